"""Policy trusting: what is kept against the target's choice, how it is counted, and what streaming waits for."""

from __future__ import annotations

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import Companions
from jetspec_train.decoding.stats import merge_stats
from tests.round_tools import Liar, Tutored, calibration_for, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import NEW, SAMPLED, plain_by_row, settings_for


def trusting(target, drafter, floor: float, **changes) -> Decoder:
    drafter.companions = Companions(tiny_verifier(drafter.head), calibration_for(target))
    config = settings_for(
        "chain", nodes=6, stages=2, policy="trusting", threshold="0", floor=floor, max_pending=4, **changes
    )
    decoder = Decoder(target, drafter, config)
    decoder.planner.judge = Liar("ones")
    return decoder


@pytest.mark.parametrize("batch", [1, 3])
def test_trusting_keeps_what_the_floor_allows_and_nothing_else(batch):
    target = tiny_target("llama")
    prompts = tiny_prompts(batch)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    # no token but the argmax has a probability of 1: with this floor trusting is lossless
    exact = trusting(target, Tutored(target, texts, right=0.7), floor=1.0).generate(prompts, max_new_tokens=NEW)
    assert [generation.tokens for generation in exact] == plain
    assert all(generation.stats.overruled_tokens == 0 for generation in exact)
    # with no floor every deferred token is kept
    loose = trusting(target, Tutored(target, texts, right=0.7), floor=0.0).generate(prompts, max_new_tokens=NEW)
    stats = merge_stats([generation.stats for generation in loose])
    assert stats.overruled_tokens > 0 and stats.kept_tokens == stats.deferred_tokens
    assert [generation.tokens for generation in loose] != plain
    assert all(len(generation.tokens) == NEW for generation in loose)
    assert stats.checked_stages == stats.deferred_stages > stats.passed_stages


def test_kept_tokens_are_the_counted_ones():
    """Replayed with plain forwards: outside the overruled tokens every token is the target's argmax, and each overruled
    one has at least the floor's probability."""
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    for floor in (0.0, 0.002, 0.05):
        drafter = Tutored(target, [[*prompt, *plain]], right=0.7, seed=1)
        generation = trusting(target, drafter, floor).generate([prompt], max_new_tokens=NEW)[0]
        text, overruled = list(prompt), 0
        for token in generation.tokens:
            with torch.no_grad():
                chances = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].softmax(-1)
            if int(chances.argmax()) != token:
                overruled += 1
                assert chances[token] >= floor - 1e-6
            text.append(token)
        assert overruled == generation.stats.overruled_tokens


def test_streaming_waits_for_the_target_unless_told_not_to():
    target = tiny_target("llama")
    prompts = tiny_prompts(2)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    for unverified in (False, True):
        streamed: list[list[int]] = [[], []]
        bursts: list[int] = []

        def listen(row: int, tokens: list[int], streamed=streamed, bursts=bursts) -> None:
            streamed[row].extend(tokens)
            bursts.append(len(tokens))

        decoder = trusting(target, Tutored(target, texts, right=0.7), 1.0, stream_unverified=unverified)
        generations = decoder.generate(prompts, max_new_tokens=NEW, on_tokens=listen)
        assert streamed == [generation.tokens for generation in generations]
        # what was handed out is never taken back: then there is no floor, although one of 1 is set
        stats = merge_stats([generation.stats for generation in generations])
        assert (stats.overruled_tokens > 0) == unverified
        assert ([generation.tokens for generation in generations] == plain) == (not unverified)


def test_a_certificate_for_greedy_decoding_does_not_serve_sampling():
    target = tiny_target("llama")
    decoder = trusting(target, Tutored(target, [[]]), 0.0)
    with pytest.raises(UserError, match=r"made for temperature 0 and asked to answer at 0\.8"):
        decoder.generate(tiny_prompts(1), max_new_tokens=4, sampling=SAMPLED)


def test_a_stage_that_ends_the_output_is_never_deferred():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    free = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    place = next(place for place in range(4, NEW) if free[place] not in free[:place])
    original = target.eos_ids
    target.eos_ids = (free[place],)
    try:
        decoder = trusting(target, Tutored(target, [[*prompt, *free]], right=1.0), 0.0, stream_unverified=True)
        streamed: list[int] = []
        generation = decoder.generate([prompt], max_new_tokens=NEW, on_tokens=lambda _, new: streamed.extend(new))[0]
    finally:
        target.eos_ids = original
    assert generation.tokens == streamed == free[: place + 1] and generation.finish_reason == "stop"
