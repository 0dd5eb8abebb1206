"""Jobs on a real Slurm: a training that is put back into the queue, an array with a killed task, a chain that breaks.

The jobs are ordinary submissions of this project on a tiny random target. The limits are generous because a busy
machine takes long to start Python; the work itself is a matter of seconds.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.cluster import jobs
from jetspec_train.config import Config, load_config
from jetspec_train.stages import distill, status
from jetspec_train.training.checkpoint import find_checkpoint, load_tensors
from jetspec_train.training.tracking import read_metrics
from tests.cluster import slurm
from tests.tiny import tiny_target_dir

pytestmark = pytest.mark.skipif(bool(slurm.why_not()), reason=f"no Slurm: {slurm.why_not()}")

PATIENCE = 400.0  # seconds for anything that takes ten on an idle machine
STEPS = 120


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    folder = tmp_path_factory.mktemp("slurm")
    with slurm.running_slurm(folder):
        yield folder


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a small run on 48 prompts, answered already."""
    folder = tmp_path_factory.mktemp("data")
    rows = [{"question": f"What is {n} and {n * 7 % 13}, " + "or so " * (n % 5) + "?"} for n in range(48)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 1.0}, "sources": [source]}))
    words = [
        *("preset=tiny", f"run_dir={folder}/run", f"recipe={folder}/recipe.yaml", "recipe.prompts=null"),
        *(f"target.name={tiny_target_dir('llama')}", "target.dtype=float32", "target.device=cpu"),
        *("distill.max_new_tokens=12", "distill.flush_rows=4", "verifier.enabled=false"),
        *("draft.layers=1", "draft.block=4", "draft.taps=2", "draft.parent_rank=8"),
        *(f"train.steps={STEPS}", "train.sequence_length=64", "train.sequences=2", "train.anchors=4"),
        *("train.precision=float32", "train.eval_prompts=0", "train.log_every=1", "train.save_every=1000"),
        *("cluster=slurm", "cluster.cpus_per_task=1", "cluster.tasks_per_node=2", "cluster.time=1:00:00"),
    ]
    cfg = load_config(words)
    distill.run(cfg)
    return cfg


def own(data: Config, tmp_path: Path, name: str, stages: list[str], *, answered: bool = True) -> Config:
    run = tmp_path / name
    if answered:
        shutil.copytree(Path(data.run_dir) / "distill", run / "distill")
    return replace(data, run_dir=str(run), pipeline=stages)


def submit(cfg: Config) -> dict[str, str]:
    """``{job: number}``."""
    return {str(record["job"]): str(record["id"]) for record in jobs.submit_chain(cfg)}


def steps_of(cfg: Config) -> list[int]:
    return [record["step"] for record in read_metrics(Path(cfg.run_dir) / "train" / "metrics.jsonl", "train")]


def events_of(cfg: Config, job: str) -> list[str]:
    return [event.what for event in jobs.read_events(cfg.run_dir) if event.job == job]


@pytest.mark.timeout(1800)
def test_a_requeued_training_on_two_ranks_ends_with_the_weights_of_an_undisturbed_one(
    cluster: Path, data: Config, tmp_path: Path
) -> None:
    whole, broken = own(data, tmp_path, "whole", ["train"]), own(data, tmp_path, "broken", ["train"])
    number = submit(broken)["train"]
    slurm.wait_for(lambda: len(steps_of(broken)) >= 3, "three steps", tmp_path, PATIENCE)
    # What --signal=B:USR1@... and preemption with a user signal do: the batch shell is told first.
    slurm.ask("scancel", "--batch", "--signal=USR1", number)
    slurm.wait_for(lambda: slurm.state_of(number) == "PENDING", "the requeue", tmp_path, PATIENCE)
    saved = find_checkpoint(Path(broken.run_dir) / "train", "last").name
    run_id = json.loads((Path(broken.run_dir) / "train" / "tracking.json").read_text())["run_id"]
    assert 3 <= int(saved[5:]) < STEPS and max(steps_of(broken)) == int(saved[5:])
    assert "train" in "\n".join(status.report_lines(Path(broken.run_dir), ["train"]))
    undisturbed = submit(whole)["train"]
    slurm.hurry(number)
    for waited, cfg in ((number, broken), (undisturbed, whole)):
        slurm.wait_for(lambda: slurm.state_of(waited) in jobs.ENDED, "the end", tmp_path, PATIENCE)  # noqa: B023
        assert slurm.state_of(waited) == "COMPLETED", events_of(cfg, "train")
    assert events_of(broken, "train") == ["started", "requeued after exit 85", "started", "finished"]
    assert events_of(whole, "train") == ["started", "finished"]
    assert steps_of(broken) == steps_of(whole) == list(range(1, STEPS + 1))
    assert json.loads((Path(broken.run_dir) / "train" / "tracking.json").read_text())["run_id"] == run_id
    one, other = (load_tensors(find_checkpoint(Path(cfg.run_dir) / "train", "last")) for cfg in (broken, whole))
    assert all(torch.equal(one[name], other[name]) for name in other)
    visits = [read_metrics(Path(cfg.run_dir) / "train" / "metrics.jsonl", "train")[-1] for cfg in (broken, whole)]
    assert visits[0]["token_visits"] == visits[1]["token_visits"]


