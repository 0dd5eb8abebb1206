"""What ``--help`` prints, gathered from the stages, the groups of conf/ and the dataclasses."""

from __future__ import annotations

import dataclasses
import textwrap
from typing import Any

import yaml

from jetspec_train.artifacts.manifest import flatten
from jetspec_train.artifacts.resources import resource_folder
from jetspec_train.config import Config, to_dict
from jetspec_train.config_loading import groups
from jetspec_train.stages import STAGES

INTRODUCTION = """\
jetspec_train - train, calibrate, export and prove draft models for speculative decoding

usage: python -m jetspec_train stage=STAGE [preset=PRESET] [run_dir=FOLDER] [key=value ...]
"""

EXAMPLES = """\
examples
  python -m jetspec_train stage=pipeline preset=quickstart
      everything once, with the embedded target and prompts made on the spot; ends with a table and a report
  python -m jetspec_train stage=distill target=Qwen/Qwen3-0.6B recipe=gsm8k run_dir=runs/qwen
      let another target answer another recipe's prompts; the same command continues after a stop
  python -m jetspec_train stage=train run_dir=runs/qwen target=Qwen/Qwen3-0.6B recipe=gsm8k draft.layers=3
      train on those answers; give the same settings to every stage of a run
  python -m jetspec_train stage=generate bundle=runs/quickstart/export/bundle "prompt=What's up?"
      answer a prompt; the text after prompt= arrives as it is
  python -m jetspec_train stage=doctor preset=gsm8k
      what this machine can do, and what that run would cost
  python -m jetspec_train stage=train preset=gsm8k plan=true
      print what a stage would do, and stop

A value of a text key (prompt, run_dir, bundle, target.name ...) needs no quotes but the shell's own. Lists are
written [a,b], "no value" is null. One command is one run: multirun (-m) is not supported.

exit codes: 0 done, 1 a defect of this project, 2 something you can put right (one line says what), 85 a scheduler
asked to stop and everything is saved, 130 interrupted with Ctrl-C; after 85 and 130 the same command continues
"""


def help_text() -> str:
    """The whole of ``--help``."""
    parts = [INTRODUCTION, "stages", *(f"  {name:<10} {text}" for name, text in STAGES.items()), ""]
    described = {name: [(c, first_comment(name, c)) for c in choices] for name, choices in groups().items()}
    parts += ["presets (each can be changed by further key=value)"]
    parts += [f"  {choice:<11} {text}" for choice, text in described.pop("preset", [])]
    described.pop("stage", None)
    described["recipe"] += [(n, text) for n, text in recipes() if n not in dict(described["recipe"])]
    parts += ["", "groups"]
    for group, choices in described.items():
        parts += [
            f"  {group + '=' + choice:<26} {textwrap.shorten(t, 95, placeholder=' ...')}" for choice, t in choices
        ]
    parts += ["", EXAMPLES, "keys and their defaults (the groups and presets above change some)"]
    parts += [f"  {line}" for line in _keys()]
    return "\n".join(parts)


def recipes() -> list[tuple[str, str]]:
    """(name, first sentence of its description) of every file in data_recipes/."""
    found = []
    for path in sorted(resource_folder("data_recipes").glob("*.yaml")):
        description = " ".join(str(yaml.safe_load(path.read_text(encoding="utf-8")).get("description", "")).split())
        sentence = description.split(". ")[0].rstrip(".")
        found.append((path.stem, sentence))
    return found


def _keys() -> list[str]:
    """The keys with their defaults, wrapped, one paragraph per section."""
    defaults = to_dict(Config())
    paragraphs = [{k: v for k, v in defaults.items() if not isinstance(v, dict)}]
    paragraphs += [flatten({name: value}) for name, value in defaults.items() if isinstance(value, dict)]
    lines = []
    for paragraph in paragraphs:
        text = " ".join(f"{key}={typed(value)}" for key, value in paragraph.items())
        lines += textwrap.wrap(text, 110, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    return lines


def typed(value: Any) -> str:
    """A value as it is typed after ``key=``."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list):
        return "[" + ",".join(typed(item) for item in value) + "]"
    return str(value)


def first_comment(group: str, choice: str) -> str:
    """The line with which a file of conf/ says what it is (its first comment that is no directive)."""
    for line in (resource_folder("conf") / group / f"{choice}.yaml").read_text(encoding="utf-8").splitlines():
        if line.startswith("#") and not line.startswith("# @package"):
            return line.lstrip("# ").strip()
    return ""


def as_yaml(value: Any) -> str:
    """Settings or a plan as YAML, in their own order."""
    return yaml.safe_dump(_simple(value), sort_keys=False, allow_unicode=True, width=110)


def _simple(value: Any) -> Any:
    """Only what safe YAML knows: paths become text, tuples lists, dataclasses mappings."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    if isinstance(value, dict):
        return {str(key): _simple(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_simple(item) for item in value]
    return value if isinstance(value, str | int | float | bool) or value is None else str(value)
