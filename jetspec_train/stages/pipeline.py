"""Run the stages of ``cfg.pipeline`` in order and end with what the user came for: is it faster?

A stage that has finished with the same settings says so and returns at once; the first one that
fails ends the pipeline. The same command continues after any stop.
"""

from __future__ import annotations

import dataclasses
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.files import make_folder, read_json
from jetspec_train.config import Config
from jetspec_train.stages import load_stage


def plan(cfg: Config) -> dict[str, Any]:
    """The plans of all stages, in order."""
    return {name: load_stage(name).plan(dataclasses.replace(cfg, stage=name)) for name in cfg.pipeline}


def run(cfg: Config) -> None:
    """Run every stage; raises whatever the first failing one raises."""
    make_folder(cfg.run_dir)
    for number, name in enumerate(cfg.pipeline, start=1):
        print(f"\n[{number}/{len(cfg.pipeline)}] {name}", flush=True)
        begun = time.monotonic()
        load_stage(name).run(dataclasses.replace(cfg, stage=name))
        print(f"[{number}/{len(cfg.pipeline)}] {name}: {readable_seconds(time.monotonic() - begun)}", flush=True)
    report = Path(cfg.run_dir) / "evaluate" / "report.json"
    if "evaluate" in cfg.pipeline and report.is_file():
        print("\n" + summary_table(read_json(report, "The report")))
        print(f"\nreport: {report.with_suffix('.html')}")
    bundle = Path(cfg.run_dir) / "export" / "bundle"
    if bundle.is_dir():
        print(f"try it: python -m jetspec_train stage=generate {shlex.quote(f'bundle={bundle}')} prompt='...'")


def readable_seconds(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def summary_table(report: Mapping[str, Any]) -> str:
    """Plain against speculative decoding per domain and overall, from ``report.json``.

    Tokens/s, speedup with its 95 % interval, acceptance length; a figure that the report lacks is
    shown as "-".
    """
    header = ["", "plain tokens/s", "speculative tokens/s", "speedup", "95 % interval", "acceptance length"]
    rows = [_row(name, figures) for name, figures in report.get("domains", {}).items()]
    rows.append(_row("overall", report.get("overall", {})))
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = []
    for index, row in enumerate([header, *rows]):
        if index in (1, len(rows)):
            lines.append("  ".join("-" * width for width in widths))
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(name: str, figures: Mapping[str, Any]) -> list[str]:
    interval = figures.get("speedup_ci95")
    return [
        name,
        _number(figures.get("baseline_tokens_per_second"), ".1f"),
        _number(figures.get("tokens_per_second"), ".1f"),
        _number(figures.get("speedup"), ".2f", "x"),
        f"{interval[0]:.2f} - {interval[1]:.2f}" if interval and None not in interval else "-",
        _number(figures.get("acceptance_length"), ".2f"),
    ]


def _number(value: Any, shape: str, unit: str = "") -> str:
    return f"{value:{shape}}{unit}" if isinstance(value, int | float) else "-"
