"""The draft loss: cross-entropy, L1 and forward KL in one chunked pass (METHODS 3).

For a slot with weight w, true token x*, target distribution q and draft distribution p::

    ce = -log p[x*]        l1 = sum_v |p_v - q_v| (twice the total variation)        kl = sum_v q_v log(q_v / p_v)
    loss = sum over slots of w * (ce_weight * ce + l1_weight * l1 + kl_weight * kl) / W

Rows are taken ``chunk_rows`` at a time; each chunk makes one softmax per side, which serves all losses,
their gradients and the metrics, and is dropped before the next chunk. With s = sign(p - q) the gradient
by the draft's logits is closed::

    dloss/dz = w / W * ( p * (ce_w + kl_w + l1_w * (s - <p, s>)) - kl_w * q - ce_w * onehot(x*) )

so the forward pass computes it on the spot and the full [slots, V] tensor never exists in any
precision. The elementwise work is done on a few rows at a time that fit the processor's cache.

Expected-acceptance weights (``reach``) multiply w by the chance that decoding reaches the slot: the product of
the acceptance of the slots before it, 1 - l1 / 2 where the mix looks at the target and p[x*] where it does not.
They take no gradient and leave W alone, which would otherwise depend on how the batch is cut.

Shapes: B rows, T tokens, A anchors, K slots, M slots with weight > 0, d / D width of draft / target
state, V vocabulary, r width of the trainable part of the logits (rank of the parent term).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Logits = Callable[[Tensor], Tensor]
Fraction = tuple[Tensor, Tensor]  # numerator, denominator: summed apart over ranks and steps, then divided


@dataclass(frozen=True)
class LossMix:
    """Weights of the three terms. DSpark: ce 0.1, l1 0.9; JetSpec: kl 1."""

    ce: float = 0.1
    l1: float = 0.9
    kl: float = 0.0

    @property
    def needs_target(self) -> bool:
        return self.l1 != 0.0 or self.kl != 0.0


@dataclass(frozen=True)
class SlotOutcomes:
    """What the pass saw at every weighted slot (no gradient): material for metrics and verifier labels.

    ``index_M``: flat index into [B, A, K]. ``correct_M``: the draft's argmax is the true token x*;
    ``matched_M``: it is the target's argmax (exact ties count for the draft). The fields after
    ``ce_M`` exist only if the mix looks at the target; ``label_probability_M`` is q[x*].
    """

    index_M: Tensor
    correct_M: Tensor
    ce_M: Tensor
    matched_M: Tensor | None
    target_argmax_M: Tensor | None
    label_probability_M: Tensor | None
    l1_M: Tensor | None
    kl_M: Tensor | None


@dataclass(frozen=True)
class DraftLoss:
    """``loss`` is already divided by W: its sum over micro-steps and ranks is the global loss."""

    loss: Tensor
    metrics: dict[str, Fraction]
    slots: SlotOutcomes


@dataclass
class _Plan:
    """The inputs of the chunked pass that take no gradient."""

    labels_M: Tensor
    weights_M: Tensor
    target_state_MD: Tensor | None
    frozen_logits: Logits | None
    target_logits: Logits | None
    target_columns_X: Tensor | None
    mix: LossMix
    total_weight: float
    chunk_rows: int
    outcomes: dict[str, Tensor]
    reach: _Reach | None = None


class _Reach:
    """Chance that decoding reaches each slot, filled in as the pass goes through the slots of a block in order."""

    def __init__(self, index_M: Tensor, weights_BAK: Tensor, dtype: torch.dtype) -> None:
        self.index_M, self.slots = index_M, weights_BAK.shape[-1]
        # Slots before the first that predicts are certain; a weighted slot without a label ends the chain.
        self.accepted_BAK = (weights_BAK.reshape(-1) == 0).to(dtype)

    def of(self, piece: slice, outcomes: dict[str, Tensor]) -> Tensor:
        """The chances of some slots, whose own outcomes (and those of all before them) are known."""
        index_m = self.index_M[piece]
        if "l1" in outcomes:
            accepted_m = 1.0 - outcomes["l1"][piece] / 2
        else:
            accepted_m = torch.exp(-outcomes["ce"][piece])
        self.accepted_BAK[index_m] = accepted_m.clamp(0.0, 1.0)
        first = int(index_m[0]) // self.slots
        blocks = self.accepted_BAK.view(-1, self.slots)[first : int(index_m[-1]) // self.slots + 1]
        before = torch.nn.functional.pad(blocks.cumprod(-1)[:, :-1], (1, 0), value=1.0)
        return before.reshape(-1)[index_m - first * self.slots]


def _cache_rows(vocabulary: int, device: torch.device, limit: int) -> int:
    """Rows whose fp32 softmaxes stay in a CPU core's cache together; on a GPU the whole chunk.

    Measured at V = 49k with one thread: 16 rows at a time take 0.4 of the time of 512 at a time.
    """
    if device.type != "cpu":
        return limit
    return max(1, min(limit, 800_000 // vocabulary))


def _rows_pass(
    z_mV: Tensor, t_mV: Tensor | None, labels_m: Tensor, weights_m: Tensor, mix: LossMix, out: dict[str, Tensor]
) -> Tensor:
    """One cache-sized piece: fills ``out`` with per-row results, returns w * W * dloss/dz [m, V] in fp32."""
    p_mV = torch.softmax(z_mV, dim=-1)
    label_m1 = labels_m.unsqueeze(-1)
    top_m1 = p_mV.amax(dim=-1, keepdim=True)
    # log-sum-exp = z_max - log p_max: no second exponential, and no underflow of p[x*]
    log_sum_m1 = z_mV.amax(dim=-1, keepdim=True) - top_m1.log()
    out["ce"].copy_((log_sum_m1 - z_mV.gather(-1, label_m1)).squeeze(-1))
    # An argmax over the vocabulary costs ten times a maximum, so "is the argmax" is asked as "has the maximum".
    out["correct"].copy_((p_mV.gather(-1, label_m1) == top_m1).squeeze(-1))
    if t_mV is None:
        gradient_mV = p_mV.mul_(mix.ce)
    else:
        q_mV = torch.softmax(t_mV, dim=-1)
        at_label_m = q_mV.gather(-1, label_m1).squeeze(-1)
        choice_m = _argmax(q_mV, labels_m, at_label_m)
        out["target_argmax"].copy_(choice_m)
        out["label_probability"].copy_(at_label_m)
        out["matched"].copy_((p_mV.gather(-1, choice_m.unsqueeze(-1)) == top_m1).squeeze(-1))
        if mix.kl:
            choice_m1 = choice_m.unsqueeze(-1)
            target_log_sum_m1 = t_mV.gather(-1, choice_m1) - q_mV.gather(-1, choice_m1).log()
            log_ratio_mV = (t_mV - z_mV).add_(log_sum_m1 - target_log_sum_m1)
            out["kl"].copy_(log_ratio_mV.mul_(q_mV).sum(-1))
        difference_mV = p_mV - q_mV
        out["l1"].copy_(difference_mV.abs().sum(-1))
        gradient_mV = difference_mV.sign_()
        mean_sign_m1 = torch.linalg.vecdot(p_mV, gradient_mV).unsqueeze(-1)
        gradient_mV.mul_(mix.l1).add_(mix.ce + mix.kl - mix.l1 * mean_sign_m1).mul_(p_mV)
        if mix.kl:
            gradient_mV.sub_(q_mV, alpha=mix.kl)
    gradient_mV.scatter_add_(-1, label_m1, torch.full_like(top_m1, -mix.ce))
    return gradient_mV.mul_(weights_m.unsqueeze(-1))


def _argmax(q_mV: Tensor, labels_m: Tensor, at_label_m: Tensor) -> Tensor:
    """The target's choice: the label where it has the maximum (nearly always, for greedy data), else searched."""
    if q_mV.device.type != "cpu":
        return q_mV.argmax(dim=-1)
    choice_m = labels_m.clone()
    other = (at_label_m < q_mV.amax(dim=-1)).nonzero().squeeze(-1)
    if len(other):
        choice_m[other] = q_mV[other].argmax(dim=-1)
    return choice_m


