"""One shard of the work: samples in, judged paths in the journal out.

Every attempt is identified before anything is built, and every attempt becomes exactly one row: a judged path, or a
reject that says why there is none. Samples are read in groups of a fixed order and a group is written as a whole, so a
run that was killed makes the missing groups again with the same neighbours, hence the same numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from jetspec_train.config import NegativesConfig
from jetspec_train.data.journal import Journal
from jetspec_train.data.negatives.answer_text import AnswerText, CannotBuild, Edit
from jetspec_train.data.negatives.candidates import (
    Candidate,
    attempts_of,
    build_edit,
    end_token,
    generator_of,
    place_edit,
)
from jetspec_train.data.negatives.judging import Group, judge, read_group, top_choices
from jetspec_train.data.negatives.replay import replay_rounds
from jetspec_train.data.negatives.rows import DIFFICULTIES, NEAR_MISS, ON_POLICY, JudgedPath, difficulty_of, path_id
from jetspec_train.data.samples import SampleStore
from jetspec_train.decoding.drafting import Drafter
from jetspec_train.targets.target import Target

ORDERS_PER_SAMPLE = 1 << 16
RANKS = (2, 3, 4, 5)  # of a near miss among the target's choices; METHODS 6
PLACES_LOOKED_AT = 8  # per near miss, so that one of the wanted difficulty is among them
TOKENS_PER_ROUND = 3  # of the answer that a replayed round passes, expected; only decides where replays may begin


@dataclass(frozen=True)
class Unit:
    """One sample and what is tried on it."""

    order: int
    sample_id: str
    split: str
    domain: str
    tokens: np.ndarray  # prompt and answer
    first: int  # position of the first answer token
    kinds: tuple[str, ...]
    ids: tuple[str, ...]  # one per attempt


class Shard:
    """The attempts of one shard.

    Args:
        stores: the samples by split.
        block: tokens of a path, at most.
        drafted: a draft is there to mine with.
        id_settings: what decides an attempt's outcome beside sample, kind and number (``rows.path_id``).
    """

    def __init__(
        self,
        *,
        cfg: NegativesConfig,
        stores: Mapping[str, SampleStore],
        journal: Journal,
        block: int,
        drafted: bool,
        id_settings: Mapping[str, Any],
        shard: int = 0,
        shards: int = 1,
    ) -> None:
        self.cfg, self.journal, self.block = cfg, journal, block
        self.id_settings, self.drafted = dict(id_settings), drafted
        self.last_tokens = Counter(
            int(token) for store in stores.values() for token in store.tokens[store.starts[1:] - 1]
        )
        self.units = [unit for unit in self._units(stores) if int(unit.sample_id[:8], 16) % shards == shard]

    def _units(self, stores: Mapping[str, SampleStore]) -> list[Unit]:
        """Samples of all shards, at most ``cfg.samples`` of each split: the first by their ids, which are random."""
        units: list[Unit] = []
        for split, store in stores.items():
            for row in np.argsort(store.ids, kind="stable")[: self.cfg.samples].tolist():
                sample_id = str(store.ids[row])
                kinds = tuple(attempts_of(self.cfg, sample_id, self.drafted))
                units.append(
                    Unit(
                        order=len(units),
                        sample_id=sample_id,
                        split=split,
                        domain=str(store.domains[row]),
                        tokens=store.tokens[store.starts[row] : store.starts[row + 1]],
                        first=int(store.prompt_lengths[row]),
                        kinds=kinds,
                        ids=tuple(path_id(sample_id, kind, i, self.id_settings) for i, kind in enumerate(kinds)),
                    )
                )
        return units

    @property
    def attempts(self) -> int:
        return sum(len(unit.ids) for unit in self.units)

    def groups(self) -> list[list[Unit]]:
        """All samples in the order of work: neighbours are of similar length."""
        ordered = sorted(self.units, key=lambda unit: (len(unit.tokens), unit.sample_id))
        size = self.cfg.batch_size
        return [ordered[begin : begin + size] for begin in range(0, len(ordered), size)]

    def run(self, target: Target, drafter: Drafter | None, report: Callable[[int, int], None] | None = None) -> None:
        """Do what is missing. ``report(attempts, tokens)`` after each group."""
        for group in self.groups():
            missing = [unit for unit in group if not self.journal.done.issuperset(unit.ids)]
            if missing:
                rows = GroupWork(self, target, drafter, missing).rows()
                self.journal.append(rows)
                if report is not None:
                    report(len(rows), sum(len(unit.tokens) for unit in missing))
        if self.journal.tally.rows != self.attempts:
            raise RuntimeError(f"{self.attempts} attempts went in, {self.journal.tally.rows} rows came out")


class GroupWork:
    """One group: read the samples, build the paths, let the target judge them."""

    def __init__(self, shard: Shard, target: Target, drafter: Drafter | None, units: Sequence[Unit]) -> None:
        self.cfg, self.block, self.target, self.units = shard.cfg, shard.block, target, units
        self.drafter = drafter
        self.end = end_token(shard.last_tokens, target.eos_ids)
        self.found: list[list[Candidate | str]] = [["" for _ in unit.kinds] for unit in units]  # str: why not

    def rows(self) -> list[JudgedPath]:
        taps = self.drafter.taps if self.drafter is not None else ()
        group = read_group(self.target, [unit.tokens.tolist() for unit in self.units], taps)
        self._near_misses(group)
        self._synthetic()
        if self.drafter is not None:
            self._on_policy(group, self.drafter)
        self._refuse_impossible()
        paths = [[item for item in of_unit if isinstance(item, Candidate)] for of_unit in self.found]
        verdicts = judge(self.target, group, paths)
        rows = []
        for unit, items, judged in zip(self.units, self.found, verdicts):
            rest = iter(judged)
            for attempt, (kind, item) in enumerate(zip(unit.kinds, items)):
                row = JudgedPath(
                    id=unit.ids[attempt],
                    order=unit.order * ORDERS_PER_SAMPLE + attempt,
                    sample_id=unit.sample_id,
                    kind=kind,
                    domain=unit.domain,
                    split=unit.split,
                )
                if isinstance(item, Candidate):
                    row.variant = item.variant
                    row.prefix_tokens = unit.tokens[: item.anchor + 1].tolist()
                    row.path_tokens = item.tokens
                    for name, value in asdict(next(rest)).items():
                        setattr(row, name, value)
                else:
                    row.reject_reason = item
                rows.append(row)
        return rows

    def _near_misses(self, group: Group) -> None:
        """The target's 2nd to 5th choice at a place of the answer, places of all difficulties alike."""
        asked = [
            (row, a) for row, unit in enumerate(self.units) for a, kind in enumerate(unit.kinds) if kind == NEAR_MISS
        ]
        drawn = []
        for row, attempt in asked:
            unit = self.units[row]
            random = generator_of(self.cfg.seed, unit.sample_id, str(attempt))
            room = len(unit.tokens) - unit.first - 1
            if room < 1:
                self.found[row][attempt] = "too_short"
            else:
                drawn.append((row, attempt, random, unit.first + 1 + random.integers(room, size=PLACES_LOOKED_AT)))
        if not drawn:
            return
        rows = np.repeat([row for row, *_ in drawn], PLACES_LOOKED_AT)
        before = np.concatenate([places for *_, places in drawn]) - 1  # the state before a token gives its distribution
        tokens, logprobs = top_choices(self.target, group.hidden_BTD[rows.tolist(), before.tolist()], max(RANKS))
        shape = (len(drawn), PLACES_LOOKED_AT, max(RANKS))
        for (row, attempt, random, places), best, scores in zip(drawn, tokens.reshape(shape), logprobs.reshape(shape)):
            place, rank = near_miss_place(scores, random)
            edit = Edit(int(places[place]), [int(best[place, rank - 1])], int(places[place]) + 1, f"choice {rank}")
            self._place(row, attempt, edit, random)

    def _synthetic(self) -> None:
        for row, unit in enumerate(self.units):
            answer = AnswerText(unit.tokens.tolist(), unit.first, self.target.chat)
            for attempt, kind in enumerate(unit.kinds):
                if kind not in (NEAR_MISS, ON_POLICY):
                    random = generator_of(self.cfg.seed, unit.sample_id, str(attempt))
                    try:
                        edit = build_edit(kind, answer, random, self.end)
                    except CannotBuild as error:
                        self.found[row][attempt] = str(error)
                    else:
                        self._place(row, attempt, edit, random)

    def _place(self, row: int, attempt: int, edit: Edit, random: np.random.Generator) -> None:
        unit = self.units[row]
        try:
            self.found[row][attempt] = place_edit(
                unit.tokens.tolist(), unit.first, edit, block=self.block, ends=self.target.eos_ids, random=random
            )
        except CannotBuild as error:
            self.found[row][attempt] = str(error)

    def _on_policy(self, group: Group, drafter: Drafter) -> None:
        """Rounds of the draft from a random place on; the n-th on-policy attempt is the n-th round."""
        places = [[a for a, kind in enumerate(unit.kinds) if kind == ON_POLICY] for unit in self.units]
        starts = []
        for unit, of_unit in zip(self.units, places):
            random = generator_of(self.cfg.seed, unit.sample_id, ON_POLICY)
            room = max(1, len(unit.tokens) - unit.first - 1 - TOKENS_PER_ROUND * len(of_unit))
            starts.append(unit.first + int(random.integers(room)))
        counts = [len(of_unit) for of_unit in places]
        rounds = replay_rounds(self.target, drafter, group, starts, counts, self.block)
        for row, (of_unit, mined) in enumerate(zip(places, rounds)):
            for number, attempt in enumerate(of_unit):
                self.found[row][attempt] = mined[number] if number < len(mined) else "answer_ends_before"

    def _refuse_impossible(self) -> None:
        """No path twice for a sample, and none beyond the target's context."""
        for of_unit in self.found:
            seen: set[tuple[int, ...]] = set()
            for attempt, item in enumerate(of_unit):
                if not isinstance(item, Candidate):
                    continue
                key = (item.anchor, *item.tokens)
                if key in seen:
                    of_unit[attempt] = "duplicate"
                elif item.anchor + 1 + len(item.tokens) > self.target.max_positions:
                    of_unit[attempt] = "context_full"
                seen.add(key)


def near_miss_place(logprobs: np.ndarray, random: np.random.Generator) -> tuple[int, int]:
    """(place, rank) of a near miss whose difficulty is drawn first, each as likely; the closest to it if there is none.

    ``logprobs`` [places, ranks]: of the target's choices, best first.
    """
    wanted = str(random.choice(list(DIFFICULTIES)))
    margins = logprobs[:, :1] - logprobs[:, [rank - 1 for rank in RANKS]]
    fitting = [(int(p), int(r)) for p, r in np.ndindex(*margins.shape) if difficulty_of(float(margins[p, r])) == wanted]
    if fitting:
        place, index = fitting[int(random.integers(len(fitting)))]
    else:  # the hardest if all are easier than what was wanted, else the easiest
        all_easier = difficulty_of(float(margins.min())) == "easy" or wanted == "hard"
        extreme = margins.argmin() if all_easier else margins.argmax()
        place, index = (int(i) for i in np.unravel_index(extreme, margins.shape))
    return place, RANKS[index]
