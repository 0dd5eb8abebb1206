"""The ``speculators`` form, which ``vllm serve`` loads: a frame around ``transformer_layer_config``.

Three kinds of draft share the frame: ``dflash`` (in-place block), ``dspark`` (block with parent term) and ``eagle3``
(see ``eagle3.py``). Layer ids count 0 = embeddings. Package and server disagree about nearly every default, so every
flag is written and none is left to be guessed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign.blocks import finish_block, parent_of
from jetspec_train.artifacts.foreign.draft import (
    ForeignDraft,
    TargetFacts,
    check_layer_ids,
    from_embedding_based,
    refuse_unknown_keys,
    require_key,
    to_embedding_based,
)
from jetspec_train.artifacts.foreign.options import ReadOptions
from jetspec_train.artifacts.foreign.qwen3 import (
    HARMLESS_KEYS,
    LAYER_KEYS,
    layer_config,
    read_layer_config,
    refuse_code,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

WRITTEN_FOR = "0.9.0"  # the speculators version whose frame is written
FRAME_KEYS = (
    "speculators_model_type", "speculators_version", "speculators_config", "transformer_layer_config",
    "draft_vocab_size", "target_hidden_size", "jetspec_train",
)  # fmt: skip
_BLOCK_KEYS = (
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal",
    "markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov",
)  # fmt: skip
# transformers' defaults of the two layer kinds: older speculators wrote only what differs from them.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    },
    "llama": {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "rms_norm_eps": 1e-6,
    },
}  # fmt: skip


def frame(
    algorithm: str,
    architecture: str,
    speculative_tokens: int,
    layers: Mapping[str, Any],
    target: TargetFacts,
    dtype: str,
) -> dict[str, Any]:
    """What all three kinds have in common. No top-level ``model_type``: vLLM would look for a model of that name."""
    return {
        "architectures": [architecture],
        "speculators_model_type": algorithm,
        "speculators_version": WRITTEN_FOR,
        "dtype": dtype,
        "tie_word_embeddings": False,
        "target_hidden_size": None,
        "transformer_layer_config": dict(layers),
        "speculators_config": {
            "algorithm": algorithm,
            "default_proposal_method": "greedy",
            "proposal_methods": [
                {
                    "proposal_type": "greedy",
                    "speculative_tokens": speculative_tokens,
                    "verifier_accept_k": 1,
                    "accept_tolerance": 0.0,
                }
            ],
            # the target is called the verifier in this format
            "verifier": {"name_or_path": target.name, "architectures": [target.architecture]},
        },
    }


def write_block(
    config: Mapping[str, Any], target: TargetFacts, dtype: str, *, confidence: bool, confidence_with_parent: bool
) -> dict[str, Any]:
    """``dflash`` for in-place heads without parent term, ``dspark`` for anchor heads and for every parent term."""
    causal = config["mask"] == "causal"
    anchor = config["layout"] == "anchor"
    dspark = anchor or config["parent"] != "none"
    # vLLM serves full-attention dspark layers bidirectional and sliding ones causal; a window that never cuts is
    # the only way to say "causal" there.
    window = config["max_positions"] if dspark and causal else None
    algorithm, architecture = ("dspark", "DSparkDraftModel") if dspark else ("dflash", "DFlashDraftModel")
    written = frame(
        algorithm,
        architecture,
        config["block"] if anchor else config["block"] - 1,
        layer_config(config, sliding_window=window),
        target,
        dtype,
    )
    written |= {
        "draft_vocab_size": config["vocab_size"],
        "block_size": config["block"],
        "mask_token_id": config["mask_token_id"],
        "aux_hidden_state_layer_ids": to_embedding_based(config["target_layer_ids"]),
        "sample_from_anchor": anchor,
        "sliding_window_non_causal": not causal,
    }
    if dspark:
        written |= {
            "markov_rank": config["parent_rank"] if config["parent"] != "none" else 0,
            "markov_head_type": "vanilla" if config["parent"] == "none" else config["parent"],
            "enable_confidence_head": confidence,
            "confidence_head_with_markov": confidence_with_parent,
        }
    # Full-attention layers are bidirectional to speculators whatever the flag says, and causal to vLLM when the flag
    # is false: what the head was trained with is therefore also written in our own words.
    written["jetspec_train"] = {"mask": config["mask"], "layout": config["layout"], "parent": config["parent"]}
    return written


def silent_parent(config: Mapping[str, Any], written: dict[str, Any]) -> dict[str, Tensor]:
    """A parent term of rank 1 that adds nothing, for a dspark folder without one: vLLM insists on a rank above 0.

    Changes ``written`` to say so; ``read_block`` takes it out again.
    """
    import torch

    written["markov_rank"] = 1
    zeros = torch.zeros(config["vocab_size"], 1)
    return {"markov_head.markov_w1.weight": zeros, "markov_head.markov_w2.weight": zeros.clone()}


def read_block(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    options: ReadOptions,
    where: str,
) -> ForeignDraft:
    """A ``dflash`` or ``dspark`` head in the speculators form."""
    notes: list[str] = []
    algorithm = config["speculators_model_type"]
    refuse_unknown_keys(config, (*HARMLESS_KEYS, *FRAME_KEYS, *_BLOCK_KEYS), where, options.accept_keys)
    refuse_code(config, algorithm, notes)
    layers, slides = read_layer_config(layer_settings(config, "qwen3", where, options, notes), where, notes)
    require_full_vocabulary(config, layers, where)
    anchor = _flag(config, "sample_from_anchor", algorithm == "dspark", where, notes)
    if anchor and algorithm == "dflash":
        raise UserError(
            f"{where} is a dflash draft with sample_from_anchor=true, which one vLLM runner refuses and the other "
            "ignores. If its slots do predict the next position, export it as dspark."
        )
    notes.append(
        "slots follow the anchor layout: slot j predicts anchor + j + 1"
        if anchor
        else "slots are in place: slot j predicts anchor + j and slot 0 holds the anchor"
    )
    notes.append("layer ids count 0 = embeddings and were lowered by one")
    parent = parent_of(config, where) if algorithm == "dspark" else {"parent": "none", "parent_rank": 0}
    ours = {
        **layers,
        "block": whole_number(config, "block_size", where, smallest=1 if anchor else 2),
        "mask": _mask(config, slides, options, where, notes),
        "layout": "anchor" if anchor else "in_place",
        **parent,
        "target_layer_ids": taps_of(config, "aux_hidden_state_layer_ids", target, options, where, notes),
        "mask_token_id": require_key(config, "mask_token_id", where),
    }
    confidence = (
        (
            _flag(config, "enable_confidence_head", True, where, notes),
            _flag(config, "confidence_head_with_markov", True, where, notes),
        )
        if algorithm == "dspark"
        else (False, False)
    )
    draft = finish_block(f"speculators {algorithm}", ours, tensors, target, notes, where, confidence=confidence)
    silent = (config.get("jetspec_train") or {}).get("parent") == "none" and ours["parent"] != "none"
    if silent and not bool(draft.tensors["markov_head.markov_w2.weight"].any()):
        draft.config |= {"parent": "none", "parent_rank": 0}
        draft.tensors = {name: t for name, t in draft.tensors.items() if not name.startswith("markov_head.")}
        notes.append("the parent term adds nothing and was left out")
    return draft


def taps_of(
    config: Mapping[str, Any], key: str, target: TargetFacts | None, options: ReadOptions, where: str, notes: list[str]
) -> list[int]:
    """Our taps from the form's ids (0 = embeddings) or from the user's; UserError asking for them if neither says."""
    stated = config.get(key)
    if stated is not None:
        if not isinstance(stated, list) or not all(isinstance(layer, int) for layer in stated):
            raise UserError(f"{where}: {key} must be a list of whole numbers, not {stated!r}.")
        stated = check_layer_ids(from_embedding_based(stated, where), target, where)
    if options.target_layer_ids is not None:
        ids = check_layer_ids(options.target_layer_ids, target, "foreign.target_layer_ids")
        if stated is not None and stated != ids:
            raise UserError(f"{where} taps {stated} (counted from 0), foreign.target_layer_ids says {ids}.")
        if stated is None:
            notes.append(f"target_layer_ids={ids} was given by the user")
        return ids
    if stated is None:
        usual = ""
        if target is not None and target.num_layers >= 8:
            n = target.num_layers
            usual = f" EAGLE-3 drafts are usually trained with [1,{n // 2 - 1},{n - 4}] for a target of {n} layers."
        raise UserError(
            f"{where} does not say which target layers it reads ({key}), and the weights cannot tell. Ask its author "
            f"and give them as foreign.target_layer_ids=[...], counting decoder layers from 0.{usual}"
        )
    return stated


def layer_settings(
    config: Mapping[str, Any], kind: str, where: str, options: ReadOptions, notes: list[str]
) -> dict[str, Any]:
    """``transformer_layer_config`` with transformers' defaults where older speculators left them out."""
    layers = require_key(config, "transformer_layer_config", where)
    if not isinstance(layers, dict):
        raise UserError(f"{where}: transformer_layer_config must be an object, not {layers!r:.80}.")
    found = layers.get("model_type", kind)
    if found != kind:
        raise UserError(
            f"{where} has layers of model_type {found!r}; this reader knows {kind!r} for this kind of draft."
        )
    inner = f"{where}, transformer_layer_config"
    refuse_unknown_keys(layers, (*HARMLESS_KEYS, *LAYER_KEYS), inner, options.accept_keys)
    missing = sorted(key for key in _DEFAULTS[kind] if layers.get(key) is None)
    if missing:
        shown = ", ".join(f"{key}={_DEFAULTS[kind][key]}" for key in missing)
        notes.append(f"not written, so transformers' defaults for {kind} were taken: {shown}")
    return {**layers, **{key: _DEFAULTS[kind][key] for key in missing}}


