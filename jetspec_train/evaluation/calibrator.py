"""From records of shadow runs to a ``Calibration``: the steps of stage=calibrate that need no model and no file.

``rounds`` are chain rounds and ``stages`` are screened stages, as evaluation/shadow.py describes them. What is fitted
comes from the fit split, what is reported of it from the certify split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_train.decoding.calibration import HEADS, PatternProfile, Threshold
from jetspec_train.decoding.patterns import STATISTICS
from jetspec_train.evaluation.calibration import (
    Certificate,
    FitStages,
    ThresholdResult,
    errors_allowed,
    fit_pattern,
    fit_temperatures,
    inside_pattern,
    random_stage,
    sigmoid,
    survivals,
    upper_bound,
)
from jetspec_train.evaluation.judgement import auprc_reject, auroc, brier_score, calibration_error, reliability

Round = Mapping[str, Any]


# ---- chain rounds ----------------------------------------------------------------------------------------


def round_arrays(rounds: Sequence[Round], head: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits of a head, whether the chain was accepted up to each slot, and whether that is known; each [N, K].

    Rounds in which the head gave no number are left out; slots that do not exist are not known.
    """
    usable = [r for r in rounds if all(value is not None for value in r[head])]
    slots = max((len(r[head]) for r in usable), default=0)
    logits, accepted = np.zeros((len(usable), slots)), np.zeros((len(usable), slots))
    known = np.zeros((len(usable), slots), dtype=bool)
    for row, record in enumerate(usable):
        logits[row, : len(record[head])] = record[head]
        accepted[row, : record["accepted"]] = 1
        known[row, : record["known"]] = True
    return logits, accepted, known


def fit_heads(rounds: Sequence[Round]) -> dict[str, list[float]]:
    """Temperatures of each head that gave numbers, one per slot."""
    fitted = {}
    for head in HEADS:
        logits, accepted, known = round_arrays(rounds, head)
        if len(logits):
            fitted[head] = fit_temperatures(logits, accepted, known)
    return fitted


