"""EAGLE-3 (arXiv 2503.01840): an autoregressive draft, one token per forward, fed with the target's fused features.

The input at place q joins the *next* token with the state of q: ``[norm(embed(x_{q+1})); norm(state_q)]``, and the
output predicts x_{q+2}. ``state_q`` is the fused target features where the target has seen x_q, and the draft's own
output of the step before where it has not. Rotary positions are those of the state (only differences matter).
Tensor names are those of the speculators package. Embedding: the target's; lm_head: its own.

Shapes: B rows, N inputs, S key columns (past and new), T tokens, F concatenated taps, d width, J key/value heads,
D head size, V draft vocabulary.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec_train.artifacts.errors import UserError
from jetspec_train.modeling.attention import rotate
from jetspec_train.modeling.draft_head import LayerContext, RMSNorm, linear
from jetspec_train.modeling.rotary import Rotary


@dataclass(frozen=True)
class Eagle3Config:
    """A resolved EAGLE-3 draft; every field is plain JSON.

    ``norm_before_residual``: the residual starts from the normed state. ``norm_before_fc``: one norm over the joined
    taps; ``fc_norm``: one per tap. ``norm_output``: the next step reads the output after the final norm. ``qk_norm``:
    Qwen3 layers. ``draft_vocab_size`` below ``vocab_size``: a reduced vocabulary with a table ``d2t`` of offsets.
    """

    layers: int
    hidden_size: int
    target_hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    rms_norm_eps: float
    rope: dict[str, Any]
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...]
    norm_before_residual: bool
    norm_before_fc: bool
    fc_norm: bool
    norm_output: bool
    qk_norm: bool
    max_positions: int

    def __post_init__(self) -> None:
        object.__setattr__(self, "target_layer_ids", tuple(int(i) for i in self.target_layer_ids))
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm exclude each other.")
        if self.hidden_size != self.target_hidden_size:
            raise UserError(
                f"An EAGLE-3 draft of width {self.hidden_size} cannot share the embedding of a target of width "
                f"{self.target_hidden_size}."
            )

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "target_layer_ids": list(self.target_layer_ids)}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Eagle3Config:
        """The inverse of ``to_dict``; raises ``UserError`` naming missing and unknown keys."""
        names = {f.name for f in fields(cls)}
        missing, unknown = sorted(names - data.keys()), sorted(data.keys() - names)
        if missing or unknown:
            raise UserError(f"An EAGLE-3 configuration cannot be read: missing {missing}, unknown {unknown}.")
        return cls(**data)


class _Attention(nn.Module):
    def __init__(self, config: Eagle3Config, width: int) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(width, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(config.head_dim, config.rms_norm_eps) if config.qk_norm else None

    def project(self, x_BNw: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, H, N, D], keys and values [B, J, N, D]; rotary positions applied."""
        B, N = x_BNw.shape[:2]
        queries = linear(x_BNw, self.q_proj).view(B, N, self.heads, self.head_dim)
        keys = linear(x_BNw, self.k_proj).view(B, N, self.kv_heads, self.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            queries, keys = self.q_norm(queries), self.k_norm(keys)
        queries, keys = rotate(queries.transpose(1, 2), cos, sin), rotate(keys.transpose(1, 2), cos, sin)
        values = linear(x_BNw, self.v_proj).view(B, N, self.kv_heads, self.head_dim).transpose(1, 2)
        return queries, keys, values

    def output(self, mixed_BHND: Tensor) -> Tensor:
        return linear(mixed_BHND.transpose(1, 2).flatten(2), self.o_proj)

    def forward(
        self, x_BNw: Tensor, cos: Tensor, sin: Tensor, past: LayerContext | None, mask_BNS: Tensor | None
    ) -> tuple[Tensor, LayerContext]:
        queries, keys, values = self.project(x_BNw, cos, sin)
        new = (keys, values)
        if past is not None:
            keys, values = torch.cat((past[0], keys), dim=2), torch.cat((past[1], values), dim=2)
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=None if mask_BNS is None else mask_BNS.unsqueeze(1),
            is_causal=mask_BNS is None and past is None and x_BNw.shape[1] > 1,
            enable_gqa=self.heads != self.kv_heads,
        )
        return self.output(mixed), new


