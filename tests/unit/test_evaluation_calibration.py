"""Laws of calibration, on made-up numbers: bounds, fixed-sequence testing, temperatures, patterns, judgements."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jetspec_train.evaluation.calibration import (
    FEWEST_ROUNDS,
    FLOOR,
    GRID,
    RISK,
    FitStages,
    ThresholdResult,
    certify,
    errors_allowed,
    fit_pattern,
    fit_temperatures,
    inside_pattern,
    random_stage,
    sigmoid,
    survivals,
    threshold_grid,
    trials_at_rate,
    trials_needed,
    upper_bound,
)
from jetspec_train.evaluation.judgement import (
    auprc_reject,
    auroc,
    calibration_error,
    compare_auroc,
    coverage_at,
    judge,
    precision_coverage,
    reliability,
)


def made_stages(random: np.random.Generator, prompts: int, risk_at: float = 0.0) -> FitStages:
    """Ten stages per prompt with calibrated survivals, most of them high."""
    survival = random.beta(8, 0.3, size=prompts * 10)
    passed = random.random(len(survival)) < survival - risk_at
    return FitStages(survival, passed, np.repeat(np.arange(prompts), 10), prompts)


# ---- the bound and what it costs -------------------------------------------------------------------------


@pytest.mark.parametrize("errors, prompts", [(0, 373), (1, 592), (2, 785), (5, 1312)])
def test_a_risk_of_08_percent_needs_the_published_numbers_of_prompts(errors: int, prompts: int) -> None:
    assert trials_needed(errors) == prompts
    assert upper_bound(errors, prompts) <= RISK < upper_bound(errors, prompts - 1)
    assert errors_allowed(prompts) == errors and errors_allowed(prompts - 1) == errors - 1


def test_the_bound_holds_95_times_in_100_whatever_the_rate() -> None:
    random = np.random.default_rng(0)
    for rate in (0.004, 0.02, 0.3):
        errors = random.binomial(500, rate, size=5000)
        bounds = {count: upper_bound(int(count), 500) for count in np.unique(errors)}
        covered = np.mean([bounds[count] >= rate for count in errors])
        assert covered >= 0.95 - 3 * math.sqrt(0.05 * 0.95 / len(errors))


@given(tested=st.integers(0, 800), errors=st.integers(0, 40))
@hypothesis_settings(max_examples=60, deadline=None)
def test_more_errors_or_fewer_tests_never_lower_the_bound(tested: int, errors: int) -> None:
    errors = min(errors, tested)
    bound = upper_bound(errors, tested)
    assert bound >= (errors / tested if tested else 1.0)
    assert upper_bound(errors, tested + 1) <= bound <= upper_bound(min(errors + 1, tested), tested) + 1e-12
    assert (errors <= errors_allowed(tested)) == (bound <= RISK)


def test_how_much_data_is_missing() -> None:
    assert trials_at_rate(0.0) == 373
    assert trials_at_rate(0.002) == trials_needed(math.ceil(0.002 * trials_at_rate(0.002)))
    assert trials_at_rate(RISK) is None  # no amount of data certifies a rate that is too high
    assert trials_at_rate(0.004) > trials_at_rate(0.001)


# ---- fixed-sequence testing ------------------------------------------------------------------------------


def test_testing_stops_at_the_first_failure_and_keeps_the_last_success() -> None:
    asked = []
    results = {0.99: (400, 0), 0.95: (600, 1), 0.9: (600, 4), 0.85: (5000, 0)}

    def run(threshold: float) -> ThresholdResult:
        asked.append(threshold)
        tested, errors = results[threshold]
        return ThresholdResult(tested, errors, prompts=700)

    found = certify(list(results), run)
    assert asked == [0.99, 0.95, 0.9]  # 0.85 would have passed, but is never looked at
    assert found.value == 0.95 and found.certified and found.test.errors == 1
    assert [row["passed"] for row in found.rows] == [True, True, False]
    assert all(row["bound"] == upper_bound(row["errors"], row["tested"]) for row in found.rows)


def test_without_enough_prompts_there_is_no_certificate_and_the_number_is_named() -> None:
    found = certify([0.99], lambda threshold: ThresholdResult(40, 0, prompts=50))
    assert found.value is None and not found.certified
    assert found.needed == found.at_this_rate == math.ceil(373 * 50 / 40)
    one_error = certify([0.99], lambda threshold: ThresholdResult(250, 1, prompts=500))
    assert one_error.needed == 2 * 592 and one_error.at_this_rate > one_error.needed
    bad = certify([0.99], lambda threshold: ThresholdResult(40, 3, prompts=40))
    assert bad.value is None and bad.needed == trials_needed(3) and bad.at_this_rate is None
    nothing = certify([], lambda threshold: ThresholdResult(0, 0, 0))
    assert nothing.value is None and nothing.test is None and nothing.needed == 373


def test_a_run_that_was_stopped_for_its_errors_never_certifies() -> None:
    found = certify([0.9], lambda threshold: ThresholdResult(5000, 0, 5000, stopped=True))
    assert found.value is None


def test_fixed_sequence_keeps_95_percent_and_the_best_of_many_does_not() -> None:
    """Twenty thresholds, all with a true risk just above the limit: certifying any of them is a mistake."""
    random = np.random.default_rng(1)
    prompts, rate, repeats = 600, RISK * 1.02, 2000
    # half of the tested stages differ from threshold to threshold, the others are common to all
    common = random.binomial(prompts // 2, rate, size=(repeats, 1))
    errors = common + random.binomial(prompts // 2, rate, size=(repeats, 20))
    sequence = 0
    for row in errors.tolist():
        remaining = iter(row)

        def run(_: float, remaining: Iterator[int] = remaining) -> ThresholdResult:
            return ThresholdResult(prompts, next(remaining), prompts)

        sequence += certify(range(20), run).certified
    assert sequence / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)
    assert (errors <= errors_allowed(prompts)).any(1).mean() > 0.1


def test_the_grid_is_short_strictest_first_and_never_below_the_floor() -> None:
    grid = threshold_grid(made_stages(np.random.default_rng(2), 300), certify_prompts=2000)
    assert 1 < len(grid) <= GRID and grid == sorted(grid, reverse=True)
    assert min(grid) >= FLOOR


def test_the_whole_procedure_certifies_what_is_good_and_hardly_ever_what_is_bad() -> None:
    """Fit a grid on one draw, certify on another, look at the true risk of what was certified."""
    random = np.random.default_rng(3)
    truth = made_stages(random, 20_000, 0.001)
    certified, bad, repeats, prompts = 0, 0, 40, 800
    for _ in range(repeats):
        grid = threshold_grid(made_stages(random, 200, 0.001), certify_prompts=prompts)
        fresh = made_stages(random, prompts, 0.001)

        def run(threshold: float, fresh: FitStages = fresh) -> ThresholdResult:
            skipped = (fresh.survival >= threshold).reshape(prompts, 10)
            tested = np.flatnonzero(skipped.any(1))
            chosen = [
                10 * p + np.flatnonzero(skipped[p])[random_stage(str(p), int(skipped[p].sum()), 0)] for p in tested
            ]
            return ThresholdResult(len(tested), int((~fresh.passed[chosen]).sum()), prompts)

        found = certify(grid, run)
        if found.value is not None:
            certified += 1
            bad += (~truth.passed[truth.survival >= found.value]).mean() > RISK
    assert certified > 0.5 * repeats
    assert bad / repeats <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / repeats)


def test_without_a_stage_above_the_floor_there_is_nothing_to_test() -> None:
    low = FitStages(np.full(50, 0.5), np.ones(50, bool), np.arange(50), 50)
    assert threshold_grid(low, 1000) == []


def test_too_few_prompts_still_give_one_threshold_to_look_at() -> None:
    assert len(threshold_grid(made_stages(np.random.default_rng(4), 30), certify_prompts=30)) == 1


def test_the_random_stage_is_uniform_and_depends_on_the_prompt_alone() -> None:
    drawn = [random_stage(f"prompt-{i}", 7, seed=3) for i in range(7000)]
    assert drawn == [random_stage(f"prompt-{i}", 7, seed=3) for i in range(7000)]
    counts = np.bincount(drawn, minlength=7)
    assert len(counts) == 7 and abs(counts - 1000).max() < 150
    with pytest.raises(ValueError):
        random_stage("prompt", 0, 0)


# ---- temperatures ----------------------------------------------------------------------------------------


def made_rounds(random: np.random.Generator, rounds: int, scales: list[float]) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are off by a factor per slot, and cumulative outcomes drawn from the true probabilities."""
    true_NK = random.normal(1.5, 1.5, size=(rounds, len(scales)))
    accepted_NK = np.cumprod(random.random(true_NK.shape) < sigmoid(true_NK), axis=1)
    return true_NK * np.array(scales), accepted_NK


