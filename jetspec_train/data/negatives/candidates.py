"""Which paths are tried on a sample, and how an edit becomes a path: an anchor before it, at most a block long.

Everything random belongs to (seed, sample, attempt) alone, so neither batches nor kills nor other kinds move it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from jetspec_train.config import NegativesConfig
from jetspec_train.data.negatives.answer_text import AnswerText, CannotBuild, Edit
from jetspec_train.data.negatives.kinds import Generator, builder_of
from jetspec_train.data.negatives.rows import NEAR_MISS, ON_POLICY, SYNTHETIC, class_of

SHORTEST_ANSWER = 3  # tokens: an anchor, and a place for an edit that is not the end


@dataclass(frozen=True)
class Candidate:
    """A path to be judged: ``tokens`` are proposed after the token at position ``anchor``."""

    anchor: int
    tokens: list[int]
    variant: str


def shares_of(cfg: NegativesConfig, drafted: bool) -> dict[str, float]:
    """The part of each class (on_policy, near_miss, synthetic) in the mix, summing to 1; only those asked for.

    ``drafted``: a bundle is there to mine on-policy paths with.
    """
    wanted = {ON_POLICY: 1.0 - cfg.near_miss - cfg.synthetic, NEAR_MISS: cfg.near_miss, "synthetic": cfg.synthetic}
    asked = {class_of(kind) for kind in cfg.kinds if kind != ON_POLICY or drafted}
    shares = {name: share for name, share in wanted.items() if name in asked and share > 0}
    total = sum(shares.values())
    return {name: share / total for name, share in shares.items()}


def attempts_of(cfg: NegativesConfig, sample_id: str, drafted: bool) -> list[str]:
    """The kinds tried on one sample: ``per_sample`` of them, by the mix in expectation, synthetic kinds in turn."""
    shares = shares_of(cfg, drafted)
    if not shares:
        return []
    random = generator_of(cfg.seed, sample_id, "plan")
    names, parts = list(shares), np.cumsum(list(shares.values()))
    # One uniform number, evenly spaced from there: every count is its share of per_sample, rounded up or down.
    places = (random.random() + np.arange(cfg.per_sample)) / cfg.per_sample
    classes = [names[min(int(np.searchsorted(parts, place, side="right")), len(names) - 1)] for place in places]
    synthetic = random.permutation([kind for kind in SYNTHETIC if kind in cfg.kinds]).tolist()
    kinds, turn = [], 0
    for name in classes:
        if name == "synthetic":
            kinds.append(synthetic[turn % len(synthetic)])
            turn += 1
        else:
            kinds.append(name)
    return kinds


def generator_of(seed: int, sample_id: str, purpose: str) -> Generator:
    """A generator of its own for every purpose of every sample."""
    digest = hashlib.blake2b(f"{seed}/{sample_id}/{purpose}".encode(), digest_size=16).digest()
    words = np.frombuffer(digest, dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=words))


def build_edit(kind: str, answer: AnswerText, random: Generator, end: int) -> Edit:
    """An edit of a synthetic kind. Raises CannotBuild with the reason where the answer has no place for it."""
    if len(answer.tokens) - answer.first < SHORTEST_ANSWER:
        raise CannotBuild("too_short")
    return builder_of(kind, end)(answer, random)


def place_edit(
    tokens: Sequence[int], first: int, edit: Edit, *, block: int, ends: Sequence[int], random: Generator
) -> Candidate:
    """An anchor at a random distance before the edit, and the path from there: right tokens, the edit, what follows.

    Every depth of the block is as likely for the first edited token, as far as the answer and the edit's own length
    allow (an edit that fits into a block is shown whole), so that depth says nothing about correctness. ``first``:
    position of the first answer token, the earliest anchor. Raises CannotBuild if nothing but the anchor would be left.
    """
    furthest = min(block - 1, edit.position - 1 - first)
    if furthest < 0:
        raise CannotBuild("only_at_the_start")
    if len(edit.tokens) <= block:
        furthest = min(furthest, block - len(edit.tokens))
    elif edit.resume < len(tokens):
        raise CannotBuild("longer_than_a_block")
    anchor = edit.position - 1 - int(random.integers(furthest + 1))
    path = [*tokens[anchor + 1 : edit.position], *edit.tokens, *tokens[edit.resume :]][:block]
    return Candidate(anchor, cut_at_end([int(token) for token in path], ends), edit.variant)


def cut_at_end(path: list[int], ends: Sequence[int]) -> list[int]:
    """Nothing stands behind an end token."""
    for place, token in enumerate(path):
        if token in ends:
            return path[: place + 1]
    return path


def end_token(last_tokens: Mapping[int, int], eos_ids: Sequence[int]) -> int:
    """The token with which this target's answers end: the most frequent of ``last_tokens`` (token -> how often)."""
    seen = {token: count for token, count in last_tokens.items() if token in eos_ids}
    return max(seen, key=lambda token: (seen[token], -token)) if seen else int(eos_ids[0])
