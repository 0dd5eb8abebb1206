"""What every long data stage shows and keeps about its own work: a progress bar, and seconds that survive kills."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from jetspec_train.artifacts.files import atomic_json, read_json


class WorkClock:
    """Working seconds of a shard, summed over its attempts as well as kills allow."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.before = float(read_json(path, "The clock")["seconds"]) if path.exists() else 0.0
        self.begun = time.monotonic()

    def save(self) -> float:
        seconds = self.before + time.monotonic() - self.begun
        atomic_json(self.path, {"seconds": round(seconds, 3)})
        return seconds


@contextmanager
def progress(title: str, unit: str, total: int, done: int) -> Iterator[Callable[[int, int], None]]:
    """A bar with units, tokens/s and time left; in a log file a line every half minute.

    Yields ``report(units, tokens)``: how many more are done, and the tokens that they took.
    """
    from tqdm import tqdm

    live = sys.stderr.isatty()
    with tqdm(
        total=total, initial=done, desc=title, unit=unit, mininterval=0.5 if live else 30, dynamic_ncols=live
    ) as bar:
        begun, tokens = time.monotonic(), 0

        def report(units: int, new_tokens: int) -> None:
            nonlocal tokens
            tokens += new_tokens
            bar.set_postfix_str(f"{tokens / max(1e-9, time.monotonic() - begun):.0f} tokens/s", refresh=False)
            bar.update(units)

        yield report