@pytest.mark.timeout(1800)
def test_an_array_of_which_one_task_is_killed_answers_every_prompt_once(
    cluster: Path, data: Config, tmp_path: Path
) -> None:
    cfg = own(data, tmp_path, "array", ["distill"], answered=False)
    cfg = replace(cfg, cluster=replace(cfg.cluster, distill_tasks=2))
    numbers = submit(cfg)
    killed = f"{numbers['distill']}_1"
    mine = (f"run_dir={cfg.run_dir}", "shard=1/2")
    slurm.wait_for(lambda: slurm.kill_tasks(*mine), "its process", tmp_path, PATIENCE)
    slurm.wait_for(
        lambda: "requeued after exit 137" in events_of(cfg, "distill"), "the requeue of the killed task", tmp_path, 120
    )
    slurm.wait_for(lambda: "PENDING" in slurm.ask("squeue", "-h", "-r", "-j", killed, "-o", "%T"), "it", tmp_path, 120)
    slurm.hurry(killed)
    last = numbers["distill_gather"]
    slurm.wait_for(lambda: slurm.state_of(last) in jobs.ENDED, "the merge", tmp_path, PATIENCE)
    assert slurm.state_of(last) == "COMPLETED", jobs.job_lines(cfg.run_dir)
    merged, alone = (read_manifest(Path(run) / "distill") for run in (cfg.run_dir, data.run_dir))
    assert merged is not None and alone is not None
    for count in ("turns", "samples", "answer_tokens", "rejected"):
        assert merged.counts[count] == alone.counts[count], count


@pytest.mark.timeout(1800)
def test_a_stage_that_fails_stops_the_chain_and_status_says_why(cluster: Path, data: Config, tmp_path: Path) -> None:
    cfg = own(data, tmp_path, "failing", ["train", "export"], answered=False)
    numbers = submit(cfg)
    slurm.wait_for(lambda: slurm.state_of(numbers["train"]) in jobs.ENDED, "the failure", tmp_path, PATIENCE)
    slurm.wait_for(lambda: slurm.state_of(numbers["export"]) in jobs.ENDED, "the cancellation", tmp_path, 120)
    assert slurm.state_of(numbers["train"]) == "FAILED" and slurm.state_of(numbers["export"]) == "CANCELLED"
    assert events_of(cfg, "train") == ["started", "failed with exit 2"] and not events_of(cfg, "export")
    lines = "\n".join(status.report_lines(Path(cfg.run_dir), ["train"]))
    assert "failed with exit 2" in lines and "run stage=distill with" in lines and "never started" in lines
    # The cause is put right and the chain submitted again: it is a new chain, and it runs.
    shutil.copytree(Path(data.run_dir) / "distill", Path(cfg.run_dir) / "distill")
    short = replace(cfg, train=replace(cfg.train, steps=2))
    again = submit(short)
    slurm.wait_for(lambda: slurm.state_of(again["export"]) in jobs.ENDED, "the end", tmp_path, PATIENCE)
    assert slurm.state_of(again["export"]) == "COMPLETED", jobs.job_lines(cfg.run_dir)
    assert (Path(cfg.run_dir) / "export" / "bundle" / "bundle.json").is_file()
