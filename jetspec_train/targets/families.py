"""What the project knows about architectures before a weight is read: who is refused, and why.

Everything else about a family (attention windows, soft caps, embedding scale, head shapes) is *observed* by running
the loaded model once (``inspection.py``), not listed here: a table of families goes stale, an observation does not.
"""

from __future__ import annotations

from typing import Any

from jetspec_train.artifacts.errors import UserError

# A layer of these kinds keeps a running state instead of keys and values: rejected draft tokens cannot be cut out of
# it, and a tree has no single state. Substrings of model types and of entries of ``layer_types``.
RECURRENT_MODEL_TYPES = (
    "mamba",
    "falcon_h1",
    "jamba",
    "zamba",
    "bamba",
    "granitemoehybrid",
    "recurrent_gemma",
    "rwkv",
    "xlstm",
    "lfm2",
    "qwen3_next",
    "qwen3_5",
    "kimi_linear",
    "nemotron_h",
    "olmo_hybrid",
)
RECURRENT_LAYER_TYPES = ("linear_attention", "mamba", "recurrent", "conv", "ssm", "hybrid")

# Attention that a per-token mask over one cache cannot express, or layers that share another layer's keys.
UNSUPPORTED_MODEL_TYPES = {
    "minimax": "it has linear-attention layers, whose state cannot be rolled back to an accepted path",
    "llama4": "its chunked attention is not a mask over earlier tokens of the same branch",
    "llama4_text": "its chunked attention is not a mask over earlier tokens of the same branch",
    "gemma3n": "its last layers reuse the keys of earlier layers",
    "gemma3n_text": "its last layers reuse the keys of earlier layers",
    "gemma4": "its last layers reuse the keys of earlier layers",
    "gemma4_text": "its last layers reuse the keys of earlier layers",
    "deepseek_v32": "its attention chooses keys by an index of its own",
    "bloom": "its position bias depends on a contiguous context",
    "mpt": "its position bias depends on a contiguous context",
    "falcon": "its position bias may depend on a contiguous context",
}
KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}


def text_config(config: Any) -> Any:
    """The part of a Hugging Face config that describes the text decoder."""
    return config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config


def check_architecture(config: Any, name: str) -> None:
    """Refuse, before weights are read, an architecture on which tree decoding cannot be exact.

    Raises:
        UserError: names the target, its architecture and the reason.
    """
    text = text_config(config)
    types = {str(getattr(config, "model_type", "")), str(getattr(text, "model_type", ""))}

    def refuse(reason: str) -> None:
        kind = getattr(text, "model_type", None) or getattr(config, "model_type", "unknown")
        raise UserError(
            f"target {name!r}: architecture {kind!r} is not supported: {reason}. Choose a decoder-only attention model "
            "(Llama, Qwen2, Qwen3, Mistral, Gemma 2/3, Phi-3, GPT-OSS and their relatives)."
        )

    if getattr(config, "is_encoder_decoder", False):
        refuse("it is an encoder-decoder model")
    for kind in types:
        if any(part in kind for part in RECURRENT_MODEL_TYPES):
            refuse("it has recurrent or linear-attention layers, whose state cannot be rolled back to an accepted path")
        if kind in UNSUPPORTED_MODEL_TYPES:
            refuse(UNSUPPORTED_MODEL_TYPES[kind])
    layer_types = getattr(text, "layer_types", None) or getattr(text, "layers_block_type", None) or []
    for layer_type in sorted(set(layer_types)):
        if any(part in str(layer_type) for part in RECURRENT_LAYER_TYPES):
            refuse(f"it has {layer_type!r} layers, whose state cannot be rolled back to an accepted path")
        if layer_type not in KNOWN_LAYER_TYPES and layer_type != "attention":
            refuse(f"its layer type {layer_type!r} is unknown to this project")
    if getattr(text, "num_kv_shared_layers", 0):
        refuse("some of its layers reuse the keys of earlier layers")
    if getattr(text, "use_bidirectional_attention", None) in (True, "all"):
        refuse("its attention is bidirectional")


def usable_positions(config: Any) -> int:
    """How many positions the target handles with rotary angles that do not depend on the length of the sequence.

    ``dynamic`` and ``longrope`` scaling change all angles once the sequence passes the original length; keys already
    in a cache then disagree with new ones, so such targets are used up to the original length only.
    """
    text = text_config(config)
    positions = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None) or 1 << 20
    scaling = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    groups = [scaling] + [value for value in scaling.values() if isinstance(value, dict)]
    for group in groups:
        kind = group.get("rope_type", group.get("type"))
        if kind in ("dynamic", "longrope", "su"):
            original = group.get("original_max_position_embeddings") or getattr(
                text, "original_max_position_embeddings", None
            )
            positions = min(positions, int(original or positions))
    return int(positions)
