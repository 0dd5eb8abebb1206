"""How good the verifier is while it trains: figures on the rounds that decoding makes of held-out answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from torch import Tensor

    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.stages.training_verifier import Networks
    from jetspec_train.targets.target import Target
    from jetspec_train.training.verifier_rounds import HeldOutRounds, JudgedSlots

OPERATING_POINT = 0.85  # [S]: above it the full check is skipped
FEWEST = 20  # judged slots for a figure of their own


class VerifierMeasure:
    """Adds the verifier's figures to what was measured of the draft; does nothing without a verifier.

    The answers come from the first decoding (they are the target's own, so they never change), the target's states of
    them are computed once. A frozen draft decodes once: ``known_acceptance`` is its record from then on.
    """

    def __init__(
        self, networks: Networks, target: Target, prompts: Sequence[list[int]], domains: Sequence[str]
    ) -> None:
        self.networks, self.target = networks, target
        self.prompts, self.domains = list(prompts), list(domains)
        self.known_acceptance: dict[str, Any] | None = None
        self._rounds: HeldOutRounds | None = None
        self._answers: list[list[int]] = []

    def take_answers(self, answers: list[list[int]]) -> None:
        self._answers = answers

    def add_figures(self, record: dict[str, Any], draft: DraftHead, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
        """``record`` with "verifier", and with "score" where the draft is frozen (by which the best is chosen)."""
        from jetspec_train.modeling.verifier import Verifier
        from jetspec_train.training.engine import load_strictly
        from jetspec_train.training.verifier_rounds import Answer, HeldOutRounds

        networks = self.networks
        if networks.verifier is None or networks.judging is None:
            return record
        if networks.frozen:
            self.known_acceptance = dict(record)
        if self._rounds is None:
            answers = [Answer(p, a, d) for p, a, d in zip(self.prompts, self._answers, self.domains) if len(a) > 1]
            self._rounds = HeldOutRounds(answers, self.target, draft.config.target_layer_ids)
        verifier = Verifier(networks.verifier.config)
        prefix = "verifier."
        own = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        load_strictly(verifier, own, "the running training")
        slots = self._rounds.collect(draft, verifier, networks.judging.rule)
        numbers = figures(slots, [answer.domain for answer in self._rounds.answers])
        print(f"train: {summary_line(numbers)}", flush=True)
        score = {"score": (numbers.get("correctness") or {}).get("auroc") or 0.0} if networks.frozen else {}
        return {**record, **score, "verifier": numbers}


def figures(slots: JudgedSlots, domains: Sequence[str]) -> dict[str, Any]:
    """The verifier's figures on held-out rounds, nested: both heads, the training-free scores, groups.

    ``domains``: of each answer. Precision and recall are those of "accepted" at a probability of 0.85; ``ece`` is that
    of the cumulative survival, the product of the round's probabilities up to a slot.
    """
    from jetspec_train.evaluation.judgement import auprc_reject, auroc, calibration_error, judge

    accepted = (slots.accepted >= 0.5).astype(float)
    numbers: dict[str, Any] = {"judged": len(slots), "rounds": len(np.unique(slots.round))}
    if not len(slots):
        return numbers
    prior = float(accepted.mean())
    numbers |= {"prior": prior, "constant_accuracy": max(prior, 1 - prior)}
    of_answer = np.asarray(domains)[slots.answer]
    for head in ("correctness", "confidence"):
        probability = 1 / (1 + np.exp(-slots.scores[head]))
        judged = judge(probability, accepted)
        names = ("accuracy", "balanced_accuracy", "auroc", "auprc_reject", "coverage_at_992")
        numbers[head] = {name: judged[name] for name in names}
        numbers[head]["ece"] = calibration_error(survivals(probability, slots.round), accepted)
        numbers[head] |= _at_operating_point(probability, accepted)
        groups = {
            "depth": {str(k): slots.depth == k for k in np.unique(slots.depth)},
            "domain": {str(d): of_answer == d for d in np.unique(of_answer)},
        }
        for group, members in groups.items():
            numbers[head][group] = {
                name: {
                    "judged": int(where.sum()),
                    "prior": float(accepted[where].mean()),
                    "auroc": auroc(probability[where], accepted[where]),
                }
                for name, where in members.items()
                if where.sum() >= FEWEST
            }
    numbers["baselines"] = {
        name: {
            "auroc": auroc(slots.scores[name], accepted),
            "auprc_reject": auprc_reject(slots.scores[name], accepted),
        }
        for name in ("probability", "margin", "entropy")
    }
    return numbers


def survivals(probability: np.ndarray, rounds: np.ndarray) -> np.ndarray:
    """Product of a round's probabilities up to each of its slots; slots of a round are consecutive, in order."""
    logs = np.log(np.clip(probability, 1e-12, 1.0))
    total = np.cumsum(logs)
    starts = np.flatnonzero(np.append(True, rounds[1:] != rounds[:-1]))
    before = np.repeat(np.append(0.0, total[starts[1:] - 1]), np.diff(np.append(starts, len(rounds))))
    return np.exp(total - before)


def _at_operating_point(probability: np.ndarray, accepted: np.ndarray) -> dict[str, float | None]:
    from sklearn.metrics import precision_score, recall_score

    said = probability >= OPERATING_POINT
    return {
        "precision_at_085": float(precision_score(accepted, said)) if said.any() else None,
        "recall_at_085": float(recall_score(accepted, said)) if accepted.any() else None,
    }


def summary_line(numbers: Mapping[str, Any]) -> str:
    """The figures of one evaluation in a few words."""
    head, baselines = numbers.get("correctness") or {}, numbers.get("baselines") or {}
    best = max((b["auroc"] for b in baselines.values() if b["auroc"] is not None), default=None)
    if head.get("auroc") is None or best is None:
        return f"verifier: {numbers['judged']} judged slots, too few to tell"
    return (
        f"verifier: AUROC {head['auroc']:.3f} (best without training {best:.3f}), accuracy {head['accuracy']:.3f} "
        f"(constant answer {numbers['constant_accuracy']:.3f}), {numbers['judged']} judged slots"
    )
