"""Losslessness: whatever is drafted, the output is the one of plain decoding (fp32, tiny random targets)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, DraftConfig, SamplingConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.decoding.stats import merge_stats
from jetspec_train.decoding.stubs import EchoDrafter, RandomDrafter, RepeatDrafter
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from tests.tiny import tiny_prompts, tiny_target

NEW = 16
GREEDY = SamplingConfig()
SAMPLED = SamplingConfig(temperature=0.8, top_k=40, top_p=0.95, repetition_penalty=1.2)


def settings_for(shape: str, nodes: int = 10, **changes) -> DecodingConfig:
    return DecodingConfig(shape=shape, nodes=nodes, shortlist=16, **changes)


def random_head(target, seed: int = 0, **changes) -> DraftHead:
    """An untrained head whose parent term is not silent."""
    config = resolve_draft_config(
        DraftConfig(layers=2, block=6, parent_rank=8, taps=2, **changes),
        target.model.config,
        mask_token_id=target.mask_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        head = DraftHead(config)
        if head.markov_head is not None:
            torch.nn.init.normal_(head.markov_head.markov_w2.weight)
    return head


def outputs(decoder: Decoder, prompts, **options) -> list[list[int]]:
    return [generation.tokens for generation in decoder.generate(prompts, **options)]


def plain_by_row(target, prompts, **options) -> list[list[int]]:
    """Plain decoding one prompt at a time, rows keyed by their number: the reference of every test here."""
    decoder = Decoder(target, None, DecodingConfig())
    return [outputs(decoder, [prompt], row_ids=[row], **options)[0] for row, prompt in enumerate(prompts)]


def drafters(target, prompts, plain):
    yield "repeat", RepeatDrafter()
    yield "random", RandomDrafter(target.vocab_size)
    yield "echo", EchoDrafter(plain, [len(prompt) for prompt in prompts])
    yield "block", BlockDrafter(random_head(target), target)
    yield "gated", BlockDrafter(random_head(target, parent="gated", mask="bidirectional"), target)
    yield "in place", BlockDrafter(random_head(target, parent="none", layout="in_place"), target)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_every_drafter_shape_and_batch_gives_the_plain_output(kind, sampling):
    target = tiny_target(kind)
    prompts = tiny_prompts(5)
    options = dict(max_new_tokens=NEW, sampling=sampling, seed=3)
    plain = plain_by_row(target, prompts, **options)
    for batch in (1, 2, 5) if kind == "llama" else (5,):
        assert outputs(Decoder(target), prompts[:batch], **options) == plain[:batch]
        for name, drafter in drafters(target, prompts, plain):
            for shape in ("chain", "tree") if batch != 2 else ("tree",):
                decoder = Decoder(target, drafter, settings_for(shape))
                assert outputs(decoder, prompts[:batch], **options) == plain[:batch], (name, shape, batch)


@pytest.mark.parametrize("kind", ["gemma3", "mistral"])
def test_trees_are_lossless_past_a_sliding_window(kind):
    target = tiny_target(kind)
    prompts = tiny_prompts(2, shortest=14)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW, sampling=GREEDY)
    for _, drafter in drafters(target, prompts, plain):
        assert outputs(Decoder(target, drafter, settings_for("tree")), prompts, max_new_tokens=NEW) == plain


def test_plain_decoding_is_the_argmax_of_the_full_forward():
    """An independent reference: transformers' own forward over the whole text, token by token."""
    target = tiny_target("llama")
    for prompt, answer in zip(tiny_prompts(2), outputs(Decoder(target), tiny_prompts(2), max_new_tokens=8)):
        text = list(prompt)
        for token in answer:
            logits = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1]
            assert int(logits.argmax()) == token
            text.append(token)


def test_rows_end_at_different_places_and_nothing_follows_the_end():
    """End tokens chosen from the plain outputs themselves, so that rows stop early, late, and never."""
    target = tiny_target("llama")
    prompts = tiny_prompts(5)
    free = plain_by_row(target, prompts, max_new_tokens=NEW, sampling=SAMPLED, seed=5)
    ends = (free[0][0], free[1][3], free[2][10])
    original = target.eos_ids
    target.eos_ids = ends
    try:
        plain = plain_by_row(target, prompts, max_new_tokens=NEW, sampling=SAMPLED, seed=5)
        assert plain[0] == free[0][:1] and len({len(text) for text in plain}) >= 3
        for _, drafter in drafters(target, prompts, free):
            decoder = Decoder(target, drafter, settings_for("tree"))
            generations = decoder.generate(prompts, max_new_tokens=NEW, sampling=SAMPLED, seed=5)
            assert [generation.tokens for generation in generations] == plain
            for generation in generations:
                ended = generation.tokens[-1] in ends
                assert not set(generation.tokens[:-1]) & set(ends)
                assert generation.finish_reason == ("stop" if ended else "length")
                assert generation.stats.emitted == len(generation.tokens) - 1
                assert ended or len(generation.tokens) == NEW
    finally:
        target.eos_ids = original


