"""The typed configuration: every key the project understands, its type and its default.

Hydra composes YAML groups from ``conf/`` into one tree; ``load_config`` checks that tree against
these dataclasses before anything heavy is imported. This file knows nothing of models or data.
The YAML in ``conf/`` holds only what differs from the defaults written here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jetspec_train import config_checks, config_loading

EMBEDDED_TARGET = "embedded:smollm2-135m-instruct"


@dataclass
class TargetConfig:
    """The frozen main model. ``name``: hub id, local folder, ``.gguf`` file, or ``embedded:...``."""

    name: str = EMBEDDED_TARGET
    revision: str | None = None
    gguf_file: str | None = None
    dtype: str = "auto"  # auto | float32 | bfloat16 | float16
    device: str = "auto"  # auto | cpu | cuda
    template: str = "tokenizer"  # tokenizer | plain (a stated plain template, only if asked)
    template_options: dict[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None


@dataclass
class RecipeConfig:
    """Which data mix. ``name`` is a file of ``data_recipes/``; ``path`` an explicit YAML file."""

    name: str = "procedural"
    path: str | None = None
    # at most so many prompts of the train split; what is measured does not change with it
    prompts: int | None = None
    overrides: dict[str, Any] = field(default_factory=dict)  # e.g. a source's local path


@dataclass
class SamplingConfig:
    """How tokens are chosen. ``temperature: 0`` is greedy; 0 / 1.0 switch a filter off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass
class DistillConfig:
    max_new_tokens: int = 256
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    samples_per_prompt: int = 1
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    splits: list[str] = field(default_factory=lambda: ["train"])  # which prompts are answered
    seed: int = 0  # of the sampled tokens; a greedy run does not depend on it
    flush_rows: int = 64  # answers per write to disk: the most that a kill loses (or a minute's worth)
    keep_truncated: bool = True  # an answer cut at max_new_tokens is a valid prefix; it gets no forged end
    max_reject_share: float = 0.05  # of bad rows; above it the stage fails


@dataclass
class BudgetConfig:
    tokens: int = 800_000_000  # unique supervised target-generated tokens kept for training
    generated_tokens: int | None = None  # cap on generation


@dataclass
class DraftConfig:
    """A block draft head; None means "derived from the target's config"."""

    kind: str = "block"  # block | eagle3 | standalone (a small language model; its settings are in `standalone`)
    preset: str = "causal_markov"
    layers: int = 2
    block: int = 8  # K predictions per block; eagle3: steps of its training-time test
    mask: str = "causal"  # causal | bidirectional
    layout: str = "anchor"  # anchor | in_place
    parent: str = "vanilla"  # none | vanilla | gated
    parent_rank: int = 64
    clean_prefix: float = 0.25  # probability that a training block starts with true tokens
    target_layer_ids: list[int] | None = None  # 0-based decoder layers, "output of layer i"
    taps: int = 5  # how many taps when target_layer_ids is None
    hidden_size: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int | None = None
    mask_token_id: int | None = None
    vocabulary: int | None = None  # eagle3: only so many tokens, the most frequent of the answers; None: all


@dataclass
class ObjectiveConfig:
    ce: float = 0.1
    l1: float = 0.9
    kl: float = 0.0
    gamma: float | None = 4.0  # w_k = exp(-k/gamma); None: no decay
    reach: bool = False  # also weight a slot by the chance that decoding reaches it (expected acceptance)
    chunk_anchors: int = 32


