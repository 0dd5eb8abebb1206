"""Intervals over prompts: the prompt is the unit that is resampled, never the token.

Tokens of one answer are not independent of each other, so an interval over tokens would be far too
narrow. Every figure here is a ratio of two sums over prompts (seconds per token, tokens per
forward), and one resample of prompts serves both methods of a comparison: that is what "paired"
means, and it removes the large differences between prompts from the interval.

Knows nothing of models: numbers in, numbers out.
"""

from __future__ import annotations

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


def resample(strata: Sequence[object], draws: int, seed: int) -> tuple[np.ndarray, int]:
    """How much each prompt counts in each resample, float64 ``[draws, prompts]``, and the degrees of freedom.

    Every stratum (domain) is resampled within itself, so that the mix of domains is the same in each resample and a
    figure over all domains does not vary with a mix that was fixed by design. Of a stratum's n prompts n - 1 are drawn
    with replacement, each counting n / (n - 1): the variance is then unbiased even for the few prompts per domain that
    are common here, where drawing n would understate it by (n - 1) / n (Rao and Wu, "Resampling Inference With
    Complex Survey Data", 1988). If a stratum has a single prompt, all prompts are resampled as one stratum.

    The degrees of freedom are prompts - strata; 0 says that there is no interval.
    """
    labels = np.array([str(label) for label in strata])
    if any(np.count_nonzero(labels == label) < 2 for label in np.unique(labels)):
        labels = np.full(len(labels), "all")
    weights = np.ones((draws, len(labels)))
    if len(labels) < 2:
        return weights, 0
    generator = np.random.default_rng(seed)
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        count = len(members)
        drawn = generator.multinomial(count - 1, np.full(count, 1 / count), size=draws)
        weights[:, members] = drawn * (count / (count - 1))
    return weights, len(labels) - len(np.unique(labels))


def interval_of(samples: np.ndarray, degrees: int, level: float = LEVEL) -> tuple[float | None, float | None]:
    """Percentile interval of bootstrap ``samples``, widened as Student's t is; ``(None, None)`` without degrees.

    The plain percentile interval has normal tails and is too narrow for a dozen prompts. The expanded one cuts
    ``Phi(-t)`` instead of 2.5 % on each side, t the quantile of Student's distribution (Hesterberg, "What Teachers
    Should Know About the Bootstrap", 2015, section 4.3; the bias in variance is already mended by ``resample``).
    """
    finite = samples[np.isfinite(samples)]
    if degrees < 1 or len(finite) == 0:
        return None, None
    tail = float(stats.norm.cdf(-stats.t.ppf(1 - (1 - level) / 2, degrees)))
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
    weights, degrees = resample(strata if strata is not None else [0] * len(top), draws, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = (weights @ top) / (weights @ bottom)
    low, high = interval_of(samples, degrees)
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
    weights, degrees = resample(strata if strata is not None else [0] * len(a), draws, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = ((weights @ a) / (weights @ b)) / ((weights @ c) / (weights @ d))
    low, high = interval_of(samples, degrees)
    return Estimate(float((a.sum() / b.sum()) / (c.sum() / d.sum())), low, high)


def percentiles(values: Sequence[float], points: Sequence[int] = (50, 90, 99)) -> dict[str, float | None]:
    """``{"p50": ...}`` of ``values``; None each where there is nothing to measure."""
    if len(values) == 0:
        return {f"p{point}": None for point in points}
    return {f"p{point}": float(np.percentile(np.asarray(values, float), point)) for point in points}


def median(values: Sequence[float]) -> float | None:
    """The median, or None of nothing."""
    return float(np.median(np.asarray(values, float))) if len(values) else None
