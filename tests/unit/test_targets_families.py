"""The target's forward equals transformers' own forward, for every family and every kind of attention.

Tolerances are fp32 rounding. Sequences are longer than the sliding window of the families that have one.
"""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from jetspec_train.targets.masks import TreeMask
from tests.tiny import FURTHER_KINDS, KINDS, WINDOW, tiny_model, tiny_prompts, tiny_target

CLOSE = dict(atol=2e-4, rtol=2e-4)
every_kind = pytest.mark.parametrize("kind", KINDS + FURTHER_KINDS)


def oracle_logits(kind: str, tokens: list[int]) -> torch.Tensor:
    """[T, V] of an untouched transformers model with its own eager attention and its own masks."""
    if kind not in _ORACLES:
        model = tiny_model(kind)
        model.set_attn_implementation("eager")
        _ORACLES[kind] = model
    with torch.no_grad():
        return _ORACLES[kind](input_ids=torch.tensor([tokens]), use_cache=False).logits[0]


_ORACLES: dict[str, torch.nn.Module] = {}


def random_tree(nodes: int, seed: int) -> list[int]:
    """Parents of a random tree of several roots; every node's parent precedes it."""
    rng = random.Random(seed)
    return [-1 if node == 0 or rng.random() < 0.15 else rng.randrange(node) for node in range(nodes)]


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@every_kind
def test_taps_and_label_logits_are_those_of_the_model(kind: str) -> None:
    target = tiny_target(kind)
    (prompt,) = tiny_prompts(1, 3 * WINDOW, 3 * WINDOW)
    tokens_BN = torch.tensor([prompt])
    with torch.no_grad():
        theirs = target.model(input_ids=tokens_BN, use_cache=False, output_hidden_states=True)
    taps = tuple(range(target.num_layers - 1))[::-1]  # the last entry of hidden_states has the final norm in it
    ours = target.forward(tokens_BN, cache=target.new_cache(1, 8), taps=taps)
    expected = torch.cat([theirs.hidden_states[layer + 1] for layer in taps], dim=-1)
    torch.testing.assert_close(ours.features_BNF, expected, **CLOSE)
    torch.testing.assert_close(target.logits(ours.hidden_BND)[0], oracle_logits(kind, prompt), **CLOSE)
    if kind != "gpt2":  # its first layer sees positions as well, which no embedding of a token alone can hold
        torch.testing.assert_close(target.embed(tokens_BN), theirs.hidden_states[0], **CLOSE)


@every_kind
@pytest.mark.parametrize("prefix", [0, 5, WINDOW + 9])
def test_a_tree_forward_equals_one_chain_per_path(kind: str, prefix: int) -> None:
    target = tiny_target(kind)
    parents = random_tree(14, seed=prefix)
    tokens = tiny_prompts(1, 14, 14, seed=1)[0]
    committed = tiny_prompts(1, prefix, prefix, seed=2)[0] if prefix else []
    cache = target.new_cache(1, 4)
    if committed:
        target.forward(torch.tensor([committed]), cache=cache)
        cache.commit_first([prefix])
    output = target.forward(torch.tensor([tokens]), cache=cache, mask=TreeMask(np.array([parents])))
    logits_NV = target.logits(output.hidden_BND)[0]
    leaves = set(range(14)) - set(parents)
    for leaf in leaves:
        path = path_to(parents, leaf)
        expected = oracle_logits(kind, committed + [tokens[node] for node in path])[-len(path) :]
        torch.testing.assert_close(logits_NV[path], expected, **CLOSE)


