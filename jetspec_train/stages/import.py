"""stage=import: another project's draft becomes a bundle, so that it runs next to ours in the same loop.

Reads ``foreign.path`` (EAGLE-3, DFlash, JetSpec, DSpark in the forms of docs/formats.md), checks it against the
target, says what it assumed, and writes ``run_dir/export/bundle/``. Nothing of the folder is ever executed.
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.bundle import write_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder, sha256_file
from jetspec_train.artifacts.foreign import ReadOptions
from jetspec_train.artifacts.manifest import MANIFEST, differing_keys, read_manifest, write_manifest
from jetspec_train.artifacts.provenance import git_revision, package_versions
from jetspec_train.config import Config

if TYPE_CHECKING:
    from jetspec_train.artifacts.foreign import ForeignDraft
    from jetspec_train.targets.target import Target

STAGE = "import"


def plan(cfg: Config) -> dict[str, Any]:
    """What would be read and written; loads nothing."""
    return {
        "stage": STAGE,
        "reads": str(_path(cfg)),
        "target": cfg.target.name,
        "stated": {k: v for k, v in dataclasses.asdict(cfg.foreign).items() if v not in (None, [])},
        "writes": str(Path(cfg.run_dir) / "export" / "bundle"),
    }


def run(cfg: Config) -> None:
    """Read, check, write the bundle; does nothing when the same folder was imported with the same settings."""
    from jetspec_train.decoding.foreign import import_draft
    from jetspec_train.targets.loading import load_target

    begun = time.monotonic()
    source, folder = _path(cfg), Path(cfg.run_dir) / STAGE
    bundle = Path(cfg.run_dir) / "export" / "bundle"
    identity = {
        "files": {p.name: sha256_file(p) for p in sorted(source.iterdir()) if p.suffix in (".json", ".safetensors")},
        "foreign": dataclasses.asdict(cfg.foreign),
        "target": dataclasses.asdict(cfg.target),
    }
    if (Path(cfg.run_dir) / "export" / MANIFEST).is_file():
        raise UserError(
            f"run_dir={cfg.run_dir} already holds the bundle of a training. Give the imported draft a run_dir of its "
            "own."
        )
    manifest = read_manifest(folder)
    if manifest is not None and not differing_keys(manifest.identity, identity) and bundle.is_dir():
        print(f"import: {bundle} is up to date, nothing to do")
        return
    make_folder(folder)
    (folder / MANIFEST).unlink(missing_ok=True)
    target = load_target(cfg.target)
    stated = {key: value for key, value in dataclasses.asdict(cfg.foreign).items() if key != "path"}
    draft = import_draft(source, target, ReadOptions(**stated))
    meta = bundle_facts(cfg, draft, target)
    write_bundle(
        bundle,
        bundle=meta,
        config={"kind": draft.kind, "draft": draft.config, "verifier": None},
        tensors={f"draft.{name}": tensor for name, tensor in draft.tensors.items()},
        card=card(meta, draft),
    )
    write_manifest(
        folder,
        stage=STAGE,
        identity=identity,
        inputs={"draft": identity["files"].get("config.json", "")},
        outputs=[],
        counts={"tensors": len(draft.tensors)},
        seconds=time.monotonic() - begun,
    )
    print(f"import: {source} is a draft in the form {draft.form!r}. Read so:")
    for assumption in draft.assumptions:
        print(f"  - {assumption}")
    print(f"import: {bundle}")


def _path(cfg: Config) -> Path:
    if cfg.foreign.path is None:
        raise UserError("stage=import needs foreign.path=FOLDER, the folder with the draft's config.json.")
    path = Path(cfg.foreign.path)
    if not path.is_dir():
        raise UserError(
            f"foreign.path={path} is not a folder. A draft of the hub is fetched first: "
            "hf download OWNER/NAME --local-dir FOLDER"
        )
    return path


def bundle_facts(cfg: Config, draft: ForeignDraft, target: Target) -> dict[str, Any]:
    """The content of ``bundle.json`` except the file list; training facts are unknown and say so."""
    parameters = sum(tensor.numel() for tensor in draft.tensors.values() if tensor.is_floating_point())
    return {
        "target": {
            **target.identity.to_dict(),
            "parameters": target.parameters,
            "gguf_file": cfg.target.gguf_file,
            "template": cfg.target.template,
            "template_options": dict(cfg.target.template_options),
            "system_prompt": cfg.target.system_prompt,
        },
        "architecture": f"imported, {draft.form}",
        "draft": {
            "preset": draft.form,
            "trainable_parameters": parameters,
            "ratio_to_target": parameters / target.parameters,
        },
        "taps": list(draft.config["target_layer_ids"]),
        "block": draft.config.get("block"),
        "conventions": {"taps": "0-based; output of decoder layer i, before the final norm"},
        "training": {"source": "unknown: imported from another project"},
        "imported": {"from": str(draft.path), "form": draft.form, "assumptions": draft.assumptions},
        "provenance": {"git_revision": git_revision(), "versions": package_versions()},
    }


def card(meta: dict[str, Any], draft: ForeignDraft) -> str:
    """README.md of the imported bundle."""
    assumptions = "\n".join(f"- {assumption}" for assumption in draft.assumptions)
    return f"""# A draft for {meta["target"]["name"]}, imported from another project

Read from `{draft.path}` in the form {draft.form}. How its folder was understood:

{assumptions}

Output stays the target's own; a draft changes the speed only. If its acceptance is near zero, one of the lines above
is the first suspect.
"""
