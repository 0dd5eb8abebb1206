"""The verifier: judges drafted tokens before the target does (METHODS 4). Two heads, one module.

* ``confidence``: reads ``[h_k ; W1[x_{k-1}]]``, the draft's state of a slot and what its parent token adds, so it never
  sees the token that it is asked about. One linear layer, exportable as DSpark's confidence head.
* ``correctness``: judges given tokens on given paths. Each node (a drafted token) attends to its ancestors, to itself
  and to the target context that the draft head uses too; never to siblings, so that a node's judgement does not depend
  on which other nodes were drafted.

The correctness head starts as the draft's own probability of the token, which is hard to beat, and learns what to add
to it: the scalars reach its logit directly, everything else through the network.

It knows nothing of files, samplers or losses. Trainer and decoder build ``NodeInputs`` and call the same functions.
Logits are of "accepted, given that the path before it was accepted"; ``survival`` multiplies them along the path.

Shapes: B rows, T context columns, M candidate nodes of a row (chain or tree), d / E width of the draft / of the
target's embeddings, r rank of the parent term, s scalars, w width of the verifier, H / J query and key-value heads,
D head size, K slots. Where a row holds A blocks (training), M is preceded by an axis A. Inside, the nodes that exist
stand row by row without their padding: N of the row with most, each with L ancestors (itself among them) at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec_train.modeling.attention import block_attention, rotate
from jetspec_train.modeling.draft_head import LayerContext, RMSNorm, linear
from jetspec_train.modeling.rotary import Rotary
from jetspec_train.modeling.verifier_config import SCALARS, VerifierConfig

__all__ = ["SCALARS", "NodeInputs", "Verifier", "VerifierConfig", "ancestors_of", "node_scalars", "survival"]


LOGIT_SCALE = 2.0  # the scalar "logit" is the draft's log-odds divided by it


@dataclass(frozen=True)
class NodeInputs:
    """What the correctness head knows of M candidate nodes: [B, M, ...], or [B, A, M, ...] for A blocks per row."""

    hidden_BMd: Tensor  # the draft's state of the slot that predicts the node
    parent_state_BMr: Tensor  # DraftHead.parent_state of the token before it (r = 0 without a parent term)
    token_embeds_BME: Tensor  # the target's embedding of the node's own token
    scalars_BMs: Tensor  # node_scalars
    ancestors_BMM: Tensor  # bool: [.., i, j] node j lies on the path to node i, or is node i
    positions_BM: Tensor  # int64: position of the node's token in its document (anchor position + depth + 1)
    valid_BM: Tensor | None = None  # bool: the nodes that exist, the rest is padding; None: all

    def blocks(self) -> NodeInputs:
        """The same with an axis of blocks: [B, M, ...] -> [B, 1, M, ...]."""
        if self.positions_BM.dim() == 3:
            return self
        return self._each(lambda x: x.unsqueeze(1))

    def detach(self) -> NodeInputs:
        return self._each(lambda x: x.detach())

    def _each(self, function: Callable[[Tensor], Tensor]) -> NodeInputs:
        changed = {f.name: getattr(self, f.name) for f in fields(self)}
        return NodeInputs(**{name: None if x is None else function(x) for name, x in changed.items()})  # type: ignore[arg-type]


class _MLP(nn.Module):
    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + linear(F.silu(linear(normed, self.gate_proj)) * linear(normed, self.up_proj), self.down_proj)


class _Layer(nn.Module):
    """Attention over context and path, then an MLP. The context has projections of its own: it lives in the draft's
    space, the nodes in the verifier's."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        w, d, D = config.hidden_size, config.draft_hidden_size, config.head_dim
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, D
        self.norm = RMSNorm(w, config.rms_norm_eps)
        self.q_proj = nn.Linear(w, config.heads * D, bias=False)
        self.k_proj = nn.Linear(w, config.kv_heads * D, bias=False)
        self.v_proj = nn.Linear(w, config.kv_heads * D, bias=False)
        self.context_k_proj = nn.Linear(d, config.kv_heads * D, bias=False)
        self.context_v_proj = nn.Linear(d, config.kv_heads * D, bias=False)
        self.o_proj = nn.Linear(config.heads * D, w, bias=False)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def context_kv(self, context_BTd: Tensor, cos: Tensor, sin: Tensor) -> LayerContext:
        B, T = context_BTd.shape[:2]
        keys = linear(context_BTd, self.context_k_proj).view(B, T, self.kv_heads, self.head_dim)
        values = linear(context_BTd, self.context_v_proj).view(B, T, self.kv_heads, self.head_dim)
        return rotate(self.k_norm(keys).transpose(1, 2), cos, sin), values.transpose(1, 2)

    def forward(self, x_BNw: Tensor, path: _Paths, cos_BND: Tensor, sin_BND: Tensor, context: LayerContext) -> Tensor:
        B, N, _ = x_BNw.shape
        D, L = self.head_dim, path.index_BNL.shape[-1]
        normed = self.norm(x_BNw)

        def heads(y: Tensor, count: int) -> Tensor:
            return y.view(B, N, count, D)

        queries = self.q_norm(heads(linear(normed, self.q_proj), self.heads)).transpose(1, 2)
        keys = self.k_norm(heads(linear(normed, self.k_proj), self.kv_heads)).transpose(1, 2)
        values = heads(linear(normed, self.v_proj), self.kv_heads).transpose(1, 2)
        queries, keys = rotate(queries, cos_BND, sin_BND), rotate(keys, cos_BND, sin_BND)
        own = path.index_BNL.reshape(B, 1, N * L, 1).expand(B, self.kv_heads, N * L, D)
        context_keys, context_values = (columns.to(queries.dtype) for columns in context)
        # Every node is a block of one slot whose own keys are those of its ancestors.
        mixed_BHN1D = block_attention(
            queries.unsqueeze(3),
            context_keys,
            context_values,
            keys.gather(2, own).view(B, self.kv_heads, N, L, D),
            values.gather(2, own).view(B, self.kv_heads, N, L, D),
            path.context_mask_BNT,
            causal=False,
            own_mask_BAKN=path.exists_BNL.unsqueeze(2),
        )
        mixed_BNx = mixed_BHN1D.squeeze(3).transpose(1, 2).reshape(B, N, self.heads * D)
        return self.mlp(x_BNw + linear(mixed_BNx, self.o_proj))


