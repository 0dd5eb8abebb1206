"""Packed weights change speed, never results."""

from __future__ import annotations

import pytest
import torch

from jetspec_train.config import DecodingConfig, TargetConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.targets.loading import load_target
from jetspec_train.targets.packing import PackedLinear, can_pack, pack_linears, unpack_linears
from tests.round_tools import random_head
from tests.tiny import tiny_model, tiny_target_dir

needs_packing = pytest.mark.skipif(
    not can_pack(torch.zeros(64, 64, dtype=torch.bfloat16)), reason="this CPU or torch build does not pack weights"
)


@needs_packing
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 64])
def test_a_packed_layer_gives_what_the_plain_one_gives(bias: bool, rows: int) -> None:
    torch.manual_seed(rows)
    plain = torch.nn.Linear(96, 160, bias=bias).bfloat16().requires_grad_(False)
    packed = PackedLinear(plain.weight, plain.bias)
    x = torch.randn(2, rows, 96).bfloat16()
    torch.testing.assert_close(packed(x), plain(x))


@needs_packing
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "phi3", "gpt_oss", "qwen3_moe"])
def test_a_packed_target_equals_the_plain_one(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = TargetConfig(name=str(tiny_target_dir(kind)), dtype="bfloat16", device="cpu")
    packed = load_target(cfg)
    monkeypatch.setattr("jetspec_train.targets.target.can_pack", lambda weight: False)
    plain = load_target(cfg)
    assert packed._packed_head is not None and plain._packed_head is None
    assert any(isinstance(module, PackedLinear) for module in packed.model.modules())
    assert not any(isinstance(module, PackedLinear) for module in plain.model.modules())
    assert packed.parameters == plain.parameters
    tokens = torch.arange(10, 30)[None]
    ours, expected = (
        target.logits(target.forward(tokens, cache=target.new_cache(1, 20)).hidden_BND).float()
        for target in (packed, plain)
    )
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)


@needs_packing
def test_gradients_pass_through_the_head_although_it_is_packed() -> None:
    """Training needs d logits / d hidden; packed layers have no gradient."""
    target = load_target(TargetConfig(name=str(tiny_target_dir("llama")), dtype="bfloat16", device="cpu"))
    hidden = torch.randn(4, 48).bfloat16().requires_grad_()
    target.logits(hidden).float().sum().backward()
    assert hidden.grad is not None and hidden.grad.abs().sum() > 0


@needs_packing
def test_packing_can_be_undone() -> None:
    model = tiny_model("llama").bfloat16()
    before = {name: type(module) for name, module in model.named_modules()}
    replaced = pack_linears(model)
    assert replaced and {name: type(module) for name, module in model.named_modules()} != before
    unpack_linears(replaced)
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_only_bfloat16_on_a_cpu_is_packed() -> None:
    assert not can_pack(torch.zeros(8, 8))
    assert not can_pack(torch.zeros(8, 8, dtype=torch.float16))


@needs_packing
def test_a_draft_is_packed_for_decoding_and_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target(TargetConfig(name=str(tiny_target_dir("llama")), dtype="bfloat16", device="cpu"))
    head = random_head(target)
    settings = DecodingConfig(nodes=8, max_new_tokens=24)
    drafter = BlockDrafter(head, target)
    packed = {name for name, module in drafter.head.named_modules() if isinstance(module, PackedLinear)}
    assert "fc" in packed and "layers.0.mlp.up_proj" in packed
    assert not any(name.startswith("markov_head") for name in packed)
    assert drafter.parameters == sum(parameter.numel() for parameter in head.parameters())
    ours = Decoder(target, drafter, settings).generate([[5, 6, 7]])[0]
    monkeypatch.setattr("jetspec_train.targets.packing.can_pack", lambda weight: False)
    plain = Decoder(target, BlockDrafter(head, target), settings).generate([[5, 6, 7]])[0]
    assert ours.tokens == plain.tokens
    assert ours.stats.accepted_by_depth == plain.stats.accepted_by_depth
