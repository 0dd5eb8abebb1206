"""The result cache against a naive model: contents, order of eviction, bytes, and nothing shared between targets."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.decoding.result_cache import ORDER, OVERHEAD, BoundedStore, ResultCache, space_of

IDENTITY = {"name": "a", "revision": "1", "config_hash": "c", "tokenizer_hash": "t", "template_hash": "p"}


def state(size: int = 100) -> SimpleNamespace:
    return SimpleNamespace(memory_bytes=size)


actions = st.lists(
    st.tuples(st.sampled_from(["put", "get", "remove"]), st.integers(0, 7), st.integers(1, 400)), max_size=60
)


@given(actions, st.integers(OVERHEAD, 5 * OVERHEAD))
def test_the_store_is_a_bounded_least_recently_used_dictionary(steps, limit):
    store: BoundedStore[int] = BoundedStore(limit)
    model: list[tuple[bytes, int, int]] = []  # least recently used first
    for action, name, size in steps:
        key = bytes([name])
        found = next((entry for entry in model if entry[0] == key), None)
        if action == "get":
            assert store.get(key) == (found[1] if found else None)
            if found:
                model.remove(found)
                model.append(found)
            continue
        if found:
            model.remove(found)
        if action == "remove":
            store.remove(key)
            continue
        fits = size + OVERHEAD <= limit
        assert store.put(key, size, size) == fits
        if fits:
            while sum(entry[2] for entry in model) + size + OVERHEAD > limit:
                model.pop(0)
            model.append((key, size, size + OVERHEAD))
        assert store.peek() == [(entry[0], entry[1]) for entry in model]
        assert store.bytes == sum(entry[2] for entry in model) <= limit
        assert len(store) == len(model)


def test_continuations_chain_from_entry_to_entry_and_the_newest_wins():
    space = ResultCache(100_000).space("a")
    space.note([1, 2, 3, 4, 5, 6, 7], 7)
    assert space.continuation([9, 1, 2, 3], 10) == [4, 5, 6, 7]
    assert space.continuation([9, 1, 2, 3], 2) == [4, 5]
    assert space.continuation([1, 2], 4) == [] and space.continuation([2, 2, 2], 4) == []
    assert space.continuation([1, 2, 3], 0) == []
    space.note([1, 2, 3, 8], 1)
    assert space.continuation([1, 2, 3], 4) == [8]
    looping = ResultCache(100_000).space("a")
    looping.note([1, 1, 1, 1], 1)
    assert looping.continuation([1, 1, 1], 6) == [1] * 6


@given(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 40))
@settings(max_examples=50)
def test_noting_in_pieces_is_noting_at_once(text, piece):
    whole, pieces = (ResultCache(100_000) for _ in range(2))
    whole.space("a").note(text, len(text))
    for end in range(0, len(text) + piece, piece):
        committed = text[: end + piece]
        pieces.space("a").note(committed, min(piece, max(0, len(committed) - end)))
    assert whole.ngrams.peek() == pieces.ngrams.peek()


def test_accounting_counts_every_byte_and_never_passes_the_limit():
    pool = ResultCache(40_000)
    space = pool.space("a")
    random = np.random.default_rng(0)
    for _ in range(30):
        text = random.integers(0, 1000, size=40).tolist()
        space.note(text, 40)
        space.store_prefix(text, state(3000), ["draft"], 500, self_owner)
        ngrams = sum(sys.getsizeof(key) + sys.getsizeof(token) + OVERHEAD for key, token in pool.ngrams.peek())
        prefixes = sum(
            sys.getsizeof(key) + prefix.tokens.nbytes + 3000 + 500 + OVERHEAD for key, prefix in pool.prefixes.peek()
        )
        assert pool.ngrams.bytes == ngrams and pool.prefixes.bytes == prefixes
        assert pool.bytes == ngrams + prefixes <= 40_000
    assert len(pool.prefixes) > 3 and pool.prefixes.evictions > 10 and pool.ngrams.evictions > 100


self_owner = object()


def test_the_longest_shared_beginning_is_found_and_one_token_is_left_to_compute():
    space = ResultCache(1_000_000).space("a")
    short, long = list(range(20)), list(range(40))
    space.store_prefix(short, state(), "short", 0, self_owner)
    space.store_prefix(long, state(), "long", 0, self_owner)
    prefix, length = space.longest_prefix([*range(30), 99, 98], self_owner)
    assert length == 30 and prefix.draft == "long"
    assert space.longest_prefix(list(range(40)), self_owner)[1] == 39
    assert space.longest_prefix(list(range(15)), self_owner) is None  # too short to be worth a copy
    assert space.longest_prefix([7, *range(40)], self_owner) is None
    assert not space.store_prefix([1, 2], state(), "", 0, self_owner)
    assert not space.store_prefix(long, state(10_000_000), "", 0, self_owner)  # larger than the pool


def test_a_used_prefix_outlives_an_unused_one():
    space = ResultCache(8 * 1100).space("a")
    texts = [[start, *range(1, 30)] for start in (100, 200, 300)]
    for text in texts[:2]:
        assert space.store_prefix(text, state(3000), "", 0, self_owner)
    assert space.longest_prefix(texts[0], self_owner) is not None
    assert space.store_prefix(texts[2], state(3000), "", 0, self_owner)
    kept = [space.longest_prefix(text, self_owner) is not None for text in texts]
    assert kept == [True, False, True]


def test_nothing_leaks_between_targets_dtypes_or_drafters():
    names = [
        space_of(IDENTITY, "float32"),
        space_of(IDENTITY, "bfloat16"),
        *(space_of({**IDENTITY, key: "other"}, "float32") for key in IDENTITY if key != "name"),
    ]
    assert len(set(names)) == len(names)
    assert space_of({**IDENTITY, "name": "a copy of it"}, "float32") == names[0]
    pool = ResultCache(1_000_000)
    text = list(range(30))
    mine = pool.space(names[0])
    mine.note(text, 30)
    mine.store_prefix(text, state(), "mine", 0, self_owner)
    for name in names[1:]:
        other = pool.space(name)
        assert other.continuation(text[:ORDER], 5) == []
        assert other.longest_prefix(text, self_owner) is None
    assert mine.longest_prefix(text, object()) is None  # another drafter's states are of no use
    again = pool.space(names[0])
    assert again.continuation(text[:ORDER], 2) == [3, 4] and again.longest_prefix(text, self_owner) is not None
