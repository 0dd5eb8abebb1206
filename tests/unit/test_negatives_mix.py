"""The laws of the mix: shares, balance, budget, and a reason for everything that is not kept."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.data.negatives.mix import (
    BUDGET,
    EASY_POSITIVE,
    SURPLUS,
    Row,
    Rules,
    choose_rows,
    even,
    within_shares,
)
from jetspec_train.data.negatives.rows import DIFFICULTIES, KINDS, class_of, difficulty_of

DRAFTED = {"on_policy": 0.7, "near_miss": 0.2, "synthetic": 0.1}
ALONE = {"near_miss": 2 / 3, "synthetic": 1 / 3}


def rows_of(described: list[tuple[str, float, bool, int]]) -> list[Row]:
    return [
        Row(f"{number * 7919 % 10007:05d}", kind, difficulty_of(margin), margin, positive, tokens)
        for number, (kind, margin, positive, tokens) in enumerate(described)
    ]


def some_rows(kinds: tuple[str, ...], size: int = 120) -> st.SearchStrategy[list[Row]]:
    row = st.tuples(st.sampled_from(kinds), st.floats(0, 8), st.booleans(), st.integers(1, 8))
    return st.lists(row, max_size=size).map(rows_of)


@settings(max_examples=60, deadline=None)
@given(some_rows(KINDS), st.floats(0.1, 1.0), st.floats(0, 1), st.integers(0, 400))
def test_shares_and_budget_hold_whatever_was_judged(rows, keep, positives, room):
    reasons = choose_rows(rows, Rules(DRAFTED, keep, positives), room)
    kept = [row for row, reason in zip(rows, reasons) if reason is None]
    counts = Counter(class_of(row.kind) for row in kept)
    assert counts["near_miss"] <= 0.2 * len(kept) + 1e-6 and counts["synthetic"] <= 0.1 * len(kept) + 1e-6
    assert not kept or counts["on_policy"] >= 0.7 * len(kept) - 1e-6
    assert sum(row.tokens for row in kept) <= room
    assert set(reasons) <= {None, EASY_POSITIVE, SURPLUS, BUDGET}
    assert choose_rows(rows, Rules(DRAFTED, keep, positives), room) == reasons


@settings(max_examples=60, deadline=None)
@given(some_rows(KINDS[1:]), st.floats(0.1, 1.0))
def test_a_difficulty_that_is_kept_less_often_than_another_has_no_more_to_give(rows, keep):
    reasons = choose_rows(rows, Rules(ALONE, keep, 1.0), 10**9)
    for kind in KINDS[1:]:
        supply = Counter(row.difficulty for row in rows if row.kind == kind)
        kept = Counter(row.difficulty for row, reason in zip(rows, reasons) if row.kind == kind and reason is None)
        most = max(kept.values(), default=0)
        for name in DIFFICULTIES:
            assert kept[name] == supply[name] or kept[name] >= most - 1, (kind, name)


@settings(max_examples=60, deadline=None)
@given(some_rows(KINDS[:1]), st.floats(0, 0.9))
def test_of_the_accepted_paths_only_the_closest_calls_may_stay(rows, positives):
    reasons = choose_rows(rows, Rules({"on_policy": 1.0}, 1.0, positives), 10**9)
    wrong = [row for row in rows if not row.is_positive]
    kept = [row for row, reason in zip(rows, reasons) if reason is None]
    easy = [row for row, reason in zip(rows, reasons) if reason == EASY_POSITIVE]
    assert [row for row in kept if not row.is_positive] == wrong
    right = [row for row in kept if row.is_positive]
    assert len(right) <= positives * len(kept) + 1e-6
    assert not right or not easy or max(row.margin for row in right) <= min(row.margin for row in easy)
    assert all(row.is_positive for row in easy)


@settings(max_examples=80, deadline=None)
@given(st.dictionaries(st.sampled_from(list(DRAFTED)), st.integers(0, 300), min_size=3))
def test_no_larger_mix_would_do(counts):
    found = within_shares(counts, DRAFTED)
    total = sum(found.values())
    assert found["on_policy"] == counts["on_policy"]
    for name in ("near_miss", "synthetic"):
        assert found[name] <= min(counts[name], DRAFTED[name] * total + 1e-6)
        # one more of this class alone would break its own bound
        assert found[name] == counts[name] or found[name] + 1 > DRAFTED[name] * (total + 1) - 1e-6


@given(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 200))
def test_even_parts(supply, total):
    dealt = even(supply, total)
    assert sum(dealt) == min(total, sum(supply)) and all(0 <= d <= s for d, s in zip(dealt, supply))
    assert all(d == s or d >= max(dealt) - 1 for d, s in zip(dealt, supply))


def test_without_a_budget_nothing_is_kept_and_all_is_said():
    rows = rows_of([("near_miss", 0.5, False, 3), ("numeric", 2.0, False, 4), ("near_miss", 5.0, False, 2)])
    assert choose_rows(rows, Rules(ALONE, 1.0, 1.0), 0) == [BUDGET, BUDGET, BUDGET]
    assert choose_rows([], Rules(ALONE, 1.0, 1.0), 0) == []
    assert choose_rows(rows, Rules(ALONE, 1.0, 1.0), 9).count(None) == 3
