"""From records to figures: speed, acceptance, waste, latency, and where a speedup is lost.

Pure functions of ``PromptRecord`` lists. A figure that is undefined (nothing drafted, nothing decoded,
one prompt) is None, never 0 or an exception. The words are those of ``docs/methods.md``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from jetspec_train.evaluation.benchmark import PLAIN, Measurement, PromptRecord
from jetspec_train.evaluation.statistics import Estimate, percentiles, ratio_of_sums, speedup


def share(part: float, whole: float) -> float | None:
    """``part / whole``, or None where there is no whole."""
    return part / whole if whole else None


def runs_of(records: Iterable[PromptRecord], name: str) -> list[Measurement]:
    return [record.runs[name] for record in records if name in record.runs]


def add_by_depth(rows: Iterable[Sequence[int]]) -> list[int]:
    """Element-wise sum of lists of different lengths."""
    return [sum(column) for column in zip_longest(*rows, fillvalue=0)]


def acceptance_by_depth(runs: Sequence[Measurement]) -> dict[str, list[float | None]]:
    """Acceptance rate at k (given that the slots before k were accepted) and prefix survival at k, k = 1 first.

    The rate counts the rounds whose tree had a node at slot k; the survival is the product of the rates (METHODS
    section 1).
    """
    accepted = add_by_depth(run.accepted_by_depth for run in runs)
    drafted = add_by_depth(run.drafted_by_depth for run in runs)
    depth = max((k + 1 for k, count in enumerate(drafted) if count), default=0)
    rates = [share(hit, tried) for hit, tried in zip(accepted[:depth], drafted[:depth])]
    survival: list[float | None] = []
    for rate in rates:
        before = survival[-1] if survival else 1.0
        survival.append(None if rate is None or before is None else before * rate)
    return {"acceptance_rate_at": rates, "prefix_survival_at": survival}


def verification_figures(runs: Sequence[Measurement]) -> dict[str, float | None]:
    """Pass rate (accepted / sent), wasted compute (rejected nodes / all target tokens) and costs per token."""
    computed = sum(run.target_tokens for run in runs)
    forwards = sum(run.target_forwards for run in runs)
    sent = computed - forwards  # every forward also carries the anchor, which is no draft
    accepted = sum(sum(run.accepted_by_depth) for run in runs)
    decoded = sum(run.decoded for run in runs)
    drafts = sum(run.draft_forwards for run in runs)
    return {
        "pass_rate": share(accepted, sent),
        "wasted_compute": share(sent - accepted, computed),
        "target_tokens_per_token": share(computed, decoded),
        "target_tokens_per_forward": share(computed, forwards),
        "tokens_per_draft_forward": share(decoded, drafts),
    }


def time_shares(runs: Sequence[Measurement]) -> dict[str, float | None]:
    """Shares of decode time (prefill excluded): target forwards, draft forwards, everything else."""
    totals = {key: sum(run.time.get(key, 0.0) for run in runs) for key in ("target", "draft", "host")}
    whole = sum(totals.values())
    return {key: share(value, whole) for key, value in totals.items()}


def decode_seconds(run: Measurement) -> float:
    """Seconds after the prefill, from the loop's own clock."""
    return sum(run.time.get(key, 0.0) for key in ("target", "draft", "host"))


def burst_gaps(runs: Iterable[Measurement]) -> tuple[list[float], list[float]]:
    """Waits between arrivals, and the same spread over the tokens that arrived together.

    The first is what a reader of a stream feels, the second the price of one token.
    """
    waits: list[float] = []
    per_token: list[float] = []
    for run in runs:
        for before, after, tokens in zip(run.burst_seconds, run.burst_seconds[1:], run.burst_tokens[1:]):
            waits.append(after - before)
            per_token.extend([(after - before) / tokens] * tokens if tokens else [])
    return waits, per_token


def latency_figures(runs: Sequence[Measurement]) -> dict[str, Any]:
    waits, per_token = burst_gaps(runs)
    first = [run.first_token_seconds for run in runs if run.first_token_seconds is not None]
    return {
        "first_token_seconds": percentiles(first),
        "seconds_between_arrivals": percentiles(waits),
        "seconds_per_token": percentiles(per_token),
    }


