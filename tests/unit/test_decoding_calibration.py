"""calibration.json there and back, what is refused, and the attention statistics behind the pattern layer."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.decoding.calibration import (
    Calibration,
    PatternProfile,
    Threshold,
    check_calibration,
    weights_hash,
)
from jetspec_train.decoding.patterns import STATISTICS, pattern_statistics

IDENTITY = {"name": "t", "revision": "1", "config_hash": "c", "tokenizer_hash": "k", "template_hash": "p"}
FULL = Calibration(
    bundle="abc",
    target=IDENTITY,
    mode="match_greedy",
    temperatures={"correctness": (1.1, 1.3), "confidence": (0.9,)},
    threshold=Threshold(0.91, True, prompts=400, errors=0, needed=373, stage_length=4, grid=[{"threshold": 0.91}]),
    pattern=PatternProfile(STATISTICS, (0.0, 0.0, 0.1, 0.0), (1.0, 0.5, 0.9, 0.7), 0.95),
    quality={"ece_after": 0.01},
)


def test_what_is_written_is_read():
    assert Calibration.from_dict(json.loads(json.dumps(FULL.to_dict()))) == FULL
    bare = Calibration("abc", IDENTITY, "match_greedy", {})
    assert Calibration.from_dict(bare.to_dict()) == bare
    assert bare.temperatures_of("correctness").tolist() == [1.0]
    assert FULL.temperatures_of("correctness").tolist() == [1.1, 1.3]


@pytest.mark.parametrize(
    "changes,words",
    [
        ({"format": 2}, "format 2.*reads format 1"),
        ({"mode": "hope"}, "mode='hope'; allowed: match_greedy"),
        ({"bundle": ""}, "bundle=''"),
        ({"target": None}, "target=None"),
        ({"temperatures": {"correctness": [1.0, -2.0]}}, "temperatures.correctness.*positive"),
        ({"temperatures": {"correctness": [float("inf")]}}, "finite numbers"),
        ({"temperatures": {"taste": [1.0]}}, "temperatures.taste"),
        ({"threshold": {"value": 1.5}}, "threshold.value=1.5; a number from 0 to 1"),
        ({"threshold": {"value": True}}, "threshold.value=True"),
        ({"threshold": {"value": 0.9, "certified": "yes"}}, "threshold.certified='yes'"),
        ({"threshold": {"value": None, "certified": True}}, "without threshold.value"),
        ({"threshold": {"risk": "small"}}, "threshold.risk='small'"),
        ({"pattern": {"statistics": ["mood"], "low": [0], "high": [1]}}, "mood.*known: entropy"),
        ({"pattern": {"statistics": ["sink"], "low": [0.9], "high": [0.1]}}, "do not fit"),
        ({"pattern": {"statistics": ["sink"], "low": [0, 0], "high": [1]}}, "do not fit"),
        ({"pattern": {"statistics": ["sink"], "low": [0], "high": [1], "coverage": 2}}, "coverage=2"),
        ({"pattern": [1]}, "pattern="),
    ],
)
def test_a_broken_file_is_refused_by_name(changes, words):
    data = json.loads(json.dumps(FULL.to_dict())) | changes
    with pytest.raises(UserError, match=f"somewhere.json.*{words}"):
        Calibration.from_dict(data, "somewhere.json")


def test_a_calibration_of_another_bundle_or_target_is_refused_with_both_values():
    check_calibration(FULL, weights="abc", target=IDENTITY, where="here")
    with pytest.raises(UserError, match=r"here was made for the weights abc, but the bundle holds def"):
        check_calibration(FULL, weights="def", target=IDENTITY, where="here")
    with pytest.raises(UserError, match=r"target 't' \(tokenizer_hash k\).*target is 'u' \(tokenizer_hash z\)"):
        check_calibration(FULL, weights="abc", target={**IDENTITY, "name": "u", "tokenizer_hash": "z"}, where="here")


def test_the_hash_sees_names_shapes_and_values_but_not_the_dtype_of_equal_values():
    weights = {"draft.a": torch.tensor([[1.0, 2.0]]), "verifier.b": torch.tensor([0.5])}
    known = weights_hash(weights)
    assert weights_hash(dict(reversed(weights.items()))) == known
    assert weights_hash({name: tensor.bfloat16() for name, tensor in weights.items()}) == known
    others = [
        {"draft.a": weights["draft.a"]},
        {**weights, "draft.a": weights["draft.a"].T},
        {**weights, "draft.a": weights["draft.a"] + 1e-6},
        {"draft.x": weights["draft.a"], "verifier.b": weights["verifier.b"]},
    ]
    assert len({known, *(weights_hash(other) for other in others)}) == 5


def test_a_profile_holds_only_what_lies_inside():
    inside = {"entropy": 0.5, "sink": 0.2, "locality": 0.3, "copy": 0.1}
    assert FULL.pattern.matches(inside)
    assert FULL.pattern.matches({**inside, "sink": 0.5})
    for name, value in (("sink", 0.51), ("locality", 0.05), ("copy", math.nan)):
        assert not FULL.pattern.matches({**inside, name: value})
    assert not FULL.pattern.matches({"sink": 0.2})


# ---- attention statistics --------------------------------------------------------------------------------------


def attention(weights_KS: torch.Tensor, layers: int = 2, heads: int = 3) -> list[torch.Tensor]:
    return [weights_KS[None, None, None].expand(1, heads, 1, *weights_KS.shape)] * layers


def test_statistics_of_attention_by_hand():
    """Context of 20 tokens, a block of 2 slots; all heads alike."""
    context = [7] + [1] * 18 + [9]
    weights = torch.zeros(2, 22)
    weights[0, 0], weights[0, 19], weights[0, 20] = 0.5, 0.25, 0.25  # first column, last context column, itself
    weights[1, 3] = 1.0  # neither first nor near
    found = pattern_statistics(attention(weights), row=0, slots=[0, 1], context=context, drafted=[9, 1])
    assert found["sink"] == pytest.approx(0.25)
    assert found["locality"] == pytest.approx(0.25)
    assert found["copy"] == pytest.approx((0.25 + 1.0) / 2)  # column 19 holds 9; column 3 holds 1
    nats = -(0.5 * math.log(0.5) + 0.5 * math.log(0.25))
    assert found["entropy"] == pytest.approx(nats / 2 / math.log(22), rel=1e-6)


def test_statistics_of_extremes_and_of_padded_rows():
    even = torch.full((1, 24), 1 / 24)
    found = pattern_statistics(attention(even), row=0, slots=[0], context=[1] * 23, drafted=[1])
    assert found["entropy"] == pytest.approx(1.0, abs=0.01) and found["copy"] == pytest.approx(23 / 24)
    # a row whose context is shorter than the batch's longest: the masked columns hold no weight and count for nothing
    padded = torch.cat([torch.full((1, 5), 0.1), torch.zeros(1, 19), torch.full((1, 1), 0.5)], dim=-1)
    found = pattern_statistics(attention(padded), row=0, slots=[0], context=[4, 5, 6, 7, 8], drafted=[6])
    assert found["copy"] == pytest.approx(0.1) and found["locality"] == pytest.approx(1.0)
    broken = pattern_statistics(attention(padded * math.nan), row=0, slots=[0], context=[4] * 5, drafted=[6])
    assert all(math.isnan(value) for value in broken.values())


def test_every_statistic_depends_on_the_slots_asked_for_only():
    weights = torch.softmax(torch.randn(4, 30, generator=torch.Generator().manual_seed(0)), dim=-1)
    context = list(range(26))
    alone = pattern_statistics(attention(weights[1:3]), row=0, slots=[0, 1], context=context, drafted=[3, 4])
    among = pattern_statistics(attention(weights), row=0, slots=[1, 2], context=context, drafted=[3, 4])
    assert among["sink"] == pytest.approx(alone["sink"]) and among["copy"] == pytest.approx(alone["copy"])


def test_a_profile_in_a_calibration_names_known_statistics_only():
    data = FULL.to_dict()
    data["pattern"]["statistics"][0] = "hunch"
    with pytest.raises(UserError, match="hunch"):
        Calibration.from_dict(data)
    assert dataclasses.replace(FULL, pattern=None).to_dict()["pattern"] is None
