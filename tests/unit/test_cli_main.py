"""The command line from outside: help, plans, one-line errors and exit codes, without waiting for torch."""

import dataclasses
import os
import signal
import subprocess
import sys
import types

import pytest
import yaml

from jetspec_train import __main__ as command
from jetspec_train import stages
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import write_manifest
from jetspec_train.artifacts.resources import resource_folder
from jetspec_train.config import Config, load_config
from jetspec_train.stages import pipeline, status
from jetspec_train.stages.overview import as_yaml, help_text

CHECKOUT = resource_folder("conf").parent


def stand_in(monkeypatch, run=lambda cfg: None, plan=lambda cfg: {}):
    """Every stage is this one."""
    module = types.SimpleNamespace(run=run, plan=plan)
    monkeypatch.setattr(stages, "load_stage", lambda name: module)
    monkeypatch.setattr(pipeline, "load_stage", lambda name: module)


def test_help_names_stages_presets_and_every_key():
    text = help_text()
    for word in [
        *stages.STAGES,
        "quickstart",
        "gsm8k",
        "draft=dflash",
        "recipe=ultrachat",
        "exit codes",
        "train.learning_rate=0.001",
    ]:
        assert word in text
    assert max(len(line) for line in text.splitlines()) <= 130


def test_help_comes_without_torch_and_without_hydra():
    code = (
        "import sys; from jetspec_train.__main__ import main; code = main(['--help'])\n"
        "assert code == 0 and not {'torch', 'transformers', 'hydra', 'pyarrow'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], cwd=CHECKOUT, check=True, capture_output=True)


def test_no_arguments_show_the_help(capsys):
    assert command.main([]) == 0
    assert "usage:" in capsys.readouterr().out


def test_a_user_error_is_one_line_and_exit_code_2(capsys):
    assert command.main(["stage=trian"]) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and "Did you mean train?" in shown.err


def test_a_stage_refusing_is_exit_code_2(monkeypatch, capsys, tmp_path):
    def refuse(cfg):
        raise UserError("the target has gone")

    stand_in(monkeypatch, refuse)
    assert command.main(["stage=train", f"run_dir={tmp_path}"]) == 2
    assert capsys.readouterr().err == "jetspec_train: the target has gone\n"


def test_a_defect_is_not_hidden(monkeypatch, tmp_path):
    stand_in(monkeypatch, lambda cfg: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        command.main(["stage=train", f"run_dir={tmp_path}"])


def test_the_prompt_reaches_the_stage_unchanged(monkeypatch):
    seen = []
    stand_in(monkeypatch, lambda cfg: seen.append(cfg.prompt))
    text = " Solve: f(x)={1}, $y = ${x}\n'now' "
    assert command.main(["stage=generate", f"prompt={text}"]) == 0
    assert seen == [text]


def test_plan_prints_yaml_and_runs_nothing(monkeypatch, capsys, tmp_path):
    run_dir = tmp_path / "absent"
    stand_in(monkeypatch, lambda cfg: 1 / 0, lambda cfg: {"steps": 3, "folder": run_dir, "betas": (0.9, 0.95)})
    assert command.main(["stage=train", "plan=true", f"run_dir={run_dir}"]) == 0
    assert yaml.safe_load(capsys.readouterr().out) == {"steps": 3, "folder": str(run_dir), "betas": [0.9, 0.95]}
    assert not run_dir.exists()


def test_the_configuration_is_kept_in_the_run_directory(monkeypatch, tmp_path):
    stand_in(monkeypatch)
    run_dir = tmp_path / "a run"
    assert command.main(["stage=train", "preset=tiny", f"run_dir={run_dir}", "train.epochs=3"]) == 0
    kept = yaml.safe_load((run_dir / "config.yaml").read_text())
    assert kept == yaml.safe_load(as_yaml(dataclasses.asdict(load_config(["preset=tiny"])))) | {
        "stage": "train",
        "run_dir": str(run_dir),
        "train": kept["train"],
    }
    assert kept["train"]["epochs"] == 3.0


def test_only_the_first_process_keeps_it(monkeypatch, tmp_path):
    stand_in(monkeypatch)
    monkeypatch.setenv("RANK", "1")
    assert command.main(["stage=train", f"run_dir={tmp_path}/r"]) == 0
    assert not (tmp_path / "r").exists()


def test_the_working_directory_stays(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    stand_in(monkeypatch, lambda cfg: None)
    command.main(["stage=train", "run_dir=here"])
    assert os.getcwd() == str(tmp_path) and sorted(os.listdir()) == ["here"]


def test_an_unwritable_run_directory_is_a_user_error(monkeypatch, capsys, tmp_path):
    stand_in(monkeypatch)
    (tmp_path / "file").write_text("")
    assert command.main(["stage=train", f"run_dir={tmp_path / 'file'}"]) == 2
    assert "is a file" in capsys.readouterr().err


def test_ctrl_c_is_one_line_and_130(tmp_path):
    code = (
        "import sys, time, types; from jetspec_train import stages, __main__ as command\n"
        "def run(cfg):\n print('up', flush=True); time.sleep(60)\n"
        "stages.load_stage = lambda name: types.SimpleNamespace(run=run)\n"
        f"sys.exit(command.main(['stage=train', 'run_dir={tmp_path}']))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # A shell ignores the signal in what it starts in the background, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stdout is not None and process.stdout.readline() == "up\n"
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130 and "Traceback" not in errors and errors.strip().count("\n") == 0


def test_a_reader_that_leaves_is_no_error():
    command_line = f"{sys.executable} -m jetspec_train --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command_line], cwd=CHECKOUT, capture_output=True, text=True)
    assert done.stderr == "" and done.returncode == 0


def test_the_pipeline_runs_in_order_and_stops_at_the_first_failure(monkeypatch, tmp_path):
    ran = []

    def run(cfg):
        ran.append(cfg.stage)
        if cfg.stage == "export":
            raise UserError("no checkpoint")

    stand_in(monkeypatch, run, lambda cfg: {"of": cfg.stage})
    monkeypatch.setattr(pipeline, "preflight", lambda cfg: None)
    cfg = Config(run_dir=str(tmp_path), pipeline=["distill", "train", "export", "evaluate"])
    with pytest.raises(UserError, match="no checkpoint"):
        pipeline.run(cfg)
    assert ran == ["distill", "train", "export"]
    assert pipeline.plan(cfg)["evaluate"] == {"of": "evaluate"}


def test_what_would_fail_later_fails_before_the_first_stage(monkeypatch, tmp_path):
    from jetspec_train.artifacts import files
    from tests.tiny import tiny_target_config

    monkeypatch.setattr(stages.load_stage("distill"), "run", lambda cfg: pytest.fail("started"))
    cfg = Config(run_dir=str(tmp_path / "run"), target=tiny_target_config())
    cfg.recipe.prompts, cfg.distill.max_new_tokens = 5, 8
    cfg.draft.target_layer_ids = [0, 99]
    with pytest.raises(UserError, match="target_layer_ids"):
        pipeline.run(cfg)
    cfg.draft.target_layer_ids = [0, 1]
    cfg.evaluate.recipes = ["no-such-suite"]
    with pytest.raises(UserError, match="no-such-suite"):
        pipeline.run(cfg)
    cfg.evaluate.recipes = []
    monkeypatch.setattr(files, "free_bytes", lambda path: 1000)
    with pytest.raises(UserError, match=r"The pipeline needs about .* but only 1\.0 kB are free"):
        pipeline.run(cfg)
    cfg.target.name = str(tmp_path / "absent")
    with pytest.raises(UserError, match="absent"):
        pipeline.run(cfg)
    assert not (tmp_path / "run").exists()


def test_every_stage_has_its_module_and_both_functions():
    for name in stages.STAGES:
        module = stages.load_stage(name)
        assert callable(module.run) and callable(module.plan), name


def test_status_shows_each_stage(tmp_path, capsys):
    (tmp_path / "distill").mkdir()
    (tmp_path / "distill" / "a.txt").write_text("x")
    write_manifest(
        tmp_path / "distill", stage="distill", identity={}, outputs=["a.txt"], counts={"samples": 1200}, seconds=75
    )
    (tmp_path / "train" / "checkpoints" / "step-000100").mkdir(parents=True)
    (tmp_path / "train" / "checkpoints" / "step-000100" / "manifest.json").write_text("{}")
    (tmp_path / "train" / "metrics.jsonl").write_text(
        '{"step": 90, "kind": "train", "loss": 2.5}\n{"step": 100, "kind": "train", "loss": 1.25}\n{"torn'
    )
    status.run(Config(run_dir=str(tmp_path)))
    shown = capsys.readouterr().out
    assert "finished" in shown and "samples 1,200" in shown and "1 min 15 s" in shown
    assert "running?" in shown and "newest step-000100" in shown and "loss 1.25" in shown
    assert "evaluate   not begun" in shown
    with pytest.raises(UserError, match="does not exist"):
        status.run(Config(run_dir=str(tmp_path / "absent")))
