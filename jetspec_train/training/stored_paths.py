"""Stored negatives as further judged paths of a training step, beside what the draft says by itself.

A stored path starts somewhere in the answer of a training sample. When the sample is in the batch, the target's states
before that place are there already, so the path costs one block of the draft and no target forward. Its labels were
given by the target when it was stored.

Shapes: B rows, T tokens, C paths per row, K slots.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from jetspec_train.modeling.blocks import Blocks, make_blocks


@dataclass(frozen=True)
class StoredPath:
    """``tokens`` drafted after the first ``prefix`` tokens of a sample (prompt included), the last of which is the
    anchor. ``labels``: of the judged ones, the chance that the target accepts each (0 or 1 where it is greedy); the
    first rejected one is the last."""

    sample: int  # row of the sample store
    prefix: int
    tokens: tuple[int, ...]
    labels: tuple[float, ...]
    kind: int


@dataclass(frozen=True)
class StoredBlocks:
    """Paths of the rows of a batch; where a row has fewer than C, nothing is labelled."""

    blocks: Blocks
    tokens_BCK: Tensor  # int64: the path's token predicted by each slot
    parents_BCK: Tensor  # int64: the token before it on the path
    labels_BCK: Tensor  # float
    labelled_BCK: Tensor  # bool
    weights_BCK: Tensor
    kind_BC: Tensor  # int64: index into kinds
    kinds: tuple[str, ...]

    def rows(self, rows: slice) -> StoredBlocks:
        return self._each(lambda x: x[rows])

    def to(self, device: torch.device | str) -> StoredBlocks:
        return self._each(lambda x: x.to(device))

    def _each(self, function: Callable[[Tensor], Tensor]) -> StoredBlocks:
        own: dict[str, Any] = {
            f.name: function(x) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)
        }
        blocks = {f.name: function(getattr(self.blocks, f.name)) for f in fields(Blocks)}
        return replace(self, blocks=Blocks(**blocks), **own)


class StoredPaths:
    """Paths by sample. ``kinds``: the names that ``StoredPath.kind`` counts."""

    def __init__(self, paths: Iterable[StoredPath], kinds: Sequence[str]) -> None:
        self.kinds = tuple(kinds)
        self._of: dict[int, list[StoredPath]] = {}
        for path in paths:
            self._of.setdefault(path.sample, []).append(path)

    def __len__(self) -> int:
        return sum(len(paths) for paths in self._of.values())

    def blocks(
        self,
        samples: Sequence[np.ndarray],
        tokens_BT: Tensor,
        positions_BT: Tensor,
        documents_BT: Tensor,
        *,
        count: int,
        block: int,
        layout: str,
        gamma: float | None,
        document_weights: Sequence[np.ndarray],
        seeds_B: Sequence[int],
    ) -> StoredBlocks:
        """At most ``count`` paths for every row, drawn from those of its samples.

        ``samples``: per row, the samples that it holds in the order of its documents 0, 1, ...; ``document_weights``:
        per row, the weight of each. Positions are kept ascending, so that attention may skip what nobody sees.
        """
        rows = len(samples)
        first = 0 if layout == "anchor" else 1
        anchors_BC = torch.full((rows, max(1, count)), -1, dtype=torch.int64)
        shape = (rows, max(1, count), block)
        given_BCK, labels_BCK = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape)
        labelled_BCK, weights_BCK = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape)
        kind_BC = torch.zeros(shape[:2], dtype=torch.int64)
        decay_K = torch.ones(block) if gamma is None else torch.exp(-torch.arange(block) / gamma)
        for row in range(rows):
            for place, (anchor, path, weight) in enumerate(
                self._draw(samples[row], documents_BT[row], document_weights[row], count, seeds_B[row])
            ):
                size = min(len(path.labels), block - first)
                slots = slice(first, first + size)
                anchors_BC[row, place], kind_BC[row, place] = anchor, path.kind
                given_BCK[row, place, slots] = torch.tensor(path.tokens[:size])
                labels_BCK[row, place, slots] = torch.tensor(path.labels[:size], dtype=torch.float32)
                labelled_BCK[row, place, slots] = True
                weights_BCK[row, place, slots] = decay_K[:size] * weight
        made = make_blocks(
            tokens_BT,
            positions_BT,
            documents_BT,
            documents_BT >= 0,
            anchors_BC,
            None,
            block=block,
            layout=layout,
        )
        anchor_BC1 = tokens_BT.gather(1, anchors_BC.clamp(min=0)).unsqueeze(-1)
        parents_BCK = torch.cat((anchor_BC1, given_BCK[..., :-1]), dim=-1)
        if first:
            parents_BCK[..., first] = anchor_BC1.squeeze(-1)
        return StoredBlocks(made, given_BCK, parents_BCK, labels_BCK, labelled_BCK, weights_BCK, kind_BC, self.kinds)

    def _draw(
        self, samples: np.ndarray, documents_T: Tensor, weights: np.ndarray, count: int, seed: int
    ) -> list[tuple[int, StoredPath, float]]:
        """(index of the anchor in the row, path, weight), ascending by anchor."""
        found: list[tuple[int, StoredPath, float]] = []
        for document, sample in enumerate(samples.tolist()):
            paths = self._of.get(sample)
            if not paths or weights[document] <= 0:
                continue
            places = (documents_T == document).nonzero().squeeze(-1)
            start, end = int(places[0]), int(places[-1])
            for path in paths:
                anchor = start + path.prefix - 1
                if anchor <= end:
                    found.append((anchor, path, float(weights[document])))
        if len(found) > count:
            order = torch.randperm(len(found), generator=torch.Generator().manual_seed(int(seed)))[:count]
            found = [found[index] for index in order.tolist()]
        return sorted(found, key=lambda item: item[0])