@pytest.mark.parametrize("limit", [1, 2, 3, 7])
def test_the_length_is_exact_and_no_node_is_sent_beyond_it(limit):
    target = tiny_target("llama")
    prompts = tiny_prompts(2)
    plain = plain_by_row(target, prompts, max_new_tokens=limit)
    echo = EchoDrafter(plain_by_row(target, prompts, max_new_tokens=NEW), [len(prompt) for prompt in prompts])
    for generation, expected in zip(
        Decoder(target, echo, settings_for("chain")).generate(prompts, max_new_tokens=limit), plain
    ):
        assert generation.tokens == expected and len(expected) == limit
        assert generation.finish_reason == "length"
        assert generation.stats.target_forwards == (limit > 1)
        assert generation.stats.target_tokens == limit - 1


def test_the_answer_ends_with_the_context():
    target = tiny_target("llama")
    original = target.max_positions
    target.max_positions = 20
    try:
        prompt = tiny_prompts(1, shortest=15, longest=15)[0]
        plain = Decoder(target).generate([prompt], max_new_tokens=NEW)[0]
        assert len(prompt) + len(plain.tokens) == 20 and plain.finish_reason == "length"
        drafter = RandomDrafter(target.vocab_size)
        assert outputs(Decoder(target, drafter, settings_for("tree")), [prompt], max_new_tokens=NEW) == [plain.tokens]
        with pytest.raises(UserError, match="does not fit target"):
            Decoder(target).generate([prompt, [5] * 20])
    finally:
        target.max_positions = original


def test_stop_strings_cut_where_plain_decoding_cuts():
    target = tiny_target("llama")
    prompts = tiny_prompts(3)
    free = plain_by_row(target, prompts, max_new_tokens=NEW)
    # A string across a token boundary in the middle of the second answer.
    text = target.chat.decode(free[1][6:8], skip_special_tokens=False)
    plain = [
        Decoder(target).generate([prompt], max_new_tokens=NEW, stop=[text], row_ids=[row])[0]
        for row, prompt in enumerate(prompts)
    ]
    assert plain[1].tokens == free[1][:8] and plain[1].stop_string == text and plain[1].finish_reason == "stop"
    for _, drafter in drafters(target, prompts, free):
        generations = Decoder(target, drafter, settings_for("tree")).generate(
            prompts, max_new_tokens=NEW, stop=[text, "never found"]
        )
        assert [generation.tokens for generation in generations] == [generation.tokens for generation in plain]


def test_streaming_hands_out_each_token_once_and_in_order():
    target = tiny_target("llama")
    prompts = tiny_prompts(3)
    streamed: dict[int, list[int]] = {0: [], 1: [], 2: []}
    drafter = EchoDrafter(plain_by_row(target, prompts, max_new_tokens=NEW), [len(prompt) for prompt in prompts])
    generations = Decoder(target, drafter, settings_for("tree")).generate(
        prompts, max_new_tokens=NEW, row_ids=[7, 8, 9], on_tokens=lambda row, new: streamed[row].extend(new)
    )
    assert [streamed[row] for row in range(3)] == [generation.tokens for generation in generations]


def test_counts_of_a_chain_that_is_always_right():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=21)
    echo = EchoDrafter(plain, [len(prompt)])
    stats = Decoder(target, echo, settings_for("chain", nodes=4)).generate([prompt], max_new_tokens=21)[0].stats
    assert stats.emitted == 20  # the prefill's token is not counted
    assert stats.rounds == stats.target_forwards == 4
    assert stats.acceptance_length == 5.0
    assert stats.target_tokens == 20 and stats.drafted_tokens == 16
    assert stats.drafted_by_depth == stats.accepted_by_depth == [4, 4, 4, 4]
    assert stats.acceptance_rate_at(3) == 1.0 and np.isnan(stats.acceptance_rate_at(4))
    assert stats.draft_forwards == 0
    assert stats.seconds["total"] >= sum(stats.seconds[kind] for kind in ("prefill", "target", "draft", "host")) * 0.99
    both = merge_stats([stats, stats])
    assert both.emitted == 40 and both.drafted_by_depth == [8, 8, 8, 8] and both.acceptance_length == 5.0


def test_counts_of_a_chain_that_is_always_wrong():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)
    wrong = EchoDrafter([[(token + 1) % target.vocab_size for token in text] for text in plain], [len(prompt)])
    stats = Decoder(target, wrong, settings_for("chain", nodes=3)).generate([prompt], max_new_tokens=NEW)[0].stats
    assert stats.acceptance_length == 1.0
    assert stats.drafted_by_depth[0] == NEW - 2  # the last round may emit one token only: nothing is drafted
    assert stats.accepted_by_depth == [0]


