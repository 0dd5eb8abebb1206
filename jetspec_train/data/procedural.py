"""Prompts that the project makes itself: six domains, no download, a pure function of (seed, index).

A template is a sequence of parts; each part has alternatives with slots, filled from the lexicon or with
numbers. Whole templates are held out for the report, so that what is measured was never trained on.
This file knows nothing of models or files.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jetspec_train.data.lexicon import LEXICON
from jetspec_train.data.splits import held_out_templates
from jetspec_train.data.templates import SENTENCES, TEMPLATES

DOMAINS = tuple(TEMPLATES)

# name -> (lowest, highest, step): ranges are disjoint, so that "gives away {few} of {some}" is possible
NUMBERS = {
    "few": (3, 9, 1),
    "some": (12, 39, 1),
    "many": (45, 190, 1),
    "lots": (240, 990, 10),
    "price": (2, 28, 1),
    "percent": (5, 60, 5),
    "minutes": (10, 55, 5),
    "pair": (2, 4, 1),
    "year": (1998, 2024, 1),
}
_SLOT = re.compile(r"\{([a-z_]+)(\d?)(?:\.([a-z]))?\}")


@dataclass(frozen=True)
class Drawn:
    """One procedural prompt: its user turns and where they come from."""

    domain: str
    template: str
    turns: tuple[str, ...]


def draw_prompt(seed: int, index: int, domains: Sequence[str] | None = None) -> Drawn:
    """The prompt number ``index``. Domains take turns; the template and its words are drawn."""
    chosen = tuple(domains) if domains else DOMAINS
    domain = chosen[index % len(chosen)]
    # A text seed goes through SHA-512: the same draws on every platform and Python version.
    generator = random.Random(f"jetspec:{seed}:{index}")
    name, turns = generator.choice(TEMPLATES[domain])
    words: dict[tuple[str, str], str] = {}
    filled = tuple(_join(_fill(generator.choice(part), generator, words) for part in parts) for parts in turns)
    return Drawn(domain, f"{domain}/{name}", filled)


@functools.cache
def report_templates(share: float) -> frozenset[str]:
    """Templates held out for the report: about ``share`` of each domain's, at least one."""
    held: set[str] = set()
    for domain, templates in TEMPLATES.items():
        held |= held_out_templates([f"{domain}/{name}" for name, _ in templates], share)
    return frozenset(held)


def _fill(text: str, generator: random.Random, words: dict[tuple[str, str], str]) -> str:
    """Fill the slots of ``text``; the same slot keeps its word through the whole prompt.

    ``{thing}`` and ``{thing2}`` differ. Forms: ``.s`` plural, ``.a`` with article, ``.c`` capital first, ``.k`` a
    class name, ``.u`` joined by underscores, ``.l`` as typed in a hurry.
    """

    def fill(match: re.Match[str]) -> str:
        kind, number, form = match.groups()
        key = (kind, number)
        if key not in words:
            words[key] = _draw(kind, generator, words)
        return _form(words[key], form)

    return _SLOT.sub(fill, text)


def _draw(kind: str, generator: random.Random, words: dict[tuple[str, str], str]) -> str:
    taken = {word for (other, _), word in words.items() if other == kind}
    if kind == "sentence":  # its words are its own
        inner: dict[tuple[str, str], str] = {}
        return _fill(generator.choice(SENTENCES), generator, inner)
    for _ in range(50):
        if kind in NUMBERS:
            low, high, step = NUMBERS[kind]
            word = str(generator.randrange(low, high + 1, step))
        else:
            word = generator.choice(LEXICON[kind])
        if word not in taken:
            return word
    raise ValueError(f"a template uses more different {kind} than there are")


def _form(word: str, form: str | None) -> str:
    if form == "s":
        head, of, rest = word.partition(" of ")  # box of tea -> boxes of tea
        if head[-1] == "y" and head[-2] not in "aeiou":
            return f"{head[:-1]}ies{of}{rest}"
        return f"{head}{'es' if head.endswith(('x', 'ch', 'sh', 's')) else 's'}{of}{rest}"
    if form == "a":
        return f"{'an' if word[0].lower() in 'aeiou' else 'a'} {word}"
    if form == "c":
        return word[0].upper() + word[1:]
    if form == "k":  # class name
        return "".join(part.capitalize() for part in word.split())
    if form == "u":
        return re.sub(r"\W+", "_", word.lower())
    if form == "l":  # as somebody types in a hurry
        return re.sub(r"[.,!?']", "", word).lower()
    return word


def _join(parts: Iterable[str]) -> str:
    """Parts with a blank between them, unless the next one begins with a line break or a punctuation mark."""
    text = ""
    for part in parts:
        text += f" {part}" if text and part and part[0] not in "\n.,?" else part
    return text.strip()
