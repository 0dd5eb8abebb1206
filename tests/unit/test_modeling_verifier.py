"""Laws of the verifier: what each head can see, and what a judgement may depend on. All in fp64.

Shapes as in modeling.verifier.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import VerifierSettings
from jetspec_train.modeling.verifier import (
    NodeInputs,
    Verifier,
    VerifierConfig,
    ancestors_of,
    node_scalars,
    survival,
)
from jetspec_train.modeling.verifier_config import parameter_count, resolve_verifier_config
from tests.draft_tools import WIDTH, head_config, random

RANK, CONTEXT = 8, 11


def verifier_config(**changes: Any) -> VerifierConfig:
    config = resolve_verifier_config(VerifierSettings(intermediate_size=48), head_config(), target_parameters=1_000_000)
    return replace(config, **changes)


def verifier(seed: int = 0, **changes: Any) -> Verifier:
    """In fp64, with heads that are not silent."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        made = Verifier(verifier_config(**changes))
        for name, weight in made.named_parameters():
            if weight.dim() == 1 and "norm" in name:
                torch.nn.init.uniform_(weight, 0.5, 1.5)
        for head in (made.score, made.confidence_head.proj):
            torch.nn.init.normal_(head.weight)
            torch.nn.init.normal_(head.bias)
    return made.double()


def tree_inputs(parents: list[list[int]], seed: int = 0, rank: int = RANK) -> NodeInputs:
    """Arbitrary but fixed inputs for one tree per row, all of one size."""
    B, M = len(parents), len(parents[0])
    ancestors = torch.stack([ancestors_of(row) for row in parents])
    return NodeInputs(
        hidden_BMd=random(B, M, WIDTH, seed=seed + 1),
        parent_state_BMr=random(B, M, rank, seed=seed + 2),
        token_embeds_BME=random(B, M, WIDTH, seed=seed + 3),
        scalars_BMs=random(B, M, 7, seed=seed + 4),
        ancestors_BMM=ancestors,
        positions_BM=20 + ancestors.sum(-1),
    )


def change(nodes: NodeInputs, node: int) -> NodeInputs:
    """Everything about one node of row 0 is another, except its place in the tree."""

    def other(x: Tensor) -> Tensor:
        x = x.clone()
        x[0, node] += 1.0
        return x

    names = ("hidden_BMd", "parent_state_BMr", "token_embeds_BME", "scalars_BMs")
    return replace(nodes, **{name: other(getattr(nodes, name)) for name in names})


def judge(module: Verifier, nodes: NodeInputs, seed: int = 50, mask: Tensor | None = None) -> Tensor:
    context = random(nodes.positions_BM.shape[0], CONTEXT, WIDTH, seed=seed)
    positions = torch.arange(CONTEXT).expand(context.shape[:2])
    return module.correctness(nodes, module.context_kv(context, positions), mask)


TREE = [-1, -1, 0, 0, 1, 2]  # nodes 0 and 1 are siblings, 2 and 3 children of 0, 4 of 1, 5 of 2


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_a_node_depends_on_its_path_and_itself_alone(layers: int) -> None:
    module, nodes = verifier(layers=layers), tree_inputs([TREE])
    before = judge(module, nodes)[0]
    ancestors = ancestors_of(TREE)
    for changed in range(len(TREE)):
        after = judge(module, change(nodes, changed))[0]
        moved = (after - before).abs() > 1e-9
        expected = ancestors[:, changed] if layers else torch.arange(len(TREE)) == changed
        assert torch.equal(moved, expected), f"changing node {changed} moved {moved.tolist()}"


@pytest.mark.parametrize("layers", [0, 1, 2])
def test_the_order_of_nodes_and_the_presence_of_others_do_not_matter(layers: int) -> None:
    module, nodes = verifier(layers=layers), tree_inputs([TREE])
    whole = judge(module, nodes)[0]
    for kept in ([1, 0, 4, 2, 3, 5], [0, 2, 5], [1, 4]):
        index = torch.tensor(kept)
        part = NodeInputs(
            hidden_BMd=nodes.hidden_BMd[:, index],
            parent_state_BMr=nodes.parent_state_BMr[:, index],
            token_embeds_BME=nodes.token_embeds_BME[:, index],
            scalars_BMs=nodes.scalars_BMs[:, index],
            ancestors_BMM=nodes.ancestors_BMM[:, index][:, :, index],
            positions_BM=nodes.positions_BM[:, index],
        )
        torch.testing.assert_close(judge(module, part)[0], whole[index], rtol=1e-9, atol=1e-9)


