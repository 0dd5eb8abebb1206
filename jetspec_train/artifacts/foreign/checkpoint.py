"""A checkpoint folder of another project: ``config.json`` beside safetensors, read without trusting it.

Nothing in such a folder is ever executed or unpickled. Every size is compared with the file that claims it
before a byte of weights is read, and no name may lead out of the folder.
"""

from __future__ import annotations

import json
import math
import struct
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError

MAX_CONFIG_BYTES = 4 << 20
MAX_HEADER_BYTES = 64 << 20
MAX_TENSORS = 20_000
_ITEM_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2, "BF16": 2,
    "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8,
}  # fmt: skip
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_config(folder: Path) -> dict[str, Any]:
    """The parsed ``config.json`` of ``folder``. Raises UserError for a missing, oversized or broken one."""
    path = inside(folder, "config.json")
    if not path.is_file():
        raise UserError(f"{folder} has no config.json, so it is not a draft checkpoint.")
    if path.stat().st_size > MAX_CONFIG_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes; a draft's config has at most {MAX_CONFIG_BYTES}.")
    try:
        config = json.loads(path.read_text("utf-8"))
    except (UnicodeDecodeError, ValueError) as error:
        raise UserError(f"{path} is not valid JSON: {error}.") from None
    if not isinstance(config, dict):
        raise UserError(f"{path} holds a {type(config).__name__}, not an object.")
    return config


def inside(folder: Path, name: str) -> Path:
    """The path of ``name`` in ``folder``; UserError if it is absolute, climbs out, or is a link to elsewhere.

    A link inside the folder is allowed when it leads to a sibling or into the blob store of the same hub snapshot
    (``models--.../snapshots/REV/x -> ../../blobs/HASH``).
    """
    if not name or Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name or "\0" in name:
        raise UserError(f"{folder} names the file {name!r}, which lies outside its folder.")
    path = folder / name
    root = folder.resolve()
    resolved = path.resolve()
    hub_blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else None
    if not resolved.is_relative_to(root) and not (hub_blobs and resolved.is_relative_to(hub_blobs)):
        raise UserError(f"{folder} names the file {name!r}, which leads outside its folder, to {resolved}.")
    return path


def read_header(path: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype code, shape) of one safetensors file, every claimed size checked against the file's own.

    Raises UserError for a truncated file, a header of absurd length, a tensor whose shape does not fill its bytes
    or whose bytes lie outside the file.
    """
    size = path.stat().st_size
    with path.open("rb") as stream:
        start = stream.read(8)
        if len(start) < 8:
            raise UserError(f"{path} has {size} bytes and is no safetensors file (half downloaded?).")
        (length,) = struct.unpack("<Q", start)
        if length > min(MAX_HEADER_BYTES, size - 8):
            raise UserError(f"{path}: its header claims {length} bytes, the file has {size}. Download it again.")
        try:
            header = json.loads(stream.read(length).decode("utf-8"))
        except (UnicodeDecodeError, ValueError) as error:
            raise UserError(f"{path} has a broken safetensors header: {error}.") from None
    if not isinstance(header, dict) or len(header) > MAX_TENSORS:
        raise UserError(f"{path} lists more than {MAX_TENSORS} tensors or no table at all; refused.")
    data_bytes = size - 8 - length
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        try:
            dtype, shape = str(entry["dtype"]), tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{path}: the entry of tensor {name!r} is malformed: {entry!r:.200}.") from None
        if dtype not in _ITEM_BYTES:
            raise UserError(f"{path}: tensor {name!r} has the unknown type {dtype!r}.")
        if any(n < 0 for n in shape) or math.prod(shape) * _ITEM_BYTES[dtype] != end - begin:
            raise UserError(
                f"{path}: tensor {name!r} claims shape {list(shape)} of {dtype} but has {end - begin} bytes; refused."
            )
        if begin < 0 or end > data_bytes:
            raise UserError(f"{path}: tensor {name!r} claims bytes {begin}..{end} of a file with {data_bytes}.")
        described[name] = (dtype, shape)
    return described


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of ``folder``: one, or the shards named by ``model.safetensors.index.json``."""
    index_path = inside(folder, "model.safetensors.index.json")
    if index_path.is_file():
        if index_path.stat().st_size > MAX_HEADER_BYTES:
            raise UserError(f"{index_path} has {index_path.stat().st_size} bytes; refused.")
        try:
            shards = sorted({str(name) for name in json.loads(index_path.read_text("utf-8"))["weight_map"].values()})
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise UserError(f"{index_path} has no usable weight_map: {error!r}.") from None
        paths = [inside(folder, name) for name in shards]
        for path in paths:
            if path.suffix != ".safetensors":
                raise _pickle_refusal(path)
            if not path.is_file():
                raise UserError(f"{index_path} names {path.name}, which is missing (half downloaded?).")
        return paths
    single = inside(folder, "model.safetensors")
    if single.is_file():
        return [single]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return [inside(folder, found[0].name)]
    if found:
        raise UserError(
            f"{folder} has {len(found)} safetensors files but no model.safetensors.index.json, so it is unclear "
            f"which to read: {', '.join(path.name for path in found)}."
        )
    pickles = sorted(path for path in folder.iterdir() if path.suffix in _PICKLES)
    if pickles:
        raise _pickle_refusal(pickles[0])
    raise UserError(f"{folder} has no *.safetensors file.")


def read_shapes(folder: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> (dtype code, shape) over all weight files of ``folder``, without reading weights."""
    described: dict[str, tuple[str, tuple[int, ...]]] = {}
    for path in weight_files(folder):
        for name, entry in read_header(path).items():
            if name in described:
                raise UserError(f"{folder}: tensor {name!r} is in two files.")
            described[name] = entry
    return described


def read_tensors(folder: Path) -> dict[str, Any]:
    """All tensors of ``folder`` on the CPU, after ``read_shapes`` has accepted every header."""
    from safetensors.torch import load_file

    read_shapes(folder)
    tensors: dict[str, Any] = {}
    for path in weight_files(folder):
        tensors.update(load_file(path, device="cpu"))
    return tensors


def write_checkpoint(folder: Path, config: dict[str, Any], tensors: dict[str, Any], files: dict[str, str]) -> None:
    """Write ``config.json``, ``model.safetensors`` and text ``files`` so that a killed export leaves nothing half done.

    The folder appears under its name only when it is complete; an older one of the same name is replaced.
    """
    import shutil

    from safetensors.torch import save_file

    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    # Shared storage and strided views are refused by safetensors and by some loaders: write plain copies.
    plain = {name: tensor.detach().to("cpu").clone().contiguous() for name, tensor in sorted(tensors.items())}
    save_file(plain, partial / "model.safetensors", metadata={"format": "pt"})
    (partial / "config.json").write_text(json.dumps(config, indent=2, sort_keys=False) + "\n", "utf-8")
    for name, text in files.items():
        inside(partial, name).write_text(text, "utf-8")
    if folder.exists():
        shutil.rmtree(folder)
    partial.rename(folder)


def _pickle_refusal(path: Path) -> UserError:
    return UserError(
        f"{path} is a pickle file, which can run code when it is opened, so it is never loaded here. Convert it where "
        "you trust it:\n  python -c \"import torch; from safetensors.torch import save_file; "
        f"state = torch.load('{path.name}', weights_only=True, map_location='cpu'); "
        "save_file({k: v.clone().contiguous() for k, v in state.items()}, 'model.safetensors')\""
    )
