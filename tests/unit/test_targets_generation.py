"""Batched generation gives each request what it would get alone, and its numbers are the target's own."""

from __future__ import annotations

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import SamplingConfig
from jetspec_train.targets.generation import Completion, Request, generate_stream
from tests.tiny import tiny_prompts, tiny_target

SAMPLED = SamplingConfig(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.1)


def alone(target, request: Request, sampling: SamplingConfig, eos_ids=None) -> Completion:
    (completion,) = generate_stream(target, iter([request]), batch_size=1, sampling=sampling, seed=7, eos_ids=eos_ids)
    return completion


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SAMPLED], ids=["greedy", "sampled"])
def test_a_batch_with_refills_equals_one_request_at_a_time(kind: str, sampling: SamplingConfig) -> None:
    target = tiny_target(kind)
    requests = [
        Request(prompt, max_new_tokens=3 + 5 * index % 17, row=index, tag=f"request {index}")
        for index, prompt in enumerate(tiny_prompts(13))
    ]
    made: list[int] = []
    completions = list(
        generate_stream(target, iter(requests), batch_size=4, sampling=sampling, seed=7, on_tokens=made.append)
    )
    assert sorted(c.request.tag for c in completions) == sorted(r.tag for r in requests)
    assert sum(made) == sum(len(c.tokens) for c in completions)
    for completion in completions:
        expected = alone(target, completion.request, sampling)
        assert completion.tokens == expected.tokens
        assert completion.finish_reason == expected.finish_reason
        torch.testing.assert_close(completion.logprobs, expected.logprobs, atol=1e-4, rtol=1e-4)


def test_the_end_token_is_kept_and_the_reason_is_told() -> None:
    target = tiny_target("llama")
    request = Request(tiny_prompts(1)[0], max_new_tokens=12)
    free_running = alone(target, request, SamplingConfig(), eos_ids=[])
    assert free_running.finish_reason == "length" and len(free_running.tokens) == 12
    end = free_running.tokens[5]
    stopped = alone(target, request, SamplingConfig(), eos_ids=[end])
    assert stopped.finish_reason == "stop"
    assert stopped.tokens == free_running.tokens[: free_running.tokens.index(end) + 1]


def test_numbers_are_those_of_the_raw_distribution() -> None:
    target = tiny_target("llama")
    completion = alone(target, Request(tiny_prompts(1)[0], max_new_tokens=9, row=3), SAMPLED)
    tokens = [*completion.request.tokens, *completion.tokens]
    with torch.no_grad():
        logits_TV = target.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].double()
    start = len(completion.request.tokens) - 1
    logprobs_NV = logits_TV[start:-1].log_softmax(-1)
    for index, token in enumerate(completion.tokens):
        row_V = logprobs_NV[index]
        best = row_V.topk(2).values
        assert completion.logprobs[index] == pytest.approx(row_V[token].item(), abs=1e-4)
        assert completion.entropies[index] == pytest.approx(-(row_V.exp() * row_V).sum().item(), abs=1e-4)
        assert completion.margins[index] == pytest.approx((best[0] - best[1]).item(), abs=1e-4)


def test_a_prompt_longer_than_the_context_is_a_clear_error() -> None:
    target = tiny_target("llama")
    request = Request([5] * 600, max_new_tokens=4)
    with pytest.raises(UserError, match=r"600 tokens.*512 tokens"):
        alone(target, request, SamplingConfig())


def test_generation_stops_where_the_context_ends() -> None:
    target = tiny_target("llama")
    completion = alone(target, Request([5] * 505, max_new_tokens=50), SamplingConfig(), eos_ids=[])
    assert completion.finish_reason == "length"
    assert 505 + len(completion.tokens) == target.max_positions


def test_no_requests_no_completions() -> None:
    assert list(generate_stream(tiny_target(), iter([]), batch_size=4, sampling=SamplingConfig())) == []
