"""A checkpoint folder of another project: ``config.json`` beside safetensors, read without trusting it.

Nothing in such a folder is ever executed or unpickled. Every claimed size is compared with the file that claims it
before a byte of weights is read, and no name may lead out of the folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.bundle import PICKLE_KINDS, check_safetensors
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import (
    atomic_json,
    atomic_write,
    make_folder,
    publish_folder,
    read_json,
    require_free_space,
    writing,
)

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
VERIFIER = "jetspec_train/verifier.safetensors"
MAX_CONFIG_BYTES = 4 << 20
MAX_INDEX_BYTES = 64 << 20
# Dtypes a draft may have: quantised ones need kernels that this project does not have.
READABLE_DTYPES = ("F32", "F16", "BF16", "F64", "I64", "I32", "BOOL", "U8")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of ``folder``. Raises UserError for a missing, oversized or broken one."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder. Give the folder that holds the draft's config.json.")
    path = inside(folder, CONFIG)
    if not path.is_file():
        raise UserError(f"{folder} has no config.json, so it is not a draft checkpoint.")
    return _small_json(path, MAX_CONFIG_BYTES)


def inside(folder: Path, name: str) -> Path:
    """The path of ``name`` in ``folder``; UserError if it is absolute, climbs out, or is a link to elsewhere.

    A link is allowed when it stays inside, or leads to the blob store of the same snapshot of a hub cache
    (``models--.../snapshots/REVISION/x -> ../../blobs/HASH``).
    """
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name:
        raise UserError(f"{folder} names the file {name!r}, which lies outside its folder; refused.")
    root, resolved = folder.resolve(), (folder / name).resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not resolved.is_relative_to(root) and not (blobs and resolved.is_relative_to(blobs)):
        raise UserError(
            f"{folder} names the file {name!r}, a link that leads outside its folder ({resolved}); refused."
        )
    return folder / name


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``: one, or the shards named by ``model.safetensors.index.json``."""
    index_path = inside(folder, INDEX)
    if index_path.is_file():
        weight_map = _small_json(index_path, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{index_path} has no usable 'weight_map'.")
        paths = [inside(folder, name) for name in sorted({str(name) for name in weight_map.values()})]
        for path in paths:
            if path.suffix != ".safetensors":
                raise _pickle_refusal(path)
            if not path.is_file():
                raise UserError(f"{index_path} names {path.name}, which is missing. Download the checkpoint again.")
        return paths
    if inside(folder, WEIGHTS).is_file():
        return [folder / WEIGHTS]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return [inside(folder, found[0].name)]
    if found:
        raise UserError(
            f"{folder} has {len(found)} safetensors files but no {INDEX}, so it is unclear which to read: "
            f"{', '.join(path.name for path in found)}."
        )
    pickles = sorted(path for path in folder.iterdir() if path.suffix in PICKLE_KINDS)
    if pickles:
        raise _pickle_refusal(pickles[0])
    raise UserError(f"{folder} has no *.safetensors file.")


def read_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape over all weight files of ``folder``, every header checked, without reading weights."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        for name, (dtype, shape) in check_safetensors(path).items():
            if name in shapes:
                raise UserError(f"{folder}: tensor {name!r} is in two of its files.")
            if dtype not in READABLE_DTYPES:
                raise UserError(
                    f"{path}: tensor {name!r} is stored as {dtype}; quantised drafts are not read. "
                    f"Use the unquantised checkpoint (one of {', '.join(READABLE_DTYPES)})."
                )
            shapes[name] = shape
    return shapes


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of ``folder`` on the CPU, after ``read_shapes`` has accepted every header."""
    from safetensors.torch import load_file

    read_shapes(folder)
    tensors: dict[str, Tensor] = {}
    for path in weight_files(folder):
        tensors.update(load_file(path, device="cpu"))
    return tensors


def write_checkpoint(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    files: Mapping[str, Any],
    beside: Mapping[str, Tensor] | None = None,
) -> Path:
    """Write ``config.json``, ``model.safetensors`` and further ``files`` (text, or an object for JSON).

    ``beside``: tensors for ``jetspec_train/verifier.safetensors``; in a folder of its own, because servers read every
    safetensors file of the main one.

    The folder appears under its name complete or not at all; an older one of the same name is replaced.
    """
    from safetensors.torch import save_file

    make_folder(folder.parent)
    need = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    require_free_space(folder.parent, need + (1 << 20), f"The export {folder.name}")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with writing(folder):
            # Tied or strided tensors are refused by safetensors and by some loaders: each is stored on its own.
            for path, content in ((WEIGHTS, tensors), (VERIFIER, beside or {})):
                plain = {name: t.detach().to("cpu").contiguous().clone() for name, t in sorted(content.items())}
                if plain:
                    make_folder((temporary / path).parent)
                    save_file(plain, temporary / path, metadata={"format": "pt"})
        atomic_json(temporary / CONFIG, dict(config))
        for name, text in files.items():
            if isinstance(text, str):
                atomic_write(inside(temporary, name), text)
            else:
                atomic_json(inside(temporary, name), text)
        return publish_folder(temporary, folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _small_json(path: Path, limit: int) -> dict[str, Any]:
    if path.stat().st_size > limit:
        raise UserError(f"{path} has {path.stat().st_size} bytes; more than {limit} is refused.")
    try:
        content = read_json(path, "The checkpoint file")
    except RecursionError:
        raise UserError(f"{path} is nested too deeply; refused.") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def _pickle_refusal(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle file, which can run code when it is opened, so it is never loaded here. Convert it once, "
        f"in its folder:\n  python -c \"import torch, safetensors.torch as s; t = torch.load('{path.name}', "
        "weights_only=True, map_location='cpu'); "
        "s.save_file({k: v.clone().contiguous() for k, v in t.items()}, 'model.safetensors')\""
    )
