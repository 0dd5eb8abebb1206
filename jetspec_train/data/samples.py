"""Samples: answers of the target with what is known about every token, in Parquet.

One row is one turn. A row says everything that is needed to make it again; its id is a hash of the
conversation, the target, the sampling settings and the draw, so that a rerun is a set difference.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder, sha256_file, stable_hash, writing
from jetspec_train.data.prompts import Prompt

FORMAT = "jetspec-train samples 1"
ROW_GROUP = 1024  # rows; a reader of one group holds a few megabytes

_TOKENS = pa.list_(pa.int32())
_NUMBERS = pa.list_(pa.float32())
_LABEL = pa.dictionary(pa.int32(), pa.string())  # few different values

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt_id", pa.string()),  # of the whole conversation: content hash of its user turns
        ("order", pa.int64()),  # place in the order of generation, the same in every run
        ("domain", _LABEL),
        ("source", _LABEL),
        ("row", pa.int64()),  # in the source
        ("template", _LABEL),
        ("split", _LABEL),
        ("turn", pa.int32()),
        ("draw", pa.int32()),
        ("messages", pa.string()),  # JSON: what the target was shown, its own earlier answers included
        ("answer", pa.string()),
        ("reference", pa.string()),  # the data set's own answer, for scoring only
        ("prompt_tokens", _TOKENS),
        ("answer_tokens", _TOKENS),  # ends with the end-of-turn token exactly where the target produced it
        ("logprobs", _NUMBERS),  # nats, of each answer token, at temperature 1 without filters
        ("entropies", _NUMBERS),  # nats
        ("margins", _NUMBERS),  # log-probability of the first choice minus the second
        ("finish_reason", _LABEL),  # stop | length
        ("truncated", pa.bool_()),
        ("target", _LABEL),  # JSON of the target's identity
        ("settings", _LABEL),  # JSON: sampling, limits, template options, seed, dtype
        ("reject_reason", _LABEL),  # journal only: null for a sample that is kept
    ]
)


@dataclass
class Sample:
    """One answered turn; the fields are those of SCHEMA."""

    id: str
    prompt_id: str
    order: int
    domain: str
    source: str
    row: int
    template: str | None
    split: str
    turn: int
    draw: int
    messages: str
    answer: str
    reference: str | None
    prompt_tokens: list[int]
    answer_tokens: list[int]
    logprobs: Sequence[float]
    entropies: Sequence[float]
    margins: Sequence[float]
    finish_reason: str
    truncated: bool
    target: str
    settings: str
    reject_reason: str | None = None


def sample_id(prompt: Prompt, *, turn: int, draw: int, target: Mapping[str, str], settings: Mapping[str, Any]) -> str:
    """The identity of one answer, known before it is generated.

    ``target``: ``TargetIdentity.to_dict()``; its name is left out, for a moved folder is the same target.
    ``settings``: sampling, limits and seed. The target's answers to earlier turns follow from these.
    """
    content = {
        "messages": prompt.messages,
        "later_turns": list(prompt.later_turns),
        "target": {key: value for key, value in target.items() if key != "name"},
        "settings": dict(settings),
        "draw": draw,
        "turn": turn,
    }
    return stable_hash(content)[:32]


def row_table(rows: Sequence[Any], schema: pa.Schema) -> pa.Table:
    """Dataclass instances as a table of ``schema``; their attributes are its columns."""
    columns = {f.name: pa.array([getattr(row, f.name) for row in rows], type=f.type) for f in schema}
    return pa.table(columns, schema=schema)


def write_table(path: Path, tables: Iterator[pa.Table] | Sequence[pa.Table], schema: pa.Schema) -> int:
    """Write a Parquet file that is whole or absent. Returns the number of rows."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    rows = 0
    with writing(path):
        try:
            with open(temporary, "wb") as file:
                with pq.ParquetWriter(file, schema, compression="zstd") as writer:
                    for table in tables:
                        writer.write_table(table.cast(schema), row_group_size=ROW_GROUP)
                        rows += table.num_rows
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    return rows


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """One sample file; UserError naming it when it is damaged."""
    try:
        return pq.read_table(path, columns=columns)
    except (pa.ArrowInvalid, OSError, pa.ArrowException) as error:
        raise UserError(
            f"The sample file {path} is damaged ({error}). Delete it and run stage=distill again."
        ) from error


