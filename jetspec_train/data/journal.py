"""A shard's rows on their way to disk: small Parquet parts first, one sorted file at the end.

Every part is whole or absent and holds whole units (conversations), so after a kill at any instant the rows on
disk are a set of finished units; what is missing is made again. The compacted file names
the parts that it contains, so a kill between writing it and deleting them leaves nothing twice.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.samples import FORMAT, ROW_GROUP, SCHEMA, read_table, row_table, write_table

log = logging.getLogger(__name__)

_CONTAINS = b"jetspec.contains_parts"
_FRESH_DROPPED = "dropped.new.parquet"


@dataclass(frozen=True)
class RowForm:
    """What a journal holds, one dataclass instance per row of ``schema``.

    Attributes:
        format: written into the compacted file, so that a reader knows it.
        schema: with ``id``, ``order``, ``domain`` and ``reject_reason`` (null for a row that is kept).
        final: path of the compacted file within the stage's folder; ``{shard}`` stands for its number.
        tokens: the list column whose length counts against the budget.
    """

    format: str
    schema: pa.Schema
    final: str
    tokens: str

    @property
    def public(self) -> pa.Schema:
        """The columns of the compacted file."""
        return pa.schema([column for column in self.schema if column.name != "reject_reason"])

    def index_columns(self, path: Path) -> list[str]:
        """The columns of a file that tell which rows it holds and what they add up to."""
        present = set(pq.read_schema(path).names)
        index = ("id", "order", self.tokens, "finish_reason", "reject_reason", "domain")
        return [name for name in index if name in present]


SAMPLES = RowForm(FORMAT, SCHEMA, "samples-{shard:05d}.parquet", "answer_tokens")


@dataclass
class Tally:
    """What a set of journal rows adds up to."""

    kept_rows: int = 0
    kept_tokens: int = 0
    generated_tokens: int = 0
    truncated_rows: int = 0
    rejected: dict[str, int] = field(default_factory=dict)
    tokens_by_domain: dict[str, int] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        return self.kept_rows + sum(self.rejected.values())

    def add(self, *, tokens: int, finish_reason: str, reject_reason: str | None, domain: str) -> None:
        self.generated_tokens += tokens
        if reject_reason is not None:
            self.rejected[reject_reason] = self.rejected.get(reject_reason, 0) + 1
            return
        self.kept_rows += 1
        self.kept_tokens += tokens
        self.truncated_rows += finish_reason == "length"
        self.tokens_by_domain[domain] = self.tokens_by_domain.get(domain, 0) + tokens


class Journal:
    """The rows of one shard of one stage's folder: answers, unless ``form`` says otherwise."""

    def __init__(self, stage_dir: Path, shard: int, form: RowForm = SAMPLES) -> None:
        self.form = form
        self.parts_dir = stage_dir / "parts" / f"shard-{shard:05d}"
        self.final = stage_dir / form.final.format(shard=shard)
        self.dropped = self.parts_dir / "dropped.parquet"  # compacted rows that were not kept
        self.done: set[str] = set()
        self.tally = Tally()
        self._open()

    def _open(self) -> None:
        """Learn what is on disk: finish an interrupted compaction, set damaged files aside."""
        for path in self._files():
            self._set_aside_if_damaged(path)
        contained = _contained_parts(self.final)
        fresh = self.dropped.with_name(_FRESH_DROPPED)
        if fresh.exists():
            if contained and _contained_parts(fresh) == contained:
                fresh.replace(self.dropped)
            else:
                fresh.unlink()
        for part in self.parts():
            if part.name in contained:
                part.unlink()
        self._next = 1 + max((int(name[5:-8]) for name in [*contained, *(p.name for p in self.parts())]), default=-1)
        for path in self._files():
            self._learn(pq.read_table(path, columns=self.form.index_columns(path)), path)

    def _set_aside_if_damaged(self, path: Path) -> None:
        try:
            pq.read_table(path, columns=self.form.index_columns(path))
        except (pa.ArrowInvalid, OSError, KeyError) as error:
            quarantine = path.with_name(path.name + ".damaged")
            path.replace(quarantine)
            log.warning("%s is damaged (%s): set aside as %s, its rows are made again.", path, error, quarantine.name)

    def _learn(self, table: pa.Table, path: Path) -> None:
        ids = table["id"].to_pylist()
        twice = self.done.intersection(ids)
        if twice or len(set(ids)) != len(ids):
            raise UserError(f"{path} holds the row {next(iter(twice), ids[0])} a second time. Delete {path}.")
        self.done.update(ids)

        def column(name: str, otherwise: Any) -> list[Any]:
            return table[name].to_pylist() if name in table.column_names else [otherwise] * len(ids)

        lengths = pc.list_value_length(table[self.form.tokens]).to_pylist()
        rows = zip(lengths, column("finish_reason", ""), column("reject_reason", None), table["domain"].to_pylist())
        for tokens, finish, reason, domain in rows:
            self.tally.add(tokens=tokens, finish_reason=finish, reject_reason=reason, domain=domain)

    def parts(self) -> list[Path]:
        return sorted(self.parts_dir.glob("part-*.parquet"))

    def _files(self) -> list[Path]:
        return [path for path in (self.final, self.dropped) if path.exists()] + self.parts()

    def append(self, rows: Sequence[Any]) -> None:
        """Write whole units of work (conversations, groups) as one part. After this returns they survive anything."""
        if not rows:
            return
        schema = self.form.schema
        self.parts_dir.mkdir(parents=True, exist_ok=True)
        write_table(self.parts_dir / f"part-{self._next:08d}.parquet", [row_table(rows, schema)], schema)
        self._next += 1
        for row in rows:
            self.done.add(row.id)
            self.tally.add(
                tokens=len(getattr(row, self.form.tokens)),
                finish_reason=getattr(row, "finish_reason", ""),
                reject_reason=row.reject_reason,
                domain=row.domain,
            )

    def compact(self) -> None:
        """Merge all parts into one file in the order of generation; memory is a few row groups.

        Rejected rows go to a file of their own first. The final file is replaced last and atomically.
        """
        parts = self.parts()
        if not parts and self.final.exists():
            return
        names = sorted(_contained_parts(self.final) | {part.name for part in parts})
        files = self._files()
        dropped = [table for path in files if path != self.final for table in [_rejected_rows(path)] if table.num_rows]
        metadata = {b"jetspec.format": self.form.format.encode(), _CONTAINS: json.dumps(names).encode()}
        fresh = self.dropped.with_name(_FRESH_DROPPED)
        if dropped:
            self.parts_dir.mkdir(parents=True, exist_ok=True)
            write_table(fresh, dropped, self.form.schema.with_metadata(metadata))
        kept = [path for path in files if path != self.dropped]
        write_table(self.final, _sorted_groups(kept, self.form), self.form.public.with_metadata(metadata))
        if dropped:
            fresh.replace(self.dropped)
        for part in parts:
            part.unlink()

    def rejected_rows(self, columns: Sequence[str]) -> Iterator[dict[str, Any]]:
        """Rows that were made but not kept: their id, these columns, and the reason."""
        for path in self._files():
            if path != self.final:
                yield from _rejected_rows(path).select(["id", *columns, "reject_reason"]).to_pylist()


