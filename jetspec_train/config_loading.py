"""From command-line words to a plain settings tree, and from that tree to checked dataclasses.

Hydra composes the groups of ``conf/``; the dataclasses (given by the caller) say which keys exist
and of which type. Values of text keys never pass through Hydra's grammar: ``prompt=What's up?``
and ``run_dir=my runs/x=1`` need no quotes beyond the shell's own, and arrive unchanged. Nothing
here creates a folder or changes the working directory.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import types
import typing
from typing import Any

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.resources import resource_folder

# Kept exactly as typed; other texts may carry one pair of outer quotes out of habit with Hydra.
VERBATIM_KEYS = ("prompt", "target.system_prompt")


def leaves(schema: type, prefix: str = "") -> dict[str, Any]:
    """``{dotted key: type}`` of every setting of a nested dataclass."""
    found: dict[str, Any] = {}
    for name, kind in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            found.update(leaves(typing.cast(type, kind), f"{prefix}{name}."))
        else:
            found[f"{prefix}{name}"] = kind
    return found


def sections(schema: type, prefix: str = "") -> list[str]:
    """Dotted names of the nested dataclasses."""
    found = []
    for name, kind in typing.get_type_hints(schema).items():
        if dataclasses.is_dataclass(kind):
            found += [f"{prefix}{name}", *sections(typing.cast(type, kind), f"{prefix}{name}.")]
    return found


def groups() -> dict[str, list[str]]:
    """``{group: its choices}`` as found in ``conf/``."""
    return {
        folder.name: sorted(file.stem for file in folder.glob("*.yaml"))
        for folder in sorted(resource_folder("conf").iterdir())
        if folder.is_dir() and any(folder.glob("*.yaml"))
    }


def near(word: str, known: typing.Iterable[str]) -> str:
    """ " Did you mean ...?" for a mistyped name, or nothing."""
    known = list(known)
    found = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    last = word.rsplit(".", 1)[-1]
    found += [k for k in known if k.rsplit(".", 1)[-1] == last and k not in found][:3]
    if not found:  # a right name in the wrong section, mistyped as well
        tails = difflib.get_close_matches(last, {k.rsplit(".", 1)[-1] for k in known}, n=2, cutoff=0.75)
        found = [k for k in known if k.rsplit(".", 1)[-1] in tails][:3]
    return f" Did you mean {' or '.join(found)}?" if found else ""


def is_text(kind: Any) -> bool:
    return kind is str or set(typing.get_args(kind)) == {str, type(None)}


def _text(key: str, value: str, kind: Any) -> str | None:
    if key in VERBATIM_KEYS:
        return value
    if len(value) >= 2 and value[0] == value[-1] and value[0] in "'\"":
        return value[1:-1]
    return None if value == "null" and kind is not str else value


@dataclasses.dataclass
class Arguments:
    """The command line sorted: for Hydra, and the texts that bypass it."""

    hydra: list[str] = dataclasses.field(default_factory=list)
    texts: dict[str, str | None] = dataclasses.field(default_factory=dict)
    keys: set[str] = dataclasses.field(default_factory=set)


def sort_arguments(arguments: list[str], schema: type) -> Arguments:
    """Check every ``key=value`` word against the schema and the groups of ``conf/``.

    Raises UserError (one line: key, value, what is allowed or meant) for unknown keys and groups,
    words that are no ``key=value``, and values that cannot be read.
    """
    known, nested, choices = leaves(schema), sections(schema), groups()
    result = Arguments()
    for number, word in enumerate(arguments):
        key, equals, value = word.partition("=")
        if not equals:
            raise UserError(_not_an_assignment(word, arguments[:number], choices))
        if key.startswith("~"):
            raise UserError(f"{word}: settings cannot be removed. Write {key[1:]}=null to unset one.")
        key = key.lstrip("+")
        result.keys.add(key)
        if key in choices and key != "run_dir":
            key, value = _shorthand(key, value, choices[key])
            if key in choices:
                result.hydra.append(f"{key}={value}")
                continue
        if key in known and is_text(known[key]):
            result.texts[key] = _text(key, value, known[key])
        elif key in known or any(key.startswith(f"{name}.") for name, kind in known.items() if _is_mapping(kind)):
            kind = known.get(key)
            result.hydra.append(_hydra_override(key, value, "a value" if kind is None else expected(kind)))
        elif key in nested:
            inside = ", ".join(k for k in known if k.startswith(f"{key}."))
            raise UserError(f"{word}: {key} is a section. Set one of its keys: {inside}.")
        elif key.startswith("hydra"):
            raise UserError(f"{word}: Hydra's own settings have no effect here. The output goes to run_dir=...")
        else:
            raise UserError(f"{word}: unknown key {key!r}.{near(key, known)} python -m jetspec_train --help lists all.")
    return result


def _is_mapping(kind: Any) -> bool:
    return kind is dict or typing.get_origin(kind) is dict


def _not_an_assignment(word: str, before: list[str], choices: dict[str, list[str]]) -> str:
    if any(b.startswith(("prompt=", "prompt_file=")) for b in before):
        return f"{word!r} is not key=value. If it belongs to the prompt, quote it as a whole: 'prompt=... {word} ...'"
    if word in choices.get("stage", []):
        return f"{word!r} is not key=value. Write stage={word}."
    if word in ("-m", "--multirun"):
        return "Multirun (-m) is not supported: start one command per run, each with its own run_dir=..."
    return f"{word!r} is not key=value. Example: stage=train train.epochs=2. See --help."


def _shorthand(group: str, value: str, choices: list[str]) -> tuple[str, str]:
    """``target=Qwen/Qwen3-0.6B`` for ``target.name=...``; ``recipe=NAME or path`` likewise."""
    if value in choices:
        return group, value
    if value == "null" and group == "preset":
        return group, "default"
    if group == "target" and ("/" in value or value.endswith(".gguf") or ":" in value):
        return "target.name", value
    if group == "recipe" and value.endswith((".yaml", ".yml")):
        return "recipe.path", value
    if group == "recipe" and (resource_folder("data_recipes") / f"{value}.yaml").is_file():
        return "recipe.name", value
    hint = {
        "target": " A hub id, a folder or a GGUF file is given as target.name=...",
        "recipe": " A recipe of your own is given as recipe.path=FILE.yaml.",
    }.get(group, "")
    raise UserError(f"{group}={value}: allowed are {', '.join(choices)}.{near(value, choices)}{hint}")


def _hydra_override(key: str, value: str, wanted: str) -> str:
    """Check that Hydra's grammar reads the value; ``++`` because conf/ holds only what differs."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    override = f"++{key}={value}"
    try:
        parsed = OverridesParser.create().parse_override(override)
    except HydraException as error:
        if wanted == "a value":  # a free-form place, such as recipe.overrides.gsm8k.path: take it as text
            return f"++{key}={_quote(value)}"
        raise UserError(f"{key}={value}: {wanted} is needed, and this cannot be read as one.") from error
    if parsed.is_sweep_override():
        raise UserError(
            f"{key}={value}: one value is needed; several runs in one command are not supported. "
            f"A list is written {key}=[{value}]."
        )
    return override


