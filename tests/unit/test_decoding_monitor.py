"""Monitoring values and the trace file."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.decoding.monitor import WINDOW, Monitor
from jetspec_train.decoding.stats import RoundStats, merge_stats
from jetspec_train.decoding.trace import TraceWriter


def answer(sent: int, accepted: int, forwards: int = 10) -> RoundStats:
    return RoundStats(
        target_forwards=forwards,
        drafted_tokens=sent,
        target_tokens=sent + forwards,
        accepted_by_depth=[accepted - accepted // 2, accepted // 2],
    )


def test_values_by_shape_and_domain():
    monitor = Monitor()
    monitor.add(answer(100, 90), shape="chain", domain="maths")
    monitor.add(answer(100, 50), shape="chain", domain="chat")
    monitor.add(answer(200, 20), shape="tree")
    values = monitor.values()
    assert values["chain"]["maths"]["pass_rate"] == 0.9 and values["chain"]["chat"]["pass_rate"] == 0.5
    assert values["chain"][""]["pass_rate"] == 0.7
    assert values["chain"]["maths"]["wasted"] == pytest.approx(10 / 110)
    assert values["tree"] == {
        "": {"pass_rate": 0.1, "wasted": 180 / 210, "running_pass_rate": 0.1, "running_wasted": 180 / 210}
    }


def test_warnings_follow_the_running_values():
    monitor = Monitor()
    for _ in range(5):
        monitor.add(answer(100, 95, forwards=30), shape="chain")
    assert monitor.warnings() == []
    for _ in range(WINDOW):
        monitor.add(answer(100, 60), shape="chain")
    low, wasted = monitor.warnings()
    assert "pass rate of chain is 60%, below 85%" in low and "wasted compute of chain is 36%, above 15%" in wasted
    assert (
        monitor.values()["chain"][""]["pass_rate"] > 0.6
    )  # all answers, while the running value forgot the first five
    for _ in range(WINDOW):
        monitor.add(answer(100, 95, forwards=30), shape="chain")
    assert monitor.warnings() == []


def test_few_tokens_and_nothing_sent_give_no_warning():
    monitor = Monitor()
    monitor.add(answer(10, 0), shape="chain")
    monitor.add(RoundStats(), shape="tree")
    assert monitor.warnings() == []
    assert monitor.values()["tree"][""]["pass_rate"] is None


def test_stage_counts_add_up_over_answers():
    one = RoundStats(target_forwards=4, stage_forwards=8, checked_stages=5, passed_stages=4, deferred_tokens=20)
    both = merge_stats([one, one])
    assert both.deferred_tokens == 40 and both.forwards_saved == 0.5 and both.screening_accuracy == 0.8
    assert np.isnan(RoundStats().forwards_saved) and np.isnan(RoundStats().screening_accuracy)


def test_a_trace_is_strict_json_line_by_line(tmp_path):
    writer = TraceWriter(tmp_path / "deep" / "trace.jsonl")
    writer.write({"a": np.float64("nan"), "b": np.arange(2), "c": [np.float32(0.1), None], "d": {"e": float("inf")}})
    writer.write({"token": np.int64(5), "flag": np.bool_(True)})
    first, second = (tmp_path / "deep" / "trace.jsonl").read_text().splitlines()
    assert json.loads(first) == {"a": None, "b": [0, 1], "c": [0.1, None], "d": {"e": None}}
    assert json.loads(second) == {"token": 5, "flag": True}
    writer.close()
    TraceWriter(tmp_path / "deep" / "trace.jsonl").close()
    assert (tmp_path / "deep" / "trace.jsonl").read_text() == ""


@pytest.mark.parametrize("where", ["", "file.txt/trace.jsonl"])
def test_a_trace_that_cannot_be_written_is_refused(tmp_path, where):
    (tmp_path / "file.txt").write_text("in the way")
    with pytest.raises(UserError, match=r"decoding.trace=.* cannot be written"):
        TraceWriter(tmp_path / where)
