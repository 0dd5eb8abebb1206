"""The report's verification section, computed from raw lines alone (verification_runs.py describes them).

``summarise_verification(read_jsonl("verification.jsonl"))`` gives the section of report.json again, figure by figure.
Ranking and calibration are judged on the greedy chain of held-out prompts, each slot up to and including the first that
the target rejects (METHODS 4); screening on the policy's own rounds; savings and quality on timed answers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jetspec_train.evaluation.benchmark import PLAIN
from jetspec_train.evaluation.calibration import CONFIDENCE, random_stage, upper_bound
from jetspec_train.evaluation.judgement import (
    PRECISION,
    auprc_reject,
    auroc,
    calibration_error,
    compare_auroc,
    coverage_at,
    judge,
    precision_coverage,
    reliability,
)
from jetspec_train.evaluation.replay import SHOWN_REJECTED
from jetspec_train.evaluation.statistics import interval_of, resample
from jetspec_train.evaluation.verification_runs import BEST, CHAIN, EVERY, POLICY

Line = Mapping[str, Any]
# What needs no training, as scores that rise with the chance of acceptance.
BASELINES = ("draft_probability", "margin", "entropy")
GRAM = 4  # words of the repetition rate are so many tokens


def summarise_verification(lines: Iterable[Line], *, draws: int = 500, seed: int = 0) -> dict[str, Any] | None:
    """The section; None where there are no lines. ``draws``: bootstrap samples over prompts."""
    everything = list(lines)
    facts = next((line for line in everything if line["type"] == "facts"), None)
    if facts is None:
        return None
    rounds = [line for line in everything if line["type"] == "round"]
    answers = [line for line in everything if line["type"] == "answer"]
    slots = Slots([line for line in rounds if line["run"] == CHAIN])
    judged = slots.judged
    scores = {name: slots.scores[name][judged] for name in BASELINES}
    accepted, conditional = slots.accepted[judged], slots.conditional[judged]
    figures = judge(conditional, accepted)
    gain = compare_auroc(
        conditional, scores, accepted, slots.prompt[judged], slots.domain_of_prompt, draws=draws, seed=seed
    )
    survival, fate = slots.survival[slots.known], slots.reached[slots.known]
    return {
        "mode": facts["mode"],
        "calibrated": facts["calibrated"],
        "prompts": len(slots.domain_of_prompt),
        "judged_tokens": figures["count"],
        "prior": figures["prior"],
        "constant_accuracy": figures["constant_accuracy"],
        "accuracy": figures["accuracy"],
        "balanced_accuracy": figures["balanced_accuracy"],
        "auroc": figures["auroc"],
        "auprc_reject": figures["auprc_reject"],
        "ece": calibration_error(survival, fate),
        "ece_token": figures["ece"],
        "baselines": {
            name: {"auroc": auroc(values, accepted), "auprc_reject": auprc_reject(values, accepted)}
            for name, values in scores.items()
        },
        "auroc_gain": gain,
        "confidence_head": _confidence(slots),
        "coverage_at_992": coverage_at(conditional, accepted),
        "baseline_coverage_at_992": {name: coverage_at(values, accepted) for name, values in scores.items()},
        "curves": _curves(conditional, scores, accepted, gain["baseline"]),
        "reliability": reliability(survival, fate),
        "positions": [
            {"position": slot + 1, **_short(conditional[at], accepted[at])}
            for slot in range(slots.slots)
            if (at := slots.slot[judged] == slot).any()
        ],
        "domains": {
            domain: {
                **_short(conditional[at], accepted[at]),
                "baseline_auroc": max(
                    (value for values in scores.values() if (value := auroc(values[at], accepted[at])) is not None),
                    default=None,
                ),
            }
            for domain in sorted(set(slots.domain_of_prompt))
            if (at := np.array([slots.domain_of_prompt[p] == domain for p in slots.prompt[judged]], dtype=bool)).any()
        },
        "policy": {key: facts[key] for key in _POLICY_FACTS} | {"reason": facts["policy_reason"]},
        **screening([line for line in rounds if line["run"] == POLICY], seed),
        **savings(answers),
        **quality_retained(answers, draws=draws, seed=seed),
        "replay": replay(rounds, next((line for line in everything if line["type"] == "texts"), None)),
        "verifier_parameters": facts["verifier_parameters"],
        "verifier_ratio_to_target": facts["verifier_parameters"] / facts["target_parameters"],
        "draft_and_verifier_ratio_to_target": (facts["verifier_parameters"] + facts["draft_parameters"])
        / facts["target_parameters"],
    }


_POLICY_FACTS = ("policy", "stage_length", "threshold", "threshold_certified", "best_without_stages")


class Slots:
    """The slots of chain rounds as flat arrays, N in all.

    accepted: the target chose this token; reached: it accepted the chain up to here; judged: offered after accepted
    slots only; known: ``reached`` means something (the answer had not ended before); conditional, survival: the
    verifier's calibrated word on the slot and on the chain up to it; prompt: index into ``domain_of_prompt``.
    Rounds in which the verifier gave no number are left out.
    """

    def __init__(self, rounds: Sequence[Line]) -> None:
        from jetspec_train.evaluation.shadow import chain_round

        usable = [(line, found) for line in rounds if (found := chain_round(line)) is not None]
        domains = {line["prompt"]: line["domain"] for line in rounds}
        number = {prompt: index for index, prompt in enumerate(domains)}
        self.domain_of_prompt = list(domains.values())
        rows: list[tuple[float, ...]] = []
        for line, found in usable:
            for slot in range(len(found["correctness"])):
                node = line["nodes"][slot]
                reached = slot < found["accepted"]
                rows.append(
                    (
                        number[line["prompt"]],
                        slot,
                        reached,
                        slot < found["known"],
                        slot < found["judged"],
                        node["correctness"],
                        node["survival"],
                        np.nan if node["confidence"] is None else node["confidence"],
                        node["logprob"],
                        node["margin"],
                        -node["entropy"],
                    )
                )
        table = np.array(rows, dtype=float).reshape(len(rows), 11)
        self.prompt, self.slot = table[:, 0].astype(int), table[:, 1].astype(int)
        self.reached, self.known, self.judged = (table[:, column].astype(bool) for column in (2, 3, 4))
        self.accepted = self.reached
        self.conditional, self.survival, self.confidence = table[:, 5], table[:, 6], table[:, 7]
        self.scores = {"draft_probability": table[:, 8], "margin": table[:, 9], "entropy": table[:, 10]}
        self.slots = int(self.slot.max()) + 1 if len(rows) else 0


def _short(conditional: np.ndarray, accepted: np.ndarray) -> dict[str, Any]:
    figures = judge(conditional, accepted)
    names = ("count", "prior", "constant_accuracy", "accuracy", "auroc", "auprc_reject", "ece", "coverage_at_992")
    return {name: figures[name] for name in names}


def _confidence(slots: Slots) -> dict[str, Any] | None:
    """The confidence head on the same slots; it never sees the token."""
    at = slots.judged & np.isfinite(slots.confidence)
    return _short(slots.confidence[at], slots.accepted[at]) if at.any() else None


def _curves(
    conditional: np.ndarray, scores: Mapping[str, np.ndarray], accepted: np.ndarray, best: str | None
) -> dict[str, Any]:
    """Precision against coverage, of the verifier and of the best score that needs no training."""
    if not len(accepted):
        return {}
    curves = {"verifier": precision_coverage(conditional, accepted)}
    if best is not None:
        curves[best] = precision_coverage(scores[best], accepted)
    return curves


# ---- screening ---------------------------------------------------------------------------------------------


def screening(rounds: Sequence[Line], seed: int = 0) -> dict[str, Any]:
    """Of the skipped checks, how many would the target have passed?

    ``screening_accuracy`` counts every skipped stage. ``screening_lower_bound`` is one-sided, 95 %, and takes one
    random skipped stage of each prompt, because the stages of one answer are not independent.
    """
    from jetspec_train.evaluation.shadow import screened_stages

    stages = [stage for line in rounds for stage in screened_stages(line)]
    decisions = sum(1 for line in rounds for decision in line["decisions"] if decision["nodes"])
    deferred = sum(1 for line in rounds for decision in line["decisions"] if decision["action"] == "defer")
    passed = sum(bool(stage["passed"]) for stage in stages)
    own: dict[str, list[bool]] = {}
    for stage in stages:
        own.setdefault(stage["prompt"], []).append(bool(stage["passed"]))
    errors = sum(not several[random_stage(prompt, len(several), seed)] for prompt, several in own.items())
    return {
        "screened_stages": len(stages),
        "screened_prompts": len(own),
        "screening_accuracy": passed / len(stages) if stages else None,
        "screening_lower_bound": 1 - upper_bound(errors, len(own), CONFIDENCE) if own else None,
        "screening_goal": PRECISION,
        "skipped_share": deferred / decisions if decisions else None,
    }


def replay(rounds: Sequence[Line], texts: Line | None) -> list[dict[str, Any]]:
    """The policy's rounds of a few answers as text: ``[{id, domain, prompt, rounds: [{tokens, rejected,
    more_rejected}]}]``, a token being ``{text, kind}``.

    Kinds: accepted (drafted, checked at once), deferred (waited, then found to be the target's own), overruled (waited,
    kept against the target's choice), bonus (the target's own next token). ``rejected`` nodes were sent and dropped.
    The first entry is the token of the prefill.
    """
    if texts is None:
        return []
    shown = []
    for prompt, text in texts["prompts"].items():
        own = [line for line in rounds if line["run"] == POLICY and line["prompt"] == prompt]
        if not own:
            continue
        first = {"tokens": [{"text": texts["tokens"][str(own[0]["anchor"])], "kind": "bonus"}]}
        shown.append(
            {
                "id": prompt,
                "domain": own[0]["domain"],
                "prompt": text,
                "rounds": [{**first, "rejected": [], "more_rejected": 0}, *(_replay_round(r, texts) for r in own)],
            }
        )
    return shown


def _replay_round(line: Line, texts: Line) -> dict[str, Any]:
    deferred, overruled = set(line["deferred"]), set(line["overruled"])
    kinds = ["overruled" if n in overruled else "deferred" if n in deferred else "accepted" for n in line["accepted"]]
    tokens = [
        {"text": texts["tokens"][str(token)], "kind": kind}
        for token, kind in zip(line["emitted"], [*kinds, "bonus"])  # an answer that ended has emitted fewer
    ]
    rejected = [texts["tokens"][str(line["nodes"][node]["token"])] for node in line["rejected"]]
    return {
        "tokens": tokens,
        "rejected": rejected[:SHOWN_REJECTED],
        "more_rejected": max(0, len(rejected) - SHOWN_REJECTED),
    }


# ---- savings and quality -----------------------------------------------------------------------------------


def _total(answers: Sequence[Line], run: str, key: str) -> float:
    return float(sum(line[key] for line in answers if line["run"] == run))


def _per_token(answers: Sequence[Line], run: str, key: str) -> float | None:
    decoded = _total(answers, run, "decoded")
    return _total(answers, run, key) / decoded if decoded else None


def _tokens_per_second(answers: Sequence[Line], run: str) -> float | None:
    seconds = _total(answers, run, "seconds")
    return sum(len(line["tokens"]) for line in answers if line["run"] == run) / seconds if seconds else None


def _ratio(top: float | None, bottom: float | None) -> float | None:
    return top / bottom if top is not None and bottom else None


def savings(answers: Sequence[Line]) -> dict[str, Any]:
    """``forwards_saved``: 1 - forwards per token / the same with every stage verified at once. ``target_tokens_ratio``:
    tokens that the target computed per emitted token, against the same. ``wall_clock_ratio``: tokens per second against
    the fastest decoder without stages; above 1 the policy is faster."""
    forwards = _ratio(_per_token(answers, POLICY, "target_forwards"), _per_token(answers, EVERY, "target_forwards"))
    return {
        "forwards_saved": None if forwards is None else 1 - forwards,
        "target_tokens_ratio": _ratio(
            _per_token(answers, POLICY, "target_tokens"), _per_token(answers, EVERY, "target_tokens")
        ),
        "wall_clock_ratio": _ratio(_tokens_per_second(answers, POLICY), _tokens_per_second(answers, BEST)),
        "tokens_per_second": {run: _tokens_per_second(answers, run) for run in (PLAIN, BEST, EVERY, POLICY)},
        "target_forwards_per_token": {
            run: _per_token(answers, run, "target_forwards") for run in (PLAIN, BEST, EVERY, POLICY)
        },
        "target_tokens_per_token": {
            run: _per_token(answers, run, "target_tokens") for run in (PLAIN, BEST, EVERY, POLICY)
        },
    }


def quality_retained(answers: Sequence[Line], *, draws: int, seed: int) -> dict[str, Any]:
    """exp(mean target log-probability per token, the policy's answers minus plain ones), with its one-sided lower 95 %
    bound over prompts (METHODS 11); the share of identical answers and the repetition rates beside it."""
    plain = {line["prompt"]: line for line in answers if line["run"] == PLAIN}
    pairs = [(plain[line["prompt"]], line) for line in answers if line["run"] == POLICY and line["prompt"] in plain]
    nothing = {"quality_retained": None, "quality_lower_bound": None, "identical_answers": None, "repetition": None}
    if not pairs:
        return nothing
    sums = np.array([[a["target_logprob"], len(a["tokens"]), b["target_logprob"], len(b["tokens"])] for a, b in pairs])
    if not sums[:, 1].sum() or not sums[:, 3].sum():
        return nothing
    weights, degrees = resample([a["domain"] for a, _ in pairs], draws, seed)
    drawn = weights @ sums
    with np.errstate(divide="ignore", invalid="ignore"):
        samples = np.exp(drawn[:, 2] / drawn[:, 3] - drawn[:, 0] / drawn[:, 1])
    total = sums.sum(0)
    return {
        "quality_retained": math.exp(total[2] / total[3] - total[0] / total[1]),
        "quality_lower_bound": interval_of(samples, degrees, level=2 * CONFIDENCE - 1)[0],
        "identical_answers": float(np.mean([a["tokens"] == b["tokens"] for a, b in pairs])),
        "repetition": {
            run: float(np.mean([repetition(pair[side]["tokens"]) for pair in pairs]))
            for side, run in enumerate((PLAIN, POLICY))
        },
    }


def repetition(tokens: Sequence[int]) -> float:
    """Share of the answer's runs of ``GRAM`` tokens that occurred in it before."""
    grams = [tuple(tokens[at : at + GRAM]) for at in range(len(tokens) - GRAM + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
