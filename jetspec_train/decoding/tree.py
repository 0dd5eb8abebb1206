"""Draft trees: which continuations of the anchor are sent to the target.

Shapes: K slots (depths), V vocabulary, C candidates of a slot, M successors, W parents of a depth.
The score of a node is the sum along its path of log p(token | parent, depth), with
p(. | parent u, depth k) = softmax(U_k + W2 W1[u]) (METHODS 2 and 7). The only parent of depth 0 is the anchor, known
before any tree exists, so its bias over the whole vocabulary is already in row 0 of the shortlist's logits.
This file knows nothing of models: arrays in, a Tree out. Where there is no parent term, pass ``term=None``.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from jetspec_train.decoding.shortlist import ParentTerm, Shortlist


@dataclass
class Tree:
    """Drafted nodes in descending order of score; the anchor is not a node.

    tokens [n]; parents [n]: index of the parent node, -1 for a child of the anchor, always smaller than the node's
    own index; depths [n]: 0 for a child of the anchor; scores [n]: cumulative log-probability under the draft.
    Because of the order, the first m nodes are a prefix-closed tree for every m.
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    scores: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    def first(self, nodes: int) -> Tree:
        """The tree of the best ``nodes`` nodes."""
        return Tree(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], self.scores[:nodes])

    def shallower_than(self, depth: int) -> Tree:
        """The tree without the nodes at ``depth`` or deeper (depth 0: an empty tree)."""
        return self.keep(self.depths < depth)

    def keep(self, kept: np.ndarray) -> Tree:
        """The tree of the nodes marked in ``kept`` (bool [n]). Raises ValueError if a kept node's parent is not."""
        if kept.all():
            return self
        parents = self.parents[kept]
        if not kept[parents[parents >= 0]].all():
            raise ValueError("a kept node's parent is not kept: the result would not be a tree")
        renumbered = np.append(np.cumsum(kept) - 1, -1)
        return Tree(self.tokens[kept], renumbered[parents], self.depths[kept], self.scores[kept])


def empty_tree() -> Tree:
    """No drafted node: the round is one step of plain decoding."""
    nothing = np.zeros(0, dtype=np.int64)
    return Tree(nothing, nothing, nothing, np.zeros(0, dtype=np.float32))


def chain_of(tokens: list[int] | np.ndarray, scores: np.ndarray | None = None) -> Tree:
    """The tree that is one path."""
    count = len(tokens)
    path = np.arange(count, dtype=np.int64)
    if scores is None:
        scores = np.zeros(count, dtype=np.float32)
    return Tree(np.asarray(tokens, dtype=np.int64), path - 1, path, scores)


