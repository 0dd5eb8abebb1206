"""Speedup against one condition at a time: length of the context, batch size, nodes per round, temperature.

Off by default (``evaluate.curves``): each point decodes a few prompts again, plainly and speculatively, one after the
other in turn. Contexts are built as a chat would build them: earlier questions with the target's answers before the
prompt. What a curve shows is about these prompts on this machine, in the timed data type.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jetspec_train.artifacts.bundle import Bundle
from jetspec_train.config import DecodingConfig, EvaluateConfig, SamplingConfig
from jetspec_train.evaluation.benchmark import PLAIN, WARMUP_TOKENS, PromptRecord, quiet_collector, synchronize
from jetspec_train.evaluation.contenders import decoder_of
from jetspec_train.evaluation.measures import share
from jetspec_train.evaluation.statistics import ratio_of_sums, speedup
from jetspec_train.evaluation.suites import SuitePrompt

CURVES: dict[str, tuple[float, ...]] = {
    "context": (512, 1024, 2048, 4096, 8192),  # tokens before the answer; those that fit the target
    "batch": (1, 2, 4, 8),  # prompts decoded together
    "budget": (4, 8, 16, 32, 64),  # decoding.nodes
    "temperature": (0.0, 0.5, 1.0),
}
LABELS = {
    "context": "context before the answer, tokens",
    "batch": "prompts decoded together",
    "budget": "drafted tokens per round",
    "temperature": "temperature",
}


@dataclasses.dataclass
class _Timed:
    """One batch of prompts, answered by one decoder."""

    seconds: float
    tokens: int
    decoded: int
    forwards: float  # of the target, weighted by its rows: decoded / forwards is the acceptance length of a row


def measure_curves(
    target: Any,
    bundle: Bundle,
    prompts: Sequence[SuitePrompt],
    records: Sequence[PromptRecord],
    evaluate: EvaluateConfig,
    decoding: DecodingConfig,
    progress: Callable[[str], None] = print,
) -> dict[str, list[dict[str, Any]]]:
    """{curve: points} of ``evaluate.curves``; a point that does not fit the target's context is left out."""
    chosen = list(prompts[: evaluate.curve_prompts])
    history = history_of(records)
    curves: dict[str, list[dict[str, Any]]] = {}
    with quiet_collector():
        for name in dict.fromkeys(evaluate.curves):
            curves[name] = []
            for value in CURVES[name]:
                batches, settings, sampling = condition(name, value, chosen, history, decoding)
                limit = target.max_positions - evaluate.max_new_tokens
                if not batches or max(len(row) for batch in batches for row in batch) > limit:
                    continue
                point = _point(target, bundle, batches, settings, sampling, evaluate, decoding.seed)
                curves[name].append({"at": value, **point})
                progress(f"curve {name}={value:g}: {point['speedup'] or 0:.2f}x plain decoding")
    return curves


def history_of(records: Sequence[PromptRecord]) -> list[int]:
    """Questions with plain decoding's answers, one after another: what may stand before a prompt."""
    return [token for r in records if PLAIN in r.runs for token in (*r.prompt.tokens, *r.runs[PLAIN].tokens)]


def condition(
    name: str, value: float, prompts: Sequence[SuitePrompt], history: Sequence[int], decoding: DecodingConfig
) -> tuple[list[list[list[int]]], DecodingConfig, SamplingConfig]:
    """(batches of prompts as tokens, settings, sampling) of one point; no batch where the history is too short."""
    rows = [list(prompt.tokens) for prompt in prompts]
    settings, sampling = decoding, decoding.sampling
    size = 1
    if name == "context":
        rows = [list(_before(history, int(value) - len(row), row)) for row in rows if len(row) < value]
        rows = [row for row in rows if len(row) == value]
    elif name == "batch":
        size = int(value)
        rows = [rows[i % len(rows)] for i in range(-(-len(rows) // size) * size)] if rows else []
    elif name == "budget":
        candidates = None if decoding.candidates is None else max(decoding.candidates, int(value))
        settings = dataclasses.replace(decoding, nodes=int(value), candidates=candidates)
    else:
        sampling = dataclasses.replace(decoding.sampling, temperature=value)
    return [rows[i : i + size] for i in range(0, len(rows), size)], settings, sampling


def _before(history: Sequence[int], length: int, row: Sequence[int]) -> Iterator[int]:
    """The last ``length`` tokens of the history (repeated where it is shorter), then the prompt."""
    repeated = list(history) * (1 + length // len(history)) if history else []
    yield from repeated[len(repeated) - length :] if length else ()
    yield from row


def _point(
    target: Any,
    bundle: Bundle,
    batches: Sequence[Sequence[list[int]]],
    settings: DecodingConfig,
    sampling: SamplingConfig,
    evaluate: EvaluateConfig,
    seed: int,
) -> dict[str, Any]:
    speculative = decoder_of(target, bundle, settings)
    plain = type(speculative)(target, None, dataclasses.replace(settings, drafting=False))
    runs: dict[bool, list[_Timed]] = {False: [], True: []}

    def answer(drafting: bool, batch: Sequence[list[int]], tokens: int) -> _Timed:
        decoder = speculative if drafting else plain
        synchronize()
        begun = time.perf_counter()
        made = decoder.generate(batch, max_new_tokens=tokens, sampling=sampling, seed=seed)
        synchronize()
        seconds = time.perf_counter() - begun
        return _Timed(
            seconds,
            sum(len(row.tokens) for row in made),
            sum(row.stats.emitted for row in made),
            sum(row.stats.target_forwards for row in made),
        )

    for drafting in (False, True):
        answer(drafting, batches[0], min(WARMUP_TOKENS, evaluate.max_new_tokens))
    for number, batch in enumerate(batches):
        for drafting in (False, True) if number % 2 == 0 else (True, False):
            runs[drafting].append(answer(drafting, batch, evaluate.max_new_tokens))
    base, ours = runs[False], runs[True]
    faster = speedup(
        [run.seconds for run in base],
        [run.tokens for run in base],
        [run.seconds for run in ours],
        [run.tokens for run in ours],
        draws=evaluate.bootstrap,
        seed=seed,
    )
    tau = ratio_of_sums([run.decoded for run in ours], [run.forwards for run in ours], draws=evaluate.bootstrap)
    return {
        "answers": sum(len(batch) for batch in batches),
        "baseline_tokens_per_second": share(sum(run.tokens for run in base), sum(run.seconds for run in base)),
        "tokens_per_second": share(sum(run.tokens for run in ours), sum(run.seconds for run in ours)),
        "speedup": faster.value,
        "speedup_ci95": faster.interval,
        "acceptance_length": tau.value,
    }
