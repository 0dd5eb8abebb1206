"""Reduced draft vocabularies: the most frequent tokens of the training text, and the tables that translate them.

Shapes: V target vocabulary, X draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class DraftVocabulary:
    """``ids_X``: target ids, ascending. ``coverage``: share of the counted tokens that the draft can say."""

    ids_X: Tensor
    vocab_size: int
    coverage: float

    @property
    def offsets_X(self) -> Tensor:
        """``d2t`` of the published formats: offsets, not ids; target id = i + d2t[i]."""
        return self.ids_X - torch.arange(len(self.ids_X))

    @property
    def contains_V(self) -> Tensor:
        """``t2d`` of the published formats: bool [V]."""
        contains = torch.zeros(self.vocab_size, dtype=torch.bool)
        contains[self.ids_X] = True
        return contains

    def draft_ids(self, tokens: Tensor) -> Tensor:
        """Target ids -> draft ids, -1 where the draft cannot say the token."""
        table = torch.full((self.vocab_size,), -1)
        table[self.ids_X] = torch.arange(len(self.ids_X))
        return table.to(tokens.device)[tokens]


def choose_vocabulary(counts_V: Tensor, size: int, always: Iterable[int] = ()) -> DraftVocabulary:
    """The ``size`` most frequent tokens (ties: the smaller id), those of ``always`` (end of turn) among them.

    Raises ``ValueError`` if ``size`` does not fit.
    """
    total = len(counts_V)
    kept = sorted(set(always))
    if not len(kept) <= size <= total or (kept and not 0 <= kept[0] <= kept[-1] < total):
        raise ValueError(f"a draft vocabulary of {size} must hold {len(kept)} fixed tokens and fit into {total}")
    order = torch.argsort(counts_V, descending=True, stable=True).tolist()
    chosen = set(kept)
    for token in order:
        if len(chosen) == size:
            break
        chosen.add(token)
    ids_X = torch.tensor(sorted(chosen))
    counted = float(counts_V.sum())
    return DraftVocabulary(ids_X, total, float(counts_V[ids_X].sum()) / counted if counted else 0.0)


def token_counts(documents: Iterable[Tensor], vocab_size: int) -> Tensor:
    """How often each token occurs, int64 [V]; one 1-D tensor of supervised tokens per document."""
    counts_V = torch.zeros(vocab_size, dtype=torch.int64)
    for tokens in documents:
        counts_V += torch.bincount(tokens.cpu(), minlength=vocab_size)
    return counts_V
