"""Checkpoints: a folder per kept step, complete or not there at all.

``checkpoints/step-000500/`` holds ``model.safetensors`` (trained weights, fp32), ``optimizer.pt`` (read back with
``weights_only=True`` alone), ``draft.json`` (the resolved draft configuration), ``verifier.json`` where a verifier is
trained, ``state.json`` (where training stands) and ``manifest.json`` (size and sha256 of each of them). It is written
under a temporary name, every file is flushed to the disk, the manifest comes last, and one rename makes it visible: a
kill at any instant leaves the previous checkpoints and a ``.tmp-`` folder that the next start removes. A folder without
a manifest, or whose files do not match it, is not a checkpoint; the previous one is used and the user is told.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import publish_folder, read_json, require_free_space, sha256_file, writing
from jetspec_train.artifacts.manifest import describe_outputs, differing_keys, read_manifest
from jetspec_train.artifacts.provenance import git_revision, package_versions

FORMAT = 1
MODEL_FILE, STATE_FILE, DRAFT_FILE, MANIFEST_FILE = "model.safetensors", "state.json", "draft.json", "manifest.json"
VERIFIER_FILE = "verifier.json"
TEMPORARY = ".tmp-"


@dataclass
class TrainState:
    """Where training stands after ``step`` updates. Batches, anchors and clean prefixes follow from the step alone."""

    step: int = 0
    token_visits: int = 0  # supervised tokens seen, repeats counted
    seconds: float = 0.0  # spent in training over all resumes
    evaluated_step: int = -1  # the last step at which acceptance was measured
    best: dict[str, Any] | None = None  # {"step", "acceptance_length", ...} of the best checkpoint so far
    window: dict[str, Any] = field(default_factory=dict)  # metric sums since the last record
    identity: dict[str, Any] = field(default_factory=dict)  # what must be the same to continue


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint on disk."""

    path: Path
    state: TrainState

    @property
    def step(self) -> int:
        return self.state.step


def checkpoint_name(step: int) -> str:
    return f"step-{step:06d}"


def save_checkpoint(
    folder: Path,
    state: TrainState,
    *,
    tensors: Mapping[str, Tensor],
    draft: Mapping[str, Any],
    save_engine: Callable[[Path], None],
    keep: int,
    verifier: Mapping[str, Any] | None = None,
) -> Path:
    """Write the checkpoint of ``state.step`` under ``folder`` atomically, then clean up.

    ``tensors``: the trained weights; ``draft``, ``verifier``: the configurations; ``save_engine``: called with the
    temporary folder, writes the optimiser. ``keep``: how many of the newest stay beside the best (at least 1).
    Raises UserError if the disk has no room for it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    size = sum(t.numel() * t.element_size() for t in tensors.values())
    require_free_space(folder, 4 * size, "a checkpoint")  # weights, two Adam moments, and a margin
    temporary = folder / f"{TEMPORARY}{checkpoint_name(state.step)}-{os.getpid()}"
    shutil.rmtree(temporary, ignore_errors=True)
    with writing(folder):
        temporary.mkdir()
        save_file({name: value.contiguous() for name, value in tensors.items()}, temporary / MODEL_FILE)
        save_engine(temporary)
        _write_json(temporary / DRAFT_FILE, dict(draft))
        if verifier is not None:
            _write_json(temporary / VERIFIER_FILE, dict(verifier))
        _write_json(temporary / STATE_FILE, asdict(state))
        for path in temporary.iterdir():
            _flush(path)
        manifest = {
            "format": FORMAT,
            "step": state.step,
            "files": describe_outputs(temporary, [path.name for path in temporary.iterdir()]),
            "versions": package_versions(),
            "git_revision": git_revision(),
            "arguments": sys.argv,
        }
        _write_json(temporary / MANIFEST_FILE, manifest)
        _flush(temporary / MANIFEST_FILE)
        _flush(temporary)
    final = publish_folder(temporary, folder / checkpoint_name(state.step))
    _clean_up(folder, keep=max(1, keep), best=None if state.best is None else int(state.best["step"]))
    return final


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint at ``path``, every byte checked. Raises ValueError that says what is wrong with it."""
    try:
        manifest = json.loads((path / MANIFEST_FILE).read_text())
    except FileNotFoundError:
        raise ValueError("it has no manifest (it was never finished)") from None
    except ValueError as error:
        raise ValueError(f"its manifest cannot be read: {error}") from None
    if manifest.get("format") != FORMAT:
        raise ValueError(f"its format is {manifest.get('format')}, this version reads {FORMAT}")
    for name, facts in manifest["files"].items():
        file = path / name
        if "/" in name or not file.is_file():
            raise ValueError(f"{name} is missing")
        if file.stat().st_size != facts["bytes"]:
            raise ValueError(f"{name} has {file.stat().st_size} bytes instead of {facts['bytes']}")
        if sha256_file(file) != facts["sha256"]:
            raise ValueError(f"{name} has changed since it was written (sha256 differs)")
    return Checkpoint(path, TrainState(**json.loads((path / STATE_FILE).read_text())))


