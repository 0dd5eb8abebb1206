"""The cache: commits, compaction, growth, refilled and dropped rows; tree masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.targets.cache import KVCache, LayerShape
from jetspec_train.targets.masks import TreeMask, cached_mask, packed_mask, within_window

SAME = [LayerShape(2, 4, 4)] * 3
MIXED = [LayerShape(2, 4, 4), LayerShape(1, 6, 3), LayerShape(2, 4, 4)]


def stage(cache: KVCache, shapes: list[LayerShape], labels: list[list[int]]) -> None:
    """Stage tokens whose keys and values are their labels, told apart by layer."""
    new = len(labels[0])
    cache.stage(new)
    for layer, shape in enumerate(shapes):
        label_B1N1 = torch.tensor(labels, dtype=torch.float32)[:, None, :, None]
        keys = (label_B1N1 + 1000 * layer).expand(-1, shape.heads, -1, shape.key_size)
        values = (label_B1N1 + 1000 * layer + 500).expand(-1, shape.heads, -1, shape.value_size)
        seen_keys, seen_values = cache.update(keys, values, layer)
        assert seen_keys.shape[2] == seen_values.shape[2] == cache.staged_keys


def contents(cache: KVCache, shapes: list[LayerShape], row: int) -> list[int]:
    """Labels of the committed tokens of a row; checks that all layers agree."""
    length = cache.lengths[row]
    rows = set()
    for layer in range(len(shapes)):
        keys = cache._layer_keys[layer][row, :, :length]
        values = cache._layer_values[layer][row, :, :length]
        assert (keys == keys[:1, :, :1]).all() and (values == values[:1, :, :1]).all()
        rows.add(tuple((keys[0, :, 0] - 1000 * layer).int().tolist()))
        rows.add(tuple((values[0, :, 0] - 1000 * layer - 500).int().tolist()))
    assert len(rows) == 1
    return list(rows.pop())


@settings(max_examples=40, deadline=None)
@given(data=st.data(), shapes=st.sampled_from([SAME, MIXED]), batch=st.integers(1, 3))
def test_any_sequence_of_rounds_keeps_exactly_what_was_committed(
    data: st.DataObject, shapes: list[LayerShape], batch: int
) -> None:
    cache = KVCache(shapes, batch, capacity=2, dtype=torch.float32)
    expected: list[list[int]] = [[] for _ in range(batch)]
    label = 0
    for _ in range(data.draw(st.integers(1, 5))):
        new = data.draw(st.integers(1, 6))
        labels = [[label + row * new + index for index in range(new)] for row in range(len(expected))]
        label += new * len(expected)
        stage(cache, shapes, labels)
        kept = [sorted(data.draw(st.sets(st.integers(0, new - 1)))) for _ in expected]
        cache.commit(kept)
        for row, indices in enumerate(kept):
            expected[row] += [labels[row][index] for index in indices]
        action = data.draw(st.sampled_from(["none", "truncate", "drop", "refill"]))
        row = data.draw(st.integers(0, len(expected) - 1))
        if action == "truncate":
            length = data.draw(st.integers(0, len(expected[row])))
            cache.truncate(row, length)
            expected[row] = expected[row][:length]
        elif action == "drop" and len(expected) > 1:
            keep = [other for other in range(len(expected)) if other != row]
            cache.drop_rows(keep)
            expected = [expected[other] for other in keep]
        elif action == "refill":
            fresh = KVCache(shapes, 1, capacity=1, dtype=torch.float32)
            stage(fresh, shapes, [[label + index for index in range(5)]])
            fresh.commit_first([4])
            cache.copy_row_from(fresh, 0, row)
            expected[row] = [label + index for index in range(4)]
            label += 5
        assert [contents(cache, shapes, index) for index in range(len(expected))] == expected


def test_views_of_the_buffer_are_returned_and_nothing_moves_for_a_chain() -> None:
    cache = KVCache(SAME, 1, capacity=16, dtype=torch.float32)
    stage(cache, SAME, [[0, 1, 2, 3]])
    before = cache._layer_keys[0].clone()
    cache.stage(4)
    shape = (1, 2, 4, 4)
    keys, _ = cache.update(torch.zeros(shape), torch.zeros(shape), 0)
    assert keys.data_ptr() == cache._layer_keys[0].data_ptr()
    cache._layer_keys[0].copy_(before)
    version = cache._keys[0]._version
    cache.commit([[0, 1, 2]])
    assert cache._keys[0]._version == version


def test_growth_keeps_what_is_committed_and_doubles() -> None:
    cache = KVCache(SAME, 1, capacity=4, dtype=torch.float32)
    for start in range(0, 12, 3):
        stage(cache, SAME, [[start, start + 1, start + 2]])
        cache.commit_first([3])
    assert contents(cache, SAME, 0) == list(range(12))
    assert cache.capacity == 16
    assert cache.memory_bytes == 2 * 3 * 2 * 16 * 4 * 4


@pytest.mark.parametrize("kept", [[[4]], [[0, 5]], [[0], [0]]])
def test_commits_of_what_was_not_staged_are_refused(kept: list[list[int]]) -> None:
    cache = KVCache(SAME, 1, capacity=4, dtype=torch.float32)
    stage(cache, SAME, [[0, 1, 2, 3]])
    with pytest.raises(ValueError):
        cache.commit(kept)


def test_tree_masks_by_hand() -> None:
    # 0 -> 1 -> 3, 0 -> 2; a second row: two roots and padding.
    tree = TreeMask(np.array([[-1, 0, 0, 1], [-1, -1, 1, -1]]))
    assert tree.depths_BN.tolist() == [[0, 1, 1, 2], [0, 0, 1, 0]]
    assert tree.positions_BN([5, 2]).tolist() == [[5, 6, 6, 7], [2, 2, 3, 2]]
    mask = cached_mask([2, 1], 4, 6, tree, torch.device("cpu")).int().tolist()
    assert mask[0] == [[1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 0, 0], [1, 1, 1, 0, 1, 0], [1, 1, 1, 1, 0, 1]]
    assert mask[1] == [[1, 1, 0, 0, 0, 0], [1, 0, 1, 0, 0, 0], [1, 0, 1, 1, 0, 0], [1, 0, 0, 0, 1, 0]]


def test_a_chain_is_a_tree_without_branches() -> None:
    lengths, device = [3, 0, 7], torch.device("cpu")
    chain = cached_mask(lengths, 4, 11, TreeMask.chain(3, 4), device)
    assert torch.equal(chain, cached_mask(lengths, 4, 11, None, device))


def test_a_parent_that_does_not_come_first_is_refused() -> None:
    with pytest.raises(ValueError, match="does not precede"):
        _ = TreeMask(np.array([[-1, 2, 0]])).ancestors_BNN


def test_packed_masks_by_hand() -> None:
    mask = packed_mask(torch.tensor([[0, 0, 1, 1, -1, -1]]))[0].int().tolist()
    assert mask == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 0, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_window_counts_positions_not_slots() -> None:
    """Two siblings lie in neighbouring slots at one position; the window must not notice the slots."""
    allowed = torch.ones(1, 1, 4, dtype=torch.bool)
    positions, keys = torch.tensor([[5]]), torch.tensor([[2, 3, 4, 4]])
    assert within_window(allowed, positions, keys, 2).tolist() == [[[False, False, True, True]]]
