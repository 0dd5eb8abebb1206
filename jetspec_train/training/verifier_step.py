"""The verifier's part of a step: which blocks are judged, what the draft says there, and what the heads say of it.

``plan_judging`` runs on the host for the whole global batch, before anything is computed: which samples are held out
(the draft takes no gradient from them, so that its drafts of them are those of text it has not memorised), which
blocks are judged, and the verifier's normaliser. ``judge_blocks`` then runs inside the micro-step, on the states that
the draft's forward has just made; stored negatives are further blocks at anchors of the same rows, so that they cost no
target forward of their own.

Shapes: B rows, T tokens, A anchors, C judged (or stored) blocks per row, K slots, S candidates per slot, M = K * S
nodes, d / D width of draft / target state, r rank of the parent term, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from jetspec_train.modeling.blocks import Blocks
from jetspec_train.modeling.draft_head import DraftHead, LayerContext
from jetspec_train.modeling.verifier import NodeInputs, Verifier, node_scalars
from jetspec_train.objectives.candidates import Candidates, Rule, draft_candidates, rate_paths
from jetspec_train.objectives.draft_loss import Fraction, SlotOutcomes
from jetspec_train.objectives.verifier_loss import VerifierLoss, VerifierWeights, add_fractions, verifier_loss
from jetspec_train.objectives.weights import slot_weights
from jetspec_train.targets.target import Target
from jetspec_train.training.stored_paths import StoredBlocks


@dataclass(frozen=True)
class JudgeSettings:
    """What judging needs from the configuration (``verifier.*``). ``seen_weight``: of labels on samples that the draft
    learns from, 1 where none is held out."""

    rule: Rule
    weights: VerifierWeights
    blocks: int
    seen_weight: float
    negatives_share: float = 0.0  # 0: no stored paths

    @property
    def stored_blocks(self) -> int:
        """Stored paths per row that keep them at ``negatives_share`` of all judged blocks."""
        return round(self.blocks * self.negatives_share / (1.0 - self.negatives_share))


@dataclass(frozen=True)
class JudgePlan:
    """The judged blocks of the global batch, C per row, in the order of their anchors; a row's rest is not ``real``."""

    index_BC: Tensor  # int64: which of the row's A blocks
    real_BC: Tensor  # bool
    weights_BCK: Tensor  # slot weights times document weight
    draws_BCK: Tensor | None  # uniform numbers of the ratio rule
    total_weight: float
    stored: StoredBlocks | None = None

    def rows(self, rows: slice) -> JudgePlan:
        stored = None if self.stored is None else self.stored.rows(rows)
        return replace(self._each(lambda x: x[rows]), stored=stored)

    def to(self, device: torch.device) -> JudgePlan:
        stored = None if self.stored is None else self.stored.to(device)
        return replace(self._each(lambda x: x.to(device)), stored=stored)

    def _each(self, function: Callable[[Tensor], Tensor]) -> JudgePlan:
        own: dict[str, Any] = {
            f.name: function(x) for f in fields(self) if isinstance(x := getattr(self, f.name), Tensor)
        }
        return replace(self, **own)


def held_out(ids: Sequence[str], share: float) -> list[bool]:
    """Which samples the draft does not learn from: a ``share`` of them, by a hash of their ids alone."""
    limit = int(share * 2**32)
    return [int.from_bytes(hashlib.blake2b(i.encode(), digest_size=4).digest(), "big") < limit for i in ids]


def plan_judging(
    blocks: Blocks,
    held_out_BA: Tensor,
    settings: JudgeSettings,
    *,
    gamma: float | None,
    seeds_B: Sequence[int],
    stored: StoredBlocks | None = None,
) -> JudgePlan:
    """Choose at most ``settings.blocks`` ordinary blocks per row, those of held-out samples first.

    ``held_out_BA``: per block. The normaliser is the sum of the slot weights of all blocks, judged or not, so that it
    is that of the draft loss where nothing is held out.
    """
    ordinary_BA = (blocks.clean_BA == 0) & blocks.valid_BAK.any(-1)
    document_BA = torch.where(held_out_BA, 1.0, settings.seen_weight)
    order_BA = torch.zeros(ordinary_BA.shape)
    for row, seed in enumerate(seeds_B):
        order_BA[row] = torch.rand(ordinary_BA.shape[1], generator=_generator(seed, 2))
    # Held-out blocks score in 2..3, others of weight in 1..2; the rest is not judged.
    score_BA = torch.where(ordinary_BA & (document_BA > 0), order_BA + 1.0 + held_out_BA.float(), 0.0)
    count = min(settings.blocks, score_BA.shape[1])
    best_BC, chosen_BC = score_BA.topk(count, dim=1)
    # What is not judged points at block 0, so that a plan never needs more blocks than the draft does.
    index_BC, order_BC = torch.where(best_BC > 0, chosen_BC, 0).sort(dim=1)
    real_BC = (best_BC > 0).gather(1, order_BC)
    all_weights_BAK = slot_weights(blocks.valid_BAK, blocks.distance_BAK, gamma)
    weights_BCK = take_blocks(all_weights_BAK * document_BA.unsqueeze(-1), index_BC) * real_BC.unsqueeze(-1)
    draws_BCK = None
    if settings.rule.mode == "ratio":
        draws = [
            torch.rand(weights_BCK.shape[1:], generator=_generator(seed, 3), dtype=torch.float64) for seed in seeds_B
        ]
        draws_BCK = torch.stack(draws)
    total = float(all_weights_BAK.double().sum())
    return JudgePlan(index_BC, real_BC, weights_BCK, draws_BCK, total if total > 0 else 1.0, stored)


