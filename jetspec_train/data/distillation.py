"""One shard of distillation: prompts in, answered conversations in the journal out.

Every conversation is identified before it is answered, so a rerun only answers what is missing. Turns of
a conversation follow each other (the target's own answer goes into the history) while other rows keep
the batch full. Conversations are admitted in one fixed order within the token budget.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DistillConfig
from jetspec_train.data.journal import Journal
from jetspec_train.data.ledger import Ledger
from jetspec_train.data.prompts import Message, Prompt, PromptCounts, Reject, iterate_prompts
from jetspec_train.data.recipes import Recipe
from jetspec_train.data.samples import Sample, sample_id, to_json

TURNS_PER_UNIT = 256  # a conversation has at most so many turns
FLUSH_SECONDS = 60.0
# Reasons that are decisions, not faults of a row; all others count against distill.max_reject_share.
POLICY_REASONS = frozenset({"duplicate", "measured_elsewhere", "truncated", "conversation_too_long"})


def sampling_settings(cfg: DistillConfig) -> dict[str, Any]:
    """What, beside prompt and target, decides an answer. A greedy answer does not depend on the seed."""
    settings: dict[str, Any] = {"sampling": asdict(cfg.sampling), "max_new_tokens": cfg.max_new_tokens}
    if cfg.sampling.temperature > 0:
        settings["seed"] = cfg.seed
    return settings


def in_shard(prompt: Prompt, shard: int, shards: int) -> bool:
    """Prompts are dealt to shards by their hash; the split uses the same hash with a salt of its own."""
    return int(prompt.id[:8], 16) % shards == shard


@dataclass
class Unit:
    """One conversation to answer, once per draw."""

    index: int  # in the shard's order of prompts and draws
    prompt: Prompt
    draw: int
    ids: list[str]  # one per turn
    reserved: int = 0
    history: list[Message] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    rows: list[Sample] = field(default_factory=list)

    @property
    def turn(self) -> int:
        return len(self.rows)


@dataclass
class ShardCounts:
    """Every turn of the shard's prompts ends in exactly one of these, ``turns`` is their sum."""

    turns: int = 0
    kept: int = 0
    rejected: int = 0  # answered or refused, with a reason
    unstarted: int = 0  # the budget was used up
    rows_read: int = 0  # over the whole recipe
    bad_rows: int = 0  # of this shard's share of the recipe's rows
    by_reason: dict[str, int] = field(default_factory=dict)
    next_reservation: int = 0  # tokens that the first unstarted conversation would reserve


class ShardWriter:
    """Collects finished conversations and writes them to the journal in small parts."""

    def __init__(self, journal: Journal, flush_rows: int) -> None:
        self.journal, self.flush_rows = journal, flush_rows
        self.buffer: list[Sample] = []
        self.last = time.monotonic()

    def add(self, rows: list[Sample]) -> None:
        self.buffer.extend(rows)
        if len(self.buffer) >= self.flush_rows or time.monotonic() - self.last > FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        buffer, self.buffer = self.buffer, []
        self.journal.append(buffer)
        self.last = time.monotonic()


