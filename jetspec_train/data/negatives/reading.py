"""Finished negatives for whoever trains or evaluates on them. Knows the columns of ``rows.SCHEMA`` and nothing else."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jetspec_train.artifacts.manifest import Manifest, read_manifest, require_manifest, verify_outputs

COLUMNS = [
    "id",
    "sample_id",
    "kind",
    "domain",
    "split",
    "prefix_tokens",
    "path_tokens",
    "labels",
    "logprobs",
    "first_wrong",
    "p_wrong",
    "p_right",
    "margin",
    "is_positive",
    "difficulty",
]


@dataclass(frozen=True)
class Negative:
    """One judged path; see ``rows.SCHEMA`` for units.

    Attributes:
        sample_id: of the distilled sample; ``prefix`` is the beginning of that sample's prompt and answer.
        prefix: token ids; the last one is the anchor.
        path: token ids proposed after it. Only the first ``len(labels)`` are judged.
        labels: per judged token, whether it is the target's own greedy choice; ends with the first that is not.
        logprobs: the target's log-probability of each judged token, nats: what sampled and ratio labels follow from.
        first_wrong: index of the first wrong token; None where the whole path is right (``is_positive``).
    """

    id: str
    sample_id: str
    kind: str
    domain: str
    split: str
    prefix: list[int]
    path: list[int]
    labels: list[bool]
    logprobs: list[float]
    first_wrong: int | None
    p_wrong: float
    p_right: float
    margin: float
    is_positive: bool
    difficulty: str


def negatives_dir(run_dir: str | Path) -> Path:
    return Path(run_dir) / "negatives"


def finished_negatives(run_dir: str | Path) -> Manifest | None:
    """The manifest of the run's negatives, None where that stage has not finished. Its files are not read."""
    return read_manifest(negatives_dir(run_dir))


def load_negatives(
    folder: str | Path, *, split: str = "train", kinds: Collection[str] | None = None
) -> Iterator[Negative]:
    """The judged paths of one split, in the order of work; ``kinds`` None: all.

    Raises UserError where the stage has not finished, or a file was changed since.
    """
    manifest = require_manifest(folder, "negatives")
    verify_outputs(folder, manifest)
    for path in sorted(Path(folder).glob("negatives-*.parquet")):
        with pq.ParquetFile(path) as file:
            for group in range(file.num_row_groups):
                for row in file.read_row_group(group, columns=COLUMNS).to_pylist():
                    if row["split"] == split and (kinds is None or row["kind"] in kinds):
                        yield _negative(row)


def judged_tokens(manifest: Manifest) -> int:
    """Supervised tokens that the negatives add to those of the samples; both count against ``budget.tokens``."""
    return int(manifest.counts["judged_tokens"])


def _negative(row: dict[str, Any]) -> Negative:
    return Negative(prefix=row.pop("prefix_tokens"), path=row.pop("path_tokens"), **row)
