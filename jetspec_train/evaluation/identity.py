"""Is speculative output really the target's own? Compared token by token, in float32.

In exact arithmetic greedy outputs are equal. In float32 a forward over many tokens may round a little
differently from one over a single token, so a divergence is excused only where the two tokens are
practically tied: their margin, recomputed in float64, is below 1e-4. In bfloat16 ties are common and
divergences are counted with their margins, never excused and never called lossless.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from jetspec_train.evaluation.benchmark import PLAIN, ArrivalClock, Contender, PromptRecord
from jetspec_train.evaluation.suites import SuitePrompt

TIE = 1e-4  # a float64 margin below this is rounding, not a difference between methods


@dataclass
class Divergence:
    """The first place where two outputs part. A token is None where that output had ended."""

    prompt_id: str
    domain: str
    position: int  # in the answer, 0-based
    plain_token: int | None
    other_token: int | None
    margin: float | None  # how far the worse of the two tokens lies below the target's best; None: not defined
    excused: bool = False

    def describe(self) -> str:
        margin = "not defined" if self.margin is None else f"{self.margin:.2e}"
        return (
            f"prompt {self.prompt_id} ({self.domain}), answer token {self.position}: plain {self.plain_token}, "
            f"speculative {self.other_token}, margin {margin}{' (a tie)' if self.excused else ''}"
        )


@dataclass
class Comparison:
    """How many outputs were compared, how many were equal, and where the others part."""

    dtype: str
    compared: int = 0
    identical: int = 0
    divergences: list[Divergence] = field(default_factory=list)
    by_domain: dict[str, list[int]] = field(default_factory=dict)  # domain -> [compared, identical]

    @property
    def lossless(self) -> bool | None:
        """True if every divergence is excused by its margin; None where nothing was compared."""
        return all(divergence.excused for divergence in self.divergences) if self.compared else None

    def add(self, prompt: SuitePrompt, divergence: Divergence | None) -> None:
        counts = self.by_domain.setdefault(prompt.domain, [0, 0])
        self.compared += 1
        counts[0] += 1
        if divergence is None:
            self.identical += 1
            counts[1] += 1
        else:
            self.divergences.append(divergence)

    def to_dict(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype,
            "compared_outputs": self.compared,
            "identical_outputs": self.identical,
            "tie_below": TIE,
            "divergences": [asdict(divergence) for divergence in self.divergences],
        }


def first_difference(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first unequal token; where one is a prefix of the other, the length of the shorter."""
    for index, (a, b) in enumerate(zip(plain, other)):
        if a != b:
            return index
    return None if len(plain) == len(other) else min(len(plain), len(other))


def compare_outputs(
    comparison: Comparison,
    prompt: SuitePrompt,
    plain: Sequence[int],
    other: Sequence[int],
    margin_of: Callable[[list[int], int, int], float] | None,
    *,
    excuse_ties: bool,
) -> Divergence | None:
    """Add one pair of outputs to ``comparison``; returns the divergence, if any.

    ``margin_of(prefix, a, b)`` gives the margin after ``prefix``; None (sampled decoding, where a margin
    between two tokens says nothing about a keyed draw) leaves it undefined, and nothing is excused.
    """
    place = first_difference(plain, other)
    divergence = None
    if place is not None:
        a = plain[place] if place < len(plain) else None
        b = other[place] if place < len(other) else None
        margin = None
        if margin_of is not None and a is not None and b is not None:
            margin = margin_of([*prompt.tokens, *plain[:place]], a, b)
        excused = excuse_ties and margin is not None and margin < TIE
        divergence = Divergence(prompt.id, prompt.domain, place, a, b, margin, excused)
    comparison.add(prompt, divergence)
    return divergence


def check_identity(
    prompts: Sequence[SuitePrompt],
    plain: Contender,
    other: Contender,
    *,
    dtype: str,
    max_new_tokens: int,
    margin_of: Callable[[list[int], int, int], float] | None,
    progress: Callable[[], Any] = lambda: None,
) -> Comparison:
    """Decode every prompt both ways and compare; ties below ``TIE`` are excused. Not timed."""
    comparison = Comparison(dtype)
    for prompt in prompts:
        first, second = (
            contender.answer(prompt.tokens, prompt.row, max_new_tokens, ArrivalClock()).tokens
            for contender in (plain, other)
        )
        compare_outputs(comparison, prompt, first, second, margin_of, excuse_ties=True)
        progress()
    return comparison


def compare_records(
    records: Sequence[PromptRecord],
    name: str,
    *,
    dtype: str,
    margin_of: Callable[[list[int], int, int], float] | None,
) -> Comparison:
    """Compare the outputs that the timed runs gave; ties are excused only where the timing was in float32."""
    comparison = Comparison(dtype)
    for record in records:
        plain, other = record.runs[PLAIN].tokens, record.runs[name].tokens
        compare_outputs(comparison, record.prompt, plain, other, margin_of, excuse_ties=dtype == "float32")
    return comparison


class MarginJudge:
    """How far apart two tokens are after a prefix, by a target of higher precision than the run's.

    ``double=True``: a float64 copy of the target, made on the first question. The weights and products are
    float64; where a model's own code computes a norm in float32 whatever its input, it does so here too,
    and the error that this leaves (about 1e-6) is far below ``TIE``. ``double=False``: the target as it is.
    """

    def __init__(self, target: Any, *, double: bool) -> None:
        self._target = target
        self._model: Any = None if double else target.model

    def __call__(self, prefix: list[int], a: int, b: int) -> float:
        """``max(logits) - min(logits[a], logits[b])`` after ``prefix``."""
        import torch

        if self._model is None:
            self._model = copy.deepcopy(self._target.model).double().eval()
        with torch.inference_mode():
            tokens = torch.tensor([prefix], device=self._target.device)
            logits = self._model(input_ids=tokens, use_cache=False).logits[0, -1].double()
        return float(logits.max() - torch.minimum(logits[a], logits[b]))
