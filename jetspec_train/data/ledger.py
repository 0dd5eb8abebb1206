"""The token budget of one shard: never exceeded, without locks, exact across kills.

A row reserves the most it can produce while it is in flight, and settles with what it did produce. What
is settled is always recomputed from the samples on disk, never from a counter of its own that could
disagree with them. Rows are admitted in one fixed order and a row that does not fit waits for those in
flight, so which rows are kept does not depend on timing or kills.
"""

from __future__ import annotations

from dataclasses import dataclass

from jetspec_train.artifacts.errors import UserError


def shard_quota(total: int | None, shard: int, shards: int) -> int | None:
    """This shard's part of a budget; the parts of all shards sum exactly to ``total``."""
    if total is None:
        return None
    return total // shards + (shard < total % shards)


@dataclass
class Ledger:
    """Tokens of one shard. ``kept``: in samples; ``generated``: also those of dropped answers."""

    kept_quota: int
    generated_quota: int | None = None
    kept: int = 0
    generated: int = 0
    reserved: int = 0

    def fits(self, tokens: int) -> bool:
        """Whether a row that may produce ``tokens`` can begin now."""
        if self.kept + self.reserved + tokens > self.kept_quota:
            return False
        return self.generated_quota is None or self.generated + self.reserved + tokens <= self.generated_quota

    def reserve(self, tokens: int) -> None:
        if not self.fits(tokens):
            raise RuntimeError(f"reserved {tokens} tokens beyond the budget ({self})")
        self.reserved += tokens

    def settle(self, reserved: int, *, kept: int, generated: int) -> None:
        """End a reservation with what the row produced."""
        if kept > generated or generated > reserved:
            raise RuntimeError(f"{generated} tokens generated, {kept} kept, but only {reserved} reserved")
        self.reserved -= reserved
        self.kept += kept
        self.generated += generated

    def restore(self, kept: int, generated: int) -> None:
        """Count what an earlier attempt left on disk."""
        self.kept += kept
        self.generated += generated
        if self.kept > self.kept_quota:
            raise UserError(
                f"The samples there hold {self.kept:,} tokens, more than this shard's budget of {self.kept_quota:,} "
                "(budget.tokens). Raise it again or choose another run_dir=..."
            )

    @property
    def unused(self) -> int:
        return self.kept_quota - self.kept


def require_room(ledger: Ledger, tokens: int) -> None:
    """Refuse a budget that not even one row fits into."""
    if not ledger.fits(tokens):
        smallest = min(q for q in (ledger.kept_quota, ledger.generated_quota) if q is not None)
        raise UserError(
            f"The budget of this shard ({smallest:,} tokens) is smaller than one answer can be ({tokens:,} = "
            "distill.max_new_tokens x turns). Raise budget.tokens or lower distill.max_new_tokens."
        )
