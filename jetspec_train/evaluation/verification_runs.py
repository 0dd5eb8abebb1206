"""What the report's verification section is made of: raw lines, one JSON object each, kept beside the report.

* ``facts``: sizes, mode, which policy was measured and why;
* ``round``: one round of a decoder with the target's verdict on every drafted token (decoding/trace.py). Run
  ``chain`` is the greedy chain over the whole block, on which heads and training-free scores are compared; run
  ``policy`` is the staged policy;
* ``texts``: of the prompts that the report replays, and of the tokens in their ``policy`` rounds;
* ``answer``: one answer of a timed run - ``plain``, ``without_stages`` (the fastest decoder measured without stages),
  ``every_stage`` (each stage verified at once) and ``policy`` - with its costs and the target's log-probability of it.

The timed runs take turns on each prompt and have no trace; the traced ones are not timed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jetspec_train.config import DecodingConfig, EvaluateConfig
from jetspec_train.evaluation.benchmark import PLAIN, SPECULATIVE, PromptRecord, decoder_contender, run_benchmark
from jetspec_train.evaluation.suites import SuitePrompt

if TYPE_CHECKING:
    from jetspec_train.artifacts.bundle import Bundle
    from jetspec_train.targets.target import Target

BEST, EVERY, POLICY, CHAIN = "without_stages", "every_stage", "policy", "chain"
STAGE_LENGTH = 3  # where neither the settings nor a calibration names one
BATCH = 16
Line = dict[str, Any]


def has_verifier(bundle: Bundle) -> bool:
    return bundle.config.get("verifier") is not None


def record_verification(
    target: Target,
    bundle: Bundle,
    prompts: Sequence[SuitePrompt],
    *,
    evaluate: EvaluateConfig,
    decoding: DecodingConfig,
    records: Sequence[PromptRecord],
) -> list[Line]:
    """Run everything; ``records``: the main benchmark's, by which the best decoder without stages is known.

    The bundle must have a verifier and a block draft head.
    """
    from jetspec_train.decoding.bundles import drafter_from_bundle, head_from_bundle
    from jetspec_train.decoding.drafting import BlockDrafter
    from jetspec_train.evaluation.shadow import ShadowPrompt, ShadowRun, chain_settings, sampling_of

    chosen = first_of_each_domain(prompts, evaluate.verification)
    drafter = drafter_from_bundle(bundle, target)
    if not isinstance(drafter, BlockDrafter) or drafter.companions is None or drafter.companions.verifier is None:
        raise ValueError("the bundle has no block draft head with a verifier")
    verifier, calibration = drafter.companions.verifier, drafter.companions.calibration
    mode = verifier.config.mode
    decoding = dataclasses.replace(decoding, sampling=sampling_of(mode, decoding))
    policy, why = policy_settings(drafter, decoding, mode)
    name, best = best_without_stages(records, evaluate, decoding)
    lines: list[Line] = [
        {
            "type": "facts",
            "mode": mode,
            "calibrated": calibration is not None,
            "policy": policy.policy,
            "policy_reason": why,
            "stage_length": policy.stages,
            "threshold": threshold_in_force(drafter, policy),
            "threshold_certified": bool(calibration is not None and calibration.threshold.certified),
            "best_without_stages": name,
            "verifier_parameters": sum(p.numel() for p in verifier.parameters()),
            "draft_parameters": drafter.parameters,
            "target_parameters": target.parameters,
        }
    ]
    # Not the drafter's own head: that one is packed for decoding.
    head = head_from_bundle(bundle, target)
    shadows = [ShadowPrompt(p.id, p.domain, p.tokens, p.row) for p in chosen]
    for run, settings in ((CHAIN, chain_settings(decoding, mode)), (POLICY, policy)):
        shadow = ShadowRun(target, head, verifier, calibration, settings)
        for at in range(0, len(shadows), BATCH):
            rounds, _ = shadow.run(shadows[at : at + BATCH], max_new_tokens=evaluate.max_new_tokens)
            lines += [{"type": "round", "run": run, **record} for record in rounds]
    lines.append(texts_of(lines, chosen[: evaluate.replay], target.chat))
    lines += timed_answers(target, drafter, chosen, evaluate, {BEST: best, EVERY: every_stage(policy), POLICY: policy})
    return lines


def texts_of(lines: Sequence[Line], prompts: Sequence[SuitePrompt], chat: Any) -> Line:
    """What people need to read the policy's rounds of these prompts."""
    names = {prompt.id for prompt in prompts}
    rounds = [line for line in lines if line["type"] == "round" and line["run"] == POLICY and line["prompt"] in names]
    tokens = {token for line in rounds for token in (line["anchor"], line["bonus"], *line["emitted"])}
    tokens |= {node["token"] for line in rounds for node in line["nodes"]}
    return {
        "type": "texts",
        "prompts": {prompt.id: prompt.text for prompt in prompts},
        "tokens": {str(token): chat.decode([token], skip_special_tokens=False) for token in sorted(tokens)},
    }


def first_of_each_domain(prompts: Sequence[SuitePrompt], count: int) -> list[SuitePrompt]:
    """At most ``count`` prompts of every domain, in their order."""
    taken: dict[str, int] = {}
    chosen = []
    for prompt in prompts:
        taken[prompt.domain] = taken.get(prompt.domain, 0) + 1
        if taken[prompt.domain] <= count:
            chosen.append(prompt)
    return chosen


