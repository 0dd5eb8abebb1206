"""The laws of training, on a tiny target's own answers: exact resume, kills, one normaliser, cache equals online."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import (
    BudgetConfig,
    Config,
    DecodingConfig,
    DistillConfig,
    DraftConfig,
    RecipeConfig,
    TrainConfig,
)
from jetspec_train.stages import distill, train
from jetspec_train.training import loop
from jetspec_train.training.checkpoint import find_checkpoint, load_draft_config, load_tensors, open_checkpoint
from jetspec_train.training.tracking import read_metrics
from tests.tiny import tiny_target_config

STEPS = 8


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A finished distillation of 40 prompts by a tiny target, and a configuration that trains on it."""
    folder = tmp_path_factory.mktemp("train-stage")
    rows = [{"question": f"What is {n} and {n * 7 % 13}, " + "or so " * (n % 5) + "?"} for n in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 0.8, "dev": 0.2}, "sources": [source]}))
    cfg = Config(
        run_dir=str(folder / "run"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(folder / "recipe.yaml")),
        distill=DistillConfig(max_new_tokens=24, batch_size=8),
        draft=DraftConfig(layers=1, block=4, taps=2, parent_rank=8, clean_prefix=0.5),
        train=TrainConfig(
            steps=STEPS,
            sequence_length=128,
            sequences=4,
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
    )
    distill.run(cfg)
    return cfg


def fresh(distilled: Config, tmp_path: Path, **changes: Any) -> Config:
    """The same data in a run directory of its own, with other training settings."""
    run = tmp_path / "run"
    shutil.copytree(Path(distilled.run_dir) / "distill", run / "distill")
    return replace(distilled, run_dir=str(run), train=replace(distilled.train, **changes))


def folder_of(cfg: Config) -> Path:
    return Path(cfg.run_dir) / "train"


def last_tensors(cfg: Config) -> dict[str, torch.Tensor]:
    return load_tensors(find_checkpoint(folder_of(cfg), "last"))


def numbers(cfg: Config) -> list[dict[str, Any]]:
    """The metrics without what a clock says."""
    records = read_metrics(folder_of(cfg) / "metrics.jsonl")
    return [{k: v for k, v in r.items() if k not in ("tokens_per_second", "seconds")} for r in records]


@pytest.fixture(scope="module")
def whole(distilled: Config, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """An undisturbed training."""
    cfg = fresh(distilled, tmp_path_factory.mktemp("whole"))
    train.run(cfg)
    return cfg


def assert_same_training(cfg: Config, whole: Config) -> None:
    expected = last_tensors(whole)
    for name, value in last_tensors(cfg).items():
        assert torch.equal(value, expected[name]), name
    assert numbers(cfg) == numbers(whole)


def test_what_a_training_leaves(whole: Config, capsys: pytest.CaptureFixture[str]) -> None:
    folder = folder_of(whole)
    manifest = read_manifest(folder)
    assert manifest is not None
    counts = manifest.counts
    assert counts["samples"] == counts["packed"] + counts["too_short"] + counts["beyond_train_tokens"]
    assert counts["steps"] == STEPS and counts["token_visits"] > 0
    records = read_metrics(folder / "metrics.jsonl")
    assert [r["step"] for r in records if r["kind"] == "train"] == [2, 4, 6, 8]
    assert [r["step"] for r in records if r["kind"] == "evaluation"] == [4, 8]
    losses = [r["loss"] for r in records if r["kind"] == "train"]
    assert losses[-1] < losses[0]
    state = open_checkpoint(find_checkpoint(folder, "best")).state
    best = max((r for r in records if r["kind"] == "evaluation"), key=lambda r: r["acceptance_length"])
    assert state.best is not None and state.best["acceptance_length"] == best["acceptance_length"] >= 1.0
    assert state.identity["target"]["config_hash"] and load_draft_config(find_checkpoint(folder))["block"] == 4
    train.run(whole)
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_stopped_run_continues_bit_for_bit(
    distilled: Config, whole: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """2N steps equal N and then N, in fp32 on one rank; the stop comes in the middle of step 5."""
    cfg = fresh(distilled, tmp_path)
    original = loop.add_sums

    def stop_in_step_5(window: dict[str, Any], sums: Any) -> None:
        calls.append(1)
        if len(calls) == 5:
            signal.raise_signal(number)
        original(window, sums)

    calls: list[int] = []
    monkeypatch.setattr(loop, "add_sums", stop_in_step_5)
    if number == signal.SIGINT:
        with pytest.raises(KeyboardInterrupt):
            train.run(cfg)
    else:
        with pytest.raises(SystemExit) as stopped:
            train.run(cfg)
        assert stopped.value.code == 85
    assert find_checkpoint(folder_of(cfg), "last").name == "step-000005"
    assert read_manifest(folder_of(cfg)) is None
    train.run(cfg)
    assert len(calls) == STEPS
    assert_same_training(cfg, whole)


CHILD = """
import pickle, sys
from jetspec_train.stages import train
import torch
torch.set_num_threads(1)
train.run(pickle.load(open(sys.argv[1], "rb")))
"""


def start(cfg: Config, tmp_path: Path, **environment: str) -> subprocess.Popen[bytes]:
    """The same call in a process of its own, one thread."""
    file = tmp_path / "cfg.pickle"
    file.write_bytes(pickle.dumps(cfg))
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, str(file)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), **environment},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )


