"""What a configuration will cost in disk, memory and time, estimated before anything runs.

Sizes follow from the target's configuration and are exact up to file overhead. Times rest on a
measurement of a second or two: the products of one decoder layer and of the lm_head, with the
configured batch, on this machine (the fastest of several tries, so that other work counts little).
They ignore what cannot be known before, such as how early answers end, and are right within a
factor of two or so.

    rows N, hidden d, layers L, vocabulary V
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import Config
from jetspec_train.stages import negatives

BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
SAMPLE_BYTES_PER_TOKEN = 12  # id, log-probability, entropy, margin, mask; compressed Parquet
OVERHEAD_OF_DECODING = 2.0  # attention, norms, cache and host work beside the products of one generation step
OVERHEAD_OF_TRAINING = 1.3
OVERHEAD_OF_JUDGING = 1.3
ADAM_BYTES = 16  # per trained parameter: fp32 weight, gradient, two moments
CHECKPOINT_BYTES = 12  # weight and two moments
PARALLEL_EFFICIENCY = 0.8
SECONDS_PER_MEASUREMENT = 0.4
MEASURED_ROWS = 128
PROMPT_TOKENS = 200  # of a sample, on average, where the target reads whole samples again
READABLE_RECIPE_BYTES = 50_000_000  # larger local recipes are not read just to be counted


@dataclass(frozen=True)
class Facts:
    """The sizes of target and draft that costs follow from; ``layer_parameters`` is of one decoder layer."""

    hidden_size: int
    layers: int
    vocab_size: int
    parameters: int
    layer_parameters: int
    kv_bytes_per_token: int
    dtype: str
    device: str
    draft_parameters: int
    taps: int
    verifier_parameters: int = 0

    @property
    def trained_parameters(self) -> int:
        return self.draft_parameters + self.verifier_parameters

    @property
    def feature_bytes_per_token(self) -> int:
        """Taps and post-final-norm state of one token, in bf16."""
        return (self.taps + 1) * self.hidden_size * 2


def facts_of(cfg: Config) -> Facts:
    """Read the target's configuration (not its weights) and count parameters on the meta device.

    Raises UserError when the target cannot be found or the draft does not fit it.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from jetspec_train.modeling.draft_config import resolve_draft_config
    from jetspec_train.modeling.draft_head import DraftHead
    from jetspec_train.modeling.eagle3 import Eagle3Head
    from jetspec_train.modeling.eagle3_training import resolve_eagle3_config
    from jetspec_train.modeling.verifier_config import parameter_count, resolve_verifier_config
    from jetspec_train.stages.training_drafts import EAGLE3
    from jetspec_train.stages.training_verifier import has_verifier
    from jetspec_train.targets.families import check_architecture, text_config
    from jetspec_train.targets.loading import pick_device, pick_dtype, resolve

    source = resolve(cfg.target)
    try:
        config = AutoConfig.from_pretrained(source.location, revision=source.revision, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise UserError(f"The configuration of target {cfg.target.name!r} cannot be read: {first}") from error
    check_architecture(config, cfg.target.name)
    text = text_config(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
        head: DraftHead | Eagle3Head
        if cfg.draft.kind == EAGLE3:
            head = Eagle3Head(resolve_eagle3_config(cfg.draft, config, draft_vocab_size=cfg.draft.vocabulary))
        else:
            head = DraftHead(resolve_draft_config(cfg.draft, config, mask_token_id=0))
    device = pick_device(cfg.target)
    dtype = pick_dtype(cfg.target, device)
    parameters = sum(p.numel() for p in model.parameters())
    judge = 0
    if has_verifier(cfg) and isinstance(head, DraftHead):
        judge = parameter_count(resolve_verifier_config(cfg.verifier, head.config, target_parameters=parameters))
    embedding = model.get_input_embeddings().weight.numel()
    tied = model.get_output_embeddings().weight is model.get_input_embeddings().weight
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    return Facts(
        hidden_size=text.hidden_size,
        layers=text.num_hidden_layers,
        vocab_size=text.vocab_size,
        parameters=parameters,
        layer_parameters=(parameters - embedding * (1 if tied else 2)) // text.num_hidden_layers,
        kv_bytes_per_token=2 * text.num_hidden_layers * heads * head_dim * BYTES[dtype],
        dtype=dtype,
        device=device,
        draft_parameters=head.trainable_parameters,
        taps=len(head.config.target_layer_ids),
        verifier_parameters=judge,
    )


def answer_tokens(cfg: Config) -> int | None:
    """The answer tokens to expect at most; None when nothing bounds them.

    Local recipes are counted by reading them, as stage=distill plans; a recipe on the hub is bounded by
    ``recipe.prompts``, since nothing is downloaded here.
    """
    prompts = _prompts(cfg)
    bounds = [cfg.budget.tokens]
    if prompts is not None:
        bounds.append(prompts * cfg.distill.samples_per_prompt * cfg.distill.max_new_tokens)
    for limit in (cfg.budget.generated_tokens, cfg.train.tokens):
        if limit is not None:
            bounds.append(limit)
    return min(bounds) if len(bounds) > 1 else None


def _prompts(cfg: Config) -> int | None:
    """How many prompts stage=distill would send, None where that cannot be known in a moment."""
    from jetspec_train.data.prompts import iterate_prompts
    from jetspec_train.data.recipes import load_recipe, local_files

    try:
        recipe = load_recipe(cfg.recipe)
        local = [source for source in recipe.sources if source.type in ("jsonl", "parquet")]
        size = sum(file.stat().st_size for source in local for file in local_files(source))
    except UserError:  # said by stage=distill, with what to do about it
        return cfg.recipe.prompts
    if any(source.type == "hub" for source in recipe.sources) or size > READABLE_RECIPE_BYTES:
        return cfg.recipe.prompts
    return sum(1 for _ in iterate_prompts(recipe, tuple(cfg.distill.splits)))


def disk_bytes(cfg: Config, facts: Facts) -> dict[str, int]:
    """Bytes on disk by stage; what depends on an unknown number of tokens is left out."""
    tokens = answer_tokens(cfg)
    kept = cfg.train.keep + 3  # beside the newest: the best, the one being written, the bundle
    needed = {
        "train": kept * CHECKPOINT_BYTES * facts.trained_parameters,
        "export": 4 * facts.trained_parameters,
        "evaluate": 5_000_000,
    }
    if tokens is not None:
        needed["distill"] = tokens * SAMPLE_BYTES_PER_TOKEN
        if negatives.is_used(cfg):
            needed["negatives"] = negative_samples(cfg, tokens) * cfg.negatives.per_sample * negatives.BYTES_PER_PATH
        if cfg.train.features == "cache":
            needed["features"] = tokens * facts.feature_bytes_per_token
    return needed


def negative_samples(cfg: Config, tokens: int) -> int:
    """How many samples stage=negatives works on, if every one of them is as long as it may be."""
    there = math.ceil(tokens / cfg.distill.max_new_tokens)
    return there if cfg.negatives.samples is None else min(there, cfg.negatives.samples * len(cfg.negatives.splits))


def _negatives_seconds(cfg: Config, facts: Facts, tokens: int, timed: Callable[[Facts, int], float]) -> float:
    """The target reads each sample once, then the paths behind it, and its head looks at every place of the answers."""
    per_sample = PROMPT_TOKENS + cfg.distill.max_new_tokens + cfg.negatives.per_sample * negatives.path_tokens(cfg)
    rows = min(MEASURED_ROWS, cfg.negatives.batch_size * per_sample)  # few enough that the head is timed with them
    return negative_samples(cfg, tokens) * per_sample / rows * timed(facts, rows) * OVERHEAD_OF_JUDGING


def estimate(cfg: Config, facts: Facts, timed: Callable[[Facts, int], float]) -> dict[str, Any]:
    """Costs by stage: ``{"disk_bytes": {...}, "memory_bytes": {...}, "seconds": {...}, "tokens": ...}``.

    ``timed(facts, rows)``: seconds of one target forward over so many rows (``measure_forward``).
    Seconds are None where the number of tokens is not known.
    """
    tokens = answer_tokens(cfg)
    width = BYTES[facts.dtype]
    batch, limit = cfg.distill.batch_size, cfg.distill.max_new_tokens
    context = cfg.distill.max_prompt_tokens + limit
    features_per_token = facts.feature_bytes_per_token
    rows = cfg.train.sequences * cfg.train.sequence_length // cfg.train.accumulation
    slots = cfg.train.anchors * cfg.draft.block * cfg.train.sequences // cfg.train.accumulation
    chunk = cfg.objective.chunk_anchors * cfg.draft.block * facts.vocab_size
    disk = disk_bytes(cfg, facts)
    weights = facts.parameters * width
    memory = {
        "distill": weights + batch * context * facts.kv_bytes_per_token,
        "train": weights
        + ADAM_BYTES * facts.trained_parameters
        + rows * features_per_token
        + 24 * slots * facts.hidden_size * cfg.draft.layers * 4
        + 3 * chunk * 4,
        "evaluate": weights * (3 if cfg.evaluate.fp32_prompts and width == 2 else 1) + facts.draft_parameters * width,
    }
    seconds: dict[str, float | None] = {"distill": None, "train": None}
    if tokens is not None:
        seconds["distill"] = tokens / batch * timed(facts, batch) * OVERHEAD_OF_DECODING
        steps = cfg.train.steps or max(
            1.0, tokens * cfg.train.epochs / (cfg.train.sequences * cfg.train.sequence_length)
        )
        forward = timed(facts, rows)
        head_share = facts.vocab_size * facts.hidden_size + facts.draft_parameters
        draft = forward * 4 * slots * head_share / (rows * facts.parameters)  # forward, twice as much backward, labels
        # Nodes of a judged block: the candidates of the slots on its path, which is about half as long as the block.
        nodes = cfg.verifier.blocks * cfg.train.sequences * cfg.draft.block * (1 + cfg.verifier.siblings) // 2
        judge = forward * 3 * nodes * facts.verifier_parameters / (rows * facts.parameters * cfg.train.accumulation)
        seconds["train"] = steps * cfg.train.accumulation * (forward + draft + judge) * OVERHEAD_OF_TRAINING
        if negatives.is_used(cfg):
            seconds["negatives"] = _negatives_seconds(cfg, facts, tokens, timed)
            read = cfg.negatives.batch_size * (PROMPT_TOKENS + limit)
            memory["negatives"] = weights + read * (facts.kv_bytes_per_token + 4 * facts.hidden_size)
    if cfg.verifier.enabled and cfg.draft.kind == "block":
        # Each prompt of the fit split is answered twice, each of the certify split once and, for a threshold that
        # passes and the one that fails, twice more; with a draft that is right half of the time.
        settings = cfg.calibrate
        decoded = (2 * settings.fit_prompts + 3 * settings.certify_prompts) * settings.max_new_tokens
        seconds["calibrate"] = decoded / settings.batch_size * timed(facts, settings.batch_size) * OVERHEAD_OF_DECODING
    domains = len(cfg.evaluate.domains) if cfg.evaluate.domains else 6
    answers = cfg.evaluate.prompts * domains * cfg.evaluate.max_new_tokens * cfg.evaluate.repeats
    seconds["evaluate"] = answers * timed(facts, 1) * OVERHEAD_OF_DECODING * (1.7 + len(cfg.evaluate.baselines))
    return {
        "tokens": tokens,
        "feature_bytes_per_token": features_per_token,
        "flops": {
            "distill": 2 * facts.parameters * tokens if tokens else None,
            "train_per_step": 2 * facts.parameters * cfg.train.sequences * cfg.train.sequence_length
            + 8 * cfg.train.accumulation * slots * (facts.vocab_size * facts.hidden_size + facts.draft_parameters),
        },
        "disk_bytes": disk,
        "memory_bytes": memory,
        "seconds": seconds,
    }


def measure_forward(facts: Facts, rows: int) -> float:
    """Seconds of the products of one target forward over ``rows`` tokens, measured on one layer and the lm_head.

    Random weights of one layer's size, several of them where that is cheap, so that a layer's weights
    do not stay in the processor's cache as they would not in a real model. Long inputs are measured on
    fewer rows and scaled. On a CPU one thread is timed and all are counted: threads that wait for each
    other would measure whatever else is running.
    """
    import torch

    if facts.device != "cpu":
        return _measure(facts, rows)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measure(facts, rows) / max(1.0, PARALLEL_EFFICIENCY * threads)
    finally:
        torch.set_num_threads(threads)


def _measure(facts: Facts, rows: int) -> float:
    import torch

    dtype, device = getattr(torch, facts.dtype), torch.device(facts.device)
    measured_rows = min(rows, MEASURED_ROWS)
    width = facts.hidden_size
    inner = max(1, facts.layer_parameters // (2 * width))
    copies = max(1, min(4, facts.layers, (256 << 20) // max(1, facts.layer_parameters * BYTES[facts.dtype])))
    with torch.inference_mode():
        up = [torch.randn(inner, width, dtype=dtype, device=device) for _ in range(copies)]
        down = [torch.randn(width, inner, dtype=dtype, device=device) for _ in range(copies)]
        head = torch.randn(facts.vocab_size, width, dtype=dtype, device=device)
        x_Nd = torch.randn(measured_rows, width, dtype=dtype, device=device)

        def layers() -> None:
            for first, second in zip(up, down):
                torch.nn.functional.linear(torch.nn.functional.linear(x_Nd, first), second)

        def output() -> None:
            torch.nn.functional.linear(x_Nd, head)

        per_layer = _fastest_seconds(layers, device) / copies
        # While training, the target's head runs at the anchors' slots only, which are counted with the draft.
        per_head = _fastest_seconds(output, device) if rows <= MEASURED_ROWS else 0.0
    return (per_layer * facts.layers + per_head) * rows / measured_rows


def _fastest_seconds(work: Callable[[], None], device: Any) -> float:
    """The fastest of several tries: what the machine does when nothing else runs."""
    import torch

    def once() -> float:
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun

    once()
    times: list[float] = []
    deadline = time.perf_counter() + SECONDS_PER_MEASUREMENT
    while len(times) < 3 or (time.perf_counter() < deadline and len(times) < 50):
        times.append(once())
    return min(times)


def disk_needed(by_stage: Mapping[str, int], run_dir: str | Path) -> int:
    """Bytes that a whole run still adds below ``run_dir``; what is there already is not counted twice."""
    total = sum(by_stage.values())
    folder = Path(run_dir)
    there = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()) if folder.is_dir() else 0
    return max(0, total - there)
