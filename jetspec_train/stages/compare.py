"""stage=compare: two evaluation reports, prompt by prompt. ``reports=[a.json,b.json]``"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json
from jetspec_train.config import Config


def run(cfg: Config) -> None:
    from jetspec_train.evaluation.compare import compare_reports, comparison_table
    from jetspec_train.evaluation.report import load_report

    paths = report_paths(cfg)
    first, second = (load_report(path) for path in paths)
    result = compare_reports(first, second, names=[str(path) for path in paths], draws=cfg.evaluate.bootstrap)
    print(f"first:  {paths[0]}\nsecond: {paths[1]}")
    print(f"{result['paired_prompts']} prompts in both; left out: {result['unpaired_prompts']}\n")
    print(comparison_table(result))
    for note in result["caveats"]:
        print(f"\nNote: {note}")
    written = atomic_json(Path(cfg.run_dir) / "compare" / "compare.json", result)
    print(f"\nWritten: {written}")


def plan(cfg: Config) -> dict[str, Any]:
    """What would be compared."""
    return {
        "stage": "compare",
        "reports": [str(path) for path in report_paths(cfg)],
        "writes": str(Path(cfg.run_dir) / "compare" / "compare.json"),
    }


def report_paths(cfg: Config) -> list[Path]:
    """The two reports; UserError for another number of them."""
    if len(cfg.reports) != 2:
        raise UserError(
            f"stage=compare needs two reports, got {len(cfg.reports)}: reports=[runs/a/evaluate/report.json,"
            "runs/b/evaluate/report.json]"
        )
    return [Path(path) for path in cfg.reports]
