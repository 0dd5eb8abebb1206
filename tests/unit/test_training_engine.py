"""Laws of the engine and the loop: exact resume, one normaliser, stops that save, metrics without gaps or repeats."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import EngineConfig, TrackingConfig
from jetspec_train.training.checkpoint import TrainState
from jetspec_train.training.deepspeed_engine import DeepSpeedEngine
from jetspec_train.training.engine import TorchEngine, create_engine, write_optimizer
from jetspec_train.training.loop import Cadence, StepResult, train
from jetspec_train.training.ranks import Ranks, find_address, find_ranks
from jetspec_train.training.schedule import learning_rate_share, make_optimizer, make_scheduler
from jetspec_train.training.signals import exit_code_for, stop_on_signals
from jetspec_train.training.tracking import Tracker, read_metrics


def make_engine(total: int = 10, clip: float = 1.0) -> tuple[nn.Module, TorchEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    engine = TorchEngine(clip=clip)
    optimizer = make_optimizer(model, learning_rate=0.05, weight_decay=0.01, betas=(0.9, 0.95))
    return engine.wrap(model, optimizer, make_scheduler(optimizer, total=total, warmup=0.2, floor=0.1)), engine


def one_step(model: nn.Module, engine: TorchEngine, step: int, pieces: int = 1) -> float:
    data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
    for piece in data.chunk(pieces):
        engine.backward(model(piece).square().sum() / 8)
    return engine.step()


def test_2n_steps_equal_n_and_resumed_n_bit_for_bit(tmp_path: Path) -> None:
    model, engine = make_engine()
    for step in range(5):
        one_step(model, engine, step)
    write_optimizer(engine.optimizer_state(), tmp_path)
    tensors = {name: value.clone() for name, value in engine.model_tensors().items()}
    for step in range(5, 10):
        one_step(model, engine, step)
    again, resumed = make_engine()
    resumed.load(tmp_path, tensors)
    for step in range(5, 10):
        one_step(again, resumed, step)
    for name, value in engine.model_tensors().items():
        assert torch.equal(value, resumed.model_tensors()[name]), name


def test_the_accumulation_split_does_not_move_the_weights() -> None:
    results = []
    for pieces in (1, 2, 4):
        model, engine = make_engine()
        for step in range(3):
            one_step(model, engine, step, pieces)
        results.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(results[0], results[2], rtol=1e-5, atol=1e-6)


def test_the_update_is_clipped_by_the_global_norm() -> None:
    model, engine = make_engine(clip=0.5)
    seen = []
    engine.optimizer.register_step_pre_hook(  # type: ignore[union-attr]
        lambda *_: seen.append(torch.stack([p.grad.square().sum() for p in model.parameters()]).sum().sqrt().item())
    )
    engine.backward(model(torch.full((8, 4), 3.0)).square().sum() * 100)
    assert engine.step() > 0.5
    assert seen[0] == pytest.approx(0.5, rel=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing() -> None:
    model, engine = make_engine()
    before = [p.detach().clone() for p in model.parameters()]
    engine.backward(model(torch.full((1, 4), float("nan"))).sum())
    with pytest.raises(FloatingPointError):
        engine.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_weights_of_another_draft_are_refused_by_name(tmp_path: Path) -> None:
    _, engine = make_engine()
    write_optimizer(engine.optimizer_state(), tmp_path)
    tensors = engine.model_tensors()
    tensors["0.weight"] = torch.zeros(2, 2)
    tensors["extra"] = tensors.pop("2.bias")
    with pytest.raises(UserError, match=r"missing \['2.bias'\].*unexpected \['extra'\].*0.weight"):
        engine.load(tmp_path, tensors)


def test_learning_rate_rises_then_falls_to_the_floor() -> None:
    shares = [learning_rate_share(i, total=100, warmup=0.1, floor=0.1) for i in range(100)]
    assert shares[0] == pytest.approx(0.1) and shares[9] == pytest.approx(1.0)
    assert shares[9:] == sorted(shares[9:], reverse=True)
    assert shares[-1] == pytest.approx(0.1)


def test_unknown_engines_and_what_plain_torch_lacks_are_user_errors() -> None:
    with pytest.raises(UserError, match=r"engine\.name=horse"):
        create_engine(EngineConfig(name="horse"), clip=1.0, ranks=Ranks())
    with pytest.raises(UserError, match=r"engine\.zero_stage=3 needs DeepSpeed.*engine\.name=torch"):
        create_engine(EngineConfig(name="torch", zero_stage=3), clip=1.0, ranks=Ranks())
    with pytest.raises(UserError, match=r"engine\.offload=true needs DeepSpeed.*one rank without a GPU"):
        create_engine(EngineConfig(name="auto", offload=True), clip=1.0, ranks=Ranks())


def test_a_stale_build_lock_and_offload_of_nothing_are_user_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("deepspeed")
    (tmp_path / "some_extension").mkdir()
    (tmp_path / "some_extension" / "lock").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    with pytest.raises(UserError, match=r"build lock.*some_extension/lock.*delete it"):
        create_engine(EngineConfig(name="deepspeed"), clip=1.0, ranks=Ranks())
    with pytest.raises(UserError, match=r"engine\.offload=true needs engine\.zero_stage"):
        DeepSpeedEngine(stage=0, offload=True)


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, Ranks()),
        ({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, Ranks()),  # the batch script itself
        ({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, Ranks(3, 4, 1)),
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "1"},
            Ranks(5, 8, 1),
        ),
        # torchrun started by srun: the inner launcher counts
        (
            {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NTASKS": "2", "RANK": "6", "WORLD_SIZE": "8"},
            Ranks(6, 8, 0),
        ),
    ],
)
def test_ranks_come_from_the_launcher(variables: dict[str, str], expected: Ranks) -> None:
    assert find_ranks(variables) == expected


def test_ranks_meet_at_the_given_address_or_at_the_job_s_first_node() -> None:
    assert find_address({"MASTER_ADDR": "there", "MASTER_PORT": "5"}) == ("there", "5")
    slurm = {"SLURM_JOB_ID": "40003", "SLURM_JOB_NODELIST": "here", "SLURM_NNODES": "1", "SLURM_STEP_ID": "0"}
    assert find_address(slurm) == ("127.0.0.1", "15003")
    assert find_address({**slurm, "SLURM_STEP_ID": "1"}) != find_address(slurm)
    assert find_address({**slurm, "MASTER_ADDR": "there"}) == ("there", "15003")
    with pytest.raises(UserError, match="MASTER_ADDR and MASTER_PORT"):
        find_address({"RANK": "0", "WORLD_SIZE": "2"})
    with pytest.raises(UserError, match="MASTER_ADDR is not set"):
        find_address({"MASTER_PORT": "5"})


class Run:
    """A toy training whose saved state survives in memory, to be stopped and resumed."""

    def __init__(self, folder: Path, total: int = 12) -> None:
        self.folder, self.total = folder, total
        self.saved: dict[str, Any] | None = None
        self.trained: list[int] = []

    def go(self, *, stop_at: int | None = None, measure_ok: bool = True, number: int = signal.SIGTERM) -> int:
        from copy import deepcopy

        state = TrainState(**deepcopy(self.saved)) if self.saved else TrainState()
        tracker = Tracker(self.folder, TrackingConfig(), resumed_step=state.step)

        def run_step(step: int) -> StepResult:
            self.trained.append(step)
            if step == stop_at:
                signal.raise_signal(number)
            sums = {"loss": ([step * 1.5], [2.0]), "accuracy": ([1.0, float(step)], [2.0, 4.0])}
            return StepResult(sums, gradient_norm=1.0, learning_rate=0.1, tokens=7)

        def measure() -> dict[str, Any] | None:
            return {"acceptance_length": 3.0 - abs(state.step - 8) * 0.1} if measure_ok else None

        def save(current: TrainState) -> None:
            self.saved = deepcopy(vars(current))

        with stop_on_signals() as stop:
            return train(
                state,
                Cadence(self.total, log=5, evaluate=4, save=3),
                run_step=run_step,
                measure=measure,
                save=save,
                tracker=tracker,
                stop=stop,
                show_progress=False,
            )

    def numbers(self) -> list[dict[str, Any]]:
        timing = {"tokens_per_second", "seconds"}
        return [{k: v for k, v in r.items() if k not in timing} for r in read_metrics(self.folder / "metrics.jsonl")]


@pytest.mark.parametrize("stop_at", [0, 3, 6, 11])
def test_a_stop_saves_at_the_boundary_and_the_metrics_are_those_of_an_undisturbed_run(
    tmp_path: Path, stop_at: int
) -> None:
    whole = Run(tmp_path / "whole")
    assert whole.go() == 0
    broken = Run(tmp_path / "broken")
    asked = broken.go(stop_at=stop_at)
    assert asked == (signal.SIGTERM if stop_at < 11 else 0)  # asked during the last step: it is simply finished
    if asked:
        assert broken.saved is not None and broken.saved["step"] == stop_at + 1
        assert broken.go() == 0
    assert broken.trained == whole.trained == list(range(12))
    assert broken.numbers() == whole.numbers()
    assert broken.saved is not None and broken.saved["best"]["step"] == 8 and broken.saved["token_visits"] == 84
    assert [r["step"] for r in broken.numbers() if r["kind"] == "train"] == [5, 10, 12]
    assert [r["step"] for r in broken.numbers() if r["kind"] == "evaluation"] == [4, 8, 12]


def test_a_stop_while_measuring_is_measured_again_after_the_resume(tmp_path: Path) -> None:
    run = Run(tmp_path, total=4)
    assert run.go(stop_at=3, measure_ok=False) == signal.SIGTERM
    assert run.saved is not None and run.saved["step"] == 4 and run.saved["best"] is None
    assert run.go() == 0
    assert run.saved["best"]["step"] == 4 and run.trained == [0, 1, 2, 3]


def test_exit_codes() -> None:
    assert exit_code_for(signal.SIGUSR1) == exit_code_for(signal.SIGTERM) == 85
    assert exit_code_for(signal.SIGINT) == 130 and exit_code_for(0) == 0


def test_a_second_ctrl_c_stops_at_once() -> None:
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.exit_code == 130
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
