"""The verifier inside a training step: what it may not do to the draft, and that it sees what a decoder sees."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetspec_train.config import DecodingConfig, DraftConfig, VerifierSettings
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.decoding.stats import Stopwatch, merge_stats
from jetspec_train.modeling.draft_config import resolve_draft_config
from jetspec_train.modeling.draft_head import DraftHead
from jetspec_train.modeling.verifier import NodeInputs, Verifier, ancestors_of, node_scalars
from jetspec_train.modeling.verifier_config import resolve_verifier_config
from jetspec_train.objectives.candidates import Candidates, Rule
from jetspec_train.objectives.verifier_loss import VerifierWeights
from jetspec_train.training import verifier_step
from jetspec_train.training.step import DraftStep, StepSettings, TrainBatch, online_states, plan_step
from jetspec_train.training.stored_paths import StoredPath, StoredPaths
from jetspec_train.training.verifier_rounds import Answer, HeldOutRounds
from jetspec_train.training.verifier_step import JudgeSettings, held_out
from tests.tiny import tiny_target

LENGTH, BLOCK = 40, 4
JUDGING = JudgeSettings(Rule(), VerifierWeights(), blocks=6, seen_weight=0.5)


def answers(rows: int, seed: int = 0) -> list[list[int]]:
    """Texts of a tiny target: a random prompt of 8 tokens, then its own greedy choices."""
    target = tiny_target("llama")
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(4, 300, (rows, 8), generator=generator)
    while tokens.shape[1] < 20:
        documents = torch.zeros_like(tokens)
        positions = torch.arange(tokens.shape[1]).expand(tokens.shape)
        hidden = target.forward_packed(tokens, positions, documents).hidden_BND[:, -1]
        tokens = torch.cat((tokens, target.logits(hidden).argmax(-1, keepdim=True)), dim=1)
    return tokens.tolist()


def batch_of(texts: list[list[int]], held: list[bool] | None = None) -> TrainBatch:
    """Two texts of 20 tokens per row."""
    rows = len(texts) // 2
    tokens = torch.tensor(texts).view(rows, LENGTH)
    held_out_BT = None
    if held is not None:
        held_out_BT = torch.tensor(held).view(rows, 2).repeat_interleave(20, dim=1)
    return TrainBatch(
        tokens,
        torch.arange(20).repeat(2).expand(rows, LENGTH),
        torch.tensor([0] * 20 + [1] * 20).expand(rows, LENGTH),
        torch.tensor(([False] * 8 + [True] * 12) * 2).expand(rows, LENGTH),
        samples=[np.arange(2 * row, 2 * row + 2) for row in range(rows)],
        held_out_BT=held_out_BT,
    )


def networks(**changes: Any) -> tuple[DraftHead, Verifier, StepSettings]:
    """A random draft that speaks, and a verifier whose heads are not silent."""
    target = tiny_target("llama")
    cfg = DraftConfig(layers=1, block=BLOCK, taps=2, parent_rank=8, **changes)
    config = resolve_draft_config(cfg, target.config, mask_token_id=target.mask_token_id)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        draft = DraftHead(config)
        if draft.parent_weight is not None:
            torch.nn.init.normal_(draft.parent_weight, std=0.5)
        verifier = Verifier(resolve_verifier_config(VerifierSettings(), config, target_parameters=target.parameters))
        for head in (verifier.score, verifier.confidence_head.proj):
            torch.nn.init.normal_(head.weight)
    settings = StepSettings(
        block=BLOCK, layout=config.layout, anchors=8, clean_prefix=0.3, gamma=4.0, ce=0.1, l1=0.9, kl=0.0, chunk_rows=16
    )
    return draft, verifier, settings


def run(
    batch: TrainBatch,
    *,
    with_verifier: bool = True,
    judging: JudgeSettings = JUDGING,
    stored: StoredPaths | None = None,
    rows: slice | None = None,
    ce_only: bool = False,
    **changes: Any,
) -> tuple[dict[str, Tensor], Any]:
    """Gradients by name, and the step's output, of one micro-step over ``rows`` of the batch."""
    target = tiny_target("llama")
    draft, verifier, settings = networks(**changes)
    if ce_only:
        settings = replace(settings, ce=1.0, l1=0.0)
    module = DraftStep(draft, target, settings, verifier if with_verifier else None, judging if with_verifier else None)
    plan = plan_step(batch, settings, seed=0, step=0, judging=judging if with_verifier else None, stored=stored)
    rows = rows or slice(0, batch.tokens_BT.shape[0])
    features, hidden = online_states(target, draft.config.target_layer_ids)(batch, rows)
    blocks, weights = plan.rows(rows)
    output = module(
        blocks,
        weights,
        batch.text(rows),
        features,
        hidden,
        plan.total_weight,
        None if plan.judging is None else plan.judging.rows(rows),
    )
    output.loss.backward()
    return {n: p.grad for n, p in module.named_parameters() if p.grad is not None}, output


