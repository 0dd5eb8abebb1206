"""The layer configuration that every block form shares: a transformers ``qwen3`` config of the draft's layers.

Also the names and shapes of the tensors, which are the same in z-lab, JetSpec, DeepSpec, speculators and here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign.draft import TargetFacts, require_key

# Settings of transformers' configurations that do not touch a draft's forward pass.
HARMLESS_KEYS = (
    "architectures", "attention_dropout", "auto_map", "bos_token_id", "dtype", "eos_token_id", "id2label",
    "initializer_range", "label2id", "max_window_layers", "model_type", "num_target_layers", "pad_token_id",
    "pretraining_tp", "tie_word_embeddings", "torch_dtype", "transformers_version", "use_cache", "_name_or_path",
    "draft_vocab_size", "output_hidden_states", "return_dict", "problem_type", "chunk_size_feed_forward",
    "is_encoder_decoder", "output_attentions", "_attn_implementation_autoset", "attn_implementation",
)  # fmt: skip
LAYER_KEYS = (
    "attention_bias", "mlp_bias", "head_dim", "hidden_act", "hidden_size", "intermediate_size", "layer_types",
    "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "use_sliding_window", "vocab_size",
)  # fmt: skip


def block_shapes(config: Mapping[str, Any], parent: bool = True) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape of a block head with our ``DraftHeadConfig`` fields. Parent term only if ``parent``."""
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["heads"] * head_dim, config["kv_heads"] * head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, len(config["target_layer_ids"]) * config["target_hidden_size"]),
        "hidden_norm.weight": (width,),
        "norm.weight": (width,),
    }
    for i in range(config["layers"]):
        prefix = f"layers.{i}."
        shapes |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (queries, width),
            prefix + "self_attn.k_proj.weight": (keys, width),
            prefix + "self_attn.v_proj.weight": (keys, width),
            prefix + "self_attn.o_proj.weight": (width, queries),
            prefix + "self_attn.q_norm.weight": (head_dim,),
            prefix + "self_attn.k_norm.weight": (head_dim,),
            prefix + "mlp.gate_proj.weight": (inner, width),
            prefix + "mlp.up_proj.weight": (inner, width),
            prefix + "mlp.down_proj.weight": (width, inner),
        }
    if parent and config["parent"] != "none":
        shapes["markov_head.markov_w1.weight"] = (config["vocab_size"], config["parent_rank"])
        shapes["markov_head.markov_w2.weight"] = (config["vocab_size"], config["parent_rank"])
    if parent and config["parent"] == "gated":
        shapes["markov_head.gate_proj.weight"] = (config["parent_rank"], width + config["parent_rank"])
        shapes["markov_head.gate_proj.bias"] = (config["parent_rank"],)
    return shapes


