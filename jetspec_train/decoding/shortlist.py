"""What tree drafting needs to know about one draft forward, on the host, without a full-vocabulary product per node.

Shapes: R rows of logits, K slots (depths), V vocabulary, C candidates of a slot, r rank of the parent term,
P parent tokens, M successors.
This file knows nothing of models or decoding: arrays in, arrays out. numpy on one thread is used on purpose: the
arrays are small enough that starting a thread pool costs more than it brings, also on a busy machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

CHUNKS = 64  # elements per chunk when the largest are looked for by chunk maxima
SUCCESSORS = 32  # cached successors of a parent token


def top_indices(row_V: np.ndarray, size: int) -> np.ndarray:
    """Indices [size] of the ``size`` largest entries, in no order; exact (ties at the edge are cut arbitrarily).

    The ``size``-th largest chunk maximum is a lower bound of the ``size``-th largest entry, so one pass of maxima
    and one comparison leave little more than ``size`` entries to select from: about 8 times faster than a
    selection over 49k entries.
    """
    vocabulary = row_V.shape[0]
    chunks = vocabulary // CHUNKS
    if size >= vocabulary:
        return np.arange(vocabulary)
    if chunks < 2 * size:
        return np.argpartition(row_V, vocabulary - size)[vocabulary - size :]
    # Chunks are strided columns: the reduction then runs over contiguous memory.
    maxima = row_V[: chunks * CHUNKS].reshape(CHUNKS, chunks).max(0)
    bound = np.partition(maxima, chunks - size)[chunks - size]
    survivors = np.flatnonzero(row_V >= bound)
    if survivors.size > size:
        values = row_V[survivors]
        survivors = survivors[np.argpartition(values, values.size - size)[values.size - size :]]
    return survivors


@dataclass
class Shortlist:
    """The candidates of every slot of one block.

    logits_KV: float32, U_k divided by the temperature; tokens_KC: the C largest of each row; values_KC: their
    logits; floor_K: the smallest of these (every other entry of the row is at most that); tail_K: log of the sum of
    exp(U_k[v]) over all v that are not candidates; sharpness_K: 1 / temperature, which the parent's bias needs too.
    """

    logits_KV: np.ndarray
    tokens_KC: np.ndarray
    values_KC: np.ndarray
    floor_K: np.ndarray
    tail_K: np.ndarray
    sharpness_K: np.ndarray


def make_shortlist(logits_KV: np.ndarray, size: int, temperature: float | np.ndarray = 1.0) -> Shortlist:
    """Select ``size`` candidates per slot. ``temperature``: one number, or one per slot [K]."""
    slots, vocabulary = logits_KV.shape
    size = min(size, vocabulary)
    sharpness_K = np.broadcast_to(1.0 / np.asarray(temperature, dtype=np.float32), (slots,))
    if (sharpness_K != 1.0).any():
        logits_KV = logits_KV * sharpness_K[:, None]
    tokens_KC = np.empty((slots, size), dtype=np.int64)
    values_KC = np.empty((slots, size), dtype=np.float32)
    tail_K = np.full(slots, -np.inf, dtype=np.float32)
    scratch_V = np.empty(vocabulary, dtype=np.float32)
    for slot in range(slots):
        row_V = logits_KV[slot]
        tokens_KC[slot] = top_indices(row_V, size)
        values_KC[slot] = row_V[tokens_KC[slot]]
        peak = values_KC[slot].max()
        np.subtract(row_V, peak, out=scratch_V)
        np.exp(scratch_V, out=scratch_V)
        scratch_V[tokens_KC[slot]] = 0.0
        mass = scratch_V.sum()
        if mass > 0:
            tail_K[slot] = peak + np.log(mass)
    return Shortlist(logits_KV, tokens_KC, values_KC, values_KC.min(1), tail_K, sharpness_K)


class ParentTerm:
    """Host copy of the parent term ``W2 W1[u]`` (METHODS 2), with a lazily filled table of each parent's successors.

    The table holds, for a parent token, the M tokens with the largest ``W2[v] W1[u]``: tokens that U_k alone may not
    bring onto the shortlist (the end of a word after its beginning). Filling one row costs one product with W2, and
    happens once per token. A gated term's vectors depend on the hidden state, so it has no table (``gate`` is
    ``(Wg's columns for h [r, d], Wg's columns for W1 [r, r], bias [r])``).
    """

    def __init__(
        self,
        w1_Vr: np.ndarray,
        w2_Vr: np.ndarray,
        gate: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None,
        successors: int = SUCCESSORS,
    ):
        self.w1_Vr = np.ascontiguousarray(w1_Vr, dtype=np.float32)
        self.w2_Vr = np.ascontiguousarray(w2_Vr, dtype=np.float32)
        self.gate = gate
        self.successors = 0 if gate is not None else min(successors, self.w2_Vr.shape[0])
        # First two moments of W2's rows: they give the mean of exp(W2[v] w) over the vocabulary (see log_mean_exp).
        self.mean_r = self.w2_Vr.mean(0)
        centred = self.w2_Vr - self.mean_r
        self.covariance_rr = centred.T @ centred / len(centred)
        self.norm_V = np.sqrt(np.einsum("vr,vr->v", self.w2_Vr, self.w2_Vr))
        self.largest_norm = float(self.norm_V.max())
        self._row_of_V = np.full(self.w2_Vr.shape[0], -1, dtype=np.int32)
        self._tokens = np.zeros((0, self.successors), dtype=np.int64)
        self._bias = np.zeros((0, self.successors), dtype=np.float32)
        self._filled = 0

    def gate_inputs(self, hidden_Kd: np.ndarray) -> np.ndarray | None:
        """The part of the gate that depends on the slot, [K, r]; None for a term without a gate."""
        if self.gate is None:
            return None
        hidden_rd, _, bias_r = self.gate
        return hidden_Kd @ hidden_rd.T + bias_r

    def vectors(self, parents_P: np.ndarray, gate_input_r: np.ndarray | None = None) -> np.ndarray:
        """The vector [P, r] whose product with W2's rows is the parents' bias."""
        vectors_Pr = self.w1_Vr[parents_P]
        if self.gate is None or gate_input_r is None:
            return vectors_Pr
        return vectors_Pr / (1.0 + np.exp(-(gate_input_r + vectors_Pr @ self.gate[1].T)))

    def log_mean_exp(self, vectors_Pr: np.ndarray) -> np.ndarray:
        """log of the mean over the vocabulary of exp(W2[v] w), [P], to second order in the cumulants of W2's rows."""
        spread_P = np.einsum("pr,pr->p", vectors_Pr @ self.covariance_rr, vectors_Pr)
        return vectors_Pr @ self.mean_r + 0.5 * spread_P

    def bias(self, vector_r: np.ndarray) -> np.ndarray:
        """W2 w over the whole vocabulary, [V]."""
        return self.w2_Vr @ vector_r

    def known(self, parents_P: np.ndarray) -> np.ndarray:
        """Which parents have a row in the table, bool [P]; all of them where the term has no table."""
        return (self._row_of_V[parents_P] >= 0) | (self.successors == 0)

    def remember(self, parent: int, bias_V: np.ndarray | None = None) -> None:
        """Fill the table's row of one parent (no effect if it is there, or if the term has no table)."""
        if not self.successors or self._row_of_V[parent] >= 0:
            return
        if bias_V is None:
            bias_V = self.bias(self.w1_Vr[parent])
        if self._filled == len(self._tokens):
            grow = max(256, self._filled)
            self._tokens = np.concatenate([self._tokens, np.zeros((grow, self.successors), dtype=np.int64)])
            self._bias = np.concatenate([self._bias, np.zeros((grow, self.successors), dtype=np.float32)])
        best = top_indices(bias_V, self.successors)
        self._tokens[self._filled] = best
        self._bias[self._filled] = bias_V[best]
        self._row_of_V[parent] = self._filled
        self._filled += 1

    def table(self, parents_P: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(tokens [P, M], bias [P, M]) of the parents' successors; the bias of a parent without a row is -inf."""
        rows_P = self._row_of_V[parents_P]
        known_P = rows_P >= 0
        if not known_P.any():
            shape = (len(parents_P), 0)
            return np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32)
        bias_PM = self._bias[rows_P]
        bias_PM[~known_P] = -np.inf
        return self._tokens[rows_P], bias_PM

    def bias_bound(self, parent: int, vector_r: np.ndarray) -> tuple[float, float]:
        """(b, n): any v outside the parent's successors has a bias of at most min(b, n * norm_V[v])."""
        norm = float(np.sqrt(vector_r @ vector_r))
        row = self._row_of_V[parent]
        return (float(self._bias[row].min()) if row >= 0 else float("inf")), norm
