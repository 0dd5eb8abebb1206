"""A recipe: which prompts a draft is trained and measured on. Read from ``data_recipes/*.yaml``.

Everything is checked when the recipe is loaded, before a row is read: unknown keys, wrong types,
impossible combinations. The schema for people is in ``data_recipes/README.md``.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from jetspec_train.artifacts.errors import UserError
from jetspec_train.artifacts.files import stable_hash
from jetspec_train.artifacts.resources import resource_folder
from jetspec_train.config import RecipeConfig
from jetspec_train.data.splits import DEFAULT_SHARES, SPLITS

KINDS = ("procedural", "jsonl", "parquet", "hub")
USES = ("all", "train", "report")
CONTENT_ROLES = ("question", "instruction", "turns", "messages")  # a source has exactly one of them
ROLES = (*CONTENT_ROLES, "input", "answer", "entry_point", "system", "domain")
SCORINGS = ("gsm8k", "math", "code")  # how an answer is compared with the reference (evaluation.scoring)
# {{name}} stands for the text {name}, {name} for a column; other braces, as in \boxed{}, for themselves.
PLACEHOLDER = re.compile(r"\{\{([A-Za-z_]\w*)\}\}|\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True)
class Source:
    """One place that prompts come from."""

    name: str
    type: str  # procedural | jsonl | parquet | hub
    path: str | None = None  # a file, a pattern, or a dataset's hub id
    config: str | None = None  # hub: the dataset's configuration
    split: str = "train"  # hub: the dataset's own split
    revision: str | None = None  # hub: a commit, so that the data cannot change
    columns: dict[str, str] = field(default_factory=dict)  # role -> column
    prompt: str | None = None  # shape of a user turn, e.g. "{question}\nThink step by step."
    domain: str | None = None
    licence: str | None = None
    scoring: str | None = None  # gsm8k | math | code: how stage=evaluate tells a right answer from a wrong one
    use: str = "all"  # all splits | train (never measured) | report (only measured)
    weight: float = 1.0  # how often this source is asked, relative to the others
    limit: int | None = None  # at most so many rows are read
    max_turns: int | None = None  # at most so many user turns of a conversation
    count: int = 10_000  # procedural: so many prompts
    seed: int = 0  # procedural
    domains: tuple[str, ...] | None = None  # procedural: which of its domains


@dataclass(frozen=True)
class Recipe:
    name: str
    sources: tuple[Source, ...]
    shares: dict[str, float]
    description: str = ""
    licence: str | None = None
    prompts: int | None = None  # at most so many prompts of the train split
    origin: str = ""  # the file it was read from

    def identity(self) -> dict[str, Any]:
        """What determines the prompts. The name, the texts for people and ``prompts`` do not."""
        return {"sources": [_source_identity(source) for source in self.sources], "shares": self.shares}

    def hash(self) -> str:
        return stable_hash(self.identity())


def _source_identity(source: Source) -> dict[str, Any]:
    settings = dataclasses.asdict(source)
    del settings["licence"], settings["scoring"]
    if source.type in ("jsonl", "parquet") and source.path:
        # A moved file is the same data; a changed one is not.
        settings["path"] = [[f.name, f.stat().st_size] for f in local_files(source)]
    return settings


def local_files(source: Source) -> list[Path]:
    """The files of a local source in a fixed order; UserError when there are none."""
    path = Path(str(source.path))
    if path.is_file():
        return [path]
    if path.is_dir():
        ending = "*.parquet" if source.type == "parquet" else "*.jsonl*"
        found = sorted(path.glob(ending))
    else:
        found = sorted(path.parent.glob(path.name)) if any(c in path.name for c in "*?[") else []
    if not found:
        raise UserError(
            f"Source {source.name!r} reads {path}, where no such file exists. Give its place with "
            f"recipe.overrides.{source.name}.path=FILE."
        )
    return found


def find_recipe(name: str) -> Path:
    """The YAML file of a recipe: a path as it is, or a name of ``data_recipes/``."""
    if name.endswith((".yaml", ".yml")) or os.sep in name:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"The recipe file {path} does not exist.")
        return path
    folder = resource_folder("data_recipes")
    path = folder / f"{name}.yaml"
    if not path.is_file():
        known = ", ".join(sorted(p.stem for p in folder.glob("*.yaml")))
        raise UserError(f"recipe.name={name} is not a recipe. Known: {known}; or give recipe.path=FILE.yaml.")
    return path


def load_recipe(cfg: RecipeConfig | str) -> Recipe:
    """Read and check the recipe of a configuration (or one by its name or path).

    Raises UserError naming the file, the key, its value and what is allowed.
    """
    if isinstance(cfg, str):
        cfg = RecipeConfig(path=cfg) if cfg.endswith((".yaml", ".yml")) else RecipeConfig(name=cfg)
    path = find_recipe(cfg.path or cfg.name)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"The recipe {path} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise UserError(f"The recipe {path} must be a mapping with the key 'sources'.")
    raw_sources = content.get("sources")
    if not isinstance(raw_sources, list) or not raw_sources:
        raise UserError(f"The recipe {path} needs 'sources': a list with at least one source.")
    sources = [dict(_mapping(source, path, "each source")) for source in raw_sources]
    for source in sources:
        _anchor_path(source, path.parent)
    content = {**content, "sources": sources}
    _apply_overrides(content, dict(cfg.overrides), path)
    return _checked(content, path, cfg.prompts)


def _mapping(value: Any, path: Path, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise UserError(f"The recipe {path}: {what} must be a mapping of keys to values, not {value!r}.")
    return value


def _anchor_path(source: dict[str, Any], folder: Path) -> None:
    """Relative paths in a recipe file are relative to that file; ``~`` and ``$NAME`` are expanded."""
    path = source.get("path")
    if isinstance(path, str) and _kind_of(source) in ("jsonl", "parquet"):
        expanded = Path(os.path.expandvars(path)).expanduser()
        source["path"] = str(expanded if expanded.is_absolute() else folder / expanded)


def _kind_of(source: Mapping[str, Any]) -> str | None:
    """The type, where it is left out, follows from the path: a file's ending, else a hub id."""
    kind, path = source.get("type"), source.get("path")
    if kind is not None or not isinstance(path, str):
        return kind
    if path.endswith((".jsonl", ".jsonl.gz", ".json")):
        return "jsonl"
    return "parquet" if path.endswith(".parquet") else "hub"


