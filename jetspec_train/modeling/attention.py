"""Attention of draft blocks: every slot sees its block's context columns and its own block.

Keys of other blocks are never touched, so that a step costs T + K keys per slot instead of T + A*K,
and the decoder (one block, A = 1) runs the very function that was trained.

Shapes: B rows, H query heads, J key/value heads, G = H/J, A blocks, K slots, T context columns, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotate(x_BHND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """Rotary positions, half-split convention of Llama and Qwen; ``cos``/``sin`` in fp32 or x's dtype."""
    first, second = x_BHND.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHND * cos_BND.unsqueeze(1) + turned * sin_BND.unsqueeze(1)).to(x_BHND.dtype)


def block_attention(
    q_BHAKD: Tensor,
    k_context_BJTD: Tensor,
    v_context_BJTD: Tensor,
    k_block_BJAKD: Tensor,
    v_block_BJAKD: Tensor,
    context_mask_BAT: Tensor | None,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over context and own block: (output [B, H, A, K, D], weights [B, J, G, A, K, T+K]).

    ``context_mask_BAT``: the context columns each block sees; None: all. A block without context
    (all False) attends to itself alone, so that no row is ever empty. ``causal``: slot k sees slots
    0..k of its block, else all K.
    """
    B, H, A, K, D = q_BHAKD.shape
    J, T = k_context_BJTD.shape[1:3]
    G = H // J
    q_BJGAKD = (q_BHAKD * D**-0.5).view(B, J, G, A, K, D)

    context_scores = (q_BJGAKD.reshape(B, J, G * A * K, D) @ k_context_BJTD.transpose(-1, -2)).view(B, J, G, A, K, T)
    block_scores = q_BJGAKD @ k_block_BJAKD.unsqueeze(2).transpose(-1, -2)
    if context_mask_BAT is not None:
        context_scores = context_scores.masked_fill(~context_mask_BAT[:, None, None, :, None, :], float("-inf"))
    if causal:
        later_KK = torch.ones(K, K, dtype=torch.bool, device=q_BHAKD.device).triu(1)
        block_scores = block_scores.masked_fill(later_KK, float("-inf"))

    # softmax accumulates in fp32 whatever the dtype of the scores
    weights = torch.softmax(torch.cat((context_scores, block_scores), dim=-1), dim=-1, dtype=q_BHAKD.dtype)
    from_context = weights[..., :T].reshape(B, J, G * A * K, T) @ v_context_BJTD
    from_block = weights[..., T:] @ v_block_BJAKD.unsqueeze(2)
    return (from_context.view(B, J, G, A, K, D) + from_block).view(B, H, A, K, D), weights
