"""How far has this run come? Reads a run directory; changes nothing, loads nothing heavy."""

from __future__ import annotations

import time
from datetime import datetime
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import read_json, read_jsonl, readable_bytes, readable_seconds
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import Config

RECENT_SECONDS = 180  # a file that changed so recently suggests that the stage is running


def plan(cfg: Config) -> dict[str, Any]:
    """What would be looked at."""
    return {"run_dir": cfg.run_dir, "stages": list(cfg.pipeline)}


def run(cfg: Config) -> None:
    """Print one line per stage, then the latest metrics and results. Raises UserError without a run there."""
    root = Path(cfg.run_dir)
    if not root.is_dir():
        raise UserError(f"run_dir={root} does not exist. Name the folder of a run.")
    for line in report_lines(root, list(cfg.pipeline)):
        print(line)


def report_lines(root: Path, stages: list[str]) -> list[str]:
    """The lines that ``stage=status`` prints for a run directory."""
    found = sorted(p.name for p in root.iterdir() if p.is_dir() and p.name != "slurm" and p.name[0] != ".")
    names = stages + [name for name in found if name not in stages]
    lines = [f"run directory {root}"]
    for name in names:
        state, details = stage_state(root / name)
        lines.append(f"  {name:<10} {state:<12} {details}".rstrip())
    lines += progress_lines(root)
    metrics = last_metrics(root / "train" / "metrics.jsonl")
    for kind, record in metrics.items():
        shown = ", ".join(f"{key} {_shown(value)}" for key, value in record.items() if _is_plain(value))
        lines.append(f"  last {kind} metrics: {shown}")
    report = root / "evaluate" / "report.json"
    if report.is_file():
        from jetspec_train.evaluation.report import load_report, summary_table

        lines += ["", summary_table(load_report(report)), f"report: {report.with_suffix('.html')}"]
    return lines


def progress_lines(root: Path) -> list[str]:
    """Jobs of a cluster, and speed and time left of a training that goes on."""
    from jetspec_train.cluster.jobs import job_lines

    lines = [f"  {line}" for line in job_lines(root)]
    last = last_metrics(root / "train" / "metrics.jsonl").get("train")
    if last and last.get("total_steps") and last["step"] < last["total_steps"]:
        step, total, seconds = last["step"], last["total_steps"], last["seconds"]
        left = readable_seconds(seconds / step * (total - step))
        lines.append(
            f"  training: step {step:,} of {total:,} ({step / total:.0%}), {last['tokens_per_second']:,.0f} tokens/s, "
            f"{left} left while it runs"
        )
    for place in sorted((root / "train" / "ranks").glob("rank-*.json")):
        facts = read_json(place, "The place of a rank")
        ago = time.time() - facts["written"]
        if ago < RECENT_SECONDS:
            lines.append(f"    rank {facts['rank']} on {facts['host']}: {facts['place']}, seen {ago:.0f} s ago")
    return lines


def stage_state(folder: Path) -> tuple[str, str]:
    """('finished' | 'running?' | 'begun' | 'not begun', details) of one stage's folder."""
    if not folder.is_dir() or not any(folder.iterdir()):
        return "not begun", ""
    files = [p for p in folder.rglob("*") if p.is_file()]
    size = readable_bytes(sum(p.stat().st_size for p in files))
    manifest = read_manifest(folder)
    if manifest is not None:
        counts = ", ".join(f"{key} {_shown(value)}" for key, value in manifest.counts.items() if _is_plain(value))
        parts = [f"in {readable_seconds(manifest.seconds)}", size, counts, manifest.created]
        return "finished", "; ".join(part for part in parts if part)
    newest = max((p.stat().st_mtime for p in files), default=0.0)
    age = time.time() - newest
    progress = _progress(folder)
    seen = f"last written {datetime.fromtimestamp(newest).isoformat(' ', 'seconds')}" if files else ""
    details = "; ".join(part for part in (progress, size, seen) if part)
    return ("running?" if age < RECENT_SECONDS else "begun"), details


def _progress(folder: Path) -> str:
    """What an unfinished stage has on disk, counted by its own kind of output."""
    checkpoints = sorted(p.name for p in (folder / "checkpoints").glob("step-*") if (p / "manifest.json").is_file())
    if checkpoints:
        return f"{len(checkpoints)} checkpoints, newest {checkpoints[-1]}"
    shards = list(folder.glob("*.parquet"))
    parts = [path for path in folder.glob("parts/shard-*/**/*.parquet") if path.is_file()]
    found = []
    if shards:
        found.append(f"{sum(_parquet_rows(p) for p in shards):,} samples in {len(shards)} files")
    if parts:
        written = sorted(path.stat().st_mtime for path in parts)
        rows, minutes = sum(_parquet_rows(p) for p in parts), (written[-1] - written[0]) / 60
        # The first part's rows were made before its time stamp, so they do not count towards the speed.
        rate = f", {rows * (1 - 1 / len(parts)) / minutes:,.0f} a minute" if minutes > 0.5 and len(parts) > 2 else ""
        found.append(f"{rows:,} answers of unfinished shards{rate}")
    return "; ".join(found)


def _parquet_rows(path: Path) -> int:
    import pyarrow.parquet

    try:
        return pyarrow.parquet.read_metadata(path).num_rows
    except (OSError, ValueError):  # being written right now, or damaged: status never fails because of it
        return 0


def last_metrics(path: Path) -> dict[str, dict[str, Any]]:
    """The newest record of each kind in ``metrics.jsonl`` ('train', 'evaluation')."""
    newest: dict[str, dict[str, Any]] = {}
    for record in read_jsonl(path):
        if isinstance(record, dict):
            newest[str(record.get("kind", "train"))] = record
    return newest


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _shown(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"
