"""stage=evaluate from a configuration: held-out prompts only, nothing done twice, errors for people."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import Config, EvaluateConfig, RecipeConfig
from jetspec_train.stages import evaluate
from tests.tiny import tiny_target_config
from tests.unit.test_evaluation_figures import made_up_records, report_of
from tests.unit.test_evaluation_session import bundle  # noqa: F401 - a fixture


@pytest.fixture
def cfg(bundle: Any, tmp_path: Path) -> Config:  # noqa: F811
    rows = [{"question": f"What is {n} and {n}?"} for n in range(60)]
    (tmp_path / "questions.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    (tmp_path / "recipe.yaml").write_text(
        "sources: [{name: sums, path: questions.jsonl, domain: sums, columns: {question: question}}]\n"
        "shares: {train: 0.8, report: 0.2}\n"
    )
    return Config(
        run_dir=str(tmp_path / "run"),
        bundle=str(bundle.path),
        recipe=RecipeConfig(path=str(tmp_path / "recipe.yaml")),
        target=tiny_target_config("llama"),
        evaluate=EvaluateConfig(prompts=2, max_new_tokens=8, bootstrap=50, cost_context=0, replay=1),
    )


def test_a_second_call_has_nothing_to_do_and_a_change_is_measured_again(
    cfg: Config, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluate.run(cfg)
    folder = Path(cfg.run_dir) / "evaluate"
    written = (folder / "report.json").stat().st_mtime_ns
    first = capsys.readouterr().out
    assert "acceptance length" in first and str(folder / "report.html") in first
    evaluate.run(cfg)
    again = capsys.readouterr().out
    assert "nothing to do" in again and "acceptance length" in again
    assert (folder / "report.json").stat().st_mtime_ns == written
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.counts["prompts"] == 2
    assert {"report.json", "report.html", "records.jsonl", "figures/speedup.png"} <= manifest.outputs.keys()
    cfg.evaluate.prompts = 1
    evaluate.run(cfg)
    assert "evaluate.prompts: 2 there, 1 asked" in capsys.readouterr().out
    assert len(json.loads((folder / "report.json").read_text())["records"]) == 1


def test_only_held_out_prompts_are_measured(cfg: Config) -> None:
    prompts = list(evaluate.report_prompts(cfg))
    assert 0 < len(prompts) < 30 and {prompt.split for prompt in prompts} == {"report"}


def test_without_a_bundle_the_stage_says_what_to_run(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="stage=export"):
        evaluate.run(Config(run_dir=str(tmp_path)))


def test_a_plan_names_the_contenders_and_loads_nothing(cfg: Config) -> None:
    cfg.evaluate.baselines = ["generate"]
    cfg.evaluate.variants = {"chain": {"shape": "chain"}}
    assert evaluate.plan(cfg)["contenders"] == ["plain", "speculative", "chain", "generate"]


def test_training_facts_come_from_the_bundle(cfg: Config, bundle: Any, tmp_path: Path) -> None:  # noqa: F811
    facts = evaluate.training_facts(bundle, tmp_path)
    assert facts["supervised_tokens"] is None and facts["seconds"] is None
    bundle.meta["training"] = {"supervised_tokens": 5, "budget_tokens": 9, "seconds": 2.0, "step": 3}
    facts = evaluate.training_facts(bundle, tmp_path)
    assert (facts["supervised_tokens"], facts["budget_tokens"], facts["seconds"]) == (5, 9, 2.0)


def test_the_page_opens_in_a_browser_without_an_error(tmp_path: Path) -> None:
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("no Chromium on this machine")
    from jetspec_train.evaluation.report import write_report

    write_report(tmp_path, report_of(made_up_records()))
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--enable-logging=stderr"]
    command += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", (tmp_path / "report.html").as_uri()]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in result.stderr
    assert result.stdout.count("<img ") == 6 and "Faster:" in result.stdout
