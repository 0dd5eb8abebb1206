"""The report: ``report.json`` for programs, ``report.html`` for people, ``figures/*.png`` for papers.

``docs/report.schema.json`` is the published schema of the JSON. A key is never removed or given another
meaning without a new ``SCHEMA_VERSION``; new keys may appear at any time. Undefined figures are null.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import PathLike, append_jsonl, atomic_json, atomic_write, make_folder, read_json
from jetspec_train.evaluation.benchmark import PLAIN, SPECULATIVE, PromptRecord
from jetspec_train.evaluation.identity import Comparison
from jetspec_train.evaluation.measures import summarise
from jetspec_train.evaluation.scoring import MEANINGFUL

SCHEMA_VERSION = 1
REPORT, PAGE, RECORDS, FIGURES = "report.json", "report.html", "records.jsonl", "figures"
VERIFICATION = "verification.jsonl"
PASS_RATE_GOAL, WASTE_GOAL = 0.85, 0.15  # the monitors' ranges (METHODS, "Monitoring and quality")
FEW_PROMPTS = 8  # below this an interval over prompts says little


def build_report(
    *,
    records: Sequence[PromptRecord],
    target: Mapping[str, Any],
    draft: Mapping[str, Any],
    training: Mapping[str, Any],
    machine: Mapping[str, Any],
    settings: Mapping[str, Any],
    identity: Comparison | None,
    timed_identity: Comparison,
    cost_curve: Mapping[int, float],
    cost_context: int,
    peak_memory: Mapping[str, Any],
    replay: Sequence[Mapping[str, Any]],
    skipped: Sequence[Mapping[str, Any]],
    empty_domains: Sequence[str],
    contenders: Mapping[str, str],
    commands: Sequence[str],
    versions: Mapping[str, str],
    verification: Mapping[str, Any] | None = None,
    tasks: Mapping[str, Mapping[str, Any]] | None = None,
    curves: Mapping[str, Sequence[Mapping[str, Any]]] | None = None,
    main: str = SPECULATIVE,
    draws: int = 2000,
    seed: int = 0,
) -> dict[str, Any]:
    """Everything that was measured, as one JSON-able object; no figure is computed anywhere else."""
    curve = dict(cost_curve)
    domains: dict[str, Any] = {}
    for name in dict.fromkeys(record.prompt.domain for record in records):
        figures = summarise([r for r in records if r.prompt.domain == name], main, curve, draws=draws, seed=seed)
        task = (tasks or {}).get(name)
        counts = _identity_counts(identity, timed_identity, name)
        domains[name] = {**figures, **counts, "task": None if task is None else dict(task)}
    overall = {**summarise(records, main, curve, draws=draws, seed=seed)}
    overall.update(_identity_counts(identity, timed_identity, None))
    overall["lossless_fp32"] = identity.lossless if identity is not None else None
    report: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "baseline": PLAIN,
        "main": main,
        "target": dict(target),
        "draft": dict(draft),
        "training": dict(training),
        "domains": domains,
        "overall": overall,
        "identity": {
            "float32": identity.to_dict() if identity is not None else None,
            "timed": timed_identity.to_dict(),
        },
        "cost_curve": {
            "context": cost_context,
            "verify_seconds": {str(size): seconds for size, seconds in curve.items()},
            "draft_seconds": (overall["bound"] or {}).get("draft_forward_seconds"),
        }
        if curve
        else None,
        "curves": {name: [dict(point) for point in points] for name, points in (curves or {}).items()},
        "machine": dict(machine),
        "peak_memory_bytes": dict(peak_memory),
        "contenders": dict(contenders),
        "settings": dict(settings),
        "skipped_prompts": [dict(entry) for entry in skipped],
        "empty_domains": list(empty_domains),
        "commands": list(commands),
        "versions": dict(versions),
        "records": [record.to_dict() for record in records],
        "replay": [dict(entry) for entry in replay],
        "verification": None if verification is None else dict(verification),
    }
    report["verdict"] = verdict(report)
    report["caveats"] = caveats(report)
    return report


def _identity_counts(identity: Comparison | None, timed: Comparison, domain: str | None) -> dict[str, Any]:
    """float32 counts under the plain names, the timed data type's beside them; of all domains for None."""
    counts = {}
    for prefix, comparison in (("", identity), ("timed_", timed)):
        if comparison is None:
            compared, identical = 0, 0
        elif domain is None:
            compared, identical = comparison.compared, comparison.identical
        else:
            compared, identical = comparison.by_domain.get(domain, [0, 0])
        counts[f"{prefix}compared_outputs"] = compared
        counts[f"{prefix}identical_outputs"] = identical
    return counts