def _generator(seed: int, stream: int) -> torch.Generator:
    # Streams 0 and 1 are those of anchors and clean prefixes (modeling.blocks).
    return torch.Generator().manual_seed((int(seed) * 4 + stream) % (2**63 - 1))


def take_blocks(values_BAx: Tensor, index_BC: Tensor) -> Tensor:
    """Some blocks of every row: [B, A, ...] -> [B, C, ...]."""
    rows_B1 = torch.arange(index_BC.shape[0], device=index_BC.device).unsqueeze(-1)
    return values_BAx[rows_B1, index_BC]


def known_choices(slots: SlotOutcomes, like_BAK: Tensor) -> Tensor | None:
    """The target's argmax where the draft loss has seen it, -1 elsewhere; None if it does not look at the target."""
    if slots.target_argmax_M is None:
        return None
    choice_BAK = torch.full_like(like_BAK, -1)
    choice_BAK.view(-1)[slots.index_M] = slots.target_argmax_M
    return choice_BAK


@dataclass(frozen=True)
class DraftStates:
    """What the draft's forward on the text left: its states, parent states [.., r] (None without a parent term), the
    fused context with the draft's own keys and values of it."""

    hidden_BAKd: Tensor
    parent_state_BAKr: Tensor | None
    fused_BTd: Tensor
    context: list[LayerContext]


def judge_blocks(
    draft: DraftHead,
    verifier: Verifier,
    target: Target,
    blocks: Blocks,
    states: DraftStates,
    plan: JudgePlan,
    *,
    positions_BT: Tensor,
    target_hidden_BTD: Tensor,
    choice_BAK: Tensor | None,
    settings: JudgeSettings,
    chunk_rows: int = 256,
) -> VerifierLoss:
    """Loss and metrics of the judged and the stored blocks of some rows (``plan.rows(rows)``)."""
    judged = Blocks(**{f.name: take_blocks(getattr(blocks, f.name), plan.index_BC) for f in fields(Blocks)})
    hidden_BCKd = take_blocks(states.hidden_BAKd, plan.index_BC)
    state_BCKr = None if states.parent_state_BAKr is None else take_blocks(states.parent_state_BAKr, plan.index_BC)
    candidates = draft_candidates(
        hidden_BCKd,
        state_BCKr,
        draft.parent_weight,
        labels_BAK=judged.labels_BAK,
        valid_BAK=judged.valid_BAK,
        judged_BA=plan.real_BC,
        target_hidden_BTD=target_hidden_BTD,
        sources_BAK=judged.sources_BAK,
        draft_logits=target.logits,
        target_logits=target.logits,
        target_choice_BAK=None if choice_BAK is None else take_blocks(choice_BAK, plan.index_BC),
        draws_BAK=plan.draws_BCK,
        rule=settings.rule,
        chunk_rows=chunk_rows,
    )
    own_context = verifier.context_kv(states.fused_BTd, positions_BT)
    nodes = nodes_of(candidates, judged, hidden_BCKd, state_BCKr, target, verifier)
    result = verifier_loss(
        verifier.confidence(hidden_BCKd, state_BCKr),
        verifier.correctness(nodes, own_context, judged.context_mask_BAT),
        candidates,
        plan.weights_BCK,
        total_weight=plan.total_weight,
        weights=settings.weights,
    )
    if plan.stored is None:
        return result
    stored = _judge_stored(draft, verifier, target, plan.stored, states.context, own_context, chunk_rows)
    further = verifier_loss(
        None,
        stored.logits_BCK,
        stored.candidates,
        plan.stored.weights_BCK,
        total_weight=plan.total_weight,
        weights=settings.weights,
    )
    metrics = add_fractions(
        result.metrics, {**_kinds(stored, plan.stored), "bce": further.metrics["correctness_bce"]}, "stored/"
    )
    return VerifierLoss(result.loss + further.loss, metrics)


