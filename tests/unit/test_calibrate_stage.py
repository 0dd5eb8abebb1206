"""stage=calibrate on a tiny target: what it writes, that a kill costs nothing, and who may use the result."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from jetspec_train.artifacts.bundle import read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import Config
from jetspec_train.decoding.bundles import drafter_from_bundle
from jetspec_train.decoding.calibration import Calibration
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.evaluation import shadow
from jetspec_train.stages import calibrate, export
from tests.tiny import tiny_target
from tests.verifier_tools import run_with_verifier


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Config:
    cfg = run_with_verifier(tmp_path_factory.mktemp("run"), bias=4.0)
    calibrate.run(cfg)
    return cfg


def result_of(cfg: Config) -> dict[str, Any]:
    return json.loads((Path(cfg.run_dir) / "calibrate" / "calibration.json").read_text())


def test_it_writes_a_readable_calibration_a_figure_and_a_manifest(finished: Config) -> None:
    folder = Path(finished.run_dir) / "calibrate"
    found = Calibration.from_dict(result_of(finished))
    assert found.mode == "match_greedy" and set(found.temperatures) == {"correctness", "confidence"}
    assert len(found.temperatures["correctness"]) == 7
    assert found.threshold.stage_length == 2 and found.threshold.value is None and not found.threshold.certified
    assert found.threshold.needed >= 373 and len(found.threshold.grid) <= 1
    assert found.pattern is None or len(found.pattern.low) == len(found.pattern.statistics)
    assert sum(found.threshold.mix.values()) == 6 and found.fitted_on["prompts"]["calibrate_fit"] == 6
    assert found.quality["rounds"] > 0 and len(found.quality["positions"]) == 7
    assert (folder / "reliability.png").read_bytes().startswith(b"\x89PNG")
    manifest = read_manifest(folder)
    assert manifest is not None and set(manifest.outputs) == {"calibration.json", "reliability.png"}
    assert manifest.counts["certify_prompts"] == 6


def test_a_second_run_has_nothing_to_do_and_other_settings_have(
    finished: Config, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadow.ShadowRun, "run", lambda *_, **__: pytest.fail("decoded again"))
    calibrate.run(finished)
    assert "nothing to do" in capsys.readouterr().out


def test_killed_after_any_batch_it_continues_to_the_same_result(
    finished: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = run_with_verifier(tmp_path, bias=4.0)
    ran: list[tuple[str, ...]] = []
    original = shadow.ShadowRun.run

    def one_batch(self: Any, prompts: Any, **named: Any) -> Any:
        if len(ran) % 2:
            ran.append(())
            raise KeyboardInterrupt
        ran.append(tuple(prompt.id for prompt in prompts))
        return original(self, prompts, **named)

    monkeypatch.setattr(shadow.ShadowRun, "run", one_batch)
    for _ in range(20):
        try:
            calibrate.run(cfg)
        except KeyboardInterrupt:
            continue
        break
    assert result_of(cfg) == result_of(finished)
    assert len(ran) > 8 and ran[1::2] == [()] * len(ran[1::2])


def test_export_packs_it_and_the_decoder_reads_it_with_these_weights_alone(
    finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tiny_target("llama")
    export.run(finished)
    bundle = read_bundle(Path(finished.run_dir) / "export" / "bundle")
    assert bundle.calibration == result_of(finished)
    drafter = drafter_from_bundle(bundle, target)
    assert drafter.companions.calibration.temperatures == Calibration.from_dict(result_of(finished)).temperatures
    assert "certified threshold" in (bundle.path / "README.md").read_text()
    with pytest.raises(UserError, match="no threshold is certified"):
        Decoder(target, drafter, dataclasses.replace(finished.decoding, policy="trusting", stages=2))
    foreign = dataclasses.replace(bundle, calibration={**result_of(finished), "bundle": "0" * 64})
    with pytest.raises(UserError, match="was made for the weights 000000000000"):
        drafter_from_bundle(foreign, target)
    capsys.readouterr()
    export.run(finished)
    assert "nothing to do" in capsys.readouterr().out


def test_a_calibration_of_another_checkpoint_is_not_exported(
    finished: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = run_with_verifier(tmp_path, step=9)
    (tmp_path / "calibrate").mkdir()
    for name in ("calibration.json", "reliability.png", "manifest.json"):
        (tmp_path / "calibrate" / name).write_bytes((Path(finished.run_dir) / "calibrate" / name).read_bytes())
    export.run(cfg)
    assert "another checkpoint" in capsys.readouterr().out
    assert read_bundle(tmp_path / "export" / "bundle").calibration is None


def test_without_a_verifier_there_is_nothing_to_calibrate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = run_with_verifier(tmp_path, verifier=False)
    calibrate.run(cfg)
    assert "nothing to calibrate" in capsys.readouterr().out and not (tmp_path / "calibrate").exists()
    cfg.verifier.enabled = False
    assert "skipped" in calibrate.plan(cfg)


def test_enough_agreeing_prompts_certify_and_trusting_then_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """400 prompts whose skipped stages the target always agrees with; made up, a tiny target cannot give them."""
    cfg = run_with_verifier(tmp_path, bias=4.0)
    cfg.calibrate = dataclasses.replace(cfg.calibrate, fit_prompts=60, certify_prompts=400, batch_size=100)
    cfg.recipe.overrides = {"procedural": {"count": 16000}}

    def made_up(self: Any, prompts: Any, **_: Any) -> Any:
        records = []
        for prompt in prompts:
            nodes = [
                {"token": n, "parent": n - 1, "correctness_logit": 4.0, "confidence_logit": 3.0, "logprob": -0.1}
                for n in range(4)
            ]
            stage = {
                "stage": 0,
                "nodes": [0, 1],
                "survival": 0.95 + 0.01 * (len(records) % 5),
                "action": "defer",
                "statistics": {"entropy": 0.5, "sink": 0.1, "locality": 0.6, "copy": 0.2},
            }
            records.append(
                {
                    "prompt": prompt.id,
                    "domain": prompt.domain,
                    "round": 0,
                    "nodes": nodes,
                    "sent": [0, 1, 2, 3],
                    "accepted": [0, 1],
                    "emitted": [0, 1, 9],
                    "target_choices": [0, 1, 9, 9, 9],
                    "decisions": [stage] if self._settings.stages else [],
                }
            )
        return records, []

    monkeypatch.setattr(shadow.ShadowRun, "run", made_up)
    calibrate.run(cfg)
    found = Calibration.from_dict(result_of(cfg)).threshold
    said = capsys.readouterr().out
    assert found.certified and found.errors == 0 and found.prompts >= 373 and found.value >= 0.85
    assert all(row["passed"] for row in found.grid) and "certified: 99.2 %" in said
    export.run(cfg)
    target = tiny_target("llama")
    drafter = drafter_from_bundle(read_bundle(tmp_path / "export" / "bundle"), target)
    settings = dataclasses.replace(cfg.decoding, policy="trusting", stages=2)
    assert Decoder(target, drafter, settings).generate([[5, 6, 7]], max_new_tokens=8)[0].tokens
    with pytest.raises(UserError, match=r"stages of 2 tokens, but decoding\.stages=3"):
        Decoder(target, drafter, dataclasses.replace(settings, stages=3))


def test_stages_longer_than_the_block_are_never_skipped_and_that_is_a_result(finished: Config, tmp_path: Path) -> None:
    cfg = run_with_verifier(tmp_path)
    cfg.calibrate = dataclasses.replace(cfg.calibrate, stages=9)
    calibrate.run(cfg)
    assert result_of(cfg)["threshold"]["value"] is None and result_of(cfg)["pattern"] is None


def test_a_split_without_prompts_is_named(tmp_path: Path) -> None:
    cfg = run_with_verifier(tmp_path)
    cfg.calibrate = dataclasses.replace(cfg.calibrate, max_new_tokens=511)
    with pytest.raises(UserError, match="no prompt of at most 1 tokens in its split calibrate_fit"):
        calibrate.run(cfg)
