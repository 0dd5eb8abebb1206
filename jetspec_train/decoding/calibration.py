"""``calibration.json``: what the calibrate stage found out about a verifier, and what decoding makes of it.

Both sides share this file: the stage fills a ``Calibration`` and writes ``to_dict()``; decoding reads it back, checked.
Heads, temperatures and thresholds speak of one acceptance rule (``mode``) and of one set of weights (``bundle``); a
calibration of other weights or of another target is refused with both values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jetspec_train.artifacts.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
HEADS = ("correctness", "confidence")
MODES = ("match_greedy", "match_sampled", "ratio")


@dataclass(frozen=True)
class Threshold:
    """The stage survival above which the target's check may be skipped, and what is guaranteed of it (METHODS 9).

    Attributes:
        value: the strictest need not be known: None where no threshold of the grid passed.
        certified: a one-sided bound of the error rate lies below ``risk`` with ``confidence``.
        risk: the share of skipped stages that the target would have decided otherwise, at most.
        confidence: of the bound, for example 0.95.
        prompts, errors: the test behind ``value``; one stage of each prompt.
        needed: prompts that a certificate with this many errors needs.
        stage_length: slots of the stages that were tested; None where not recorded.
        grid: every threshold tested, strictest first: {"threshold", "tested", "errors", "bound", "passed"}.
        mix: prompts by domain; the guarantee holds for this mix.
    """

    value: float | None = None
    certified: bool = False
    risk: float = 0.008
    confidence: float = 0.95
    prompts: int = 0
    errors: int = 0
    needed: int = 0
    stage_length: int | None = None
    grid: list[dict[str, Any]] = field(default_factory=list)
    mix: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class PatternProfile:
    """The range of each attention statistic among accepted drafts (``patterns.STATISTICS``).

    ``coverage``: the share of accepted stages of the fit split that lie inside all ranges.
    """

    statistics: tuple[str, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]
    coverage: float

    def matches(self, measured: Mapping[str, float]) -> bool:
        """Whether every statistic lies in its range; a missing one and NaN do not."""
        return all(
            low <= measured.get(name, math.nan) <= high
            for name, low, high in zip(self.statistics, self.low, self.high, strict=True)
        )


@dataclass(frozen=True)
class Calibration:
    """See the top of this file.

    Attributes:
        bundle: ``weights_hash`` of the draft's and the verifier's weights.
        target: the target's identity (``TargetIdentity.to_dict``).
        mode: the acceptance rule whose outcome the verifier predicts.
        temperatures: by head, one per depth; logits are divided by them.
        reliability, quality, fitted_on: for reports; decoding does not read them.
    """

    bundle: str
    target: dict[str, str]
    mode: str
    temperatures: dict[str, tuple[float, ...]]
    threshold: Threshold = field(default_factory=Threshold)
    pattern: PatternProfile | None = None
    reliability: dict[str, Any] = field(default_factory=dict)
    quality: dict[str, Any] = field(default_factory=dict)
    fitted_on: dict[str, Any] = field(default_factory=dict)

    def temperatures_of(self, head: str) -> np.ndarray:
        """Temperatures of a head, float64 [depths]; [1] where the head was not calibrated."""
        return np.asarray(self.temperatures.get(head) or (1.0,), dtype=np.float64)

    def to_dict(self) -> dict[str, Any]:
        pattern = self.pattern
        return {
            "format": FORMAT,
            "bundle": self.bundle,
            "target": dict(self.target),
            "mode": self.mode,
            "temperatures": {head: list(values) for head, values in self.temperatures.items()},
            "threshold": dict(vars(self.threshold)),
            "pattern": None if pattern is None else {name: _plain(value) for name, value in vars(pattern).items()},
            "reliability": self.reliability,
            "quality": self.quality,
            "fitted_on": self.fitted_on,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "calibration.json") -> Calibration:
        """Read and check; raises UserError naming ``where``, the key, the value and what is needed."""
        if not isinstance(data, Mapping):
            raise UserError(f"{where} holds {type(data).__name__}; an object is needed.")
        read = _Reader(data, where)
        version = data.get("format")
        if version != FORMAT:
            raise UserError(
                f"{where} has format {version!r}; this version of jetspec-train reads format {FORMAT}. "
                "Run stage=calibrate again, or use the version that wrote it."
            )
        mode = read.text("mode")
        if mode not in MODES:
            raise UserError(f"{where}: mode={mode!r}; allowed: {', '.join(MODES)}.")
        target = read.mapping("target")
        temperatures = {}
        for head, values in read.mapping("temperatures").items():
            if head not in HEADS:
                raise UserError(f"{where}: temperatures.{head} is not known; allowed: {', '.join(HEADS)}.")
            numbers = _numbers(values, f"{where}: temperatures.{head}")
            if not numbers or min(numbers) <= 0:
                raise UserError(f"{where}: temperatures.{head}={list(numbers)}; positive numbers are needed.")
            temperatures[head] = numbers
        return cls(
            bundle=read.text("bundle"),
            target={str(key): str(value) for key, value in target.items()},
            mode=mode,
            temperatures=temperatures,
            threshold=_threshold(read.mapping("threshold"), where),
            pattern=_pattern(data.get("pattern"), where),
            reliability=read.mapping("reliability", optional=True),
            quality=read.mapping("quality", optional=True),
            fitted_on=read.mapping("fitted_on", optional=True),
        )


class _Reader:
    def __init__(self, data: Mapping[str, Any], where: str) -> None:
        self._data, self._where = data, where

    def text(self, key: str) -> str:
        value = self._data.get(key)
        if not isinstance(value, str) or not value:
            raise UserError(f"{self._where}: {key}={value!r}; a text is needed.")
        return value

    def mapping(self, key: str, optional: bool = False) -> dict[str, Any]:
        value = self._data.get(key)
        if value is None and optional:
            return {}
        if not isinstance(value, Mapping):
            raise UserError(f"{self._where}: {key}={value!r}; an object is needed.")
        return dict(value)


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _numbers(values: Any, what: str) -> tuple[float, ...]:
    if not isinstance(values, Sequence) or isinstance(values, str) or not all(_is_number(value) for value in values):
        raise UserError(f"{what}={values!r}; a list of finite numbers is needed.")
    return tuple(float(value) for value in values)


def _threshold(data: Mapping[str, Any], where: str) -> Threshold:
    known = {name: data[name] for name in Threshold.__dataclass_fields__ if name in data}
    threshold = Threshold(**known)
    for name in ("value", "risk", "confidence"):
        value = getattr(threshold, name)
        if (value is not None or name != "value") and not (_is_number(value) and 0 <= value <= 1):
            raise UserError(f"{where}: threshold.{name}={value!r}; a number from 0 to 1 is needed.")
    if not isinstance(threshold.certified, bool):
        raise UserError(f"{where}: threshold.certified={threshold.certified!r}; true or false is needed.")
    if threshold.certified and threshold.value is None:
        raise UserError(f"{where}: threshold.certified=true without threshold.value; run stage=calibrate again.")
    return threshold


def _pattern(data: Any, where: str) -> PatternProfile | None:
    if data is None:
        return None
    if not isinstance(data, Mapping):
        raise UserError(f"{where}: pattern={data!r}; an object or null is needed.")
    names = data.get("statistics")
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise UserError(f"{where}: pattern.statistics={names!r}; a list of names is needed.")
    low, high = (_numbers(data.get(key), f"{where}: pattern.{key}") for key in ("low", "high"))
    if not len(names) == len(low) == len(high) or any(a > b for a, b in zip(low, high)):
        raise UserError(f"{where}: pattern.low={list(low)} and pattern.high={list(high)} do not fit {list(names)}.")
    from jetspec_train.decoding.patterns import STATISTICS

    unknown = [name for name in names if name not in STATISTICS]
    if unknown:
        raise UserError(f"{where}: pattern.statistics names {unknown}; known: {', '.join(STATISTICS)}.")
    coverage = data.get("coverage", 1.0)
    if not (_is_number(coverage) and 0 <= coverage <= 1):
        raise UserError(f"{where}: pattern.coverage={coverage!r}; a number from 0 to 1 is needed.")
    return PatternProfile(tuple(str(name) for name in names), low, high, float(coverage))


def weights_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 (hex) of the weights that a calibration belongs to: names ("draft.*", "verifier.*"), shapes, values.

    Values are compared in fp32, so that a checkpoint and its export in another dtype of the same values agree.
    """
    import torch

    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().to("cpu", torch.float32).contiguous()
        digest.update(f"{name}{tuple(tensor.shape)}".encode())
        digest.update(tensor.numpy().tobytes())
    return digest.hexdigest()


def check_calibration(calibration: Calibration, *, weights: str, target: Mapping[str, str], where: str) -> None:
    """Refuse a calibration of other weights or of another target; raises UserError naming both values."""
    if calibration.bundle != weights:
        raise UserError(
            f"{where} was made for the weights {calibration.bundle[:12]}, but the bundle holds {weights[:12]}. "
            "Calibrate this draft and verifier (stage=calibrate), then export again."
        )
    for key in ("config_hash", "tokenizer_hash", "template_hash"):
        made, loaded = calibration.target.get(key), target.get(key)
        if made is not None and made != loaded:
            raise UserError(
                f"{where} was made for target {calibration.target.get('name')!r} ({key} {made[:12]}), but the loaded "
                f"target is {target.get('name')!r} ({key} {str(loaded)[:12]}). Calibrate with this target."
            )
