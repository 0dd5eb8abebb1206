"""Laws of the verifier's labels and loss: what is judged, up to where, and against which rule. All in fp64.

Shapes as in objectives.candidates.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec_train.modeling.blocks import Blocks
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.objectives.candidates import Candidates, Rule, draft_candidates, largest, rate_paths
from jetspec_train.objectives.verifier_loss import VerifierWeights, verifier_loss, weighted_bce
from tests.draft_tools import LM_HEAD, Packed, draft_head, logits, packed, random, run_head

ANCHORS = torch.tensor([[4, 5, 6, 7, 8, 9, 12, 14]])


def setting(seed: int = 0, sampled: bool = False, **changes: Any) -> tuple[DraftHead, Packed, Blocks, Tensor]:
    """A head, a text, its blocks, and the head's hidden states. Unless ``sampled``, the text is the target's own: its
    state at every place chooses the text's next token."""
    head = draft_head(seed, **changes)
    if head.parent_weight is not None:
        head.parent_weight.data *= 0.2  # the parent matters and does not drown everything else
    batch = packed([[(4, 20)]], 24, seed=seed)
    blocks = batch.blocks(ANCHORS, config=head.config)
    hidden = run_head(head, batch, blocks).detach()
    if not sampled:
        states = batch.hidden_BTD.clone()
        states[0, :-1] = LM_HEAD[batch.tokens_BT[0, 1:]] * 3
        batch = replace(batch, hidden_BTD=states)
    return head, batch, blocks, hidden


def drafted(head: DraftHead, batch: Packed, blocks: Blocks, hidden: Tensor, **changes: Any) -> Candidates:
    """The head's candidates, of hidden states that know the text at about two places of three."""
    hidden = helped(hidden, blocks)
    state = head.parent_state(blocks.parents_BAK, hidden) if head.has_parent else None
    arguments: dict[str, Any] = dict(
        labels_BAK=blocks.labels_BAK,
        valid_BAK=blocks.valid_BAK,
        judged_BA=blocks.anchors_BA >= 0,
        target_hidden_BTD=batch.hidden_BTD,
        sources_BAK=blocks.sources_BAK,
        draft_logits=logits,
        target_logits=logits,
        rule=Rule(siblings=3),
        chunk_rows=3,
    )
    return draft_candidates(hidden, state, head.parent_weight, **{**arguments, **changes})


def helped(hidden: Tensor, blocks: Blocks) -> Tensor:
    knows = (blocks.labels_BAK * 7 % 3 > 0).unsqueeze(-1)
    return 0.5 * hidden + 3.0 * knows * LM_HEAD[blocks.labels_BAK] + 1.0 * LM_HEAD[blocks.labels_BAK]


def slow_logits(head: DraftHead, hidden: Tensor, parent: int, a: int, k: int) -> Tensor:
    with torch.no_grad():
        row = logits(hidden[0, a, k])
        return row + head.parent_bias(torch.tensor(parent), hidden[0, a, k]) if head.has_parent else row


@pytest.mark.parametrize("parent", ["vanilla", "none", "gated"])
@pytest.mark.parametrize("layout", ["anchor", "in_place"])
def test_the_chain_is_the_decoders_own_up_to_the_first_rejected_token(parent: str, layout: str) -> None:
    """Against a slow chain that feeds every token back as the next parent and asks the target one by one."""
    changes = dict(parent=parent, layout=layout, parent_rank=8 if parent != "none" else 0)
    head, batch, blocks, hidden = setting(**changes)
    found = drafted(head, batch, blocks, hidden)
    hidden = helped(hidden, blocks)
    lengths = []
    for a, anchor in enumerate(ANCHORS[0].tolist()):
        token, accepted = int(batch.tokens_BT[0, anchor]), 0
        for k in range(head.config.first_slot, head.config.block):
            place = anchor + k + head.config.offset - 1  # the token before the one that is drafted
            if place + 1 >= 24:
                break
            token = int(slow_logits(head, hidden, token, a, k).argmax())
            choice = int(logits(batch.hidden_BTD[0, place]).argmax())
            assert found.chain_BAK[0, a, k] and found.tokens_BAKS[0, a, k, 0] == token
            assert found.labels_BAKS[0, a, k, 0] == found.chain_labels_BAK[0, a, k] == (token == choice)
            if token != choice:
                assert not found.chain_BAK[0, a, k + 1 :].any()
                break
            accepted += 1
        lengths.append(accepted)
        assert found.chain_BAK[0, a].sum() in (accepted, accepted + 1)
    assert 0 < sum(lengths) < 8 * head.config.predictions, "the setting shows both outcomes"


