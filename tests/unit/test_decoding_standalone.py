"""A small language model as draft: the output is the target's own, whatever it drafts, chains and trees, any batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, SamplingConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.standalone import StandaloneDrafter, _tree, token_difference
from tests.tiny import tiny_model, tiny_prompts, tiny_target, tiny_tokenizer


def answers(decoder, prompts, **more):
    return [generation.tokens for generation in decoder.generate(prompts, max_new_tokens=14, **more)]


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("small", [("llama", 0), ("llama", 5), ("gemma2", 0)])
def test_drafting_with_a_small_model_is_lossless(shape, batch, small):
    """Greedy and sampled; with the target itself, another model, and one of another family with sliding windows."""
    target = tiny_target("llama")
    drafter = StandaloneDrafter(tiny_target(*small), target, depth=4)
    settings = DecodingConfig(shape=shape, nodes=6)
    prompts = tiny_prompts(batch, seed=batch)
    for sampling in (SamplingConfig(), SamplingConfig(temperature=0.8)):
        plain = answers(Decoder(target), prompts, sampling=sampling)
        assert answers(Decoder(target, drafter, settings), prompts, sampling=sampling) == plain


def test_the_target_as_its_own_draft_is_always_right():
    """Every drafted token is accepted: so the kept keys, values and positions are those of a fresh forward."""
    target = tiny_target("llama")
    drafter = StandaloneDrafter(tiny_target("llama"), target, depth=3)
    for batch in (1, 3):
        for generation in Decoder(target, drafter, DecodingConfig(shape="chain", nodes=3)).generate(
            tiny_prompts(batch, seed=7), max_new_tokens=13
        ):
            stats = generation.stats
            assert stats.accepted_by_depth == stats.drafted_by_depth
            # 1 token of the prefill, then 4 per round (chain of 3 and the target's own), as long as the text lasts
            assert stats.target_forwards == -(-(len(generation.tokens) - 1) // 4)
            assert 0 < stats.draft_forwards <= 3 * stats.target_forwards


def test_beyond_the_end_of_its_own_context_the_target_goes_on_alone(monkeypatch):
    target, small = tiny_target("llama"), tiny_target("llama", 5)
    monkeypatch.setattr(small, "max_positions", 24)
    drafter = StandaloneDrafter(small, target, depth=4)
    prompts = tiny_prompts(2, shortest=18, longest=20)
    decoder = Decoder(target, drafter, DecodingConfig(nodes=4))
    assert answers(decoder, prompts) == answers(Decoder(target), prompts)
    assert drafter.forwards == 0


def test_a_tree_is_the_chain_and_the_best_alternatives_beside_it():
    levels = [
        (np.array([5, 6, 7]), np.log([0.6, 0.3, 0.1])),
        (np.array([8, 9, 1]), np.log([0.9, 0.06, 0.04])),
    ]
    tree = _tree(levels, nodes=4)
    assert tree.tokens.tolist() == [5, 8, 6, 7]
    assert tree.parents.tolist() == [-1, 0, -1, -1]
    assert tree.depths.tolist() == [0, 1, 0, 0]
    np.testing.assert_allclose(np.exp(tree.scores), [0.6, 0.54, 0.3, 0.1], rtol=1e-5)


def test_other_tokens_are_refused_with_the_reason():
    target, small = tiny_target("llama"), tiny_target("qwen3")
    other = tiny_tokenizer_with("<|another|>")
    assert "301" in token_difference(other, small.chat.tokenizer)

    class Other:
        chat = type("Chat", (), {"tokenizer": other})
        identity = small.identity
        vocab_size = small.vocab_size

    with pytest.raises(UserError, match=r"has 301 tokens, the target's has 300.*prune_layers"):
        StandaloneDrafter(Other(), target)
    wide = tiny_model("llama", vocab_size=320)
    assert wide.config.vocab_size != target.vocab_size

    class Wide(Other):
        chat = small.chat
        vocab_size = 320

    with pytest.raises(UserError, match="320 entries, the target's has 300"):
        StandaloneDrafter(Wide(), target)


def tiny_tokenizer_with(token: str):
    """A copy of the tests' tokenizer with one more token."""
    import copy

    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_tokens([token])
    return tokenizer


def test_rows_that_finish_leave_the_small_models_cache():
    target = tiny_target("llama")
    drafter = StandaloneDrafter(tiny_target("llama", 5), target, depth=3)
    decoder = Decoder(target, drafter, DecodingConfig(nodes=3))
    prompts = tiny_prompts(3, seed=11)
    alone = [answers(decoder, [prompt], row_ids=[row])[0] for row, prompt in enumerate(prompts)]
    assert answers(decoder, prompts) == alone
    assert torch.equal(
        torch.tensor(decoder.generate([prompts[2]], max_new_tokens=5)[0].tokens), torch.tensor(alone[2][:5])
    )
