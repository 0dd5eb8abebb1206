"""Which judged paths are kept: shares of the mix, difficulties in balance, within the token budget (METHODS 6).

Pure arithmetic on columns; what is not kept gets a reason. Ties are broken by the rows' ids, so the choice depends on
nothing but the rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jetspec_train.data.negatives.rows import DIFFICULTIES, class_of

# Why a judged path is not kept, in the order in which they are decided.
EASY_POSITIVE = "easy_positive"  # accepted by the target, and not among the closest calls
SURPLUS = "surplus"  # its class, kind or difficulty has enough
BUDGET = "beyond_budget"


@dataclass(frozen=True)
class Row:
    """What the choice looks at. ``tokens``: judged ones."""

    id: str
    kind: str
    difficulty: str
    margin: float
    is_positive: bool
    tokens: int


@dataclass(frozen=True)
class Rules:
    """``shares``: part of each class, summing to 1, a bound for every class but the first; see ``shares_of``."""

    shares: Mapping[str, float]
    keep: float
    positives: float


def choose_rows(rows: Sequence[Row], rules: Rules, room: int) -> list[str | None]:
    """Per row, why it is not kept; None if it is. ``room``: judged tokens that fit the budget."""
    reasons: list[str | None] = [None] * len(rows)
    classes: dict[str, list[int]] = {name: [] for name in rules.shares}
    for index, row in enumerate(rows):
        classes[class_of(row.kind)].append(index)
    open_rows: dict[str, list[int]] = {}
    quotas: dict[str, int] = {}
    for name, members in classes.items():
        open_rows[name], easy = without_easy_positives(rows, members, rules.positives)
        for index in easy:
            reasons[index] = EASY_POSITIVE
        quotas[name] = min(len(open_rows[name]), math.ceil(rules.keep * len(members)))
    quotas = within_shares(quotas, rules.shares)
    kept = {index for name, quota in quotas.items() for index in balanced(rows, open_rows[name], quota)}
    for members in open_rows.values():
        for index in members:
            if index not in kept:
                reasons[index] = SURPLUS
    if sum(rows[index].tokens for index in kept) > room:
        fitting = _within_room(rows, kept, quotas, rules, room)
        for index in kept - fitting:
            reasons[index] = BUDGET
    return reasons


def without_easy_positives(rows: Sequence[Row], members: Sequence[int], share: float) -> tuple[list[int], list[int]]:
    """(rows that may be kept, accepted paths beyond ``share`` of the class): the closest calls may stay."""
    positives = sorted((i for i in members if rows[i].is_positive), key=lambda i: (rows[i].margin, rows[i].id))
    wrong = [i for i in members if not rows[i].is_positive]
    allowed = len(positives) if share >= 1 else int(share / (1 - share) * len(wrong))
    return [*wrong, *positives[:allowed]], positives[allowed:]


def within_shares(counts: Mapping[str, int], shares: Mapping[str, float]) -> dict[str, int]:
    """The largest counts in which no class but the first one has more than its share of the sum.

    Lowering one class lowers the sum and with it the others; repeated until nothing moves, which ends at the largest
    counts that satisfy all bounds together.
    """
    result = {name: counts[name] for name in shares}
    bounded = list(shares)[1:]
    moved = True
    while moved:
        moved = False
        for name in bounded:
            allowed = math.floor(shares[name] * sum(result.values()) + 1e-9)
            if result[name] > allowed:
                result[name], moved = allowed, True
    return result


def balanced(rows: Sequence[Row], members: Sequence[int], quota: int) -> list[int]:
    """``quota`` of the rows: even over kinds, and within a kind even over difficulties, as far as the supply goes."""
    by_kind: dict[str, list[int]] = {}
    for index in members:
        by_kind.setdefault(rows[index].kind, []).append(index)
    kinds = sorted(by_kind)
    chosen: list[int] = []
    for kind, part in zip(kinds, even([len(by_kind[kind]) for kind in kinds], quota)):
        buckets = [[i for i in by_kind[kind] if rows[i].difficulty == name] for name in DIFFICULTIES]
        for bucket, count in zip(buckets, even([len(bucket) for bucket in buckets], part)):
            chosen += sorted(bucket, key=lambda i: rows[i].id)[:count]
    return chosen


def even(supply: Sequence[int], total: int) -> list[int]:
    """``total`` dealt out as evenly as the supply allows: who has less than an even part gives all it has."""
    dealt = [0] * len(supply)
    left = min(total, sum(supply))
    order = sorted(range(len(supply)), key=lambda i: supply[i])
    for place, index in enumerate(order):
        dealt[index] = min(supply[index], left // (len(order) - place))
        left -= dealt[index]
    return dealt


def _within_room(rows: Sequence[Row], kept: set[int], quotas: Mapping[str, int], rules: Rules, room: int) -> set[int]:
    """Of the kept rows a smaller mix of the same shares that fits: the largest scale, found by halving."""
    members: dict[str, list[int]] = {name: [] for name in quotas}
    for index in sorted(kept):
        members[class_of(rows[index].kind)].append(index)
    best: set[int] = set()
    low, high = 0, sum(quotas.values())
    while low < high:
        middle = (low + high + 1) // 2
        scale = middle / sum(quotas.values())
        smaller = within_shares({name: math.floor(quota * scale) for name, quota in quotas.items()}, rules.shares)
        chosen = {index for name, quota in smaller.items() for index in balanced(rows, members[name], quota)}
        if sum(rows[index].tokens for index in chosen) <= room:
            best, low = chosen, middle
        else:
            high = middle - 1
    return best
