"""One attention function for every family, registered with transformers under the name ``jetspec``.

During a ``Target`` forward the masks come from the target's own ``AttentionPlan`` (one per distinct window, built once
per forward), not from the model's mask code. Outside of it - transformers' ``generate`` on the same weights, for
instance - the function behaves as usual and uses the mask that it is given.

Grouped queries are folded into the query axis, so keys are never repeated in memory. Soft caps and attention sinks,
which scaled_dot_product_attention lacks, are computed directly.

Shapes: B rows, H query heads, G key/value heads, R = H / G, N queries, S keys, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

NAME = "jetspec"
PLAN_ATTRIBUTE = "_jetspec_plan"


class AttentionPlan:
    """Masks of the forward under way. ``masks`` maps a window (None: unlimited) to an additive mask [B, 1, N, S].

    A mask of None means that every query sees every key, or - if ``causal`` - that N = S and attention is causal.
    """

    def __init__(self) -> None:
        self.active = False
        self.causal = False
        self.masks: dict[int | None, torch.Tensor | None] = {}
        self._folded: dict[tuple[int | None, int], torch.Tensor] = {}

    def open(self, masks: dict[int | None, torch.Tensor | None], causal: bool) -> None:
        self.masks, self.causal, self.active = masks, causal, True
        self._folded.clear()

    def close(self) -> None:
        self.active = False
        self.masks = {}
        self._folded.clear()

    def folded(self, window: int | None, repeats: int) -> torch.Tensor | None:
        """The mask for queries folded as [B, G, R * N, D]; made once per forward, not per layer."""
        mask = self.masks[window]
        if mask is None or repeats == 1 or mask.shape[2] == 1:
            return mask
        key = (window, repeats)
        if key not in self._folded:
            self._folded[key] = mask.repeat(1, 1, repeats, 1)
        return self._folded[key]


class AttentionRecorder:
    """Notes every call of the attention function while a target is inspected: (module, keyword arguments)."""

    active: AttentionRecorder | None = None

    def __init__(self) -> None:
        self.calls: list[tuple[torch.nn.Module, dict[str, Any]]] = []

    def __enter__(self) -> AttentionRecorder:
        AttentionRecorder.active = self
        return self

    def __exit__(self, *exception: object) -> None:
        AttentionRecorder.active = None


def _direct(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    softcap: float | None,
    sinks_R1: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(cap(q k^T)) v with an optional sink logit per query row; softmax in fp32."""
    scores = torch.matmul(query, key.transpose(2, 3)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    scores = scores.float()
    if sinks_R1 is not None:
        sinks = sinks_R1.float().expand(scores.shape[0], -1, -1, -1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return torch.matmul(weights.to(value.dtype), value)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of one layer. query [B, H, N, D], key and value [B, G, S, D]; returns [B, N, H, D].

    Raises:
        NotImplementedError: the model asks for a bias that this function does not know.
    """
    if AttentionRecorder.active is not None:
        AttentionRecorder.active.calls.append((module, kwargs))
    if kwargs.get("position_bias") is not None:
        raise NotImplementedError("attention with a position bias is not supported")
    batch, heads, new, size = query.shape
    groups, keys = key.shape[1], key.shape[2]
    repeats = heads // groups
    scale = scaling if scaling is not None else size**-0.5
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")

    plan: AttentionPlan | None = module.__dict__.get(PLAN_ATTRIBUTE)
    if plan is not None and plan.active:
        causal = plan.causal
        mask = None if causal else plan.folded(kwargs.get("sliding_window"), repeats)
        if causal and plan.masks[kwargs.get("sliding_window")] is not None:
            causal, mask = False, plan.folded(kwargs.get("sliding_window"), repeats)
    else:
        causal = attention_mask is None and new > 1
        mask = attention_mask
        if mask is not None:
            mask = mask[..., :keys]
            if mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape, dtype=query.dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            if repeats > 1 and mask.shape[2] > 1:
                mask = mask.repeat(1, 1, repeats, 1)

    if softcap is None and sinks is None and causal:
        output = scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=repeats > 1)
        return output.transpose(1, 2), None
    if causal:
        triangle = torch.full((new, keys), float("-inf"), dtype=query.dtype, device=query.device).triu_(keys - new + 1)
        mask = triangle.repeat(repeats, 1)[None, None]
    folded = query.reshape(batch, groups, repeats * new, size)
    if softcap is None and sinks is None:
        output = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    else:
        sinks_R1 = None
        if sinks is not None:
            sinks_R1 = sinks.reshape(1, groups, repeats, 1).expand(1, groups, repeats, new)
            sinks_R1 = sinks_R1.reshape(1, groups, repeats * new, 1)
        output = _direct(folded, key, value, mask, scale, softcap, sinks_R1)
    return output.view(batch, heads, new, -1).transpose(1, 2), None


def register() -> None:
    """Make the name known to transformers; safe to call more than once."""
    AttentionInterface.register(NAME, attend)
    AttentionMaskInterface.register(NAME, sdpa_mask)
