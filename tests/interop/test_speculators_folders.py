"""Our forms against what speculators 0.9.0 itself writes, without the package: configurations and shapes recorded from
its own classes for a tiny target (6 layers, width 32, 64 tokens, taps after layers 0, 2 and 4).

``scripts/conformance.sh`` makes the same comparison with the package installed, and runs the drafts.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.foreign import Draft, TargetFacts, export_forms, lint, read_foreign
from tests.foreign_drafts import random_tensors, write_folder

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "speculators_0.9.0.json").read_text())
TARGET = TargetFacts(name="org/tiny-llama", hidden_size=32, vocab_size=64, num_layers=6)
# Which of its choices our export of the same draft changes on purpose, because vLLM reads them differently.
ON_PURPOSE = {"sliding_window_non_causal", "auto_map", "transformers_version", "architectures"}


def folder_of(kind: str, tmp_path: Path) -> Path:
    shapes = {name: tuple(shape) for name, shape in RECORDED[kind]["shapes"].items()}
    tensors = random_tensors({name: shape for name, shape in shapes.items() if name not in ("d2t", "t2d")})
    if "d2t" in shapes:
        tensors["d2t"] = torch.arange(shapes["d2t"][0])
        tensors["t2d"] = torch.arange(64) % 2 == 0
    return write_folder(tmp_path / kind, RECORDED[kind]["config"], tensors)


@pytest.mark.parametrize("kind", sorted(RECORDED))
def test_a_folder_of_the_package_is_read_and_written_again_with_the_same_names_shapes_and_settings(
    kind: str, tmp_path: Path
) -> None:
    source = folder_of(kind, tmp_path)
    draft = read_foreign(source, TARGET)
    assert draft.config["target_layer_ids"] == [0, 2, 4]
    out = Draft(draft.kind, draft.config, draft.tensors, draft.confidence, draft.confidence_with_parent)
    (written,) = export_forms(out, ["vllm"], tmp_path / "out", TARGET, lambda: {})
    assert not [finding for finding in lint(written.folder) if finding.severity == "error"]
    from safetensors.torch import load_file

    before, after = load_file(source / "model.safetensors"), load_file(written.folder / "model.safetensors")
    assert set(before) - set(after) <= {"embed_tokens.weight"} and not set(after) - set(before)
    assert all(torch.equal(before[name], after[name]) for name in after)
    recorded = RECORDED[kind]["config"]
    config = json.loads((written.folder / "config.json").read_text())
    assert set(recorded) - set(config) <= ON_PURPOSE
    for key in set(recorded) & set(config) - ON_PURPOSE - {"transformer_layer_config", "speculators_config"}:
        assert config[key] == recorded[key], key
    layers, theirs = config["transformer_layer_config"], recorded["transformer_layer_config"]
    settings = [key for key, value in theirs.items() if value is not None and key not in ("max_window_layers",)]
    for key in set(settings) - {"bos_token_id", "eos_token_id"}:
        assert layers[key] == theirs[key], key
    assert config["speculators_config"]["verifier"] == recorded["speculators_config"]["verifier"]
    methods = [frame["speculators_config"]["proposal_methods"][0] for frame in (config, recorded)]
    if draft.kind == "block":
        assert methods[0] == methods[1]
    else:
        assert methods[0].keys() == methods[1].keys()
