"""The verifier at run time: one judgement of a whole drafted tree, before the target sees any of it.

It builds the same ``NodeInputs`` as training does, from the draft forward that made the tree, and keeps the verifier's
own keys and values of the fused context, appended once per committed token like the draft's. Tokens that wait already
take part as ancestors, with the draft states from which they were judged.

Shapes: B rows, N nodes of the largest tree, W waiting tokens of the row with most, M = W + N, d draft width, r parent
rank, T context columns.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from jetspec_train.decoding.calibration import Calibration
from jetspec_train.decoding.drafting import BlockDrafter, DraftContext
from jetspec_train.decoding.tree import Tree
from jetspec_train.modeling.verifier import NodeInputs, Verifier, ancestors_of, node_scalars
from jetspec_train.targets.packing import pack_linears
from jetspec_train.targets.target import Target


@dataclass(frozen=True)
class Judgement:
    """One row's tree; all [n] float64.

    ``conditional``: calibrated probability that the target accepts the node, given its path. ``logits``,
    ``confidence_logits``: raw outputs of the two heads, the latter of "the slot's own first choice is accepted"."""

    conditional: np.ndarray
    logits: np.ndarray
    confidence_logits: np.ndarray | None


@dataclass
class _Trunk:
    """Inputs of one row's waiting tokens, in order: hidden [W, d], state [W, r], embeds [W, E], scalars [W, s]."""

    parts: list[torch.Tensor] | None = None
    path_logprob: float = 0.0

    @property
    def count(self) -> int:
        return 0 if self.parts is None else len(self.parts[0])


