"""One row's drafted nodes of a round and what is believed of each, through drafting, deferral, pruning and choice.

A tree grows here: a stage that waits gets the next draft grafted below it, the result cache adds a path, and in the end
some of the nodes are chosen and sent. All operations keep parents before children.

Shapes: n nodes. "Conditional" is the probability that the target accepts a node, given that it accepted its parent; the
product along the path is the node's survival.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

import numpy as np

from jetspec_train.decoding.tree import Tree


class Judged(Protocol):
    """A verifier's word on the n nodes of a tree; see judging.Judgement."""

    conditional: np.ndarray
    logits: np.ndarray
    confidence_logits: np.ndarray | None


@dataclass
class CandidateSet:
    """Attributes, all [n]:
    tokens, parents (-1: the anchor), depths: as in Tree.
    logprobs: of the token given its parent under the draft; nan where the draft did not propose it.
    conditional: see above; from the verifier where it judged, else the draft's own probability.
    logits, confidence_logits: the verifier's raw outputs; nan without.
    cached: only the result cache proposed it.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    logprobs: np.ndarray
    conditional: np.ndarray
    logits: np.ndarray
    confidence_logits: np.ndarray
    cached: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, tree: Tree, judged: Judged | None = None) -> CandidateSet:
        """Nodes in the order of the tree."""
        above = np.where(tree.parents >= 0, tree.scores[tree.parents], 0.0) if len(tree) else np.zeros(0)
        logprobs = np.minimum(tree.scores.astype(np.float64) - above, 0.0)
        unknown = np.full(len(tree), np.nan)
        confidence = None if judged is None else judged.confidence_logits
        return cls(
            tokens=tree.tokens.astype(np.int64),
            parents=tree.parents.astype(np.int64),
            depths=tree.depths.astype(np.int64),
            logprobs=logprobs,
            conditional=np.exp(logprobs) if judged is None else np.clip(judged.conditional, 0.0, 1.0),
            logits=unknown if judged is None else judged.logits,
            confidence_logits=unknown if confidence is None else confidence,
            cached=np.zeros(len(tree), dtype=bool),
        )

    def survival(self, conditional: np.ndarray | None = None) -> np.ndarray:
        """Products along the paths [n]; of ``conditional`` instead of the set's own where given."""
        values: list[float] = []
        each = (self.conditional if conditional is None else conditional).tolist()
        for parent, own in zip(self.parents.tolist(), each):
            values.append(own if parent < 0 else own * values[parent])
        return np.asarray(values, dtype=np.float64)

    def path_to(self, node: int) -> list[int]:
        """Nodes from the anchor's child down to ``node``."""
        path = []
        while node >= 0:
            path.append(node)
            node = int(self.parents[node])
        return path[::-1]

    def stage_below(self, node: int, length: int) -> list[int]:
        """The ``length`` nodes below ``node`` (-1: the anchor) on the path of greatest survival that is so long; empty
        where none is. Nodes of the result cache do not take part: the verifier has not judged them."""
        depth = length - 1 if node < 0 else int(self.depths[node]) + length
        survival = self.survival()
        ends = [end for end in np.flatnonzero((self.depths == depth) & ~self.cached).tolist()]
        for end in sorted(ends, key=lambda end: -survival[end]):
            path = self.path_to(end)
            if node < 0 or (len(path) > length and path[-length - 1] == node):
                return path[-length:]
        return []

    def graft(self, node: int, branch: CandidateSet) -> tuple[CandidateSet, np.ndarray]:
        """Replace what is below ``node`` by ``branch``. Returns the new set and the new places [n] of the old nodes
        (-1: gone)."""
        below = np.zeros(len(self) + 1, dtype=bool)
        for index, parent in enumerate(self.parents.tolist()):
            below[index] = parent == node or (parent >= 0 and below[parent])
        kept = np.flatnonzero(~below[:-1])
        place = np.full(len(self), -1)
        place[kept] = np.arange(len(kept))
        base = self.take(kept)
        merged = {f.name: np.concatenate([getattr(base, f.name), getattr(branch, f.name)]) for f in fields(self)}
        root = -1 if node < 0 else int(place[node])
        start = len(base)
        merged["parents"][start:] = np.where(branch.parents >= 0, branch.parents + start, root)
        merged["depths"][start:] += 0 if node < 0 else int(self.depths[node]) + 1
        return CandidateSet(**merged), place

    def with_path(self, tokens: Sequence[int], rate: float) -> CandidateSet:
        """The set with a path from the anchor added; nodes that are there already stay as they are. ``rate``: the
        conditional of the new ones."""
        child_of = {(int(p), int(t)): node for node, (p, t) in enumerate(zip(self.parents, self.tokens))}
        parent, first_new = -1, len(tokens)
        for depth, token in enumerate(tokens):
            if (parent, int(token)) not in child_of:
                first_new = depth
                break
            parent = child_of[parent, int(token)]
        new = len(tokens) - first_new
        if not new:
            return self
        start = len(self)
        nan = np.full(new, np.nan)
        added = {
            "tokens": np.asarray(tokens[first_new:], dtype=np.int64),
            "parents": np.concatenate([[parent], np.arange(start, start + new - 1)]).astype(np.int64),
            "depths": np.arange(first_new, len(tokens), dtype=np.int64),
            "logprobs": nan,
            "conditional": np.full(new, rate),
            "logits": nan,
            "confidence_logits": nan,
            "cached": np.ones(new, dtype=bool),
        }
        return CandidateSet(**{f.name: np.concatenate([getattr(self, f.name), added[f.name]]) for f in fields(self)})

    def best_chain(self, survival: np.ndarray) -> np.ndarray:
        """The nodes of the path with the greatest expected number of accepted tokens, in order."""
        totals: list[float] = []
        for parent, own in zip(self.parents.tolist(), survival.tolist()):
            totals.append(own + (totals[parent] if parent >= 0 else 0.0))
        return np.asarray(self.path_to(int(np.argmax(totals))) if totals else [], dtype=np.int64)

    def take(self, order: np.ndarray) -> CandidateSet:
        """The nodes with these indices, in this order. Raises ValueError unless each one's parent comes before it."""
        place = np.full(len(self) + 1, -2)
        place[order] = np.arange(len(order))
        place[-1] = -1
        parents = place[self.parents[order]]
        if (parents == -2).any() or (parents >= np.arange(len(order))).any():
            raise ValueError("a node is taken without its parent before it: the result would not be a tree")
        taken = {f.name: getattr(self, f.name)[order] for f in fields(self)}
        return CandidateSet(**{**taken, "parents": parents})

    def tree(self) -> Tree:
        """For the target; the scores are log-survivals."""
        scores = np.log(np.maximum(self.survival(), 1e-30)).astype(np.float32)
        return Tree(self.tokens, self.parents, self.depths, scores)


def sending_order(candidates: CandidateSet, survival: np.ndarray, pending: Sequence[int]) -> np.ndarray:
    """All nodes, pending ones first, then by descending survival: every beginning of it is a tree."""
    forced = survival.copy()
    forced[list(pending)] = np.inf
    # Stable, and a parent has the smaller index and at least its child's survival: it never falls behind.
    return np.argsort(-forced, kind="stable")


def prune(candidates: CandidateSet, survival: np.ndarray, least: float, pending: Sequence[int]) -> np.ndarray:
    """Which nodes stay, bool [n]: those of at least ``least`` survival, the pending ones, and all their ancestors."""
    kept = survival >= least
    kept[list(pending)] = True
    for node in range(len(candidates) - 1, -1, -1):
        parent = int(candidates.parents[node])
        if kept[node] and parent >= 0:
            kept[parent] = True
    return kept
