"""Block heads in the z-lab (DFlash), JetSpec and DeepSpec forms: reading and writing.

One layout of tensors, three ways to say what they mean. z-lab and JetSpec: ``dflash_config``, in-place slots,
no parent term. DeepSpec: flat keys, anchor slots, parent term, copies of embedding and lm_head.
Layer ids in all three count decoder layers from 0, as here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign.draft import (
    ForeignDraft,
    TargetFacts,
    check_layer_ids,
    check_target_sizes,
    compare_names,
    refuse_unknown_keys,
    require_key,
)
from jetspec_train.artifacts.foreign.options import ReadOptions
from jetspec_train.artifacts.foreign.qwen3 import (
    HARMLESS_KEYS,
    LAYER_KEYS,
    block_shapes,
    check_parity_of_scales,
    layer_config,
    read_layer_config,
    refuse_code,
    whole_number,
)

if TYPE_CHECKING:
    from torch import Tensor

_SCALES = ("input_embedding_scale", "output_multiplier", "final_logit_softcapping")
_DFLASH_KEYS = (
    "target_layer_ids", "mask_token_id", "causal_head", "causal", "block_size", "target_hidden_size", "draft_shift",
    "sample_from_anchor", *_SCALES,
)  # fmt: skip
_DEEPSPEC_KEYS = (
    "target_layer_ids", "block_size", "mask_token_id", "markov_rank", "markov_head_type", "enable_confidence_head",
    "confidence_head_with_markov", "num_anchors",
)  # fmt: skip
COPIES = ("embed_tokens.weight", "lm_head.weight")


# -- writing ---------------------------------------------------------------------------------------------------------
def write_dflash(config: Mapping[str, Any], target: TargetFacts, dtype: str) -> dict[str, Any]:
    """The z-lab / JetSpec ``config.json`` of an in-place head without parent term."""
    causal = config["mask"] == "causal"
    dflash: dict[str, Any] = {
        "target_layer_ids": list(config["target_layer_ids"]),
        "mask_token_id": config["mask_token_id"],
        # JetSpec reads causal_head; NeMo and vLLM read causal. A missing key loads silently as bidirectional.
        "causal_head": causal,
        "causal": causal,
    }
    if target.embedding_scale != 1.0:
        dflash["input_embedding_scale"] = target.embedding_scale
    if target.logit_scale != 1.0:
        dflash["output_multiplier"] = target.logit_scale
    if target.logit_softcap is not None:
        dflash["final_logit_softcapping"] = target.logit_softcap
    return {
        "architectures": ["DFlashDraftModel"],
        **layer_config(config),
        "dtype": dtype,
        "block_size": config["block"],
        # required by JetSpec and SGLang even though the taps are given
        "num_target_layers": target.num_layers,
        "is_causal": causal,
        "dflash_config": dflash,
    }


def write_deepspec(
    config: Mapping[str, Any], target: TargetFacts, dtype: str, *, confidence: bool, confidence_with_parent: bool
) -> dict[str, Any]:
    """The DeepSpec ``config.json`` of an anchor-layout head."""
    return {
        "architectures": ["Qwen3DSparkModel"],
        **layer_config(config),
        "dtype": dtype,
        "block_size": config["block"],
        "num_target_layers": target.num_layers,
        "target_layer_ids": list(config["target_layer_ids"]),
        "mask_token_id": config["mask_token_id"],
        "num_anchors": 512,  # a training setting that its loader insists on
        "markov_rank": config["parent_rank"] if config["parent"] != "none" else 0,
        "markov_head_type": "vanilla" if config["parent"] == "none" else config["parent"],
        "enable_confidence_head": confidence,
        "confidence_head_with_markov": confidence_with_parent,
    }


# -- reading ---------------------------------------------------------------------------------------------------------
def read_dflash(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    options: ReadOptions,
    where: str,
) -> ForeignDraft:
    """A z-lab or JetSpec head (``DFlashDraftModel``)."""
    notes: list[str] = []
    dflash = config.get("dflash_config") or {}
    if not isinstance(dflash, dict):
        raise UserError(f"{where}: dflash_config must be an object, not {dflash!r}.")
    inner_keys = ("dflash_config", "is_causal", *_DFLASH_KEYS)
    refuse_unknown_keys(config, (*HARMLESS_KEYS, *LAYER_KEYS, *inner_keys), where, options.accept_keys)
    refuse_unknown_keys(dflash, _DFLASH_KEYS, f"{where}, dflash_config", options.accept_keys)
    refuse_code(config, "DFlashDraftModel", notes)
    merged = {**{key: config[key] for key in _DFLASH_KEYS if key in config}, **dflash}
    for key in ("sample_from_anchor", "draft_shift"):
        if merged.get(key):
            raise UserError(
                f"{where} sets {key}=true in a DFlash form: no published loader agrees on its slots. Export it in the "
                "dspark form, or convert the draft with the project that made it."
            )
    check_parity_of_scales(merged, target, where)
    layers, slides = read_layer_config(config, where, notes)
    if merged.get("target_hidden_size", layers["hidden_size"]) != layers["hidden_size"]:
        raise UserError(
            f"{where} adapts a target of hidden size {merged['target_hidden_size']} to a draft of "
            f"{layers['hidden_size']} with an untrained projection; not read."
        )
    causal = _causality(config, dflash, slides, options, where, notes)
    notes.append("slots are in place: slot j predicts anchor + j and slot 0 holds the anchor")
    notes.append("target_layer_ids count decoder layers from 0")
    mask_token_id = require_key(merged, "mask_token_id", where)
    ours = {
        **layers,
        "block": whole_number({**config, **merged}, "block_size", where, smallest=2),
        "mask": "causal" if causal else "bidirectional",
        "layout": "in_place",
        "parent": "none",
        "parent_rank": 0,
        "target_layer_ids": taps_of(merged, target, options, where, notes),
        "mask_token_id": mask_token_id,
    }
    form = "jetspec" if causal else "dflash"
    return finish_block(form, ours, tensors, target, notes, where)


def read_deepspec(
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    options: ReadOptions,
    where: str,
) -> ForeignDraft:
    """A DeepSpec DSpark head (``Qwen3DSparkModel``)."""
    notes: list[str] = []
    refuse_unknown_keys(config, (*HARMLESS_KEYS, *LAYER_KEYS, *_DEEPSPEC_KEYS), where, options.accept_keys)
    refuse_code(config, "Qwen3DSparkModel", notes)
    layers, slides = read_layer_config(config, where, notes)
    if slides:
        raise UserError(f"{where} has sliding layers; DeepSpec's own loader attends to everything in both directions.")
    causal = options.mask == "causal"
    notes.append(
        "in-block attention is causal, as foreign.mask says"
        if causal
        else "in-block attention is bidirectional, as DeepSpec always computes it"
    )
    notes.append("slots follow the anchor layout: slot j predicts anchor + j + 1")
    notes.append("target_layer_ids count decoder layers from 0")
    ours = {
        **layers,
        "block": whole_number(config, "block_size", where),
        "mask": "causal" if causal else "bidirectional",
        "layout": "anchor",
        **parent_of(config, where),
        "target_layer_ids": taps_of(config, target, options, where, notes),
        "mask_token_id": require_key(config, "mask_token_id", where),
    }
    confidence = (config.get("enable_confidence_head"), config.get("confidence_head_with_markov"))
    return finish_block("deepspec", ours, tensors, target, notes, where, confidence=confidence)


def taps_of(
    config: Mapping[str, Any], target: TargetFacts | None, options: ReadOptions, where: str, notes: list[str]
) -> list[int]:
    """The taps that the form or the user states; UserError asking for them when neither does."""
    stated = config.get("target_layer_ids")
    if options.target_layer_ids is not None:
        ids = check_layer_ids(options.target_layer_ids, target, "foreign.target_layer_ids")
        if stated is not None and list(stated) != ids:
            raise UserError(f"{where} says target_layer_ids={stated}, foreign.target_layer_ids says {ids}.")
        if stated is None:
            notes.append(f"target_layer_ids={ids} was given by the user")
        return ids
    if stated is None:
        raise UserError(
            f"{where} does not say which target layers it reads (target_layer_ids), and the weights cannot tell. Ask "
            "its author and give them as foreign.target_layer_ids=[...], counting decoder layers from 0."
        )
    return check_layer_ids(stated, target, where)


def parent_of(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Our parent fields from ``markov_rank`` and ``markov_head_type``."""
    rank = whole_number(config, "markov_rank", where, smallest=0)
    if rank == 0:
        return {"parent": "none", "parent_rank": 0}
    kind = str(require_key(config, "markov_head_type", where))
    if kind not in ("vanilla", "gated"):
        raise UserError(
            f"{where} has markov_head_type={kind!r}; known are 'vanilla' and 'gated' (a bias by the previous token). A "
            "recurrent head depends on the whole path, which a tree of drafts cannot share."
        )
    return {"parent": kind, "parent_rank": rank}