@dataclass(frozen=True)
class _Paths:
    """Where the ancestors of every node stand among the N nodes of its row, and the context that it sees."""

    index_BNL: Tensor  # int64
    exists_BNL: Tensor  # bool; a node is its own ancestor, so every row has one
    context_mask_BNT: Tensor | None


class _Confidence(nn.Module):
    """One linear layer; named as in DSpark's checkpoints (``proj.weight`` [1, d + r], ``proj.bias`` [1])."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.proj = nn.Linear(config.draft_hidden_size + config.parent_rank, 1)

    def forward(self, hidden: Tensor, parent_state: Tensor | None) -> Tensor:
        read = hidden if parent_state is None else torch.cat((hidden, parent_state.to(hidden.dtype)), dim=-1)
        return _score(read, self.proj)


class Verifier(nn.Module):
    """See the top of this file."""

    def __init__(self, config: VerifierConfig) -> None:
        super().__init__()
        self.config = config
        w, scalars = config.hidden_size, len(config.scalars)
        self.confidence_head = _Confidence(config)
        # The draft's state is normed by the draft; the scale of embeddings differs from target to target.
        self.embed_norm = RMSNorm(config.target_hidden_size, config.rms_norm_eps)
        inputs = config.draft_hidden_size + config.parent_rank + config.target_hidden_size + scalars
        self.in_proj = nn.Linear(inputs, w, bias=False)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.layers))
        self.mlp = None if config.layers else _MLP(config)
        self.norm = RMSNorm(w, config.rms_norm_eps)
        self.score = nn.Linear(w, 1)
        self.scalar_score = nn.Linear(scalars, 1, bias=False)
        self.rotary = Rotary(config.rope, head_dim=config.head_dim, max_positions=config.max_positions)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Unit-variance matrices, small layers; confidence starts as one half, correctness as the draft's own
        probability."""
        small = (2 * max(1, self.config.layers)) ** -0.5
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = small if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
                nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
        for head in (self.confidence_head.proj, self.score, self.scalar_score):
            for weight in head.parameters():
                nn.init.zeros_(weight)
        if "logit" in self.config.scalars:
            self.scalar_score.weight[0, self.config.scalars.index("logit")] = LOGIT_SCALE

    @property
    def trainable_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters() if p.requires_grad)

    def confidence(self, hidden_BAKd: Tensor, parent_state_BAKr: Tensor | None) -> Tensor:
        """Logits [B, A, K] (any leading axes) of "the slot's greedy token is accepted", from what is known before it.

        ``parent_state``: ``DraftHead.parent_state`` of the token before each slot; None without a parent term.
        """
        if self.config.detach:
            hidden_BAKd = hidden_BAKd.detach()
            parent_state_BAKr = None if parent_state_BAKr is None else parent_state_BAKr.detach()
        return self.confidence_head(hidden_BAKd, parent_state_BAKr)

    def context_kv(self, context_BTd: Tensor, positions_BT: Tensor) -> list[LayerContext]:
        """Keys and values [B, J, T, D] of the draft's fused context (``DraftHead.fuse``) in every layer; each column
        depends on its own token alone, so a decoder appends."""
        if self.config.detach:
            context_BTd = context_BTd.detach()
        cos, sin = self.rotary(positions_BT)
        return [layer.context_kv(context_BTd, cos, sin) for layer in self.layers]  # type: ignore[operator, union-attr]

    def correctness(self, nodes: NodeInputs, context: list[LayerContext], context_mask: Tensor | None = None) -> Tensor:
        """Logits of "the node's token is accepted, given its path was", [B, M] (or [B, A, M]), at least fp32.

        ``context``: from ``context_kv``; ``context_mask``: bool, the columns that a row ([B, T]) or block ([B, A, T])
        sees, those before its anchor; None: all. Padding nodes get 0.
        """
        shape = nodes.positions_BM.shape
        if self.config.detach:
            nodes = nodes.detach()
        nodes = nodes.blocks()
        if context_mask is not None and context_mask.dim() == 2:
            context_mask = context_mask.unsqueeze(1)
        B, A, M = nodes.positions_BM.shape
        valid = nodes.valid_BM
        exists_BP = torch.ones_like(nodes.positions_BM, dtype=torch.bool) if valid is None else valid
        exists_BP = exists_BP.reshape(B, A * M)
        most = A * M if valid is None else max(1, int(exists_BP.sum(1).max()))
        # The nodes that exist, in their order, before the padding of their row.
        place_BN = exists_BP.int().argsort(dim=1, descending=True, stable=True)[:, :most]

        def take(x: Tensor) -> Tensor:
            flat = x.flatten(1, 2)
            return flat.gather(1, place_BN.view(B, most, *[1] * (flat.dim() - 2)).expand(B, most, *flat.shape[2:]))

        x_BNw = self._read(nodes, take)
        if self.mlp is not None:
            x_BNw = self.mlp(x_BNw)
        else:
            path = _paths(nodes.ancestors_BMM, take(exists_BP.view(B, A, M)), place_BN, context_mask)
            cos, sin = self.rotary(take(nodes.positions_BM))
            for layer, columns in zip(self.layers, context, strict=True):
                x_BNw = layer(x_BNw, path, cos, sin, columns)
        logits_BN = _score(self.norm(x_BNw), self.score) + _score(take(nodes.scalars_BMs), self.scalar_score)
        if valid is not None:
            logits_BN = logits_BN * take(exists_BP.view(B, A, M))
            return logits_BN.new_zeros(B, A * M).scatter(1, place_BN, logits_BN).view(shape)
        return logits_BN.view(shape)

    def _read(self, nodes: NodeInputs, take: Callable[[Tensor], Tensor]) -> Tensor:
        """Everything a node knows of itself, as the first state [B, N, w] of the residual stream."""
        dtype = self.norm.weight.dtype
        parts = (
            take(nodes.hidden_BMd).to(dtype),
            take(nodes.parent_state_BMr).to(dtype),
            self.embed_norm(take(nodes.token_embeds_BME).to(dtype)),
            take(nodes.scalars_BMs).to(dtype),
        )
        return linear(torch.cat(parts, dim=-1), self.in_proj).to(dtype)


