"""Being asked to stop: SIGTERM and SIGUSR1 (a scheduler), SIGINT (Ctrl-C).

The handler only sets a flag; the loop looks at it at step boundaries, where a checkpoint can be written. A second
Ctrl-C stops at once.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

REQUEUE_EXIT_CODE = 85  # "saved, start me again": what the batch script looks for
INTERRUPT_EXIT_CODE = 130  # the shell's own convention for Ctrl-C


class StopRequest:
    """``signal_number`` is 0 until someone asks."""

    def __init__(self) -> None:
        self.signal_number = 0

    def __bool__(self) -> bool:
        return self.signal_number != 0

    @property
    def exit_code(self) -> int:
        return exit_code_for(self.signal_number)


def exit_code_for(signal_number: int) -> int:
    """What a run that was stopped by this signal, and saved, exits with (0: it was not stopped)."""
    if signal_number == 0:
        return 0
    return INTERRUPT_EXIT_CODE if signal_number == signal.SIGINT else REQUEUE_EXIT_CODE


@contextmanager
def stop_on_signals() -> Iterator[StopRequest]:
    """Collect stop signals inside the block; the handlers that were there before come back after it."""
    request = StopRequest()

    def note(number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and request.signal_number == signal.SIGINT:
            raise KeyboardInterrupt
        request.signal_number = number

    if threading.current_thread() is not threading.main_thread():
        yield request  # handlers belong to the main thread
        return
    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
