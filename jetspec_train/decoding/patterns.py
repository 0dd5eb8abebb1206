"""The pattern layer's view of a draft: how the draft layers distributed their attention (METHODS 8).

Each statistic is a mean over layers, heads and the slots of a stage, between 0 and 1. They are computed the same way
when a profile is fitted and when a draft is compared with it.

Shapes: B rows, H heads, K slots, T context columns; weights are [B, H, 1, K, T + K], context columns first, each
(row, head, slot) summing to one (``DraftHead.forward(attention=...)``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

STATISTICS = ("entropy", "sink", "locality", "copy")
LOCAL_COLUMNS = 16  # committed tokens before the anchor that count as near


def pattern_statistics(
    attention: Sequence[Tensor], *, row: int, slots: Sequence[int], context: Sequence[int], drafted: Sequence[int]
) -> dict[str, float]:
    """Statistics of one stage of one row.

    ``slots``: the block's slots that predict the stage's tokens ``drafted``. ``context``: the row's committed tokens
    before the anchor, which hold its context columns. Returns by name:

    * entropy: of the weights, divided by that of even weights over context and block;
    * sink: weight on the first context column;
    * locality: weight on the last LOCAL_COLUMNS context columns and on the block itself;
    * copy: weight on context columns that hold the very token that the slot drafted (an n-gram continued).
    """
    seen = len(context)
    index = torch.tensor(list(slots), device=attention[0].device)
    weights_XST = torch.cat([layer[row, :, 0].index_select(1, index).float() for layer in attention])
    columns = weights_XST.shape[-1] - attention[0].shape[3]
    own = weights_XST[..., columns:].sum(-1)
    near = weights_XST[..., max(0, seen - LOCAL_COLUMNS) : seen].sum(-1)
    first = weights_XST[..., 0] if seen else torch.zeros_like(own)
    entropy = -torch.special.xlogy(weights_XST, weights_XST).sum(-1)
    held = torch.tensor(list(context), device=own.device)
    repeated_ST = held[None] == torch.tensor(list(drafted), device=own.device)[:, None]
    copied = (weights_XST[..., :seen] * repeated_ST).sum(-1)
    even = math.log(max(2, seen + attention[0].shape[3]))
    means = torch.stack([entropy.mean() / even, first.mean(), (near + own).mean(), copied.mean()])
    values = [float(value) for value in means.tolist()]
    return {name: value if math.isfinite(value) else math.nan for name, value in zip(STATISTICS, values)}