def test_temperature_scaling_recovers_known_temperatures_and_calibrates_the_product() -> None:
    random = np.random.default_rng(5)
    scales = [2.0, 0.5, 3.0, 1.0]
    logits, accepted = made_rounds(random, 40_000, scales)
    found = fit_temperatures(logits, accepted)
    assert found == pytest.approx(scales, rel=0.15)
    fresh_logits, fresh_accepted = made_rounds(random, 40_000, scales)
    raw, fitted = survivals(fresh_logits, [1.0]), survivals(fresh_logits, found)
    for slot in range(4):
        before = calibration_error(raw[:, slot], fresh_accepted[:, slot])
        after = calibration_error(fitted[:, slot], fresh_accepted[:, slot])
        assert after < 0.012 and after <= before + 0.002
    assert calibration_error(raw[:, 0], fresh_accepted[:, 0]) > 0.03  # the test would notice if nothing were fitted


def test_temperature_keeps_the_order_within_a_slot() -> None:
    random = np.random.default_rng(6)
    logits, accepted = made_rounds(random, 400, [2.5, 0.4])
    found = fit_temperatures(logits, accepted)
    assert all(0.2 <= temperature <= 5.0 for temperature in found)
    for slot, temperature in enumerate(found):
        scaled = sigmoid(logits[:, slot] / temperature)
        assert (np.argsort(scaled, kind="stable") == np.argsort(logits[:, slot], kind="stable")).all()
        assert auroc(scaled, accepted[:, slot]) == pytest.approx(auroc(logits[:, slot], accepted[:, slot]))