class Shard:
    """The work of one shard over one recipe."""

    def __init__(
        self,
        *,
        cfg: DistillConfig,
        recipe: Recipe,
        journal: Journal,
        ledger: Ledger,
        target_identity: dict[str, str],
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.cfg, self.recipe, self.journal, self.ledger = cfg, recipe, journal, ledger
        self.identity = target_identity
        self.settings = sampling_settings(cfg)
        self.shard, self.shards = shard, shards
        self.input_rejects: list[Reject] = []
        self.counts = ShardCounts()
        ledger.restore(journal.tally.kept_tokens, journal.tally.generated_tokens)

    # -- which conversations ------------------------------------------------------------------------------------

    def units(self) -> Iterator[Unit]:
        """All conversations of this shard in the recipe's order, done ones included. Fills the counts."""
        self.counts = ShardCounts()
        self.input_rejects = []
        read = PromptCounts()
        index = 0
        for prompt in iterate_prompts(self.recipe, self.cfg.splits, on_reject=self._row_rejected, counts=read):
            self.counts.rows_read = read.rows
            if not in_shard(prompt, self.shard, self.shards):
                continue
            for draw in range(self.cfg.samples_per_prompt):
                self.counts.turns += prompt.turns
                if prompt.turns > TURNS_PER_UNIT:
                    self.refuse(prompt, draw, "too_many_turns", f"{prompt.turns} turns, at most {TURNS_PER_UNIT}")
                else:
                    yield Unit(index, prompt, draw, self.ids(prompt, draw))
                index += 1
        self.counts.rows_read = read.rows

    def ids(self, prompt: Prompt, draw: int) -> list[str]:
        return [
            sample_id(prompt, turn=turn, draw=draw, target=self.identity, settings=self.settings)
            for turn in range(prompt.turns)
        ]

    def _row_rejected(self, reject: Reject) -> None:
        if reject.row % self.shards == self.shard:
            self.input_rejects.append(reject)
            if reject.bad:
                self.counts.bad_rows += 1

    def refuse(self, prompt: Prompt, draw: int, reason: str, detail: str = "") -> None:
        """A conversation that cannot be answered: found again, the same, in every attempt."""
        for _ in range(prompt.turns):
            self._count(reason)
        self.input_rejects.append(Reject(prompt.source, prompt.row, reason, True, f"draw {draw}: {detail}"[:500]))

    def _count(self, reason: str) -> None:
        self.counts.rejected += 1
        self.counts.by_reason[reason] = self.counts.by_reason.get(reason, 0) + 1

    def is_done(self, unit: Unit) -> bool:
        return all(identifier in self.journal.done for identifier in unit.ids)

    def ordered_units(self, window: int) -> Iterator[Unit]:
        """Conversations in the order in which they are admitted: windows sorted by length, up and down in turn.

        Windows are cut before done conversations are left out, so the order is the same after a kill.
        """
        pending: list[Unit] = []
        ascending = True
        for unit in self.units():
            pending.append(unit)
            if len(pending) == window:
                yield from _by_length(pending, ascending)
                pending, ascending = [], not ascending
        yield from _by_length(pending, ascending)

    # -- answering ----------------------------------------------------------------------------------------------

    def run(self, target: Any, on_answers: Callable[[int, int], None] | None = None) -> None:
        """Answer everything that is missing. ``on_answers(turns, tokens)`` reports progress.

        What is finished is on disk when this returns or raises, Ctrl-C included.
        """
        from jetspec_train.targets.generation import Request, generate_stream

        units = self.ordered_units(window=max(1024, 16 * self.cfg.batch_size))
        ready: deque[Unit] = deque()
        blocked: list[Unit] = []  # at most one: the next to admit, waiting for the budget

        def requests() -> Iterator[Any]:
            while True:
                unit = ready.popleft() if ready else self._admit(units, blocked, target)
                if unit is None:
                    return
                row = int(unit.ids[unit.turn][:12], 16)
                yield Request(unit.prompt_tokens, self.cfg.max_new_tokens, row=row, tag=unit)

        writer = ShardWriter(self.journal, self.cfg.flush_rows)
        try:
            while True:
                progressed = False
                for completion in generate_stream(
                    target,
                    requests(),
                    batch_size=self.cfg.batch_size,
                    sampling=self.cfg.sampling,
                    seed=self.cfg.seed,
                ):
                    progressed = True
                    unit = completion.request.tag
                    finished = self._answered(unit, completion, target)
                    if on_answers is not None:
                        on_answers(1, len(completion.tokens))
                    if finished:
                        self._settle(unit)
                        writer.add(unit.rows)
                    else:
                        ready.append(unit)
                # The stream ends when nothing could be admitted: what was in flight has settled by now.
                if not ready and not (blocked and progressed):
                    break
        finally:
            writer.flush()
        self.count_unstarted([*blocked, *units])

    def _admit(self, units: Iterator[Unit], blocked: list[Unit], target: Any) -> Unit | None:
        """The next conversation that is not done, can be rendered, and fits the budget now; None to wait."""
        while True:
            unit = blocked.pop() if blocked else next(units, None)
            if unit is None:
                return None
            if self.is_done(unit) or (not unit.prompt_tokens and not self._open(unit, target)):
                continue
            reservation = unit.prompt.turns * self.cfg.max_new_tokens
            if not self.ledger.fits(reservation):
                blocked.append(unit)
                return None
            self.ledger.reserve(reservation)
            unit.reserved = reservation
            return unit

    def _open(self, unit: Unit, target: Any) -> bool:
        """Render the first turn. False (and a reject) when the template or the context refuses it."""
        unit.history = list(unit.prompt.messages)
        problem = self._render(unit, target)
        if problem is not None:
            self.refuse(unit.prompt, unit.draw, *problem)
        return problem is None

    def _render(self, unit: Unit, target: Any) -> tuple[str, str] | None:
        try:
            tokens = target.chat.render(unit.history)
        except UserError as error:
            return "template_error", str(error)
        limit = min(self.cfg.max_prompt_tokens, target.max_positions - self.cfg.max_new_tokens)
        if len(tokens) > limit:
            return "prompt_too_long", f"{len(tokens)} tokens, at most {limit}"
        if not tokens:
            return "template_error", "the prompt has no tokens"
        unit.prompt_tokens = tokens
        return None

    def _answered(self, unit: Unit, completion: Any, target: Any) -> bool:
        """Record one answer. True when the conversation is finished."""
        text = target.chat.decode(completion.tokens)
        truncated = completion.finish_reason != "stop"
        reason = None
        if not truncated and len(completion.tokens) <= 1:
            reason = "empty_answer"
        elif truncated and not self.cfg.keep_truncated:
            reason = "truncated"
        unit.rows.append(self._sample(unit, target, completion, text, reason))
        if unit.turn == unit.prompt.turns:
            return True
        unit.history = [
            *unit.history,
            {"role": "assistant", "content": text},
            {"role": "user", "content": unit.prompt.later_turns[unit.turn - 1]},
        ]
        if self._render(unit, target) is None:
            return False
        while unit.turn < unit.prompt.turns:  # no room for the rest of the conversation
            unit.rows.append(self._sample(unit, target, None, "", "conversation_too_long"))
        return True

    def _sample(self, unit: Unit, target: Any, completion: Any, text: str, reason: str | None) -> Sample:
        prompt, answered = unit.prompt, completion is not None
        return Sample(
            id=unit.ids[unit.turn],
            prompt_id=prompt.id,
            order=unit.index * TURNS_PER_UNIT + unit.turn,
            domain=prompt.domain,
            source=prompt.source,
            row=prompt.row,
            template=prompt.template,
            split=prompt.split,
            turn=unit.turn,
            draw=unit.draw,
            messages=to_json(unit.history),
            answer=text,
            reference=prompt.reference,
            prompt_tokens=list(unit.prompt_tokens) if answered else [],
            answer_tokens=completion.tokens if answered else [],
            logprobs=completion.logprobs if answered else [],
            entropies=completion.entropies if answered else [],
            margins=completion.margins if answered else [],
            finish_reason=completion.finish_reason if answered else "",
            truncated=answered and completion.finish_reason != "stop",
            target=to_json(self.identity),
            settings=to_json({**self.settings, "dtype": str(getattr(target, "dtype", "")).replace("torch.", "")}),
            reject_reason=reason,
        )

    def _settle(self, unit: Unit) -> None:
        generated = sum(len(row.answer_tokens) for row in unit.rows)
        kept = sum(len(row.answer_tokens) for row in unit.rows if row.reject_reason is None)
        self.ledger.settle(unit.reserved, kept=kept, generated=generated)

    # -- counting -----------------------------------------------------------------------------------------------

    def count_unstarted(self, rest: Iterator[Unit] | list[Unit]) -> None:
        """Turns that the budget left unanswered; also what is on disk. Then counts in = counts out."""
        for unit in rest:
            if not self.is_done(unit):
                if not self.counts.unstarted:
                    self.counts.next_reservation = unit.prompt.turns * self.cfg.max_new_tokens
                self.counts.unstarted += unit.prompt.turns
        tally = self.journal.tally
        self.counts.kept = tally.kept_rows
        for reason, number in tally.rejected.items():
            self.counts.rejected += number
            self.counts.by_reason[reason] = self.counts.by_reason.get(reason, 0) + number
        self.check_counts()

    def check_counts(self) -> None:
        counts, tally = self.counts, self.journal.tally
        if counts.kept + counts.rejected + counts.unstarted != counts.turns:
            raise RuntimeError(f"{counts.turns} turns went in, but these came out: {asdict(counts)}")
        if self.ledger.reserved or self.ledger.kept != tally.kept_tokens:
            raise RuntimeError(f"the budget ({self.ledger}) disagrees with {tally.kept_tokens} tokens on disk")

    def reject_share(self) -> float:
        """Bad rows and turns, as a share of all that this shard had to do."""
        bad = self.counts.bad_rows
        bad += sum(number for reason, number in self.counts.by_reason.items() if reason not in POLICY_REASONS)
        return bad / max(1, self.counts.turns + self.counts.bad_rows)


def _by_length(units: list[Unit], ascending: bool) -> list[Unit]:
    def characters(unit: Unit) -> int:
        return sum(len(message["content"]) for message in unit.prompt.messages)

    return sorted(units, key=lambda unit: (characters(unit) if ascending else -characters(unit), unit.index))
