"""The target as judge: one forward per group of samples, then short ones over the paths, behind a cached prefix.

A sample's tokens go through the target once. Its paths are then judged from the last anchor to the first: the cache is
cut at the anchor and the path staged behind it, so a path costs a block of tokens instead of its whole prefix. Labels
come from nowhere else (METHODS 4 and 6).

Shapes: B samples, T tokens, N staged tokens of a path, M judged places, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jetspec_train.config import SamplingConfig
from jetspec_train.data.negatives.candidates import Candidate
from jetspec_train.data.negatives.rows import difficulty_of
from jetspec_train.targets.cache import KVCache
from jetspec_train.targets.sampling import choose
from jetspec_train.targets.target import Target

LOGIT_ROWS = 256  # places whose full-vocabulary logits exist at once


@dataclass
class Group:
    """B samples as the target has read them: states at every token, and the cache that paths are judged behind."""

    texts: list[list[int]]
    cache: KVCache
    hidden_BTD: torch.Tensor
    features_BTF: torch.Tensor | None


@dataclass(frozen=True)
class Judgement:
    """What the target says of a path; see the columns of the same names in ``rows.SCHEMA``."""

    labels: list[bool]
    logprobs: list[float]
    first_wrong: int | None
    place: int
    right_token: int
    wrong_token: int
    p_right: float
    p_wrong: float
    margin: float
    is_positive: bool
    difficulty: str


@dataclass(frozen=True)
class Places:
    """The target's view of M places. Log-probabilities in nats; ``second_M`` is the best token but the choice."""

    choice_M: np.ndarray
    choice_logprob_M: np.ndarray
    second_M: np.ndarray
    second_logprob_M: np.ndarray
    given_logprob_M: np.ndarray  # of the token that was asked about


def read_group(target: Target, texts: Sequence[Sequence[int]], taps: Sequence[int] = ()) -> Group:
    """One forward over whole samples, ragged rows padded on the right."""
    rows = [[int(token) for token in text] for text in texts]
    lengths = [len(row) for row in rows]
    cache = target.new_cache(len(rows), max(lengths) + 1)
    tokens_BT = torch.full((len(rows), max(lengths)), target.pad_id, dtype=torch.long)
    for index, row in enumerate(rows):
        tokens_BT[index, : len(row)] = torch.tensor(row)
    output = target.forward(tokens_BT, cache=cache, taps=tuple(taps))
    cache.commit_first(lengths)
    return Group(rows, cache, output.hidden_BND, output.features_BNF)


@torch.inference_mode()
def top_choices(target: Target, hidden_MD: torch.Tensor, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The ``count`` most probable next tokens at M places, best first: tokens and log-probabilities, [M, count]."""
    tokens, logprobs = [], []
    for part in hidden_MD.split(LOGIT_ROWS):
        best = target.logits(part).float().log_softmax(-1).topk(count, dim=-1)
        tokens.append(best.indices.cpu().numpy())
        logprobs.append(best.values.cpu().numpy())
    return np.concatenate(tokens), np.concatenate(logprobs)


@torch.inference_mode()
def judge(target: Target, group: Group, paths: Sequence[Sequence[Candidate]]) -> list[list[Judgement]]:
    """Judge the paths of every sample of the group; the order of the input is kept.

    Uses the group's cache up: what lies behind the first anchor is overwritten.
    """
    verdicts: list[list[Judgement | None]] = [[None] * len(of_row) for of_row in paths]
    orders = [sorted(range(len(of_row)), key=lambda i: -of_row[i].anchor) for of_row in paths]
    for turn in range(max((len(order) for order in orders), default=0)):
        chosen = [(row, order[turn]) for row, order in enumerate(orders) if turn < len(order)]
        staged = max(len(paths[row][index].tokens) for row, index in chosen)
        tokens_BN = torch.full((len(group.texts), staged), target.pad_id, dtype=torch.long)
        for row, index in chosen:
            path = paths[row][index]
            group.cache.truncate(row, path.anchor)
            # The state at a token gives the next one's distribution, so the last token need not be run.
            inputs = [group.texts[row][path.anchor], *path.tokens[:-1]]
            tokens_BN[row, : len(inputs)] = torch.tensor(inputs)
        hidden_BND = target.forward(tokens_BN, cache=group.cache).hidden_BND
        asked = [paths[row][index].tokens for row, index in chosen]
        hidden_MD = torch.cat([hidden_BND[row, : len(given)] for (row, _), given in zip(chosen, asked)])
        seen = look(target, hidden_MD, [token for given in asked for token in given])
        begin = 0
        for (row, index), given in zip(chosen, asked):
            verdicts[row][index] = verdict_on(given, seen, begin)
            begin += len(given)
    return [[verdict for verdict in of_row if verdict is not None] for of_row in verdicts]


def look(target: Target, hidden_MD: torch.Tensor, given_M: Sequence[int]) -> Places:
    """The target's greedy choice at M places, its second choice, and what it thinks of the given tokens."""
    columns: list[list[np.ndarray]] = []
    asked_M = torch.tensor(list(given_M), device=hidden_MD.device)
    for part, given in zip(hidden_MD.split(LOGIT_ROWS), asked_M.split(LOGIT_ROWS)):
        logits_MV = target.logits(part)
        # the same choice as decoding makes, ties included
        choice_M = choose(logits_MV, SamplingConfig(), 0, [], []).to(part.device)
        logprobs_MV = logits_MV.float().log_softmax(-1)
        two = logprobs_MV.topk(2, dim=-1)
        is_first_M = two.indices[:, 0] == choice_M
        second_M = torch.where(is_first_M, two.indices[:, 1], two.indices[:, 0])
        rows = torch.arange(len(part), device=part.device)
        found = (choice_M, logprobs_MV[rows, choice_M], second_M, logprobs_MV[rows, second_M], logprobs_MV[rows, given])
        columns.append([column.cpu().numpy() for column in found])
    return Places(*(np.concatenate(column) for column in zip(*columns)))


def verdict_on(path: Sequence[int], seen: Places, begin: int) -> Judgement:
    """Read a path's verdict off its places ``begin .. begin + len(path) - 1``."""
    here = slice(begin, begin + len(path))
    right = seen.choice_M[here] == np.asarray(path)
    first_wrong = None if right.all() else int(right.argmin())
    judged = len(path) if first_wrong is None else first_wrong + 1
    if first_wrong is not None:
        place = first_wrong
        wrong_token, wrong_logprob = int(path[place]), float(seen.given_logprob_M[here][place])
    else:  # the closest call: where the second choice came nearest
        place = int((seen.choice_logprob_M[here] - seen.second_logprob_M[here]).argmin())
        wrong_token, wrong_logprob = int(seen.second_M[here][place]), float(seen.second_logprob_M[here][place])
    right_logprob = float(seen.choice_logprob_M[here][place])
    margin = max(0.0, right_logprob - wrong_logprob)  # equal logits may differ in the last digit
    return Judgement(
        labels=right[:judged].tolist(),
        logprobs=seen.given_logprob_M[here][:judged].astype(float).tolist(),
        first_wrong=first_wrong,
        place=place,
        right_token=int(seen.choice_M[here][place]),
        wrong_token=wrong_token,
        p_right=float(np.exp(right_logprob)),
        p_wrong=float(np.exp(wrong_logprob)),
        margin=margin,
        is_positive=first_wrong is None,
        difficulty=difficulty_of(margin),
    )
