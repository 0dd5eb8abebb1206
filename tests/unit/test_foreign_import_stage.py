"""stage=import: a foreign folder becomes a bundle that generates and evaluates like our own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetspec_train.artifacts.bundle import read_bundle, read_meta
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import Draft, export_forms
from jetspec_train.config import Config, DecodingConfig, ForeignConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.foreign import target_facts
from jetspec_train.stages import load_stage
from tests import foreign_drafts as made
from tests.tiny import tiny_prompts, tiny_target, tiny_target_config


def configuration(folder: Path, run_dir: Path, **foreign: Any) -> Config:
    return Config(
        stage="import",
        run_dir=str(run_dir),
        target=tiny_target_config("llama"),
        foreign=ForeignConfig(path=str(folder), **foreign),
    )


@pytest.mark.parametrize("kind", ["block", "eagle3"])
def test_an_imported_draft_decodes_without_changing_the_text(kind: str, tmp_path: Path, capsys: Any) -> None:
    target = tiny_target("llama")
    if kind == "block":
        config = made.block_config(target_layer_ids=[0, 1, 2], mask="bidirectional")
        tensors = made.block_tensors(config)
    else:
        config = made.eagle3_config(target_layer_ids=[0, 1, 2], draft_vocab_size=150)
        tensors = made.eagle3_tensors(config)
    export_forms(Draft(kind, config, tensors), ["vllm"], tmp_path, target_facts(target), lambda: {})
    cfg = configuration(tmp_path / "vllm", tmp_path / "run")
    stage = load_stage("import")
    assert stage.plan(cfg)["reads"] == str(tmp_path / "vllm")
    stage.run(cfg)
    assert "lowered by one" in capsys.readouterr().out
    bundle = read_bundle(tmp_path / "run" / "export" / "bundle")
    assert bundle.config["kind"] == kind and bundle.meta["imported"]["assumptions"]
    prompts = tiny_prompts(2)
    plain = [g.tokens for g in Decoder(target).generate(prompts, max_new_tokens=6)]
    decoder = Decoder.from_bundle(bundle.path, target, DecodingConfig(nodes=5))
    assert [g.tokens for g in decoder.generate(prompts, max_new_tokens=6)] == plain
    stage.run(cfg)
    assert "nothing to do" in capsys.readouterr().out


def test_what_is_missing_is_said_before_anything_is_written(tmp_path: Path) -> None:
    stage = load_stage("import")
    with pytest.raises(UserError, match=r"needs foreign\.path="):
        stage.run(Config(stage="import", run_dir=str(tmp_path / "run")))
    with pytest.raises(UserError, match="is not a folder"):
        stage.run(configuration(tmp_path / "absent", tmp_path / "run"))
    folder = made.write_folder(tmp_path / "draft", made.zlab_config(hidden_size=64), {})
    with pytest.raises(UserError, match="made for a target of 12 layers"):
        stage.run(configuration(folder, tmp_path / "run"))
    assert not (tmp_path / "run" / "export").exists()
    with pytest.raises(UserError, match="stage=import"):
        read_meta(folder)


def test_a_run_with_a_trained_bundle_is_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run" / "export").mkdir(parents=True)
    (tmp_path / "run" / "export" / "manifest.json").write_text("{}")
    folder = made.write_folder(tmp_path / "draft", made.zlab_config(), {})
    with pytest.raises(UserError, match="run_dir of its own"):
        load_stage("import").run(configuration(folder, tmp_path / "run"))
