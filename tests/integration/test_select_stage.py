"""stage=select on samples of a finished distillation: repeatable, explained, and honoured by stage=train."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import write_manifest
from jetspec_train.config import Config
from jetspec_train.data.samples import SCHEMA, Sample, row_table, write_table
from jetspec_train.stages import select
from jetspec_train.stages.training_inputs import load_data


def sample(number: int, **changes: object) -> Sample:
    generator = np.random.default_rng(number)
    length = int(generator.integers(20, 60))
    words = " ".join(f"w{int(x)}" for x in generator.integers(0, 4000, length))
    values = {
        "id": f"{number:032x}",
        "prompt_id": f"p{number}",
        "order": number,
        "domain": "ab"[number % 2],
        "source": "made",
        "row": number,
        "template": None,
        "split": "train",
        "turn": 0,
        "draw": 0,
        "messages": "[]",
        "answer": words,
        "reference": None,
        "prompt_tokens": [1, 2, 3],
        "answer_tokens": generator.integers(0, 500, length).tolist(),
        "logprobs": (-generator.random(length)).tolist(),
        "entropies": generator.random(length).tolist(),
        "margins": generator.random(length).tolist(),
        "finish_reason": "stop",
        "truncated": False,
        "target": "{}",
        "settings": "{}",
    }
    return Sample(**{**values, **changes})  # type: ignore[arg-type]


@pytest.fixture
def cfg(tmp_path: Path) -> Config:
    """40 ordinary samples, a near-duplicate, a loop, a one-token answer, and one of another split."""
    samples = [sample(number) for number in range(40)]
    samples += [
        dataclasses.replace(samples[0], id="f" * 32, answer=samples[0].answer),
        sample(41, answer_tokens=[7, 8] * 40, logprobs=[-0.1] * 80, entropies=[0.1] * 80, margins=[1.0] * 80),
        sample(42, answer_tokens=[5], logprobs=[-0.1], entropies=[0.1], margins=[1.0]),
        sample(43, split="dev"),
    ]
    folder = tmp_path / "distill"
    write_table(folder / "samples-00000.parquet", [row_table(samples, SCHEMA)], SCHEMA)
    write_manifest(folder, stage="distill", identity={"made": 1}, outputs=["samples-00000.parquet"])
    settings = Config(run_dir=str(tmp_path))
    settings.select.share = 0.5
    return settings


def rows(cfg: Config) -> dict[str, str]:
    table = pq.read_table(Path(cfg.run_dir) / "select" / "selection.parquet", columns=["id", "reason"])
    return dict(zip(table["id"].to_pylist(), table["reason"].to_pylist()))


def test_every_sample_has_one_fate_and_the_budget_holds(cfg: Config) -> None:
    select.run(cfg)
    fates = rows(cfg)
    assert len(fates) == 43
    assert fates["f" * 32] == "near-duplicate"
    assert fates[f"{41:032x}"] == "repetitive"
    assert fates[f"{42:032x}"] == "too short"
    summary = json.loads((Path(cfg.run_dir) / "select" / "summary.json").read_text())
    open_tokens = summary["tokens"]["kept"] + summary["tokens"]["budget"]
    assert summary["tokens"]["kept"] <= 0.5 * open_tokens
    assert summary["tokens"]["kept"] > 0.4 * open_tokens
    assert "highest" in (Path(cfg.run_dir) / "select" / "summary.html").read_text()


def test_the_same_data_and_settings_give_the_same_selection(cfg: Config, tmp_path: Path) -> None:
    select.run(cfg)
    first = rows(cfg)
    for file in (tmp_path / "select").iterdir():
        file.unlink()
    select.run(cfg)
    assert rows(cfg) == first


def test_other_settings_in_the_same_folder_are_refused(cfg: Config) -> None:
    select.run(cfg)
    cfg.select.share = 0.4
    with pytest.raises(UserError, match=r"select\.share"):
        select.run(cfg)


def test_training_takes_exactly_what_was_selected(cfg: Config) -> None:
    before, _ = load_data(cfg)
    assert len(before) == 43
    select.run(cfg)
    store, left_out = load_data(cfg)
    kept = {name for name, fate in rows(cfg).items() if fate == "kept"}
    assert set(store.ids.tolist()) == kept and left_out == 0


def test_a_selection_of_other_samples_is_refused(cfg: Config, tmp_path: Path) -> None:
    select.run(cfg)
    write_manifest(tmp_path / "distill", stage="distill", identity={"made": 2}, outputs=["samples-00000.parquet"])
    with pytest.raises(UserError, match="made from other samples"):
        load_data(cfg)


def test_quotas_of_unknown_domains_and_impossible_limits_are_refused(cfg: Config) -> None:
    cfg.select.domain_shares = {"law": 0.5}
    with pytest.raises(UserError, match="law"):
        select.run(cfg)
    cfg.select.domain_shares = {}
    cfg.select.tokens = 3
    with pytest.raises(UserError, match="shortest sample"):
        select.run(cfg)