def test_too_few_rounds_leave_the_temperature_alone() -> None:
    random = np.random.default_rng(7)
    logits, accepted = made_rounds(random, 500, [3.0, 3.0])
    drafted = np.ones(logits.shape, bool)
    drafted[FEWEST_ROUNDS - 1 :, 1] = False
    found = fit_temperatures(logits, accepted, drafted)
    assert found[0] > 1.5 and found[1] == 1.0
    assert fit_temperatures(np.zeros((0, 3)), np.zeros((0, 3))) == [1.0, 1.0, 1.0]


def test_slots_beyond_the_fitted_ones_use_the_last_temperature() -> None:
    logits = np.array([[2.0, 2.0, 2.0]])
    assert survivals(logits, [1.0, 2.0])[0] == pytest.approx(np.cumprod(sigmoid([2.0, 1.0, 1.0])))


# ---- the pattern profile ---------------------------------------------------------------------------------


@given(coverage=st.floats(0.5, 0.99), seed=st.integers(0, 100))
@hypothesis_settings(max_examples=30, deadline=None)
def test_the_profile_holds_the_wanted_share_of_accepted_stages(coverage: float, seed: int) -> None:
    random = np.random.default_rng(seed)
    values = {"entropy": random.gamma(2.0, size=400), "locality": random.normal(size=400)}
    accepted = random.random(400) < 0.8
    pattern = fit_pattern(values, accepted, coverage)
    inside = inside_pattern(pattern, values)
    share = inside[accepted].mean()
    assert share == pytest.approx(pattern["coverage"]) and coverage <= share <= coverage + 0.05
    assert pattern["stages"] == accepted.sum()


