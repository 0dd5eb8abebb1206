"""Run the stages of ``cfg.pipeline`` in order; the last one, evaluate, ends with what the user came for.

A stage that has finished with the same settings says so and returns at once; the first one that
fails ends the pipeline. The same command continues after any stop.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder, readable_seconds, require_free_space
from jetspec_train.config import Config
from jetspec_train.stages import load_stage


def plan(cfg: Config) -> dict[str, Any]:
    """The plans of all stages, in order."""
    return {name: load_stage(name).plan(dataclasses.replace(cfg, stage=name)) for name in cfg.pipeline}


def preflight(cfg: Config) -> None:
    """Find out now what would otherwise fail hours later; reads configurations only, no weights.

    Raises UserError for a target that cannot be found or is not supported, a draft that does not fit
    it, a recipe or bundle of the evaluation that does not exist, and a disk too small for the run.
    """
    from jetspec_train.stages.costs import disk_bytes, disk_needed, facts_of

    facts = facts_of(cfg)
    for name in cfg.pipeline:
        if name != "distill":  # its plan reads the whole recipe, which its run is about to do
            load_stage(name).plan(dataclasses.replace(cfg, stage=name))
    require_free_space(cfg.run_dir, disk_needed(disk_bytes(cfg, facts), cfg.run_dir), "The pipeline")


def submit(cfg: Config) -> None:
    """Put the stages into Slurm's queue, each after the one before.

    Raises UserError for a target that the compute nodes could not load, a training that its ranks do not
    divide, and what ``submit_chain`` refuses.
    """
    from jetspec_train.cluster.jobs import submit_chain
    from jetspec_train.cluster.scripts import shape_of
    from jetspec_train.stages.train import check_ranks

    shape = shape_of("train", cfg.cluster)
    if "train" in cfg.pipeline:
        check_ranks(cfg, shape.nodes * shape.tasks_per_node)
    if cfg.cluster.offline:
        require_fetched(cfg)
    for record in submit_chain(cfg):
        after = f" after {record['after']}" if record["after"] else ""
        print(f"submitted {record['job']:<15} {record['id']}{after}  {record['script']}")
    print(f"\nprogress: python -m jetspec_train stage=status {shlex.quote(f'run_dir={cfg.run_dir}')}")


def require_fetched(cfg: Config) -> None:
    """Raise UserError with the command to run unless the target's weights are on this file system already."""
    from jetspec_train.targets.loading import resolve

    source = resolve(cfg.target)
    if Path(source.location).exists():
        return
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        snapshot_download(source.location, revision=source.revision, local_files_only=True)
    except LocalEntryNotFoundError:
        revision = f" --revision {source.revision}" if source.revision else ""
        raise UserError(
            f"The target {source.location} is not in the hub cache, and compute nodes are taken to be offline "
            f"(cluster.offline=true). Fetch it here first: hf download {source.location}{revision}  (HF_HOME must be "
            f"on a disk that the compute nodes see)."
        ) from None


def run(cfg: Config) -> None:
    """Run every stage, or submit them with cluster=slurm; raises whatever the first failing one raises."""
    preflight(cfg)
    make_folder(cfg.run_dir)
    if cfg.cluster.name == "slurm":
        submit(cfg)
        return
    for number, name in enumerate(cfg.pipeline, start=1):
        mark = f"[{number}/{len(cfg.pipeline)}] {name}"
        print(f"\n{mark}", flush=True)
        begun = time.monotonic()
        load_stage(name).run(dataclasses.replace(cfg, stage=name))
        print(f"{mark}: {readable_seconds(time.monotonic() - begun)}", flush=True)
    bundle = Path(cfg.run_dir) / "export" / "bundle"
    if bundle.is_dir():
        print(
            f'\ntry it: python -m jetspec_train stage=generate {shlex.quote(f"bundle={bundle}")} "prompt=What\'s up?"'
        )
