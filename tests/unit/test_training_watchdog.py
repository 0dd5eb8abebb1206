"""The watchdog: silent while any rank moves, and a report that names ranks and places when none does."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

from jetspec_train.training.ranks import Ranks
from jetspec_train.training.watchdog import HANG_EXIT_CODE, Watchdog


def wait_until(event: threading.Event) -> bool:
    return event.wait(60)


def test_a_hang_is_reported_with_the_place_of_every_rank(tmp_path: Path) -> None:
    heard, reports = threading.Event(), []

    def on_hang(report: str) -> None:
        reports.append(report)
        heard.set()

    gone = {"rank": 1, "host": "far", "pid": 7, "stage": "train", "place": "step 3, computing"}
    (tmp_path / "rank-00001.json").write_text(json.dumps({**gone, "moved": 100.0, "written": 100.0}))
    with Watchdog(tmp_path, Ranks(0, 3), stage="train", limit=0.5, on_hang=on_hang, write_seconds=0.1) as watchdog:
        watchdog.enter("step 4, exchanging gradients")
        assert wait_until(heard)
    (report,) = reports
    assert "HANG in stage train" in report and "Look at rank 1, 2 first" in report
    assert "rank 0 on " in report and "step 4, exchanging gradients" in report
    assert "rank 1 on far (process 7): step 3, computing" in report and "gone or blocked" in report
    assert "rank 2: never heard of" in report


def test_silent_while_this_or_another_rank_moves(tmp_path: Path) -> None:
    reports: list[str] = []
    other = Watchdog(tmp_path, Ranks(1, 2), stage="train", limit=4.0, on_hang=reports.append, write_seconds=0.1)
    with Watchdog(tmp_path, Ranks(0, 2), stage="train", limit=4.0, on_hang=reports.append, write_seconds=0.1), other:
        for _ in range(55):
            other.beat()  # rank 0 waits for rank 1, which measures or saves
            time.sleep(0.1)
    assert not reports and not list(tmp_path.glob("rank-*.json"))


def test_no_limit_leaves_no_trace(tmp_path: Path) -> None:
    with Watchdog(tmp_path / "ranks", Ranks(), stage="train", limit=0.0) as watchdog:
        watchdog.enter("step 1, computing")
    assert not (tmp_path / "ranks").exists()


def test_the_process_ends_with_its_own_exit_code_and_its_stack(tmp_path: Path) -> None:
    code = (
        "import pathlib, time\n"
        "from jetspec_train.training.ranks import Ranks\n"
        "from jetspec_train.training.watchdog import Watchdog\n"
        "def stuck_here():\n    time.sleep(600)\n"
        f"with Watchdog(pathlib.Path({str(tmp_path)!r}), Ranks(), stage='train', limit=0.4, write_seconds=0.1):\n"
        "    stuck_here()\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert ended.returncode == HANG_EXIT_CODE
    assert "no rank has moved" in ended.stderr and "stuck_here" in ended.stderr
