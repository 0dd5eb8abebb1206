"""stage=doctor: findings and costs before anything runs."""

import dataclasses
import json

import pytest

from jetspec_train.config import Config, load_config
from jetspec_train.stages import costs, doctor
from tests.tiny import tiny_model, tiny_target, tiny_target_config

STATES = {doctor.OK, doctor.NOTE, doctor.PROBLEM}


def configuration(**changes) -> Config:
    cfg = Config(target=tiny_target_config(), **changes)
    cfg.recipe.prompts = 10
    cfg.distill.max_new_tokens = 20
    return cfg


def test_the_report_is_complete_and_written(tmp_path, capsys):
    cfg = configuration(run_dir=str(tmp_path / "run"))
    cfg.doctor.json = str(tmp_path / "found.json")
    doctor.run(cfg)
    shown = capsys.readouterr().out
    found = json.loads((tmp_path / "found.json").read_text())
    names = {finding["name"] for finding in found["findings"]}
    assert {"torch", "processor", "GPU", "memory", "disk", "DeepSpeed", "Slurm", "W&B", "versions"} <= names
    assert all(f["state"] in STATES and f["text"] for f in found["findings"])
    assert found["costs"]["tokens"] <= 200 and "distill" in shown and "evaluate" in shown
    assert not (tmp_path / "run").exists()


def test_facts_are_those_of_the_loaded_target():
    facts = costs.facts_of(configuration())
    target = tiny_target()
    assert (facts.parameters, facts.vocab_size) == (target.parameters, target.vocab_size)
    layer = tiny_model("llama").model.layers[0]
    assert abs(facts.layer_parameters - sum(p.numel() for p in layer.parameters())) <= target.hidden_size
    cache = target.new_cache(1, 64)
    assert facts.kv_bytes_per_token * 64 == cache.memory_bytes


def test_costs_grow_with_what_causes_them():
    cfg = configuration()
    cfg.train.sequences, cfg.train.sequence_length = 1, 16
    facts = costs.facts_of(cfg)

    def timed(_, rows):
        return rows * 1e-3

    base = costs.estimate(cfg, facts, timed)
    cfg.recipe.prompts = 20
    more = costs.estimate(cfg, facts, timed)
    assert more["tokens"] == 2 * base["tokens"]
    assert more["seconds"]["distill"] == pytest.approx(2 * base["seconds"]["distill"])
    assert more["seconds"]["train"] == pytest.approx(2 * base["seconds"]["train"])
    cfg.train.features = "cache"
    cached = costs.estimate(cfg, facts, timed)
    assert cached["disk_bytes"]["features"] == more["tokens"] * (facts.taps + 1) * facts.hidden_size * 2
    cfg.train.steps = 7
    assert costs.estimate(cfg, facts, timed)["seconds"]["train"] < cached["seconds"]["train"]
    cfg.recipe.prompts, cfg.recipe.name = None, "gsm8k"  # from the hub: not read just to be counted
    unknown = costs.estimate(cfg, facts, timed)
    assert (
        unknown["tokens"] is None
        and unknown["seconds"]["distill"] is None
        and doctor.cost_table({**unknown, "facts": dataclasses.asdict(facts)})
    )


def test_negatives_and_calibration_are_part_of_the_costs():
    cfg = configuration()
    facts = costs.facts_of(cfg)

    def timed(_, rows):
        return rows * 1e-3

    found = costs.estimate(cfg, facts, timed)
    shown = doctor.cost_table({**found, "facts": dataclasses.asdict(facts)})
    assert "negatives" in shown and "calibrate" in shown
    samples = costs.negative_samples(cfg, found["tokens"])
    assert 0 < samples <= 10 and found["disk_bytes"]["negatives"] == samples * cfg.negatives.per_sample * 900
    cfg.negatives.samples = 1
    fewer = costs.estimate(cfg, facts, timed)
    assert fewer["seconds"]["negatives"] == pytest.approx(found["seconds"]["negatives"] / samples)
    cfg.negatives.per_sample *= 2
    assert costs.estimate(cfg, facts, timed)["seconds"]["negatives"] > fewer["seconds"]["negatives"]
    cfg.verifier.negatives_share = 0.0  # then training reads none and the stage makes none
    without = costs.estimate(cfg, facts, timed)
    assert "negatives" not in without["seconds"] and "negatives" not in without["disk_bytes"]


def test_the_measurement_is_a_time_and_leaves_the_threads_alone():
    import torch

    threads = torch.get_num_threads()
    facts = costs.facts_of(configuration())
    assert 0 < costs.measure_forward(facts, 4) < 1
    assert torch.get_num_threads() == threads


def test_too_little_disk_or_memory_is_a_problem(monkeypatch, tmp_path):
    cfg = configuration(run_dir=str(tmp_path))
    facts = costs.facts_of(cfg)
    estimate = {"facts": dataclasses.asdict(facts), **costs.estimate(cfg, facts, lambda *_: 1.0)}
    assert doctor.judge(cfg, estimate) == []
    estimate["disk_bytes"] = {"train": 10**18}
    estimate["memory_bytes"] = {"train": 10**18}
    found = doctor.judge(cfg, estimate)
    assert [f.name for f in found] == ["disk", "memory"] and all(f.state == doctor.PROBLEM for f in found)
    assert "train.sequences" in found[1].text


def test_an_absent_target_is_said_and_the_rest_still_shown(tmp_path, capsys):
    doctor.run(load_config([f"target.name={tmp_path / 'absent'}", f"run_dir={tmp_path}"]))
    shown = capsys.readouterr().out
    assert "torch" in shown and "costs are not known" in shown and "absent" in shown


def test_what_the_configuration_needs_and_lacks_is_a_problem(monkeypatch):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda tool: None)
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda name: None)
    for words, check in [
        (["cluster=slurm"], doctor._slurm),
        (["engine=deepspeed"], doctor._deepspeed),
        (["tracking=wandb"], doctor._wandb),
    ]:
        assert check(load_config(words)).state == doctor.PROBLEM
        assert check(load_config()).state != doctor.PROBLEM


def test_a_target_that_offline_nodes_would_miss_is_a_problem_with_its_command(monkeypatch, tmp_path):
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    words = ["cluster=slurm", "target.name=someone/absent-model"]
    finding = doctor._slurm(load_config(words))
    assert finding.state == doctor.PROBLEM and "hf download someone/absent-model" in finding.text
    assert "hf download" not in doctor._slurm(load_config([*words, "cluster.offline=false"])).text


def test_a_login_is_found_in_the_environment_or_a_netrc_file(monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.delenv("WANDB_BASE_URL", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not doctor.logged_in()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password made-up\n")
    (tmp_path / "netrc").chmod(0o600)
    assert doctor.logged_in()
    (tmp_path / "netrc").write_text("machine example.org login user password made-up\n")
    assert not doctor.logged_in()
    monkeypatch.setenv("WANDB_API_KEY", "made-up")
    assert doctor.logged_in()


def test_versions_are_compared_without_their_build_tags():
    tested = doctor.tested_versions()
    assert tested is not None and "torch" in tested
    assert doctor.version_differences({"torch": "0.0.1", "no-such-package": "1"}).keys() == {"torch"}
    from jetspec_train.artifacts.provenance import package_version

    have = package_version("torch")
    assert doctor.version_differences({"torch": f"{have.split('+')[0]}+other"}) == {}
    assert doctor.version_differences(None) is None
