"""Laws of tracking: a step at most once per kind whatever was killed; W&B never stops a training."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from jetspec_train.config import TrackingConfig
from jetspec_train.training import tracking
from jetspec_train.training.tracking import Tracker, read_metrics


def test_no_step_twice_after_a_resume(tmp_path: Path) -> None:
    tracker = Tracker(tmp_path, TrackingConfig())
    for step in (10, 20, 30, 40):
        tracker.log("train", step, {"loss": step / 10})
    tracker.log("evaluation", 40, {"acceptance_length": 2.0})
    with tracker.path.open("a") as file:
        file.write('{"step": 50, "kin')  # killed inside a write
    tracker = Tracker(tmp_path, TrackingConfig(), resumed_step=20)
    for step in (30, 40, 50):
        tracker.log("train", step, {"loss": step / 10})
    assert [r["step"] for r in read_metrics(tracker.path, "train")] == [10, 20, 30, 40, 50]
    assert read_metrics(tracker.path, "evaluation") == []


class FakeRun:
    def __init__(self) -> None:
        self.logged: list[tuple[int, dict]] = []
        self.summary: dict = {}

    def log(self, numbers: dict, step: int) -> None:
        self.logged.append((step, numbers))

    def finish(self) -> None:
        pass


def test_wandb_hears_each_step_once_and_keeps_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[FakeRun] = []

    def start(self: Tracker, cfg: TrackingConfig, config: dict) -> FakeRun:
        runs.append(FakeRun())
        return runs[-1]

    monkeypatch.setattr(Tracker, "_start_wandb", start)
    first = Tracker(tmp_path, TrackingConfig(name="wandb"))
    for step in (1, 2, 3):
        first.log("train", step, {"accuracy": [0.5, 0.25], "loss": 1.0})
    second = Tracker(tmp_path, TrackingConfig(name="wandb"), resumed_step=1)  # killed after 3, checkpoint at 1
    third = Tracker(tmp_path, TrackingConfig(name="wandb"), resumed_step=1)  # killed again before logging anything
    for step in (2, 3, 4):
        third.log("train", step, {"loss": 1.0})
    assert first.run_id == second.run_id == third.run_id
    assert [step for run in runs for step, _ in run.logged] == [1, 2, 3, 4]
    assert runs[0].logged[0][1] == {"train/accuracy/0": 0.5, "train/accuracy/1": 0.25, "train/loss": 1.0}
    assert [r["step"] for r in read_metrics(third.path)] == [1, 2, 3, 4]


def test_wandb_that_breaks_does_not_stop_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken(FakeRun):
        def log(self, numbers: dict, step: int) -> None:
            raise ConnectionError("gone")

    monkeypatch.setattr(Tracker, "_start_wandb", lambda *_: Broken())
    warnings: list[str] = []
    tracker = Tracker(tmp_path, TrackingConfig(name="wandb"), warn=warnings.append)
    tracker.log("train", 1, {"loss": 1.0})
    tracker.log("train", 2, {"loss": 1.0})
    tracker.close({})
    assert len(warnings) == 1 and [r["step"] for r in read_metrics(tracker.path)] == [1, 2]


def log_records(data: bytes) -> list[bytes]:
    """The records of a W&B offline file: a 7-byte header, then LevelDB's log format in blocks of 32 KiB."""
    records, whole, at = [], b"", 7
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole = (b"" if kind in (1, 2) else whole) + data[at + 7 : at + 7 + length]
        if kind in (1, 4):  # a full record, or the last piece of one
            records.append(whole)
        at += 7 + length
    return records


def test_no_key_means_offline_with_one_warning_and_the_metrics_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reads back what an offline run really wrote."""
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2

    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))  # no ~/.netrc of the person who runs the tests
    monkeypatch.setattr(tracking, "why_not_online", lambda: "no API key")
    warnings: list[str] = []
    folder = tmp_path / "train"
    tracker = Tracker(folder, TrackingConfig(name="wandb"), run_config={"seed": 3}, warn=warnings.append)
    tracker.log("train", 7, {"loss": 1.25})
    tracker.close({"best_step": 7})
    assert len(warnings) == 1 and "wandb sync" in warnings[0]
    history, run_id, ended = [], "", False
    deadline = time.monotonic() + 30
    while not ended and time.monotonic() < deadline:  # W&B's own process may write the file's end after finish()
        time.sleep(0.1)
        (file,) = folder.glob("wandb/offline-run-*/*.wandb")
        history = []
        for data in log_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            kind = record.WhichOneof("record_type")
            if kind == "history":
                items = record.history.item
                history.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in items})
            if kind == "run":
                run_id = record.run.run_id
            ended = ended or kind == "exit"
    assert run_id == tracker.run_id
    assert history[0]["train/loss"] == 1.25 and history[0]["_step"] == 7
