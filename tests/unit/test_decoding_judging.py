"""The judge at run time is the trained verifier, and the pattern layer reads the draft's own attention."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import torch

from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.calibration import PatternProfile
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter, Companions
from jetspec_train.decoding.patterns import STATISTICS
from jetspec_train.decoding.tree import Tree
from jetspec_train.modeling.blocks import make_blocks
from tests.round_tools import Tutored, calibration_for, tiny_verifier
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import NEW, plain_by_row, random_head, settings_for


@pytest.mark.parametrize("parent", ["vanilla", "none"])
def test_the_judge_scores_a_chain_as_the_trainer_does(parent):
    """Parity with the training step: same draft, same text, same anchor, same nodes -> the same logits."""
    from jetspec_train.objectives.candidates import rate_paths
    from jetspec_train.training.verifier_step import nodes_of

    target = tiny_target("qwen3")
    head = random_head(target, parent=parent)
    verifier = tiny_verifier(head)
    drafter = BlockDrafter(head, target, Companions(verifier))
    prompt = tiny_prompts(1, shortest=14, longest=14)[0]
    # With the whole vocabulary on the shortlist the draft's log-probabilities are exact, as in training.
    decoder = Decoder(target, drafter, DecodingConfig(shape="chain", nodes=6, prune=1e-9, shortlist=300))
    seen: list[tuple[Tree, np.ndarray]] = []
    original = decoder.planner.judge.judge

    def spy(trees, before):
        found = original(trees, before)
        seen.append((trees[0], found[0].logits))
        return found

    decoder.planner.judge.judge = spy
    answer = decoder.generate([prompt], max_new_tokens=4)[0].tokens
    tree, logits = seen[0]
    anchor = len(prompt)
    text = [*prompt, answer[0], *tree.tokens.tolist()]
    tokens_BT = torch.tensor([text])
    positions_BT = torch.arange(len(text))[None]
    with torch.no_grad():
        packed = target.forward_packed(tokens_BT, positions_BT, torch.zeros_like(tokens_BT), taps=drafter.taps)
        context = head.fuse(packed.features_BNF)
        supervised = torch.ones_like(tokens_BT, dtype=torch.bool)
        blocks = make_blocks(
            tokens_BT, positions_BT, torch.zeros_like(tokens_BT), supervised, torch.tensor([[anchor]]),
            block=head.config.block, layout="anchor",
        )  # fmt: skip
        hidden_BAKd = head(
            head.embed(blocks.inputs_BAK, target.embed), blocks.positions_BAK,
            head.context_kv(context, positions_BT), blocks.context_mask_BAT,
        )  # fmt: skip
        state = head.parent_state(blocks.parents_BAK, hidden_BAKd) if head.has_parent else None
        valid = blocks.valid_BAK
        valid[..., len(tree) :] = False
        candidates = rate_paths(
            hidden_BAKd, state, head.parent_weight, tokens_BAK=blocks.labels_BAK, labels_BAK=valid.float(),
            labelled_BAK=valid, draft_logits=target.logits, logits_dtype=target.dtype,
        )  # fmt: skip
        nodes = nodes_of(candidates, blocks, hidden_BAKd, state, target, verifier)
        expected = verifier.correctness(nodes, verifier.context_kv(context, positions_BT), blocks.context_mask_BAT)
    np.testing.assert_allclose(logits, expected[0, 0, : len(tree)].numpy(), atol=2e-3)


def test_a_judgement_after_a_deferral_knows_the_pending_tokens():
    """Waiting tokens are ancestors: the second draft's logits equal those of one tree that holds both stages, and move
    with the waiting tokens."""
    target = tiny_target("llama")
    prompt = tiny_prompts(1)[0]
    plain = plain_by_row(target, [prompt], max_new_tokens=NEW)[0]
    drafter = Tutored(target, [[*prompt, *plain]], right=1.0)
    drafter.companions = Companions(tiny_verifier(drafter.head))
    decoder = Decoder(target, drafter, settings_for("chain", nodes=6, stages=2, threshold="0"))
    generation = decoder.generate([prompt], max_new_tokens=NEW)[0]
    assert generation.tokens == plain
    assert generation.stats.deferred_stages > 0 and generation.stats.verifier_failures == 0
    assert generation.stats.verifier_forwards == generation.stats.draft_forwards
    judge = decoder.planner.judge
    judge.begin(1)
    tree = drafter.propose([5], [6], decoder.settings)[0]
    first = judge.judge([tree], [5])[0]
    judge.defer(0, [0, 1])
    assert judge._trunks[0].path_logprob == pytest.approx(float(tree.scores[1]))
    rest = Tree(tree.tokens[2:], tree.parents[2:] - 2, tree.depths[2:] - 2, tree.scores[2:] - tree.scores[1])
    rest.parents[0] = -1
    states = drafter.states
    drafter.states = dataclasses.replace(
        states, hidden_BKd=states.hidden_BKd[:, 2:], entropies_BK=states.entropies_BK[:, 2:]
    )
    second = judge.judge([rest], [int(tree.tokens[1])])[0]
    np.testing.assert_allclose(second.logits, first.logits[2:], atol=1e-4)


def test_the_confidence_never_sees_the_token_it_is_about():
    target = tiny_target("llama")
    drafter = BlockDrafter(random_head(target), target)
    drafter.companions = Companions(tiny_verifier(drafter.head))
    decoder = Decoder(target, drafter, settings_for("chain", nodes=6, stages=2))
    decoder.planner.judge.confidences = True
    decoder.generate([tiny_prompts(1)[0]], max_new_tokens=3)
    judge = decoder.planner.judge
    judge.begin(1)
    tree = drafter.propose([5], [6], decoder.settings)[0]
    before = judge.judge([tree], [5])[0]
    changed = dataclasses.replace(tree, tokens=np.append(tree.tokens[:-1], (tree.tokens[-1] + 1) % 300))
    after = judge.judge([changed], [5])[0]
    np.testing.assert_allclose(before.confidence_logits, after.confidence_logits, atol=1e-5)
    assert abs(before.logits[-1] - after.logits[-1]) > 1e-3
    np.testing.assert_allclose(before.logits[:-1], after.logits[:-1], atol=1e-5)


def test_the_pattern_layer_reads_the_drafts_own_attention(tmp_path):
    target = tiny_target("llama")
    prompts = tiny_prompts(2)
    plain = plain_by_row(target, prompts, max_new_tokens=NEW)
    texts = [[*prompt, *text] for prompt, text in zip(prompts, plain)]
    wide = PatternProfile(STATISTICS, (-1.0,) * 4, (2.0,) * 4, 1.0)
    nothing = PatternProfile(STATISTICS, (-1.0,) * 4, (-0.5,) * 4, 1.0)
    for profile in (wide, nothing):
        drafter = Tutored(target, texts, right=1.0)
        drafter.companions = Companions(tiny_verifier(drafter.head), calibration_for(target, pattern=profile))
        path = tmp_path / "trace.jsonl"
        config = settings_for("tree", stages=2, threshold="0", trace=str(path))
        generations = Decoder(target, drafter, config).generate(prompts, max_new_tokens=NEW)
        assert [generation.tokens for generation in generations] == plain
        decisions = [d for line in path.read_text().splitlines() for d in json.loads(line)["decisions"]]
        measured = [d["statistics"] for d in decisions if d["statistics"]]
        assert measured and all(0 <= value <= 1 for found in measured for value in found.values())
        assert {d["reason"] for d in decisions if d["statistics"]} & {"passed" if profile is wide else "pattern"}
        assert any(d["action"] == "defer" for d in decisions) == (profile is wide)