class _ChunkedLoss(torch.autograd.Function):
    """sum of w * loss / W over M slots; gradients for hidden, state and head are made in the forward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, hidden_Md: Tensor | None, state_Mr: Tensor | None, head_Vr: Tensor | None, plan: _Plan
    ) -> Tensor:
        wants_hidden, wants_state, wants_head, _ = ctx.needs_input_grad
        rows = plan.labels_M.shape[0]
        grad_hidden = torch.zeros_like(hidden_Md) if wants_hidden and hidden_Md is not None else None
        grad_state = torch.zeros_like(state_Mr) if wants_state and state_Mr is not None else None
        grad_head = torch.zeros_like(head_Vr) if wants_head and head_Vr is not None else None
        low = head_Vr.to(_work_dtype(head_Vr)) if head_Vr is not None else None

        for start in range(0, rows, plan.chunk_rows):
            piece = slice(start, min(start + plan.chunk_rows, rows))
            frozen, leaf = None, None
            if plan.frozen_logits is not None and hidden_Md is not None:
                leaf = hidden_Md[piece].detach().requires_grad_(grad_hidden is not None)
                with torch.enable_grad():
                    frozen = plan.frozen_logits(leaf)
            trained = None
            if low is not None and state_Mr is not None:
                trained = state_Mr[piece].to(low.dtype) @ low.t()
            targets = None
            if plan.target_logits is not None and plan.target_state_MD is not None:
                targets = plan.target_logits(plan.target_state_MD[piece])
                if plan.target_columns_X is not None:
                    best_m1 = targets.amax(dim=-1, keepdim=True)
                    targets = targets[:, plan.target_columns_X]
                    plan.outcomes["sayable"][piece] = (targets == best_m1).any(dim=-1)

            grad_z = _chunk_gradient(frozen, trained, targets, piece, plan)
            if plan.reach is not None:
                reached_m = plan.reach.of(piece, plan.outcomes)
                plan.outcomes["reached"][piece] = reached_m
                grad_z *= reached_m.unsqueeze(-1).to(grad_z.dtype)
            if grad_hidden is not None and frozen is not None and leaf is not None:
                (part,) = torch.autograd.grad(frozen, leaf, grad_z.to(frozen.dtype))
                grad_hidden[piece] = part
            if low is not None and state_Mr is not None:
                grad_low = grad_z.to(low.dtype)
                if grad_state is not None:
                    grad_state[piece] = (grad_low @ low).to(grad_state.dtype)
                if grad_head is not None:
                    grad_head += grad_low.t() @ state_Mr[piece].to(low.dtype)

        for gradient in (grad_hidden, grad_state, grad_head):
            if gradient is not None:
                gradient.div_(plan.total_weight)
        ctx.gradients = (grad_hidden, grad_state, grad_head)
        out, mix = plan.outcomes, plan.mix
        each = mix.ce * out["ce"]
        if mix.l1:
            each = each + mix.l1 * out["l1"]
        if mix.kl:
            each = each + mix.kl * out["kl"]
        if plan.reach is not None:
            each = each * out["reached"]
        return (each.double() * plan.weights_M).sum().div(plan.total_weight).to(each.dtype)

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        scaled = tuple(None if g is None else g * grad_loss.to(g.dtype) for g in ctx.gradients)
        return (*scaled, None)


def _work_dtype(tensor: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on, else the tensor's own."""
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else tensor.dtype


