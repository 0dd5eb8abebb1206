"""The adaptive scheduler: how many drafted nodes are sent, and how many tokens may wait (METHODS 10).

Per round the tree size maximises (1 + sum of survivals of the kept nodes) / (t_draft + t_verify(n)). Survivals are
corrected online by the running pass rate per depth, so that a change of domain changes tree size and pending tokens
within a few rounds. Utilisation of the machine ([S]: below 70 % more, above 90 % less) moves only an upper bound.

Numbers in, numbers out: nothing here measures anything or knows of trees, models or devices.
Shapes: n nodes of a tree, k depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from jetspec_train.decoding.cost_profile import CostProfile

SMALLEST_TREE = 3  # [S]: at least three candidates
# Weight of the past per round, and observations' worth of trust in what was predicted. Chosen on simulated changes of
# domain: a longer memory was slower to follow and gained no speed before the change.
MEMORY = 0.75
PRIOR = 2.0
LARGEST_FACTOR = 4.0  # the correction of a survival stays within [1/4, 4]
MOST_RELIEF = 4  # so that a machine that was busy for hours recovers in seconds
WORTH_WAITING = 0.5  # tokens may wait as long as they are more likely kept than not


def first_nodes(units: int, largest: int) -> int:
    """Initial tree size: 1.5 x the machine's units (SMs, or cores), within [3, largest] ([S])."""
    return max(min(SMALLEST_TREE, largest), min(largest, round(1.5 * units)))


class PassRates:
    """Running pass rate per depth, and its ratio to what was predicted.

    Every round forgets a part of all depths, so that a depth which is no longer reached goes back to what the depth
    above it says, not to what it was in another domain.
    """

    def __init__(self, memory: float = MEMORY, prior: float = PRIOR) -> None:
        self._memory, self._prior = memory, prior
        self._predicted: list[float] = []
        self._passed: list[float] = []
        self._seen: list[float] = []

    def note(self, depth: int, predicted: float, passed: bool) -> None:
        """One decision at ``depth``: the probability predicted, and what came of it. Depth 0 begins a round."""
        kinds = (self._predicted, self._passed, self._seen)
        new = (min(1.0, predicted) if math.isfinite(predicted) else 0.0, float(passed), 1.0)
        for values, value in zip(kinds, new):
            values.extend([0.0] * (depth + 1 - len(values)))
            if depth == 0:
                values[:] = [self._memory * old for old in values]
            values[depth] += value

    def rate(self, depth: int) -> float:
        """Share of decisions at this depth that passed, at least 1/4; that of the depth above where few were seen, at
        first 1."""
        return self._ratios(depth, self._seen)

    def factor(self, depth: int) -> float:
        """Observed over predicted, within [1/4, 4]; that of the depth above where few were seen, at first 1."""
        return self._ratios(depth, self._predicted)

    def _ratios(self, depth: int, expected: list[float]) -> float:
        ratio = 1.0
        for passed, base in list(zip(self._passed, expected))[: depth + 1]:
            ratio = (passed + self._prior * ratio) / (base + self._prior)
            ratio = min(LARGEST_FACTOR, max(1.0 / LARGEST_FACTOR, ratio))
        return ratio


@dataclass
class UtilisationBound:
    """An upper bound that follows the machine's utilisation with hysteresis.

    It grows after ``patience`` readings in a row below ``low`` and shrinks after as many above ``high``; between the
    two it rests. ``relief`` counts how often it shrank without growing back: that many stages fewer may wait.
    """

    value: int
    largest: int
    smallest: int = SMALLEST_TREE
    low: float = 0.70
    high: float = 0.90
    step: float = 1.25
    patience: int = 2
    relief: int = 0
    _streak: int = field(default=0, repr=False)

    def note(self, share: float | None) -> None:
        """A reading from 0 to 1; None (unreadable) changes nothing."""
        if share is None or not math.isfinite(share):
            return
        side = -1 if share < self.low else 1 if share > self.high else 0
        self._streak = self._streak + side if side * self._streak > 0 else side
        if abs(self._streak) < self.patience:
            return
        self._streak = 0
        if side < 0:
            self.value = min(self.largest, max(self.value + 1, math.ceil(self.value * self.step)))
            self.relief = max(0, self.relief - 1)
        else:
            self.value = max(min(self.smallest, self.largest), min(self.value - 1, math.floor(self.value / self.step)))
            self.relief = min(MOST_RELIEF, self.relief + 1)


