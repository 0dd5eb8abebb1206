"""One optimiser step: target states -> draft head -> loss, and the verifier's beside it, for the whole global batch.

A step is a function of its number. ``plan_step`` draws anchors and clean prefixes for every row of the *global* batch
from a generator keyed by (seed, step, row) and sums the weights of all of them to the one normaliser W before
anything is computed; each rank and each micro-step then takes its own rows. So neither the number of ranks nor the
accumulation split nor the order of work can move the loss.

Shapes: B rows of the global batch, T tokens of a packed row, A anchors per row, K slots per block, F concatenated
taps, D width of the target, d width of the draft, V vocabulary.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from jetspec_train.modeling.blocks import Blocks, make_blocks, sample_anchors, sample_clean
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.eagle3_training import eagle3_blocks
from jetspec_train.modeling.verifier import Verifier
from jetspec_train.objectives.draft_loss import Fraction, draft_loss
from jetspec_train.objectives.verifier_loss import add_fractions
from jetspec_train.objectives.weights import slot_weights, total_weight
from jetspec_train.targets.target import Target
from jetspec_train.training.engine import Engine
from jetspec_train.training.loop import StepResult, Sums
from jetspec_train.training.ranks import sum_over_ranks
from jetspec_train.training.stored_paths import StoredBlocks, StoredPaths
from jetspec_train.training.verifier_step import (
    DraftStates,
    JudgePlan,
    JudgeSettings,
    judge_blocks,
    known_choices,
    plan_judging,
)

EAGLE3 = "eagle3"


@dataclass(frozen=True)
class PackedText:
    """What the networks of a micro-step may read of its packed rows; int64 [B, T] each."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor

    def to(self, device: torch.device) -> PackedText:
        return PackedText(self.tokens_BT.to(device), self.positions_BT.to(device), self.documents_BT.to(device))


@dataclass(frozen=True)
class TrainBatch:
    """The global batch of a step: B packed rows of T tokens, padded with document -1."""

    tokens_BT: Tensor  # int64
    positions_BT: Tensor  # int64, within the document
    documents_BT: Tensor  # int64, -1 for padding
    supervised_BT: Tensor  # bool
    samples: list[np.ndarray]  # per row: which samples it holds, in their order (what a feature cache looks up)
    held_out_BT: Tensor | None = None  # bool: of samples that only the verifier learns from; None: there are none

    def text(self, rows: slice) -> PackedText:
        return PackedText(self.tokens_BT[rows], self.positions_BT[rows], self.documents_BT[rows])


States = Callable[[TrainBatch, slice], tuple[Tensor, Tensor]]  # rows -> features [b, T, F], hidden [b, T, D]


@dataclass(frozen=True)
class StepSettings:
    """What a step needs from the configuration. ``autocast``: the dtype of matrix products, None for fp32.

    ``layout``: that of a block draft, or "eagle3" for blocks of so many steps of training-time test.
    """

    block: int
    layout: str
    anchors: int
    clean_prefix: float
    gamma: float | None
    ce: float
    l1: float
    kl: float
    chunk_rows: int = 256
    autocast: torch.dtype | None = None
    reach: bool = False  # expected-acceptance weights (objectives.draft_loss)


@dataclass(frozen=True)
class StepPlan:
    """Everything random about a step, and its normaliser."""

    blocks: Blocks
    weights_BAK: Tensor  # of the draft loss; 0 on held-out samples
    total_weight: float
    judging: JudgePlan | None = None

    def rows(self, rows: slice) -> tuple[Blocks, Tensor]:
        """Blocks and weights of some rows, without the anchors that none of them has."""
        used = max(1, int((self.blocks.anchors_BA[rows] >= 0).sum(1).max()))
        cut = {name: value[rows, :used] for name, value in vars(self.blocks).items()}
        return Blocks(**cut), self.weights_BAK[rows, :used]


