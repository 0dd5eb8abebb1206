"""A small language model of its own as drafter: chains, one forward of the small model per drafted token.

It reads nothing of the target, only the committed tokens, and keeps its own keys and values. Drafted tokens that the
target accepted are already in its cache: of a round's tokens only those that differ from what was drafted, and the
last one, are forwarded again. A tree costs no more forwards than a chain: it is the chain with the best alternatives
at each depth as leaves, so that a wrong choice costs less.

Shapes: B rows, N new tokens of a row (padded), D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jetspec_train.artifacts.errors import UserError
from jetspec_train.config import DecodingConfig, TargetConfig
from jetspec_train.decoding.drafting import Companions
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.tree import Tree, empty_tree
from jetspec_train.targets.loading import load_target
from jetspec_train.targets.target import Target

DEFAULT_DEPTH = 5  # tokens drafted per round; the bundle's "block" and settings.depth override it


class StandaloneDrafter:
    """See the top of this file. Raises UserError if the small model's tokens are not the target's.

    Attributes:
        forwards: forwards of the small model that the last proposal took.
    """

    taps: tuple[int, ...] = ()
    block = 0  # it cannot go on from pending tokens
    companions: Companions | None = None

    def __init__(self, model: Target, target: Target, depth: int = DEFAULT_DEPTH) -> None:
        check_same_tokens(model, target)
        self.model = model
        self.depth = depth
        self.forwards = depth
        self._clock: Stopwatch | None = None
        self._cache = model.new_cache(1, 1)
        self._committed: list[list[int]] = []
        self._cached: list[list[int]] = []

    def start(self, batch: int, capacity: int, clock: Stopwatch | None) -> None:
        self._cache = self.model.new_cache(batch, capacity)
        self._committed = [[] for _ in range(batch)]  # what the target has accepted
        self._cached = [[] for _ in range(batch)]  # what the cache holds: committed tokens, then drafted ones
        self._clock = clock

    def observe(
        self, tokens: Sequence[Sequence[int]], features_BNF: torch.Tensor | None, kept: Sequence[Sequence[int]]
    ) -> None:
        for row, (new, places) in enumerate(zip(tokens, kept)):
            self._committed[row].extend(int(token) for token in new[: len(places)])

    @torch.inference_mode()
    def propose(
        self,
        anchors: Sequence[int],
        limits: Sequence[int],
        settings: DecodingConfig,
        pending: Sequence[Sequence[int]] | None = None,
    ) -> list[Tree]:
        wanted = settings.depth or self.depth
        depth = min(max(limits), wanted, settings.nodes)
        # The small model's context may be the shorter one; beyond its end the target goes on alone.
        depth = min(depth, self.model.max_positions - max(len(row) for row in self._committed) - 1)
        self.forwards = max(0, depth)
        if depth <= 0:
            return [empty_tree() for _ in anchors]
        siblings = 1 if settings.shape == "chain" else min(settings.nodes, self.model.vocab_size)
        temperature = settings.sampling.temperature or 1.0
        logits_BV = self._catch_up(anchors)
        levels: list[tuple[np.ndarray, np.ndarray]] = []
        while True:
            scores_BV = torch.log_softmax(logits_BV.float() / temperature, dim=-1)
            scores_BS, tokens_BS = scores_BV.topk(siblings, dim=-1)
            levels.append((tokens_BS.cpu().numpy(), scores_BS.cpu().numpy()))
            if len(levels) == depth:
                break
            logits_BV = self._extend(tokens_BS[:, :1])
        self._lap("draft")
        trees = []
        for row, limit in enumerate(limits):
            of_row = [(tokens[row], scores[row]) for tokens, scores in levels[: max(0, limit)]]
            trees.append(_tree(of_row, settings.nodes) if of_row else empty_tree())
        self._lap("host")
        return trees

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._cache.drop_rows(keep)
        self._committed = [self._committed[row] for row in keep]
        self._cached = [self._cached[row] for row in keep]

    def _catch_up(self, anchors: Sequence[int]) -> torch.Tensor:
        """Forward what the cache lacks of each row's committed tokens, and the anchor; logits [B, V] after it."""
        missing: list[list[int]] = []
        for row, anchor in enumerate(anchors):
            text = [*self._committed[row], int(anchor)]
            # The anchor itself is always forwarded: its state gives the first drafted token.
            agreed = _agreement(self._cached[row], text[:-1])
            self._cache.truncate(row, agreed)
            missing.append(text[agreed:])
            self._cached[row] = text
        longest = max(len(tokens) for tokens in missing)
        tokens_BN = torch.full((len(missing), longest), self.model.pad_id, dtype=torch.long)
        for row, tokens in enumerate(missing):
            tokens_BN[row, : len(tokens)] = torch.tensor(tokens)
        output = self.model.forward(tokens_BN, cache=self._cache)
        counts = [len(tokens) for tokens in missing]
        self._cache.commit_first(counts)
        last_BD = output.hidden_BND[range(len(counts)), [count - 1 for count in counts]]
        return self.model.logits(last_BD)

    def _extend(self, tokens_B1: torch.Tensor) -> torch.Tensor:
        """Forward one drafted token per row; logits [B, V] after it."""
        output = self.model.forward(tokens_B1, cache=self._cache)
        self._cache.commit_first([1] * len(tokens_B1))
        for row, token in enumerate(tokens_B1[:, 0].tolist()):
            self._cached[row].append(token)
        return self.model.logits(output.hidden_BND[:, 0])

    def _lap(self, kind: str) -> None:
        if self._clock is not None:
            self._clock.lap(kind)


