"""The ratio rule at run time: chains drawn from the draft, kept with probability min(1, p_t / p_d) (METHODS 7).

The output has the distribution of plain sampling; it is not the same text as under the match rule. All random numbers
are keyed by (seed, row, position) in streams of their own, so that a row's output depends on nothing but its inputs and
the lengths of its chains. These may be cut by what is known before each token only (``confident_survivals``).

Shapes: B rows, V vocabulary, n drafted tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.decoding.acceptance import ratio_choices
from jetspec_train.decoding.rows import Row
from jetspec_train.decoding.tree import Tree
from jetspec_train.targets.sampling import invert_cdf, keyed_uniform, process_logits

DRAFT, ACCEPT, REDRAW = 1, 2, 3  # streams of random numbers
_STRIDE = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: neighbouring seeds of different streams never meet


class Confidences(Protocol):
    """A judge that knows, before a slot's token is drawn, how likely it is accepted (judging.VerifierJudge)."""

    def confidence_of(self, slot: int, parents: Sequence[int]) -> np.ndarray: ...


def stream_uniform(stream: int, seed: int, row: int, position: int) -> float:
    """A uniform number in [0, 1), independent between streams, seeds, rows and positions."""
    return keyed_uniform(seed + stream * _STRIDE, row, position)


class RatioRounds:
    """Drafts chains and decides on them; holds the draft's probabilities of the round in between."""

    def __init__(self, drafter: Any, settings: DecodingConfig, sampling: SamplingConfig, seed: int) -> None:
        self._drafter, self._settings = drafter, settings
        self._sampling, self._seed = sampling, seed
        self._chances: list[np.ndarray] = []  # per slot [B, V]

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Tree]:
        """One drawn chain per row."""
        self._chances = []

        def draw(slot: int, logits_BV: torch.Tensor, paths: list[list[int]]) -> list[int]:
            histories = None
            if self._sampling.repetition_penalty != 1.0:
                histories = [[*row.prompt, *row.output, *path] for row, path in zip(rows, paths)]
            chances_BV = process_logits(logits_BV, self._sampling, histories).double().exp()
            uniform = [stream_uniform(DRAFT, self._seed, row.key, row.anchor_position + 1 + slot) for row in rows]
            drawn_B = invert_cdf(
                chances_BV, torch.tensor(uniform, dtype=torch.float64, device=logits_BV.device)[:, None]
            )
            self._chances.append(chances_BV.cpu().numpy())
            return [int(token) for token in drawn_B.tolist()]

        return self._drafter.sample_chains([row.anchor for row in rows], limits, self._settings, draw)

    def choices(self, rows: Sequence[Row], trees: Sequence[Tree], logprobs_MV: torch.Tensor) -> np.ndarray:
        """The rule's choices after each anchor and drafted token, row after row, for ``acceptance.walk``.

        ``logprobs_MV``: the target's processed log-probabilities at the same places.
        """
        target_MV = logprobs_MV.double().exp().cpu().numpy()
        found, first = [], 0
        for index, (row, tree) in enumerate(zip(rows, trees)):
            count = len(tree)
            places = [row.anchor_position + 1 + slot for slot in range(count + 1)]
            draft_NV = np.stack([self._chances[slot][index] for slot in range(count)]) if count else target_MV[:0]
            accept, redraw = (
                [stream_uniform(stream, self._seed, row.key, place) for place in places] for stream in (ACCEPT, REDRAW)
            )
            found.append(
                ratio_choices(tree.tokens.tolist(), target_MV[first : first + count + 1], draft_NV, accept, redraw)
            )
            first += count + 1
        return np.concatenate(found)


def confident_survivals(judge: Confidences, trees: Sequence[Tree], anchors: Sequence[int]) -> list[np.ndarray]:
    """Per row and slot, the probability that the chain survives the slot, from what precedes the slot's token.

    Slot k's value looks at x_{<k} alone, so a length chosen by it leaves the ratio rule exact. A confidence that is not
    finite counts as certain: the slot is then sent.
    """
    longest = max(len(tree) for tree in trees)
    each_KB = []
    for slot in range(longest):
        parents = [
            int(tree.tokens[slot - 1]) if 0 < slot <= len(tree) else anchor for tree, anchor in zip(trees, anchors)
        ]
        each_KB.append(np.nan_to_num(judge.confidence_of(slot, parents), nan=1.0))
    return [np.cumprod([each_KB[slot][row] for slot in range(len(tree))]) for row, tree in enumerate(trees)]