class AdaptiveScheduler:
    """See the top of this file.

    Attributes:
        bound: of the utilisation rule; None where the rule is off.
        draft_seconds: running cost of drafting a round; the first guess is a quarter of a target forward.
        tree, path: pass rates of whole depths (any sent node) and of the first choices (what could wait).
    """

    def __init__(
        self, profile: CostProfile, *, most_nodes: int, stage: int = 0, bound: UtilisationBound | None = None
    ) -> None:
        self.profile = profile
        self.most_nodes = most_nodes
        self.bound = bound
        self.tree, self.path = PassRates(), PassRates()
        self.draft_seconds = profile.draft_seconds or 0.25 * float(profile.seconds(1))
        self._stage = stage
        self._drift = 1.0  # how much slower target forwards are now than when they were profiled

    def corrected(self, conditional: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Per-node probabilities [n] given the parent, times the factor of their depth, at most 1."""
        factors = np.array([self.tree.factor(depth) for depth in range(int(depths.max(initial=-1)) + 1)])
        return np.minimum(1.0, conditional * factors[depths]) if len(depths) else conditional

    def choose(self, survivals: Sequence[np.ndarray], *, first_drop: bool = False) -> int:
        """The number of nodes per row to send.

        ``survivals``: per row of the batch, the survivals of its nodes in the order in which they would be sent. The
        forward is padded to the largest row, so the rows share one number. ``first_drop``: stop at the first size
        that is worse than the one before (ratio rule: a later gain must not depend on it; DSpark, algorithm 1).
        """
        longest = max((len(values) for values in survivals), default=0)
        largest = min(longest, self.most_nodes if self.bound is None else min(self.most_nodes, self.bound.value))
        gained = np.zeros(largest + 1)
        for values in survivals:
            total = np.concatenate(([0.0], np.cumsum(values[:largest], dtype=np.float64)))
            gained[: len(total)] += 1.0 + total
            gained[len(total) :] += 1.0 + total[-1]
        sizes = np.arange(largest + 1)
        seconds = self.draft_seconds + self._drift * self.profile.seconds(len(survivals) * (1 + sizes))
        speed = gained / seconds
        if first_drop:
            drops = np.flatnonzero(np.diff(speed) < 0)
            return int(drops[0]) if drops.size else largest
        return int(speed.argmax())

    def pending_bound(self, most: int) -> int:
        """How many tokens may wait: as many as the running pass rates keep with a probability of one half, less a
        stage for every time that a busy machine asked to verify more often."""
        kept, allowed = 1.0, 0
        while allowed < most:
            kept *= self.path.rate(allowed)
            if kept < WORTH_WAITING:
                break
            allowed += 1
        relief = 0 if self.bound is None else self.bound.relief * self._stage
        return max(0, allowed - relief)

    def note_seconds(self, tokens: int, target_seconds: float, draft_seconds: float) -> None:
        """What a round took: a target forward over ``tokens``, and drafting with everything around it."""
        expected = float(self.profile.seconds(tokens))
        if expected > 0 and target_seconds > 0:
            drift = min(LARGEST_FACTOR, max(1.0 / LARGEST_FACTOR, target_seconds / expected))
            self._drift = MEMORY * self._drift + (1.0 - MEMORY) * drift
        if draft_seconds > 0:
            self.draft_seconds = MEMORY * self.draft_seconds + (1.0 - MEMORY) * draft_seconds
