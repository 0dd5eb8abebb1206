"""Foreign drafts in our decoder: the same loop, lossless, and the very tokens that the draft itself would choose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.foreign import Draft, export_forms
from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.decoding.eagle3 import Eagle3Drafter
from jetspec_train.decoding.foreign import drafter_of, foreign_drafter, import_draft, target_facts
from jetspec_train.modeling.draft_head import DraftHead, DraftHeadConfig
from jetspec_train.modeling.eagle3 import Eagle3Config, Eagle3Head
from tests import foreign_drafts as made
from tests.tiny import tiny_prompts, tiny_target

TAPS = [0, 1, 2]
CHAIN = DecodingConfig(shape="chain", nodes=4)
TREE = DecodingConfig(shape="tree", nodes=7)


def weights(target: Any) -> dict[str, torch.Tensor]:
    return {"embed_tokens.weight": target.embedding.weight.detach(), "lm_head.weight": target.head.weight.detach()}


def block(**changes: Any) -> Draft:
    config = made.block_config(target_layer_ids=TAPS, **changes)
    return Draft("block", config, made.block_tensors(config))


def eagle3(**changes: Any) -> Draft:
    config = made.eagle3_config(target_layer_ids=TAPS, **changes)
    return Draft("eagle3", config, made.eagle3_tensors(config))


DRAFTS = [
    (block(mask="bidirectional"), "dflash"),
    (block(mask="causal"), "jetspec"),
    (block(mask="bidirectional", layout="anchor", parent="gated", parent_rank=8), "deepspec"),
    (block(mask="causal", layout="anchor", parent="vanilla", parent_rank=8), "vllm"),
    (eagle3(draft_vocab_size=150), "vllm"),
    (eagle3(qk_norm=True, norm_before_residual=True, norm_output=True, layers=2), "vllm"),
    (eagle3(), "eagle3"),
]


@pytest.mark.parametrize(("draft", "form"), DRAFTS)
def test_a_draft_drafts_the_same_tokens_before_and_after_the_round_trip_and_loses_nothing(
    draft: Draft, form: str, tmp_path: Path
) -> None:
    target = tiny_target("llama")
    export_forms(draft, [form], tmp_path, target_facts(target), lambda: weights(target))
    if draft.kind == "block":
        head = DraftHead(DraftHeadConfig(**draft.config))
        head.load_state_dict(dict(draft.tensors))
        own: Any = BlockDrafter(head, target)
    else:
        eagle = Eagle3Head(Eagle3Config(**draft.config))
        eagle.load_state_dict(dict(draft.tensors))
        own = Eagle3Drafter(eagle, target)
    prompts = tiny_prompts(3)
    plain = [generation.tokens for generation in Decoder(target).generate(prompts, max_new_tokens=8)]
    foreign = foreign_drafter(tmp_path / form, target)
    for settings in (CHAIN, TREE):
        proposals = []
        for drafter in (own, foreign):
            with recorded(drafter) as trees:
                answers = Decoder(target, drafter, settings).generate(prompts, max_new_tokens=8)
            assert [generation.tokens for generation in answers] == plain
            proposals.append(trees)
        assert proposals[0] == proposals[1] and proposals[0]


class recorded:
    """What a drafter proposes while the block runs."""

    def __init__(self, drafter: Any) -> None:
        self.drafter, self.trees = drafter, []

    def __enter__(self) -> list[Any]:
        original = self.drafter.propose

        def propose(*args: Any) -> Any:
            trees = original(*args)
            self.trees.extend((tree.tokens.tolist(), tree.parents.tolist()) for tree in trees)
            return trees

        self.drafter.propose = propose
        return self.trees

    def __exit__(self, *_: Any) -> None:
        del self.drafter.propose


def slow_chain(head: Eagle3Head, target: Any, tokens: list[int], steps: int) -> list[int]:
    """EAGLE-3's greedy chain after ``tokens`` with everything computed anew: the oracle of the drafter's caches."""
    tokens_1T = torch.tensor([tokens])
    output = target.forward_packed(
        tokens_1T, torch.arange(len(tokens))[None], torch.zeros_like(tokens_1T), head.config.target_layer_ids
    )
    states = [head.fuse(output.features_BNF)[0, i] for i in range(len(tokens) - 1)]
    following, drafted = list(tokens[1:]), []
    for _ in range(steps):
        positions = torch.arange(len(states))[None]
        hidden, out, _ = head(target.embed(torch.tensor([following])), torch.stack(states)[None], positions)
        drafted.append(int(head.target_ids(head.lm_head(hidden[0, -1]).argmax())))
        # the drafted step's own output stands in for the state that the target has not computed
        states.append(out[0, -1])
        following.append(drafted[-1])
    return drafted


@torch.no_grad()
def test_the_eagle3_chain_equals_the_one_computed_without_caches() -> None:
    target = tiny_target("llama")
    for changes in ({}, {"draft_vocab_size": 150}, {"norm_output": True, "qk_norm": True}):
        draft = eagle3(**changes)
        head = Eagle3Head(Eagle3Config(**draft.config)).eval()
        head.load_state_dict(dict(draft.tensors))
        drafter = Eagle3Drafter(head, target)
        rows = [list(prompt) for prompt in tiny_prompts(2, seed=3)]
        drafter.start(2, 64, None)
        done = [0, 0]
        for grown in ([len(row) for row in rows], [1, 3], [2, 1]):
            # commit all but the anchor, as the decoder does, in steps of different sizes per row
            for row, count in zip(rows, grown):
                if done != [0, 0]:
                    row.extend(range(10, 10 + count))
            new = [row[start : len(row) - 1] for row, start in zip(rows, done)]
            longest = max(map(len, new))
            features = torch.zeros(2, longest, 3 * target.hidden_size)
            for i, row in enumerate(rows):
                tokens = torch.tensor([row])
                output = target.forward_packed(tokens, torch.arange(len(row))[None], torch.zeros_like(tokens), TAPS)
                features[i, : len(new[i])] = output.features_BNF[0, done[i] : len(row) - 1]
            drafter.observe(new, features, [list(range(len(part))) for part in new])
            trees = drafter.propose([row[-1] for row in rows], [4, 4], CHAIN)
            assert [tree.tokens.tolist() for tree in trees] == [slow_chain(head, target, row, 4) for row in rows]
            done = [len(row) - 1 for row in rows]


@torch.no_grad()
def test_every_path_of_an_eagle3_tree_is_scored_as_if_it_were_the_only_one() -> None:
    target = tiny_target("llama")
    draft = eagle3()
    head = Eagle3Head(Eagle3Config(**draft.config)).eval()
    head.load_state_dict(dict(draft.tensors))
    drafter = Eagle3Drafter(head, target)
    prompt = tiny_prompts(1, seed=5)[0]
    tokens = torch.tensor([prompt])
    output = target.forward_packed(tokens, torch.arange(len(prompt))[None], torch.zeros_like(tokens), TAPS)
    drafter.start(1, 64, None)
    drafter.observe([prompt[:-1]], output.features_BNF, [list(range(len(prompt) - 1))])
    (tree,) = drafter.propose([prompt[-1]], [3], DecodingConfig(shape="tree", nodes=136))
    assert tree.depths.max() == 2 and len(set(zip(tree.parents.tolist(), tree.tokens.tolist()))) == len(tree)
    states_Td = head.fuse(output.features_BNF)[0, : len(prompt) - 1]
    for node in range(0, len(tree), 9):
        path = [node]
        while tree.parents[path[0]] >= 0:
            path.insert(0, int(tree.parents[path[0]]))
        states, following, total = list(states_Td), list(prompt[1:]), 0.0
        for step in path:
            positions = torch.arange(len(states))[None]
            hidden, out, _ = head(target.embed(torch.tensor([following])), torch.stack(states)[None], positions)
            total += float(torch.log_softmax(head.lm_head(hidden[0, -1]), dim=-1)[tree.tokens[step]])
            states.append(out[0, -1])
            following.append(int(tree.tokens[step]))
        assert abs(total - tree.scores[node]) < 1e-3


def test_a_draft_with_another_embedding_than_the_targets_is_refused(tmp_path: Path) -> None:
    target = tiny_target("llama")
    draft = block(mask="bidirectional", layout="anchor", parent="vanilla", parent_rank=8)
    other = {name: tensor + 0.01 * torch.randn(tensor.shape) for name, tensor in weights(target).items()}
    export_forms(draft, ["deepspec"], tmp_path, target_facts(target), lambda: other)
    with pytest.raises(UserError, match=r"carries its own embed_tokens\.weight, which differs"):
        import_draft(tmp_path / "deepspec", target)
    rounded = {name: tensor.bfloat16().float() for name, tensor in weights(target).items()}
    export_forms(draft, ["deepspec"], tmp_path, target_facts(target), lambda: rounded)
    assert drafter_of(import_draft(tmp_path / "deepspec", target), target).taps == tuple(TAPS)
