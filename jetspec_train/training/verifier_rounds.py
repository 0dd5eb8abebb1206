"""How well the verifier judges while it trains: the rounds that decoding would make on held-out answers.

In lossless decoding the output is the target's own answer, whatever is drafted. So a round is known without decoding:
from an anchor in the answer the draft's greedy chain is compared with what follows; the next anchor is the target's own
token behind the accepted ones. ``HeldOutRounds.collect`` walks the answers that way, all of them at once, and notes
every judged slot - up to and including the first rejected one of each round, METHODS 4's fixed population - with the
scores of both heads and of what needs no training.

Shapes: B answers, T tokens, K slots, F concatenated taps, D width of the target.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from jetspec_train.modeling.blocks import make_blocks
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.verifier import Verifier
from jetspec_train.objectives.candidates import Rule, draft_candidates
from jetspec_train.targets.target import Target
from jetspec_train.training.verifier_step import nodes_of

NAMES = ("correctness", "confidence", "probability", "margin", "entropy")


@dataclass(frozen=True)
class Answer:
    """A held-out prompt with the target's own answer to it."""

    prompt: list[int]
    tokens: list[int]
    domain: str


@dataclass(frozen=True)
class JudgedSlots:
    """N judged slots. ``accepted``: 1 or 0 (a probability under the sampled rules). ``scores``: by name, higher for
    "accepted"; the two heads give logits, the training-free ones are the draft's probability of its token, its lead
    over the second choice in log-probability, and the negative entropy."""

    accepted: np.ndarray
    depth: np.ndarray  # 0 for the first drafted token
    round: np.ndarray  # number of the round, over all answers
    answer: np.ndarray  # index of the answer
    scores: dict[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.accepted)


class HeldOutRounds:
    """Answers with the target's states, computed once; ``collect`` judges them with the weights of the moment."""

    def __init__(self, answers: Sequence[Answer], target: Target, taps: tuple[int, ...]) -> None:
        self.answers, self.target = list(answers), target
        lengths = [len(a.prompt) + len(a.tokens) for a in self.answers]
        shape = (len(self.answers), max(lengths))
        self.tokens_BT = torch.full(shape, target.pad_id)
        self.documents_BT = torch.full(shape, -1)
        self.supervised_BT = torch.zeros(shape, dtype=torch.bool)
        for row, answer in enumerate(self.answers):
            self.tokens_BT[row, : lengths[row]] = torch.tensor([*answer.prompt, *answer.tokens])
            self.documents_BT[row, : lengths[row]] = 0
            # Before the last token that it may emit, decoding drafts nothing: the target's own choice fills it.
            cut = answer.tokens[-1] not in target.eos_ids
            self.supervised_BT[row, len(answer.prompt) : lengths[row] - cut] = True
        self.positions_BT = torch.arange(shape[1]).expand(shape)
        rows = [
            target.forward_packed(
                self.tokens_BT[row : row + 1, :length],
                self.positions_BT[row : row + 1, :length],
                self.documents_BT[row : row + 1, :length],
                taps,
            )
            for row, length in enumerate(lengths)
        ]
        self.features_BTF = _pad([row.features_BNF for row in rows], shape[1])
        self.hidden_BTD = _pad([row.hidden_BND for row in rows], shape[1])

    @torch.inference_mode()
    def collect(self, draft: DraftHead, verifier: Verifier, rule: Rule | None = None) -> JudgedSlots:
        """Walk all answers with copies of both networks in the target's dtype, as they would be served."""
        target = self.target
        rule = replace(rule or Rule(), siblings=0, baselines=True)
        served = {"device": target.device, "dtype": target.dtype}
        draft, verifier = (copy.deepcopy(module).eval().to(**served) for module in (draft, verifier))  # type: ignore[call-overload]
        fused_BTd = draft.fuse(self.features_BTF)
        context = draft.context_kv(fused_BTd, self.positions_BT.to(target.device))
        own_context = verifier.context_kv(fused_BTd, self.positions_BT.to(target.device))
        anchors_B = torch.tensor([len(a.prompt) for a in self.answers])
        ends_B = torch.tensor([len(a.prompt) + len(a.tokens) for a in self.answers])
        draws = torch.Generator().manual_seed(0)
        parts: list[dict[str, np.ndarray]] = []
        rounds = 0
        while bool((anchors_B < ends_B - 1).any()):
            running_B = anchors_B < ends_B - 1
            blocks = make_blocks(
                self.tokens_BT,
                self.positions_BT,
                self.documents_BT,
                self.supervised_BT,
                torch.where(running_B, anchors_B, -1).unsqueeze(-1),
                None,
                block=draft.config.block,
                layout=draft.config.layout,
            ).to(target.device)
            hidden = draft(
                draft.embed(blocks.inputs_BAK, target.embed), blocks.positions_BAK, context, blocks.context_mask_BAT
            )
            state = draft.parent_state(blocks.parents_BAK, hidden) if draft.has_parent else None
            found = draft_candidates(
                hidden,
                state,
                draft.parent_weight,
                labels_BAK=blocks.labels_BAK,
                valid_BAK=blocks.valid_BAK,
                judged_BA=blocks.anchors_BA >= 0,
                target_hidden_BTD=self.hidden_BTD,
                sources_BAK=blocks.sources_BAK,
                draft_logits=target.logits,
                target_logits=target.logits,
                draws_BAK=torch.rand(blocks.labels_BAK.shape, generator=draws, dtype=torch.float64).to(target.device),
                rule=rule,
            )
            nodes = nodes_of(found, blocks, hidden, state, target, verifier)
            correctness = verifier.correctness(nodes, own_context, blocks.context_mask_BAT).view_as(found.labels_BAKS)
            judged = found.chain_BAK[:, 0]
            row, slot = judged.nonzero().unbind(-1)
            part = {
                "accepted": found.labels_BAKS[row, 0, slot, 0],
                "depth": blocks.distance_BAK[row, 0, slot],
                "round": rounds + row,
                "answer": row,
                "correctness": correctness[row, 0, slot, 0],
                "confidence": verifier.confidence(hidden, state)[row, 0, slot],
                "probability": found.logprobs_BAKS[row, 0, slot, 0].exp(),
                "margin": found.leads_BAK[row, 0, slot],
                "entropy": -found.parent_entropies_BAK[row, 0, slot],
            }
            parts.append({name: value.cpu().numpy() for name, value in part.items()})
            rounds += len(self.answers)
            accepted_B = (found.followed_BAK[:, 0] >= 0).sum(-1).cpu()
            anchors_B = torch.where(running_B, anchors_B + accepted_B + 1, anchors_B)
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else {}
        if not joined:
            joined = {name: np.zeros(0) for name in ("accepted", "depth", "round", "answer", *NAMES)}
        scores = {name: joined[name].astype(np.float64) for name in NAMES}
        whole = {name: joined[name].astype(np.int64) for name in ("depth", "round", "answer")}
        return JudgedSlots(joined["accepted"].astype(np.float64), scores=scores, **whole)


def _pad(rows: Sequence[Tensor | None], length: int) -> Tensor:
    """[1, n, x] each -> [B, length, x], zeros behind."""
    first = rows[0]
    assert first is not None
    padded = first.new_zeros(len(rows), length, first.shape[-1])
    for number, row in enumerate(rows):
        assert row is not None
        padded[number, : row.shape[1]] = row[0]
    return padded
