"""Statistics, measures, verdicts and comparisons on made-up records, where the right answer is known."""

from __future__ import annotations

import copy
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json
from jetspec_train.config import Config, DecodingConfig, EvaluateConfig
from jetspec_train.evaluation.benchmark import PLAIN, SPECULATIVE, Contender, Measurement, PromptRecord, rotate
from jetspec_train.evaluation.benchmark import run_benchmark as benchmark
from jetspec_train.evaluation.compare import compare_reports, comparison_table
from jetspec_train.evaluation.contenders import check_contenders
from jetspec_train.evaluation.identity import Comparison, compare_outputs, first_difference
from jetspec_train.evaluation.machine import OtherWork
from jetspec_train.evaluation.measures import bound_and_gap, summarise
from jetspec_train.evaluation.page import render_page
from jetspec_train.evaluation.replay import replay_rounds
from jetspec_train.evaluation.report import build_report, load_report, write_report
from jetspec_train.evaluation.statistics import interval_of, ratio_of_sums, speedup
from jetspec_train.evaluation.suites import SuitePrompt


def prompt(number: int, domain: str = "sums") -> SuitePrompt:
    return SuitePrompt(f"{domain}-{number}", domain, number, [5, 6, 7, number], f"question {number}")


def plain_run(tokens: int = 41, each: float = 0.03) -> Measurement:
    decoded = tokens - 1
    time = {"prefill": 0.05, "target": decoded * each, "draft": 0.0, "host": 0.001 * decoded}
    return Measurement(
        tokens=list(range(tokens)), seconds=sum(time.values()), first_token_seconds=0.05, target_forwards=decoded,
        target_tokens=decoded, decoded=decoded, rounds=decoded, time=time,
    )  # fmt: skip


def drafted_run(
    tokens: int = 41, rounds: int = 20, nodes: int = 7, accepted: int | None = None, noise: float = 1.0
) -> Measurement:
    decoded = tokens - 1
    accepted = decoded - rounds if accepted is None else accepted
    time = {"prefill": 0.05, "target": noise * rounds * 0.036, "draft": rounds * 0.004, "host": rounds * 0.002}
    return Measurement(
        tokens=list(range(tokens)), seconds=sum(time.values()), first_token_seconds=0.05, target_forwards=rounds,
        target_tokens=rounds * (1 + nodes), draft_forwards=rounds, decoded=decoded, rounds=rounds, time=time,
        drafted_by_depth=[rounds, accepted], accepted_by_depth=[accepted, 0],
        burst_seconds=[0.05 + 0.04 * n for n in range(rounds)], burst_tokens=[1] + [2] * (rounds - 1),
    )  # fmt: skip


def made_up_records(prompts: int = 12, seed: int = 0, gain: float = 1.0) -> list[PromptRecord]:
    random = np.random.default_rng(seed)
    records = []
    for number in range(prompts):
        domain = ("sums", "lists")[number % 2]
        tokens = int(random.integers(30, 60))
        rounds = max(1, round((tokens - 1) / float(gain * random.uniform(1.7, 2.3))))
        runs = {
            PLAIN: plain_run(tokens),
            SPECULATIVE: drafted_run(tokens, rounds, noise=float(random.uniform(0.9, 1.1))),
        }
        records.append(PromptRecord(prompt(number, domain), runs))
    return records


def report_of(records: list[PromptRecord], **changes: Any) -> dict[str, Any]:
    exact = Comparison("float32")
    timed = Comparison("bfloat16")
    for record in records:
        exact.add(record.prompt, None)
        timed.add(record.prompt, None)
    arguments: dict[str, Any] = dict(
        records=records,
        target={"name": "a/target", "parameters": 1000, "hash": "abc"},
        draft={"architecture": "block", "trainable_parameters": 90, "ratio_to_target": 0.09},
        training={"supervised_tokens": 10, "budget_tokens": 20, "seconds": 3.0},
        machine={
            "processor": "a processor", "processor_features": [], "cores": 2, "threads": 2, "dtype": "bfloat16",
            "accelerator": None, "load_average_before": [0.1, 0.1, 0.1], "load_average_after": None,
            "other_processes_share": 0.01, "busy": False,
        },
        settings={
            "evaluate": {"warmup": 1, "repeats": 1, "bootstrap": 200, "max_new_tokens": 60},
            "decoding": {"sampling": {"temperature": 0.0}},
        },
        identity=exact,
        timed_identity=timed,
        cost_curve={1: 0.030, 8: 0.036, 32: 0.05},
        cost_context=256,
        peak_memory={"host": 10**9, "accelerator": None},
        replay=[],
        skipped=[],
        empty_domains=[],
        contenders={PLAIN: "no drafting", SPECULATIVE: "a tree"},
        commands=["python -m jetspec_train stage=evaluate"],
        versions={"python": "3"},
        draws=200,
    )  # fmt: skip
    return build_report(**{**arguments, **changes})