def _chunk_gradient(
    frozen: Tensor | None, trained: Tensor | None, targets: Tensor | None, piece: slice, plan: _Plan
) -> Tensor:
    """w * W * dloss/dz of one chunk, in the dtype of its logits; per-row results go to ``plan.outcomes``."""
    logits = frozen.detach() if frozen is not None else trained
    assert logits is not None, "the draft needs frozen or trainable logits"
    count, vocabulary = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    gradient = torch.empty_like(logits)
    step = _cache_rows(vocabulary, logits.device, count)
    for begin in range(0, count, step):
        near = slice(begin, min(begin + step, count))
        far = slice(piece.start + near.start, piece.start + near.stop)
        z = logits[near].to(wide)
        if frozen is not None and trained is not None:
            z = z + trained[near]
        gradient[near] = _rows_pass(
            z,
            None if targets is None else targets[near].to(wide),
            plan.labels_M[far],
            plan.weights_M[far].to(wide),
            plan.mix,
            {name: values[far] for name, values in plan.outcomes.items() if name not in ("sayable", "reached")},
        )
    return gradient


def draft_loss(
    hidden_BAKd: Tensor,
    *,
    labels_BAK: Tensor,
    weights_BAK: Tensor,
    clean_BA: Tensor | None,
    target_hidden_BTD: Tensor,
    sources_BAK: Tensor,
    draft_logits: Logits | None,
    target_logits: Logits,
    total_weight: float,
    ce: float = 0.1,
    l1: float = 0.9,
    kl: float = 0.0,
    parent_state_BAKr: Tensor | None = None,
    parent_weight_Vr: Tensor | None = None,
    target_columns_X: Tensor | None = None,
    chunk_rows: int = 256,
    reach: bool = False,
) -> DraftLoss:
    """Loss and metrics of the blocks of one micro-step.

    ``weights_BAK``: from ``objectives.weights.slot_weights``; slots of weight 0 cost nothing.
    ``sources_BAK``: index q-1 into ``target_hidden_BTD`` (post-final-norm states) for the label at q.
    ``draft_logits`` / ``target_logits``: [M, width] -> [M, V], frozen; normally both the target's
    ``logits``. The parent term ``parent_state @ parent_weight.T`` is added to the draft's, after any
    soft-cap. ``total_weight``: W of the whole global batch (``objectives.weights.total_weight``).
    ``clean_BA``: blocks with a clean prefix train but are left out of the acceptance metrics. ``reach``: also weight a
    slot by the chance that decoding reaches it (see the top of this file).

    A draft with its own trainable lm_head (EAGLE-3) passes its hidden states as ``parent_state``, its head as
    ``parent_weight`` and ``draft_logits=None``. With a reduced vocabulary of X tokens it also passes their target
    ids as ``target_columns`` and labels in draft ids, -1 where the draft cannot say the token: such a slot has no
    loss but stays in W, and counts as a rejection.

    Both sides' states are cast to the dtype of ``target_hidden_BTD`` before their logits.
    Source: METHODS 3; the position weights and mixtures of DSpark and DFlash.
    """
    mix = LossMix(ce, l1, kl)
    A, K = labels_BAK.shape[1:]
    index_M = ((weights_BAK > 0) & (labels_BAK >= 0)).reshape(-1).nonzero().squeeze(-1)
    hidden_Md = None
    if draft_logits is not None:
        hidden_Md = hidden_BAKd.flatten(0, 2)[index_M].to(target_hidden_BTD.dtype)
    state_Mr = None if parent_state_BAKr is None else parent_state_BAKr.flatten(0, 2)[index_M]
    target_state_MD = None
    if mix.needs_target:
        row_M = index_M // (A * K)
        target_state_MD = target_hidden_BTD.detach()[row_M, sources_BAK.reshape(-1)[index_M]]
    weights_M = weights_BAK.reshape(-1)[index_M]
    labels_M = labels_BAK.reshape(-1)[index_M]

    wide = torch.promote_types(target_hidden_BTD.dtype, torch.float32)
    outcomes = {
        "ce": torch.zeros(len(index_M), dtype=wide, device=labels_M.device),
        "correct": torch.zeros_like(labels_M, dtype=torch.bool),
    }
    if mix.needs_target:
        outcomes["matched"] = torch.zeros_like(outcomes["correct"])
        outcomes["target_argmax"] = torch.zeros_like(labels_M)
        outcomes["label_probability"] = torch.zeros_like(outcomes["ce"])
        outcomes["l1"] = torch.zeros_like(outcomes["ce"])
    if mix.kl:
        outcomes["kl"] = torch.zeros_like(outcomes["ce"])
    if target_columns_X is not None and mix.needs_target:
        outcomes["sayable"] = torch.zeros_like(outcomes["correct"])
    if reach:
        outcomes["reached"] = torch.zeros_like(outcomes["ce"])
    plan = _Plan(
        labels_M=labels_M,
        weights_M=weights_M,
        target_state_MD=target_state_MD,
        frozen_logits=draft_logits,
        target_logits=target_logits if mix.needs_target else None,
        target_columns_X=target_columns_X,
        mix=mix,
        total_weight=total_weight,
        chunk_rows=max(1, chunk_rows),
        outcomes=outcomes,
        reach=_Reach(index_M, weights_BAK, wide) if reach and len(index_M) else None,
    )
    loss = _ChunkedLoss.apply(hidden_Md, state_Mr, parent_weight_Vr, plan)
    if "sayable" in outcomes:
        outcomes["matched"] &= outcomes["sayable"]  # the target's own choice lies outside the draft's vocabulary
    slots = SlotOutcomes(
        index_M=index_M,
        correct_M=outcomes["correct"],
        ce_M=outcomes["ce"],
        matched_M=outcomes.get("matched"),
        target_argmax_M=outcomes.get("target_argmax"),
        label_probability_M=outcomes.get("label_probability"),
        l1_M=outcomes.get("l1"),
        kl_M=outcomes.get("kl"),
    )
    metrics = slot_metrics(slots, weights_BAK, clean_BA)
    metrics["loss"] = (loss.detach().double() * total_weight, weights_M.double().sum())
    return DraftLoss(loss, metrics, slots)


