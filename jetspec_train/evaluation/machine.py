"""What the figures were measured on, and whether anything else was running meanwhile.

A speedup measured on a busy machine is a weak claim: the load shifts between the two timings. So the
work of *other* processes is metered over exactly the measured time and written into the report.
"""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

import psutil

BUSY_SHARE = 0.10  # other processes used more than this share of all cores while we measured


def processor_name() -> str:
    """The CPU's model name as the kernel gives it, else what Python knows."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.lower().startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def processor_features() -> list[str]:
    """Vector and matrix extensions that decide which data type is fast."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(errors="replace").splitlines():
            if line.startswith("flags"):
                flags = set(line.split(":", 1)[1].split())
                return sorted(flags & {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_tile"})
    return []


def load_average() -> list[float] | None:
    """1, 5 and 15 minute load averages, or None where the system has none."""
    try:
        return [round(value, 2) for value in os.getloadavg()]
    except OSError:
        return None


def clock_megahertz() -> float | None:
    """Current core clock where readable."""
    with contextlib.suppress(Exception):
        frequency = psutil.cpu_freq()
        return round(float(frequency.current), 1) if frequency and frequency.current else None
    return None


def describe_machine() -> dict[str, Any]:
    """Hardware, software and state before the measurement starts."""
    import torch
    import transformers

    state: dict[str, Any] = {
        "processor": processor_name(),
        "processor_features": processor_features(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
        "clock_megahertz": clock_megahertz(),
        "load_average_before": load_average(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "accelerator": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
        "wait_policy": os.environ.get("OMP_WAIT_POLICY"),
    }
    return state


def peak_memory_bytes() -> dict[str, int | None]:
    """Peak resident memory of this process and peak memory of the accelerator so far."""
    import torch

    unit = 1 if sys.platform == "darwin" else 1024
    return {
        "host": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit,
        "accelerator": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
    }


class OtherWork:
    """Meters what other processes did with the CPU during the measured intervals only.

    ``share`` is their CPU seconds over (wall seconds x cores), 0 to 1. The machine's own counters have
    a resolution of 10 ms, far below the seconds that an answer takes.
    """

    def __init__(self) -> None:
        self.wall = 0.0
        self.other = 0.0
        self.cores = psutil.cpu_count() or 1
        self._start: tuple[float, float, float] | None = None

    def _now(self) -> tuple[float, float, float]:
        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        # guest time is already inside user time in the kernel's accounting
        guest = getattr(times, "guest", 0.0) + getattr(times, "guest_nice", 0.0)
        return time.perf_counter(), sum(times) - idle - guest, time.process_time()

    def start(self) -> None:
        self._start = self._now()

    def stop(self) -> None:
        if self._start is None:
            return
        wall, busy, own = (now - then for now, then in zip(self._now(), self._start))
        self.wall += wall
        self.other += busy - own
        self._start = None

    @property
    def share(self) -> float | None:
        if self.wall <= 0:
            return None
        return max(0.0, min(1.0, self.other / (self.wall * self.cores)))

    def summary(self) -> dict[str, Any]:
        """``{share_of_cores, busy, ...}`` for the report."""
        share = self.share
        return {
            "other_processes_share": share,
            "busy": bool(share is not None and share > BUSY_SHARE),
            "busy_above": BUSY_SHARE,
            "load_average_after": load_average(),
            "timed_seconds": self.wall,
        }
