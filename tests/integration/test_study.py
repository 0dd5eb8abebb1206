"""scripts/study_drafts.py: each piece once, from stored samples alone, continued where it stopped."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jetspec_train.config import Config, DistillConfig, RecipeConfig
from jetspec_train.decoding.shortlist import make_shortlist
from jetspec_train.stages import distill
from tests.tiny import tiny_target_config


def load_script() -> Any:
    path = Path(__file__).parents[2] / "scripts" / "study_drafts.py"
    spec = importlib.util.spec_from_file_location("study_drafts", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


study = load_script()


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str]]:
    """A finished distillation by a tiny target, and the settings with which it was made."""
    folder = tmp_path_factory.mktemp("study")
    rows = [{"question": f"What is {n} and {n * 7 % 13}?"} for n in range(30)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = {"name": "rows", "path": "rows.jsonl", "columns": {"question": "question"}}
    (folder / "recipe.yaml").write_text(json.dumps({"shares": {"train": 0.8, "dev": 0.2}, "sources": [source]}))
    cfg = Config(
        run_dir=str(folder / "run"),
        target=tiny_target_config("llama"),
        recipe=RecipeConfig(path=str(folder / "recipe.yaml")),
        distill=DistillConfig(max_new_tokens=16, batch_size=8),
    )
    distill.run(cfg)
    words = [f"target.name={cfg.target.name}", "target.dtype=float32", f"recipe={folder / 'recipe.yaml'}"]
    words += ["train.steps=2", "train.sequence_length=64", "train.sequences=2", "train.anchors=4", "draft.taps=2"]
    return folder, words


def test_piece_by_piece_with_table_and_figures(
    prepared: tuple[Path, list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, words = prepared
    own = [str(folder / "run"), str(folder / "out"), "--prompts", "3", "--new-tokens", "8", "--timed", "1"]
    assert study.main([*own, "--only", "budget-4", "--", *words]) == 2
    assert "run --only base" in capsys.readouterr().err
    assert study.main([*own, "--only", "base", "preset-eagle3", "--", *words]) == 0
    assert study.main([*own, "--only", "base", "builder-all-2", "builder-exact", "--", *words]) == 0
    assert "base is done" in capsys.readouterr().out
    results = json.loads((folder / "out" / "study.json").read_text())
    assert list(results) == ["base", "preset-eagle3", "builder-exact", "builder-all-2"]
    for result in (results["base"], results["preset-eagle3"]):
        for shape in ("chain", "tree"):
            assert result[shape]["acceptance_length"] >= 1.0 and result[shape]["draft_ms"] > 0
        assert result["parameters"] > 0 and result["chain_mflops"] > 0
    assert results["base"]["parameters"] != results["preset-eagle3"]["parameters"]
    text = (folder / "out" / "study.md").read_text()
    assert text.count("\n") == 6 and "| builder-all-2 | - |" in text
    figures = {path.name for path in (folder / "out" / "figures").iterdir()}
    assert figures == {"preset.png", "builder.png"}
    assert not (folder / "run" / "train").exists()  # the source stays as it was
    assert study.main([*own, "--only", "base", "--", *words, "train.steps=3"]) == 2
    assert "Give another OUT" in capsys.readouterr().err
    assert study.main([*own, "--only", "bass"]) == 2
    assert "--only bass" in capsys.readouterr().err


def test_every_item_of_the_study_is_a_configuration_and_differs_from_the_base() -> None:
    from jetspec_train.config import load_config, to_dict

    found = {}
    for name, words in study.items().items():
        found[name] = to_dict(load_config(study.settings([*study.BASE_WORDS, *words, "stage=train"])))
    for name, cfg in found.items():
        assert (name == "base") == (cfg == found["base"]), name


def test_the_builder_that_adds_all_children_keeps_families_whole() -> None:
    logits = np.random.default_rng(0).normal(size=(4, 50)).astype(np.float32) * 3
    tree = study.build_all(make_shortlist(logits, 16), None, 12, None, 3)
    assert len(tree) == 12 and (tree.parents < np.arange(12)).all()
    assert set(np.unique(tree.parents, return_counts=True)[1]) == {3}
    assert (tree.scores[tree.parents[tree.parents >= 0]] >= tree.scores[tree.parents >= 0]).all()
