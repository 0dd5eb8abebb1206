"""Weights of the draft loss: position decay, and the one normaliser of a global batch.

Shapes: B rows, A anchors per row, K slots per block.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def slot_weights(valid_BAK: Tensor, distance_BAK: Tensor, gamma: float | None) -> Tensor:
    """``w = valid * exp(-distance / gamma)``, fp32 [B, A, K] (METHODS 3).

    ``distance_BAK`` counts slots from the first one that predicts, so a clean prefix moves the decay
    with it. ``gamma`` None: no decay.
    """
    if gamma is None or math.isinf(gamma):
        return valid_BAK.float()
    return torch.where(valid_BAK, torch.exp(-distance_BAK.clamp(min=0).float() / gamma), 0.0)


def total_weight(weights: Iterable[Tensor]) -> float:
    """``W``: the sum of all weights of a global batch - every rank and every accumulation step.

    Computed from masks and anchors alone, before the first backward pass, so that neither padding nor
    the way a batch is cut into micro-steps moves the loss. Zero (no supervised anchor anywhere)
    becomes 1: every loss is then zero too.
    """
    total = math.fsum(float(w.double().sum()) for w in weights)
    return total if total > 0.0 else 1.0
