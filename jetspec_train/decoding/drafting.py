"""What proposes trees: the door every drafter stands behind, and the block draft head behind it.

A round is propose -> verify -> commit (decoder.py). A drafter sees committed tokens with the target's features of
them (``observe``) and proposes a tree per row (``propose``). It keeps what it has computed: each committed token is
fused and turned into keys and values once.

Shapes: B rows, N staged tokens, M newly committed tokens of all rows together, K slots, F concatenated taps,
d hidden size, J key/value heads, D head size, V vocabulary, r rank of the parent term.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.shortlist import ParentTerm, make_shortlist
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.tree import Tree, build_chain, build_paths, build_tree, chain_of, empty_tree
from jetspec_train.modeling.draft_head import MASK_SLOT, DraftHead
from jetspec_train.targets.packing import pack_linears
from jetspec_train.targets.target import Target

if TYPE_CHECKING:
    from jetspec_train.decoding.calibration import Calibration
    from jetspec_train.decoding.cost_profile import CostProfile
    from jetspec_train.modeling.verifier import Verifier


@dataclass(frozen=True)
class Companions:
    """What came in the same bundle as a draft and belongs to its weights."""

    verifier: Verifier | None = None
    calibration: Calibration | None = None
    cost_profile: CostProfile | None = None


@dataclass(frozen=True)
class DraftStates:
    """The draft forward behind the last proposal, for those who judge it.

    hidden_BKd: states of the predicting slots, the row's first one at 0 (slots beyond a row's own are padding);
    entropies_BK: nats, of U_k without any parent term; first_B: the place of a row's first predicting slot in its
    block; attention: weights of every draft layer over the whole block, None unless asked for.
    """

    hidden_BKd: torch.Tensor
    entropies_BK: np.ndarray
    first_B: list[int]
    attention: list[torch.Tensor] | None


class Drafter(Protocol):
    """Proposes continuations; what it proposes can change the speed of decoding, never its output.

    Attributes:
        taps: target layers whose hidden states it wants to observe; may be empty.
        forwards: forwards of a draft model per proposal (0 for one without a model).
        block: tokens that a proposal can reach from the anchor, pending ones included; 0 for a drafter that cannot go
            on from pending tokens (the others are ``ContinuingDrafter``).
        companions: None without any.

    A drafter whose requests' states can be kept and taken up again also has ``snapshot(row) -> (state, bytes)`` and
    ``restore(row, state, length)``.
    """

    taps: tuple[int, ...]
    forwards: int
    block: int
    companions: Companions | None

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


class ContinuingDrafter(Drafter, Protocol):
    """A drafter with ``block`` > 0."""

    def propose(
        self,
        anchors: Sequence[int],
        limits: Sequence[int],
        settings: DecodingConfig,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> list[Tree]:
        """``pending``: drafted tokens after the anchor that the target has not seen; the tree hangs below the last."""


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

    def snapshot(self, row: int) -> tuple[list[torch.Tensor], int]:
        """Copies [J, T, D] of a row's columns, and their bytes."""
        copies = [buffer[row, :, : self.lengths[row]].clone() for buffer in self._buffers]
        return copies, sum(copy.numel() * copy.element_size() for copy in copies)

    def restore(self, row: int, columns: list[torch.Tensor], length: int) -> None:
        """Fill an empty row with the first ``length`` columns of a snapshot."""
        self._reserve(length, [column[None] for column in columns])
        for buffer, column in zip(self._buffers, columns):
            buffer[row, :, :length] = column[:, :length]
        self.lengths[row] = length

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

    Attributes:
        parameters: how many weights the head has.
        keep_states, keep_attention: fill ``states`` with each proposal (off: nothing is computed for it).
        states: the forward behind the last proposal.
        listener: called with (fused context [1, M, d], positions [1, M], tokens per row) of what was observed.
    """

    forwards = 1

    def __init__(self, head: DraftHead, target: Target, companions: Companions | None = None) -> None:
        config = head.config
        check_fits(config, target)
        self.head = copy.deepcopy(head).requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)
        self.config = config
        self.taps: tuple[int, ...] = tuple(config.target_layer_ids)
        self.block = config.predictions
        self.companions = companions
        self.keep_states = self.keep_attention = False
        self.states: DraftStates | None = None
        self.listener: Callable[[torch.Tensor, torch.Tensor, list[int]], None] | None = None
        self._target = target
        self.parameters = sum(p.numel() for p in self.head.parameters())
        self._term = _parent_term(head)
        pack_linears(self.head, but=[self.head.markov_head])
        self._context = DraftContext(config.layers, 0, 1)
        self._clock: Stopwatch | None = None

    def start(self, batch: int, capacity: int, clock: Stopwatch) -> None:
        self._context = DraftContext(self.config.layers, batch, capacity)
        self._clock = clock
        # Whoever judges asks anew for each batch: another decoder with the same drafter may not want to pay for it.
        self.keep_states = self.keep_attention = False
        self.states, self.listener = None, None

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
        if self.listener is not None:
            self.listener(context_1Md, positions_1M, counts)

    @torch.inference_mode()
    def propose(
        self,
        anchors: Sequence[int],
        limits: Sequence[int],
        settings: DecodingConfig,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> list[Tree]:
        self.states = None
        slots_B = self._slots(limits, settings, pending)
        if max(slots_B) <= 0:
            return [empty_tree() for _ in anchors]
        logits_BKV, gates = self._logits(anchors, max(slots_B), pending)
        host_BKV = logits_BKV.float().cpu().numpy()
        self._lap("draft")
        # Under sampling a node is accepted with the target's processed probability; the draft is scored likewise.
        temperature = settings.sampling.temperature or 1.0
        trees = []
        for row, slots in enumerate(slots_B):
            if slots <= 0:
                trees.append(empty_tree())
                continue
            shortlist = make_shortlist(host_BKV[row, :slots], max(settings.shortlist, settings.nodes), temperature)
            gate_KR = None if gates is None else gates[row]
            if settings.shape == "paths":
                trees.append(build_paths(shortlist, self._term, settings.paths, settings.nodes, gate_KR))
            else:
                build = build_chain if settings.shape == "chain" else build_tree
                trees.append(build(shortlist, self._term, settings.nodes, gate_KR))
        self._lap("host")
        return trees

    @torch.inference_mode()
    def sample_chains(
        self,
        anchors: Sequence[int],
        limits: Sequence[int],
        settings: DecodingConfig,
        draw: Callable[[int, torch.Tensor, list[list[int]]], list[int]],
    ) -> list[Tree]:
        """One chain per row, drawn from the draft's own distribution (ratio rule).

        ``draw(slot, logits_BV, paths)`` returns the token of each row at this slot, given the logits after the rows'
        paths so far; rows whose limit is reached draw along and are cut.
        """
        self.states = None
        slots_B = self._slots(limits, settings, None)
        paths: list[list[int]] = [[] for _ in anchors]
        if max(slots_B) > 0:
            logits_BKV, _ = self._logits(anchors, max(slots_B))
            for slot in range(logits_BKV.shape[1]):
                logits_BV = logits_BKV[:, slot].float()
                if slot and self.head.has_parent and self.states is not None:
                    parents_B = torch.tensor([path[-1] for path in paths], device=logits_BV.device)
                    logits_BV = logits_BV + self.head.parent_bias(parents_B, self.states.hidden_BKd[:, slot]).float()
                for path, token in zip(paths, draw(slot, logits_BV, paths)):
                    path.append(token)
        self._lap("draft")
        return [chain_of(path[:slots]) for path, slots in zip(paths, slots_B)]

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._context.drop_rows(keep)

    def snapshot(self, row: int) -> tuple[list[torch.Tensor], int]:
        return self._context.snapshot(row)

    def restore(self, row: int, state: list[torch.Tensor], length: int) -> None:
        self._context.restore(row, state, length)

    def _slots(
        self, limits: Sequence[int], settings: DecodingConfig, pending: Sequence[Sequence[int]] | None
    ) -> list[int]:
        """Slots to draft per row, below what is pending."""
        deepest = min(settings.depth or self.block, settings.nodes if settings.shape == "chain" else self.block)
        waiting = [0] * len(limits) if pending is None else [len(tokens) for tokens in pending]
        return [min(limit, deepest, self.block - count) for limit, count in zip(limits, waiting)]

    def _logits(
        self, anchors: Sequence[int], predictions: int, pending: Sequence[Sequence[int]] | None = None
    ) -> tuple[torch.Tensor, np.ndarray | None]:
        """U_k [B, K, V] of the predicting slots, the first conditioned on the token before it; the gate's inputs
        [B, K, r]. Slots of the anchor and of the pending tokens hold these: a clean prefix, as in training."""
        config, target = self.config, self._target
        waiting = [0] * len(anchors) if pending is None else [len(tokens) for tokens in pending]
        first_B = [config.first_slot + count for count in waiting]
        # A causal slot does not see later ones, so that slots nobody asks for need not be computed.
        block = min(max(first_B) + predictions, config.block) if config.mask == "causal" else config.block
        inputs_B1K = torch.full((len(anchors), 1, block), MASK_SLOT, dtype=torch.long)
        inputs_B1K[:, 0, 0] = torch.tensor(list(anchors))
        if pending is not None:
            for row, tokens in enumerate(pending):
                inputs_B1K[row, 0, 1 : len(tokens) + 1] = torch.tensor(list(tokens), dtype=torch.long)
        inputs_B1K = inputs_B1K.to(target.device)
        starts_B = torch.tensor(self._context.lengths)
        positions_B1K = (starts_B[:, None, None] + torch.arange(block)).to(target.device)
        attention: list[torch.Tensor] | None = [] if self.keep_attention else None
        hidden_BKd = self.head(
            self.head.embed(inputs_B1K, target.embed),
            positions_B1K,
            self._context.layers(),
            self._context.mask_B1T(target.device),
            attention,
        )[:, 0]
        rows = torch.arange(len(anchors), device=target.device)
        if min(first_B) == max(first_B):
            hidden_BKd = hidden_BKd[:, first_B[0] : first_B[0] + predictions]
            last_B = inputs_B1K[:, 0, waiting[0]]
        else:
            places_BK = (torch.tensor(first_B)[:, None] + torch.arange(predictions)).clamp(max=block - 1)
            hidden_BKd = hidden_BKd[rows[:, None], places_BK.to(target.device)]
            last_B = inputs_B1K[rows, 0, torch.tensor(waiting, device=target.device)]
        logits_BKV = target.logits(hidden_BKd)
        if self.keep_states:
            self.states = DraftStates(hidden_BKd, _entropies(logits_BKV), first_B, attention)
        if self._term is None:
            return logits_BKV, None
        logits_BKV[:, 0] += self.head.parent_bias(last_B, hidden_BKd[:, 0])
        if self._term.gate is None:
            return logits_BKV, None
        gates = [self._term.gate_inputs(row.float().cpu().numpy()) for row in hidden_BKd]
        return logits_BKV, np.stack([gate for gate in gates if gate is not None])

    def _lap(self, kind: str) -> None:
        if self._clock is not None:
            self._clock.lap(kind)


def _entropies(logits_BKV: torch.Tensor) -> np.ndarray:
    log_BKV = torch.log_softmax(logits_BKV.float(), dim=-1)
    return -torch.linalg.vecdot(log_BKV.exp(), log_BKV.clamp(min=-1e4)).cpu().numpy()


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
