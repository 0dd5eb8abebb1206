"""Edits of answers: they change what they say and nothing else, and nothing is made up where a text has no place."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from jetspec_train.config import NegativesConfig
from jetspec_train.data.negatives.answer_text import LOST, AnswerText, CannotBuild, Edit
from jetspec_train.data.negatives.candidates import attempts_of, cut_at_end, end_token, place_edit, shares_of
from jetspec_train.data.negatives.kinds import builder_of, numeric, repeat, stale, subword, swap, truncate
from jetspec_train.data.negatives.rows import SYNTHETIC, difficulty_of

END = 0
PROMPT = "Tom has 12 apples and pays 5 dollars. How many does Ann get?"
ANSWERS = [
    "First, Tom gives Ann 7 apples, so 12 - 7 = 5 apples are left. Then Ann pays Tom 30 dollars in 2 hours.",
    "def add_two(first_value, other):\n    return first_value + other\n\nIt adds 3 and 14.",
    "Ünïcödé naïve café: größer ist 3.5 km — 日本語のテキスト 42 and so on, und so weiter.",
    "The list is a list. The list is short. The list has three words and the list ends.",
]


class Bytes:
    """Byte-level BPE in the way of chat models, without any model library."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

        self.backend = Tokenizer(models.BPE())
        self.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        self.backend.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=420,
            special_tokens=["<|end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        self.backend.train_from_iterator([PROMPT, *ANSWERS, "apples and apples, words and words"], trainer)

    def encode(self, text: str) -> list[int]:
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        return self.backend.decode(list(tokens), skip_special_tokens=skip_special_tokens)


@functools.cache
def codec() -> Bytes:
    return Bytes()


@functools.cache
def answer_of(text: str, ended: bool = True) -> AnswerText:
    prompt = codec().encode(PROMPT + "\n")
    return AnswerText([*prompt, *codec().encode(text), *([END] if ended else [])], len(prompt), codec())


def applied(answer: AnswerText, edit: Edit) -> list[int]:
    return [*answer.tokens[: edit.position], *edit.tokens, *answer.tokens[edit.resume :]]


def edits(builder: Any, text: str, tries: int = 60) -> list[Edit]:
    answer = answer_of(text)
    return [builder(answer, np.random.default_rng(seed)) for seed in range(tries)]


@pytest.mark.parametrize("text", ANSWERS)
def test_the_pieces_are_the_text(text):
    answer = answer_of(text)
    assert len(answer.pieces) == len(answer.tokens) - answer.first and answer.pieces[-1] == LOST
    shown = answer.text
    assert re.fullmatch(
        "".join(f"(?:{re.escape(part)}).*?" for part in re.split(f"{LOST}+", shown) if part), text, re.S
    )
    if text.isascii():
        assert shown == text + LOST


@pytest.mark.parametrize("text", ANSWERS[:3])
def test_a_number_is_changed_and_the_rest_is_what_the_tokenizer_would_write(text):
    variants = set()
    for edit in edits(numeric, text):
        edited = applied(answer_of(text), edit)
        new = codec().decode(edited[answer_of(text).first :])
        variants.add(edit.variant)
        assert new != text
        assert codec().encode(new) == edited[answer_of(text).first : -1]  # no odd tokenisation to recognise it by
        assert edit.position > answer_of(text).first
        if edit.variant == "digit":
            assert re.sub(r"\d", "0", new) == re.sub(r"\d", "0", text)
        elif edit.variant == "sign":
            assert new.replace("-", "") == text.replace("-", "")
        elif edit.variant == "operator":
            assert re.sub("[-+*/=<>]", "+", new) == re.sub("[-+*/=<>]", "+", text)
        else:
            assert edit.variant == "unit"
    assert "digit" in variants


def test_all_variants_are_found_where_the_text_offers_them():
    assert {edit.variant for edit in edits(numeric, ANSWERS[0])} == {"digit", "sign", "operator", "unit"}
    assert {edit.variant for edit in edits(swap, ANSWERS[0])} == {"tokens", "name", "number"}
    assert {edit.variant for edit in edits(swap, ANSWERS[1])} == {"tokens", "identifier", "number"}


def test_a_swapped_entity_comes_from_the_document_and_swapped_tokens_are_the_same_tokens():
    document = PROMPT + ANSWERS[0]
    for edit in edits(swap, ANSWERS[0]):
        answer = answer_of(ANSWERS[0])
        edited = applied(answer, edit)
        if edit.variant == "tokens":
            assert sorted(edited) == sorted(answer.tokens) and edited != answer.tokens
        else:
            new = codec().decode(edited[answer.first :])
            assert new != ANSWERS[0] and set(re.findall(r"\w+", new)) <= set(re.findall(r"\w+", document))


@pytest.mark.parametrize("text", ANSWERS)
def test_another_tokenisation_is_the_same_text(text):
    for edit in edits(subword, text):
        answer = answer_of(text)
        edited = applied(answer, edit)
        assert edited != answer.tokens and codec().decode(edited) == codec().decode(answer.tokens)
        assert answer.tokens[edit.position] != edit.tokens[0]


def test_a_loop_repeats_the_last_tokens():
    for edit in edits(repeat, ANSWERS[0]):
        length = int(edit.variant.split()[-1])
        before = answer_of(ANSWERS[0]).tokens[edit.position - length : edit.position]
        assert edit.tokens[: 2 * length] == before * 2 and 1 <= length <= 6


def test_a_stale_continuation_followed_the_same_words_before():
    for edit in edits(stale, ANSWERS[3]):
        tokens = answer_of(ANSWERS[3]).tokens
        context = tokens[edit.position - 2 : edit.position]
        earlier = [
            place
            for place in range(2, edit.position)
            if tokens[place - 2 : place] == context and tokens[place] == edit.tokens[0]
        ]
        assert earlier and edit.tokens[0] != tokens[edit.position]
    with pytest.raises(CannotBuild, match="nothing_repeats"):
        stale(AnswerText([1, 2, 3, 4, 5, 6, 7], 2, codec()), np.random.default_rng(0))


def test_ends_come_too_early_or_are_missed():
    seen = set()
    for seed in range(40):
        answer = answer_of(ANSWERS[0])
        edit = truncate(answer, np.random.default_rng(seed), END)
        seen.add(edit.variant)
        if edit.variant == "early end":
            assert edit.tokens == [END] and answer.first < edit.position < len(answer.tokens) - 1
        else:
            assert edit.position == len(answer.tokens) - 1 and edit.tokens[0] == answer.tokens[answer.first]
    assert seen == {"early end", "missed end"}
    cut = answer_of(ANSWERS[0], ended=False)  # no end that could be missed
    assert {truncate(cut, np.random.default_rng(seed), END).variant for seed in range(20)} == {"early end"}


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("numeric", "No digits here at all, just words.", "no_number"),
        ("truncate", "a", "too_short"),
        ("swap", "", "too_short"),
        ("repeat", "", "too_short"),
        ("subword", "!", "no_other_tokens"),
    ],
)
def test_what_a_text_does_not_offer_is_not_made_up(kind, text, reason):
    with pytest.raises(CannotBuild, match=reason):
        builder_of(kind, END)(answer_of(text), np.random.default_rng(0))


