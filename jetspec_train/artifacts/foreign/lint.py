"""What a written folder must say so that no loader guesses: every trap that was found by running the loaders.

``lint`` looks at a folder as a server would, knowing nothing of how it was written, so it also judges folders of
other origin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign.checkpoint import read_config, read_shapes
from jetspec_train.artifacts.foreign.eagle3 import FLAGS

Shapes = Mapping[str, tuple[int, ...]]
_LAYER_FACTS = (
    "model_type", "head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers",
    "num_key_value_heads", "rms_norm_eps", "vocab_size", "max_position_embeddings", "hidden_act", "attention_bias",
)  # fmt: skip
_BLOCK_FLAGS = (
    "block_size", "mask_token_id", "aux_hidden_state_layer_ids", "sample_from_anchor", "sliding_window_non_causal",
)  # fmt: skip
_DSPARK_FLAGS = ("markov_rank", "markov_head_type", "enable_confidence_head", "confidence_head_with_markov")


@dataclass(frozen=True)
class Finding:
    """``severity``: error (a loader refuses it or drafts garbage) or warning. ``message``: what and why."""

    severity: str
    message: str


def lint(folder: str | Path) -> list[Finding]:
    """Findings about a draft folder in one of the known forms. Raises UserError if it cannot be read at all."""
    path = Path(folder)
    return list(lint_content(read_config(path), read_shapes(path)))


def lint_content(config: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    """The findings about a configuration and the shapes beside it."""
    architectures = config.get("architectures") or ["?"]
    if "speculators_model_type" in config:
        yield from _speculators(config, shapes)
    elif "DFlashDraftModel" in architectures:
        yield from _dflash(config, shapes)
    elif "Qwen3DSparkModel" in architectures:
        yield from _deepspec(config, shapes)
    elif any("Eagle3" in name for name in architectures) or any(name.startswith("midlayer.") for name in shapes):
        yield from _safeailab(config, shapes)
    else:
        raise UserError(f"architectures={architectures} is none of the draft forms known here.")


def _error(message: str) -> Finding:
    return Finding("error", message)


def _warning(message: str) -> Finding:
    return Finding("warning", message)


def _missing(config: Mapping[str, Any], keys: tuple[str, ...], where: str) -> Iterator[Finding]:
    for key in keys:
        if key not in config:
            yield _error(f"{where}{key} is not written: loaders disagree about its default")


def _layers(layers: Mapping[str, Any], where: str) -> Iterator[Finding]:
    yield from _missing(layers, _LAYER_FACTS, where)
    if "rope_theta" not in layers and "rope_theta" not in (layers.get("rope_parameters") or {}):
        yield _error(f"{where}rope_theta is not written: loaders take 10000 or 1000000")


def _speculators(config: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    algorithm = config["speculators_model_type"]
    if "model_type" in config:
        yield _error("a top-level model_type makes vLLM look for a model of that name; remove it")
    frame = config.get("speculators_config") or {}
    methods = frame.get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    if tokens is None:
        yield _error("proposal_methods[0].speculative_tokens is not written: vLLM refuses the folder")
    name = str((frame.get("verifier") or {}).get("name_or_path"))
    if name.startswith(("/", ".", "~", "embedded:")) or "\\" in name:
        yield _warning(
            f"verifier.name_or_path is {name!r}, not a hub id: `vllm serve DRAFT` refuses it from 0.33 on; "
            "name target and draft separately (see the card)"
        )
    layers = config.get("transformer_layer_config") or {}
    yield from _layers(layers, "transformer_layer_config.")
    yield from _missing(config, ("draft_vocab_size", "tie_word_embeddings", "dtype"), "")
    if algorithm == "eagle3":
        yield from _eagle3_frame(config, layers, shapes)
    else:
        yield from _block_frame(config, layers, shapes, tokens)


def _block_frame(
    config: Mapping[str, Any], layers: Mapping[str, Any], shapes: Shapes, tokens: int | None
) -> Iterator[Finding]:
    dspark = config["speculators_model_type"] == "dspark"
    yield from _missing(config, _BLOCK_FLAGS + (_DSPARK_FLAGS if dspark else ()), "")
    kinds = set(layers.get("layer_types") or [])
    if not kinds:
        yield _error("transformer_layer_config.layer_types is not written")
    if len(kinds) > 1:
        yield _error("layers mix full and sliding attention: in-block causality of such a draft cannot be expressed")
    anchor = bool(config.get("sample_from_anchor"))
    if anchor and not dspark:
        yield _error("sample_from_anchor=true under dflash is refused by one vLLM runner and ignored by the other")
    expected = (config.get("block_size") or 0) - (0 if anchor else 1)
    if tokens not in (None, expected):
        yield _error(f"speculative_tokens is {tokens}; a block of {config.get('block_size')} drafts {expected}")
    if dspark and config.get("markov_head_type") != "vanilla":
        yield _error(f"markov_head_type={config.get('markov_head_type')!r}: vLLM implements only 'vanilla'")
    if dspark and not config.get("markov_rank"):
        yield _error("markov_rank=0: vLLM implements no dspark without a parent term")
    yield from _taps(config.get("aux_hidden_state_layer_ids"), 1, "aux_hidden_state_layer_ids")
    trained = (config.get("jetspec_train") or {}).get("mask")
    non_causal = config.get("sliding_window_non_causal")
    served = "causal" if ("sliding_attention" in kinds if dspark else not non_causal) else "bidirectional"
    if trained is not None and trained != served:
        yield _error(f"vLLM serves this folder {served}, but the draft was trained {trained}")
    if trained is None and not dspark and kinds == {"full_attention"} and not non_causal:
        yield _warning(
            "full-attention layers with sliding_window_non_causal=false: vLLM serves them causal, speculators trained "
            "them bidirectional"
        )
    if (
        dspark
        and "sliding_attention" in kinds
        and (layers.get("sliding_window") or 0) < (layers.get("max_position_embeddings") or 0)
    ):
        yield _error("the sliding window is shorter than the longest context: the draft would lose its context")
    yield from _vocabulary(config, layers, shapes)


def _eagle3_frame(config: Mapping[str, Any], layers: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    yield from _missing(config, (*FLAGS, "embed_requires_grad", "eagle_aux_hidden_state_layer_ids"), "")
    taps = config.get("eagle_aux_hidden_state_layer_ids") or []
    yield from _taps(taps, 1, "eagle_aux_hidden_state_layer_ids")
    if layers.get("model_type") == "llama" and len(taps) != 3 and layers.get("num_aux_hidden_states") != len(taps):
        yield _error(f"{len(taps)} taps need transformer_layer_config.num_aux_hidden_states: vLLM assumes 3 for Llama")
    yield from _vocabulary(config, layers, shapes)


def _vocabulary(config: Mapping[str, Any], layers: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    whole, own = layers.get("vocab_size"), config.get("draft_vocab_size")
    if own is None or whole is None:
        return
    if own == whole:
        if "d2t" in shapes:
            yield _error("a d2t table beside a whole vocabulary: vLLM refuses the folder (no such parameter)")
        return
    if "lm_head.weight" not in shapes:
        yield _error("a reduced vocabulary without lm_head.weight loads without an error and drafts garbage")
    elif shapes["lm_head.weight"][0] != own:
        yield _error(f"lm_head.weight has {shapes['lm_head.weight'][0]} rows, draft_vocab_size is {own}")
    if shapes.get("d2t") != (own,) or shapes.get("t2d") != (whole,):
        yield _error(f"a reduced vocabulary needs d2t [{own}] (offsets) and t2d [{whole}]")


def _taps(ids: Any, smallest: int, key: str) -> Iterator[Finding]:
    if not ids:
        yield _error(f"{key} is not written: a loader would take its own default layers")
    elif list(ids) != sorted(set(ids)):
        yield _error(f"{key}={ids} must be increasing: servers join the taps in layer order")
    elif ids[0] < smallest:
        yield _error(f"{key}={ids}: the smallest layer id of this form is {smallest}")


def _dflash(config: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    inner = config.get("dflash_config") or {}
    yield from _layers(config, "")
    yield from _missing(config, ("block_size", "num_target_layers"), "")
    for key in ("causal", "causal_head", "mask_token_id", "target_layer_ids"):
        if key not in inner:
            yield _error(f"dflash_config.{key} is not written: a missing key loads silently with another meaning")
    if inner.get("causal") != inner.get("causal_head"):
        yield _error("dflash_config.causal and causal_head differ; loaders read one or the other")
    yield from _taps(inner.get("target_layer_ids"), 0, "dflash_config.target_layer_ids")
    if any(name.startswith("markov_head.") for name in shapes):
        yield _error("this form has no place for a parent term (markov_head.*)")


def _deepspec(config: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    yield from _layers(config, "")
    yield from _missing(
        config,
        ("block_size", "mask_token_id", "num_anchors", "num_target_layers", "target_layer_ids", *_DSPARK_FLAGS),
        "",
    )
    yield from _taps(config.get("target_layer_ids"), 0, "target_layer_ids")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        if name not in shapes:
            yield _error(f"{name} is missing: this form carries its own copy of the target's")


def _safeailab(config: Mapping[str, Any], shapes: Shapes) -> Iterator[Finding]:
    yield from _layers(config, "")
    yield from _missing(config, ("draft_vocab_size",), "")
    ids = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    yield from _taps(ids, 0, "eagle_config.eagle_aux_hidden_state_layer_ids")
    if "lm_head.weight" not in shapes:
        yield _error("lm_head.weight is missing: loaders of this form predict with the draft's own head")
    if not any(name.startswith("midlayer.") for name in shapes):
        yield _warning("tensors are not named midlayer.*: SafeAILab's own loader does not find them")
    yield from _vocabulary(config, config, shapes)