def row_seed(seed: int, step: int, row: int) -> int:
    """A number of 62 bits that belongs to this row of this step alone."""
    digest = hashlib.blake2b(f"{seed}/{step}/{row}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 2


def plan_step(
    batch: TrainBatch,
    settings: StepSettings,
    *,
    seed: int,
    step: int,
    judging: JudgeSettings | None = None,
    stored: StoredPaths | None = None,
) -> StepPlan:
    """Anchors, clean prefixes, blocks and the normaliser W of the global batch of ``step``.

    ``judging``: also choose what the verifier learns from; ``stored``: with paths out of these. Neither moves anything
    about the draft but the weights of held-out samples, which become 0.
    """
    seeds = [row_seed(seed, step, row) for row in range(batch.tokens_BT.shape[0])]
    anchors_BA = sample_anchors(batch.supervised_BT, batch.documents_BT, settings.anchors, seeds)
    rows = (batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.supervised_BT, anchors_BA)
    if settings.layout == EAGLE3:
        blocks = eagle3_blocks(*rows, steps=settings.block)
    else:
        clean_BA = sample_clean(anchors_BA, block=settings.block, probability=settings.clean_prefix, seeds_B=seeds)
        blocks = make_blocks(*rows, clean_BA, block=settings.block, layout=settings.layout)
    weights_BAK = slot_weights(blocks.valid_BAK, blocks.distance_BAK, settings.gamma)
    held_out_BA = torch.zeros(anchors_BA.shape, dtype=torch.bool)
    if batch.held_out_BT is not None:
        held_out_BA = batch.held_out_BT.gather(1, anchors_BA.clamp(min=0)) & (anchors_BA >= 0)
        weights_BAK = weights_BAK * ~held_out_BA.unsqueeze(-1)
    plan = None
    if judging is not None:
        paths = _stored_blocks(batch, settings, judging, stored, seeds) if stored is not None else None
        plan = plan_judging(blocks, held_out_BA, judging, gamma=settings.gamma, seeds_B=seeds, stored=paths)
    return StepPlan(blocks, weights_BAK, total_weight([weights_BAK]), plan)


def _stored_blocks(
    batch: TrainBatch, settings: StepSettings, judging: JudgeSettings, stored: StoredPaths, seeds: list[int]
) -> StoredBlocks:
    weights = []
    for row, samples in enumerate(batch.samples):
        seen = np.full(len(samples), judging.seen_weight)
        if batch.held_out_BT is not None:
            for document in range(len(samples)):
                of_document_T = batch.documents_BT[row] == document
                seen[document] = 1.0 if bool(batch.held_out_BT[row][of_document_T].any()) else seen[document]
        weights.append(seen)
    return stored.blocks(
        batch.samples,
        batch.tokens_BT,
        batch.positions_BT,
        batch.documents_BT,
        count=judging.stored_blocks,
        block=settings.block,
        layout=settings.layout,
        gamma=settings.gamma,
        document_weights=weights,
        seeds_B=seeds,
    )


@dataclass(frozen=True)
class StepOutput:
    """``loss``: of draft and verifier together, each divided by its normaliser; metrics as (numerator, denominator)."""

    loss: Tensor
    metrics: dict[str, Fraction]


class DraftStep(nn.Module):
    """The trained modules under the names of a bundle's tensors (``draft.*``, ``verifier.*``); its forward is one
    micro-step.

    The frozen target is held outside the module tree: no engine may shard, cast or save it. ``train_draft`` false: so
    is the draft, and there is no draft loss.
    """

    def __init__(
        self,
        draft: DraftHead,
        target: Target,
        settings: StepSettings,
        verifier: Verifier | None = None,
        judging: JudgeSettings | None = None,
        *,
        train_draft: bool = True,
    ) -> None:
        super().__init__()
        if train_draft:
            self.draft = draft
        else:
            draft.requires_grad_(False)
        self.verifier = verifier
        self._outside = (target, draft)
        self.settings, self.judging, self.train_draft = settings, judging, train_draft

    @property
    def target(self) -> Target:
        return self._outside[0]

    def used_directly(self) -> list[Tensor]:
        """Large trained weights that are read outside their own module's forward: an engine that divides weights
        among ranks must bring these together first."""
        weight = self._outside[1].parent_weight
        return [weight] if self.train_draft and weight is not None else []

    def forward(
        self,
        blocks: Blocks,
        weights_BAK: Tensor,
        text: PackedText,
        features_BTF: Tensor,
        target_hidden_BTD: Tensor,
        total_weight: float,
        judging: JudgePlan | None = None,
    ) -> StepOutput:
        """Loss (already normalised) and metrics of some rows."""
        settings, (target, draft) = self.settings, self._outside
        with autocast(target.device, settings.autocast):
            fused_BTd = draft.fuse(features_BTF)
            context = draft.context_kv(fused_BTd, text.positions_BT)
            embeds = draft.embed(blocks.inputs_BAK, target.embed)
            hidden_BAKd = draft(embeds, blocks.positions_BAK, context, blocks.context_mask_BAT)
            state = draft.parent_state(blocks.parents_BAK, hidden_BAKd) if draft.has_parent else None
            parts: list[Tensor] = []
            metrics: dict[str, Fraction] = {}
            choice_BAK = None
            if self.train_draft:
                drafted = draft_loss(
                    hidden_BAKd,
                    labels_BAK=blocks.labels_BAK,
                    weights_BAK=weights_BAK,
                    clean_BA=blocks.clean_BA,
                    target_hidden_BTD=target_hidden_BTD,
                    sources_BAK=blocks.sources_BAK,
                    draft_logits=target.logits,
                    target_logits=target.logits,
                    total_weight=total_weight,
                    ce=settings.ce,
                    l1=settings.l1,
                    kl=settings.kl,
                    parent_state_BAKr=state,
                    parent_weight_Vr=draft.parent_weight,
                    chunk_rows=settings.chunk_rows,
                    reach=settings.reach,
                )
                parts.append(drafted.loss)
                metrics = dict(drafted.metrics)
                choice_BAK = known_choices(drafted.slots, blocks.labels_BAK)
            if self.verifier is not None and self.judging is not None and judging is not None:
                judged = judge_blocks(
                    draft,
                    self.verifier,
                    target,
                    blocks,
                    DraftStates(hidden_BAKd, state, fused_BTd, context),
                    judging,
                    positions_BT=text.positions_BT,
                    target_hidden_BTD=target_hidden_BTD,
                    choice_BAK=choice_BAK,
                    settings=self.judging,
                    chunk_rows=settings.chunk_rows,
                )
                parts.append(judged.loss)
                metrics = add_fractions(metrics, judged.metrics, "verifier/")
                if not self.train_draft:
                    weight = judging.weights_BCK.double().sum()
                    metrics["loss"] = (judged.loss.detach().double() * judging.total_weight, weight)
        return StepOutput(sum(parts[1:], start=parts[0]), metrics)


def autocast(device: torch.device, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """Matrix products in ``dtype`` with fp32 weights; nothing for None."""
    return torch.autocast(device.type, dtype=dtype) if dtype is not None else contextlib.nullcontext()


def online_states(target: Target, taps: tuple[int, ...]) -> States:
    """Taps and final hidden states from a target forward over the packed rows (METHODS 2)."""

    def states(batch: TrainBatch, rows: slice) -> tuple[Tensor, Tensor]:
        output = target.forward_packed(batch.tokens_BT[rows], batch.positions_BT[rows], batch.documents_BT[rows], taps)
        assert output.features_BNF is not None
        return output.features_BNF, output.hidden_BND

    return states


def micro_rows(rows: int, *, rank: int, world: int, accumulation: int) -> list[slice]:
    """The rows of the global batch that this rank works on, one slice per micro-step.

    ``rows`` must be a multiple of ``world * accumulation`` (checked before training starts).
    """
    size = rows // (world * accumulation)
    first = rank * accumulation * size
    return [slice(first + i * size, first + (i + 1) * size) for i in range(accumulation)]


def run_step(
    module: nn.Module,
    engine: Engine,
    states: States,
    batch: TrainBatch,
    plan: StepPlan,
    *,
    device: torch.device,
    accumulation: int,
    learning_rate: float,
) -> StepResult:
    """Forward, backward and update for one global batch; metric sums are those of all ranks."""
    ranks = engine.ranks
    pieces = micro_rows(batch.tokens_BT.shape[0], rank=ranks.rank, world=ranks.world, accumulation=accumulation)
    sums: dict[str, tuple[Tensor, Tensor]] = {}
    for number, rows in enumerate(pieces):
        features_BTF, hidden_BTD = states(batch, rows)
        blocks, weights_BAK = plan.rows(rows)
        result = module(
            blocks.to(device),
            weights_BAK.to(device),
            batch.text(rows).to(device),
            features_BTF,
            hidden_BTD,
            plan.total_weight,
            None if plan.judging is None else plan.judging.rows(rows).to(device),
        )
        engine.backward(result.loss, boundary=number == len(pieces) - 1)
        sums = add_fractions(sums, result.metrics)
    norm = engine.step()
    return StepResult(
        sums=_gather(sums, engine),
        gradient_norm=norm,
        learning_rate=learning_rate,
        tokens=int(batch.supervised_BT.sum()),
    )


def _gather(sums: dict[str, tuple[Tensor, Tensor]], engine: Engine) -> Sums:
    """Sums over ranks as plain numbers, in one transfer. Every rank has the same metrics in the same order."""
    parts = [part.double().reshape(-1) for pair in sums.values() for part in pair]
    flat = sum_over_ranks(torch.cat(parts), engine.ranks).tolist()
    gathered, at = {}, 0
    for name, pair in sums.items():
        lists = []
        for part in pair:
            lists.append(flat[at : at + part.numel()])
            at += part.numel()
        gathered[name] = (lists[0], lists[1])
    return gathered
