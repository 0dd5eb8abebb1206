"""From the shards' judged paths to the finished negatives: checks, the mix, counts, files.

Everything here follows from files that are complete, so doing it again after a kill gives the same.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import atomic_json, atomic_write, read_json, sha256_file, stable_hash
from jetspec_train.data.journal import Journal
from jetspec_train.data.negatives.mix import Row, Rules, choose_rows
from jetspec_train.data.negatives.rows import DIFFICULTIES, JUDGED, KINDS, class_of
from jetspec_train.data.samples import read_table, write_table
from jetspec_train.data.shards import rejects_path, report_path


@dataclass
class ShardReport:
    """What one finished shard did. Written last by the shard, read by the merge."""

    shard: int
    identity_hash: str
    samples: int
    attempts: int
    training_tokens: int  # supervised tokens of all samples that training will read, the same in every shard
    judged_sha256: str
    rejects_sha256: str
    seconds: float


@dataclass
class KindCounts:
    """What became of the attempts of one kind: ``tried = not_built + judged`` and ``judged = kept + dropped``."""

    tried: int = 0
    not_built: int = 0
    judged: int = 0
    positives: int = 0  # of the judged: the target would accept the whole path
    kept: int = 0
    kept_positives: int = 0
    dropped: int = 0
    kept_by_difficulty: dict[str, int] = field(default_factory=lambda: dict.fromkeys(DIFFICULTIES, 0))
    not_built_by_reason: dict[str, int] = field(default_factory=dict)


@dataclass
class Merged:
    """The finished files and their counts."""

    files: list[Path]
    kinds: dict[str, KindCounts]
    counts: dict[str, Any]
    seconds: float


def judged_path(stage_dir: Path, shard: int) -> Path:
    return stage_dir / JUDGED.final.format(shard=shard)


def write_shard_report(
    stage_dir: Path,
    identity: Mapping[str, Any],
    journal: Journal,
    *,
    shard: int,
    samples: int,
    training_tokens: int,
    seconds: float,
) -> None:
    """Close a shard: its rejects, and last the report by which the merge knows that it is complete."""
    rejects = [
        {"id": row["id"], "sample_id": row["sample_id"], "kind": row["kind"], "reason": row["reject_reason"]}
        for row in journal.rejected_rows(["sample_id", "kind"])
    ]
    rejects.sort(key=lambda reject: reject["id"])
    atomic_write(rejects_path(stage_dir, shard), _lines(rejects))
    report = ShardReport(
        shard=shard,
        identity_hash=stable_hash(identity),
        samples=samples,
        attempts=journal.tally.rows,
        training_tokens=training_tokens,
        judged_sha256=sha256_file(judged_path(stage_dir, shard)),
        rejects_sha256=sha256_file(rejects_path(stage_dir, shard)),
        seconds=seconds,
    )
    atomic_json(report_path(stage_dir, shard), asdict(report))


def read_shard_report(stage_dir: Path, shard: int, identity: Mapping[str, Any]) -> ShardReport | None:
    """The report of a finished shard, None while there is none."""
    path = report_path(stage_dir, shard)
    if not path.exists() or not judged_path(stage_dir, shard).exists():
        return None
    report = ShardReport(**read_json(path, "The shard report"))
    return report if report.identity_hash == stable_hash(identity) else None


def merge(stage_dir: Path, reports: Sequence[ShardReport], rules: Rules, room: int) -> Merged:
    """Choose the rows over all shards and write ``negatives-*.parquet`` and ``rejects.jsonl``.

    ``room``: judged tokens that the budget leaves. Raises UserError naming a file that changed since its shard wrote
    it, RuntimeError when counts in and counts out differ.
    """
    for report in reports:
        _check_files(stage_dir, report)
    rows: list[Row] = []
    owners: list[tuple[int, int]] = []  # shard, rows before its first
    for report in reports:
        owners.append((report.shard, len(rows)))
        rows += _columns(judged_path(stage_dir, report.shard))
    reasons = choose_rows(rows, rules, room)
    unbuilt = [
        json.loads(line)
        for report in reports
        for line in rejects_path(stage_dir, report.shard).read_text(encoding="utf-8").splitlines()
    ]
    files, dropped = [], []
    for (shard, begin), end in zip(owners, [*(start for _, start in owners[1:]), len(rows)]):
        kept = np.asarray([reason is None for reason in reasons[begin:end]], dtype=bool)
        path = stage_dir / f"negatives-{shard:05d}.parquet"
        schema = JUDGED.public.with_metadata({b"jetspec.format": JUDGED.format.encode()})
        write_table(path, _filtered(judged_path(stage_dir, shard), kept), schema)
        files.append(path)
        table = read_table(judged_path(stage_dir, shard), columns=["id", "sample_id", "kind"])
        for row, reason in zip(table.to_pylist(), reasons[begin:end]):
            if reason is not None:
                dropped.append({**row, "reason": reason})
    rejects = stage_dir / "rejects.jsonl"
    atomic_write(rejects, _lines([*unbuilt, *dropped]))
    kinds = count_kinds(rows, reasons, unbuilt)
    counts: dict[str, Any] = {
        "samples": sum(report.samples for report in reports),
        "attempts": sum(report.attempts for report in reports),
        "kept": sum(kind.kept for kind in kinds.values()),
        "rejected": len(unbuilt) + len(dropped),
        "judged_tokens": sum(row.tokens for row, reason in zip(rows, reasons) if reason is None),
        "positives": sum(kind.kept_positives for kind in kinds.values()),
        "shares": _shares(kinds),
        "rejects_by_reason": dict(sorted(Counter(r["reason"] for r in [*unbuilt, *dropped]).items())),
        "kinds": {name: asdict(kind) for name, kind in kinds.items()},
    }
    if counts["attempts"] != counts["kept"] + counts["rejected"]:
        raise RuntimeError(f"attempts in and rows out differ: {counts}")
    return Merged([*files, rejects], kinds, counts, sum(report.seconds for report in reports))


def count_kinds(
    rows: Sequence[Row], reasons: Sequence[str | None], unbuilt: Sequence[Mapping[str, str]]
) -> dict[str, KindCounts]:
    """The books of every kind that was tried, in the order of KINDS."""
    counts = {kind: KindCounts() for kind in KINDS}
    for reject in unbuilt:
        kind = counts[reject["kind"]]
        kind.tried += 1
        kind.not_built += 1
        kind.not_built_by_reason[reject["reason"]] = kind.not_built_by_reason.get(reject["reason"], 0) + 1
    for row, reason in zip(rows, reasons):
        kind = counts[row.kind]
        kind.tried += 1
        kind.judged += 1
        kind.positives += row.is_positive
        if reason is None:
            kind.kept += 1
            kind.kept_positives += row.is_positive
            kind.kept_by_difficulty[row.difficulty] += 1
        else:
            kind.dropped += 1
    return {name: kind for name, kind in counts.items() if kind.tried}


def _shares(kinds: Mapping[str, KindCounts]) -> dict[str, float]:
    """Part of each class among the kept rows."""
    total = sum(kind.kept for kind in kinds.values())
    by_class: dict[str, int] = {}
    for name, kind in kinds.items():
        by_class[class_of(name)] = by_class.get(class_of(name), 0) + kind.kept
    return {name: round(count / max(1, total), 4) for name, count in by_class.items()}


def _columns(path: Path) -> list[Row]:
    table = read_table(path, columns=["id", "kind", "difficulty", "margin", "is_positive", "labels"])
    columns = [table[name].to_pylist() for name in ("id", "kind", "difficulty", "margin", "is_positive")]
    lengths = pc.list_value_length(table["labels"]).to_pylist()
    return [Row(*values) for values in zip(*columns, lengths)]


def _filtered(path: Path, kept: np.ndarray) -> Iterator[pa.Table]:
    """The kept rows of a judged file, a row group at a time."""
    begin = 0
    with pq.ParquetFile(path) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group)
            yield table.filter(pa.array(kept[begin : begin + table.num_rows]))
            begin += table.num_rows


def _check_files(stage_dir: Path, report: ShardReport) -> None:
    for path, written in (
        (judged_path(stage_dir, report.shard), report.judged_sha256),
        (rejects_path(stage_dir, report.shard), report.rejects_sha256),
    ):
        if not path.exists() or sha256_file(path) != written:
            raise UserError(
                f"{path} is missing or was changed after shard {report.shard} wrote it. Delete it and "
                f"{report_path(stage_dir, report.shard)}, and run stage=negatives again."
            )


def _lines(records: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records)