def require_full_vocabulary(config: Mapping[str, Any], layers: Mapping[str, Any], where: str) -> None:
    """Block heads here predict through the target's own lm_head, so a reduced vocabulary cannot be honoured."""
    if config.get("draft_vocab_size") not in (None, layers["vocab_size"]):
        raise UserError(
            f"{where} drafts in a reduced vocabulary of {config['draft_vocab_size']} of {layers['vocab_size']} tokens; "
            "block heads here use the target's whole lm_head. EAGLE-3 drafts with a reduced vocabulary can be read."
        )


def _flag(config: Mapping[str, Any], key: str, default: bool, where: str, notes: list[str]) -> bool:
    value = config.get(key)
    if value is None:
        notes.append(f"{key} is not written; {default} was taken, the default of the speculators package")
        return default
    if not isinstance(value, bool):
        raise UserError(f"{where} says {key}={value!r}; true or false is needed.")
    return value


def _mask(config: Mapping[str, Any], slides: bool, options: ReadOptions, where: str, notes: list[str]) -> str:
    own = config.get("jetspec_train") or {}
    said = own.get("mask") if isinstance(own, dict) else None
    if said in ("causal", "bidirectional"):
        notes.append(f"in-block attention is {said}, as jetspec_train.mask says")
    elif slides:
        flag = _flag(config, "sliding_window_non_causal", False, where, notes)
        said = "bidirectional" if flag else "causal"
        notes.append(f"in-block attention is {said}, as sliding_window_non_causal says for sliding layers")
    elif options.mask is None:
        said = "bidirectional"
        notes.append(
            "in-block attention of full-attention layers was read as bidirectional, as the speculators package trains "
            "them (vLLM serves the same folder causal unless sliding_window_non_causal is true)"
        )
    if options.mask is not None:
        if said is not None and said != options.mask:
            raise UserError(f"{where} says in-block attention is {said}, foreign.mask says {options.mask!r}.")
        if said is None:
            notes.append(f"in-block attention is {options.mask}, as foreign.mask says")
        return options.mask
    return str(said)
