"""stage=adapt: a bundle learns another domain by a small adapter (LoRA), and is measured on both domains.

Reads the answers of the domain's own run (``run_dir/distill``) and a bundle (``bundle=``). Writes ``run_dir/adapt/``:
``adapter/`` (a few megabytes, which ``Decoder.load_adapter`` swaps at run time), ``bundle/`` with ``adapt.merge=true``,
``checkpoints/``, ``metrics.jsonl``, ``report.json`` (acceptance length before and after, on the new domain and on the
old one: what was forgotten) and the manifest. Steps, loop, checkpoints and signals are those of stage=train.
"""

from __future__ import annotations

import dataclasses
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.adapter import weights_hash
from jetspec_train.artifacts.bundle import Bundle, check_target, read_bundle, read_meta
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder
from jetspec_train.artifacts.manifest import is_current, require_manifest, verify_outputs
from jetspec_train.artifacts.provenance import git_revision
from jetspec_train.config import Config, to_dict
from jetspec_train.stages.adapt_report import STAGE, finish, head_with, in_memory, measured, old_recipe
from jetspec_train.stages.train import objective_identity

if TYPE_CHECKING:
    from torch import Tensor

    from jetspec_train.targets.target import Target
    from jetspec_train.training.checkpoint import TrainState
    from jetspec_train.training.ranks import Ranks

# Of ``train`` only these concern an adaptation; steps and learning rate are in ``adapt``.
USED_TRAIN_KEYS = (
    "tokens",
    "sequence_length",
    "sequences",
    "anchors",
    "min_learning_rate",
    "warmup",
    "weight_decay",
    "betas",
    "clip",
    "precision",
)


def plan(cfg: Config) -> dict[str, Any]:
    """What would be adapted, on what; reads descriptions only."""
    meta = read_meta(bundle_of(cfg))
    return {
        "stage": STAGE,
        "bundle": str(cfg.bundle),
        "target": meta.get("target", {}).get("name"),
        "data": str(Path(cfg.run_dir) / "distill"),
        "old_recipe": old_recipe(cfg, meta) or "unknown; set adapt.old_recipe to measure forgetting",
        "adapt": to_dict(cfg.adapt),
        "writes": [str(Path(cfg.run_dir) / STAGE / name) for name in outputs_of(cfg)],
    }


def run(cfg: Config) -> None:
    """Adapt, or go on adapting, or find that there is nothing to do.

    Raises UserError for a bundle that is missing, of another target, or no block draft; for missing data; for another
    configuration's folder. SystemExit(85) after a stop signal, KeyboardInterrupt after Ctrl-C, both saved.
    """
    from jetspec_train.stages.train import check_ranks, only_trainer
    from jetspec_train.targets.loading import pick_device, target_identity
    from jetspec_train.training.ranks import join_ranks

    folder = Path(cfg.run_dir) / STAGE
    meta = read_meta(bundle_of(cfg))
    check_target(meta, target_identity(cfg.target))
    identity = adapt_identity(cfg, meta)
    if is_current(folder, identity):
        print(f"adapt: finished before, nothing to do ({folder})")
        return
    bundle = read_bundle(bundle_of(cfg))
    check_kind(bundle)
    ranks = join_ranks(pick_device(cfg.target))
    check_ranks(cfg, ranks.world)
    make_folder(folder)
    with only_trainer(folder, ranks):
        asked = _adapt(cfg, folder, bundle, identity, ranks)
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    if asked:
        from jetspec_train.training.signals import exit_code_for

        print(f"adapt: stopped by {signal.Signals(asked).name}; the same command continues", file=sys.stderr)
        raise SystemExit(exit_code_for(asked))


def bundle_of(cfg: Config) -> Path:
    if cfg.bundle is None:
        raise UserError("stage=adapt needs bundle=FOLDER, the bundle that is to learn the domain of run_dir/distill.")
    return Path(cfg.bundle)


def check_kind(bundle: Bundle) -> None:
    """Raises UserError for a bundle whose draft is not a block head."""
    kind = bundle.meta.get("kind") or bundle.config.get("kind") or "block"
    if kind != "block":
        hint = " Distil it again with standalone.lora_rank on the domain's samples." if kind == "standalone" else ""
        raise UserError(f"bundle={bundle.path} holds a draft of kind {kind}; stage=adapt adapts block drafts.{hint}")


