"""The report's verification section: every figure from raw lines alone, checked by hand on made-up ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetspec_train.evaluation.calibration import upper_bound
from jetspec_train.evaluation.report import verification_verdict
from jetspec_train.evaluation.verification import (
    quality_retained,
    repetition,
    replay,
    savings,
    summarise_verification,
)

SCHEMA = Path(__file__).resolve().parents[2] / "docs" / "report.schema.json"
FACTS = {
    "type": "facts",
    "mode": "match_greedy",
    "calibrated": True,
    "policy": "trusting",
    "policy_reason": "certified",
    "stage_length": 2,
    "threshold": 0.97,
    "threshold_certified": True,
    "best_without_stages": "speculative",
    "verifier_parameters": 60,
    "draft_parameters": 40,
    "target_parameters": 1000,
}
DEPTH = 4


def made_up_lines(prompts: int = 12, rounds: int = 15, seed: int = 0) -> list[dict[str, Any]]:
    """Chains whose slots are accepted with known probabilities; the verifier knows them, the margin hardly does."""
    random = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = [dict(FACTS)]
    for prompt in range(prompts):
        names = {"prompt": f"p{prompt}", "domain": "sums" if prompt % 2 else "lists"}
        for number in range(rounds):
            truth = random.beta(3, 0.6, size=DEPTH)
            accepted = int(np.cumprod(random.random(DEPTH) < truth).sum())
            logits = np.log(truth / (1 - truth))
            nodes = [
                {
                    "token": slot,
                    "parent": slot - 1,
                    "correctness_logit": float(logits[slot]),
                    "correctness": float(truth[slot]),
                    "survival": float(truth[: slot + 1].prod()),
                    "confidence_logit": float(logits[slot]),
                    "confidence": float(truth[slot]),
                    "logprob": float(logits[slot] + random.normal(scale=3) - 6),
                    "margin": float(abs(random.normal())),
                    "entropy": float(abs(random.normal())),
                }
                for slot in range(DEPTH)
            ]
            common = {"type": "round", "round": number, "nodes": nodes, "sent": list(range(DEPTH)), **names}
            taken = {"accepted": list(range(accepted)), "emitted": list(range(accepted + 1))}
            lines.append({"run": "chain", "decisions": [], "target_choices": [], **common, **taken})
            choices = [*range(accepted), 99, 98, 97, 96, 95][: DEPTH + 1]
            stages = [
                {"stage": i, "nodes": [2 * i, 2 * i + 1], "survival": 0.98, "action": "defer", "statistics": None}
                for i in range(2)
            ]
            lines.append({"run": "policy", "decisions": stages, "target_choices": choices, **common, **taken})
        for run, (forwards, tokens, seconds) in RUNS.items():
            lines.append(answer(run, f"p{prompt}", names["domain"], forwards, tokens, seconds))
    return lines


RUNS = {"plain": (20, 20, 2.0), "without_stages": (8, 80, 0.8), "every_stage": (10, 40, 1.2), "policy": (4, 48, 1.0)}


def answer(run: str, prompt: str, domain: str, forwards: int, tokens: int, seconds: float) -> dict[str, Any]:
    return {
        "type": "answer",
        "run": run,
        "prompt": prompt,
        "domain": domain,
        "tokens": list(range(21)) if run != "policy" else [*range(20), 77],
        "target_logprob": -10.5 if run != "policy" else -10.92,
        "seconds": seconds,
        "decoded": 20,
        "target_forwards": forwards,
        "target_tokens": tokens,
        "draft_forwards": forwards,
    }


@pytest.fixture(scope="module")
def section() -> dict[str, Any]:
    found = summarise_verification(made_up_lines(), draws=100)
    assert found is not None
    return found


def test_the_section_is_the_same_again_from_the_file_and_fits_the_schema(section: dict[str, Any]) -> None:
    import jsonschema

    again = summarise_verification((json.loads(json.dumps(line)) for line in made_up_lines()), draws=100)
    assert again == section
    schema = json.loads(SCHEMA.read_text())
    jsonschema.validate(
        json.loads(json.dumps(section)), {**schema["properties"]["verification"], "$defs": schema["$defs"]}
    )
    json.dumps(section, allow_nan=False)


def test_the_judged_population_ends_with_the_first_reject(section: dict[str, Any]) -> None:
    chains = [line for line in made_up_lines() if line.get("run") == "chain"]
    judged = sum(min(len(line["accepted"]) + 1, DEPTH) for line in chains)
    accepted = sum(len(line["accepted"]) for line in chains)
    assert section["judged_tokens"] == judged and section["prior"] == pytest.approx(accepted / judged)
    assert section["constant_accuracy"] == pytest.approx(max(accepted, judged - accepted) / judged)
    assert (
        sum(p["count"] for p in section["positions"]) == judged == sum(d["count"] for d in section["domains"].values())
    )
    assert [p["position"] for p in section["positions"]] == [1, 2, 3, 4]
    assert section["positions"][0]["count"] == len(chains)


def test_a_verifier_that_knows_the_truth_beats_the_baselines_and_is_calibrated(section: dict[str, Any]) -> None:
    assert (
        section["auroc"] > section["baselines"]["draft_probability"]["auroc"] > section["baselines"]["margin"]["auroc"]
    )
    gain = section["auroc_gain"]
    assert gain["baseline"] == "draft_probability" and 0 < gain["ci95"][0] < gain["difference"] < gain["ci95"][1]
    assert section["ece"] < 0.06 and set(section["curves"]) == {"verifier", "draft_probability"}
    assert section["confidence_head"]["auroc"] == section["auroc"]
    assert verification_verdict(section)[0][0] == "good"


def test_screening_counts_every_stage_and_bounds_one_of_each_prompt(section: dict[str, Any]) -> None:
    lines = [line for line in made_up_lines() if line.get("run") == "policy" and line["type"] == "round"]
    stages = passed = 0
    for line in lines:
        accepted = len(line["accepted"])
        judged = 1 if accepted < 2 else 2
        stages, passed = stages + judged, passed + min(judged, accepted // 2)
    assert (section["screened_stages"], section["screened_prompts"]) == (stages, 12)
    assert section["screening_accuracy"] == pytest.approx(passed / stages)
    bounds = {1 - upper_bound(errors, 12) for errors in range(13)}
    assert section["screening_lower_bound"] in bounds and section["skipped_share"] == 1.0


def test_savings_compare_with_verifying_every_stage_and_with_the_best_decoder(section: dict[str, Any]) -> None:
    assert section["forwards_saved"] == pytest.approx(1 - 4 / 10)
    assert section["target_tokens_ratio"] == pytest.approx(48 / 40)
    assert section["wall_clock_ratio"] == pytest.approx(0.8 / 1.0)
    assert section["verifier_ratio_to_target"] == 0.06 and section["draft_and_verifier_ratio_to_target"] == 0.1
    assert savings([])["forwards_saved"] is None and savings([])["wall_clock_ratio"] is None


def test_quality_is_a_ratio_of_probabilities_per_token_with_a_bound(section: dict[str, Any]) -> None:
    assert section["quality_retained"] == pytest.approx(np.exp((-10.92 + 10.5) / 21))
    assert section["quality_lower_bound"] == pytest.approx(section["quality_retained"])  # every prompt is alike
    assert section["identical_answers"] == 0.0
    lines = [
        a for p in range(20) for a in (answer("plain", f"p{p}", "d", 1, 1, 1), answer("policy", f"p{p}", "d", 1, 1, 1))
    ]
    for line, noise in zip(lines, np.random.default_rng(1).normal(size=40)):
        line["target_logprob"] += noise
    found = quality_retained(lines, draws=200, seed=0)
    assert found["quality_lower_bound"] < found["quality_retained"]
    assert quality_retained([], draws=10, seed=0)["quality_retained"] is None


def test_the_replay_colours_what_waited_what_was_kept_and_what_was_dropped() -> None:
    line = {
        "run": "policy",
        "prompt": "p",
        "domain": "d",
        "anchor": 7,
        "nodes": [{"token": 10 + n} for n in range(5)],
        "accepted": [0, 1, 2],
        "deferred": [0, 1],
        "overruled": [1],
        "rejected": [3, 4],
        "emitted": [10, 11, 12, 99],
    }
    texts = {"prompts": {"p": "Hi"}, "tokens": {str(t): f"<{t}>" for t in (7, 10, 11, 12, 13, 14, 99)}}
    (shown,) = replay([line, {**line, "emitted": [10]}], texts)
    kinds = [[(t["text"], t["kind"]) for t in part["tokens"]] for part in shown["rounds"]]
    assert kinds[0] == [("<7>", "bonus")]
    assert kinds[1] == [("<10>", "deferred"), ("<11>", "overruled"), ("<12>", "accepted"), ("<99>", "bonus")]
    assert kinds[2] == [("<10>", "deferred")]  # the answer ended there
    assert shown["rounds"][1]["rejected"] == ["<13>", "<14>"] and replay([line], None) == []


def test_repetition_is_the_share_of_runs_seen_before() -> None:
    assert repetition([1, 2, 3]) == 0.0 and repetition([1, 2, 3, 4, 5]) == 0.0
    assert repetition([1] * 10) == pytest.approx(6 / 7)


def test_nothing_measured_gives_no_section_and_nothing_judged_gives_nulls() -> None:
    assert summarise_verification([]) is None
    empty = summarise_verification([dict(FACTS)])
    assert empty is not None and empty["auroc"] is None and empty["screening_accuracy"] is None
    assert verification_verdict(empty) == [] and verification_verdict(None) == []


def test_a_round_without_a_number_from_the_verifier_is_left_out() -> None:
    lines = made_up_lines(prompts=4)
    chain = next(line for line in lines if line.get("run") == "chain")
    before = summarise_verification(lines, draws=20)
    chain["nodes"][0]["correctness_logit"] = None
    after = summarise_verification(lines, draws=20)
    assert before is not None and after is not None
    assert after["judged_tokens"] == before["judged_tokens"] - min(len(chain["accepted"]) + 1, DEPTH)