def _agreement(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two texts have in common from their beginning."""
    shared = min(len(first), len(second))
    return next((place for place in range(shared) if first[place] != second[place]), shared)


def _tree(levels: Sequence[tuple[np.ndarray, np.ndarray]], nodes: int) -> Tree:
    """The chain of first choices, and further choices at each depth as leaves; the ``nodes`` most probable of them.

    levels: per depth the tokens [S], best first, and their log-probabilities given the chain before.
    """
    total = 0.0
    candidates: list[tuple[float, int, int, bool]] = []
    for depth, (tokens, scores) in enumerate(levels):
        candidates += [
            (total + float(s), depth, int(t), place == 0) for place, (t, s) in enumerate(zip(tokens, scores))
        ]
        total += float(scores[0])
    # A child is never more probable than its parent; at equal probability the chain comes first, and depth decides.
    chosen = sorted(candidates, key=lambda entry: (-entry[0], entry[1], not entry[3]))[:nodes]
    parents, spine = [], [-1]
    for number, (_, depth, _, on_chain) in enumerate(chosen):
        parents.append(spine[depth])
        if on_chain:
            spine.append(number)
    return Tree(
        np.asarray([entry[2] for entry in chosen], np.int64),
        np.asarray(parents, np.int64),
        np.asarray([entry[1] for entry in chosen], np.int64),
        np.asarray([entry[0] for entry in chosen], np.float32),
    )


def check_same_tokens(model: Target, target: Target) -> None:
    """Raises UserError, with the reason, unless both read and write the same token ids."""
    problem = token_difference(model.chat.tokenizer, target.chat.tokenizer)
    if problem is None and model.vocab_size != target.vocab_size:
        problem = f"its output has {model.vocab_size} entries, the target's has {target.vocab_size}"
    if problem is not None:
        raise UserError(different_tokens(model.identity.name, target.identity.name, problem))


def different_tokens(model: str, target: str, problem: str) -> str:
    """The message for a small model with other tokens than the target's."""
    return (
        f"The standalone draft {model!r} does not speak the tokens of target {target!r}: {problem}. The target "
        "verifies token ids, so both need one tokenizer. Take a small model of the target's own family, or set "
        "standalone.prune_layers=N to cut the draft out of the target."
    )


def token_difference(one: Any, other: Any) -> str | None:
    """How two tokenizers' vocabularies differ, in words; None if every token has the same id in both.

    How they cut text is not compared: a draft is given the target's token ids and never a text.
    """
    mine, theirs = one.get_vocab(), other.get_vocab()
    if len(mine) != len(theirs):
        return f"its tokenizer has {len(mine)} tokens, the target's has {len(theirs)}"
    moved = sorted((i, token) for token, i in theirs.items() if mine.get(token) != i)
    if moved:
        place, token = moved[0]
        return f"{len(moved)} tokens have other ids, the first is {token!r} ({place} there, {mine.get(token)} here)"
    return None


def standalone_from_folder(path: str | Path, target: Target, depth: int | None = None) -> StandaloneDrafter:
    """Load the small model of an exported folder beside its target, in the target's dtype and on its device.

    Raises UserError for a folder that is no model, and for other tokens than the target's.
    """
    dtype = str(target.dtype).removeprefix("torch.")
    # The template plays no part in drafting; a small model without one of its own must not be refused for that.
    config = TargetConfig(name=str(Path(path)), dtype=dtype, device=str(target.device), template="plain")
    return StandaloneDrafter(load_target(config), target, depth or DEFAULT_DEPTH)