def layer_config(config: Mapping[str, Any], *, sliding_window: int | None = None) -> dict[str, Any]:
    """A transformers ``qwen3`` configuration of the draft's layers, every value that a loader would guess written.

    ``sliding_window``: every layer is a sliding one of that window (only where a form expresses causality so).
    """
    rope = dict(config["rope"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    kind = "full_attention" if sliding_window is None else "sliding_attention"
    return {
        "model_type": "qwen3",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config["head_dim"],
        "hidden_act": "silu",
        "hidden_size": config["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": config["intermediate_size"],
        "layer_types": [kind] * config["layers"],
        "max_position_embeddings": config["max_positions"],
        "max_window_layers": 0 if sliding_window is not None else config["layers"],
        "num_attention_heads": config["heads"],
        "num_hidden_layers": config["layers"],
        "num_key_value_heads": config["kv_heads"],
        "rms_norm_eps": config["rms_norm_eps"],
        # transformers 5 reads rope_parameters; SGLang and transformers 4 read the other two
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "sliding_window": sliding_window,
        "use_sliding_window": sliding_window is not None,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config["vocab_size"],
    }


def read_layer_config(config: Mapping[str, Any], where: str, assumptions: list[str]) -> tuple[dict[str, Any], bool]:
    """Our fields of a ``qwen3`` configuration, and whether every layer slides over more than all positions.

    Raises UserError for what the draft head cannot compute: biases, another activation, a window that cuts.
    """
    for key in ("attention_bias", "mlp_bias"):
        if config.get(key):
            raise UserError(f"{where} sets {key}=true; draft layers here have no bias, so this draft is not read.")
    if config.get("hidden_act", "silu") != "silu":
        raise UserError(f"{where} uses the activation {config['hidden_act']!r}; only silu is supported.")
    positions = whole_number(config, "max_position_embeddings", where)
    slides = all_layers_slide(config, positions, where)
    width, heads = whole_number(config, "hidden_size", where), whole_number(config, "num_attention_heads", where)
    head_dim = config.get("head_dim")
    if head_dim is None:
        head_dim = width // heads
        assumptions.append(f"head_dim is not written; hidden_size / heads = {head_dim} was taken")
    fields = {
        "layers": whole_number(config, "num_hidden_layers", where),
        "hidden_size": width,
        "heads": heads,
        "kv_heads": whole_number(config, "num_key_value_heads", where),
        "head_dim": int(head_dim),
        "intermediate_size": whole_number(config, "intermediate_size", where),
        "rms_norm_eps": float(require_key(config, "rms_norm_eps", where)),
        "rope": read_rope(config, where, assumptions),
        "vocab_size": whole_number(config, "vocab_size", where),
        "target_hidden_size": width,
        "max_positions": positions,
    }
    return fields, slides


def all_layers_slide(config: Mapping[str, Any], positions: int, where: str) -> bool:
    """True if all layers are ``sliding_attention`` with a window that never cuts; False if all are full.

    Raises UserError for a mixture and for a window shorter than the positions: the head attends to everything.
    """
    kinds = config.get("layer_types") or ["full_attention"] * int(config.get("num_hidden_layers") or 0)
    if set(kinds) <= {"full_attention"}:
        return False
    if set(kinds) == {"sliding_attention"} and (config.get("sliding_window") or 0) >= positions:
        return True
    raise UserError(
        f"{where} has the layer types {kinds} with sliding_window={config.get('sliding_window')}; draft layers here "
        "attend to the whole context, so a draft with real sliding windows is not read."
    )


def read_rope(config: Mapping[str, Any], where: str, assumptions: list[str]) -> dict[str, Any]:
    """transformers' ``rope_parameters`` from any of the three ways in which they are written."""
    if config.get("rope_parameters"):
        rope = dict(config["rope_parameters"])
    else:
        rope = dict(config.get("rope_scaling") or {})
    if "rope_type" not in rope and "type" in rope:
        rope["rope_type"] = rope.pop("type")
    rope.setdefault("rope_type", "default")
    if rope.get("rope_theta") is None:
        rope["rope_theta"] = config.get("rope_theta")
    if rope["rope_theta"] is None:
        rope["rope_theta"] = 10000.0
        assumptions.append("rope_theta is not written; 10000 was taken, transformers' default for Llama")
    rope["rope_theta"] = float(rope["rope_theta"])
    if config.get("rope_theta") not in (None, rope["rope_theta"]):
        raise UserError(
            f"{where} says rope_theta={config['rope_theta']} and rope_parameters.rope_theta={rope['rope_theta']}; "
            "it is unclear which one the draft was trained with."
        )
    if rope["rope_type"] not in ("default", "linear", "llama3", "yarn"):
        raise UserError(f"{where} uses rope_type={rope['rope_type']!r}, which draft heads here do not compute.")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise UserError(f"{where} rotates only a part of each head (partial_rotary_factor); that is not supported.")
    rope.pop("partial_rotary_factor", None)
    return rope


def whole_number(config: Mapping[str, Any], key: str, where: str, smallest: int = 1) -> int:
    """A required whole number of at least ``smallest``, at most 2^31 (an absurd size is refused before it is used)."""
    value = require_key(config, key, where)
    if isinstance(value, bool) or not isinstance(value, int) or not smallest <= value < 1 << 31:
        raise UserError(f"{where} says {key}={value!r}; a whole number from {smallest} on is needed.")
    return value


def refuse_code(config: Mapping[str, Any], architecture: str, assumptions: list[str]) -> None:
    """Note (never follow) an ``auto_map``: published drafts have one, and nothing here would run it."""
    if config.get("auto_map"):
        assumptions.append(
            f"the folder names code to load itself with (auto_map); it was not read, {architecture} is known here"
        )


def check_parity_of_scales(config: Mapping[str, Any], target: TargetFacts | None, where: str) -> None:
    """z-lab's optional scales must be what the target itself does, because this decoder uses the target's own."""
    if target is None:
        return
    for key, default, actual in (
        ("input_embedding_scale", 1.0, target.embedding_scale),
        ("output_multiplier", 1.0, target.logit_scale),
        ("final_logit_softcapping", None, target.logit_softcap),
    ):
        stated = config.get(key, default)
        same = (
            stated == actual if stated is None or actual is None else abs(stated - actual) < 1e-6 * max(1, abs(actual))
        )
        if not same:
            raise UserError(
                f"{where} was trained with {key}={stated}, but {target.name} computes with {actual}, and the draft "
                "shares the target's embedding and lm_head here; refused."
            )
