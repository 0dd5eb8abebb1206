"""Small random drafts for the tests of foreign forms, and folders in other projects' layouts made by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from jetspec_train.artifacts.foreign import TargetFacts
from jetspec_train.artifacts.foreign.eagle3 import eagle3_shapes
from jetspec_train.artifacts.foreign.qwen3 import block_shapes
from tests.tiny import SPECIAL_TOKENS

MASK_TOKEN = SPECIAL_TOKENS.index("<|reserved_0|>")
LAYERS = 12


def facts(**changes: Any) -> TargetFacts:
    """A target of 12 layers, so that the usual EAGLE-3 taps (1, 5, 8) exist."""
    return TargetFacts(**{**dict(name="org/target", hidden_size=48, vocab_size=300, num_layers=LAYERS), **changes})


def block_config(**changes: Any) -> dict[str, Any]:
    """Our configuration of a block head for ``facts()``: causal, in place, no parent term."""
    config = dict(
        layers=2, block=4, mask="causal", layout="in_place", parent="none", parent_rank=0, target_layer_ids=[1, 5, 8],
        hidden_size=48, heads=4, kv_heads=2, head_dim=16, intermediate_size=96, rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0}, vocab_size=300, target_hidden_size=48,
        mask_token_id=MASK_TOKEN, max_positions=512, extra={},
    )  # fmt: skip
    return {**config, **changes}


def eagle3_config(**changes: Any) -> dict[str, Any]:
    config = dict(
        layers=1, hidden_size=48, target_hidden_size=48, heads=4, kv_heads=2, head_dim=16, intermediate_size=96,
        rms_norm_eps=1e-5, rope={"rope_type": "default", "rope_theta": 10000.0}, vocab_size=300, draft_vocab_size=300,
        target_layer_ids=[1, 5, 8], norm_before_residual=False, norm_before_fc=False, fc_norm=False,
        norm_output=False, qk_norm=False, max_positions=512,
    )  # fmt: skip
    return {**config, **changes}


def random_tensors(shapes: dict[str, tuple[int, ...]], seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 1 + 0.1 * torch.randn(shape, generator=generator)
        if "norm" in name
        else torch.randn(shape, generator=generator) * shape[-1] ** -0.5
        for name, shape in shapes.items()
    }


def block_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    return random_tensors(block_shapes(config), seed)


def eagle3_tensors(config: dict[str, Any], seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights; with a reduced vocabulary also a d2t of every second token (offsets 0, 1, 2, ...)."""
    tensors = random_tensors(eagle3_shapes(config), seed)
    if config["draft_vocab_size"] < config["vocab_size"]:
        tensors["d2t"] = torch.arange(config["draft_vocab_size"], dtype=torch.int64)
    return tensors


def target_weights() -> dict[str, torch.Tensor]:
    return random_tensors({"embed_tokens.weight": (300, 48), "lm_head.weight": (300, 48)}, seed=9)


def write_folder(folder: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor]) -> Path:
    """A checkpoint folder exactly as given, good or bad."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, folder / "model.safetensors")
    return folder


def zlab_config(**changes: Any) -> dict[str, Any]:
    """A DFlash config as z-lab publishes it (no causality written)."""
    config = {
        "architectures": ["DFlashDraftModel"], "attention_bias": False, "attention_dropout": 0.0,
        "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "block_size": 4, "bos_token_id": 1, "dtype": "bfloat16",
        "dflash_config": {"mask_token_id": MASK_TOKEN, "target_layer_ids": [1, 5, 8]}, "eos_token_id": 2,
        "head_dim": 16, "hidden_act": "silu", "hidden_size": 48, "initializer_range": 0.02, "intermediate_size": 96,
        "layer_types": ["full_attention"] * 2, "max_position_embeddings": 512, "max_window_layers": 2,
        "model_type": "qwen3", "num_attention_heads": 4, "num_hidden_layers": 2, "num_key_value_heads": 2,
        "num_target_layers": LAYERS, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 10000,
        "sliding_window": None, "tie_word_embeddings": False, "use_cache": True, "use_sliding_window": False,
        "vocab_size": 300,
    }  # fmt: skip
    return {**config, **changes}


def deepspec_config(**changes: Any) -> dict[str, Any]:
    """A DSpark config as DeepSpec derives it from a Qwen3 target."""
    config = zlab_config()
    del config["dflash_config"], config["auto_map"]
    config |= {
        "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [1, 5, 8], "mask_token_id": MASK_TOKEN,
        "num_anchors": 512, "markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }  # fmt: skip
    return {**config, **changes}


def safeailab_config(**changes: Any) -> dict[str, Any]:
    """An EAGLE-3 config as SafeAILab and SpecForge publish it (no taps written)."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
        "hidden_size": 48, "head_dim": 16, "initializer_range": 0.02, "intermediate_size": 96,
        "max_position_embeddings": 512, "model_type": "llama", "num_attention_heads": 4, "num_key_value_heads": 2,
        "num_hidden_layers": 1, "pad_token_id": 0, "rms_norm_eps": 1e-05, "tie_word_embeddings": False,
        "torch_dtype": "float16", "transformers_version": "4.28.1", "use_cache": True, "vocab_size": 300,
        "draft_vocab_size": 150,
    }  # fmt: skip
    return {**config, **changes}
