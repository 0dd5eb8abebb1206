"""A configuration as the command-line words that give it back.

A job runs hours after it was submitted, on another machine, so its script must hold everything that was asked for.
Words are kept, not a dump of all settings: they are short, a person can change one in the script, and what they give
back is compared with the configuration before anything is submitted.
"""

from __future__ import annotations

import dataclasses
import json
import typing
from typing import Any

from jetspec_train.config import Config, load_config
from jetspec_train.config_loading import VERBATIM_KEYS, is_text


def words_of(cfg: Config) -> list[str]:
    """``key=value`` words with which ``load_config`` gives ``cfg``: the preset, then each setting that differs.

    Raises RuntimeError if they do not give the same configuration.
    """
    words = [] if cfg.preset is None else [f"preset={cfg.preset}"]
    given = load_config(words)
    words += _differences(cfg, given, "")
    found = load_config(words)
    if found != cfg:
        lost = _differences(cfg, found, "")
        raise RuntimeError(f"these settings cannot be written as words: {', '.join(lost)}")
    return words


def _differences(wanted: Any, given: Any, prefix: str) -> list[str]:
    words = []
    hints = typing.get_type_hints(type(wanted))
    for field in dataclasses.fields(wanted):
        new, old = getattr(wanted, field.name), getattr(given, field.name)
        key = f"{prefix}{field.name}"
        if dataclasses.is_dataclass(new):
            words += _differences(new, old, f"{key}.")
        elif isinstance(new, dict) and new and not old:
            words += _leaves(new, key)
        elif new != old and key != "preset":
            words.append(f"{key}={new if key in VERBATIM_KEYS else _value(new, hints[field.name])}")
    return words


def _leaves(tree: dict[str, Any], prefix: str) -> list[str]:
    """One word per value of a free-form mapping: Hydra's grammar has no quotes for the keys of a whole one."""
    words = []
    for name, value in tree.items():
        key = f"{prefix}.{name}"
        words += _leaves(value, key) if isinstance(value, dict) and value else [f"{key}={_hydra(value)}"]
    return words


def _value(value: Any, kind: Any) -> str:
    """A value as it is typed: texts as they are, the rest in Hydra's grammar."""
    if is_text(kind):
        if value is None:
            return "null"
        # One pair of outer quotes is taken off when the word is read, so a text with its own needs another.
        quoted = len(value) >= 2 and value[0] == value[-1] and value[0] in "'\""
        return f'"{value}"' if quoted or value == "null" else value
    return _hydra(value)


def _hydra(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        text = value.replace("'", "\\'")
        return f"'{text}'"
    if isinstance(value, list):
        return "[" + ",".join(_hydra(item) for item in value) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{_hydra(item)}" for name, item in value.items()) + "}"
    return json.dumps(value)
