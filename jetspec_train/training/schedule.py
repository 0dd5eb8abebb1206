"""Optimiser and learning rate: AdamW over the draft's weights, linear warm-up, cosine to a floor."""

from __future__ import annotations

import math

import torch
from torch import nn


def learning_rate_share(step: int, *, total: int, warmup: float, floor: float) -> float:
    """The learning rate of the update number ``step`` (from 0) as a share of the peak.

    Rises linearly over the first ``warmup`` share of all ``total`` updates (at least one), then falls along half a
    cosine to ``floor`` at the last update.
    """
    rising = max(1, round(warmup * total))
    if step < rising:
        return (step + 1) / rising
    progress = min(1.0, (step - rising + 1) / max(1, total - rising))
    return floor + (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * progress))


def make_optimizer(
    model: nn.Module, *, learning_rate: float, weight_decay: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """AdamW in fp32. Norm weights (one dimension) are not decayed: pulling a gain towards 0 is no regulariser."""
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": weight_decay},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=betas, eps=1e-8, fused=True)


def make_scheduler(
    optimizer: torch.optim.Optimizer, *, total: int, warmup: float, floor: float
) -> torch.optim.lr_scheduler.LambdaLR:
    """``learning_rate_share`` as a torch scheduler (its only state is the number of updates)."""
    return torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_share(step, total=total, warmup=warmup, floor=floor)
    )
