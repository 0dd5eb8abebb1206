"""Two figures to watch while decoding ([S]): verification pass rate and wasted compute (METHODS 11).

pass rate = drafted tokens accepted / sent to the target (at least 85 %); wasted compute = target tokens of rejected
nodes / all target tokens (at most 15 %). Running and per domain; chains and trees are kept apart, because a tree wastes
most of its nodes by design and buys time with them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from jetspec_train.decoding.stats import RoundStats

PASS_RATE_AT_LEAST = 0.85
WASTED_AT_MOST = 0.15
WINDOW = 32  # answers behind the running figures
ENOUGH = 64  # tokens sent before a warning


@dataclass
class Shares:
    """Counts of some answers."""

    sent: int = 0
    accepted: int = 0
    target_tokens: int = 0

    def add(self, other: Shares, sign: int = 1) -> None:
        self.sent += sign * other.sent
        self.accepted += sign * other.accepted
        self.target_tokens += sign * other.target_tokens

    @property
    def pass_rate(self) -> float | None:
        return self.accepted / self.sent if self.sent else None

    @property
    def wasted(self) -> float | None:
        return (self.sent - self.accepted) / self.target_tokens if self.target_tokens else None


def shares_of(stats: RoundStats) -> Shares:
    return Shares(stats.drafted_tokens, stats.accepted_tokens, stats.target_tokens)


@dataclass
class _Series:
    total: Shares = field(default_factory=Shares)
    running: Shares = field(default_factory=Shares)
    recent: deque[Shares] = field(default_factory=deque)

    def add(self, shares: Shares) -> None:
        self.total.add(shares)
        self.running.add(shares)
        self.recent.append(shares)
        if len(self.recent) > WINDOW:
            self.running.add(self.recent.popleft(), -1)


class Monitor:
    """Takes the counts of finished answers; ``values`` and ``warnings`` at any time."""

    def __init__(self) -> None:
        self._series: dict[tuple[str, str], _Series] = {}

    def add(self, stats: RoundStats, *, shape: str, domain: str = "") -> None:
        """``shape``: chain, tree or paths. ``domain``: "" where none is known."""
        shares = shares_of(stats)
        for key in {(shape, ""), (shape, domain)}:
            self._series.setdefault(key, _Series()).add(shares)

    def values(self) -> dict[str, dict[str, dict[str, float | None]]]:
        """{shape: {domain or "": {pass_rate, wasted, running_pass_rate, running_wasted}}}."""
        result: dict[str, dict[str, dict[str, float | None]]] = {}
        for (shape, domain), series in sorted(self._series.items()):
            result.setdefault(shape, {})[domain] = {
                "pass_rate": series.total.pass_rate,
                "wasted": series.total.wasted,
                "running_pass_rate": series.running.pass_rate,
                "running_wasted": series.running.wasted,
            }
        return result

    def warnings(self) -> list[str]:
        """One sentence per running figure out of range, once enough tokens were sent."""
        found = []
        for (shape, domain), series in sorted(self._series.items()):
            running = series.running
            if running.sent < ENOUGH:
                continue
            where = f"{shape}{f', {domain}' if domain else ''}"
            design = " (a tree spends most of its nodes by design)" if shape != "chain" else ""
            if running.pass_rate is not None and running.pass_rate < PASS_RATE_AT_LEAST:
                found.append(
                    f"verification pass rate of {where} is {running.pass_rate:.0%}, "
                    f"below {PASS_RATE_AT_LEAST:.0%}{design}"
                )
            if running.wasted is not None and running.wasted > WASTED_AT_MOST:
                found.append(f"wasted compute of {where} is {running.wasted:.0%}, above {WASTED_AT_MOST:.0%}{design}")
        return found