def test_nothing_after_a_rejected_token_and_nothing_outside_the_text_has_a_label() -> None:
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    for a in range(8):
        reached = True
        for k in range(head.config.block):
            assert bool(found.on_path_BAK[0, a, k]) == (reached and bool(blocks.valid_BAK[0, a, k]))
            reached = reached and int(found.followed_BAK[0, a, k]) >= 0
    dead = ~found.on_path_BAK
    assert dead.any() and not found.labelled_BAKS[dead].any() and not found.labels_BAKS[dead].any()
    assert (found.followed_BAK[dead] == -1).all() and not found.path_weights_BAK[dead].any()
    assert (found.chain_BAK <= found.on_path_BAK).all()


def test_siblings_are_the_next_choices_and_at_most_one_of_a_slot_is_right() -> None:
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    hidden = helped(hidden, blocks)
    rescued = 0
    for _, a, k in found.on_path_BAK.nonzero().tolist():
        row = slow_logits(head, hidden, int(blocks.parents_BAK[0, a, k]), a, k)
        expected = row.topk(4)
        assert found.tokens_BAKS[0, a, k].tolist() == expected.indices.tolist()
        torch.testing.assert_close(found.logprobs_BAKS[0, a, k], row.log_softmax(-1)[expected.indices])
        torch.testing.assert_close(found.margins_BAKS[0, a, k], expected.values[0] - expected.values)
        assert found.ranks_BAKS[0, a, k].tolist() == [0, 1, 2, 3]
        assert found.labels_BAKS[0, a, k].sum() <= 1
        plain = logits(hidden[0, a, k]).log_softmax(-1)
        torch.testing.assert_close(found.entropies_BAK[0, a, k], -(plain.exp() * plain).sum())
        rescued += int(found.labels_BAKS[0, a, k, 1:].sum())
    assert rescued > 0, "the setting has a sibling that is right"


def test_ancestors_run_through_the_candidates_that_the_text_takes() -> None:
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    ancestors, path_logprobs = found.ancestors(), found.path_logprobs()
    K, S = head.config.block, 4
    for _, a, k in found.on_path_BAK.nonzero().tolist():
        for s in range(S):
            above = [(j, int(found.followed_BAK[0, a, j])) for j in range(k)]
            expected = {j * S + t for j, t in above} | {k * S + s}
            assert set(ancestors[0, a, k * S + s].nonzero().squeeze(-1).tolist()) == expected
            path = [found.logprobs_BAKS[0, a, j, t] for j, t in [*above, (k, s)]]
            torch.testing.assert_close(path_logprobs[0, a, k, s], torch.stack(path).sum())
    assert ancestors.shape == (1, 8, K * S, K * S)


def test_a_text_that_the_target_would_not_have_chosen_ends_the_path_and_the_label_stays_true() -> None:
    head, batch, blocks, hidden = setting()
    before = drafted(head, batch, blocks, hidden)
    a, k = next(
        (a, k) for _, a, k in before.on_path_BAK.nonzero().tolist() if k == 0 and before.followed_BAK[0, a, 1] >= 0
    )
    second = int(before.tokens_BAKS[0, a, 0, 1])  # now the target chooses the draft's second choice there
    states = batch.hidden_BTD.clone()
    states[0, int(blocks.sources_BAK[0, a, k])] = LM_HEAD[second] * 3
    after = drafted(head, replace(batch, hidden_BTD=states), blocks, hidden)
    assert after.labels_BAKS[0, a, 0].tolist() == [0.0, 1.0, 0.0, 0.0]
    assert after.on_path_BAK[0, a].sum() == 1 and after.followed_BAK[0, a, 0] == -1


