"""Verifier, calibration and costs travel in the bundle with the draft, checked against its weights."""

from __future__ import annotations

import dataclasses

import pytest

from jetspec_train.artifacts.bundle import write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.calibration import Calibration, Threshold, weights_hash
from jetspec_train.decoding.cost_profile import CostProfile
from jetspec_train.decoding.decoder import Decoder
from tests.round_tools import FREE, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import plain_by_row, random_head

TRUSTING = DecodingConfig(shape="chain", nodes=6, shortlist=16, stages=2, policy="trusting", floor=1.0)


def write(path, target, *, seed: int = 0, verifier: bool = True, threshold: Threshold | None = None, **changes):
    """A bundle with everything; ``changes``: of its calibration. Without ``threshold`` there is none."""
    head = random_head(target, seed)
    judge = tiny_verifier(head, seed) if verifier else None
    tensors = {f"draft.{name}": tensor for name, tensor in head.state_dict().items()}
    if judge is not None:
        tensors |= {f"verifier.{name}": tensor for name, tensor in judge.state_dict().items()}
    known = None
    if threshold is not None:
        made = Calibration(weights_hash(tensors), target.identity.to_dict(), "match_greedy", {}, threshold)
        known = dataclasses.replace(made, **{key.removesuffix("_"): value for key, value in changes.items()}).to_dict()
    return write_bundle(
        path,
        bundle={"target": target.identity.to_dict()},
        config={"draft": head.config.to_dict(), "verifier": None if judge is None else judge.config.to_dict()},
        tensors=tensors,
        calibration=known,
        cost_profile=FREE.to_dict(),
        card="A test.",
    )


CERTIFIED = Threshold(0.5, True, prompts=400, needed=373)


def test_everything_arrives(tmp_path):
    target = tiny_target("llama")
    decoder = Decoder.from_bundle(write(tmp_path / "b", target, threshold=CERTIFIED), target, TRUSTING)
    companions = decoder.drafter.companions
    assert companions.calibration.threshold == CERTIFIED and companions.verifier is not None
    assert companions.cost_profile == CostProfile.from_dict(FREE.to_dict())
    assert decoder.planner.controller.threshold == 0.85 and decoder.planner.judge is not None
    prompts = tiny_prompts(2)
    answers = [generation.tokens for generation in decoder.generate(prompts, max_new_tokens=8)]
    assert answers == plain_by_row(target, prompts, max_new_tokens=8)  # the floor of 1 keeps nothing else


@pytest.mark.parametrize(
    "what,words",
    [
        (dict(verifier=False), "needs a verifier"),
        (dict(), "no calibration.json"),
        (dict(threshold=Threshold(None, False, prompts=50, needed=373)), "no threshold is certified.*50 prompts, 373"),
        (dict(threshold=CERTIFIED, mode="match_sampled"), "mode match_sampled"),
    ],
)
def test_trusting_is_refused_without_its_certificate(tmp_path, what, words):
    target = tiny_target("llama")
    path = write(tmp_path / "b", target, **what)
    with pytest.raises(UserError, match=words):
        Decoder.from_bundle(path, target, TRUSTING)
    lossless = dataclasses.replace(TRUSTING, policy="lossless")
    prompt = tiny_prompts(1)
    answer = Decoder.from_bundle(path, target, lossless).generate(prompt, max_new_tokens=6)[0].tokens
    assert [answer] == plain_by_row(target, prompt, max_new_tokens=6)


def test_a_calibration_of_another_bundle_is_refused_whatever_is_asked(tmp_path):
    target = tiny_target("llama")
    foreign = write(tmp_path / "b", target, threshold=CERTIFIED, bundle="f" * 64)
    with pytest.raises(UserError, match=r"calibration\.json was made for the weights ffffffffffff, but the bundle"):
        Decoder.from_bundle(foreign, target)
    identity = {**target.identity.to_dict(), "tokenizer_hash": "e" * 64}
    foreign = write(tmp_path / "c", target, threshold=CERTIFIED, target_=identity)
    with pytest.raises(UserError, match=r"tokenizer_hash eeeeeeeeeeee"):
        Decoder.from_bundle(foreign, target)


def test_a_draft_that_breaks_the_settings_is_not_swapped_in(tmp_path):
    target = tiny_target("llama")
    decoder = Decoder.from_bundle(write(tmp_path / "a", target, threshold=CERTIFIED), target, TRUSTING)
    drafter, planner = decoder.drafter, decoder.planner
    with pytest.raises(UserError, match="needs a verifier"):
        decoder.load_draft(write(tmp_path / "b", target, seed=1, verifier=False))
    assert decoder.drafter is drafter and decoder.planner is planner
    decoder.load_draft(write(tmp_path / "c", target, seed=2, threshold=CERTIFIED))
    assert decoder.drafter is not drafter and decoder.planner is not planner


def test_a_trace_goes_on_when_the_draft_is_swapped(tmp_path):
    target = tiny_target("llama")
    settings = DecodingConfig(nodes=6, shortlist=16, trace=str(tmp_path / "trace.jsonl"))
    decoder = Decoder.from_bundle(write(tmp_path / "a", target), target, settings)
    decoder.generate(tiny_prompts(1), max_new_tokens=6)
    before = (tmp_path / "trace.jsonl").read_text()
    decoder.load_draft(write(tmp_path / "b", target, seed=1))
    decoder.generate(tiny_prompts(1), max_new_tokens=6)
    after = (tmp_path / "trace.jsonl").read_text()
    assert before and after.startswith(before) and len(after) > len(before)