def adapt_identity(cfg: Config, meta: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that determines adapter and report. Raises UserError if the data are not there or were changed."""
    data = require_manifest(Path(cfg.run_dir) / "distill", "distill")
    verify_outputs(Path(cfg.run_dir) / "distill", data)
    return {
        "bundle": weights_hash(meta),
        "data": data.digest(),
        "adapt": to_dict(cfg.adapt),
        "objective": objective_identity(cfg),
        "train": {key: to_dict(cfg.train)[key] for key in USED_TRAIN_KEYS},
        "clean_prefix": cfg.draft.clean_prefix,
        "decoding": to_dict(cfg.decoding),
        "seed": cfg.seed,
    }


def outputs_of(cfg: Config) -> list[str]:
    return ["adapter/", *(["bundle/"] if cfg.adapt.merge else []), "report.json", "checkpoints/", "metrics.jsonl"]


def _adapt(cfg: Config, folder: Path, bundle: Bundle, identity: Mapping[str, Any], ranks: Ranks) -> int:
    """The whole story; returns the signal that stopped it, 0 when it finished."""
    from jetspec_train.data.packing import PackedSampler
    from jetspec_train.modeling.draft_config import DraftHeadConfig
    from jetspec_train.stages.train import step_settings_of
    from jetspec_train.stages.training_inputs import StepBatches, dev_prompts, load_data
    from jetspec_train.targets.loading import load_target
    from jetspec_train.training import adapters
    from jetspec_train.training.checkpoint import save_checkpoint
    from jetspec_train.training.engine import create_engine, write_optimizer
    from jetspec_train.training.loop import Cadence, StepResult, train
    from jetspec_train.training.schedule import make_optimizer, make_scheduler
    from jetspec_train.training.signals import stop_on_signals
    from jetspec_train.training.step import online_states, plan_step, row_seed, run_step
    from jetspec_train.training.tracking import Tracker

    settings, adapt = cfg.train, cfg.adapt
    store, left_out = load_data(cfg)
    sampler = PackedSampler(
        store, sequence_length=settings.sequence_length, sequences=settings.sequences, seed=cfg.seed
    )
    batches = StepBatches(sampler)
    target = load_target(cfg.target)
    draft_config = DraftHeadConfig.from_dict(bundle.config["draft"])
    step_settings = step_settings_of(cfg, draft_config, target)
    module, judging = networks(cfg, bundle, target, step_settings)
    peft_config = adapters.add_adapters(
        module, adapt.modules, rank=adapt.rank, alpha=adapt.alpha, dropout=adapt.dropout, seed=cfg.seed
    )
    frozen = adapters.frozen_tensors(module.state_dict())
    engine = create_engine(
        cfg.engine, clip=settings.clip, ranks=ranks, accumulation=settings.accumulation, device=target.device
    )
    optimizer = make_optimizer(
        module,
        learning_rate=adapt.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(settings.betas[0], settings.betas[1]),
    )
    scheduler = make_scheduler(optimizer, total=adapt.steps, warmup=settings.warmup, floor=settings.min_learning_rate)
    wrapped = engine.wrap(module, optimizer, scheduler)
    state = resume(folder / "checkpoints", engine, identity, frozen, ranks)
    states = online_states(target, draft_config.target_layer_ids)
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    prompts = dev_prompts(cfg, target) if ranks.is_main and settings.eval_prompts else []
    if ranks.is_main:
        with_verifier = " and verifier" if module.verifier is not None else ""
        print(
            f"adapt: draft{with_verifier} of {bundle.path}, {trained:,} trained numbers in "
            f"{len(peft_config['target_modules'])} layers, steps {state.step} to {adapt.steps} on "
            f"{store.supervised_tokens:,} supervised tokens",
            flush=True,
        )

    def one_step(step: int) -> StepResult:
        import torch

        if adapt.dropout:
            torch.manual_seed(row_seed(cfg.seed, step, ranks.rank))  # so that a resumed run drops the same
        batch = batches(step)
        return run_step(
            wrapped,
            engine,
            states,
            batch,
            plan_step(batch, step_settings, seed=cfg.seed, step=step, judging=judging),
            device=target.device,
            accumulation=settings.accumulation,
            learning_rate=float(scheduler.get_last_lr()[0]),
        )

    def factors() -> dict[str, Tensor]:
        return {name: value for name, value in engine.model_tensors().items() if name not in frozen}

    def save(current: TrainState) -> None:
        tensors, optimizer_state = factors(), engine.optimizer_state()  # all ranks bring their parts
        if ranks.is_main:
            save_checkpoint(
                folder / "checkpoints",
                dataclasses.replace(current, identity=dict(identity)),
                tensors=tensors,
                draft=draft_config.to_dict(),
                save_engine=lambda place: write_optimizer(optimizer_state, place),
                keep=settings.keep,
            )

    def measure() -> dict[str, Any] | None:
        tensors = factors()
        if not ranks.is_main:
            return None
        head = head_with(bundle, in_memory(peft_config, adapters.adapter_tensors(tensors), bundle))
        return measured(cfg, head, target, [p.tokens for p in prompts], settings.eval_max_new_tokens, should_stop=stop)

    with stop_on_signals() as stop:
        tracker = None
        if ranks.is_main:
            run_config = {**to_dict(cfg), "git_revision": git_revision(), "total_steps": adapt.steps}
            tracker = Tracker(folder, cfg.tracking, resumed_step=state.step, run_config=run_config)
        asked = train(
            state,
            Cadence(adapt.steps, log=settings.log_every, evaluate=settings.eval_every, save=settings.save_every),
            run_step=one_step,
            measure=measure if settings.eval_prompts else None,
            save=save,
            tracker=tracker,
            stop=stop,
            ranks=ranks,
        )
        if tracker is not None:
            tracker.close({"best": state.best, "step": state.step})
    if asked or not ranks.is_main:
        return asked
    counts = {
        "samples": len(store) + left_out,
        "supervised_tokens": store.supervised_tokens,
        "token_visits": state.token_visits,
        "steps": adapt.steps,
        "trainable_parameters": trained,
    }
    finish(cfg, folder, bundle, identity, peft_config, state, target, counts)
    return 0


def networks(cfg: Config, bundle: Bundle, target: Target, step_settings: Any) -> tuple[Any, Any]:
    """The bundle's draft, and its verifier where it is to be adapted, as a trainable step; how it is judged."""
    from jetspec_train.decoding.bundles import load_draft_tensors, verifier_from_bundle
    from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
    from jetspec_train.stages.training_verifier import judge_settings
    from jetspec_train.training.step import DraftStep

    head = DraftHead(DraftHeadConfig.from_dict(bundle.config["draft"]))
    load_draft_tensors(head, bundle.tensors, str(bundle.path))
    verifier = verifier_from_bundle(bundle) if cfg.adapt.verifier else None
    judging = None
    if verifier is not None:
        # An adapted draft learns from all samples, and there are no stored negatives of this domain.
        wanted = dataclasses.replace(cfg.verifier, enabled=True, mode=verifier.config.mode, holdout=0.0)
        judging = judge_settings(
            dataclasses.replace(cfg, verifier=wanted, train=dataclasses.replace(cfg.train, only=None)), stored=False
        )
        verifier = verifier.train().to(target.device)
    return DraftStep(head.to(target.device), target, step_settings, verifier, judging), judging


def resume(
    folder: Path, engine: Any, identity: Mapping[str, Any], frozen: Mapping[str, Any], ranks: Ranks
) -> TrainState:
    """The state of the newest good checkpoint, its factors loaded beside the frozen weights; else a fresh state."""
    from jetspec_train.training import checkpoint
    from jetspec_train.training.ranks import from_main_rank

    warn = (lambda text: print(text, file=sys.stderr)) if ranks.is_main else (lambda text: None)
    found = from_main_rank(checkpoint.newest_checkpoint(folder, warn) if ranks.is_main else None, ranks)
    if found is None:
        return checkpoint.TrainState()
    checkpoint.check_identity(found.state.identity, identity, found.path)
    if ranks.is_main:
        checkpoint.tidy(folder, found.step)
        print(f"adapt: continuing from {found.path.name}")
    engine.load(found.path, {**frozen, **checkpoint.load_tensors(found.path)})
    return found.state
