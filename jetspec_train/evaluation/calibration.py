"""From recorded rounds to numbers that may be acted on: temperatures, a certified threshold, the usual pattern.

Pure science (METHODS 9): arrays in, numbers out; stages/calibrate.py runs the decoder and writes the file.

* Sequential temperature scaling (DSpark paper, section 3.2.1): slot by slot, the temperature that makes the *product*
  up to this slot agree with how often the prefix was accepted.
* A threshold with a guarantee: a short grid is chosen on the fit split; on the certify split it is tested from the
  strictest on, each threshold with a one-sided Clopper-Pearson bound, and the first failure ends it (fixed-sequence
  testing, so that the chance of certifying anything bad stays at 5 % however long the grid is).
* The pattern profile: between which values the draft's attention statistics of accepted stages usually lie.

Shapes: N rounds, K slots, S stages.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetspec_train.evaluation.judgement import calibration_error

RISK, CONFIDENCE = 0.008, 0.95  # 99.2 % of the skipped checks would have passed
GRID = 20  # thresholds at most
FLOOR = 0.85  # no lower threshold is used at run time
HOPELESS = 0.01  # a threshold whose chance of passing is lower ends the grid
TEMPERATURES = (0.2, 5.0)  # a factor beyond these would say that the head is wrong, not that its scale is
FEWEST_ROUNDS = 40  # below it a slot keeps temperature 1


# ---- temperatures ----------------------------------------------------------------------------------------


def sigmoid(logits: Any) -> np.ndarray:
    return 1.0 / (1.0 + np.exp(-np.clip(np.asarray(logits, dtype=float), -60.0, 60.0)))


def fit_temperatures(logits_NK: Any, accepted_NK: Any, drafted_NK: Any | None = None) -> list[float]:
    """One temperature per slot, left to right, each minimising the calibration error of the product up to its slot.

    ``logits``: of "slot k is accepted given that the slots before it were"; ``accepted``: whether slots 0..k all were
    (so a row never rises again after its first 0); ``drafted``: bool, the slots that exist (default: all). A slot with
    fewer than ``FEWEST_ROUNDS`` rounds, or that 1.0 fits as well as anything, keeps 1.0.
    """
    logits_NK = np.asarray(logits_NK, dtype=float)
    accepted_NK = np.asarray(accepted_NK, dtype=float)
    drafted_NK = np.ones(logits_NK.shape, dtype=bool) if drafted_NK is None else np.asarray(drafted_NK, dtype=bool)
    temperatures: list[float] = []
    product_N = np.ones(len(logits_NK))
    for slot in range(logits_NK.shape[1]):
        rows = drafted_NK[:, slot]
        temperature = 1.0
        if rows.sum() >= FEWEST_ROUNDS:
            temperature = _best_temperature(logits_NK[rows, slot], product_N[rows], accepted_NK[rows, slot])
        temperatures.append(temperature)
        product_N = product_N * sigmoid(logits_NK[:, slot] / temperature)
    return temperatures


def _best_temperature(logits: np.ndarray, product: np.ndarray, accepted: np.ndarray) -> float:
    """The minimum over a logarithmic grid, looked at more closely twice; ties go to the value nearest to 1."""

    def error(temperature: float) -> float:
        found = calibration_error(product * sigmoid(logits / temperature), accepted)
        return math.inf if found is None else found

    low, high = (math.log(bound) for bound in TEMPERATURES)
    best = (error(1.0), 0.0, 0.0)  # error, distance from 1, log of the temperature
    for _ in range(3):
        for place in np.linspace(low, high, 25):
            best = min(best, (error(math.exp(place)), abs(float(place)), float(place)))
        step = (high - low) / 24
        low, high = max(low, best[2] - step), min(high, best[2] + step)
    return math.exp(best[2])


def survivals(logits_NK: Any, temperatures: Sequence[float]) -> np.ndarray:
    """Cumulative products [N, K] of the calibrated probabilities; deeper slots use the last temperature."""
    logits_NK = np.asarray(logits_NK, dtype=float)
    scale = np.asarray([*temperatures][: logits_NK.shape[1]] or [1.0], dtype=float)
    scale = np.pad(scale, (0, max(0, logits_NK.shape[1] - len(scale))), mode="edge")
    return np.cumprod(sigmoid(logits_NK / scale), axis=1)


# ---- the threshold ---------------------------------------------------------------------------------------


@functools.cache
def upper_bound(errors: int, tested: int, confidence: float = CONFIDENCE) -> float:
    """One-sided Clopper-Pearson bound: with this confidence the true error rate is at most the result."""
    from scipy.stats import beta

    if not 0 <= errors <= tested:
        raise ValueError(f"{errors} errors in {tested} tests")
    return 1.0 if errors == tested else float(beta.ppf(confidence, errors + 1, tested - errors))


def trials_needed(errors: int, risk: float = RISK, confidence: float = CONFIDENCE) -> int:
    """The fewest trials that certify ``risk`` with this many errors among them (risk 0.8 %: 373, 592, 785, ...)."""
    low, high = errors, max(1, errors)
    while upper_bound(errors, high, confidence) > risk:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if upper_bound(errors, middle, confidence) > risk else (low, middle)
    return high


@functools.cache
def errors_allowed(tested: int, risk: float = RISK, confidence: float = CONFIDENCE) -> int:
    """How many errors this many trials may have and still certify ``risk``; -1 where not even none would do."""
    allowed = -1
    while allowed < tested and upper_bound(allowed + 1, tested, confidence) <= risk:
        allowed += 1
    return allowed


def trials_at_rate(rate: float, risk: float = RISK, confidence: float = CONFIDENCE) -> int | None:
    """How many trials would certify ``risk`` if errors keep coming at ``rate``; None if no number would."""
    if rate >= risk:
        return None
    trials = trials_needed(0, risk, confidence)
    while True:
        wanted = trials_needed(math.ceil(rate * trials), risk, confidence)
        if wanted <= trials:
            return trials
        trials = wanted


@dataclass(frozen=True)
class FitStages:
    """Stages of the fit split that a threshold could let pass, S of them.

    ``survival`` [S]: the lowest survival that had to pass for the stage to be skipped (of the stage and of those before
    it in its round); ``passed`` [S]: the target agrees with every token of it; ``prompt`` [S]: index of its prompt.
    Stages that the pattern layer stops are left out; ``prompts``: how many prompts were run.
    """

    survival: np.ndarray
    passed: np.ndarray
    prompt: np.ndarray
    prompts: int


def threshold_grid(
    stages: FitStages,
    certify_prompts: int,
    *,
    risk: float = RISK,
    confidence: float = CONFIDENCE,
    floor: float = FLOOR,
    size: int = GRID,
) -> list[float]:
    """At most ``size`` thresholds to test on the certify split, strictest first, from the fit split alone.

    The first is the one with the best chance of passing: stricter ones leave too few tested prompts, looser ones too
    many errors. The others follow evenly by the share of stages that they skip, down to ``floor`` or to where passing
    is hopeless. Empty where no stage reaches ``floor``.
    """
    eligible = np.sort(stages.survival[stages.survival >= floor])[::-1]
    if not len(eligible) or not stages.prompts:
        return []
    places = np.unique(np.linspace(0, len(eligible) - 1, min(len(eligible), 200)).round().astype(int))
    candidates = [*np.unique(eligible[places])[::-1], floor]
    chances = [_chance(stages, threshold, certify_prompts, risk, confidence) for threshold in candidates]
    # With too little data nothing passes, and every chance is 0: then the strictest that all prompts reach is tested.
    start = int(np.argmax(chances)) if max(chances) > 0 else _most_prompts(stages, candidates)
    following = [i for i in range(start + 1, len(candidates)) if chances[i] >= HOPELESS]
    kept = [start]
    if following and size > 1:
        shown = np.unique(np.linspace(0, len(following) - 1, min(size - 1, len(following))).round().astype(int))
        kept += [following[i] for i in shown]
    return [float(candidates[i]) for i in kept]


def _chance(stages: FitStages, threshold: float, prompts: int, risk: float, confidence: float) -> float:
    """Chance that ``threshold`` passes with ``prompts`` prompts, if the fit split's rates are the true ones."""
    from scipy.stats import binom

    skipped = stages.survival >= threshold
    tested = int(prompts * len(np.unique(stages.prompt[skipped])) / stages.prompts)
    allowed = errors_allowed(tested, risk, confidence)
    if allowed < 0:
        return 0.0
    errors = int((~stages.passed[skipped].astype(bool)).sum())
    rate = (errors + 0.5) / (int(skipped.sum()) + 1)  # no errors in few stages is not a rate of nought
    return float(binom.cdf(allowed, tested, rate))


