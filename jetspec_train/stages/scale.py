"""What a large run costs: GPU-hours, memory per GPU at each ZeRO stage, disk, wall time. Arithmetic, no measurement.

FLOPs follow from the shapes and count what this code computes; a test compares them with torch's own counter on a small
model. Turning FLOPs into time needs two shares of a device's peak that are assumptions, not measurements, and named as
such. ``python -m jetspec_train.stages.scale`` prints docs/scale.md.

    d width, L layers, H / J query and key-value heads, D head size, I inner width, V vocabulary, r rank of the parent
    term, T tokens of a packed sequence, A anchors per sequence, K slots per block, N GPUs, P trained parameters
"""

from __future__ import annotations

from dataclasses import dataclass

COMPUTE_SHARE = 0.35  # of peak FLOP/s, training and prefill; assumed
BANDWIDTH_SHARE = 0.6  # of peak memory bandwidth, generation; assumed


@dataclass(frozen=True)
class Shape:
    """A decoder-only model with gated MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    inner: int
    vocabulary: int
    tied: bool = False

    @property
    def layer_parameters(self) -> int:
        """Matrices of one decoder layer (norms are left out)."""
        projections = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return projections + 3 * self.hidden * self.inner

    @property
    def parameters(self) -> int:
        return self.layers * self.layer_parameters + self.hidden * self.vocabulary * (1 if self.tied else 2)

    @property
    def cache_bytes_per_token(self) -> int:
        """Keys and values in bf16."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True)
class Plan:
    """A run: the draft's own shape, and how it is trained."""

    layers: int = 2
    block: int = 8
    taps: int = 5
    parent_rank: int = 64
    sequence: int = 2048
    anchors: int = 256
    epochs: float = 1.0
    verifier_share: float = 0.06  # of the target's parameters; 0: no verifier
    judged_nodes: int = 24 * 8 * 4  # per sequence: blocks, slots, candidates at a slot
    answer_tokens: int = 800_000_000
    tokens_per_answer: int = 400
    tokens_per_prompt: int = 200


@dataclass(frozen=True)
class Device:
    """Public figures of a GPU: dense bf16 FLOP/s, memory and its bandwidth in bytes(/s)."""

    name: str
    flops: float
    memory: float
    bandwidth: float


QWEN3_8B = Shape(4096, 36, 32, 8, 128, 12288, 151_936)
LLAMA3_70B = Shape(8192, 80, 64, 8, 128, 28672, 128_256)
A100 = Device("A100 80 GB", 312e12, 80e9, 2.04e12)
H100 = Device("H100 SXM 80 GB", 989e12, 80e9, 3.35e12)
B200 = Device("B200 180 GB", 2250e12, 180e9, 7.7e12)


def target_flops(target: Shape, tokens: int, context: float) -> float:
    """A forward without lm_head over ``tokens`` that each attend to ``context`` columns."""
    return tokens * target.layers * (2 * target.layer_parameters + 4 * target.heads * target.head_dim * context)


def draft_parameters(target: Shape, plan: Plan) -> int:
    """Layers of the target's own shape, the fusion of the taps, and the parent term."""
    fusion = plan.taps * target.hidden * target.hidden
    return plan.layers * target.layer_parameters + fusion + 2 * plan.parent_rank * target.vocabulary


def verifier_parameters(target: Shape, plan: Plan) -> int:
    return int(plan.verifier_share * target.parameters)


def draft_flops(target: Shape, plan: Plan, *, tokens: int, slots: int, labelled: int) -> float:
    """Forward and backward of the draft over packed rows, and its loss.

    ``tokens``: positions that give context; ``slots``: all slots of all blocks, each attending to ``plan.sequence``
    context columns and its own block; ``labelled``: slots with a weight in the loss.
    """
    d, width = target.hidden, target.head_dim
    # Forward and weight gradient; the target below it needs none.
    fusion = 2 * 2 * plan.taps * d * d * tokens
    # Keys and values of the context: forward, and gradients of weight and input.
    context = 3 * plan.layers * 2 * d * 2 * target.kv_heads * width * tokens
    attention = 4 * target.heads * width * (plan.sequence + plan.block)
    body = 3 * plan.layers * (2 * target.layer_parameters + attention) * slots
    # lm_head for both sides and once back to the draft; the parent term forward and back twice.
    loss = (3 * 2 * d + 3 * 2 * plan.parent_rank) * target.vocabulary * labelled
    return fusion + context + body + loss


