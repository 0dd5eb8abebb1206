"""Which drafted tokens are kept: the match rule, its trusting variant, and the ratio rule.

Match rule: how far the target's own choices follow a drafted tree. At every node the target's choice has been made
already - the argmax, or one keyed draw from its processed distribution. The walk follows the child that equals the
choice; the choice where it stops is the next token, never redrawn (METHODS 7). Each emitted token is therefore one that
plain decoding would have chosen, whatever was drafted.

Trusting: the same walk, but tokens that two layers of the controller let pass may be kept against the choice.

Ratio rule (arXiv 2211.17192) for chains sampled from the draft: x is kept with probability min(1, p_t(x) / p_d(x)),
and what replaces the first rejected one is drawn from the normalised max(0, p_t - p_d). The output then follows p_t,
provided that whether slot k is sent at all depends on x_{<k} only: a decision that has looked at x_k conditions the
draft's distribution on something the rule does not know, and biases the output.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jetspec_train.decoding.tree import Tree


def walk(tree: Tree, choices: Sequence[int] | np.ndarray) -> tuple[list[int], int]:
    """Follow the choices through the tree.

    ``choices`` [n + 1]: the target's choice after the anchor, then after each of the tree's n nodes.
    Returns (indices of the accepted nodes from the anchor down, the next token). Raises ValueError if the number of
    choices does not fit, or if two siblings hold the same token (the walk would depend on their order).
    """
    return _follow(tree, choices, [])


def _follow(tree: Tree, choices: Sequence[int] | np.ndarray, accepted: list[int]) -> tuple[list[int], int]:
    """Go on from the last of the nodes ``accepted`` already (none: from the anchor)."""
    if len(choices) != len(tree) + 1:
        raise ValueError(f"{len(choices)} choices for a tree of {len(tree)} nodes; one per node and one for the anchor")
    child_of: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        if child_of.setdefault((parent, token), node) != node:
            raise ValueError(f"nodes {child_of[parent, token]} and {node} are siblings with the same token {token}")
    node = accepted[-1] if accepted else -1
    while True:
        choice = int(choices[node + 1])
        child = child_of.get((node, choice))
        if child is None:
            return accepted, choice
        accepted.append(child)
        node = child


def walk_trusting(
    tree: Tree,
    choices: Sequence[int] | np.ndarray,
    trusted: Sequence[int],
    probability: Sequence[float] | np.ndarray,
    floor: float,
) -> tuple[list[int], int, list[int]]:
    """The match rule, except that a trusted token is kept where the target gives it at least ``floor``.

    ``trusted``: nodes of one path, anchor's child first, that passed both layers. ``probability`` [n]: the target's
    probability of each node's token after its path, in the distribution that it chooses from; NaN keeps nothing.
    Returns (accepted nodes, the next token, the nodes kept against the target's choice).
    """
    accepted: list[int] = []
    overruled: list[int] = []
    for node in trusted:
        if int(tree.parents[node]) != (accepted[-1] if accepted else -1):
            raise ValueError(f"node {node} does not continue the trusted path {accepted}")
        if int(choices[int(tree.parents[node]) + 1]) != int(tree.tokens[node]):
            if not probability[node] >= floor:
                break
            overruled.append(node)
        accepted.append(node)
    accepted, following = _follow(tree, choices, accepted)
    return accepted, following, overruled


def ratio_choices(
    tokens_N: Sequence[int],
    target_QV: np.ndarray,
    draft_NV: np.ndarray,
    accept_N: Sequence[float],
    redraw_Q: Sequence[float],
) -> np.ndarray:
    """The ratio rule as choices for ``walk``, int64 [n + 1]: the drafted token where it is kept, else its replacement.

    ``target_QV`` [n + 1, V], ``draft_NV`` [n, V]: probabilities after the anchor and after each drafted token, both
    as processed for sampling. ``accept_N``, ``redraw_Q``: uniform numbers in [0, 1), independent of each other and of
    the draft's own draws. Choices after the first rejected slot are never read.
    """
    choices = np.zeros(len(tokens_N) + 1, dtype=np.int64)
    for slot, token in enumerate(tokens_N):
        if accept_N[slot] * draft_NV[slot, token] < target_QV[slot, token]:
            choices[slot] = token
            continue
        residual_V = np.maximum(target_QV[slot].astype(np.float64) - draft_NV[slot], 0.0)
        if residual_V.sum() <= 0.0:  # equal distributions up to rounding: any draw of the target's is right
            residual_V = target_QV[slot].astype(np.float64)
        choices[slot] = _draw(residual_V, redraw_Q[slot])
        return choices
    choices[-1] = _draw(target_QV[len(tokens_N)].astype(np.float64), redraw_Q[len(tokens_N)])
    return choices


def _draw(weights_V: np.ndarray, uniform: float) -> int:
    """A draw in proportion to the weights; never one of weight zero."""
    cumulative_V = np.cumsum(weights_V)
    drawn = int(np.searchsorted(cumulative_V, uniform * cumulative_V[-1], side="right"))
    return min(drawn, int(np.flatnonzero(weights_V)[-1]))
