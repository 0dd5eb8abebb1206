"""An adapter on disk: a few megabytes of LoRA weights that belong to one bundle.

``adapter_model.safetensors`` and ``adapter_config.json`` are in peft's own form; ``adapter.json`` names the weights of
the bundle that they change, by hash, and the size and hash of both files. As with bundles, nothing is ever unpickled.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.bundle import WEIGHTS as BUNDLE_WEIGHTS
from jetspec_train.artifacts.bundle import check_safetensors
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import (
    PathLike,
    atomic_json,
    make_folder,
    publish_folder,
    read_json,
    sha256_file,
    writing,
)
from jetspec_train.artifacts.manifest import describe_outputs

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "jetspec-train-adapter"
FORMAT_VERSION = 1
FACTS, CONFIG, WEIGHTS = "adapter.json", "adapter_config.json", "adapter_model.safetensors"
# How peft names a tensor of the module tree that was adapted.
PEFT_PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# What a plain LoRA leaves at these values; anything else changes how the weights are meant.
PLAIN: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "fan_in_fan_out": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "trainable_token_indices": (None,),
    "target_parameters": (None, []),
}


@dataclass(frozen=True)
class Adapter:
    """An adapter read and checked. ``tensors``: peft's names without their prefix, ``draft...lora_A.weight``."""

    path: Path
    facts: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, Tensor]

    @property
    def base(self) -> str:
        """SHA-256 of the weights of the bundle that it belongs to."""
        return str(self.facts["base"]["weights_sha256"])

    @property
    def scaling(self) -> float:
        """What the product of the two factors is multiplied by."""
        rank, alpha = int(self.config["r"]), float(self.config["lora_alpha"])
        return alpha / rank**0.5 if self.config.get("use_rslora") else alpha / rank


def weights_hash(meta: Mapping[str, Any]) -> str:
    """What an adapter is bound to: the hash of a bundle's weights (``meta``: its bundle.json).

    Not of bundle.json itself, which changes when the same weights are calibrated.
    """
    return str(meta["files"][BUNDLE_WEIGHTS]["sha256"])


def write_adapter(
    path: PathLike, *, facts: Mapping[str, Any], config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> Path:
    """Write an adapter folder as a whole. ``facts`` must hold ``base.weights_sha256``; ``config``: peft's own;
    ``tensors``: names as in ``Adapter``."""
    from safetensors.torch import save_file

    final = Path(path)
    make_folder(final.parent)
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with writing(final):
            plain = {f"{PEFT_PREFIX}{n}": t.detach().to("cpu").contiguous().clone() for n, t in sorted(tensors.items())}
            save_file(plain, temporary / WEIGHTS, metadata={"format": "pt"})
        atomic_json(temporary / CONFIG, dict(config))
        files = describe_outputs(temporary, [WEIGHTS, CONFIG])
        atomic_json(
            temporary / FACTS, {"format": FORMAT, "format_version": FORMAT_VERSION, **dict(facts), "files": files}
        )
        publish_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read_adapter(path: PathLike) -> Adapter:
    """Read an adapter and check all of it.

    Raises UserError naming the file and the values for: no adapter, an unknown version, a missing or changed file, a
    kind of adapter other than plain LoRA, tensors that do not come in pairs of the stated rank.
    """
    folder = Path(path)
    if not (folder / FACTS).is_file():
        raise UserError(f"adapter={folder} holds no {FACTS}. Give a folder that stage=adapt wrote (run_dir/adapt/...).")
    facts = read_json(folder / FACTS, "The adapter file")
    if facts.get("format") != FORMAT or facts.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder / FACTS} is {facts.get('format')!r} version {facts.get('format_version')!r}; this version of "
            f"jetspec-train reads {FORMAT!r} version {FORMAT_VERSION}."
        )
    base, files = facts.get("base"), facts.get("files")
    if not isinstance(base, dict) or "weights_sha256" not in base or not isinstance(files, dict):
        raise UserError(f"{folder / FACTS} does not say which bundle it belongs to ('base') or lists no 'files'.")
    for name in (WEIGHTS, CONFIG):
        file = folder / name
        if name not in files or not file.is_file():
            raise UserError(f"{file} is missing, or not listed in {FACTS}. Copy the whole adapter again.")
        found = sha256_file(file)
        if found != files[name].get("sha256"):
            raise UserError(
                f"{file} has SHA-256 {found[:16]}..., {FACTS} says {str(files[name].get('sha256'))[:16]}...: the file "
                "was changed or damaged. Copy the whole adapter again."
            )
    config = read_json(folder / CONFIG, "The adapter's configuration")
    check_plain(config, folder / CONFIG)
    check_safetensors(folder / WEIGHTS)
    from safetensors.torch import load_file

    tensors = {name.removeprefix(PEFT_PREFIX): tensor for name, tensor in load_file(folder / WEIGHTS).items()}
    check_pairs(tensors, int(config["r"]), folder / WEIGHTS)
    return Adapter(folder, facts, config, tensors)


def check_plain(config: Mapping[str, Any], path: Path) -> None:
    """Raises UserError for a configuration that means more than ``weight + scaling * B A``."""
    for key, allowed in PLAIN.items():
        if key in config and config[key] not in allowed:
            raise UserError(f"{path}: {key}={config[key]!r} is not supported; adapters here are plain LoRA.")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, (int, float)):
        raise UserError(f"{path}: r={rank!r} and lora_alpha={alpha!r} must be a rank and a number.")


def check_pairs(tensors: Mapping[str, Tensor], rank: int, path: Path) -> None:
    """Raises UserError unless the tensors are pairs of factors [rank, in] and [out, rank]."""
    downs = {name.removesuffix(DOWN): tensor for name, tensor in tensors.items() if name.endswith(DOWN)}
    ups = {name.removesuffix(UP): tensor for name, tensor in tensors.items() if name.endswith(UP)}
    if not downs or downs.keys() != ups.keys() or len(downs) + len(ups) != len(tensors):
        raise UserError(f"{path} does not hold pairs of lora_A and lora_B; it is not an adapter of stage=adapt.")
    for name, down in downs.items():
        up = ups[name]
        if down.dim() != 2 or up.dim() != 2 or down.shape[0] != rank or up.shape[1] != rank:
            raise UserError(
                f"{path}: the factors of {name} are {list(down.shape)} and {list(up.shape)}; rank {rank} is stated."
            )
