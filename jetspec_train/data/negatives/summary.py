"""What was made, for eyes: one self-contained HTML page with the books of every kind and examples as coloured text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from jetspec_train.data.negatives.answer_text import Codec
from jetspec_train.data.negatives.merging import KindCounts, Merged
from jetspec_train.data.negatives.rows import DIFFICULTIES, KINDS
from jetspec_train.data.samples import read_table

SHOWN_PREFIX = 48  # tokens of the prefix before the anchor
MEANINGS = {
    "on_policy": "what the draft itself proposed, up to the first token that the target does not choose",
    "near_miss": "the target's second to fifth choice",
    "numeric": "another digit, sign, operator or unit",
    "swap": "two tokens in the other order, or another name, identifier or number of the same document",
    "repeat": "a loop",
    "truncate": "an end too early, or missed",
    "stale": "what followed the same words earlier on",
    "subword": "the right text by other tokens",
}
_COLUMNS = [
    *("id", "kind", "variant", "domain", "prefix_tokens", "path_tokens", "labels", "first_wrong", "place"),
    *("right_token", "wrong_token", "p_right", "p_wrong", "margin", "is_positive", "difficulty"),
]


@dataclass(frozen=True)
class Span:
    """A token of an example. ``state``: prefix, anchor, right, wrong, unjudged or choice (the target's own)."""

    text: str
    state: str


def spans_of(row: Mapping[str, Any], codec: Codec) -> list[Span]:
    """The tokens of a judged path as they are shown: a part of the prefix, the path, the target's choice."""
    prefix = row["prefix_tokens"]
    states = [*["prefix"] * (len(prefix) - 1), "anchor"][-SHOWN_PREFIX:]
    tokens = prefix[-SHOWN_PREFIX:]
    spans = [Span(text, state) for text, state in zip(_texts(tokens, codec), states)]
    labels = row["labels"]
    for place, text in enumerate(_texts([*tokens, *row["path_tokens"]], codec)[len(tokens) :]):
        if place >= len(labels):
            spans.append(Span(text, "unjudged"))
            continue
        spans.append(Span(text, "right" if labels[place] else "wrong"))
        if not labels[place]:
            choice = _texts([*tokens, *row["path_tokens"][:place], row["right_token"]], codec)[-1]
            spans.append(Span(choice, "choice"))
    return spans


def _texts(tokens: Sequence[int], codec: Codec) -> list[str]:
    """What each token adds to the text before it; line breaks as signs, nothing (a part of a character) as a dot."""
    texts, known = [], ""
    for end in range(1, len(tokens) + 1):
        whole = codec.decode(tokens[:end], skip_special_tokens=False)
        added = whole[len(known) :] if whole.startswith(known) else ""
        known = whole
        texts.append(added.replace("\n", "↵").replace("\t", "⇥") or "·")
    return texts


def choose_examples(files: Sequence[Path], count: int) -> dict[str, list[dict[str, Any]]]:
    """Up to ``count`` kept rows of each kind: one accepted path if there is one, then difficulties in turn."""
    groups: dict[str, dict[tuple[bool, str], list[dict[str, Any]]]] = {}
    for path in files:
        if path.suffix == ".parquet":
            for batch in read_table(path, columns=_COLUMNS).to_batches(max_chunksize=1024):
                for row in batch.to_pylist():
                    group = groups.setdefault(row["kind"], {})
                    key = (row["is_positive"], "" if row["is_positive"] else row["difficulty"])
                    if len(group.setdefault(key, [])) < count:
                        group[key].append(row)
    chosen: dict[str, list[dict[str, Any]]] = {}
    for kind in (kind for kind in KINDS if kind in groups):
        positives = groups[kind].get((True, ""), [])[:1]
        others = [groups[kind].get((False, name), []) for name in DIFFICULTIES]
        turns = [rows[turn] for turn in range(count) for rows in others if turn < len(rows)]
        chosen[kind] = [*turns[: count - len(positives)], *positives][:count]
    return chosen


def render_summary(merged: Merged, codec: Codec, *, examples: int, facts: Mapping[str, Any]) -> str:
    """The page. ``facts``: name -> value lines at its head. Every text is escaped."""
    import jinja2

    source = resources.files("jetspec_train.data.negatives").joinpath("templates/summary.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    shown = [
        {
            "kind": kind,
            "meaning": MEANINGS[kind],
            "rows": [{**row, "spans": spans_of(row, codec)} for row in rows],
        }
        for kind, rows in choose_examples(merged.files, examples).items()
    ]
    return environment.from_string(source).render(
        kinds=[(name, MEANINGS[name], kind, _bars(kind)) for name, kind in merged.kinds.items()],
        counts=merged.counts,
        facts=facts,
        examples=shown,
        difficulties=DIFFICULTIES,
    )


def _bars(kind: KindCounts) -> list[tuple[str, int, float]]:
    """(difficulty, kept rows, width in per cent)."""
    total = max(1, kind.kept)
    return [(name, count, 100 * count / total) for name, count in kind.kept_by_difficulty.items()]