def quality(rounds: Sequence[Round], temperatures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """What calibration did, on rounds that it has not seen: overall, per position and per domain.

    ``ece_before``, ``ece_after``, ``brier``: of the cumulative survival over all slots whose fate is known. ``auroc``,
    ``auprc_reject``, ``prior``: of single slots offered after accepted ones, whose order calibration does not change
    within a position.
    """
    by_domain = {domain: [r for r in rounds if r["domain"] == domain] for domain in _domains(rounds)}
    deepest = max((len(r["correctness"]) for r in rounds), default=0)
    return {
        "rounds": len(rounds),
        "prompts": len({r["prompt"] for r in rounds}),
        "overall": _figures(rounds, temperatures["correctness"]) if rounds else None,
        "positions": [_figures(rounds, temperatures["correctness"], slot) for slot in range(deepest)],
        "domains": {name: _figures(own, temperatures["correctness"]) for name, own in by_domain.items()},
        "confidence": _figures(rounds, temperatures["confidence"], head="confidence")
        if rounds and "confidence" in temperatures
        else None,
    }


def _figures(
    rounds: Sequence[Round], temperatures: Sequence[float], slot: int | None = None, head: str = "correctness"
) -> dict[str, Any]:
    """Figures over all slots, or over one."""
    logits, accepted, known = round_arrays(rounds, head)
    judged = known & (np.pad(accepted, ((0, 0), (1, 0)), constant_values=1)[:, :-1] == 1)
    place = np.ones(known.shape, dtype=bool)
    if slot is not None:
        place[:] = np.arange(known.shape[1]) == slot
    before, after = survivals(logits, [1.0]), survivals(logits, temperatures)
    conditional = sigmoid(logits / _per_slot(temperatures, logits.shape[1]))
    known, judged = known & place, judged & place
    return {
        "count": int(known.sum()),
        "judged": int(judged.sum()),
        "prior": float(accepted[judged].mean()) if judged.any() else None,
        "ece_before": calibration_error(before[known], accepted[known]),
        "ece_after": calibration_error(after[known], accepted[known]),
        "brier": brier_score(after[known], accepted[known]),
        "auroc": auroc(conditional[judged], accepted[judged]),
        "auprc_reject": auprc_reject(conditional[judged], accepted[judged]),
    }


def reliability_tables(rounds: Sequence[Round], temperatures: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """Predicted against observed survival, before and after calibration."""
    logits, accepted, known = round_arrays(rounds, "correctness")
    return {
        name: reliability(survivals(logits, scale)[known], accepted[known])
        for name, scale in (("before", [1.0]), ("after", temperatures["correctness"]))
    }


def _per_slot(temperatures: Sequence[float], slots: int) -> np.ndarray:
    return np.array([temperatures[min(slot, len(temperatures) - 1)] for slot in range(slots)])


# ---- stages ----------------------------------------------------------------------------------------------


def statistics_of(stages: Sequence[Mapping[str, Any]]) -> dict[str, np.ndarray]:
    """Attention statistics by name, [S]; NaN where a stage has none."""
    return {
        name: np.array([np.nan if (s["statistics"] or {}).get(name) is None else s["statistics"][name] for s in stages])
        for name in STATISTICS
    }


def pattern_of(stages: Sequence[Mapping[str, Any]], coverage: float) -> PatternProfile | None:
    """The profile of the accepted stages; None where there are none to fit it on."""
    found = fit_pattern(statistics_of(stages), [s["passed"] for s in stages], coverage)
    if found["low"] is None:
        return None
    return PatternProfile(tuple(found["statistics"]), tuple(found["low"]), tuple(found["high"]), found["coverage"])


def fit_stages(stages: Sequence[Mapping[str, Any]], pattern: PatternProfile | None, prompts: int) -> FitStages:
    """The stages that a threshold could let pass: those whose pattern is usual, with every stage before them in their
    round. A stage after one that the target refused is left out (its threshold would never have been asked)."""
    usual = np.ones(len(stages), dtype=bool)
    if pattern is not None:
        usual = inside_pattern(vars(pattern), statistics_of(stages))
    kept, broken = [], None
    for index, stage in enumerate(stages):
        place = (stage["prompt"], stage["round"])
        if place == broken:
            continue
        if usual[index]:
            kept.append(index)
        if not usual[index] or not stage["passed"]:
            broken = place
    number = {prompt: i for i, prompt in enumerate(dict.fromkeys(stages[i]["prompt"] for i in kept))}
    return FitStages(
        survival=np.array([stages[i]["lowest_survival"] for i in kept], dtype=float),
        passed=np.array([stages[i]["passed"] for i in kept], dtype=bool),
        prompt=np.array([number[stages[i]["prompt"]] for i in kept], dtype=int),
        prompts=prompts,
    )


def count_errors(
    batches: Iterable[tuple[Sequence[str], Sequence[Mapping[str, Any]]]],
    *,
    prompts: int,
    seed: int,
    risk: float,
    confidence: float,
    note: Callable[[int, int], None] = lambda tested, errors: None,
) -> ThresholdResult:
    """One random skipped stage of each prompt against the target's verdict.

    ``batches``: (ids of the prompts, their screened stages), taken one after another and not beyond the point where the
    errors exclude a certificate even if all remaining prompts had none (where there are enough prompts for one at all).
    ``prompts``: how many there are in all.
    """
    tested = errors = ran = 0
    domains: dict[str, list[int]] = {}
    stopped, possible = False, errors_allowed(prompts, risk, confidence) >= 0
    for ids, stages in batches:
        ran += len(ids)
        own: dict[str, list[Mapping[str, Any]]] = {}
        for stage in stages:
            own.setdefault(stage["prompt"], []).append(stage)
        for prompt, several in own.items():
            stage = several[random_stage(prompt, len(several), seed)]
            wrong = not stage["passed"]
            counts = domains.setdefault(stage["domain"], [0, 0])
            tested, errors = tested + 1, errors + wrong
            counts[0] += 1
            counts[1] += wrong
        note(tested, errors)
        if possible and ran < prompts and errors > errors_allowed(tested + prompts - ran, risk, confidence):
            stopped = True
            break
    return ThresholdResult(tested, errors, ran, domains, stopped)


def threshold_of(
    found: Certificate, *, risk: float, confidence: float, stages: int, mix: Mapping[str, int]
) -> Threshold:
    """For ``calibration.json``."""
    test = found.test
    return Threshold(
        value=found.value,
        certified=found.certified,
        risk=risk,
        confidence=confidence,
        prompts=test.tested if test is not None else 0,
        errors=test.errors if test is not None else 0,
        needed=found.needed,
        stage_length=stages,
        grid=found.rows,
        mix=dict(mix),
    )


def domain_table(test: ThresholdResult | None, confidence: float) -> dict[str, dict[str, Any]]:
    """Per domain what was tested and the bound that would follow from it alone; no guarantee, several are looked at."""
    if test is None:
        return {}
    return {
        domain: {"tested": tested, "errors": errors, "bound": upper_bound(errors, tested, confidence)}
        for domain, (tested, errors) in sorted(test.domains.items())
    }


def _domains(records: Iterable[Mapping[str, Any]]) -> list[str]:
    return sorted({record["domain"] for record in records})


# ---- words -----------------------------------------------------------------------------------------------


def describe_threshold(found: Certificate, risk: float, certify_prompts: int) -> str:
    """What was certified, or how much is missing, in one sentence."""
    test, limit = found.test, f"{100 * (1 - risk):.1f} %"
    if test is None or not test.tested:
        return (
            f"no threshold can be certified: no stage's survival reached 0.85 in a prompt of the certify split "
            f"({certify_prompts} prompts). At least {found.needed} prompts with such a stage are needed"
        )
    counts = f"{test.errors} wrong in {test.tested} prompts with a skipped stage (of {test.prompts} run)"
    if found.certified:
        return f"threshold {found.value:.4f} certified: {limit} of the skipped checks would have passed; {counts}"
    lead = f"no threshold is certified for {limit} at {found.rows[0]['threshold']:.4f}: {counts}"
    if found.at_this_rate is None:
        return f"{lead}; more prompts would not help at this rate of errors, a better verifier would"
    return (
        f"{lead}. With as many errors {found.needed} prompts would be needed, about {found.at_this_rate} if errors "
        f"keep coming at this rate; there were {certify_prompts}"
    )