def _apply_overrides(content: dict[str, Any], overrides: dict[str, Any], path: Path) -> None:
    """``recipe.overrides``: a source's name with its keys, a recipe key, or a key of the only source."""
    sources: list[dict[str, Any]] = content["sources"]
    by_name = {str(source.get("name")): source for source in sources}
    source_keys = {f.name for f in dataclasses.fields(Source)}
    for key, value in overrides.items():
        if key in by_name:
            _override_source(by_name[key], dict(_mapping(value, path, f"recipe.overrides.{key}")))
        elif key in ("shares", "description", "licence"):
            content[key] = value
        elif key in source_keys and len(sources) == 1:
            _override_source(sources[0], {key: value})
        else:
            raise UserError(
                f"recipe.overrides.{key} fits neither a source of {path.name} ({', '.join(by_name)}) nor a key "
                "of the recipe (shares). Write recipe.overrides.SOURCE.KEY=VALUE."
            )


def _override_source(source: dict[str, Any], changes: dict[str, Any]) -> None:
    if isinstance(changes.get("columns"), Mapping):
        changes["columns"] = {**(source.get("columns") or {}), **changes["columns"]}
    path = changes.get("path")
    if isinstance(path, str):
        changes["path"] = os.path.expandvars(os.path.expanduser(path))
        kind = _kind_of({"path": path}) if "type" not in changes else changes["type"]
        if kind != source.get("type"):
            source["type"] = kind
            if kind != "hub":  # what pinned the hub's copy says nothing about a local file
                for key in ("config", "split", "revision"):
                    source.pop(key, None)
    source.update(changes)


def _checked(content: dict[str, Any], path: Path, prompts: int | None) -> Recipe:
    allowed = {f.name for f in dataclasses.fields(Recipe)} - {"origin"}
    _known_keys(content, allowed, f"the recipe {path}")
    if prompts is None:
        prompts = content.get("prompts")
    _positive(prompts, f"{path}: prompts")
    names = [str(source.get("name")) for source in content["sources"]]
    if len(set(names)) != len(names) or "None" in names:
        raise UserError(f"The recipe {path}: every source needs its own 'name' (found: {', '.join(names)}).")
    licence = content.get("licence")
    return Recipe(
        name=str(content.get("name") or path.stem),
        sources=tuple(_checked_source(source, path, licence) for source in content["sources"]),
        shares=_checked_shares(content.get("shares"), path),
        description=str(content.get("description") or "").strip(),
        licence=licence,
        prompts=prompts,
        origin=str(path),
    )


def _known_keys(mapping: Mapping[str, Any], allowed: set[str], where: str) -> None:
    unknown = sorted(str(key) for key in mapping if key not in allowed)
    if unknown:
        raise UserError(
            f"Unknown key {', '.join(map(repr, unknown))} in {where}. Allowed: {', '.join(sorted(allowed))}."
        )


def _positive(value: Any, where: str) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise UserError(f"{where} is {value!r}; it must be a whole number of at least 1.")


