"""Batched plain generation with the target, for making training answers.

The batch stays full: the place of a finished row is given to the next request. Requests of similar length should
follow each other (the caller sorts), since every row attends over as many key slots as the longest one. New requests
are read together in a small cache of their own and copied into the free rows; an eighth of the batch may lie idle
until then, because reading prompts one at a time costs more than idle rows do. Rows leave the cache only when requests
have run out: each time, what remains is copied.

Nothing here knows of prompts as text, files or budgets: token ids in, token ids and numbers out.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jetspec_train.config import SamplingConfig
from jetspec_train.targets.cache import KVCache
from jetspec_train.targets.sampling import choose
from jetspec_train.targets.target import Target


@dataclass(frozen=True)
class Request:
    """One answer to make.

    Attributes:
        tokens: the prompt.
        max_new_tokens: at most so many tokens, the end token included.
        row: key of the request's random draws; equal keys and prompts give equal samples.
        tag: anything the caller wants back.
    """

    tokens: Sequence[int]
    max_new_tokens: int
    row: int = 0
    tag: Any = None


@dataclass
class Completion:
    """A finished answer.

    Attributes:
        tokens: generated ids; the last one is an end token if ``finish_reason`` is "stop". Never a forged end.
        logprobs: log-probability of each token under the target's raw distribution (temperature 1, no filters), nats.
        entropies: entropy of that distribution, nats.
        margins: log-probability of its first choice minus that of its second, nats.
        finish_reason: "stop" (an end token came) or "length" (``max_new_tokens`` or the context ran out).
    """

    request: Request
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    entropies: list[float] = field(default_factory=list)
    margins: list[float] = field(default_factory=list)
    finish_reason: str = "length"


@torch.no_grad()
def generate_stream(
    target: Target,
    requests: Iterator[Request],
    *,
    batch_size: int,
    sampling: SamplingConfig,
    seed: int = 0,
    eos_ids: Sequence[int] | None = None,
    prefill_rows: int = 8,
    on_tokens: Callable[[int], None] | None = None,
) -> Iterator[Completion]:
    """Answer the requests, each as soon as it is finished (so not in order).

    Args:
        batch_size: rows decoded together.
        seed: of the keyed draws.
        eos_ids: token ids that end an answer; the target's own by default.
        prefill_rows: at most so many prompts are read in one forward.
        on_tokens: called after each step with the number of tokens made (for progress bars).

    Raises:
        UserError: a prompt does not fit the target's context.
    """
    ends = frozenset(target.eos_ids if eos_ids is None else eos_ids)
    waiting = iter(requests)
    first = list(itertools.islice(waiting, batch_size))
    if not first:
        return
    waiting = itertools.chain(first, waiting)
    cache = target.new_cache(len(first), max(len(request.tokens) + request.max_new_tokens for request in first))
    rows: list[Completion | None] = [None] * len(first)
    exhausted = False

    while True:
        free = [row for row, completion in enumerate(rows) if completion is None]
        if not exhausted and len(free) >= max(1, len(rows) // 8):
            group = list(itertools.islice(waiting, min(len(free), prefill_rows)))
            exhausted = not group
            yield from _admit(target, group, sampling, seed, ends, cache, rows, free)
            if on_tokens is not None:
                on_tokens(len(group))
            continue
        running = [row for row, completion in enumerate(rows) if completion is not None]
        if not running:
            return
        if exhausted and 4 * len(free) >= len(rows):
            cache.drop_rows(running)
            rows, running = [rows[row] for row in running], list(range(len(running)))

        completions = [completion for completion in rows if completion is not None]
        last = [completion.tokens[-1] if completion is not None else target.pad_id for completion in rows]
        output = target.forward(torch.tensor(last)[:, None], cache=cache)
        cache.commit_first([int(completion is not None) for completion in rows])
        hidden_BD = output.hidden_BND[:, 0]
        _extend(target, completions, hidden_BD if len(running) == len(rows) else hidden_BD[running], sampling, seed)
        if on_tokens is not None:
            on_tokens(len(running))
        for row, completion in zip(running, completions):
            if _finished(target, completion, ends):
                rows[row] = None
                cache.truncate(row, 0)
                yield completion


def _admit(
    target: Target,
    group: list[Request],
    sampling: SamplingConfig,
    seed: int,
    ends: frozenset[int],
    cache: KVCache,
    rows: list[Completion | None],
    free: list[int],
) -> Iterator[Completion]:
    """Put new requests into free rows; yields those that their first token already finishes."""
    if not group:
        return
    for request in group:
        target.check_length(len(request.tokens))
    admitted, fresh = _prefill(target, group, sampling, seed)
    places = iter(free)
    for source, completion in enumerate(admitted):
        if _finished(target, completion, ends):
            yield completion
        else:
            row = next(places)
            cache.copy_row_from(fresh, source, row)
            rows[row] = completion


def _prefill(
    target: Target, group: list[Request], sampling: SamplingConfig, seed: int
) -> tuple[list[Completion], KVCache]:
    """Read the prompts in one right-padded forward and choose each row's first token."""
    lengths = [len(request.tokens) for request in group]
    tokens_BN = torch.full((len(group), max(lengths)), target.pad_id, dtype=torch.long)
    for row, request in enumerate(group):
        tokens_BN[row, : lengths[row]] = torch.tensor(list(request.tokens))
    cache = target.new_cache(len(group), max(lengths))
    output = target.forward(tokens_BN, cache=cache)
    cache.commit_first(lengths)
    rows = torch.arange(len(group), device=target.device)
    hidden_BD = output.hidden_BND[rows, torch.tensor(lengths, device=target.device) - 1]
    completions = [Completion(request) for request in group]
    _extend(target, completions, hidden_BD, sampling, seed)
    return completions, cache