@dataclass
class VerifierSettings:
    """The network that judges drafted tokens before the target does; trained beside the draft (METHODS 4)."""

    enabled: bool = True
    mode: str = "match_greedy"  # match_greedy | match_sampled | ratio: the acceptance rule that its heads predict
    layers: int = 2  # 0: an MLP over a node's own inputs, without attention to path and context
    share: float = 0.06  # its parameters as a share of the target's; sets intermediate_size where that is None
    hidden_size: int | None = None  # None: as the draft's
    heads: int | None = None
    kv_heads: int | None = None
    intermediate_size: int | None = None
    detach: bool = True  # its gradients stop before the draft
    confidence_weight: float = 1.0
    correctness_weight: float = 1.0
    reject_weight: float = 1.0  # of the rejected class; above 1 distorts probabilities, which calibration then undoes
    siblings: int = 2  # alternatives to the first choice that are judged at each slot
    sibling_weight: float = 0.5  # of an alternative against a node of the greedy chain
    blocks: int = 12  # blocks judged per packed sequence, at most (those of held-out samples first)
    holdout: float = 0.2  # share of the training samples that the draft does not learn from: honest material
    seen_weight: float = 0.25  # of labels on samples that the draft does learn from, where there are held-out ones
    negatives: bool = True  # also learn from run_dir/negatives where that stage has finished
    negatives_share: float = 0.3  # stored negatives against judged blocks, at most


@dataclass
class SelectConfig:
    """Which answers are worth training on. stage=select explains itself in select/summary.html."""

    share: float = 1.0  # of the answer tokens that pass the filters
    tokens: int | None = None  # at most so many answer tokens
    # score = sum of weight x rank(signal); the signals are gap, entropy, uncertain, flatness, tokens, repetition
    weights: dict[str, float] = field(default_factory=lambda: {"gap": 1.0})
    domain_shares: dict[str, float] = field(default_factory=dict)  # domain -> at most this share of the kept tokens
    entropy_band: list[float] = field(default_factory=lambda: [0.5, 3.0])  # nats, of the signal "uncertain"
    min_tokens: int = 4
    max_tokens: int | None = None
    max_repetition: float = 0.5  # of the answer's 4-grams
    duplicate_similarity: float = 0.8  # estimated Jaccard of 5-word shingles; 1: only identical shingles


@dataclass
class NegativesConfig:
    """Which judged paths stage=negatives makes of the samples, and which it keeps (METHODS 6)."""

    kinds: list[str] = field(
        default_factory=lambda: [
            "on_policy",  # mined with the draft of bundle=...; without one the training step drafts its own
            "near_miss",
            "numeric",
            "swap",
            "repeat",
            "truncate",
            "stale",
            "subword",
        ]
    )
    splits: list[str] = field(default_factory=lambda: ["train"])  # of the samples
    samples: int | None = 2000  # at most so many samples of each split, chosen by their ids; None: all
    per_sample: int = 8  # paths tried on each
    near_miss: float = 0.2  # share of the kept paths, at most; the rest is on_policy
    synthetic: float = 0.1  # share of all other kinds together, at most
    keep: float = 0.8  # share of the judged paths of a class that is kept, chosen evenly over difficulties
    positives: float = 0.25  # share of a class that may be paths which the target accepts, the closest calls first
    batch_size: int = 16  # samples that the target reads at once
    seed: int = 0
    examples: int = 4  # of each kind in summary.html


@dataclass
class TrainConfig:
    only: str | None = None  # draft | verifier (on a frozen draft); None: both in the same step
    init: str | None = None  # only=verifier: the checkpoint with the frozen draft; None: the best of this run
    tokens: int | None = None  # use at most so many unique supervised tokens
    epochs: float = 4.0
    steps: int | None = None  # overrides epochs
    sequence_length: int = 512
    sequences: int = 4  # packed sequences per step, over all ranks and accumulation steps
    accumulation: int = 1
    anchors: int = 64  # per packed sequence
    learning_rate: float = 1e-3
    min_learning_rate: float = 0.1  # as a share of learning_rate
    warmup: float = 0.04  # share of all steps
    weight_decay: float = 0.01
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    clip: float = 1.0
    precision: str = "auto"  # auto | float32 | bfloat16 (autocast, fp32 master weights)
    # recompute the draft's layers in the backward pass: less memory for activations, about a third more time
    recompute: bool = False
    features: str = "online"  # online | cache (the target's states are computed once and kept on disk)
    features_folder: str | None = None  # None: run_dir/train/features; a shared one serves several runs on one data set
    features_max_bytes: int = 50_000_000_000  # refuse a larger cache
    eval_every: int = 200  # steps; 0: only at the end
    eval_prompts: int = 12
    eval_max_new_tokens: int = 96
    save_every: int = 200
    log_every: int = 10
    keep: int = 2  # newest checkpoints kept beside the best