# --- statistics


def test_speedup_is_a_ratio_of_totals_not_a_mean_of_ratios() -> None:
    estimate = speedup([10.0, 1.0], [100, 10], [5.0, 1.0], [100, 10])
    assert estimate.value == pytest.approx(11 / 6)


def test_pairing_removes_what_differs_between_prompts() -> None:
    seconds = np.exp(np.random.default_rng(0).normal(size=20))
    estimate = speedup(seconds, seconds * 30, seconds / 2, seconds * 30)
    assert estimate.interval == pytest.approx([2.0, 2.0])
    tokens = [30] * 20
    estimate = speedup(seconds, tokens, seconds / 2, tokens)
    assert estimate.interval == pytest.approx([2.0, 2.0])


@pytest.mark.parametrize(("domains", "each"), [(1, 10), (6, 3)])
def test_interval_covers_the_truth_about_as_often_as_it_says(domains: int, each: int) -> None:
    random = np.random.default_rng(1)
    strata = [domain for domain in range(domains) for _ in range(each)]
    means = 1.5 + np.array(strata) / 2  # domains differ far more than prompts of one domain do
    truth = float(means.mean())
    hits, trials = 0, 400
    for trial in range(trials):
        forwards = np.full(len(strata), 20.0)
        tokens = random.poisson(means * forwards)
        estimate = ratio_of_sums(tokens, forwards, strata=strata, draws=400, seed=trial)
        assert estimate.low is not None and estimate.high is not None
        hits += estimate.low <= truth <= estimate.high
    assert 0.91 <= hits / trials <= 0.98


def test_single_prompts_of_many_domains_still_have_an_honest_interval() -> None:
    estimate = ratio_of_sums([10.0, 20.0, 30.0, 40.0], [10.0] * 4, strata=list("abcd"))
    assert estimate.interval is not None and estimate.interval[0] < 2.0 and estimate.interval[1] > 3.0


def test_one_prompt_has_no_interval_and_none_no_value() -> None:
    assert ratio_of_sums([4.0], [2.0]).interval is None
    assert ratio_of_sums([], []).value is None
    assert ratio_of_sums([1.0, 2.0], [0.0, 0.0]).value is None
    assert interval_of(np.array([math.nan]), 5) == (None, None)
    with pytest.raises(ValueError, match="paired"):
        speedup([1.0], [1], [1.0, 2.0], [1, 2])


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=10, deadline=None)
def test_every_interval_contains_its_value(seed: int) -> None:
    random = np.random.default_rng(seed)
    estimate = ratio_of_sums(random.uniform(1, 9, 12), random.uniform(1, 9, 12), draws=500, seed=seed)
    assert estimate.interval is not None and estimate.interval[0] <= estimate.value <= estimate.interval[1]  # type: ignore[operator]


# --- the loop


def test_contenders_take_turns_and_warm_up_is_not_counted() -> None:
    calls: list[str] = []

    def contender(name: str) -> Contender:
        def answer(tokens: list[int], row: int, limit: int, clock: Any) -> Measurement:
            calls.append(name)
            return Measurement(tokens=[1, 2], seconds=0.0)

        return Contender(name, answer)

    records = benchmark(
        [prompt(n) for n in range(3)], [contender("a"), contender("b")], max_new_tokens=4, warmup=1, repeats=2
    )
    assert calls[:2] == ["a", "b"]
    assert calls[2:] == ["a", "b", "b", "a", "b", "a", "a", "b", "a", "b", "b", "a"]
    assert len(records) == 3 and all(run.repeats == 2 for record in records for run in record.runs.values())


def test_rotation_keeps_everyone() -> None:
    contenders = [Contender(name, lambda *_: Measurement([], 0.0)) for name in "abc"]
    assert [c.name for c in rotate(contenders, 4)] == ["b", "c", "a"]


def test_own_work_is_not_other_work() -> None:
    meter = OtherWork()
    meter.start()
    sum(n * n for n in range(200_000))
    meter.stop()
    assert meter.share is not None and 0.0 <= meter.share <= 1.0
    meter.other = meter.wall * meter.cores * 0.5
    assert meter.summary()["busy"] is True and meter.summary()["other_processes_share"] == pytest.approx(0.5)


# --- measures


