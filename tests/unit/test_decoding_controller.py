"""The controller's three layers on made-up numbers, and what it refuses before any work."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.decoding.calibration import Calibration, PatternProfile, Threshold
from jetspec_train.decoding.controller import Stage, VerificationController, make_controller

PROFILE = PatternProfile(("entropy", "sink"), (0.1, 0.0), (0.6, 0.5), 0.95)
INSIDE, OUTSIDE = {"entropy": 0.3, "sink": 0.2}, {"entropy": 0.9, "sink": 0.2}
CONTROLLER = VerificationController(threshold=0.85, max_pending=7, pattern=PROFILE)


def stage(**changes) -> Stage:
    return dataclasses.replace(Stage(length=4, pending=0, survival=0.9, statistics=INSIDE), **changes)


@pytest.mark.parametrize(
    "changes,reason",
    [
        ({}, "passed"),
        ({"survival": 0.85}, "passed"),
        ({"survival": 0.849}, "threshold"),
        ({"statistics": OUTSIDE}, "pattern"),
        ({"statistics": OUTSIDE, "cached": True}, "passed"),  # an n-gram hit counts as a match
        ({"statistics": None}, "pattern"),
        ({"statistics": {"entropy": math.nan, "sink": 0.2}}, "pattern"),
        ({"survival": None}, "no score"),
        ({"survival": math.nan}, "no score"),
        ({"survival": math.inf}, "no score"),
        ({"ends": True}, "end of the output"),
        ({"pending": 4}, "max_pending"),
        ({"pending": 3}, "passed"),
        ({"length": 0}, "no whole stage"),
    ],
)
def test_each_layer_sends_to_the_target_what_it_must(changes, reason):
    decision = CONTROLLER.decide(stage(**changes))
    assert decision.reason == reason and decision.defers == (reason == "passed")


def test_without_a_profile_the_pattern_layer_says_nothing():
    decision = dataclasses.replace(CONTROLLER, pattern=None).decide(stage(statistics=None))
    assert decision.defers and decision.pattern_ok is None


def test_the_schedulers_bound_can_only_tighten():
    assert not CONTROLLER.decide(stage(), bound=3).defers
    assert CONTROLLER.decide(stage(pending=3), bound=100).defers
    assert not CONTROLLER.decide(stage(pending=4), bound=100).defers


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_a_stricter_threshold_never_defers_more(survival, low, high):
    low, high = sorted((low, high))
    loose, strict = (dataclasses.replace(CONTROLLER, threshold=value) for value in (low, high))
    assert loose.decide(stage(survival=survival)).defers >= strict.decide(stage(survival=survival)).defers


# ---- what the settings may ask for ---------------------------------------------------------------------------

IDENTITY = {"name": "t", "config_hash": "c", "tokenizer_hash": "k", "template_hash": "p"}


def calibration(
    value: float | None = 0.9, certified: bool = True, mode: str = "match_greedy", **changes
) -> Calibration:
    threshold = Threshold(value, certified, prompts=200, errors=3, needed=1000, **changes)
    return Calibration("hash", IDENTITY, mode, {}, threshold, PROFILE)


def make(settings: DecodingConfig, verifier="a verifier", known: Calibration | None = None, block: int = 8):
    return make_controller(settings, block=block, verifier=verifier, calibration=known)


TRUSTING = DecodingConfig(policy="trusting", stages=4)


def test_automatic_thresholds():
    assert make(DecodingConfig(stages=4), known=calibration(0.97)).threshold == 0.85
    assert make(TRUSTING, known=calibration(0.97)).threshold == 0.97
    assert make(TRUSTING, known=calibration(0.5)).threshold == 0.85
    assert make(DecodingConfig(stages=4, threshold="0.3")).threshold == 0.3
    assert make(dataclasses.replace(TRUSTING, threshold="0.95"), known=calibration(0.9)).threshold == 0.95


def test_most_pending_is_the_block_less_one():
    assert make(DecodingConfig(stages=4)).max_pending == 7
    assert make(DecodingConfig(stages=4, max_pending=7)).max_pending == 7
    with pytest.raises(UserError, match=r"max_pending=8 .*block predicts 8.*at most 7"):
        make(DecodingConfig(stages=4, max_pending=8))


def test_the_profile_is_used_with_a_verifier_only():
    assert make(DecodingConfig(stages=4), known=calibration()).pattern == PROFILE
    assert make(DecodingConfig(stages=4), verifier=None, known=calibration()).pattern is None


@pytest.mark.parametrize(
    "settings,verifier,known,words",
    [
        (TRUSTING, None, calibration(), "needs a verifier"),
        (TRUSTING, "v", None, "no calibration.json"),
        (TRUSTING, "v", calibration(None, False), "no threshold is certified.*3 errors in 200 prompts, 1000"),
        (TRUSTING, "v", calibration(0.9, False), "no threshold is certified"),
        (dataclasses.replace(TRUSTING, stages=0), "v", calibration(), "stage by stage"),
        (dataclasses.replace(TRUSTING, threshold="0.8"), "v", calibration(0.9), "0.8 is below the certified.*0.9"),
        (dataclasses.replace(TRUSTING, threshold="2"), "v", calibration(), "threshold=2"),
        (dataclasses.replace(TRUSTING, threshold="nan"), "v", calibration(), "threshold=nan"),
        (TRUSTING, "v", calibration(mode="match_sampled"), "mode match_sampled.*mode match_greedy"),
        (
            dataclasses.replace(TRUSTING, sampling=SamplingConfig(temperature=0.7)),
            "v",
            calibration(),
            "mode match_greedy.*mode match_sampled",
        ),
        (TRUSTING, "v", calibration(stage_length=3), "stages of 3 tokens.*stages=4"),
    ],
)
def test_refused_with_both_values(settings, verifier, known, words):
    with pytest.raises(UserError, match=words):
        make(settings, verifier, known)


def test_a_certificate_of_the_same_stage_length_is_taken():
    assert make(TRUSTING, known=calibration(0.9, stage_length=4)).policy == "trusting"
