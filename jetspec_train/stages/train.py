"""stage=train: draft and verifier learn from the target's own answers, in the same steps.

Reads ``run_dir/distill`` by its manifest, writes ``run_dir/train/``: ``checkpoints/step-.../``, ``metrics.jsonl`` and
the manifest (``run_dir/verifier/`` under ``train.only=verifier``, whose draft is a frozen checkpoint). Killed at any
instant and started again it continues from the last checkpoint; asked to stop (SIGTERM, SIGUSR1, Ctrl-C) it saves at
the next step boundary first. The best checkpoint is the one with the longest acceptance length, measured by decoding
dev prompts (under ``train.only=verifier`` the one that ranks held-out slots best).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import make_folder
from jetspec_train.artifacts.manifest import is_current, read_manifest, require_manifest, verify_outputs, write_manifest
from jetspec_train.artifacts.provenance import git_revision
from jetspec_train.config import Config, to_dict
from jetspec_train.stages import standalone, training_drafts, training_verifier
from jetspec_train.stages.training_verifier import train_folder

if TYPE_CHECKING:
    from jetspec_train.data.packing import PackedSampler
    from jetspec_train.data.samples import SampleStore
    from jetspec_train.stages.training_verifier import Networks
    from jetspec_train.targets.target import Target
    from jetspec_train.training.checkpoint import TrainState
    from jetspec_train.training.ranks import Ranks
    from jetspec_train.training.step import StepSettings

STAGE = "train"
# What may change between two calls of the same training: how often it looks, saves and logs, and how the same
# arithmetic is cut up. Everything else makes another training.
FREE_TRAIN_KEYS = (
    "accumulation",
    "init",  # the frozen draft counts by its content
    "eval_every",
    "eval_prompts",
    "eval_max_new_tokens",
    "save_every",
    "log_every",
    "keep",
    "recompute",
    "features",
    "features_folder",
    "features_max_bytes",
)


def plan(cfg: Config) -> dict[str, Any]:
    """What would be trained, on what; reads manifests only."""
    if cfg.draft.kind == "standalone":
        return standalone.plan(cfg, STAGE)
    distill = read_manifest(Path(cfg.run_dir) / "distill")
    return {
        "stage": STAGE,
        "data": dict(distill.counts) if distill else f"{cfg.run_dir}/distill has not finished yet",
        "target": cfg.target.name,
        "draft": to_dict(cfg.draft),
        "objective": to_dict(cfg.objective),
        "verifier": to_dict(cfg.verifier) if training_verifier.has_verifier(cfg) else None,
        "train": to_dict(cfg.train),
        "engine": cfg.engine.name,
        "seed": cfg.seed,
        "writes": [str(train_folder(cfg) / name) for name in ("checkpoints/", "metrics.jsonl", "manifest.json")],
    }


def run(cfg: Config) -> None:
    """Train, or go on training, or find that there is nothing to do.

    Raises UserError for missing or changed data, another configuration's folder, more tokens than the budget, ranks
    that do not divide the batch; SystemExit(85) after a stop signal, KeyboardInterrupt after Ctrl-C, both saved.
    """
    from jetspec_train.targets.loading import pick_device, target_identity
    from jetspec_train.training.ranks import join_ranks

    if cfg.draft.kind == "standalone":
        standalone.train(cfg)
        return
    folder = train_folder(cfg)
    identity = train_identity(cfg, target_identity(cfg.target).to_dict())
    if is_current(folder, without_name(identity)):
        print(f"train: finished before, nothing to do ({folder})")
        return
    check(cfg)
    ranks = join_ranks(pick_device(cfg.target))
    check_ranks(cfg, ranks.world)
    make_folder(folder)
    with only_trainer(folder, ranks):
        asked = _train(cfg, folder, identity, ranks)
    if asked == signal.SIGINT:
        raise KeyboardInterrupt
    if asked:
        from jetspec_train.training.signals import exit_code_for

        print(f"train: stopped by {signal.Signals(asked).name}; the same command continues", file=sys.stderr)
        raise SystemExit(exit_code_for(asked))


def train_identity(cfg: Config, target: Mapping[str, str]) -> dict[str, Any]:
    """Everything that determines the weights. Raises UserError if the data are not there or were changed."""
    data = require_manifest(Path(cfg.run_dir) / "distill", "distill")
    verify_outputs(Path(cfg.run_dir) / "distill", data)
    selection = read_manifest(Path(cfg.run_dir) / "select")
    return {
        "target": dict(target),
        "data": data.digest(),
        **({"selection": selection.digest()} if selection else {}),
        "draft": draft_identity(cfg) if cfg.train.only != "verifier" else None,
        "objective": objective_identity(cfg),
        **training_verifier.identity(cfg),
        "train": {key: value for key, value in to_dict(cfg.train).items() if key not in FREE_TRAIN_KEYS},
        "seed": cfg.seed,
    }


def objective_identity(cfg: Config) -> dict[str, Any]:
    """The objective's settings without how the arithmetic is cut up; weights by reach count where they are on."""
    settings = to_dict(cfg.objective)
    return {key: settings[key] for key in settings if key != "chunk_anchors" and (key != "reach" or settings[key])}


