"""A bundle and its target belong together, and the decoder refuses everything else with both values."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from jetspec_train.artifacts.bundle import write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, TargetConfig
from jetspec_train.decoding.decoder import Decoder
from tests.tiny import tiny_prompts, tiny_target, tiny_target_config
from tests.unit.test_decoding_decoder import random_head

SETTINGS = DecodingConfig(nodes=6, shortlist=16)


def write(path, head, target, **identity):
    tensors = {f"draft.{name}": tensor for name, tensor in head.state_dict().items()}
    meta = {"target": {**target.identity.to_dict(), **identity}}
    config = {"draft": head.config.to_dict(), "verifier": None}
    return write_bundle(path, bundle=meta, config=config, tensors=tensors, card="A test.")


def test_a_bundle_alone_is_enough_to_decode(tmp_path):
    target = tiny_target("llama")
    head = random_head(target)
    write(tmp_path / "bundle", head, target)
    decoder = Decoder.from_bundle(tmp_path / "bundle", settings=SETTINGS, target_config=tiny_target_config("llama"))
    prompts = tiny_prompts(2)
    answers = [generation.tokens for generation in decoder.generate(prompts, max_new_tokens=8)]
    assert answers == [generation.tokens for generation in Decoder(target).generate(prompts, max_new_tokens=8)]
    for name, tensor in head.state_dict().items():
        assert torch.equal(decoder.drafter.head.state_dict()[name], tensor)
    # Without a target configuration, the name in the bundle is enough.
    named = Decoder.from_bundle(tmp_path / "bundle")
    assert named.target.identity.to_dict() == target.identity.to_dict()


def test_drafts_are_swapped_between_requests_and_a_refused_one_changes_nothing(tmp_path):
    target = tiny_target("llama")
    heads = [random_head(target, seed) for seed in (1, 2)]
    for number, head in enumerate(heads):
        write(tmp_path / f"bundle{number}", head, target)
    decoder = Decoder.from_bundle(tmp_path / "bundle0", target, SETTINGS)
    prompt = tiny_prompts(1)
    before = decoder.generate(prompt, max_new_tokens=8)[0].tokens
    decoder.load_draft(tmp_path / "bundle1")
    assert decoder.target is target
    assert torch.equal(decoder.drafter.head.fc.weight, heads[1].fc.weight)
    assert decoder.generate(prompt, max_new_tokens=8)[0].tokens == before
    kept = decoder.drafter
    write(tmp_path / "wrong", heads[0], target, config_hash="0" * 64)
    with pytest.raises(UserError):
        decoder.load_draft(tmp_path / "wrong")
    assert decoder.drafter is kept


@pytest.mark.parametrize("key", ["config_hash", "tokenizer_hash", "template_hash"])
def test_another_target_is_refused_with_both_values(tmp_path, key):
    target = tiny_target("llama")
    write(tmp_path / "bundle", random_head(target), target, **{key: "f" * 64})
    with pytest.raises(UserError) as refused:
        Decoder.from_bundle(tmp_path / "bundle", target)
    assert "f" * 12 in str(refused.value)
    assert getattr(target.identity, key)[:12] in str(refused.value)


def test_weights_that_do_not_fit_are_listed(tmp_path):
    target = tiny_target("llama")
    head = random_head(target)
    state = {f"draft.{name}": tensor for name, tensor in head.state_dict().items()}
    state["draft.fc.weight"] = state["draft.fc.weight"][:, :-1]
    del state["draft.norm.weight"]
    state["draft.surplus"] = torch.zeros(1)
    write_bundle(
        tmp_path / "bundle",
        bundle={"target": target.identity.to_dict()},
        config={"draft": head.config.to_dict(), "verifier": None},
        tensors=state,
        card="A test.",
    )
    with pytest.raises(UserError, match=r"missing \['norm.weight'\].*\['surplus'\].*fc.weight is"):
        Decoder.from_bundle(tmp_path / "bundle", target)


def test_a_head_that_reads_layers_the_target_lacks_is_refused(tmp_path):
    target = tiny_target("llama")
    head = random_head(target)
    config = dataclasses.replace(head.config, target_layer_ids=(0, 7))
    head.config = config
    write(tmp_path / "bundle", head, target)
    with pytest.raises(UserError, match=r"\[0, 7\].*3 layers"):
        Decoder.from_bundle(tmp_path / "bundle", target)


def test_a_bundle_without_a_target_name_says_so(tmp_path):
    target = tiny_target("llama")
    write(tmp_path / "bundle", random_head(target), target, name=None)
    with pytest.raises(UserError, match=r"target\.name"):
        Decoder.from_bundle(tmp_path / "bundle")


def test_local_and_embedded_targets_are_not_asked_for_by_revision():
    from jetspec_train.decoding.bundles import target_config_of

    meta = {"target": {"name": "embedded:smollm2-135m-instruct", "revision": "abc"}}
    assert target_config_of(meta) == TargetConfig(name="embedded:smollm2-135m-instruct")
    meta = {"target": {"name": "someone/model", "revision": "abc", "template": "plain"}}
    assert target_config_of(meta) == TargetConfig(name="someone/model", revision="abc", template="plain")
