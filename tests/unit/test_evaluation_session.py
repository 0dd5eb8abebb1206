"""An evaluation end to end on a tiny random target and an untrained draft, from prompts to page."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jetspec_train.artifacts.bundle import read_bundle, write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, DraftConfig, EvaluateConfig, SamplingConfig
from jetspec_train.evaluation.benchmark import PLAIN, SPECULATIVE, decoder_contender, run_benchmark
from jetspec_train.evaluation.identity import MarginJudge
from jetspec_train.evaluation.measures import contender_figures
from jetspec_train.evaluation.report import load_report, write_report
from jetspec_train.evaluation.session import evaluate_bundle
from jetspec_train.evaluation.suites import SuitePrompt, build_suite
from tests.tiny import tiny_prompts, tiny_target, tiny_target_config

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"


@dataclass
class Candidate:
    id: str
    domain: str
    messages: list[dict[str, str]]


def candidates(count: int = 3) -> list[Candidate]:
    return [
        Candidate(f"{domain}-{n}", domain, [{"role": "user", "content": f"What is {n} and {word}? <b>&amp;"}])
        for n in range(count)
        for domain, word in (("sums", "four"), ("lists", "apples"))
    ]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    from jetspec_train.modeling.draft_config import resolve_draft_config
    from jetspec_train.modeling.draft_head import DraftHead

    target = tiny_target("llama")
    config = resolve_draft_config(
        DraftConfig(layers=1, block=4, taps=2, parent_rank=8), target.model.config, mask_token_id=target.mask_token_id
    )
    head = DraftHead(config)
    path = tmp_path_factory.mktemp("bundle") / "bundle"
    write_bundle(
        path,
        bundle={"target": target.identity.to_dict()},
        config={"draft": config.to_dict(), "verifier": None},
        tensors={f"draft.{name}": tensor for name, tensor in head.state_dict().items()},
        card="A tiny untrained draft.",
    )
    return read_bundle(path)


def evaluate(
    bundle: Any, *, prompts: list[Candidate] | None = None, **changes: Any
) -> tuple[dict[str, Any], list[Any]]:
    decoding = changes.pop("decoding", DecodingConfig(nodes=6, shortlist=4))
    settings = EvaluateConfig(
        **{"prompts": 3, "max_new_tokens": 10, "bootstrap": 100, "cost_context": 16, "replay": 2, **changes}
    )
    from dataclasses import asdict

    return evaluate_bundle(
        bundle,
        candidates() if prompts is None else prompts,
        target_config=tiny_target_config("llama"),
        evaluate=settings,
        decoding=decoding,
        training={"supervised_tokens": None, "budget_tokens": None, "seconds": None},
        settings={"evaluate": asdict(settings), "decoding": asdict(decoding)},
        commands=["python -m jetspec_train stage=evaluate"],
        versions={"python": "3"},
    )[:2]


def test_report_is_complete_valid_and_self_contained(bundle: Any, tmp_path: Path) -> None:
    import jsonschema

    report, records = evaluate(bundle, baselines=["generate", "prompt_lookup"], variants={"chain": {"shape": "chain"}})
    files = write_report(tmp_path, report, records)
    loaded = load_report(tmp_path)
    jsonschema.validate(loaded, json.loads(SCHEMA.read_text()))
    assert set(loaded["overall"]["contenders"]) == {PLAIN, SPECULATIVE, "chain", "generate", "prompt_lookup"}
    assert loaded["overall"]["lossless_fp32"] is True
    assert loaded["domains"]["sums"]["compared_outputs"] == 3 == loaded["domains"]["sums"]["identical_outputs"]
    page = (tmp_path / "report.html").read_text()
    assert page.count("data:image/svg+xml;base64,") >= 5
    for reference in ("http://", "https://", "<script", 'src="/', "file:"):
        assert reference not in page.replace("http://www.w3.org", "")
    assert "&lt;b&gt;&amp;amp;" in page and "<b>&amp;" not in page
    assert len(page) < 5_000_000
    assert all(path.is_file() for path in files)
    assert len((tmp_path / "records.jsonl").read_text().splitlines()) == len(records) == 6


def test_an_untrained_draft_is_reported_as_useless_not_as_a_crash(bundle: Any) -> None:
    report, _ = evaluate(bundle, replay=0, cost_context=0, prompts=candidates(1))
    overall = report["overall"]
    assert overall["acceptance_length"] >= 1.0
    assert 0.0 <= overall["pass_rate"] < 0.5
    assert report["replay"] == [] and report["cost_curve"] is None and overall["bound"]["bound"] is None


def test_transformers_agrees_with_plain_decoding_in_float32(bundle: Any) -> None:
    _, records = evaluate(bundle, baselines=["generate", "prompt_lookup"], replay=0, cost_context=0)
    for record in records:
        assert record.runs["generate"].tokens == record.runs[PLAIN].tokens
        assert record.runs["prompt_lookup"].tokens == record.runs[PLAIN].tokens
        assert record.runs["generate"].target_forwards == record.runs["generate"].decoded


def test_curves_measure_one_condition_at_a_time(bundle: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import jsonschema

    from jetspec_train.evaluation import curves

    monkeypatch.setitem(curves.CURVES, "context", (48, 64, 1_000_000))
    report, records = evaluate(
        bundle, curves=list(curves.CURVES), curve_prompts=3, replay=0, cost_context=0, fp32_prompts=0
    )
    write_report(tmp_path, report, records)
    jsonschema.validate(load_report(tmp_path), json.loads(SCHEMA.read_text()))
    points = {name: [point["at"] for point in found] for name, found in report["curves"].items()}
    assert points == {
        "context": [48, 64],  # the last is longer than the target's context
        "batch": [1, 2, 4, 8],
        "budget": [4, 8, 16, 32, 64],
        "temperature": [0.0, 0.5, 1.0],
    }
    answers = {point["at"]: point["answers"] for point in report["curves"]["batch"]}
    assert answers == {1: 3, 2: 4, 4: 4, 8: 8}  # whole batches: prompts are repeated
    for found in report["curves"].values():
        assert all(point["speedup"] > 0 and point["acceptance_length"] >= 1 for point in found)
    assert (tmp_path / "figures" / "curve_context.png").is_file()


def test_the_context_of_a_curve_ends_with_the_prompt(bundle: Any) -> None:
    from jetspec_train.evaluation.curves import condition

    prompt = SuitePrompt("a", "d", 0, [7, 8, 9], "")
    batches, settings, _ = condition("context", 8, [prompt], [1, 2], DecodingConfig(nodes=5))
    assert batches == [[[2, 1, 2, 1, 2, 7, 8, 9]]]
    assert settings.nodes == 5
    assert condition("context", 8, [prompt], [], DecodingConfig())[0] == []
    assert condition("context", 3, [prompt], [1], DecodingConfig())[0] == []  # the prompt alone is as long
    wider = condition("budget", 16, [prompt], [], DecodingConfig(nodes=4, candidates=6))[1]
    assert (wider.nodes, wider.candidates) == (16, 16)


def test_keyed_sampling_is_compared_too(bundle: Any) -> None:
    decoding = DecodingConfig(nodes=6, shortlist=4, sampling=SamplingConfig(temperature=0.8))
    report, _ = evaluate(bundle, decoding=decoding, replay=0, cost_context=0)
    assert report["overall"]["lossless_fp32"] is True


def test_replay_shows_the_whole_answer(bundle: Any) -> None:
    report, records = evaluate(bundle, cost_context=0)
    chat = tiny_target("llama").chat
    for item, record in zip(report["replay"], records):
        kept = [text for part in item["rounds"] for text in [*part["accepted"], part["bonus"]] if text is not None]
        expected = [chat.decode([token], skip_special_tokens=False) for token in record.runs[SPECULATIVE].tokens]
        assert kept == expected
        assert sum(len(part["rejected"]) for part in item["rounds"]) > 0


def test_a_perfect_draft_reaches_the_length_of_its_chain() -> None:
    from jetspec_train.decoding.decoder import Decoder
    from jetspec_train.decoding.stubs import EchoDrafter

    target = tiny_target("llama")
    tokens = tiny_prompts(1)[0]
    settings = DecodingConfig(shape="chain", nodes=4)
    common: dict[str, Any] = {"sampling": SamplingConfig(), "seed": 0, "stop": []}
    plain = Decoder(target, None, settings)
    answer = plain.generate([tokens], max_new_tokens=21)[0].tokens
    echo = Decoder(target, EchoDrafter([answer], [len(tokens)]), settings)
    contenders = [decoder_contender(PLAIN, plain, **common), decoder_contender(SPECULATIVE, echo, **common)]
    records = run_benchmark([SuitePrompt("a", "d", 0, tokens, "")], contenders, max_new_tokens=21, warmup=0)
    figures = contender_figures(records, SPECULATIVE, draws=50, seed=0)
    assert records[0].runs[SPECULATIVE].tokens == answer
    if len(answer) == 21:
        assert figures["acceptance_length"] == 5.0
        assert figures["prefix_survival_at"] == [1.0] * 4
    assert figures["pass_rate"] == 1.0 and figures["wasted_compute"] == 0.0


def test_timing_covers_the_decoder_and_arrivals_cover_the_answer(bundle: Any) -> None:
    _, records = evaluate(bundle, replay=0, cost_context=0)
    for record in records:
        for run in record.runs.values():
            assert sum(run.burst_tokens) == len(run.tokens)
            assert sum(run.time.values()) <= run.seconds
            assert run.first_token_seconds <= run.burst_seconds[-1] <= run.seconds


def test_margin_is_that_of_the_target() -> None:
    import torch

    target = tiny_target("llama")
    tokens = tiny_prompts(1)[0]
    logits = target.model(torch.tensor([tokens])).logits[0, -1]
    best, second = logits.topk(2).indices.tolist()
    expected = float(logits[best] - logits[second])
    assert MarginJudge(target, double=True)(tokens, best, second) == pytest.approx(expected, abs=1e-4)
    assert MarginJudge(target, double=True)(tokens, best, best) == 0.0


def test_prompts_that_do_not_fit_are_counted_and_none_left_is_an_error() -> None:
    chat = tiny_target("llama").chat
    long = Candidate("long", "sums", [{"role": "user", "content": "apples " * 300}])
    suite = build_suite([long, *candidates(1)], chat, per_domain=5, max_new_tokens=32, max_positions=256)
    assert [entry["id"] for entry in suite.skipped] == ["long"] and len(suite.prompts) == 2
    assert suite.skipped[0]["prompt_tokens"] > 224
    with pytest.raises(UserError, match="too long"):
        build_suite([long], chat, per_domain=5, max_new_tokens=32, max_positions=256)
    with pytest.raises(UserError, match="nothing to evaluate"):
        build_suite([], chat, per_domain=5, max_new_tokens=32, max_positions=256)
    with pytest.raises(UserError, match=r"poems.*lists, sums"):
        build_suite(candidates(1), chat, per_domain=5, max_new_tokens=32, max_positions=256, domains=["poems"])


def test_domains_are_interleaved_and_limited() -> None:
    chat = tiny_target("llama").chat
    suite = build_suite(candidates(5), chat, per_domain=2, max_new_tokens=4, max_positions=256)
    assert [prompt.domain for prompt in suite.prompts] == ["sums", "lists", "sums", "lists"]
    assert [prompt.row for prompt in suite.prompts] == [0, 1, 2, 3]


def test_a_bundle_with_a_verifier_has_a_section_that_its_raw_lines_give_again(tmp_path: Path) -> None:
    import jsonschema

    from jetspec_train.evaluation.session import evaluate_bundle as run
    from jetspec_train.evaluation.verification import summarise_verification
    from jetspec_train.stages import calibrate, export
    from tests.verifier_tools import run_with_verifier

    cfg = run_with_verifier(tmp_path, bias=3.0)
    calibrate.run(cfg)
    export.run(cfg)
    settings = EvaluateConfig(
        prompts=2, max_new_tokens=12, bootstrap=100, cost_context=0, replay=1, fp32_prompts=0, verification=1
    )
    report, records, lines = run(
        read_bundle(tmp_path / "export" / "bundle"),
        candidates(),
        target_config=tiny_target_config("llama"),
        evaluate=settings,
        decoding=cfg.decoding,
        training={"supervised_tokens": None, "budget_tokens": None, "seconds": None},
        settings={"evaluate": vars(settings), "decoding": {"sampling": {"temperature": 0}}},
        commands=[],
        versions={},
    )
    write_report(tmp_path / "evaluate", report, records, lines)
    loaded = load_report(tmp_path / "evaluate")
    jsonschema.validate(loaded, json.loads(SCHEMA.read_text()))
    section = loaded["verification"]
    raw = [json.loads(line) for line in (tmp_path / "evaluate" / "verification.jsonl").read_text().splitlines()]
    assert summarise_verification(raw, draws=100) == section
    assert section["calibrated"] and section["policy"]["policy"] == "lossless"
    assert "no threshold is certified" in section["policy"]["reason"]
    assert section["prompts"] == 2 and section["judged_tokens"] > 0
    # what a lossless policy emits is the target's own
    assert section["identical_answers"] == 1.0 and section["quality_retained"] == 1.0 == section["quality_lower_bound"]
    target, bundle = tiny_target("llama"), read_bundle(tmp_path / "export" / "bundle")
    own = sum(tensor.numel() for name, tensor in bundle.tensors.items() if name.startswith("verifier."))
    assert section["verifier_parameters"] == own == section["verifier_ratio_to_target"] * target.parameters
    # the replay is the whole answer: what each round emitted, in order
    answer = next(line for line in raw if line["type"] == "answer" and line["run"] == "policy")
    (shown,) = section["replay"]
    text = "".join(token["text"] for part in shown["rounds"] for token in part["tokens"])
    assert text == "".join(target.chat.decode([token], skip_special_tokens=False) for token in answer["tokens"])
    page = (tmp_path / "evaluate" / "report.html").read_text()
    assert 'id="verification"' in page and 'id="figure-reliability"' in page
    assert (tmp_path / "evaluate" / "figures" / "precision_coverage.png").is_file()
