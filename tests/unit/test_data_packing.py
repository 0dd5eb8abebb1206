"""Packing loses nothing, mixes nothing, and is a function of (samples, seed, epoch) alone."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.packing import NO_DOCUMENT, PackedSampler, best_fit
from jetspec_train.data.samples import SampleStore


def store_of(pairs: list[tuple[int, int]]) -> SampleStore:
    """Samples of (prompt, answer) lengths; every token of the store is a number of its own."""
    lengths = np.array([prompt + answer for prompt, answer in pairs])
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return SampleStore(
        np.arange(starts[-1], dtype=np.int32) + 1,
        starts,
        np.array([prompt for prompt, _ in pairs], dtype=np.int32),
        np.array([f"{number:04x}" for number in range(len(pairs))]),
        np.array(["d"] * len(pairs)),
    )


PAIRS = st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=1, max_size=40).filter(
    lambda pairs: any(prompt <= 30 and answer >= 2 for prompt, answer in pairs)
)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=80), st.integers(50, 90))
def test_best_fit_fills_no_bin_beyond_its_capacity_and_beats_half(lengths, capacity):
    bins = best_fit(np.array(lengths), capacity)
    loads = np.bincount(bins, weights=lengths)
    assert loads.max() <= capacity and loads.min() > 0
    assert len(loads) <= 2 * -(-sum(lengths) // capacity)  # no two bins could be merged


@settings(max_examples=60, deadline=None)
@given(PAIRS, st.integers(40, 70), st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)]), st.integers(0, 3))
def test_every_supervised_token_appears_once_over_all_ranks(pairs, length, sequences_world, epoch):
    sequences, world = sequences_world
    store = store_of(pairs)
    seen: list[int] = []
    supervised: list[int] = []
    for rank in range(world):
        sampler = PackedSampler(store, sequence_length=length, sequences=sequences, seed=3, rank=rank, world=world)
        for batch in sampler.epoch(epoch):
            assert batch.tokens_ST.shape == (sequences // world, length)
            real = batch.documents_ST != NO_DOCUMENT
            assert not batch.supervised_ST[~real].any() and not batch.tokens_ST[~real].any()
            seen += batch.tokens_ST[real].tolist()
            supervised += batch.tokens_ST[batch.supervised_ST].tolist()
            check_documents(store, batch)
    expected_seen, expected_supervised = [], []
    for row, (prompt, answer) in enumerate(pairs):
        size = min(prompt + answer, length)
        if size - prompt < 2:
            continue  # counted as too short
        begin = int(store.starts[row]) + 1
        expected_seen += range(begin, begin + size)
        expected_supervised += range(begin + prompt, begin + size)
    assert sorted(seen) == expected_seen and sorted(supervised) == expected_supervised
    facts = sampler.facts()
    assert facts.supervised_tokens == len(expected_supervised)
    assert facts.cropped_tokens == store.supervised_tokens - len(expected_supervised)
    assert facts.samples == facts.packed + facts.too_short


def check_documents(store, batch):
    """Tokens of one document are one sample from its start, positions count from 0."""
    for line in range(len(batch.tokens_ST)):
        documents = batch.documents_ST[line]
        assert (np.diff(documents[documents != NO_DOCUMENT]) >= 0).all()
        for document in range(documents.max() + 1):
            place = np.flatnonzero(documents == document)
            tokens = batch.tokens_ST[line, place]
            assert (np.diff(place) == 1).all() and (np.diff(tokens) == 1).all()
            assert tokens[0] - 1 in store.starts
            assert (batch.positions_ST[line, place] == np.arange(len(place))).all()


def test_resuming_at_any_step_gives_the_same_batch_and_epochs_differ():
    store = store_of([(5, 10 + number % 9) for number in range(50)])
    one = PackedSampler(store, sequence_length=64, sequences=2, seed=1)
    first = [batch.tokens_ST for batch in one.epoch(0)]
    one.batch(3, 0)  # jumping about leaves no trace
    fresh = PackedSampler(store, sequence_length=64, sequences=2, seed=1)
    for step in (4, 0, 2):
        assert (fresh.batch(0, step).tokens_ST == first[step]).all()
    assert any((a != b).any() for a, b in zip(first, (batch.tokens_ST for batch in one.epoch(1))))
    total = one.epoch_steps(0)
    assert one.locate(total + 1) == (1, 1) and one.steps(1.0) == total
    assert (one.step_batch(total + 1).tokens_ST == one.batch(1, 1).tokens_ST).all()
    other = PackedSampler(store, sequence_length=64, sequences=2, seed=2)
    assert any((a != b.tokens_ST).any() for a, b in zip(first, other.epoch(0)))


def test_ranks_that_do_not_divide_and_samples_without_room_are_refused():
    store = store_of([(60, 5), (70, 9)])
    with pytest.raises(UserError, match="multiple of the number of ranks"):
        PackedSampler(store, sequence_length=64, sequences=3, world=2)
    with pytest.raises(UserError, match=r"train\.sequence_length=40"):
        PackedSampler(store, sequence_length=40, sequences=1)


def test_a_token_limit_keeps_nested_subsets():
    generator = np.random.default_rng(0)
    store = store_of([(3, int(size)) for size in generator.integers(2, 30, 200)])
    small, large = store.limit_tokens(500), store.limit_tokens(1500)
    assert 470 < small.supervised_tokens <= 500 and large.supervised_tokens <= 1500
    assert set(small.ids) < set(large.ids)
    row = list(store.ids).index(small.ids[7])
    expected = store.tokens[store.starts[row] : store.starts[row + 1]]
    assert (small.tokens[small.starts[7] : small.starts[8]] == expected).all()


def test_packing_is_fast_and_full():
    lengths = np.random.default_rng(0).integers(60, 380, 50_000)
    begun = time.perf_counter()
    bins = best_fit(lengths, 512)
    assert time.perf_counter() - begun < 2
    assert lengths.sum() / (512 * (bins.max() + 1)) > 0.97
