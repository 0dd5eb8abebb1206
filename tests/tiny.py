"""Tiny random targets for tests: real transformers models with a real tokenizer, made in a second, no network.

Use ``tiny_target(kind)`` for a loaded fp32 target, ``tiny_target_dir(kind)`` for its folder. Both are made once per
process. Weights are random but fixed; they are scaled up so that greedy choices are clear-cut in fp32.
"""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import torch

from jetspec_train.config import TargetConfig

KINDS = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "gpt_oss", "qwen3_moe")
FURTHER_KINDS = (
    "granite",
    "cohere2",
    "deepseek_v3",
    "gpt2",
)  # scaled embeddings and logits, latent keys, learned positions
WINDOW = 12  # sliding window of the kinds that have one; small, so that tests pass it

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|reserved_0|>"]
_TEXT = [
    "What is the sum of two numbers? The answer is four. Tom has 12 apples and gives 5 to Ann.",
    "user assistant system Write a list of three short words, please. Yes, of course I can do that.",
    "def add(a, b):\n    return a + b\n",
]


@functools.cache
def tiny_tokenizer() -> Any:
    """Byte-level BPE of 300 tokens with a chat template, four special tokens and ``<|im_end|>`` as end of turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(_TEXT, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>", "<|reserved_0|>"],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_config(kind: str, **changes: Any) -> Any:
    """A transformers config of the family: hidden 48, 4 heads over 2 key/value heads, 3-4 layers, 300 tokens."""
    import transformers

    shared: dict[str, Any] = dict(
        vocab_size=300,
        hidden_size=48,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        eos_token_id=2,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.3,
        tie_word_embeddings=False,
    )
    sliding = dict(sliding_window=WINDOW)
    mixed = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    by_kind: dict[str, tuple[str, dict[str, Any]]] = {
        "llama": ("LlamaConfig", {}),
        "qwen2": ("Qwen2Config", {}),
        "qwen3": ("Qwen3Config", dict(tie_word_embeddings=True)),
        "mistral": ("MistralConfig", sliding),
        "gemma2": (
            "Gemma2Config",
            dict(
                **sliding,
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                attn_logit_softcapping=20.0,
                final_logit_softcapping=15.0,
                query_pre_attn_scalar=16,
                tie_word_embeddings=True,
            ),
        ),
        "gemma3": (
            "Gemma3TextConfig",
            dict(
                **sliding,
                num_hidden_layers=4,
                layer_types=mixed,
                query_pre_attn_scalar=16,
                tie_word_embeddings=True,
                final_logit_softcapping=15.0,
            ),
        ),
        "phi3": ("Phi3Config", dict(**sliding, resid_pdrop=0.0, original_max_position_embeddings=512)),
        "gpt_oss": (
            "GptOssConfig",
            dict(
                **sliding,
                num_hidden_layers=4,
                layer_types=["sliding_attention", "full_attention"] * 2,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            ),
        ),
        "granite": (
            "GraniteConfig",
            dict(embedding_multiplier=3.0, logits_scaling=2.0, attention_multiplier=0.3, residual_multiplier=0.5),
        ),
        "cohere2": (
            "Cohere2Config",
            dict(**sliding, num_hidden_layers=4, layer_types=mixed, logit_scale=0.5, tie_word_embeddings=True),
        ),
        "deepseek_v3": (
            "DeepseekV3Config",
            dict(
                num_key_value_heads=4,
                head_dim=8,
                q_lora_rank=16,
                kv_lora_rank=16,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
                n_routed_experts=4,
                num_experts_per_tok=2,
                n_group=1,
                topk_group=1,
                first_k_dense_replace=1,
                moe_intermediate_size=32,
            ),
        ),
        "gpt2": ("GPT2Config", dict(n_embd=48, n_layer=3, n_head=4, n_positions=512)),
        "qwen3_moe": (
            "Qwen3MoeConfig",
            dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1),
        ),
    }
    name, own = by_kind[kind]
    return getattr(transformers, name)(**{**shared, **own, **changes})


def tiny_model(kind: str, seed: int = 0, **changes: Any) -> Any:
    """A random fp32 model of the family, in evaluation mode."""
    from transformers import AutoModelForCausalLM

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(tiny_config(kind, **changes))
        for name, parameter in model.named_parameters():
            # Fresh models leave sinks empty and biases zero; random ones make tests see them.
            if "sinks" in name or name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.3)
    return model.float().eval()


@functools.cache
def _root() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="tiny-targets-")


@functools.cache
def tiny_target_dir(kind: str = "llama", seed: int = 0) -> Path:
    """A folder with config, weights, tokenizer and template of a tiny target; made once per process."""
    folder = Path(_root().name) / f"{kind}-{seed}"
    tiny_model(kind, seed).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def tiny_target_config(kind: str = "llama", seed: int = 0) -> TargetConfig:
    return TargetConfig(name=str(tiny_target_dir(kind, seed)), dtype="float32", device="cpu")


@functools.cache
def tiny_target(kind: str = "llama", seed: int = 0) -> Any:
    """A loaded fp32 target; shared by all tests of a process, so do not change it."""
    from jetspec_train.targets.loading import load_target

    return load_target(tiny_target_config(kind, seed))


def tiny_prompts(count: int, shortest: int = 4, longest: int = 20, seed: int = 0) -> list[list[int]]:
    """Random prompts of ordinary tokens, of different lengths."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(len(SPECIAL_TOKENS), 300, (length,), generator=generator).tolist() for length in lengths]
