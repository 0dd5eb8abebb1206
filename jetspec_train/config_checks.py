"""Impossible settings, refused in one line before anything heavy is imported.

Ranges and choices are tables; what concerns several keys is a function below them. What depends on
the target (head sizes, tap layers) is checked where the target is known.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config_loading import near

if TYPE_CHECKING:
    from jetspec_train.config import Config, DecodingConfig

CHOICES: dict[str, tuple[str, ...]] = {
    "target.dtype": ("auto", "float32", "bfloat16", "float16"),
    "target.template": ("tokenizer", "plain"),
    "draft.kind": ("block", "eagle3", "standalone"),
    "draft.mask": ("causal", "bidirectional"),
    "draft.layout": ("anchor", "in_place"),
    "draft.parent": ("none", "vanilla", "gated"),
    "verifier.mode": ("match_greedy", "match_sampled", "ratio"),
    "train.only": ("draft", "verifier"),
    "train.precision": ("auto", "float32", "bfloat16"),
    "train.features": ("online", "cache"),
    "engine.name": ("auto", "torch", "deepspeed"),
    "tracking.name": ("none", "wandb"),
    "tracking.mode": ("online", "offline"),
    "decoding.shape": ("chain", "tree", "paths"),
    "decoding.rule": ("match", "ratio"),
    "decoding.policy": ("lossless", "trusting"),
    "cluster.name": ("local", "slurm"),
    # lists: every entry must be one of these
    "negatives.kinds": ("on_policy", "near_miss", "numeric", "swap", "repeat", "truncate", "stale", "subword"),
    "negatives.splits": ("train", "dev", "calibrate_fit", "calibrate_certify"),
    "pipeline": ("distill", "select", "negatives", "train", "calibrate", "export", "evaluate"),
    "export.formats": ("bundle", "vllm", "dflash", "jetspec", "deepspec", "eagle3"),
    "evaluate.baselines": ("generate", "prompt_lookup", "assisted"),
    "evaluate.curves": ("context", "batch", "budget", "temperature"),
}

# "at least", "above", "at most", "below"; None is left alone
RANGES: dict[str, tuple[tuple[str, float], ...]] = {
    "seed": (("at least", 0),),
    "recipe.prompts": (("at least", 1),),
    "distill.max_new_tokens": (("at least", 1),),
    "distill.max_prompt_tokens": (("at least", 1),),
    "distill.batch_size": (("at least", 1),),
    "distill.samples_per_prompt": (("at least", 1),),
    "distill.seed": (("at least", 0),),
    "distill.flush_rows": (("at least", 1),),
    "distill.max_reject_share": (("at least", 0), ("at most", 1)),
    "budget.tokens": (("at least", 1),),
    "budget.generated_tokens": (("at least", 1),),
    "draft.layers": (("at least", 1),),
    "draft.block": (("at least", 2),),
    "draft.parent_rank": (("at least", 1),),
    "draft.clean_prefix": (("at least", 0), ("at most", 1)),
    "draft.taps": (("at least", 1),),
    "draft.hidden_size": (("at least", 1),),
    "draft.heads": (("at least", 1),),
    "draft.kv_heads": (("at least", 1),),
    "draft.head_dim": (("at least", 2),),
    "draft.intermediate_size": (("at least", 1),),
    "draft.mask_token_id": (("at least", 0),),
    "draft.vocabulary": (("at least", 1),),
    "objective.ce": (("at least", 0),),
    "objective.l1": (("at least", 0),),
    "objective.kl": (("at least", 0),),
    "objective.gamma": (("above", 0),),
    "objective.chunk_anchors": (("at least", 1),),
    "verifier.layers": (("at least", 0),),
    "verifier.share": (("above", 0), ("at most", 1)),
    "verifier.hidden_size": (("at least", 1),),
    "verifier.heads": (("at least", 1),),
    "verifier.kv_heads": (("at least", 1),),
    "verifier.intermediate_size": (("at least", 1),),
    "verifier.confidence_weight": (("at least", 0),),
    "verifier.correctness_weight": (("at least", 0),),
    "verifier.reject_weight": (("above", 0),),
    "verifier.siblings": (("at least", 0),),
    "verifier.sibling_weight": (("at least", 0),),
    "verifier.blocks": (("at least", 1),),
    "verifier.holdout": (("at least", 0), ("below", 1)),
    "verifier.seen_weight": (("at least", 0),),
    "verifier.negatives_share": (("at least", 0), ("below", 1)),
    "select.share": (("above", 0), ("at most", 1)),
    "select.tokens": (("at least", 1),),
    "select.min_tokens": (("at least", 0),),
    "select.max_tokens": (("at least", 1),),
    "select.max_repetition": (("at least", 0), ("at most", 1)),
    "select.duplicate_similarity": (("above", 0), ("at most", 1)),
    "negatives.samples": (("at least", 1),),
    "negatives.per_sample": (("at least", 1),),
    "negatives.near_miss": (("at least", 0), ("at most", 1)),
    "negatives.synthetic": (("at least", 0), ("at most", 1)),
    "negatives.keep": (("above", 0), ("at most", 1)),
    "negatives.positives": (("at least", 0), ("at most", 1)),
    "negatives.batch_size": (("at least", 1),),
    "negatives.seed": (("at least", 0),),
    "negatives.examples": (("at least", 0),),
    "train.tokens": (("at least", 1),),
    "train.epochs": (("above", 0),),
    "train.steps": (("at least", 1),),
    "train.sequence_length": (("at least", 8),),
    "train.sequences": (("at least", 1),),
    "train.accumulation": (("at least", 1),),
    "train.anchors": (("at least", 1),),
    "train.learning_rate": (("above", 0),),
    "train.min_learning_rate": (("at least", 0), ("at most", 1)),
    "train.warmup": (("at least", 0), ("at most", 1)),
    "train.weight_decay": (("at least", 0),),
    "train.clip": (("above", 0),),
    "train.features_max_bytes": (("at least", 1),),
    "train.eval_every": (("at least", 0),),
    "train.eval_prompts": (("at least", 0),),
    "train.eval_max_new_tokens": (("at least", 1),),
    "train.save_every": (("at least", 1),),
    "train.log_every": (("at least", 1),),
    "train.keep": (("at least", 1),),
    "engine.zero_stage": (("at least", 0), ("at most", 3)),
    "cluster.nodes": (("at least", 1),),
    "cluster.gpus": (("at least", 0),),
    "cluster.tasks_per_node": (("at least", 1),),
    "cluster.cpus_per_task": (("at least", 1),),
    "cluster.distill_tasks": (("at least", 1),),
    "cluster.distill_parallel": (("at least", 1),),
    "cluster.signal_seconds": (("at least", 1),),
    "cluster.requeues": (("at least", 0),),
    "cluster.hang_minutes": (("at least", 0),),
    "decoding.max_new_tokens": (("at least", 1),),
    "decoding.nodes": (("at least", 1),),
    "decoding.shortlist": (("at least", 1),),
    "decoding.depth": (("at least", 1),),
    "decoding.seed": (("at least", 0),),
    "decoding.paths": (("at least", 1),),
    "decoding.stages": (("at least", 0),),
    "decoding.max_pending": (("at least", 0),),
    "decoding.floor": (("at least", 0), ("at most", 1)),
    "decoding.prune": (("at least", 0), ("at most", 1)),
    "decoding.candidates": (("at least", 1),),
    "decoding.cache_max_bytes": (("at least", 1),),
    "adapt.rank": (("at least", 1),),
    "adapt.alpha": (("above", 0),),
    "adapt.dropout": (("at least", 0), ("below", 1)),
    "adapt.steps": (("at least", 1),),
    "adapt.learning_rate": (("above", 0),),
    "adapt.prompts": (("at least", 1),),
    "adapt.max_new_tokens": (("at least", 1),),
    "standalone.prune_layers": (("at least", 1),),
    "standalone.steps": (("at least", 1),),
    "standalone.batch_size": (("at least", 1),),
    "standalone.learning_rate": (("above", 0),),
    "standalone.warmup": (("at least", 0), ("at most", 1)),
    "standalone.lmbda": (("at least", 0), ("at most", 1)),
    "standalone.beta": (("at least", 0), ("at most", 1)),
    "standalone.temperature": (("above", 0),),
    "standalone.max_new_tokens": (("at least", 1),),
    "standalone.sequence_length": (("at least", 8),),
    "standalone.lora_rank": (("at least", 0),),
    "standalone.lora_alpha": (("above", 0),),
    "standalone.depth": (("at least", 1),),
    "standalone.save_every": (("at least", 1),),
    "calibrate.fit_prompts": (("at least", 1),),
    "calibrate.certify_prompts": (("at least", 1),),
    "calibrate.max_new_tokens": (("at least", 2),),
    "calibrate.batch_size": (("at least", 1),),
    "calibrate.stages": (("at least", 1),),
    "calibrate.risk": (("above", 0), ("below", 1)),
    "calibrate.confidence": (("above", 0), ("below", 1)),
    "calibrate.grid": (("at least", 1), ("at most", 20)),
    "calibrate.pattern_coverage": (("above", 0), ("at most", 1)),
    "calibrate.seed": (("at least", 0),),
    "evaluate.verification": (("at least", 0),),
    "evaluate.prompts": (("at least", 1),),
    "evaluate.max_new_tokens": (("at least", 1),),
    "evaluate.warmup": (("at least", 0),),
    "evaluate.fp32_prompts": (("at least", 0),),
    "evaluate.bootstrap": (("at least", 100),),
    "evaluate.repeats": (("at least", 1),),
    "evaluate.replay": (("at least", 0),),
    "evaluate.curve_prompts": (("at least", 1),),
    "evaluate.cost_context": (("at least", 0),),
    **{
        f"{section}.sampling.{name}": limits
        for section in ("distill", "decoding")
        for name, limits in {
            "temperature": (("at least", 0),),
            "top_k": (("at least", 0),),
            "top_p": (("above", 0), ("at most", 1)),
            "min_p": (("at least", 0), ("below", 1)),
            "repetition_penalty": (("above", 0),),
        }.items()
    },
}

_HOLDS = {
    "at least": lambda value, limit: value >= limit,
    "above": lambda value, limit: value > limit,
    "at most": lambda value, limit: value <= limit,
    "below": lambda value, limit: value < limit,
}


def setting(cfg: Any, key: str) -> Any:
    """The value at a dotted key."""
    for name in key.split("."):
        cfg = getattr(cfg, name)
    return cfg


def check(cfg: Config) -> None:
    """Raise UserError for the first setting, or combination of settings, that cannot work."""
    for key, allowed in CHOICES.items():
        value = setting(cfg, key)
        for entry in value if isinstance(value, list) else [value]:
            if entry is not None and entry not in allowed:
                raise UserError(f"{key}={entry}: allowed are {', '.join(allowed)}.{near(str(entry), allowed)}")
    for key, limits in RANGES.items():
        value = setting(cfg, key)
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{key}={value}: a finite number is needed.")
        if value is not None and not all(_HOLDS[word](value, limit) for word, limit in limits):
            raise UserError(f"{key}={value}: must be {' and '.join(f'{word} {limit:g}' for word, limit in limits)}.")
    _check_draft(cfg)
    _check_select(cfg)
    _check_negatives(cfg)
    _check_training(cfg)
    check_decoding(cfg.decoding)
    _check_inputs(cfg)


def _check_draft(cfg: Config) -> None:
    draft = cfg.draft
    if draft.clean_prefix > 0 and draft.block < 3:
        raise UserError(
            f"draft.block={draft.block} with draft.clean_prefix={draft.clean_prefix}: clean-prefix training needs a "
            "block of at least 3. Set draft.clean_prefix=0 or a larger block."
        )
    if draft.vocabulary is not None and draft.kind != "eagle3":
        raise UserError(
            f"draft.vocabulary={draft.vocabulary} with draft.kind={draft.kind}: only draft=eagle3 has an output head "
            "of its own; the others share the target's, whole."
        )
    if draft.kind == "eagle3" and draft.clean_prefix > 0:
        raise UserError(
            f"draft.clean_prefix={draft.clean_prefix} with draft.kind=eagle3: its training-time test has no clean "
            "prefixes. Set draft.clean_prefix=0, or take draft=eagle3, which does."
        )
    if draft.heads is not None and draft.kv_heads is not None and draft.heads % draft.kv_heads:
        raise UserError(f"draft.heads={draft.heads}: must be a multiple of draft.kv_heads={draft.kv_heads}.")
    if draft.head_dim is not None and draft.head_dim % 2:
        raise UserError(f"draft.head_dim={draft.head_dim}: must be even (rotary positions pair the dimensions).")
    layers = draft.target_layer_ids
    if layers is not None and (not layers or layers != sorted(set(layers)) or layers[0] < 0):
        raise UserError(
            f"draft.target_layer_ids={layers}: distinct layers in ascending order are needed, counted from 0 "
            "(0 = output of the first decoder layer)."
        )
    objective = cfg.objective
    if objective.ce + objective.l1 + objective.kl <= 0:
        raise UserError("objective.ce, objective.l1 and objective.kl are all 0: nothing would be trained.")


SIGNALS = ("gap", "entropy", "uncertain", "flatness", "tokens", "repetition")  # those of data/value.py


def _check_select(cfg: Config) -> None:
    select = cfg.select
    for name in select.weights:
        if name not in SIGNALS:
            raise UserError(f"select.weights.{name}: no such signal; allowed are {', '.join(SIGNALS)}.")
    for name, share in select.domain_shares.items():
        if not 0 <= share <= 1:
            raise UserError(f"select.domain_shares.{name}={share}: must be at least 0 and at most 1.")
    band = select.entropy_band
    if len(band) != 2 or not 0 <= band[0] < band[1]:
        raise UserError(f"select.entropy_band={band}: two numbers of nats, the lower first, are needed.")


def _check_negatives(cfg: Config) -> None:
    negatives = cfg.negatives
    if negatives.near_miss + negatives.synthetic > 1:
        raise UserError(
            f"negatives.near_miss={negatives.near_miss} and negatives.synthetic={negatives.synthetic}: shares of one "
            "mix, together at most 1 (what they leave is on_policy)."
        )
    for key, values in (("kinds", negatives.kinds), ("splits", negatives.splits)):
        if not values or len(set(values)) != len(values):
            raise UserError(f"negatives.{key}={values}: name at least one, each once.")


def _check_training(cfg: Config) -> None:
    train = cfg.train
    if len(train.betas) != 2 or not all(0 <= beta < 1 for beta in train.betas):
        raise UserError(f"train.betas={train.betas}: two numbers of at least 0 and below 1 are needed.")
    if train.sequences % train.accumulation:
        raise UserError(
            f"train.sequences={train.sequences}: must be a multiple of train.accumulation={train.accumulation} "
            "(sequences counts those of the whole step)."
        )
    if train.sequence_length < cfg.draft.block + 2:
        raise UserError(
            f"train.sequence_length={train.sequence_length}: too short for draft.block={cfg.draft.block}; "
            f"at least {cfg.draft.block + 2} is needed."
        )
    if train.tokens is not None and train.tokens > cfg.budget.tokens:
        raise UserError(f"train.tokens={train.tokens}: exceeds budget.tokens={cfg.budget.tokens}.")


def parse_threshold(text: str) -> float | None:
    """``decoding.threshold``: "auto" -> None, a number from 0 to 1 -> that number; UserError for anything else."""
    if text == "auto":
        return None
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.0 <= value <= 1.0:
        raise UserError(f"decoding.threshold={text}: auto, or a number from 0 to 1, is needed.")
    return value


def check_decoding(decoding: DecodingConfig) -> None:
    """What does not depend on the draft; the rest is refused where the draft is known (decoding.controller)."""
    parse_threshold(decoding.threshold)
    if decoding.policy == "trusting" and not decoding.stages:
        raise UserError("decoding.policy=trusting decides stage by stage: set decoding.stages to 3, 4 or 5.")
    if decoding.stream_unverified and decoding.policy != "trusting":
        raise UserError("decoding.stream_unverified=true: only decoding.policy=trusting hands out unverified tokens.")
    if decoding.candidates is not None and decoding.candidates < decoding.nodes:
        raise UserError(
            f"decoding.candidates={decoding.candidates}: at least decoding.nodes={decoding.nodes} must be drafted "
            "to send that many."
        )
    if decoding.utilisation and not decoding.scheduler:
        raise UserError("decoding.utilisation=true moves the scheduler's upper bound: set decoding.scheduler=true too.")
    if decoding.rule == "ratio":
        _check_ratio_rule(decoding)


def _check_ratio_rule(decoding: DecodingConfig) -> None:
    """Under the ratio rule no decision may look at the token that it is about (METHODS 7)."""
    wrong = [
        f"decoding.{key}={value}"
        for key, value, wanted in (
            ("shape", decoding.shape, "chain"),
            ("policy", decoding.policy, "lossless"),
            ("stages", decoding.stages, 0),
            ("prune", decoding.prune, 0),
            ("cache", decoding.cache, False),
        )
        if value != wanted
    ]
    if wrong:
        raise UserError(
            f"decoding.rule=ratio does not go with {', '.join(wrong)}: it keeps the target's distribution only for "
            "chains sampled from the draft whose length was decided without looking at the token in question."
        )
    if decoding.sampling.temperature == 0:
        raise UserError("decoding.rule=ratio needs sampling: set decoding.sampling.temperature above 0.")


def _check_inputs(cfg: Config) -> None:
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d+)?", cfg.target.device):
        raise UserError(f"target.device={cfg.target.device}: allowed are auto, cpu, mps, cuda, cuda:0, cuda:1, ...")
    shard = re.fullmatch(r"(\d+)/(\d+)", cfg.shard)
    if not shard or int(shard[1]) >= int(shard[2]):
        raise UserError(f"shard={cfg.shard}: write i/n with i from 0 to n-1, for example 0/4.")
    if not cfg.run_dir.strip():
        raise UserError("run_dir is empty: name a folder for the output.")
    if cfg.prompt is not None and cfg.prompt_file is not None:
        raise UserError("prompt= and prompt_file= are both given: use one of them.")
    if not cfg.pipeline or len(set(cfg.pipeline)) != len(cfg.pipeline):
        raise UserError(f"pipeline={cfg.pipeline}: at least one stage, and each only once.")
    if cfg.stage == "compare" and len(cfg.reports) < 2:
        raise UserError(f"reports={cfg.reports}: stage=compare needs two reports, reports=[a.json,b.json].")
