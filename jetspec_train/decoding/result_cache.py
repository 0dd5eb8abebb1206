"""The result cache pool ([S]): what has been verified once is not computed or guessed again.

Two stores under one limit of bytes, each with its own share and its own least-recently-used order:

* n-grams: which token followed the last ORDER tokens, in prompts and in verified output. Followed from entry to entry
  they give further draft candidates, which the target verifies like all others.
* prefixes: the target's keys and values (and the drafter's context) of finished requests, so that a later turn or a
  request with the same beginning does not compute it again.

Every entry is keyed by target, tokenizer and dtype (``space_of``): nothing leaks between models. A wrong entry can cost
time, never change an output.
"""

from __future__ import annotations

import hashlib
import sys
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np

from jetspec_train.artifacts.files import stable_hash

ORDER = 3  # tokens that name a continuation
NGRAM_SHARE = 1 / 8  # of the limit; the rest is for prefixes
OVERHEAD = 200  # bytes of an entry beside key and value: its place in the ordered dictionary
SHORTEST_PREFIX = 16  # tokens; a shorter one is cheaper to compute than to copy

Value = TypeVar("Value")


class BoundedStore(Generic[Value]):
    """A dictionary that never holds more than ``max_bytes``: the least recently used entries go first.

    ``bytes`` is the sum over the entries present, exactly. An entry larger than the limit is not taken.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self.evictions = 0
        self._entries: OrderedDict[bytes, tuple[Value, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: bytes) -> Value | None:
        """The value, which becomes the most recently used; None if absent."""
        found = self._entries.get(key)
        if found is None:
            return None
        self._entries.move_to_end(key)
        return found[0]

    def peek(self) -> list[tuple[bytes, Value]]:
        """All entries, least recently used first; their order stays."""
        return [(key, entry[0]) for key, entry in self._entries.items()]

    def put(self, key: bytes, value: Value, size: int) -> bool:
        """Store under ``key``, replacing what was there; ``size``: bytes of key and value. False if it cannot fit."""
        self.remove(key)
        size += OVERHEAD
        if size > self.max_bytes:
            return False
        while self.bytes + size > self.max_bytes:
            _, (_, freed) = self._entries.popitem(last=False)
            self.bytes -= freed
            self.evictions += 1
        self._entries[key] = (value, size)
        self.bytes += size
        return True

    def remove(self, key: bytes) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.bytes -= entry[1]


@dataclass(frozen=True)
class Prefix:
    """Computed state of a token sequence.

    ``target``: a KVCache of one row that holds these tokens. ``draft``: the drafter's own state, of use to the drafter
    with this ``owner`` only.
    """

    tokens: np.ndarray
    target: Any
    draft: Any
    owner: object | None


class ResultCache:
    """The pool; ``space(identity)`` opens the part of one target. Several decoders may share a pool.

    Attributes:
        ngrams, prefixes: the two stores.
        lookups, found: n-gram look-ups, and those that gave at least one token.
        reused_tokens: prompt tokens whose forward was saved.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.ngrams: BoundedStore[int] = BoundedStore(int(max_bytes * NGRAM_SHARE))
        self.prefixes: BoundedStore[Prefix] = BoundedStore(max_bytes - int(max_bytes * NGRAM_SHARE))
        self.lookups = self.found = self.reused_tokens = 0

    @property
    def bytes(self) -> int:
        return self.ngrams.bytes + self.prefixes.bytes

    def space(self, name: str) -> CacheSpace:
        """``name``: from ``space_of``."""
        return CacheSpace(self, hashlib.sha256(name.encode()).digest()[:16])


def space_of(identity: dict[str, str], dtype: Any) -> str:
    """A name that differs wherever tokens or states of one target would be wrong for the other."""
    return stable_hash({"identity": {k: v for k, v in identity.items() if k != "name"}, "dtype": str(dtype)})


class CacheSpace:
    """One target's part of the pool."""

    def __init__(self, pool: ResultCache, digest: bytes) -> None:
        self.pool = pool
        self._digest = digest

    def note(self, tokens: Sequence[int], new: int) -> None:
        """Remember what followed what, for the last ``new`` of the tokens of a committed text."""
        first = max(ORDER, len(tokens) - new)
        text = np.asarray(tokens[first - ORDER :], dtype=np.int32)
        for end in range(ORDER, len(text)):
            key = self._digest + text[end - ORDER : end].tobytes()
            token = int(text[end])
            self.pool.ngrams.put(key, token, sys.getsizeof(key) + sys.getsizeof(token))

    def continuation(self, tokens: Sequence[int], length: int) -> list[int]:
        """At most ``length`` tokens that followed the last ones before; empty where nothing is known."""
        if len(tokens) < ORDER or length <= 0:
            return []
        window = [int(token) for token in tokens[-ORDER:]]
        found: list[int] = []
        while len(found) < length:
            following = self.pool.ngrams.get(self._digest + np.asarray(window, dtype=np.int32).tobytes())
            if following is None:
                break
            found.append(following)
            window = [*window[1:], following]
        self.pool.lookups += 1
        self.pool.found += bool(found)
        return found

    def store_prefix(self, tokens: Sequence[int], target: Any, draft: Any, draft_bytes: int, owner: object) -> bool:
        """Keep a finished request's state; False if it is too short to be worth it or larger than the limit.

        ``target``: a KVCache of one row; its memory is counted, with ``draft_bytes`` and the tokens.
        """
        if len(tokens) < SHORTEST_PREFIX:
            return False
        text = np.asarray(tokens, dtype=np.int32)
        key = self._digest + hashlib.sha256(text.tobytes()).digest()
        size = sys.getsizeof(key) + text.nbytes + target.memory_bytes + draft_bytes
        return self.pool.prefixes.put(key, Prefix(text, target, draft, owner), size)

    def longest_prefix(self, prompt: Sequence[int], owner: object) -> tuple[Prefix, int] | None:
        """The stored state that shares most tokens with the prompt, and how many; at least one token of the prompt is
        left to compute. None below SHORTEST_PREFIX tokens. Only states of this ``owner`` are looked at."""
        wanted = np.asarray(prompt, dtype=np.int32)
        best: tuple[bytes, Prefix, int] | None = None
        for key, prefix in self.pool.prefixes.peek():
            if not key.startswith(self._digest) or prefix.owner is not owner:
                continue
            shared = min(len(prefix.tokens), len(wanted) - 1)
            differs = np.flatnonzero(prefix.tokens[:shared] != wanted[:shared])
            length = int(differs[0]) if differs.size else shared
            if length >= SHORTEST_PREFIX and (best is None or length > best[2]):
                best = (key, prefix, length)
        if best is None:
            return None
        self.pool.prefixes.get(best[0])  # it was used
        self.pool.reused_tokens += best[2]
        return best[1], best[2]