def contender_figures(records: Sequence[PromptRecord], name: str, *, draws: int, seed: int) -> dict[str, Any]:
    """Everything that is said of one contender over ``records``, beside plain decoding."""
    paired = [record for record in records if name in record.runs and PLAIN in record.runs]
    runs = runs_of(paired, name)
    plain = runs_of(paired, PLAIN)
    strata = [record.prompt.domain for record in paired]
    seconds, tokens = [run.seconds for run in runs], [len(run.tokens) for run in runs]
    faster = speedup(
        [run.seconds for run in plain],
        [len(run.tokens) for run in plain],
        seconds,
        tokens,
        strata=strata,
        draws=draws,
        seed=seed,
    )
    timed = all(run.time for run in [*runs, *plain])
    decode = (
        speedup(
            [decode_seconds(run) for run in plain],
            [run.decoded for run in plain],
            [decode_seconds(run) for run in runs],
            [run.decoded for run in runs],
            strata=strata,
            draws=draws,
            seed=seed,
        )
        if timed
        else Estimate(None)
    )
    tau = ratio_of_sums(
        [run.decoded for run in runs],
        [run.target_forwards for run in runs],
        strata=strata,
        draws=draws,
        seed=seed,
    )
    return {
        "prompts": len(paired),
        "tokens": sum(tokens),
        "seconds": sum(seconds),
        "tokens_per_second": share(sum(tokens), sum(seconds)),
        "speedup": faster.value,
        "speedup_ci95": faster.interval,
        "decode_speedup": decode.value,
        "decode_speedup_ci95": decode.interval,
        "acceptance_length": tau.value,
        "acceptance_length_ci95": tau.interval,
        **acceptance_by_depth(runs),
        **verification_figures(runs),
        "time_share": time_shares(runs),
        **latency_figures(runs),
    }


def interpolate_cost(curve: dict[int, float], tokens: float) -> float | None:
    """``t_verify(tokens)`` from the measured points, linear between them and flat beyond the ends."""
    if not curve:
        return None
    points = sorted(curve)
    return float(np.interp(tokens, points, [curve[point] for point in points]))


def bound_and_gap(
    records: Sequence[PromptRecord], name: str, curve: dict[int, float], achieved: float | None
) -> dict[str, Any] | None:
    """The speedup that tau and the cost curve allow, and where the rest of tau goes.

    ``bound = tau * t(1) / (t(n) + t_draft)`` with n the mean number of tokens per target forward (METHODS
    section 7, 10). The gap is a waterfall from tau (target forwards alone, each as cheap as a plain one, draft
    and host free) to what was achieved; each step divides by one more measured cost, so the steps multiply
    to the result exactly.
    """
    paired = [record for record in records if name in record.runs and PLAIN in record.runs]
    runs, plain = runs_of(paired, name), runs_of(paired, PLAIN)
    decoded, forwards = sum(run.decoded for run in runs), sum(run.target_forwards for run in runs)
    plain_decoded = sum(run.decoded for run in plain)
    if not forwards or not decoded or not plain_decoded:
        return None
    tau = decoded / forwards
    times = {key: sum(run.time.get(key, 0.0) for run in runs) for key in ("target", "draft", "host")}
    plain_forward = sum(run.time.get("target", 0.0) for run in plain) / plain_decoded
    plain_token = sum(decode_seconds(run) for run in plain) / plain_decoded
    target, draft, host = (times[key] / forwards for key in ("target", "draft", "host"))
    if not plain_forward or not target:
        return None
    drafts = sum(run.draft_forwards for run in runs)
    draft_seconds = times["draft"] / drafts if drafts else 0.0
    tokens_per_forward = sum(run.target_tokens for run in runs) / forwards
    one, many = interpolate_cost(curve, 1), interpolate_cost(curve, tokens_per_forward)
    bound = tau * one / (many + draft_seconds) if one and many else None
    steps = [
        ("every accepted token free (tau)", tau),
        ("after the cost of verifying more tokens per forward", tau * plain_forward / target),
        ("after draft forwards", tau * plain_forward / (target + draft)),
        ("after host work, both loops", tau * plain_token / (target + draft + host)),
    ]
    if achieved is not None:
        steps.append(("end to end, with the prefill that both share", achieved))
    return {
        "acceptance_length": tau,
        "tokens_per_forward": tokens_per_forward,
        "draft_forward_seconds": draft_seconds,
        "bound": bound,
        "bound_formula": "tau * t(1) / (t(n) + t_draft)",
        "achieved_end_to_end": achieved,
        "achieved_decode": steps[3][1],
        "steps": [{"name": label, "speedup": value} for label, value in steps],
    }


def summarise(
    records: Sequence[PromptRecord], main: str, curve: dict[int, float], *, draws: int = 2000, seed: int = 0
) -> dict[str, Any]:
    """The figures of one domain (or of all): the main contender's at the top, every contender's below."""
    names = list(dict.fromkeys(name for record in records for name in record.runs))
    contenders = {name: contender_figures(records, name, draws=draws, seed=seed) for name in names}
    figures = dict(contenders[main])
    figures["baseline_tokens_per_second"] = contenders[PLAIN]["tokens_per_second"]
    figures["bound"] = bound_and_gap(records, main, curve, figures["speedup"])
    figures["contenders"] = contenders
    return figures