def finish_block(
    form: str,
    ours: dict[str, Any],
    tensors: Mapping[str, Tensor],
    target: TargetFacts | None,
    notes: list[str],
    where: str,
    confidence: tuple[Any, Any] = (False, False),
) -> ForeignDraft:
    """Check sizes against the target and names against the configuration; split off copies and confidence head."""
    check_target_sizes(ours["target_hidden_size"], ours["vocab_size"], target, where)
    wanted = block_shapes(ours)
    enabled, with_parent = bool(confidence[0]), bool(confidence[1])
    if enabled:
        width = ours["hidden_size"] + (ours["parent_rank"] if with_parent else 0)
        wanted |= {"confidence_head.proj.weight": (1, width), "confidence_head.proj.bias": (1,)}
    head_shape = (ours["vocab_size"], ours["hidden_size"])
    wanted |= {name: head_shape for name in COPIES if name in tensors}
    compare_names({name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted, where)
    head = {name.removeprefix("confidence_head.proj."): t for name, t in tensors.items() if "confidence_head" in name}
    if head:
        notes.append("a confidence head is carried along; the decoder does not use it")
    return ForeignDraft(
        kind="block",
        form=form,
        config=ours,
        tensors={n: t for n, t in tensors.items() if n not in COPIES and not n.startswith("confidence_head.")},
        copies={n: tensors[n] for n in COPIES if n in tensors},
        confidence=head or None,
        confidence_with_parent=enabled and with_parent,
        assumptions=notes,
    )


def _causality(
    config: Mapping[str, Any],
    dflash: Mapping[str, Any],
    slides: bool,
    options: ReadOptions,
    where: str,
    notes: list[str],
) -> bool:
    stated = {
        "is_causal": config.get("is_causal"),
        "dflash_config.causal": dflash.get("causal"),
        "dflash_config.causal_head": dflash.get("causal_head"),
    }
    said = {key: bool(value) for key, value in stated.items() if value is not None}
    if len(set(said.values())) > 1:
        raise UserError(f"{where} contradicts itself about in-block causality: {said}.")
    if options.mask is not None:
        causal = options.mask == "causal"
        if said and next(iter(said.values())) != causal:
            raise UserError(f"{where} says {said}, foreign.mask says {options.mask!r}.")
        notes.append(f"in-block attention is {options.mask}, as foreign.mask says")
        return causal
    if said:
        causal = next(iter(said.values()))
        notes.append(f"in-block attention is {'causal' if causal else 'bidirectional'}, as {next(iter(said))} says")
        return causal
    notes.append(
        "nothing says whether in-block attention is causal; "
        + ("causal was taken, as z-lab does for sliding layers" if slides else "bidirectional was taken, as z-lab does")
        + " (if acceptance is poor, try foreign.mask="
        + ("bidirectional)" if slides else "causal)")
    )
    return slides