def transitions(
    shortlist: Shortlist, term: ParentTerm | None, slot: int, parents_W: np.ndarray, gate_KR: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probabilities [W, C + M] of the candidates of one slot after each of its parents.

    The first C columns are the slot's shortlist, the others the parents' cached successors, whose tokens [W, M] are
    returned too (see ``token_at``). Every candidate's logit is exact. The normaliser is exact over the candidates and
    the successors; the rest of the vocabulary enters as (sum of exp(U_k) over the rest) times (mean of exp(W2[v] w)
    over the vocabulary, to second order): the parent's bias and U_k are taken as independent in the tail. At slot 0
    and without a parent term the normaliser is exact. A successor that is on the shortlist already has -inf.
    """
    values_C, tail = shortlist.values_KC[slot], shortlist.tail_K[slot]
    if term is None or slot == 0:
        peak = values_C.max()
        normaliser = peak + np.log(np.exp(values_C - peak).sum() + np.exp(tail - peak))
        return np.tile(values_C - normaliser, (len(parents_W), 1)), np.zeros((len(parents_W), 0), dtype=np.int64)
    sharpness = shortlist.sharpness_K[slot]
    vectors_Wr = term.vectors(parents_W, None if gate_KR is None else gate_KR[slot]) * sharpness
    successors_WM, bias_WM = term.table(parents_W)
    candidates = len(values_C)
    logits_WS = np.empty((len(parents_W), candidates + successors_WM.shape[1]), dtype=np.float32)
    np.matmul(vectors_Wr, term.w2_Vr[shortlist.tokens_KC[slot]].T, out=logits_WS[:, :candidates])
    logits_WS[:, :candidates] += values_C
    if successors_WM.shape[1]:
        plain_WM = shortlist.logits_KV[slot, successors_WM]
        logits_WS[:, candidates:] = plain_WM + bias_WM * sharpness
        # What is not below the floor is on the shortlist; the comparison says so without a look-up.
        logits_WS[:, candidates:][plain_WM >= shortlist.floor_K[slot]] = -np.inf
    peak_W1 = logits_WS.max(1, keepdims=True)
    logits_WS -= peak_W1
    tail_W = tail + term.log_mean_exp(vectors_Wr) - peak_W1[:, 0]
    logits_WS -= np.log(np.exp(logits_WS).sum(1) + np.exp(tail_W))[:, None]
    return logits_WS, successors_WM


def token_at(
    shortlist: Shortlist, slot: int, successors_WM: np.ndarray, parent: np.ndarray, column: np.ndarray
) -> np.ndarray:
    """The tokens behind (parent, column) pairs of what ``transitions`` returns; int64."""
    candidates = shortlist.tokens_KC.shape[1]
    tokens = shortlist.tokens_KC[slot, np.minimum(column, candidates - 1)]
    beyond = column >= candidates
    if beyond.any():
        tokens[beyond] = successors_WM[parent[beyond], column[beyond] - candidates]
    return tokens


def build_tree(shortlist: Shortlist, term: ParentTerm | None, nodes: int, gate_KR: np.ndarray | None = None) -> Tree:
    """The ``nodes`` best nodes over all depths: the exact top-B prefix-closed set of the scored candidates.

    Scores never rise along a path, so the B best nodes of the whole tree are prefix-closed, and a node whose score is
    below the B-th best seen so far has no descendant among them. It is therefore enough to go through the depths
    once, with all parents of a depth in one product, and to keep at each depth what still beats the B-th best. The
    result is the set that best-first search (pop the best, push its next sibling and its first child) pops in B
    steps. The best node whose token is not yet in the term's table of successors is added to it for the calls that
    follow: one per call, so that a cold table never stalls a round.
    """
    if nodes <= 0 or not len(shortlist.tokens_KC):
        return empty_tree()
    parent_tokens, parent_scores, parent_nodes = np.array([-1]), np.zeros(1, np.float32), np.array([-1])
    levels: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    best_B = np.zeros(0, dtype=np.float32)
    threshold, count = -np.inf, 0
    for slot in range(len(shortlist.tokens_KC)):
        scores_WS, successors_WM = transitions(shortlist, term, slot, parent_tokens, gate_KR)
        np.minimum(scores_WS, 0.0, out=scores_WS)
        scores_WS += parent_scores[:, None]
        scores = scores_WS.ravel()
        kept = np.flatnonzero(scores > threshold)
        if kept.size > nodes:
            kept = kept[np.argpartition(scores[kept], kept.size - nodes)[kept.size - nodes :]]
        best_B = np.concatenate([best_B, scores[kept]])
        if best_B.size >= nodes:
            best_B = np.partition(best_B, best_B.size - nodes)[best_B.size - nodes :]
            threshold = best_B[0]
            kept = kept[scores[kept] >= threshold]
        if not kept.size:
            break
        kept = kept[np.argsort(-scores[kept], kind="stable")]
        parent, column = np.divmod(kept, scores_WS.shape[1])
        parent_tokens, parent_scores = token_at(shortlist, slot, successors_WM, parent, column), scores[kept]
        levels.append((parent_tokens, parent_nodes[parent], parent_scores))
        parent_nodes = np.arange(count, count + kept.size)
        count += kept.size
    tokens, parents, scores = (np.concatenate(parts) for parts in zip(*levels))
    depths = np.repeat(np.arange(len(levels)), [len(level[0]) for level in levels])
    # Stable, and levels come in order of depth: a parent stays before a child of equal score.
    order = np.argsort(-scores, kind="stable")[:nodes]
    place = np.full(count + 1, -1)
    place[order] = np.arange(len(order))
    tree = Tree(tokens[order], place[parents[order]], depths[order], scores[order])
    if term is not None:
        unknown = tree.tokens[~term.known(tree.tokens)]
        if unknown.size:
            term.remember(int(unknown[0]))
    return tree


def build_paths(
    shortlist: Shortlist, term: ParentTerm | None, paths: int, nodes: int, gate_KR: np.ndarray | None = None
) -> Tree:
    """The ``paths`` best whole paths, merged into one trie of at most ``nodes`` nodes ([S]: 3-5 candidate sequences).

    A beam of four times as many paths is kept from slot to slot. Where the trie would have too many nodes, the worst
    paths are left out, never the end of one; at least the best path stays (its first ``nodes`` slots).
    """
    parent_tokens, totals = np.array([-1]), np.zeros(1, np.float32)
    histories = np.zeros((1, 0), dtype=np.int64)
    scores_WK = np.zeros((1, 0), dtype=np.float32)
    for slot in range(min(nodes, len(shortlist.tokens_KC))):
        scores_WS, successors_WM = transitions(shortlist, term, slot, parent_tokens, gate_KR)
        scores = (np.minimum(scores_WS, 0.0) + totals[:, None]).ravel()
        best = np.argsort(-scores, kind="stable")[: 4 * paths]
        parent, column = np.divmod(best, scores_WS.shape[1])
        parent_tokens, totals = token_at(shortlist, slot, successors_WM, parent, column), scores[best]
        histories = np.concatenate([histories[parent], parent_tokens[:, None]], axis=1)
        scores_WK = np.concatenate([scores_WK[parent], totals[:, None]], axis=1)
    found: dict[tuple[int, ...], float] = {}
    for history, path_scores in list(zip(histories.tolist(), scores_WK.tolist()))[:paths]:
        new = {tuple(history[: end + 1]): path_scores[end] for end in range(len(history))}
        if found and len(found | new) > nodes:
            break
        found |= new
    order = sorted(found, key=lambda path: (-found[path], len(path)))
    place = {path: index for index, path in enumerate(order)}
    return Tree(
        np.array([path[-1] for path in order], dtype=np.int64),
        np.array([place.get(path[:-1], -1) for path in order], dtype=np.int64),
        np.array([len(path) - 1 for path in order], dtype=np.int64),
        np.array([found[path] for path in order], dtype=np.float32),
    )


def build_chain(shortlist: Shortlist, term: ParentTerm | None, nodes: int, gate_KR: np.ndarray | None = None) -> Tree:
    """The greedy path: at each slot the argmax over the full vocabulary of U_k + W2 W1[parent]. Exact.

    A token outside the shortlist and outside the parent's cached successors has a logit of at most U_k[v] plus a
    bound of its bias; only tokens whose bound beats the best candidate are looked at (METHODS 7 asks for no
    full-vocabulary product per node; most slots need none).
    """
    tokens: list[int] = []
    scores: list[float] = []
    parent, total = -1, 0.0
    for slot in range(min(nodes, len(shortlist.tokens_KC))):
        scores_1S, successors_1M = transitions(shortlist, term, slot, np.array([parent]), gate_KR)
        best = scores_1S.argmax(1)
        token, score = (
            int(token_at(shortlist, slot, successors_1M, np.zeros(1, int), best)[0]),
            float(scores_1S[0, best[0]]),
        )
        if term is not None and slot:
            token, score = _full_argmax(shortlist, term, slot, parent, token, score, gate_KR)
        total += min(score, 0.0)
        tokens.append(token)
        scores.append(total)
        parent = token
    return chain_of(tokens, np.asarray(scores, dtype=np.float32))


def _full_argmax(
    shortlist: Shortlist,
    term: ParentTerm,
    slot: int,
    parent: int,
    token: int,
    score: float,
    gate_KR: np.ndarray | None,
) -> tuple[int, float]:
    """Replace the best candidate by a better token of the rest of the vocabulary, if there is one."""
    row_V = shortlist.logits_KV[slot]
    sharpness = shortlist.sharpness_K[slot]
    vector_r = term.vectors(np.array([parent]), None if gate_KR is None else gate_KR[slot])[0] * sharpness
    best_logit = row_V[token] + term.w2_Vr[token] @ vector_r
    bias_bound, norm = term.bias_bound(parent, vector_r)
    bias_bound *= sharpness
    if shortlist.floor_K[slot] + min(bias_bound, norm * term.largest_norm) <= best_logit:
        return token, score
    if np.isfinite(bias_bound):
        rivals = np.flatnonzero(row_V > best_logit - bias_bound)
    else:
        rivals = np.flatnonzero(row_V + norm * term.norm_V > best_logit)
    if not rivals.size:
        return token, score
    if rivals.size > len(row_V) // 32 and term.successors:
        # Many rows: rather read all of W2 once, and know the parent's successors from now on.
        bias_V = term.bias(term.w1_Vr[parent])
        term.remember(parent, bias_V)
        logits = row_V[rivals] + bias_V[rivals] * sharpness
    else:
        logits = row_V[rivals] + term.w2_Vr[rivals] @ vector_r
    best = int(logits.argmax())
    if logits[best] <= best_logit:
        return token, score
    return int(rivals[best]), score + float(logits[best] - best_logit)