def test_figures_of_a_known_run() -> None:
    records = [PromptRecord(prompt(n), {PLAIN: plain_run(), SPECULATIVE: drafted_run()}) for n in range(3)]
    figures = summarise(records, SPECULATIVE, {1: 0.03, 8: 0.036}, draws=50)
    assert figures["acceptance_length"] == 2.0
    assert figures["acceptance_rate_at"] == [1.0, 0.0] and figures["prefix_survival_at"] == [1.0, 0.0]
    assert figures["pass_rate"] == pytest.approx(20 / 140)
    assert figures["wasted_compute"] == pytest.approx(120 / 160)
    assert figures["target_tokens_per_token"] == 4.0
    assert sum(figures["time_share"].values()) == pytest.approx(1.0)
    assert figures["speedup"] == pytest.approx(plain_run().seconds / drafted_run().seconds)
    assert figures["seconds_between_arrivals"]["p50"] == pytest.approx(0.04)
    assert figures["seconds_per_token"]["p50"] == pytest.approx(0.02)
    bound = figures["bound"]
    assert bound["bound"] == pytest.approx(2.0 * 0.03 / (0.036 + 0.004))
    assert bound["steps"][0]["speedup"] == 2.0
    assert [step["speedup"] for step in bound["steps"][:3]] == sorted(
        (step["speedup"] for step in bound["steps"][:3]), reverse=True
    )
    assert bound["achieved_decode"] == pytest.approx(figures["decode_speedup"])


def test_a_draft_that_is_never_accepted_has_figures_and_a_verdict() -> None:
    records = [
        PromptRecord(prompt(n), {PLAIN: plain_run(), SPECULATIVE: drafted_run(rounds=40, accepted=0)}) for n in range(9)
    ]
    report = report_of(records)
    assert report["overall"]["acceptance_length"] == 1.0 and report["overall"]["pass_rate"] == 0.0
    assert report["overall"]["wasted_compute"] == pytest.approx(7 / 8)
    assert any("never accepted" in line["text"] and line["state"] == "bad" for line in report["verdict"])
    assert report["verdict"][0]["text"].startswith("Slower")


def test_answers_of_one_token_have_no_rounds_and_do_not_divide_by_zero(tmp_path: Path) -> None:
    one = Measurement(tokens=[2], seconds=0.05, first_token_seconds=0.05, time={"prefill": 0.05})
    records = [PromptRecord(prompt(n), {PLAIN: copy.deepcopy(one), SPECULATIVE: copy.deepcopy(one)}) for n in range(2)]
    report = report_of(records, cost_curve={})
    assert report["overall"]["acceptance_length"] is None and report["overall"]["bound"] is None
    assert bound_and_gap(records, SPECULATIVE, {}, None) is None
    write_report(tmp_path, report, records)


# --- identity


def test_the_first_difference() -> None:
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


@pytest.mark.parametrize(("margin", "lossless"), [(5e-5, True), (2e-4, False)])
def test_only_a_tie_excuses_a_divergence(margin: float, lossless: bool) -> None:
    comparison = Comparison("float32")
    asked: list[Any] = []

    def margin_of(prefix: list[int], a: int, b: int) -> float:
        asked.append((prefix, a, b))
        return margin

    compare_outputs(comparison, prompt(1), [8, 9, 10], [8, 11, 10], margin_of, excuse_ties=True)
    assert asked == [([5, 6, 7, 1, 8], 9, 11)]
    assert comparison.lossless is lossless and comparison.identical == 0


def test_an_output_that_ends_early_is_never_excused() -> None:
    comparison = Comparison("float32")
    compare_outputs(comparison, prompt(1), [8, 9], [8], lambda *_: 0.0, excuse_ties=True)
    assert comparison.lossless is False
    assert Comparison("float32").lossless is None


# --- report


def test_verdict_states_failures_ties_and_a_busy_machine() -> None:
    records = made_up_records()
    report = report_of(records)
    assert report["verdict"][0]["state"] == "good" and report["verdict"][0]["text"].startswith("Faster")
    failed = Comparison("float32")
    compare_outputs(failed, records[0].prompt, [1], [2], lambda *_: 0.5, excuse_ties=True)
    busy = {**report["machine"], "busy": True, "other_processes_share": 0.4}
    report = report_of(records, identity=failed, machine=busy)
    texts = " ".join(line["text"] for line in report["verdict"])
    assert report["overall"]["lossless_fp32"] is False
    assert "NOT lossless: 1 of 1" in texts and "busy: other processes used 40 %" in texts


def test_without_a_float32_check_nothing_is_claimed() -> None:
    report = report_of(made_up_records(), identity=None)
    assert report["overall"]["lossless_fp32"] is None
    assert any("not checked" in line["text"] for line in report["verdict"])


def test_two_runs_of_the_same_thing_agree() -> None:
    first, second = report_of(made_up_records(seed=1)), report_of(made_up_records(seed=2))
    (low, high), (other_low, other_high) = first["overall"]["speedup_ci95"], second["overall"]["speedup_ci95"]
    assert max(low, other_low) <= min(high, other_high)
    assert first["verdict"][0]["state"] == second["verdict"][0]["state"]