@dataclass
class EngineConfig:
    name: str = "auto"  # auto | torch | deepspeed
    zero_stage: int | None = None  # 0-3; None: 2 under DeepSpeed, nothing divided under plain torch
    offload: bool = False


@dataclass
class TrackingConfig:
    name: str = "none"  # none | wandb
    project: str = "jetspec-train"
    entity: str | None = None
    mode: str = "online"  # online | offline
    run_name: str | None = None


@dataclass
class DecodingConfig:
    max_new_tokens: int = 256
    drafting: bool = True
    shape: str = "tree"  # chain | tree | paths (the `paths` best paths of `depth` tokens, merged into one trie)
    nodes: int = 12  # drafted nodes sent to the target per round (anchor not counted)
    paths: int = 4  # shape=paths: how many
    shortlist: int = 256  # candidates per depth (at least `nodes` are taken)
    depth: int | None = None  # at most so many slots; None: the draft's block
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    seed: int = 0
    stop: list[str] = field(default_factory=list)
    # match: drafted tokens that equal the target's own choice are kept. ratio: accept with probability p_t / p_d
    # (chains sampled from the draft; the same distribution as plain sampling, not the same tokens)
    rule: str = "match"
    # Verification controller (METHODS 8). All of it is off by default: see docs/benchmarks.md for where it pays.
    policy: str = "lossless"  # lossless | trusting (keeps tokens against the target's choice; needs a certificate)
    stages: int = 0  # slots of a stage at which it decides to defer or to verify, 3..5; 0: no stages
    max_pending: int | None = None  # tokens that may wait for the target; None: the draft's block - 1; 0: never wait
    threshold: str = "auto"  # survival that a deferred stage needs, 0..1; auto: 0.85, under trusting at least certified
    floor: float = 0.1  # trusting: the target's probability that a kept token needs
    stream_unverified: bool = False  # trusting: hand tokens out before the target has seen them; then there is no floor
    verifier: bool = True  # judge drafted nodes with the bundle's verifier; false: by the draft's own probabilities
    prune: float = 0.0  # nodes with a smaller survival are not sent
    candidates: int | None = None  # nodes drafted and judged, of which at most `nodes` are sent; None: `nodes`
    scheduler: bool = False  # choose the number of nodes by cost and running pass rate, up to `nodes`
    utilisation: bool = False  # with the scheduler: its upper bound follows how busy the machine is
    cache: bool = False  # result cache: n-gram continuations as candidates, states of finished requests as prefixes
    cache_max_bytes: int = 256_000_000
    trace: str | None = None  # a file that records every decision as JSON lines


@dataclass
class ExportConfig:
    formats: list[str] = field(default_factory=lambda: ["bundle"])
    checkpoint: str = "best"  # best | last | a path
    force: bool = False
    target_name: str | None = None  # what foreign forms call the target (a hub id); None: target.name


@dataclass
class ForeignConfig:
    """A draft of another project for stage=import. All but ``path`` only where its folder leaves them open."""

    path: str | None = None  # the folder with its config.json
    target_layer_ids: list[int] | None = None  # taps, 0-based decoder layers
    mask: str | None = None  # causal | bidirectional
    norm_before_residual: bool | None = None  # EAGLE-3
    accept_keys: list[str] = field(default_factory=list)  # unknown configuration keys that are harmless


@dataclass
class CalibrateConfig:
    """stage=calibrate: what the verifier's probabilities are worth, and above which one a check may be skipped."""

    fit_prompts: int = 200  # of the split calibrate_fit, at most
    certify_prompts: int = 800  # of the split calibrate_certify, at most; 373 without an error are the least
    max_new_tokens: int = 96
    batch_size: int = 16
    stages: int = 3  # slots of a stage; a certificate is for this length alone
    risk: float = 0.008  # share of skipped checks that the target would not have passed, at most
    confidence: float = 0.95
    grid: int = 20  # thresholds tested, at most; strictest first, until one fails
    pattern_coverage: float = 0.95  # share of accepted stages that the usual attention pattern must hold
    seed: int = 0  # of the one stage per prompt that is tested