def test_killed_at_any_instant_it_continues_exactly(distilled: Config, tmp_path: Path) -> None:
    """SIGKILL while a checkpoint is being written, again later, then to the end: the undisturbed weights."""
    settings = {"save_every": 1, "eval_prompts": 0, "steps": 12}
    killed = fresh(distilled, tmp_path / "killed", **settings)
    checkpoints = folder_of(killed) / "checkpoints"
    for wanted in (2, 5):
        child = start(killed, tmp_path)
        deadline = time.monotonic() + 240  # starting a process takes seconds, or minutes on a busy machine
        while time.monotonic() < deadline and child.poll() is None:
            if any(checkpoints.glob(f".tmp-step-{wanted:06d}-*")) or (checkpoints / f"step-{wanted:06d}").exists():
                break
            time.sleep(0.001)
        child.kill()
        assert child.wait() == -signal.SIGKILL, child.stderr.read().decode()[-2000:]  # type: ignore[union-attr]
        assert any(checkpoints.iterdir()) and read_manifest(folder_of(killed)) is None
    whole = fresh(distilled, tmp_path / "whole", **settings)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the killed processes: sums of other threads differ in their last bit
    try:
        train.run(killed)
        train.run(whole)
    finally:
        torch.set_num_threads(threads)
    assert not list(checkpoints.glob(".tmp-*"))
    assert_same_training(killed, whole)


def test_a_damaged_checkpoint_falls_back_loudly_and_the_result_is_the_same(
    distilled: Config, whole: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = fresh(distilled, tmp_path)
    shutil.copytree(folder_of(whole), folder_of(cfg))
    (folder_of(cfg) / "manifest.json").unlink()
    file = find_checkpoint(folder_of(cfg), "last") / "optimizer.pt"
    file.write_bytes(file.read_bytes()[:-100])
    train.run(cfg)
    assert "optimizer.pt has" in capsys.readouterr().err
    assert_same_training(cfg, whole)


@pytest.mark.parametrize("accumulation", [2, 4])
def test_the_accumulation_split_does_not_move_loss_or_weights(
    distilled: Config, whole: Config, tmp_path: Path, accumulation: int
) -> None:
    cfg = fresh(distilled, tmp_path, accumulation=accumulation)
    train.run(cfg)
    for one, other in zip(numbers(cfg), numbers(whole), strict=True):
        if one["kind"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], abs=2e-5)
    for name, value in last_tensors(cfg).items():
        torch.testing.assert_close(value, last_tensors(whole)[name], rtol=0, atol=2e-4, msg=name)


def test_cached_features_give_the_losses_of_online_ones(distilled: Config, whole: Config, tmp_path: Path) -> None:
    cfg = fresh(distilled, tmp_path, features="cache")
    train.run(cfg)
    for one, other in zip(numbers(cfg), numbers(whole), strict=True):
        if one["kind"] == "train":
            assert one["loss"] == pytest.approx(other["loss"], abs=1e-4)
            assert one["token_visits"] == other["token_visits"]