def training_flops(target: Shape, plan: Plan) -> dict[str, float]:
    """Per packed sequence, by part."""
    slots = plan.anchors * plan.block
    return {
        "target": target_flops(target, plan.sequence, plan.sequence),
        "draft": draft_flops(target, plan, tokens=plan.sequence, slots=slots, labelled=slots),
        "verifier": 6.0 * verifier_parameters(target, plan) * plan.judged_nodes,
    }


def sequences(plan: Plan) -> float:
    """Packed sequences over all epochs: answers with their prompts."""
    per_answer = 1 + plan.tokens_per_prompt / plan.tokens_per_answer
    return plan.epochs * plan.answer_tokens * per_answer / plan.sequence


def zero_bytes(trained: int, stage: int, gpus: int, *, offload: bool = False) -> float:
    """Weights (fp32), gradients, master weights and two moments per GPU, before activations and buckets.

    Stages 1-3 keep a divided fp32 master copy beside the weights that compute.
    """
    state = {0: 8.0, 1: 12.0 / gpus, 2: 12.0 / gpus, 3: 12.0 / gpus}[stage]
    weights = 4.0 / gpus if stage == 3 else 4.0
    gradients = 4.0 / gpus if stage >= 2 else 4.0
    return trained * (weights + gradients + (0.0 if offload and stage else state))


def activation_bytes(target: Shape, plan: Plan, rows: int = 1) -> float:
    """What the backward pass of the draft keeps for ``rows`` packed sequences, roughly, and the features."""
    slots = plan.anchors * plan.block
    kept = slots * plan.layers * (16 * target.hidden + 3 * target.inner) * 2
    features = plan.sequence * (plan.taps + 1) * target.hidden * 2
    chunk = 4 * 256 * target.vocabulary * 4
    return rows * (kept + features) + chunk


def generation_seconds(target: Shape, plan: Plan, device: Device, batch: int) -> tuple[float, float]:
    """GPU-seconds to read all prompts and to write all answers, ``batch`` at a time."""
    answers = plan.answer_tokens / plan.tokens_per_answer
    prefill = answers * target_flops(target, plan.tokens_per_prompt, plan.tokens_per_prompt / 2)
    context = plan.tokens_per_prompt + plan.tokens_per_answer / 2
    moved = 2 * target.parameters + batch * context * target.cache_bytes_per_token
    step = max(
        moved / (BANDWIDTH_SHARE * device.bandwidth), 2 * target.parameters * batch / (COMPUTE_SHARE * device.flops)
    )
    return prefill / (COMPUTE_SHARE * device.flops), plan.answer_tokens / batch * step


def largest_batch(target: Shape, plan: Plan, device: Device) -> int:
    """Rows whose cache fits beside the weights in nine tenths of the memory; at most 256, 0: the weights do not fit."""
    room = 0.9 * device.memory - 2 * target.parameters
    longest = plan.tokens_per_prompt + 2 * plan.tokens_per_answer
    return max(0, min(256, int(room / (longest * target.cache_bytes_per_token))))


