"""Drafters, judges and decoders for tests of rounds with controls on: tiny random targets and heads in fp32.

A random draft is nearly always wrong, so most tests draft with a *tutored* drafter: a real block head whose first
choices are replaced, most of the time, by what the target will say. Costs are made up: no test measures the machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from jetspec_train.config import VerifierSettings
from jetspec_train.decoding.calibration import Calibration, Threshold
from jetspec_train.decoding.cost_profile import CostProfile
from jetspec_train.decoding.decoder import Decoder
from jetspec_train.decoding.drafting import BlockDrafter
from jetspec_train.decoding.judging import Judgement
from jetspec_train.decoding.scheduler import AdaptiveScheduler
from jetspec_train.decoding.tree import Tree
from jetspec_train.modeling.verifier import Verifier
from jetspec_train.modeling.verifier_config import resolve_verifier_config
from tests.unit.test_decoding_decoder import random_head, settings_for

FREE = CostProfile({1: 1.0, 64: 1.0}, draft_seconds=0.1)  # a machine on which every node pays
EVERYTHING = dict(stages=2, prune=0.05, scheduler=True, cache=True, candidates=16)


class Tutored(BlockDrafter):
    """A block drafter most of whose tokens are replaced by the true continuation; wrong ones stay wrong.

    ``right``: share of the depths at which the first choice is the true token. The states, tensors and trees are those
    of a real draft.
    """

    def __init__(self, target, texts: Sequence[Sequence[int]], right: float = 0.8, companions=None, seed: int = 0):
        super().__init__(random_head(target), target, companions)
        self.texts, self.right, self._random = [list(text) for text in texts], right, np.random.default_rng(seed)
        self.pending_seen: list[list[int]] = []

    def propose(self, anchors, limits, settings, pending=None):
        trees = super().propose(anchors, limits, settings, pending)
        waiting = [[] for _ in anchors] if pending is None else [list(tokens) for tokens in pending]
        self.pending_seen.extend(tokens for tokens in waiting if tokens)
        return [self._tutor(tree, self._context.lengths[row] + 1 + len(waiting[row])) for row, tree in enumerate(trees)]

    def _tutor(self, tree: Tree, start: int) -> Tree:
        """Replace the first choices along the first path by the text that has this position."""
        text = next((text for text in self.texts if len(text) > start), None)
        if text is None or not len(tree):
            return tree
        tokens, parent = tree.tokens.copy(), -1
        for depth in range(int(tree.depths.max()) + 1):
            children = np.flatnonzero(tree.parents == parent)
            if not len(children) or start + depth >= len(text) or self._random.random() > self.right:
                break
            taken = set(tokens[children].tolist())
            if text[start + depth] not in taken:
                tokens[children[0]] = text[start + depth]
            parent = int(children[list(tokens[children]).index(text[start + depth])])
        return dataclasses.replace(tree, tokens=tokens)


class Liar:
    """Says what it likes of any tree; it has the judge's door and none of its insight."""

    def __init__(self, kind: str, seed: int = 0) -> None:
        self.kind, self._random = kind, np.random.default_rng(seed)

    def start(self, batch, capacity): ...
    def begin(self, batch): ...
    def observe(self, *_): ...
    def drop_rows(self, keep): ...
    def defer(self, row, nodes): ...
    def restore(self, row, state, length): ...

    def snapshot(self, row):
        return None, 0

    def judge(self, trees, before):
        return [self._judge(tree) for tree in trees]

    def _judge(self, tree: Tree) -> Judgement | None:
        if not len(tree) or self.kind == "nan":
            return None
        chance = {
            "ones": np.ones(len(tree)),
            "zeros": np.zeros(len(tree)),
            "random": self._random.random(len(tree)),
            "inverted": 1.0 - np.exp(np.minimum(tree.scores.astype(float), 0.0)),
        }[self.kind]
        return Judgement(chance, chance, None)


def controlled(target, drafter, shape: str = "tree", liar: str | None = None, **changes) -> Decoder:
    """A decoder with everything on, a cost curve on which trees pay, and a judge that lies if asked to."""
    config = settings_for(shape, **{**EVERYTHING, **changes})
    decoder = Decoder(target, drafter, config)
    if config.scheduler:
        decoder.planner.scheduler = AdaptiveScheduler(FREE, most_nodes=config.nodes, stage=config.stages)
    if liar is not None:
        decoder.planner.judge = Liar(liar)
    return decoder


def tiny_verifier(head, seed: int = 0, **changes) -> Verifier:
    config = resolve_verifier_config(
        VerifierSettings(layers=2, share=0.1, **changes), head.config, target_parameters=10**5
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        verifier = Verifier(config)
        for proj in (verifier.confidence_head.proj, verifier.score):
            torch.nn.init.normal_(proj.weight)
    return verifier.eval()


def calibration_for(target, value: float = 0.0, **changes) -> Calibration:
    return Calibration("w", target.identity.to_dict(), "match_greedy", {}, Threshold(value, True), **changes)
