"""Standalone drafts: what the trainer is fed, how a target is cut, and which start models are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import StandaloneConfig, TargetConfig
from jetspec_train.data.samples import SampleStore
from jetspec_train.targets.loading import load_tokenizer
from jetspec_train.training.standalone import (
    IGNORED,
    check_start,
    collate,
    kept_layers,
    prune_layers,
    save_model,
    training_rows,
)
from tests.tiny import tiny_model, tiny_target_config, tiny_target_dir, tiny_tokenizer


def test_layers_are_kept_evenly_with_first_and_last():
    assert kept_layers(30, 4) == [0, 10, 19, 29]
    assert kept_layers(3, 3) == [0, 1, 2]
    assert kept_layers(5, 1) == [0]
    with pytest.raises(UserError, match="prune_layers=4: the target has 3 layers"):
        kept_layers(3, 4)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "gemma3", "gpt2"])
def test_a_pruned_target_is_made_of_its_own_weights(kind):
    """Cutting nothing changes nothing; what is cut leaves embedding, head and the kept layers as they were."""
    model = tiny_model(kind)
    total = model.config.num_hidden_layers
    tokens = torch.arange(5, 17)[None]
    with torch.no_grad():
        expected = model(tokens).logits
        torch.testing.assert_close(prune_layers(model, total).eval()(tokens).logits, expected)
        small = prune_layers(model, 2).eval()
        assert small.config.num_hidden_layers == 2 and not torch.allclose(small(tokens).logits, expected)
        # the same model with the middle layers taken out by hand
        layers = next(m for n, m in model.named_modules() if n.endswith((".layers", ".h")))
        kept = torch.nn.ModuleList([layers[0], layers[total - 1]])
        for place, layer in enumerate(kept):
            (layer.attn if kind == "gpt2" else layer.self_attn).layer_idx = place
        parent = model.get_decoder() if kind != "gpt2" else model.transformer
        setattr(parent, "h" if kind == "gpt2" else "layers", kept)
        parent.config.num_hidden_layers = 2
        if getattr(parent.config, "layer_types", None):
            parent.config.layer_types = small.config.layer_types
        torch.testing.assert_close(small(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits)


def test_batches_supervise_answers_and_continue_prompts():
    rows = [{"question": [1, 2, 3], "reply": [4]}, {"question": [5], "reply": [6, 7, 8, 9]}]
    batch = collate(rows, pad=0)
    assert batch["input_ids"].tolist() == [[1, 2, 3, 4, 0], [5, 6, 7, 8, 9]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert batch["labels"].tolist() == [[IGNORED] * 3 + [4, IGNORED], [IGNORED, 6, 7, 8, 9]]
    assert batch["prompts"].tolist() == [[1, 2, 3], [0, 0, 5]]
    assert batch["prompt_attention_mask"].tolist() == [[1, 1, 1], [0, 0, 1]]


def test_long_samples_are_cut_and_those_without_room_counted():
    tokens = np.arange(20, dtype=np.int32)
    starts = np.array([0, 6, 20])
    store = SampleStore(tokens, starts, np.array([2, 10], np.int32), np.array(["a", "b"]), np.array(["x", "x"]))
    rows, dropped = training_rows(store, 5)
    assert rows == [{"question": [0, 1], "reply": [2, 3, 4]}] and dropped == 1
    assert training_rows(store, 100)[0][1] == {"question": list(range(6, 16)), "reply": [16, 17, 18, 19]}


def test_a_start_model_with_other_tokens_is_refused_before_weights_are_read(tmp_path):
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens(["<|another|>"])
    tiny_model("llama", vocab_size=301).config.save_pretrained(tmp_path / "other")  # no weights at all
    tokenizer.save_pretrained(tmp_path / "other")
    target = tiny_target_config("llama")
    with pytest.raises(UserError, match=r"has 301 tokens, the target's has 300.*prune_layers"):
        check_start(StandaloneConfig(model=str(tmp_path / "other")), target)
    tiny_model("llama", vocab_size=320).config.save_pretrained(tmp_path / "wide")
    tiny_tokenizer().save_pretrained(tmp_path / "wide")
    with pytest.raises(UserError, match="its output has 320 entries, the target's has 300"):
        check_start(StandaloneConfig(model=str(tmp_path / "wide")), target)
    for wrong in (StandaloneConfig(), StandaloneConfig(model="a/b", prune_layers=2)):
        with pytest.raises(UserError, match="needs one start"):
            check_start(wrong, target)
    check_start(StandaloneConfig(model=str(tiny_target_dir("qwen3"))), target)
    check_start(StandaloneConfig(prune_layers=1), target)


def test_a_saved_model_keeps_its_template_in_json_and_speaks_the_same_tokens(tmp_path):
    chat = load_tokenizer(tiny_target_config("llama"))
    save_model(tiny_model("llama"), chat, tmp_path / "model")
    assert {path.suffix for path in (tmp_path / "model").iterdir()} <= {".json", ".safetensors", ".txt"}
    again = load_tokenizer(TargetConfig(name=str(tmp_path / "model")))
    assert again.template_hash == chat.template_hash and again.tokenizer_hash == chat.tokenizer_hash