def table(name: str, target: Shape, plan: Plan, device: Device, gpus: int) -> list[str]:
    """The Markdown section of one target on one kind of device."""
    draft, verifier = draft_parameters(target, plan), verifier_parameters(target, plan)
    trained = draft + verifier
    by_part = training_flops(target, plan)
    total = sum(by_part.values()) * sequences(plan)
    batch = largest_batch(target, plan, device)
    lines = [
        f"## {name} on {gpus} x {device.name}",
        "",
        f"Target {target.parameters / 1e9:.2f} B parameters ({2 * target.parameters / 1e9:.0f} GB in bf16); draft "
        f"{draft / 1e9:.2f} B, verifier {verifier / 1e9:.2f} B.",
        "",
        "| training, per packed sequence | TFLOP | share |",
        "| --- | --- | --- |",
    ]
    whole = sum(by_part.values())
    lines += [f"| {part} | {value / 1e12:.1f} | {value / whole:.0%} |" for part, value in by_part.items()]
    room = device.memory / 1e9
    base = 2 * target.parameters + activation_bytes(target, plan)
    lines += [
        "",
        f"| memory per GPU (of {room:.0f} GB) | ZeRO 0 | 1 | 2 | 3 | 2, offloaded |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    cells = [zero_bytes(trained, stage, gpus) for stage in range(4)] + [zero_bytes(trained, 2, gpus, offload=True)]
    lines.append("| trained weights, gradients, state | " + " | ".join(f"{c / 1e9:.1f} GB" for c in cells) + " |")
    fits = [f"{(base + c) / 1e9:.0f} GB{'' if base + c < 0.95 * device.memory else ' (too much)'}" for c in cells]
    lines.append("| with target and activations, one sequence | " + " | ".join(fits) + " |")
    seconds = total / (COMPUTE_SHARE * device.flops)
    lines += ["", "| stage | GPU-hours | wall time | disk |", "| --- | --- | --- | --- |"]
    if batch:
        prefill, writing = generation_seconds(target, plan, device, batch)
        hours = (prefill + writing) / 3600
        lines.append(
            f"| distill, {batch} rows at a time | {hours:,.0f} | {hours / gpus:,.1f} h | "
            f"{plan.answer_tokens * 18 / 1e9:.0f} GB |"
        )
    else:
        lines.append("| distill | the target does not fit on one device | | |")
    if 2 * target.parameters < 0.95 * device.memory:
        lines.append(
            f"| train, {sequences(plan):,.0f} sequences | {seconds / 3600:,.0f} | {seconds / 3600 / gpus:,.1f} h | "
            f"{6 * 12 * trained / 1e9:.0f} GB (6 checkpoints) |"
        )
    else:
        lines.append("| train | the target does not fit on one device | | |")
    lines.append(f"| export | 0 | minutes | {4 * trained / 1e9:.0f} GB |")
    cache = plan.answer_tokens * (1 + plan.tokens_per_prompt / plan.tokens_per_answer)
    cache *= (plan.taps + 1) * target.hidden * 2
    lines += ["", f"With `train.features=cache` the target's states would take {cache / 1e12:,.0f} TB, so: online.", ""]
    return lines


def document() -> str:
    """docs/scale.md."""
    plan = Plan()
    lines = [
        "# What the 800M-token run costs",
        "",
        "Written by `python -m jetspec_train.stages.scale > docs/scale.md`. FLOPs are counted from the shapes (and",
        "checked against torch's counter on a small model by a test). **Times are arithmetic, not measurements**: they",
        f"assume {COMPUTE_SHARE:.0%} of the peak FLOP/s in training and prefill, {BANDWIDTH_SHARE:.0%} of the memory",
        "bandwidth in generation. Nothing on this page was run on these devices. For your own configuration on your",
        "own machine, `stage=doctor` measures instead of assuming.",
        "",
        f"The run: {plan.answer_tokens / 1e6:,.0f} M answer tokens, {plan.tokens_per_answer} per answer after prompts",
        f"of {plan.tokens_per_prompt}; packed to {plan.sequence}; {plan.anchors} blocks of {plan.block} per sequence;",
        f"{plan.layers} draft layers, {plan.taps} taps, {plan.epochs:g} epoch; a verifier of {plan.verifier_share:.0%}",
        "of the target.",
        "",
        *table("Qwen3-8B", QWEN3_8B, plan, A100, 8),
        *table("Qwen3-8B", QWEN3_8B, plan, H100, 16),
        *table("A 70B target (shapes of Llama 3.1)", LLAMA3_70B, plan, H100, 32),
        *table("A 70B target (shapes of Llama 3.1)", LLAMA3_70B, plan, B200, 32),
        "## What follows",
        "",
        "- Every rank holds the whole target in this version. A 70B target in bf16 (141 GB) therefore needs devices of",
        "  180 GB; on 80 GB it cannot be trained at any ZeRO stage, because ZeRO divides only what is trained.",
        "- Weights that train are fp32 and multiply in bf16 under autocast: 4 bytes each where DeepSpeed's own bf16",
        "  mode takes 2. That is the price of one arithmetic, and one checkpoint, for both engines and all stages.",
        "- ZeRO 2 is the default. Stage 3 pays when draft and verifier together no longer fit, at the price of",
        "  bringing each layer together twice a step. Offload moves 12 bytes per parameter to the CPU.",
        "- Saving gathers the state on rank 0: 12 bytes per trained parameter of CPU memory on its node.",
        "",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(document(), end="")
