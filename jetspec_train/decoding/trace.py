"""A trace of decoding: every decision as one JSON line, enough to replay an answer token by token.

One line per round and row::

    {"request", "row", "round", "position", "anchor",
     "nodes": [{"token", "parent", "depth", "origin", "logprob", "survival", "correctness", "correctness_logit",
                "confidence", "confidence_logit"}],
     "pattern": {statistic: value} | null,
     "decisions": [{"stage", "nodes", "pattern_ok", "survival", "threshold", "action", "reason", "statistics",
                    "cached"}],
     "sent": [node], "accepted": [node], "deferred": [node], "rejected": [node], "overruled": [node],
     "bonus", "emitted": [token], "target_choices": [token], "target_logprob_of_tokens": [number], "seconds": {}}

``nodes`` are all candidates of the round; parent -1 is the anchor, origin "draft" or "cache". ``target_choices`` stand
after the anchor and after each sent node, in the order of ``sent``; ``target_logprob_of_tokens`` are the target's
log-probabilities of the sent nodes' tokens, in the same order, in the distribution that it chooses from.
Numbers that do not exist (no verifier, NaN from a head) are null.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, TextIO

from jetspec_train.artifacts.errors import UserError


class TraceWriter:
    """Writes to ``path``, from its beginning; raises UserError at once if that is not possible."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.lines = 0
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: TextIO = open(self.path, "w", encoding="utf-8")  # noqa: SIM115 - lives as long as the writer
        except OSError as error:
            raise UserError(
                f"decoding.trace={path} cannot be written: {error.strerror or error}. Choose another path, or leave "
                "decoding.trace unset."
            ) from error

    def write(self, record: dict[str, Any]) -> None:
        """One line, handed to the operating system at once, so that a kill loses no finished round."""
        self._file.write(json.dumps(_json(record), allow_nan=False) + "\n")
        self._file.flush()
        self.lines += 1

    def close(self) -> None:
        self._file.close()


def _json(value: Any) -> Any:
    """Plain JSON values; numpy numbers unwrapped, what is not finite as null, floats at six digits."""
    if isinstance(value, dict):
        return {str(key): _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    if hasattr(value, "tolist"):
        return _json(value.tolist())
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
