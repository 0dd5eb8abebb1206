"""Deriving a draft head from a target: defaults, families, and the message for each impossible combination."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DraftConfig
from jetspec_train.modeling.draft_config import (
    DraftHeadConfig,
    default_taps,
    draft_rope,
    preset_settings,
    resolve_draft_config,
)
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.rotary import Rotary
from tests.tiny import KINDS, tiny_config


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("preset", ["dflash", "jetspec", "dspark", "causal_markov"])
def test_every_preset_fits_every_target_family_and_survives_json(kind: str, preset: str) -> None:
    hf_config = tiny_config(kind)
    resolved = resolve_draft_config(DraftConfig(**preset_settings(preset), parent_rank=4), hf_config, mask_token_id=3)
    assert resolved.hidden_size == hf_config.hidden_size
    assert max(resolved.target_layer_ids) < hf_config.num_hidden_layers
    assert DraftHeadConfig.from_dict(json.loads(json.dumps(resolved.to_dict()))) == resolved
    DraftHead(resolved)


def test_the_presets_are_the_published_families() -> None:
    table = {
        name: tuple(preset_settings(name)[k] for k in ("mask", "layout", "parent"))
        for name in ("dflash", "jetspec", "dspark", "causal_markov")
    }
    assert table == {
        "dflash": ("bidirectional", "in_place", "none"),
        "jetspec": ("causal", "in_place", "none"),
        "dspark": ("bidirectional", "anchor", "vanilla"),
        "causal_markov": ("causal", "anchor", "vanilla"),
    }
    defaults = DraftConfig()
    assert all(getattr(defaults, key) == value for key, value in preset_settings(defaults.preset).items())
    with pytest.raises(UserError, match=r"medusa.*causal_markov"):
        preset_settings("medusa")


def test_taps_are_spread_over_the_depth() -> None:
    assert default_taps(30, 5) == (1, 8, 14, 20, 27)
    assert default_taps(30, 1) == (27,)
    assert default_taps(3, 5) == (0, 1, 2)
    assert default_taps(6, 5) == (0, 1, 2, 4, 5)
    for layers in range(1, 40):
        for count in range(1, 8):
            taps = default_taps(layers, count)
            assert len(taps) == min(count, layers) and list(taps) == sorted(set(taps))
            assert taps[0] >= 0 and taps[-1] < layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(mask="diagonal"), "draft.mask='diagonal'.*causal, bidirectional"),
        (dict(layout="sideways"), "draft.layout='sideways'.*anchor, in_place"),
        (dict(parent="grand"), "draft.parent='grand'.*none, vanilla, gated"),
        (dict(layout="in_place", block=1), "draft.block=1.*at least 2"),
        (dict(block=0), "draft.block=0"),
        (dict(layers=0), "draft.layers=0"),
        (dict(parent_rank=0), "draft.parent_rank=0"),
        (dict(hidden_size=64), "draft.hidden_size=64.*48"),
        (dict(heads=3, kv_heads=2), "draft.heads=3.*draft.kv_heads=2"),
        (dict(head_dim=7), "draft.head_dim=7"),
        (dict(target_layer_ids=[0, 9]), r"draft.target_layer_ids=\[0, 9\].*0 .. 2"),
        (dict(target_layer_ids=[1, 1]), "different layers"),
        (dict(target_layer_ids=[]), "empty"),
        (dict(taps=0), "draft.taps=0"),
        (dict(mask_token_id=300), "draft.mask_token_id=300.*299"),
    ],
)
def test_an_impossible_combination_is_one_line_with_key_and_value(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message) as caught:
        resolve_draft_config(DraftConfig(**changes), tiny_config("llama"), mask_token_id=3)
    assert "\n" not in str(caught.value)


def test_explicit_values_win_and_no_mask_token_means_a_learned_vector() -> None:
    asked = DraftConfig(heads=6, kv_heads=3, head_dim=8, intermediate_size=64, target_layer_ids=[2, 0])
    resolved = resolve_draft_config(asked, tiny_config("llama"), mask_token_id=None)
    assert (resolved.heads, resolved.kv_heads, resolved.head_dim, resolved.intermediate_size) == (6, 3, 8, 64)
    assert resolved.target_layer_ids == (2, 0)  # the order of the concatenation is the user's
    assert resolved.mask_token_id is None
    assert DraftHead(resolved).mask_embedding is not None
    reserved = resolve_draft_config(DraftConfig(mask_token_id=7), tiny_config("llama"), mask_token_id=3)
    assert reserved.mask_token_id == 7


def test_a_foreign_dictionary_is_refused_with_its_keys() -> None:
    good = resolve_draft_config(DraftConfig(), tiny_config("llama"), mask_token_id=3).to_dict()
    good.pop("mask")
    with pytest.raises(UserError, match=r"missing keys \['mask'\], unknown keys \['masks'\]"):
        DraftHeadConfig.from_dict({**good, "masks": "causal"})


def test_rope_of_the_target_is_taken_over_where_its_frequencies_are_fixed() -> None:
    llama3 = dict(
        rope_type="llama3",
        rope_theta=5e5,
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=64,
    )
    assert draft_rope(llama3) == llama3
    assert draft_rope({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}) == {
        "rope_type": "default",
        "rope_theta": 1e4,
    }
    by_kind = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_type": "default", "rope_theta": 1e6}}
    assert draft_rope(by_kind) == {"rope_type": "default", "rope_theta": 1e6}
    assert draft_rope(None, 123.0) == {"rope_type": "default", "rope_theta": 123.0}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1e5},
        {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
)
def test_rotary_equals_that_of_a_target_with_the_same_parameters(rope: dict[str, Any]) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=64, num_attention_heads=4, head_dim=16, rope_parameters=dict(rope))
    positions = torch.tensor([[0, 1, 7, 2000]])
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    found = Rotary(rope, head_dim=16, max_positions=2048)(positions)
    for mine, theirs in zip(found, expected):
        assert torch.allclose(mine, theirs, atol=1e-4)


def test_an_unknown_rope_type_is_named() -> None:
    with pytest.raises(ValueError, match="spiral"):
        Rotary({"rope_type": "spiral", "rope_theta": 1e4}, head_dim=8, max_positions=8)
