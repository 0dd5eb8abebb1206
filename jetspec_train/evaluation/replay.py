"""A few prompts, token by token: what the draft proposed, what the target accepted, what it put instead.

Recorded outside the timed runs by a drafter that forwards every call and keeps what it proposed. The
walk is recomputed from the output: under the match rule the accepted path is the one that equals it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from jetspec_train.config import DecodingConfig
from jetspec_train.decoding.planning import without_controls
from jetspec_train.evaluation.suites import SuitePrompt

SHOWN_REJECTED = 3  # rejected tokens shown per round; the rest are counted


class RecordingDrafter:
    """Any drafter, with every tree kept that it proposes for the batch's only row."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.trees: list[Any] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._drafter, name)

    def propose(self, *arguments: Any, **named: Any) -> Any:
        trees = self._drafter.propose(*arguments, **named)
        self.trees.append(trees[0])
        return trees


def walk_output(tree: Any, following: Sequence[int]) -> tuple[list[int], list[int]]:
    """``(accepted nodes, rejected nodes)`` of a tree, given the tokens that came after its anchor.

    Rejected nodes: first those that competed with the token at which the walk stopped, then by the tree's order.
    """
    parent, accepted = -1, []
    for token in following:
        found = [
            node
            for node, (drafted, above) in enumerate(zip(tree.tokens, tree.parents))
            if int(above) == parent and int(drafted) == int(token)
        ]
        if not found:
            break
        parent = found[0]
        accepted.append(parent)
    rejected = [node for node in range(len(tree.tokens)) if node not in accepted]
    rejected.sort(key=lambda node: (int(tree.parents[node]) != parent, node))
    return accepted, rejected


def replay_rounds(tokens: Sequence[int], trees: Sequence[Any], show: Callable[[int], str]) -> list[dict[str, Any]]:
    """The rounds of one answer: ``{accepted: [text], rejected: [text], more_rejected: int, bonus: text | None}``.

    The first entry is the token that the prefill gave; it has no draft. ``trees``: one per round, in order;
    rounds beyond them (the last one, where nothing is left to draft) drafted nothing. ``show`` turns a token
    id into text.
    """
    rounds: list[dict[str, Any]] = []
    position = 0
    for tree in [None, *trees]:
        following = tokens[position:]
        if not len(following):
            break
        accepted, rejected = walk_output(tree, following) if tree is not None else ([], [])
        bonus = following[len(accepted)] if len(accepted) < len(following) else None
        rounds.append(
            {
                "accepted": [show(int(tree.tokens[node])) for node in accepted] if tree is not None else [],
                "rejected": [show(int(tree.tokens[node])) for node in rejected[:SHOWN_REJECTED]] if rejected else [],
                "more_rejected": max(0, len(rejected) - SHOWN_REJECTED),
                "bonus": None if bonus is None else show(int(bonus)),
            }
        )
        position += len(accepted) + 1
    for token in tokens[position:]:
        rounds.append({"accepted": [], "rejected": [], "more_rejected": 0, "bonus": show(int(token))})
    return rounds


def record_replay(
    decoder: Any, prompts: Sequence[SuitePrompt], max_new_tokens: int, settings: DecodingConfig
) -> list[dict[str, Any]]:
    """Decode ``prompts`` once more with the proposals recorded; ``decoder`` is any Decoder with a drafter."""
    chat = decoder.target.chat

    def show(token: int) -> str:
        return chat.decode([token], skip_special_tokens=False)

    shown = []
    for prompt in prompts:
        recorder = RecordingDrafter(decoder.drafter)
        # One proposal per round: decisions of a staged round are in the decoder's own trace.
        watched = type(decoder)(decoder.target, recorder, without_controls(settings))
        generation = watched.generate(
            [prompt.tokens],
            max_new_tokens=max_new_tokens,
            sampling=settings.sampling,
            seed=settings.seed,
            row_ids=[prompt.row],
            stop=tuple(settings.stop),
        )[0]
        shown.append(
            {
                "id": prompt.id,
                "domain": prompt.domain,
                "prompt": prompt.text,
                "tokens": len(generation.tokens),
                "rounds": replay_rounds(generation.tokens, recorder.trees, show),
            }
        )
    return shown
