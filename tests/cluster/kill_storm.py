"""A storm of kills on a two-rank Slurm training; see scripts/kill_storm.sh. Not a test: it takes minutes.

Kinds of kill, at random times: SIGUSR1 and SIGTERM to the batch shell (save, then requeue), SIGKILL to the processes
(the work since the last checkpoint is repeated), and Slurm's own requeue.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import torch

from jetspec_train.cluster import jobs
from jetspec_train.cluster.scripts import UNPLANNED_REQUEUES
from jetspec_train.config import load_config
from jetspec_train.stages import distill
from jetspec_train.training.checkpoint import find_checkpoint, load_tensors
from jetspec_train.training.tracking import read_metrics
from tests.cluster import slurm
from tests.tiny import tiny_target_dir

KINDS = ("USR1", "TERM", "KILL", "requeue")
PATIENCE = 900.0


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, default=None)
    options = parser.parse_args()
    folder = options.folder or Path(tempfile.mkdtemp(prefix="kill-storm-"))
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"question": f"What is {n} and {n * 7 % 13}?"} for n in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 1.0}, "sources": [source]}))
    cfg = load_config(
        [
            *("preset=tiny", f"run_dir={folder}/storm", f"recipe={folder}/recipe.yaml", "recipe.prompts=null"),
            *(f"target.name={tiny_target_dir('llama')}", "target.dtype=float32", "target.device=cpu"),
            *("distill.max_new_tokens=12", "verifier.enabled=false", "draft.block=4", "draft.parent_rank=8"),
            *(f"train.steps={options.steps}", "train.sequence_length=64", "train.sequences=2", "train.anchors=4"),
            *("train.precision=float32", "train.eval_prompts=0", "train.log_every=1", "train.save_every=20"),
            *("pipeline=[train]", "cluster=slurm", "cluster.cpus_per_task=1", "cluster.tasks_per_node=2"),
        ]
    )
    distill.run(cfg)
    calm = replace(cfg, run_dir=str(folder / "calm"))
    shutil.copytree(Path(cfg.run_dir) / "distill", Path(calm.run_dir) / "distill")
    (folder / "slurm").mkdir()
    with slurm.running_slurm(folder / "slurm"):
        number = str(jobs.submit_chain(calm)[0]["id"])
        slurm.wait_for(lambda: slurm.state_of(number) in jobs.ENDED, "the calm run", folder, PATIENCE)
        killed = storm(cfg, options.kills, random.Random(options.seed), folder)
    compare(cfg, calm, options.steps, killed)


def metrics(cfg):  # type: ignore[no-untyped-def]
    return read_metrics(Path(cfg.run_dir) / "train" / "metrics.jsonl", "train")


def storm(cfg, kills: int, chance: random.Random, folder: Path) -> list[str]:  # type: ignore[no-untyped-def]
    """Submit the run, kill it so many times, see it to its end; returns what was done."""
    number = str(jobs.submit_chain(cfg)[0]["id"])
    done: list[str] = []
    while len(done) < kills:
        slurm.wait_for(lambda: slurm.state_of(number) == "RUNNING", "a start", folder, PATIENCE)
        known, target = len(metrics(cfg)), chance.randint(1, cfg.train.steps // (kills + 1))
        slurm.wait_for(
            lambda: len(metrics(cfg)) >= known + target or slurm.state_of(number) in jobs.ENDED,  # noqa: B023
            "progress",
            folder,
            PATIENCE,
        )
        if slurm.state_of(number) in jobs.ENDED:
            break
        often = sum(one.startswith("KILL") for one in done) >= UNPLANNED_REQUEUES  # after that, a kill is final
        kind = chance.choice([kind for kind in KINDS if kind != "KILL" or not often])
        if kind == "requeue":
            slurm.ask("scontrol", "requeue", number)
        elif kind == "KILL":
            slurm.kill_tasks(f"run_dir={cfg.run_dir}")
        else:
            slurm.ask("scancel", "--batch", f"--signal={kind}", number)
        done.append(f"{kind} at step {len(metrics(cfg))}")
        print(f"kill {len(done)}: {done[-1]}", flush=True)
        slurm.wait_for(lambda: slurm.state_of(number) in ("PENDING", *jobs.ENDED), "the requeue", folder, PATIENCE)
        time.sleep(0.5)
        slurm.hurry(number)
    slurm.wait_for(lambda: slurm.state_of(number) in jobs.ENDED, "the end of the storm", folder, PATIENCE)
    print(f"the job ended as {slurm.state_of(number)}")
    return done


def compare(cfg, calm, steps: int, killed: list[str]) -> None:  # type: ignore[no-untyped-def]
    """Raise AssertionError unless the storm left no trace."""
    one, other = metrics(cfg), metrics(calm)
    assert [record["step"] for record in one] == [record["step"] for record in other] == list(range(1, steps + 1))
    # Supervised tokens seen up to each step: the same samples in the same order.
    assert [record["token_visits"] for record in one] == [record["token_visits"] for record in other]
    assert [record["loss"] for record in one] == [record["loss"] for record in other]
    a, b = (load_tensors(find_checkpoint(Path(run.run_dir) / "train", "last")) for run in (cfg, calm))
    assert all(torch.equal(a[name], b[name]) for name in b)
    print(f"{len(killed)} kills: {steps} steps, samples, losses and weights are those of the undisturbed run")


if __name__ == "__main__":
    main()
