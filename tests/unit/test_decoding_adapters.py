"""Adapters: what is loaded can be taken out again without a trace, and only on the bundle that it was made for."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from jetspec_train.artifacts.adapter import read_adapter, weights_hash, write_adapter
from jetspec_train.artifacts.bundle import read_bundle, write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.adapters import adapted_bundle
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.training.adapters import adaptable_layers, adapter_tensors, add_adapters, frozen_tensors
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import random_head

ENDINGS = ["q_proj", "v_proj", "down_proj", "fc"]
SETTINGS = DecodingConfig(nodes=6, shortlist=16)


class Networks(nn.Module):
    """The trained modules as a training step names them."""

    def __init__(self, draft: nn.Module) -> None:
        super().__init__()
        self.draft = draft


def make_bundle(folder, seed=1):
    target = tiny_target("llama")
    head = random_head(target, seed)
    tensors = {f"draft.{name}": tensor for name, tensor in head.state_dict().items()}
    config = {"draft": head.config.to_dict(), "verifier": None}
    write_bundle(folder, bundle={"target": target.identity.to_dict()}, config=config, tensors=tensors, card="A test.")
    return read_bundle(folder), head


def make_adapter(folder, bundle, head, *, scale=0.5, rank=3):
    """An adapter that changes every adapted layer; returns the module with peft's factors in it."""
    module = Networks(head)
    config = add_adapters(module, ENDINGS, rank=rank, alpha=6.0, dropout=0.0, seed=0)
    torch.manual_seed(5)
    for name, weight in module.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(weight, std=scale)
    facts = {"base": {"weights_sha256": weights_hash(bundle.meta)}}
    write_adapter(folder, facts=facts, config=config, tensors=adapter_tensors(module.state_dict()))
    return module


def trees(decoder, prompts):
    """What the drafter proposes after these prompts, as plain lists."""
    seen = []
    propose = decoder.drafter.propose

    def noting(*args, **kwargs):
        seen.append(propose(*args, **kwargs))
        return seen[-1]

    decoder.drafter.propose = noting
    answers = [generation.tokens for generation in decoder.generate(prompts, max_new_tokens=8)]
    decoder.drafter.propose = propose
    return answers, [(t.tokens.tolist(), t.parents.tolist(), t.scores.tolist()) for round in seen for t in round]


def test_load_and_unload_leave_the_drafts_bit_for_bit(tmp_path):
    bundle, head = make_bundle(tmp_path / "bundle")
    make_adapter(tmp_path / "adapter", bundle, head)
    decoder = Decoder.from_bundle(tmp_path / "bundle", tiny_target("llama"), SETTINGS)
    prompts = tiny_prompts(2)
    # A drafter learns likely successors as it runs, so the comparison is one that ran the same way without an adapter.
    untouched = Decoder.from_bundle(tmp_path / "bundle", tiny_target("llama"), SETTINGS)
    expected = [trees(untouched, prompts), trees(untouched, prompts)]
    weights = {name: value.clone() for name, value in decoder.drafter.head.state_dict().items()}
    answers, before = trees(decoder, prompts)
    assert (answers, before) == expected[0]
    decoder.load_adapter(tmp_path / "adapter")
    adapted, drafts = trees(decoder, prompts)
    assert adapted == answers, "an adapter changes speed, never output"
    assert drafts != before
    decoder.load_adapter(tmp_path / "adapter")  # replacing an adapter does not pile up
    assert trees(decoder, prompts)[1] == drafts
    decoder.unload_adapter()
    assert all(torch.equal(value, weights[name]) for name, value in decoder.drafter.head.state_dict().items())
    drafter = decoder.drafter
    decoder.unload_adapter()  # nothing is loaded: nothing happens
    assert decoder.drafter is drafter
    assert trees(decoder, prompts) == expected[1]


