"""DeepSpeed against plain torch, on two CPU ranks: the same curves, exact resumes, checkpoints that fit either.

All trainings of this file run in one pair of processes (they start slowly), one after the other, from a list of
configurations; the tests then look at the run directories.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.config import (
    Config,
    DecodingConfig,
    DistillConfig,
    DraftConfig,
    EngineConfig,
    RecipeConfig,
    TrainConfig,
    VerifierSettings,
)
from jetspec_train.stages import distill, train
from jetspec_train.training import deepspeed_engine
from jetspec_train.training.checkpoint import find_checkpoint, load_tensors
from jetspec_train.training.tracking import read_metrics
from tests.tiny import tiny_target_config

pytest.importorskip("deepspeed")

pytestmark = pytest.mark.timeout(3000)  # a busy machine; a minute on an idle one
STEPS = 6
STAGES = (0, 1, 2, 3)

CHILD = """
import pickle, signal, sys
import torch
torch.set_num_threads(1)
from jetspec_train.stages import train
from jetspec_train.training import deepspeed_engine, loop
deepspeed_engine.KEEP_WHOLE_BELOW = int(sys.argv[2])
add_sums = loop.add_sums
for cfg, stop_at in pickle.load(open(sys.argv[1], "rb")):
    seen = []
    def counting(window, sums):
        seen.append(1)
        if len(seen) == stop_at:
            signal.raise_signal(signal.SIGUSR1)
        add_sums(window, sums)
    loop.add_sums = counting
    try:
        train.run(cfg)
    except SystemExit as stopped:
        assert stopped.code == 85 and stop_at
