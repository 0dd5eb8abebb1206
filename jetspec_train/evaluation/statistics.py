"""Intervals over prompts: the prompt is the unit that is resampled, never the token.

Tokens of one answer are not independent of each other, so an interval over tokens would be far too
narrow. Every figure here is a ratio of two sums over prompts (seconds per token, tokens per
forward), and one resample of prompts serves both methods of a comparison: that is what "paired"
means, and it removes the large differences between prompts from the interval.

Knows nothing of models: numbers in, numbers out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True)
class Estimate:
    """A figure with its interval; ``low`` and ``high`` are None where fewer than two prompts were measured."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> list[float] | None:
        return None if self.low is None or self.high is None else [self.low, self.high]


def resample_weights(strata: Sequence[object], draws: int, seed: int) -> np.ndarray:
    """How often each prompt is drawn in each resample: float64 ``[draws, prompts]``.

    Every stratum (domain) is resampled within itself, so that the mix of domains is the same in each
    resample and a figure over all domains does not vary with a mix that was fixed by design.
    """
    generator = np.random.default_rng(seed)
    weights = np.zeros((draws, len(strata)))
    labels = np.array([str(label) for label in strata])
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        weights[:, members] = generator.multinomial(len(members), np.full(len(members), 1 / len(members)), size=draws)
    return weights


def tail_probability(prompts: int, level: float = LEVEL) -> float:
    """The tail to cut on each side of the bootstrap distribution.

    The plain percentile interval is too narrow for few prompts (a dozen is common here). The expanded
    percentile interval widens it as Student's t does (Hesterberg, "What Teachers Should Know About the
    Bootstrap", 2015, section 4.3): ``Phi(-sqrt(n / (n - 1)) * t_{(1 - level) / 2, n - 1})``.
    """
    quantile = stats.t.ppf(1 - (1 - level) / 2, prompts - 1)
    return float(stats.norm.cdf(-math.sqrt(prompts / (prompts - 1)) * quantile))


def interval_of(samples: np.ndarray, prompts: int, level: float = LEVEL) -> tuple[float | None, float | None]:
    """Expanded percentile interval of bootstrap ``samples``; ``(None, None)`` below two prompts."""
    finite = samples[np.isfinite(samples)]
    if prompts < 2 or len(finite) == 0:
        return None, None
    tail = tail_probability(prompts, level)
    low, high = np.quantile(finite, [tail, 1 - tail])
    return float(low), float(high)


def ratio_of_sums(
    numerator: Sequence[float],
    denominator: Sequence[float],
    *,
    strata: Sequence[object] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Estimate:
    """``sum(numerator) / sum(denominator)`` over prompts, e.g. emitted tokens / target forwards = tau."""
    top, bottom = np.asarray(numerator, float), np.asarray(denominator, float)
    if len(top) == 0 or bottom.sum() == 0:
        return Estimate(None)
    weights = resample_weights(strata if strata is not None else [0] * len(top), draws, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = (weights @ top) / (weights @ bottom)
    low, high = interval_of(samples, len(top))
    return Estimate(float(top.sum() / bottom.sum()), low, high)


def speedup(
    baseline_seconds: Sequence[float],
    baseline_tokens: Sequence[float],
    seconds: Sequence[float],
    tokens: Sequence[float],
    *,
    strata: Sequence[object] | None = None,
    draws: int = 2000,
    seed: int = 0,
) -> Estimate:
    """How many times faster: ratio of total seconds per token, paired by prompt.

    Element i of every argument belongs to prompt i. Per token, because outputs may differ in length
    once rounding makes two runs part.
    """
    a, b = np.asarray(baseline_seconds, float), np.asarray(baseline_tokens, float)
    c, d = np.asarray(seconds, float), np.asarray(tokens, float)
    if not len(a) == len(b) == len(c) == len(d):
        raise ValueError(f"paired figures need one entry per prompt, got {len(a)}, {len(b)}, {len(c)}, {len(d)}")
    if len(a) == 0 or b.sum() == 0 or d.sum() == 0 or c.sum() == 0:
        return Estimate(None)
    weights = resample_weights(strata if strata is not None else [0] * len(a), draws, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = ((weights @ a) / (weights @ b)) / ((weights @ c) / (weights @ d))
    low, high = interval_of(samples, len(a))
    return Estimate(float((a.sum() / b.sum()) / (c.sum() / d.sum())), low, high)


def percentiles(values: Sequence[float], points: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    """``{"p50": ...}`` of ``values``; None each where there is nothing to measure."""
    if len(values) == 0:
        return {f"p{point}": None for point in points}
    return {f"p{point}": float(np.percentile(np.asarray(values, float), point)) for point in points}


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(np.asarray(values, float))) if len(values) else None