def test_an_end_inside_an_accepted_path_counts_nothing_after_it():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    free = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    place = next(place for place in range(2, NEW) if free[place] not in free[:place])
    original = target.eos_ids
    target.eos_ids = (free[place],)
    try:
        echo = EchoDrafter([free], [len(prompt)])
        generation = Decoder(target, echo, settings_for("chain", nodes=8)).generate([prompt], max_new_tokens=NEW)[0]
    finally:
        target.eos_ids = original
    assert generation.tokens == free[: place + 1]
    assert generation.stats.emitted == place
    assert sum(generation.stats.accepted_by_depth) + generation.stats.rounds - 1 == place


@pytest.mark.parametrize(
    "layout,mask,parent", [("anchor", "causal", "vanilla"), ("in_place", "bidirectional", "gated")]
)
def test_the_drafters_forward_is_the_trained_forward(layout, mask, parent):
    """Parity: the logits that drafting uses, with its context grown round by round, equal those of the head's forward
    over the whole text at the same anchor, as the trainer runs it."""
    from jetspec_train.decoding.stats import Stopwatch
    from jetspec_train.modeling.blocks import make_blocks

    target = tiny_target("qwen3")
    head = random_head(target, layout=layout, mask=mask, parent=parent)
    drafter = BlockDrafter(head, target)
    text = tiny_prompts(1, shortest=20, longest=20)[0]
    tokens_BT = torch.tensor([text])
    positions_BT = torch.arange(20)[None]
    documents_BT = torch.zeros_like(positions_BT)
    with torch.no_grad():
        packed = target.forward_packed(tokens_BT, positions_BT, documents_BT, taps=drafter.taps)
        drafter.start(1, 4, Stopwatch(target.device))
        seen = 0
        for count in (9, 1, 3):  # a prompt and two commits; the capacity of 4 has to grow
            features = packed.features_BNF[:, seen : seen + count]
            drafter.observe([text[seen : seen + count]], features, [list(range(count))])
            seen += count
            drafted_BKV, _ = drafter._logits([text[seen]], head.config.predictions)
            blocks = make_blocks(
                tokens_BT, positions_BT, documents_BT, torch.ones_like(tokens_BT, dtype=torch.bool),
                torch.tensor([[seen]]), block=head.config.block, layout=layout,
            )  # fmt: skip
            context = head.context_kv(head.fuse(packed.features_BNF), positions_BT)
            hidden_BAKd = head(
                head.embed(blocks.inputs_BAK, target.embed), blocks.positions_BAK, context, blocks.context_mask_BAT
            )
            hidden_Kd = hidden_BAKd[0, 0, head.config.first_slot :]
            expected_KV = target.logits(hidden_Kd)
            expected_KV[0] += head.parent_bias(torch.tensor(text[seen]), hidden_Kd[0])
            torch.testing.assert_close(drafted_BKV[0], expected_KV, atol=1e-4, rtol=1e-4)


def test_chain_drafts_follow_the_heads_own_parent_term():
    target = tiny_target("llama")
    for parent in ("vanilla", "gated"):
        head = random_head(target, parent=parent)
        drafter = BlockDrafter(head, target)
        decoder = Decoder(target, drafter, settings_for("chain", nodes=6))
        decoder.generate([tiny_prompts(1)[0]], max_new_tokens=3)
        logits_BKV, _ = drafter._logits([11], 6)
        with torch.no_grad():
            tree = drafter.propose([11], [6], decoder.settings)[0]
            hidden_Kd = _hidden(drafter, 11)
            parent_token = 11
            for slot, token in enumerate(tree.tokens.tolist()):
                logits_V = target.logits(hidden_Kd[slot]) + head.parent_bias(
                    torch.tensor(parent_token), hidden_Kd[slot]
                )
                assert logits_V[token] >= logits_V.max() - 1e-4
                parent_token = token
        assert torch.equal(logits_BKV[0, 0].argmax(), torch.tensor(int(tree.tokens[0])))


def _hidden(drafter: BlockDrafter, anchor: int) -> torch.Tensor:
    """The drafter's hidden states [K, d] at its present context, by the head's own forward."""
    head, target = drafter.head, drafter._target
    inputs = torch.full((1, 1, 6), -1)
    inputs[0, 0, 0] = anchor
    positions = drafter._context.lengths[0] + torch.arange(6)[None, None]
    embeds = head.embed(inputs, target.embed)
    return head(embeds, positions, drafter._context.layers(), None)[0, 0]


def test_bad_input_is_refused_before_any_work():
    target = tiny_target("llama")
    with pytest.raises(UserError, match="prompt 1 is empty"):
        Decoder(target).generate([[5], []])
    with pytest.raises(UserError, match="max_new_tokens=0"):
        Decoder(target).generate([[5]], max_new_tokens=0)
    assert Decoder(target).generate([]) == []
    head = random_head(target)
    other = DraftHead(dataclasses.replace(head.config, vocab_size=target.vocab_size + 1))
    with pytest.raises(UserError, match=f"vocabulary {target.vocab_size + 1}.*{target.vocab_size}"):
        BlockDrafter(other, target)
