"""Which prompts are measured, and why the others are not.

Every prompt that does not fit is skipped *and counted*; domains are interleaved so that a machine that
slows down during the run slows every domain alike.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import stable_hash


@dataclass(frozen=True)
class SuitePrompt:
    """One prompt as the target sees it. ``row`` keys the random draws, the same for every contender."""

    id: str
    domain: str
    row: int
    tokens: list[int]
    text: str  # the last user turn, for people
    reference: str | None = None  # the right answer, where it is known
    scoring: str | None = None  # how an answer is compared with it

    @property
    def hash(self) -> str:
        return stable_hash(self.tokens)[:16]


@dataclass
class Suite:
    """The prompts to measure, in the order of measurement, and what was left out."""

    prompts: list[SuitePrompt]
    skipped: list[dict[str, Any]] = field(default_factory=list)  # {id, domain, prompt_tokens, reason}
    empty_domains: list[str] = field(default_factory=list)

    @property
    def domains(self) -> list[str]:
        return list(dict.fromkeys(prompt.domain for prompt in self.prompts))


def interleave(groups: dict[str, list[Any]]) -> list[Any]:
    """One of each group in turn until all are used; shorter groups simply end earlier."""
    longest = max((len(group) for group in groups.values()), default=0)
    return [group[index] for index in range(longest) for group in groups.values() if index < len(group)]


def build_suite(
    candidates: Iterable[Any],
    chat: Any,
    *,
    per_domain: int,
    max_new_tokens: int,
    max_positions: int | None,
    domains: list[str] | None = None,
) -> Suite:
    """Render ``candidates`` (objects with ``id``, ``domain``, ``messages``) and keep what fits the context.

    Raises UserError where nothing is left to measure, saying why.
    """
    groups: dict[str, list[SuitePrompt]] = {}
    seen: set[str] = set()
    skipped: list[dict[str, Any]] = []
    wanted = set(domains) if domains is not None else None
    for candidate in candidates:
        domain = str(candidate.domain)
        seen.add(domain)
        if wanted is not None and domain not in wanted:
            continue
        group = groups.setdefault(domain, [])
        if len(group) >= per_domain:
            # every domain that was asked for is full: the rest of a large recipe need not be read
            if wanted is not None and all(len(groups.get(name, [])) >= per_domain for name in wanted):
                break
            continue
        tokens = list(chat.render(candidate.messages))
        if max_positions is not None and len(tokens) + max_new_tokens > max_positions:
            reason = (
                f"prompt of {len(tokens)} tokens + {max_new_tokens} new tokens "
                f"exceeds the target's context of {max_positions}"
            )
            skipped.append({"id": str(candidate.id), "domain": domain, "prompt_tokens": len(tokens), "reason": reason})
            continue
        turns = [message["content"] for message in candidate.messages if message.get("role") == "user"]
        group.append(
            SuitePrompt(
                str(candidate.id),
                domain,
                0,
                tokens,
                turns[-1] if turns else "",
                getattr(candidate, "reference", None),
                getattr(candidate, "scoring", None),
            )
        )

    missing = sorted((wanted or set()) - seen)
    if missing:
        available = ", ".join(sorted(seen)) or "none"
        raise UserError(
            f"evaluate.domains names {', '.join(missing)}, which no recipe provides for the report split "
            f"(available: {available})."
        )
    prompts = interleave(groups)
    if not prompts:
        if skipped:
            raise UserError(
                f"All {len(skipped)} evaluation prompts are too long: {skipped[0]['reason']}. "
                "Lower evaluate.max_new_tokens or choose recipes with shorter prompts."
            )
        raise UserError(
            "The recipes give no prompt for the report split, so there is nothing to evaluate. "
            "Check recipe.name and evaluate.recipes, or raise recipe.prompts."
        )
    numbered = [dataclasses.replace(p, row=row) for row, p in enumerate(prompts)]
    return Suite(numbered, skipped, sorted(name for name, group in groups.items() if not group))