class _MLP(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return linear(F.silu(linear(x, self.gate_proj)) * linear(x, self.up_proj), self.down_proj)


class _Layer(nn.Module):
    def __init__(self, config: Eagle3Config, first: bool) -> None:
        super().__init__()
        d = config.hidden_size
        self.input_layernorm = RMSNorm(d, config.rms_norm_eps)
        if first:
            self.hidden_norm = RMSNorm(d, config.rms_norm_eps)
        self.first, self.norm_before_residual = first, config.norm_before_residual
        self.self_attn = _Attention(config, 2 * d if first else d)
        self.post_attention_layernorm = RMSNorm(d, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def read(self, embeds_BNd: Tensor, x_BNd: Tensor) -> tuple[Tensor, Tensor]:
        """(residual, what attention reads)."""
        if not self.first:
            return x_BNd, self.input_layernorm(x_BNd)
        normed = self.hidden_norm(x_BNd)
        joined = torch.cat((self.input_layernorm(embeds_BNd).to(normed.dtype), normed), dim=-1)
        return normed if self.norm_before_residual else x_BNd, joined

    def finish(self, residual_BNd: Tensor, mixed_BNd: Tensor) -> Tensor:
        x_BNd = residual_BNd + mixed_BNd
        return x_BNd + self.mlp(self.post_attention_layernorm(x_BNd))

    def forward(
        self,
        embeds_BNd: Tensor,
        x_BNd: Tensor,
        cos: Tensor,
        sin: Tensor,
        past: LayerContext | None,
        mask_BNS: Tensor | None,
    ) -> tuple[Tensor, LayerContext]:
        residual, read = self.read(embeds_BNd, x_BNd)
        mixed, new = self.self_attn(read, cos, sin, past, mask_BNS)
        return self.finish(residual, mixed), new


class Eagle3Head(nn.Module):
    """See the top of this file. ``d2t`` is None for the whole vocabulary.

    ``recompute``: keep no activations of the training-time test's steps for the backward pass, make them again there.
    """

    d2t: Tensor | None
    recompute = False

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        d, taps = config.hidden_size, len(config.target_layer_ids)
        width = taps * config.target_hidden_size
        self.input_norm = RMSNorm(width, config.rms_norm_eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, config.rms_norm_eps) for _ in range(taps))
            if config.fc_norm
            else None
        )
        self.fc = nn.Linear(width, d, bias=False)
        self.layers = nn.ModuleList(_Layer(config, first=i == 0) for i in range(config.layers))
        self.norm = RMSNorm(d, config.rms_norm_eps)
        self.lm_head = nn.Linear(d, config.draft_vocab_size, bias=False)
        reduced = config.draft_vocab_size < config.vocab_size
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64) if reduced else None)
        self.rotary = Rotary(config.rope, head_dim=config.head_dim, max_positions=config.max_positions)

    def fuse(self, features_BTF: Tensor) -> Tensor:
        """Concatenated taps -> states [B, T, d]."""
        if self.input_norm is not None:
            features_BTF = self.input_norm(features_BTF)
        if self.fc_norm is not None:
            chunks = features_BTF.chunk(len(self.fc_norm), dim=-1)
            features_BTF = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks)], dim=-1)
        return linear(features_BTF, self.fc)

    def forward(
        self,
        embeds_BNd: Tensor,
        states_BNd: Tensor,
        positions_BN: Tensor,
        past: list[LayerContext] | None = None,
        mask_BNS: Tensor | None = None,
    ) -> tuple[Tensor, Tensor, list[LayerContext]]:
        """(hidden [B, N, d] for ``lm_head``, states [B, N, d] for the next step, keys and values of the N inputs).

        ``past``: keys and values of earlier inputs, per layer [B, J, S - N, D]. ``mask_BNS``: what each input sees of
        past and new ones; None without ``past``: causal.
        """
        cos, sin = self.rotary(positions_BN)
        x_BNd, new = states_BNd, []
        for i, layer in enumerate(self.layers):
            x_BNd, columns = layer(embeds_BNd, x_BNd, cos, sin, None if past is None else past[i], mask_BNS)
            new.append(columns)
        hidden_BNd = self.norm(x_BNd)
        return hidden_BNd, hidden_BNd if self.config.norm_output else x_BNd, new

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    @property
    def columns_X(self) -> Tensor | None:
        """Target ids of a reduced vocabulary, ascending; None for the whole."""
        return None if self.d2t is None else self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Ids of the draft's vocabulary for those of the target's; -1 where it cannot say the token."""
        if self.columns_X is None:
            return tokens
        table_V = torch.full((self.config.vocab_size,), -1, device=tokens.device)
        table_V[self.columns_X] = torch.arange(len(self.columns_X), device=tokens.device)
        return torch.where(tokens >= 0, table_V[tokens.clamp(min=0)], tokens)

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """Ids of the target's vocabulary for ids of the draft's."""
        return draft_ids if self.d2t is None else draft_ids + self.d2t[draft_ids]
