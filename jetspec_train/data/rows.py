"""Rows of a source, one at a time: JSON lines, Parquet files, or a dataset of the hub.

A row that cannot be parsed comes as a ``BadRow`` in its place, so that counting stays exact. A column
that the source lacks is the recipe's mistake and stops the run with the columns that are there.
"""

from __future__ import annotations

import gzip
import json
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.recipes import Source, local_files

log = logging.getLogger(__name__)

LONGEST_LINE = 8 * 2**20  # bytes; a longer line is skipped without being held in memory
_PARQUET_BATCH = 1024


class BadRow(Exception):
    """Why one row cannot be used: a short reason for the counts, a detail for a person."""

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(reason)
        self.reason, self.detail = reason, detail


def read_rows(source: Source) -> Iterator[tuple[int, Any]]:
    """``(row number, row as a dict, or a BadRow)`` in the source's own order, at most ``source.limit``.

    Raises UserError naming a missing file, a missing column (and those present), a failed download.
    """
    readers = {"jsonl": _jsonl_rows, "parquet": _parquet_rows, "hub": _hub_rows}
    checked = False
    for number, row in enumerate(readers[source.type](source)):
        if source.limit is not None and number >= source.limit:
            return
        if isinstance(row, dict):
            if not checked:
                require_columns(source, row.keys())
                checked = True
            row = _complete(source, row)
        yield number, row


def require_columns(source: Source, present: Iterable[str]) -> None:
    """Raise UserError when a column that the recipe names is missing."""
    present = sorted(present)
    for role, column in source.columns.items():
        if column not in present:
            raise UserError(
                f"Source {source.name!r} ({source.path}) has no column {column!r} (columns.{role}). "
                f"Its columns: {', '.join(present)}. Change recipe.overrides.{source.name}.columns.{role}."
            )


def _complete(source: Source, row: dict[str, Any]) -> Any:
    """JSON lines may leave a key out in a single row: that row is bad, not the recipe."""
    for role, column in source.columns.items():
        if column not in row:
            if role in ("answer", "domain", "system", "input"):
                row[column] = None
            else:
                return BadRow("missing_column", f"{column} ({role}) is not in this row")
    return row


def _lines(file: IO[bytes] | gzip.GzipFile) -> Iterator[bytes | None]:
    """Lines of a file; None for one beyond LONGEST_LINE."""
    while line := file.readline(LONGEST_LINE):
        if len(line) == LONGEST_LINE and not line.endswith(b"\n"):
            while (rest := file.readline(LONGEST_LINE)) and not rest.endswith(b"\n"):
                pass
            yield None
        else:
            yield line


def _jsonl_rows(source: Source) -> Iterator[Any]:
    for path in local_files(source):
        if path.suffix == ".json":
            yield from _json_list(path)
            continue
        with gzip.open(path, "rb") if path.suffix == ".gz" else open(path, "rb") as file:
            for line in _lines(file):
                if line is None:
                    yield BadRow("too_long", f"a line of more than {LONGEST_LINE} bytes in {path.name}")
                elif line.strip():
                    try:
                        row = json.loads(line)
                    except UnicodeDecodeError as error:
                        yield BadRow("invalid_unicode", str(error))
                    except (ValueError, RecursionError) as error:
                        yield BadRow("invalid_json", str(error))
                    else:
                        yield row if isinstance(row, dict) else BadRow("invalid_json", "the line is not an object")


def _json_list(path: Path) -> Iterator[Any]:
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}).") from error
    if not isinstance(rows, list):
        raise UserError(f"{path} must hold a list of objects. For one object a line, name it .jsonl.")
    yield from rows


def _parquet_rows(source: Source) -> Iterator[Any]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    wanted = list(dict.fromkeys(source.columns.values()))
    for path in local_files(source):
        try:
            file = pq.ParquetFile(path)
        except (pa.ArrowInvalid, OSError) as error:
            raise UserError(f"{path} is not a readable Parquet file ({error}).") from error
        with file:
            require_columns(source, file.schema_arrow.names)
            for batch in file.iter_batches(batch_size=_PARQUET_BATCH, columns=wanted):
                yield from batch.to_pylist()


def _hub_rows(source: Source) -> Iterator[Any]:
    if source.revision is None:
        log.warning("Source %s is not pinned: its data can change. Set its revision to a commit.", source.name)
    import datasets

    try:
        loaded = datasets.load_dataset(source.path, source.config, split=source.split, revision=source.revision)
    except Exception as error:  # the hub client raises a dozen unrelated types
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"Source {source.name!r}: the dataset {source.path} ({source.config or 'default'}, {source.split}, "
            f"revision {source.revision}) cannot be loaded: {type(error).__name__}: {reason}. With a local copy: "
            f"recipe.overrides.{source.name}.path=FILE.jsonl or FILE.parquet."
        ) from error
    require_columns(source, loaded.column_names)
    yield from loaded