def _extend(
    target: Target, completions: list[Completion], hidden_BD: torch.Tensor, sampling: SamplingConfig, seed: int
) -> None:
    """Choose one token per row and note its numbers. One device-to-host transfer."""
    logits_BV = target.logits(hidden_BD).float()
    histories = None
    if sampling.repetition_penalty != 1.0:
        histories = [[*completion.request.tokens, *completion.tokens] for completion in completions]
    positions = [len(completion.request.tokens) + len(completion.tokens) for completion in completions]
    rows = [completion.request.row for completion in completions]
    chosen_B = choose(logits_BV, sampling, seed, rows, positions, histories)
    normaliser_B = logits_BV.logsumexp(-1)
    best_B2 = logits_BV.topk(2, dim=-1).values
    chosen_logit_B = logits_BV.gather(1, chosen_B[:, None])[:, 0]
    # H = log Z - sum p * logit; a full matrix of log-probabilities is not needed.
    probability_BV = (logits_BV - normaliser_B[:, None]).exp_()
    entropy_B = normaliser_B - torch.linalg.vecdot(probability_BV, logits_BV)
    numbers = torch.stack(
        [
            chosen_B.double(),
            (chosen_logit_B - normaliser_B).double(),
            entropy_B.double(),
            (best_B2[:, 0] - best_B2[:, 1]).double(),
        ],
        dim=1,
    ).tolist()
    for completion, (token, logprob, entropy, margin) in zip(completions, numbers):
        completion.tokens.append(int(token))
        completion.logprobs.append(logprob)
        completion.entropies.append(entropy)
        completion.margins.append(margin)


def _finished(target: Target, completion: Completion, ends: frozenset[int]) -> bool:
    if completion.tokens[-1] in ends:
        completion.finish_reason = "stop"
        return True
    context = len(completion.request.tokens) + len(completion.tokens)
    return len(completion.tokens) >= completion.request.max_new_tokens or context >= target.max_positions