def _most_prompts(stages: FitStages, candidates: Sequence[float]) -> int:
    reached = [len(np.unique(stages.prompt[stages.survival >= threshold])) for threshold in candidates]
    return int(np.argmax(reached))


@dataclass(frozen=True)
class ThresholdResult:
    """One threshold on the certify split. ``domains``: {domain: [tested, errors]}. ``prompts``: how many were run."""

    tested: int
    errors: int
    prompts: int
    domains: Mapping[str, Sequence[int]] = field(default_factory=dict)
    stopped: bool = False  # the errors so far already excluded a certificate, so the rest was not run


@dataclass(frozen=True)
class Certificate:
    """The result of fixed-sequence testing.

    ``value``: the last threshold that passed, None if none did. ``test``: of that threshold, of the first one where
    none passed, None where there was none to test. ``needed``: prompts of the same mix that would certify the threshold
    of ``test`` if its errors stayed as many as they are. ``at_this_rate``: the same if errors keep coming at their
    rate, None where no number of prompts would do.
    """

    value: float | None
    rows: list[dict[str, Any]]
    test: ThresholdResult | None
    needed: int
    at_this_rate: int | None

    @property
    def certified(self) -> bool:
        return self.value is not None


def certify(
    grid: Sequence[float],
    run: Callable[[float], ThresholdResult],
    *,
    risk: float = RISK,
    confidence: float = CONFIDENCE,
) -> Certificate:
    """Test thresholds in the given order and stop at the first failure; the last that passed is certified.

    ``run(threshold)``: the policy itself on the certify split at this threshold; each prompt gives one random skipped
    stage (``random_stage``), so that the tests of one threshold are independent of each other.
    """
    value, rows = None, []
    last: ThresholdResult | None = None
    first: ThresholdResult | None = None
    for threshold in grid:
        test = run(threshold)
        bound = upper_bound(test.errors, test.tested, confidence)
        passed = bound <= risk and not test.stopped
        rows.append(
            {
                "threshold": float(threshold),
                "tested": test.tested,
                "errors": test.errors,
                "prompts": test.prompts,
                "bound": bound,
                "passed": passed,
            }
        )
        first = first or test
        if not passed:
            break
        value, last = float(threshold), test
    decisive = last or first
    tested, errors = (decisive.tested, decisive.errors) if decisive is not None else (0, 0)
    trials = trials_at_rate(errors / tested, risk, confidence) if tested else None
    share = (
        tested / decisive.prompts if decisive is not None and tested else 1.0
    )  # of the prompts, those with a stage to test
    return Certificate(
        value=value,
        rows=rows,
        test=decisive,
        needed=math.ceil(trials_needed(errors, risk, confidence) / share),
        at_this_rate=None if trials is None else math.ceil(trials / share),
    )


