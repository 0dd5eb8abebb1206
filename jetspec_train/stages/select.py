"""stage=select: which of the target's answers are worth training on, and why.

Reads the samples of ``run_dir/distill``, writes ``run_dir/select/``: ``selection.parquet`` (every sample with all its
signals, score and fate), ``summary.json``, ``summary.html`` and the manifest. Nothing is deleted: the selection is a
list of ids that stage=train honours when it is there. Repeatable: the same data and settings give the same list.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, make_folder
from jetspec_train.artifacts.manifest import is_current, read_manifest, require_manifest, verify_outputs, write_manifest
from jetspec_train.config import Config

if TYPE_CHECKING:
    import numpy as np

STAGE = "select"
EXTREMES = 20  # samples of highest and lowest score shown in the summary
_COLUMNS = ["id", "domain", "split", "answer", "prompt_tokens", "answer_tokens", "logprobs", "entropies", "margins"]


def plan(cfg: Config) -> dict[str, Any]:
    """What would be selected from; reads manifests only."""
    distill = read_manifest(Path(cfg.run_dir) / "distill")
    return {
        "stage": STAGE,
        "data": dict(distill.counts) if distill else f"{cfg.run_dir}/distill has not finished yet",
        "select": asdict(cfg.select),
        "writes": str(Path(cfg.run_dir) / STAGE),
    }


def run(cfg: Config) -> None:
    """Score every sample, drop what the filters name, keep the best within the budget.

    Raises UserError for missing or changed data, a domain quota for a domain that does not exist, another
    configuration's folder, and when nothing would be kept.
    """
    folder = Path(cfg.run_dir) / STAGE
    data = require_manifest(Path(cfg.run_dir) / "distill", "distill")
    identity = {"data": data.digest(), "select": asdict(cfg.select), "budget": cfg.budget.tokens}
    if is_current(folder, identity):
        print(f"select: finished before, nothing to do ({folder})")
        return
    verify_outputs(Path(cfg.run_dir) / "distill", data)
    make_folder(folder)
    begun = time.monotonic()
    table = _measure(cfg, folder)
    _decide(table, cfg)
    summary = _summary(table, cfg)
    outputs = [folder / name for name in ("selection.parquet", "summary.json", "summary.html")]
    _write_selection(outputs[0], table)
    atomic_json(outputs[1], summary)
    atomic_write(outputs[2], _page(summary, _extremes(cfg, table)))
    counts = {"samples": len(table["id"]), **{f"{name} samples": n for name, n in summary["samples"].items()}}
    assert counts["samples"] == sum(summary["samples"].values())
    write_manifest(
        folder,
        stage=STAGE,
        identity=identity,
        inputs={"distill": data.digest()},
        outputs=outputs,
        counts={**counts, "kept tokens": summary["tokens"].get("kept", 0)},
        seconds=time.monotonic() - begun,
    )
    kept = summary["samples"].get("kept", 0)
    print(
        f"select: {kept:,} of {counts['samples']:,} samples kept, {summary['tokens'].get('kept', 0):,} of "
        f"{sum(summary['tokens'].values()):,} answer tokens; see {outputs[2]}"
    )


def _samples(cfg: Config, columns: list[str]) -> Iterator[dict[str, Any]]:
    """The samples of the train split, one row group in memory at a time."""
    import pyarrow.parquet as pq

    from jetspec_train.data.samples import sample_files

    for path in sample_files(Path(cfg.run_dir) / "distill"):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for row in file.read_row_group(group, columns=columns).to_pylist():
                    if row["split"] == "train":
                        yield row


def _measure(cfg: Config, folder: Path) -> dict[str, Any]:
    """Signals of every sample, and the filters' verdicts (None where a sample may be kept): columns of N values."""
    import numpy as np
    from tqdm import tqdm

    from jetspec_train.data.duplicates import DuplicateIndex
    from jetspec_train.data.value import SIGNALS, NgramDraft, signals_of

    settings = cfg.select
    vocabulary = 1
    for row in _samples(cfg, ["split", "answer_tokens", "prompt_tokens"]):
        vocabulary = max(vocabulary, 1 + max([*row["answer_tokens"], *row["prompt_tokens"]], default=0))
    draft = NgramDraft(vocabulary)
    for row in _samples(cfg, ["split", "answer_tokens", "prompt_tokens"]):
        draft.add(np.array(row["prompt_tokens"] + row["answer_tokens"]), len(row["prompt_tokens"]))

    table: dict[str, list[Any]] = {name: [] for name in ("id", "domain", "reason", "repeats", *SIGNALS)}
    index = DuplicateIndex(folder / "duplicates.sqlite", settings.duplicate_similarity)
    try:
        for row in tqdm(_samples(cfg, _COLUMNS), desc="select", unit="sample", mininterval=1):
            answer = np.array(row["answer_tokens"])
            found = {name: 0.0 for name in SIGNALS}
            if len(answer):
                found = signals_of(
                    np.concatenate([np.array(row["prompt_tokens"], dtype=answer.dtype), answer]),
                    len(row["prompt_tokens"]),
                    np.array(row["logprobs"]),
                    np.array(row["entropies"]),
                    np.array(row["margins"]),
                    draft,
                    settings.entropy_band,
                )
            reason, repeats = None, None
            if len(answer) < settings.min_tokens:
                reason = "too short"
            elif settings.max_tokens is not None and len(answer) > settings.max_tokens:
                reason = "too long"
            elif found["repetition"] > settings.max_repetition:
                reason = "repetitive"
            elif (repeats := index.find(row["id"], row["answer"])) is not None:
                reason = "near-duplicate"
            table["id"].append(row["id"])
            table["domain"].append(row["domain"])
            table["reason"].append(reason)
            table["repeats"].append(repeats)
            for name in SIGNALS:
                table[name].append(found[name])
    finally:
        index.close()
    if not table["id"]:
        raise UserError(f"{cfg.run_dir}/distill has no samples of the train split. Check distill.splits.")
    texts = ("id", "domain", "reason", "repeats")
    return {name: values if name in texts else np.array(values) for name, values in table.items()}


