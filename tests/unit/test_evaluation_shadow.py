"""Shadow runs on a tiny target: what is recorded of a round, and that the target's verdict is the real one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.calibration import Calibration
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.evaluation.shadow import (
    EVERY_PATTERN,
    ShadowPrompt,
    ShadowRun,
    chain_round,
    chain_settings,
    screened_stages,
    staged_settings,
)
from tests.tiny import tiny_prompts, tiny_target
from tests.verifier_tools import bigram_draft, noisy_verifier

LIMIT = 24
DECODING = DecodingConfig(nodes=8, shortlist=8)


@pytest.fixture(scope="module")
def parts(plain: list[list[int]]) -> tuple[Any, Any, Any, Calibration]:
    target = tiny_target("llama")
    draft = bigram_draft(target, plain)
    verifier = noisy_verifier(target, draft)
    calibration = Calibration("w", target.identity.to_dict(), "match_greedy", {}, pattern=EVERY_PATTERN)
    return target, draft, verifier, calibration


@pytest.fixture(scope="module")
def prompts() -> list[ShadowPrompt]:
    tokens = tiny_prompts(5, shortest=4, longest=12)
    return [ShadowPrompt(f"p{i}", "ab"[i % 2], prompt, i) for i, prompt in enumerate(tokens)]


@pytest.fixture(scope="module")
def plain(prompts: list[ShadowPrompt]) -> list[list[int]]:
    return [a.tokens for a in Decoder(tiny_target("llama")).generate([p.tokens for p in prompts], max_new_tokens=LIMIT)]


def test_chain_rounds_say_what_the_target_accepted_and_what_nobody_knows(
    parts: Any, prompts: list[ShadowPrompt], plain: list[list[int]]
) -> None:
    target, draft, verifier, calibration = parts
    run = ShadowRun(target, draft, verifier, calibration, chain_settings(DECODING, "match_greedy"))
    records, answers = run.run(prompts, max_new_tokens=LIMIT)
    assert [answer.tokens for answer in answers] == plain  # nothing is emitted that the target did not choose
    rounds = [(record, found) for record in records if (found := chain_round(record)) is not None]
    assert sum(found["accepted"] for _, found in rounds) > 10  # the draft is right often enough to test something
    assert {record["prompt"] for record in records} == {p.id for p in prompts}
    for record, found in rounds:
        answer = plain[int(record["prompt"][1:])]
        start = record["position"] - len(prompts[int(record["prompt"][1:])].tokens) + 1
        chain = [node["token"] for node in record["nodes"]]
        agreed = 0
        while agreed < found["known"] and start + agreed < len(answer) and chain[agreed] == answer[start + agreed]:
            agreed += 1
        assert found["accepted"] == agreed
        assert found["judged"] == min(agreed + 1, found["known"]) and found["known"] <= len(chain)


def test_training_free_scores_are_those_of_the_drafts_own_distribution(parts: Any, prompts: list[ShadowPrompt]) -> None:
    target, draft, verifier, calibration = parts
    run = ShadowRun(target, draft, verifier, calibration, chain_settings(DECODING, "match_greedy"))
    records, _ = run.run(prompts[:3], max_new_tokens=6)
    nodes = [node for record in records for node in record["nodes"]]
    assert nodes
    for node in nodes:
        assert node["margin"] >= 0 and 0 <= node["entropy"] <= torch.log(torch.tensor(300.0))
        # the first choice has at least the mass that its margin and one rival leave it
        assert node["logprob"] >= -node["entropy"] - 1e-3 or node["entropy"] < 1e-3


def test_deferring_everything_is_lossless_and_judges_stages_by_the_targets_choices(
    parts: Any, prompts: list[ShadowPrompt], plain: list[list[int]]
) -> None:
    target, draft, verifier, calibration = parts
    settings = staged_settings(DECODING, "match_greedy", stages=2, policy="lossless", threshold="0.0", prune=0.0)
    records, answers = ShadowRun(target, draft, verifier, calibration, settings).run(prompts, max_new_tokens=LIMIT)
    assert [answer.tokens for answer in answers] == plain
    stages = []
    for record in records:
        found = list(screened_stages(record))
        assert [s["stage"] for s in found] == list(range(len(found)))
        assert all(s["passed"] for s in found[:-1])  # nothing below a rolled back stage is judged
        assert [s["lowest_survival"] for s in found] == sorted((s["lowest_survival"] for s in found), reverse=True)
        answer = plain[int(record["prompt"][1:])]
        place = record["position"] - len(prompts[int(record["prompt"][1:])].tokens) + 1
        for stage in found:
            tokens = [record["nodes"][n]["token"] for n in record["decisions"][stage["stage"]]["nodes"]]
            assert stage["passed"] == (tokens == answer[place : place + len(tokens)])
            place += len(tokens)
        stages += found
    assert {stage["passed"] for stage in stages} == {True, False}
    for stage in stages:
        assert set(stage["statistics"]) == set(EVERY_PATTERN.statistics)
        assert all(0 <= value <= 1 for value in stage["statistics"].values())


def round_of(**changes: Any) -> dict[str, Any]:
    """A round of four drafted tokens, made up."""
    nodes = [
        {"token": 10 + n, "parent": n - 1, "correctness_logit": 1.0 + n, "confidence_logit": None, "logprob": -0.1}
        for n in range(4)
    ]
    record = {
        "prompt": "p",
        "domain": "d",
        "round": 3,
        "nodes": nodes,
        "sent": [0, 1, 2, 3],
        "accepted": [0, 1],
        "emitted": [10, 11, 99],
        "target_choices": [10, 11, 99, 13, 14],
        "decisions": [],
    }
    return {**record, **changes}


def test_slots_after_the_end_of_the_answer_are_unknown_and_slots_after_a_reject_unjudged() -> None:
    found = chain_round(round_of())
    assert (found["accepted"], found["judged"], found["known"]) == (2, 3, 4)
    ended = chain_round(round_of(accepted=[0, 1, 2, 3], emitted=[10, 11]))
    assert (ended["accepted"], ended["judged"], ended["known"]) == (2, 2, 2)
    whole = chain_round(round_of(accepted=[0, 1, 2, 3], emitted=[10, 11, 12, 13, 14]))
    assert (whole["accepted"], whole["judged"], whole["known"]) == (4, 4, 4)
    assert chain_round(round_of(nodes=[], sent=[])) is None
    failed = round_of()
    failed["nodes"][1]["correctness_logit"] = None
    assert chain_round(failed) is None


def decision(number: int, nodes: list[int], survival: float, action: str = "defer") -> dict[str, Any]:
    return {"stage": number, "nodes": nodes, "survival": survival, "action": action, "statistics": None}


def test_a_kept_stage_that_is_not_the_targets_own_is_an_error_and_the_next_one_is_still_judged() -> None:
    trusted = round_of(
        accepted=[0, 1, 2, 3],
        emitted=[10, 11, 12, 13, 14],
        target_choices=[10, 77, 12, 13, 14],
        decisions=[decision(0, [0, 1], 0.99), decision(1, [2, 3], 0.95), decision(2, [], 0.5, "verify")],
    )
    assert [(s["passed"], s["lowest_survival"]) for s in screened_stages(trusted)] == [(False, 0.99), (True, 0.95)]
    rolled_back = {**trusted, "accepted": [0], "emitted": [10, 77]}
    assert [s["passed"] for s in screened_stages(rolled_back)] == [False]
