"""One evaluation from bundle and prompts to report: the order of the measurements and what each gets.

First the timing (nothing else has run in the process yet), then cost curve, replay and the verifier, then the float32
check with a second copy of the target, which is loaded only after the first one has been let go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tqdm import tqdm

from jetspec_train.artifacts.bundle import STANDALONE, Bundle
from jetspec_train.config import DecodingConfig, EvaluateConfig, TargetConfig
from jetspec_train.decoding.cost_profile import measure_verify_seconds
from jetspec_train.evaluation.benchmark import (
    PLAIN,
    SPECULATIVE,
    Contender,
    PromptRecord,
    decoder_contender,
    run_benchmark,
)
from jetspec_train.evaluation.contenders import build_contenders, decoder_of
from jetspec_train.evaluation.curves import measure_curves
from jetspec_train.evaluation.identity import Comparison, MarginJudge, check_identity, compare_records
from jetspec_train.evaluation.machine import OtherWork, describe_machine, peak_memory_bytes
from jetspec_train.evaluation.replay import record_replay
from jetspec_train.evaluation.report import build_report
from jetspec_train.evaluation.scoring import score_records
from jetspec_train.evaluation.suites import Suite, build_suite
from jetspec_train.evaluation.verification import summarise_verification
from jetspec_train.evaluation.verification_runs import has_verifier, record_verification


class Evaluated(NamedTuple):
    """The report, and what it was computed from: records of the timed runs, raw lines of the verifier's (empty without
    one)."""

    report: dict[str, Any]
    records: list[PromptRecord]
    verification: list[dict[str, Any]]


def evaluate_bundle(
    bundle: Bundle,
    candidates: Iterable[Any],
    *,
    target_config: TargetConfig,
    evaluate: EvaluateConfig,
    decoding: DecodingConfig,
    training: Mapping[str, Any],
    settings: Mapping[str, Any],
    commands: Sequence[str],
    versions: Mapping[str, str],
    seed: int = 0,
) -> Evaluated:
    """Measure ``bundle`` on ``candidates`` (prompts with id, domain, messages).

    Raises UserError for another target than the bundle's, or where no prompt is left to measure.
    """
    from jetspec_train.artifacts.bundle import check_target
    from jetspec_train.targets.loading import load_target

    machine = describe_machine()
    target = load_target(target_config)
    check_target(bundle.meta, target.identity)
    suite = build_suite(
        candidates,
        target.chat,
        per_domain=evaluate.prompts,
        max_new_tokens=evaluate.max_new_tokens,
        max_positions=target.max_positions,
        domains=evaluate.domains,
    )
    dtype = str(target.dtype).removeprefix("torch.")
    contenders = build_contenders(target, bundle, evaluate, decoding, target_config)
    meter = OtherWork()
    records = timed_runs(suite, contenders, evaluate, meter)
    machine |= {"dtype": dtype, **meter.summary()}
    peak_memory = peak_memory_bytes()
    curve = {}
    if evaluate.cost_context:
        curve = measure_verify_seconds(target, context=evaluate.cost_context, repeats=7)
    curves = measure_curves(target, bundle, suite.prompts, records, evaluate, decoding)
    replay = record_replay(
        decoder_of(target, bundle, decoding), suite.prompts[: evaluate.replay], evaluate.max_new_tokens, decoding
    )
    tasks = score_records(records, target.chat.decode, run_code=evaluate.run_code)
    lines: list[dict[str, Any]] = []
    if evaluate.verification and has_verifier(bundle):
        lines = record_verification(
            target, bundle, suite.prompts, evaluate=evaluate, decoding=decoding, records=records
        )
    target_facts, draft_facts = describe_target(target), describe_draft(bundle, target.parameters)
    descriptions = {contender.name: contender.description for contender in contenders}
    if dtype == "float32":
        precise = target
    else:
        precise = None
        del target, contenders
        if evaluate.fp32_prompts:
            precise = load_target(target_config, dtype="float32")
    exact, timed = compare_all(precise, bundle, suite, records, dtype, evaluate, decoding)
    report = build_report(
        records=records,
        target=target_facts,
        draft=draft_facts,
        training=training,
        machine=machine,
        settings=settings,
        identity=exact,
        timed_identity=timed,
        cost_curve=curve,
        cost_context=evaluate.cost_context,
        peak_memory=peak_memory,
        replay=replay,
        verification=summarise_verification(lines, draws=evaluate.bootstrap, seed=seed),
        tasks=tasks,
        curves=curves,
        skipped=suite.skipped,
        empty_domains=suite.empty_domains,
        contenders=descriptions,
        commands=commands,
        versions=versions,
        draws=evaluate.bootstrap,
        seed=seed,
    )
    return Evaluated(report, records, lines)


def timed_runs(
    suite: Suite, contenders: Sequence[Contender], evaluate: EvaluateConfig, meter: OtherWork
) -> list[PromptRecord]:
    """The benchmark behind a progress bar that shows the running speedup."""
    seconds = {PLAIN: 0.0, SPECULATIVE: 0.0}
    tokens = {PLAIN: 0, SPECULATIVE: 0}
    with tqdm(total=len(suite.prompts), desc="evaluate", unit="prompt") as bar:

        def show(record: PromptRecord) -> None:
            for name in seconds:
                seconds[name] += record.runs[name].seconds
                tokens[name] += len(record.runs[name].tokens)
            rates = {name: tokens[name] / seconds[name] for name in seconds if seconds[name]}
            if len(rates) == 2 and rates[PLAIN]:
                bar.set_postfix_str(
                    f"plain {rates[PLAIN]:.1f} tokens/s, speculative {rates[SPECULATIVE]:.1f}, "
                    f"{rates[SPECULATIVE] / rates[PLAIN]:.2f}x"
                )
            bar.update()

        return run_benchmark(
            suite.prompts,
            contenders,
            max_new_tokens=evaluate.max_new_tokens,
            warmup=evaluate.warmup,
            repeats=evaluate.repeats,
            meter=meter,
            progress=show,
        )


def compare_all(
    precise: Any,
    bundle: Bundle,
    suite: Suite,
    records: Sequence[PromptRecord],
    dtype: str,
    evaluate: EvaluateConfig,
    decoding: DecodingConfig,
) -> tuple[Comparison | None, Comparison]:
    """``(float32 comparison or None, comparison of the timed outputs)``; divergences are printed.

    ``precise``: the target in float32, or None where the check is switched off. If the timing itself was in
    float32, its outputs are the compared ones and nothing is decoded again.
    """
    greedy = decoding.sampling.temperature == 0
    double = MarginJudge(precise, double=True) if greedy and precise is not None else None
    if dtype == "float32":
        timed = compare_records(records, SPECULATIVE, dtype=dtype, margin_of=double)
        exact: Comparison | None = timed if evaluate.fp32_prompts else None
    else:
        exact = None
        if precise is not None:
            chosen = suite.prompts[: max(evaluate.fp32_prompts, len(suite.domains))]
            common: dict[str, Any] = {"sampling": decoding.sampling, "seed": decoding.seed, "stop": decoding.stop}
            speculative = decoder_of(precise, bundle, decoding)
            plain = type(speculative)(precise, None, dataclasses.replace(decoding, drafting=False))
            with tqdm(total=len(chosen), desc="identity in float32", unit="prompt") as bar:
                exact = check_identity(
                    chosen,
                    decoder_contender(PLAIN, plain, **common),
                    decoder_contender(SPECULATIVE, speculative, **common),
                    dtype="float32",
                    max_new_tokens=evaluate.max_new_tokens,
                    margin_of=double,
                    progress=bar.update,
                )
        single = MarginJudge(precise, double=False) if greedy and precise is not None else None
        timed = compare_records(records, SPECULATIVE, dtype=dtype, margin_of=single)
    for divergence in exact.divergences if exact is not None else []:
        print(f"float32 divergence: {divergence.describe()}")
    return exact, timed


def describe_target(target: Any) -> dict[str, Any]:
    """The report's ``target``: name, parameters, and the hash that the bundle is bound to."""
    identity = target.identity.to_dict()
    return {
        "name": identity["name"],
        "parameters": target.parameters,
        "hash": identity["config_hash"],
        "identity": identity,
        "max_positions": target.max_positions,
    }


def describe_draft(bundle: Bundle, target_parameters: int) -> dict[str, Any]:
    """The report's ``draft``. Every tensor of the bundle's draft is trainable: embedding and head are the target's."""
    standalone = bundle.meta.get("kind") == STANDALONE  # then every tensor is the draft's, embedding and head too
    trainable = sum(
        tensor.numel()
        for name, tensor in bundle.tensors.items()
        if tensor.is_floating_point() and (standalone or name.startswith("draft."))
    )
    architecture = bundle.meta.get("architecture")
    config = bundle.config.get("draft") or {}
    if not isinstance(architecture, str):
        architecture = "block draft head, {layers} layers, block of {block}, {mask}, {layout} layout".format_map(
            {key: config.get(key, "?") for key in ("layers", "block", "mask", "layout")}
        )
    return {
        "architecture": architecture,
        "trainable_parameters": trainable,
        "ratio_to_target": trainable / target_parameters,
        "config": config,
    }