def _paths(ancestors_BAMM: Tensor, exists_BN: Tensor, place_BN: Tensor, context_mask_BAT: Tensor | None) -> _Paths:
    """From who descends from whom within each block to places among the N nodes of a row."""
    B, A, M, _ = ancestors_BAMM.shape
    rows_B1 = torch.arange(B, device=place_BN.device).unsqueeze(1)
    above_BNM = ancestors_BAMM.flatten(1, 2)[rows_B1, place_BN]
    above_BNM = torch.where(exists_BN.unsqueeze(-1), above_BNM, torch.arange(M, device=place_BN.device) == 0)
    longest = max(1, int(above_BNM.sum(-1).max()))
    is_above_BNL, within_BNL = above_BNM.int().sort(dim=-1, descending=True, stable=True)
    is_above_BNL, within_BNL = is_above_BNL[..., :longest].bool(), within_BNL[..., :longest]
    block_BN = place_BN // M
    stands_BP = torch.zeros(B, A * M, dtype=torch.int64, device=place_BN.device)
    stands_BP.scatter_(1, place_BN, torch.arange(place_BN.shape[1], device=place_BN.device).expand_as(place_BN))
    index_BNL = stands_BP.gather(1, (block_BN.unsqueeze(-1) * M + within_BNL).flatten(1)).view(within_BNL.shape)
    seen = None if context_mask_BAT is None else context_mask_BAT[rows_B1, block_BN]
    return _Paths(index_BNL, is_above_BNL, seen)


