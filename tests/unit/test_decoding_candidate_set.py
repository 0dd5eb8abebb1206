"""Laws of a growing candidate set: it stays a tree, ancestors stay, and survivals are products along the paths."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_train.decoding.candidate_set import CandidateSet, prune, sending_order
from jetspec_train.decoding.shortlist import make_shortlist
from jetspec_train.decoding.stubs import random_tree
from jetspec_train.decoding.tree import build_paths, build_tree, chain_of, empty_tree


def random_set(seed: int, nodes: int = 14, slots: int = 4) -> CandidateSet:
    random = np.random.default_rng(seed)
    tree = random_tree(random, 50, nodes, slots)
    each = random.random(len(tree))
    return CandidateSet.of(tree, SimpleNamespace(conditional=each, logits=each, confidence_logits=None))


def paths(candidates: CandidateSet) -> list[tuple[int, ...]]:
    return [tuple(int(candidates.tokens[n]) for n in candidates.path_to(node)) for node in range(len(candidates))]


def is_tree(candidates: CandidateSet) -> bool:
    index = np.arange(len(candidates))
    depths = np.where(candidates.parents >= 0, candidates.depths[candidates.parents] + 1, 0) if len(index) else index
    return bool((candidates.parents < index).all() and (candidates.depths == depths).all())


@given(st.integers(0, 10_000))
def test_survival_is_the_product_along_the_path(seed):
    candidates = random_set(seed)
    for node, survival in enumerate(candidates.survival()):
        assert survival == pytest.approx(np.prod(candidates.conditional[candidates.path_to(node)]))


@given(st.integers(0, 10_000), st.floats(0, 1), st.integers(0, 14))
def test_pruning_and_any_beginning_of_the_sending_order_leave_a_tree(seed, least, count):
    candidates = random_set(seed)
    survival = candidates.survival()
    deepest = int(candidates.depths.max(initial=-1))
    pending = candidates.path_to(int(np.flatnonzero(candidates.depths == deepest)[0])) if len(candidates) else []
    order = sending_order(candidates, survival, pending)
    assert order[: len(pending)].tolist() == pending
    kept = prune(candidates, survival, least, pending)
    assert kept[pending].all() and kept[survival >= least].all()
    for chosen in (order[:count], order[kept[order]], order[kept[order]][:count]):
        assert is_tree(candidates.take(chosen))
    # nothing but what was asked for goes: a node stays if it, or a descendant that stays, has a reason to
    reasons = (survival >= least) | np.isin(np.arange(len(candidates)), pending)
    for node in np.flatnonzero(kept):
        assert any(node in candidates.path_to(int(other)) for other in np.flatnonzero(reasons))


@given(st.integers(0, 10_000), st.integers(0, 10_000))
def test_a_graft_replaces_what_was_below_and_keeps_the_rest(seed, other):
    base, branch = random_set(seed), random_set(other)
    if not len(base):
        return
    at = seed % len(base)
    merged, place = base.graft(at, branch)
    assert is_tree(merged)
    below = [node for node in range(len(base)) if at in base.path_to(node)[:-1]]
    assert set(np.flatnonzero(place < 0)) == set(below)
    stem = paths(base)[at]
    old = {path for node, path in enumerate(paths(base)) if node not in below}
    assert set(paths(merged)) == old | {stem + path for path in paths(branch)}
    for node in range(len(base)):
        if place[node] >= 0:
            assert merged.conditional[place[node]] == base.conditional[node]


def test_a_graft_at_the_anchor_is_the_new_draft():
    merged, place = random_set(1).graft(-1, random_set(2))
    assert paths(merged) == paths(random_set(2)) and (place == -1).all()


def test_a_cached_path_adds_only_what_is_missing():
    base = CandidateSet.of(chain_of([3, 4, 5], np.log([0.9, 0.81, 0.6])))
    longer = base.with_path([3, 4, 5, 6, 7], 0.5)
    assert paths(longer)[-1] == (3, 4, 5, 6, 7) and longer.cached.tolist() == [False] * 3 + [True] * 2
    assert longer.survival()[-1] == pytest.approx(0.6 * 0.25)
    assert base.with_path([3, 4], 0.5) is base
    branching = base.with_path([3, 9, 5], 0.5)
    assert paths(branching)[3:] == [(3, 9), (3, 9, 5)] and is_tree(branching)
    alone = CandidateSet.of(empty_tree()).with_path([1, 2], 0.25)
    assert paths(alone) == [(1,), (1, 2)] and np.isnan(alone.logprobs).all()


def test_the_stage_below_is_the_best_path_of_its_length():
    base = CandidateSet.of(chain_of([3, 4, 5], np.log([0.9, 0.81, 0.6]))).with_path([8, 9, 9, 9], 0.99)
    assert base.stage_below(-1, 3) == [0, 1, 2]
    assert base.stage_below(0, 2) == [1, 2] and base.stage_below(2, 1) == []
    assert base.stage_below(-1, 4) == []  # only the cache goes so deep, and nobody has judged it
    for seed in range(50):
        candidates = random_set(seed)
        found = candidates.stage_below(-1, 3)
        ends = np.flatnonzero(candidates.depths == 2)
        assert bool(found) == bool(len(ends))
        if found:
            assert candidates.survival()[found[-1]] == candidates.survival()[ends].max()
            assert candidates.path_to(found[-1]) == found


def test_the_best_chain_has_the_greatest_expected_length():
    base = CandidateSet.of(chain_of([3, 4, 5], np.log([0.5, 0.25, 0.2]))).with_path([8, 9], 0.6)
    assert base.best_chain(base.survival()).tolist() == [3, 4]  # 0.6 + 0.36 against 0.5 + 0.25 + 0.2
    assert CandidateSet.of(empty_tree()).best_chain(np.zeros(0)).tolist() == []


def test_taking_a_node_without_its_parent_is_refused():
    base = CandidateSet.of(chain_of([3, 4, 5]))
    with pytest.raises(ValueError, match="without its parent"):
        base.take(np.array([1]))
    with pytest.raises(ValueError, match="without its parent"):
        base.take(np.array([1, 0]))


# ---- tries of whole paths ([S]) --------------------------------------------------------------------------------


@given(st.integers(0, 10_000), st.integers(1, 6), st.integers(1, 5), st.integers(1, 20))
def test_a_trie_holds_the_best_whole_paths(seed, wanted, slots, nodes):
    random = np.random.default_rng(seed)
    logits_KV = random.normal(size=(slots, 12)).astype(np.float32) * 2
    shortlist = make_shortlist(logits_KV, 12)
    tree = build_paths(shortlist, None, wanted, nodes)
    assert 0 < len(tree) <= nodes and (np.diff(tree.scores) <= 1e-5).all()
    candidates = CandidateSet.of(tree)
    assert is_tree(candidates)
    found = paths(candidates)
    assert len(set(found)) == len(found)
    leaves = [path for path in found if not any(other[: len(path)] == path and other != path for other in found)]
    assert {len(leaf) for leaf in leaves} == {min(slots, nodes)} and len(leaves) <= wanted
    # Without a parent term slots are independent, so that the best path takes each slot's first choice.
    assert tuple(int(row.argmax()) for row in logits_KV)[: min(slots, nodes)] in found
    log_KV = logits_KV - np.log(np.exp(logits_KV).sum(1, keepdims=True))
    for path, score in zip(found, tree.scores):
        assert score == pytest.approx(sum(log_KV[slot, token] for slot, token in enumerate(path)), abs=1e-4)


def test_the_four_best_paths_of_three_tokens_are_those_of_a_full_search():
    random = np.random.default_rng(3)
    logits_KV = random.normal(size=(3, 6)).astype(np.float32)
    log_KV = logits_KV - np.log(np.exp(logits_KV).sum(1, keepdims=True))
    every = sorted(np.ndindex(6, 6, 6), key=lambda path: -sum(log_KV[slot, token] for slot, token in enumerate(path)))
    tree = build_paths(make_shortlist(logits_KV, 6), None, 4, 100)
    found = paths(CandidateSet.of(tree))
    assert {path for path in found if len(path) == 3} == set(every[:4])
    assert len(build_tree(make_shortlist(logits_KV, 6), None, len(tree))) == len(tree)
