"""Training-time test of an EAGLE-3 draft (arXiv 2503.01840): it learns on its own states, as it will draft.

At place q the draft joins the token x_{q+1} with a state of x_q and predicts x_{q+2}. Step 0 reads the
fused target features at every place; step s reads what step s-1 gave at place q-1. A query at place q in
step s is the (s+1)-th drafted token after the anchor a = q - s + 1, and sees exactly what it would see when
drafting: keys made of target features at places <= q - s = a - 1, and the keys of steps 1..s along its own
path (places a .. q).

Results are handed over as blocks [B, A, K, d] with K steps, slot k of anchor a predicting x_{a+k+1}: labels,
validity, weights (decay 0.8^s), loss and metrics are then those of a block head in the anchor layout.

Shapes: B rows, T tokens, A anchors, K steps, F taps, d width, J key/value heads, D head size, V / X target / draft
vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DraftConfig
from jetspec_train.modeling.attention import block_attention
from jetspec_train.modeling.blocks import Blocks, make_blocks
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head

STEPS = 7  # of the paper's training-time test
STEP_GAMMA = -1.0 / math.log(0.8)  # exp(-s / gamma) = 0.8^s, the paper's step weights


def resolve_eagle3_config(cfg: DraftConfig, hf_config: Any, *, draft_vocab_size: int | None = None) -> Eagle3Config:
    """An EAGLE-3 draft for this target: Llama-shaped layers over the taps of ``cfg`` (preset eagle3: one over three).

    ``draft_vocab_size``: size of a reduced vocabulary (``modeling.vocabulary``), None for the whole.

    Raises ``UserError`` on an impossible combination.
    """
    block = resolve_draft_config(
        replace(cfg, parent="none", layout="anchor", mask="causal"), hf_config, mask_token_id=0
    )
    size = block.vocab_size if draft_vocab_size is None else draft_vocab_size
    if not 1 <= size <= block.vocab_size:
        raise UserError(
            f"draft_vocab_size={draft_vocab_size} must lie between 1 and the target's vocabulary of {block.vocab_size}."
        )
    return Eagle3Config(
        layers=block.layers,
        hidden_size=block.hidden_size,
        target_hidden_size=block.target_hidden_size,
        heads=block.heads,
        kv_heads=block.kv_heads,
        head_dim=block.head_dim,
        intermediate_size=block.intermediate_size,
        rms_norm_eps=block.rms_norm_eps,
        rope=block.rope,
        vocab_size=block.vocab_size,
        draft_vocab_size=size,
        target_layer_ids=block.target_layer_ids,
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        qk_norm=False,
        max_positions=block.max_positions,
    )


def _attend_and_finish(
    layer: Any,
    residual_BTd: Tensor,
    queries_BHTD: Tensor,
    context: tuple[Tensor, Tensor],
    own_keys: Tensor,
    own_values: Tensor,
    mask_BTT: Tensor,
) -> Tensor:
    """The rest of a layer once its keys are known: the part whose activations (scores [B, H, T, T]) are large."""
    mixed = block_attention(queries_BHTD.unsqueeze(3), *context, own_keys, own_values, mask_BTT, causal=False)
    return layer.finish(residual_BTd, layer.self_attn.output(mixed.squeeze(3)))


@torch.no_grad()
def initialise_eagle3(head: Eagle3Head, lm_head_Vd: Tensor, ids_X: Tensor | None) -> None:
    """Start from the target's own output rows, unit-variance matrices and small layers.

    ``lm_head_Vd``: the target's lm_head; ``ids_X``: the target ids of a reduced vocabulary, ascending (writes
    ``d2t``), None for the whole. Raises ``ValueError`` if their number is not the configured one.
    """
    config = head.config
    count = config.vocab_size if ids_X is None else len(ids_X)
    if count != config.draft_vocab_size or (ids_X is None) != (head.d2t is None):
        raise ValueError(f"{count} draft tokens given for a draft vocabulary of {config.draft_vocab_size}")
    depth_scale = (2 * config.layers) ** -0.5
    for name, weight in head.named_parameters():
        if weight.dim() == 2:
            scale = depth_scale if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
            torch.nn.init.normal_(weight, std=scale * weight.shape[-1] ** -0.5)
    head.lm_head.weight.copy_(lm_head_Vd if ids_X is None else lm_head_Vd[ids_X])
    if head.d2t is not None and ids_X is not None:
        head.d2t.copy_(ids_X - torch.arange(count, device=ids_X.device))


def eagle3_blocks(
    tokens_BT: Tensor,
    positions_BT: Tensor,
    documents_BT: Tensor,
    supervised_BT: Tensor,
    anchors_BA: Tensor,
    *,
    steps: int = STEPS,
) -> Blocks:
    """Blocks of ``steps`` slots in the anchor layout; an anchor needs one token before it in its document."""
    blocks = make_blocks(
        tokens_BT, positions_BT, documents_BT, supervised_BT, anchors_BA, None, block=steps, layout="anchor"
    )
    before_BA = (anchors_BA - 1).clamp(min=0)
    same_BA = documents_BT.gather(1, before_BA) == documents_BT.gather(1, anchors_BA.clamp(min=0))
    return replace(blocks, valid_BAK=blocks.valid_BAK & (same_BA & (anchors_BA > 0)).unsqueeze(-1))


def _shifted(x_BTd: Tensor) -> Tensor:
    """Place q gets what was at q - 1; zeros at the first place."""
    return torch.nn.functional.pad(x_BTd[:, :-1], (0, 0, 1, 0))


def unroll(
    head: Eagle3Head,
    features_BTF: Tensor,
    tokens_BT: Tensor,
    positions_BT: Tensor,
    documents_BT: Tensor,
    anchors_BA: Tensor,
    target_embed: Callable[[Tensor], Tensor],
    *,
    steps: int = STEPS,
) -> Tensor:
    """Hidden states for ``lm_head``, [B, A, K, d]: slot k of anchor a predicts x_{a+k+1} after k drafted tokens.

    Every place of the row is run in every step (a step's attention costs T + s keys per place); the anchors' outputs
    are then picked. Where an anchor lies at place 0 or its path leaves the row, the output is meaningless: weight 0.
    """
    length = tokens_BT.shape[1]
    device = tokens_BT.device
    next_BT = torch.cat((tokens_BT[:, 1:], tokens_BT[:, -1:]), dim=1)
    embeds_BTd = target_embed(next_BT)
    cos, sin = head.rotary(positions_BT)
    place_T = torch.arange(length, device=device)
    same_BTT = documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)

    states_BTd = head.fuse(features_BTF).to(head.norm.weight.dtype)
    context: list[tuple[Tensor, Tensor]] = []  # keys and values of step 0, per layer
    paths: list[list[tuple[Tensor, Tensor]]] = []  # those of every later step, per layer
    picked = []
    for step in range(steps):
        mask_BTT = same_BTT & (place_T <= place_T.unsqueeze(1) - step)
        x_BTd, columns = states_BTd, []
        for i, layer in enumerate(head.layers):
            residual, read = layer.read(embeds_BTd, x_BTd)  # type: ignore[operator, union-attr]
            queries, keys, values = layer.self_attn.project(read, cos, sin)  # type: ignore[operator, union-attr]
            columns.append((keys, values))
            if step == 0:
                context.append((keys, values))
                own_keys, own_values = (x.unsqueeze(3)[:, :, :, :0] for x in (keys, values))
            else:
                # the key of step r on the path to place q lies at place q - step + r
                own = [(paths[r - 1][i], step - r) for r in range(1, step)] + [((keys, values), 0)]
                own_keys, own_values = (
                    torch.stack([pair[kind].roll(back, dims=2) for pair, back in own], dim=3) for kind in (0, 1)
                )
            attend = partial(_attend_and_finish, layer, residual, queries, context[i], own_keys, own_values, mask_BTT)
            recompute = head.recompute and torch.is_grad_enabled()
            x_BTd = checkpoint(attend, use_reentrant=False) if recompute else attend()
        if step:
            paths.append(columns)
        hidden_BTd = head.norm(x_BTd)
        states_BTd = _shifted(hidden_BTd if head.config.norm_output else x_BTd)
        index_BA = (anchors_BA - 1 + step).clamp(0, length - 1)
        picked.append(hidden_BTd.gather(1, index_BA.unsqueeze(-1).expand(-1, -1, hidden_BTd.shape[-1])))
    return torch.stack(picked, dim=2)