def test_two_ranks_give_the_weights_of_one(distilled: Config, whole: Config, tmp_path: Path) -> None:
    """Over gloo, started as torchrun would: same sample multiset, same normaliser, same weights to rounding."""
    cfg = fresh(distilled, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    children = [start(cfg, tmp_path, RANK=str(rank), LOCAL_RANK=str(rank), **shared) for rank in range(2)]
    for child in children:
        _, error = child.communicate(timeout=400)
        assert child.returncode == 0, error.decode()[-2000:]
    for one, other in zip(numbers(cfg), numbers(whole), strict=True):
        if one["kind"] == "train":
            assert one["token_visits"] == other["token_visits"]
            assert one["loss"] == pytest.approx(other["loss"], abs=2e-5)
    for name, value in last_tensors(cfg).items():
        torch.testing.assert_close(value, last_tensors(whole)[name], rtol=0, atol=2e-4, msg=name)


def test_another_configuration_is_refused_with_the_differences(
    distilled: Config, whole: Config, tmp_path: Path
) -> None:
    cfg = fresh(distilled, tmp_path, anchors=7)
    shutil.copytree(folder_of(whole), folder_of(cfg))
    with pytest.raises(UserError, match=r"train\.anchors: 8 .* 7"):
        train.run(cfg)
    (folder_of(cfg) / "manifest.json").unlink()
    with pytest.raises(UserError, match=r"train\.anchors: 8 in the checkpoint, 7 now"):
        train.run(cfg)


def test_more_tokens_than_the_budget_are_refused(distilled: Config, tmp_path: Path) -> None:
    cfg = replace(fresh(distilled, tmp_path), budget=BudgetConfig(tokens=100))
    with pytest.raises(UserError, match=r"budget\.tokens=100"):
        train.run(cfg)
    limited = replace(cfg, train=replace(cfg.train, tokens=100, steps=1, eval_prompts=0))
    train.run(limited)
    manifest = read_manifest(folder_of(limited))
    assert manifest is not None and manifest.counts["supervised_tokens"] <= 100
    assert find_checkpoint(folder_of(limited), "best").name == "step-000001"  # nothing measured: the last one


def test_missing_data_a_second_trainer_and_uneven_ranks_are_user_errors(distilled: Config, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage=distill"):
        train.run(replace(distilled, run_dir=str(tmp_path / "nothing")))
    with pytest.raises(UserError, match="multiple of ranks"):
        train.check_ranks(distilled, 3)
    cfg = fresh(distilled, tmp_path)
    folder_of(cfg).mkdir()
    from jetspec_train.training.ranks import Ranks

    with train.only_trainer(folder_of(cfg), Ranks()), pytest.raises(UserError, match="Another process"):
        train.run(cfg)


def test_feature_cache_resumes_by_shard_and_knows_its_content(
    distilled: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from jetspec_train.training import feature_cache
    from jetspec_train.training.ranks import Ranks
    from tests.tiny import tiny_target

    monkeypatch.setattr(feature_cache, "SHARD_BYTES", 100_000)
    generator = np.random.default_rng(0)
    lengths = generator.integers(3, 60, 50)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    tokens = generator.integers(4, 300, starts[-1]).astype(np.int32)
    target = tiny_target("llama")

    def cache(content: np.ndarray, longest: int = 40) -> feature_cache.FeatureCache:
        samples = feature_cache.CachedSamples(content, starts, longest)
        return feature_cache.FeatureCache(tmp_path / "features", samples, target, (0, 2))

    built = cache(tokens)
    with pytest.raises(UserError, match="features_max_bytes=1000"):
        built.build(Ranks(), max_bytes=1000)
    built.build(Ranks(), max_bytes=10**9, show_progress=False)
    shards = sorted((tmp_path / "features").glob("shard-*.bin"))
    assert len(shards) > 2 and sum(s.stat().st_size for s in shards) == built.total_bytes
    for number in (0, 7, 49):
        length = min(int(lengths[number]), 40)
        text = torch.from_numpy(tokens[starts[number] : starts[number] + length].astype(np.int64))[None]
        direct = target.forward_packed(text, torch.arange(length)[None], torch.zeros_like(text), (0, 2))
        expected = torch.cat((direct.features_BNF[0], direct.hidden_BND[0]), dim=-1)
        torch.testing.assert_close(built.sample(number), expected, rtol=1e-4, atol=1e-4)

    before = [s.stat().st_mtime_ns for s in shards]
    shards[1].unlink()
    cache(tokens).build(Ranks(), max_bytes=10**9, show_progress=False)
    after = [s.stat().st_mtime_ns for s in shards]
    assert [a == b for a, b in zip(before, after, strict=True)] == [i != 1 for i in range(len(shards))]
    other = tokens.copy()
    other[0] += 1
    cache(other).build(Ranks(), max_bytes=10**9, show_progress=False)
    assert all(a != b for a, b in zip(after, [s.stat().st_mtime_ns for s in shards], strict=True))
    shards[0].write_bytes(b"short")
    with pytest.raises(UserError, match="bytes instead of"):
        cache(other).sample(0)
