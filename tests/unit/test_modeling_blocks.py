"""Laws of training blocks: alignment by hand, anchors, clean prefixes, document borders."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.modeling.blocks import MASK_SLOT as M
from jetspec_train.modeling.blocks import anchor_candidates, make_blocks, sample_anchors, sample_clean
from tests.draft_tools import head_config, packed


def six_tokens(layout: str, anchors: list[int], clean: list[int] | None = None, block: int = 3):
    """x = 10 11 12 13 14 15 at positions 100.., the first two are the prompt."""
    tokens = torch.tensor([[10, 11, 12, 13, 14, 15]])
    return make_blocks(
        tokens,
        torch.arange(100, 106)[None],
        torch.zeros_like(tokens),
        torch.tensor([[False, False, True, True, True, True]]),
        torch.tensor([anchors]),
        None if clean is None else torch.tensor([clean]),
        block=block,
        layout=layout,
    )


def test_alignment_by_hand_in_the_anchor_layout() -> None:
    blocks = six_tokens("anchor", [2, 4])
    assert blocks.inputs_BAK.tolist() == [[[12, M, M], [14, M, M]]]
    assert blocks.positions_BAK.tolist() == [[[102, 103, 104], [104, 105, 106]]]
    assert blocks.valid_BAK.tolist() == [[[True, True, True], [True, False, False]]]
    assert blocks.labels_BAK[0, 0].tolist() == [13, 14, 15]
    assert blocks.parents_BAK[0, 0].tolist() == [12, 13, 14]
    assert blocks.sources_BAK[0, 0].tolist() == [2, 3, 4]  # the state that produced the label
    assert (blocks.labels_BAK[0, 1, 0], blocks.parents_BAK[0, 1, 0], blocks.sources_BAK[0, 1, 0]) == (15, 14, 4)
    assert blocks.distance_BAK.tolist() == [[[0, 1, 2], [0, 1, 2]]]
    assert blocks.context_mask_BAT[0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_alignment_by_hand_in_the_in_place_layout() -> None:
    blocks = six_tokens("in_place", [2, 4])
    assert blocks.inputs_BAK.tolist() == [[[12, M, M], [14, M, M]]]
    assert blocks.positions_BAK.tolist() == [[[102, 103, 104], [104, 105, 106]]]
    assert blocks.valid_BAK.tolist() == [[[False, True, True], [False, True, False]]]
    assert blocks.labels_BAK[0, 0, 1:].tolist() == [13, 14]
    assert blocks.parents_BAK[0, 0, 1:].tolist() == [12, 13]
    assert blocks.sources_BAK[0, 0, 1:].tolist() == [2, 3]
    assert blocks.distance_BAK[0, 0].tolist() == [-1, 0, 1]
    assert blocks.context_mask_BAT[0].int().tolist() == [[1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0]]


def test_alignment_by_hand_with_a_clean_prefix() -> None:
    anchor = six_tokens("anchor", [2], [1])
    assert anchor.inputs_BAK.tolist() == [[[12, 13, M]]]
    assert anchor.valid_BAK.tolist() == [[[False, True, True]]]
    assert anchor.distance_BAK.tolist() == [[[-1, 0, 1]]]
    in_place = six_tokens("in_place", [2], [1], block=4)
    assert in_place.inputs_BAK.tolist() == [[[12, 13, M, M]]]
    assert in_place.valid_BAK.tolist() == [[[False, False, True, True]]]
    assert in_place.labels_BAK[0, 0, 2:].tolist() == [14, 15]
    assert in_place.distance_BAK.tolist() == [[[-2, -1, 0, 1]]]


@pytest.mark.parametrize("layout", ["anchor", "in_place"])
def test_a_clean_prefix_leaves_a_supervised_token_to_predict(layout: str) -> None:
    blocks = six_tokens(layout, [4], [3], block=6)  # one token, 15, follows the anchor
    assert blocks.clean_BA.tolist() == [[0]]
    assert blocks.valid_BAK.sum() == 1


def test_an_anchor_that_is_the_last_prompt_token_is_served_too() -> None:
    for layout in ("anchor", "in_place"):
        blocks = six_tokens(layout, [1])
        assert blocks.labels_BAK[blocks.valid_BAK][0] == 12


def test_only_a_contiguous_supervised_prefix_of_one_document_counts() -> None:
    tokens = torch.arange(20)[None]
    documents = torch.tensor([[0] * 10 + [1] * 6 + [-1] * 4])
    supervised = torch.ones(1, 20, dtype=torch.bool)
    supervised[0, 4] = False
    anchors = torch.tensor([[2, 7, 14, -1]])
    blocks = make_blocks(tokens, tokens, documents, supervised, anchors, None, block=4, layout="anchor")
    # token 4 is not supervised; token 10 starts another document; token 16 is padding; no block at all
    assert blocks.valid_BAK[0].int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert not blocks.context_mask_BAT[0, 3].any()
    assert blocks.context_mask_BAT[0, 2].nonzero().flatten().tolist() == [10, 11, 12, 13]


def test_unknown_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="sideways"):
        six_tokens("sideways", [2])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**9), st.integers(1, 40), st.integers(0, 2**63 - 1))
def test_anchors_are_distinct_candidates_and_belong_to_the_row_alone(pattern: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(pattern)
    supervised = torch.rand(3, 24, generator=generator) < 0.7
    documents = (torch.rand(3, 24, generator=generator) < 0.15).long().cumsum(-1)
    documents[:, 20:] = -1
    anchors = sample_anchors(supervised, documents, count, [seed, 5, 6])
    candidates = anchor_candidates(supervised, documents)
    for row in range(3):
        chosen = anchors[row][anchors[row] >= 0].tolist()
        assert len(chosen) == min(count, int(candidates[row].sum()))
        assert chosen == sorted(set(chosen))
        for t in chosen:
            assert supervised[row, t] and supervised[row, t + 1]
            assert documents[row, t] == documents[row, t + 1] >= 0
    alone = sample_anchors(supervised[:1], documents[:1], count, [seed])
    assert torch.equal(alone[0], anchors[0])


def test_every_candidate_is_drawn_equally_often() -> None:
    supervised = torch.ones(1, 9, dtype=torch.bool)
    documents = torch.zeros(1, 9, dtype=torch.long)
    draws = torch.cat([sample_anchors(supervised, documents, 2, [seed]) for seed in range(2000)])
    share = torch.bincount(draws.flatten(), minlength=9).float() / 4000
    assert share[8] == 0  # nothing follows the last token
    assert (share[:8] - 1 / 8).abs().max() < 0.02


def test_clean_lengths_are_uniform_between_one_and_block_minus_two() -> None:
    anchors = torch.zeros(4, 4000, dtype=torch.long)
    clean = sample_clean(anchors, block=6, probability=0.25, seeds_B=[1, 2, 3, 4])
    share = torch.bincount(clean.flatten(), minlength=7).float() / clean.numel()
    assert (share - torch.tensor([0.75, 0.0625, 0.0625, 0.0625, 0.0625, 0.0, 0.0])).abs().max() < 0.01
    assert sample_clean(anchors, block=2, probability=1.0, seeds_B=[1, 2, 3, 4]).sum() == 0
    assert torch.equal(clean[2], sample_clean(anchors[2:3], block=6, probability=0.25, seeds_B=[3])[0])


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["anchor", "in_place"]), st.integers(2, 7))
def test_every_index_tells_the_same_story(seed: int, layout: str, block: int) -> None:
    """Label, parent and source of a slot are x_q, x_{q-1} and q-1 for one q, and everything shown is known."""
    batch = packed([[(3, 9), (2, 5)], [(1, 14)]], 24, seed=seed % 1000)
    config = head_config(layout=layout, block=block)
    anchors = sample_anchors(batch.supervised_BT, batch.documents_BT, 6, [seed, seed + 1])
    clean = sample_clean(anchors, block=block, probability=0.6, seeds_B=[seed, seed + 1])
    blocks = batch.blocks(anchors, clean, config=config)
    for b, a, j in blocks.valid_BAK.nonzero().tolist():
        anchor, m = int(blocks.anchors_BA[b, a]), int(blocks.clean_BA[b, a])
        q = anchor + j + config.offset
        assert blocks.labels_BAK[b, a, j] == batch.tokens_BT[b, q]
        assert blocks.parents_BAK[b, a, j] == batch.tokens_BT[b, q - 1]
        assert blocks.sources_BAK[b, a, j] == q - 1
        assert batch.supervised_BT[b, q] and batch.documents_BT[b, q] == batch.documents_BT[b, anchor]
        assert blocks.distance_BAK[b, a, j] == j - m - config.first_slot
        # slots up to m hold x_anchor .. x_{anchor+m}; no shown token is the label of a predicting slot or later
        shown = blocks.inputs_BAK[b, a, : m + 1]
        assert torch.equal(shown, batch.tokens_BT[b, anchor : anchor + m + 1])
        assert (blocks.inputs_BAK[b, a, m + 1 :] == M).all()
        assert anchor + m < q
        assert blocks.context_mask_BAT[b, a].nonzero().max() < anchor if anchor > 0 else True
