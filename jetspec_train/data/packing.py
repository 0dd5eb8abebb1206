"""Samples into fixed-length sequences, and the order in which training reads them.

Samples are packed by best fit, never split; one longer than the sequence is cropped at its end, which is
counted. The plan of an epoch is a pure function of (samples, seed, epoch), so a run resumes from a step
number alone. Nothing is dropped: where the sequences do not fill the last step, empty ones of weight 0 do.

Shapes: S sequences of one rank and step, T sequence length, N samples.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from jetspec_train.artifacts.errors import UserError
from jetspec_train.data.samples import SampleStore

NO_DOCUMENT = -1
MIN_SUPERVISED = 2  # an anchor needs itself and its successor supervised


@dataclass(frozen=True)
class PackedBatch:
    """Sequences of one rank for one step (or micro-step).

    tokens_ST: int64, 0 on padding. positions_ST: int64, position inside the document, 0 on padding.
    documents_ST: int64, 0, 1, ... within a sequence, -1 on padding. supervised_ST: bool, answer tokens.
    """

    tokens_ST: np.ndarray
    positions_ST: np.ndarray
    documents_ST: np.ndarray
    supervised_ST: np.ndarray

    @property
    def supervised_tokens(self) -> int:
        return int(self.supervised_ST.sum())


@dataclass(frozen=True)
class PackingFacts:
    """What packing did to the samples, for the log and the counts."""

    samples: int
    packed: int
    too_short: int  # nothing left to learn from after cropping
    cropped: int
    cropped_tokens: int  # supervised tokens that cropping lost, of cropped and too short samples
    supervised_tokens: int  # in the sequences, per epoch
    tokens: int
    sequences: int
    places: int  # sequences x sequence length

    @property
    def fill(self) -> float:
        """Share of the places that hold a token."""
        return self.tokens / max(1, self.places)


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
    """Bin of every item: the fullest open bin that still has room, longest items first.

    Args:
        lengths: int [N], each in 1..capacity.
    Returns:
        int64 [N], bins numbered from 0. A bit mask of the free sizes in use finds the bin in O(1).
    """
    order = np.argsort(-lengths, kind="stable")
    bins = np.empty(len(lengths), dtype=np.int64)
    open_bins: list[list[int]] = [[] for _ in range(capacity + 1)]  # by free places
    free_sizes, count = 0, 0
    for item, length in zip(order.tolist(), lengths[order].tolist()):
        fitting = free_sizes >> length
        if fitting:
            free = length + (fitting & -fitting).bit_length() - 1
            number = open_bins[free].pop()
            if not open_bins[free]:
                free_sizes &= ~(1 << free)
        else:
            free, number, count = capacity, count, count + 1
        left = free - length
        if left:
            open_bins[left].append(number)
            free_sizes |= 1 << left
        bins[item] = number
    return bins


class PackedSampler:
    """Batches of packed sequences for any (epoch, step): stateless, so resuming needs no replay.

    Args:
        store: the samples.
        sequence_length: T.
        sequences: sequences of one global step, over all ranks; a multiple of ``world``.
        seed: with the epoch, decides which samples share a sequence and the order of sequences.
        rank, world: this rank's part; ranks are disjoint and together complete.

    Raises UserError when nothing can be trained on, or ranks do not divide the sequences of a step.
    """

    def __init__(
        self, store: SampleStore, *, sequence_length: int, sequences: int, seed: int = 0, rank: int = 0, world: int = 1
    ) -> None:
        if sequences % world:
            raise UserError(f"train.sequences={sequences} must be a multiple of the number of ranks ({world}).")
        self.store, self.length, self.sequences, self.seed = store, sequence_length, sequences, seed
        self.rank, self.world = rank, world
        lengths = np.minimum(store.lengths, sequence_length)
        supervised = lengths - np.minimum(store.prompt_lengths, lengths)
        self.rows = np.flatnonzero(supervised >= MIN_SUPERVISED)
        if not len(self.rows):
            raise UserError(
                f"None of the {len(store)} samples has {MIN_SUPERVISED} answer tokens within "
                f"train.sequence_length={sequence_length} (the shortest prompt has "
                f"{int(store.prompt_lengths.min()) if len(store) else 0} tokens). Raise train.sequence_length."
            )
        self.lengths = lengths[self.rows].astype(np.int64)
        self.supervised_tokens = int(supervised[self.rows].sum())
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def facts(self) -> PackingFacts:
        """Counts of the first epoch (later ones differ by a few sequences)."""
        cropped = self.store.lengths[self.rows] > self.length
        count = self.epoch_sequences(0)
        return PackingFacts(
            samples=len(self.store),
            packed=len(self.rows),
            too_short=len(self.store) - len(self.rows),
            cropped=int(cropped.sum()),
            cropped_tokens=self.store.supervised_tokens - self.supervised_tokens,
            supervised_tokens=self.supervised_tokens,
            tokens=int(self.lengths.sum()),
            sequences=count,
            places=count * self.length,
        )

    def epoch_sequences(self, epoch: int) -> int:
        return len(self._plan(epoch)[0]) - 1

    def epoch_steps(self, epoch: int) -> int:
        """Global steps of an epoch; the last may hold empty sequences."""
        return -(-self.epoch_sequences(epoch) // self.sequences)

    def steps(self, epochs: float) -> int:
        """Global steps of so many epochs; a fraction counts for its part of the last one."""
        whole = int(epochs)
        steps = sum(self.epoch_steps(epoch) for epoch in range(whole))
        if epochs > whole:
            steps += -(-int(self.epoch_steps(whole) * (epochs - whole) * 1e6) // 1_000_000)
        return max(1, steps)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a global step counted from 0."""
        epoch = 0
        while step >= (count := self.epoch_steps(epoch)):
            step -= count
            epoch += 1
        return epoch, step

    def batch(self, epoch: int, step: int) -> PackedBatch:
        """This rank's sequences of a step: [sequences / world, T]."""
        share = self.sequences // self.world
        first = step * self.sequences + self.rank * share
        return self._sequences(epoch, range(first, first + share))

    def step_batch(self, step: int) -> PackedBatch:
        """``batch`` of a global step over all epochs."""
        return self.batch(*self.locate(step))

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[PackedBatch]:
        for step in range(first_step, self.epoch_steps(epoch)):
            yield self.batch(epoch, step)

    def sequence_rows(self, epoch: int, sequence: int) -> np.ndarray:
        """Which samples (rows of the store) a sequence of an epoch holds, in their order."""
        starts, members = self._plan(epoch)
        if sequence >= len(starts) - 1:
            return np.empty(0, dtype=np.int64)
        return self.rows[members[starts[sequence] : starts[sequence + 1]]]

    def _plan(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(starts [sequences + 1], members [N]): sequence i holds ``members[starts[i]:starts[i + 1]]``."""
        if self._epoch is None or self._epoch[0] != epoch:
            generator = np.random.Generator(np.random.Philox(key=[self.seed & (2**64 - 1), epoch]))
            shuffled = generator.permutation(len(self.rows))  # which of equal lengths meet
            bins = best_fit(self.lengths[shuffled], self.length)
            count = int(bins.max()) + 1
            place = generator.permutation(count)[bins]  # order of the sequences
            inside = generator.permutation(len(bins))  # order within a sequence
            order = np.lexsort((inside, place))
            starts = np.concatenate([[0], np.cumsum(np.bincount(place, minlength=count))])
            self._epoch = (epoch, starts, shuffled[order])
        return self._epoch[1], self._epoch[2]

    def _sequences(self, epoch: int, numbers: range) -> PackedBatch:
        shape = (len(numbers), self.length)
        tokens, positions = np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
        documents, supervised = np.full(shape, NO_DOCUMENT, dtype=np.int64), np.zeros(shape, dtype=bool)
        for line, number in enumerate(numbers):
            at = 0
            for document, row in enumerate(self.sequence_rows(epoch, number).tolist()):
                begin = int(self.store.starts[row])
                size = min(int(self.store.starts[row + 1]) - begin, self.length)
                place = slice(at, at + size)
                tokens[line, place] = self.store.tokens[begin : begin + size]
                positions[line, place] = np.arange(size)
                documents[line, place] = document
                supervised[line, at + int(self.store.prompt_lengths[row]) : at + size] = True
                at += size
        return PackedBatch(tokens, positions, documents, supervised)
