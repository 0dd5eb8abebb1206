"""What proposes trees: the door every drafter stands behind, and the block draft head behind it.

A round is propose -> verify -> commit (decoder.py). A drafter sees committed tokens with the target's features of
them (``observe``) and proposes a tree per row (``propose``). It keeps what it has computed: each committed token is
fused and turned into keys and values once.

Shapes: B rows, N staged tokens, M newly committed tokens of all rows together, K slots, F concatenated taps,
d hidden size, J key/value heads, D head size, V vocabulary, r rank of the parent term.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.shortlist import ParentTerm, make_shortlist
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.tree import Tree, build_chain, build_tree, empty_tree
from jetspec_train.modeling.draft_head import MASK_SLOT, DraftHead
from jetspec_train.targets.target import Target


class Drafter(Protocol):
    """Proposes continuations; what it proposes can change the speed of decoding, never its output.

    Attributes:
        taps: target layers whose hidden states it wants to observe; may be empty.
        forwards: forwards of a draft model per proposal (0 for one without a model).
    """

    taps: tuple[int, ...]
    forwards: int

    def start(self, batch: int, capacity: int, clock: Stopwatch) -> None:
        """Forget everything; expect ``batch`` rows of about ``capacity`` tokens."""

    def observe(
        self, tokens: Sequence[Sequence[int]], features_BNF: torch.Tensor | None, kept: Sequence[Sequence[int]]
    ) -> None:
        """Tokens that each row has just committed, with their places ``kept`` among the N staged ones."""

    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        """One tree per row, at most ``limits[row]`` slots deep. The anchor follows the observed tokens."""

    def drop_rows(self, keep: Sequence[int]) -> None:
        """Keep only these rows, in this order."""


class DraftContext:
    """Keys and values of the fused context in every draft layer, preallocated, appended to incrementally.

    Attributes:
        lengths: committed tokens per row (host integers), which is also the position of the next one.
    """

    def __init__(self, layers: int, batch: int, capacity: int) -> None:
        self.lengths = [0] * batch
        self._capacity = max(capacity, 1)
        self._buffers: list[torch.Tensor] = []  # keys and values of layer 0, of layer 1, ...; each [B, J, C, D]
        self._layers = layers

    def append(self, layers: list[tuple[torch.Tensor, torch.Tensor]], counts: Sequence[int]) -> None:
        """Append ``counts[row]`` tokens to each row, given row after row in ``layers``: pairs of [1, J, M, D]."""
        new = [tensor for pair in layers for tensor in pair]
        self._reserve(max(length + count for length, count in zip(self.lengths, counts)), new)
        offset = 0
        for row, count in enumerate(counts):
            start = self.lengths[row]
            for buffer, tensor in zip(self._buffers, new):
                buffer[row, :, start : start + count] = tensor[0, :, offset : offset + count]
            offset += count
            self.lengths[row] += count

    def layers(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(keys, values) per layer, views [B, J, T, D] up to the longest row."""
        longest = max(self.lengths)
        views = [buffer[:, :, :longest] for buffer in self._buffers]
        return list(zip(views[0::2], views[1::2]))

    def mask_B1T(self, device: torch.device) -> torch.Tensor | None:
        """True at each row's own tokens; None where all rows are equally long."""
        if min(self.lengths) == max(self.lengths):
            return None
        lengths_B11 = torch.tensor(self.lengths, device=device)[:, None, None]
        return torch.arange(max(self.lengths), device=device) < lengths_B11

    def drop_rows(self, keep: Sequence[int]) -> None:
        index = list(keep)
        self._buffers = [buffer[index] for buffer in self._buffers]
        self.lengths = [self.lengths[row] for row in index]

    def _reserve(self, slots: int, like: list[torch.Tensor]) -> None:
        if self._buffers and slots <= self._capacity:
            return
        self._capacity = max(slots, self._capacity if not self._buffers else 2 * self._capacity)
        old = self._buffers
        shapes = [(len(self.lengths), tensor.shape[1], self._capacity, tensor.shape[3]) for tensor in like]
        # Zeros, not empty: a masked column is multiplied by zero, and zero times a stray NaN would be NaN.
        self._buffers = [tensor.new_zeros(shape) for tensor, shape in zip(like, shapes)]
        for buffer, previous in zip(self._buffers, old):
            buffer[:, :, : previous.shape[2]] = previous


