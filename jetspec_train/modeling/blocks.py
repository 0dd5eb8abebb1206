"""Training blocks: which tokens a block sees, which it predicts, and where the labels come from.

One function, ``make_blocks``, turns packed rows and anchors into inputs, positions, labels, parents
and masks by explicit indices, for both layouts and with clean prefixes. It knows token ids, document
numbers and positions only; weights of the loss are made from its result in ``objectives.weights``.

Shapes: B rows, T tokens of a packed row, A anchors per row, K slots per block.

For a slot ``j`` of a block at anchor ``a`` (index into the packed row)::

    layout      input              predicts (q)   parent of q    target state for q    discarded
    anchor      [x_a, MASK ...]    a + j + 1      x_{a+j}        index a + j           none
    in_place    [x_a, MASK ...]    a + j          x_{a+j-1}      index a + j - 1       slot 0

With a clean prefix ``m`` the slots 0..m hold the true tokens x_a .. x_{a+m}; predictions start at slot
``m`` (anchor) or ``m + 1`` (in_place), and ``m = 0`` is the ordinary block. Context keys are those at
indices strictly below ``a`` in the same document: when drafting, the target has not yet seen ``x_a``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

MASK_SLOT = -1  # stands in ``inputs`` where the MASK is; the head knows its embedding


@dataclass(frozen=True)
class Blocks:
    """Blocks of a packed batch. A row with fewer anchors than A is filled with anchor -1."""

    anchors_BA: Tensor  # int64 index of the anchor in its row; -1: no block
    clean_BA: Tensor  # int64 m: slots 0..m hold true tokens; 0 is the ordinary block
    inputs_BAK: Tensor  # int64 token ids; MASK_SLOT where the MASK stands
    positions_BAK: Tensor  # int64 rotary position of every slot (within its document)
    labels_BAK: Tensor  # int64 the token to predict, x_q
    parents_BAK: Tensor  # int64 the token before it, x_{q-1}
    sources_BAK: Tensor  # int64 q - 1: index whose post-final-norm target state gives the label distribution
    valid_BAK: Tensor  # bool: predicts, and everything from the anchor to q is supervised and one document
    distance_BAK: Tensor  # int64 slots since the first predicting one (negative before it)
    context_mask_BAT: Tensor  # bool: the context columns that the block may see

    def to(self, device: torch.device | str) -> Blocks:
        return Blocks(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


def _generator(seed: int, stream: int) -> torch.Generator:
    # Two streams (anchors, clean prefixes) per row seed, so that switching one off does not move the other.
    return torch.Generator().manual_seed((int(seed) * 2 + stream) % (2**63 - 1))


def anchor_candidates(supervised_BT: Tensor, documents_BT: Tensor) -> Tensor:
    """Bool [B, T]: t and t+1 are both supervised and of one document (METHODS 2)."""
    follows_BT = torch.zeros_like(supervised_BT, dtype=torch.bool)
    same_document = (documents_BT[:, 1:] == documents_BT[:, :-1]) & (documents_BT[:, 1:] >= 0)
    follows_BT[:, :-1] = supervised_BT[:, 1:].bool() & same_document
    return supervised_BT.bool() & follows_BT


def sample_anchors(supervised_BT: Tensor, documents_BT: Tensor, count: int, seeds_B: Sequence[int]) -> Tensor:
    """Anchors uniform without replacement: int64 [B, count], ascending, filled with -1 at the end.

    ``seeds_B``: one seed per row, so that a row's anchors do not depend on the batch, rank or
    accumulation step in which it is seen.
    """
    candidates_BT = anchor_candidates(supervised_BT, documents_BT).cpu()
    anchors_BA = torch.full((candidates_BT.shape[0], count), -1, dtype=torch.int64)
    for row, seed in enumerate(seeds_B):
        places = candidates_BT[row].nonzero().squeeze(-1)
        chosen = torch.randperm(len(places), generator=_generator(seed, 0))[:count]
        anchors_BA[row, : len(chosen)] = places[chosen].sort().values
    return anchors_BA


def sample_clean(anchors_BA: Tensor, *, block: int, probability: float, seeds_B: Sequence[int]) -> Tensor:
    """Clean-prefix lengths m: int64 [B, A]; with ``probability`` uniform in 1 .. K-2, else 0.

    A block too small to have both a clean token and two more slots stays ordinary. ``make_blocks``
    shortens m where the supervised run after the anchor is shorter.
    """
    clean_BA = torch.zeros_like(anchors_BA, device="cpu")
    if probability <= 0.0 or block < 3:
        return clean_BA
    for row, seed in enumerate(seeds_B):
        generator = _generator(seed, 1)
        chosen_A = torch.rand(clean_BA.shape[1], generator=generator) < probability
        length_A = torch.randint(1, block - 1, (clean_BA.shape[1],), generator=generator)
        clean_BA[row] = torch.where(chosen_A, length_A, 0)
    return clean_BA


def make_blocks(
    tokens_BT: Tensor,
    positions_BT: Tensor,
    documents_BT: Tensor,
    supervised_BT: Tensor,
    anchors_BA: Tensor,
    clean_BA: Tensor | None = None,
    *,
    block: int,
    layout: str,
) -> Blocks:
    """Blocks of K = ``block`` slots at the given anchors, by the index table at the top of this file.

    ``documents_BT``: document number of each token, -1 for padding. ``positions_BT``: position within
    its document. A clean prefix is shortened so that at least one supervised token is left to predict.
    Raises ``ValueError`` for an unknown layout.
    """
    if layout not in ("anchor", "in_place"):
        raise ValueError(f"layout={layout!r}; allowed: anchor, in_place")
    length = tokens_BT.shape[1]
    in_place = layout == "in_place"
    real_BA1 = (anchors_BA >= 0).unsqueeze(-1)
    anchor_BA1 = anchors_BA.clamp(min=0).unsqueeze(-1)
    slots_K = torch.arange(block, device=tokens_BT.device)
    place_BAK = anchor_BA1 + slots_K  # index of x_{a+j}, the token whose place slot j takes
    label_BAK = place_BAK if in_place else place_BAK + 1  # q

    def take(values_BT: Tensor, index_BAK: Tensor) -> Tensor:
        flat = index_BAK.clamp(0, length - 1).flatten(1)
        return values_BT.gather(1, flat).view(index_BAK.shape)

    document_BA1 = take(documents_BT, anchor_BA1)
    known_BAK = (
        real_BA1
        & (label_BAK < length)
        & take(supervised_BT.bool(), label_BAK)
        & (take(documents_BT, label_BAK) == document_BA1)
    )
    if in_place:  # slot 0 repeats the anchor, which is committed whether supervised or not
        known_BAK[..., 0] = real_BA1.squeeze(-1)
    run_BAK = known_BAK.cumprod(dim=-1).bool()

    to_predict_BA = run_BAK.sum(-1) - int(in_place)  # supervised tokens that follow the anchor
    if clean_BA is None:
        clean_BA = torch.zeros_like(anchors_BA)
    clean_BA = torch.minimum(clean_BA.to(anchors_BA.device), to_predict_BA - 1).clamp(min=0)
    distance_BAK = slots_K - clean_BA.unsqueeze(-1) - int(in_place)

    shown_BAK = slots_K <= clean_BA.unsqueeze(-1)
    columns_T = torch.arange(length, device=tokens_BT.device)
    return Blocks(
        anchors_BA=anchors_BA,
        clean_BA=clean_BA,
        inputs_BAK=torch.where(shown_BAK, take(tokens_BT, place_BAK), MASK_SLOT),
        positions_BAK=take(positions_BT, anchor_BA1) + slots_K,
        labels_BAK=take(tokens_BT, label_BAK),
        parents_BAK=take(tokens_BT, label_BAK - 1),
        sources_BAK=(label_BAK - 1).clamp(0, length - 1),
        valid_BAK=run_BAK & (distance_BAK >= 0),
        distance_BAK=distance_BAK,
        context_mask_BAT=real_BA1 & (columns_T < anchor_BA1) & (documents_BT.unsqueeze(1) == document_BA1),
    )