def draft_identity(cfg: Config) -> dict[str, Any]:
    """The draft's settings; a vocabulary that is not reduced is no setting (drafts of before it could be are equal)."""
    settings = to_dict(cfg.draft)
    return {key: value for key, value in settings.items() if key != "vocabulary" or value is not None}


def without_name(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The identity as it is compared: a target that was moved to another folder is the same target."""
    return {**identity, "target": {key: value for key, value in identity["target"].items() if key != "name"}}


def check(cfg: Config) -> None:
    """Raise UserError for settings that cannot train."""
    if cfg.objective.ce == cfg.objective.l1 == cfg.objective.kl == 0:
        raise UserError("objective.ce, objective.l1 and objective.kl are all 0: at least one loss is needed.")


def check_ranks(cfg: Config, world: int) -> None:
    """Raise UserError unless every rank and accumulation step gets the same number of sequences."""
    if cfg.train.sequences % (world * cfg.train.accumulation):
        raise UserError(
            f"train.sequences={cfg.train.sequences} must be a multiple of ranks x train.accumulation = "
            f"{world} x {cfg.train.accumulation} (sequences counts those of the whole step)."
        )


@contextlib.contextmanager
def only_trainer(folder: Path, ranks: Ranks) -> Iterator[None]:
    """Hold the run directory; UserError when another training writes there. The system releases it after a kill."""
    if not ranks.is_main:
        yield
        return
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"Another process is training in {folder}. Wait for it, or use another run_dir.") from None
        yield


def _train(cfg: Config, folder: Path, identity: Mapping[str, Any], ranks: Ranks) -> int:
    """The whole story; returns the signal that stopped it, 0 when it finished."""
    from jetspec_train.data.packing import PackedSampler
    from jetspec_train.stages.training_figures import VerifierMeasure
    from jetspec_train.stages.training_inputs import StepBatches, dev_prompts, load_data
    from jetspec_train.targets.loading import load_target
    from jetspec_train.training.acceptance import measure_acceptance
    from jetspec_train.training.checkpoint import checkpoint_name, save_checkpoint
    from jetspec_train.training.engine import create_engine, write_optimizer
    from jetspec_train.training.loop import Cadence, StepResult, train
    from jetspec_train.training.schedule import make_optimizer, make_scheduler
    from jetspec_train.training.signals import stop_on_signals
    from jetspec_train.training.step import plan_step, run_step
    from jetspec_train.training.tracking import Tracker
    from jetspec_train.training.watchdog import Watchdog

    settings = cfg.train
    store, left_out = load_data(cfg)
    sampler = PackedSampler(
        store, sequence_length=settings.sequence_length, sequences=settings.sequences, seed=cfg.seed
    )
    batches = StepBatches(sampler, training_verifier.holdout(cfg))
    total = settings.steps or batches.steps(settings.epochs)
    target = load_target(cfg.target)
    networks = training_verifier.networks(cfg, target, store)
    networks.draft.recompute = settings.recompute
    draft_config, head = networks.draft_config, networks.draft
    step_settings = step_settings_of(cfg, draft_config, target)
    module = training_drafts.step_module(networks, target, step_settings)
    engine = create_engine(
        cfg.engine, clip=settings.clip, ranks=ranks, accumulation=settings.accumulation, device=target.device
    )
    optimizer = make_optimizer(
        module,
        learning_rate=settings.learning_rate,
        weight_decay=settings.weight_decay,
        betas=(settings.betas[0], settings.betas[1]),
    )
    scheduler = make_scheduler(optimizer, total=total, warmup=settings.warmup, floor=settings.min_learning_rate)
    wrapped = engine.wrap(module, optimizer, scheduler)
    state = resume(folder / "checkpoints", engine, identity, ranks, frozen=networks.frozen)
    states = feature_source(cfg, folder, target, draft_config.target_layer_ids, store, ranks)
    prompts = dev_prompts(cfg, target) if ranks.is_main and settings.eval_prompts else []
    if ranks.is_main:
        describe(sampler, total, networks, target, step_settings, state)

    def one_step(step: int) -> StepResult:
        batch = batches(step)
        planned = plan_step(
            batch, step_settings, seed=cfg.seed, step=step, judging=networks.judging, stored=networks.stored
        )
        return run_step(
            wrapped,
            engine,
            states,
            batch,
            planned,
            device=target.device,
            accumulation=settings.accumulation,
            learning_rate=float(scheduler.get_last_lr()[0]),
        )

    def save(current: TrainState) -> None:
        tensors, optimizer_state = engine.model_tensors(), engine.optimizer_state()  # all ranks bring their parts
        if not ranks.is_main:
            return
        save_checkpoint(
            folder / "checkpoints",
            dataclasses.replace(current, identity=dict(identity)),
            tensors=networks.frozen | tensors,
            draft=training_drafts.described(draft_config),
            verifier=networks.verifier_config,
            save_engine=lambda place: write_optimizer(optimizer_state, place),
            keep=settings.keep,
        )

    watchdog = Watchdog(folder / "ranks", ranks, stage=STAGE, limit=60 * cfg.cluster.hang_minutes)
    engine.on_exchange = lambda: watchdog.enter(f"step {state.step + 1}, exchanging gradients")
    with stop_on_signals() as stop, watchdog:
        measure = None
        judge = VerifierMeasure(networks, target, [p.tokens for p in prompts], [p.domain for p in prompts])
        if settings.eval_prompts:

            def asked_to_stop() -> bool:
                watchdog.beat()
                return bool(stop)

            def measure() -> dict[str, Any] | None:
                tensors = engine.model_tensors()  # all ranks bring their parts
                if not ranks.is_main:
                    return None
                draft = training_drafts.draft_of(networks.frozen | tensors, draft_config, target.device)
                record = judge.known_acceptance or measure_acceptance(
                    draft,
                    target,
                    judge.prompts,
                    cfg.decoding,
                    max_new_tokens=settings.eval_max_new_tokens,
                    should_stop=asked_to_stop,
                    on_answers=judge.take_answers,
                )
                return record and judge.add_figures(record, draft, tensors)

        tracker = None
        if ranks.is_main:
            run_config = {**to_dict(cfg), "git_revision": git_revision(), "total_steps": total}
            tracker = Tracker(folder, cfg.tracking, resumed_step=state.step, run_config=run_config)
        asked = train(
            state,
            Cadence(total, log=settings.log_every, evaluate=settings.eval_every, save=settings.save_every),
            run_step=one_step,
            measure=measure,
            save=save,
            tracker=tracker,
            stop=stop,
            ranks=ranks,
            enter=watchdog.enter,
        )
        if tracker is not None:
            tracker.close({"best": state.best, "step": state.step})
    if asked or not ranks.is_main:
        return asked
    best = checkpoint_name(int(state.best["step"])) if state.best else checkpoint_name(state.step)
    kept = [
        p for p in (folder / "checkpoints").glob("step-*/*") if p.parent.name in (best, checkpoint_name(state.step))
    ]
    facts = sampler.facts()
    write_manifest(
        folder,
        stage=STAGE,
        identity=without_name(identity),
        inputs={"distill": str(identity["data"]), **networks.inputs},
        outputs=[*kept, folder / "metrics.jsonl"],
        counts={
            "samples": facts.samples + left_out,
            "beyond_train_tokens": left_out,
            **{name: value for name, value in dataclasses.asdict(facts).items() if name != "samples"},
            "token_visits": state.token_visits,
            "steps": total,
            "budget_tokens": cfg.budget.tokens,
            "trainable_parameters": head.trainable_parameters,
            "verifier_parameters": networks.verifier_parameters,
            **({"draft_vocabulary_coverage": networks.vocabulary.coverage} if networks.vocabulary else {}),
        },
        seconds=state.seconds,
    )
    found = f"; best {best}: {state.best['chain']:.2f} (chain), {state.best['tree']:.2f} (tree)" if state.best else ""
    print(f"train: {total} steps, {state.token_visits:,} token visits in {state.seconds:.0f} s{found}")
    return 0


def step_settings_of(cfg: Config, draft: Any, target: Target) -> StepSettings:
    """The step's settings; ``train.precision=auto`` multiplies in bfloat16 where the target does."""
    import torch

    from jetspec_train.modeling.eagle3 import Eagle3Config
    from jetspec_train.training.step import EAGLE3, StepSettings

    wanted = cfg.train.precision
    low = wanted == "bfloat16" or (wanted == "auto" and target.dtype == torch.bfloat16)
    eagle3 = isinstance(draft, Eagle3Config)
    frozen = cfg.train.only == "verifier"  # then every block is drafted in order to be judged
    return StepSettings(
        block=cfg.draft.block if eagle3 else draft.block,
        layout=EAGLE3 if eagle3 else draft.layout,
        anchors=cfg.verifier.blocks if frozen else cfg.train.anchors,
        clean_prefix=0.0 if frozen or eagle3 else cfg.draft.clean_prefix,
        gamma=cfg.objective.gamma,
        ce=cfg.objective.ce,
        l1=cfg.objective.l1,
        kl=cfg.objective.kl,
        chunk_rows=cfg.objective.chunk_anchors * cfg.draft.block,
        autocast=torch.bfloat16 if low else None,
        reach=cfg.objective.reach,
    )


def resume(
    folder: Path, engine: Any, identity: Mapping[str, Any], ranks: Ranks, *, frozen: Mapping[str, Any]
) -> TrainState:
    """The state of the newest good checkpoint, loaded into the engine; a fresh one if there is none.

    ``frozen``: weights that are in it but not trained.
    """
    from jetspec_train.training import checkpoint
    from jetspec_train.training.ranks import from_main_rank

    warn = (lambda text: print(text, file=sys.stderr)) if ranks.is_main else (lambda text: None)
    found = from_main_rank(checkpoint.newest_checkpoint(folder, warn) if ranks.is_main else None, ranks)
    if found is None:
        return checkpoint.TrainState()
    checkpoint.check_identity(without_name(found.state.identity), without_name(identity), found.path)
    if ranks.is_main:
        checkpoint.tidy(folder, found.step)
        print(f"train: continuing from {found.path.name}")
    engine.load(found.path, {n: t for n, t in checkpoint.load_tensors(found.path).items() if n not in frozen})
    return found.state


def feature_source(
    cfg: Config, folder: Path, target: Target, taps: tuple[int, ...], store: SampleStore, ranks: Ranks
) -> Any:
    """Where a step gets the target's states from: a forward each time, or a cache that is filled now."""
    from jetspec_train.training.step import online_states

    if cfg.train.features == "online":
        return online_states(target, taps)
    from jetspec_train.training.feature_cache import CachedSamples, FeatureCache

    place = Path(cfg.train.features_folder) if cfg.train.features_folder else folder / "features"
    samples = CachedSamples(store.tokens, store.starts, cfg.train.sequence_length)
    cache = FeatureCache(place, samples, target, taps)
    cache.build(ranks, max_bytes=cfg.train.features_max_bytes)
    return cache.states()


def describe(
    sampler: PackedSampler, total: int, networks: Networks, target: Target, settings: StepSettings, state: TrainState
) -> None:
    """One line about the data and one about the work, before hours are spent."""
    facts = sampler.facts()
    print(
        f"train: {facts.packed:,} samples, {facts.supervised_tokens:,} supervised tokens, packed {facts.fill:.0%} full"
        + (f", {facts.too_short:,} too short" if facts.too_short else "")
        + (f", {facts.cropped:,} cropped (-{facts.cropped_tokens:,} tokens)" if facts.cropped else "")
    )
    precision = "bfloat16 products, float32 weights" if settings.autocast else "float32"
    print(f"train: steps {state.step} to {total}; {networks.describe(target)}; {precision}", flush=True)