class BlockDrafter:
    """A ``DraftHead`` as drafter: one forward of a block per round, one product with the target's head, one tree.

    The weights are copied in the target's dtype, as they will be served; make a new drafter after a training step.
    Raises UserError if the head does not fit the target's sizes.
    """

    forwards = 1

    def __init__(self, head: DraftHead, target: Target) -> None:
        config = head.config
        check_fits(config, target)
        self.head = copy.deepcopy(head).requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)
        self.config = config
        self.taps: tuple[int, ...] = tuple(config.target_layer_ids)
        self._target = target
        self._term = _parent_term(head)
        self._context = DraftContext(config.layers, 0, 1)
        self._clock: Stopwatch | None = None

    def start(self, batch: int, capacity: int, clock: Stopwatch) -> None:
        self._context = DraftContext(self.config.layers, batch, capacity)
        self._clock = clock

    @torch.inference_mode()
    def observe(
        self, tokens: Sequence[Sequence[int]], features_BNF: torch.Tensor | None, kept: Sequence[Sequence[int]]
    ) -> None:
        if features_BNF is None:
            raise ValueError("the draft head needs the target's features; forward the target with the drafter's taps")
        counts = [len(places) for places in kept]
        if not sum(counts):
            return
        lengths = self._context.lengths
        if len(kept) == 1 and kept[0] == list(range(counts[0])):
            features_MF = features_BNF[0, : counts[0]]
        else:
            rows = [row for row, count in enumerate(counts) for _ in range(count)]
            places = [place for row_places in kept for place in row_places]
            features_MF = features_BNF[rows, places]
        positions = [length + i for length, count in zip(lengths, counts) for i in range(count)]
        positions_1M = torch.tensor([positions], device=features_BNF.device)
        context_1Md = self.head.fuse(features_MF[None])
        self._context.append(self.head.context_kv(context_1Md, positions_1M), counts)

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        predictions = min(max(limits), settings.depth or self.config.predictions, self.config.predictions)
        if settings.shape == "chain":
            predictions = min(predictions, settings.nodes)
        if predictions <= 0:
            return [empty_tree() for _ in anchors]
        logits_BKV, gates = self._logits(anchors, predictions)
        host_BKV = logits_BKV.float().cpu().numpy()
        self._lap("draft")
        # Under sampling a node is accepted with the target's processed probability; the draft is scored likewise.
        temperature = settings.sampling.temperature or 1.0
        trees = []
        for row, limit in enumerate(limits):
            slots = min(limit, predictions)
            if slots <= 0:
                trees.append(empty_tree())
                continue
            shortlist = make_shortlist(host_BKV[row, :slots], max(settings.shortlist, settings.nodes), temperature)
            build = build_chain if settings.shape == "chain" else build_tree
            trees.append(build(shortlist, self._term, settings.nodes, None if gates is None else gates[row]))
        self._lap("host")
        return trees

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._context.drop_rows(keep)

    def _logits(self, anchors: Sequence[int], predictions: int) -> tuple[torch.Tensor, np.ndarray | None]:
        """U_k [B, K, V] of the predicting slots, slot 0 conditioned on the anchor; the gate's inputs [B, K, r]."""
        config, target = self.config, self._target
        # A causal slot does not see later ones, so that slots nobody asks for need not be computed.
        block = predictions + config.first_slot if config.mask == "causal" else config.block
        inputs_B1K = torch.full((len(anchors), 1, block), MASK_SLOT, dtype=torch.long)
        inputs_B1K[:, 0, 0] = torch.tensor(list(anchors))
        inputs_B1K = inputs_B1K.to(target.device)
        starts_B = torch.tensor(self._context.lengths)
        positions_B1K = (starts_B[:, None, None] + torch.arange(block)).to(target.device)
        hidden_BKd = self.head(
            self.head.embed(inputs_B1K, target.embed),
            positions_B1K,
            self._context.layers(),
            self._context.mask_B1T(target.device),
        )[:, 0, config.first_slot : config.first_slot + predictions]
        logits_BKV = target.logits(hidden_BKd)
        if self._term is None:
            return logits_BKV, None
        bias_BV = self.head.parent_bias(inputs_B1K[:, 0, 0], hidden_BKd[:, 0])
        logits_BKV[:, 0] += bias_BV
        if self._term.gate is None:
            return logits_BKV, None
        gates = [self._term.gate_inputs(row.float().cpu().numpy()) for row in hidden_BKd]
        return logits_BKV, np.stack([gate for gate in gates if gate is not None])

    def _lap(self, kind: str) -> None:
        if self._clock is not None:
            self._clock.lap(kind)


def check_fits(config: Any, target: Target) -> None:
    """Raises UserError if a draft head of this configuration cannot read this target."""
    for what, drafted, loaded in (
        ("vocabulary", config.vocab_size, target.vocab_size),
        ("hidden size", config.target_hidden_size, target.hidden_size),
    ):
        if drafted != loaded:
            raise UserError(
                f"The draft head was made for a target with {what} {drafted}, but target {target.identity.name!r} has "
                f"{what} {loaded}. Load the draft with its own target."
            )
    if max(config.target_layer_ids) >= target.num_layers:
        raise UserError(
            f"The draft head reads layers {list(config.target_layer_ids)}, but target {target.identity.name!r} has "
            f"only {target.num_layers} layers. Load the draft with its own target."
        )


def _parent_term(head: DraftHead) -> ParentTerm | None:
    """The head's parent term for host use, None without one."""
    module = head.markov_head
    if module is None:
        return None

    def host(tensor: torch.Tensor) -> np.ndarray:
        return tensor.detach().float().cpu().numpy()

    gate = None
    if module.gate_proj is not None:
        weight_rx, hidden_size = host(module.gate_proj.weight), head.config.hidden_size
        gate = (weight_rx[:, :hidden_size], weight_rx[:, hidden_size:], host(module.gate_proj.bias))
    return ParentTerm(host(module.markov_w1.weight), host(module.markov_w2.weight), gate)