def newest_checkpoint(folder: Path, warn: Callable[[str], None]) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None if training never saved one.

    Each damaged one on the way is reported through ``warn`` and passed over. Raises UserError if there are
    checkpoints but none can be used: starting again from nothing must be the user's decision.
    """
    candidates = _folders(folder)[::-1]
    for path in candidates:
        try:
            return open_checkpoint(path)
        except ValueError as error:
            warn(f"WARNING: checkpoint {path} cannot be used: {error}. Falling back to the one before it.")
    if candidates:
        raise UserError(
            f"None of the {len(candidates)} checkpoints in {folder} can be used (reasons above). "
            f"Delete that folder to train again from the beginning."
        )
    return None


def find_checkpoint(train_dir: str | Path, which: str = "best") -> Path:
    """The folder of a whole checkpoint: ``best`` (longest measured acceptance), ``last``, or an explicit path.

    ``train_dir`` is ``run_dir/train``. Raises UserError if there is none, or if the one asked for is damaged.
    """
    folder = Path(train_dir) / "checkpoints"
    if which in ("best", "last"):
        problems: list[str] = []
        newest = newest_checkpoint(folder, problems.append)
        if newest is None:
            raise UserError(f"There is no checkpoint in {folder}: run stage=train first.")
        if which == "last" or newest.state.best is None:
            if which == "last" and problems:
                raise UserError(f"The last checkpoint is damaged. {problems[0]} Run stage=train to redo it.")
            return newest.path
        path = folder / checkpoint_name(int(newest.state.best["step"]))
    else:
        path = Path(which)
    try:
        return open_checkpoint(path).path
    except ValueError as error:
        raise UserError(f"The checkpoint {path} (asked for as {which!r}) cannot be used: {error}.") from None


def find_trained(run_dir: str | Path, which: str = "best", warn: Callable[[str], None] = print) -> Path:
    """The checkpoint that a run offers for export and calibration: ``find_checkpoint`` of ``run_dir/train``, or of
    ``run_dir/verifier`` where a verifier was trained afterwards on that very draft.

    A verifier that judges another draft is left out, and ``warn`` is told. Raises UserError as ``find_checkpoint``.
    """
    run_dir = Path(run_dir)
    later = read_manifest(run_dir / "verifier")
    if later is None or which not in ("best", "last"):
        return find_checkpoint(run_dir / "train", which)
    if not (run_dir / "train" / "checkpoints").exists():
        return find_checkpoint(run_dir / "verifier", which)
    draft = find_checkpoint(run_dir / "train", which)
    if sha256_file(draft / MODEL_FILE) == later.inputs.get("draft"):
        return find_checkpoint(run_dir / "verifier", "best")
    warn(
        f"NOTE: {run_dir / 'verifier'} judges another draft than {draft.name}; it is left out. Run stage=train with "
        f"train.only=verifier again to train one for this draft."
    )
    return draft


def load_tensors(path: str | Path) -> dict[str, Tensor]:
    """All trained weights of a checkpoint folder, as the engine names them (``draft.*``, ``verifier.*``), in fp32 on
    the CPU."""
    return load_file(Path(path) / MODEL_FILE)


def load_draft_tensors(path: str | Path) -> dict[str, Tensor]:
    """The draft head's weights of a checkpoint folder by its own state-dict names, in fp32 on the CPU."""
    return _of_module(load_tensors(path), "draft.")


def load_draft_config(path: str | Path) -> dict[str, Any]:
    """The resolved draft configuration of a checkpoint folder (``draft.json``)."""
    return read_json(Path(path) / DRAFT_FILE, "The draft configuration")


def load_verifier_tensors(path: str | Path) -> dict[str, Tensor]:
    """The verifier's weights of a checkpoint folder by its own state-dict names; empty without a verifier."""
    return _of_module(load_tensors(path), "verifier.")


def load_verifier_config(path: str | Path) -> dict[str, Any] | None:
    """The resolved verifier configuration of a checkpoint folder; None where only a draft was trained."""
    file = Path(path) / VERIFIER_FILE
    return read_json(file, "The verifier configuration") if file.exists() else None


def _of_module(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}


def check_identity(found: Mapping[str, Any], wanted: Mapping[str, Any], path: Path) -> None:
    """Refuse to continue another training. Raises UserError that lists each differing key with both values."""
    differing = differing_keys(_plain(found), _plain(wanted))
    if differing:
        lines = "\n".join(f"  {key}: {old!r} in the checkpoint, {new!r} now" for key, (old, new) in differing.items())
        raise UserError(
            f"The checkpoint {path} belongs to another configuration:\n{lines}\n"
            f"Use another run_dir, or set these keys back, or delete {path.parent} to train again."
        )


def tidy(folder: Path, resumed_step: int) -> None:
    """Before training goes on from ``resumed_step``: delete what a killed writer left, set damaged folders aside.

    A damaged newer folder must not count among the newest, or clean-up would delete a good one for it; it is renamed
    to ``damaged-...`` rather than deleted, for whoever wants to know what happened to it.
    """
    for path in [*folder.glob(f"{TEMPORARY}*"), *folder.glob(".step-*.old")]:
        shutil.rmtree(path, ignore_errors=True)
    for path in _folders(folder):
        if int(path.name[5:]) > resumed_step:
            aside = folder / f"damaged-{path.name}"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)


def _clean_up(folder: Path, *, keep: int, best: int | None) -> None:
    """Delete all but the ``keep`` newest and the best. The newest is the last one, so it always stays."""
    for path in _folders(folder)[:-keep]:
        if best is None or path.name != checkpoint_name(best):
            # Renamed first: half-deleted folders must not look like damaged checkpoints.
            doomed = folder / f"{TEMPORARY}delete-{path.name}"
            path.rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def _folders(folder: Path) -> list[Path]:
    """Finished-looking checkpoint folders, oldest first."""
    return sorted(
        (path for path in folder.glob("step-*") if path.name[5:].isdigit()), key=lambda path: int(path.name[5:])
    )


def _plain(value: Any) -> Any:
    """The value as JSON would give it back (tuples are lists there)."""
    return json.loads(json.dumps(value))


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def _flush(path: Path) -> None:
    """Push a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
