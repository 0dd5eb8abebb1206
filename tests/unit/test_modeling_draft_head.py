"""Laws of the draft head: no leak, parity of trainer and decoder, clean prefixes, parent term, dtypes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetspec_train.modeling import attention
from jetspec_train.modeling.attention import block_attention, block_attention_weights
from jetspec_train.modeling.blocks import MASK_SLOT, Blocks
from jetspec_train.modeling.draft_head import DraftHead
from tests import draft_tools as tools

ROWS = [[(4, 12), (3, 9)], [(5, 20)]]
ANCHORS = torch.tensor([[6, 9, 20], [7, 12, 18]])
FAMILIES = [
    dict(mask="bidirectional", layout="in_place", parent="none"),
    dict(mask="causal", layout="in_place", parent="none"),
    dict(mask="bidirectional", layout="anchor", parent="vanilla"),
    dict(mask="causal", layout="anchor", parent="vanilla"),
    dict(mask="causal", layout="anchor", parent="gated", mask_token_id=None),
]
families = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: "-".join(str(v) for v in f.values()))


def anchor_outputs(head: DraftHead, batch: tools.Packed, clean: torch.Tensor | None = None) -> tuple[Blocks, Any, Any]:
    blocks = batch.blocks(ANCHORS, clean, config=head.config)
    hidden = tools.run_head(head, batch, blocks)
    return blocks, hidden, tools.slot_logits(head, hidden, blocks.parents_BAK)


def changed(batch: tools.Packed, row: int, index: int) -> tools.Packed:
    """The batch with another token at one place and, as a target would have it, other states from there on."""
    tokens, features = batch.tokens_BT.clone(), batch.features_BTF.clone()
    tokens[row, index] = (tokens[row, index] + 17) % tools.VOCABULARY
    same = batch.documents_BT[row] == batch.documents_BT[row, index]
    later = same & (torch.arange(tokens.shape[1]) >= index)
    features[row, later] = features[row, later].roll(1, -1) + 1.0
    return tools.Packed(tokens, batch.positions_BT, batch.documents_BT, batch.supervised_BT, features, batch.hidden_BTD)


@families
def test_nothing_at_or_after_the_anchor_leaks_into_a_block(family: dict[str, Any]) -> None:
    """PITFALLS 1. Change one token after the anchor: U_k stays; the conditioned logits move only with their parent."""
    head = tools.draft_head(**family)
    batch = tools.packed(ROWS, 32)
    blocks, hidden, conditioned = anchor_outputs(head, batch)
    anchor = int(ANCHORS[1, 0])
    for index in range(anchor + 1, 25):
        _, new_hidden, new_conditioned = anchor_outputs(head, changed(batch, 1, index))
        assert torch.equal(new_hidden[1, 0], hidden[1, 0]), f"token {index} moved a block at anchor {anchor}"
        for slot in range(head.config.block):
            parent = anchor + slot + head.config.offset - 1
            moved = not torch.equal(new_conditioned[1, 0, slot], conditioned[1, 0, slot])
            assert moved == (head.has_parent and parent == index and bool(blocks.sources_BAK[1, 0, slot] == parent))
    # the anchor itself and what lies before it do move the block: the test can fail
    for index in (anchor, anchor - 1, 0):
        assert not torch.equal(anchor_outputs(head, changed(batch, 1, index))[1][1, 0], hidden[1, 0])


@families
def test_blocks_and_documents_do_not_see_each_other(family: dict[str, Any]) -> None:
    head = tools.draft_head(**family)
    batch = tools.packed(ROWS, 32)
    _, hidden, _ = anchor_outputs(head, batch)
    alone = batch.blocks(ANCHORS[:, :1], config=head.config)
    assert torch.allclose(tools.run_head(head, batch, alone)[:, 0], hidden[:, 0], atol=1e-12)
    _, after_other_document, _ = anchor_outputs(head, changed(batch, 0, 3))
    assert torch.equal(after_other_document[0, 2], hidden[0, 2])
    assert not torch.equal(after_other_document[0, 0], hidden[0, 0])


def test_a_causal_slot_sees_only_the_clean_tokens_up_to_itself() -> None:
    head = tools.draft_head(mask="causal")
    batch = tools.packed(ROWS, 32)
    clean = torch.tensor([[0, 0, 0], [2, 0, 0]])
    _, hidden, _ = anchor_outputs(head, batch, clean)
    anchor = int(ANCHORS[1, 0])
    for index in range(anchor + 1, anchor + 6):
        _, new, _ = anchor_outputs(head, changed(batch, 1, index), clean)
        for slot in range(head.config.block):
            sees = index <= anchor + 2 and slot >= index - anchor
            assert torch.equal(new[1, 0, slot], hidden[1, 0, slot]) != sees


@families
def test_the_decoder_step_gives_the_logits_of_the_training_step(family: dict[str, Any]) -> None:
    """Parity (PITFALLS 1): context fused token by token and appended, A = 1, one row, no padding, no mask."""
    head = tools.draft_head(**family)
    batch = tools.packed(ROWS, 32)
    blocks, hidden, conditioned = anchor_outputs(head, batch)
    with torch.inference_mode():
        for row, number, start in ((0, 0, 0), (0, 2, 16), (1, 1, 0)):
            anchor = int(ANCHORS[row, number])
            columns = []
            for index in range(start, anchor):
                context = head.fuse(batch.features_BTF[row : row + 1, index : index + 1])
                columns.append(head.context_kv(context, torch.tensor([[index - start]])))
            joined = [
                (torch.cat([c[i][0] for c in columns], 2), torch.cat([c[i][1] for c in columns], 2))
                for i in range(head.config.layers)
            ]
            inputs = torch.full((1, 1, head.config.block), MASK_SLOT)
            inputs[0, 0, 0] = batch.tokens_BT[row, anchor]
            positions = torch.arange(head.config.block)[None, None] + anchor - start
            decoded = head(head.embed(inputs, tools.embed), positions, joined, None)
            assert torch.allclose(decoded[0, 0], hidden[row, number], atol=1e-12)
            parents = blocks.parents_BAK[row : row + 1, number : number + 1]
            assert torch.allclose(tools.slot_logits(head, decoded, parents)[0, 0], conditioned[row, number], atol=1e-12)


@pytest.mark.parametrize("layout", ["anchor", "in_place"])
def test_deferring_m_correct_tokens_equals_the_block_with_m_clean_slots(layout: str) -> None:
    """METHODS 2, golden: draft, append m tokens to the inputs at run time, draft on = the trained forward."""
    head = tools.draft_head(mask="causal", layout=layout)
    batch = tools.packed(ROWS, 32)
    m = 2
    clean = torch.full_like(ANCHORS, m)
    blocks, hidden, _ = anchor_outputs(head, batch, clean)
    assert (blocks.clean_BA == m).all()
    row, number = 1, 1
    anchor = int(ANCHORS[row, number])
    with torch.inference_mode():
        context = head.context_kv(
            head.fuse(batch.features_BTF[row : row + 1, :anchor]), batch.positions_BT[row : row + 1, :anchor]
        )
        deferred = batch.tokens_BT[row, anchor : anchor + m + 1].tolist()
        inputs = torch.tensor([[deferred + [MASK_SLOT] * (head.config.block - m - 1)]])
        positions = anchor + torch.arange(head.config.block)[None, None]
        decoded = head(head.embed(inputs, tools.embed), positions, context, None)
    first = m + head.config.first_slot
    assert torch.allclose(decoded[0, 0, first:], hidden[row, number, first:], atol=1e-12)
    # and what is predicted there is the first token that was not deferred
    assert blocks.labels_BAK[row, number, first] == batch.tokens_BT[row, anchor + m + 1]
    assert blocks.valid_BAK[row, number].nonzero().min() == first


def test_a_shorter_causal_block_gives_the_first_slots_of_the_longer_one() -> None:
    head = tools.draft_head(mask="causal")
    batch = tools.packed(ROWS, 32)
    blocks, hidden, _ = anchor_outputs(head, batch)
    context = head.context_kv(head.fuse(batch.features_BTF), batch.positions_BT)
    short = head(
        head.embed(blocks.inputs_BAK[..., :2], tools.embed),
        blocks.positions_BAK[..., :2],
        context,
        blocks.context_mask_BAT,
    )
    assert torch.allclose(short, hidden[..., :2, :], atol=1e-12)


def test_rows_of_different_length_in_one_batch_equal_the_rows_alone() -> None:
    head = tools.draft_head()
    batch = tools.packed([[(4, 16)], [(3, 8)]], 20)
    lengths = [12, 7]
    context = head.context_kv(head.fuse(batch.features_BTF[:, :12]), batch.positions_BT[:, :12])
    mask = torch.arange(12)[None, None] < torch.tensor(lengths)[:, None, None]
    inputs = torch.full((2, 1, 5), MASK_SLOT)
    inputs[:, 0, 0] = torch.tensor([batch.tokens_BT[0, 12], batch.tokens_BT[1, 7]])
    positions = torch.tensor(lengths)[:, None, None] + torch.arange(5)
    together = head(head.embed(inputs, tools.embed), positions, context, mask)
    for row, length in enumerate(lengths):
        own = [(k[row : row + 1, :, :length], v[row : row + 1, :, :length]) for k, v in context]
        alone = head(head.embed(inputs[row : row + 1], tools.embed), positions[row : row + 1], own, None)
        assert torch.allclose(alone[0], together[row], atol=1e-12)


@pytest.mark.parametrize("parent", ["vanilla", "gated"])
def test_the_shortlist_bias_is_the_full_bias_at_the_candidates(parent: str) -> None:
    head = tools.draft_head(parent=parent)
    parents = torch.tensor([[5, 9, 30], [7, 7, 60]])
    hidden = tools.random(2, 3, tools.WIDTH)
    full = head.parent_bias(parents, hidden)
    candidates = torch.randint(0, tools.VOCABULARY, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(head.parent_bias_at(parents, candidates, hidden), full.gather(-1, candidates))
    w1, w2 = head.markov_head.markov_w1.weight, head.parent_weight
    state = w1[parents]
    if parent == "gated":
        gate = head.markov_head.gate_proj
        state = state * torch.sigmoid(torch.cat((hidden, state), -1) @ gate.weight.t() + gate.bias)
    assert torch.allclose(full, state @ w2.t())


def test_a_gated_term_broadcasts_one_slot_over_many_parents_and_asks_for_it() -> None:
    head = tools.draft_head(parent="gated")
    parents, hidden = torch.tensor([[4, 5, 6]]), tools.random(1, 1, tools.WIDTH)
    many = head.parent_bias(parents, hidden)
    assert torch.allclose(many[0, 1], head.parent_bias(parents[:, 1], hidden[:, 0])[0])
    with pytest.raises(ValueError, match="gated"):
        head.parent_bias(parents)
    with pytest.raises(ValueError, match="no parent term"):
        tools.draft_head(parent="none").parent_bias(parents)


def test_a_fresh_parent_term_is_silent_and_the_learned_mask_is_used() -> None:
    head = DraftHead(tools.head_config(mask_token_id=None))
    assert head.parent_bias(torch.arange(10)).abs().max() == 0
    embeds = head.embed(torch.tensor([[[5, MASK_SLOT]]]), lambda t: tools.embed(t).float())
    assert torch.equal(embeds[0, 0, 1], head.mask_embedding)
    reserved = DraftHead(tools.head_config(mask_token_id=3)).embed(torch.tensor([[[5, MASK_SLOT]]]), tools.embed)
    assert torch.equal(reserved[0, 0, 1], tools.EMBEDDING[3])


def test_tensor_names_are_those_of_the_published_formats() -> None:
    names = set(DraftHead(tools.head_config(layers=1)).state_dict())
    norms = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")
    products = ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    layer = {f"layers.0.{n}.weight" for n in (*norms, *(f"{p}_proj" for p in products))}
    assert names == layer | {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
    }


@pytest.mark.parametrize("chunk", [1, 700, 10**9])
@pytest.mark.parametrize("causal", [True, False])
def test_chunked_attention_and_its_gradient_equal_a_plain_softmax(
    causal: bool, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(attention._CHUNK_SCORES, "cpu", chunk)
    B, H, J, A, K, T, D = 2, 4, 2, 3, 4, 9, 6
    q, kb, vb = (tools.random(B, h, A, K, D, seed=i).requires_grad_() for i, h in enumerate((H, J, J)))
    kc, vc = (tools.random(B, J, T, D, seed=5 + i).requires_grad_() for i in range(2))
    mask = torch.arange(T) < torch.tensor([[0, 3, 9], [2, 5, 6]])[..., None]

    repeat = H // J
    keys = torch.cat((kc.unsqueeze(2).expand(B, J, A, T, D), kb), 3).repeat_interleave(repeat, 1)
    values = torch.cat((vc.unsqueeze(2).expand(B, J, A, T, D), vb), 3).repeat_interleave(repeat, 1)
    own = torch.ones(K, K, dtype=torch.bool)
    own = own.tril() if causal else own
    allowed = torch.cat((mask[:, :, None].expand(B, A, K, T), own.expand(B, A, K, K)), -1)
    scores = (q @ keys.transpose(-1, -2) / D**0.5).masked_fill(~allowed[:, None], float("-inf"))
    expected = scores.softmax(-1) @ values

    out = block_attention(q, kc, vc, kb, vb, mask, causal=causal)
    assert torch.allclose(out, expected)
    assert torch.allclose(block_attention_weights(q, kc, kb, mask, causal=causal), scores.softmax(-1))
    grad = tools.random(*out.shape, seed=9)
    for mine, plain in zip(
        torch.autograd.grad(out, (q, kc, vc, kb, vb), grad), torch.autograd.grad(expected, (q, kc, vc, kb, vb), grad)
    ):
        assert torch.allclose(mine, plain)


def test_attention_statistics_can_be_collected() -> None:
    head = tools.draft_head()
    batch = tools.packed(ROWS, 32)
    blocks = batch.blocks(ANCHORS, config=head.config)
    context = head.context_kv(head.fuse(batch.features_BTF), batch.positions_BT)
    seen: list[torch.Tensor] = []
    embeds = head.embed(blocks.inputs_BAK, tools.embed)
    head(embeds, blocks.positions_BAK, context, blocks.context_mask_BAT, seen)
    assert len(seen) == head.config.layers
    weights = seen[0]
    assert weights.shape == (2, 4, 3, 5, 32 + 5)
    assert torch.allclose(weights.sum(-1), torch.ones_like(weights[..., 0]))
    hidden = (~blocks.context_mask_BAT)[:, None, :, None].expand_as(weights[..., :32])
    assert weights[..., :32][hidden].max() == 0


def test_bf16_autocast_follows_fp32_and_gives_fp32_gradients() -> None:
    head = tools.draft_head().float()
    batch = tools.packed(ROWS, 32)
    batch.features_BTF = batch.features_BTF.float()
    blocks = batch.blocks(ANCHORS, config=head.config)

    def run() -> torch.Tensor:
        context = head.context_kv(head.fuse(batch.features_BTF), batch.positions_BT)
        embeds = head.embed(blocks.inputs_BAK, lambda t: tools.embed(t).float())
        return head(embeds, blocks.positions_BAK, context, blocks.context_mask_BAT)

    exact = run()
    with torch.autocast("cpu", torch.bfloat16):
        rough = run()
    assert rough.dtype == torch.float32
    assert (rough - exact).abs().mean() < 0.02 * exact.abs().mean()
    rough.square().sum().backward()
    grads = {name: p.grad for name, p in head.named_parameters() if "markov" not in name}
    assert all(g is not None and g.dtype == torch.float32 and g.abs().max() > 0 for g in grads.values())


def test_moving_the_head_to_bf16_keeps_exact_rotary_frequencies() -> None:
    head = DraftHead(tools.head_config())
    before = head.rotary.frequencies.clone()
    head.to(torch.bfloat16)
    assert torch.equal(head.rotary.frequencies, before)
    cos, _ = head.rotary(torch.tensor([[4001]]))
    assert cos.dtype == torch.float32
    assert torch.allclose(cos[0, 0, :1].double(), torch.cos(torch.tensor([4001.0], dtype=torch.float64)), atol=1e-3)


def test_recomputed_layers_give_the_same_gradients_and_keep_less() -> None:
    batch = tools.packed([[(4, 20)]], 24)
    head = tools.draft_head(layers=2)
    blocks = batch.blocks(torch.tensor([[6, 9, 14]]), config=head.config)
    found = []
    for recompute in (False, True):
        head.recompute = recompute
        kept: list[int] = []

        def keep(tensor: torch.Tensor, kept: list[int] = kept) -> torch.Tensor:
            kept.append(tensor.numel())
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss = tools.run_head(head, batch, blocks).square().sum()
        parameters = [p for name, p in head.named_parameters() if "markov" not in name]
        found.append((torch.autograd.grad(loss, parameters), sum(kept)))
    assert all(torch.equal(one, other) for one, other in zip(found[0][0], found[1][0]))
    assert found[1][1] < 0.6 * found[0][1]
