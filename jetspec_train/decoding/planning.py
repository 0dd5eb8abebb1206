"""A round with its controls on: draft, judge, defer or verify, prune, choose how much to send, and learn from it.

``RoundPlanner`` is what the decoder asks when stages, pruning, scheduler, result cache, a trace or the ratio rule are
on; otherwise there is none and the loop is as short as before. Everything it decides happens before the target's
choices are made, so under the match rule nothing here can change an output (METHODS 7). Only ``trusting`` does, by
keeping tokens.

Order within a round: draft a tree below what is pending - judge it - the controller decides on its next stage - a stage
that is deferred waits and drafting goes on below it - the result cache adds a path - prune - the scheduler chooses the
size - pending tokens and the best other nodes are sent.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.config_checks import check_decoding
from jetspec_train.decoding.acceptance import walk, walk_trusting
from jetspec_train.decoding.bookkeeping import RowRound, count_stages, note_rates, trace_record
from jetspec_train.decoding.candidate_set import CandidateSet, prune, sending_order
from jetspec_train.decoding.controller import TRUSTING, Stage, decoding_mode, make_controller
from jetspec_train.decoding.cost_profile import profile_of
from jetspec_train.decoding.drafting import BlockDrafter, Companions, ContinuingDrafter, Drafter
from jetspec_train.decoding.judging import VerifierJudge, calibrated
from jetspec_train.decoding.patterns import pattern_statistics
from jetspec_train.decoding.ratio import RatioRounds, confident_survivals
from jetspec_train.decoding.reuse import Reuse
from jetspec_train.decoding.rows import Row
from jetspec_train.decoding.scheduler import AdaptiveScheduler, UtilisationBound, first_nodes
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.streams import VerificationStream
from jetspec_train.decoding.trace import TraceWriter
from jetspec_train.decoding.tree import Tree
from jetspec_train.decoding.utilisation import UtilisationMeter, parallel_units
from jetspec_train.targets.cache import KVCache
from jetspec_train.targets.target import Target

Stream = Callable[[Row, list[int]], None]


def has_controls(settings: DecodingConfig) -> bool:
    """Whether these settings need a planner at all."""
    asked = (settings.stages, settings.prune, settings.scheduler, settings.cache, settings.trace, settings.candidates)
    return any(asked) or settings.rule != "match" or settings.policy == TRUSTING


def without_controls(settings: DecodingConfig) -> DecodingConfig:
    """The same drafting by the plain loop: for measurements of the draft alone."""
    fresh = DecodingConfig()
    names = ("rule", "policy", "stages", "stream_unverified", "prune", "candidates", "scheduler", "utilisation")
    changes = {name: getattr(fresh, name) for name in (*names, "cache", "trace")}
    return dataclasses.replace(settings, **changes)


class RoundPlanner:
    """Controls of one decoder, for any number of batches one after another.

    Raises UserError where settings, draft and calibration do not go together (see ``make_controller``), and where the
    drafter cannot do what is asked.

    Attributes:
        reuse: the result cache's hooks, None without a cache.
        scheduler: None where it is off (and before the first batch, for which costs are measured).
        reads_target: whether the target's log-probabilities of each round are wanted (``read_target``).
        ratio: the ratio rule's rounds of this batch; None under the match rule.
        verification: puts the target's forward first in line on an accelerator; None where that is not asked for.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        settings: DecodingConfig,
        reuse: Reuse | None = None,
        trace: TraceWriter | None = None,
    ) -> None:
        check_decoding(settings)
        self.settings, self.reuse, self.trace = settings, reuse, trace
        self._target, self._drafter = target, drafter
        companions = drafter.companions or Companions()
        verifier = companions.verifier if settings.verifier else None
        self._calibration, self._costs = companions.calibration, companions.cost_profile
        if settings.stages and not drafter.block:
            raise UserError(
                f"decoding.stages={settings.stages}: this draft ({type(drafter).__name__}) cannot go on from tokens "
                "that the target has not seen. Use a block draft head, or decoding.stages=0."
            )
        if settings.rule == "ratio" and not hasattr(drafter, "sample_chains"):
            raise UserError(f"decoding.rule=ratio: this draft ({type(drafter).__name__}) cannot be sampled from.")
        self.controller = make_controller(
            settings, block=drafter.block, verifier=verifier, calibration=self._calibration
        )
        tracing = trace is not None
        self.judge: Any = None
        if verifier is not None and isinstance(drafter, BlockDrafter):
            self.judge = VerifierJudge(verifier, drafter, target, self._calibration, confidences=tracing)
        self.scheduler: AdaptiveScheduler | None = None
        self.ratio: RatioRounds | None = None
        self.reads_target = tracing or settings.policy == TRUSTING
        self.rounds: list[RowRound] = []
        self._meter = UtilisationMeter(target.device) if settings.utilisation else None
        self.verification = VerificationStream(target.device) if settings.utilisation else None
        self._requests = 0
        self._draft_settings = dataclasses.replace(settings, nodes=settings.candidates or settings.nodes)
        self._stream: Stream | None = None

    # ---- a batch -----------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Measure what has to be measured once, outside anybody's clock."""
        if not self.settings.scheduler or self.scheduler is not None:
            return
        bound, most = None, self.settings.nodes
        if self.settings.utilisation:
            bound = UtilisationBound(first_nodes(parallel_units(self._target.device), most), largest=most)
        profile = profile_of(self._target, self._costs)
        self.scheduler = AdaptiveScheduler(profile, most_nodes=most, stage=self.settings.stages, bound=bound)

    def start(self, cache: KVCache, clock: Stopwatch, sampling: SamplingConfig, seed: int, stream: Stream) -> None:
        """Begin a batch with the rows of ``cache``, after the drafter's own ``start``.

        ``stream``: takes tokens that the target has not seen (``stream_unverified``). Raises UserError for another kind
        of sampling than the settings', where a certificate or the ratio rule hangs on it.
        """
        asked, made_for = (
            decoding_mode(dataclasses.replace(self.settings, sampling=sampling)),
            decoding_mode(self.settings),
        )
        greedy = sampling.temperature == 0
        if (self.settings.policy == TRUSTING and asked != made_for) or (self.settings.rule == "ratio" and greedy):
            raise UserError(
                f"This decoder was made for temperature {self.settings.sampling.temperature:g} and asked to answer at "
                f"{sampling.temperature:g}: decoding.policy={self.settings.policy}, decoding.rule={self.settings.rule} "
                "depend on it. Make a decoder with the other decoding.sampling."
            )
        self._clock, self._requests = clock, self._requests + 1
        self._seconds = dict(clock.seconds)
        self._stream = stream if self.settings.stream_unverified else None
        if self.settings.rule == "ratio":
            self.ratio = RatioRounds(self._drafter, self.settings, sampling, seed)
        if isinstance(self._drafter, BlockDrafter):
            self._drafter.keep_states = self.judge is not None or self.ratio is not None
            self._drafter.keep_attention = self.settings.stages > 0 and self.controller.pattern is not None
            self._drafter.keep_states |= self._drafter.keep_attention
            if self.judge is not None:
                self._drafter.listener = self.judge.observe
        if self.judge is not None:
            self.judge.start(cache.batch, cache.capacity)
        if self.reuse is not None:
            self.reuse.keepers = [self._drafter] if self.judge is None else [self._drafter, self.judge]

    def take_up(self, rows: Sequence[Row], cache: KVCache) -> list[int]:
        """Tokens of each prompt whose state the result cache had; they are in ``cache`` now."""
        if self.reuse is None:
            return [0] * len(rows)
        reused = [self.reuse.take_up(row, index, cache) for index, row in enumerate(rows)]
        for row in rows:
            self.reuse.note_prompt(row)
        return reused

    def keep_finished(self, rows: Sequence[Row], cache: KVCache) -> None:
        """Store the states of rows that have ended, before they leave the batch."""
        if self.reuse is None:
            return
        for index, row in enumerate(rows):
            if row.finish_reason is not None:
                self.reuse.keep(row, index, cache)

    def drop_rows(self, keep: Sequence[int]) -> None:
        if self.judge is not None:
            self.judge.drop_rows(keep)

    # ---- before the target -------------------------------------------------------------------------

    def propose(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Tree]:
        """What is sent of each row; every decision of the round up to the target's forward."""
        self.rounds = [RowRound(row, max(0, limit)) for row, limit in zip(rows, limits)]
        if self.judge is not None:
            self.judge.begin(len(rows))
        if max(limits) > 0:
            if self.ratio is not None:
                return self._propose_ratio(rows, limits)
            self._draft_and_defer()
            self._choose_nodes()
        self._clock.lap("host")
        return [record.candidates.take(record.sent).tree() for record in self.rounds]

    def _draft_and_defer(self) -> None:
        drafter, records = self._drafter, self.rounds
        anchors = [record.row.anchor for record in records]
        going_on = [record.limit > 0 for record in records]
        while any(going_on):
            asked = [record.limit - len(record.pending) if on else 0 for record, on in zip(records, going_on)]
            pending = [record.pending_tokens if on else [] for record, on in zip(records, going_on)]
            if any(pending):
                trees = cast(ContinuingDrafter, drafter).propose(anchors, asked, self._draft_settings, pending)
            else:
                trees = drafter.propose(anchors, asked, self._draft_settings)
            self._clock.lap("host")
            judged = [None] * len(trees)
            if self.judge is not None:
                judged = self.judge.judge(trees, [record.before for record in records])
                self._clock.lap("verifier")
            for index, (record, tree) in enumerate(zip(records, trees)):
                if not going_on[index]:
                    continue
                self._count_draft(record, tree, judged[index])
                record.take_draft(CandidateSet.of(tree, judged[index]))
                going_on[index] = self.settings.stages > 0 and self._decide(index)

    def _count_draft(self, record: RowRound, tree: Tree, judged: Any) -> None:
        record.row.stats.draft_forwards += self._drafter.forwards
        if self.judge is not None and len(tree):
            record.row.stats.verifier_forwards += 1
            if judged is None:
                record.row.stats.verifier_failures += 1
                record.judged = False

    def _decide(self, index: int) -> bool:
        """The controller's word on the next stage of a row; True if it was deferred and drafting goes on."""
        record, settings = self.rounds[index], self.settings
        candidates, row = record.candidates, record.row
        at = record.pending[-1] if record.pending else -1
        nodes = candidates.stage_below(at, settings.stages)
        tokens = [int(token) for token in candidates.tokens[nodes]]
        history = [*record.pending_tokens, *tokens]
        statistics = self._statistics(index, nodes, tokens) if nodes else None
        cached = bool(nodes) and self.reuse is not None and self.reuse.continues(row, record.pending_tokens, tokens)
        survival = float(candidates.conditional[nodes].prod()) if nodes and record.judged else None
        stage = Stage(
            length=len(nodes),
            pending=len(record.pending),
            survival=survival,
            statistics=statistics,
            cached=cached,
            ends=bool(nodes) and row.ends_within(history),
        )
        bound = None if self.scheduler is None else self.scheduler.pending_bound(self.controller.max_pending)
        decision = self.controller.decide(stage, bound=bound)
        record.decisions.append(
            {
                "stage": len(record.decisions),
                "nodes": nodes,
                **dataclasses.asdict(decision),
                "statistics": statistics,
                "cached": cached,
            }
        )
        if not decision.defers:
            return False
        if self.judge is not None:
            self.judge.defer(index, [node - record.drafted_from for node in nodes])
        record.pending.extend(nodes)
        record.stages.append(list(nodes))
        if self._stream is not None:
            self._stream(row, tokens)
        return True

    def _statistics(self, index: int, nodes: Sequence[int], tokens: Sequence[int]) -> dict[str, float] | None:
        states = getattr(self._drafter, "states", None)
        if states is None or not states.attention:
            return None
        record = self.rounds[index]
        depths = record.candidates.depths[list(nodes)] - len(record.pending)
        slots = [states.first_B[index] + int(depth) for depth in depths]
        context = [*record.row.prompt, *record.row.output[:-1]]
        return pattern_statistics(states.attention, row=index, slots=slots, context=context, drafted=tokens)

    def _choose_nodes(self) -> None:
        """Fill ``sent`` of every row: which candidates, in which order."""
        orders, survivals = [], []
        for record in self.rounds:
            if self.reuse is not None and record.limit > 0:
                path = self.reuse.continuation(record.row, record.limit)
                record.candidates = record.candidates.with_path(path, self.reuse.rate)
            candidates = record.candidates
            conditional = candidates.conditional
            if self.scheduler is not None:
                conditional = self.scheduler.corrected(conditional, candidates.depths)
            survival = candidates.survival(conditional)
            if self.settings.shape == "chain":
                favoured = survival.copy()
                favoured[record.pending] = 1e6
                order = candidates.best_chain(favoured)
            else:
                order = sending_order(candidates, survival, record.pending)
            if self.settings.prune and record.judged:
                order = order[prune(candidates, survival, self.settings.prune, record.pending)[order]]
            orders.append(order)
            survivals.append(survival[order])
        most = self.settings.nodes if self.scheduler is None else self.scheduler.choose(survivals)
        for record, order in zip(self.rounds, orders):
            record.sent = order[: max(most, len(record.pending))]

    def _propose_ratio(self, rows: Sequence[Row], limits: Sequence[int]) -> list[Tree]:
        assert self.ratio is not None
        trees = self.ratio.propose(rows, [max(0, limit) for limit in limits])
        if self.scheduler is not None and self.judge is not None and any(len(tree) for tree in trees):
            survivals = confident_survivals(self.judge, trees, [row.anchor for row in rows])
            self._clock.lap("verifier")
            most = self.scheduler.choose(survivals, first_drop=True)
            trees = [tree.first(most) for tree in trees]
        for record, tree in zip(self.rounds, trees):
            record.row.stats.draft_forwards += self._drafter.forwards if record.limit > 0 else 0
            record.candidates = CandidateSet.of(tree)
            record.sent = np.arange(len(tree))
        self._clock.lap("host")
        return trees

    # ---- after the target --------------------------------------------------------------------------

    def read_target(self, logprobs_MV: torch.Tensor, trees: Sequence[Tree]) -> None:
        """The target's processed log-probabilities after each anchor and node, row after row."""
        first = 0
        for record, tree in zip(self.rounds, trees):
            places = torch.from_numpy(first + 1 + tree.parents).to(logprobs_MV.device)
            tokens = torch.from_numpy(tree.tokens).to(logprobs_MV.device)
            record.target_logprobs = logprobs_MV[places, tokens].double().cpu().numpy()
            first += len(tree) + 1

    def walk(self, index: int, tree: Tree, choices: np.ndarray) -> tuple[list[int], int]:
        """Which nodes of the tree sent are accepted, and the next token."""
        record = self.rounds[index]
        self._overruled: list[int] = []
        if self.settings.policy != TRUSTING or not record.pending:
            return walk(tree, choices)
        assert record.target_logprobs is not None
        # What was handed out already cannot be taken back: then every probability is enough, NaN included.
        probability = np.nan_to_num(np.exp(record.target_logprobs), nan=-1.0)
        floor = -2.0 if self._stream is not None else self.controller.floor
        trusted = list(range(len(record.pending)))  # pending nodes come first in the order of sending
        accepted, following, self._overruled = walk_trusting(tree, choices, trusted, probability, floor)
        return accepted, following

    def settle(
        self, index: int, tree: Tree, choices: np.ndarray, accepted: list[int], following: int, emitted: list[int]
    ) -> None:
        """Book a row's round, after its tokens were emitted and counted; call once after each ``walk``."""
        record = self.rounds[index]
        if self.settings.stages:
            count_stages(record, tree, accepted, choices, len(self._overruled))
        sent = record.candidates.take(record.sent)
        if self.scheduler is not None:
            note_rates(self.scheduler.tree, self.scheduler.path, sent, tree, accepted)
        if self.reuse is not None:
            self.reuse.note_round(record.row, sent, tree, accepted, len(emitted))
        if self.trace is not None:
            temperatures = np.ones(1) if self._calibration is None else self._calibration.temperatures_of("confidence")
            candidates = record.candidates
            row = record.row
            start = len(row.prompt) + len(row.output) - len(emitted) - 1
            self.trace.write(
                trace_record(
                    record,
                    request=self._requests,
                    position=start,
                    anchor=int(row.output[start - len(row.prompt)]),
                    accepted=accepted,
                    overruled=self._overruled,
                    choices=choices,
                    following=following,
                    emitted=emitted,
                    confidence=calibrated(candidates.confidence_logits, temperatures, candidates.depths),
                    seconds=self._since(),
                )
            )

    def finish_round(self, rows: int, tokens: int) -> None:
        """After a commit: what the round cost, for ``rows`` rows padded to ``tokens`` each."""
        spent = self._since()
        self._seconds = dict(self._clock.seconds)
        if self.scheduler is None:
            return
        drafting = sum(spent.get(kind, 0.0) for kind in ("draft", "host", "verifier"))
        self.scheduler.note_seconds(rows * tokens, spent.get("target", 0.0), drafting)
        if self._meter is not None and self.scheduler.bound is not None:
            self.scheduler.bound.note(self._meter.read())

    def _since(self) -> dict[str, float]:
        """Seconds by kind since the last round ended."""
        return {kind: total - self._seconds.get(kind, 0.0) for kind, total in self._clock.seconds.items()}