def _checked_shares(value: Any, path: Path) -> dict[str, float]:
    if value is None:
        return dict(DEFAULT_SHARES)
    shares = dict(_mapping(value, path, "shares"))
    _known_keys(shares, set(SPLITS), f"shares of the recipe {path}")
    for split, share in shares.items():
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UserError(f"{path}: shares.{split} is {share!r}; it must be a number between 0 and 1.")
    total = sum(shares.values())
    if abs(total - 1) > 1e-6:
        raise UserError(f"{path}: the shares sum to {total:g}, not to 1 ({shares}).")
    return {split: float(shares.get(split, 0.0)) for split in SPLITS}


def _checked_source(raw: dict[str, Any], path: Path, licence: str | None) -> Source:
    where = f"source {raw['name']!r} of the recipe {path}"
    _known_keys(raw, {f.name for f in dataclasses.fields(Source)}, where)
    kind = _kind_of(raw)
    if kind not in KINDS:
        raise UserError(f"{where}: type is {kind!r}. Allowed: {', '.join(KINDS)}.")
    use = raw.get("use", "all")
    if use not in USES:
        raise UserError(f"{where}: use is {use!r}. Allowed: {', '.join(USES)}.")
    scoring = raw.get("scoring")
    if scoring is not None:
        if scoring not in SCORINGS:
            raise UserError(f"{where}: scoring is {scoring!r}. Allowed: {', '.join(SCORINGS)}.")
        if "answer" not in (raw.get("columns") or {}):
            raise UserError(f"{where}: scoring={scoring} needs columns.answer, the column of the right answers.")
    for key in ("limit", "max_turns", "count"):
        _positive(raw.get(key), f"{where}: {key}")
    weight = raw.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < float("inf"):
        raise UserError(f"{where}: weight is {weight!r}; it must be a number above 0.")
    for key in ("path", "config", "split", "revision", "prompt", "domain", "licence"):
        if raw.get(key) is not None and not isinstance(raw[key], str):
            raise UserError(f"{where}: {key} is {raw[key]!r}; it must be text (quote it).")
    columns = {str(k): v for k, v in dict(_mapping(raw.get("columns") or {}, path, "columns")).items()}
    if kind == "procedural":
        _check_procedural(raw, columns, where)
    else:
        _check_columns(columns, raw.get("prompt"), where)
        if not raw.get("path"):
            raise UserError(f"{where} needs a path: recipe.overrides.{raw['name']}.path=FILE_OR_HUB_ID.")
        for key in ("count", "seed", "domains"):
            if key in raw:
                raise UserError(f"{where}: {key} is only for a procedural source, this one is {kind}.")
    for key in ("config", "split", "revision"):
        if kind != "hub" and key in raw:
            raise UserError(f"{where}: {key} is only for a hub source, this one is {kind}.")
    domains = raw.get("domains")
    values = {**raw, "type": kind, "columns": columns, "weight": float(weight), "licence": raw.get("licence", licence)}
    values["domains"] = tuple(domains) if domains is not None else None
    return Source(**values)


def _check_procedural(raw: dict[str, Any], columns: dict[str, str], where: str) -> None:
    from jetspec_train.data.procedural import DOMAINS

    for key in ("path", "prompt", "domain"):
        if raw.get(key):
            raise UserError(f"{where}: {key} is not for a procedural source.")
    if columns:
        raise UserError(f"{where}: a procedural source has no columns.")
    domains = raw.get("domains")
    if domains is not None and (not isinstance(domains, list) or not domains or set(domains) - set(DOMAINS)):
        raise UserError(f"{where}: domains is {domains!r}; it must be a list out of {', '.join(DOMAINS)}.")
    seed = raw.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise UserError(f"{where}: seed is {seed!r}; it must be a whole number.")


def _check_columns(columns: dict[str, str], prompt: str | None, where: str) -> None:
    _known_keys(columns, set(ROLES), f"columns of {where}")
    content = [role for role in CONTENT_ROLES if role in columns]
    if len(content) != 1:
        raise UserError(f"{where}: columns must name exactly one of {', '.join(CONTENT_ROLES)} (found: {content}).")
    for role, column in columns.items():
        if not isinstance(column, str) or not column:
            raise UserError(f"{where}: columns.{role} is {column!r}; it must be the name of a column.")
    if prompt is None:
        return
    usable = (
        {"turn"}
        if content[0] in ("turns", "messages")
        else (set(columns) - {"answer", "entry_point", "domain", "system"})
    )
    used = {name for _, name in PLACEHOLDER.findall(prompt) if name}
    if used - usable or not used:
        raise UserError(
            f"{where}: the prompt shape {prompt!r} uses {{{', '.join(sorted(used)) or ''}}}; it may use, and needs one "
            f"of: {', '.join('{' + name + '}' for name in sorted(usable))}. Write {{{{name}}}} for a literal {{name}}."
        )
