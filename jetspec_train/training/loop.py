"""The training loop: step after step, measured, saved, stoppable. It knows nothing of models, losses or files of data.

It is given functions: ``run_step(step)`` does one optimiser step and returns sums, ``measure()`` the acceptance
length on dev prompts. Everything a step needs follows from its number, so that resuming is: load weights and
optimiser, go on with the next number. The order at a step boundary is fixed - record, measure, save - and the saved
state carries the half-filled logging window, so that a run killed anywhere leaves the same metrics as an undisturbed
one.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from jetspec_train.artifacts.errors import UserError
from jetspec_train.training.checkpoint import TrainState
from jetspec_train.training.ranks import Ranks, from_main_rank, largest_over_ranks
from jetspec_train.training.signals import StopRequest
from jetspec_train.training.tracking import Tracker

Sums = dict[str, tuple[list[float], list[float]]]  # name -> numerators, denominators (one of each, or one per slot)


@dataclass(frozen=True)
class StepResult:
    """One optimiser step: metric sums over the global batch, gradient norm, learning rate, supervised tokens."""

    sums: Sums
    gradient_norm: float
    learning_rate: float
    tokens: int


@dataclass(frozen=True)
class Cadence:
    """How often, in steps; 0 is never (the last step is always recorded, measured and saved)."""

    total: int
    log: int
    evaluate: int
    save: int

    def due(self, every: int, step: int) -> bool:
        return step == self.total or (every > 0 and step % every == 0)


def train(
    state: TrainState,
    cadence: Cadence,
    *,
    run_step: Callable[[int], StepResult],
    measure: Callable[[], dict[str, Any] | None] | None,
    save: Callable[[TrainState], Any],
    tracker: Tracker | None,
    stop: StopRequest,
    ranks: Ranks | None = None,
    enter: Callable[[str], None] = lambda place: None,
    show_progress: bool = True,
) -> int:
    """Train from ``state.step`` to ``cadence.total``; ``state`` is updated in place.

    ``measure`` is called on all ranks and counts on rank 0: a record with ``acceptance_length`` (by which the best
    checkpoint is chosen), or None if it was asked to stop half-way; without it nothing is measured and there is no
    best. ``save`` writes a checkpoint of the state, called on all ranks too. ``enter`` is told what comes next (the
    watchdog listens). Returns 0 when finished, else the number of the signal that stopped it; a checkpoint of the last
    finished step is then on the disk. Raises UserError
    if the loss or gradient stops being finite.
    """
    ranks = ranks or Ranks()
    saved_step, asked = (state.step if state.step > 0 else -1), 0
    bar = tqdm(
        total=cadence.total,
        initial=state.step,
        desc="train",
        unit="step",
        dynamic_ncols=True,
        disable=not (show_progress and ranks.is_main and sys.stderr.isatty()),
    )
    with bar:
        measured = state.step == 0 or state.evaluated_step == state.step
        if measure is not None and not measured and cadence.due(cadence.evaluate, state.step):
            saved_step = -1 if _evaluate(state, measure, tracker, ranks) else saved_step  # it was stopped before this
        since, tokens_since = time.perf_counter(), 0
        while state.step < cadence.total:
            enter(f"step {state.step + 1}, agreeing to go on")
            asked = largest_over_ranks(stop.signal_number, ranks)
            if asked:
                break
            enter(f"step {state.step + 1}, computing")
            started = time.perf_counter()
            try:
                result = run_step(state.step)
            except FloatingPointError as error:
                raise UserError(
                    f"Training stopped at step {state.step + 1}: {error}. The last checkpoint is intact. "
                    f"Try a smaller train.learning_rate or train.precision=float32, in a new run_dir."
                ) from None
            state.step += 1
            state.token_visits += result.tokens
            tokens_since += result.tokens
            add_sums(state.window, result.sums)
            state.seconds += time.perf_counter() - started
            bar.update(1)
            if cadence.due(cadence.log, state.step):
                rate = tokens_since / max(1e-9, time.perf_counter() - since)
                numbers = window_means(state.window)
                state.window = {}
                if tracker is not None:
                    facts = {"gradient_norm": result.gradient_norm, "learning_rate": result.learning_rate}
                    facts |= {"token_visits": state.token_visits, "tokens_per_second": round(rate, 1)}
                    facts["total_steps"] = cadence.total
                    tracker.log("train", state.step, {**numbers, **facts, "seconds": round(state.seconds, 3)})
                _show(bar, state, cadence, numbers, rate, quiet=not (show_progress and ranks.is_main))
                since, tokens_since = time.perf_counter(), 0
            if measure is not None and cadence.due(cadence.evaluate, state.step):
                pause = time.perf_counter()
                enter(f"measuring acceptance after step {state.step}")
                if _evaluate(state, measure, tracker, ranks):
                    save(state)
                    saved_step = state.step
                since += time.perf_counter() - pause
            if saved_step != state.step and cadence.due(cadence.save, state.step):
                pause = time.perf_counter()
                enter(f"saving step {state.step}")
                save(state)
                saved_step = state.step
                since += time.perf_counter() - pause
    if measure is not None and state.step == cadence.total and state.evaluated_step != state.step:
        asked = largest_over_ranks(stop.signal_number, ranks)  # stopped while measuring after the last step
    if saved_step != state.step and state.step > 0:
        enter(f"saving step {state.step}")
        save(state)
    return asked


def _evaluate(
    state: TrainState, measure: Callable[[], dict[str, Any] | None], tracker: Tracker | None, ranks: Ranks
) -> bool:
    """Measure acceptance, tell the other ranks, keep the best in the state. False: stopped half-way."""
    started = time.perf_counter()
    record = from_main_rank(measure(), ranks)
    if record is None:
        return False
    state.seconds += time.perf_counter() - started
    state.evaluated_step = state.step
    if state.best is None or score_of(record) > score_of(state.best):
        state.best = {"step": state.step, **record}
    if tracker is not None:
        tracker.log("evaluation", state.step, {**record, "best_step": state.best["step"]})
    return True


def score_of(record: Mapping[str, Any]) -> float:
    """What the best checkpoint is chosen by: ``score`` where a record has one, else the acceptance length."""
    return float(record.get("score", record.get("acceptance_length", 0.0)))


def add_sums(window: dict[str, Any], sums: Sums) -> None:
    """Add numerators and denominators, slot by slot, to a window of ``{name: [numerators, denominators]}``."""
    for name, (numerators, denominators) in sums.items():
        old = window.get(name, [[0.0] * len(numerators), [0.0] * len(denominators)])
        window[name] = [
            [a + b for a, b in zip(old[0], numerators, strict=True)],
            [a + b for a, b in zip(old[1], denominators, strict=True)],
        ]


def window_means(window: dict[str, Any]) -> dict[str, Any]:
    """``{name: mean}`` of a window; a list for metrics with one value per slot; None where nothing was counted."""
    means: dict[str, Any] = {}
    for name, (numerators, denominators) in window.items():
        values = [a / b if b else None for a, b in zip(numerators, denominators, strict=True)]
        means[name] = values[0] if len(values) == 1 else values
    return means


def _show(bar: tqdm, state: TrainState, cadence: Cadence, numbers: dict[str, Any], rate: float, *, quiet: bool) -> None:
    """Loss, accuracy of the first slot and speed: beside the bar on a terminal, as a plain line in a log file."""
    # The first slot that predicts: slot 0, or slot 1 in the in-place layout.
    first = next((value for value in numbers.get("accuracy_at") or [] if value is not None), None)
    facts = {"loss": f"{numbers.get('loss', float('nan')):.3f}", "tokens/s": f"{rate:.0f}"}
    if first is not None:
        facts["first slot"] = f"{first:.3f}"
    if state.best is not None:
        facts["tau"] = f"{state.best['acceptance_length']:.2f}"
    if not bar.disable:
        bar.set_postfix(facts)
    elif not quiet and (state.step == cadence.total or state.step % max(cadence.log, cadence.total // 20) == 0):
        left = state.seconds / state.step * (cadence.total - state.step)
        words = " ".join(f"{name} {value}" for name, value in facts.items())
        print(f"train: step {state.step}/{cadence.total} {words} left {left:.0f} s", flush=True)
