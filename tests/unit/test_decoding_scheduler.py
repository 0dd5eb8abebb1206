"""The scheduler on made-up costs and pass rates: sizes, correction, utilisation, and a change of domain."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.decoding.cost_profile import CostProfile
from jetspec_train.decoding.scheduler import AdaptiveScheduler, PassRates, UtilisationBound, first_nodes

FLAT = CostProfile({1: 1.0, 32: 1.0}, draft_seconds=0.2)
STEEP = CostProfile({1: 1.0, 2: 2.0, 32: 32.0}, draft_seconds=0.2)
LINEAR = CostProfile({1: 1.0, 32: 1.0 + 31 * 0.05}, draft_seconds=0.2)


def scheduler(profile: CostProfile = LINEAR, most_nodes: int = 32, **changes) -> AdaptiveScheduler:
    return AdaptiveScheduler(profile, most_nodes=most_nodes, **changes)


def test_costs_between_and_beyond_the_profiled_sizes():
    profile = CostProfile({1: 1.0, 3: 2.0, 5: 6.0})
    assert profile.seconds(np.array([1, 2, 3, 4, 5, 7])).tolist() == [1.0, 1.5, 2.0, 4.0, 6.0, 10.0]
    assert CostProfile.from_dict(profile.to_dict()) == profile
    for wrong in ({"0": 1.0}, {"1": -1.0}, {"1": float("nan")}, {}, {"x": 1.0}, {"1": "fast"}):
        with pytest.raises(UserError, match="verify_seconds"):
            CostProfile.from_dict({"format": 1, "verify_seconds": wrong})
    with pytest.raises(UserError, match="format 2"):
        CostProfile.from_dict({"format": 2})


def test_free_nodes_are_all_sent_and_dear_ones_none():
    survivals = [np.full(20, 0.3)]
    assert scheduler(FLAT).choose(survivals) == 20
    assert scheduler(FLAT, most_nodes=7).choose(survivals) == 7
    assert scheduler(STEEP).choose(survivals) == 0
    assert scheduler(STEEP).choose([]) == 0
    assert scheduler(STEEP).choose([np.zeros(0)]) == 0


@given(st.lists(st.lists(st.floats(0, 1), max_size=12), min_size=1, max_size=3), st.floats(0.001, 0.5))
def test_the_size_is_the_global_maximum_of_tokens_per_second(rows, slope):
    """Against the definition, row by row and size by size."""
    profile = CostProfile({1: 1.0, 101: 1.0 + 100 * slope}, draft_seconds=0.3)
    survivals = [np.sort(np.array(row))[::-1] for row in rows]
    chosen = scheduler(profile, most_nodes=10).choose(survivals)

    def speed(size: int) -> float:
        tokens = sum(1.0 + values[:size].sum() for values in survivals)
        return tokens / (0.3 + float(profile.seconds(len(rows) * (1 + size))))

    longest = min(10, max(len(row) for row in rows))
    assert speed(chosen) >= max(speed(size) for size in range(longest + 1)) * (1 - 1e-9)


def test_the_first_drop_stops_where_the_global_maximum_goes_on():
    """A plateau in the cost curve: worse at first, better later. Under the ratio rule the later gain must not count."""
    stairs = CostProfile({1: 1.0, 2: 1.9, 3: 1.9, 4: 1.9, 5: 1.9}, draft_seconds=0.0001)
    survivals = [np.array([0.85, 0.8, 0.75, 0.7])]
    assert scheduler(stairs).choose(survivals, first_drop=True) == 0
    assert scheduler(stairs).choose(survivals) == 4


def test_pass_rates_forget():
    rates = PassRates()
    assert rates.rate(0) == rates.factor(0) == 1.0
    for _ in range(60):
        rates.note(0, 0.9, True)
    assert rates.rate(0) > 0.99 and 1.0 <= rates.factor(0) < 1.15
    for _ in range(8):
        rates.note(0, 0.9, False)
    assert rates.rate(0) < 0.45 and rates.factor(0) < 0.5
    assert rates.factor(5) == rates.factor(0)  # deeper depths that were never reached share the deepest one's
    rates = PassRates(memory=0.99)
    for _ in range(100):
        rates.note(0, 1.0, False)
        rates.note(1, 0.01, True)
    assert rates.factor(0) == 0.25 and rates.factor(1) == 4.0  # bounded
    rates.note(0, float("nan"), False)
    assert np.isfinite(rates.factor(0))


def test_corrected_survivals_never_grow_along_a_path():
    made = scheduler()
    for _ in range(30):
        made.tree.note(0, 0.3, True)
        made.tree.note(1, 0.9, False)
    conditional = np.array([0.9, 0.5, 0.5])
    corrected = made.corrected(conditional, np.array([0, 1, 1]))
    assert corrected[0] == 1.0 and corrected[1] < 0.4
    assert len(made.corrected(np.zeros(0), np.zeros(0, dtype=int))) == 0


def test_another_domain_changes_tree_size_and_pending_tokens_within_a_few_rounds():
    """The experiment: a drafter that always promises the same, on text where it keeps its promise, then on text where
    it does not, then back. Every round is decided by the scheduler and booked as the decoder books it."""
    random = np.random.default_rng(0)
    made = scheduler(LINEAR, most_nodes=16)
    promised = 0.9
    conditional = np.full(16, promised)  # a chain of 16 slots
    depths = np.arange(16)

    def round_on(true_rate: float) -> tuple[int, int]:
        nodes = made.choose([np.cumprod(made.corrected(conditional, depths))])
        pending = made.pending_bound(7)
        for depth in range(max(nodes, 1)):
            passed = bool(random.random() < true_rate)
            made.tree.note(depth, promised, passed)
            made.path.note(depth, promised, passed)
            if not passed:
                break
        return nodes, pending

    easy = [round_on(0.9) for _ in range(30)]
    hard = [round_on(0.2) for _ in range(12)]
    again = [round_on(0.95) for _ in range(25)]
    usual = np.mean([nodes for nodes, _ in easy[10:]])
    assert usual > 5 and np.mean([pending for _, pending in easy[10:]]) > 2.5
    assert np.mean([nodes for nodes, _ in hard[5:]]) < 0.6 * usual, hard
    assert np.mean([pending for _, pending in hard[5:]]) <= 1, hard
    assert np.mean([nodes for nodes, _ in again[12:]]) > 0.9 * usual, again
    assert np.mean([pending for _, pending in again[12:]]) > 2.5, again


def test_costs_that_drift_are_followed_within_bounds():
    made = scheduler(LINEAR)
    before = made.choose([np.linspace(0.9, 0.05, 20)])
    for _ in range(40):
        made.note_seconds(8, target_seconds=1.35, draft_seconds=2.0)
    assert made.draft_seconds == pytest.approx(2.0, rel=0.01)
    assert made.choose([np.linspace(0.9, 0.05, 20)]) > before  # dear drafts want more from each round
    for _ in range(100):
        made.note_seconds(8, target_seconds=1e6, draft_seconds=0.0)
    assert made.choose([np.linspace(0.9, 0.05, 20)]) >= 1
    made.note_seconds(8, 0.0, 0.0)  # a clock that did not move says nothing


def test_initial_tree_size():
    assert first_nodes(2, 24) == 3 and first_nodes(8, 24) == 12 and first_nodes(132, 24) == 24
    assert first_nodes(1, 2) == 2


def test_utilisation_moves_the_bound_with_hysteresis():
    bound = UtilisationBound(8, largest=24)
    readings = itertools.chain([0.5, 0.8, 0.5, 0.95, 0.5])
    for reading in readings:  # never twice in a row on one side
        bound.note(reading)
    assert bound.value == 8 and bound.relief == 0
    bound.note(0.5)
    assert bound.value == 10
    bound.note(None)
    bound.note(float("nan"))
    bound.note(0.5)
    bound.note(0.5)
    assert bound.value == 13
    for _ in range(40):
        bound.note(0.1)
    assert bound.value == 24
    for _ in range(40):
        bound.note(0.99)
    assert bound.value == 3 and bound.relief == 4
    for _ in range(2):
        bound.note(0.2)
    assert bound.value == 4 and bound.relief == 3


def test_utilisation_bounds_the_tree_and_verifies_more_often():
    bound = UtilisationBound(5, largest=24)
    made = scheduler(FLAT, bound=bound, stage=3)
    assert made.choose([np.full(20, 0.5)]) == 5
    assert made.pending_bound(7) == 7
    for _ in range(4):
        bound.note(0.95)
    assert made.choose([np.full(20, 0.5)]) < 5 and made.pending_bound(7) == 1
