"""Task scores: is an answer right? Asked of every contender's answer to the same prompts (METHODS 11).

Kinds, declared by a recipe's source (``scoring``):

    gsm8k   the reference ends with "#### NUMBER"; mathematical equality (math-verify)
    math    the reference holds ``\\boxed{...}`` or is the answer itself; mathematical equality (math-verify)
    code    the reference is a test program that the answer's code must pass; run only if asked for (sandbox.py)

Speculative decoding is meant to change no answer, so scores are compared in pairs: the exact McNemar test looks at the
prompts that one of two contenders got right and the other not. Below a plain score of 20 % a ratio of scores is noise,
and the report says so.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from jetspec_train.evaluation.benchmark import PLAIN, PromptRecord
from jetspec_train.evaluation.sandbox import passes_tests

SCORERS = ("gsm8k", "math", "code")
MEANINGFUL = 0.2  # plain decoding's share of right answers from which on scores are compared
SECONDS_PER_ANSWER = 20.0  # after which a scorer counts as hanging


class Scorer:
    """Scores one answer after another in a process of its own, which is replaced when it hangs or dies."""

    def __init__(self, seconds: float = SECONDS_PER_ANSWER) -> None:
        self.seconds = seconds
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    def score(self, judge: Callable[[str, str], bool], answer: str, reference: str) -> bool | None:
        """Whether the answer is right; None if ``judge`` (a function of a module) raised, hung or died."""
        if self._pool is None:
            # Not forked: the parent holds threads of torch, and a model.
            context = multiprocessing.get_context("spawn")
            self._pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=context)
            self._pool.submit(_warm_up).result()
        try:
            return bool(self._pool.submit(judge, answer, reference).result(timeout=self.seconds))
        except Exception:  # whatever an answer of a language model may cause
            self.close()
            return None

    def close(self) -> None:
        """End the process, also if it is still at work."""
        pool, self._pool = self._pool, None
        if pool is not None:
            for process in list((pool._processes or {}).values()):
                process.kill()
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def scorer(seconds: float = SECONDS_PER_ANSWER) -> Iterator[Scorer]:
    made = Scorer(seconds)
    try:
        yield made
    finally:
        made.close()


def _warm_up() -> None:
    """Imports take seconds, which no answer should be charged for."""
    import math_verify  # noqa: F401


def same_number(answer: str, reference: str) -> bool:
    """GSM8K: the answer's final value equals the number after the reference's last "####"."""
    return _equal(reference.rsplit("####", 1)[-1].strip().replace(",", ""), answer)


def same_expression(answer: str, reference: str) -> bool:
    """MATH: the answer's final expression equals the reference's boxed one, or the whole reference without a box."""
    return _equal(reference if "\\boxed" in reference else f"${reference}$", answer)


def _equal(gold: str, answer: str) -> bool:
    from math_verify import parse, verify

    return bool(verify(parse(gold), parse(answer)))


JUDGES: dict[str, Callable[[str, str], bool]] = {
    "gsm8k": same_number,
    "math": same_expression,
    "code": passes_tests,
}


def score_records(
    records: Sequence[PromptRecord], decode: Callable[[list[int]], str], *, run_code: bool, seconds: float | None = None
) -> dict[str, dict[str, Any]]:
    """{domain: the report's ``task``} of the domains whose prompts can be scored.

    A scorer that raises or hangs on an answer is counted (``failed``), and that answer counts as wrong. Where code
    would have to run and ``run_code`` is false, ``reason`` says so and nothing is scored.
    """
    tasks: dict[str, dict[str, Any]] = {}
    for domain in dict.fromkeys(record.prompt.domain for record in records):
        own = [r for r in records if r.prompt.domain == domain and r.prompt.scoring and r.prompt.reference]
        if not own:
            continue
        kind = str(own[0].prompt.scoring)
        if kind == "code" and not run_code:
            tasks[domain] = _task(kind, {}, "code of the model runs only with evaluate.run_code=true")
            continue
        right: dict[str, list[bool]] = {name: [] for name in own[0].runs}
        failed = dict.fromkeys(right, 0)
        with scorer(SECONDS_PER_ANSWER if seconds is None else seconds) as process:
            known: dict[tuple[str, str], bool | None] = {}  # contenders mostly give the same answer
            for record in own:
                for name, run in record.runs.items():
                    pair = (decode(run.tokens), str(record.prompt.reference))
                    if pair not in known:
                        known[pair] = process.score(JUDGES[kind], *pair)
                    failed[name] += known[pair] is None
                    right[name].append(bool(known[pair]))
        tasks[domain] = _task(kind, right, None, failed)
    return tasks


def _task(
    kind: str, right: Mapping[str, Sequence[bool]], reason: str | None, failed: Mapping[str, int] | None = None
) -> dict[str, Any]:
    plain = right.get(PLAIN)
    contenders = {}
    for name, answers in right.items():
        lost = gained = 0
        if plain is not None:
            lost = sum(before and not after for before, after in zip(plain, answers))
            gained = sum(after and not before for before, after in zip(plain, answers))
        contenders[name] = {
            "right": sum(answers),
            "scored": len(answers),
            "failed": (failed or {}).get(name, 0),
            "accuracy": sum(answers) / len(answers),
            "lost": lost,
            "gained": gained,
            "p_value": exact_mcnemar(lost, gained) if plain is not None and name != PLAIN else None,
        }
    accuracy = contenders[PLAIN]["accuracy"] if PLAIN in contenders else None
    return {
        "scoring": kind,
        "contenders": contenders,
        "meaningful": accuracy is not None and accuracy >= MEANINGFUL,
        "reason": reason,
    }


def exact_mcnemar(lost: int, gained: int) -> float:
    """Two-sided p-value: are prompts lost and gained equally likely? 1 where nothing differs (McNemar 1947, exact)."""
    from scipy.stats import binomtest

    return float(binomtest(lost, lost + gained, 0.5).pvalue) if lost + gained else 1.0
