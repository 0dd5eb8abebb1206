"""The block draft head: K tokens per forward from the target's hidden states.

Taps of the target are fused into one context vector per token and injected as extra keys and values
into every layer (DFlash, arXiv 2602.06036). DFlash, JetSpec, DSpark and our causal parent-conditioned
head are settings of this one module. It knows nothing of files, samplers or losses, and holds neither
embedding nor lm_head: both are the target's, frozen. Draft logits of slot k after parent u are

    target.logits(h_k) + W2 W1[u]

where ``target.logits`` is the target's whole output function (lm_head, scaling, soft-cap) and the
parent term is added after it.

Shapes: B rows, T context columns, A blocks, K slots, d width, F concatenated taps, H / J query and
key-value heads, D head size, V vocabulary, r rank of the parent term, S candidates.
The trainer runs all A blocks of a packed row at once; the decoder runs A = 1.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from jetspec_train.modeling.attention import block_attention, block_attention_weights, rotate
from jetspec_train.modeling.blocks import MASK_SLOT
from jetspec_train.modeling.draft_config import DraftHeadConfig
from jetspec_train.modeling.rotary import Rotary
from jetspec_train.targets.packing import PackedLinear

__all__ = ["MASK_SLOT", "DraftHead", "DraftHeadConfig", "LayerContext", "RMSNorm"]

LayerContext = tuple[Tensor, Tensor]  # keys and values of one layer, each [B, J, T, D]


class RMSNorm(nn.Module):
    """Root-mean-square norm over the last axis, computed in at least fp32, in the dtype of its input."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * self.weight).to(x.dtype)


def linear(x: Tensor, layer: nn.Linear | PackedLinear) -> Tensor:
    """``layer(x)`` in the layer's dtype, or in autocast's where that is on."""
    if not torch.is_autocast_enabled(x.device.type):
        x = x.to(layer.dtype if isinstance(layer, PackedLinear) else layer.weight.dtype)
    return layer(x)


