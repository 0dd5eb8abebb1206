"""Submitting a chain of jobs, and what has become of them.

Each stage is one job (distill: an array and a job that merges it) that starts when the one before has succeeded
(``afterok``). A job whose predecessor failed never starts: Slurm drops it (``--kill-on-invalid-dep``). The scripts lie
in ``run_dir/slurm/`` and are submitted from there through submitit, so that what ran can be submitted again by hand,
with ``sbatch``.
"""

from __future__ import annotations

import contextlib
import shlex
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import append_jsonl, atomic_write, make_folder, read_jsonl
from jetspec_train.cluster.scripts import GATHER, batch_script, interpreter
from jetspec_train.cluster.submission import ScriptExecutor, conditions
from jetspec_train.cluster.words import words_of
from jetspec_train.config import Config

JOBS_FILE, EVENTS_FILE = "jobs.jsonl", "events.log"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL")


@dataclass(frozen=True)
class Event:
    """A line that a batch script wrote about itself. ``task`` is "-" outside an array."""

    when: str
    job: str
    task: str
    number: str
    attempt: int
    what: str


def job_names(stages: Sequence[str]) -> list[str]:
    """The jobs of a pipeline, in order."""
    names = []
    for stage in stages:
        names += ["distill", GATHER] if stage == "distill" else [stage]
    return names


def write_scripts(cfg: Config, folder: Path) -> dict[str, Path]:
    """``{job: script}`` for the stages of ``cfg.pipeline``, written into ``run_dir/slurm``; nothing is submitted."""
    here = make_folder(Path(cfg.run_dir) / "slurm")
    make_folder(here / "logs")
    left_out = ("stage=", "shard=", "plan=", "pipeline=", "cluster.")
    words = [word for word in words_of(cfg) if not word.startswith(left_out)]
    # The watchdog is the one setting of this section that the running stage itself reads.
    words.append(f"cluster.hang_minutes={cfg.cluster.hang_minutes}")
    scripts = {}
    for job in job_names(cfg.pipeline):
        text = batch_script(
            job,
            cfg.cluster,
            words=words,
            run_dir=cfg.run_dir,
            folder=str(folder),
            python=cfg.cluster.python or interpreter(),
        )
        scripts[job] = atomic_write(here / f"{job}.sh", text)
        scripts[job].chmod(0o755)
    return scripts


def submit_chain(cfg: Config) -> list[dict[str, Any]]:
    """Submit the pipeline; returns one record per job (``job``, ``id``, ``script``, ``after``).

    Raises UserError without sbatch, while jobs of this run are still queued or running, and when Slurm refuses a job
    (those already submitted are then cancelled).
    """
    if shutil.which("sbatch") is None or shutil.which("srun") is None:
        raise UserError(
            "cluster=slurm: there is no sbatch (or no srun) on this machine. Run this on the cluster's login node."
        )
    here = Path(cfg.run_dir) / "slurm"
    alive = [record for record in read_jobs(cfg.run_dir) if states([str(record["id"])])]
    if alive:
        listed = ", ".join(f"{record['job']} ({record['id']})" for record in alive)
        raise UserError(
            f"Jobs of {cfg.run_dir} are still queued or running: {listed}. Wait for them (stage=status), or cancel "
            f"them first: scancel {' '.join(str(record['id']) for record in alive)}"
        )
    scripts = write_scripts(cfg, Path.cwd())
    executor = ScriptExecutor(make_folder(here / "submitted"))
    records: list[dict[str, Any]] = []
    for job, script in scripts.items():
        after = records[-1]["id"] if records else None
        try:
            number = _submit(executor, script, after)
        except UserError:
            for record in records:
                subprocess.run(["scancel", record["id"]], capture_output=True)
            raise
        records.append({"job": job, "id": number, "script": str(script), "after": after, "submitted": _now()})
        append_jsonl(here / JOBS_FILE, records[-1])
    return records


