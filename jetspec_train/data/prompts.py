"""From a recipe to prompts: rows become checked conversations, each with its domain and its split.

A bad row never stops a run: it is handed to ``on_reject`` with a reason. Reading is streaming; what
stays in memory is one 8-byte hash per distinct prompt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.procedural import draw_prompt, report_templates
from jetspec_train.data.recipes import CONTENT_ROLES, PLACEHOLDER, Recipe, Source
from jetspec_train.data.rows import BadRow, read_rows
from jetspec_train.data.splits import SPLITS, content_hash, split_of

MAX_CHARACTERS = 200_000  # per prompt: beyond any context, and slow to tokenise

Message = dict[str, str]


@dataclass(frozen=True)
class Prompt:
    """One conversation to answer: its opening messages, and the user turns that follow the answers."""

    id: str  # content hash of its user turns and system text
    domain: str
    messages: list[Message]  # up to and including the first user turn
    source: str
    split: str
    template: str | None = None  # procedural: which one made it
    later_turns: tuple[str, ...] = ()  # replayed after the target's own answers
    reference: str | None = None  # a known answer, for scoring only
    scoring: str | None = None  # how an answer is compared with it
    row: int = 0  # where in the source

    @property
    def turns(self) -> int:
        return 1 + len(self.later_turns)


@dataclass(frozen=True)
class Reject:
    """A row that became no prompt. ``bad`` rows count against the allowed share; others are policy."""

    source: str
    row: int
    reason: str
    bad: bool = True
    detail: str = ""


@dataclass
class _Conversation:
    system: str | None
    turns: list[str]
    raw_turns: list[str]  # before the prompt shape: they decide the split
    domain: str
    reference: str | None = None
    template: str | None = None


@dataclass
class PromptCounts:
    """What became of the rows that were read: ``rows = prompts + other_splits + rejects``."""

    rows: int = 0
    prompts: int = 0
    turns: int = 0
    other_splits: int = 0
    rejects: int = 0
    bad: int = 0
    by_domain: dict[str, int] = field(default_factory=dict)
    by_reason: dict[str, int] = field(default_factory=dict)
    stopped_early: bool = False  # the recipe's ``prompts`` was reached


def iterate_prompts(
    recipe: Recipe,
    splits: Sequence[str] = SPLITS,
    *,
    on_reject: Callable[[Reject], None] | None = None,
    counts: PromptCounts | None = None,
) -> Iterator[Prompt]:
    """The recipe's prompts of the given splits, always in the same order.

    Sources take turns by weight until each has ended. A prompt seen before is rejected as a duplicate;
    one that a ``use: report`` source measures is never given to training. ``recipe.prompts`` limits
    the train split alone, so that what is measured does not depend on how much is trained on.

    Raises UserError for a missing file or column, and when the recipe has no rows at all.
    """
    unknown = [split for split in splits if split not in SPLITS]
    if unknown:
        raise UserError(f"{unknown[0]!r} is not a split. Splits: {', '.join(SPLITS)}.")
    counts = counts if counts is not None else PromptCounts()
    seen: set[int] = set()
    measured = _measured_prompts(recipe, splits)
    train_left = recipe.prompts
    for source, row, found in _interleaved(recipe):
        counts.rows += 1
        prompt, reject = _prompt_or_reject(recipe, source, row, found, seen, measured)
        if reject is not None:
            counts.rejects += 1
            counts.bad += reject.bad
            counts.by_reason[reject.reason] = counts.by_reason.get(reject.reason, 0) + 1
            if on_reject is not None:
                on_reject(reject)
            continue
        assert prompt is not None
        if prompt.split not in splits or (prompt.split == "train" and train_left == 0):
            counts.other_splits += 1
            continue
        counts.prompts += 1
        counts.turns += prompt.turns
        counts.by_domain[prompt.domain] = counts.by_domain.get(prompt.domain, 0) + 1
        yield prompt
        if prompt.split == "train" and train_left is not None:
            train_left -= 1
            if train_left == 0 and set(splits) == {"train"}:
                counts.stopped_early = True
                return
    if counts.rows == 0:
        names = ", ".join(f"{s.name} ({s.path or s.type})" for s in recipe.sources)
        raise UserError(f"The recipe {recipe.name} has no rows: {names} is empty.")


def _prompt_or_reject(
    recipe: Recipe, source: Source, row: int, found: Any, seen: set[int], measured: frozenset[int]
) -> tuple[Prompt | None, Reject | None]:
    try:
        conversation = _read_conversation(source, recipe, row, found)
    except BadRow as bad:
        return None, Reject(source.name, row, bad.reason, True, bad.detail[:500])
    digest = content_hash([*([conversation.system] if conversation.system else []), *conversation.raw_turns])
    short = int(digest[:16], 16)
    if source.use != "report" and short in measured:
        return None, Reject(source.name, row, "measured_elsewhere", False)
    if short in seen:
        return None, Reject(source.name, row, "duplicate", False)
    seen.add(short)
    split = _split(recipe, source, conversation, digest)
    opening = [{"role": "system", "content": conversation.system}] if conversation.system else []
    prompt = Prompt(
        id=digest[:32],
        domain=conversation.domain,
        messages=[*opening, {"role": "user", "content": conversation.turns[0]}],
        source=source.name,
        split=split,
        template=conversation.template,
        later_turns=tuple(conversation.turns[1:]),
        reference=conversation.reference,
        scoring=source.scoring,
        row=row,
    )
    return prompt, None


def _split(recipe: Recipe, source: Source, conversation: _Conversation, digest: str) -> str:
    if source.use == "report":
        return "report"
    if source.type == "procedural":
        if source.use == "all" and conversation.template in report_templates(recipe.shares["report"]):
            return "report"
        return split_of(digest, recipe.shares, measured=False)
    return split_of(digest, recipe.shares, measured=source.use == "all")


def _measured_prompts(recipe: Recipe, splits: Sequence[str]) -> frozenset[int]:
    """Short hashes of every ``use: report`` row: read first, so that training can never contain one."""
    if set(splits) == {"report"} or all(source.use == "report" for source in recipe.sources):
        return frozenset()
    hashes = set()
    for source in recipe.sources:
        if source.use != "report":
            continue
        for row, found in _rows(source):
            try:
                conversation = _read_conversation(source, recipe, row, found)
            except BadRow:
                continue  # reported when the source has its turn
            system = [conversation.system] if conversation.system else []
            hashes.add(int(content_hash([*system, *conversation.raw_turns])[:16], 16))
    return frozenset(hashes)


def _interleaved(recipe: Recipe) -> Iterator[tuple[Source, int, Any]]:
    """Rows of all sources; the one that is furthest behind its weight is asked next."""
    open_sources = [(source, iter(_rows(source))) for source in recipe.sources]
    taken = {source.name: 0 for source in recipe.sources}
    while open_sources:
        source, rows = min(open_sources, key=lambda item: (taken[item[0].name] + 1) / item[0].weight)
        try:
            row, found = next(rows)
        except StopIteration:
            open_sources = [item for item in open_sources if item[0] is not source]
            continue
        taken[source.name] += 1
        yield source, row, found


def _rows(source: Source) -> Iterable[tuple[int, Any]]:
    if source.type == "procedural":
        count = source.count if source.limit is None else min(source.count, source.limit)
        return ((index, None) for index in range(count))
    return read_rows(source)


def _read_conversation(source: Source, recipe: Recipe, row: int, found: Any) -> _Conversation:
    if source.type == "procedural":
        drawn = draw_prompt(source.seed, row, source.domains)
        turns = list(drawn.turns)
        return _Conversation(None, turns, turns, drawn.domain, template=drawn.template)
    if isinstance(found, BadRow):
        raise found
    conversation = conversation_of(source, found)
    if source.max_turns is not None:
        conversation.turns = conversation.turns[: source.max_turns]
        conversation.raw_turns = conversation.raw_turns[: source.max_turns]
    if sum(map(len, conversation.turns)) > MAX_CHARACTERS:
        raise BadRow("too_long", f"more than {MAX_CHARACTERS} characters")
    if not conversation.domain:
        conversation.domain = recipe.name
    return conversation


def conversation_of(source: Source, row: dict[str, Any]) -> _Conversation:
    """Map one row's columns to user turns. Assistant turns are dropped: the target writes its own.

    Raises BadRow with the reason: empty or non-text content, unknown roles, tool messages, no user turn.
    """
    columns = source.columns
    role = next(name for name in CONTENT_ROLES if name in columns)
    system = _text(row, columns["system"], "system", may_be_empty=True) if "system" in columns else ""
    if role == "messages":
        found_system, raw = _user_turns(row[columns[role]])
        system = found_system or system
        shaped = [_shape(source.prompt or "{turn}", {"turn": turn}) for turn in raw]
    elif role == "turns":
        raw = _turn_list(row[columns[role]])
        shaped = [_shape(source.prompt or "{turn}", {"turn": turn}) for turn in raw]
    else:
        values = {role: _text(row, columns[role], role)}
        if "input" in columns:
            values["input"] = _text(row, columns["input"], "input", may_be_empty=True)
        default = f"{{{role}}}\n\n{{input}}" if values.get("input") else f"{{{role}}}"
        raw = ["\n\n".join(value for value in values.values() if value)]
        shaped = [_shape(source.prompt or default, values)]
    domain = str(row[columns["domain"]]) if row.get(columns.get("domain", "")) is not None else source.domain or ""
    return _Conversation(system or None, shaped, raw, domain, _reference(row, columns))


def _reference(row: dict[str, Any], columns: dict[str, str]) -> str | None:
    """The known answer; of code its tests: a text, a list of statements, or a ``check`` function and its subject."""
    found = row.get(columns.get("answer", ""))
    if found is None:
        return None
    text = "\n".join(str(line) for line in found) if isinstance(found, list) else str(found)
    return f"{text}\n\ncheck({row[columns['entry_point']]})" if "entry_point" in columns else text


def _shape(shape: str, values: dict[str, str]) -> str:
    """Fill ``{name}``; every other brace stands for itself (``\\boxed{}``), ``{{name}}`` gives ``{name}``."""

    def fill(match: re.Match[str]) -> str:
        doubled, name = match[1], match[2]
        return f"{{{doubled}}}" if doubled else values.get(name, "")

    return PLACEHOLDER.sub(fill, shape).strip()


def _text(row: dict[str, Any], column: str, role: str, may_be_empty: bool = False) -> str:
    value = row[column]
    if value is None and may_be_empty:
        return ""
    if not isinstance(value, str):
        raise BadRow("not_text", f"{column} ({role}) is {type(value).__name__}")
    return _clean(value, column, may_be_empty)


def _clean(value: str, where: str, may_be_empty: bool = False) -> str:
    if not value.strip():
        if may_be_empty:
            return ""
        raise BadRow("empty", f"{where} has no text")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError as error:
        raise BadRow("invalid_unicode", f"{where}: {error.reason}") from error
    return value


def _turn_list(value: Any) -> list[str]:
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRow("no_user_turn", "turns must be a list of at least one text")
    turns = []
    for index, turn in enumerate(value):
        if not isinstance(turn, str):
            raise BadRow("not_text", f"turn {index} is {type(turn).__name__}")
        turns.append(_clean(turn, f"turn {index}"))
    return turns


_ROLE_NAMES = {"human": "user", "gpt": "assistant", "bot": "assistant", "model": "assistant"}


def _user_turns(value: Any) -> tuple[str, list[str]]:
    """System text and user turns of a list of ``{role, content}`` or ``{from, value}`` messages."""
    if not isinstance(value, list) or not value:
        raise BadRow("no_user_turn", "messages must be a list of at least one message")
    system, turns, previous = "", [], None
    for index, message in enumerate(value):
        if not isinstance(message, dict):
            raise BadRow("not_text", f"message {index} is {type(message).__name__}")
        role = message.get("role", message.get("from"))
        role = _ROLE_NAMES.get(str(role), role)
        content = message.get("content", message.get("value"))
        if role is None:
            raise BadRow("no_role", f"message {index} has neither 'role' nor 'from'")
        if role in ("tool", "function", "ipython") or message.get("tool_calls"):
            raise BadRow("tool_message", f"message {index}: conversations with tools are not replayed")
        if role not in ("system", "user", "assistant"):
            raise BadRow("unknown_role", f"message {index} has the role {role!r}")
        if not isinstance(content, str):
            raise BadRow("not_text", f"content of message {index} is {type(content).__name__}")
        if role == "system":
            if index:
                raise BadRow("role_order", f"message {index}: a system message must come first")
            system = _clean(content, "system", may_be_empty=True)
        elif role == "user":
            if previous == "user":
                raise BadRow("role_order", f"message {index}: two user turns in a row")
            turns.append(_clean(content, f"message {index}"))
        elif previous not in ("user",):
            raise BadRow("role_order", f"message {index}: an assistant turn without a question before it")
        previous = role
    if not turns:
        raise BadRow("no_user_turn", "no message of the user")
    return system, turns
