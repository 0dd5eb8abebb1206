"""How busy the machine is, for the scheduler's upper bound.

On a GPU: its utilisation by NVML. On a CPU: the share that *other* processes use of all cores, since our own always
keeps them busy.
"""

from __future__ import annotations

import contextlib
import os
import time
from typing import Any

INTERVAL = 0.5  # seconds between readings; the kernel's counters advance in steps of 10 ms


def parallel_units(device: Any) -> int:
    """Streaming multiprocessors of a GPU, or the cores this process may use."""
    if device.type == "cuda":
        import torch

        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class UtilisationMeter:
    """``read()`` gives a new reading at most every INTERVAL seconds, else None; it never waits."""

    def __init__(self, device: Any) -> None:
        self._device = device
        self._due = 0.0
        self._before: tuple[float, float, float] | None = None
        self._handle: Any = None
        if device.type == "cuda":
            with contextlib.suppress(Exception):  # no driver library, no permission: then there are no readings
                import pynvml

                pynvml.nvmlInit()
                self._handle = pynvml.nvmlDeviceGetHandleByIndex(device.index or 0)

    def read(self) -> float | None:
        """Utilisation from 0 to 1 since the last reading; None if none is due or the machine gives none."""
        now = time.perf_counter()
        if now < self._due:
            return None
        self._due = now + INTERVAL
        return self._gpu() if self._device.type == "cuda" else self._other_processes()

    def _gpu(self) -> float | None:
        if self._handle is None:
            return None
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            return pynvml.nvmlDeviceGetUtilizationRates(self._handle).gpu / 100.0
        return None

    def _other_processes(self) -> float | None:
        import psutil

        times = psutil.cpu_times()
        idle = times.idle + getattr(times, "iowait", 0.0)
        busy = sum(times) - idle - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0)
        now = (time.perf_counter(), busy, time.process_time())
        before, self._before = self._before, now
        if before is None or now[0] <= before[0]:
            return None
        wall, busy, own = (new - old for new, old in zip(now, before))
        return max(0.0, min(1.0, (busy - own) / (wall * (psutil.cpu_count() or 1))))
