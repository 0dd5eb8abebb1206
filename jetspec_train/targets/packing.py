"""Weights of a frozen model laid out once as the CPU's matrix units want them (oneDNN blocked format, bfloat16).

``nn.Linear`` keeps a plain row-major weight that oneDNN re-reads in an unsuitable order at every call. Packed once, the
linear layers of SmolLM2-135M take 27-32 ms instead of 42-54 ms on one AMX core at 1 to 33 rows, with bit-identical
results. A packed layer has no ``weight`` any more: it can be used, not trained, saved or moved.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch.nn.functional import linear

log = logging.getLogger(__name__)
# Rows that the layout is tuned for. The measured layout is the same from 8 to 300 rows and hardly worse at one.
_ROWS = 32


class PackedLinear(torch.nn.Module):
    """A frozen linear layer whose weight lives in oneDNN's own layout. No gradient passes through it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        # Not buffers: opaque tensors cannot be moved, cast or saved by module machinery.
        self._packed = (torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), _ROWS),)
        self._bias = (None if bias is None else bias.detach(),)

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self._packed[0], self._bias[0], "none", [], "")

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}"


def can_pack(weight: torch.Tensor) -> bool:
    """Whether this weight may be packed here: bfloat16 on a CPU, and the packed product equals the plain one."""
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or not torch.backends.mkldnn.is_available():
        return False
    part = weight.detach()[:32].contiguous()
    probe = torch.linspace(-1, 1, 3 * part.shape[1]).view(3, -1).to(weight.dtype)
    try:
        return torch.allclose(PackedLinear(part)(probe).float(), linear(probe, part).float(), atol=1e-2, rtol=1e-2)
    except (RuntimeError, AttributeError, NotImplementedError) as error:  # another build of torch, another CPU
        log.info("linear layers stay unpacked: %s", error)
        return False


def pack_linears(
    module: torch.nn.Module, *, but: Iterable[torch.nn.Module | None] = ()
) -> list[tuple[torch.nn.Module, str, torch.nn.Linear]]:
    """Replace every plain ``nn.Linear`` below ``module``; returns (parent, name, original) of each, for undoing.

    ``but``: parts that stay as they are, because their weights are read directly.
    """
    replaced = []
    left_alone = {part for whole in but if whole is not None for part in whole.modules()}
    for parent in list(module.modules()):
        if parent in left_alone:
            continue
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear and child not in left_alone and can_pack(child.weight):
                setattr(parent, name, PackedLinear(child.weight, child.bias))
                replaced.append((parent, name, child))
    return replaced


def unpack_linears(replaced: list[tuple[torch.nn.Module, str, torch.nn.Linear]]) -> None:
    for parent, name, original in replaced:
        setattr(parent, name, original)
