"""Laws of checkpoints: whole or absent, the best and the last never deleted, damage seen and said."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.training import checkpoint as ck
from jetspec_train.training.checkpoint import TrainState


def save(folder: Path, step: int, *, best: int | None = None, keep: int = 2, value: float | None = None) -> Path:
    state = TrainState(step=step, best=None if best is None else {"step": best, "acceptance_length": 2.0})
    tensors = {"draft.fc.weight": torch.full((3, 2), float(step if value is None else value))}
    return ck.save_checkpoint(
        folder / "checkpoints",
        state,
        tensors=tensors,
        draft={"layers": 2},
        save_engine=lambda path: torch.save({"optimizer": {}}, path / "optimizer.pt"),
        keep=keep,
    )


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = save(tmp_path, 5, best=5)
    assert ck.find_checkpoint(tmp_path, "best") == ck.find_checkpoint(tmp_path, "last") == path
    assert torch.equal(ck.load_draft_tensors(path)["fc.weight"], torch.full((3, 2), 5.0))
    assert ck.load_draft_config(path) == {"layers": 2}
    assert ck.open_checkpoint(path).state.best == {"step": 5, "acceptance_length": 2.0}


def test_best_and_newest_stay(tmp_path: Path) -> None:
    for step in range(1, 8):
        save(tmp_path, step, best=min(step, 2), keep=2)
    assert names(tmp_path) == ["step-000002", "step-000006", "step-000007"]
    assert ck.find_checkpoint(tmp_path, "best").name == "step-000002"


def test_steps_sort_as_numbers(tmp_path: Path) -> None:
    save(tmp_path, 999_999, keep=1)
    save(tmp_path, 1_000_000, keep=1)
    assert names(tmp_path) == ["step-1000000"]


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.pt", "state.json", "manifest.json"])
@pytest.mark.parametrize("damage", ["cut", "flip", "delete"])
def test_damage_is_seen_and_the_previous_one_used(tmp_path: Path, file: str, damage: str) -> None:
    good = save(tmp_path, 1)
    bad = save(tmp_path, 2) / file
    data = bytearray(bad.read_bytes())
    if damage == "delete":
        bad.unlink()
    elif damage == "cut":
        bad.write_bytes(data[: len(data) // 2])
    else:
        data[len(data) // 2] ^= 0x81
        bad.write_bytes(data)
    warnings: list[str] = []
    if file == "manifest.json" and damage == "flip":  # either no JSON any more, or a value that no file matches
        data[data.index(b'"sha256": "') + 12] = ord("z")
        bad.write_bytes(data)
    found = ck.newest_checkpoint(tmp_path / "checkpoints", warnings.append)
    assert found is not None and found.path == good
    assert len(warnings) == 1 and "step-000002" in warnings[0]
    with pytest.raises(UserError, match="damaged"):
        ck.find_checkpoint(tmp_path, "last")


def test_a_crash_while_writing_leaves_no_checkpoint(tmp_path: Path) -> None:
    save(tmp_path, 1)

    def crash(path: Path) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ck.save_checkpoint(
            tmp_path / "checkpoints",
            TrainState(step=2),
            tensors={"w": torch.ones(1)},
            draft={},
            save_engine=crash,
            keep=2,
        )
    found = ck.newest_checkpoint(tmp_path / "checkpoints", pytest.fail)
    assert found is not None and found.step == 1
    ck.tidy(tmp_path / "checkpoints", 1)
    assert names(tmp_path) == ["step-000001"]


def test_nothing_usable_is_an_error_not_a_fresh_start(tmp_path: Path) -> None:
    (save(tmp_path, 1) / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match="Delete that folder"):
        ck.newest_checkpoint(tmp_path / "checkpoints", lambda _: None)
    assert ck.newest_checkpoint(tmp_path / "other", pytest.fail) is None


def test_a_damaged_newer_folder_cannot_push_out_a_good_one(tmp_path: Path) -> None:
    save(tmp_path, 1)
    (save(tmp_path, 9) / "model.safetensors").write_bytes(b"")
    ck.tidy(tmp_path / "checkpoints", 1)
    save(tmp_path, 2, keep=1)
    found = ck.newest_checkpoint(tmp_path / "checkpoints", pytest.fail)
    assert found is not None and found.step == 2
    assert "damaged-step-000009" in names(tmp_path)


def test_another_configuration_is_refused_with_every_difference(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ck.check_identity(
            {"train": {"anchors": 64, "betas": (0.9, 0.95)}, "seed": 0},
            {"train": {"anchors": 32, "betas": [0.9, 0.95]}, "seed": 1},
            tmp_path / "checkpoints" / "step-000001",
        )
    message = str(caught.value)
    assert "train.anchors: 64" in message and "32" in message and "seed: 0" in message and "betas" not in message


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    """A checkpoint whose optimiser file would run code on loading is refused by the loader itself."""
    from jetspec_train.training.engine import TorchEngine
    from jetspec_train.training.schedule import make_optimizer, make_scheduler

    class Evil:
        def __reduce__(self):  # type: ignore[no-untyped-def]
            return (Path.touch, (tmp_path / "ran",))

    model = torch.nn.Linear(2, 2)
    engine = TorchEngine()
    optimizer = make_optimizer(model, learning_rate=1e-3, weight_decay=0.0, betas=(0.9, 0.95))
    engine.wrap(model, optimizer, make_scheduler(optimizer, total=3, warmup=0.1, floor=0.1))
    torch.save({"optimizer": Evil(), "scheduler": {}}, tmp_path / "optimizer.pt")
    with pytest.raises(Exception, match=r"[Ww]eights"):
        engine.load(tmp_path, engine.model_tensors())
    assert not (tmp_path / "ran").exists()


def test_manifest_records_where_it_came_from(tmp_path: Path) -> None:
    manifest = json.loads((save(tmp_path, 1) / "manifest.json").read_text())
    assert manifest["versions"]["torch"] and manifest["arguments"] and "git_revision" in manifest
