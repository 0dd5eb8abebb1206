"""Drafters without a model: they make losslessness and the cost of the loop testable without a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.drafting import Companions
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.tree import Tree, chain_of

DEPTH = 8  # slots where the settings name no depth


class _Stub:
    """Keeps the committed tokens of each row and proposes by itself."""

    taps: tuple[int, ...] = ()
    forwards = 0
    block = 0
    companions: Companions | None = None

    def __init__(self) -> None:
        self._seen: list[list[int]] = []
        self._rows: list[int] = []

    def start(self, batch: int, capacity: int, clock: Stopwatch) -> None:
        self._seen = [[] for _ in range(batch)]
        self._rows = list(range(batch))

    def observe(
        self, tokens: Sequence[Sequence[int]], features_BNF: torch.Tensor | None, kept: Sequence[Sequence[int]]
    ) -> None:
        for seen, new, places in zip(self._seen, tokens, kept):
            seen.extend(new[: len(places)])

    def snapshot(self, row: int) -> tuple[list[int], int]:
        return list(self._seen[row]), 8 * len(self._seen[row])

    def restore(self, row: int, state: list[int], length: int) -> None:
        self._seen[row] = state[:length]

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._seen = [self._seen[row] for row in keep]
        self._rows = [self._rows[row] for row in keep]


def _slots(limit: int, settings: DecodingConfig) -> int:
    return max(0, min(limit, settings.depth or DEPTH, settings.nodes))


class RepeatDrafter(_Stub):
    """Drafts the anchor again and again."""

    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        return [chain_of([anchor] * _slots(limit, settings)) for anchor, limit in zip(anchors, limits)]


class RandomDrafter(_Stub):
    """Drafts random trees (random chains where the settings ask for chains) of random tokens."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(seed)

    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        return [self._tree(_slots(limit, settings), settings) for limit in limits]

    def _tree(self, slots: int, settings: DecodingConfig) -> Tree:
        if settings.shape == "chain" or slots == 0:
            return chain_of(self._random.integers(self._vocabulary, size=slots))
        return random_tree(self._random, self._vocabulary, settings.nodes, slots)


class EchoDrafter(_Stub):
    """Drafts given continuations: of each row's text, what follows the tokens committed so far. With the plain
    output as text every draft is accepted, which is the upper bound of any drafter. In trees, every true token gets
    siblings that are wrong."""

    def __init__(self, continuations: Sequence[Sequence[int]], prompt_lengths: Sequence[int]) -> None:
        super().__init__()
        self._continuations = [list(text) for text in continuations]
        self._prompt_lengths = list(prompt_lengths)

    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        trees = []
        for row, seen, limit in zip(self._rows, self._seen, limits):
            start = len(seen) + 1 - self._prompt_lengths[row]
            slots = _slots(limit, settings)
            if settings.shape == "tree":
                slots = max(1, slots // 2) if slots else 0
            path = self._continuations[row][start : start + slots]
            trees.append(chain_of(path) if settings.shape == "chain" else _with_siblings(path, settings.nodes))
        return trees


def _with_siblings(path: Sequence[int], nodes: int) -> Tree:
    """The path, and before each of its nodes a sibling that holds another token, while nodes last."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    parent = -1
    for depth, token in enumerate(path):
        if len(tokens) + len(path) - depth < nodes:
            tokens.append(token + 1 if token == 0 else token - 1)
            parents.append(parent)
            depths.append(depth)
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        parent = len(tokens) - 1
    scores = np.zeros(len(tokens), dtype=np.float32)
    return Tree(np.asarray(tokens, np.int64), np.asarray(parents, np.int64), np.asarray(depths, np.int64), scores)


def random_tree(random: np.random.Generator, vocabulary: int, nodes: int, slots: int) -> Tree:
    """A random tree of at most ``nodes`` nodes and ``slots`` slots; siblings hold different tokens."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    taken: set[tuple[int, int]] = set()
    for _ in range(nodes):
        parent = int(random.integers(-1, len(tokens)))
        depth = depths[parent] + 1 if parent >= 0 else 0
        token = int(random.integers(vocabulary))
        if depth < slots and (parent, token) not in taken:
            taken.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
    scores = -np.asarray(depths, dtype=np.float32)
    return Tree(np.asarray(tokens, np.int64), np.asarray(parents, np.int64), np.asarray(depths, np.int64), scores)