def _contained_parts(path: Path) -> set[str]:
    """Names of the parts that were merged into this file."""
    if not path.exists():
        return set()
    metadata = pq.read_schema(path).metadata or {}
    return set(json.loads(metadata.get(_CONTAINS, b"[]")))


def _rejected_rows(path: Path) -> pa.Table:
    table = read_table(path)
    return table.filter(pc.is_valid(table["reject_reason"]))


def _sorted_groups(files: list[Path], form: RowForm) -> Iterator[pa.Table]:
    """Kept rows of all files in the order of their ``order``, a row group at a time.

    Only (order, file, row) of every row is held in memory. Orders are nearly sorted already, so a few
    recently used files serve each group.
    """
    orders, homes, rows = [], [], []
    for number, path in enumerate(files):
        table = pq.read_table(path, columns=form.index_columns(path))
        keep = np.ones(table.num_rows, dtype=bool)
        if "reject_reason" in table.column_names:
            keep = ~pc.is_valid(table["reject_reason"]).to_numpy()
        orders.append(table["order"].to_numpy()[keep])
        homes.append(np.full(int(keep.sum()), number))
        rows.append(np.flatnonzero(keep))
    if not orders:
        return
    order, home, row = np.concatenate(orders), np.concatenate(homes), np.concatenate(rows)
    sorting = np.argsort(order, kind="stable")
    cache: dict[int, pa.Table] = {}
    for begin in range(0, len(sorting), ROW_GROUP):
        chunk = sorting[begin : begin + ROW_GROUP]
        pieces, places = [], []
        for number in np.unique(home[chunk]):
            inside = np.flatnonzero(home[chunk] == number)
            if number not in cache:
                cache[number] = read_table(files[number]).select(form.public.names).cast(_plain(form.public))
            pieces.append(cache[number].take(pa.array(row[chunk][inside])))
            places.append(inside)
        for number in list(cache)[:-8]:
            if number not in home[chunk]:
                del cache[number]
        yield pa.concat_tables(pieces).take(pa.array(np.argsort(np.concatenate(places), kind="stable")))


def _plain(schema: pa.Schema) -> pa.Schema:
    """Labels as plain text while rows move between files: dictionaries of different files do not mix."""
    return pa.schema([(f.name, f.type.value_type if pa.types.is_dictionary(f.type) else f.type) for f in schema])