def sample_files(distill_dir: str | os.PathLike[str]) -> list[Path]:
    """The finished sample files of a run, in order; UserError when there are none."""
    files = sorted(Path(distill_dir).glob("samples-*.parquet"))
    if not files:
        raise UserError(f"{distill_dir} holds no samples-*.parquet. Run stage=distill with the same run_dir first.")
    return files


@dataclass
class SampleStore:
    """Token sequences of samples in flat arrays; N samples, row i is ``tokens[starts[i]:starts[i + 1]]``.

    tokens: int32; starts: int64 [N + 1]; prompt_lengths: int32 [N]; ids: N hex texts; domains: N texts.
    """

    tokens: np.ndarray
    starts: np.ndarray
    prompt_lengths: np.ndarray
    ids: np.ndarray
    domains: np.ndarray

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens per sample, prompt and answer [N]."""
        return np.diff(self.starts)

    @property
    def answer_lengths(self) -> np.ndarray:
        """Supervised tokens per sample [N]."""
        return self.lengths - self.prompt_lengths

    @property
    def supervised_tokens(self) -> int:
        return int(self.answer_lengths.sum())

    def select(self, rows: np.ndarray) -> SampleStore:
        """The given rows, in the given order."""
        lengths = self.lengths[rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        gather = np.repeat(self.starts[rows] - starts[:-1], lengths) + np.arange(starts[-1])
        return SampleStore(self.tokens[gather], starts, self.prompt_lengths[rows], self.ids[rows], self.domains[rows])

    def limit_tokens(self, tokens: int) -> SampleStore:
        """At most so many supervised tokens: whole samples in the order of their ids.

        The order is a fixed random one, so that a smaller limit gives a subset of a larger one.
        """
        order = np.argsort(self.ids, kind="stable")
        kept = order[np.cumsum(self.answer_lengths[order]) <= tokens]
        return self.select(np.sort(kept))

    def digest(self) -> str:
        return stable_hash([self.ids.tolist(), self.supervised_tokens])


def load_samples(distill_dir: str | os.PathLike[str], split: str = "train") -> SampleStore:
    """Read the finished samples of one split. Raises UserError when there are none or a file is damaged."""
    tokens, lengths, prompts, ids, domains = [], [], [], [], []
    for path in sample_files(distill_dir):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                table = file.read_row_group(group, columns=["id", "domain", "split", "prompt_tokens", "answer_tokens"])
                table = table.filter(pc.equal(table["split"].cast(pa.string()), split))
                if not table.num_rows:
                    continue
                prompt = table["prompt_tokens"].combine_chunks()
                answer = table["answer_tokens"].combine_chunks()
                prompt_lengths = np.diff(prompt.offsets.to_numpy()).astype(np.int32)
                answer_lengths = np.diff(answer.offsets.to_numpy()).astype(np.int32)
                tokens.append(_joined(prompt, answer, prompt_lengths, answer_lengths))
                lengths.append(prompt_lengths + answer_lengths)
                prompts.append(prompt_lengths)
                ids.append(np.asarray(table["id"].to_pylist()))
                domains.append(np.asarray(table["domain"].cast(pa.string()).to_pylist()))
    if not tokens:
        raise UserError(f"{distill_dir} has no samples of the split {split!r}. Check distill.splits and the recipe.")
    starts = np.concatenate([[0], np.cumsum(np.concatenate(lengths))]).astype(np.int64)
    return SampleStore(
        np.concatenate(tokens), starts, np.concatenate(prompts), np.concatenate(ids), np.concatenate(domains)
    )


def _joined(prompt: Any, answer: Any, prompt_lengths: np.ndarray, answer_lengths: np.ndarray) -> np.ndarray:
    """Interleave two ragged columns: prompt 0, answer 0, prompt 1, answer 1, ..."""
    lengths = prompt_lengths + answer_lengths
    starts = np.concatenate([[0], np.cumsum(lengths)])
    within = np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)
    is_prompt = within < np.repeat(prompt_lengths, lengths)
    joined = np.empty(starts[-1], dtype=np.int32)
    joined[is_prompt] = prompt.flatten().to_numpy()
    joined[~is_prompt] = answer.flatten().to_numpy()
    return joined


def describe_files(folder: Path, files: Sequence[Path]) -> dict[str, dict[str, Any]]:
    return {f.relative_to(folder).as_posix(): {"sha256": sha256_file(f), "bytes": f.stat().st_size} for f in files}


def to_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