def nodes_of(
    candidates: Candidates,
    blocks: Blocks,
    hidden_BCKd: Tensor,
    state_BCKr: Tensor | None,
    target: Target,
    verifier: Verifier,
) -> NodeInputs:
    """The candidates of all slots as the nodes [B, C, M] of one tree per block."""
    B, C, K, S = candidates.tokens_BAKS.shape

    def per_node(x_BCKx: Tensor) -> Tensor:
        """One row per slot -> one row per node."""
        return x_BCKx.unsqueeze(3).expand(B, C, K, S, x_BCKx.shape[-1]).reshape(B, C, K * S, x_BCKx.shape[-1])

    depth_BCK = blocks.distance_BAK.clamp(min=0)
    depth_BCKS = depth_BCK.unsqueeze(-1).expand(B, C, K, S)
    scalars = node_scalars(
        verifier.config,
        logprob=candidates.logprobs_BAKS,
        path_logprob=candidates.path_logprobs(),
        margin=candidates.margins_BAKS,
        rank=candidates.ranks_BAKS,
        entropy=candidates.entropies_BAK.unsqueeze(-1).expand(B, C, K, S),
        depth=depth_BCKS,
    )
    valid_BCK = candidates.on_path_BAK
    anchor_BC11 = blocks.positions_BAK[..., :1].unsqueeze(-1)
    return NodeInputs(
        hidden_BMd=per_node(hidden_BCKd),
        parent_state_BMr=per_node(hidden_BCKd[..., :0] if state_BCKr is None else state_BCKr),
        token_embeds_BME=target.embed(candidates.tokens_BAKS.flatten(2)),
        scalars_BMs=scalars.flatten(2, 3),
        ancestors_BMM=candidates.ancestors(),
        positions_BM=(anchor_BC11 + 1 + depth_BCKS).flatten(2),
        valid_BM=valid_BCK.unsqueeze(-1).expand(B, C, K, S).flatten(2),
    )


@dataclass(frozen=True)
class _StoredResult:
    candidates: Candidates
    logits_BCK: Tensor


def _judge_stored(
    draft: DraftHead,
    verifier: Verifier,
    target: Target,
    stored: StoredBlocks,
    context: list[LayerContext],
    own_context: list[LayerContext],
    chunk_rows: int,
) -> _StoredResult:
    """Given paths, drafted from their anchors without a gradient for the draft."""
    blocks = stored.blocks
    with torch.no_grad():
        hidden_BCKd = draft(
            draft.embed(blocks.inputs_BAK, target.embed), blocks.positions_BAK, context, blocks.context_mask_BAT
        )
        state_BCKr = draft.parent_state(stored.parents_BCK, hidden_BCKd) if draft.has_parent else None
        candidates = rate_paths(
            hidden_BCKd,
            state_BCKr,
            draft.parent_weight,
            tokens_BAK=stored.tokens_BCK,
            labels_BAK=stored.labels_BCK,
            labelled_BAK=stored.labelled_BCK,
            draft_logits=target.logits,
            logits_dtype=target.dtype,
            chunk_rows=chunk_rows,
        )
    nodes = nodes_of(candidates, blocks, hidden_BCKd, state_BCKr, target, verifier)
    return _StoredResult(candidates, verifier.correctness(nodes, own_context, blocks.context_mask_BAT))


def _kinds(result: _StoredResult, stored: StoredBlocks) -> Mapping[str, Fraction]:
    """Share of right judgements at one half, over the last labelled token of each stored path, per kind."""
    last_BC1 = (stored.labelled_BCK.cumsum(-1).argmax(-1)).unsqueeze(-1)
    right_BC = (result.logits_BCK.gather(-1, last_BC1) >= 0) == (stored.labels_BCK.gather(-1, last_BC1) > 0)
    real_BC = stored.labelled_BCK.any(-1)
    counts: dict[str, Fraction] = {}
    for number, kind in enumerate(stored.kinds):
        of_kind_BC = real_BC & (stored.kind_BC == number)
        counts[f"accuracy/{kind}"] = (
            (right_BC.squeeze(-1) & of_kind_BC).sum().double(),
            of_kind_BC.sum().double(),
        )
    return counts
