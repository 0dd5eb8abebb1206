"""The README.md of an exported form: what it is, what was assumed or forced, how to serve it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_train.artifacts.foreign.draft import TargetFacts
from jetspec_train.artifacts.foreign.expressing import DESCRIPTIONS


def write_card(
    form: str,
    kind: str,
    config: Mapping[str, Any],
    target: TargetFacts,
    *,
    notes: Sequence[str],
    forced: Sequence[str],
    tokens: int,
    beside: Sequence[str],
) -> str:
    """Markdown. ``forced``: inequalities that export.force overrode. ``beside``: files for the bundled decoder."""
    if kind == "eagle3":
        size, whole = config["draft_vocab_size"], config["vocab_size"]
        what = f"EAGLE-3 draft, {config['layers']} layer(s), draft vocabulary {size} of {whole}"
    else:
        what = f"{config['mask']} block of {config['block']} slots, {config['layout']} layout"
        what += f", parent term: {config['parent']}"
    lines = [
        f"# Draft model for {target.name}",
        "",
        f"- Form: {DESCRIPTIONS[form]}",
        f"- Draft: {what}",
        f"- Target: {target.name} ({target.architecture}, width {target.hidden_size}, {target.num_layers} layers)",
        f"- Taps: outputs of decoder layers {list(config['target_layer_ids'])}, counted from 0",
        "- Written by jetspec-train; provenance.json says from which run, data and code",
        "",
    ]
    if forced:
        lines += [
            "## This folder is NOT served as it was trained",
            "",
            "It was written with export.force=true although:",
            *(f"- {reason}" for reason in forced),
            "",
        ]
    if notes:
        lines += ["## Good to know", "", *(f"- {note}" for note in notes), ""]
    lines += ["## How to serve it", "", *_serving(form, kind, target, tokens), ""]
    if beside:
        lines += [
            "## Beside the form",
            "",
            f"`jetspec_train/` holds what this form has no place for: {', '.join(beside)}. Servers ignore it.",
            "",
        ]
    return "\n".join(lines)


def _serving(form: str, kind: str, target: TargetFacts, tokens: int) -> list[str]:
    if form == "vllm":
        method = "eagle3" if kind == "eagle3" else "METHOD"
        method_note = (
            [] if kind == "eagle3" else ["METHOD is the speculators_model_type of config.json (dflash or dspark)."]
        )
        return [
            "```",
            f"vllm serve {target.name} --speculative-config "
            f'\'{{"method":"{method}","model":"THIS_FOLDER","num_speculative_tokens":{tokens}}}\'',
            "```",
            *method_note,
            "`vllm serve THIS_FOLDER` alone works when the target above is a hub id.",
        ]
    if form == "eagle3":
        return [
            "```",
            f"python -m sglang.launch_server --model {target.name} --speculative-algorithm EAGLE3 "
            f"--speculative-draft-model-path THIS_FOLDER --speculative-num-steps {tokens}",
            "```",
        ]
    if form in ("dflash", "jetspec"):
        return [
            "```",
            f"python -m sglang.launch_server --model {target.name} --speculative-algorithm DFLASH "
            "--speculative-draft-model-path THIS_FOLDER",
            "```",
            'or with the published DFlash / JetSpec code, or in vLLM with `"method":"dflash"`.',
        ]
    return ["With DeepSpec's own evaluation loop, which loads `Qwen3DSparkModel` folders."]
