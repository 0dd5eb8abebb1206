"""The decoding loop: propose -> verify -> commit, for batches of prompts of any lengths.

Plain decoding is the same loop without a drafter (every tree is empty). Whatever is drafted, the output is the one of
plain decoding (METHODS 7): all tokens are the target's own choices, keyed by (seed, row, position). Between ``propose``
and ``verify`` nodes may be removed from the trees by anyone: that changes the speed only.

Shapes: B rows in the batch, N staged tokens (anchor and drafted nodes), M nodes of all rows, D hidden size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, SamplingConfig, TargetConfig
from jetspec_train.decoding.acceptance import walk
from jetspec_train.decoding.drafting import Drafter
from jetspec_train.decoding.rows import Row, StopStrings
from jetspec_train.decoding.stats import RoundStats, Stopwatch
from jetspec_train.decoding.tree import Tree, empty_tree
from jetspec_train.targets.masks import TreeMask
from jetspec_train.targets.sampling import choose
from jetspec_train.targets.target import Target

if TYPE_CHECKING:
    from jetspec_train.targets.cache import KVCache

OnTokens = Callable[[int, list[int]], None]


@dataclass
class Generation:
    """One prompt's answer.

    Attributes:
        tokens: emitted tokens, the end token included where the target chose it; nothing after it.
        finish_reason: "stop" (end token or stop string) or "length".
        stop_string: the stop string that ended the output, if one did; it is still part of the tokens.
        stats: what it cost.
    """

    tokens: list[int]
    finish_reason: str
    stop_string: str | None
    stats: RoundStats


@dataclass
class _Batch:
    """The rows still running, and what the target remembers of them (same order)."""

    rows: list[Row]
    cache: KVCache
    sampling: SamplingConfig
    seed: int
    clock: Stopwatch
    on_tokens: OnTokens | None


class Decoder:
    """Generates with a target, and with a drafter where there is one.

    ``settings.drafting=false`` or ``drafter=None`` is plain decoding.
    """

    def __init__(self, target: Target, drafter: Drafter | None = None, settings: DecodingConfig | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.settings = settings or DecodingConfig()

    @classmethod
    def from_bundle(
        cls,
        path: str | Path,
        target: Target | None = None,
        settings: DecodingConfig | None = None,
        target_config: TargetConfig | None = None,
    ) -> Decoder:
        """Read an exported bundle; load the target that it names unless ``target`` is given.

        ``target_config`` says how to load it (dtype, device, a local path); by default name and revision are the
        bundle's. Raises UserError if bundle and target do not belong together, naming both values.
        """
        from jetspec_train.decoding.bundles import open_bundle

        target, drafter = open_bundle(path, target, target_config)
        return cls(target, drafter, settings)

    def load_draft(self, path: str | Path) -> None:
        """Swap the drafter for another bundle's; the target stays as it is. Not during ``generate``.

        If the bundle is refused (UserError), the drafter in use stays.
        """
        from jetspec_train.decoding.bundles import open_bundle

        self.drafter = open_bundle(path, self.target)[1]

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        seed: int | None = None,
        row_ids: Sequence[int] | None = None,
        stop: Sequence[str] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> list[Generation]:
        """Answer all prompts together; each row advances at its own pace and leaves when it ends.

        What is not given is taken from the settings. ``row_ids`` name the rows' random draws (default 0, 1, ...): a
        row's output depends on (seed, row id, prompt) and not on its batch. ``on_tokens(index, tokens)`` is called
        after each commit. An answer also ends where the target's context ends (finish_reason "length").
        Raises UserError for an empty prompt and for one that leaves no room in the target's context.
        """
        clock = Stopwatch(self.target.device)
        rows = self._rows(prompts, max_new_tokens, row_ids, self.settings.stop if stop is None else stop)
        if not rows:
            return []
        settings = self.settings
        # Room for the answers, up to a bound: a cache for a long limit that is never reached would only cost memory.
        capacity = max(len(row.prompt) + min(row.limit, 512) for row in rows) + settings.nodes + 1
        batch = _Batch(
            rows=list(rows),
            cache=self.target.new_cache(len(rows), capacity),
            sampling=settings.sampling if sampling is None else sampling,
            seed=settings.seed if seed is None else seed,
            clock=clock,
            on_tokens=on_tokens,
        )
        if self._drafting and self.drafter is not None:
            self.drafter.start(len(rows), capacity, clock)
        self._prefill(batch)
        while batch.rows:
            trees = self._propose(batch)
            choices = self._verify(batch, trees)
            self._commit(batch, trees, choices)
        return [Generation(row.output, row.finish_reason or "length", row.stop_string, row.stats) for row in rows]

    @property
    def _drafting(self) -> bool:
        return self.drafter is not None and self.settings.drafting

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self._drafting else ()

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        row_ids: Sequence[int] | None,
        stop: Sequence[str],
    ) -> list[Row]:
        target = self.target
        limit = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit < 1:
            raise UserError(f"max_new_tokens={limit} must be at least 1.")
        keys = list(range(len(prompts))) if row_ids is None else list(row_ids)
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} row_ids for {len(prompts)} prompts")
        stops = StopStrings(stop, lambda tokens: target.chat.decode(tokens, skip_special_tokens=False))
        rows = []
        for index, (key, prompt) in enumerate(zip(keys, prompts)):
            if not len(prompt):
                raise UserError(f"prompt {index} is empty: it has no token to continue from.")
            target.check_length(len(prompt), what=f"prompt {index}")
            room = min(limit, target.max_positions - len(prompt))
            rows.append(Row(index, key, [int(token) for token in prompt], room, target.eos_ids, stops))
        return rows

    def _prefill(self, batch: _Batch) -> None:
        """The prompts' forward and the first token of each row."""
        target, rows = self.target, batch.rows
        lengths = [len(row.prompt) for row in rows]
        tokens_BT = torch.full((len(rows), max(lengths)), target.pad_id, dtype=torch.long)
        for index, row in enumerate(rows):
            tokens_BT[index, : lengths[index]] = torch.tensor(row.prompt)
        output = target.forward(tokens_BT, cache=batch.cache, taps=self._taps)
        last_BD = output.hidden_BND[range(len(rows)), [length - 1 for length in lengths]]
        choices = self._choose(batch, last_BD, [empty_tree() for _ in rows], "prefill")
        batch.cache.commit_first(lengths)
        batch.clock.lap("prefill")
        kept = [list(range(length)) for length in lengths]
        if self._drafting and self.drafter is not None:
            self.drafter.observe([row.prompt for row in rows], output.features_BNF, kept)
            batch.clock.lap("prefill")
        for row, choice in zip(rows, choices):
            row.stats.first_token_seconds = batch.clock.elapsed()
            self._emit(batch, row, [int(choice)])
        self._drop_finished(batch)

    def _propose(self, batch: _Batch) -> list[Tree]:
        """One tree per row; none deeper than what the row may still emit beside the target's own next token."""
        limits = [row.remaining - 1 for row in batch.rows]
        if not self._drafting or self.drafter is None or max(limits) <= 0:
            return [empty_tree() for _ in batch.rows]
        trees = self.drafter.propose([row.anchor for row in batch.rows], limits, self.settings)
        for row, limit in zip(batch.rows, limits):
            row.stats.draft_forwards += self.drafter.forwards if limit > 0 else 0
        batch.clock.lap("host")
        return trees

    def _verify(self, batch: _Batch, trees: list[Tree]) -> list[np.ndarray]:
        """The target's own choice after the anchor and after every node of each row: [n + 1] per row.

        Stages anchors and nodes in the cache and leaves the forward's features for ``_commit``.
        """
        target, rows = self.target, batch.rows
        sizes = [len(tree) + 1 for tree in trees]
        tokens_BN = np.full((len(rows), max(sizes)), target.pad_id, dtype=np.int64)
        for index, (row, tree) in enumerate(zip(rows, trees)):
            tokens_BN[index, 0] = row.anchor
            tokens_BN[index, 1 : sizes[index]] = tree.tokens
        batch.clock.lap("host")
        output = target.forward(
            torch.from_numpy(tokens_BN), cache=batch.cache, mask=_mask(trees, max(sizes)), taps=self._taps
        )
        self._features_BNF = output.features_BNF
        hidden_MD = torch.cat([output.hidden_BND[index, :size] for index, size in enumerate(sizes)])
        choices_M = self._choose(batch, hidden_MD, trees, "target")
        return np.split(choices_M, np.cumsum(sizes)[:-1])

    def _commit(self, batch: _Batch, trees: list[Tree], choices: list[np.ndarray]) -> None:
        """Walk the trees, emit, and keep what the target and the drafter have computed for the accepted path."""
        kept: list[list[int]] = []
        committed: list[list[int]] = []
        for row, tree, chosen in zip(batch.rows, trees, choices):
            accepted, following = walk(tree, chosen)
            anchor = row.anchor
            path = [int(tree.tokens[node]) for node in accepted]
            emitted = self._emit(batch, row, [*path, following])
            deepest = int(tree.depths.max()) + 1 if len(tree) else 0
            row.stats.count_round(len(tree), deepest, len(accepted), len(emitted))
            running = row.finish_reason is None
            kept.append([0, *(node + 1 for node in accepted)] if running else [])
            committed.append([anchor, *path] if running else [])
        batch.cache.commit(kept)
        batch.clock.lap("host")
        if self._drafting and self.drafter is not None and any(kept):
            self.drafter.observe(committed, self._features_BNF, kept)
            batch.clock.lap("draft")
        self._drop_finished(batch)

    def _choose(self, batch: _Batch, hidden_MD: torch.Tensor, trees: list[Tree], kind: str) -> np.ndarray:
        """The target's choices [M] after the last committed token of each row and after each node of its tree."""
        logits_MV = self.target.logits(hidden_MD)
        batch.clock.lap(kind)
        keys: list[int] = []
        positions: list[int] = []
        histories: list[list[int]] | None = [] if batch.sampling.repetition_penalty != 1.0 else None
        for row, tree in zip(batch.rows, trees):
            # The token to be drawn stands one place after the token whose state gives its distribution.
            first = len(row.prompt) + len(row.output)
            keys.extend([row.key] * (len(tree) + 1))
            positions.append(first)
            positions.extend((first + 1 + tree.depths).tolist())
            if histories is not None:
                before = [*row.prompt, *row.output]
                histories.extend([*before, *path] for path in _paths(tree))
        return choose(logits_MV, batch.sampling, batch.seed, keys, positions, histories).cpu().numpy()

    def _emit(self, batch: _Batch, row: Row, tokens: list[int]) -> list[int]:
        """Hand the tokens to the row; tell the listener what it took; close its books where it ends."""
        taken = row.take(tokens)
        if row.finish_reason is not None:
            batch.clock.lap("host")
            row.stats.seconds = {**batch.clock.seconds, "total": batch.clock.elapsed()}
        if batch.on_tokens is not None and taken:
            batch.on_tokens(row.index, taken)
        return taken

    def _drop_finished(self, batch: _Batch) -> None:
        keep = [index for index, row in enumerate(batch.rows) if row.finish_reason is None]
        if len(keep) == len(batch.rows):
            return
        batch.rows = [batch.rows[index] for index in keep]
        if not keep:
            return
        batch.cache.drop_rows(keep)
        if self._drafting and self.drafter is not None:
            self.drafter.drop_rows(keep)


def _paths(tree: Tree) -> list[list[int]]:
    """Tokens from the anchor's first child down to each node; the empty path of the anchor comes first."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append([*paths[parent + 1], token])
    return paths


def _mask(trees: list[Tree], staged: int) -> TreeMask | None:
    """Who descends from whom among anchor (index 0) and nodes; None where every tree is a chain."""
    if all((tree.parents == np.arange(len(tree)) - 1).all() for tree in trees):
        return None
    parents_BN = np.full((len(trees), staged), -1, dtype=np.int64)
    for row, tree in enumerate(trees):
        parents_BN[row, 1 : len(tree) + 1] = tree.parents + 1
    return TreeMask(parents_BN)