def _submit(executor: ScriptExecutor, script: Path, after: str | None) -> str:
    """Submit one script; returns the job's number."""
    from submitit.core.utils import FailedJobError, FailedSubmissionError

    try:
        return executor.submit_script(script, after)
    except (FailedJobError, FailedSubmissionError) as error:
        command = shlex.join(["sbatch", *conditions(after), str(script)])
        raise UserError(
            f"Slurm refused {script} ({str(error).strip().removeprefix('sbatch: error: ')}). Check the cluster.* "
            f"settings; the command was: {command}"
        ) from error


def read_jobs(run_dir: str | Path) -> list[dict[str, Any]]:
    """The jobs that were submitted for a run, the latest of each name."""
    path = Path(run_dir) / "slurm" / JOBS_FILE
    latest = {str(record["job"]): record for record in (read_jsonl(path) if path.is_file() else [])}
    return list(latest.values())


def states(numbers: Sequence[str]) -> dict[str, tuple[str, str]]:
    """``{number or number_task: (state, reason)}`` of the jobs that are still in the queue or running."""
    if not numbers:
        return {}
    command = ["squeue", "-h", "-r", "-j", ",".join(numbers), "-o", "%i|%T|%r"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return {}
    found = {}
    for line in answer.stdout.splitlines():
        number, state, reason = [*line.split("|"), "", ""][:3]
        if state not in ENDED and state != "COMPLETING":
            found[number] = (state, reason)
    return found


def read_events(run_dir: str | Path) -> list[Event]:
    """What the run's batch scripts noted, in order."""
    try:
        lines = (Path(run_dir) / "slurm" / EVENTS_FILE).read_text().splitlines()
    except OSError:
        return []
    events = []
    for line in lines:
        parts = line.split(" ", 5)
        if len(parts) == 6:
            with contextlib.suppress(ValueError):
                when, job, task, number, attempt, what = parts
                events.append(Event(when, job, task, number, int(attempt), what))
    return events


def job_lines(run_dir: str | Path) -> list[str]:
    """One line per job for ``stage=status``: its state, attempts, and for a failed one the last line of its log."""
    records = read_jobs(run_dir)
    if not records:
        return []
    alive = states([str(record["id"]) for record in records])
    events = read_events(run_dir)
    lines = ["jobs:"]
    for record in records:
        number, job = str(record["id"]), str(record["job"])
        own = {key: value for key, value in alive.items() if key.split("_")[0] == number}
        latest = {event.task: event for event in events if event.job == job and event.when >= record["submitted"]}
        parts = _counted([state if reason in ("None", "") else f"{state} ({reason})" for state, reason in own.values()])
        # A task that Slurm still holds has said what it is about; the others are judged by their last word.
        running = {key.split("_")[1] if "_" in key else "-" for key in own}
        ended = [event.what for task, event in latest.items() if task not in running]
        parts += _counted(ended)
        if not parts:
            parts = ["ended without a word" if latest else "never started (cancelled, or a job before it failed)"]
        again = sum(event.attempt for event in latest.values())
        if again:
            parts.append(f"{again} requeues")
        lines.append(f"  {job:<15} {number:<9} {', '.join(parts)}")
        if any(what.startswith("failed") for what in ended):
            lines += [f"    {line}" for line in _last_error(Path(run_dir) / "slurm" / "logs", job, number)]
    return lines


def _counted(words: Sequence[str]) -> list[str]:
    return [word if words.count(word) == 1 else f"{words.count(word)} {word}" for word in dict.fromkeys(words)]


def _last_error(logs: Path, job: str, number: str) -> list[str]:
    """The last telling line of the newest log of a job, and where it is."""
    found = sorted(logs.glob(f"jetspec-{job}-{number}*.log"), key=lambda path: path.stat().st_mtime)
    telling: list[tuple[Path, str]] = []
    for path in found:
        lines = [line.strip() for line in path.read_text(errors="replace").splitlines() if line.strip()]
        ours = [line for line in lines if line.startswith("jetspec_train:") or "Error" in line or "HANG" in line]
        if ours or lines:
            telling.append((path, (ours or lines)[-1]))
    if not telling:
        return []
    path, text = telling[-1]
    return [f"last error: {text[:300]}", f"log: {path}"]


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S")