def _quote(value: str) -> str:
    """A Hydra string literal that means exactly ``value``."""
    escaped = re.sub(r"(\\*)(')", lambda match: match.group(1) * 2 + "\\'", value)
    tail = len(escaped) - len(escaped.rstrip("\\"))
    return "'" + escaped + "\\" * tail + "'"


def compose(arguments: Arguments) -> dict[str, Any]:
    """The settings tree: groups and presets of conf/, then the command line. Interpolations resolved."""
    from hydra import compose as hydra_compose
    from hydra import initialize_config_dir
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    try:
        with initialize_config_dir(config_dir=str(resource_folder("conf")), version_base="1.3"):
            composed = hydra_compose("config", overrides=arguments.hydra)
        tree = typing.cast("dict[str, Any]", OmegaConf.to_container(composed, resolve=True))
    except (HydraException, OmegaConfBaseException) as error:
        first = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"The configuration cannot be put together: {first}") from error
    for key, value in arguments.texts.items():
        *parents, name = key.split(".")
        place = tree
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return tree


def build(schema: type, tree: Any, prefix: str = "") -> Any:
    """Fill a dataclass from a plain tree, checking names and types.

    Raises UserError naming the key, the value and the type that is needed.
    """
    if not isinstance(tree, dict):
        raise UserError(f"{prefix.rstrip('.')}={tree!r}: a section with keys is needed.")
    hints = typing.get_type_hints(schema)
    values = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if name not in hints:
            raise UserError(f"Unknown key {key!r} with value {value!r} in conf/.{near(str(name), hints)}")
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            values[name] = build(typing.cast(type, kind), value, f"{key}.")
        else:
            try:
                values[name] = convert(value, kind)
            except (TypeError, ValueError, OverflowError) as error:
                raise UserError(f"{key}={_shown(value)}: {expected(kind)} is needed.") from error
    return schema(**values)


def _shown(value: Any) -> str:
    """As the user would type it."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    return str(value)


def convert(value: Any, kind: Any) -> Any:
    """``value`` as ``kind``; raises TypeError or ValueError when it is something else.

    The only liberties: an integer where a float is meant, and 8e8 where an integer is meant.
    """
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return value
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in parameters:
            return None
        return convert(value, next(p for p in parameters if p is not type(None)))
    if origin is list:
        if not isinstance(value, list):
            raise TypeError(value)
        return [convert(item, parameters[0]) for item in value]
    if origin is dict:
        if not isinstance(value, dict):
            raise TypeError(value)
        return {str(k): convert(v, parameters[1]) for k, v in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind is int and isinstance(value, float) and value == int(value):
        return int(value)
    if type(value) is not kind:
        raise TypeError(value)
    return value


def expected(kind: Any) -> str:
    """A type in words: 'an integer or null'."""
    origin, parameters = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(expected(p) if p is not type(None) else "null" for p in parameters)
    if origin is list:
        return f"a list such as {'[1,2]' if parameters[0] in (int, float) else '[a,b]'}"
    if origin is dict or kind is dict:
        return "a mapping such as {a: 1}"
    return {int: "an integer", float: "a number", bool: "true or false", str: "a text"}.get(kind, "a value")