def _decide(table: dict[str, Any], cfg: Config) -> None:
    """Fill in ``score`` and complete ``reason``: kept, a filter's name, domain quota, or budget."""
    import numpy as np

    from jetspec_train.data.value import SIGNALS, choose, score

    settings = cfg.select
    open_rows = np.array([place for place, reason in enumerate(table["reason"]) if reason is None], dtype=np.int64)
    domains = np.array(table["domain"])
    unknown = sorted(set(settings.domain_shares) - set(table["domain"]))
    if unknown:
        raise UserError(
            f"select.domain_shares names {', '.join(unknown)}, but the samples have only the domains "
            f"{', '.join(sorted(set(table['domain'])))}."
        )
    if not len(open_rows):
        raise UserError("select: the filters leave no sample. Loosen select.min_tokens or select.max_repetition.")
    tokens = table["tokens"].astype(np.int64)
    limit = int(settings.share * tokens[open_rows].sum())
    limit = min(limit, cfg.budget.tokens, settings.tokens if settings.tokens is not None else limit)
    scores = score({name: table[name][open_rows] for name in SIGNALS}, settings.weights)
    fates = choose(
        scores, tokens[open_rows], domains[open_rows], np.array(table["id"])[open_rows], limit, settings.domain_shares
    )
    if not (fates == "kept").any():
        raise UserError(
            f"select: a limit of {limit:,} tokens is less than the shortest sample "
            f"({int(tokens[open_rows].min())} tokens). Raise select.share or select.tokens."
        )
    table["score"] = np.full(len(tokens), np.nan)
    table["score"][open_rows] = scores
    for place, fate in zip(open_rows, fates):
        table["reason"][place] = str(fate)


def _write_selection(path: Path, table: dict[str, Any]) -> None:
    import pyarrow as pa

    from jetspec_train.data.samples import write_table

    columns = {name: pa.array(values) for name, values in table.items() if name != "repeats"}
    columns["repeats"] = pa.array(table["repeats"], type=pa.string())
    columns["kept"] = pa.array([reason == "kept" for reason in table["reason"]])
    whole = pa.table(columns)
    write_table(path, [whole], whole.schema)