"""


def free_port() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def run_all(
    jobs: list[tuple[Config, int]], folder: Path, world: int, keep_whole_below: int = deepspeed_engine.KEEP_WHOLE_BELOW
) -> None:
    """Train every configuration in order (stopped after a step where the number is not 0) on ``world`` ranks."""
    file = folder / f"jobs-{world}.pickle"
    file.write_bytes(pickle.dumps(jobs))
    shared = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if world > 1:
        shared |= {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    children = []
    for rank in range(world):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if world > 1 else {}
        children.append(
            subprocess.Popen(
                [sys.executable, "-c", CHILD, str(file), str(keep_whole_below)],
                env={**os.environ, **shared, **own},
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
            )
        )
    try:
        for child in children:
            _, error = child.communicate(timeout=1500)
            assert child.returncode == 0, error.decode()[-3000:]
    finally:
        for child in children:
            child.kill()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Config]:
    """Finished trainings by name, all on the same answers of a tiny target."""
    folder = tmp_path_factory.mktemp("deepspeed")
    rows = [{"question": f"What is {n} and {n * 7 % 13}, " + "or so " * (n % 5) + "?"} for n in range(32)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 0.9, "dev": 0.1}, "sources": [source]}))
    base = Config(
        run_dir=str(folder / "data"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(folder / "recipe.yaml")),
        distill=DistillConfig(max_new_tokens=16, batch_size=8),
        draft=DraftConfig(layers=1, block=4, taps=2, parent_rank=8, clean_prefix=0.5),
        verifier=VerifierSettings(enabled=False),
        train=TrainConfig(
            steps=STEPS,
            sequence_length=96,
            sequences=4,
            anchors=8,
            learning_rate=3e-3,
            precision="float32",
            eval_every=3,
            eval_prompts=1,
            eval_max_new_tokens=4,
            save_every=3,
            log_every=1,
        ),
        decoding=DecodingConfig(nodes=4, shortlist=4),
    )
    distill.run(base)
    found: dict[str, Config] = {}

    def job(name: str, engine: EngineConfig, **changes: Any) -> Config:
        run = folder / name
        shutil.copytree(folder / "data" / "distill", run / "distill")
        found[name] = replace(base, run_dir=str(run), engine=engine, train=replace(base.train, **changes))
        return found[name]

    plain = EngineConfig(name="torch")
    jobs = [(job("torch", plain), 0), (job("torch-bf16", plain, precision="bfloat16"), 0)]
    for stage in STAGES:
        engine = EngineConfig(name="deepspeed", zero_stage=stage)
        jobs.append((job(f"zero{stage}", engine, accumulation=2 if stage == 2 else 1), 0))
        stopped = job(f"zero{stage}-stopped", engine, accumulation=2 if stage == 2 else 1)
        jobs += [(stopped, 2), (stopped, 0)]
        if stage:
            jobs.append((job(f"zero{stage}-bf16", engine, precision="bfloat16"), 0))
    offloaded = EngineConfig(name="deepspeed", zero_stage=2, offload=True)
    jobs.append((job("offload", offloaded), 0))
    # Stopped on two ranks, finished on one, under the other engine and at another stage.
    moved = [job(f"moved{stage}", EngineConfig(name="deepspeed", zero_stage=stage)) for stage in (2, 3)]
    jobs += [(cfg, 2) for cfg in moved]
    run_all(jobs, folder, world=2)
    alone = job("one-rank", EngineConfig(name="deepspeed", zero_stage=1))
    torch_alone = job("one-rank-torch", plain)
    stopped = job("one-rank-stopped", EngineConfig(name="deepspeed", zero_stage=1))
    second = replace(moved[1], engine=EngineConfig(name="deepspeed", zero_stage=1))
    run_all(
        [(torch_alone, 0), (alone, 0), (stopped, 2), (stopped, 0), (replace(moved[0], engine=plain), 0), (second, 0)],
        folder,
        world=1,
    )
    return found


def records(cfg: Config) -> list[dict[str, Any]]:
    found = read_metrics(Path(cfg.run_dir) / "train" / "metrics.jsonl", "train")
    assert [record["step"] for record in found] == list(range(1, STEPS + 1))
    return found


def losses(cfg: Config) -> list[float]:
    return [record["loss"] for record in records(cfg)]


def tensors(cfg: Config) -> dict[str, torch.Tensor]:
    return load_tensors(find_checkpoint(Path(cfg.run_dir) / "train", "last"))


def largest_difference(one: Config, other: Config) -> float:
    a, b = tensors(one), tensors(other)
    assert a.keys() == b.keys() and all(name.startswith("draft.") for name in a)
    assert all(value.dtype == torch.float32 for value in a.values())
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize("stage", STAGES)
def test_every_zero_stage_gives_the_curve_of_plain_torch(trained: dict[str, Config], stage: int) -> None:
    assert losses(trained[f"zero{stage}"]) == pytest.approx(losses(trained["torch"]), abs=1e-3)
    assert losses(trained["torch"])[-1] < losses(trained["torch"])[0]
    assert largest_difference(trained[f"zero{stage}"], trained["torch"]) < 1e-3
    for one, other in zip(records(trained["torch"]), records(trained[f"zero{stage}"]), strict=True):
        assert one["gradient_norm"] == pytest.approx(other["gradient_norm"], rel=1e-3)
        assert one["learning_rate"] == other["learning_rate"] and one["token_visits"] == other["token_visits"]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_gives_the_curve_of_plain_torch(trained: dict[str, Config], stage: int) -> None:
    assert losses(trained[f"zero{stage}-bf16"]) == pytest.approx(losses(trained["torch-bf16"]), abs=1e-2)
    assert losses(trained["torch-bf16"]) != losses(trained["torch"])


def test_offloaded_state_gives_the_curve_too(trained: dict[str, Config]) -> None:
    assert losses(trained["offload"]) == pytest.approx(losses(trained["torch"]), abs=1e-3)


@pytest.mark.parametrize("stage", STAGES)
def test_a_stopped_run_on_two_ranks_continues_as_if_nothing_had_been(trained: dict[str, Config], stage: int) -> None:
    assert losses(trained[f"zero{stage}-stopped"]) == pytest.approx(losses(trained[f"zero{stage}"]), abs=1e-6)
    assert largest_difference(trained[f"zero{stage}-stopped"], trained[f"zero{stage}"]) < 1e-6


def test_one_rank_resumes_bit_for_bit(trained: dict[str, Config]) -> None:
    assert losses(trained["one-rank-stopped"]) == losses(trained["one-rank"])
    assert largest_difference(trained["one-rank-stopped"], trained["one-rank"]) == 0.0
    assert losses(trained["one-rank"]) == pytest.approx(losses(trained["one-rank-torch"]), abs=1e-5)


@pytest.mark.parametrize("stage", [2, 3])
def test_another_number_of_ranks_and_another_engine_continue_a_run(trained: dict[str, Config], stage: int) -> None:
    """Stopped on two ranks at this stage; finished on one, under plain torch or at stage 1."""
    moved = trained[f"moved{stage}"]
    assert losses(moved) == pytest.approx(losses(trained["torch"]), abs=1e-3)
    assert largest_difference(moved, trained["torch"]) < 1e-3
    visits = [[record["token_visits"] for record in records(cfg)] for cfg in (moved, trained["torch"])]
    assert visits[0] == visits[1]  # the same samples at every step


def test_a_finished_run_is_known_as_finished_by_the_other_engine(
    trained: dict[str, Config], capsys: pytest.CaptureFixture[str]
) -> None:
    train.run(replace(trained["zero3"], engine=EngineConfig(name="torch")))
    assert "nothing to do" in capsys.readouterr().out
    assert signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL
