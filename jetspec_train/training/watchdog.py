"""Finds a training that stands still, and says which rank stands where.

Ranks that wait for each other look alike from outside: the job runs, nothing moves, and the one that is stuck may be
on another machine. So every rank says where it is (``enter``), and a thread of each writes that to a small file beside
the checkpoints. When no rank has moved for the limit, each prints where all of them stand, and its own stack, and ends
its process; the batch script starts the job again from the last checkpoint.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.files import atomic_json
from jetspec_train.training.ranks import Ranks

HANG_EXIT_CODE = 86  # "stood still; start me again from the last checkpoint"
WRITE_SECONDS = 15.0
GONE_SECONDS = 4 * WRITE_SECONDS


class Watchdog:
    """``with Watchdog(...) as watchdog: watchdog.enter("step 3, computing")``; a limit of 0 watches nothing."""

    def __init__(
        self,
        folder: Path,
        ranks: Ranks,
        *,
        stage: str,
        limit: float,
        on_hang: Callable[[str], None] | None = None,
        write_seconds: float = WRITE_SECONDS,
    ) -> None:
        """``folder``: where all ranks' files are; ``limit``: seconds; ``on_hang``: called with the report instead of
        printing it and ending the process."""
        self.folder, self.ranks, self.stage, self.limit = folder, ranks, stage, limit
        self._on_hang = on_hang or _end
        self._write_seconds = write_seconds
        self.enter("starting")
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watchdog:
        if self.limit > 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._write()
            self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()
            self._path(self.ranks.rank).unlink(missing_ok=True)

    def enter(self, place: str) -> None:
        """This rank has moved and is now at ``place``."""
        self._place = place
        self.beat()

    def beat(self) -> None:
        """This rank is where it was, and moves."""
        # The second clock stands still while the machine is suspended, which is no hang.
        self._moved, self._moved_awake = time.time(), time.monotonic()

    def report(self, now: float) -> str:
        """Where every rank stands, one line each; ranks of which nothing was heard lately are named first."""
        gone, lines = [], []
        for rank in range(self.ranks.world):
            facts = self._read(rank)
            if facts is None:
                gone.append(str(rank))
                lines.append(f"  rank {rank}: never heard of, or it has ended")
                continue
            silent = now - facts["written"]
            if silent > GONE_SECONDS:
                gone.append(str(rank))
            heard = f", silent for {silent:.0f} s: its process is gone or blocked" if silent > GONE_SECONDS else ""
            lines.append(
                f"  rank {rank} on {facts['host']} (process {facts['pid']}): {facts['place']}, "
                f"for {now - facts['moved']:.0f} s{heard}"
            )
        suspects = f" Look at rank {', '.join(gone)} first." if gone else ""
        head = f"HANG in stage {self.stage}: no rank has moved for {self.limit:.0f} s.{suspects}"
        return "\n".join([head, *lines])

    def _watch(self) -> None:
        while not self._closing.wait(min(self._write_seconds, self.limit / 4)):
            self._write()
            now = time.time()
            if time.monotonic() - self._moved_awake > self.limit and now - self._newest() > self.limit:
                self._on_hang(self.report(now))
                return

    def _newest(self) -> float:
        """When any rank last moved, as far as is known here."""
        found = [facts for facts in map(self._read, range(self.ranks.world)) if facts is not None]
        return max([self._moved, *(facts["moved"] for facts in found)])

    def _path(self, rank: int) -> Path:
        return self.folder / f"rank-{rank:05d}.json"

    def _write(self) -> None:
        facts = {"rank": self.ranks.rank, "host": socket.gethostname(), "pid": os.getpid(), "stage": self.stage}
        facts |= {"place": self._place, "moved": self._moved, "written": time.time()}
        with contextlib.suppress(Exception):  # a full disk is the trainer's to report
            atomic_json(self._path(self.ranks.rank), facts)

    def _read(self, rank: int) -> dict[str, Any] | None:
        try:
            return json.loads(self._path(rank).read_text())
        except (OSError, ValueError):
            return None


def _end(report: str) -> None:
    print(report, file=sys.stderr, flush=True)
    faulthandler.dump_traceback(all_threads=True)
    os._exit(HANG_EXIT_CODE)
