"""Adapters at run time: the factors are multiplied into a copy of the bundle's weights.

So an adapted draft costs exactly what the draft costs, and its forward is the same code; the price is a moment and the
draft's memory once more per swap (the target is never touched).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import torch

from jetspec_train.artifacts.adapter import DOWN, UP, Adapter, read_adapter, weights_hash
from jetspec_train.artifacts.bundle import Bundle, read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.decoding.drafting import Drafter
from jetspec_train.targets.target import Target


def adapted_bundle(bundle: Bundle, path: str | Path) -> Bundle:
    """The bundle as the adapter changes it, in memory.

    Its calibration is left out: temperatures and certificates were fitted to the weights as they were.
    Raises UserError for an adapter of another bundle, naming both hashes, and for one that does not fit.
    """
    adapter = read_adapter(path)
    check_base(adapter, bundle)
    return dataclasses.replace(bundle, tensors=merged_tensors(bundle.tensors, adapter), calibration=None)


def adapted_drafter(bundle_path: str | Path, path: str | Path, target: Target) -> Drafter:
    """The draft (and verifier) of a bundle on this target, changed by an adapter; raises as ``adapted_bundle``."""
    from jetspec_train.decoding.bundles import drafter_from_bundle

    return drafter_from_bundle(adapted_bundle(read_bundle(bundle_path), path), target)


def check_base(adapter: Adapter, bundle: Bundle) -> None:
    """Raises UserError unless the adapter was made for exactly these weights."""
    loaded = weights_hash(bundle.meta)
    if adapter.base != loaded:
        raise UserError(
            f"The adapter {adapter.path} was made for a bundle with weights {adapter.base[:16]}..., but the bundle "
            f"{bundle.path} has weights {loaded[:16]}.... Load it with its own bundle, or run stage=adapt again."
        )


def merged_tensors(base: Mapping[str, torch.Tensor], adapter: Adapter) -> dict[str, torch.Tensor]:
    """``W + scaling * B A`` (LoRA, arXiv 2106.09685) for every adapted weight, the others as they are.

    The sum is made in fp32 and rounded once, to the dtype of W. Raises UserError for a weight that the base lacks or
    that has another shape.
    """
    merged = dict(base)
    for name, down_rI in adapter.tensors.items():
        if not name.endswith(DOWN):
            continue
        layer = name.removesuffix(DOWN)
        up_Or, weight_OI = adapter.tensors[f"{layer}{UP}"], base.get(f"{layer}.weight")
        if weight_OI is None or tuple(weight_OI.shape) != (up_Or.shape[0], down_rI.shape[1]):
            found = "no such weight" if weight_OI is None else f"a weight of shape {list(weight_OI.shape)}"
            raise UserError(
                f"The adapter {adapter.path} changes {layer} of shape {[up_Or.shape[0], down_rI.shape[1]]}, "
                f"but the bundle has {found}."
            )
        change_OI = adapter.scaling * (up_Or.float() @ down_rI.float())
        merged[f"{layer}.weight"] = (weight_OI.float() + change_OI).to(weight_OI.dtype)
    return merged
