"""The verification controller: defer a drafted stage, or have the target verify now (METHODS 8, three layers).

1. Pattern layer: do the draft's attention statistics lie inside the profile of accepted drafts? An n-gram hit in the
   result cache counts as a match.
2. Threshold layer: is the calibrated survival of the stage above the threshold?
3. Target layer: otherwise the target verifies what is pending, now.

Pure decisions from numbers: nothing here knows of models, tensors or batches. Under ``lossless`` every deferred token
is still checked by the coarse forward; under ``trusting`` one that passed both layers may be kept against the target's
choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.config_checks import parse_threshold
from jetspec_train.decoding.calibration import Calibration, PatternProfile

DEFER, VERIFY = "defer", "verify"
LOSSLESS, TRUSTING = "lossless", "trusting"
ARTICLE_THRESHOLD = 0.85  # [S]: "skip the full check when the draft's probability is above 0.85"


@dataclass(frozen=True)
class Stage:
    """What the controller looks at.

    Attributes:
        length: tokens of the stage; 0 where the draft holds no whole stage.
        pending: tokens that wait already.
        survival: probability that the whole stage is accepted, given what came before it; None or NaN if the verifier
            gave no usable number.
        statistics: attention statistics of the stage; None where no pattern is looked at.
        cached: the result cache continues with exactly these tokens.
        ends: the stage holds an end of the output.
    """

    length: int
    pending: int
    survival: float | None
    statistics: Mapping[str, float] | None = None
    cached: bool = False
    ends: bool = False


@dataclass(frozen=True)
class Decision:
    """``action`` defer or verify; ``reason``: the first layer or rule that sent it to the target, else "passed".

    ``pattern_ok`` None: no profile to compare with.
    """

    action: str
    reason: str
    pattern_ok: bool | None
    survival: float | None
    threshold: float

    @property
    def defers(self) -> bool:
        return self.action == DEFER


@dataclass(frozen=True)
class VerificationController:
    """Thresholds and bounds of one run; ``decide`` has no memory.

    ``floor``: under ``trusting``, the target's probability that a kept token needs where the target would have
    chosen another.
    """

    threshold: float
    max_pending: int
    pattern: PatternProfile | None = None
    policy: str = LOSSLESS
    floor: float = 0.0

    def decide(self, stage: Stage, *, bound: int | None = None) -> Decision:
        """``bound``: pending tokens that the scheduler allows at the moment; None: ``max_pending``."""
        most = self.max_pending if bound is None else min(self.max_pending, bound)
        matches = stage.cached or self.pattern.matches(stage.statistics or {}) if self.pattern is not None else None
        survival = stage.survival
        usable = survival is not None and math.isfinite(survival)
        if stage.length == 0:
            reason = "no whole stage"
        elif stage.ends:
            reason = "end of the output"
        elif stage.pending + stage.length > most:
            reason = "max_pending"
        elif not usable:
            reason = "no score"
        elif matches is False:
            reason = "pattern"
        elif survival < self.threshold:  # type: ignore[operator]
            reason = "threshold"
        else:
            reason = "passed"
        action = DEFER if reason == "passed" else VERIFY
        return Decision(action, reason, matches, survival if usable else None, self.threshold)


def decoding_mode(settings: DecodingConfig) -> str:
    """The acceptance rule in force, in the words that verifiers and calibrations use."""
    if settings.rule == "ratio":
        return "ratio"
    return "match_greedy" if settings.sampling.temperature == 0 else "match_sampled"


def make_controller(
    settings: DecodingConfig, *, block: int, verifier: Any | None, calibration: Calibration | None
) -> VerificationController:
    """The controller that the settings ask for.

    ``block``: predictions of one draft block (K). Raises UserError for a ``max_pending`` beyond K - 1, for a threshold
    outside [0, 1], and for ``trusting`` without a verifier, without a certificate of this mode and stage length, or
    with a threshold below the certified one.
    """
    asked = parse_threshold(settings.threshold)
    threshold = ARTICLE_THRESHOLD if asked is None else asked
    if settings.policy == TRUSTING:
        certified = _certificate(settings, verifier, calibration)
        threshold = max(ARTICLE_THRESHOLD, certified) if asked is None else asked
        if threshold < certified:
            raise UserError(
                f"decoding.threshold={settings.threshold} is below the certified threshold {certified:g}: "
                "decoding.policy=trusting keeps its guarantee only at or above it. Leave decoding.threshold=auto."
            )
    most = settings.max_pending
    if most is None:
        most = max(0, block - 1)
    elif settings.stages and most > block - 1:
        raise UserError(
            f"decoding.max_pending={most} is more than this draft can continue from: its block predicts {block} "
            f"tokens, so that at most {max(0, block - 1)} may wait. Lower decoding.max_pending."
        )
    pattern = calibration.pattern if calibration is not None and verifier is not None else None
    return VerificationController(threshold, most, pattern, settings.policy, settings.floor)


def _certificate(settings: DecodingConfig, verifier: Any | None, calibration: Calibration | None) -> float:
    """The certified threshold; UserError where there is none for what is asked."""
    asked = "decoding.policy=trusting keeps tokens that the target would not have chosen"
    if not settings.stages:
        raise UserError("decoding.policy=trusting decides stage by stage; set decoding.stages to 3..5.")
    if verifier is None:
        raise UserError(
            f"{asked}, which needs a verifier, but this draft has none in use (a bundle without one, or "
            "decoding.verifier=false). Train one (verifier=two_heads), or use decoding.policy=lossless."
        )
    if calibration is None:
        raise UserError(
            f"{asked}, which needs a certificate, but the bundle has no calibration.json. Run stage=calibrate and "
            "export again, or use decoding.policy=lossless."
        )
    found = calibration.threshold
    if not found.certified or found.value is None:
        raise UserError(
            f"{asked}, but no threshold is certified for a risk of {found.risk:g}: {found.errors} errors in "
            f"{found.prompts} prompts, {found.needed} prompts would be needed. Calibrate with more prompts, or use "
            "decoding.policy=lossless."
        )
    mode = decoding_mode(settings)
    if calibration.mode != mode:
        raise UserError(
            f"The certificate is for mode {calibration.mode}, but these settings decode in mode {mode} "
            f"(decoding.sampling.temperature={settings.sampling.temperature:g}). Calibrate for it, or use "
            "decoding.policy=lossless."
        )
    if found.stage_length not in (None, settings.stages):
        raise UserError(
            f"The certificate is for stages of {found.stage_length} tokens, but decoding.stages={settings.stages}. "
            f"Set decoding.stages={found.stage_length}, or calibrate again."
        )
    return found.value
