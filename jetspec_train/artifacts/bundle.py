"""The bundle: one folder that holds a trained draft, loadable without any other file of the run.

``bundle.json`` names the format version, the target the draft belongs to, and the SHA-256 and size
of every other file. Reading trusts nothing: each entry must be a plain file inside the folder, of a
permitted kind, with its stated size and hash. Weights are safetensors; nothing is ever unpickled.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import (
    PathLike,
    atomic_json,
    atomic_write,
    make_folder,
    publish_folder,
    read_json,
    require_free_space,
    sha256_file,
    writing,
)
from jetspec_train.artifacts.manifest import describe_outputs

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = "jetspec-train-bundle"
FORMAT_VERSION = 1
STANDALONE = "standalone"  # kind of a bundle whose weights are a whole small model; a draft head's says nothing
BUNDLE, CONFIG, WEIGHTS, CALIBRATION, COSTS, CARD = (
    "bundle.json",
    "config.json",
    "model.safetensors",
    "calibration.json",
    "cost_profile.json",
    "README.md",
)
PERMITTED_KINDS = (".json", ".safetensors", ".md", ".txt", ".svg", ".png", ".html")
PICKLE_KINDS = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".npy", ".joblib")
MAX_JSON_BYTES = 64 << 20
MAX_HEADER_BYTES = 100 << 20  # the limit of the safetensors format itself
_DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "I16": 2,
    "U16": 2,
    "F16": 2,
    "BF16": 2,
    "I32": 4,
    "U32": 4,
    "F32": 4,
    "I64": 8,
    "U64": 8,
    "F64": 8,
}


@dataclass
class Bundle:
    """A bundle read and checked. ``config``: {"draft": ..., "verifier": ... or None}."""

    path: Path
    meta: dict[str, Any]
    config: dict[str, Any]
    tensors: dict[str, Tensor]
    calibration: dict[str, Any] | None
    cost_profile: dict[str, Any] | None


def write_bundle(
    path: PathLike,
    *,
    bundle: Mapping[str, Any],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    calibration: Mapping[str, Any] | None = None,
    cost_profile: Mapping[str, Any] | None = None,
    card: str,
) -> Path:
    """Write a bundle folder as a whole: it appears complete or not at all.

    ``bundle``: the facts for ``bundle.json`` (target, architecture, provenance ...); the format
    version and the files' hashes are added here. ``tensors``: names with "draft." or "verifier.".
    """
    from safetensors.torch import save_file

    final = Path(path)
    make_folder(final.parent)
    weights_bytes = sum(t.numel() * t.element_size() for t in tensors.values())
    require_free_space(final.parent, weights_bytes + (1 << 20), "The bundle")
    temporary = final.with_name(f".{final.name}.{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    make_folder(temporary)
    try:
        with writing(final):
            # safetensors refuses tensors that share memory; a bundle stores each on its own
            plain = {name: tensor.detach().to("cpu").contiguous().clone() for name, tensor in sorted(tensors.items())}
            save_file(plain, temporary / WEIGHTS, metadata={"format": "pt"})
        atomic_json(temporary / CONFIG, dict(config))
        if calibration is not None:
            atomic_json(temporary / CALIBRATION, dict(calibration))
        if cost_profile is not None:
            atomic_json(temporary / COSTS, dict(cost_profile))
        atomic_write(temporary / CARD, card)
        files = describe_outputs(temporary, [p.name for p in temporary.iterdir()])
        head = {"format": FORMAT, "format_version": FORMAT_VERSION}
        atomic_json(temporary / BUNDLE, {**head, **bundle, "files": files})
        publish_folder(temporary, final)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return final


def read_meta(path: PathLike) -> dict[str, Any]:
    """``bundle.json`` alone, its format version and file list checked; instant, and torch-free."""
    folder = Path(path)
    if not folder.is_dir():
        raise UserError(f"bundle={folder} is not a folder. Give the folder that holds bundle.json.")
    if not (folder / BUNDLE).is_file():
        inner = [p.parent for p in folder.glob(f"**/{BUNDLE}") if not p.parent.name.startswith(".")][:1]
        hint = f" Did you mean bundle={inner[0]}?" if inner else " It is not a bundle, or only partly copied."
        if (folder / CONFIG).is_file():
            hint = (
                " It looks like another project's draft; make a bundle of it first: stage=import "
                f"foreign.path={folder} target=... run_dir=..."
            )
        raise UserError(f"bundle={folder} holds no {BUNDLE}.{hint}")
    meta = _read_small_json(folder / BUNDLE)
    if meta.get("format") != FORMAT:
        raise UserError(f"{folder / BUNDLE} says format {meta.get('format')!r}; this project reads {FORMAT!r}.")
    if meta.get("format_version") != FORMAT_VERSION:
        raise UserError(
            f"{folder / BUNDLE} has format version {meta.get('format_version')!r}; this version of jetspec-train "
            f"reads version {FORMAT_VERSION}. Use the version of jetspec-train that wrote it, or export it again."
        )
    files = meta.get("files")
    if not isinstance(files, dict) or not {CONFIG, WEIGHTS} <= files.keys():
        raise UserError(f"{folder / BUNDLE} does not list {CONFIG} and {WEIGHTS} under 'files'.")
    return meta


def read_bundle(path: PathLike) -> Bundle:
    """Read a bundle and check all of it.

    Raises UserError naming the file and the two values for: an unknown format version, an entry
    outside the folder, a missing file, a size or hash that differs, a pickle, a malformed weight
    file, a configuration that names code to run.
    """
    folder = Path(path)
    meta = read_meta(folder)
    for name, described in meta["files"].items():
        _check_entry(folder, name, described)
    config = _read_small_json(folder / CONFIG)
    _refuse_code(config, folder / CONFIG)
    check_safetensors(folder / WEIGHTS)
    from safetensors.torch import load_file

    return Bundle(
        path=folder,
        meta=meta,
        config=config,
        tensors=load_file(folder / WEIGHTS),
        calibration=_read_small_json(folder / CALIBRATION) if CALIBRATION in meta["files"] else None,
        cost_profile=_read_small_json(folder / COSTS) if COSTS in meta["files"] else None,
    )


def _read_small_json(path: Path) -> dict[str, Any]:
    if path.stat().st_size > MAX_JSON_BYTES:
        raise UserError(f"{path} has {path.stat().st_size} bytes; more than {MAX_JSON_BYTES} is refused.")
    content = read_json(path, "The bundle file")
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold a JSON object, not a {type(content).__name__}.")
    return content


def _check_entry(folder: Path, name: str, described: Any) -> None:
    """One line of the file list: inside the folder, permitted kind, present, right size, right hash."""
    listed = f"{folder / BUNDLE} lists {name!r}"
    parts = PurePosixPath(name)
    if not name or "\\" in name or "\0" in name or parts.is_absolute() or ".." in parts.parts:
        raise UserError(f"{listed}, which lies outside the bundle's folder; refused.")
    file = folder / name
    if not file.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"{listed}, a link that leads outside the bundle's folder ({file.resolve()}); refused.")
    if file.suffix in PICKLE_KINDS:
        raise UserError(f"{listed}: a {file.suffix} file can run code when it is loaded; only safetensors are read.")
    if file.suffix not in PERMITTED_KINDS:
        raise UserError(f"{listed}: files of kind {file.suffix!r} are refused; allowed: {', '.join(PERMITTED_KINDS)}.")
    if not isinstance(described, dict) or not {"sha256", "bytes"} <= described.keys():
        raise UserError(f"{listed} without its 'sha256' and 'bytes'.")
    if not file.is_file():
        raise UserError(f"{listed}, but the file is missing. Copy the whole bundle again.")
    size = file.stat().st_size
    if size != described["bytes"]:
        raise UserError(f"{file} has {size} bytes, {BUNDLE} says {described['bytes']}. Copy the whole bundle again.")
    found = sha256_file(file)
    if found != described["sha256"]:
        raise UserError(
            f"{file} has SHA-256 {found[:16]}..., {BUNDLE} says {str(described['sha256'])[:16]}...: the file was "
            "changed or damaged. Copy the whole bundle again."
        )


def _refuse_code(config: Any, path: Path) -> None:
    """A configuration never names code; ``auto_map`` is how model folders smuggle it in."""
    if isinstance(config, dict):
        for key, value in config.items():
            if key in ("auto_map", "trust_remote_code", "custom_code", "_target_"):
                raise UserError(f"{path} contains the key {key!r}, which names code to run; refused.")
            _refuse_code(value, path)
    elif isinstance(config, list):
        for value in config:
            _refuse_code(value, path)


def check_safetensors(path: PathLike) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Check a weight file's header against its size without loading it: {name: (dtype, shape)}.

    Raises UserError for a header that does not parse, an unknown dtype, a shape whose bytes do not
    match its offsets, and offsets that leave the file, overlap, or leave gaps.
    """
    file = Path(path)
    size = file.stat().st_size
    with open(file, "rb") as handle:
        prefix = handle.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, size - 8):
            raise UserError(f"{file} is not a safetensors file: its header claims {length} bytes of {size}.")
        try:
            header = json.loads(handle.read(length))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise UserError(f"{file} is not a safetensors file: its header does not parse ({error}).") from error
    if not isinstance(header, dict):
        raise UserError(f"{file} is not a safetensors file: its header is not an object.")
    header.pop("__metadata__", None)
    tensors, spans = {}, []
    for name, entry in header.items():
        try:
            dtype, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            expected = math.prod(shape) * _DTYPE_BYTES[dtype]
            consistent = all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)) and end - begin == expected
        except (KeyError, TypeError, ValueError) as error:
            raise UserError(f"{file}: the entry of tensor {name!r} is malformed ({error}).") from error
        if not consistent or end > size - 8 - length:
            raise UserError(
                f"{file}: tensor {name!r} of shape {list(shape)} {dtype} needs {expected} bytes, "
                f"but its place in the file is {begin}..{end} of {size - 8 - length}."
            )
        tensors[name] = (dtype, shape)
        spans.append((begin, end))
    position = 0
    for begin, end in sorted(spans):
        if begin != position:
            raise UserError(f"{file}: tensors overlap or leave a gap at byte {position}.")
        position = end
    return tensors


def check_target(meta: Mapping[str, Any], identity: Any) -> None:
    """Refuse to run a draft on another target than its own.

    ``meta``: the content of bundle.json; ``identity``: a TargetIdentity or its dict. The name may
    differ (a local copy of a hub model); configuration, tokenizer and chat template may not.
    Raises UserError naming both values.
    """
    loaded = identity if isinstance(identity, Mapping) else identity.to_dict()
    trained = meta.get("target")
    if not isinstance(trained, Mapping):
        raise UserError("The bundle does not say which target it belongs to (no 'target' in bundle.json).")
    for key, what, advice in (
        ("config_hash", "model configuration", "Load the bundle with the target it was trained for."),
        ("tokenizer_hash", "tokenizer", "Load the bundle with the target it was trained for."),
        ("template_hash", "chat template", "Set target.template and target.template_options as in training."),
    ):
        if trained.get(key) != loaded.get(key):
            raise UserError(
                f"The bundle was made for target {trained.get('name')!r} ({what} {str(trained.get(key))[:12]}), but "
                f"the loaded target is {loaded.get('name')!r} ({what} {str(loaded.get(key))[:12]}). {advice}"
            )
