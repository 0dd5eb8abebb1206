"""What a round costs on a machine: seconds of one target forward by the tokens it carries, and of one draft.

Profiled once per machine and target. A bundle may bring a profile (``cost_profile.json``); where it has none, or one of
another machine, it is measured before the first answer (about a second).
"""

from __future__ import annotations

import math
import platform
import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from jetspec_train.artifacts.errors import UserError

if TYPE_CHECKING:
    from jetspec_train.targets.target import Target

FORMAT = 1
SIZES = (1, 2, 4, 8, 16, 32)


@dataclass(frozen=True)
class CostProfile:
    """Attributes:
    verify_seconds: {tokens of a target forward: its seconds}, ascending.
    draft_seconds: one draft forward with its tree; None: not measured, learnt while decoding.
    machine, target, dtype: what was measured, for people.
    """

    verify_seconds: dict[int, float]
    draft_seconds: float | None = None
    machine: str = ""
    target: str = ""
    dtype: str = ""

    def seconds(self, tokens: np.ndarray | float) -> np.ndarray:
        """Seconds of a forward over ``tokens``, linear between the profiled sizes and beyond the last two."""
        sizes = np.asarray(list(self.verify_seconds), dtype=np.float64)
        values = np.asarray(list(self.verify_seconds.values()), dtype=np.float64)
        wanted = np.asarray(tokens, dtype=np.float64)
        inside = np.interp(wanted, sizes, values)
        if len(sizes) < 2:
            return inside
        slope = max(0.0, (values[-1] - values[-2]) / (sizes[-1] - sizes[-2]))
        return np.where(wanted > sizes[-1], values[-1] + slope * (wanted - sizes[-1]), inside)

    def to_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "machine": self.machine,
            "target": self.target,
            "dtype": self.dtype,
            "verify_seconds": {str(size): seconds for size, seconds in self.verify_seconds.items()},
            "draft_seconds": self.draft_seconds,
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], where: str = "cost_profile.json") -> CostProfile:
        """Raises UserError naming ``where`` and the value that cannot be a cost."""
        if data.get("format") != FORMAT:
            raise UserError(f"{where} has format {data.get('format')!r}; this version reads format {FORMAT}.")
        listed = data.get("verify_seconds")
        if not isinstance(listed, Mapping) or not listed:
            raise UserError(f"{where}: verify_seconds={listed!r}; an object of seconds by tokens is needed.")
        costs: dict[int, float] = {}
        for size, seconds in listed.items():
            if not str(size).isdigit() or int(size) < 1 or not _is_cost(seconds):
                raise UserError(f"{where}: verify_seconds has {size!r}: {seconds!r}; tokens and seconds are needed.")
            costs[int(size)] = float(seconds)
        draft = data.get("draft_seconds")
        if draft is not None and not _is_cost(draft):
            raise UserError(f"{where}: draft_seconds={draft!r}; seconds or null is needed.")
        named = {key: str(data.get(key, "")) for key in ("machine", "target", "dtype")}
        return cls(dict(sorted(costs.items())), None if draft is None else float(draft), **named)


def _is_cost(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def this_machine(device: Any) -> str:
    """A name under which costs may be compared: the accelerator, else the processor and the threads in use."""
    import torch

    if getattr(device, "type", device) == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.processor() or platform.machine()}, {torch.get_num_threads()} threads"


def measure_verify_seconds(
    target: Target, *, context: int = 256, sizes: tuple[int, ...] = SIZES, repeats: int = 5
) -> dict[int, float]:
    """Median seconds of forward + head over n tokens after ``context`` cached ones, for each n.

    The sizes are visited in turn, ``repeats`` times, so that a drift of the machine does not tilt the curve. The
    tokens are arbitrary (the cost of a dense model does not depend on them) and never committed. A context that does
    not fit the target is shortened.
    """
    import torch

    def synchronize() -> None:
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    largest = max(sizes)
    if target.max_positions is not None:
        context = max(1, min(context, target.max_positions - largest))
    cache = target.new_cache(1, context + largest)
    tokens_1N = torch.arange(context + largest, device=target.device)[None] % max(1, target.vocab_size // 2)
    timings: dict[int, list[float]] = {size: [] for size in sizes}
    with torch.inference_mode():
        target.forward(tokens_1N[:, :context], cache=cache)
        cache.commit([list(range(context))])
        for repeat in range(repeats + 1):
            for size in sizes:
                synchronize()
                start = time.perf_counter()
                output = target.forward(tokens_1N[:, context : context + size], cache=cache)
                target.logits(output.hidden_BND[0])
                synchronize()
                if repeat:  # the first visit of each size pays for allocations and is dropped
                    timings[size].append(time.perf_counter() - start)
    return {size: statistics.median(values) for size, values in timings.items()}


def profile_of(target: Target, known: CostProfile | None = None) -> CostProfile:
    """``known`` if it was measured on this machine with this dtype, else a fresh measurement."""
    machine, dtype = this_machine(target.device), str(target.dtype).removeprefix("torch.")
    if known is not None and (known.machine, known.dtype) == (machine, dtype):
        return known
    return CostProfile(measure_verify_seconds(target), None, machine, target.identity.name, dtype)
