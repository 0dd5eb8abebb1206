"""What a round came to: counts, running pass rates and the trace, from the target's choices on what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jetspec_train.decoding.candidate_set import CandidateSet
from jetspec_train.decoding.rows import Row
from jetspec_train.decoding.scheduler import PassRates
from jetspec_train.decoding.tree import Tree, empty_tree


@dataclass
class RowRound:
    """One row's round. Node numbers are those of ``candidates`` unless said otherwise.

    Attributes:
        limit: slots that the row may still use.
        candidates: everything drafted.
        drafted_from: number of the first node of the last draft.
        pending: nodes that wait, anchor's child first; stages: the same, stage by stage.
        decisions: of the controller, as the trace shows them.
        judged: False after a verifier's failure; the row then goes to the target as it was drafted.
        sent: nodes sent, in the order of the tree that the target sees.
        target_logprobs: [sent] of the nodes' tokens, where somebody asked.
    """

    row: Row
    limit: int
    candidates: CandidateSet = field(default_factory=lambda: CandidateSet.of(empty_tree()))
    drafted_from: int = 0
    pending: list[int] = field(default_factory=list)
    stages: list[list[int]] = field(default_factory=list)
    decisions: list[dict[str, Any]] = field(default_factory=list)
    judged: bool = True
    sent: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    target_logprobs: np.ndarray | None = None

    @property
    def pending_tokens(self) -> list[int]:
        return [int(self.candidates.tokens[node]) for node in self.pending]

    @property
    def before(self) -> int:
        """The token that the next draft continues from."""
        return int(self.candidates.tokens[self.pending[-1]]) if self.pending else self.row.anchor

    def take_draft(self, branch: CandidateSet) -> None:
        """Hang a new draft below what is pending; what was drafted there before is superseded."""
        at = self.pending[-1] if self.pending else -1
        self.candidates, place = self.candidates.graft(at, branch)
        self.drafted_from = len(self.candidates) - len(branch)
        self.pending = [int(place[node]) for node in self.pending]
        self.stages = [[int(place[node]) for node in stage] for stage in self.stages]
        for decision in self.decisions:
            decision["nodes"] = [int(place[node]) for node in decision["nodes"]]


def count_stages(record: RowRound, tree: Tree, accepted: Sequence[int], choices: np.ndarray, overruled: int) -> None:
    """Book the round's stages. ``accepted``, ``choices``: of the tree that was sent."""
    stats = record.row.stats
    kept = {int(record.sent[node]) for node in accepted}
    place = {int(node): index for index, node in enumerate(record.sent)}
    stats.stages += len(record.decisions)
    stats.deferred_stages += len(record.stages)
    stats.deferred_tokens += len(record.pending)
    stats.kept_tokens += sum(node in kept for node in record.pending)
    stats.overruled_tokens += overruled
    checked, whole = 0, True
    for stage in record.stages:
        if not whole:
            break
        checked += 1
        nodes = [place[node] for node in stage]
        own = all(int(choices[int(tree.parents[node]) + 1]) == int(tree.tokens[node]) for node in nodes)
        stats.passed_stages += own
        whole = all(node in kept for node in stage)
    stats.checked_stages += checked
    # Verified one by one, the stages up to the failing one take a forward each; so does what follows them if all hold.
    stats.stage_forwards += checked + whole


def note_rates(
    tree_rates: PassRates, path_rates: PassRates, candidates: CandidateSet, tree: Tree, accepted: Sequence[int]
) -> None:
    """Compare what was predicted for the tree sent with what was accepted, depth by depth along the accepted path.

    ``candidates``: of the tree's nodes, in its order. ``path_rates`` follow first choices only.
    """
    children: dict[int, list[int]] = {}
    for node, parent in enumerate(tree.parents.tolist()):
        children.setdefault(parent, []).append(node)
    parent, first_choice = -1, True
    for depth in range(len(accepted) + 1):
        offered = children.get(parent)
        if not offered:
            return
        passed = depth < len(accepted)
        tree_rates.note(depth, float(candidates.conditional[offered].sum()), passed)
        if first_choice:
            best = max(offered, key=lambda node: (candidates.conditional[node], -node))
            first_choice = passed and accepted[depth] == best
            path_rates.note(depth, float(candidates.conditional[best]), first_choice)
        if not passed:
            return
        parent = accepted[depth]


def trace_record(
    record: RowRound,
    *,
    request: int,
    position: int,
    anchor: int,
    accepted: Sequence[int],
    overruled: Sequence[int],
    choices: np.ndarray,
    following: int,
    emitted: Sequence[int],
    confidence: np.ndarray,
    seconds: dict[str, float],
) -> dict[str, Any]:
    """The line of decoding/trace.py. ``accepted``, ``overruled``, ``choices``: of the tree that was sent;
    ``confidence``: calibrated, of all candidates (nan without)."""
    candidates, sent = record.candidates, record.sent.tolist()
    survival = candidates.survival()
    kept = [sent[node] for node in accepted]
    nodes = [
        {
            "token": int(candidates.tokens[node]),
            "parent": int(candidates.parents[node]),
            "depth": int(candidates.depths[node]),
            "origin": "cache" if candidates.cached[node] else "draft",
            "logprob": float(candidates.logprobs[node]),
            "survival": float(survival[node]),
            "correctness": float(candidates.conditional[node]),
            "correctness_logit": float(candidates.logits[node]),
            "confidence": float(confidence[node]),
            "confidence_logit": float(candidates.confidence_logits[node]),
        }
        for node in range(len(candidates))
    ]
    return {
        "request": request,
        "row": record.row.index,
        "round": record.row.stats.rounds - 1,
        "position": position,
        "anchor": anchor,
        "nodes": nodes,
        "pattern": record.decisions[0]["statistics"] if record.decisions else None,
        "decisions": record.decisions,
        "sent": sent,
        "accepted": kept,
        "deferred": record.pending,
        "rejected": [node for node in sent if node not in kept],
        "overruled": [sent[node] for node in overruled],
        "bonus": following,
        "emitted": list(emitted),
        "target_choices": [int(choice) for choice in choices],
        "target_logprob_of_tokens": record.target_logprobs,
        "seconds": seconds,
    }
