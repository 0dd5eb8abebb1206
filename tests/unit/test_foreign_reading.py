"""Reading drafts that others made: what is assumed is said, what cannot be honoured is refused with the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import Draft, ReadOptions, export_forms, read_foreign
from jetspec_train.artifacts.foreign.eagle3 import to_midlayer
from tests import foreign_drafts as made

BIDIRECTIONAL = made.block_config(mask="bidirectional")
DSPARK = made.block_config(mask="bidirectional", layout="anchor", parent="vanilla", parent_rank=8)
EAGLE3 = made.eagle3_config(draft_vocab_size=150)


def zlab(folder: Path, **changes: Any) -> Path:
    return made.write_folder(folder, made.zlab_config(**changes), made.block_tensors(BIDIRECTIONAL))


def deepspec_tensors() -> dict[str, torch.Tensor]:
    confidence = {"confidence_head.proj.weight": torch.randn(1, 56), "confidence_head.proj.bias": torch.zeros(1)}
    return {**made.block_tensors(DSPARK), **made.target_weights(), **confidence}


def safeailab_tensors() -> dict[str, torch.Tensor]:
    tensors = {to_midlayer(name): tensor for name, tensor in made.eagle3_tensors(EAGLE3).items()}
    t2d = torch.zeros(300, dtype=torch.bool)
    t2d[torch.arange(150) * 2] = True
    return {**tensors, "t2d": t2d}


def safeailab(folder: Path, drop: tuple[str, ...] = (), **changes: Any) -> Path:
    tensors = {name: tensor for name, tensor in safeailab_tensors().items() if name not in drop}
    return made.write_folder(folder, made.safeailab_config(**changes), tensors)


TAPS = ReadOptions(target_layer_ids=[1, 5, 8])


# -- the layouts of others, by hand ----------------------------------------------------------------------------------
def test_a_zlab_head_is_read_and_written_without_touching_a_tensor(tmp_path: Path) -> None:
    folder = zlab(tmp_path / "in")
    draft = read_foreign(folder, made.facts())
    assert (draft.form, draft.config["mask"], draft.config["layout"]) == ("dflash", "bidirectional", "in_place")
    assert draft.config["target_layer_ids"] == [1, 5, 8]
    said = " ".join(draft.assumptions)
    assert "nothing says whether in-block attention is causal" in said and "auto_map" in said and "in place" in said
    export_forms(Draft("block", draft.config, draft.tensors), ["dflash"], tmp_path, made.facts(), made.target_weights)
    found, original = (load_file(path / "model.safetensors") for path in (tmp_path / "dflash", folder))
    assert found.keys() == original.keys() and all(torch.equal(found[name], original[name]) for name in original)


def test_a_jetspec_head_says_that_it_is_causal(tmp_path: Path) -> None:
    inner = {"mask_token_id": made.MASK_TOKEN, "target_layer_ids": [1, 5, 8], "causal_head": True}
    folder = zlab(tmp_path / "a", dflash_config=inner)
    draft = read_foreign(folder, made.facts())
    assert (draft.form, draft.config["mask"]) == ("jetspec", "causal")
    with pytest.raises(UserError, match=r"foreign\.mask"):
        read_foreign(folder, made.facts(), ReadOptions(mask="bidirectional"))
    with pytest.raises(UserError, match="contradicts itself"):
        read_foreign(zlab(tmp_path / "b", dflash_config={**inner, "causal": False}), made.facts())


def test_a_deepspec_head_is_read_and_written_without_touching_a_tensor(tmp_path: Path) -> None:
    tensors = deepspec_tensors()
    draft = read_foreign(made.write_folder(tmp_path / "in", made.deepspec_config(), tensors), made.facts())
    assert (draft.config["layout"], draft.config["parent"], draft.config["parent_rank"]) == ("anchor", "vanilla", 8)
    assert draft.config["mask"] == "bidirectional" and draft.copies.keys() == made.target_weights().keys()
    out = Draft("block", draft.config, draft.tensors, draft.confidence, draft.confidence_with_parent)
    export_forms(out, ["deepspec"], tmp_path, made.facts(), made.target_weights)
    found = load_file(tmp_path / "deepspec" / "model.safetensors")
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], tensors[name]) for name in tensors)


def test_a_safeailab_draft_is_read_and_written_without_touching_a_tensor(tmp_path: Path) -> None:
    folder = safeailab(tmp_path / "in")
    draft = read_foreign(folder, made.facts(), TAPS)
    assert draft.kind == "eagle3" and draft.config["draft_vocab_size"] == 150
    assert "layers.0.self_attn.q_proj.weight" in draft.tensors
    export_forms(Draft("eagle3", draft.config, draft.tensors), ["eagle3"], tmp_path, made.facts(), made.target_weights)
    found, original = (load_file(path / "model.safetensors") for path in (tmp_path / "eagle3", folder))
    assert found.keys() == original.keys() and all(torch.equal(found[name], original[name]) for name in original)


def test_sglang_layer_ids_count_from_zero_and_vllm_ids_from_the_embeddings(tmp_path: Path) -> None:
    key = "eagle_aux_hidden_state_layer_ids"
    assert read_foreign(safeailab(tmp_path / "a", eagle_config={key: [1, 5, 8]})).config["target_layer_ids"] == [
        1,
        5,
        8,
    ]
    assert read_foreign(safeailab(tmp_path / "b", **{key: [2, 6, 9]})).config["target_layer_ids"] == [1, 5, 8]
    with pytest.raises(UserError, match="contradicts itself"):
        read_foreign(safeailab(tmp_path / "c", eagle_config={key: [1, 5, 8]}, **{key: [1, 5, 8]}))


# -- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(hidden_size=64), r"hidden size 48, but org/target has 64"),
        (dict(vocab_size=320), r"vocabulary size 300, but org/target has 320"),
        (dict(num_layers=8), r"target of 12 layers, but org/target has 8"),
    ],
)
def test_a_draft_for_another_target_is_refused_with_both_values(
    change: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        read_foreign(zlab(tmp_path), made.facts(**change))


def test_taps_are_asked_for_and_never_guessed(tmp_path: Path) -> None:
    folder = zlab(tmp_path / "z", dflash_config={"mask_token_id": made.MASK_TOKEN})
    with pytest.raises(UserError, match=r"foreign\.target_layer_ids="):
        read_foreign(folder, made.facts())
    draft = read_foreign(folder, made.facts(), TAPS)
    assert draft.config["target_layer_ids"] == [1, 5, 8] and any("by the user" in note for note in draft.assumptions)
    with pytest.raises(UserError, match=r"usually trained with \[1,5,8\]"):
        read_foreign(safeailab(tmp_path / "e"), made.facts())
    with pytest.raises(UserError, match=r"fc\.weight is"):
        read_foreign(folder, made.facts(), ReadOptions(target_layer_ids=[1, 5]))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (dict(rotary_flavour="new"), r"rotary_flavour='new'"),
        (dict(attention_bias=True), "attention_bias"),
        (dict(hidden_act="gelu"), "gelu"),
        (dict(layer_types=["sliding_attention"] * 2, sliding_window=64), "sliding windows"),
        (dict(layer_types=["sliding_attention", "full_attention"], sliding_window=512), "sliding windows"),
        (dict(architectures=["DFlash2DraftModel"]), "not a draft form"),
        (dict(block_size=True), "block_size"),
        (dict(rope_scaling={"rope_type": "longrope", "factor": 2.0}), "longrope"),
        (dict(num_hidden_layers=3, layer_types=None), "Missing: layers.2"),
        (dict(intermediate_size=10**15), "intermediate_size"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        read_foreign(zlab(tmp_path, **change), made.facts())


def test_unknown_keys_are_accepted_only_by_name(tmp_path: Path) -> None:
    folder = zlab(tmp_path, rotary_flavour="new", empty_option=None)
    assert read_foreign(folder, made.facts(), ReadOptions(accept_keys=["rotary_flavour"])).kind == "block"


def test_a_reduced_vocabulary_needs_its_table_and_its_head(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no d2t table"):
        read_foreign(safeailab(tmp_path / "a", drop=("d2t", "t2d")), made.facts(), TAPS)
    with pytest.raises(UserError, match="draft garbage"):
        read_foreign(safeailab(tmp_path / "b", drop=("lm_head.weight",)), made.facts(), TAPS)
    with pytest.raises(UserError, match="shapes do not fit"):
        read_foreign(safeailab(tmp_path / "c", draft_vocab_size=149), made.facts(), TAPS)


def test_a_tied_head_is_read_as_the_targets(tmp_path: Path) -> None:
    config = made.eagle3_config()
    tensors = {to_midlayer(n): t for n, t in made.eagle3_tensors(config).items() if n != "lm_head.weight"}
    folder = made.write_folder(tmp_path, made.safeailab_config(draft_vocab_size=300), tensors)
    draft = read_foreign(folder, made.facts(), TAPS)
    assert "lm_head.weight" not in draft.tensors and any("tied" in note for note in draft.assumptions)


def test_shards_with_an_index_are_read_as_one(tmp_path: Path) -> None:
    whole = made.block_tensors(BIDIRECTIONAL)
    (tmp_path / "config.json").write_text(json.dumps(made.zlab_config()))
    names = sorted(whole)
    files = {"model-00001-of-00002.safetensors": names[:9], "model-00002-of-00002.safetensors": names[9:]}
    for file, part in files.items():
        save_file({name: whole[name].clone() for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    draft = read_foreign(tmp_path, made.facts())
    assert all(torch.equal(draft.tensors[name], whole[name]) for name in whole)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UserError, match="missing"):
        read_foreign(tmp_path, made.facts())


def test_a_pickle_is_never_opened_and_the_conversion_is_named(tmp_path: Path) -> None:
    folder = zlab(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'echo opened > " + bytes(tmp_path) + b"/opened'\ntR.")
    with pytest.raises(UserError, match=r"never loaded here(.|\n)*weights_only=True(.|\n)*model\.safetensors"):
        read_foreign(folder, made.facts())
    assert not (tmp_path / "opened").exists()


# -- hostile folders ---------------------------------------------------------------------------------------------------
def test_shards_outside_the_folder_are_refused(tmp_path: Path) -> None:
    folder = zlab(tmp_path / "draft")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    for name in ("../outside.safetensors", str(tmp_path / "outside.safetensors")):
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"fc.weight": name}}))
        with pytest.raises(UserError, match="outside its folder"):
            read_foreign(folder)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").symlink_to(tmp_path / "outside.safetensors")
    with pytest.raises(UserError, match="leads outside"):
        read_foreign(folder)


def test_a_link_into_the_blobs_of_a_hub_cache_is_allowed(tmp_path: Path) -> None:
    snapshot = zlab(tmp_path / "models--org--draft" / "snapshots" / "abc")
    blobs = tmp_path / "models--org--draft" / "blobs"
    blobs.mkdir()
    (snapshot / "model.safetensors").rename(blobs / "hash")
    (snapshot / "model.safetensors").symlink_to(blobs / "hash")
    assert read_foreign(snapshot, made.facts()).kind == "block"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ({"dtype": "F32", "shape": [1 << 40, 1 << 20], "data_offsets": [0, 16]}, "needs"),
        ({"dtype": "F32", "shape": [4], "data_offsets": [0, 1 << 50]}, "needs"),
        ({"dtype": "F32", "shape": [1 << 48], "data_offsets": [0, 1 << 50]}, "of 16"),
        ({"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]}, "place in the file|needs"),
        ({"dtype": "F8_E4M3", "shape": [16], "data_offsets": [0, 16]}, "quantised"),
    ],
)
def test_a_tensor_of_absurd_size_is_refused_before_it_is_read(
    entry: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    folder = zlab(tmp_path)
    header = json.dumps({"fc.weight": entry}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(UserError, match=reason):
        read_foreign(folder)


def test_a_config_of_absurd_size_or_depth_is_refused(tmp_path: Path) -> None:
    folder = zlab(tmp_path)
    (folder / "config.json").write_text('{"a": "' + "x" * (5 << 20) + '"}')
    with pytest.raises(UserError, match="more than"):
        read_foreign(folder)
    (folder / "config.json").write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}")
    with pytest.raises(UserError, match=r"deep|not valid JSON"):
        read_foreign(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(UserError, match="object"):
        read_foreign(folder)