def selected_ids(run_dir: Path) -> set[str] | None:
    """The ids that stage=select keeps, or None when that stage did not run here. Raises UserError if they changed."""
    import pyarrow.parquet as pq

    folder = run_dir / STAGE
    manifest = read_manifest(folder)
    if manifest is None:
        return None
    verify_outputs(folder, manifest)
    data = require_manifest(run_dir / "distill", "distill")
    if manifest.inputs.get("distill") != data.digest():
        raise UserError(
            f"{folder} was made from other samples than {run_dir}/distill now holds. Run stage=select again "
            f"(delete {folder} first), or delete it to train on everything."
        )
    table = pq.read_table(folder / "selection.parquet", columns=["id", "kept"])
    return {name for name, kept in zip(table["id"].to_pylist(), table["kept"].to_pylist()) if kept}


def _summary(table: dict[str, Any], cfg: Config) -> dict[str, Any]:
    """Kept and dropped samples and tokens by reason and domain, and quartiles of every signal of both sides."""
    import numpy as np

    from jetspec_train.data.value import SIGNALS

    reasons, tokens = np.array(table["reason"]), table["tokens"]
    samples, sums = Counter(table["reason"]), Counter[str]()
    domains: dict[str, dict[str, dict[str, int]]] = {}
    for domain, reason, count in zip(table["domain"], table["reason"], tokens):
        sums[reason] += int(count)
        cell = domains.setdefault(domain, {}).setdefault(reason, {"samples": 0, "tokens": 0})
        cell["samples"] += 1
        cell["tokens"] += int(count)
    spread = {}
    for name in SIGNALS:
        sides = {"kept": table[name][reasons == "kept"], "dropped": table[name][reasons != "kept"]}
        spread[name] = {
            side: [round(float(x), 4) for x in np.quantile(values, [0, 0.25, 0.5, 0.75, 1])] if len(values) else None
            for side, values in sides.items()
        }
    return {
        "score": " + ".join(f"{weight:g} x rank({name})" for name, weight in cfg.select.weights.items() if weight)
        or "none: a fixed random order",
        "samples": dict(samples),
        "tokens": dict(sums),
        "domains": domains,
        "signals": spread,
        "signal_histograms": {name: _histogram(table[name], reasons == "kept") for name in SIGNALS},
    }


def _histogram(values: np.ndarray, kept: np.ndarray) -> dict[str, list[float]]:
    import numpy as np

    edges = np.histogram_bin_edges(values, bins=24)
    return {
        "edges": [round(float(edge), 5) for edge in edges],
        "kept": np.histogram(values[kept], edges)[0].tolist(),
        "dropped": np.histogram(values[~kept], edges)[0].tolist(),
    }


def _extremes(cfg: Config, table: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """The samples of highest and lowest score, with the first words of their answers."""
    import numpy as np

    scored = np.flatnonzero(~np.isnan(table["score"]))
    order = scored[np.argsort(-table["score"][scored], kind="stable")]
    sides = {"highest": order[:EXTREMES], "lowest": order[-EXTREMES:][::-1]}
    wanted = {table["id"][place] for places in sides.values() for place in places}
    texts = {row["id"]: row["answer"] for row in _samples(cfg, ["id", "split", "answer"]) if row["id"] in wanted}
    shown = ("gap", "entropy", "flatness", "tokens", "repetition")
    return {
        side: [
            {
                "domain": table["domain"][place],
                "score": float(table["score"][place]),
                "reason": table["reason"][place],
                **{name: float(table[name][place]) for name in shown},
                "text": " ".join(texts[table["id"][place]].split())[:240],
            }
            for place in places
        ]
        for side, places in sides.items()
    }


def _page(summary: dict[str, Any], extremes: dict[str, list[dict[str, Any]]]) -> str:
    """The summary as one self-contained HTML page."""
    from importlib import resources

    from jinja2 import Environment

    source = resources.files("jetspec_train.data").joinpath("select.html.j2").read_text(encoding="utf-8")
    return (
        Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
        .from_string(source)
        .render(summary=summary, extremes=extremes)
    )
