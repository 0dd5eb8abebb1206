"""One request of a batch: what it has emitted, where it ends, and how that is decided.

Both plain and speculative decoding hand their tokens to ``Row.take`` one commit at a time; the cut at an end token, a
stop string or the length is made here, token by token, so it cannot depend on how many tokens a commit brings.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from jetspec_train.decoding.stats import RoundStats


class StopStrings:
    """Ends an output at the first token with which the decoded output contains one of the strings."""

    def __init__(self, strings: Sequence[str], decode: Callable[[list[int]], str]) -> None:
        self.strings = tuple(text for text in strings if text)
        self._decode = decode
        # Every token but a special one stands for at least one byte; the margin is for special tokens, which may
        # decode to nothing, and for a word-initial space that decoding a part of a text can lose.
        self._window = max((len(text.encode()) for text in self.strings), default=0) + 8

    def found(self, output: list[int]) -> str | None:
        """The stop string that the end of ``output`` completes, if any."""
        if not self.strings:
            return None
        text = self._decode(output[-self._window :])
        return next((stop for stop in self.strings if stop in text), None)


@dataclass
class Row:
    """A request in progress. ``index``: its place among the prompts; ``key``: names its random draws."""

    index: int
    key: int
    prompt: list[int]
    limit: int  # most tokens to emit
    eos_ids: tuple[int, ...]
    stops: StopStrings
    output: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_string: str | None = None
    stats: RoundStats = field(default_factory=RoundStats)
    streamed: int = 0  # tokens of the next commit that the listener has already been given

    @property
    def anchor(self) -> int:
        """The last committed token; the target has not seen it yet."""
        return self.output[-1]

    @property
    def anchor_position(self) -> int:
        return len(self.prompt) + len(self.output) - 1

    @property
    def remaining(self) -> int:
        return self.limit - len(self.output)

    def ends_within(self, tokens: Sequence[int]) -> bool:
        """Whether the output would end at or before the last of these tokens; nothing is changed."""
        if len(tokens) >= self.remaining or any(token in self.eos_ids for token in tokens):
            return True
        if not self.stops.strings:
            return False
        text = list(self.output)
        for token in tokens:
            text.append(int(token))
            if self.stops.found(text) is not None:
                return True
        return False

    def take(self, tokens: Sequence[int]) -> list[int]:
        """Append the tokens up to where the output ends; returns those that were appended."""
        taken: list[int] = []
        for token in tokens:
            self.output.append(int(token))
            taken.append(int(token))
            if token in self.eos_ids:
                self.finish_reason = "stop"
            else:
                self.stop_string = self.stops.found(self.output)
                if self.stop_string is not None:
                    self.finish_reason = "stop"
                elif self.remaining <= 0:
                    self.finish_reason = "length"
            if self.finish_reason is not None:
                break
        return taken
