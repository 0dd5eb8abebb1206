"""What a generation cost and how its drafts fared: counts per row, seconds by kind of work."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, fields

import torch

KINDS = ("prefill", "target", "draft", "host")


class Stopwatch:
    """Attributes wall time to kinds of work: ``lap(kind)`` books the time since the last lap.

    A device is waited for only at a lap, and only where work is queued at all (CUDA): the laps are the boundaries
    between target, draft and host work, where the host needs the results anyway.
    """

    def __init__(self, device: torch.device) -> None:
        self._queued = device.type == "cuda"
        self.seconds = dict.fromkeys(KINDS, 0.0)
        self.started = self._last = self._now()

    def _now(self) -> float:
        if self._queued:
            torch.cuda.synchronize()
        return time.perf_counter()

    def lap(self, kind: str) -> None:
        now = self._now()
        self.seconds[kind] = self.seconds.get(kind, 0.0) + now - self._last
        self._last = now

    def elapsed(self) -> float:
        """Seconds since the start, up to the last lap."""
        return self._last - self.started


@dataclass
class RoundStats:
    """One row's counts. A round is one decode forward of the target in which the row took part.

    Attributes:
        rounds, target_forwards: decode forwards; the prefill is not one.
        target_tokens: anchor and drafted nodes sent to the target in them.
        draft_forwards: forwards of the draft model.
        drafted_tokens: nodes sent.
        emitted: tokens emitted by decode forwards: the prefill's token and everything after a stop excluded.
        drafted_by_depth: [k] rounds in which the slots before k were accepted and the tree had nodes at slot k.
        accepted_by_depth: [k] rounds in which slot k was accepted; emitted tokens only.
        stages, deferred_stages: decisions of the verification controller, and those to defer.
        checked_stages: deferred stages whose prefix was kept, so that the target's judgement of them means something.
        passed_stages: those of them that hold the target's own choices throughout.
        deferred_tokens, kept_tokens: tokens that waited for a coarse forward, and those of them that stayed.
        overruled_tokens: kept although the target would have chosen another (policy trusting only).
        stage_forwards: target forwards that verifying every stage at once would have taken for the same stages.
        verifier_forwards, verifier_failures: judgements, and those that gave no usable number (NaN).
        cached_nodes, cached_accepted: nodes sent that only the result cache proposed, and those accepted.
        reused_tokens: prompt tokens whose state came from the result cache.
        seconds: by kind - prefill, target, draft, host, total, and verifier where one is at work - while this row was
            in the batch. The rows of a batch share the time: do not add them up.
        first_token_seconds: from the call to the first token.
    """

    rounds: int = 0
    target_forwards: int = 0
    target_tokens: int = 0
    draft_forwards: int = 0
    drafted_tokens: int = 0
    emitted: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)
    stages: int = 0
    deferred_stages: int = 0
    checked_stages: int = 0
    passed_stages: int = 0
    deferred_tokens: int = 0
    kept_tokens: int = 0
    overruled_tokens: int = 0
    stage_forwards: int = 0
    verifier_forwards: int = 0
    verifier_failures: int = 0
    cached_nodes: int = 0
    cached_accepted: int = 0
    reused_tokens: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    first_token_seconds: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """tau: tokens emitted per target decode forward; nan without one."""
        return self.emitted / self.target_forwards if self.target_forwards else float("nan")

    def acceptance_rate_at(self, slot: int) -> float:
        """P(slot accepted, given that the slots before it were); nan where it was never drafted."""
        if slot >= len(self.drafted_by_depth) or not self.drafted_by_depth[slot]:
            return float("nan")
        return self.accepted_by_depth[slot] / self.drafted_by_depth[slot]

    @property
    def accepted_tokens(self) -> int:
        """Drafted tokens that were accepted and emitted."""
        return sum(self.accepted_by_depth)

    @property
    def screening_accuracy(self) -> float:
        """Share of skipped checks that the target would have passed; nan where none was skipped (METHODS 8)."""
        return self.passed_stages / self.checked_stages if self.checked_stages else float("nan")

    @property
    def forwards_saved(self) -> float:
        """1 - forwards / forwards that verifying every stage would have taken for the same stages; nan without stages.
        An estimate: the comparison itself is a run with ``max_pending=0``."""
        return 1.0 - self.target_forwards / self.stage_forwards if self.stage_forwards else float("nan")

    def count_round(self, nodes: int, deepest: int, accepted: int, emitted: int) -> None:
        """Book one round: a tree of ``nodes`` nodes and ``deepest`` slots, ``accepted`` nodes on the walk's path,
        ``emitted`` tokens kept. Where a stop cut the output, slots after the cut were neither drafted nor accepted."""
        self.rounds += 1
        self.target_forwards += 1
        self.target_tokens += 1 + nodes
        self.drafted_tokens += nodes
        self.emitted += emitted
        seen = accepted if emitted <= accepted else accepted + 1
        seen = min(seen, deepest, emitted)
        while len(self.drafted_by_depth) < seen:
            self.drafted_by_depth.append(0)
            self.accepted_by_depth.append(0)
        for slot in range(seen):
            self.drafted_by_depth[slot] += 1
            self.accepted_by_depth[slot] += slot < accepted


def merge_stats(many: list[RoundStats]) -> RoundStats:
    """Counts of several generations added up. Seconds too: meant for generations that ran one after another."""
    total = RoundStats(seconds=dict.fromkeys((*KINDS, "total"), 0.0))
    counts = [count.name for count in fields(RoundStats) if count.type == "int"]
    for stats in many:
        for name in counts:
            setattr(total, name, getattr(total, name) + getattr(stats, name))
        for name in ("drafted_by_depth", "accepted_by_depth"):
            mine, theirs = getattr(total, name), getattr(stats, name)
            mine.extend([0] * (len(theirs) - len(mine)))
            for slot, count in enumerate(theirs):
                mine[slot] += count
        for kind, seconds in stats.seconds.items():
            total.seconds[kind] = total.seconds.get(kind, 0.0) + seconds
        total.first_token_seconds += stats.first_token_seconds
    return total
