"""LoRA on the trained modules, through peft: put in before training, taken out as a small dictionary of tensors.

The modules keep their class and their forward; peft replaces single linear layers. Everything else is frozen.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jetspec_train.artifacts.adapter import CONFIG
from jetspec_train.artifacts.errors import UserError

ADAPTER = "default"  # peft's own name; it is cut out of the tensors' names, as peft does when it saves
# The parent term is used by its tables and not by calls of its layers, so that peft's factors would have no effect.
LEFT_OUT = "markov_head."


def adaptable_layers(module: nn.Module, endings: Sequence[str]) -> list[str]:
    """Names of the linear layers that end with one of ``endings``. Raises UserError if one of them fits none."""
    linear = [n for n, layer in module.named_modules() if isinstance(layer, nn.Linear) and LEFT_OUT not in f"{n}."]
    found = [name for name in linear if name.rsplit(".", 1)[-1] in endings]
    present = {name.rsplit(".", 1)[-1] for name in linear}
    unknown = sorted(set(endings) - present)
    if unknown or not found:
        raise UserError(
            f"adapt.modules={list(endings)}: the bundle has no linear layer named {', '.join(unknown) or '...'}; "
            f"it has {', '.join(sorted(present))}."
        )
    return found


def add_adapters(
    module: nn.Module, endings: Sequence[str], *, rank: int, alpha: float, dropout: float, seed: int
) -> dict[str, Any]:
    """Put LoRA factors beside the named layers, in place, and freeze the rest; returns peft's configuration.

    The factors start so that nothing changes (B = 0). The global generator is left as it was.
    """
    from peft import LoraConfig, inject_adapter_in_model

    layers = adaptable_layers(module, endings)
    # peft scales by alpha / rank and takes a fraction too; only its annotation says int
    settings: dict[str, Any] = {"lora_alpha": alpha, "lora_dropout": dropout}
    config = LoraConfig(r=rank, target_modules=layers, inference_mode=False, **settings)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        inject_adapter_in_model(config, module, adapter_name=ADAPTER)
    with tempfile.TemporaryDirectory() as folder:  # the only door to the configuration as peft would write it
        config.save_pretrained(folder)
        plain: dict[str, Any] = json.loads((Path(folder) / CONFIG).read_text())
    return {**plain, "target_modules": sorted(layers), "inference_mode": True}


def adapter_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a module's tensors the adapter's factors, named as in an ``Adapter``."""
    return {name.replace(f".{ADAPTER}.", "."): value for name, value in tensors.items() if ".lora_" in name}


def frozen_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Of a module's tensors those that are no factors of an adapter, under the names that they have now."""
    return {name: value for name, value in tensors.items() if ".lora_" not in name}