def slot_metrics(slots: SlotOutcomes, weights_BAK: Tensor, clean_BA: Tensor | None) -> dict[str, Fraction]:
    """Metrics as (numerator, denominator).

    ``ce``, ``l1``, ``kl``: weighted means. ``accuracy_at``: [K], share of valid slots k whose draft
    argmax is the true token. ``acceptance_length``: 1 + the mean length of the greedy chain, i.e. of
    the run of leading slots where the draft's argmax is the target's (the true token's, if the mix
    does not look at the target). A slot without label ends the chain. Ordinary blocks only.
    """
    weights_M = weights_BAK.reshape(-1)[slots.index_M].double()
    metrics: dict[str, Fraction] = {}
    for name, values in (("ce", slots.ce_M), ("l1", slots.l1_M), ("kl", slots.kl_M)):
        if values is not None:
            metrics[name] = ((values.double() * weights_M).sum(), weights_M.sum())

    valid_BAK = weights_BAK > 0
    if clean_BA is not None:
        valid_BAK = valid_BAK & (clean_BA == 0).unsqueeze(-1)
    correct_BAK, matched_BAK = torch.zeros_like(valid_BAK), torch.zeros_like(valid_BAK)
    correct_BAK.view(-1)[slots.index_M] = slots.correct_M
    matched_BAK.view(-1)[slots.index_M] = slots.correct_M if slots.matched_M is None else slots.matched_M
    metrics["accuracy_at"] = ((correct_BAK & valid_BAK).double().sum((0, 1)), valid_BAK.double().sum((0, 1)))

    before_first_BAK = valid_BAK.cumsum(-1) == 0  # slot 0 of the in-place layout
    chain_BAK = (matched_BAK | before_first_BAK).cumprod(-1).bool() & valid_BAK
    blocks = valid_BAK.any(-1).double().sum()
    metrics["acceptance_length"] = (chain_BAK.double().sum() + blocks, blocks)
    metrics["valid_slots"] = (valid_BAK.double().sum(), blocks)
    return metrics
