"""Attention of draft blocks: every slot sees its block's context columns and its own block.

Keys of other blocks are never touched, so a slot costs T + K keys instead of T + A*K, and the decoder
(one block, A = 1) runs the very function that was trained. In training the blocks are taken a few at a
time and their weights are recomputed in the backward pass, so that no [A*K, T] tensor outlives its
chunk (with an explicit softmax over all of them a layer would keep H * A * K * (T + K) numbers).

Shapes: B rows, H query heads, J key/value heads, G = H/J, A blocks (a: of one chunk), K slots,
T context columns, N own keys per block (= K where slots attend to each other), D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_CHUNK_SCORES = {"cpu": 1_000_000, "cuda": 64_000_000}  # scores of one chunk: what a cache (a GPU's memory) holds well


def rotate(x_BHND: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> Tensor:
    """Rotary positions, half-split convention of Llama and Qwen; in x's dtype."""
    first, second = x_BHND.chunk(2, dim=-1)
    turned = torch.cat((-second, first), dim=-1)
    return (x_BHND * cos_BND.unsqueeze(1) + turned * sin_BND.unsqueeze(1)).to(x_BHND.dtype)


def block_attention(
    q_BHAKD: Tensor,
    k_context_BJTD: Tensor,
    v_context_BJTD: Tensor,
    k_block_BJAND: Tensor,
    v_block_BJAND: Tensor,
    context_mask_BAT: Tensor | None,
    *,
    causal: bool,
    own_mask_BAKN: Tensor | None = None,
) -> Tensor:
    """Softmax attention over context and own block, [B, H, A, K, D].

    ``context_mask_BAT``: the context columns each block sees; None: all. A block without context
    (all False) attends to its own keys alone, so a block needs one or the other. ``causal`` (N = K only):
    slot k sees own keys 0..k, else all N. ``own_mask_BAKN``: the own keys each slot sees instead (a tree's
    ancestors); it needs at least one.
    """
    return _BlockAttention.apply(
        q_BHAKD, k_context_BJTD, v_context_BJTD, k_block_BJAND, v_block_BJAND, context_mask_BAT, causal, own_mask_BAKN
    )


def block_attention_weights(
    q_BHAKD: Tensor, k_context_BJTD: Tensor, k_block_BJAND: Tensor, context_mask_BAT: Tensor | None, *, causal: bool
) -> Tensor:
    """The weights that ``block_attention`` mixes values with: [B, H, A, K, T + N], context columns first."""
    B, H, A, K, _ = q_BHAKD.shape
    weights = _weights(q_BHAKD, k_context_BJTD, k_block_BJAND, context_mask_BAT, causal)
    return weights.reshape(B, H, A, K, -1)


