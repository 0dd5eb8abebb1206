"""Which earlier tokens each new token may attend to: chains, trees, ragged batches, packed documents, windows.

Shapes: B rows, N new tokens per row, S key slots, T packed length. A mask here is boolean, True = "may attend".
Committed tokens of a row occupy key slots 0 .. length-1 and their position equals their slot; the N new tokens follow
at slots length .. length+N-1 with positions of their own (in a tree, siblings share a position).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch


@dataclass(frozen=True)
class TreeMask:
    """Who descends from whom among the N new tokens of each row.

    Attributes:
        parents_BN: int; index of the parent within the row, smaller than the node's own index; -1: a root, which
            attends to the committed prefix and itself only. Padding nodes are roots.
    """

    parents_BN: np.ndarray

    @classmethod
    def chain(cls, batch: int, nodes: int) -> TreeMask:
        return cls(np.tile(np.arange(nodes) - 1, (batch, 1)))

    @cached_property
    def ancestors_BNN(self) -> np.ndarray:
        """bool [B, N, N]; True where the second node is the first or one of its ancestors."""
        parents_BN = np.asarray(self.parents_BN)
        batch, nodes = parents_BN.shape
        rows = np.arange(batch)
        ancestors_BNN = np.zeros((batch, nodes, nodes), dtype=bool)
        for node in range(nodes):
            parent_B = parents_BN[:, node]
            if (parent_B >= node).any():
                raise ValueError(f"node {node} has a parent that does not precede it: {parent_B.max()}")
            has_parent_B = parent_B >= 0
            ancestors_BNN[:, node] = ancestors_BNN[rows, np.maximum(parent_B, 0)] & has_parent_B[:, None]
            ancestors_BNN[:, node, node] = True
        return ancestors_BNN

    @property
    def depths_BN(self) -> np.ndarray:
        """int [B, N]; number of proper ancestors among the new tokens: 0 for a root."""
        return self.ancestors_BNN.sum(-1) - 1

    def positions_BN(self, lengths: Sequence[int]) -> np.ndarray:
        """Absolute positions: committed length of the row plus depth."""
        return self.depths_BN + np.asarray(lengths)[:, None]


def cached_mask(
    lengths: Sequence[int], new: int, keys: int, tree: TreeMask | None, device: torch.device
) -> torch.Tensor:
    """bool [B, N, S] for N new tokens per row behind ``lengths`` committed ones; all attention, no window."""
    lengths_B1 = torch.tensor(lengths, device=device)[:, None]
    slots_S = torch.arange(keys, device=device)
    new_N = torch.arange(new, device=device)
    if tree is None:
        return slots_S[None, None, :] <= (lengths_B1 + new_N)[:, :, None]
    allowed_BNS = (slots_S[None, :] < lengths_B1)[:, None, :].repeat(1, new, 1)
    ancestors_BNN = torch.from_numpy(tree.ancestors_BNN).to(device)
    slots_BNN = (lengths_B1 + new_N)[:, None, :].expand(-1, new, -1)
    return allowed_BNS.scatter_(2, slots_BNN, ancestors_BNN)


def key_positions(lengths: Sequence[int], positions_BN: torch.Tensor, keys: int) -> torch.Tensor:
    """int [B, S]; the position of the token in each key slot (committed: its slot; new: as given)."""
    batch, new = positions_BN.shape
    device = positions_BN.device
    positions_BS = torch.arange(keys, device=device).repeat(batch, 1)
    slots_BN = torch.tensor(lengths, device=device)[:, None] + torch.arange(new, device=device)
    return positions_BS.scatter_(1, slots_BN, positions_BN)


def within_window(
    allowed_BNS: torch.Tensor, positions_BN: torch.Tensor, key_positions_BS: torch.Tensor, window: int
) -> torch.Tensor:
    """``allowed`` restricted to keys fewer than ``window`` positions back (the query's own position counts as one)."""
    return allowed_BNS & (positions_BN[:, :, None] - key_positions_BS[:, None, :] < window)


def packed_mask(documents_BT: torch.Tensor) -> torch.Tensor:
    """bool [B, T, T]: causal within the same document; a padding token (document -1) attends to itself only."""
    length = documents_BT.shape[1]
    index_T = torch.arange(length, device=documents_BT.device)
    same_BTT = (documents_BT[:, :, None] == documents_BT[:, None, :]) & (documents_BT >= 0)[:, :, None]
    return (same_BTT & (index_T[None, :] <= index_T[:, None])) | torch.eye(
        length, dtype=torch.bool, device=documents_BT.device
    )


def additive(allowed: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where attention is allowed, -inf elsewhere; every row of a mask here allows at least the token itself."""
    return torch.zeros(allowed.shape, dtype=dtype, device=allowed.device).masked_fill_(~allowed, float("-inf"))
