"""An answer as tokens and as text at once, and edits of the text that come back as tokens.

An edit is made in whole words and written by the tokenizer as it writes such text itself; where it would not give back
the words that stand there now, nothing is edited. So an edited text never differs by its tokenisation alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

LOOK_BACK = 6  # tokens before a token with which its text is read: enough for leading spaces and split characters
LOST = "\ufffd"


class Codec(Protocol):
    """The two functions of ``targets.chat.ChatTokenizer`` that are needed here."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class CannotBuild(Exception):
    """Why a kind cannot be built on a text; the message is the reason that is counted."""


@dataclass(frozen=True)
class Edit:
    """Tokens ``position .. resume - 1`` of a sequence are replaced by ``tokens``; what follows stays."""

    position: int
    tokens: list[int]
    resume: int
    variant: str


class AnswerText:
    """Prompt and answer of one sample. Positions count from the start of the prompt.

    Attributes:
        tokens: all tokens.
        first: position of the first answer token.
    """

    def __init__(self, tokens: Sequence[int], first: int, codec: Codec) -> None:
        self.tokens = [int(token) for token in tokens]
        self.first = first
        self.codec = codec

    @cached_property
    def pieces(self) -> list[str]:
        """What each answer token adds to the text; LOST for a special token and for a part of a character."""
        return [self._piece(position) for position in range(self.first, len(self.tokens))]

    @cached_property
    def text(self) -> str:
        return "".join(self.pieces)

    @cached_property
    def prompt_text(self) -> str:
        return self._decode(self.tokens[: self.first])

    @cached_property
    def _starts(self) -> list[int]:
        """Where each piece begins in ``text``, and its end."""
        starts = [0]
        for piece in self.pieces:
            starts.append(starts[-1] + len(piece))
        return starts

    def replaced(self, begin: int, end: int, new: str, variant: str) -> Edit:
        """The edit that puts ``new`` for the characters ``begin .. end - 1`` of ``text``.

        Raises CannotBuild if the words around them are not what the tokenizer would write, or nothing changes.
        """
        low, high = self._words(begin, end)
        old_text = "".join(self.pieces[low:high])
        if LOST in old_text:
            raise CannotBuild("no_text")
        offset = self._starts[low]
        new_text = old_text[: begin - offset] + new + old_text[end - offset :]
        old = self.tokens[self.first + low : self.first + high]
        fresh = self._written(old_text, old, new_text)
        if fresh == old:
            raise CannotBuild("no_change")
        same = _common(old, fresh)
        tail = _common(old[same:][::-1], fresh[same:][::-1])
        return Edit(self.first + low + same, fresh[same : len(fresh) - tail], self.first + high - tail, variant)

    def split_again(self, position: int, at: int) -> list[int]:
        """Other tokens for the text of the token at ``position``: its first ``at`` characters, then the rest.

        Raises CannotBuild if the two parts do not give the same text by other tokens.
        """
        piece = self.pieces[position - self.first]
        tokens = [*self.codec.encode(piece[:at]), *self.codec.encode(piece[at:])]
        before = self.tokens[max(0, position - LOOK_BACK) : position]
        if tokens == [self.tokens[position]] or self._decode([*before, *tokens]) != self._decode(before) + piece:
            raise CannotBuild("no_other_tokens")
        return tokens

    def _piece(self, position: int) -> str:
        if not self.codec.decode([self.tokens[position]], skip_special_tokens=True):
            return LOST
        before = self.tokens[max(0, position - LOOK_BACK) : position]
        head, whole = self._decode(before), self._decode([*before, self.tokens[position]])
        added = whole[len(head) :] if whole.startswith(head) else LOST
        return LOST if LOST in added else added

    def _words(self, begin: int, end: int) -> tuple[int, int]:
        """The answer tokens (from, to) of the whole words that the characters touch."""
        last = len(self.pieces)
        low = next(i for i in range(last) if self._starts[i + 1] > begin)
        high = next(i for i in range(last, 0, -1) if self._starts[i - 1] < end)
        while low > 0 and not self.pieces[low][:1].isspace() and self.pieces[low - 1] != LOST:
            low -= 1
        while high < last and not self.pieces[high][:1].isspace() and self.pieces[high] != LOST:
            high += 1
        return low, high

    def _written(self, old_text: str, old: list[int], new_text: str) -> list[int]:
        """``new_text`` in tokens, written in the way that turns ``old_text`` into ``old``."""
        for lead in ("", "x"):  # some tokenizers put a space before a text that begins with a word
            head = self.codec.encode(lead) if lead else []
            before, after = self.codec.encode(lead + old_text), self.codec.encode(lead + new_text)
            if before == head + old and after[: len(head)] == head:
                return after[len(head) :]
        raise CannotBuild("written_differently")

    def _decode(self, tokens: Sequence[int]) -> str:
        return self.codec.decode(tokens, skip_special_tokens=False)


def _common(first: Sequence[int], second: Sequence[int]) -> int:
    """How many tokens two sequences begin with in common."""
    count = 0
    while count < min(len(first), len(second)) and first[count] == second[count]:
        count += 1
    return count
