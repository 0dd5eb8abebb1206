"""Rotary positions of draft heads, from transformers' rope parameters.

Shapes: N positions, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


class Rotary(nn.Module):
    """Cosines and sines at explicit positions. Frequencies are fixed, whatever the context length.

    ``rope``: transformers' ``rope_parameters`` (``rope_theta``, ``rope_type`` and its factors).
    Raises ``ValueError`` for a rope type that transformers does not know.
    """

    frequencies: Tensor

    def __init__(self, rope: dict[str, Any], *, head_dim: int, max_positions: int) -> None:
        super().__init__()
        kind = rope.get("rope_type", "default")
        self.scale = 1.0
        if kind == "default":
            steps = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
            frequencies = (1.0 / float(rope["rope_theta"]) ** steps).float()
        elif kind in ROPE_INIT_FUNCTIONS:
            config = LlamaConfig(
                hidden_size=head_dim,
                num_attention_heads=1,
                head_dim=head_dim,
                max_position_embeddings=max_positions,
                rope_parameters=dict(rope),
            )
            frequencies, self.scale = ROPE_INIT_FUNCTIONS[kind](config, device=torch.device("cpu"))
        else:
            raise ValueError(f"rope_type={kind!r}; transformers knows: default, {', '.join(ROPE_INIT_FUNCTIONS)}")
        self._exact = frequencies  # fp32 whatever dtype the head is moved to
        self.register_buffer("frequencies", frequencies, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> Rotary:
        # ``head.to(bfloat16)`` must not round the frequencies: far positions would turn by wrong angles.
        super()._apply(fn, recurse)
        self.frequencies = self._exact.to(self.frequencies.device)
        return self

    @torch.no_grad()
    def forward(self, positions_BN: Tensor) -> tuple[Tensor, Tensor]:
        """(cos, sin), fp32 [B, N, D], halves repeated."""
        angles = positions_BN.float().unsqueeze(-1) * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos() * self.scale, angles.sin() * self.scale