def policy_settings(drafter: Any, decoding: DecodingConfig, mode: str) -> tuple[DecodingConfig, str]:
    """The staged policy to measure, and the reason in words: ``trusting`` where the bundle's calibration certifies it
    for these settings, else ``lossless``, whose coarse forward checks what it deferred."""
    from jetspec_train.artifacts.errors import UserError
    from jetspec_train.decoding.controller import make_controller

    companions = drafter.companions
    calibration = companions.calibration
    certified_for = calibration.threshold.stage_length if calibration is not None else None
    stages = decoding.stages or certified_for or STAGE_LENGTH
    most = min(decoding.max_pending or drafter.block - 1, drafter.block - 1)
    common = {"rule": "match", "stages": stages, "max_pending": most, "scheduler": False, "utilisation": False}
    common |= {"cache": False, "trace": None, "stream_unverified": False}
    trusting = dataclasses.replace(decoding, policy="trusting", **common)
    try:
        make_controller(trusting, block=drafter.block, verifier=companions.verifier, calibration=calibration)
    except UserError as refusal:
        return dataclasses.replace(decoding, policy="lossless", **common), str(refusal)
    return trusting, f"certified for mode {mode} and stages of {stages} tokens"


def threshold_in_force(drafter: Any, policy: DecodingConfig) -> float:
    from jetspec_train.decoding.controller import make_controller

    companions = drafter.companions
    return make_controller(
        policy, block=drafter.block, verifier=companions.verifier, calibration=companions.calibration
    ).threshold


def every_stage(policy: DecodingConfig) -> DecodingConfig:
    """The same drafting with the target asked after every stage: what a policy saves forwards against."""
    return dataclasses.replace(policy, policy="lossless", stages=0, depth=policy.stages, max_pending=None)


def best_without_stages(
    records: Sequence[PromptRecord], evaluate: EvaluateConfig, decoding: DecodingConfig
) -> tuple[str, DecodingConfig]:
    """Name and settings of the contender of most tokens per second among those of the main benchmark without stages.

    Where that benchmark's own decoder has stages and no variant is without, the same decoder with them switched off.
    """
    from jetspec_train.evaluation.contenders import variant_settings

    named = {SPECULATIVE: decoding}
    named |= {name: variant_settings(decoding, name, changes) for name, changes in evaluate.variants.items()}
    plain = {
        name: settings for name, settings in named.items() if not settings.stages and settings.policy != "trusting"
    }
    if not plain:
        return f"{SPECULATIVE}, stages off", dataclasses.replace(decoding, stages=0, policy="lossless")

    def rate(name: str) -> float:
        runs = [record.runs[name] for record in records if name in record.runs]
        seconds = sum(run.seconds for run in runs)
        return sum(len(run.tokens) for run in runs) / seconds if seconds else 0.0

    name = max(plain, key=rate)
    return name, dataclasses.replace(plain[name], trace=None)


def timed_answers(
    target: Target,
    drafter: Any,
    prompts: Sequence[SuitePrompt],
    evaluate: EvaluateConfig,
    settings: Mapping[str, DecodingConfig],
) -> list[Line]:
    """Each contender on each prompt, taking turns, one prompt at a time; plain decoding is one of them."""
    from jetspec_train.decoding.decoder import Decoder

    some = next(iter(settings.values()))
    common: dict[str, Any] = {"sampling": some.sampling, "seed": some.seed, "stop": some.stop}
    plain = Decoder(target, None, dataclasses.replace(some, drafting=False, stages=0, policy="lossless", trace=None))
    contenders = [decoder_contender(PLAIN, plain, **common)]
    contenders += [
        decoder_contender(name, Decoder(target, drafter, of_run), **common) for name, of_run in settings.items()
    ]
    records = run_benchmark(
        prompts,
        contenders,
        max_new_tokens=evaluate.max_new_tokens,
        warmup=min(1, evaluate.warmup),
        repeats=evaluate.repeats,
    )
    lines: list[Line] = []
    for record in records:
        known: dict[tuple[int, ...], float] = {}  # equal answers are scored once
        for name, run in record.runs.items():
            answer = tuple(run.tokens)
            if answer not in known:
                known[answer] = answer_logprob(target, record.prompt.tokens, run.tokens)
            lines.append(
                {
                    "type": "answer",
                    "run": name,
                    "prompt": record.prompt.id,
                    "domain": record.prompt.domain,
                    "tokens": run.tokens,
                    "target_logprob": known[answer],
                    "seconds": run.seconds,
                    "decoded": run.decoded,
                    "target_forwards": run.target_forwards,
                    "target_tokens": run.target_tokens,
                    "draft_forwards": run.draft_forwards,
                }
            )
    return lines


def answer_logprob(target: Target, prompt: Sequence[int], answer: Sequence[int]) -> float:
    """The target's log-probability of an answer to a prompt, summed over its tokens, nats; no processors."""
    import torch

    if not answer:
        return 0.0
    tokens_1T = torch.tensor([[*prompt, *answer]], device=target.device)
    positions_1T = torch.arange(tokens_1T.shape[1], device=target.device)[None]
    with torch.inference_mode():
        output = target.forward_packed(tokens_1T, positions_1T, torch.zeros_like(tokens_1T), ())
        hidden_ND = output.hidden_BND[0, len(prompt) - 1 : -1]
        logits_NV = target.logits(hidden_ND).float()
        answer_N1 = tokens_1T[0, len(prompt) :, None]
        return float(torch.log_softmax(logits_NV, dim=-1).gather(1, answer_N1).double().sum())
