"""Two reports, prompt by prompt: what changed, and is the change real?

Only prompts that both reports measured (same domain, same tokens) are compared, so a difference
between sets of prompts cannot look like progress. A difference is called real when the whole 95 %
interval of the paired bootstrap lies on one side of "no change".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_train.artifacts.errors import UserError
from jetspec_train.evaluation.report import format_number, text_table
from jetspec_train.evaluation.statistics import interval_of, resample

SCHEMA_VERSION = 1


def pair_records(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Records of the same prompt in both reports, in the order of the first."""
    other = {(record["domain"], record["prompt_hash"]): record for record in second["records"]}
    pairs = []
    for record in first["records"]:
        match = other.get((record["domain"], record["prompt_hash"]))
        if match is not None:
            pairs.append((record, match))
    return pairs


def _sums(records: Sequence[Mapping[str, Any]], name: str) -> dict[str, np.ndarray]:
    """Per-prompt sums of one contender, from which every ratio is made."""
    keys = ("seconds", "tokens", "decoded", "target_forwards")
    return {key: np.array([float(record["runs"][name][key]) for record in records]) for key in keys}


def _measure(name: str, plain: dict[str, np.ndarray], run: dict[str, np.ndarray], weights: np.ndarray) -> np.ndarray:
    """One measure for each row of ``weights [draws, prompts]``."""

    def total(key: str, of: dict[str, np.ndarray]) -> np.ndarray:
        return weights @ of[key]

    with np.errstate(divide="ignore", invalid="ignore"):
        if name == "tokens_per_second":
            return total("tokens", run) / total("seconds", run)
        if name == "acceptance_length":
            return total("decoded", run) / total("target_forwards", run)
        return (total("seconds", plain) / total("tokens", plain)) / (total("seconds", run) / total("tokens", run))


MEASURES = ("speedup", "acceptance_length", "tokens_per_second")


def compare_reports(
    first: Mapping[str, Any], second: Mapping[str, Any], *, names: Sequence[str], draws: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """Paired comparison of two reports; ``names`` are what the result calls them.

    Each row gives both values, the ratio second / first with its 95 % interval, and the verdict: higher |
    lower | no real difference. Raises UserError where the two share no prompt.
    """
    pairs = pair_records(first, second)
    if not pairs:
        raise UserError(
            f"{names[0]} and {names[1]} share no prompt, so nothing can be paired. Evaluate both with the same "
            "recipe, template and evaluate.prompts."
        )
    rows = []
    domains = list(dict.fromkeys(a["domain"] for a, _ in pairs))
    groups = [("all", pairs)] + (
        [(d, [p for p in pairs if p[0]["domain"] == d]) for d in domains] if domains[1:] else []
    )
    for label, group in groups:
        for measure in MEASURES:
            rows.append(_row(label, measure, group, first, second, draws=draws, seed=seed))
    return {
        "schema_version": SCHEMA_VERSION,
        "reports": list(names),
        "paired_prompts": len(pairs),
        "unpaired_prompts": [len(first["records"]) - len(pairs), len(second["records"]) - len(pairs)],
        "caveats": comparability(first, second),
        "rows": rows,
    }


def _row(
    label: str,
    measure: str,
    pairs: Sequence[tuple[dict[str, Any], dict[str, Any]]],
    first: Mapping[str, Any],
    second: Mapping[str, Any],
    *,
    draws: int,
    seed: int,
) -> dict[str, Any]:
    sides = []
    for index, report in enumerate((first, second)):
        records = [pair[index] for pair in pairs]
        sides.append((_sums(records, report["baseline"]), _sums(records, report["main"])))
    weights, degrees = resample([pair[0]["domain"] for pair in pairs], draws, seed)
    once = np.ones((1, len(pairs)))
    values = [_finite(_measure(measure, *side, once)[0]) for side in sides]
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = _measure(measure, *sides[1], weights) / _measure(measure, *sides[0], weights)
    low, high = interval_of(samples, degrees)
    if low is None or high is None:
        verdict = "too few prompts to tell"
    else:
        verdict = "higher" if low > 1 else "lower" if high < 1 else "no real difference"
    return {
        "domain": label,
        "measure": measure,
        "prompts": len(pairs),
        "first": values[0],
        "second": values[1],
        "ratio": values[1] / values[0] if values[0] and values[1] is not None else None,
        "ratio_ci95": None if low is None or high is None else [low, high],
        "verdict": verdict,
        "real": verdict in ("higher", "lower"),
    }


def _finite(value: float) -> float | None:
    return float(value) if np.isfinite(value) else None


def comparability(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """What differs between the two runs besides what one wants to compare."""
    notes = []
    for path, text in (
        (("target", "hash"), "The targets differ, so acceptance and speed compare two different tasks."),
        (("machine", "processor"), "The machines differ: compare speedups, not tokens per second."),
        (("machine", "accelerator"), "The accelerators differ: compare speedups, not tokens per second."),
        (("machine", "threads"), "The numbers of threads differ: compare speedups, not tokens per second."),
        (("machine", "dtype"), "The data types differ."),
        (("settings", "evaluate", "max_new_tokens"), "The limits on new tokens differ."),
        (("settings", "decoding", "sampling"), "The sampling settings differ."),
    ):
        values = []
        for report in (first, second):
            value: Any = report
            for key in path:
                value = value.get(key) if isinstance(value, Mapping) else None
            values.append(value)
        if values[0] != values[1]:
            notes.append(f"{text} ({'.'.join(path)}: {values[0]} and {values[1]})")
    for report, which in ((first, "first"), (second, "second")):
        if report["machine"].get("busy"):
            notes.append(f"The machine was busy during the {which} run; its times are uncertain.")
    return notes


def comparison_table(result: Mapping[str, Any]) -> str:
    """The comparison as text for a terminal."""
    header = ["domain", "measure", "first", "second", "ratio", "95 % interval", "verdict"]
    lines = [header]
    for row in result["rows"]:
        span = row["ratio_ci95"]
        lines.append(
            [
                row["domain"],
                row["measure"].replace("_", " "),
                format_number(row["first"]),
                format_number(row["second"]),
                format_number(row["ratio"], 3),
                f"{span[0]:.3f} to {span[1]:.3f}" if span else "-",
                row["verdict"],
            ]
        )
    return text_table(lines)