def test_a_report_of_another_version_is_refused_with_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text(json.dumps({**report_of(made_up_records()), "schema_version": 7}))
    with pytest.raises(UserError, match=r"version 7.*reads version 1"):
        load_report(path)
    path.write_text("[1, 2]")
    with pytest.raises(UserError, match="no schema_version"):
        load_report(path)


def test_the_page_escapes_what_a_model_wrote() -> None:
    item = {"id": "x", "domain": "<i>d</i>", "prompt": "<script>alert(1)</script>", "tokens": 1}
    item["rounds"] = [{"accepted": ["<b>"], "rejected": ["\n"], "more_rejected": 2, "bonus": "&"}]
    page = render_page(report_of(made_up_records(), replay=[item]), {})
    assert "<script>" not in page and "<b>" not in page and "↵" in page and "+2" in page


# --- replay


class Tree:
    def __init__(self, tokens: list[int], parents: list[int]) -> None:
        self.tokens, self.parents = tokens, parents


def test_replay_walks_the_tree_along_the_output() -> None:
    trees = [Tree([11, 12, 13, 14], [-1, 0, -1, 1]), Tree([99], [-1])]
    rounds = replay_rounds([10, 11, 12, 20, 30, 40], trees, str)
    assert rounds == [
        {"accepted": [], "rejected": [], "more_rejected": 0, "bonus": "10"},
        {"accepted": ["11", "12"], "rejected": ["14", "13"], "more_rejected": 0, "bonus": "20"},
        {"accepted": [], "rejected": ["99"], "more_rejected": 0, "bonus": "30"},
        {"accepted": [], "rejected": [], "more_rejected": 0, "bonus": "40"},
    ]


# --- compare


def test_comparison_finds_a_real_difference_and_no_difference() -> None:
    base, same, better = (report_of(made_up_records(seed=3, gain=gain)) for gain in (1.0, 1.0, 1.3))
    result = compare_reports(base, same, names=["a", "b"], draws=300)
    assert all(row["ratio"] == 1.0 and not row["real"] for row in result["rows"])
    result = compare_reports(base, better, names=["a", "b"], draws=300)
    rows = {(row["domain"], row["measure"]): row for row in result["rows"]}
    assert rows["all", "acceptance_length"]["verdict"] == "higher" and rows["all", "speedup"]["real"]
    assert "higher" in comparison_table(result)
    assert {row["domain"] for row in result["rows"]} == {"all", "sums", "lists"}


def test_only_common_prompts_are_compared() -> None:
    first = report_of(made_up_records(12))
    second = report_of(made_up_records(6))
    result = compare_reports(first, second, names=["a", "b"], draws=50)
    assert result["paired_prompts"] == 6 and result["unpaired_prompts"] == [6, 0]
    for record in second["records"]:
        record["prompt_hash"] = "other"
    with pytest.raises(UserError, match="share no prompt"):
        compare_reports(first, second, names=["a", "b"])


def test_what_makes_reports_hard_to_compare_is_said() -> None:
    first, second = report_of(made_up_records()), report_of(made_up_records())
    second["target"]["hash"] = "xyz"
    second["machine"]["busy"] = True
    notes = " ".join(compare_reports(first, second, names=["a", "b"], draws=50)["caveats"])
    assert "targets differ" in notes and "busy during the second" in notes


def test_compare_stage_writes_its_result_and_asks_for_two_reports(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from jetspec_train.stages import compare

    cfg = Config(run_dir=str(tmp_path), reports=["only.json"])
    with pytest.raises(UserError, match="two reports, got 1"):
        compare.run(cfg)
    for name in ("a", "b"):
        atomic_json(tmp_path / name / "report.json", report_of(made_up_records()))
    cfg.reports = [str(tmp_path / "a" / "report.json"), str(tmp_path / "b")]
    compare.run(cfg)
    assert "no real difference" in capsys.readouterr().out
    assert json.loads((tmp_path / "compare" / "compare.json").read_text())["paired_prompts"] == 12


# --- settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"baselines": ["vllm"]}, "vllm.*generate, prompt_lookup"),
        ({"baselines": ["assisted"]}, "evaluate.assistant"),
        ({"variants": {"chain": {"shapes": "chain"}}}, "chain.shapes"),
        ({"variants": {"wide": {"nodes": "many"}}}, "wide.nodes.*'many'"),
        ({"variants": {"plain": {"nodes": 3}}}, "taken"),
    ],
)
def test_wrong_settings_are_refused_before_a_model_is_loaded(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_contenders(EvaluateConfig(**changes), DecodingConfig())