def speed_word(interval: Sequence[float] | None) -> str:
    """faster | slower | undecided, by the whole interval."""
    if interval is None:
        return "undecided"
    return "faster" if interval[0] > 1 else "slower" if interval[1] < 1 else "undecided"


def verdict(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """The report in a few sentences: ``{state: good | bad | unclear, text}``, the most important first."""
    overall, lines = report["overall"], []
    interval, value = overall["speedup_ci95"], overall["speedup"]
    word = speed_word(interval)
    span = f" (95 % interval {interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
    figure = f"{value:.2f}x plain decoding{span} on {overall['prompts']} held-out prompts" if value else "not measured"
    text = {"faster": "Faster", "slower": "Slower", "undecided": "No clear difference"}[word]
    lines.append(_line({"faster": "good", "slower": "bad", "undecided": "unclear"}[word], f"{text}: {figure}."))
    lines.append(_lossless_line(report))
    tau = overall["acceptance_length"]
    if tau is not None:
        accepted = any(overall["prefix_survival_at"])
        lines.append(
            _line(
                "good" if accepted and tau > 1 else "bad",
                f"Each target forward gives {tau:.2f} tokens."
                if accepted
                else "The draft was never accepted: each target forward gives one token, and drafting only costs.",
            )
        )
    for name, figures in overall["contenders"].items():
        if name in (report["baseline"], report["main"]) or not figures["speedup"] or not value:
            continue
        ratio = value / figures["speedup"]
        state = "good" if ratio > 1.02 else "bad" if ratio < 0.98 else "unclear"
        lines.append(_line(state, f"Against {name} ({figures['speedup']:.2f}x plain decoding): {ratio:.2f}x as fast."))
    lines.extend(_line(*found) for found in verification_verdict(report["verification"]))
    lines.extend(task_verdict(report))
    slower = [name for name, figures in report["domains"].items() if speed_word(figures["speedup_ci95"]) == "slower"]
    if slower:
        lines.append(_line("bad", f"Slower than plain decoding in: {', '.join(slower)}."))
    if report["machine"]["busy"]:
        share = 100 * report["machine"]["other_processes_share"]
        lines.append(
            _line(
                "unclear",
                f"The machine was busy: other processes used {share:.0f} % of its cores during the timing. "
                "Repeat the run on an idle machine before quoting a figure.",
            )
        )
    return lines


def verification_verdict(found: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """What the report says of the verifier: against scores that need no training, and about skipping checks."""
    if found is None or found["auroc"] is None or found["auroc_gain"]["difference"] is None:
        return []
    gain = found["auroc_gain"]
    interval = gain["ci95"]
    state = "unclear" if interval is None else "good" if interval[0] > 0 else "bad" if interval[1] < 0 else "unclear"
    span = "" if interval is None else f" (95 % interval {interval[0]:+.3f} to {interval[1]:+.3f})"
    lines = [
        (
            state,
            f"The verifier ranks drafted tokens with AUROC {found['auroc']:.3f}, {gain['difference']:+.3f} against "
            f"{gain['baseline'].replace('_', ' ')}, the best score without training{span}.",
        )
    ]
    if found["screening_accuracy"] is not None:
        right, policy = found["screening_accuracy"], found["policy"]
        kept = "kept" if policy["policy"] == "trusting" else "still checked"
        lines.append(
            (
                "good" if (found["screening_lower_bound"] or 0) >= found["screening_goal"] else "unclear",
                f"{100 * right:.1f} % of {found['screened_stages']} stages deferred by the {policy['policy']} policy "
                f"(and {kept}) are the target's own; one-sided 95 % bound "
                f"{100 * (found['screening_lower_bound'] or 0):.1f} %.",
            )
        )
    return lines


def task_verdict(report: Mapping[str, Any]) -> list[dict[str, str]]:
    """Whether the main contender's answers are as often right as plain decoding's, by domain."""
    lines = []
    for name, figures in report["domains"].items():
        task = figures.get("task")
        if task is None or report["main"] not in task["contenders"]:
            continue
        plain, main = task["contenders"][report["baseline"]], task["contenders"][report["main"]]
        shares = f"{main['right']} of {main['scored']} answers right, plain decoding {plain['right']}"
        if not task["meaningful"]:
            text = "too few right answers of plain decoding for a comparison"
            lines.append(_line("unclear", f"{name}: {shares}; {text} (below {100 * MEANINGFUL:.0f} %)."))
            continue
        real = main["p_value"] < 0.05
        state = "bad" if real and main["lost"] > main["gained"] else "good"
        found = "a real difference" if real else "no real difference"
        lines.append(
            _line(
                state,
                f"{name}: {shares}; {main['lost']} lost and {main['gained']} gained, {found} "
                f"(exact McNemar test, p = {main['p_value']:.2f}).",
            )
        )
    return lines


def _line(state: str, text: str) -> dict[str, str]:
    return {"state": state, "text": text}


def _lossless_line(report: Mapping[str, Any]) -> dict[str, str]:
    """What the float32 identity check found."""
    check = report["identity"]["float32"]
    if check is None or not check["compared_outputs"]:
        return _line("unclear", "Losslessness was not checked (evaluate.fp32_prompts=0).")
    equal, compared = check["identical_outputs"], check["compared_outputs"]
    failures = [d for d in check["divergences"] if not d["excused"]]
    ties = len(check["divergences"]) - len(failures)
    if failures:
        return _line("bad", f"NOT lossless: {len(failures)} of {compared} float32 outputs differ from plain decoding.")
    tied = f" ({ties} part at an exact tie of the target, margin below {check['tie_below']:g})" if ties else ""
    return _line("good", f"Lossless: {equal} of {compared} float32 outputs are token-identical{tied}.")


def caveats(report: Mapping[str, Any]) -> list[str]:
    """What a reader must know before quoting a figure."""
    notes = []
    overall, timed = report["overall"], report["identity"]["timed"]
    if overall["prompts"] < FEW_PROMPTS:
        notes.append(f"Only {overall['prompts']} prompts were measured; the intervals are wide or missing.")
    if report["skipped_prompts"]:
        notes.append(f"{len(report['skipped_prompts'])} prompts did not fit the context and were skipped.")
    if report["empty_domains"]:
        notes.append(f"No prompt was left to measure in: {', '.join(report['empty_domains'])}.")
    if timed["dtype"] != "float32" and timed["divergences"]:
        margins = [d["margin"] for d in timed["divergences"] if d["margin"] is not None]
        largest = f", largest margin {max(margins):.3f}" if margins else ""
        notes.append(
            f"In {timed['dtype']} {len(timed['divergences'])} of {timed['compared_outputs']} outputs part from plain "
            f"decoding through rounding{largest}; speeds are therefore compared per token."
        )
    waste, passed = overall["wasted_compute"], overall["pass_rate"]
    if waste is not None and (waste > WASTE_GOAL or (passed is not None and passed < PASS_RATE_GOAL)):
        notes.append(
            f"{100 * waste:.0f} % of the target's tokens were spent on rejected drafts (monitor: at most "
            f"{100 * WASTE_GOAL:.0f} %), pass rate {100 * (passed or 0):.0f} % (monitor: at least "
            f"{100 * PASS_RATE_GOAL:.0f} %). A tree spends most nodes by design; the cost in time is what counts."
        )
    host = overall["time_share"]["host"]
    if host is not None and host > 0.1:
        notes.append(f"Host work takes {100 * host:.0f} % of the decode time; below 10 % is expected.")
    if report["machine"].get("accelerator") is None:
        notes.append("Measured on a CPU. Nothing here says what an accelerator would show.")
    return notes


def write_report(
    folder: PathLike,
    report: Mapping[str, Any],
    records: Sequence[PromptRecord] = (),
    verification: Sequence[Mapping[str, Any]] = (),
) -> list[Path]:
    """Write JSON, page, figures and raw records into ``folder``; returns the files, for the manifest.

    ``verification``: the raw lines behind the section of that name.
    """
    from jetspec_train.evaluation.figures import draw_all
    from jetspec_train.evaluation.page import render_page

    root = make_folder(folder)
    figures = draw_all(dict(report))
    shutil.rmtree(root / FIGURES, ignore_errors=True)
    written = []
    for name, figure in figures.items():
        written.append(atomic_write(root / FIGURES / f"{name}.png", figure["png"]))
    raw = root / RECORDS
    raw.unlink(missing_ok=True)
    for record in records:
        append_jsonl(raw, raw_record(record))
    if records:
        written.append(raw)
    (root / VERIFICATION).unlink(missing_ok=True)
    if verification:
        text = "".join(json.dumps(line, allow_nan=False) + "\n" for line in verification)
        written.append(atomic_write(root / VERIFICATION, text))
    written.append(atomic_json(root / REPORT, report))
    written.append(atomic_write(root / PAGE, render_page(report, figures)))
    return written


def summary_table(report: Mapping[str, Any]) -> str:
    """Plain against speculative decoding by domain, for a terminal."""
    lines = [["domain", "prompts", "plain tokens/s", "speculative", "speedup", "95 % interval", "acceptance length"]]
    scopes = [*report["domains"].items()]
    if len(scopes) > 1:
        scopes.append(("all", report["overall"]))
    for name, figures in scopes:
        span = figures["speedup_ci95"]
        lines.append(
            [
                name,
                str(figures["prompts"]),
                format_number(figures["baseline_tokens_per_second"], 1),
                format_number(figures["tokens_per_second"], 1),
                format_number(figures["speedup"]),
                f"{span[0]:.2f} to {span[1]:.2f}" if span else "-",
                format_number(figures["acceptance_length"]),
            ]
        )
    for name, figures in report["overall"]["contenders"].items():
        if name not in (report["baseline"], report["main"]):
            rate, span = format_number(figures["tokens_per_second"], 1), figures["speedup_ci95"]
            lines.append(
                [
                    f"({name})",
                    str(figures["prompts"]),
                    "",
                    rate,
                    format_number(figures["speedup"]),
                    f"{span[0]:.2f} to {span[1]:.2f}" if span else "-",
                    format_number(figures["acceptance_length"]),
                ]
            )
    return text_table(lines)


def format_number(value: float | None, digits: int = 2) -> str:
    """A figure for a terminal; a dash where it is undefined."""
    return "-" if value is None else f"{value:.{digits}f}"


def text_table(lines: Sequence[Sequence[str]]) -> str:
    """Columns aligned with blanks; the first line is underlined."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    rows = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in lines]
    return "\n".join([rows[0], "-" * len(rows[0]), *rows[1:]])


def raw_record(record: PromptRecord) -> dict[str, Any]:
    """One prompt with the tokens and arrival times of every contender: what the figures can be recomputed from."""
    whole = record.to_dict()
    for name, run in record.runs.items():
        whole["runs"][name] |= {
            "output": run.tokens,
            "burst_seconds": [round(moment, 6) for moment in run.burst_seconds],
            "burst_tokens": run.burst_tokens,
        }
    return {**whole, "prompt": record.prompt.tokens}


def load_report(path: PathLike) -> dict[str, Any]:
    """Read a report; UserError for a file that is no report or has another schema version."""
    file = Path(path)
    if file.is_dir():
        file = file / REPORT
    report = read_json(file, "The report")
    if not isinstance(report, dict) or "schema_version" not in report:
        raise UserError(f"{file} is not a report of stage=evaluate (it has no schema_version).")
    if report["schema_version"] != SCHEMA_VERSION:
        raise UserError(
            f"{file} has schema version {report['schema_version']!r}; this version of jetspec-train reads version "
            f"{SCHEMA_VERSION}. Run stage=evaluate again, or use the version that wrote the report."
        )
    return report
