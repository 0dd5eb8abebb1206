"""Configurations as words, batch scripts, and status lines: everything about jobs that needs no Slurm."""

from __future__ import annotations

import dataclasses
import subprocess
from pathlib import Path

import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import append_jsonl
from jetspec_train.cluster import jobs
from jetspec_train.cluster.scripts import GATHER, batch_script, shape_of
from jetspec_train.cluster.words import words_of
from jetspec_train.config import ClusterConfig, load_config

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["preset=tiny", "run_dir=runs/it's a run", "target=Qwen/Qwen3-0.6B", "seed=5"],
        ["draft=dflash", "objective=ce", "train.betas=[0.9,0.99]", "objective.gamma=null", "train.steps=7"],
        ["prompt='quoted'", 'target.system_prompt=It\'s "so", x=1', "evaluate.domains=[math,chat]", "plan=true"],
        ["recipe.overrides.gsm8k.path=/data/a b.jsonl", "evaluate.variants={chain:{shape:chain,nodes:7}}"],
        ["cluster=slurm", "cluster.setup=['source env/bin/activate','export HF_HOME=/shared/hf']", "cluster.gpus=4"],
    ],
)
def test_words_give_the_configuration_back(words: list[str]) -> None:
    cfg = load_config(words)
    assert load_config(words_of(cfg)) == cfg


def test_a_changed_configuration_changes_the_words() -> None:
    cfg = load_config(["preset=tiny"])
    other = dataclasses.replace(cfg, train=dataclasses.replace(cfg.train, learning_rate=0.25))
    assert words_of(cfg) == ["preset=tiny"]
    assert words_of(other) == ["preset=tiny", "train.learning_rate=0.25"]


@pytest.mark.parametrize("job", ["distill", GATHER, "negatives", "train", "calibrate", "export", "evaluate"])
def test_the_general_scripts_are_those_of_the_writer_and_valid_shell(job: str, tmp_path: Path) -> None:
    path = ROOT / "slurm" / f"{job}.sbatch"
    expected = batch_script(job, ClusterConfig(gpus=1), words=None)
    assert path.read_text() == expected, f"write it again: python -m jetspec_train.cluster.scripts {path.parent}"
    text = batch_script(job, ClusterConfig(), words=["run_dir=a b", "prompt=it's"], run_dir="a b", folder="/x y")
    for script in (path.read_text(), text):
        checked = subprocess.run(["bash", "-n"], input=script, text=True, capture_output=True)
        assert checked.returncode == 0, checked.stderr


def test_what_each_stage_asks_of_the_cluster() -> None:
    cluster = ClusterConfig(
        nodes=2,
        gpus=8,
        distill_tasks=16,
        distill_parallel=4,
        partition="a100",
        account="me",
        memory="64G",
        modules=["cuda/12"],
        setup=["export HF_HOME=/shared/hf"],
        container="apptainer exec --nv x.sif",
        options=["--exclusive"],
    )
    assert shape_of("train", cluster).tasks_per_node == 8 and shape_of("train", cluster).nodes == 2
    assert shape_of("export", cluster).gpus_per_node == 0 and shape_of("evaluate", cluster).gpus_per_node == 1
    train = batch_script("train", cluster, words=["a=1"], run_dir="runs/x")
    for line in (
        "#SBATCH --nodes=2",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --partition=a100",
        "#SBATCH --account=me",
        "#SBATCH --mem=64G",
        "#SBATCH --exclusive",
        "#SBATCH --requeue",
        "module load cuda/12",
        "export HF_HOME=/shared/hf",
    ):
        assert f"\n{line}\n" in train, line
    assert (
        "srun --ntasks=16" in train and 'apptainer exec --nv x.sif "$python" -u -m jetspec_train stage=train' in train
    )
    distill = batch_script("distill", cluster, words=[], run_dir="runs/x")
    assert "#SBATCH --array=0-15%4\n" in distill and "shards=16" in distill
    assert "gpus-per-node" not in batch_script("train", ClusterConfig(), words=[], run_dir="x")


def run_body(
    tmp_path: Path, exit_code: int, attempt: str = "0", state: str = "RUNNING", **variables: str
) -> tuple[int, list[str]]:
    """Run a train script whose srun exits with the code, against fake Slurm commands; its code and the requeues."""
    fake = tmp_path / "bin"
    fake.mkdir(exist_ok=True)
    for name, body in {
        "srun": f"exit {exit_code}",
        "squeue": f"echo {state}",
        "scontrol": f'echo "$@" >> {tmp_path}/scontrol; exit 1',  # as if refused, so that it does not wait
    }.items():
        (fake / name).write_text(f"#!/bin/bash\n{body}\n")
        (fake / name).chmod(0o755)
    script = batch_script("train", ClusterConfig(requeues=2), words=[], run_dir=str(tmp_path), folder=str(tmp_path))
    answer = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": f"{fake}:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": attempt, **variables},
        capture_output=True,
    )
    asked = (tmp_path / "scontrol").read_text().splitlines() if (tmp_path / "scontrol").exists() else []
    return answer.returncode, asked


@pytest.mark.parametrize(
    ("code", "attempt", "state", "requeued"),
    [
        (0, "0", "RUNNING", False),
        (85, "0", "RUNNING", True),
        (85, "2", "RUNNING", False),  # cluster.requeues are used up
        (85, "0", "CANCELLED", False),  # the user has cancelled it
        (143, "1", "RUNNING", True),
        (143, "60", "RUNNING", True),  # counted apart from preemptions
        (86, "0", "RUNNING", True),
        (137, "9", "RUNNING", True),  # many preemptions before do not count
        (2, "0", "RUNNING", False),  # a user's mistake is not repeated
        (1, "0", "RUNNING", False),
    ],
)
def test_which_ends_are_started_again(tmp_path: Path, code: int, attempt: str, state: str, requeued: bool) -> None:
    returned, asked = run_body(tmp_path, code, attempt, state)
    assert returned == code
    assert asked == (["requeue 7"] if requeued else [])
    events = jobs.read_events(tmp_path)
    assert events[0].what == "started" and events[0].number == "7"
    assert events[-1].what == ("finished" if code == 0 else f"failed with exit {code}")


