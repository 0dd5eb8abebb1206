"""Which split a prompt belongs to: a pure function of the prompt's text, the same in every run and shard.

``train`` feeds training, ``dev`` chooses checkpoints and defaults, ``calibrate_fit`` and
``calibrate_certify`` belong to calibration, and nothing is ever chosen on ``report``.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Mapping, Sequence

SPLITS = ("train", "dev", "calibrate_fit", "calibrate_certify", "report")
DEFAULT_SHARES = {"train": 0.86, "dev": 0.03, "calibrate_fit": 0.04, "calibrate_certify": 0.04, "report": 0.03}

_SPACE = re.compile(r"\s+")


def normalise(text: str) -> str:
    """Text as it is compared: Unicode compatibility form, case folded, every run of white space one blank."""
    return _SPACE.sub(" ", unicodedata.normalize("NFKC", text).casefold()).strip()


def content_hash(texts: Sequence[str]) -> str:
    """SHA-256 (hex) of the normalised user turns of one prompt: equal for prompts that differ only in form."""
    joined = "\x1e".join(normalise(text) for text in texts)
    return hashlib.sha256(joined.encode("utf-8", "surrogatepass")).hexdigest()


def fraction(key: str) -> float:
    """A number in [0, 1) that depends on ``key`` alone."""
    return int.from_bytes(hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()[:8], "big") / 2**64


def split_of(prompt_hash: str, shares: Mapping[str, float] | None = None, *, measured: bool = True) -> str:
    """The split of a prompt, from ``content_hash`` and the recipe's shares (they sum to 1).

    ``measured`` False: for sources that are not reported on, what was meant for the report goes to training.
    The hash is used with its own salt, so that a shard chosen from the same hash is independent of it.
    """
    shares = DEFAULT_SHARES if shares is None else shares
    place = fraction("split:" + prompt_hash)
    total = 0.0
    for split in SPLITS:
        total += shares.get(split, 0.0)
        if place < total:
            return split if measured or split != "report" else "train"
    return "train"  # only rounding of the sum brings us here


def held_out_templates(templates: Sequence[str], share: float) -> frozenset[str]:
    """Whole templates for the report split: about ``share`` of them, at least one, chosen by name.

    ``share`` 0 holds none out. A list of one template cannot be split and holds none out either.
    """
    if share <= 0 or len(templates) < 2:
        return frozenset()
    count = min(max(1, round(share * len(templates))), len(templates) - 1)
    return frozenset(sorted(templates, key=lambda name: fraction("template:" + name))[:count])
