"""Label distributions: logits from the stored post-final-norm state are the target's own logits (PITFALLS 3)."""

from __future__ import annotations

import pytest
import torch

from jetspec_train.config import DraftConfig
from jetspec_train.modeling.blocks import make_blocks
from jetspec_train.modeling.draft_config import resolve_draft_config
from tests.tiny import tiny_config, tiny_model, tiny_target


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("layout", ["anchor", "in_place"])
def test_the_label_at_q_is_judged_by_the_targets_own_logits_at_q_minus_one(kind: str, layout: str) -> None:
    target = tiny_target(kind)
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(4, 300, (n,), generator=generator) for n in (9, 8)]
    tokens = torch.cat(documents)[None]
    numbers = torch.tensor([[0] * 9 + [1] * 8])
    positions = torch.cat([torch.arange(9), torch.arange(8)])[None]
    taps = resolve_draft_config(DraftConfig(block=4, taps=2), tiny_config(kind), mask_token_id=3).target_layer_ids
    with torch.inference_mode():
        output = target.forward_packed(tokens, positions, numbers, taps)
    blocks = make_blocks(
        tokens, positions, numbers, numbers >= 0, torch.tensor([[1, 4, 10, 13]]), None, block=4, layout=layout
    )
    model = tiny_model(kind)
    with torch.inference_mode():
        own = [model(document[None]).logits[0] for document in documents]
    assert blocks.valid_BAK.sum() >= 10
    for _, a, j in blocks.valid_BAK.nonzero().tolist():
        source = int(blocks.sources_BAK[0, a, j])
        number, start = int(numbers[0, source]), 9 * int(numbers[0, source])
        found = target.logits(output.hidden_BND[0, source])
        assert torch.allclose(found, own[number][source - start], atol=1e-4)
        assert blocks.labels_BAK[0, a, j] == documents[number][source + 1 - start]
