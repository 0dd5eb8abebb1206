"""Draft and verifier together on two CPU ranks: every ZeRO stage against plain torch, and every launcher against the
variables that srun's tasks derive theirs from.

The launched runs are the command line itself (``torchrun -m jetspec_train``), so that one code path serves them all.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetspec_train.cluster.words import words_of
from jetspec_train.config import Config, EngineConfig, load_config
from jetspec_train.stages import distill
from jetspec_train.training.checkpoint import find_checkpoint, load_tensors
from jetspec_train.training.tracking import read_metrics
from tests.integration.test_train_deepspeed import free_port, run_all
from tests.tiny import tiny_target_dir

pytest.importorskip("deepspeed")
pytestmark = pytest.mark.timeout(2000)  # a busy machine; half a minute on an idle one

STEPS = 5
STAGES = (1, 2, 3)
LOSSES = ("loss", "verifier/correctness_bce", "verifier/confidence_bce")
BIN = Path(sys.executable).parent


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Settings of a small training of both networks, on a tiny target's answers."""
    folder = tmp_path_factory.mktemp("launchers")
    rows = [{"question": f"What is {n} and {n * 7 % 13}?"} for n in range(24)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 1.0}, "sources": [source]}))
    words = [
        *("preset=tiny", "stage=train", f"run_dir={folder}/data", f"recipe={folder}/recipe.yaml", "engine=torch"),
        *(
            "recipe.prompts=null",
            f"target.name={tiny_target_dir('llama')}",
            "target.dtype=float32",
            "target.device=cpu",
        ),
        *("distill.max_new_tokens=16", "distill.batch_size=8", "draft.layers=1", "draft.block=4", "draft.taps=2"),
        *("draft.parent_rank=8", "verifier.layers=1", "verifier.share=0.2", "verifier.holdout=0.5"),
        *(f"train.steps={STEPS}", "train.sequence_length=96", "train.sequences=4", "train.anchors=8"),
        *("train.learning_rate=0.003", "train.precision=float32", "train.eval_prompts=0", "train.log_every=1"),
        "train.clip=0.05",  # far below the norms: both networks are clipped at every step
    ]
    cfg = load_config(words)
    distill.run(cfg)
    return cfg


def job(base: Config, name: str, engine: EngineConfig) -> Config:
    run = Path(base.run_dir).parent / name
    shutil.copytree(Path(base.run_dir) / "distill", run / "distill")
    return replace(base, run_dir=str(run), engine=engine)


@pytest.fixture(scope="module")
def trained(base: Config) -> dict[str, Config]:
    """Finished trainings by engine; at stage 3 all but the smallest weights really are divided."""
    found = {"torch": job(base, "torch", EngineConfig(name="torch"))}
    for stage in STAGES:
        found[f"zero{stage}"] = job(base, f"zero{stage}", EngineConfig(name="deepspeed", zero_stage=stage))
    run_all([(cfg, 0) for cfg in found.values()], Path(base.run_dir).parent, world=2, keep_whole_below=200)
    return found


def curve(cfg: Config, name: str) -> list[float]:
    records = read_metrics(Path(cfg.run_dir) / "train" / "metrics.jsonl", "train")
    assert [record["step"] for record in records] == list(range(1, STEPS + 1))
    return [record[name] for record in records]


def tensors(cfg: Config) -> dict[str, torch.Tensor]:
    return load_tensors(find_checkpoint(Path(cfg.run_dir) / "train", "last"))


@pytest.mark.parametrize("stage", STAGES)
def test_draft_and_verifier_learn_the_same_at_every_zero_stage(trained: dict[str, Config], stage: int) -> None:
    divided, plain = trained[f"zero{stage}"], trained["torch"]
    for name in (*LOSSES, "gradient_norm"):
        assert curve(divided, name) == pytest.approx(curve(plain, name), abs=1e-3), name
    assert curve(plain, "verifier/correctness_bce")[-1] < curve(plain, "verifier/correctness_bce")[0]
    one, other = tensors(divided), tensors(plain)
    assert one.keys() == other.keys() and {name.split(".")[0] for name in one} == {"draft", "verifier"}
    for name, value in other.items():
        torch.testing.assert_close(one[name], value, rtol=0, atol=1e-3, msg=name)


LAUNCHERS = {
    "torchrun": ["--nproc-per-node=2", "--master-addr=127.0.0.1", "--master-port=PORT", "-m"],
    "deepspeed": ["--num_gpus=2", "--master_addr=127.0.0.1", "--master_port=PORT", "--module"],
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_every_launcher_starts_the_same_training(trained: dict[str, Config], base: Config, launcher: str) -> None:
    program = BIN / launcher
    if not program.exists():
        pytest.skip(f"no {launcher} beside {sys.executable}")
    reference = trained["torch" if launcher == "torchrun" else "zero1"]
    cfg = job(base, launcher, reference.engine)
    options = [option.replace("PORT", free_port()) for option in LAUNCHERS[launcher]]
    done = subprocess.run(
        [sys.executable, str(program), *options, "jetspec_train", *words_of(cfg)],
        capture_output=True,
        text=True,
        timeout=900,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "PATH": f"{BIN}:{os.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    for name in LOSSES:
        assert curve(cfg, name) == curve(reference, name), name
    one, other = tensors(cfg), tensors(reference)
    assert all(torch.equal(one[name], value) for name, value in other.items())