def test_padding_nodes_and_other_rows_do_not_matter() -> None:
    module = verifier()
    one, two = tree_inputs([TREE], seed=10), tree_inputs([[-1, 0, 1]], seed=20)
    alone = judge(module, two, seed=7)

    def stack(a: Tensor, b: Tensor, value: float) -> Tensor:
        padded = torch.full_like(a, value) if a.dtype != torch.bool else torch.zeros_like(a)
        padded[:, : b.shape[1]] = b if b.dim() < 3 or a.dtype != torch.bool else 0
        return torch.cat((a, padded))

    ancestors = torch.stack((ancestors_of(TREE), ancestors_of([-1, 0, 1], nodes=6)))
    both = NodeInputs(
        *(
            stack(getattr(one, name), getattr(two, name), 3.5)
            for name in ("hidden_BMd", "parent_state_BMr", "token_embeds_BME", "scalars_BMs")
        ),
        ancestors_BMM=ancestors,
        positions_BM=stack(one.positions_BM, two.positions_BM, 0),
        valid_BM=torch.tensor([[True] * 6, [True] * 3 + [False] * 3]),
    )
    context = torch.cat((random(1, CONTEXT, WIDTH, seed=5), random(1, CONTEXT, WIDTH, seed=7)))
    positions = torch.arange(CONTEXT).expand(2, CONTEXT)
    logits = module.correctness(both, module.context_kv(context, positions))
    torch.testing.assert_close(logits[1, :3], alone[0], rtol=1e-9, atol=1e-9)
    assert not logits[1, 3:].any()


def test_blocks_of_one_row_equal_rows_of_one_block() -> None:
    """The trainer's [B, A, M] with a mask per block is the decoder's [B, M] with its context cut to length."""
    module = verifier()
    rows = tree_inputs([TREE, [-1, 0, 1, 1, 0, 4]])
    context, positions = random(1, CONTEXT, WIDTH, seed=3), torch.arange(CONTEXT)[None]
    blocks = NodeInputs(**{name: value[None] for name, value in vars(rows).items() if value is not None})
    seen = torch.stack((torch.arange(CONTEXT) < 4, torch.arange(CONTEXT) < 9))[None]
    together = module.correctness(blocks, module.context_kv(context, positions), seen)
    for block, length in enumerate((4, 9)):
        own = NodeInputs(**{name: value[block : block + 1] for name, value in vars(rows).items() if value is not None})
        short = module.context_kv(context[:, :length], positions[:, :length])
        torch.testing.assert_close(together[0, block], module.correctness(own, short)[0], rtol=1e-9, atol=1e-9)


def test_context_that_is_masked_is_not_read_and_context_that_is_not_masked_is() -> None:
    module, nodes = verifier(), tree_inputs([TREE])
    context, positions = random(1, CONTEXT, WIDTH, seed=3), torch.arange(CONTEXT)[None]
    seen = torch.arange(CONTEXT)[None] < 6
    before = module.correctness(nodes, module.context_kv(context, positions), seen)
    for column in (5, 6):
        other = context.clone()
        other[0, column] += 1.0
        after = module.correctness(nodes, module.context_kv(other, positions), seen)
        assert torch.equal(after, before) == (column == 6)


def test_confidence_reads_the_slot_and_its_parent_and_nothing_else() -> None:
    module = verifier()
    hidden, state = random(2, 3, 5, WIDTH, seed=1), random(2, 3, 5, RANK, seed=2)
    before = module.confidence(hidden, state)
    assert before.shape == (2, 3, 5)
    for other_hidden, other_state in ((hidden.clone(), state), (hidden, state.clone())):
        (other_hidden if other_hidden is not hidden else other_state)[0, 1, 2] += 1.0
        moved = (module.confidence(other_hidden, other_state) - before).abs() > 1e-9
        assert moved.nonzero().tolist() == [[0, 1, 2]]
    proj = module.confidence_head.proj  # the form in which it is exported
    expected = torch.cat((hidden, state), dim=-1) @ proj.weight[0] + proj.bias
    torch.testing.assert_close(before, expected, rtol=1e-9, atol=1e-9)


