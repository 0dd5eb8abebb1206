"""How good are probabilities that something is accepted? Ranking, calibration, and what they are worth at a precision.

Accuracy says little without the share of the larger class, so every summary here gives both; a score is judged beside
training-free ones on the same items (METHODS 4). Intervals resample prompts, never single tokens: the tokens of one
answer are not independent of each other.

Shapes: N judged items. ``outcomes`` are 1 for accepted and 0 for rejected. Knows nothing of models or files. A figure
that cannot be had (one class only, nothing judged) is None.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_train.evaluation.statistics import interval_of, resample

BINS = 15
PER_BIN = 20  # fewer items than this say nothing about a bin's frequency
PRECISION = 0.992  # of skipped checks, from the article that this project follows
CURVE_POINTS = 60


def reliability(probabilities: Any, outcomes: Any, bins: int = BINS) -> list[dict[str, float]]:
    """Predicted against observed frequency in bins of equal mass: ``[{"predicted", "observed", "count"}]``.

    There are never so many bins that one has fewer than ``PER_BIN`` items, so that little data gives a coarse table
    rather than a noisy one.
    """
    p, y = _pair(probabilities, outcomes)
    if not len(p):
        return []
    order = np.argsort(p, kind="stable")
    count = max(1, min(bins, len(p) // PER_BIN))
    return [
        {"predicted": float(p[part].mean()), "observed": float(y[part].mean()), "count": len(part)}
        for part in np.array_split(order, count)
    ]


def calibration_error(probabilities: Any, outcomes: Any, bins: int = BINS) -> float | None:
    """Expected calibration error: mean distance of predicted and observed frequency, bins of equal mass."""
    p, y = _pair(probabilities, outcomes)
    if not len(p):
        return None
    order = np.argsort(p, kind="stable")
    count = max(1, min(bins, len(p) // PER_BIN))
    # Sums instead of means: sum over bins of |sum(p) - sum(y)| / N is the weighted mean of the distances.
    starts = np.array([part[0] for part in np.array_split(np.arange(len(p)), count)])
    return float(np.abs(np.add.reduceat((p - y)[order], starts)).sum() / len(p))


def brier_score(probabilities: Any, outcomes: Any) -> float | None:
    p, y = _pair(probabilities, outcomes)
    return float(np.square(p - y).mean()) if len(p) else None


def auroc(scores: Any, outcomes: Any, weights: Any = None) -> float | None:
    """Area under the ROC curve: P(an accepted item scores higher than a rejected one)."""
    from sklearn.metrics import roc_auc_score

    s, y = _pair(scores, outcomes)
    if not _both_classes(y, weights):
        return None
    return float(roc_auc_score(y, s, sample_weight=weights))


def auprc_reject(scores: Any, outcomes: Any) -> float | None:
    """Average precision of finding the rejected items by a low score; a random score gives their share."""
    from sklearn.metrics import average_precision_score

    s, y = _pair(scores, outcomes)
    return float(average_precision_score(1 - y, -s)) if _both_classes(y) else None


def precision_coverage(scores: Any, outcomes: Any, points: int = CURVE_POINTS) -> list[dict[str, float]]:
    """What share of the items lies above a threshold, and what share of those is accepted, strictest first.

    Items of equal score are above a threshold together. At most ``points`` thresholds are kept, evenly by coverage.
    """
    coverage, precision, threshold = _curve(scores, outcomes)
    if not len(coverage):
        return []
    kept = np.unique(np.linspace(0, len(coverage) - 1, points).round().astype(int))
    return [
        {"threshold": float(threshold[i]), "coverage": float(coverage[i]), "precision": float(precision[i])}
        for i in kept
    ]


def coverage_at(scores: Any, outcomes: Any, precision: float = PRECISION) -> float | None:
    """The largest share of items that a threshold can pass with at least this share of accepted ones among them."""
    coverage, reached, _ = _curve(scores, outcomes)
    if not len(coverage):
        return None
    good = np.flatnonzero(reached >= precision)
    return float(coverage[good[-1]]) if len(good) else 0.0


def _curve(scores: Any, outcomes: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    s, y = _pair(scores, outcomes)
    order = np.argsort(-s, kind="stable")
    s, y = s[order], y[order]
    last = np.flatnonzero(np.append(s[1:] != s[:-1], True)) if len(s) else np.zeros(0, dtype=int)
    passed = np.cumsum(y)[last] if len(s) else np.zeros(0)
    return (last + 1) / max(1, len(s)), passed / (last + 1), s[last]


def judge(probabilities: Any, outcomes: Any, *, operating_point: float = 0.5) -> dict[str, Any]:
    """The figures of one population: prior, the better constant answer, accuracy, ranking, calibration."""
    p, y = _pair(probabilities, outcomes)
    if not len(p):
        names = ("prior", "constant_accuracy", "accuracy", "balanced_accuracy", "auroc", "auprc_reject", "ece", "brier")
        return {"count": 0, **dict.fromkeys((*names, "coverage_at_992"))}
    prior, said = float(y.mean()), p >= operating_point
    right = said == (y == 1)
    by_class = [float(right[y == value].mean()) for value in (0, 1) if (y == value).any()]
    return {
        "count": len(p),
        "prior": prior,
        "constant_accuracy": max(prior, 1 - prior),
        "accuracy": float(right.mean()),
        "balanced_accuracy": sum(by_class) / 2 if len(by_class) == 2 else None,
        "auroc": auroc(p, y),
        "auprc_reject": auprc_reject(p, y),
        "ece": calibration_error(p, y),
        "brier": brier_score(p, y),
        "coverage_at_992": coverage_at(p, y),
    }


def compare_auroc(
    scores: Any,
    baselines: Mapping[str, Any],
    outcomes: Any,
    prompts: Sequence[int],
    strata: Sequence[object],
    *,
    draws: int = 500,
    seed: int = 0,
) -> dict[str, Any]:
    """AUROC of ``scores`` minus that of the best baseline, with a 95 % interval over prompts.

    ``prompts`` [N]: index of each item's prompt into ``strata`` (the prompts' domains). The best baseline is chosen on
    the whole data, once; in each resample the difference is taken to that same one.
    """
    s, y = _pair(scores, outcomes)
    of = {name: auroc(values, y) for name, values in baselines.items()}
    ranked = {name: value for name, value in of.items() if value is not None}
    own = auroc(s, y)
    if own is None or not ranked:
        return {"baseline": None, "difference": None, "ci95": None}
    best = max(ranked, key=lambda name: ranked[name])
    weights, degrees = resample(strata, draws, seed)
    index = np.asarray(prompts, dtype=int)
    other = np.asarray(baselines[best], dtype=float)
    differences = []
    for drawn in weights:
        w = drawn[index]
        first, second = auroc(s, y, w), auroc(other, y, w)
        differences.append(np.nan if first is None or second is None else first - second)
    low, high = interval_of(np.array(differences), degrees)
    return {
        "baseline": best,
        "difference": own - ranked[best],
        "ci95": None if low is None or high is None else [low, high],
    }


def _pair(scores: Any, outcomes: Any) -> tuple[np.ndarray, np.ndarray]:
    s, y = np.asarray(scores, dtype=float).ravel(), np.asarray(outcomes, dtype=float).ravel()
    if len(s) != len(y):
        raise ValueError(f"{len(s)} scores for {len(y)} outcomes")
    return s, y


def _both_classes(y: np.ndarray, weights: Any = None) -> bool:
    counted = y if weights is None else y[np.asarray(weights) > 0]
    return bool(len(counted)) and bool((counted == 0).any()) and bool((counted == 1).any())