class VerifierJudge:
    """Judges what ``drafter`` proposes. ``confidences``: also run the confidence head (for traces and ratio chains)."""

    def __init__(
        self,
        verifier: Verifier,
        drafter: BlockDrafter,
        target: Target,
        calibration: Calibration | None = None,
        confidences: bool = False,
    ) -> None:
        self.verifier = (
            copy.deepcopy(verifier).requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)
        )
        pack_linears(
            self.verifier, but=[self.verifier.confidence_head, self.verifier.score, self.verifier.scalar_score]
        )
        self.confidences = confidences
        self._drafter, self._target = drafter, target
        self._temperatures = np.ones(1) if calibration is None else calibration.temperatures_of("correctness")
        self._confidence_temperatures = np.ones(1) if calibration is None else calibration.temperatures_of("confidence")
        self.start(0, 1)

    def start(self, batch: int, capacity: int) -> None:
        """Forget everything; expect ``batch`` rows."""
        self._context = DraftContext(len(self.verifier.layers), batch, capacity)
        self.begin(batch)

    def begin(self, batch: int) -> None:
        """A new round: nothing waits."""
        self._trunks = [_Trunk() for _ in range(batch)]
        self._nodes: NodeInputs | None = None
        self._path_logprobs: list[np.ndarray] = []

    @torch.inference_mode()
    def observe(self, context_1Md: torch.Tensor, positions_1M: torch.Tensor, counts: list[int]) -> None:
        """Fused context of newly committed tokens, as BlockDrafter hands it to its listener."""
        self._context.append(self.verifier.context_kv(context_1Md, positions_1M), counts)

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._context.drop_rows(keep)

    def snapshot(self, row: int) -> tuple[list[torch.Tensor], int]:
        return self._context.snapshot(row)

    def restore(self, row: int, state: list[torch.Tensor], length: int) -> None:
        self._context.restore(row, state, length)

    @torch.inference_mode()
    def judge(self, trees: Sequence[Tree], before: Sequence[int]) -> list[Judgement | None]:
        """Judge the trees of the drafter's last proposal. ``before``: the token above each row's roots (the anchor or
        the last waiting token). None for a row without nodes, and for one with an output that is not finite."""
        states = self._drafter.states
        if states is None or not any(len(tree) for tree in trees):
            return [None] * len(trees)
        inputs = self._inputs(trees, before)
        nodes, waiting = self._with_trunks(inputs, trees)
        self._nodes = inputs
        mask_B1T = self._context.mask_B1T(self._target.device)
        logits_BM = self.verifier.correctness(nodes, self._context.layers(), mask_B1T)
        confidence_BN = None
        if self.confidences:
            state = inputs.parent_state_BMr if self._drafter.head.has_parent else None
            confidence_BN = self.verifier.confidence(inputs.hidden_BMd, state).double().cpu().numpy()
        logits_BN = logits_BM[:, waiting:].double().cpu().numpy()
        found: list[Judgement | None] = []
        for row, tree in enumerate(trees):
            logits = logits_BN[row, : len(tree)]
            confidence = None if confidence_BN is None else confidence_BN[row, : len(tree)]
            finite = np.isfinite(logits).all() and (confidence is None or np.isfinite(confidence).all())
            if not len(tree) or not finite:
                found.append(None)
                continue
            depths = tree.depths + self._trunks[row].count
            found.append(Judgement(calibrated(logits, self._temperatures, depths), logits, confidence))
        return found

    def defer(self, row: int, nodes: Sequence[int]) -> None:
        """These nodes of the row's last judged tree (one path from its root) wait from now on."""
        inputs, trunk = self._nodes, self._trunks[row]
        if inputs is None:
            return
        index = torch.tensor(list(nodes), device=inputs.hidden_BMd.device)
        new = [
            part[row].index_select(0, index)
            for part in (inputs.hidden_BMd, inputs.parent_state_BMr, inputs.token_embeds_BME, inputs.scalars_BMs)
        ]
        trunk.parts = new if trunk.parts is None else [torch.cat(pair) for pair in zip(trunk.parts, new)]
        trunk.path_logprob = float(self._path_logprobs[row][nodes[-1]])

    @torch.inference_mode()
    def confidence_of(self, slot: int, parents: Sequence[int]) -> np.ndarray:
        """Calibrated confidences [B] of one slot of the drafter's last forward, given each row's token before it."""
        states = self._drafter.states
        assert states is not None
        hidden_Bd = states.hidden_BKd[:, slot]
        head = self._drafter.head
        parents_B = torch.tensor(list(parents), device=hidden_Bd.device)
        state_Br = head.parent_state(parents_B, hidden_Bd) if head.has_parent else None
        logits_B = self.verifier.confidence(hidden_Bd, state_Br).double().cpu().numpy()
        return calibrated(logits_B, self._confidence_temperatures, np.full(len(logits_B), slot))

    def _inputs(self, trees: Sequence[Tree], before: Sequence[int]) -> NodeInputs:
        """Inputs of the trees' nodes alone, padded to the largest tree."""
        states, device, head = self._drafter.states, self._target.device, self._drafter.head
        assert states is not None
        batch, most = len(trees), max(len(tree) for tree in trees)
        tokens_BN, parents_BN, depths_BN = (np.zeros((batch, most), dtype=np.int64) for _ in range(3))
        numbers = {name: np.zeros((batch, most)) for name in ("logprob", "path_logprob", "margin", "rank", "entropy")}
        overall_BN = np.zeros((batch, most))
        valid_BN = np.zeros((batch, most), dtype=bool)
        ancestors_BNN = torch.eye(most, dtype=torch.bool).repeat(batch, 1, 1)
        self._path_logprobs = []
        for row, tree in enumerate(trees):
            n, trunk = len(tree), self._trunks[row]
            tokens_BN[row, :n], depths_BN[row, :n], valid_BN[row, :n] = tree.tokens, tree.depths, True
            parents_BN[row, :n] = np.where(tree.parents >= 0, tree.tokens[tree.parents], before[row]) if n else 0
            facts = sibling_facts(tree)
            path = tree.scores.astype(np.float64) + trunk.path_logprob
            self._path_logprobs.append(path)
            for name, values in zip(("logprob", "margin", "rank"), facts):
                numbers[name][row, :n] = values
            numbers["path_logprob"][row, :n] = path
            numbers["entropy"][row, :n] = states.entropies_BK[row, tree.depths]
            overall_BN[row, :n] = tree.depths + trunk.count
            ancestors_BNN[row] = ancestors_of(tree.parents, nodes=most)
        rows_B1 = torch.arange(batch, device=device)[:, None]
        hidden_BNd = states.hidden_BKd[rows_B1, torch.from_numpy(depths_BN).to(device)]
        tokens = torch.from_numpy(tokens_BN).to(device)
        if head.has_parent:
            state_BNr = head.parent_state(torch.from_numpy(parents_BN).to(device), hidden_BNd)
        else:
            state_BNr = hidden_BNd.new_zeros(batch, most, 0)
        tensors = {name: torch.from_numpy(values).float().to(device) for name, values in numbers.items()}
        overall = torch.from_numpy(overall_BN)
        lengths_B1 = torch.tensor(self._context.lengths)[:, None]
        return NodeInputs(
            hidden_BMd=hidden_BNd,
            parent_state_BMr=state_BNr,
            token_embeds_BME=self._target.embed(tokens),
            scalars_BMs=node_scalars(self.verifier.config, depth=overall.float().to(device), **tensors),
            ancestors_BMM=ancestors_BNN.to(device),
            positions_BM=(lengths_B1 + overall.long() + 1).to(device),
            valid_BM=torch.from_numpy(valid_BN).to(device),
        )

    def _with_trunks(self, nodes: NodeInputs, trees: Sequence[Tree]) -> tuple[NodeInputs, int]:
        """The nodes behind their rows' waiting tokens, which are ancestors of all of them; and W."""
        waiting = max(trunk.count for trunk in self._trunks)
        if waiting == 0:
            return nodes, 0
        batch, most = nodes.positions_BM.shape
        device = nodes.positions_BM.device
        ancestors_BMM = torch.eye(waiting + most, dtype=torch.bool).repeat(batch, 1, 1)
        ancestors_BMM[:, waiting:, waiting:] = nodes.ancestors_BMM.cpu()
        positions_BW = torch.zeros(batch, waiting, dtype=torch.long)
        valid_BW = torch.zeros(batch, waiting, dtype=torch.bool)
        own = (nodes.hidden_BMd, nodes.parent_state_BMr, nodes.token_embeds_BME, nodes.scalars_BMs)
        parts = [part.new_zeros(batch, waiting, part.shape[-1]) for part in own]
        for row, trunk in enumerate(self._trunks):
            count = trunk.count
            if trunk.parts is None:
                continue
            for part, kept in zip(parts, trunk.parts):
                part[row, :count] = kept
            ancestors_BMM[row, :count, :count] = torch.ones(count, count).tril().bool()
            ancestors_BMM[row, waiting : waiting + len(trees[row]), :count] = True
            positions_BW[row, :count] = self._context.lengths[row] + 1 + torch.arange(count)
            valid_BW[row, :count] = True
        hidden, state, embeds, scalars = (torch.cat(pair, dim=1) for pair in zip(parts, own))
        assert nodes.valid_BM is not None
        merged = NodeInputs(
            hidden_BMd=hidden,
            parent_state_BMr=state,
            token_embeds_BME=embeds,
            scalars_BMs=scalars,
            ancestors_BMM=ancestors_BMM.to(device),
            positions_BM=torch.cat((positions_BW.to(device), nodes.positions_BM), dim=1),
            valid_BM=torch.cat((valid_BW.to(device), nodes.valid_BM), dim=1),
        )
        return merged, waiting


def calibrated(logits: np.ndarray, temperatures: np.ndarray, depths: np.ndarray) -> np.ndarray:
    """Probabilities: sigmoid(logit / temperature of its depth); the last temperature serves deeper ones. NaN stays."""
    cooled = logits / temperatures[np.minimum(depths, len(temperatures) - 1)]
    with np.errstate(invalid="ignore"):
        return np.exp(-np.logaddexp(0.0, -cooled))


def sibling_facts(tree: Tree) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(log-probability given the parent, margin to the best sibling, number of better siblings) of each node, [n].

    A tree of the best nodes holds every sibling that the draft likes better than a node it holds, so that these are the
    slot's own first choice and rank. (A trie of whole paths may lack some: then the node looks better than it is.)
    """
    above = np.where(tree.parents >= 0, tree.scores[tree.parents], 0.0) if len(tree) else np.zeros(0)
    logprob = np.minimum(tree.scores.astype(np.float64) - above, 0.0)
    sibling_NN = tree.parents[:, None] == tree.parents[None, :]
    others_NN = np.where(sibling_NN, logprob[None, :], -np.inf)
    best = others_NN.max(1, initial=-np.inf)
    return logprob, best - logprob, (others_NN > logprob[:, None]).sum(1)
