"""One judged path: the columns of ``negatives-*.parquet`` and of the journal before it.

A path follows a prefix whose last token is the anchor. It is judged as decoding would judge it: token by token, up to
and including the first one that is not the target's own greedy choice after what stands before it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from jetspec_train.artifacts.files import stable_hash
from jetspec_train.data.journal import RowForm

ON_POLICY, NEAR_MISS = "on_policy", "near_miss"
SYNTHETIC = ("numeric", "swap", "repeat", "truncate", "stale", "subword")
KINDS = (ON_POLICY, NEAR_MISS, *SYNTHETIC)
# Upper ends of the margins (nats) of a hard and of a medium one: the right token is then e or e^3 times as likely.
DIFFICULTIES = {"hard": 1.0, "medium": 3.0, "easy": math.inf}

FORMAT = "jetspec-train negatives 1"
_TOKENS = pa.list_(pa.int32())
_LABEL = pa.dictionary(pa.int32(), pa.string())

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("order", pa.int64()),  # place in the order of work, the same in every run
        ("sample_id", pa.string()),
        ("kind", _LABEL),
        ("variant", _LABEL),  # which way of its kind: digit, unit, rank 3, early end, ...
        ("domain", _LABEL),
        ("split", _LABEL),
        ("prefix_tokens", _TOKENS),  # prompt and the right answer so far; the last one is the anchor
        ("path_tokens", _TOKENS),  # what is proposed after it, at most a block
        ("labels", pa.list_(pa.bool_())),  # of the judged tokens: is it the target's own choice?
        ("logprobs", pa.list_(pa.float32())),  # nats, the target's, of each judged token (temperature 1, no filters)
        ("first_wrong", pa.int32()),  # place in the path; null where the target would accept all of it
        ("place", pa.int32()),  # where the four below are measured: the first wrong token, or the closest call
        ("right_token", pa.int32()),  # the target's choice there
        ("wrong_token", pa.int32()),  # the path's token there; of an accepted path the target's second choice
        ("p_right", pa.float32()),
        ("p_wrong", pa.float32()),
        ("margin", pa.float32()),  # nats, ln p_right - ln p_wrong
        ("is_positive", pa.bool_()),  # the target accepts the whole path
        ("difficulty", _LABEL),
        ("reject_reason", _LABEL),  # journal only
    ]
)
JUDGED = RowForm(FORMAT, SCHEMA, "parts/shard-{shard:05d}/judged.parquet", "labels")


@dataclass
class JudgedPath:
    """A row of SCHEMA; with a ``reject_reason`` it is an attempt from which no path came."""

    id: str
    order: int
    sample_id: str
    kind: str
    domain: str
    split: str
    variant: str | None = None
    prefix_tokens: list[int] = field(default_factory=list)
    path_tokens: list[int] = field(default_factory=list)
    labels: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    first_wrong: int | None = None
    place: int | None = None
    right_token: int | None = None
    wrong_token: int | None = None
    p_right: float | None = None
    p_wrong: float | None = None
    margin: float | None = None
    is_positive: bool | None = None
    difficulty: str | None = None
    reject_reason: str | None = None


def difficulty_of(margin: float) -> str:
    """The bucket of a margin in nats."""
    return next(name for name, limit in DIFFICULTIES.items() if margin < limit)


def class_of(kind: str) -> str:
    """What the mix distinguishes: on_policy, near_miss, synthetic."""
    return kind if kind in (ON_POLICY, NEAR_MISS) else "synthetic"


def path_id(sample_id: str, kind: str, attempt: int, settings: Mapping[str, Any]) -> str:
    """The identity of an attempt, known before anything is built or judged.

    ``settings``: what decides its outcome (target, bundle, block, seed); the sample's own id covers text and sampling.
    """
    return stable_hash({"sample": sample_id, "kind": kind, "attempt": attempt, **settings})[:32]