@every_kind
def test_after_committing_a_path_decoding_goes_on_as_if_it_had_been_a_chain(kind: str) -> None:
    """Several rounds over a ragged batch; each row accepts a path of its own, past the window's length."""
    target = tiny_target(kind)
    prompts = tiny_prompts(3, 3, 11, seed=3)
    lengths = [len(prompt) for prompt in prompts]
    cache = target.new_cache(3, 4)
    padded = torch.zeros(3, max(lengths), dtype=torch.long)
    for row, prompt in enumerate(prompts):
        padded[row, : len(prompt)] = torch.tensor(prompt)
    target.forward(padded, cache=cache)
    cache.commit_first(lengths)
    rng = random.Random(4)
    texts = [list(prompt) for prompt in prompts]
    for round_ in range(4):
        parents = [random_tree(9, seed=10 * round_ + row) for row in range(3)]
        tokens = tiny_prompts(3, 9, 9, seed=20 + round_)
        output = target.forward(torch.tensor(tokens), cache=cache, mask=TreeMask(np.array(parents)))
        kept = [path_to(parents[row], rng.randrange(9)) for row in range(3)]
        logits_BNV = target.logits(output.hidden_BND)
        for row, path in enumerate(kept):
            texts[row] += [tokens[row][node] for node in path]
            expected = oracle_logits(kind, texts[row])[-len(path) :]
            torch.testing.assert_close(logits_BNV[row, path], expected, **CLOSE)
        cache.commit(kept)
        assert cache.lengths == [len(text) for text in texts]
    assert max(cache.lengths) > WINDOW


@every_kind
def test_packed_documents_equal_each_document_alone(kind: str) -> None:
    target = tiny_target(kind)
    documents = tiny_prompts(3, WINDOW - 4, WINDOW + 8, seed=5)
    width = sum(map(len, documents)) + 3
    tokens = torch.zeros(1, width, dtype=torch.long)
    positions, ids = torch.zeros_like(tokens), torch.full_like(tokens, -1)
    spans, at = [], 0
    for index, document in enumerate(documents):
        span = slice(at, at + len(document))
        tokens[0, span], ids[0, span] = torch.tensor(document), index
        positions[0, span] = torch.arange(len(document))
        spans.append(span)
        at = span.stop
    output = target.forward_packed(tokens, positions, ids, taps=(0,))
    logits_TV = target.logits(output.hidden_BND)[0]
    assert torch.isfinite(logits_TV).all()
    for document, span in zip(documents, spans):
        torch.testing.assert_close(logits_TV[span], oracle_logits(kind, document), **CLOSE)
        alone = target.forward(torch.tensor([document]), cache=target.new_cache(1, 1), taps=(0,))
        torch.testing.assert_close(output.features_BNF[0, span], alone.features_BNF[0], **CLOSE)


@every_kind
def test_transformers_own_generate_still_works_on_a_loaded_target(kind: str) -> None:
    """Baselines use the same weights; outside of our forwards the attention must behave as usual."""
    target = tiny_target(kind)
    (prompt,) = tiny_prompts(1, WINDOW + 3, WINDOW + 3, seed=6)
    made = target.model.generate(
        torch.tensor([prompt]), max_new_tokens=8, min_new_tokens=8, do_sample=False, pad_token_id=0
    )[0].tolist()
    expected = list(prompt)
    for _ in range(8):
        logits_V = oracle_logits(kind, expected)[-1]
        logits_V[list(target.eos_ids)] = float("-inf")  # what min_new_tokens does
        expected.append(int(logits_V.argmax()))
    assert made == expected


def test_the_window_matters_in_these_tests() -> None:
    """Guards the tests above: a mask without the window must give other logits."""
    (prompt,) = tiny_prompts(1, 3 * WINDOW, 3 * WINDOW)
    model = tiny_model("mistral")
    with torch.no_grad():
        limited = model(input_ids=torch.tensor([prompt])).logits
        model.config.sliding_window = None
        unlimited = model(input_ids=torch.tensor([prompt])).logits
    assert (limited - unlimited)[0, -1].abs().max() > 0.1
    assert tiny_target("mistral").windows == [WINDOW] * 3
    assert tiny_target("gemma3").windows == [WINDOW, WINDOW, None, WINDOW]
    assert tiny_target("llama").windows == [None] * 3
