"""The judge behind its cache says what a plain forward over prefix and path says; replayed rounds are decoding's."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from jetspec_train.config import DecodingConfig
from jetspec_train.data.negatives.candidates import Candidate
from jetspec_train.data.negatives.judging import Judgement, judge, read_group
from jetspec_train.data.negatives.replay import replay_rounds
from jetspec_train.data.negatives.rows import difficulty_of
from jetspec_train.data.negatives.work import near_miss_place
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.decoding.stubs import EchoDrafter, RandomDrafter
from tests.tiny import tiny_prompts, tiny_target
from tests.unit.test_decoding_decoder import random_head


def plain_logprobs(target, prefix: list[int], path: list[int]) -> torch.Tensor:
    """Log-probabilities at every token of the path [len(path), V], by one forward over everything."""
    tokens = torch.tensor([[*prefix, *path]])
    hidden = target.forward_packed(tokens, torch.arange(tokens.shape[1])[None], torch.zeros_like(tokens)).hidden_BND
    return target.logits(hidden)[0, len(prefix) - 1 : -1].float().log_softmax(-1)


def check_verdict(target, prefix: list[int], path: list[int], verdict: Judgement) -> None:
    """Every field of a verdict, from a plain forward."""
    logprobs = plain_logprobs(target, prefix, path)
    right = (logprobs.argmax(-1) == torch.tensor(path)).tolist()
    judged = right.index(False) + 1 if False in right else len(path)
    assert verdict.labels == right[:judged]
    assert verdict.first_wrong == (judged - 1 if False in right else None)
    assert verdict.is_positive == (False not in right)
    own = logprobs[range(judged), path[:judged]]
    torch.testing.assert_close(torch.tensor(verdict.logprobs), own, atol=2e-4, rtol=1e-3)
    two = logprobs.topk(2, dim=-1)
    place = verdict.first_wrong
    if place is None:
        place = int((two.values[:, 0] - two.values[:, 1]).argmin())
        assert verdict.wrong_token == two.indices[place, 1]
    else:
        assert verdict.wrong_token == path[place]
    assert verdict.place == place and verdict.right_token == two.indices[place, 0]
    assert verdict.p_right == pytest.approx(float(two.values[place, 0].exp()), rel=1e-3)
    assert verdict.p_wrong == pytest.approx(float(logprobs[place, verdict.wrong_token].exp()), rel=1e-3)
    assert verdict.margin == pytest.approx(np.log(verdict.p_right / verdict.p_wrong), abs=1e-3)
    assert verdict.difficulty == difficulty_of(verdict.margin)


@pytest.mark.parametrize("kind", ["llama", "gemma2"])  # gemma2: sliding windows of 12 tokens, which the texts pass
def test_verdicts_are_those_of_a_plain_forward(kind):
    target = tiny_target(kind)
    texts = tiny_prompts(4, shortest=14, longest=30, seed=5)
    own = [generation.tokens for generation in Decoder(target).generate(texts, max_new_tokens=10)]
    texts = [[*text, *answer] for text, answer in zip(texts, own)]
    random = np.random.default_rng(0)
    paths: list[list[Candidate]] = []
    for text, answer in zip(texts, own):
        first = len(text) - len(answer)
        of_row = [Candidate(first + 1, text[first + 2 : first + 6], "right")]
        of_row.append(Candidate(first + 1, [*text[first + 2 : first + 4], 17, 18], "two right"))
        of_row += [
            Candidate(int(random.integers(4, len(text) - 1)), random.integers(4, 300, size=size).tolist(), "random")
            for size in random.integers(1, 6, size=len(paths))  # rows have different numbers of paths, or none more
        ]
        paths.append([of_row[i] for i in random.permutation(len(of_row))])
    verdicts = judge(target, read_group(target, texts), paths)
    assert [len(of_row) for of_row in verdicts] == [len(of_row) for of_row in paths]
    for text, of_row, judged in zip(texts, paths, verdicts):
        for path, verdict in zip(of_row, judged):
            check_verdict(target, text[: path.anchor + 1], path.tokens, verdict)
    by_variant = {path.variant: v for of_row, judged in zip(paths, verdicts) for path, v in zip(of_row, judged)}
    assert by_variant["right"].is_positive and by_variant["two right"].first_wrong == 2


class Recording:
    """Any drafter, with what it proposed: (anchor, tokens), for one row."""

    def __init__(self, drafter) -> None:
        self.drafter, self.proposed = drafter, []

    def __getattr__(self, name):
        return getattr(self.drafter, name)

    def propose(self, anchors, limits, settings, *rest, **named):
        trees = self.drafter.propose(anchors, limits, settings, *rest, **named)
        self.proposed.append((anchors[0], trees[0].tokens.tolist()))
        return trees


def test_replayed_rounds_are_those_of_decoding():
    target = tiny_target("llama")
    drafter = BlockDrafter(random_head(target), target)
    settings = DecodingConfig(shape="chain", nodes=6)
    prompts = tiny_prompts(3, seed=2)
    texts, rounds_of = [], []
    for prompt in prompts:
        recorder = Recording(drafter)
        answer = Decoder(target, recorder, settings).generate([prompt], max_new_tokens=24)[0].tokens
        texts.append([*prompt, *answer])
        rounds_of.append(recorder.proposed)
    group = read_group(target, texts, drafter.taps)
    found = replay_rounds(target, drafter, group, [len(prompt) for prompt in prompts], [99, 99, 99], 6)
    for text, decoded, replayed in zip(texts, rounds_of, found):
        assert abs(len(decoded) - len(replayed)) <= 1  # the last round of decoding drafts one slot less
        for (anchor, tokens), path in list(zip(decoded, replayed))[:-2]:
            assert text[path.anchor] == anchor and tokens[: len(path.tokens)] == path.tokens
            follows = text[path.anchor + 1 : path.anchor + 1 + len(path.tokens)]
            assert path.tokens[:-1] == follows[:-1]
            assert path.tokens != follows or path.tokens == tokens  # cut at the first departure, else whole


def test_replay_follows_the_text_whatever_is_drafted():
    target = tiny_target("llama")
    texts = tiny_prompts(5, shortest=12, longest=30, seed=8)
    starts = [4, 5, len(texts[2]) - 1, 6, 7]  # the third has nothing left to draft
    group = read_group(target, texts)
    echo = EchoDrafter([text[2:] for text in texts], [2] * 5)
    for drafter, block in ((echo, 4), (RandomDrafter(target.vocab_size, seed=1), 3)):
        found = replay_rounds(target, drafter, group, starts, [3, 2, 3, 0, 99], block)
        assert [len(paths) for paths in found][2:4] == [0, 0] and len(found[0]) <= 3 and len(found[1]) <= 2
        for text, start, paths in zip(texts, starts, found):
            anchor = start
            for path in paths:
                assert path.anchor == anchor and 1 <= len(path.tokens) <= block
                accepted = int(path.variant.split()[-1])
                assert path.tokens[:accepted] == text[anchor + 1 : anchor + 1 + accepted]
                anchor += accepted + 1
    assert sum(len(path.tokens) for path in replay_rounds(target, echo, group, starts, [9] * 5, 4)[0]) > 0


def test_a_judged_group_does_not_depend_on_its_company():
    target = tiny_target("llama")
    texts = tiny_prompts(3, shortest=10, longest=25, seed=4)
    paths = [[Candidate(6, [5, 6, 7], "a"), Candidate(8, [9], "b")] for _ in texts]
    together = judge(target, read_group(target, texts), paths)
    for text, of_row, verdicts in zip(texts, paths, together):
        alone = judge(target, read_group(target, [text]), [of_row])[0]
        for one, other in zip(alone, verdicts):
            exact, noisy = ("labels", "first_wrong", "place", "right_token", "wrong_token"), ("logprobs", "margin")
            a, b = dataclasses.asdict(one), dataclasses.asdict(other)
            assert [a[name] for name in exact] == [b[name] for name in exact]
            assert all(a[name] == pytest.approx(b[name], abs=1e-3) for name in noisy)


def test_near_misses_of_every_difficulty_are_as_likely_where_the_text_has_them():
    random = np.random.default_rng(0)
    ranks = np.log([[0.5, 0.3, 0.1, 0.05, 0.01], [0.9, 0.01, 0.005, 0.001, 0.0001]])
    drawn = [near_miss_place(ranks, random) for _ in range(900)]
    found = [difficulty_of(float(ranks[place, 0] - ranks[place, rank - 1])) for place, rank in drawn]
    assert all(2 <= rank <= 5 for _, rank in drawn)
    assert all(found.count(name) == pytest.approx(300, abs=60) for name in ("hard", "medium", "easy"))
    # nothing but easy places: the hardest of them, or any where an easy one was wanted
    easy = np.log([[0.99, 1e-3, 1e-4, 1e-5, 1e-6], [0.9, 0.01, 1e-3, 1e-4, 1e-5]])
    assert [near_miss_place(easy, random) for _ in range(60)].count((1, 2)) > 30
