"""The verifier's loss: binary cross-entropy of both heads against the outcome of the acceptance rule (METHODS 4).

    L = (confidence_weight * sum w_k * bce(confidence_k, chain label)
         + correctness_weight * sum w_n * bce(correctness_n, label)) / W

with the slot weights ``w_k`` of the draft loss, times the weight of the document and, for a node that is not the first
choice of its slot, ``sibling_weight``. A slot or node without label has weight 0 and stays in W, so W is known before
the forward pass and the loss does not depend on ranks or accumulation. ``reject_weight`` multiplies the term of the
rejected class, also of a label between 0 and 1.

Shapes: B rows, A blocks, K slots, S candidates per slot, M = K * S nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec_train.objectives.candidates import Candidates
from jetspec_train.objectives.draft_loss import Fraction


@dataclass(frozen=True)
class VerifierWeights:
    confidence: float = 1.0
    correctness: float = 1.0
    reject: float = 1.0
    sibling: float = 0.5


@dataclass(frozen=True)
class VerifierLoss:
    """``loss`` is already divided by W."""

    loss: Tensor
    metrics: dict[str, Fraction]


def weighted_bce(logits: Tensor, labels: Tensor, reject_weight: float) -> Tensor:
    """-(y log s + reject_weight (1 - y) log(1 - s)), elementwise, for labels in [0, 1]."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits, labels = logits.to(wide), labels.to(wide)
    return -(labels * F.logsigmoid(logits) + reject_weight * (1.0 - labels) * F.logsigmoid(-logits))


def node_weights(candidates: Candidates, slot_weights_BAK: Tensor, sibling: float) -> Tensor:
    """Weights [B, A, K, S] of nodes: the slot's, reduced for all but the first choice; 0 off the path or unlabelled."""
    share_S = torch.full((candidates.tokens_BAKS.shape[-1],), sibling, device=slot_weights_BAK.device)
    share_S[0] = 1.0
    return (slot_weights_BAK * candidates.path_weights_BAK).unsqueeze(-1) * share_S * candidates.labelled_BAKS


def verifier_loss(
    confidence_BAK: Tensor | None,
    correctness_BAM: Tensor,
    candidates: Candidates,
    slot_weights_BAK: Tensor,
    *,
    total_weight: float,
    weights: VerifierWeights | None = None,
) -> VerifierLoss:
    """Loss and metrics of the judged blocks of one micro-step.

    ``slot_weights``: of the draft loss, times the document's weight; 0 in blocks that are not judged. ``confidence``
    None: given paths, which say nothing about the draft's own chain.

    Metrics (numerator, denominator), over labels unweighted by position: ``confidence_bce``, ``correctness_bce``
    (all nodes), ``accuracy`` (chain nodes, at one half), ``prior`` (their mean label), ``judged_nodes`` (per block).
    """
    weights = weights or VerifierWeights()
    weight_BAKS = node_weights(candidates, slot_weights_BAK, weights.sibling)
    logits_BAKS = correctness_BAM.view_as(weight_BAKS)
    each_BAKS = weighted_bce(logits_BAKS, candidates.labels_BAKS, weights.reject)
    loss = weights.correctness * (weight_BAKS * each_BAKS).sum()

    counted = weight_BAKS.detach() > 0
    chain_BAK = candidates.chain_BAK & counted[..., 0]
    labels_BAK = candidates.labels_BAKS[..., 0]
    metrics: dict[str, Fraction] = {
        "correctness_bce": _mean(each_BAKS, counted),
        "prior": _mean(labels_BAK, chain_BAK),
        "judged_nodes": (counted.sum().double(), counted.flatten(2).any(-1).sum().double()),
        # A soft label is met as far as it agrees with the answer: p for "accepted", 1 - p for "rejected".
        "accuracy": _mean(torch.where(logits_BAKS[..., 0] >= 0, labels_BAK, 1 - labels_BAK), chain_BAK),
    }
    if confidence_BAK is not None:
        each_BAK = weighted_bce(confidence_BAK, candidates.chain_labels_BAK, weights.reject)
        weight_BAK = slot_weights_BAK * candidates.path_weights_BAK * candidates.chain_BAK
        loss = loss + weights.confidence * (weight_BAK * each_BAK).sum()
        metrics["confidence_bce"] = _mean(each_BAK, chain_BAK)
    return VerifierLoss(loss / total_weight, metrics)


def _mean(values: Tensor, where: Tensor) -> Fraction:
    return (values.detach().double() * where).sum(), where.double().sum()


def add_fractions(one: Mapping[str, Fraction], other: Mapping[str, Fraction], prefix: str = "") -> dict[str, Fraction]:
    """Numerators and denominators of both; the names of ``other`` with ``prefix`` before them."""
    total = dict(one)
    for name, (top, bottom) in other.items():
        before = total.get(prefix + name)
        total[prefix + name] = (top, bottom) if before is None else (before[0] + top, before[1] + bottom)
    return total
