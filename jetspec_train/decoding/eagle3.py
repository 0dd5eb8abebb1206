"""An EAGLE-3 draft as drafter: one small forward per depth, over one path (chain) or several at once (tree).

The state of the last committed token waits for the anchor, because an input joins a state with the *next* token.
Keys and values are kept for inputs made of the target's features only; those of drafted steps are thrown away, and
their places are filled with the target's features of what was accepted.

Shapes: B rows, M new inputs of a row (padded), S key columns, W nodes of a depth, d width, V draft vocabulary.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import torch

from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.drafting import Companions, DraftContext, check_fits
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.decoding.tree import Tree, empty_tree
from jetspec_train.modeling.eagle3 import Eagle3Head
from jetspec_train.targets.packing import pack_linears
from jetspec_train.targets.target import Target

DEFAULT_DEPTH = 7  # the steps of the paper's training; settings.depth overrides
WIDTH = 8  # nodes of a depth that a tree goes on from


class Eagle3Drafter:
    """See the top of this file. The weights are copied in the target's dtype."""

    forwards = DEFAULT_DEPTH
    block = 0
    companions: Companions | None = None

    def __init__(self, head: Eagle3Head, target: Target) -> None:
        check_fits(head.config, target)
        self.head = copy.deepcopy(head).requires_grad_(False).eval().to(device=target.device, dtype=target.dtype)
        pack_linears(self.head)
        self.config = head.config
        self.taps: tuple[int, ...] = tuple(head.config.target_layer_ids)
        self._target = target
        self._clock: Stopwatch | None = None
        self.start(0, 1, None)

    def start(self, batch: int, capacity: int, clock: Stopwatch | None) -> None:
        self._context = DraftContext(self.config.layers, batch, capacity)
        # per row: states [m, d] that are not yet part of the context, and the tokens after the first of them
        self._states: list[torch.Tensor | None] = [None] * batch
        self._tokens: list[list[int]] = [[] for _ in range(batch)]
        self._clock = clock

    @torch.inference_mode()
    def observe(
        self, tokens: Sequence[Sequence[int]], features_BNF: torch.Tensor | None, kept: Sequence[Sequence[int]]
    ) -> None:
        if features_BNF is None:
            raise ValueError("an EAGLE-3 draft needs the target's features; forward the target with the drafter's taps")
        for row, (new, places) in enumerate(zip(tokens, kept)):
            if not places:
                continue
            states_Md = self.head.fuse(features_BNF[row, list(places)][None])[0]
            waiting = self._states[row]
            if waiting is None:
                self._states[row], self._tokens[row] = states_Md, list(new[1:])
            else:
                self._states[row] = torch.cat((waiting, states_Md))
                self._tokens[row] = [*self._tokens[row], *new]

    @torch.inference_mode()
    def propose(self, anchors: Sequence[int], limits: Sequence[int], settings: DecodingConfig) -> list[Tree]:
        hidden_Bd, states_Bd = self._advance(anchors)
        depth = min(max(limits), settings.depth or DEFAULT_DEPTH)
        width = 1
        if settings.shape == "chain":
            depth = min(depth, settings.nodes)
        else:
            width = min(WIDTH, settings.nodes, self.config.draft_vocab_size)
        if depth <= 0:
            return [empty_tree() for _ in anchors]
        trees = self._grow(hidden_Bd, states_Bd, depth, width, settings.sampling.temperature or 1.0)
        self._lap("draft")
        trimmed = [tree.shallower_than(limit).first(settings.nodes) for tree, limit in zip(trees, limits)]
        self._lap("host")
        return trimmed

    def drop_rows(self, keep: Sequence[int]) -> None:
        self._context.drop_rows(keep)
        self._states = [self._states[row] for row in keep]
        self._tokens = [self._tokens[row] for row in keep]

    def _advance(self, anchors: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
        """Take every waiting state into the context, each with its next token; outputs of each row's last one."""
        target, lengths = self._target, list(self._context.lengths)
        rows = [states for states in self._states if states is not None]
        if len(rows) != len(anchors):
            raise ValueError("propose needs at least one observed token per row since the last proposal")
        counts = [len(states) for states in rows]
        longest, old = max(counts), max(lengths)
        tokens_BM = torch.zeros(len(rows), longest, dtype=torch.long)
        states_BMd = rows[0].new_zeros(len(rows), longest, rows[0].shape[-1])
        for row, (states, anchor) in enumerate(zip(rows, anchors)):
            tokens_BM[row, : counts[row]] = torch.tensor([*self._tokens[row], anchor])
            states_BMd[row, : counts[row]] = states
        starts_B1 = torch.tensor(lengths)[:, None]
        positions_BM = (starts_B1 + torch.arange(longest)).to(target.device)
        # input i sees its row's context and the new inputs up to itself; padding lies behind all of them
        context_B1S = (torch.arange(old) < starts_B1)[:, None, :].expand(-1, longest, -1)
        causal_1MM = torch.ones(longest, longest, dtype=torch.bool).tril()[None].expand(len(rows), -1, -1)
        mask_BMS = torch.cat((context_B1S, causal_1MM), dim=-1).to(target.device)
        past = self._context.layers() if old else None
        embeds_BMd = target.embed(tokens_BM.to(target.device))
        hidden_BMd, out_BMd, new = self.head(embeds_BMd, states_BMd, positions_BM, past, mask_BMS)
        flat = [(self._flatten(keys, counts), self._flatten(values, counts)) for keys, values in new]
        self._context.append(flat, counts)
        self._states = [None] * len(rows)
        self._tokens = [[] for _ in rows]
        last = torch.tensor(counts, device=target.device) - 1
        places = torch.arange(len(rows), device=target.device)
        return hidden_BMd[places, last], out_BMd[places, last]

    @staticmethod
    def _flatten(tensor_BJMD: torch.Tensor, counts: Sequence[int]) -> torch.Tensor:
        """The first ``counts[row]`` columns of each row, row after row: [1, J, sum of counts, D]."""
        return torch.cat([tensor_BJMD[row, :, :count] for row, count in enumerate(counts)], dim=1)[None]

    def _grow(
        self, hidden_Bd: torch.Tensor, states_Bd: torch.Tensor, depth: int, width: int, temperature: float
    ) -> list[Tree]:
        """Trees of every row: at each depth the best ``width`` nodes are gone on from, each with ``width`` children."""
        target, batch, device = self._target, len(hidden_Bd), hidden_Bd.device
        lengths_B = torch.tensor(self._context.lengths, device=device)
        context_B1S = (torch.arange(max(self._context.lengths), device=device) < lengths_B[:, None])[:, None, :]
        past = self._context.layers()
        hidden_BWd, states_BWd = hidden_Bd[:, None], states_Bd[:, None]
        totals_BW = torch.zeros(batch, 1, device=device)
        nodes_BW = torch.full((batch, 1), -1, device=device)  # number of the node that each frontier entry is
        seen_BWN = torch.zeros(batch, 1, 0, dtype=torch.bool, device=device)  # inputs of earlier depths on its path
        found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        count = 0
        for level in range(depth):
            logits_BWV = self.head.lm_head(hidden_BWd).float() / temperature
            best_BWC, ids_BWC = torch.log_softmax(logits_BWV, dim=-1).topk(width, dim=-1)
            scores_BX = (totals_BW[..., None] + best_BWC).flatten(1)
            parents_BX = nodes_BW[..., None].expand_as(best_BWC).flatten(1)
            tokens_BX = self.head.target_ids(ids_BWC).flatten(1)
            found.append((tokens_BX, parents_BX, scores_BX))
            if level + 1 == depth:
                break
            totals_BW, order_BW = scores_BX.topk(width, dim=-1)
            source_BW = order_BW // width  # which frontier entry each chosen child belongs to
            nodes_BW = count + order_BW
            count += scores_BX.shape[1]
            chosen_BW = tokens_BX.gather(1, order_BW)
            rows = torch.arange(batch, device=device)[:, None]
            own = torch.eye(width, dtype=torch.bool, device=device).expand(batch, -1, -1)
            seen_BWN = torch.cat((seen_BWN[rows, source_BW], own), dim=-1)
            mask_BWS = torch.cat((context_B1S.expand(-1, width, -1), seen_BWN), dim=-1)
            positions_BW = (lengths_B + level)[:, None].expand(-1, width)
            hidden_BWd, states_BWd, new = self.head(
                target.embed(chosen_BW), states_BWd[rows, source_BW], positions_BW, past, mask_BWS
            )
            past = [
                (torch.cat((old[0], keys), dim=2), torch.cat((old[1], values), dim=2))
                for old, (keys, values) in zip(past, new)
            ]
        return [self._tree([tuple(level[row] for level in part) for part in found], width) for row in range(batch)]

    @staticmethod
    def _tree(levels: list[tuple[torch.Tensor, ...]], width: int) -> Tree:
        """One row's candidates of all depths as a Tree: best first, parents before children."""
        tokens = np.concatenate([level[0].cpu().numpy() for level in levels])
        parents = np.concatenate([level[1].cpu().numpy() for level in levels])
        scores = np.concatenate([level[2].cpu().numpy() for level in levels]).astype(np.float32)
        depths = np.concatenate([np.full(len(level[0]), depth) for depth, level in enumerate(levels)])
        order = np.lexsort((depths, -scores))
        place = np.empty(len(order) + 1, dtype=np.int64)
        place[order], place[-1] = np.arange(len(order)), -1
        return Tree(tokens[order], place[parents[order]], depths[order], scores[order])

    def _lap(self, kind: str) -> None:
        if self._clock is not None:
            self._clock.lap(kind)
