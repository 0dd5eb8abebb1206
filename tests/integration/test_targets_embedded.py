"""The embedded default target, really converted and really asked something."""

from __future__ import annotations

import pytest
import torch

from jetspec_train.config import SamplingConfig, TargetConfig
from jetspec_train.targets.embedded import EMBEDDED, embedded_gguf
from jetspec_train.targets.generation import Request, generate_stream
from jetspec_train.targets.loading import load_target

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def target():
    return load_target(TargetConfig(device="cpu"))


def test_the_default_target_is_what_its_name_says(target) -> None:
    assert TargetConfig().name in EMBEDDED and embedded_gguf(TargetConfig().name).is_file()
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (30, 576, 49152)
    assert target.parameters == 134_515_008 and target.max_positions == 8192
    assert target.head.weight.data_ptr() == target.embedding.weight.data_ptr()


def test_it_speaks_its_own_template(target) -> None:
    text = target.chat.render_text([{"role": "user", "content": "Hi"}])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert target.eos_ids == (2,)
    mask_token = target.chat.tokenizer.convert_ids_to_tokens(target.mask_token_id)
    assert mask_token == "<empty_output>" and mask_token not in text


def test_it_answers_sensibly_and_ends(target) -> None:
    prompt = target.chat.render([{"role": "user", "content": "What is the capital of France?"}])
    (answer,) = generate_stream(
        target, iter([Request(prompt, max_new_tokens=32)]), batch_size=1, sampling=SamplingConfig()
    )
    assert "Paris" in target.chat.decode(answer.tokens)
    assert answer.finish_reason == "stop" and answer.tokens[-1] == 2
    assert torch.tensor(answer.logprobs).mean() > -1.5
