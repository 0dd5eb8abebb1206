"""Near-duplicates by MinHash with its bands on disk, so that memory does not grow with the corpus.

A text's signature has 64 minima over hashed shingles of 5 words (datasketch); texts that share one of 8 bands of 8
minima are candidates, and a candidate counts when the estimated Jaccard similarity reaches the threshold. The chance to
be found is 1 - (1 - s^8)^8 at similarity s: 0.94 at 0.85, 0.06 at 0.5.
"""

from __future__ import annotations

import sqlite3
from pathlib import Path

import numpy as np
from datasketch import MinHash

PERMUTATIONS = 64
BANDS = 8
ROWS = PERMUTATIONS // BANDS
SHINGLE = 5


def signature(text: str) -> np.ndarray:
    """Minima [64] of a text; texts without white space (many scripts) are cut into runs of characters."""
    words = text.casefold().split()
    if len(words) < SHINGLE:
        words = list(text.casefold())
    count = max(1, len(words) - SHINGLE + 1)
    sketch = MinHash(num_perm=PERMUTATIONS, seed=1)
    sketch.update_batch([" ".join(words[i : i + SHINGLE]).encode("utf-8", "surrogatepass") for i in range(count)])
    return sketch.hashvalues


class DuplicateIndex:
    """Texts seen so far; ``find`` says which earlier one a text nearly repeats, and remembers it if it is new."""

    def __init__(self, path: Path, threshold: float) -> None:
        path.unlink(missing_ok=True)
        self._path = path
        self._threshold = threshold
        self._base = sqlite3.connect(path, isolation_level=None)
        self._base.executescript(
            "pragma journal_mode=off; pragma synchronous=off;"
            "create table bands (key blob, id text); create index bands_key on bands (key);"
            "create table texts (id text primary key, minima blob) without rowid; begin;"
        )

    def find(self, identifier: str, text: str) -> str | None:
        """The id of an earlier text at least ``threshold`` similar to this one, else None."""
        minima = signature(text)
        keys = [bytes([band]) + minima[band * ROWS : (band + 1) * ROWS].tobytes() for band in range(BANDS)]
        marks = ",".join("?" * len(keys))
        found = self._base.execute(
            f"select distinct texts.id, minima from bands join texts on texts.id = bands.id where key in ({marks})",
            keys,
        )
        for earlier, blob in found:
            if np.mean(np.frombuffer(blob, dtype=minima.dtype) == minima) >= self._threshold:
                return str(earlier)
        self._base.execute("insert into texts values (?, ?)", (identifier, minima.tobytes()))
        self._base.executemany("insert into bands values (?, ?)", [(key, identifier) for key in keys])
        return None

    def close(self) -> None:
        """Drop the index; it is made again from the data whenever it is needed."""
        self._base.close()
        self._path.unlink(missing_ok=True)
