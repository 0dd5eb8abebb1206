"""Sources of targets: every way weights are stored loads; every way a source is broken is said in one message."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import TargetConfig
from jetspec_train.targets import loading
from jetspec_train.targets.loading import load_target, load_tokenizer, target_identity
from tests.tiny import tiny_config, tiny_model, tiny_target_config, tiny_target_dir, tiny_tokenizer

PROMPT = torch.tensor([[5, 99, 7, 250, 31]])


def config_of(folder: Path, **changes: Any) -> TargetConfig:
    return TargetConfig(name=str(folder), **{"dtype": "float32", "device": "cpu", **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(tiny_target_dir("llama"), tmp_path / "target"))


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("shard", ["5GB", "40KB"], ids=["single-file", "sharded"])
def test_tied_untied_single_and_sharded_weights_load(tmp_path: Path, tied: bool, shard: str) -> None:
    model = tiny_model("llama", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path, max_shard_size=shard)
    tiny_tokenizer().save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors.index.json").exists() == (shard == "40KB")
    target = load_target(config_of(tmp_path))
    with torch.no_grad():
        expected = model(input_ids=PROMPT).logits
    output = target.forward(PROMPT, cache=target.new_cache(1, 8))
    torch.testing.assert_close(target.logits(output.hidden_BND), expected, atol=1e-4, rtol=1e-4)
    assert (target.head.weight is target.embedding.weight) == tied


def test_facts_of_a_target() -> None:
    target = load_target(tiny_target_config("llama"))
    assert (target.hidden_size, target.vocab_size, target.num_layers, target.max_positions) == (48, 300, 3, 512)
    assert target.dtype == torch.float32 and target.device.type == "cpu"
    assert target.eos_ids == (2,) and target.pad_id == 0 and target.mask_token_id == 3
    assert not any(parameter.requires_grad for parameter in target.model.parameters())
    assert target.identity == target_identity(tiny_target_config("llama"))


def test_identity_tells_weights_config_tokenizer_and_template_apart(folder: Path) -> None:
    original = target_identity(config_of(folder)).to_dict()
    other = target_identity(config_of(tiny_target_dir("llama", seed=1))).to_dict()
    assert other["revision"] != original["revision"] and other["config_hash"] == original["config_hash"]
    optioned = target_identity(config_of(folder, template_options={"thinking": True})).to_dict()
    assert {key for key in original if original[key] != optioned[key]} == {"template_hash"}
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "transformers_version": "9.9", "dtype": "bfloat16"}))
    assert target_identity(config_of(folder)).to_dict() == original
    (folder / "config.json").write_text(json.dumps({**settings, "rms_norm_eps": 0.5}))
    assert target_identity(config_of(folder)).config_hash != original["config_hash"]


def test_end_tokens_may_be_a_list(folder: Path) -> None:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    settings = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**settings, "eos_token_id": [2, 9]}))
    assert load_tokenizer(config_of(folder)).eos_ids == (2, 7, 9)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.*does not exist"):
        load_target(config_of(tmp_path / "nowhere"))


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no config\.json"):
        load_target(config_of(tmp_path))


def test_missing_weights_and_unfinished_downloads_are_named(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "model.safetensors.incomplete")
    with pytest.raises(UserError, match=r"no model.safetensors.*model.safetensors.incomplete"):
        load_target(config_of(folder))


def test_missing_shards_are_named(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path, max_shard_size="40KB")
    tiny_tokenizer().save_pretrained(tmp_path)
    gone = sorted(tmp_path.glob("model-*.safetensors"))[1]
    gone.unlink()
    with pytest.raises(UserError, match=rf"half-downloaded.*{gone.name}"):
        load_target(config_of(tmp_path))


def test_a_cut_off_weight_file_is_named(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"cut off: model.safetensors"):
        load_target(config_of(folder))


def test_a_missing_tokenizer_is_said(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (folder / name).unlink(missing_ok=True)
    with pytest.raises(UserError, match="tokenizer"):
        load_target(config_of(folder))


def test_a_tokenizer_without_template_needs_a_stated_plain_one(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"target\.template=plain"):
        load_tokenizer(config_of(folder))
    assert load_tokenizer(config_of(folder, template="plain")).render_text([{"role": "user", "content": "Hi"}])


def test_an_unreachable_hub_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=r"no local folder.*network.*embedded"):
        load_target(TargetConfig(name="nobody/nothing-at-all"))


def test_remote_code_is_never_run(folder: Path) -> None:
    settings = json.loads((folder / "config.json").read_text())
    settings.update(
        model_type="own_invention", auto_map={"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.M"}
    )
    (folder / "config.json").write_text(json.dumps(settings))
    (folder / "evil.py").write_text(f"open({str(folder / 'ran')!r}, 'w').close()\n")
    with pytest.raises(UserError):
        load_target(config_of(folder))
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("kind", "settings", "reason"),
    [
        ("mamba", {}, "recurrent"),
        ("falcon_h1", {}, "recurrent"),
        ("qwen3_next", {}, "linear-attention"),
        ("recurrent_gemma", {}, "recurrent"),
        ("llama4_text", {}, "chunked"),
        ("gemma3n_text", {}, "reuse the keys"),
        ("t5", {}, "encoder-decoder"),
    ],
)
def test_unsupported_architectures_are_refused_before_weights_are_read(
    tmp_path: Path, kind: str, settings: dict[str, Any], reason: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, **settings}))
    with pytest.raises(UserError, match=reason) as refusal:
        load_target(config_of(tmp_path))
    assert kind.removesuffix("_text") in str(refusal.value)


def test_linear_attention_layers_of_an_unknown_family_are_refused() -> None:
    from jetspec_train.targets.families import check_architecture

    config = tiny_config("qwen3")
    config.layer_types = ["full_attention", "linear_attention", "full_attention"]
    with pytest.raises(UserError, match="linear_attention"):
        check_architecture(config, "mine")


def test_taps_outside_the_target_are_refused() -> None:
    target = load_target(tiny_target_config("llama"))
    with pytest.raises(UserError, match="layers 0 to 2"):
        target.forward(PROMPT, cache=target.new_cache(1, 8), taps=(0, 3))


def test_devices_and_dtypes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert loading.pick_device(TargetConfig()) == "cpu"
    with pytest.raises(UserError, match="no CUDA device"):
        loading.pick_device(TargetConfig(device="cuda"))
    with pytest.raises(UserError, match="allowed: auto, cpu, cuda"):
        loading.pick_device(TargetConfig(device="tpu"))
    monkeypatch.setattr(loading, "cpu_multiplies_bfloat16", lambda: True)
    assert loading.pick_dtype(TargetConfig(), "cpu") == "bfloat16"
    monkeypatch.setattr(loading, "cpu_multiplies_bfloat16", lambda: False)
    assert loading.pick_dtype(TargetConfig(), "cpu") == "float32"
    assert loading.pick_dtype(TargetConfig(dtype="bfloat16"), "cpu") == "bfloat16"
    with pytest.raises(UserError, match="float8"):
        loading.pick_dtype(TargetConfig(dtype="float8"), "cpu")


def test_lengths_stay_where_rotary_angles_do_not_change() -> None:
    from jetspec_train.targets.families import usable_positions

    assert usable_positions(tiny_config("llama")) == 512
    scaled = tiny_config("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0})
    assert usable_positions(scaled) == 512
    dynamic = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 128}
    assert usable_positions(tiny_config("llama", rope_parameters=dynamic)) == 128
