"""Verification first in line on an accelerator ([S]: give the tensor cores to verification).

On CUDA the target's forward is queued on a stream of high priority, so that work of other streams on the same device
(another decoder's drafting, a training run) yields to it. On a CPU there is nothing to do. Not measured: this project's
machines have no GPU that two processes share.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

HIGHEST = -1  # torch maps it to the device's own range


class VerificationStream:
    """``with stream.first():`` runs what is inside at high priority; before and after it, work keeps its order."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device, priority=HIGHEST) if device.type == "cuda" else None

    @contextlib.contextmanager
    def first(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        usual = torch.cuda.current_stream(self._stream.device)
        # Both waits also keep memory apart: what either stream frees is reused by the other only after it is done.
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            yield
        usual.wait_stream(self._stream)