@pytest.mark.parametrize("ce_only", [False, True])
def test_the_draft_trains_bit_identically_with_a_detached_verifier_beside_it(ce_only: bool) -> None:
    batch = batch_of(answers(4))
    alone, output = run(batch, with_verifier=False, ce_only=ce_only)
    beside, both = run(batch, ce_only=ce_only)
    assert {n for n in beside if n.startswith("draft.")} == set(alone)
    for name, gradient in alone.items():
        assert torch.equal(gradient, beside[name]), name
    for name, (top, bottom) in output.metrics.items():
        assert torch.equal(top, both.metrics[name][0]) and torch.equal(bottom, both.metrics[name][1]), name
    assert any(name.startswith("verifier.") and g.any() for name, g in beside.items())
    assert both.metrics["verifier/judged_nodes"][0] > 0


def test_held_out_samples_give_the_draft_no_gradient_and_the_verifier_one() -> None:
    texts = answers(4)
    all_held, output = run(batch_of(texts, [True] * 4))
    assert not any(gradient.any() for name, gradient in all_held.items() if name.startswith("draft."))
    assert output.metrics["loss"][0] == 0 and output.metrics["verifier/judged_nodes"][0] > 0
    assert any(gradient.any() for name, gradient in all_held.items() if name.startswith("verifier."))

    other = answers(4, seed=9)
    some, _ = run(batch_of([texts[0], texts[1], texts[2], texts[3]], [False, True, False, True]))
    changed, _ = run(batch_of([texts[0], other[1], texts[2], other[3]], [False, True, False, True]))
    for name, gradient in some.items():
        if name.startswith("draft."):
            torch.testing.assert_close(gradient, changed[name], msg=name)


def test_the_normaliser_of_the_draft_is_exact_with_held_out_samples() -> None:
    """Half of the samples held out: the loss is the mean over the others, as if the held-out blocks did not exist."""
    batch = batch_of(answers(4), [False, True, True, False])
    _, _, settings = networks()
    plan = plan_step(batch, settings, seed=0, step=0, judging=JUDGING)
    whole = plan_step(replace(batch, held_out_BT=None), settings, seed=0, step=0, judging=JUDGING)
    document_BA = (plan.blocks.anchors_BA >= 20).long()
    kept_BA = (document_BA == 0) == (torch.arange(2)[:, None] == 0)
    expected = whole.weights_BAK * kept_BA.unsqueeze(-1)
    assert torch.equal(plan.weights_BAK, expected)
    assert plan.total_weight == pytest.approx(float(expected.double().sum()))
    assert plan.judging is not None and whole.judging is not None
    assert plan.judging.total_weight == pytest.approx(whole.total_weight)  # every slot is in the verifier's W


def test_held_out_blocks_are_judged_first_and_seen_ones_count_less() -> None:
    batch = batch_of(answers(4), [False, True, False, True])
    _, _, settings = networks()
    judging = replace(JUDGING, blocks=4, seen_weight=0.25)
    plan = plan_step(batch, settings, seed=0, step=0, judging=judging)
    assert plan.judging is not None
    ordinary_BA = (plan.blocks.clean_BA == 0) & plan.blocks.valid_BAK.any(-1)
    held_BA = plan.blocks.anchors_BA >= 20
    for row in range(2):
        chosen = plan.judging.index_BC[row][plan.judging.real_BC[row]]
        assert len(set(chosen.tolist())) == len(chosen) == min(4, int(ordinary_BA[row].sum()))
        assert ordinary_BA[row, chosen].all()
        assert held_BA[row, chosen].sum() == min(4, int((ordinary_BA & held_BA)[row].sum()))
        first = plan.judging.weights_BCK[row].amax(-1)[plan.judging.real_BC[row]]
        assert torch.equal(first, torch.where(held_BA[row, chosen], 1.0, 0.25))


