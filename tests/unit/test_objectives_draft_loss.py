"""Laws of the draft loss: the gradient of plain autograd, one normaliser, no dependence on cutting or padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec_train.modeling.blocks import Blocks, sample_anchors, sample_clean
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.objectives import draft_loss as module
from jetspec_train.objectives.draft_loss import DraftLoss, draft_loss
from jetspec_train.objectives.weights import slot_weights, total_weight
from tests import draft_tools as tools

MIXES = [dict(ce=0.1, l1=0.9, kl=0.0), dict(ce=1.0, l1=0.0, kl=0.0), dict(ce=0.0, l1=0.0, kl=1.0)]
MIXES += [dict(ce=0.3, l1=0.5, kl=0.7)]


def make(rows: list[list[tuple[int, int]]], length: int, head: DraftHead, **options: Any) -> tuple[Any, Blocks]:
    batch = tools.packed(rows, length)
    seeds = list(range(len(rows)))
    anchors = sample_anchors(batch.supervised_BT, batch.documents_BT, options.pop("anchors", 6), seeds)
    clean = sample_clean(anchors, block=head.config.block, probability=0.4, seeds_B=seeds)
    return batch, batch.blocks(anchors, clean, config=head.config)


def loss_of(
    head: DraftHead, batch: tools.Packed, blocks: Blocks, total: float | None = None, gamma: float = 4.0, **mix: Any
) -> DraftLoss:
    hidden = tools.run_head(head, batch, blocks)
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, gamma)
    return draft_loss(
        hidden,
        labels_BAK=blocks.labels_BAK,
        weights_BAK=weights,
        clean_BA=blocks.clean_BA,
        target_hidden_BTD=batch.hidden_BTD,
        sources_BAK=blocks.sources_BAK,
        draft_logits=tools.logits,
        target_logits=tools.logits,
        total_weight=total_weight([weights]) if total is None else total,
        parent_state_BAKr=head.parent_state(blocks.parents_BAK, hidden) if head.has_parent else None,
        parent_weight_Vr=head.parent_weight,
        **mix,
    )


def plain_loss(head: DraftHead, batch: tools.Packed, blocks: Blocks, gamma: float, ce: float, l1: float, kl: float):
    """METHODS 3 as written, by autograd over full tensors."""
    hidden = tools.run_head(head, batch, blocks)
    z = tools.slot_logits(head, hidden, blocks.parents_BAK)
    rows = torch.arange(len(z))[:, None, None]
    q = tools.logits(batch.hidden_BTD[rows, blocks.sources_BAK]).softmax(-1)
    log_p = z.log_softmax(-1)
    weights = blocks.valid_BAK * torch.exp(-blocks.distance_BAK.float() / gamma).double()
    per_slot = (
        ce * -log_p.gather(-1, blocks.labels_BAK.unsqueeze(-1)).squeeze(-1)
        + l1 * (log_p.exp() - q).abs().sum(-1)
        + kl * (q * (q.log() - log_p)).sum(-1)
    )
    return (weights * per_slot).sum() / weights.sum()


def gradients(loss: Tensor, head: DraftHead) -> dict[str, Tensor]:
    names = [name for name, _ in head.named_parameters()]
    return dict(zip(names, torch.autograd.grad(loss, list(head.parameters()))))


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("parent", ["none", "vanilla", "gated"])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_value_and_gradient_are_those_of_plain_autograd(mix: dict[str, float], parent: str, chunk: int) -> None:
    head = tools.draft_head(parent=parent)
    batch, blocks = make([[(3, 12), (2, 7)], [(4, 15)]], 26, head)
    mine, plain = loss_of(head, batch, blocks, chunk_rows=chunk, **mix), plain_loss(head, batch, blocks, 4.0, **mix)
    assert torch.allclose(mine.loss.double(), plain, rtol=1e-6)
    expected, found = gradients(plain, head), gradients(3.0 * mine.loss, head)
    for name, gradient in found.items():
        assert torch.allclose(gradient, 3.0 * expected[name], rtol=1e-6, atol=1e-9), name
        assert gradient.abs().max() > 0, name


@pytest.mark.parametrize("chunk", [1, 7, 1000])
@pytest.mark.parametrize("mix", MIXES[:2], ids=str)
def test_weights_by_reach_are_the_acceptance_of_the_slots_before_and_take_no_gradient(
    mix: dict[str, float], chunk: int
) -> None:
    head = tools.draft_head(parent="vanilla")
    batch, blocks = make([[(3, 12), (2, 7)], [(4, 15)]], 26, head)
    mine = loss_of(head, batch, blocks, chunk_rows=chunk, reach=True, **mix)
    hidden = tools.run_head(head, batch, blocks)
    log_p = tools.slot_logits(head, hidden, blocks.parents_BAK).log_softmax(-1)
    q = tools.logits(batch.hidden_BTD[torch.arange(2)[:, None, None], blocks.sources_BAK]).softmax(-1)
    distance = (log_p.exp() - q).abs().sum(-1)
    label = log_p.gather(-1, blocks.labels_BAK.unsqueeze(-1)).squeeze(-1)
    accepted = (1 - distance / 2 if mix["l1"] else label.exp()).detach()
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, 4.0)
    accepted = torch.where(weights > 0, accepted, 1.0)
    reached = torch.cat((torch.ones_like(accepted[..., :1]), accepted.cumprod(-1)[..., :-1]), dim=-1)
    plain = (weights * reached * (mix["l1"] * distance - mix["ce"] * label)).sum() / weights.sum()
    assert torch.allclose(mine.loss.double(), plain, rtol=1e-6)
    expected, found = gradients(plain, head), gradients(mine.loss, head)
    for name, gradient in found.items():
        assert torch.allclose(gradient, expected[name], rtol=1e-6, atol=1e-9), name


def test_fp32_and_bf16_autocast_follow_fp64(monkeypatch: pytest.MonkeyPatch) -> None:
    head = tools.draft_head(parent="gated")
    batch, blocks = make([[(3, 12), (2, 7)], [(4, 15)]], 26, head)
    exact = gradients(plain_loss(head, batch, blocks, 4.0, 0.1, 0.9, 0.0), head)
    low = tools.draft_head(parent="gated").float()
    batch.features_BTF = batch.features_BTF.float()
    monkeypatch.setattr(tools, "embed", lambda t: tools.EMBEDDING[t].float())
    for dtype, tolerance in ((torch.float32, 1e-4), (torch.bfloat16, 0.05)):
        batch.hidden_BTD = batch.hidden_BTD.to(dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            result = loss_of(low, batch, blocks, ce=0.1, l1=0.9, kl=0.0)
        for name, gradient in gradients(result.loss, low).items():
            assert gradient.dtype == torch.float32
            error = (gradient - exact[name]).norm() / exact[name].norm()
            assert error < tolerance, f"{name}: {error:.4f} in {dtype}"


def test_logits_far_below_the_maximum_do_not_overflow() -> None:
    labels, sources = torch.tensor([[[1]]]), torch.zeros(1, 1, 1, dtype=torch.long)
    hidden = torch.zeros(1, 1, 1, 4, requires_grad=True)
    result = draft_loss(
        hidden,
        labels_BAK=labels,
        weights_BAK=torch.ones(1, 1, 1),
        clean_BA=None,
        target_hidden_BTD=torch.zeros(1, 1, 4),
        sources_BAK=sources,
        draft_logits=lambda h: h @ torch.eye(4) + torch.tensor([500.0, 0.0, 0.0, 0.0]),
        target_logits=lambda h: h @ torch.eye(4),
        total_weight=1.0,
        ce=1.0,
        l1=0.0,
        kl=1.0,
    )
    result.loss.backward()
    assert result.metrics["ce"][0].item() == pytest.approx(500.0)
    assert result.metrics["kl"][0].item() == pytest.approx(0.75 * 500 - torch.log(torch.tensor(4.0)).item(), rel=1e-5)
    assert torch.isfinite(hidden.grad).all()


def test_packed_and_unpacked_rows_give_the_same_loss_and_gradient() -> None:
    """PITFALLS 4: the same blocks, once two documents to a row, once one to a row, with different padding."""
    head = tools.draft_head()
    together = tools.packed([[(3, 9), (2, 10)], [(4, 11)]], 27)
    apart = tools.packed([[(3, 9)], [(2, 10)], [(4, 11)]], 31)
    anchors = [[3, 8, 10], [2, 5, 9], [4, 8, 13]]  # within the documents
    joined = torch.tensor([anchors[0] + [a + 12 for a in anchors[1]], anchors[2] + [-1, -1, -1]])
    single = torch.tensor(anchors)
    clean = torch.tensor([[0, 1, 0, 0, 2, 0], [1, 0, 0, 0, 0, 0]])
    results = []
    for batch, places, lengths in (
        (together, joined, clean),
        (apart, single, torch.stack([clean[0, :3], clean[0, 3:], clean[1, :3]])),
    ):
        result = loss_of(head, batch, batch.blocks(places, lengths, config=head.config), ce=0.1, l1=0.9, kl=0.1)
        results.append((result, gradients(result.loss, head)))
    (one, one_grad), (two, two_grad) = results
    assert torch.allclose(one.loss, two.loss, rtol=1e-7)
    for name in one_grad:
        assert torch.allclose(one_grad[name], two_grad[name], rtol=1e-6, atol=1e-10), name
    for name, (top, bottom) in one.metrics.items():
        assert torch.allclose(top, two.metrics[name][0]) and torch.allclose(bottom, two.metrics[name][1]), name


@pytest.mark.parametrize("split", [1, 2, 4])
def test_neither_split_nor_padding_moves_loss_gradient_or_metrics(split: int) -> None:
    """PITFALLS 5: 4 rows in 1 x 4, 2 x 2 and 4 x 1 micro-steps, one W for all; rows carry unequal numbers of slots."""
    head = tools.draft_head()
    rows = [[(3, 20)], [(2, 3)], [(9, 10)], [(1, 6), (1, 6)]]
    batch, blocks = make(rows, 26, head)
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, 4.0)
    total = total_weight([weights])
    whole = loss_of(head, batch, blocks, total)
    expected = gradients(whole.loss, head)

    padded = tools.packed(rows, 33)  # other lengths, other garbage in the padding
    found = {name: torch.zeros_like(g) for name, g in expected.items()}
    loss, sums = 0.0, {}
    for start in range(0, 4, 4 // split):
        piece = slice(start, start + 4 // split)
        part = tools.Packed(**{name: value[piece] for name, value in vars(padded).items()})
        cut = part.blocks(blocks.anchors_BA[piece], blocks.clean_BA[piece], config=head.config)
        result = loss_of(head, part, cut, total)
        loss += result.loss.item()
        for name, gradient in gradients(result.loss, head).items():
            found[name] += gradient
        for name, (top, bottom) in result.metrics.items():
            old = sums.get(name, (0.0, 0.0))
            sums[name] = (old[0] + top, old[1] + bottom)
    assert loss == pytest.approx(whole.loss.item(), rel=1e-6)
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-6, atol=1e-10), name
    for name, (top, bottom) in whole.metrics.items():
        assert torch.allclose(sums[name][0], top) and torch.allclose(sums[name][1], bottom), name


def test_the_normaliser_is_a_sum_over_the_global_batch() -> None:
    valid = torch.tensor([[[True, True, False]], [[True, False, False]]])
    distance = torch.tensor([[[0, 1, 2]], [[0, 1, 2]]])
    weights = slot_weights(valid, distance, 2.0)
    assert total_weight([weights]) == pytest.approx(2 + torch.exp(torch.tensor(-0.5)).item())
    assert total_weight([weights[:1], weights[1:]]) == pytest.approx(total_weight([weights]))
    assert slot_weights(valid, distance, None).tolist() == valid.float().tolist()
    assert total_weight([torch.zeros(1, 1, 3)]) == 1.0


def test_a_clean_prefix_moves_the_decay_to_the_first_predicting_slot() -> None:
    head = tools.draft_head()
    batch = tools.packed([[(2, 18)]], 20)
    blocks = batch.blocks(torch.tensor([[4, 10]]), torch.tensor([[0, 2]]), config=head.config)
    weights = slot_weights(blocks.valid_BAK, blocks.distance_BAK, 4.0)[0]
    decay = torch.exp(-torch.arange(5) / 4.0)
    assert torch.allclose(weights[0], decay)
    assert torch.allclose(weights[1], torch.cat((torch.zeros(2), decay[:3])))


def test_metrics_count_the_greedy_chain_by_hand() -> None:
    """Three ordinary blocks (chains of 2, 0 and 1 where a label is missing) and one with a clean prefix, ignored."""
    V = 6
    truth = torch.tensor([[[1, 2, 3], [1, 2, 3], [4, 5, 0], [1, 2, 3]]])
    drafted = torch.tensor([[[1, 2, 5], [0, 2, 3], [4, 5, 0], [1, 2, 3]]])
    weights = torch.ones(1, 4, 3)
    weights[0, 2, 1:] = 0  # the document ends after one token
    sources = torch.arange(12).view(1, 4, 3)
    result = draft_loss(
        torch.nn.functional.one_hot(drafted, V).float(),
        labels_BAK=truth,
        weights_BAK=weights,
        clean_BA=torch.tensor([[0, 0, 0, 1]]),
        target_hidden_BTD=torch.nn.functional.one_hot(truth, V).float().view(1, 12, V),
        sources_BAK=sources,
        draft_logits=lambda h: 9 * h,
        target_logits=lambda h: 9 * h,
        total_weight=1.0,
    )
    top, bottom = result.metrics["acceptance_length"]
    assert (top.item(), bottom.item()) == (3 + 2 + 0 + 1, 3)
    assert result.metrics["accuracy_at"][0].tolist() == [2, 2, 1]
    assert result.metrics["accuracy_at"][1].tolist() == [3, 2, 2]
    assert result.slots.matched_M.sum() == result.slots.correct_M.sum() == 5 + 3


def test_the_in_place_chain_starts_at_the_first_predicting_slot() -> None:
    head = tools.draft_head(layout="in_place", parent="none")
    batch, blocks = make([[(3, 20)]], 26, head)
    result = loss_of(head, batch, blocks)
    assert result.metrics["accuracy_at"][1][0] == 0
    assert result.metrics["valid_slots"][1] > 0
    assert 1.0 <= (result.metrics["acceptance_length"][0] / result.metrics["acceptance_length"][1]).item() <= 5.0


def test_a_batch_without_a_single_weighted_slot_is_zero_with_zero_gradient() -> None:
    head = tools.draft_head()
    batch, blocks = make([[(6, 1)]], 12, head)
    result = loss_of(head, batch, blocks)
    assert result.loss == 0
    assert all(g.abs().max() == 0 for g in gradients(result.loss, head).values())


def test_no_tensor_of_all_slots_by_vocabulary_is_ever_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The widest logits that the pass asks for have ``chunk_rows`` rows, and fewer rows are softened at once."""
    head = tools.draft_head()
    batch, blocks = make([[(3, 20)], [(3, 20)]], 26, head, anchors=12)
    asked: list[int] = []
    softened: list[int] = []
    real, softmax = tools.logits, torch.softmax

    def counted(hidden: Tensor) -> Tensor:
        asked.append(len(hidden))
        return real(hidden)

    def watched(x: Tensor, **options: Any) -> Tensor:
        if x.shape[-1] == tools.VOCABULARY:
            softened.append(len(x))
        return softmax(x, **options)

    monkeypatch.setattr(tools, "logits", counted)
    monkeypatch.setattr(module.torch, "softmax", watched)
    monkeypatch.setattr(module, "_cache_rows", lambda vocabulary, device, limit: min(limit, 3))
    result = loss_of(head, batch, blocks, chunk_rows=10)
    result.loss.backward()
    slots = len(result.slots.index_M)
    assert slots > 60
    assert max(asked) == 10 and sum(asked) == 2 * slots  # one product per side
    assert max(softened) == 3 and sum(softened) == 2 * slots  # one softmax per side
