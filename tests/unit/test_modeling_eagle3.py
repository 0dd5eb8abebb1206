"""Laws of EAGLE-3 training: the training-time test is the drafting loop; reduced vocabularies count honestly."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DraftConfig
from jetspec_train.modeling.draft_config import preset_settings
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from jetspec_train.modeling.eagle3_training import (
    STEP_GAMMA,
    eagle3_blocks,
    initialise_eagle3,
    resolve_eagle3_config,
    unroll,
)
from jetspec_train.modeling.vocabulary import choose_vocabulary, token_counts
from jetspec_train.objectives.draft_loss import draft_loss
from jetspec_train.objectives.weights import slot_weights, total_weight
from tests import draft_tools as tools
from tests.tiny import KINDS, tiny_config

ROWS = [[(4, 12), (3, 9)], [(5, 20)]]
ANCHORS = torch.tensor([[1, 6, 9, 20], [7, 12, 18, -1]])


def eagle3_head(draft_vocab_size: int = tools.VOCABULARY, **changes: Any) -> Eagle3Head:
    settings: dict[str, Any] = dict(
        layers=1,
        hidden_size=tools.WIDTH,
        target_hidden_size=tools.WIDTH,
        heads=4,
        kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-6,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        vocab_size=tools.VOCABULARY,
        draft_vocab_size=draft_vocab_size,
        target_layer_ids=tuple(range(tools.TAPS)),
        norm_before_residual=False,
        norm_before_fc=False,
        fc_norm=False,
        norm_output=False,
        qk_norm=False,
        max_positions=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Eagle3Head(Eagle3Config(**{**settings, **changes})).double()


def unrolled(head: Eagle3Head, batch: tools.Packed, anchors: torch.Tensor, steps: int = 5) -> torch.Tensor:
    return unroll(
        head,
        batch.features_BTF,
        batch.tokens_BT,
        batch.positions_BT,
        batch.documents_BT,
        anchors,
        tools.embed,
        steps=steps,
    )


def drafted(head: Eagle3Head, batch: tools.Packed, row: int, start: int, anchor: int, steps: int) -> torch.Tensor:
    """The drafting loop, one input at a time on its own states, along the given text: hidden [steps, d]."""
    past, out = None, []
    states = head.fuse(batch.features_BTF[row : row + 1, start:anchor])
    for place in range(start, anchor + steps - 1):
        state = states[:, place - start : place - start + 1] if place < anchor else state  # noqa: F821
        embeds = tools.embed(batch.tokens_BT[row : row + 1, place + 1 : place + 2])
        seen = torch.ones(1, 1, place - start + 1, dtype=torch.bool)
        hidden, state, new = head(embeds, state, torch.tensor([[place - start]]), past, seen)
        past = (
            new
            if past is None
            else [(torch.cat((a[0], b[0]), 2), torch.cat((a[1], b[1]), 2)) for a, b in zip(past, new)]
        )
        if place >= anchor - 1:
            out.append(hidden[0, 0])
    return torch.stack(out)


@pytest.mark.parametrize(
    "changes",
    [{}, dict(layers=2, qk_norm=True, norm_before_residual=True, norm_output=True), dict(fc_norm=True)],
    ids=["original", "two-layers-qwen3", "fc-norm"],
)
def test_the_training_time_test_is_the_drafting_loop(changes: dict[str, Any]) -> None:
    head = eagle3_head(**changes)
    batch = tools.packed(ROWS, 32)
    steps = 5
    hidden = unrolled(head, batch, ANCHORS, steps)
    for row, number, start in ((0, 0, 0), (0, 1, 0), (0, 3, 16), (1, 0, 0), (1, 2, 0)):
        anchor = int(ANCHORS[row, number])
        assert torch.allclose(hidden[row, number], drafted(head, batch, row, start, anchor, steps), atol=1e-10)


def test_nothing_after_a_slots_parent_moves_it() -> None:
    """Leak (PITFALLS 1): slot k of anchor a reads tokens up to x_{a+k} and features up to a - 1."""
    head = eagle3_head()
    batch = tools.packed(ROWS, 32)
    hidden = unrolled(head, batch, ANCHORS)
    row, number = 1, 1
    anchor = int(ANCHORS[row, number])
    for index in range(anchor - 1, anchor + 7):
        other = replace(batch, tokens_BT=batch.tokens_BT.clone(), features_BTF=batch.features_BTF.clone())
        other.tokens_BT[row, index] = (other.tokens_BT[row, index] + 17) % tools.VOCABULARY
        other.features_BTF[row, max(index, anchor) :] += 1.0
        moved = (unrolled(head, other, ANCHORS)[row, number] != hidden[row, number]).any(-1)
        assert moved.tolist() == [index <= anchor + slot for slot in range(5)]


def test_labels_are_those_of_the_anchor_layout_and_need_a_token_before_the_anchor() -> None:
    batch = tools.packed([[(0, 8), (0, 8)], [(2, 14)]], 16)
    anchors = torch.tensor([[0, 3, 8, 9], [4, 14, -1, -1]])
    blocks = eagle3_blocks(
        batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.supervised_BT, anchors, steps=3
    )
    assert blocks.valid_BAK.sum(-1).tolist() == [[0, 3, 0, 3], [3, 1, 0, 0]]
    assert blocks.labels_BAK[0, 1].tolist() == batch.tokens_BT[0, 4:7].tolist()
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, STEP_GAMMA)
    assert torch.allclose(weights[0, 1], torch.tensor([1.0, 0.8, 0.64]))


def test_loss_and_gradient_with_a_reduced_vocabulary_are_those_of_plain_autograd() -> None:
    vocabulary = choose_vocabulary(torch.arange(tools.VOCABULARY), 25, always=[2])
    head = eagle3_head(25)
    batch = tools.packed(ROWS, 32)
    blocks = eagle3_blocks(
        batch.tokens_BT, batch.positions_BT, batch.documents_BT, batch.supervised_BT, ANCHORS, steps=4
    )
    labels = vocabulary.draft_ids(blocks.labels_BAK)
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, STEP_GAMMA)
    total = total_weight([weights])
    hidden = unrolled(head, batch, ANCHORS, 4)
    result = draft_loss(
        hidden,
        labels_BAK=labels,
        weights_BAK=weights,
        clean_BA=None,
        target_hidden_BTD=batch.hidden_BTD,
        sources_BAK=blocks.sources_BAK,
        draft_logits=None,
        target_logits=tools.logits,
        total_weight=total,
        ce=0.5,
        l1=0.5,
        kl=0.2,
        parent_state_BAKr=hidden,
        parent_weight_Vr=head.lm_head.weight,
        target_columns_X=vocabulary.ids_X,
        chunk_rows=5,
    )
    z = head.lm_head(hidden).log_softmax(-1)
    full = tools.logits(batch.hidden_BTD[torch.arange(2)[:, None, None], blocks.sources_BAK])
    q = full[..., vocabulary.ids_X].softmax(-1)
    each = (
        -0.5 * z.gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
        + 0.5 * (z.exp() - q).abs().sum(-1)
        + 0.2 * (q * (q.log() - z)).sum(-1)
    )
    said = (labels >= 0) & blocks.valid_BAK
    assert 0 < said.sum() < blocks.valid_BAK.sum()
    plain = (each * weights * said).sum() / total  # slots that cannot be said stay in W
    assert torch.allclose(result.loss, plain)
    parameters = list(head.parameters())
    found = torch.autograd.grad(result.loss, parameters, retain_graph=True)
    for mine, expected in zip(found, torch.autograd.grad(plain, parameters)):
        assert torch.allclose(mine, expected, atol=1e-9)

    # metrics: a token that the draft cannot say is a rejection, and so is a target choice outside its vocabulary
    assert result.metrics["accuracy_at"][1].tolist() == blocks.valid_BAK.sum((0, 1)).tolist()
    guess = vocabulary.ids_X[z.argmax(-1)]
    right = (guess == full.argmax(-1)) & said
    chain = (right.long().cumprod(-1)).sum() + blocks.valid_BAK.any(-1).sum()
    assert result.metrics["acceptance_length"][0] == chain


def test_a_vocabulary_keeps_the_frequent_and_the_fixed_and_translates_both_ways() -> None:
    counts = token_counts([torch.tensor([5, 5, 5, 9, 9, 1]), torch.tensor([9, 9, 7])], 12)
    chosen = choose_vocabulary(counts, 3, always=[0])
    assert chosen.ids_X.tolist() == [0, 5, 9]
    assert chosen.coverage == pytest.approx(7 / 9)
    assert (torch.arange(3) + chosen.offsets_X).tolist() == [0, 5, 9]
    assert chosen.contains_V.nonzero().flatten().tolist() == [0, 5, 9]
    assert chosen.draft_ids(torch.tensor([[9, 1], [0, 5]])).tolist() == [[2, -1], [0, 1]]
    for size, always in ((13, []), (1, [0, 1]), (3, [12])):
        with pytest.raises(ValueError, match="draft vocabulary"):
            choose_vocabulary(counts, size, always)


@pytest.mark.parametrize("kind", KINDS)
def test_an_eagle3_draft_is_derived_from_every_target_family(kind: str) -> None:
    cfg = DraftConfig(**preset_settings("eagle3"))
    config = resolve_eagle3_config(cfg, tiny_config(kind), draft_vocab_size=100)
    assert (config.layers, len(config.target_layer_ids), config.draft_vocab_size) == (1, 3, 100)
    assert Eagle3Config.from_dict(config.to_dict()) == config
    with pytest.raises(UserError, match="draft_vocab_size=301"):
        resolve_eagle3_config(cfg, tiny_config(kind), draft_vocab_size=301)


def test_initialisation_takes_the_targets_output_rows_and_writes_the_table() -> None:
    head = eagle3_head(4)
    ids = torch.tensor([2, 5, 6, 60])
    initialise_eagle3(head, tools.LM_HEAD, ids)
    assert torch.equal(head.lm_head.weight, tools.LM_HEAD[ids])
    assert head.target_ids(torch.arange(4)).tolist() == ids.tolist()
    with pytest.raises(ValueError, match="61 draft tokens"):
        initialise_eagle3(head, tools.LM_HEAD, None)
    assert math.isclose(math.exp(-1 / STEP_GAMMA), 0.8)


def test_recomputed_steps_give_the_same_gradients() -> None:
    batch = tools.packed(ROWS, 32)
    head = eagle3_head(layers=2)
    found = []
    for recompute in (False, True):
        head.recompute = recompute
        parameters = [p for name, p in head.named_parameters() if not name.startswith("lm_head")]
        found.append(torch.autograd.grad(unrolled(head, batch, ANCHORS).square().sum(), parameters))
    assert all(torch.equal(one, other) for one, other in zip(*found))