class _Attention(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        d, D = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, D
        self.causal = config.mask == "causal"
        self.q_proj = nn.Linear(d, config.heads * D, bias=False)
        self.k_proj = nn.Linear(d, config.kv_heads * D, bias=False)
        self.v_proj = nn.Linear(d, config.kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.heads * D, d, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)

    def keys_values(self, x_BNd: Tensor, cos_BND: Tensor, sin_BND: Tensor) -> LayerContext:
        """Keys (normed, rotated) and values of N positions, context or block: each [B, J, N, D]."""
        B, N = x_BNd.shape[:2]
        keys = self.k_norm(linear(x_BNd, self.k_proj).view(B, N, self.kv_heads, self.head_dim)).transpose(1, 2)
        values = linear(x_BNd, self.v_proj).view(B, N, self.kv_heads, self.head_dim).transpose(1, 2)
        return rotate(keys, cos_BND, sin_BND), values

    def forward(
        self,
        x_BAKd: Tensor,
        cos_BND: Tensor,
        sin_BND: Tensor,
        context: LayerContext,
        context_mask_BAT: Tensor | None,
        attention: list[Tensor] | None,
    ) -> Tensor:
        B, A, K, d = x_BAKd.shape
        x_BNd = x_BAKd.reshape(B, A * K, d)
        queries = self.q_norm(linear(x_BNd, self.q_proj).view(B, A * K, self.heads, self.head_dim)).transpose(1, 2)
        queries = rotate(queries, cos_BND, sin_BND).reshape(B, self.heads, A, K, self.head_dim)
        keys, values = self.keys_values(x_BNd, cos_BND, sin_BND)
        keys = keys.reshape(B, self.kv_heads, A, K, self.head_dim)
        values = values.reshape(B, self.kv_heads, A, K, self.head_dim)
        context_keys, context_values = (columns.to(queries.dtype) for columns in context)
        mixed_BHAKD = block_attention(
            queries, context_keys, context_values, keys, values, context_mask_BAT, causal=self.causal
        )
        if attention is not None:
            attention.append(
                block_attention_weights(queries, context_keys, keys, context_mask_BAT, causal=self.causal).detach()
            )
        mixed_BAKd = mixed_BHAKD.permute(0, 2, 3, 1, 4).reshape(B, A, K, self.heads * self.head_dim)
        return linear(mixed_BAKd, self.o_proj)


class _MLP(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class _Layer(nn.Module):
    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        context: LayerContext,
        context_mask_BAT: Tensor | None,
        attention: list[Tensor] | None,
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, context, context_mask_BAT, attention)
        return x + self.mlp(self.post_attention_layernorm(x))


class _ParentTerm(nn.Module):
    """``W2 (gate * W1[u])``: what the parent token adds to a slot's logits (the "Markov head" of DSpark)."""

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        r = config.parent_rank
        self.markov_w1 = nn.Embedding(config.vocab_size, r)
        self.markov_w2 = nn.Linear(r, config.vocab_size, bias=False)
        self.gate_proj = nn.Linear(config.hidden_size + r, r) if config.parent == "gated" else None

    def forward(self, parents: Tensor, hidden: Tensor | None) -> Tensor:
        state = self.markov_w1(parents)
        if self.gate_proj is None:
            return state
        if hidden is None:
            raise ValueError("a gated parent term needs the slot's hidden state; pass hidden")
        # The parents of one slot may be many (candidates of a tree): hidden is broadcast over them.
        hidden = hidden.to(state.dtype).expand(*state.shape[:-1], hidden.shape[-1])
        return state * torch.sigmoid(linear(torch.cat((hidden, state), dim=-1), self.gate_proj)).to(state.dtype)


class DraftHead(nn.Module):
    """See the top of this file. ``forward`` serves trainer, calibrator and decoder alike.

    ``recompute``: keep no activations of the layers for the backward pass, make them again there.
    """

    recompute = False

    def __init__(self, config: DraftHeadConfig) -> None:
        super().__init__()
        self.config = config
        d = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * config.target_hidden_size, d, bias=False)
        self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.markov_head = _ParentTerm(config) if config.parent != "none" else None
        self.mask_embedding = nn.Parameter(torch.zeros(d)) if config.mask_token_id is None else None
        self.rotary = Rotary(config.rope, head_dim=config.head_dim, max_positions=config.max_positions)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Weights that train well in few steps: every matrix keeps unit variance, every layer starts as
        a small change of its input, and the parent term starts silent (W2 = 0)."""
        depth_scale = (2 * self.config.layers) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() < 2:
                continue
            scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
        if self.markov_head is not None:
            nn.init.normal_(self.markov_head.markov_w1.weight, std=1.0)
            nn.init.zeros_(self.markov_head.markov_w2.weight)
        if self.mask_embedding is not None:
            nn.init.normal_(self.mask_embedding, std=self.config.hidden_size**-0.5)

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    # ---- context -------------------------------------------------------------------------------

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Concatenated taps -> context [B, T, d], one vector per committed token."""
        return self.hidden_norm(linear(features_BTF, self.fc))

    def context_kv(self, context_BTd: Tensor, positions_BT: Tensor) -> list[LayerContext]:
        """Keys and values of the context in every layer; each column depends on its own token alone,
        so a decoder computes it once per committed token and appends."""
        cos, sin = self.rotary(positions_BT)
        return [layer.self_attn.keys_values(context_BTd, cos, sin) for layer in self.layers]  # type: ignore[union-attr, operator]

    # ---- block ---------------------------------------------------------------------------------

    def embed(self, inputs_BAK: Tensor, target_embed: Callable[[Tensor], Tensor]) -> Tensor:
        """Slot inputs [B, A, K, d]: the target's own embeddings, the MASK where ``inputs`` is MASK_SLOT."""
        is_mask = inputs_BAK == MASK_SLOT
        stand_in = self.config.mask_token_id if self.config.mask_token_id is not None else 0
        embeds = target_embed(torch.where(is_mask, stand_in, inputs_BAK))
        if self.mask_embedding is not None:
            embeds = torch.where(is_mask.unsqueeze(-1), self.mask_embedding.to(embeds.dtype), embeds)
        return embeds

    def forward(
        self,
        embeds_BAKd: Tensor,
        positions_BAK: Tensor,
        context: list[LayerContext],
        context_mask_BAT: Tensor | None,
        attention: list[Tensor] | None = None,
    ) -> Tensor:
        """Hidden states after the final norm, [B, A, K, d]; slot j's gives the logits of ``anchor + j + offset``.

        ``context``: from ``context_kv``; ``context_mask_BAT``: the columns each block sees (its own
        document, strictly before the anchor), None for all. K may be smaller than ``config.block``.
        ``attention``: a list to which every layer appends its weights [B, H, A, K, T + K] (no gradient).
        """
        cos, sin = self.rotary(positions_BAK.flatten(1))
        # the residual stream is kept in the precision of the weights (fp32 when training in bf16)
        x = embeds_BAKd.to(self.norm.weight.dtype)
        for layer, columns in zip(self.layers, context, strict=True):
            if self.recompute and attention is None and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, columns, context_mask_BAT, None, use_reentrant=False)
            else:
                x = layer(x, cos, sin, columns, context_mask_BAT, attention)
        return self.norm(x)

    # ---- parent term ---------------------------------------------------------------------------

    @property
    def has_parent(self) -> bool:
        return self.markov_head is not None

    @property
    def parent_weight(self) -> Tensor | None:
        """W2 [V, r], None without a parent term."""
        return None if self.markov_head is None else self.markov_head.markov_w2.weight

    def parent_state(self, parents: Tensor, hidden: Tensor | None = None) -> Tensor:
        """``W1[u]``, gated by the slot's hidden state in a gated head: [..., r]. Raises ``ValueError``
        without a parent term."""
        if self.markov_head is None:
            raise ValueError("this draft head has no parent term (parent: none)")
        return self.markov_head(parents, hidden)

    def parent_bias(self, parents: Tensor, hidden: Tensor | None = None) -> Tensor:
        """What parents u [...] add to the logits of a slot: [..., V]."""
        state = self.parent_state(parents, hidden)
        return F.linear(state, self.parent_weight)  # type: ignore[arg-type]

    def parent_bias_at(self, parents: Tensor, candidates_S: Tensor, hidden: Tensor | None = None) -> Tensor:
        """``parent_bias`` at a shortlist: parents [...], candidates [..., S] -> [..., S].

        Cost per node: a gather of S rows and an S x r product, no draft forward.
        """
        state = self.parent_state(parents, hidden)
        rows = F.embedding(candidates_S, self.parent_weight)  # type: ignore[arg-type]
        return (rows @ state.unsqueeze(-1)).squeeze(-1)
