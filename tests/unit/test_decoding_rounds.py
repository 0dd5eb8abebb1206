"""Rounds with all controls on: lossless is exactly lossless, whoever judges; deferral is the trained forward."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter, Companions
from jetspec_train.decoding.stats import Stopwatch, merge_stats
from jetspec_train.decoding.stubs import EchoDrafter
from jetspec_train.modeling.blocks import make_blocks
from tests.round_tools import Liar, Tutored, controlled, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import GREEDY, NEW, SAMPLED, outputs, plain_by_row, random_head, settings_for


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 3])
def test_lossless_with_everything_on_whoever_judges(sampling, batch):
    target = tiny_target("llama")
    prompts = tiny_prompts(batch)
    options = dict(max_new_tokens=NEW, sampling=sampling, seed=3)
    plain = plain_by_row(target, prompts, **options)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    deferred = 0
    for liar in (None, "ones", "zeros", "random", "inverted", "nan"):
        for shape in ("tree", "chain", "paths"):
            drafter = Tutored(target, texts)
            if liar is None:
                drafter.companions = Companions(tiny_verifier(drafter.head))
            decoder = controlled(target, drafter, shape, liar, paths=3)
            generations = decoder.generate(prompts, **options)
            assert [generation.tokens for generation in generations] == plain, (liar, shape)
            # a second time with what the cache has learnt, its prefixes included
            again = decoder.generate(prompts, **options)
            assert [generation.tokens for generation in again] == plain, (liar, shape, "again")
            stats = merge_stats([generation.stats for generation in generations + again])
            deferred += stats.deferred_stages
            assert stats.emitted == 2 * sum(len(text) - 1 for text in plain)
            assert stats.passed_stages <= stats.checked_stages <= stats.deferred_stages <= stats.stages
            assert stats.overruled_tokens == 0 and stats.kept_tokens <= stats.deferred_tokens
            if liar == "nan":
                assert stats.deferred_stages == 0 and stats.verifier_failures == stats.verifier_forwards > 0
            elif liar is not None:
                assert stats.verifier_failures == 0 < stats.verifier_forwards
    assert deferred > 0


@given(
    st.integers(0, 10_000),
    st.sampled_from(["ones", "random", "inverted", "nan"]),
    st.sampled_from(["tree", "chain", "paths"]),
    st.integers(0, 3),
    st.sampled_from([None, 0, 2, 4]),
    st.floats(0, 0.9),
    st.booleans(),
    st.booleans(),
    st.floats(0, 1),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_setting_changes_a_token(seed, liar, shape, stages, most, pruned, scheduled, cached, right):
    target = tiny_target("llama")
    prompts = tiny_prompts(2, seed=seed % 3)
    options = dict(max_new_tokens=10, sampling=SAMPLED if seed % 2 else GREEDY, seed=seed)
    plain = plain_by_row(target, prompts, **options)
    drafter = Tutored(target, [[*prompt, *text] for prompt, text in zip(prompts, plain)], right, seed=seed)
    decoder = controlled(
        target, drafter, shape, liar, stages=stages, max_pending=most, prune=pruned, scheduler=scheduled, cache=cached,
        threshold=str(seed % 10 / 10),
    )  # fmt: skip
    assert outputs(decoder, prompts, **options) == plain


def test_a_verifier_of_nan_falls_back_to_the_target_and_is_counted():
    """The real judge, with weights that are NaN."""
    target = tiny_target("llama")
    prompts = tiny_prompts(2)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    drafter = Tutored(target, texts)
    verifier = tiny_verifier(drafter.head)
    torch.nn.init.constant_(verifier.score.weight, float("nan"))
    drafter.companions = Companions(verifier)
    generations = controlled(target, drafter).generate(prompts, max_new_tokens=NEW)
    assert [generation.tokens for generation in generations] == plain
    for generation in generations:
        assert generation.stats.verifier_failures == generation.stats.verifier_forwards > 0
        assert generation.stats.deferred_stages == 0 and generation.stats.drafted_tokens > 0


def test_deferral_saves_forwards_where_the_draft_is_right():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=25)[0]

    def run(most: int | None) -> tuple[list[int], object]:
        drafter = Tutored(target, [[*prompt, *plain]], right=1.0)
        config = settings_for("chain", nodes=6, stages=2, depth=2, max_pending=most)
        decoder = Decoder(target, drafter, config)
        decoder.planner.judge = Liar("ones")
        generation = decoder.generate([prompt], max_new_tokens=25)[0]
        return generation.tokens, generation.stats

    staged, saved = run(None)
    each, verified = run(0)
    assert staged == each == plain
    assert verified.deferred_stages == 0 and verified.forwards_saved == 0.0
    # stages of 2 in a block of 6: two wait, the third goes with them: 7 tokens per forward instead of 3
    assert verified.target_forwards == 8 and saved.target_forwards == 4
    assert saved.screening_accuracy == 1.0 and saved.kept_tokens == saved.deferred_tokens
    assert saved.forwards_saved > 0.5
    assert saved.draft_forwards > saved.target_forwards


def test_wrong_pending_tokens_are_rolled_back_and_booked():
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    drafter = Tutored(target, [[*prompt, *plain]], right=0.0)
    config = settings_for("chain", nodes=6, stages=2)
    decoder = Decoder(target, drafter, config)
    decoder.planner.judge = Liar("ones")
    generation = decoder.generate([prompt], max_new_tokens=NEW)[0]
    stats = generation.stats
    assert generation.tokens == plain
    assert stats.deferred_stages > 0 and stats.kept_tokens < stats.deferred_tokens
    assert stats.passed_stages < stats.checked_stages < stats.deferred_stages  # stages below a wrong one are not judged
    assert stats.screening_accuracy < 1.0


# ---- deferral is the trained forward ---------------------------------------------------------------------------


@pytest.mark.parametrize("layout,mask", [("anchor", "causal"), ("in_place", "causal"), ("anchor", "bidirectional")])
@pytest.mark.parametrize("ragged", [False, True])
def test_deferring_m_correct_tokens_is_the_trained_forward_with_m_clean_slots(layout, mask, ragged):
    """METHODS 2, the golden test: states and logits of the run-time forward equal those of a training block."""
    target = tiny_target("qwen3")
    head = random_head(target, layout=layout, mask=mask)
    drafter = BlockDrafter(head, target)
    text = tiny_prompts(1, shortest=24, longest=24)[0]
    anchor, config = 12, head.config
    tokens_BT = torch.tensor([text])
    positions_BT = torch.arange(len(text))[None]
    documents_BT = torch.zeros_like(positions_BT)
    with torch.no_grad():
        packed = target.forward_packed(tokens_BT, positions_BT, documents_BT, taps=drafter.taps)
        clean = [1, 3] if ragged else [2]
        drafter.start(len(clean), 4, Stopwatch(target.device))
        features = packed.features_BNF[:, :anchor].expand(len(clean), -1, -1)
        drafter.observe([text[:anchor]] * len(clean), features, [list(range(anchor))] * len(clean))
        drafter.keep_states = True
        pending = [text[anchor + 1 : anchor + 1 + m] for m in clean]
        predictions = config.predictions - max(clean)
        logits_BKV, _ = drafter._logits([text[anchor]] * len(clean), predictions, pending)
        context = head.context_kv(head.fuse(packed.features_BNF), positions_BT)
        for row, m in enumerate(clean):
            blocks = make_blocks(
                tokens_BT, positions_BT, documents_BT, torch.ones_like(tokens_BT, dtype=torch.bool),
                torch.tensor([[anchor]]), torch.tensor([[m]]), block=config.block, layout=layout,
            )  # fmt: skip
            assert blocks.clean_BA.item() == m
            hidden_BAKd = head(
                head.embed(blocks.inputs_BAK, target.embed), blocks.positions_BAK, context, blocks.context_mask_BAT
            )
            first = config.first_slot + m
            hidden_Kd = hidden_BAKd[0, 0, first : first + predictions]
            assert blocks.distance_BAK[0, 0, first] == 0
            torch.testing.assert_close(drafter.states.hidden_BKd[row], hidden_Kd, atol=1e-4, rtol=1e-4)
            expected_KV = target.logits(hidden_Kd)
            expected_KV[0] += head.parent_bias(blocks.parents_BAK[0, 0, first], hidden_Kd[0])
            torch.testing.assert_close(logits_BKV[row], expected_KV, atol=1e-4, rtol=1e-4)


def test_a_draft_after_pending_tokens_depends_on_them_and_fits_the_block():
    target = tiny_target("llama")
    drafter = BlockDrafter(random_head(target), target)
    config = settings_for("chain", nodes=12)
    Decoder(target, drafter, config).generate([tiny_prompts(1)[0]], max_new_tokens=3)
    free = drafter.propose([11], [20], config)[0]
    assert len(free) == drafter.block == 6
    after = drafter.propose([11], [20], config, [[5, 6]])[0]
    other = drafter.propose([11], [20], config, [[5, 7]])[0]
    assert len(after) == 4 and after.tokens.tolist() != other.tokens.tolist()
    assert len(drafter.propose([11], [20], config, [[5] * 5])[0]) == 1
    assert len(drafter.propose([11], [20], config, [[5] * 6])[0]) == 0
    assert len(drafter.propose([11], [2], config, [[5, 6]])[0]) == 2


# ---- bad input and defaults ----------------------------------------------------------------------------------------


def test_what_does_not_go_together_is_refused_before_any_work(tmp_path):
    target = tiny_target("llama")
    drafter = BlockDrafter(random_head(target), target)
    cases = [
        (dict(policy="trusting", stages=2), "needs a verifier"),
        (dict(policy="trusting"), "decoding.stages"),
        (dict(stages=2, max_pending=6), "max_pending=6 .*block predicts 6"),
        (dict(stages=2, threshold="1.5"), "threshold=1.5"),
        (dict(stages=2, threshold="-0.1"), "threshold=-0.1"),
        (dict(rule="ratio"), "decoding.shape=tree"),
        (dict(rule="ratio", shape="chain"), "needs sampling"),
        (dict(stream_unverified=True, stages=2), "only decoding.policy=trusting"),
        (dict(trace=str(tmp_path)), "cannot be written"),
        (dict(utilisation=True, stages=2), "set decoding.scheduler=true"),
        (dict(candidates=3), "decoding.candidates=3"),
    ]
    for changes, words in cases:
        with pytest.raises(UserError, match=words):
            Decoder(target, drafter, dataclasses.replace(settings_for("tree"), **changes))
    with pytest.raises(UserError, match=r"EchoDrafter.* cannot go on"):
        Decoder(target, EchoDrafter([[]], [1]), settings_for("tree", stages=2))
    with pytest.raises(UserError, match=r"EchoDrafter.* cannot be sampled"):
        Decoder(target, EchoDrafter([[]], [1]), settings_for("chain", rule="ratio", sampling=SAMPLED))
    with pytest.raises(UserError, match="needs a verifier"):
        Decoder(target, None, settings_for("tree", policy="trusting", stages=2))


def test_a_plain_decoder_has_no_planner_and_its_drafter_keeps_no_states():
    target = tiny_target("llama")
    prompts = tiny_prompts(1)
    drafter = BlockDrafter(random_head(target), target, Companions(tiny_verifier(random_head(target))))
    controlled(target, drafter).generate(prompts, max_new_tokens=4)  # leaves its wishes behind
    decoder = Decoder(target, drafter, DecodingConfig())
    assert decoder.planner is None
    decoder.generate(prompts, max_new_tokens=4)
    assert not drafter.keep_states and not drafter.keep_attention and drafter.listener is None
    assert "verifier" not in decoder.generate(prompts, max_new_tokens=4)[0].stats.seconds


def test_the_monitor_watches_every_answer():
    target = tiny_target("llama")
    prompts = tiny_prompts(2)
    drafter = BlockDrafter(random_head(target), target)
    decoder = Decoder(target, drafter, settings_for("tree"))
    for _ in range(3):
        decoder.generate(prompts, max_new_tokens=NEW, domains=["maths", "chat"])
    assert set(decoder.monitor.values()["tree"]) == {"", "maths", "chat"}
    values = decoder.monitor.values()["tree"][""]
    assert values["pass_rate"] < 0.5 and values["wasted"] > 0.5
    assert any("below 85%" in warning for warning in decoder.monitor.warnings())