@pytest.mark.parametrize("kind", SYNTHETIC)
def test_a_path_is_right_up_to_its_edit_and_fits_a_block(kind):
    depths = set()
    for seed in range(200):
        random = np.random.default_rng(seed)
        answer = answer_of(ANSWERS[seed % len(ANSWERS)])
        try:
            edit = builder_of(kind, END)(answer, random)
            path = place_edit(answer.tokens, answer.first, edit, block=6, ends=[END], random=random)
        except CannotBuild:
            continue
        depth = edit.position - path.anchor - 1
        depths.add(depth)
        assert path.anchor >= answer.first and 0 <= depth < 6 and 1 <= len(path.tokens) <= 6
        edited = applied(answer, edit)
        assert path.tokens == edited[path.anchor + 1 : path.anchor + 1 + len(path.tokens)]
        assert path.tokens[:depth] == answer.tokens[path.anchor + 1 : edit.position]
        assert END not in path.tokens[:-1]
        if len(edit.tokens) <= 6 and END not in path.tokens:
            assert depth + len(edit.tokens) <= 6
    assert len(depths) >= 4  # depth says nothing about correctness


def test_attempts_follow_the_mix_and_nothing_else():
    cfg = NegativesConfig(per_sample=10)
    ids = [f"{number:032x}" for number in range(400)]
    for drafted, shares in ((True, {"on_policy": 0.7, "near_miss": 0.2}), (False, {"near_miss": 2 / 3})):
        kinds = [attempts_of(cfg, sample_id, drafted) for sample_id in ids]
        assert kinds == [attempts_of(cfg, sample_id, drafted) for sample_id in ids]
        assert all(len(of_sample) == 10 for of_sample in kinds)
        for kind, share in shares.items():
            counts = [of_sample.count(kind) for of_sample in kinds]
            assert np.mean(counts) == pytest.approx(10 * share, abs=0.15)
            assert max(counts) - min(counts) <= 1
        synthetic = [kind for of_sample in kinds for kind in of_sample if kind in SYNTHETIC]
        assert all(synthetic.count(kind) == pytest.approx(len(synthetic) / 6, rel=0.3) for kind in SYNTHETIC)
        assert drafted or not any("on_policy" in of_sample for of_sample in kinds)
    assert shares_of(NegativesConfig(kinds=["swap", "stale"]), True) == {"synthetic": 1.0}
    assert shares_of(NegativesConfig(kinds=["on_policy"]), False) == {}


def test_small_helpers():
    assert cut_at_end([3, 1, 2, 1], [1]) == [3, 1] and cut_at_end([3, 2], [1]) == [3, 2]
    assert end_token({5: 3, 7: 9, 8: 100}, [5, 7]) == 7 and end_token({8: 100}, [5, 7]) == 5
    assert [difficulty_of(m) for m in (0.0, 0.99, 1.0, 2.9, 3.0, 50.0)] == [
        *("hard", "hard", "medium", "medium", "easy", "easy")
    ]
