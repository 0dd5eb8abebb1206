"""Drafts of other projects on our targets: read, checked against the target's own weights, made into drafters.

The decoder then treats them like its own: the same loop, the same tree or chain, the same lossless walk.
"""

from __future__ import annotations

from pathlib import Path

import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import ForeignDraft, ReadOptions, TargetFacts, read_foreign
from jetspec_train.decoding.drafting import BlockDrafter, Drafter
from jetspec_train.decoding.eagle3 import Eagle3Drafter
from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from jetspec_train.targets.target import Target


def target_facts(target: Target, name: str | None = None) -> TargetFacts:
    """What the forms say about a target. ``name``: how others shall find it (default: as it was loaded)."""
    config = target.config
    scale, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return TargetFacts(
        name=name or target.identity.name,
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        num_layers=target.num_layers,
        architecture=(getattr(target.model.config, "architectures", None) or [type(target.model).__name__])[0],
        max_positions=target.max_positions,
        embedding_scale=float(target.embedding_scale),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        logit_scale=float(scale or 1.0) / float(divisor or 1.0),
    )


def import_draft(path: str | Path, target: Target, options: ReadOptions | None = None) -> ForeignDraft:
    """Read a foreign draft for this target; its copies of target weights must be the target's own.

    Raises UserError with the reason for whatever cannot be honoured.
    """
    draft = read_foreign(path, target_facts(target), options)
    own = {"embed_tokens.weight": target.embedding.weight, "lm_head.weight": target.head.weight}
    for name, copy in draft.copies.items():
        check_copy(copy, own[name], name, str(path), target.identity.name)
        draft.assumptions.append(f"its copy of the target's {name} equals the target's and was left out")
    if draft.kind == "eagle3" and "lm_head.weight" not in draft.tensors:
        draft.tensors["lm_head.weight"] = target.head.weight.detach().cpu().clone()
    return draft


def check_copy(copy: torch.Tensor, own: torch.Tensor, name: str, where: str, target: str) -> None:
    """Refuse a draft whose embedding or head is not the target's, beyond the rounding of another dtype."""
    if tuple(copy.shape) != tuple(own.shape):
        raise UserError(f"{where}: {name} is {list(copy.shape)}, that of {target} is {list(own.shape)}.")
    theirs, ours = copy.float(), own.detach().cpu().float()
    # bf16 keeps 8 bits of a number, so that a copy in bf16 differs by up to 2^-8 of it; fp16 rounds small ones away
    different = (theirs - ours).abs() > 2**-7 * ours.abs() + 1e-6
    if bool(different.any()):
        rows = int(different.any(dim=-1).sum())
        raise UserError(
            f"{where} carries its own {name}, which differs from that of {target} in {rows} of {len(ours)} rows. The "
            "decoder shares the target's, so this draft would not compute what it was trained to: it belongs to "
            "another (fine-tuned?) target, or its embedding was trained too, which is not supported."
        )


def drafter_of(draft: ForeignDraft, target: Target) -> Drafter:
    """A drafter for the decoder."""
    if draft.kind == "block":
        head = DraftHead(DraftHeadConfig(**draft.config))
        head.load_state_dict(draft.tensors)
        return BlockDrafter(head, target)
    eagle3 = Eagle3Head(Eagle3Config(**draft.config))
    eagle3.load_state_dict(draft.tensors)
    return Eagle3Drafter(eagle3, target)


def foreign_drafter(path: str | Path, target: Target, options: ReadOptions | None = None) -> Drafter:
    """``import_draft`` and ``drafter_of`` in one call, for use from Python."""
    return drafter_of(import_draft(path, target, options), target)
