"""Tiny draft heads and packed batches for tests: random weights, fp64 where a law must hold to the last digits.

Shapes: B rows, T tokens of a packed row, A anchors per row, K slots per block.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from jetspec_train.modeling.blocks import Blocks, make_blocks
from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig

VOCABULARY, WIDTH, TAPS = 61, 32, 2


def head_config(**changes: Any) -> DraftHeadConfig:
    """Two causal layers, anchor layout, block 5, parent term of rank 8, unless changed."""
    settings: dict[str, Any] = dict(
        layers=2,
        block=5,
        mask="causal",
        layout="anchor",
        parent="vanilla",
        parent_rank=8,
        target_layer_ids=tuple(range(TAPS)),
        hidden_size=WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=VOCABULARY,
        target_hidden_size=WIDTH,
        mask_token_id=3,
        max_positions=256,
    )
    return DraftHeadConfig(**{**settings, **changes})


def draft_head(seed: int = 0, **changes: Any) -> DraftHead:
    """A head in fp64 whose parent term is not silent."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(head_config(**changes))
        if head.parent_weight is not None:
            torch.nn.init.normal_(head.parent_weight)
        for name, weight in head.named_parameters():
            if weight.dim() == 1 and "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
    return head.double()


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


EMBEDDING = random(VOCABULARY, WIDTH, seed=101)
LM_HEAD = random(VOCABULARY, WIDTH, seed=102) * 0.3


def embed(tokens: Tensor) -> Tensor:
    return EMBEDDING[tokens]


def logits(hidden: Tensor) -> Tensor:
    """An output head with a soft-cap, so that nobody may take it for linear."""
    return 8.0 * torch.tanh(hidden @ LM_HEAD.to(hidden.dtype).t() / 8.0)


@dataclass
class Packed:
    """A packed batch with the target's states; features and hidden are arbitrary but fixed."""

    tokens_BT: Tensor
    positions_BT: Tensor
    documents_BT: Tensor
    supervised_BT: Tensor
    features_BTF: Tensor
    hidden_BTD: Tensor

    def blocks(self, anchors_BA: Tensor, clean_BA: Tensor | None = None, *, config: DraftHeadConfig) -> Blocks:
        return make_blocks(
            self.tokens_BT,
            self.positions_BT,
            self.documents_BT,
            self.supervised_BT,
            anchors_BA,
            clean_BA,
            block=config.block,
            layout=config.layout,
        )


def packed(rows: list[list[tuple[int, int]]], length: int, seed: int = 0) -> Packed:
    """Rows of documents given as (prompt tokens, answer tokens); the rest of a row is padding.

    A document's tokens and states depend on its index over all rows alone, not on where it is packed.
    """
    count = len(rows)
    tokens = torch.zeros(count, length, dtype=torch.long)
    positions = torch.zeros(count, length, dtype=torch.long)
    documents = torch.full((count, length), -1)
    supervised = torch.zeros(count, length, dtype=torch.bool)
    features = random(count, length, TAPS * WIDTH, seed=seed + 900)  # padding has states too: they must not matter
    hidden = random(count, length, WIDTH, seed=seed + 901)
    number = 0
    for row, shapes in enumerate(rows):
        at = 0
        for prompt, answer in shapes:
            size = prompt + answer
            place = slice(at, at + size)
            generator = torch.Generator().manual_seed(seed + number)
            tokens[row, place] = torch.randint(4, VOCABULARY, (size,), generator=generator)
            positions[row, place] = torch.arange(size)
            documents[row, place] = at  # any number that differs within the row
            supervised[row, at + prompt : at + size] = True
            features[row, place] = random(size, TAPS * WIDTH, seed=seed + 1000 + number)
            hidden[row, place] = random(size, WIDTH, seed=seed + 2000 + number)
            at += size
            number += 1
    return Packed(tokens, positions, documents, supervised, features, hidden)


def run_head(head: DraftHead, batch: Packed, blocks: Blocks) -> Tensor:
    """The trainer's forward: hidden states [B, A, K, d] of all blocks."""
    context = head.context_kv(head.fuse(batch.features_BTF), batch.positions_BT)
    return head(head.embed(blocks.inputs_BAK, embed), blocks.positions_BAK, context, blocks.context_mask_BAT)


def slot_logits(head: DraftHead, hidden_BAKd: Tensor, parents_BAK: Tensor) -> Tensor:
    """Parent-conditioned logits [B, A, K, V]."""
    plain = logits(hidden_BAKd)
    return plain + head.parent_bias(parents_BAK, hidden_BAKd) if head.has_parent else plain
