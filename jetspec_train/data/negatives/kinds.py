"""The synthetic kinds: edits of a right answer that a decoding verifier should see through (METHODS 6).

A builder takes an answer and a random generator and returns an Edit, or raises CannotBuild with the reason: nothing is
made up where a text offers no place for a kind. Whether an edit is wrong is not decided here but by the target.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from jetspec_train.data.negatives.answer_text import LOST, AnswerText, CannotBuild, Edit

Generator = np.random.Generator
Match = tuple[int, int, str]  # characters begin .. end - 1 of the answer's text, and what to put there

LONGEST_LOOP = 6  # tokens that a loop repeats
STALE_CONTEXT = 2  # tokens that two places must share before a continuation is taken from the earlier one
_OPERATORS = {
    "+": "-*",
    "-": "+*",
    "*": "+/",
    "/": "*-",
    "×": "+÷",
    "÷": "×-",
    "=": "<>",
    "<": ">=",
    ">": "<=",
}
_OPERATOR = re.compile(r"(?<=[\d\s)])[-+*/×÷=<>](?=[\d\s($])")
_SIGN = re.compile(r"(?<=\s)-?(?=\d)")
_DIGIT = re.compile(r"\d")
_UNIT_GROUPS = (
    ("dollars", "cents", "euros", "pounds"),
    ("dollar", "cent", "euro", "pound"),
    ("$", "€", "£"),
    ("seconds", "minutes", "hours", "days", "weeks", "months", "years"),
    ("second", "minute", "hour", "day", "week", "month", "year"),
    ("meters", "centimeters", "kilometers", "feet", "inches", "miles", "yards"),
    ("meter", "centimeter", "kilometer", "foot", "inch", "mile", "yard"),
    ("kg", "g", "mg"),
    ("km", "m", "cm", "mm"),
    ("grams", "kilograms", "ounces"),
    ("liters", "gallons", "milliliters"),
    ("percent", "degrees"),
    ("%", "°"),
)
_UNITS = {unit: [other for other in group if other != unit] for group in _UNIT_GROUPS for unit in group}
_WORD_UNITS = sorted((unit for unit in _UNITS if unit.isalpha()), key=len, reverse=True)
_UNIT = re.compile(r"[$€£](?=\d)|(?<=\d)[%°]|(?<=\d\s)(?:" + "|".join(_WORD_UNITS) + r")\b")
_NAME = re.compile(r"(?<=[a-z,;] )[A-Z][a-z]+\b")  # capitalised, and not at the start of a sentence
_IDENTIFIER = re.compile(r"\b[a-z]+(?:_[a-z0-9]+)+\b|\b[a-z]+[A-Z]\w*\b")
_NUMBER = re.compile(r"\b\d+(?:\.\d+)?\b")


def numeric(answer: AnswerText, random: Generator) -> Edit:
    """Another digit, sign, operator or unit."""
    text = answer.text
    found: dict[str, list[Match]] = {
        "digit": [(m.start(), m.end(), _other_digit(m[0], random)) for m in _DIGIT.finditer(text)],
        "operator": [(m.start(), m.end(), _one_of(_OPERATORS[m[0]], random)) for m in _OPERATOR.finditer(text)],
        "sign": [(m.start(), m.end(), "" if m[0] else "-") for m in _SIGN.finditer(text)],
        "unit": [(m.start(), m.end(), _one_of(_UNITS[m[0]], random)) for m in _UNIT.finditer(text)],
    }
    return _replace_one(answer, found, random, "no_number")


def swap(answer: AnswerText, random: Generator) -> Edit:
    """Two adjacent tokens in the other order, or a name, identifier or number for another one of the document."""
    text, document = answer.text, answer.prompt_text + "\n" + answer.text
    found: dict[str, list[Match]] = {}
    for variant, pattern in (("name", _NAME), ("identifier", _IDENTIFIER), ("number", _NUMBER)):
        pool = sorted({m[0] for m in pattern.finditer(document)})
        others = {m[0]: [other for other in pool if other != m[0]] for m in pattern.finditer(text)}
        found[variant] = [
            (m.start(), m.end(), _one_of(others[m[0]], random)) for m in pattern.finditer(text) if others[m[0]]
        ]
    if any(found.values()) and random.random() < 0.5:
        return _replace_one(answer, found, random, "no_entity")
    tokens = answer.tokens
    places = [p for p in range(answer.first + 1, len(tokens) - 1) if tokens[p] != tokens[p + 1]]
    if not places:
        raise CannotBuild("too_short")
    place = int(random.choice(places))
    return Edit(place, [tokens[place + 1], tokens[place]], place + 2, "tokens")


def repeat(answer: AnswerText, random: Generator) -> Edit:
    """The last tokens once more, again and again: a loop."""
    places = len(answer.tokens) - answer.first - 1
    if places < 1:
        raise CannotBuild("too_short")
    place = answer.first + 1 + int(random.integers(places))
    length = 1 + int(random.integers(min(LONGEST_LOOP, place - answer.first)))
    loop = answer.tokens[place - length : place]
    return Edit(place, (loop * len(answer.tokens))[: len(answer.tokens)], len(answer.tokens), f"loop of {length}")


def stale(answer: AnswerText, random: Generator) -> Edit:
    """What followed the same words at an earlier place of the document."""
    tokens = answer.tokens
    earlier: dict[tuple[int, ...], list[int]] = {}
    found: list[tuple[int, list[int]]] = []
    for place in range(STALE_CONTEXT, len(tokens)):
        context = tuple(tokens[place - STALE_CONTEXT : place])
        sources = [source for source in earlier.get(context, []) if tokens[source] != tokens[place]]
        if place > answer.first and sources:
            found.append((place, sources))
        earlier.setdefault(context, []).append(place)
    if not found:
        raise CannotBuild("nothing_repeats")
    place, sources = found[int(random.integers(len(found)))]
    source = int(random.choice(sources))
    return Edit(place, tokens[source:place], len(tokens), "earlier continuation")


def subword(answer: AnswerText, random: Generator) -> Edit:
    """The right text by other tokens: one token's text in two parts."""
    places = [answer.first + i for i, piece in enumerate(answer.pieces) if i and piece != LOST and len(piece) > 1]
    for place in random.permutation(places).tolist()[:8]:
        length = len(answer.pieces[place - answer.first])
        try:
            tokens = answer.split_again(place, 1 + int(random.integers(length - 1)))
        except CannotBuild:
            continue
        return Edit(place, tokens, place + 1, f"{len(tokens)} tokens for one")
    raise CannotBuild("no_other_tokens")