@dataclass
class EvaluateConfig:
    prompts: int = 12  # per domain
    max_new_tokens: int = 128
    warmup: int = 1
    repeats: int = 1  # how often each answer is timed; the median counts
    domains: list[str] | None = None  # None: every domain of the recipe's report split
    recipes: list[str] = field(default_factory=list)  # further suites: recipe names or YAML paths
    baselines: list[str] = field(default_factory=list)  # generate | prompt_lookup | assisted
    assistant: str | None = None  # the small draft of the assisted baseline: hub id or folder
    bundles: list[str] = field(default_factory=list)  # other bundles, measured in the same run
    # the same bundle with other decoding settings, name -> overrides of decoding.*: {chain: {shape: chain, nodes: 7}}
    variants: dict[str, Any] = field(default_factory=dict)
    fp32_prompts: int = 4  # prompts of the fp32 identity check, over all domains; at least one of each
    bootstrap: int = 2000
    cost_context: int = 256  # cached tokens before the forwards of the cost curve; 0 leaves the curve out
    # speedup against one condition at a time: context | batch | budget | temperature; each takes minutes
    curves: list[str] = field(default_factory=list)
    curve_prompts: int = 4  # prompts of every point of a curve
    replay: int = 3  # prompts shown token by token in the report
    run_code: bool = False  # run the model's code against a suite's tests, in a restricted process (recipes: scoring)
    verification: int = 4  # prompts per domain on which the verifier is judged, where there is one; 0: it is not


@dataclass
class AdaptConfig:
    """stage=adapt: a small adapter (LoRA) that teaches a bundle's draft, and its verifier, another domain.

    Data, packing, batch and optimiser are those of ``train``; what is set here differs from a training.
    """

    rank: int = 8
    alpha: float = 16.0  # the adapter's product is scaled by alpha / rank
    dropout: float = 0.0
    # linear layers of draft and verifier by the end of their name; the parent term's tables are not adapted
    modules: list[str] = field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "fc"]
    )
    verifier: bool = True  # also adapt the verifier where the bundle has one
    steps: int = 200
    learning_rate: float = 1e-3
    merge: bool = False  # also write a bundle with the adapter built in
    old_recipe: str | None = None  # what the bundle was trained on, to measure forgetting; None: as the bundle says
    prompts: int = 8  # per domain, of the report split, for the table before and after
    max_new_tokens: int = 96


@dataclass
class StandaloneConfig:
    """draft.kind=standalone: a small language model, distilled on its own drafts (GKD, arXiv 2306.13649)."""

    model: str | None = None  # hub id or folder of the model to start from; it must share the target's tokenizer
    revision: str | None = None
    prune_layers: int | None = None  # instead: start from so many of the target's own layers, evenly spread
    steps: int = 200
    batch_size: int = 4
    learning_rate: float = 1e-4
    warmup: float = 0.05  # share of all steps
    lmbda: float = (
        0.5  # share of batches that the draft answers itself (on-policy); the others are the target's answers
    )
    beta: float = 0.5  # 0: forward KL, 1: reverse KL, between: generalised Jensen-Shannon divergence
    temperature: float = 0.9  # of the draft's own answers
    max_new_tokens: int = 64  # of the draft's own answers
    sequence_length: int = 256  # longer samples are cut
    lora_rank: int = 0  # 0: all weights are trained
    lora_alpha: float = 16.0
    depth: int = 5  # tokens drafted per round
    save_every: int = 50


@dataclass
class DoctorConfig:
    json: str | None = None  # also write the findings to this file


