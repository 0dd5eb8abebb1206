"""On-policy paths: a draft's own rounds, replayed over an answer that the target has already given (METHODS 6).

The rounds are those of decoding, for the text says what the target would accept: each begins where the last one ended,
so the anchors lie where drafting really begins. A path reaches up to and including the first token that departs from
the text. Nothing is decoded: the target's features of the whole text are there.
"""

from __future__ import annotations

from collections.abc import Sequence

from jetspec_train.config import DecodingConfig
from jetspec_train.data.negatives.candidates import Candidate, cut_at_end
from jetspec_train.data.negatives.judging import Group
from jetspec_train.decoding.drafting import Drafter
from jetspec_train.decoding.stats import Stopwatch
from jetspec_train.targets.target import Target


def replay_rounds(
    target: Target, drafter: Drafter, group: Group, starts: Sequence[int], rounds: Sequence[int], block: int
) -> list[list[Candidate]]:
    """Up to ``rounds[row]`` drafted paths per sample, the first after the anchor at position ``starts[row]``.

    There are fewer where the answer ends before. ``block``: tokens of a path, at most.
    """
    settings = DecodingConfig(shape="chain", nodes=block)
    found: list[list[Candidate]] = [[] for _ in group.texts]
    anchors = list(starts)
    running = [row for row in range(len(anchors)) if rounds[row] > 0 and anchors[row] < len(group.texts[row]) - 1]
    if not running:
        return found
    features_BTF = group.features_BTF
    drafter.start(len(group.texts), max(len(text) for text in group.texts) + block, Stopwatch(target.device))
    active = list(range(len(group.texts)))  # what the drafter's rows are; it knows every sample at first
    before = [0] * len(anchors)
    while running:
        if running != active:
            drafter.drop_rows([active.index(row) for row in running])
            active = list(running)
        kept = [list(range(before[row], anchors[row])) for row in running]
        committed = [[group.texts[row][place] for place in places] for row, places in zip(running, kept)]
        drafter.observe(committed, None if features_BTF is None else features_BTF[running], kept)
        heads = [group.texts[row][anchors[row]] for row in running]
        limits = [len(group.texts[row]) - 1 - anchors[row] for row in running]
        for row, tree in zip(running, drafter.propose(heads, limits, settings)):
            path = [int(token) for token in tree.tokens[:block]]
            following = group.texts[row][anchors[row] + 1 :]
            accepted = 0
            while accepted < min(len(path), len(following)) and path[accepted] == following[accepted]:
                accepted += 1
            path = cut_at_end(path[: accepted + 1], target.eos_ids)
            if path:
                found[row].append(Candidate(anchors[row], path, f"accepted {accepted}"))
            before[row] = anchors[row]
            anchors[row] += accepted + 1
        running = [
            row
            for row in running
            if len(found[row]) < rounds[row] and anchors[row] < len(group.texts[row]) - 1 and before[row] < anchors[row]
        ]
    return found