def test_merged_weights_compute_what_base_and_adapter_compute(tmp_path):
    """Through peft's own layers on one side, through the product in the weights on the other."""
    bundle, head = make_bundle(tmp_path / "bundle")
    module = make_adapter(tmp_path / "adapter", bundle, head)
    merged = adapted_bundle(bundle, tmp_path / "adapter")
    plain = random_head(tiny_target("llama"), 1)
    plain.load_state_dict({name.removeprefix("draft."): value for name, value in merged.tensors.items()})
    base = random_head(tiny_target("llama"), 1)
    torch.manual_seed(0)
    config = plain.config
    features = torch.randn(1, 7, len(config.target_layer_ids) * config.target_hidden_size)
    embeds = torch.randn(1, 1, config.block, config.hidden_size)
    positions = torch.arange(7)[None]

    def states(draft):
        with torch.no_grad():
            context = draft.context_kv(draft.fuse(features), positions)
            return draft(embeds, 7 + torch.arange(config.block)[None, None], context, None)

    torch.testing.assert_close(states(module.draft), states(plain), rtol=1e-4, atol=1e-4)
    assert (states(module.draft) - states(base)).abs().max() > 0.05
    changed = {n for n, t in merged.tensors.items() if not torch.equal(t, bundle.tensors[n])}
    assert changed == {f"{name}.weight" for name in adaptable_layers(Networks(base), ENDINGS)}


def test_peft_itself_reads_the_folder(tmp_path):
    from peft import PeftModel

    bundle, head = make_bundle(tmp_path / "bundle")
    module = make_adapter(tmp_path / "adapter", bundle, head)
    again = PeftModel.from_pretrained(Networks(random_head(tiny_target("llama"), 1)), tmp_path / "adapter")
    expected = adapter_tensors(module.state_dict())
    found = adapter_tensors(again.base_model.model.state_dict())
    assert expected.keys() == found.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


def test_an_adapter_of_another_bundle_is_refused_with_both_hashes(tmp_path):
    bundle, head = make_bundle(tmp_path / "bundle")
    other, _ = make_bundle(tmp_path / "other", seed=2)
    make_adapter(tmp_path / "adapter", bundle, head)
    decoder = Decoder.from_bundle(tmp_path / "other", tiny_target("llama"), SETTINGS)
    kept = decoder.drafter
    with pytest.raises(UserError) as caught:
        decoder.load_adapter(tmp_path / "adapter")
    for meta in (bundle.meta, other.meta):
        assert weights_hash(meta)[:16] in str(caught.value)
    assert decoder.drafter is kept
    with pytest.raises(UserError, match="needs the bundle"):
        Decoder(tiny_target("llama"), kept).load_adapter(tmp_path / "adapter")


def test_a_damaged_or_foreign_adapter_is_refused(tmp_path):
    bundle, head = make_bundle(tmp_path / "bundle")
    make_adapter(tmp_path / "adapter", bundle, head)
    config = tmp_path / "adapter" / "adapter_config.json"
    content = json.loads(config.read_text())
    config.write_text(json.dumps({**content, "r": 4}))
    with pytest.raises(UserError, match=r"adapter_config\.json has SHA-256"):
        read_adapter(tmp_path / "adapter")
    facts = {"base": {"weights_sha256": "0"}}
    good = {"draft.fc.lora_A.weight": torch.zeros(3, 8), "draft.fc.lora_B.weight": torch.zeros(4, 3)}
    for change, tensors, reason in (
        ({"use_dora": True}, good, "use_dora=True is not supported"),
        ({"r": 5}, good, "rank 5 is stated"),
        ({}, {"draft.fc.lora_A.weight": torch.zeros(3, 8)}, "pairs"),
    ):
        write_adapter(tmp_path / "bad", facts=facts, config={**content, **change}, tensors=tensors)
        with pytest.raises(UserError, match=reason):
            read_adapter(tmp_path / "bad")
    with pytest.raises(UserError, match=r"holds no adapter\.json"):
        read_adapter(tmp_path / "bundle")


def test_fresh_factors_change_nothing_and_only_they_are_trained():
    module = Networks(random_head(tiny_target("llama"), 1))
    before = torch.random.get_rng_state()
    base = {name: value.clone() for name, value in module.draft.state_dict().items()}
    add_adapters(module, ENDINGS, rank=2, alpha=4.0, dropout=0.0, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    trained = {name for name, weight in module.named_parameters() if weight.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    frozen = frozen_tensors(module.state_dict())
    assert {n.removeprefix("draft.").replace(".base_layer", "") for n in frozen} == base.keys()
    assert all(weight.abs().sum() == 0 for name, weight in module.named_parameters() if ".lora_B." in name)


def test_unknown_layers_are_refused_and_the_parent_term_is_left_out():
    module = Networks(random_head(tiny_target("llama"), 1))
    with pytest.raises(UserError, match=r"no linear layer named query; it has .*q_proj"):
        adaptable_layers(module, ["query"])
    assert not any("markov" in name for name in adaptable_layers(module, ["fc", "gate_proj"]))