@dataclass
class ClusterConfig:
    """Where stage=pipeline runs: here, or as jobs of a Slurm cluster (see slurm/README.md)."""

    name: str = "local"  # local | slurm
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    time: str = "24:00:00"  # limit of each job; a training that needs longer continues in the next attempt
    nodes: int = 1  # for training; every other stage runs on one
    gpus: int = 0  # per node; training uses them all, distill tasks and evaluate one, export none
    tasks_per_node: int | None = None  # of training; None: one per GPU
    cpus_per_task: int = 4
    memory: str | None = None  # per node, as sbatch takes it: 64G
    distill_tasks: int = 1  # array tasks among which the prompts are divided
    distill_parallel: int | None = None  # at most so many of them at once
    modules: list[str] = field(default_factory=list)  # module load ...
    setup: list[str] = field(
        default_factory=list
    )  # shell lines before python: source env/bin/activate, export HF_HOME=...
    container: str | None = None  # words before python: apptainer exec --nv jetspec.sif
    python: str | None = None  # None: the interpreter that submits
    options: list[str] = field(default_factory=list)  # further #SBATCH options: --exclusive
    signal_seconds: int = 180  # warning before the time limit; at least twice (step + checkpoint) and a minute
    requeues: int = 50  # attempts after preemptions and time limits
    hang_minutes: float = 30.0  # a training of which no rank moved for so long is ended and started again; 0: never
    offline: bool = True  # compute nodes do not reach the hub


@dataclass
class Config:
    stage: str = "pipeline"
    preset: str | None = None
    run_dir: str = "runs/default"
    seed: int = 0
    plan: bool = False
    shard: str = "0/1"
    bundle: str | None = None
    adapter: str | None = None  # stage=generate and evaluate: an adapter of this bundle (stage=adapt made it)
    prompt: str | None = None
    prompt_file: str | None = None
    reports: list[str] = field(default_factory=list)
    pipeline: list[str] = field(
        default_factory=lambda: ["distill", "negatives", "train", "calibrate", "export", "evaluate"]
    )
    target: TargetConfig = field(default_factory=TargetConfig)
    recipe: RecipeConfig = field(default_factory=RecipeConfig)
    distill: DistillConfig = field(default_factory=DistillConfig)
    budget: BudgetConfig = field(default_factory=BudgetConfig)
    draft: DraftConfig = field(default_factory=DraftConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    verifier: VerifierSettings = field(default_factory=VerifierSettings)
    select: SelectConfig = field(default_factory=SelectConfig)
    negatives: NegativesConfig = field(default_factory=NegativesConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    tracking: TrackingConfig = field(default_factory=TrackingConfig)
    decoding: DecodingConfig = field(default_factory=DecodingConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    foreign: ForeignConfig = field(default_factory=ForeignConfig)
    adapt: AdaptConfig = field(default_factory=AdaptConfig)
    standalone: StandaloneConfig = field(default_factory=StandaloneConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    cluster: ClusterConfig = field(default_factory=ClusterConfig)
    doctor: DoctorConfig = field(default_factory=DoctorConfig)


def load_config(arguments: Iterable[str] = ()) -> Config:
    """Compose conf/ with ``key=value`` arguments into a checked Config.

    Raises UserError, one line that names the key, its value and what is allowed. Imports neither
    torch nor transformers, creates no folder, and leaves the working directory alone.
    """
    sorted_arguments = config_loading.sort_arguments(list(arguments), Config)
    cfg = config_loading.build(Config, config_loading.compose(sorted_arguments))
    config_checks.check(cfg)
    return cfg


def to_dict(cfg: Any) -> dict[str, Any]:
    """A configuration, or a section of one, as plain nested dicts."""
    return dataclasses.asdict(cfg)


def identity_of(cfg: Config, keys: Iterable[str]) -> dict[str, Any]:
    """The settings that determine a stage's output: ``{dotted key: value}``, sections as nested dicts.

    For manifests; the order and the nesting do not matter there, only which values differ.
    """
    identity = {}
    for key in keys:
        value = config_checks.setting(cfg, key)
        identity[key] = to_dict(value) if dataclasses.is_dataclass(value) else value
    return identity
