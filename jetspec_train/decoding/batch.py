"""The rows that decode together: what is remembered of them, how their tokens go out, how their trees go in.

Shapes: B rows, N staged tokens (anchor and drafted nodes).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jetspec_train.config import SamplingConfig
from jetspec_train.decoding.rows import Row
from jetspec_train.decoding.stats import RoundStats, Stopwatch
from jetspec_train.decoding.tree import Tree
from jetspec_train.targets.masks import TreeMask

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
class Batch:
    """The rows still running, and what the target remembers of them (same order)."""

    rows: list[Row]
    cache: KVCache
    sampling: SamplingConfig
    seed: int
    clock: Stopwatch
    on_tokens: OnTokens | None

    def emit(self, row: Row, tokens: list[int]) -> list[int]:
        """Hand the tokens to the row; tell the listener what it took; close its books where it ends."""
        taken = row.take(tokens)
        known, row.streamed = row.streamed, 0
        if row.finish_reason is not None:
            self.clock.lap("host")
            row.stats.seconds = {**self.clock.seconds, "total": self.clock.elapsed()}
        if self.on_tokens is not None and taken[known:]:
            self.on_tokens(row.index, taken[known:])
        return taken

    def stream(self, row: Row, tokens: list[int]) -> None:
        """Tell the listener of tokens that the target has not seen; they begin what the row's next commit emits."""
        row.streamed += len(tokens)
        if self.on_tokens is not None:
            self.on_tokens(row.index, tokens)


def paths_of(tree: Tree) -> list[list[int]]:
    """Tokens from the anchor's first child down to each node; the empty path of the anchor comes first."""
    paths: list[list[int]] = [[]]
    for token, parent in zip(tree.tokens.tolist(), tree.parents.tolist()):
        paths.append([*paths[parent + 1], token])
    return paths


def mask_of(trees: Sequence[Tree], staged: int) -> TreeMask | None:
    """Who descends from whom among anchor (index 0) and nodes; None where every tree is a chain."""
    if all((tree.parents == np.arange(len(tree)) - 1).all() for tree in trees):
        return None
    parents_BN = np.full((len(trees), staged), -1, dtype=np.int64)
    for row, tree in enumerate(trees):
        parents_BN[row, 1 : len(tree) + 1] = tree.parents + 1
    return TreeMask(parents_BN)