def _weights(
    q_BHaKD: Tensor,
    k_context_BJTD: Tensor,
    k_block_BJaND: Tensor,
    context_mask_BaT: Tensor | None,
    causal: bool,
    own_mask_BaKN: Tensor | None = None,
) -> Tensor:
    """[B, J, G, a, K, T + N], softmax in fp32, in the dtype of the queries."""
    B, H, a, K, D = q_BHaKD.shape
    J, T = k_context_BJTD.shape[1:3]
    N = k_block_BJaND.shape[3]
    q_BJGaKD = (q_BHaKD * D**-0.5).reshape(B, J, H // J, a, K, D)
    scores = torch.empty(
        B, J, H // J, a, K, T + N, device=q_BHaKD.device, dtype=torch.promote_types(q_BHaKD.dtype, torch.float32)
    )
    context_scores = q_BJGaKD.reshape(B, J, -1, D) @ k_context_BJTD.transpose(-1, -2)
    scores[..., :T] = context_scores.view(B, J, H // J, a, K, T)
    scores[..., T:] = q_BJGaKD @ k_block_BJaND.unsqueeze(2).transpose(-1, -2)
    if context_mask_BaT is not None:
        scores[..., :T].masked_fill_(~context_mask_BaT[:, None, None, :, None, :], float("-inf"))
    if causal:
        later_KK = torch.ones(K, K, dtype=torch.bool, device=scores.device).triu(1)
        scores[..., T:].masked_fill_(later_KK, float("-inf"))
    if own_mask_BaKN is not None:
        scores[..., T:].masked_fill_(~own_mask_BaKN[:, None, None], float("-inf"))
    return torch.softmax(scores, dim=-1).to(q_BHaKD.dtype)


def _mix(weights_BJGaKS: Tensor, v_context_BJTD: Tensor, v_block_BJaND: Tensor) -> Tensor:
    """Weighted values, [B, J, G, a, K, D]."""
    B, J, G, a, K, _ = weights_BJGaKS.shape
    T, D = v_context_BJTD.shape[2:]
    from_context = weights_BJGaKS[..., :T].reshape(B, J, G * a * K, T) @ v_context_BJTD
    return from_context.view(B, J, G, a, K, D) + weights_BJGaKS[..., T:] @ v_block_BJaND.unsqueeze(2)


def _chunks(
    q_BHAKD: Tensor, k_context_BJTD: Tensor, context_mask_BAT: Tensor | None
) -> list[tuple[slice, int, Tensor | None]]:
    """(blocks, context columns, mask) of every chunk. On a CPU a chunk drops the columns that none of
    its blocks sees: anchors ascend, so early chunks see few."""
    B, H, A, K, _ = q_BHAKD.shape
    T = k_context_BJTD.shape[2]
    limit = _CHUNK_SCORES.get(q_BHAKD.device.type, _CHUNK_SCORES["cuda"])
    size = max(1, min(A, limit // (B * H * K * (T + K))))
    pieces: list[tuple[slice, int, Tensor | None]] = []
    for start in range(0, A, size):
        blocks = slice(start, min(start + size, A))
        if context_mask_BAT is None:
            pieces.append((blocks, T, None))
            continue
        mask, columns = context_mask_BAT[:, blocks], T
        if size < A and mask.device.type == "cpu":
            seen = mask.any(dim=0).any(dim=0).nonzero()
            columns = int(seen[-1]) + 1 if len(seen) else 0
        pieces.append((blocks, columns, mask[..., :columns]))
    return pieces


class _BlockAttention(torch.autograd.Function):
    """Chunked attention that recomputes its weights in the backward pass."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any,
        q: Tensor,
        k_context: Tensor,
        v_context: Tensor,
        k_block: Tensor,
        v_block: Tensor,
        context_mask: Tensor | None,
        causal: bool,
        own_mask: Tensor | None,
    ) -> Tensor:
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        chunks = _chunks(q, k_context, context_mask)
        with torch.autocast(q.device.type, enabled=False):
            for blocks, columns, mask in chunks:
                query = q[:, :, blocks]
                own = None if own_mask is None else own_mask[:, blocks]
                weights = _weights(query, k_context[:, :, :columns], k_block[:, :, blocks], mask, causal, own)
                mixed = _mix(weights, v_context[:, :, :columns], v_block[:, :, blocks])
                out[:, :, blocks] = mixed.reshape(query.shape)
        ctx.save_for_backward(q, k_context, v_context, k_block, v_block, out)
        ctx.chunks, ctx.causal, ctx.own_mask = chunks, causal, own_mask
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        q, k_context, v_context, k_block, v_block, out = ctx.saved_tensors
        B, H, _, K, D = q.shape
        J = k_context.shape[1]
        wide = torch.promote_types(q.dtype, torch.float32)
        grad_q, grad_k_block, grad_v_block = torch.empty_like(q), torch.empty_like(k_block), torch.empty_like(v_block)
        grad_k_context = torch.zeros_like(k_context, dtype=wide)
        grad_v_context = torch.zeros_like(v_context, dtype=wide)
        with torch.autocast(q.device.type, enabled=False):
            for blocks, T, mask in ctx.chunks:
                keys, values = k_context[:, :, :T], v_context[:, :, :T]
                own_keys, own_values = k_block[:, :, blocks], v_block[:, :, blocks]
                shape = (B, J, H // J, own_keys.shape[2], K, D)
                query, grad = q[:, :, blocks].reshape(shape), grad_out[:, :, blocks].reshape(shape).to(q.dtype)
                own_mask = None if ctx.own_mask is None else ctx.own_mask[:, blocks]
                weights = _weights(q[:, :, blocks], keys, own_keys, mask, ctx.causal, own_mask)
                # softmax backward: dS = P * (dP - <dO, O>)
                mean = (grad.to(wide) * out[:, :, blocks].reshape(shape)).sum(-1, keepdim=True)
                grad_scores = torch.empty_like(weights, dtype=wide)
                flat = grad.reshape(B, J, -1, D)
                grad_scores[..., :T] = (flat @ values.transpose(-1, -2)).view(*shape[:-1], T)
                grad_scores[..., T:] = grad @ own_values.unsqueeze(2).transpose(-1, -2)
                low = grad_scores.sub_(mean).mul_(weights).mul_(D**-0.5).to(q.dtype)
                context_low = low[..., :T].reshape(B, J, -1, T)
                own_low = low[..., T:]
                grad_query = (context_low @ keys).view(shape) + own_low @ own_keys.unsqueeze(2)
                grad_q[:, :, blocks] = grad_query.reshape(B, H, -1, K, D)
                grad_k_context[:, :, :T] += context_low.transpose(-1, -2) @ query.reshape(B, J, -1, D)
                grad_v_context[:, :, :T] += weights[..., :T].reshape(B, J, -1, T).transpose(-1, -2) @ flat
                grad_k_block[:, :, blocks] = (own_low.transpose(-1, -2) @ query).sum(2)
                grad_v_block[:, :, blocks] = (weights[..., T:].transpose(-1, -2) @ grad).sum(2)
        return (
            grad_q,
            grad_k_context.to(k_context.dtype),
            grad_v_context.to(v_context.dtype),
            grad_k_block,
            grad_v_block,
            None,
            None,
            None,
        )
