"""Loads every exported speculators-form folder with the speculators package: configuration, names, shapes, forward.

Runs in an environment of its own and imports nothing of this project.

    python check_speculators.py --target FOLDER --drafts FOLDER --out result.json
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", required=True)
    parser.add_argument("--drafts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    results = {
        f"{path.parent.parent.name}/{path.parent.name}": check(path.parent, options.target)
        for path in sorted(options.drafts.glob("*/vllm/config.json"))
    }
    options.out.write_text(json.dumps(results, indent=2))
    print(json.dumps(results, indent=2))


def check(folder: Path, target: str) -> dict[str, Any]:
    """What the package makes of one folder. ``same``: it wrote the tensors back as it had read them."""
    from speculators import SpeculatorModel, SpeculatorModelConfig

    written = json.loads((folder / "config.json").read_text())
    with tempfile.TemporaryDirectory() as temporary:
        copy = Path(temporary) / "draft"
        shutil.copytree(folder, copy)
        # the package reads the target's weights, so the name must lead to them
        written["speculators_config"]["verifier"]["name_or_path"] = target
        (copy / "config.json").write_text(json.dumps(written))
        config = SpeculatorModelConfig.from_pretrained(copy)
        kept = {
            key: value
            for key, value in written.items()
            if key not in ("transformer_layer_config", "speculators_config", "dtype", "jetspec_train")
        }
        changed = {
            key: getattr(config, key, None) for key, value in kept.items() if getattr(config, key, None) != value
        }
        config.transformer_layer_config._attn_implementation = "eager"
        model = SpeculatorModel.from_pretrained(copy, config=config).float().eval()
        if hasattr(model, "load_verifier_weights"):
            model.load_verifier_weights()
    tensors = load_file(folder / "model.safetensors")
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    from_target = ("embed_tokens.weight", "verifier_norm.weight", "verifier_lm_head.weight", "lm_head.weight")
    missing = sorted(name for name in own if name not in tensors and name not in from_target and "inv_freq" not in name)
    unknown = sorted(name for name in tensors if name not in own)
    shapes = sorted(name for name in tensors if name in own and own[name].shape != tensors[name].shape)
    values = sorted(
        name for name, tensor in tensors.items() if name in own and not torch.equal(own[name].detach().cpu(), tensor)
    )
    return {
        "class": type(model).__name__,
        "config_changed": changed,
        "missing": missing,
        "unknown": unknown,
        "shapes": shapes,
        "values": values,
        "loss": forward(model, written),
    }


@torch.no_grad()
def forward(model: Any, written: dict[str, Any]) -> float:
    """The package's own training forward on random features; a finite loss means that it ran."""
    torch.manual_seed(0)
    layers, length = written["transformer_layer_config"], 64
    taps = written.get("aux_hidden_state_layer_ids") or written["eagle_aux_hidden_state_layer_ids"]
    inputs = {
        "hidden_states": torch.randn(1, length, len(taps) * layers["hidden_size"]),
        "input_ids": torch.randint(layers["vocab_size"], (1, length)),
        "loss_mask": torch.ones(1, length),
        "verifier_last_hidden_states": torch.randn(1, length, layers["hidden_size"]),
        "document_ids": torch.zeros(1, length, dtype=torch.long),
    }
    if "block_size" in written:
        inputs["max_anchors"] = 4
    from speculators.losses import resolve_loss_config

    inputs["loss_config"] = resolve_loss_config("ce", "eager")
    if written["speculators_model_type"] == "dspark":
        inputs["tv_loss_fn"] = resolve_loss_config("tv", "eager")["tv"][0]  # the default needs Triton
    _, loss, _ = model(**inputs)
    return round(float(loss), 4)


if __name__ == "__main__":
    main()