def _score(x: Tensor, layer: nn.Linear) -> Tensor:
    """A logit in at least fp32, whatever the weights are served in: bf16 would round 0.97 and 0.98 together."""
    wide = torch.promote_types(x.dtype, torch.float32)
    with torch.autocast(x.device.type, enabled=False):
        if layer.weight.dtype == wide:
            # The layer's own forward, before and after which ZeRO-3 brings its divided weights together.
            return layer(x.to(wide)).squeeze(-1)
        bias = None if layer.bias is None else layer.bias.to(wide)
        return F.linear(x.to(wide), layer.weight.to(wide), bias).squeeze(-1)


def node_scalars(
    config: VerifierConfig,
    *,
    logprob: Tensor,
    path_logprob: Tensor,
    margin: Tensor,
    rank: Tensor,
    entropy: Tensor,
    depth: Tensor,
) -> Tensor:
    """The scalars [..., s] of nodes, in the order of ``config.scalars``, from raw quantities of any (equal) shape.

    ``logprob``: log p(token | parent, slot) under the draft, nats. ``path_logprob``: its sum from the anchor's child to
    the node. ``margin``: log-probability of the slot's first choice after the same parent, minus ``logprob`` (0 for the
    first choice). ``rank``: 0 for the first choice, 1 for the second ...; 3 stands for "third alternative or later".
    ``entropy``: nats, of the slot's distribution without the parent term. ``depth``: 0 for a child of the anchor.
    """
    wide = torch.promote_types(logprob.dtype, torch.float32)
    certain = logprob.to(wide).clamp(-12.0, -6e-6)  # the draft's probability as a logit between -12 and 12
    # Scales that bring each near unit size; the bounds keep a hopeless node from shouting.
    made: dict[str, Tensor] = {
        "logit": (certain - torch.log(-torch.expm1(certain))) / LOGIT_SCALE,
        "logprob": logprob.to(wide).clamp(-20.0, 0.0) / 2.0,
        "path_logprob": path_logprob.to(wide).clamp(-40.0, 0.0) / 4.0,
        "margin": margin.to(wide).clamp(0.0, 20.0) / 2.0,
        "rank": rank.to(wide).clamp(0.0, 3.0) / 3.0,
        "entropy": entropy.to(wide).clamp(0.0, 12.0) / 4.0,
        "depth": depth.to(wide) / max(1, config.block - 1),
    }
    return torch.stack([made[name] for name in config.scalars], dim=-1)


def ancestors_of(parents: Any, *, nodes: int | None = None) -> Tensor:
    """Ancestors-or-self [n, n] bool of one tree given as parent indices (-1: child of the anchor), each smaller than
    the node's own. ``nodes``: padded size; padding nodes have only themselves."""
    size = len(parents) if nodes is None else nodes
    ancestors = torch.eye(size, dtype=torch.bool)
    for node, parent in enumerate(int(p) for p in parents):
        if parent >= 0:
            ancestors[node] |= ancestors[parent]
    return ancestors


def survival(logits_BM: Tensor, temperatures_by_depth: Tensor | None, ancestors_BMM: Tensor) -> Tensor:
    """Probability [B, M] (any leading axes) that the node and its whole path are accepted: the product of the
    calibrated sigmoids along the path. ``temperatures_by_depth`` [K]: logits at depth k are divided by entry k (the
    last one for deeper nodes); None: all 1."""
    if temperatures_by_depth is not None:
        depth_BM = (ancestors_BMM.sum(-1) - 1).clamp(0, len(temperatures_by_depth) - 1)
        logits_BM = logits_BM / temperatures_by_depth.to(logits_BM)[depth_BM]
    log_BM = F.logsigmoid(logits_BM)
    return (ancestors_BMM.to(log_BM.dtype) @ log_BM.unsqueeze(-1)).squeeze(-1).exp()
