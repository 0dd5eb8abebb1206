"""The result cache at work in a decoder: candidates from n-grams, and prompts that begin like a finished request.

A state is worth taking up only if target and drafter both can: the target's keys and values come with the drafter's own
context (and the verifier's), taken when a request ended. Whatever is found, the target verifies all candidates, and a
prefix holds exactly what its tokens would be turned into again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jetspec_train.decoding.candidate_set import CandidateSet
from jetspec_train.decoding.result_cache import ORDER, CacheSpace, ResultCache, space_of
from jetspec_train.decoding.rows import Row
from jetspec_train.decoding.tree import Tree
from jetspec_train.targets.cache import KVCache
from jetspec_train.targets.target import Target

MEMORY = 0.95  # of the running acceptance of cached candidates


class Reuse:
    """One decoder's use of a pool.

    ``keepers``: what holds state per row beside the target's cache (drafter, verifier), each with ``snapshot(row)`` and
    ``restore(row, state, length)``; if one of them cannot, only n-grams are used.
    """

    def __init__(self, pool: ResultCache, target: Target) -> None:
        self.pool = pool
        self._target = target
        self._space: CacheSpace = pool.space(space_of(target.identity.to_dict(), target.dtype))
        self._owner = object()
        self._passed, self._tried = 1.0, 2.0
        self.keepers: list[Any] = []

    @property
    def rate(self) -> float:
        """Running share of cached candidates accepted, given that their parent was."""
        return self._passed / self._tried

    def continuation(self, row: Row, length: int) -> list[int]:
        """Candidates after the row's anchor."""
        return self._space.continuation(_tail(row, ORDER), length)

    def continues(self, row: Row, pending: Sequence[int], tokens: Sequence[int]) -> bool:
        """Whether the cache continues with exactly these tokens behind the pending ones."""
        history = [*_tail(row, ORDER), *pending]
        return self._space.continuation(history, len(tokens)) == list(tokens)

    def note_prompt(self, row: Row) -> None:
        self._space.note(row.prompt, len(row.prompt))

    def note_round(self, row: Row, sent: CandidateSet, tree: Tree, accepted: Sequence[int], emitted: int) -> None:
        """Learn what the target made of the candidates (``sent``, in the tree's order), and the new text."""
        reached = {-1, *accepted}
        for node in range(len(tree)):
            if not sent.cached[node]:
                continue
            row.stats.cached_nodes += 1
            row.stats.cached_accepted += node in reached
            if int(tree.parents[node]) in reached:
                self._passed = MEMORY * self._passed + (node in reached)
                self._tried = MEMORY * self._tried + 1.0
        self.note_output(row, emitted)

    def note_output(self, row: Row, new: int) -> None:
        self._space.note(_tail(row, ORDER + new), new)

    def take_up(self, row: Row, index: int, cache: KVCache) -> int:
        """Fill the row's place in the batch from the longest stored prefix; returns the tokens filled."""
        if not self._can_restore():
            return 0
        found = self._space.longest_prefix(row.prompt, self._owner)
        if found is None:
            return 0
        prefix, length = found
        cache.copy_row_from(prefix.target, 0, index)
        cache.truncate(index, length)
        for keeper, state in zip(self.keepers, prefix.draft):
            keeper.restore(index, state, length)
        row.stats.reused_tokens = length
        return length

    def keep(self, row: Row, index: int, cache: KVCache) -> None:
        """Store a finished row's state."""
        length = cache.lengths[index]
        if not self._can_restore() or length == 0:
            return
        own = self._target.new_cache(1, length)
        own.copy_row_from(cache, index, 0)
        snapshots = [keeper.snapshot(index) for keeper in self.keepers]
        size = sum(amount for _, amount in snapshots)
        tokens = [*row.prompt, *row.output][:length]
        self._space.store_prefix(tokens, own, [state for state, _ in snapshots], size, self._owner)

    def _can_restore(self) -> bool:
        return all(hasattr(keeper, "snapshot") for keeper in self.keepers)


def _tail(row: Row, count: int) -> list[int]:
    """The last tokens of prompt and output together."""
    missing = count - len(row.output)
    if missing <= 0:
        return row.output[-count:]
    return [*row.prompt[-missing:], *row.output]
