"""The match rule: how far the target's own choices follow a drafted tree.

At every node the target's choice has been made already - the argmax, or one keyed draw from its processed
distribution. The walk follows the child that equals the choice; the choice where it stops is the next token, never
redrawn (METHODS 7). Each emitted token is therefore one that plain decoding would have chosen, whatever was drafted.
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
    if len(choices) != len(tree) + 1:
        raise ValueError(f"{len(choices)} choices for a tree of {len(tree)} nodes; one per node and one for the anchor")
    child_of: dict[tuple[int, int], int] = {}
    for node, (parent, token) in enumerate(zip(tree.parents.tolist(), tree.tokens.tolist())):
        if child_of.setdefault((parent, token), node) != node:
            raise ValueError(f"nodes {child_of[parent, token]} and {node} are siblings with the same token {token}")
    accepted: list[int] = []
    node = -1
    while True:
        choice = int(choices[node + 1])
        child = child_of.get((node, choice))
        if child is None:
            return accepted, choice
        accepted.append(child)
        node = child
