"""The decoding loop: propose -> verify -> commit, for batches of prompts of any lengths.

Plain decoding is the same loop without a drafter (every tree is empty). Whatever is drafted, the output is the one of
plain decoding (METHODS 7): all tokens are the target's own choices, keyed by (seed, row, position). Which nodes are
sent is decided before ``verify`` - by the drafter alone, or by a ``RoundPlanner`` where stages, pruning, scheduler,
result cache or a trace are on - and changes the speed only. The exceptions are asked for by name: policy ``trusting``
keeps tokens that the target would not have chosen, and the ratio rule gives another sample.

Shapes: B rows in the batch, N staged tokens (anchor and drafted nodes), M nodes of all rows, D hidden size,
V vocabulary.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, SamplingConfig, TargetConfig
from jetspec_train.decoding.acceptance import walk
from jetspec_train.decoding.batch import Batch, Generation, OnTokens, mask_of, paths_of
from jetspec_train.decoding.controller import TRUSTING, make_controller
from jetspec_train.decoding.drafting import Drafter
from jetspec_train.decoding.monitor import Monitor
from jetspec_train.decoding.planning import RoundPlanner, has_controls
from jetspec_train.decoding.result_cache import ResultCache
from jetspec_train.decoding.reuse import Reuse
from jetspec_train.decoding.rows import Row, StopStrings
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.trace import TraceWriter
from jetspec_train.decoding.tree import Tree, empty_tree
from jetspec_train.targets.sampling import choose, process_logits
from jetspec_train.targets.target import Target

__all__ = ["Decoder", "Generation", "OnTokens"]


class Decoder:
    """Generates with a target, and with a drafter where there is one.

    ``settings.drafting=false`` or ``drafter=None`` is plain decoding. ``pool``: a result cache to share with other
    decoders; without one, ``settings.cache`` makes one of its own. Raises UserError where settings and draft do not go
    together (a policy without its certificate, more pending tokens than the draft's block, a trace that cannot be
    written).

    Attributes:
        monitor: pass rate and wasted compute of all answers so far.
        planner: the controls of a round; None where all are off.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        settings: DecodingConfig | None = None,
        pool: ResultCache | None = None,
    ) -> None:
        self.target = target
        self.drafter = drafter
        self.settings = settings or DecodingConfig()
        self.pool = pool
        self.monitor = Monitor()
        self._trace: TraceWriter | None = None
        self.planner = self._plan_with(drafter)
        self.bundle: Path | None = None  # the folder that the drafter comes from
        self._unadapted: Drafter | None = None  # the bundle's own draft while an adapter is in use

    def _plan_with(self, drafter: Drafter | None) -> RoundPlanner | None:
        settings = self.settings
        if not settings.drafting or not has_controls(settings):
            return None
        if drafter is None:
            if settings.policy == TRUSTING:
                make_controller(settings, block=0, verifier=None, calibration=None)  # refuses
            return None
        if settings.cache and self.pool is None:
            self.pool = ResultCache(settings.cache_max_bytes)
        reuse = Reuse(self.pool, self.target) if settings.cache and self.pool is not None else None
        if settings.trace is not None and self._trace is None:
            self._trace = TraceWriter(settings.trace)
        return RoundPlanner(self.target, drafter, settings, reuse=reuse, trace=self._trace)

    @classmethod
    def from_bundle(
        cls,
        path: str | Path,
        target: Target | None = None,
        settings: DecodingConfig | None = None,
        target_config: TargetConfig | None = None,
    ) -> Decoder:
        """Read an exported bundle; load the target that it names unless ``target`` is given.

        ``target_config`` says how to load it (dtype, device, a local path); by default name and revision are the
        bundle's. Raises UserError if bundle and target do not belong together, naming both values.
        """
        from jetspec_train.decoding.bundles import open_bundle

        target, drafter = open_bundle(path, target, target_config)
        decoder = cls(target, drafter, settings)
        decoder.bundle = Path(path)
        return decoder

    def load_draft(self, path: str | Path) -> None:
        """Swap the drafter for another bundle's; the target stays as it is. Not during ``generate``.

        If the bundle is refused (UserError), the drafter in use stays.
        """
        from jetspec_train.decoding.bundles import open_bundle

        self._swap(open_bundle(path, self.target)[1])
        self.bundle, self._unadapted = Path(path), None

    def load_adapter(self, path: str | Path) -> None:
        """Change the bundle's draft, and its verifier, by an adapter of stage=adapt; one in use is replaced. The target
        stays as it is. Not during ``generate``.

        If the adapter is refused (UserError: another bundle's, damaged), the drafter in use stays.
        """
        from jetspec_train.decoding.adapters import adapted_drafter

        if self.bundle is None:
            raise UserError(f"The adapter {path} needs the bundle that it changes: make the decoder from that bundle.")
        unadapted = self._unadapted or self.drafter
        self._swap(adapted_drafter(self.bundle, path, self.target))
        self._unadapted = unadapted

    def unload_adapter(self) -> None:
        """Back to the draft as the bundle has it; nothing happens where no adapter is in use."""
        if self._unadapted is not None:
            self._swap(self._unadapted)
            self._unadapted = None

    def _swap(self, drafter: Drafter) -> None:
        self.planner = self._plan_with(drafter)  # a new one also forgets the states that the other draft computed
        self.drafter = drafter

    @torch.inference_mode()
    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        max_new_tokens: int | None = None,
        sampling: SamplingConfig | None = None,
        seed: int | None = None,
        row_ids: Sequence[int] | None = None,
        stop: Sequence[str] | None = None,
        on_tokens: OnTokens | None = None,
        domains: Sequence[str] | None = None,
    ) -> list[Generation]:
        """Answer all prompts together; each row advances at its own pace and leaves when it ends.

        What is not given is taken from the settings. ``row_ids`` name the rows' random draws (default 0, 1, ...): a
        row's output depends on (seed, row id, prompt) and not on its batch. ``on_tokens(index, tokens)`` is called
        after each commit. ``domains`` name what the prompts are about, for ``monitor``. An answer also ends where the
        target's context ends (finish_reason "length").
        Raises UserError for an empty prompt and for one that leaves no room in the target's context.
        """
        if self.planner is not None:
            self.planner.prepare()
        clock = Stopwatch(self.target.device)
        rows = self._rows(prompts, max_new_tokens, row_ids, self.settings.stop if stop is None else stop)
        if not rows:
            return []
        settings = self.settings
        # Room for the answers, up to a bound: a cache for a long limit that is never reached would only cost memory.
        most = max(settings.nodes, settings.candidates or 0)
        capacity = max(len(row.prompt) + min(row.limit, 512) for row in rows) + most + 1
        batch = Batch(
            rows=list(rows),
            cache=self.target.new_cache(len(rows), capacity),
            sampling=settings.sampling if sampling is None else sampling,
            seed=settings.seed if seed is None else seed,
            clock=clock,
            on_tokens=on_tokens,
        )
        if self._drafting and self.drafter is not None:
            self.drafter.start(len(rows), capacity, clock)
            if self.planner is not None:
                self.planner.start(batch.cache, clock, batch.sampling, batch.seed, batch.stream)
        self._prefill(batch)
        while batch.rows:
            trees = self._propose(batch)
            choices = self._verify(batch, trees)
            self._commit(batch, trees, choices)
        if self._drafting:
            for row in rows:
                domain = "" if domains is None else domains[row.index]
                self.monitor.add(row.stats, shape=settings.shape, domain=domain)
        return [Generation(row.output, row.finish_reason or "length", row.stop_string, row.stats) for row in rows]

    @property
    def _drafting(self) -> bool:
        return self.drafter is not None and self.settings.drafting

    @property
    def _taps(self) -> tuple[int, ...]:
        return self.drafter.taps if self.drafter is not None and self._drafting else ()

    def _rows(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | None,
        row_ids: Sequence[int] | None,
        stop: Sequence[str],
    ) -> list[Row]:
        target = self.target
        limit = self.settings.max_new_tokens if max_new_tokens is None else max_new_tokens
        if limit < 1:
            raise UserError(f"max_new_tokens={limit} must be at least 1.")
        keys = list(range(len(prompts))) if row_ids is None else list(row_ids)
        if len(keys) != len(prompts):
            raise ValueError(f"{len(keys)} row_ids for {len(prompts)} prompts")
        stops = StopStrings(stop, lambda tokens: target.chat.decode(tokens, skip_special_tokens=False))
        rows = []
        for index, (key, prompt) in enumerate(zip(keys, prompts)):
            if not len(prompt):
                raise UserError(f"prompt {index} is empty: it has no token to continue from.")
            target.check_length(len(prompt), what=f"prompt {index}")
            room = min(limit, target.max_positions - len(prompt))
            rows.append(Row(index, key, [int(token) for token in prompt], room, target.eos_ids, stops))
        return rows

    def _prefill(self, batch: Batch) -> None:
        """The prompts' forward and the first token of each row."""
        target, rows = self.target, batch.rows
        reused = [0] * len(rows) if self.planner is None else self.planner.take_up(rows, batch.cache)
        prompts = [row.prompt[count:] for row, count in zip(rows, reused)]
        lengths = [len(prompt) for prompt in prompts]
        tokens_BT = torch.full((len(rows), max(lengths)), target.pad_id, dtype=torch.long)
        for index, prompt in enumerate(prompts):
            tokens_BT[index, : lengths[index]] = torch.tensor(prompt)
        output = target.forward(tokens_BT, cache=batch.cache, taps=self._taps)
        last_BD = output.hidden_BND[range(len(rows)), [length - 1 for length in lengths]]
        choices = self._choose(batch, last_BD, [empty_tree() for _ in rows], "prefill")
        batch.cache.commit_first(lengths)
        batch.clock.lap("prefill")
        kept = [list(range(length)) for length in lengths]
        if self._drafting and self.drafter is not None:
            self.drafter.observe(prompts, output.features_BNF, kept)
            batch.clock.lap("prefill")
        for row, choice in zip(rows, choices):
            row.stats.first_token_seconds = batch.clock.elapsed()
            batch.emit(row, [int(choice)])
        self._drop_finished(batch)

    def _propose(self, batch: Batch) -> list[Tree]:
        """One tree per row; none deeper than what the row may still emit beside the target's own next token."""
        limits = [row.remaining - 1 for row in batch.rows]
        if self.planner is not None:
            return self.planner.propose(batch.rows, limits)
        if not self._drafting or self.drafter is None or max(limits) <= 0:
            return [empty_tree() for _ in batch.rows]
        trees = self.drafter.propose([row.anchor for row in batch.rows], limits, self.settings)
        for row, limit in zip(batch.rows, limits):
            row.stats.draft_forwards += self.drafter.forwards if limit > 0 else 0
        batch.clock.lap("host")
        return trees

    def _verify(self, batch: Batch, trees: list[Tree]) -> list[np.ndarray]:
        """The target's own choice after the anchor and after every node of each row: [n + 1] per row.

        Stages anchors and nodes in the cache and leaves the forward's features for ``_commit``.
        """
        target, rows = self.target, batch.rows
        sizes = [len(tree) + 1 for tree in trees]
        tokens_BN = np.full((len(rows), max(sizes)), target.pad_id, dtype=np.int64)
        for index, (row, tree) in enumerate(zip(rows, trees)):
            tokens_BN[index, 0] = row.anchor
            tokens_BN[index, 1 : sizes[index]] = tree.tokens
        batch.clock.lap("host")
        stream = None if self.planner is None else self.planner.verification
        with contextlib.nullcontext() if stream is None else stream.first():
            output = target.forward(
                torch.from_numpy(tokens_BN), cache=batch.cache, mask=mask_of(trees, max(sizes)), taps=self._taps
            )
        self._features_BNF = output.features_BNF
        hidden_MD = torch.cat([output.hidden_BND[index, :size] for index, size in enumerate(sizes)])
        choices_M = self._choose(batch, hidden_MD, trees, "target")
        return np.split(choices_M, np.cumsum(sizes)[:-1])

    def _commit(self, batch: Batch, trees: list[Tree], choices: list[np.ndarray]) -> None:
        """Walk the trees, emit, and keep what the target and the drafter have computed for the accepted path."""
        kept: list[list[int]] = []
        committed: list[list[int]] = []
        planner = self.planner
        for index, (row, tree, chosen) in enumerate(zip(batch.rows, trees, choices)):
            accepted, following = walk(tree, chosen) if planner is None else planner.walk(index, tree, chosen)
            anchor = row.anchor
            path = [int(tree.tokens[node]) for node in accepted]
            emitted = batch.emit(row, [*path, following])
            deepest = int(tree.depths.max()) + 1 if len(tree) else 0
            row.stats.count_round(len(tree), deepest, len(accepted), len(emitted))
            if planner is not None:
                planner.settle(index, tree, chosen, accepted, following, emitted)
            running = row.finish_reason is None
            kept.append([0, *(node + 1 for node in accepted)] if running else [])
            committed.append([anchor, *path] if running else [])
        batch.cache.commit(kept)
        batch.clock.lap("host")
        if self._drafting and self.drafter is not None and any(kept):
            self.drafter.observe(committed, self._features_BNF, kept)
            batch.clock.lap("draft")
        if planner is not None:
            planner.finish_round(len(batch.rows), 1 + max(len(tree) for tree in trees))
        self._drop_finished(batch)

    def _choose(self, batch: Batch, hidden_MD: torch.Tensor, trees: list[Tree], kind: str) -> np.ndarray:
        """The target's choices [M] after the last committed token of each row and after each node of its tree."""
        logits_MV = self.target.logits(hidden_MD)
        batch.clock.lap(kind)
        keys: list[int] = []
        positions: list[int] = []
        histories: list[list[int]] | None = [] if batch.sampling.repetition_penalty != 1.0 else None
        for row, tree in zip(batch.rows, trees):
            # The token to be drawn stands one place after the token whose state gives its distribution.
            first = len(row.prompt) + len(row.output)
            keys.extend([row.key] * (len(tree) + 1))
            positions.append(first)
            positions.extend((first + 1 + tree.depths).tolist())
            if histories is not None:
                before = [*row.prompt, *row.output]
                histories.extend([*before, *path] for path in paths_of(tree))
        planner = self.planner
        if planner is not None and kind == "target" and (planner.reads_target or planner.ratio is not None):
            logprobs_MV = process_logits(logits_MV, batch.sampling, histories)
            if planner.reads_target:
                planner.read_target(logprobs_MV, trees)
            if planner.ratio is not None:
                return planner.ratio.choices(batch.rows, trees, logprobs_MV)
        return choose(logits_MV, batch.sampling, batch.seed, keys, positions, histories).cpu().numpy()

    def _drop_finished(self, batch: Batch) -> None:
        keep = [index for index, row in enumerate(batch.rows) if row.finish_reason is None]
        if len(keep) == len(batch.rows):
            return
        if self.planner is not None:
            self.planner.keep_finished(batch.rows, batch.cache)
        batch.rows = [batch.rows[index] for index in keep]
        if not keep:
            return
        batch.cache.drop_rows(keep)
        if self._drafting and self.drafter is not None:
            self.drafter.drop_rows(keep)
            if self.planner is not None:
                self.planner.drop_rows(keep)
