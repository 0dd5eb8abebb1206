"""stage=train with a verifier: beside the draft, after it, resumed, exported; and its figures on held-out rounds."""

from __future__ import annotations

import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetspec_train.artifacts.bundle import read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import Config
from jetspec_train.data.negatives.rows import KINDS
from jetspec_train.decoding.bundles import verifier_from_bundle
from jetspec_train.stages import export, negatives, train
from jetspec_train.stages.training_figures import figures, survivals
from jetspec_train.training import loop
from jetspec_train.training.checkpoint import (
    find_checkpoint,
    load_draft_tensors,
    load_tensors,
    load_verifier_config,
    load_verifier_tensors,
)
from jetspec_train.training.tracking import read_metrics
from jetspec_train.training.verifier_rounds import JudgedSlots
from tests.integration.test_train_stage import distilled, folder_of, fresh, numbers  # noqa: F401


def verifying(cfg: Config, **changes: Any) -> Config:
    return replace(cfg, verifier=replace(cfg.verifier, **changes))


@pytest.fixture(scope="module")
def trained(distilled: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:  # noqa: F811
    """Draft and verifier trained together; every sample teaches the draft."""
    cfg = verifying(fresh(distilled, tmp_path_factory.mktemp("both")), holdout=0.0)
    train.run(cfg)
    return cfg


@pytest.fixture(scope="module")
def draft_only(distilled: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:  # noqa: F811
    cfg = fresh(distilled, tmp_path_factory.mktemp("draft-only"), only="draft")
    train.run(cfg)
    return cfg


def test_what_a_training_with_a_verifier_leaves(trained: Config) -> None:
    checkpoint = find_checkpoint(folder_of(trained), "best")
    config, weights = load_verifier_config(checkpoint), load_verifier_tensors(checkpoint)
    assert config is not None and config["mode"] == "match_greedy" and config["block"] == 4
    manifest = read_manifest(folder_of(trained))
    assert manifest is not None
    assert manifest.counts["verifier_parameters"] == sum(w.numel() for w in weights.values())
    assert any(name.endswith(f"{checkpoint.name}/verifier.json") for name in manifest.outputs)
    records = read_metrics(folder_of(trained) / "metrics.jsonl")
    learnt = [r for r in records if r["kind"] == "train"]
    for name in ("verifier/correctness_bce", "verifier/confidence_bce", "verifier/prior", "verifier/accuracy"):
        assert all(record[name] is not None for record in learnt), name
    assert learnt[-1]["verifier/correctness_bce"] < learnt[0]["verifier/correctness_bce"]
    measured = [r["verifier"] for r in records if r["kind"] == "evaluation"]
    assert len(measured) == 2 and measured[-1]["judged"] > 0
    assert set(measured[-1]["baselines"]) == {"probability", "margin", "entropy"}
    for head in ("correctness", "confidence"):
        assert {"auroc", "auprc_reject", "accuracy", "balanced_accuracy", "ece", "depth", "domain"} <= set(
            measured[-1][head]
        )


def test_the_draft_is_the_one_that_trains_alone(trained: Config, draft_only: Config) -> None:
    """Detached, nothing held out: the same weights and the same figures to the last bit."""
    both, alone = (load_draft_tensors(find_checkpoint(folder_of(c), "last")) for c in (trained, draft_only))
    assert both.keys() == alone.keys()
    for name, value in alone.items():
        assert torch.equal(value, both[name]), name
    assert not load_verifier_tensors(find_checkpoint(folder_of(draft_only)))
    for one, other in zip(numbers(draft_only), numbers(trained), strict=True):
        assert one == {name: value for name, value in other.items() if not name.startswith("verifier")}


def stop_in_step(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    original, calls = loop.add_sums, []

    def counting(window: dict[str, Any], sums: Any) -> None:
        calls.append(1)
        if len(calls) == number:
            signal.raise_signal(signal.SIGTERM)
        original(window, sums)

    monkeypatch.setattr(loop, "add_sums", counting)


def test_a_verifier_on_a_frozen_draft_continues_exactly_and_leaves_the_draft_alone(
    draft_only: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    init = str(find_checkpoint(folder_of(draft_only), "best"))

    def config(name: str, **changes: Any) -> Config:
        cfg = fresh(draft_only, tmp_path / name, only="verifier", init=init, **changes)
        return verifying(cfg, holdout=0.5)

    whole = config("whole")
    train.run(whole)
    assert "learned with verifier.holdout=0.0" in capsys.readouterr().out
    folder = Path(whole.run_dir) / "verifier"
    last = find_checkpoint(folder, "last")
    for name, value in load_draft_tensors(init).items():
        assert torch.equal(load_draft_tensors(last)[name], value)
    records = [r for r in read_metrics(folder / "metrics.jsonl") if r["kind"] == "evaluation"]
    best = max(records, key=lambda r: r["score"])
    assert find_checkpoint(folder, "best").name == f"step-{best['step']:06d}"
    assert len({r["chain"] for r in records}) == 1

    cfg = config("stopped", features="cache")  # the cached states are the online ones on a tiny fp32 target
    stop_in_step(5, monkeypatch)
    with pytest.raises(SystemExit):
        train.run(cfg)
    monkeypatch.undo()
    train.run(cfg)
    stopped = find_checkpoint(Path(cfg.run_dir) / "verifier", "last")
    for name, value in load_tensors(last).items():
        torch.testing.assert_close(load_tensors(stopped)[name], value, rtol=0, atol=2e-3, msg=name)

    online = config("again")
    stop_in_step(3, monkeypatch)
    with pytest.raises(SystemExit):
        train.run(online)
    monkeypatch.undo()
    train.run(online)
    for name, value in load_tensors(find_checkpoint(Path(online.run_dir) / "verifier", "last")).items():
        assert torch.equal(value, load_tensors(last)[name]), name


def test_a_later_verifier_is_exported_with_its_draft_and_left_out_with_another(
    draft_only: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = fresh(draft_only, tmp_path)
    shutil.copytree(folder_of(draft_only), folder_of(cfg))
    export.run(cfg)
    bundle = read_bundle(Path(cfg.run_dir) / "export" / "bundle")
    assert bundle.config["verifier"] is None and verifier_from_bundle(bundle) is None

    later = replace(cfg, train=replace(cfg.train, only="verifier", steps=2))
    train.run(later)
    export.run(later)
    bundle = read_bundle(Path(cfg.run_dir) / "export" / "bundle")
    found = verifier_from_bundle(bundle)
    weights = load_verifier_tensors(find_checkpoint(Path(cfg.run_dir) / "verifier", "best"))
    assert found is not None
    for name, value in found.state_dict().items():
        assert torch.equal(value, weights[name]), name
    facts = bundle.meta["verifier"]
    assert facts["parameters"] == sum(w.numel() for w in weights.values())
    assert facts["ratio_with_draft"] > facts["ratio_to_target"] > 0
    assert "verifier" in (bundle.path / "README.md").read_text()

    shutil.rmtree(folder_of(cfg))
    again = replace(cfg, seed=5, train=replace(cfg.train, steps=2))
    train.run(again)
    capsys.readouterr()
    export.run(again)
    assert "judges another draft" in capsys.readouterr().out
    assert read_bundle(Path(cfg.run_dir) / "export" / "bundle").config["verifier"] is None


def test_a_verifier_that_does_not_fit_its_bundle_is_refused(trained: Config, tmp_path: Path) -> None:
    cfg = fresh(trained, tmp_path)
    shutil.copytree(folder_of(trained), folder_of(cfg))
    export.run(cfg)
    bundle = read_bundle(Path(cfg.run_dir) / "export" / "bundle")
    assert verifier_from_bundle(bundle) is not None
    tensors = dict(bundle.tensors)
    del tensors["verifier.score.weight"]
    with pytest.raises(UserError, match=r"score\.weight"):
        verifier_from_bundle(replace(bundle, tensors=tensors))
    other = {**bundle.config, "verifier": {**bundle.config["verifier"], "draft_hidden_size": 64}}
    with pytest.raises(UserError, match=r"width 64\b.*\bwidth 48"):
        verifier_from_bundle(replace(bundle, config=other))


def test_stored_negatives_are_judged_with_their_samples_and_are_part_of_the_identity(
    distilled: Config,  # noqa: F811
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cfg = fresh(distilled, tmp_path, steps=3, eval_prompts=0)
    without = replace(cfg, run_dir=str(tmp_path / "without"))
    shutil.copytree(Path(cfg.run_dir) / "distill", Path(without.run_dir) / "distill")
    negatives.run(cfg)
    train.run(cfg)
    assert "stored paths" in capsys.readouterr().out
    record = read_metrics(folder_of(cfg) / "metrics.jsonl", "train")[-1]
    assert record["verifier/stored/bce"] > 0
    assert any(record[f"verifier/stored/accuracy/{kind}"] is not None for kind in KINDS)
    manifest = read_manifest(folder_of(cfg))
    assert manifest is not None and manifest.inputs["negatives"] == manifest.identity["negatives"]

    train.run(without)
    assert "verifier/stored/bce" not in read_metrics(folder_of(without) / "metrics.jsonl", "train")[-1]
    shutil.copytree(Path(cfg.run_dir) / "negatives", Path(without.run_dir) / "negatives")
    with pytest.raises(UserError, match="negatives"):
        train.run(without)
    small = replace(
        cfg, run_dir=str(tmp_path / "small"), budget=replace(cfg.budget, tokens=manifest.counts["supervised_tokens"])
    )
    shutil.copytree(Path(cfg.run_dir) / "distill", Path(small.run_dir) / "distill")
    shutil.copytree(Path(cfg.run_dir) / "negatives", Path(small.run_dir) / "negatives")
    with pytest.raises(UserError, match="Samples and stored negatives hold"):
        train.run(small)


def test_contradicting_settings_are_user_errors(distilled: Config, tmp_path: Path) -> None:  # noqa: F811
    cfg = fresh(distilled, tmp_path, only="verifier")
    with pytest.raises(UserError, match="There is no checkpoint"):
        train.run(cfg)
    with pytest.raises(UserError, match="nothing to train"):
        train.run(verifying(cfg, enabled=False))
    with pytest.raises(UserError, match=r"train\.init=somewhere"):
        train.run(fresh(distilled, tmp_path / "init", init="somewhere"))
    with pytest.raises(UserError, match=r"match_sampled needs answers sampled"):
        train.run(verifying(fresh(distilled, tmp_path / "mode"), mode="match_sampled"))


def test_figures_of_a_perfect_and_of_a_random_judge() -> None:
    generator = np.random.default_rng(0)
    rounds = np.repeat(np.arange(300), 2)
    accepted = np.tile([1.0, 0.0], 300)
    certain = np.where(accepted > 0, 8.0, -8.0)
    scores = {
        "correctness": certain,
        "confidence": generator.normal(size=600),
        "probability": generator.random(600),
        "margin": certain,
        "entropy": -certain,
    }
    slots = JudgedSlots(accepted, np.tile([0, 1], 300), rounds, rounds % 3, scores)
    found = figures(slots, ["a", "b", "b"])
    assert found["prior"] == found["constant_accuracy"] == 0.5
    assert found["correctness"]["auroc"] == found["correctness"]["accuracy"] == 1.0
    assert found["correctness"]["ece"] < 0.01 and found["correctness"]["precision_at_085"] == 1.0
    assert 0.4 < found["confidence"]["auroc"] < 0.6
    assert found["baselines"]["entropy"]["auroc"] == 0.0
    assert found["correctness"]["depth"]["0"]["prior"] == 1.0 and found["correctness"]["depth"]["1"]["auroc"] is None
    assert found["confidence"]["domain"]["b"]["judged"] == 400
    np.testing.assert_allclose(
        survivals(np.array([0.5, 0.5, 0.9, 0.1, 0.2]), np.array([0, 0, 7, 8, 8])), [0.5, 0.25, 0.9, 0.1, 0.02]
    )