def test_the_split_into_micro_steps_moves_neither_loss_nor_gradient() -> None:
    batch = batch_of(answers(6), [False, True] * 3)
    whole, output = run(batch)
    parts = [run(batch, rows=slice(i, i + 1)) for i in range(3)]
    torch.testing.assert_close(sum(p[1].loss for p in parts), output.loss)
    for name, gradient in whole.items():
        together = sum(part[0][name] for part in parts if name in part[0])
        torch.testing.assert_close(together, gradient, atol=1e-6, rtol=1e-4, msg=name)
    for name, (top, bottom) in output.metrics.items():
        torch.testing.assert_close(sum(p[1].metrics[name][0] for p in parts), top, rtol=1e-5, atol=1e-6, msg=name)
        torch.testing.assert_close(sum(p[1].metrics[name][1] for p in parts), bottom, msg=name)


def test_confidence_does_not_change_with_the_token_it_is_asked_about(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything from a token on is another text: the confidence of its own slot and those before it stays, and that of
    the next slot moves, through its parent."""
    seen: list[Tensor] = []
    original = Verifier.confidence

    def spy(self: Verifier, hidden: Tensor, state: Tensor | None) -> Tensor:
        seen.append(original(self, hidden, state))
        return seen[-1]

    monkeypatch.setattr(Verifier, "confidence", spy)
    texts = answers(2)
    batch = batch_of(texts)
    _, _, settings = networks()
    settings = replace(settings, clean_prefix=0.0, anchors=32)
    plan = plan_step(batch, settings, seed=0, step=0, judging=replace(JUDGING, blocks=32))
    assert plan.judging is not None
    target = tiny_target("llama")

    def confidences(batch: TrainBatch) -> Tensor:
        draft, verifier, _ = networks()
        module = DraftStep(draft, target, settings, verifier, replace(JUDGING, blocks=32))
        again = plan_step(batch, settings, seed=0, step=0, judging=replace(JUDGING, blocks=32))
        features, hidden = online_states(target, draft.config.target_layer_ids)(batch, slice(0, 1))
        module(*again.rows(slice(0, 1)), batch.text(slice(0, 1)), features, hidden, 1.0, again.judging)
        return seen[-1].detach()

    before = confidences(batch)
    for block, anchor in enumerate(plan.blocks.anchors_BA[0, plan.judging.index_BC[0]].tolist()):
        if not bool(plan.judging.real_BC[0, block]):
            continue
        for k in range(BLOCK):
            place = anchor + 1 + k  # the token that slot k is asked about
            if place >= LENGTH:
                continue
            tokens = batch.tokens_BT.clone()
            tokens[0, place:] = (tokens[0, place:] + 7) % 290 + 4
            after = confidences(replace(batch, tokens_BT=tokens))
            torch.testing.assert_close(after[0, block, : k + 1], before[0, block, : k + 1], rtol=0, atol=1e-5)
            if k + 1 < BLOCK:
                assert (after[0, block, k + 1] - before[0, block, k + 1]).abs() > 1e-4
        break


@pytest.mark.parametrize("layout", ["anchor", "in_place"])
@pytest.mark.parametrize("parent", ["vanilla", "none"])
def test_the_chain_of_the_step_is_judged_like_the_chain_of_the_decoder(
    monkeypatch: pytest.MonkeyPatch, layout: str, parent: str
) -> None:
    """Same anchors, once as blocks of a packed row and once through the drafter's cached context and its chain."""
    noted: dict[str, Any] = {}
    original = verifier_step.verifier_loss

    def spy(confidence: Tensor, correctness: Tensor, candidates: Candidates, *rest: Any, **named: Any) -> Any:
        noted.update(confidence=confidence.detach(), correctness=correctness.detach(), candidates=candidates)
        return original(confidence, correctness, candidates, *rest, **named)

    monkeypatch.setattr(verifier_step, "verifier_loss", spy)
    texts, target = answers(2), tiny_target("llama")
    batch = batch_of(texts)
    draft, verifier, settings = networks(layout=layout, parent=parent)
    settings = replace(settings, clean_prefix=0.0, anchors=16, layout=layout)
    judging = replace(JUDGING, blocks=16)
    module = DraftStep(draft, target, settings, verifier, judging)
    plan = plan_step(batch, settings, seed=0, step=0, judging=judging)
    assert plan.judging is not None
    features, hidden = online_states(target, draft.config.target_layer_ids)(batch, slice(0, 1))
    module(*plan.rows(slice(0, 1)), batch.text(slice(0, 1)), features, hidden, 1.0, plan.judging)
    found: Candidates = noted["candidates"]
    S, first = found.tokens_BAKS.shape[-1], draft.config.first_slot

    compared = 0
    anchors = plan.blocks.anchors_BA[0, plan.judging.index_BC[0]].tolist()
    for block, anchor in enumerate(anchors):
        chain = int(found.chain_BAK[0, block].sum())
        if not chain:
            continue
        start = 20 * (anchor // 20)
        prefix, own = batch.tokens_BT[0, start:anchor].tolist(), features[:, start:anchor]
        drafter = BlockDrafter(draft, target)
        drafter.start(1, 64, Stopwatch(target.device))
        drafter.observe([prefix], own, [list(range(len(prefix)))])
        tree = drafter.propose([int(batch.tokens_BT[0, anchor])], [chain], DecodingConfig(shape="chain", nodes=8))[0]
        assert tree.tokens.tolist() == found.tokens_BAKS[0, block, first : first + chain, 0].tolist()
        logits, confidence = judge_tree(draft, verifier, own, int(batch.tokens_BT[0, anchor]), tree)
        nodes = torch.arange(first, first + chain) * S
        torch.testing.assert_close(logits[0], noted["correctness"][0, block][nodes], rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(
            confidence[0], noted["confidence"][0, block, first : first + chain], rtol=1e-3, atol=1e-3
        )
        compared += chain
    assert compared >= 8


@torch.no_grad()
def judge_tree(draft: DraftHead, verifier: Verifier, features: Tensor, anchor: int, tree: Any) -> tuple[Tensor, Tensor]:
    """A decoder's judgement of a drafted chain from the tree alone: token scores, one row, its own context."""
    target, config = tiny_target("llama"), draft.config
    length = features.shape[1]
    positions = torch.arange(length)[None]
    fused = draft.fuse(features)
    inputs = torch.full((1, 1, config.block), -1)
    inputs[..., 0] = anchor
    hidden = draft(
        draft.embed(inputs, target.embed),
        length + torch.arange(config.block)[None, None],
        draft.context_kv(fused, positions),
        None,
    )[:, 0, config.first_slot :]
    plain = target.logits(hidden[0]).log_softmax(-1)
    depths = torch.from_numpy(tree.depths)
    tokens = torch.from_numpy(tree.tokens)[None]
    scores = torch.from_numpy(tree.scores)
    hidden_BMd = hidden[:, depths]
    before = torch.cat((torch.tensor([[anchor]]), tokens[:, :-1]), dim=1)
    state = draft.parent_state(before, hidden_BMd) if draft.has_parent else hidden_BMd[..., :0]
    inputs_of_nodes = NodeInputs(
        hidden_BMd=hidden_BMd,
        parent_state_BMr=state,
        token_embeds_BME=target.embed(tokens),
        scalars_BMs=node_scalars(
            verifier.config,
            logprob=torch.diff(scores, prepend=torch.zeros(1)),
            path_logprob=scores,
            margin=torch.zeros(len(tree)),
            rank=torch.zeros(len(tree)),
            entropy=-(plain.exp() * plain).sum(-1)[depths],
            depth=depths,
        )[None],
        ancestors_BMM=ancestors_of(tree.parents)[None],
        positions_BM=(length + 1 + depths)[None],
    )
    logits = verifier.correctness(inputs_of_nodes, verifier.context_kv(fused, positions))
    return logits, verifier.confidence(hidden_BMd, state if draft.has_parent else None)


def test_stored_paths_are_judged_at_their_own_anchors_and_never_reach_the_draft() -> None:
    texts = answers(4)
    batch = batch_of(texts)
    right = [tuple(texts[i][12:15]) for i in range(4)]
    paths = [StoredPath(i, 12, (right[i][0], 5, 6), (1.0, 0.0), kind=i % 2) for i in range(4)]
    paths.append(StoredPath(1, 19, (7, 8, 9), (0.0,), kind=0))
    judging = replace(JUDGING, negatives_share=0.5)
    none, plain = run(batch)
    some, output = run(batch, judging=judging, stored=StoredPaths(paths, ("near_miss", "swap")))
    for name, gradient in none.items():
        if name.startswith("draft."):
            assert torch.equal(gradient, some[name]), name
    assert output.metrics["verifier/stored/bce"][1] == 4 * 2 + 1  # labelled tokens
    assert output.metrics["verifier/stored/accuracy/near_miss"][1] == 3
    assert output.metrics["verifier/stored/accuracy/swap"][1] == 2
    assert plain.metrics["verifier/prior"][1] == output.metrics["verifier/prior"][1]
    assert any(not torch.equal(some[name], none[name]) for name in none if name.startswith("verifier."))

    _, _, settings = networks()
    plan = plan_step(batch, settings, seed=0, step=0, judging=judging, stored=StoredPaths(paths, ("near_miss", "swap")))
    assert plan.judging is not None and plan.judging.stored is not None
    made = plan.judging.stored
    for row in range(2):
        real = made.labelled_BCK[row].any(-1)
        for block in real.nonzero().squeeze(-1).tolist():
            anchor = int(made.blocks.anchors_BA[row, block])
            assert int(made.parents_BCK[row, block, 0]) == int(batch.tokens_BT[row, anchor])
            assert made.parents_BCK[row, block, 1:].tolist() == made.tokens_BCK[row, block, :-1].tolist()
            assert int(made.blocks.inputs_BAK[row, block, 0]) == int(batch.tokens_BT[row, anchor])


def test_a_row_takes_its_share_of_stored_paths_and_no_more() -> None:
    texts = answers(4)
    batch = batch_of(texts)
    paths = [StoredPath(0, prefix, (5, 6), (0.0,), 0) for prefix in range(8, 20)]
    _, _, settings = networks()
    judging = replace(JUDGING, blocks=6, negatives_share=0.25)
    assert judging.stored_blocks == 2
    stored = StoredPaths(paths, ("near_miss",))
    plan = plan_step(batch, settings, seed=0, step=0, judging=judging, stored=stored)
    assert plan.judging is not None and plan.judging.stored is not None
    assert plan.judging.stored.labelled_BCK.any(-1).sum(-1).tolist() == [2, 0]
    again = plan_step(batch, settings, seed=0, step=0, judging=judging, stored=stored)
    assert again.judging is not None and again.judging.stored is not None
    assert torch.equal(again.judging.stored.blocks.anchors_BA, plan.judging.stored.blocks.anchors_BA)


def test_who_is_held_out_depends_on_the_sample_alone_and_hits_the_share() -> None:
    ids = [f"sample-{n}" for n in range(4000)]
    chosen = held_out(ids, 0.2)
    assert 0.18 < sum(chosen) / len(ids) < 0.22
    assert held_out(ids[::-1], 0.2) == chosen[::-1]
    more = held_out(ids, 0.5)
    assert all(b for a, b in zip(chosen, more) if a), "a larger share holds out the same samples and others"
    assert not any(held_out(ids, 0.0))


def test_held_out_rounds_are_the_rounds_that_decoding_makes() -> None:
    """Counted against the decoder, with a draft that knows half of the texts by heart."""
    target, texts = tiny_target("llama"), answers(8)
    draft, verifier, settings = networks()
    module = DraftStep(draft, target, settings)
    batch, rows = batch_of(texts[:4]), slice(0, 2)
    features, hidden = online_states(target, draft.config.target_layer_ids)(batch, rows)
    optimizer = torch.optim.Adam(draft.parameters(), lr=5e-3)
    for step in range(60):
        plan = plan_step(batch, settings, seed=0, step=step)
        loss = module(*plan.rows(rows), batch.text(rows), features, hidden, plan.total_weight).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    decoder = Decoder(target, BlockDrafter(draft, target), DecodingConfig(shape="chain", nodes=8))
    generations = decoder.generate([text[:8] for text in texts], max_new_tokens=12)
    stats = merge_stats([generation.stats for generation in generations])
    held = [Answer(text[:8], g.tokens, "all") for text, g in zip(texts, generations, strict=True) if len(g.tokens) > 1]
    slots = HeldOutRounds(held, target, draft.config.target_layer_ids).collect(draft, verifier)
    accepted = np.bincount(slots.depth, weights=slots.accepted, minlength=4).astype(int).tolist()
    judged = np.bincount(slots.depth, minlength=4).tolist()
    assert accepted == [*stats.accepted_by_depth, 0, 0, 0, 0][:4]
    assert judged == [*stats.drafted_by_depth, 0, 0, 0, 0][:4]
    assert accepted[2] > 0 and judged[0] > accepted[0], "the setting shows long and short rounds"
    for values in slots.scores.values():
        assert len(values) == len(slots) and np.isfinite(values).all()
