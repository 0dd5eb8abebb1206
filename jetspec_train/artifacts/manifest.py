"""A stage's receipt: what it was asked, what it read, what it wrote, what it cost.

The manifest is written last and atomically, so a stage's output counts only when its manifest
exists. ``is_current`` answers the question every stage asks first: is there anything to do?
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import PathLike, atomic_json, read_json, sha256_file, stable_hash
from jetspec_train.artifacts.provenance import package_versions

MANIFEST = "manifest.json"


class _Absent:
    """Stands for a key that one of two settings does not have (None is a value)."""

    def __repr__(self) -> str:
        return "nothing"


ABSENT = _Absent()


@dataclass
class Manifest:
    """One finished stage. Paths in ``outputs`` are relative to the stage's folder."""

    stage: str
    identity: dict[str, Any]  # the settings and inputs that determine the output
    inputs: dict[str, str] = field(default_factory=dict)  # name -> hash of what was read
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)  # path -> {"sha256", "bytes"}
    counts: dict[str, Any] = field(default_factory=dict)  # counts in = counts out + rejects
    seconds: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""

    def digest(self) -> str:
        """Hash of what was asked and what came out; the name under which a later stage cites this one."""
        return stable_hash([self.stage, self.identity, self.outputs])


def describe_outputs(stage_dir: PathLike, paths: Iterable[PathLike]) -> dict[str, dict[str, Any]]:
    """``{relative path: {"sha256", "bytes"}}`` of files inside ``stage_dir``, sorted by path."""
    root = Path(stage_dir)
    described = {}
    for path in sorted(Path(p) if Path(p).is_absolute() else root / p for p in paths):
        name = path.absolute().relative_to(root.absolute()).as_posix()
        described[name] = {"sha256": sha256_file(path), "bytes": path.stat().st_size}
    return described


def write_manifest(
    stage_dir: PathLike,
    *,
    stage: str,
    identity: Mapping[str, Any],
    inputs: Mapping[str, str] | None = None,
    outputs: Iterable[PathLike] | Mapping[str, dict[str, Any]] = (),
    counts: Mapping[str, Any] | None = None,
    seconds: float = 0.0,
) -> Manifest:
    """Write ``stage_dir/manifest.json``; call it after every output is complete.

    ``outputs``: files (relative to ``stage_dir`` or absolute inside it), hashed here; or a mapping
    already described. ``seconds``: the work's wall-clock time, over all resumed attempts.
    """
    described = dict(outputs) if isinstance(outputs, Mapping) else describe_outputs(stage_dir, outputs)
    manifest = Manifest(
        stage=stage,
        identity=dict(identity),
        inputs=dict(inputs or {}),
        outputs=described,
        counts=dict(counts or {}),
        seconds=round(float(seconds), 3),
        versions=package_versions(),
        created=datetime.fromtimestamp(time.time(), timezone.utc).isoformat(timespec="seconds"),
    )
    atomic_json(Path(stage_dir) / MANIFEST, dataclasses.asdict(manifest))
    return manifest


def read_manifest(stage_dir: PathLike) -> Manifest | None:
    """The manifest of a finished stage, or None when the stage has not finished there."""
    path = Path(stage_dir) / MANIFEST
    if not path.is_file():
        return None
    content = read_json(path, "The manifest")
    names = {f.name for f in dataclasses.fields(Manifest)}
    if not isinstance(content, dict) or not {"stage", "identity", "outputs"} <= content.keys():
        raise UserError(f"The manifest {path} lacks its fields. Remove it to run the stage again.")
    return Manifest(**{name: value for name, value in content.items() if name in names})


def require_manifest(stage_dir: PathLike, stage: str) -> Manifest:
    """The manifest of an earlier stage that a later one builds on; UserError when it is missing."""
    manifest = read_manifest(stage_dir)
    if manifest is None:
        raise UserError(f"{stage_dir} holds no finished {stage}: run stage={stage} with the same run_dir first.")
    return manifest


def verify_outputs(stage_dir: PathLike, manifest: Manifest, *, hashes: bool = True) -> None:
    """Check that every output is there, unchanged (size, and unless ``hashes`` is off, SHA-256).

    Raises UserError naming the first file that is missing or differs.
    """
    for name, described in manifest.outputs.items():
        path = Path(stage_dir) / name
        advice = f"Delete {Path(stage_dir) / MANIFEST} to run stage={manifest.stage} again."
        if not path.is_file():
            raise UserError(f"{path} is listed in the manifest but missing. {advice}")
        size = path.stat().st_size
        if size != described["bytes"]:
            raise UserError(f"{path} has {size} bytes, its manifest says {described['bytes']}. {advice}")
        if hashes and (found := sha256_file(path)) != described["sha256"]:
            raise UserError(
                f"{path} was changed: its SHA-256 is {found[:12]}..., its manifest says "
                f"{described['sha256'][:12]}... {advice}"
            )


def differing_keys(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """``{dotted key: (first value, second value)}`` wherever two nested settings differ."""
    left, right = flatten(first), flatten(second)
    return {
        key: (left.get(key, ABSENT), right.get(key, ABSENT))
        for key in sorted(left.keys() | right.keys())
        if left.get(key, ABSENT) != right.get(key, ABSENT)
    }


def flatten(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``{"draft.layers": 2, ...}``; tuples and lists compare as equal."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{name}."))
        else:
            flat[name] = list(value) if isinstance(value, tuple) else value
    return flat


def check_identity(stage_dir: PathLike, stored: Mapping[str, Any], wanted: Mapping[str, Any], stage: str) -> None:
    """Refuse to mix two configurations in one folder; the message lists the keys that differ.

    For use before a manifest exists too: a stage that resumes keeps its identity beside its
    partial output and compares it here.
    """
    if listed := _differences(stored, wanted):
        raise UserError(
            f"{stage_dir} belongs to another configuration of stage={stage} ({listed}). "
            "Choose another run_dir=..., or ask for the settings of that run."
        )


def _differences(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The keys that differ, with both values, as one line; empty where none does."""
    differing = differing_keys(stored, wanted)
    return "; ".join(f"{key}: {old!r} there, {new!r} asked" for key, (old, new) in differing.items())


def is_current(stage_dir: PathLike, identity: Mapping[str, Any]) -> bool:
    """True when the stage has finished with this identity and all its files are still there.

    Raises UserError listing the differing keys when the folder holds another configuration.
    Only sizes are compared here, so that the check stays instant for large outputs.
    """
    manifest = read_manifest(stage_dir)
    if manifest is None:
        return False
    check_identity(stage_dir, manifest.identity, identity, manifest.stage)
    verify_outputs(stage_dir, manifest, hashes=False)
    return True


def is_current_or_replaced(stage_dir: PathLike, identity: Mapping[str, Any], doing: str) -> bool:
    """``is_current`` for a stage whose work is quickly done again: another identity is a reason to do so, not an error.

    Prints what differs after ``doing`` ("evaluate: measuring again") and removes the manifest first, so that no half of
    old and new output is ever trusted.
    """
    manifest = read_manifest(stage_dir)
    if manifest is None:
        return False
    listed = _differences(manifest.identity, identity)
    if not listed:
        verify_outputs(stage_dir, manifest, hashes=False)
        return True
    print(f"{doing}, replacing what is in {stage_dir} ({listed})")
    (Path(stage_dir) / MANIFEST).unlink()
    return False
