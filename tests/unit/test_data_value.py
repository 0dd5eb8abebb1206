"""Laws of the value of samples: signals, near-duplicates, and a choice that never exceeds its limits."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_train.config_checks import SIGNALS as CHECKED_SIGNALS
from jetspec_train.data.duplicates import DuplicateIndex
from jetspec_train.data.value import SIGNALS, NgramDraft, choose, ranks, repetition, score, signals_of


def test_the_configuration_knows_the_same_signals() -> None:
    assert CHECKED_SIGNALS == SIGNALS


def test_the_ngram_draft_predicts_what_repeats_and_not_what_occurs_once() -> None:
    draft = NgramDraft(vocabulary=50)
    frequent, rare = np.array([1, 2, 3, 4, 5]), np.array([1, 2, 30, 31, 32])
    for _ in range(20):
        draft.add(frequent, 2)
    draft.add(rare, 2)
    assert draft.log_probabilities(frequent, 2).mean() > np.log(0.5)
    # The rare sample's own tokens are taken out of the counts: nothing else in the data has them.
    assert draft.log_probabilities(rare, 2).max() < np.log(0.05)


def test_the_ngram_draft_gives_probabilities() -> None:
    """Over all next tokens of one context they sum to at most one, and to nearly one in a large sample."""
    draft = NgramDraft(vocabulary=8)
    generator = np.random.default_rng(0)
    text = generator.integers(0, 8, 4000)
    draft.add(text, 1)
    chances = []
    for token in range(8):
        trial = np.array([text[10], text[11], token])
        draft.add(trial, 2)  # the count that log_probabilities takes out again
        chances.append(float(np.exp(draft.log_probabilities(trial, 2)[0])))
    assert sum(chances) == pytest.approx(1.0, abs=0.05)


def test_repetition_is_zero_without_repeats_and_near_one_in_a_loop() -> None:
    assert repetition(np.arange(100)) == 0.0
    assert repetition(np.tile([1, 2], 100)) > 0.95
    assert repetition(np.array([1, 1])) == 0.0


def test_signals_see_what_their_names_say() -> None:
    draft = NgramDraft(vocabulary=10)
    tokens = np.array([1, 2, 3, 4])
    draft.add(tokens, 2)
    found = signals_of(tokens, 2, np.log([0.5, 0.25]), np.array([0.1, 1.0]), np.array([0.0, 100.0]), draft, (0.5, 3.0))
    assert found["tokens"] == 2
    assert found["uncertain"] == 0.5
    assert found["flatness"] == pytest.approx(0.5)
    assert found["entropy"] == pytest.approx(0.55)
    assert found["gap"] > 0


@given(
    st.lists(st.tuples(st.integers(1, 40), st.sampled_from("ab"), st.integers(0, 5)), min_size=1, max_size=40),
    st.integers(0, 400),
    st.floats(0, 1),
)
def test_a_choice_respects_budget_and_quota_and_prefers_higher_scores(
    rows: list[tuple[int, str, int]], limit: int, share: float
) -> None:
    tokens, domains, scores = (np.array(column) for column in zip(*rows))
    keys = np.array([f"{i:03d}" for i in range(len(rows))])
    fates = choose(scores.astype(float), tokens, domains, keys, limit, {"a": share})
    kept = fates == "kept"
    assert tokens[kept].sum() <= limit
    assert tokens[kept & (domains == "a")].sum() <= share * limit + 1e-9
    # Of two samples of one domain and size, the better one is never dropped for the worse.
    for better in range(len(rows)):
        for worse in range(len(rows)):
            same = tokens[better] == tokens[worse] and domains[better] == domains[worse]
            if same and scores[better] > scores[worse] and kept[worse]:
                assert kept[better]


def test_the_score_is_the_stated_function_of_ranks() -> None:
    signals = {"gap": np.array([1.0, 5.0, 5.0]), "entropy": np.array([3.0, 2.0, 1.0])}
    np.testing.assert_allclose(ranks(signals["gap"]), [1 / 3, 2.5 / 3, 2.5 / 3])
    np.testing.assert_allclose(
        score(signals, {"gap": 2.0, "entropy": -1.0}), 2 * ranks(signals["gap"]) - ranks(signals["entropy"])
    )
    assert not score(signals, {}).any()


def test_near_duplicates_are_found_and_other_texts_are_not(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    words = [f"word{i}" for i in range(3000)]
    index = DuplicateIndex(tmp_path / "index.sqlite", 0.8)
    texts = [" ".join(generator.choice(words, 120)) for _ in range(60)]
    assert [index.find(f"first{i}", text) for i, text in enumerate(texts)] == [None] * 60
    nearly = [text + " end" for text in texts]
    found = [index.find(f"second{i}", text) for i, text in enumerate(nearly)]
    right = sum(name == f"first{i}" for i, name in enumerate(found))
    assert right >= 57  # a Jaccard similarity of 0.99 shares a band with probability 1 - 2e-9
    assert all(name in (None, f"first{i}") for i, name in enumerate(found))
    index.close()
    assert not (tmp_path / "index.sqlite").exists()