def random_stage(prompt_id: str, stages: int, seed: int) -> int:
    """Which of a prompt's skipped stages is tested: uniform, from the prompt's id alone, never from outcomes.

    Raises ValueError for a prompt without stages.
    """
    if stages < 1:
        raise ValueError("a prompt without skipped stages cannot be tested")
    digest = hashlib.blake2b(f"stage:{seed}:{prompt_id}".encode(), digest_size=8).digest()
    return int(int.from_bytes(digest, "big") / 2**64 * stages)


# ---- the pattern layer -----------------------------------------------------------------------------------


def fit_pattern(statistics: Mapping[str, Any], accepted: Any, coverage: float) -> dict[str, Any]:
    """The box of low and high quantiles that holds ``coverage`` of the accepted stages, all statistics at once.

    ``statistics``: name -> values [S]; ``accepted`` [S]: the stages to describe. Each statistic is cut at the same
    quantile on both sides, the narrowest with which the share inside reaches ``coverage``; NaN never lies inside.
    """
    names = list(statistics)
    chosen = np.asarray(accepted, dtype=bool)
    table = np.array([np.asarray(statistics[name], dtype=float)[chosen] for name in names]).T  # [S, names]
    table = table[np.isfinite(table).all(1)] if table.size else np.zeros((0, len(names)))
    if not len(table):
        return {"statistics": names, "low": None, "high": None, "coverage": None, "stages": 0}

    def box(tail: float) -> tuple[np.ndarray, np.ndarray, float]:
        low, high = np.quantile(table, [tail, 1 - tail], axis=0, method="closest_observation")
        return low, high, float(((table >= low) & (table <= high)).all(1).mean())

    few, many = 0.0, 0.5
    for _ in range(30):
        tail = (few + many) / 2
        few, many = (tail, many) if box(tail)[2] >= coverage else (few, tail)
    low, high, share = box(few)
    return {
        "statistics": names,
        "low": [float(value) for value in low],
        "high": [float(value) for value in high],
        "coverage": share,
        "stages": len(table),
    }


def inside_pattern(pattern: Mapping[str, Any], statistics: Mapping[str, Any]) -> np.ndarray:
    """Which stages [S] lie inside the profile; all of them where no profile could be fitted."""
    columns = [np.asarray(statistics[name], dtype=float) for name in pattern["statistics"]]
    if pattern["low"] is None:
        return np.ones(len(columns[0]) if columns else 0, dtype=bool)
    inside = np.ones(len(columns[0]), dtype=bool)
    for values, low, high in zip(columns, pattern["low"], pattern["high"]):
        inside &= (values >= low) & (values <= high)
    return inside
