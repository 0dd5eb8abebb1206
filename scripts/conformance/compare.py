"""Puts our own figures and those of the other engines side by side; exit status 1 if anything differs.

python scripts/conformance/compare.py --ours ours.json --speculators speculators.json --vllm FOLDER --out FILE.md
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", type=Path, required=True)
    parser.add_argument("--speculators", type=Path)
    parser.add_argument("--vllm", type=Path, help="folder with one JSON file per draft")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    ours = json.loads(options.ours.read_text())
    failures: list[str] = []
    lines = []
    if options.speculators and options.speculators.is_file():
        lines += speculators_table(json.loads(options.speculators.read_text()), failures)
    if options.vllm and options.vllm.is_dir():
        lines += vllm_table(ours, options.vllm, failures)
    for name, facts in ours["drafts"].items():
        if not facts["identical"]:
            failures.append(f"{name}: our own speculative text differs from plain greedy")
    text = "\n".join(lines) + "\n"
    if options.out:
        options.out.write_text(text)
    print(text)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    raise SystemExit(1 if failures else 0)


def speculators_table(results: dict[str, dict[str, Any]], failures: list[str]) -> list[str]:
    """One line per folder that the speculators package loaded."""
    lines = [
        "| folder | loaded as | config kept | names and shapes | values | forward (loss) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, found in results.items():
        names = not (found["missing"] or found["unknown"] or found["shapes"])
        ran = found["loss"] == found["loss"] and abs(found["loss"]) < float("inf")
        checks = (not found["config_changed"], names, not found["values"])
        if not all(checks) or not ran:
            failures.append(f"speculators, {name}: {found}")
        shown = " | ".join("same" if check else "DIFFERENT" for check in checks)
        lines.append(f"| {name} | {found['class']} | {shown} | {found['loss']} |")
    return [*lines, ""]


def vllm_table(ours: dict[str, Any], folder: Path, failures: list[str]) -> list[str]:
    """One line per draft that vLLM served: text against plain greedy, counters against our own chain."""
    lines = [
        "| folder | method | text = plain greedy | rounds vLLM / ours | accepted per position, vLLM | ours |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for path in sorted(folder.glob("*.json")):
        name = path.stem.replace("--", "/")
        found, facts = json.loads(path.read_text()), ours["drafts"][name]
        same_text = found["texts"] == ours["texts"]
        same_counts = (found["drafts"], found["accepted"]) == (facts["drafts"], facts["accepted"])
        if not same_text or not same_counts:
            failures.append(f"vLLM, {name}: text {'same' if same_text else 'differs'}, counters {found['accepted']}")
        lines.append(
            f"| {name} | {found['method']} | {'yes' if same_text else 'NO'} | {found['drafts']} / {facts['drafts']} | "
            f"{' '.join(map(str, found['accepted']))} | {' '.join(map(str, facts['accepted']))} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    main()
