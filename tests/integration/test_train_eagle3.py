"""EAGLE-3 through every stage on a tiny target's own answers: distill, train, export, generate, evaluate."""

from __future__ import annotations

import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.__main__ import main
from jetspec_train.artifacts.bundle import read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import (
    Config,
    DecodingConfig,
    DistillConfig,
    DraftConfig,
    EvaluateConfig,
    ExportConfig,
    ObjectiveConfig,
    RecipeConfig,
    TrainConfig,
    VerifierSettings,
    load_config,
)
from jetspec_train.data.samples import load_samples
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.modeling.draft_config import preset_settings
from jetspec_train.stages import distill, evaluate, export, train
from jetspec_train.training import loop
from jetspec_train.training.checkpoint import find_checkpoint, load_tensors
from jetspec_train.training.tracking import read_metrics
from tests.tiny import tiny_prompts, tiny_target, tiny_target_config

VOCABULARY = 120


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Config:
    folder = tmp_path_factory.mktemp("eagle3")
    rows = [{"question": f"What is {n} and {n * 7 % 13}, " + "or so " * (n % 5) + "?"} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    shares = {"train": 0.7, "dev": 0.15, "report": 0.15}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": shares, "sources": [source]}))
    cfg = Config(
        run_dir=str(folder / "run"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(folder / "recipe.yaml")),
        distill=DistillConfig(max_new_tokens=24, batch_size=8),
        draft=DraftConfig(**preset_settings("eagle3"), block=4, vocabulary=VOCABULARY),
        objective=ObjectiveConfig(ce=0.2, l1=0.0, kl=0.8, gamma=4.4814),
        verifier=VerifierSettings(enabled=False),
        train=TrainConfig(
            steps=8,
            sequence_length=128,
            sequences=2,
            anchors=8,
            learning_rate=3e-3,
            precision="float32",
            eval_every=4,
            eval_prompts=2,
            eval_max_new_tokens=8,
            save_every=3,
            log_every=2,
        ),
        decoding=DecodingConfig(nodes=4, shortlist=4),
        export=ExportConfig(formats=["bundle", "eagle3", "vllm"], target_name="org/tiny"),
        evaluate=EvaluateConfig(prompts=2, max_new_tokens=8, bootstrap=100, cost_context=0, replay=1),
    )
    distill.run(cfg)
    return cfg


def fresh(distilled: Config, folder: Path, **changes: Any) -> Config:
    shutil.copytree(Path(distilled.run_dir) / "distill", folder / "run" / "distill")
    return replace(distilled, run_dir=str(folder / "run"), train=replace(distilled.train, **changes))


def tensors_of(cfg: Config) -> dict[str, torch.Tensor]:
    return load_tensors(find_checkpoint(Path(cfg.run_dir) / "train", "last"))


@pytest.fixture(scope="module")
def trained(distilled: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    cfg = fresh(distilled, tmp_path_factory.mktemp("trained"))
    train.run(cfg)
    return cfg


def test_training_learns_counts_and_covers(trained: Config) -> None:
    folder = Path(trained.run_dir) / "train"
    records = read_metrics(folder / "metrics.jsonl")
    losses = [record["loss"] for record in records if record["kind"] == "train"]
    assert losses[-1] < losses[0]
    assert [record["step"] for record in records if record["kind"] == "evaluation"] == [4, 8]
    manifest = read_manifest(folder)
    assert manifest is not None
    store = load_samples(Path(trained.run_dir) / "distill", "train")
    said = set((tensors_of(trained)["draft.d2t"] + torch.arange(VOCABULARY)).tolist())
    assert len(said) == VOCABULARY and set(tiny_target("llama").eos_ids) <= said
    answers = [
        token
        for start, prompt, end in zip(store.starts[:-1], store.prompt_lengths, store.starts[1:])
        for token in store.tokens[start + prompt : end].tolist()
    ]
    share = sum(token in said for token in answers) / len(answers)
    assert manifest.counts["draft_vocabulary_coverage"] == pytest.approx(share)


def test_the_bundle_decodes_losslessly_and_other_forms_stand_beside_it(
    trained: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    export.run(trained)
    folder = Path(trained.run_dir) / "export"
    bundle = read_bundle(folder / "bundle")
    assert bundle.config["kind"] == "eagle3" and "EAGLE-3" in bundle.meta["architecture"]
    weights = sum(t.numel() for t in bundle.tensors.values() if t.is_floating_point())
    assert bundle.meta["draft"]["trainable_parameters"] == weights
    assert (folder / "eagle3" / "model.safetensors").is_file() and (folder / "vllm" / "config.json").is_file()
    target, prompts = tiny_target("llama"), tiny_prompts(3)
    plain = Decoder(target, None, DecodingConfig(drafting=False)).generate(prompts, max_new_tokens=12)
    for shape in ("chain", "tree"):
        decoder = Decoder.from_bundle(folder / "bundle", settings=DecodingConfig(shape=shape, nodes=6), target=target)
        found = decoder.generate(prompts, max_new_tokens=12)
        assert [g.tokens for g in found] == [g.tokens for g in plain]
    capsys.readouterr()
    words = ["stage=generate", f"bundle={folder / 'bundle'}", "prompt=What is 3?", "target.dtype=float32"]
    assert main([*words, "decoding.max_new_tokens=8"]) == 0
    assert "acceptance length" in capsys.readouterr().err


def test_evaluation_measures_it_beside_plain_decoding(trained: Config) -> None:
    export.run(trained)
    evaluate.run(trained)
    report = json.loads((Path(trained.run_dir) / "evaluate" / "report.json").read_text())
    assert "EAGLE-3" in report["draft"]["architecture"]
    assert report["draft"]["config"]["draft_vocab_size"] == VOCABULARY


def test_a_stopped_training_continues_bit_for_bit(
    distilled: Config, trained: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = fresh(distilled, tmp_path, features="cache")  # in fp32 the cached states are those of the forward, nearly
    whole = fresh(distilled, tmp_path / "whole", features="cache")
    train.run(whole)
    original = loop.add_sums
    calls: list[int] = []

    def stop_in_step_5(window: dict[str, Any], sums: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(signal.SIGTERM)
        original(window, sums)

    monkeypatch.setattr(loop, "add_sums", stop_in_step_5)
    with pytest.raises(SystemExit) as stopped:
        train.run(cfg)
    assert stopped.value.code == 85
    train.run(cfg)
    assert len(calls) == 8
    for name, value in tensors_of(cfg).items():
        assert torch.equal(value, tensors_of(whole)[name]), name


def test_the_accumulation_split_does_not_move_the_weights(distilled: Config, trained: Config, tmp_path: Path) -> None:
    cfg = fresh(distilled, tmp_path, accumulation=2)
    train.run(cfg)
    for name, value in tensors_of(cfg).items():
        torch.testing.assert_close(value, tensors_of(trained)[name], rtol=0, atol=2e-4, msg=name)


def test_what_cannot_work_is_refused_in_one_line(distilled: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"verifier\.enabled=true with draft\.kind=eagle3.*verifier=none"):
        train.run(replace(distilled, verifier=VerifierSettings()))
    with pytest.raises(UserError, match=r"verifier\.enabled=true with draft\.kind=eagle3"):
        train.plan(replace(distilled, verifier=VerifierSettings()))
    for size in (300, 0):
        cfg = fresh(distilled, tmp_path / str(size))
        with pytest.raises(UserError, match=f"draft.vocabulary={size}: must be below the target's"):
            train.run(replace(cfg, draft=replace(cfg.draft, vocabulary=size)))
    for words, message in (
        (["draft=jetspec", "draft.vocabulary=100"], "draft.vocabulary=100 with draft.kind=block"),
        (["draft=eagle3", "draft.vocabulary=0"], "draft.vocabulary=0: must be at least 1"),
        (["draft.kind=eagle3"], "draft.clean_prefix=0.25 with draft.kind=eagle3"),
    ):
        with pytest.raises(UserError, match=message):
            load_config(words)
    cfg = load_config(["draft=eagle3", "objective=eagle3", "verifier=none"])
    assert (cfg.draft.kind, cfg.draft.block, cfg.draft.taps) == ("eagle3", 7, 3)