def test_known_choices_give_the_same_labels_as_looking_again() -> None:
    head, batch, blocks, hidden = setting()
    looked = drafted(head, batch, blocks, hidden)
    choice = logits(batch.hidden_BTD)[0].argmax(-1)[blocks.sources_BAK]
    some = torch.where(torch.arange(8)[None, :, None] % 2 == 0, choice, -1)
    for known in (choice, some):
        given = drafted(head, batch, blocks, hidden, target_choice_BAK=known)
        for name, value in vars(looked).items():
            assert torch.equal(getattr(given, name), value), name


def test_blocks_that_are_not_judged_cost_nothing_and_change_nothing() -> None:
    head, batch, blocks, hidden = setting()
    everything = drafted(head, batch, blocks, hidden)
    judged = torch.tensor([[True, False] * 4])
    asked: list[int] = []

    def counted(states: Tensor) -> Tensor:
        asked.append(len(states))
        return logits(states)

    half = drafted(head, batch, blocks, hidden, judged_BA=judged, draft_logits=counted)
    assert torch.equal(half.labels_BAKS[:, 0::2], everything.labels_BAKS[:, 0::2])
    assert not half.on_path_BAK[:, 1::2].any()
    assert sum(asked) == int(half.on_path_BAK.sum())


def test_sampled_labels_are_the_targets_probabilities() -> None:
    head, batch, blocks, hidden = setting(sampled=True)
    cold = lambda rows: torch.log_softmax(rows / 0.5, dim=-1)  # noqa: E731
    found = drafted(head, batch, blocks, hidden, rule=Rule("match_sampled", 3, cold))
    for _, a, k in found.on_path_BAK.nonzero().tolist():
        target = cold(logits(batch.hidden_BTD[0, int(blocks.sources_BAK[0, a, k])])).exp()
        torch.testing.assert_close(found.labels_BAKS[0, a, k], target[found.tokens_BAKS[0, a, k]])
        text = int(blocks.labels_BAK[0, a, k])
        assert (int(found.followed_BAK[0, a, k]) >= 0) == (text in found.tokens_BAKS[0, a, k].tolist())


