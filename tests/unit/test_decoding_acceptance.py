"""Rules of acceptance on made-up probabilities: what trusting keeps, and why the ratio rule must not peek."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_train.decoding.acceptance import ratio_choices, walk, walk_trusting
from jetspec_train.decoding.ratio import ACCEPT, DRAFT, REDRAW, stream_uniform
from jetspec_train.decoding.tree import Tree, chain_of

# anchor -> 0:(5) -> 1:(6) -> 2:(7) trusted; 3:(9) is a sibling of 1, 4:(4) hangs below 2, 5:(2) below 3
TREE = Tree(np.array([5, 6, 7, 9, 4, 2]), np.array([-1, 0, 1, 0, 2, 3]), np.array([0, 1, 2, 1, 3, 2]), np.zeros(6))
TRUSTED = [0, 1, 2]
AGREED = [5, 6, 7, 4, 1, 2, 1]  # the target's choices where it agrees with every trusted token


def trust(choices, probability, floor=0.1):
    return walk_trusting(TREE, choices, TRUSTED, np.array(probability), floor)


def test_where_the_target_agrees_trusting_is_the_match_rule():
    accepted, following, overruled = trust(AGREED, [0.0] * 6)
    assert (accepted, following) == walk(TREE, AGREED) == ([0, 1, 2, 4], 2) and overruled == []


def test_a_trusted_token_is_kept_above_the_floor_only():
    other = [5, 9, 7, 4, 2, 8, 1]  # after token 5 the target would choose 9
    assert trust(other, [1, 0.2, 1, 0, 0, 0]) == ([0, 1, 2, 4], 8, [1])
    assert trust(other, [1, 0.1, 1, 0, 0, 0])[2] == [1]
    # below the floor the target's choice is taken, and the walk goes on where it leads
    assert trust(other, [1, 0.099, 1, 0, 0, 0]) == ([0, 3, 5], 1, [])
    assert trust(other, [1, float("nan"), 1, 0, 0, 0]) == ([0, 3, 5], 1, [])
    assert trust([8, *other[1:]], [0.05, 1, 1, 0, 0, 0]) == ([], 8, [])


def test_tokens_that_are_not_trusted_follow_the_match_rule():
    assert trust([5, 6, 7, 3, 1, 2, 1], [1] * 6) == ([0, 1, 2], 3, [])  # node 4 is not kept, however probable


def test_a_trusted_path_must_be_a_path():
    with pytest.raises(ValueError, match="does not continue"):
        walk_trusting(TREE, AGREED, [0, 2], np.ones(6), 0.1)


# ---- the ratio rule ------------------------------------------------------------------------------------------


def distribution(random: np.random.Generator, size: int) -> np.ndarray:
    weights = random.gamma(0.6, size=size) + 1e-6
    return weights / weights.sum()


def one_slot_output(target_V, draft_V, *, peek: bool) -> np.ndarray:
    """The exact distribution of the first emitted token, integrated over a grid of the accepting uniform.

    ``peek``: the slot is sent only if the drafted token is token 0 - a decision that looks at x_k; otherwise nothing is
    sent and the target's own draw is the next token.
    """
    grid = (np.arange(2000) + 0.5) / 2000
    output_V = np.zeros(len(target_V))
    for token, chance in enumerate(draft_V):
        if peek and token != 0:
            output_V += chance * target_V
            continue
        kept = float((grid * draft_V[token] < target_V[token]).mean())
        output_V[token] += chance * kept
        residual_V = np.maximum(target_V - draft_V, 0)
        if residual_V.sum() > 0:
            output_V += chance * (1 - kept) * residual_V / residual_V.sum()
    return output_V


def test_a_decision_that_looks_at_the_token_biases_the_ratio_rule():
    """METHODS 7. Target (1/2, 1/2), draft (3/4, 1/4). Sent whatever was drafted, token 0 comes out in half of the
    cases. Sent only when token 0 was drafted, it comes out in 3/4 * 2/3 + 1/4 * 1/2 = 5/8 of them."""
    target_V, draft_V = np.array([0.5, 0.5]), np.array([0.75, 0.25])
    assert one_slot_output(target_V, draft_V, peek=False)[0] == pytest.approx(0.5, abs=1e-3)
    assert one_slot_output(target_V, draft_V, peek=True)[0] == pytest.approx(0.625, abs=1e-3)


def test_our_function_shows_the_same_bias_and_the_same_absence_of_it():
    target_QV = np.array([[0.5, 0.5], [0.5, 0.5]])
    draft_NV = np.array([[0.75, 0.25]])
    first = {False: 0, True: 0}
    draws = 8000
    random = np.random.default_rng(0)
    for _ in range(draws):
        token = int(random.random() >= 0.75)
        uniforms = random.random(4)
        for peek in (False, True):
            if peek and token != 0:
                choices = ratio_choices([], target_QV[:1], draft_NV[:0], [], uniforms[2:3])
            else:
                choices = ratio_choices([token], target_QV, draft_NV, uniforms[:1], uniforms[1:3])
            first[peek] += int(choices[0] == 0)
    assert first[False] / draws == pytest.approx(0.5, abs=0.02)
    assert first[True] / draws == pytest.approx(0.625, abs=0.02)


@given(st.integers(0, 10_000))
@settings(max_examples=25, deadline=None)
def test_ratio_chains_of_any_length_leave_the_targets_distribution_alone(seed):
    """Three slots of four tokens with context-dependent distributions; the joint distribution of the first two emitted
    tokens is that of the target. Exact over drafted tokens, and over uniforms by a grid in each place."""
    random = np.random.default_rng(seed)
    vocabulary = 3
    target = {(): distribution(random, vocabulary)}
    draft = {(): distribution(random, vocabulary)}
    for token in range(vocabulary):
        target[token,] = distribution(random, vocabulary)
        draft[token,] = distribution(random, vocabulary)
    grid = (np.arange(24) + 0.5) / 24
    output = np.zeros((vocabulary, vocabulary))
    for first in range(vocabulary):
        # one slot is sent; then the choices give the first token, and where it is the drafted one, the second
        weight = draft[()][first] / len(grid) ** 2
        for accept in grid:
            for redraw in grid:
                choices = ratio_choices(
                    [first], np.stack([target[()], target[first,]]), draft[()][None], [accept], [redraw, redraw]
                )
                accepted, following = walk(chain_of([first]), choices)
                if accepted:
                    output[first, following] += weight
                else:
                    output[following] += weight * target[following,]
    expected = target[()][:, None] * np.stack([target[token,] for token in range(vocabulary)])
    np.testing.assert_allclose(output, expected, atol=0.06)
    assert output.sum() == pytest.approx(1.0)


def test_a_token_the_target_never_gives_is_never_kept():
    target_QV = np.array([[0.0, 1.0], [1.0, 0.0]])
    draft_NV = np.array([[1.0, 0.0]])
    assert ratio_choices([0], target_QV, draft_NV, [0.0], [0.999999, 0.5])[0] == 1
    # equal distributions: rejection is impossible but for rounding, and even then a token of the target's comes out
    same = np.array([[0.5, 0.5], [0.5, 0.5]])
    assert ratio_choices([0], same, same[:1], [1.0], [0.2, 0.2])[0] in (0, 1)


def test_streams_of_random_numbers_are_independent():
    values = {
        (stream, seed, row, position): stream_uniform(stream, seed, row, position)
        for stream in (DRAFT, ACCEPT, REDRAW)
        for seed in range(3)
        for row in range(3)
        for position in range(30)
    }
    assert len(set(values.values())) == len(values)
    by_stream = np.array([[v for key, v in values.items() if key[0] == stream] for stream in (DRAFT, ACCEPT, REDRAW)])
    assert np.abs(np.corrcoef(by_stream) - np.eye(3)).max() < 0.2
