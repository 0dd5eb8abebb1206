"""The budget is never exceeded, whatever rows reserve, produce and in which order they end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.ledger import Ledger, require_room, shard_quota
from jetspec_train.data.shards import _handed


@given(st.integers(0, 10**9), st.integers(1, 300))
def test_quotas_of_all_shards_sum_to_the_budget(total, shards):
    quotas = [shard_quota(total, shard, shards) for shard in range(shards)]
    assert sum(quotas) == total and max(quotas) - min(quotas) <= 1


@given(
    st.integers(1, 500),
    st.one_of(st.none(), st.integers(1, 500)),
    st.lists(st.tuples(st.integers(1, 60), st.floats(0, 1), st.floats(0, 1), st.booleans()), max_size=60),
)
def test_kept_and_generated_tokens_stay_within_their_quotas(kept_quota, generated_quota, rows):
    ledger = Ledger(kept_quota, generated_quota)
    in_flight: list[tuple[int, int, int]] = []

    def end_one() -> None:
        reserved, kept, generated = in_flight.pop(0)
        ledger.settle(reserved, kept=kept, generated=generated)

    for reserve, made, kept_share, end_now in rows:
        while not ledger.fits(reserve) and in_flight:
            end_one()
        if ledger.fits(reserve):
            ledger.reserve(reserve)
            generated = round(made * reserve)
            in_flight.append((reserve, round(kept_share * generated), generated))
        if end_now and in_flight:
            end_one()
        assert ledger.kept + ledger.reserved <= kept_quota
        assert generated_quota is None or ledger.generated + ledger.reserved <= generated_quota
    while in_flight:
        end_one()
    assert ledger.reserved == 0 and ledger.kept <= kept_quota


def test_misuse_is_an_error():
    ledger = Ledger(10)
    with pytest.raises(RuntimeError, match="beyond the budget"):
        ledger.reserve(11)
    ledger.reserve(5)
    with pytest.raises(RuntimeError, match="only 5 reserved"):
        ledger.settle(5, kept=6, generated=6)
    with pytest.raises(UserError, match="smaller than one answer"):
        require_room(Ledger(10), 11)
    with pytest.raises(UserError, match=r"budget\.tokens"):
        Ledger(10).restore(11, 11)


@given(st.lists(st.integers(0, 100), min_size=2, max_size=10), st.integers(0, 1000), st.data())
def test_handing_on_keeps_the_sum(used, pool, data):
    fed = data.draw(st.lists(st.integers(0, len(used) - 1), min_size=1, max_size=len(used), unique=True))
    quotas = _handed(used, pool, fed)
    assert sum(quotas) == sum(used) + pool and all(quota >= before for quota, before in zip(quotas, used))
