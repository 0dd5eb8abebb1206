"""EAGLE-3 drafts in two forms: speculators (``layers.0.*``) and SafeAILab / SpecForge / SGLang (``midlayer.*``).

Our names are those of speculators. Layer ids: speculators and a top-level ``eagle_aux_hidden_state_layer_ids`` count
0 = embeddings; ``eagle_config.eagle_aux_hidden_state_layer_ids`` (SGLang) counts decoder layers from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign.draft import (
    ForeignDraft,
    TargetFacts,
    check_target_sizes,
    compare_names,
    ids_from_offsets,
    refuse_unknown_keys,
    to_embedding_based,
)
from jetspec_train.artifacts.foreign.options import ReadOptions
from jetspec_train.artifacts.foreign.qwen3 import (
    HARMLESS_KEYS,
    LAYER_KEYS,
    read_layer_config,
    refuse_code,
    whole_number,
)
from jetspec_train.artifacts.foreign.speculators import FRAME_KEYS, frame, layer_settings, taps_of

if TYPE_CHECKING:
    from torch import Tensor

FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
_IDS = "eagle_aux_hidden_state_layer_ids"
_EMBEDDING = "embed_tokens.weight"
_STANDARD_NOTE = "norm flags are all false, as the original EAGLE-3 and SpecForge compute"


def eagle3_shapes(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Tensor name -> shape under our (speculators') names, without embedding, d2t and t2d."""
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["heads"] * head_dim, config["kv_heads"] * head_dim
    taps = len(config["target_layer_ids"])
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, taps * config["target_hidden_size"]),
        "norm.weight": (width,),
        "lm_head.weight": (config["draft_vocab_size"], width),
        "layers.0.hidden_norm.weight": (width,),
    }
    if config["norm_before_fc"]:
        shapes["input_norm.weight"] = (taps * config["target_hidden_size"],)
    if config["fc_norm"]:
        shapes |= {f"fc_norm.{i}.weight": (config["target_hidden_size"],) for i in range(taps)}
    for i in range(config["layers"]):
        prefix, read = f"layers.{i}.", width * (2 if i == 0 else 1)
        shapes |= {
            prefix + "input_layernorm.weight": (width,),
            prefix + "post_attention_layernorm.weight": (width,),
            prefix + "self_attn.q_proj.weight": (queries, read),
            prefix + "self_attn.k_proj.weight": (keys, read),
            prefix + "self_attn.v_proj.weight": (keys, read),
            prefix + "self_attn.o_proj.weight": (width, queries),
            prefix + "mlp.gate_proj.weight": (inner, width),
            prefix + "mlp.up_proj.weight": (inner, width),
            prefix + "mlp.down_proj.weight": (width, inner),
        }
        if config["qk_norm"]:
            shapes |= {prefix + f"self_attn.{kind}_norm.weight": (head_dim,) for kind in ("q", "k")}
    return shapes


def _layers(config: Mapping[str, Any]) -> dict[str, Any]:
    rope = dict(config["rope"])
    scaling = {key: value for key, value in rope.items() if key != "rope_theta"}
    return {
        "model_type": "qwen3" if config["qk_norm"] else "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "head_dim": config["head_dim"],
        "hidden_act": "silu",
        "hidden_size": config["hidden_size"],
        "initializer_range": 0.02,
        "intermediate_size": config["intermediate_size"],
        "max_position_embeddings": config["max_positions"],
        "num_attention_heads": config["heads"],
        "num_hidden_layers": config["layers"],
        "num_key_value_heads": config["kv_heads"],
        "rms_norm_eps": config["rms_norm_eps"],
        "rope_parameters": rope,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "tie_word_embeddings": False,
        "use_cache": True,
        "vocab_size": config["vocab_size"],
        **({} if config["qk_norm"] else {"mlp_bias": False, "pretraining_tp": 1}),
    }


# -- writing ---------------------------------------------------------------------------------------------------------
def write_speculators(config: Mapping[str, Any], target: TargetFacts, dtype: str, steps: int) -> dict[str, Any]:
    """The speculators ``config.json``; ``steps``: drafted tokens per round that the server starts with."""
    layers = _layers(config)
    if len(config["target_layer_ids"]) != 3:
        layers["num_aux_hidden_states"] = len(config["target_layer_ids"])  # vLLM assumes 3 for Llama layers
    return {
        **frame("eagle3", "Eagle3DraftModel", steps, layers, target, dtype),
        "draft_vocab_size": config["draft_vocab_size"],
        **{flag: bool(config[flag]) for flag in FLAGS},
        "embed_requires_grad": False,
        _IDS: to_embedding_based(config["target_layer_ids"]),
    }


