"""The trace replays what happened; the result cache saves forwards and changes nothing."""

from __future__ import annotations

import json

from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter, Companions
from jetspec_train.decoding.stubs import EchoDrafter
from tests.round_tools import Tutored, controlled, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import NEW, outputs, plain_by_row, random_head, settings_for


def test_the_trace_replays_the_answer_and_agrees_with_the_counts(tmp_path):
    target = tiny_target("llama")
    prompts = tiny_prompts(3)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    drafter = Tutored(target, texts, right=0.8)
    drafter.companions = Companions(tiny_verifier(drafter.head))
    path = tmp_path / "trace.jsonl"
    decoder = controlled(target, drafter, trace=str(path), threshold="0.2")
    generations = decoder.generate(prompts, max_new_tokens=NEW)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == sum(generation.stats.rounds for generation in generations)
    for row, generation in enumerate(generations):
        own = [line for line in lines if line["row"] == row]
        assert [line["round"] for line in own] == list(range(len(own)))
        assert [token for line in own for token in line["emitted"]] == generation.tokens[1:]
        text, stats = [*prompts[row], *generation.tokens], generation.stats
        for line in own:
            nodes, sent = line["nodes"], line["sent"]
            assert text[line["position"]] == line["anchor"]
            path_tokens = [nodes[node]["token"] for node in line["accepted"]]
            assert [*path_tokens, line["bonus"]][: len(line["emitted"])] == line["emitted"]
            assert len(line["target_choices"]) == len(sent) + 1
            assert len(line["target_logprob_of_tokens"]) == len(sent)
            assert sorted(line["accepted"] + line["rejected"]) == sorted(sent)
            place = {node: index for index, node in enumerate(sent)}
            for node in sent:  # accepted means: the target's own choice after an accepted parent
                parent = nodes[node]["parent"]
                choice = line["target_choices"][0 if parent < 0 else place[parent] + 1]
                reached = parent < 0 or parent in line["accepted"]
                assert (node in line["accepted"]) == (reached and choice == nodes[node]["token"])
        assert sum(len(line["sent"]) for line in own) == stats.drafted_tokens
        assert sum(len(line["deferred"]) for line in own) == stats.deferred_tokens
        assert sum(len(line["decisions"]) for line in own) == stats.stages
        assert sum(d["action"] == "defer" for line in own for d in line["decisions"]) == stats.deferred_stages


def test_a_trace_can_be_taken_with_everything_else_off(tmp_path):
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    path = tmp_path / "trace.jsonl"
    drafter = Tutored(target, [[*prompt, *plain]])
    decoder = Decoder(target, drafter, settings_for("tree", trace=str(path)))
    assert decoder.generate([prompt], max_new_tokens=NEW)[0].tokens == plain
    bare = Decoder(target, Tutored(target, [[*prompt, *plain]]), settings_for("tree"))
    assert bare.planner is None
    first, second = decoder.generate([prompt], max_new_tokens=NEW)[0], bare.generate([prompt], max_new_tokens=NEW)[0]
    assert first.tokens == second.tokens == plain
    assert len(path.read_text().splitlines()) > 2


def test_the_result_cache_drafts_what_was_said_before_and_reuses_prompts():
    target = tiny_target("llama")
    prompt = tiny_prompts(1, shortest=20, longest=20)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    drafter = BlockDrafter(random_head(target), target)
    decoder = Decoder(target, drafter, settings_for("tree", nodes=12, cache=True))
    first = decoder.generate([prompt], max_new_tokens=NEW)[0]
    second = decoder.generate([prompt], max_new_tokens=NEW)[0]
    assert first.tokens == second.tokens == plain
    assert second.stats.cached_accepted > 0 and second.stats.target_forwards < first.stats.target_forwards
    assert second.stats.reused_tokens == len(prompt) - 1 and first.stats.reused_tokens == 0
    # another turn: the conversation so far is the beginning of the new prompt
    turn = [*prompt, *plain, *tiny_prompts(1, seed=9)[0]]
    expected = plain_by_row(target, [turn], max_new_tokens=NEW)[0]
    third = decoder.generate([turn], max_new_tokens=NEW)[0]
    assert third.tokens == expected and third.stats.reused_tokens >= len(prompt) + NEW - 6
    assert decoder.pool.bytes <= decoder.pool.max_bytes and decoder.pool.reused_tokens > 0


def test_a_shared_pool_gives_nothing_to_another_target():
    llama, qwen = tiny_target("llama"), tiny_target("qwen2")
    prompt = tiny_prompts(1, shortest=20, longest=20)[0]
    first = Decoder(llama, EchoDrafter([[]], [len(prompt)]), settings_for("tree", cache=True))
    first.generate([prompt], max_new_tokens=NEW)
    other = Decoder(qwen, EchoDrafter([[]], [len(prompt)]), settings_for("tree", cache=True), pool=first.pool)
    generation = other.generate([prompt], max_new_tokens=NEW)[0]
    assert generation.stats.reused_tokens == 0 and generation.stats.cached_nodes == 0
    assert generation.tokens == plain_by_row(qwen, [prompt], max_new_tokens=NEW)[0]


def test_a_smaller_pool_forgets_and_stays_lossless():
    target = tiny_target("llama")
    prompts = tiny_prompts(3, shortest=18)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    drafter = BlockDrafter(random_head(target), target)
    decoder = Decoder(target, drafter, settings_for("tree", cache=True, cache_max_bytes=30_000))
    for _ in range(2):
        assert outputs(decoder, prompts, max_new_tokens=NEW) == plain
        assert decoder.pool.bytes <= 30_000
    assert decoder.pool.ngrams.evictions > 0