def test_detached_gradients_stop_before_the_draft_and_others_do_not() -> None:
    for detach in (True, False):
        module = verifier(detach=detach)
        nodes = tree_inputs([TREE])
        leaves = {
            name: getattr(nodes, name).requires_grad_()
            for name in ("hidden_BMd", "parent_state_BMr", "scalars_BMs", "token_embeds_BME")
        }
        context = random(1, CONTEXT, WIDTH).requires_grad_()
        columns = module.context_kv(context, torch.arange(CONTEXT)[None])
        loss = module.correctness(nodes, columns).square().sum()
        loss = loss + module.confidence(nodes.hidden_BMd, nodes.parent_state_BMr).square().sum()
        loss.backward()
        for name, leaf in {**leaves, "context": context}.items():
            assert (leaf.grad is None) == detach, name
        assert all(weight.grad is not None and weight.grad.any() for weight in module.parameters())


def test_a_fresh_verifier_says_what_the_draft_says() -> None:
    config = verifier_config()
    fresh = Verifier(config).double()
    probability = torch.tensor([[0.9, 0.5, 1e-3, 0.999, 0.2, 0.7]], dtype=torch.float64)
    other = torch.zeros_like(probability)
    scalars = node_scalars(
        config, logprob=probability.log(), path_logprob=other, margin=other, rank=other, entropy=other, depth=other
    )
    logits = judge(fresh, replace(tree_inputs([TREE]), scalars_BMs=scalars))
    torch.testing.assert_close(torch.sigmoid(logits), probability)
    assert not fresh.confidence(random(1, 1, 5, WIDTH), random(1, 1, 5, RANK)).any()


def test_survival_is_the_product_of_calibrated_probabilities_along_the_path() -> None:
    logits = random(1, 6, seed=4) * 3
    temperatures = torch.tensor([2.0, 0.5])
    depth = [0, 0, 1, 1, 1, 2]
    each = torch.sigmoid(logits[0] / temperatures[torch.tensor(depth).clamp(max=1)])
    product = []
    for node, parent in enumerate(TREE):
        product.append(each[node] * (product[parent] if parent >= 0 else 1.0))
    found = survival(logits, temperatures, ancestors_of(TREE)[None])
    torch.testing.assert_close(found[0], torch.stack(product), rtol=1e-9, atol=1e-9)
    assert (found[0, 2:] <= found[0, torch.tensor(TREE[2:])]).all()


def test_scalars_are_finite_for_hopeless_and_certain_nodes() -> None:
    extreme = torch.tensor([0.0, -1e9, -3.0])
    made = node_scalars(
        verifier_config(),
        logprob=extreme,
        path_logprob=extreme * 5,
        margin=-extreme,
        rank=torch.tensor([0, 1000, 1]),
        entropy=torch.tensor([0.0, 11.0, 2.0]),
        depth=torch.arange(3),
    )
    assert made.shape == (3, 7) and made.isfinite().all() and made.abs().max() <= 10.0


@pytest.mark.parametrize("layers", [0, 1, 2, 3])
def test_the_size_is_the_share_of_the_target_that_was_asked_for(layers: int) -> None:
    target = 400_000
    settings = VerifierSettings(layers=layers, share=0.08)
    config = resolve_verifier_config(settings, head_config(), target_parameters=target)
    counted = sum(p.numel() for p in Verifier(config).parameters())
    assert counted == parameter_count(config)
    assert 0.08 <= counted / target < 0.10 or config.intermediate_size in (16, 32, 8 * WIDTH)
    assert VerifierConfig.from_dict(config.to_dict()) == config


def test_impossible_configurations_are_refused() -> None:
    for changes, words in (
        (dict(mode="hope"), "match_greedy, match_sampled, ratio"),
        (dict(heads=3, kv_heads=2), "multiple"),
        (dict(scalars=("logprob", "age")), "age"),
        (dict(layers=-1), "at least 0"),
    ):
        with pytest.raises(UserError, match=words):
            verifier_config(**changes)
    data = verifier_config().to_dict()
    del data["rope"]
    with pytest.raises(UserError, match="rope"):
        VerifierConfig.from_dict({**data, "colour": 1})