def truncate(answer: AnswerText, random: Generator, end: int) -> Edit:
    """The end too early or, where the answer has an end, missed: the answer goes on as it began. ``end``: its token."""
    tokens = answer.tokens
    ends = tokens[-1] == end
    if len(tokens) - answer.first < 3:
        raise CannotBuild("too_short")
    if ends and random.random() < 0.5:
        return Edit(len(tokens) - 1, tokens[answer.first : -1], len(tokens), "missed end")
    place = answer.first + 1 + int(random.integers(len(tokens) - answer.first - 1 - ends))
    return Edit(place, [end], len(tokens), "early end")


def builder_of(kind: str, end: int) -> Callable[[AnswerText, Generator], Edit]:
    """The builder of a synthetic kind. ``end``: the token with which this target's answers end."""
    builders: dict[str, Callable[[AnswerText, Generator], Edit]] = {
        "numeric": numeric,
        "swap": swap,
        "repeat": repeat,
        "truncate": lambda answer, random: truncate(answer, random, end),
        "stale": stale,
        "subword": subword,
    }
    return builders[kind]


def _replace_one(answer: AnswerText, found: dict[str, list[Match]], random: Generator, missing: str) -> Edit:
    """A variant that the text offers, each as likely, and one of its places; a few are tried."""
    variants = [name for name, matches in found.items() if matches]
    if not variants:
        raise CannotBuild(missing)
    reason = missing
    for _ in range(4):
        variant = _one_of(variants, random)
        begin, end, new = found[variant][int(random.integers(len(found[variant])))]
        try:
            edit = answer.replaced(begin, end, new, variant)
        except CannotBuild as error:
            reason = str(error)
            continue
        if edit.position > answer.first:  # the first answer token is an anchor, no draft stands there
            return edit
        reason = "only_at_the_start"
    raise CannotBuild(reason)


def _other_digit(digit: str, random: Generator) -> str:
    return str((int(digit) + 1 + int(random.integers(9))) % 10)


def _one_of(options: str | list[str], random: Generator) -> str:
    return options[int(random.integers(len(options)))]