def write_safeailab(config: Mapping[str, Any], target: TargetFacts, dtype: str) -> dict[str, Any]:
    """The SafeAILab / SGLang ``config.json``."""
    layers = _layers(config)
    if layers["rope_scaling"] is None:
        del layers["rope_scaling"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        **layers,
        "dtype": dtype,
        "torch_dtype": dtype,
        "draft_vocab_size": config["draft_vocab_size"],
        "num_target_layers": target.num_layers,
        # SGLang reads this one and adds 1 ...
        "eagle_config": {_IDS: list(config["target_layer_ids"]), "use_aux_hidden_state": True},
        # ... vLLM reads this one and does not.
        _IDS: to_embedding_based(config["target_layer_ids"]),
        "num_aux_hidden_states": len(config["target_layer_ids"]),
    }


def to_midlayer(name: str) -> str:
    """Our tensor name -> SafeAILab's."""
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def from_midlayer(name: str) -> str:
    """SafeAILab's (or a torch-compiled SpecForge's) tensor name -> ours."""
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def vocabulary_tables(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``d2t`` and ``t2d`` of a reduced vocabulary; nothing for a whole one, with which vLLM refuses the tables."""
    import torch

    size = config["vocab_size"]
    if config["draft_vocab_size"] == size:
        return {}
    t2d = torch.zeros(size, dtype=torch.bool)
    t2d[ids_from_offsets(tensors["d2t"], size, "the draft")] = True
    return {"d2t": tensors["d2t"].to(torch.int64), "t2d": t2d}


# -- reading ---------------------------------------------------------------------------------------------------------
def read_speculators(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    options: ReadOptions,
    where: str,
) -> ForeignDraft:
    """An EAGLE-3 draft in the speculators form."""
    notes: list[str] = []
    own = (*HARMLESS_KEYS, *FRAME_KEYS, *FLAGS, _IDS, "embed_requires_grad")
    refuse_unknown_keys(config, own, where, options.accept_keys)
    refuse_code(config, "eagle3", notes)
    kind = (config.get("transformer_layer_config") or {}).get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise UserError(f"{where} has layers of model_type {kind!r}; EAGLE-3 layers here are llama or qwen3.")
    accept = ReadOptions(accept_keys=[*options.accept_keys, "num_aux_hidden_states"])
    settings = layer_settings(config, kind, where, accept, notes)
    if settings.get("num_key_value_heads") is None:
        settings["num_key_value_heads"] = settings["num_attention_heads"]
    flags = {flag: config.get(flag) for flag in FLAGS}
    for flag, value in flags.items():
        if flag == "norm_before_residual" and value is None and options.norm_before_residual is not None:
            flags[flag] = options.norm_before_residual
        elif value is None and flag == "norm_before_residual":
            raise UserError(
                f"{where} does not say norm_before_residual; the speculators package then means false and vLLM true. "
                "Say which: foreign.norm_before_residual=true or false."
            )
        elif value is None:
            flags[flag] = False
            notes.append(f"{flag} is not written; false was taken, as package and server do")
    taps = taps_of(config, _IDS, target, options, where, notes)
    notes.append("layer ids count 0 = embeddings and were lowered by one")
    return _finish(config, settings, flags, taps, tensors, target, notes, where, kind == "qwen3", "speculators eagle3")


def read_safeailab(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    options: ReadOptions,
    where: str,
) -> ForeignDraft:
    """An EAGLE-3 draft in the layout of SafeAILab, SpecForge and SGLang."""
    notes: list[str] = []
    own = (*HARMLESS_KEYS, *LAYER_KEYS, "eagle_config", "target_hidden_size", "num_aux_hidden_states", _IDS, *FLAGS)
    refuse_unknown_keys(config, own, where, options.accept_keys)
    refuse_code(config, "EAGLE-3", notes)
    eagle = config.get("eagle_config") or {}
    refuse_unknown_keys(eagle, (_IDS, "use_aux_hidden_state", *FLAGS), f"{where}, eagle_config", options.accept_keys)
    if eagle.get("use_aux_hidden_state") is False:
        raise UserError(f"{where} reads no intermediate layers (use_aux_hidden_state=false); that is not EAGLE-3.")
    flags = {flag: bool(eagle.get(flag, config.get(flag, False))) for flag in FLAGS}
    if options.norm_before_residual is not None:
        flags["norm_before_residual"] = options.norm_before_residual
    notes.append(_STANDARD_NOTE if not any(flags.values()) else f"norm flags: {flags}")
    inner = eagle.get(_IDS)
    if inner is not None and config.get(_IDS) is not None and to_embedding_based(inner) != list(config[_IDS]):
        raise UserError(
            f"{where} contradicts itself: eagle_config says layers {inner} (counted from 0, as SGLang reads it), the "
            f"top-level key says {config[_IDS]} (0 = embeddings, as vLLM reads it)."
        )
    stated = {_IDS: to_embedding_based(inner)} if inner is not None else config
    taps = taps_of(stated, _IDS, target, options, where, notes)
    if inner is not None:
        notes.append("eagle_config counts decoder layers from 0, as SGLang reads it")
    elif config.get(_IDS) is not None:
        notes.append("the top-level layer ids count 0 = embeddings, as vLLM reads them, and were lowered by one")
    names = {from_midlayer(name): tensor for name, tensor in tensors.items()}
    qk_norm = "layers.0.self_attn.q_norm.weight" in names
    return _finish(config, config, flags, taps, names, target, notes, where, qk_norm, "eagle3")


def _finish(
    config: Mapping[str, Any],
    settings: Mapping[str, Any],
    flags: Mapping[str, Any],
    taps: list[int],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    notes: list[str],
    where: str,
    qk_norm: bool,
    form: str,
) -> ForeignDraft:
    if flags["norm_before_fc"] and flags["fc_norm"]:
        raise UserError(f"{where} sets both norm_before_fc and fc_norm, which exclude each other.")
    layers, slides = read_layer_config(settings, where, notes)
    if slides:
        notes.append("sliding layers with a window over all positions were read as full attention")
    target_hidden = config.get("target_hidden_size") or layers["hidden_size"]
    if target_hidden != layers["hidden_size"]:
        raise UserError(
            f"{where} has a width of {layers['hidden_size']} for a target of {target_hidden}; an EAGLE-3 draft here "
            "shares the target's embedding, so both must be equal."
        )
    vocabulary = layers["vocab_size"]
    size = config.get("draft_vocab_size")
    if size is None:
        size = vocabulary
        notes.append("draft_vocab_size is not written; the whole vocabulary was taken")
    else:
        size = whole_number(config, "draft_vocab_size", where)
    if target is not None and size == vocabulary and "t2d" in tensors and len(tensors["t2d"]) != vocabulary:
        raise UserError(f"{where}: t2d has {len(tensors['t2d'])} entries for a vocabulary of {vocabulary}.")
    check_target_sizes(target_hidden, vocabulary, target, where)
    ours = {**layers, "draft_vocab_size": size, "target_layer_ids": taps, **flags, "qk_norm": qk_norm}
    wanted = eagle3_shapes(ours)
    if "lm_head.weight" not in tensors:
        if size < vocabulary:
            raise UserError(
                f"{where} has no lm_head.weight although its vocabulary is reduced ({size} of {vocabulary}), so there "
                "is nothing to predict with. Servers load such a folder without an error and draft garbage."
            )
        del wanted["lm_head.weight"]
        notes.append("there is no lm_head.weight: the head is tied to the target's own, as vLLM reads it")
    if size < vocabulary and "d2t" not in tensors:
        raise UserError(
            f"{where} drafts in a reduced vocabulary of {size} of {vocabulary} tokens but has no d2t table, so its "
            "tokens cannot be translated. Get the complete checkpoint."
        )
    if size < vocabulary:
        wanted |= {"d2t": (size,)}
        ids = ids_from_offsets(tensors["d2t"], vocabulary, where)
        if "t2d" in tensors and not bool(tensors["t2d"][ids].all() and int(tensors["t2d"].sum()) == len(ids)):
            raise UserError(f"{where}: d2t and t2d do not describe the same tokens.")
        notes.append(f"d2t holds offsets: draft id 0 is target id {int(ids[0])}, the last is {int(ids[-1])}")
    optional = {_EMBEDDING: (vocabulary, layers["hidden_size"]), "t2d": (vocabulary,)}
    if size == vocabulary:
        optional["d2t"] = (size,)
        if "d2t" in tensors and bool(tensors["d2t"].any()):
            raise UserError(f"{where} has the whole vocabulary but a d2t table that is not zero.")
    wanted |= {name: shape for name, shape in optional.items() if name in tensors}
    compare_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted, where)
    kept = {
        n: t for n, t in tensors.items() if n not in (_EMBEDDING, "t2d") and not (n == "d2t" and size == vocabulary)
    }
    copies = {_EMBEDDING: tensors[_EMBEDDING]} if _EMBEDDING in tensors else {}
    return ForeignDraft(kind="eagle3", form=form, config=ours, tensors=kept, copies=copies, assumptions=notes)
