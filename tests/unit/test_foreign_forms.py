"""Writing and reading other projects' forms: nothing is lost, nothing is off by one, nothing is served as something
else than it was trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import Draft, ReadOptions, export_forms, lint, read_foreign
from jetspec_train.artifacts.foreign.draft import (
    from_embedding_based,
    ids_from_offsets,
    offsets_from_ids,
    to_embedding_based,
)
from jetspec_train.artifacts.foreign.lint import lint_content
from tests import foreign_drafts as made

BLOCKS: dict[str, dict[str, Any]] = {
    "dflash": dict(mask="bidirectional"),
    "jetspec": dict(mask="causal"),
    "dspark": dict(mask="bidirectional", layout="anchor", parent="vanilla", parent_rank=8),
    "causal_markov": dict(mask="causal", layout="anchor", parent="vanilla", parent_rank=8),
    "causal_anchor": dict(mask="causal", layout="anchor"),
    "in_place_parent": dict(mask="causal", parent="vanilla", parent_rank=8),
}
EXPRESSIBLE = [
    ("dflash", "vllm"), ("dflash", "dflash"), ("dflash", "jetspec"),
    ("jetspec", "vllm"), ("jetspec", "jetspec"),
    ("dspark", "vllm"), ("dspark", "deepspec"),
    ("causal_markov", "vllm"), ("causal_anchor", "vllm"), ("in_place_parent", "vllm"),
]  # fmt: skip
INEXPRESSIBLE = [
    ("jetspec", "dflash", "bidirectional without a word"),
    ("jetspec", "deepspec", "one position off"),
    ("dspark", "dflash", "one position off"),
    ("dspark", "jetspec", "parent term"),
    ("causal_markov", "deepspec", "always computes it bidirectional"),
    ("causal_markov", "jetspec", "one position off"),
    ("in_place_parent", "jetspec", "parent term"),
]


def block(name: str, **changes: Any) -> Draft:
    config = made.block_config(**{**BLOCKS.get(name, {}), **changes})
    return Draft(kind="block", config=config, tensors=made.block_tensors(config), provenance={"run": "test"})


def eagle3(**changes: Any) -> Draft:
    config = made.eagle3_config(**changes)
    return Draft(kind="eagle3", config=config, tensors=made.eagle3_tensors(config))


def export(draft: Draft, form: str, folder: Path, **options: Any) -> Path:
    target = options.pop("target", made.facts())
    (exported,) = export_forms(draft, [form], folder, target, made.target_weights, **options)
    return exported.folder


def meaning(config: dict[str, Any]) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items() if key != "extra"}


@pytest.mark.parametrize(("name", "form"), EXPRESSIBLE)
def test_a_block_head_survives_the_round_trip(name: str, form: str, tmp_path: Path) -> None:
    draft = block(name)
    folder = export(draft, form, tmp_path)
    back = read_foreign(folder, made.facts(), ReadOptions())
    assert meaning(back.config) == meaning(dict(draft.config))
    assert back.tensors.keys() == draft.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in draft.tensors.items())
    assert not [finding for finding in lint(folder) if finding.severity == "error"]
    again = export(Draft("block", back.config, back.tensors), form, tmp_path / "again")
    assert (again / "model.safetensors").read_bytes() == (folder / "model.safetensors").read_bytes()
    assert (again / "config.json").read_bytes() == (folder / "config.json").read_bytes()


@pytest.mark.parametrize("form", ["vllm", "eagle3"])
@pytest.mark.parametrize("size", [300, 150])
def test_an_eagle3_draft_survives_the_round_trip(form: str, size: int, tmp_path: Path) -> None:
    draft = eagle3(draft_vocab_size=size)
    folder = export(draft, form, tmp_path)
    back = read_foreign(folder, made.facts())
    assert meaning(back.config) == meaning(dict(draft.config))
    assert back.tensors.keys() == draft.tensors.keys()
    assert all(torch.equal(back.tensors[name], tensor) for name, tensor in draft.tensors.items())
    assert not [finding for finding in lint(folder) if finding.severity == "error"]


@pytest.mark.parametrize("flags", [{"fc_norm": True}, {"norm_before_fc": True}, {"norm_before_residual": True}])
def test_norm_flags_travel_in_the_speculators_form_and_are_refused_by_the_other(
    flags: dict[str, bool], tmp_path: Path
) -> None:
    draft = eagle3(**flags, qk_norm=True)
    back = read_foreign(export(draft, "vllm", tmp_path), made.facts())
    assert meaning(back.config) == meaning(dict(draft.config))
    with pytest.raises(UserError, match=next(iter(flags))):
        export(draft, "eagle3", tmp_path)


@pytest.mark.parametrize(("name", "form", "reason"), INEXPRESSIBLE)
def test_what_a_form_cannot_say_is_refused_and_recorded_when_forced(
    name: str, form: str, reason: str, tmp_path: Path
) -> None:
    draft = block(name)
    with pytest.raises(UserError, match=reason):
        export(draft, form, tmp_path)
    assert not list(tmp_path.iterdir())
    folder = export(draft, form, tmp_path, force=True)
    card = (folder / "README.md").read_text()
    assert "NOT served as it was trained" in card and reason in card
    assert any(reason in text for text in json.loads((folder / "provenance.json").read_text())["forced"])


@pytest.mark.parametrize(
    ("draft", "form", "reason"),
    [
        (block("jetspec", mask_token_id=None), "vllm", "learned vector"),
        (block("jetspec"), "eagle3", "block head"),
        (eagle3(), "jetspec", "autoregressive"),
        (eagle3(layers=2), "eagle3", "2 layers"),
    ],
)
def test_what_a_form_has_no_place_for_is_refused_even_with_force(
    draft: Draft, form: str, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=reason):
        export(draft, form, tmp_path, force=True)


def test_all_forms_are_checked_before_the_first_is_written(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="deepspec"):
        export_forms(block("jetspec"), ["vllm", "deepspec"], tmp_path, made.facts(), made.target_weights)
    assert not list(tmp_path.iterdir())


def test_scaled_embeddings_are_not_served_unscaled(tmp_path: Path) -> None:
    target = made.facts(embedding_scale=48**0.5)
    with pytest.raises(UserError, match="scales its embeddings"):
        export(block("jetspec"), "vllm", tmp_path, target=target)
    folder = export(block("jetspec"), "jetspec", tmp_path, target=target)
    assert read_foreign(folder, target).config["mask"] == "causal"
    with pytest.raises(UserError, match="input_embedding_scale"):
        read_foreign(folder, made.facts())


# -- off by one: each of these fails when a conversion is shifted ---------------------------------------------------
def test_layer_ids_are_one_higher_in_the_speculators_form_only(tmp_path: Path) -> None:
    written = {form: json.loads((export(block("jetspec"), form, tmp_path) / "config.json").read_text())
               for form in ("vllm", "jetspec")}  # fmt: skip
    assert written["vllm"]["aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert written["jetspec"]["dflash_config"]["target_layer_ids"] == [1, 5, 8]
    deepspec = json.loads((export(block("dspark"), "deepspec", tmp_path) / "config.json").read_text())
    assert deepspec["target_layer_ids"] == [1, 5, 8]
    eagle = json.loads((export(eagle3(), "eagle3", tmp_path) / "config.json").read_text())
    assert eagle["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    assert eagle["eagle_aux_hidden_state_layer_ids"] == [2, 6, 9]
    assert from_embedding_based(to_embedding_based([0, 3]), "here") == [0, 3]
    with pytest.raises(UserError, match="embedding output"):
        from_embedding_based([0, 2], "here")


def test_the_layout_decides_how_many_tokens_a_block_drafts(tmp_path: Path) -> None:
    for name, tokens, anchor in (("jetspec", 3, False), ("dflash", 3, False), ("causal_markov", 4, True)):
        config = json.loads((export(block(name), "vllm", tmp_path / name) / "config.json").read_text())
        assert config["block_size"] == 4 and config["sample_from_anchor"] is anchor
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == tokens
        config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = tokens + 1
        assert any("speculative_tokens" in finding.message for finding in lint_content(config, {}))


def test_d2t_holds_offsets_and_ids_are_found_out(tmp_path: Path) -> None:
    ids = torch.tensor([0, 2, 3, 7])
    offsets = offsets_from_ids(ids)
    assert offsets.tolist() == [0, 1, 1, 4]
    assert ids_from_offsets(offsets, 8, "here").tolist() == ids.tolist()
    with pytest.raises(UserError, match="offsets"):
        ids_from_offsets(ids, 8, "here")  # 3 + 7 leaves the vocabulary
    draft = eagle3(draft_vocab_size=150)
    folder = export(draft, "vllm", tmp_path)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    assert tensors["t2d"].nonzero().flatten().tolist() == list(range(0, 300, 2))
    config = json.loads((folder / "config.json").read_text())
    shifted = made.write_folder(tmp_path / "shifted", config, {**tensors, "d2t": tensors["d2t"] + 1})
    with pytest.raises(UserError, match="d2t and t2d"):
        read_foreign(shifted, made.facts())


def test_taps_out_of_order_are_sorted_with_the_columns_of_fc(tmp_path: Path) -> None:
    draft = block("jetspec", target_layer_ids=[8, 1, 5])
    back = read_foreign(export(draft, "vllm", tmp_path), made.facts())
    assert back.config["target_layer_ids"] == [1, 5, 8]
    late, early, middle = draft.tensors["fc.weight"].chunk(3, dim=1)
    assert torch.equal(back.tensors["fc.weight"], torch.cat([early, middle, late], dim=1))


# -- how a server would take the folder -------------------------------------------------------------------------------
def test_causality_is_written_as_vllm_reads_it(tmp_path: Path) -> None:
    expected = {
        "jetspec": (False, "full_attention"),
        "dflash": (True, "full_attention"),
        "causal_markov": (False, "sliding_attention"),
        "dspark": (True, "full_attention"),
    }
    for name, (non_causal, kind) in expected.items():
        config = json.loads((export(block(name), "vllm", tmp_path / name) / "config.json").read_text())
        layers = config["transformer_layer_config"]
        assert config["sliding_window_non_causal"] is non_causal and set(layers["layer_types"]) == {kind}
        assert kind == "full_attention" or layers["sliding_window"] >= layers["max_position_embeddings"]
        config["sliding_window_non_causal"] = not non_causal
        layers["layer_types"] = ["sliding_attention" if kind == "full_attention" else "full_attention"] * 2
        assert any("serves this folder" in finding.message for finding in lint_content(config, {}))


def _drop(config: dict[str, Any], *path: str) -> None:
    for key in path[:-1]:
        config = config[key]
    del config[path[-1]]


@pytest.mark.parametrize(
    ("name", "form", "path"),
    [
        ("jetspec", "vllm", ("sample_from_anchor",)),
        ("jetspec", "vllm", ("sliding_window_non_causal",)),
        ("jetspec", "vllm", ("transformer_layer_config", "head_dim")),
        ("jetspec", "vllm", ("transformer_layer_config", "layer_types")),
        ("causal_markov", "vllm", ("markov_head_type",)),
        ("causal_markov", "vllm", ("enable_confidence_head",)),
        ("jetspec", "jetspec", ("dflash_config", "causal_head")),
        ("jetspec", "jetspec", ("dflash_config", "causal")),
        ("jetspec", "jetspec", ("num_target_layers",)),
        ("dspark", "deepspec", ("num_anchors",)),
    ],
)
def test_the_lint_misses_no_flag_that_loaders_would_guess(
    name: str, form: str, path: tuple[str, ...], tmp_path: Path
) -> None:
    folder = export(block(name), form, tmp_path)
    config = json.loads((folder / "config.json").read_text())
    _drop(config, *path)
    (folder / "config.json").write_text(json.dumps(config))
    assert [f for f in lint(folder) if f.severity == "error" and path[-1] in f.message]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "qwen3"}, "model_type"),
        ({"sample_from_anchor": True}, "refused by one vLLM runner"),
        ({"aux_hidden_state_layer_ids": [6, 2, 9]}, "increasing"),
        ({"aux_hidden_state_layer_ids": [0, 2, 9]}, "smallest"),
        ({"draft_vocab_size": 100}, "drafts garbage"),
    ],
)
def test_the_lint_knows_the_traps_of_the_speculators_form(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = export(block("jetspec"), "vllm", tmp_path)
    config = {**json.loads((folder / "config.json").read_text()), **change}
    (folder / "config.json").write_text(json.dumps(config))
    assert any(message in finding.message for finding in lint(folder) if finding.severity == "error")


def test_more_than_three_taps_of_a_llama_eagle3_are_announced_to_vllm(tmp_path: Path) -> None:
    folder = export(eagle3(target_layer_ids=[1, 3, 5, 8]), "vllm", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    assert config["transformer_layer_config"].pop("num_aux_hidden_states") == 4
    (folder / "config.json").write_text(json.dumps(config))
    assert any("assumes 3" in finding.message for finding in lint(folder))


def test_a_whole_vocabulary_has_no_table(tmp_path: Path) -> None:
    folder = export(eagle3(), "eagle3", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    from jetspec_train.artifacts.foreign.checkpoint import read_shapes

    shapes = read_shapes(folder)
    assert "d2t" not in shapes and not list(lint_content(config, shapes))
    assert any("d2t" in finding.message for finding in lint_content(config, {**shapes, "d2t": (300,), "t2d": (300,)}))


def test_a_local_target_name_is_warned_about(tmp_path: Path) -> None:
    folder = export(block("jetspec"), "vllm", tmp_path, target=made.facts(name="/models/target"))
    assert any("hub id" in finding.message for finding in lint(folder) if finding.severity == "warning")


def test_the_confidence_head_goes_where_the_form_has_a_place(tmp_path: Path) -> None:
    draft = block("dspark")
    draft.confidence = {"weight": torch.randn(1, 48 + 8), "bias": torch.zeros(1)}
    draft.confidence_with_parent = True
    draft.calibration = {"temperatures": [1.0, 1.1]}
    draft.beside = {"verifier.correctness.weight": torch.ones(2, 2)}
    for form in ("vllm", "deepspec"):
        folder = export(draft, form, tmp_path)
        back = read_foreign(folder, made.facts())
        assert back.confidence is not None and torch.equal(back.confidence["weight"], draft.confidence["weight"])
        assert back.confidence_with_parent
        assert json.loads((folder / "jetspec_train" / "calibration.json").read_text()) == draft.calibration
        assert (folder / "jetspec_train" / "verifier.safetensors").is_file()
        assert list(folder.glob("*.safetensors")) == [folder / "model.safetensors"]
