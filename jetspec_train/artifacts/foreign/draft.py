"""A draft read from, or written to, another project's form: our configuration, our tensor names, and the notes.

The forms differ in three silent ways, each converted here and nowhere else:

- *layer ids*: ours, z-lab, JetSpec, DeepSpec and SGLang count decoder layers from 0 ("output of layer i");
  speculators and vLLM count 0 = embeddings, so the same tap is one higher.
- *draft vocabulary*: ``d2t`` holds offsets (target id = i + d2t[i]), never ids.
- *block layout*: ``in_place`` slots predict their own position and slot 0 is the anchor; ``anchor`` slots predict
  the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class TargetFacts:
    """What a form must say, or a reader must check, about the target.

    ``num_layers``: decoder layers. ``embedding_scale``, ``logit_softcap``, ``logit_scale``: what the target does to
    its embeddings and logits beyond a lookup and a product (Gemma, Cohere); 1, None, 1 for most.
    """

    name: str
    hidden_size: int
    vocab_size: int
    num_layers: int
    architecture: str = "LlamaForCausalLM"
    max_positions: int = 0
    embedding_scale: float = 1.0
    logit_softcap: float | None = None
    logit_scale: float = 1.0


@dataclass
class ForeignDraft:
    """A draft in our terms.

    ``kind``: block or eagle3. ``config``: the fields of ``DraftHeadConfig`` (block) or ``Eagle3Config`` (eagle3).
    ``tensors``: under our names. ``copies``: target weights that the folder carries (``embed_tokens.weight``,
    ``lm_head.weight`` of a block head), to be compared with the target's. ``confidence``: a DSpark confidence head
    (``weight`` [1, H(+r)], ``bias`` [1]) with its flag ``confidence_with_parent``. ``assumptions``: what was read
    into the folder, one sentence each, for the report.
    """

    kind: str
    form: str
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    copies: dict[str, Tensor] = field(default_factory=dict)
    confidence: dict[str, Tensor] | None = None
    confidence_with_parent: bool = False
    assumptions: list[str] = field(default_factory=list)
    path: Path | None = None


# -- layer ids -------------------------------------------------------------------------------------------------------
def to_embedding_based(target_layer_ids: Iterable[int]) -> list[int]:
    """ "Output of layer i" -> the ids of speculators and vLLM, where 0 is the embeddings."""
    return [int(layer) + 1 for layer in target_layer_ids]


def from_embedding_based(layer_ids: Iterable[int], where: str) -> list[int]:
    """The inverse of ``to_embedding_based``; UserError for a tap on the embeddings, which our taps do not offer."""
    ids = [int(layer) for layer in layer_ids]
    if any(layer < 1 for layer in ids):
        raise UserError(
            f"{where} taps layer id {min(ids)}: in this form 0 is the embedding output, which this project does not "
            "tap. Only outputs of decoder layers can be read."
        )
    return [layer - 1 for layer in ids]


def check_layer_ids(target_layer_ids: Any, target: TargetFacts | None, where: str) -> list[int]:
    """Taps as a list of distinct increasing ints inside the target. Raises UserError."""
    if not isinstance(target_layer_ids, list | tuple) or not target_layer_ids:
        raise UserError(f"{where}: the taps must be a non-empty list of layer numbers, not {target_layer_ids!r}.")
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in target_layer_ids):
        raise UserError(f"{where}: the taps must be whole numbers, not {target_layer_ids!r}.")
    ids = list(target_layer_ids)
    if sorted(set(ids)) != ids or ids[0] < 0:
        raise UserError(f"{where}: the taps {ids} must be distinct, increasing and not negative.")
    if target is not None and ids[-1] >= target.num_layers:
        raise UserError(
            f"{where} taps the output of decoder layer {ids[-1]} (counted from 0), but the target {target.name} has "
            f"{target.num_layers} layers. This draft belongs to another target."
        )
    return ids


# -- reduced draft vocabulary ----------------------------------------------------------------------------------------
def offsets_from_ids(target_ids: Tensor) -> Tensor:
    """d2t offsets [DV] int64 of the sorted target ids that the draft's vocabulary keeps."""
    import torch

    return (target_ids - torch.arange(len(target_ids))).to(torch.int64)


def ids_from_offsets(d2t: Tensor, vocab_size: int, where: str) -> Tensor:
    """Target ids [DV] of d2t offsets. Raises UserError when they are not distinct ids of the target's vocabulary.

    Tables that hold ids instead of offsets (a known export bug) leave the vocabulary or repeat, and are refused.
    """
    import torch

    ids = torch.arange(len(d2t)) + d2t.to(torch.int64)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab_size or len(torch.unique(ids)) != len(ids):
        raise UserError(
            f"{where}: d2t must hold offsets (target id = i + d2t[i]); read so, its ids run from {low} to {high} for "
            f"a vocabulary of {vocab_size} with {len(ids) - len(torch.unique(ids))} repeats. Does it hold ids instead?"
        )
    return ids


# -- checks shared by the readers ------------------------------------------------------------------------------------
def require_key(config: Mapping[str, Any], key: str, where: str) -> Any:
    """The value of ``key``; UserError if it is absent or null."""
    if config.get(key) is None:
        raise UserError(f"{where} does not say {key!r}, which this form needs; it is not guessed.")
    return config[key]


def refuse_unknown_keys(
    config: Mapping[str, Any], known: Iterable[str], where: str, accepted: Iterable[str] = ()
) -> list[str]:
    """Names of unknown keys without effect (null, false, empty); UserError for any other unknown one.

    An unknown key may change what the weights mean (a norm flag of a newer version), so it is only passed over when
    the user has named it in ``accepted``.
    """
    unknown = sorted(set(config) - set(known))
    empty = [key for key in unknown if config[key] in (None, False, {}, [], "")]
    refused = [key for key in unknown if key not in empty and key not in set(accepted)]
    if refused:
        shown = ", ".join(f"{key}={config[key]!r:.60}" for key in refused)
        raise UserError(
            f"{where} has keys that this reader does not know and which may change the draft's meaning: {shown}. "
            f"If they are harmless, say so: foreign.accept_keys=[{','.join(refused)}]"
        )
    return empty


def compare_names(found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]], where: str) -> None:
    """Strict: the same names and the same shapes. Raises UserError with the lists."""
    missing, extra = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    if missing or extra:
        raise UserError(
            f"{where}: the tensors do not fit the configuration. Missing: {_listed(missing)}. Unexpected: "
            f"{_listed(extra)}."
        )
    wrong = [name for name in sorted(wanted) if tuple(found[name]) != tuple(wanted[name])]
    if wrong:
        shown = "; ".join(f"{name} is {list(found[name])}, expected {list(wanted[name])}" for name in wrong[:5])
        raise UserError(f"{where}: {len(wrong)} tensor shapes do not fit the configuration: {shown}.")


def check_target_sizes(hidden_size: int, vocab_size: int, target: TargetFacts | None, where: str) -> None:
    """Refuse a draft made for another hidden size or vocabulary, naming both values."""
    if target is None:
        return
    for what, value, expected in (
        ("hidden size", hidden_size, target.hidden_size),
        ("vocabulary size", vocab_size, target.vocab_size),
    ):
        if value != expected:
            raise UserError(
                f"{where} was made for a target of {what} {value}, but {target.name} has {expected}. "
                "Load it with the target it was trained for."
            )


def _listed(names: list[str]) -> str:
    if not names:
        return "none"
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