def test_after_three_kills_it_is_given_up(tmp_path: Path) -> None:
    for attempt in range(4):
        (tmp_path / "scontrol").unlink(missing_ok=True)
        _, asked = run_body(tmp_path, 137, str(attempt))
        assert bool(asked) == (attempt < 3)


def test_one_task_of_an_array_requeues_itself_alone(tmp_path: Path) -> None:
    _, asked = run_body(tmp_path, 85, SLURM_ARRAY_JOB_ID="7", SLURM_ARRAY_TASK_ID="2")
    assert asked == ["requeue 7_2"]


def test_scripts_of_a_run_hold_its_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = load_config(["preset=tiny", "cluster=slurm", "cluster.distill_tasks=3", "run_dir=r", "train.steps=9"])
    scripts = jobs.write_scripts(cfg, tmp_path)
    assert list(scripts) == ["distill", GATHER, *cfg.pipeline[1:]]
    text = (tmp_path / "r" / "slurm" / "train.sh").read_text()
    assert "settings=(preset=tiny run_dir=r train.steps=9 cluster.hang_minutes=30.0)" in text
    assert f"cd {tmp_path}" in text and "cluster.name" not in text


def test_no_sbatch_and_a_second_submission_are_user_errors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = load_config(["preset=tiny", "cluster=slurm", f"run_dir={tmp_path}"])
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match="no sbatch"):
        jobs.submit_chain(cfg)
    monkeypatch.setattr(jobs.shutil, "which", lambda name: name)
    append_jsonl(tmp_path / "slurm" / jobs.JOBS_FILE, {"job": "train", "id": "12", "submitted": "2026-01-01T00:00:00"})
    monkeypatch.setattr(jobs, "states", lambda numbers: {"12": ("RUNNING", "None")})
    with pytest.raises(UserError, match=r"still queued or running: train \(12\).*scancel 12"):
        jobs.submit_chain(cfg)


def fake_slurm(folder: Path, refuse: str = "none") -> None:
    """An sbatch that counts its calls from 41 and refuses the script of one job, and an scancel that notes whom."""
    folder.mkdir()
    for name, body in {
        "sbatch": f'grep -q "jetspec-{refuse}$" "${{@: -1}}" && {{ echo "sbatch: error: no such" >&2; exit 1; }}'
        f'\necho "$*" >> {folder}/asked; echo "Submitted batch job $((40 + $(wc -l < {folder}/asked)))"',
        "srun": "exit 1",
        "squeue": "exit 0",
        "scancel": f'echo "$@" >> {folder}/cancelled',
    }.items():
        (folder / name).write_text(f"#!/bin/bash\n{body}\n")
        (folder / name).chmod(0o755)


def test_a_chain_is_submitted_job_after_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    cfg = load_config(["preset=tiny", "cluster=slurm", f"run_dir={tmp_path / 'r'}", "pipeline=[train,export]"])
    records = jobs.submit_chain(cfg)
    assert [(r["job"], r["id"], r["after"]) for r in records] == [("train", "41", None), ("export", "42", "41")]
    first, second = (tmp_path / "bin" / "asked").read_text().splitlines()
    assert "dependency" not in first and second.startswith("--dependency=afterok:41 --kill-on-invalid-dep=yes ")
    # What was handed to Slurm is the script that lies in the run directory.
    handed = tmp_path / "r" / "slurm" / "submitted" / "42_submission.sh"
    assert handed.read_text() == (tmp_path / "r" / "slurm" / "export.sh").read_text()
    assert [record["id"] for record in jobs.read_jobs(cfg.run_dir)] == ["41", "42"]


def test_a_refused_job_takes_the_submitted_ones_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_slurm(tmp_path / "bin", refuse="export")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    cfg = load_config(["preset=tiny", "cluster=slurm", f"run_dir={tmp_path / 'r'}", "pipeline=[train,export]"])
    with pytest.raises(UserError, match=r"refused .*export.sh \(no such\).*sbatch --dependency=afterok:41"):
        jobs.submit_chain(cfg)
    assert (tmp_path / "bin" / "cancelled").read_text().split() == ["41"]


def test_status_shows_states_requeues_and_the_last_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "slurm"
    for job, number in (("distill", "10"), ("train", "11"), ("export", "12")):
        append_jsonl(here / jobs.JOBS_FILE, {"job": job, "id": number, "submitted": "2026-01-01T00:00:00"})
    stamp = "2026-01-01T00:00:05"
    (here / jobs.EVENTS_FILE).write_text(
        f"{stamp} distill 0 10 0 finished\n{stamp} distill 1 101 1 started\n{stamp} distill 2 102 0 finished\n"
        f"{stamp} train - 11 2 failed with exit 2\nhalf a li"
    )
    (here / "logs").mkdir()
    (here / "logs" / "jetspec-train-11.log").write_text("noise\njetspec_train: the disk is full\nsrun: error: task 0\n")
    monkeypatch.setattr(jobs, "states", lambda numbers: {"10_1": ("RUNNING", "None")})
    lines = "\n".join(jobs.job_lines(tmp_path))
    assert "distill         10        RUNNING, 2 finished, 1 requeues" in lines
    assert "failed with exit 2, 2 requeues" in lines and "last error: jetspec_train: the disk is full" in lines
    assert "export          12        never started" in lines
