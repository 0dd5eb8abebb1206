"""The arithmetic of costs against torch's own FLOP counter, and the page against the arithmetic."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from jetspec_train.config import DraftConfig
from jetspec_train.modeling.blocks import make_blocks
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.objectives.draft_loss import draft_loss
from jetspec_train.objectives.weights import slot_weights
from jetspec_train.stages import scale
from tests.tiny import tiny_target

SHAPE = scale.Shape(48, 3, 4, 2, 16, 96, 300)
TOKENS, ANCHORS, BLOCK = 64, 12, 4


class Counter(TorchDispatchMode):
    """Sums torch's own formulas. Its FlopCounterMode also follows modules, which fails inside our custom gradient."""

    flops = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        count = flop_registry.get(func._overloadpacket)
        if count is not None:
            self.flops += count(*args, **(kwargs or {}), out_val=result)
        return result


def test_target_flops_are_those_that_torch_counts() -> None:
    target = tiny_target("llama")
    tokens = torch.randint(4, 300, (1, TOKENS))
    with Counter() as counter:
        target.forward_packed(tokens, torch.arange(TOKENS)[None], torch.zeros_like(tokens), (0,))
    attention = 4 * SHAPE.heads * SHAPE.head_dim * TOKENS * TOKENS * SHAPE.layers
    counted = counter.flops
    expected = scale.target_flops(SHAPE, TOKENS, TOKENS)
    # Torch does not see the products inside a fused attention kernel of the CPU.
    assert counted in (pytest.approx(expected, rel=0.02), pytest.approx(expected - attention, rel=0.02))


def test_draft_flops_are_those_that_torch_counts() -> None:
    target = tiny_target("llama")
    cfg = DraftConfig(layers=2, block=BLOCK, taps=2, parent_rank=8, clean_prefix=0.0)
    head = DraftHead(resolve_draft_config(cfg, target.config, mask_token_id=target.mask_token_id))
    tokens = torch.randint(4, 300, (1, TOKENS))
    positions, documents = torch.arange(TOKENS)[None], torch.zeros_like(tokens)
    output = target.forward_packed(tokens, positions, documents, head.config.target_layer_ids)
    anchors = torch.arange(0, TOKENS - BLOCK - 2, (TOKENS - BLOCK - 2) // ANCHORS)[None, :ANCHORS]
    supervised = torch.ones_like(tokens, dtype=torch.bool)
    blocks = make_blocks(tokens, positions, documents, supervised, anchors, None, block=BLOCK, layout="anchor")
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, None)
    labelled = int((weights > 0).sum())
    with Counter() as counter:
        context = head.context_kv(head.fuse(output.features_BNF), positions)
        embeds = head.embed(blocks.inputs_BAK, target.embed)
        hidden = head(embeds, blocks.positions_BAK, context, blocks.context_mask_BAT)
        loss = draft_loss(
            hidden,
            labels_BAK=blocks.labels_BAK,
            weights_BAK=weights,
            clean_BA=blocks.clean_BA,
            target_hidden_BTD=output.hidden_BND,
            sources_BAK=blocks.sources_BAK,
            draft_logits=target.logits,
            target_logits=target.logits,
            total_weight=1.0,
            parent_state_BAKr=head.parent_state(blocks.parents_BAK, hidden),
            parent_weight_Vr=head.parent_weight,
        ).loss
        loss.backward()
    plan = scale.Plan(layers=2, block=BLOCK, taps=2, parent_rank=8, sequence=TOKENS)
    slots = ANCHORS * BLOCK
    expected = scale.draft_flops(SHAPE, plan, tokens=TOKENS, slots=slots, labelled=labelled)
    attention = 3 * 2 * 4 * SHAPE.heads * SHAPE.head_dim * (TOKENS + BLOCK) * slots
    assert expected - attention * 1.05 < counter.flops < expected * 1.05


def test_parameters_are_those_of_the_models() -> None:
    assert scale.QWEN3_8B.parameters == pytest.approx(8.19e9, rel=0.01)
    assert scale.LLAMA3_70B.parameters == pytest.approx(70.6e9, rel=0.01)


def test_zero_divides_more_with_every_stage() -> None:
    sizes = [scale.zero_bytes(1_000_000, stage, 8) for stage in range(4)]
    assert sizes == sorted(sizes, reverse=True) and sizes[0] == 16_000_000
    assert scale.zero_bytes(1_000_000, 2, 8, offload=True) < sizes[2]


def test_the_page_is_the_one_that_is_written() -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "scale.md"
    assert page.read_text() == scale.document(), "write it again: python -m jetspec_train.stages.scale > docs/scale.md"