def test_the_ratio_rule_draws_from_the_draft_and_weighs_the_text_as_it_would_have_been_drafted() -> None:
    """Averaged over draws, the label is the chance of acceptance sum_v min(p_t, p_d), which is the chain's label."""
    head, batch, blocks, hidden = setting(sampled=True)
    rounds = 400
    many = Blocks(**{name: value.repeat(1, rounds, *[1] * (value.dim() - 2)) for name, value in vars(blocks).items()})
    draws = torch.rand(many.labels_BAK.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = drafted(
        head, batch, many, hidden.repeat(1, rounds, 1, 1), rule=Rule("ratio"), draws_BAK=draws, chunk_rows=4000
    )
    assert not found.labelled_BAKS[..., 1].any()
    mean = found.labels_BAKS[0, :, 0, 0].view(rounds, 8).mean(0)
    torch.testing.assert_close(mean, found.chain_labels_BAK[0, :8, 0], atol=0.07, rtol=0)
    hidden = helped(hidden, blocks)
    for a in range(8):
        weight = 1.0
        for k in blocks.valid_BAK[0, a].nonzero().squeeze(-1).tolist():
            assert float(found.path_weights_BAK[0, a, k]) == pytest.approx(weight)
            text = int(blocks.labels_BAK[0, a, k])
            draft = slow_logits(head, hidden, int(blocks.parents_BAK[0, a, k]), a, k).softmax(-1)
            target = logits(batch.hidden_BTD[0, int(blocks.sources_BAK[0, a, k])]).softmax(-1)
            assert float(found.chain_labels_BAK[0, a, k]) == pytest.approx(float(torch.minimum(draft, target).sum()))
            weight *= min(1.0, float(draft[text] / target[text]))


def test_given_paths_are_rated_like_drafted_ones() -> None:
    """The chain handed in as given paths: the same opinions, and a token of low rank is told as one."""
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    state = head.parent_state(blocks.parents_BAK, hidden)
    arguments = dict(draft_logits=logits, logits_dtype=torch.float64, labelled_BAK=found.chain_BAK, chunk_rows=5)
    for choice in range(4):
        given = rate_paths(
            helped(hidden, blocks),
            state,
            head.parent_weight,
            tokens_BAK=found.tokens_BAKS[..., choice],
            labels_BAK=found.labels_BAKS[..., choice],
            **arguments,  # type: ignore[arg-type]
        )
        where = found.chain_BAK
        for name in ("logprobs_BAKS", "margins_BAKS", "labels_BAKS"):
            one, other = getattr(given, name)[..., 0][where], getattr(found, name)[..., choice][where]
            torch.testing.assert_close(one, other)
        assert (given.ranks_BAKS[..., 0][where] == choice).all()
        torch.testing.assert_close(given.entropies_BAK[where], found.entropies_BAK[where])
        assert not given.labelled_BAKS[..., 0][~where].any() and not given.chain_BAK.any()


def test_loss_is_the_weighted_mean_over_labels_with_the_slots_without_label_in_the_normaliser() -> None:
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    weights = torch.exp(-torch.arange(5) / 4.0).expand(1, 8, 5).double() * blocks.valid_BAK
    confidence, correctness = random(1, 8, 5, seed=1), random(1, 8, 20, seed=2)
    share = VerifierWeights(confidence=0.5, correctness=2.0, reject=3.0, sibling=0.25)
    result = verifier_loss(confidence, correctness, found, weights, total_weight=7.0, weights=share)
    expected = 0.0
    for _, a, k in found.on_path_BAK.nonzero().tolist():
        if found.chain_BAK[0, a, k]:
            expected += 0.5 * weights[0, a, k] * bce(confidence[0, a, k], found.labels_BAKS[0, a, k, 0], 3.0)
        for s in range(4):
            weight = weights[0, a, k] * (1.0 if s == 0 else 0.25)
            expected += 2.0 * weight * bce(correctness[0, a, k * 4 + s], found.labels_BAKS[0, a, k, s], 3.0)
    torch.testing.assert_close(result.loss, expected / 7.0)
    top, bottom = result.metrics["prior"]
    assert bottom == found.chain_BAK.sum() and top == found.labels_BAKS[..., 0][found.chain_BAK].sum()


def bce(logit: Tensor, label: Tensor, reject: float) -> Tensor:
    p = torch.sigmoid(logit)
    return -(label * p.log() + reject * (1 - label) * (1 - p).log())


def test_cross_entropy_does_not_overflow_and_splits_over_micro_steps() -> None:
    extreme = weighted_bce(torch.tensor([300.0, -300.0]), torch.tensor([0.0, 1.0]), 1.0)
    assert extreme.tolist() == [300.0, 300.0]
    head, batch, blocks, hidden = setting()
    found = drafted(head, batch, blocks, hidden)
    weights = blocks.valid_BAK.double()
    confidence, correctness = random(1, 8, 5, seed=1), random(1, 8, 20, seed=2)
    whole = verifier_loss(confidence, correctness, found, weights, total_weight=9.0).loss
    parts = 0.0
    for piece in (slice(0, 3), slice(3, 8)):
        cut = Candidates(**{name: value[:, piece] for name, value in vars(found).items()})
        parts += verifier_loss(
            confidence[:, piece], correctness[:, piece], cut, weights[:, piece], total_weight=9.0
        ).loss
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize("vocabulary", [61, 1000, 4800, 5003])
def test_the_largest_entries_are_those_of_topk(vocabulary: int) -> None:
    values = random(7, vocabulary, seed=vocabulary)
    values[0, -3:] = 9.0 + torch.arange(3)  # at the end, where the chunks do not reach
    values[1, :4] = 9.0 + torch.arange(4)  # all in one chunk
    found, places = largest(values, 4)
    expected = values.topk(4, dim=-1)
    assert torch.equal(found, expected.values) and torch.equal(places, expected.indices)
