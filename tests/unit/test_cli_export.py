"""stage=export on a tiny target: the bundle is the checkpoint bit for bit, or it is refused; stage=generate uses it."""

import dataclasses
import json

import pytest
import torch

from jetspec_train import __main__ as command
from jetspec_train.artifacts.bundle import read_bundle
from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.manifest import read_manifest
from jetspec_train.config import Config
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.stages import export
from jetspec_train.training.checkpoint import TrainState, save_checkpoint
from tests.tiny import tiny_target, tiny_target_config


def make_run(run_dir, *, step=5, best=None, seed=0, kind="llama", **draft):
    """A run directory with one checkpoint of a random head; returns its configuration and weights."""
    target = tiny_target(kind)
    cfg = Config(run_dir=str(run_dir), target=tiny_target_config(kind))
    cfg.draft = dataclasses.replace(cfg.draft, layers=1, block=4, taps=2, parent_rank=8, **draft)
    config = resolve_draft_config(cfg.draft, target.config, mask_token_id=target.mask_token_id)
    torch.manual_seed(seed)
    head = DraftHead(config)
    for weight in head.parameters():  # a fresh parent term is silent; a trained one is not
        torch.nn.init.normal_(weight, std=0.2)
    state = TrainState(step=step, best=best, token_visits=100, seconds=1.0)
    state.identity = {"target": target.identity.to_dict(), "seed": 0}
    save_checkpoint(
        run_dir / "train" / "checkpoints",
        state,
        tensors={f"draft.{name}": tensor for name, tensor in head.state_dict().items()},
        draft=config.to_dict(),
        save_engine=lambda folder: torch.save({}, folder / "optimizer.pt"),
        keep=2,
    )
    return cfg, head


@pytest.mark.parametrize("parent", ["vanilla", "none", "gated"])
def test_the_bundle_is_the_checkpoint(tmp_path, capsys, parent):
    cfg, head = make_run(tmp_path, best={"step": 5, "acceptance_length": 2.5}, parent=parent)
    export.run(cfg)
    bundle = read_bundle(tmp_path / "export" / "bundle")
    assert set(bundle.tensors) == {f"draft.{name}" for name in head.state_dict()}
    for name, tensor in head.state_dict().items():
        assert torch.equal(bundle.tensors[f"draft.{name}"], tensor)
    assert bundle.config["draft"] == head.config.to_dict() and bundle.config["verifier"] is None
    target = tiny_target()
    assert target.identity.to_dict().items() <= bundle.meta["target"].items()
    assert bundle.meta["draft"]["ratio_to_target"] == head.trainable_parameters / target.parameters
    card = (bundle.path / "README.md").read_text()
    assert target.identity.name in card and "2.500" in card and "stage=generate" in card
    manifest = read_manifest(tmp_path / "export")
    assert manifest is not None and "bundle/model.safetensors" in manifest.outputs
    assert "bit for bit" in capsys.readouterr().out


def test_a_second_export_has_nothing_to_do_and_a_newer_checkpoint_has(tmp_path, capsys):
    cfg, _ = make_run(tmp_path)
    export.run(cfg)
    written = (tmp_path / "export" / "bundle" / "bundle.json").stat().st_mtime_ns
    export.run(cfg)
    assert "nothing to do" in capsys.readouterr().out
    assert (tmp_path / "export" / "bundle" / "bundle.json").stat().st_mtime_ns == written
    _, newer = make_run(tmp_path, step=9, seed=1)
    export.run(cfg)
    weights = read_bundle(tmp_path / "export" / "bundle").tensors
    assert torch.equal(weights["draft.fc.weight"], newer.state_dict()["fc.weight"])
    (tmp_path / "export" / "bundle" / "config.json").unlink()
    export.run(cfg)
    assert "exporting again" in capsys.readouterr().out and read_bundle(tmp_path / "export" / "bundle")


def test_another_target_is_refused_with_both_values(tmp_path):
    cfg, _ = make_run(tmp_path)
    cfg.target = tiny_target_config("qwen3")
    with pytest.raises(UserError) as caught:
        export.run(cfg)
    message = str(caught.value)
    for target in (tiny_target("llama"), tiny_target("qwen3")):
        assert target.identity.name in message and target.identity.config_hash[:12] in message
    assert not (tmp_path / "export" / "bundle").exists()


def test_a_bundle_that_differs_is_found(tmp_path):
    cfg, head = make_run(tmp_path)
    export.run(cfg)
    weights = dict(head.state_dict())
    weights["norm.weight"] = weights["norm.weight"].clone()
    weights["norm.weight"][3] *= 1.001
    with pytest.raises(UserError, match="logits differ by up to"):
        export.compare_with_checkpoint(
            tmp_path / "export" / "bundle", "block", head.config.to_dict(), weights, tiny_target("llama")
        )


def test_without_a_checkpoint(tmp_path):
    with pytest.raises(UserError, match="run stage=train first"):
        export.run(Config(run_dir=str(tmp_path), target=tiny_target_config()))


def test_generate_streams_an_answer_of_the_bundle(tmp_path, capsys):
    cfg, _ = make_run(tmp_path)
    export.run(cfg)
    bundle = tmp_path / "export" / "bundle"
    capsys.readouterr()
    words = ["stage=generate", f"bundle={bundle}", "prompt=What's 2+2 (now)?", "target.dtype=float32"]
    texts = []
    for decoding in ("tree", "plain"):
        assert command.main([*words, f"decoding={decoding}", "decoding.max_new_tokens=24"]) == 0
        shown = capsys.readouterr()
        texts.append(shown.out)
        assert "acceptance length" in shown.err and "tokens/s" in shown.err
    assert texts[0] == texts[1] and len(texts[0]) > 1
    assert command.main(["stage=generate", f"bundle={bundle}", "prompt=x", "plan=true"]) == 0
    assert cfg.target.name in capsys.readouterr().out


def test_generate_refuses_another_target(tmp_path, capsys):
    cfg, _ = make_run(tmp_path)
    export.run(cfg)
    words = ["stage=generate", f"bundle={tmp_path / 'export' / 'bundle'}", "prompt=x"]
    assert command.main([*words, f"target.name={tiny_target_config('qwen3').name}"]) == 2
    errors = capsys.readouterr().err
    assert tiny_target("llama").identity.config_hash[:12] in errors
    assert tiny_target("qwen3").identity.config_hash[:12] in errors


def test_other_forms_are_written_beside_the_bundle(tmp_path):
    cfg, _ = make_run(tmp_path, mask="causal", layout="in_place", parent="none", clean_prefix=0.0)
    cfg.export.formats = ["bundle", "jetspec"]
    cfg.export.target_name = "org/tiny"
    export.run(cfg)
    written = json.loads((tmp_path / "export" / "jetspec" / "config.json").read_text())
    assert written["architectures"] == ["DFlashDraftModel"] and written["dflash_config"]["causal_head"] is True
    manifest = read_manifest(tmp_path / "export")
    assert manifest is not None and "jetspec/model.safetensors" in manifest.outputs
