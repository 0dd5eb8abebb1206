"""The timed loop: every contender answers every prompt, interleaved, warm-up excluded.

Plain decoding is the same loop with drafting off, timed in the same run; otherwise a speedup may only
say that the baseline was slow. The order of the contenders rotates from prompt to prompt, so that a
drift of the machine (heat, load) falls on all of them.

Outside the timed region: rendering prompts, garbage collection, statistics, files, progress. Inside it,
besides the contender's own work: one clock read per burst of tokens (below a microsecond).
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jetspec_train.evaluation.machine import OtherWork
from jetspec_train.evaluation.statistics import median
from jetspec_train.evaluation.suites import SuitePrompt

PLAIN = "plain"
SPECULATIVE = "speculative"
WARMUP_TOKENS = 32


@dataclass
class Measurement:
    """One contender's answer to one prompt. Seconds are wall clock; counts leave the prefill out."""

    tokens: list[int]
    seconds: float
    finish_reason: str = "length"
    first_token_seconds: float | None = None
    burst_seconds: list[float] = field(default_factory=list)  # arrival of each burst, from the start
    burst_tokens: list[int] = field(default_factory=list)
    target_forwards: int = 0
    target_tokens: int = 0
    draft_forwards: int = 0
    decoded: int = 0  # tokens from decode forwards: without the prefill's token
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    rounds: int = 0
    time: dict[str, float] = field(default_factory=dict)  # prefill, target, draft, host
    repeats: int = 1

    @property
    def acceptance_length(self) -> float | None:
        """tau: tokens emitted per target decode forward (METHODS: prefill's token excluded)."""
        return self.decoded / self.target_forwards if self.target_forwards else None

    def to_dict(self) -> dict[str, Any]:
        """For the report: without the tokens and bursts, which stay in ``records.jsonl``."""
        plain = asdict(self)
        for key in ("tokens", "burst_seconds", "burst_tokens"):
            del plain[key]
        return {"tokens": len(self.tokens), "acceptance_length": self.acceptance_length, **plain}


class ArrivalClock:
    """Notes when tokens arrive: a decoder's ``on_tokens`` callback and a transformers streamer."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.counts: list[int] = []
        self.prompt_expected = False  # transformers' generate() first sends the prompt to its streamer

    def __call__(self, *arguments: Any) -> None:
        self.times.append(time.perf_counter())
        tokens = arguments[-1]
        self.counts.append(len(tokens) if hasattr(tokens, "__len__") else 1)

    def put(self, value: Any) -> None:
        if self.prompt_expected:
            self.prompt_expected = False
            return
        self.times.append(time.perf_counter())
        self.counts.append(int(value.numel()))

    def end(self) -> None:
        """Part of the streamer's protocol; nothing is left to do."""


@dataclass(frozen=True)
class Contender:
    """A way to answer a prompt. ``answer(tokens, row, max_new_tokens, clock)`` does the work that is timed."""

    name: str
    answer: Callable[[list[int], int, int, ArrivalClock], Measurement]
    description: str = ""


@dataclass
class PromptRecord:
    """All contenders on one prompt."""

    prompt: SuitePrompt
    runs: dict[str, Measurement]

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.prompt.id,
            "domain": self.prompt.domain,
            "prompt_hash": self.prompt.hash,
            "prompt_tokens": len(self.prompt.tokens),
            "runs": {name: run.to_dict() for name, run in self.runs.items()},
        }


def decoder_contender(name: str, decoder: Any, *, sampling: Any, seed: int, stop: Sequence[str], description: str = ""):
    """A contender that runs our own decoding loop, with or without a drafter."""

    def answer(tokens: list[int], row: int, max_new_tokens: int, clock: ArrivalClock) -> Measurement:
        generation = decoder.generate(
            [tokens],
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            seed=seed,
            row_ids=[row],
            stop=tuple(stop),
            on_tokens=clock,
        )[0]
        return from_generation(generation)

    return Contender(name, answer, description)


def from_generation(generation: Any) -> Measurement:
    """Take over the decoder's own round statistics; wall clock and arrivals are added by ``timed``."""
    stats = generation.stats
    return Measurement(
        tokens=[int(token) for token in generation.tokens],
        seconds=0.0,
        finish_reason=generation.finish_reason,
        first_token_seconds=stats.first_token_seconds,
        target_forwards=int(stats.target_forwards),
        target_tokens=int(stats.target_tokens),
        draft_forwards=int(stats.draft_forwards),
        decoded=int(stats.emitted),
        drafted_by_depth=[int(count) for count in stats.drafted_by_depth],
        accepted_by_depth=[int(count) for count in stats.accepted_by_depth],
        rounds=int(stats.rounds),
        time={key: float(stats.seconds.get(key, 0.0)) for key in ("prefill", "target", "draft", "host")},
    )


def synchronize() -> None:
    """Wait for queued accelerator work, so that the wall clock covers it; nothing to do on a CPU."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(contender: Contender, prompt: SuitePrompt, max_new_tokens: int, meter: OtherWork | None) -> Measurement:
    """Run one contender on one prompt under the clock."""
    clock = ArrivalClock()
    gc.collect()
    synchronize()
    if meter is not None:
        meter.start()
    start = time.perf_counter()
    result = contender.answer(prompt.tokens, prompt.row, max_new_tokens, clock)
    synchronize()
    result.seconds = time.perf_counter() - start
    if meter is not None:
        meter.stop()
    result.burst_seconds = [moment - start for moment in clock.times]
    result.burst_tokens = clock.counts
    if result.burst_seconds:
        result.first_token_seconds = result.burst_seconds[0]
    return result


def middle_run(runs: list[Measurement]) -> Measurement:
    """The run of median duration; with an even number of repeats the slower of the two middle ones."""
    chosen = sorted(runs, key=lambda run: run.seconds)[len(runs) // 2]
    chosen.seconds = median([run.seconds for run in runs]) or chosen.seconds
    chosen.repeats = len(runs)
    return chosen


def rotate(contenders: Sequence[Contender], by: int) -> list[Contender]:
    """The same contenders, starting with another one."""
    by %= len(contenders)
    return [*contenders[by:], *contenders[:by]]


@contextlib.contextmanager
def quiet_collector() -> Iterator[None]:
    """Take what exists out of the garbage collector's sight: a full collection over all imported modules takes
    a large part of a second, and could fall into anyone's timed region."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def run_benchmark(
    prompts: Sequence[SuitePrompt],
    contenders: Sequence[Contender],
    *,
    max_new_tokens: int,
    warmup: int = 1,
    repeats: int = 1,
    meter: OtherWork | None = None,
    progress: Callable[[PromptRecord], None] | None = None,
) -> list[PromptRecord]:
    """Every contender on every prompt; returns one record per prompt, in order."""
    with quiet_collector():
        for index in range(min(warmup, len(prompts))):
            for contender in contenders:
                timed(contender, prompts[index], min(WARMUP_TOKENS, max_new_tokens), None)
        records = []
        for index, prompt in enumerate(prompts):
            runs: dict[str, list[Measurement]] = {contender.name: [] for contender in contenders}
            for repeat in range(max(1, repeats)):
                for contender in rotate(contenders, index + repeat):
                    runs[contender.name].append(timed(contender, prompt, max_new_tokens, meter))
            record = PromptRecord(prompt, {name: middle_run(several) for name, several in runs.items()})
            records.append(record)
            if progress is not None:
                progress(record)
    return records
