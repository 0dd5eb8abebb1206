"""The value of a sample: named signals per answer, and a score that is a stated function of them (METHODS 5).

Signals (one number per sample; T answer tokens):

    gap           mean over tokens of log p_target - log p_ngram, nats: what a draft as simple as an n-gram model of the
                  same data still has to learn. The model's counts leave the token itself out.
    entropy       mean entropy of the target, nats
    uncertain     share of tokens whose entropy lies in ``entropy_band``
    flatness      mean of exp(-margin): 1 where the target's two first choices are equally likely (arXiv 2601.18902)
    tokens        T
    repetition    1 - distinct 4-grams / 4-grams of the answer

Published signals disagree in sign (arXiv 2604.14084, 2601.18902, 2510.19779), so none is trusted by default beyond the
weights that the configuration states. The score is ``sum of weight * rank``, ranks in (0, 1] among all candidates.

This file knows arrays only: no files, no configuration objects.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

SIGNALS = ("gap", "entropy", "uncertain", "flatness", "tokens", "repetition")
_BUCKETS = 1 << 22  # per table; memory stays at 50 MB however large the corpus
_ORDER_WEIGHTS = (0.6, 0.3, 0.1)  # trigram, bigram, unigram


class NgramDraft:
    """An interpolated trigram model in hashed tables: the cheapest draft, fitted in one pass over the data.

    Collisions of the hash only blur rare contexts. ``add`` every sample first, then ask ``log_probabilities``.
    """

    def __init__(self, vocabulary: int, buckets: int = _BUCKETS) -> None:
        self._vocabulary = vocabulary
        self._buckets = buckets
        self._unigrams = np.zeros(vocabulary, dtype=np.int64)
        # per order (trigram, bigram): counts of (context, token) and of the context
        self._joint = [np.zeros(buckets, dtype=np.int32) for _ in range(2)]
        self._context = [np.zeros(buckets, dtype=np.int32) for _ in range(2)]
        self._total = 0

    def add(self, tokens: np.ndarray, answer_start: int) -> None:
        """Count the answer tokens of one sample: int [prompt + answer]."""
        token, keys = self._keys(tokens, answer_start)
        np.add.at(self._unigrams, token, 1)
        for order, (joint, context) in enumerate(keys):
            np.add.at(self._joint[order], joint, 1)
            np.add.at(self._context[order], context, 1)
        self._total += len(token)

    def log_probabilities(self, tokens: np.ndarray, answer_start: int) -> np.ndarray:
        """Log-probability of each answer token [T], with the token's own occurrence taken out of the counts."""
        token, keys = self._keys(tokens, answer_start)
        floor = 1.0 / self._vocabulary
        unigram = (self._unigrams[token] - 1 + floor) / max(self._total, 1)
        probability = _ORDER_WEIGHTS[2] * unigram
        for order, (joint, context) in enumerate(keys):
            seen = np.maximum(self._context[order][context] - 1, 0)
            hits = np.maximum(self._joint[order][joint] - 1, 0)
            # A context never seen elsewhere says nothing: the unigram stands in.
            known = np.where(seen > 0, hits / np.maximum(seen, 1), unigram)
            probability = probability + _ORDER_WEIGHTS[order] * known
        return np.log(np.maximum(probability, 1e-12))

    def _keys(self, tokens: np.ndarray, start: int) -> tuple[np.ndarray, list[tuple[np.ndarray, np.ndarray]]]:
        padded = np.concatenate([np.zeros(2, dtype=np.uint64), tokens.astype(np.uint64) + np.uint64(1)])
        places = np.arange(start, len(tokens)) + 2
        one, two, token = padded[places - 1], padded[places - 2], padded[places]
        contexts = [self._hash(two, one), self._hash(one)]
        keys = [(self._slot(self._hash(context, token)), self._slot(context)) for context in contexts]
        return tokens[start:], keys

    @staticmethod
    def _hash(*parts: np.ndarray) -> np.ndarray:
        value = np.full(parts[0].shape, 0x9E3779B97F4A7C15, dtype=np.uint64)
        with np.errstate(over="ignore"):
            for part in parts:
                value = (value ^ part) * np.uint64(0xBF58476D1CE4E5B9)
                value ^= value >> np.uint64(29)
        return value

    def _slot(self, value: np.ndarray) -> np.ndarray:
        return (value % np.uint64(self._buckets)).astype(np.int64)


def repetition(tokens: np.ndarray, order: int = 4) -> float:
    """1 - distinct n-grams / n-grams: 0 for text without any repeated run of ``order`` tokens."""
    if len(tokens) <= order:
        return 0.0
    grams = np.lib.stride_tricks.sliding_window_view(tokens, order)
    return 1.0 - len(np.unique(grams, axis=0)) / len(grams)


def signals_of(
    tokens: np.ndarray,
    answer_start: int,
    logprobs: np.ndarray,
    entropies: np.ndarray,
    margins: np.ndarray,
    draft: NgramDraft,
    entropy_band: Sequence[float],
) -> dict[str, float]:
    """All signals of one sample. ``tokens``: prompt and answer; the other arrays are per answer token [T > 0]."""
    low, high = entropy_band
    answer = tokens[answer_start:]
    return {
        "gap": float(np.mean(logprobs - draft.log_probabilities(tokens, answer_start))),
        "entropy": float(entropies.mean()),
        "uncertain": float(((entropies >= low) & (entropies <= high)).mean()),
        "flatness": float(np.exp(-np.maximum(margins, 0.0)).mean()),
        "tokens": float(len(answer)),
        "repetition": repetition(answer),
    }


def ranks(values: np.ndarray) -> np.ndarray:
    """Ranks in (0, 1], ties share their mean rank, so that equal samples get equal scores."""
    from scipy.stats import rankdata

    return rankdata(values, method="average") / max(len(values), 1)


def score(signals: Mapping[str, np.ndarray], weights: Mapping[str, float]) -> np.ndarray:
    """``sum of weight * rank(signal)`` per sample; zeros for no weights. Raises ``KeyError`` for an unknown signal."""
    total = np.zeros(len(next(iter(signals.values()))))
    for name, weight in weights.items():
        if weight:
            total = total + weight * ranks(signals[name])
    return total


def choose(
    scores: np.ndarray,
    tokens: np.ndarray,
    domains: np.ndarray,
    keys: np.ndarray,
    limit: int,
    domain_shares: Mapping[str, float],
) -> np.ndarray:
    """Which samples to keep, best score first, within ``limit`` tokens and each domain's share of it: texts [N].

    "kept", "domain quota" or "budget". Equal scores are taken in the order of ``keys`` (ids, which are hashes: a fixed
    random order). A sample that no longer fits is passed over; smaller ones behind it may still fit.
    """
    reasons = np.full(len(scores), "budget", dtype=object)
    room = {name: share * limit for name, share in domain_shares.items()}
    left = limit
    for place in np.lexsort((keys, -scores)):
        size, domain = int(tokens[place]), str(domains[place])
        if size > left:
            continue
        if domain in room and size > room[domain]:
            reasons[place] = "domain quota"
            continue
        reasons[place] = "kept"
        left -= size
        if domain in room:
            room[domain] -= size
    return reasons