def test_the_profile_rejects_what_lies_outside_and_what_is_not_a_number() -> None:
    values = {"entropy": np.linspace(1, 2, 100)}
    pattern = fit_pattern(values, np.ones(100, bool), 0.9)
    assert list(inside_pattern(pattern, {"entropy": np.array([1.5, 7.0, -7.0, np.nan])})) == [True, False, False, False]


def test_without_accepted_stages_the_pattern_layer_stops_nothing() -> None:
    pattern = fit_pattern({"entropy": np.ones(3)}, np.zeros(3, bool), 0.9)
    assert pattern["low"] is None and inside_pattern(pattern, {"entropy": np.array([0.0, 9.0])}).all()


# ---- judgements ------------------------------------------------------------------------------------------


def test_calibrated_probabilities_have_no_calibration_error_and_wrong_ones_their_distance() -> None:
    random = np.random.default_rng(8)
    p = random.random(60_000)
    y = random.random(60_000) < p
    assert calibration_error(p, y) < 0.01
    assert calibration_error(np.full(60_000, 0.9), y) == pytest.approx(0.9 - y.mean())
    assert sum(row["count"] for row in reliability(p, y)) == 60_000
    assert len(reliability(p[:45], y[:45])) == 2  # little data gives few bins, not noisy ones
    assert calibration_error([], []) is None and reliability([], []) == []


def test_the_calibration_error_is_that_of_the_reliability_table() -> None:
    random = np.random.default_rng(9)
    p, y = random.random(997), random.random(997) < 0.4
    table = reliability(p, y)
    expected = sum(row["count"] * abs(row["predicted"] - row["observed"]) for row in table) / 997
    assert calibration_error(p, y) == pytest.approx(expected)


def test_coverage_at_a_precision_by_hand() -> None:
    scores, outcomes = [0.9, 0.8, 0.7, 0.6, 0.5], [1, 1, 0, 1, 0]
    assert coverage_at(scores, outcomes, 1.0) == 0.4
    assert coverage_at(scores, outcomes, 0.75) == 0.8
    assert coverage_at([0.9, 0.9], [1, 0], 0.9) == 0.0  # equal scores pass together or not at all
    assert coverage_at([], []) is None
    curve = precision_coverage(scores, outcomes)
    assert [(point["coverage"], point["precision"]) for point in curve] == [
        (0.2, 1.0),
        (0.4, 1.0),
        (0.6, 2 / 3),
        (0.8, 0.75),
        (1.0, 0.6),
    ]


def test_judging_says_the_prior_and_what_a_constant_answer_would_reach() -> None:
    found = judge([0.9, 0.8, 0.3, 0.6], [1, 1, 0, 0])
    assert (found["prior"], found["constant_accuracy"], found["accuracy"]) == (0.5, 0.5, 0.75)
    assert found["balanced_accuracy"] == 0.75 and found["auroc"] == 1.0 and found["auprc_reject"] == 1.0
    one_class = judge([0.9, 0.8], [1, 1])
    assert one_class["auroc"] is None and one_class["balanced_accuracy"] is None and one_class["accuracy"] == 1.0
    assert judge([], [])["count"] == 0 and auprc_reject([0.1], [1]) is None


def test_the_difference_to_the_best_baseline_has_an_interval_over_prompts() -> None:
    random = np.random.default_rng(10)
    prompts = np.repeat(np.arange(60), 30)
    truth = random.normal(size=len(prompts))
    outcomes = random.random(len(prompts)) < sigmoid(2 * truth)
    good, poor = truth + random.normal(scale=0.5, size=len(prompts)), truth + random.normal(scale=2, size=len(prompts))
    found = compare_auroc(
        good, {"poor": poor, "noise": random.normal(size=len(prompts))}, outcomes, prompts, ["a"] * 60, draws=100
    )
    assert found["baseline"] == "poor" and found["ci95"][0] > 0
    assert found["ci95"][0] < found["difference"] < found["ci95"][1]
    same = compare_auroc(good, {"itself": good}, outcomes, prompts, ["a"] * 60, draws=20)
    assert same["difference"] == 0 and same["ci95"] == [0, 0]
    assert compare_auroc(good, {}, outcomes, prompts, ["a"] * 60)["difference"] is None
