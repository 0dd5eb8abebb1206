"""Where the numbers go: ``metrics.jsonl`` always, Weights & Biases if asked, both behind ``Tracker``.

A record is ``{"step", "kind": "train" | "evaluation", ...numbers}``; a step appears at most once per kind, however
often the run was killed and resumed: on resume the records after the checkpoint's step are taken out of the file
(they are trained again), and W&B, which cannot take anything back, is not told again what it already knows. The W&B
run id is fixed in ``tracking.json`` beside the metrics, so that every resume continues the same run.

Tracking never stops a training: no package, no key, no network means W&B offline with one warning and the command
that uploads it later.
"""

from __future__ import annotations

import json
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jetspec_train.artifacts.files import append_jsonl, atomic_json, atomic_write
from jetspec_train.config import TrackingConfig

METRICS_FILE, TRACKING_FILE = "metrics.jsonl", "tracking.json"


class Tracker:
    """Writes records to ``metrics.jsonl`` and, if configured, to W&B. Only rank 0 makes one."""

    def __init__(
        self,
        folder: Path,
        cfg: TrackingConfig,
        *,
        resumed_step: int = 0,
        run_config: Mapping[str, Any] | None = None,
        warn: Callable[[str], None] = print,
    ) -> None:
        """``resumed_step``: records of later steps are dropped from the file. ``run_config``: shown in W&B."""
        self.path = folder / METRICS_FILE
        folder.mkdir(parents=True, exist_ok=True)
        facts = _read_json(folder / TRACKING_FILE)
        # What W&B already has, per kind. Written before the file is cut: a second kill must not forget it.
        seen = largest_steps(self.path) if facts.get("wandb") else {}
        known = {kind: int(step) for kind, step in facts.get("known_to_wandb", {}).items()}
        self.known_to_wandb = {kind: max(known.get(kind, -1), seen.get(kind, -1)) for kind in {*known, *seen}}
        self.run_id = str(facts.get("run_id") or uuid.uuid4().hex[:12])
        self._folder, self._warn, self._run = folder, warn, None
        uses_wandb = bool(facts.get("wandb")) or cfg.name == "wandb"
        facts = {"run_id": self.run_id, "wandb": uses_wandb, "known_to_wandb": self.known_to_wandb}
        atomic_json(folder / TRACKING_FILE, facts)
        cut_metrics(self.path, resumed_step)
        if cfg.name == "wandb":
            self._run = self._start_wandb(cfg, dict(run_config or {}))

    def log(self, kind: str, step: int, numbers: Mapping[str, Any]) -> None:
        """One record. ``numbers`` may hold lists (one number per slot); W&B gets them as ``name/0``, ``name/1``..."""
        append_jsonl(self.path, {"step": step, "kind": kind, **numbers})
        if self._run is not None and step > self.known_to_wandb.get(kind, -1):
            try:
                self._run.log({f"{kind}/{k}": v for k, v in _flatten(numbers).items()}, step=step)
            except Exception as error:
                self._warn(
                    f"WARNING: W&B stopped taking metrics ({error}); training goes on, {self.path} has them all."
                )
                self._run = None

    def close(self, summary: Mapping[str, Any] | None = None) -> None:
        """Finish the W&B run (exit code 0: being preempted is not a failure)."""
        if self._run is not None:
            try:
                self._run.summary.update(dict(summary or {}))
                self._run.finish()
            except Exception as error:
                self._warn(f"WARNING: W&B could not finish its run ({error}); {self.path} has all metrics.")
            self._run = None

    def _start_wandb(self, cfg: TrackingConfig, run_config: dict[str, Any]) -> Any:
        try:
            import wandb
        except ImportError:
            self._warn(
                "WARNING: tracking=wandb, but the wandb package is missing (pip install wandb). Going on without."
            )
            return None
        mode, reason = cfg.mode, ""
        if mode == "online":
            reason = why_not_online()
            mode = "offline" if reason else "online"
        try:
            run = wandb.init(
                project=cfg.project,
                entity=cfg.entity,
                name=cfg.run_name,
                id=self.run_id,
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                dir=str(self._folder),
                config=run_config,
                settings=wandb.Settings(init_timeout=30, silent=True),
            )
        except Exception as error:
            if mode == "offline":
                self._warn(f"WARNING: W&B cannot start ({error}). Going on without; {self.path} has all metrics.")
                return None
            reason = str(error)
            run = wandb.init(
                project=cfg.project,
                name=cfg.run_name,
                id=self.run_id,
                mode="offline",
                dir=str(self._folder),
                config=run_config,
                settings=wandb.Settings(silent=True),
            )
        if reason:
            self._warn(
                f"WARNING: W&B is offline ({reason}). To upload later: wandb sync {self._folder}/wandb/offline-run-*"
            )
        return run


def cut_metrics(path: Path, last_step: int) -> None:
    """Keep the records up to ``last_step`` in a metrics file.

    A half-written last line, as a kill leaves it, is dropped too.
    """
    if path.exists():
        text = path.read_text()
        kept = "".join(f"{line}\n" for line, record in _parse(text) if record["step"] <= last_step)
        if kept != text:
            atomic_write(path, kept)


def largest_steps(path: Path) -> dict[str, int]:
    """The largest step of each kind of record in a metrics file."""
    largest: dict[str, int] = {}
    for _, record in _parse(path.read_text()) if path.exists() else []:
        largest[record["kind"]] = max(largest.get(record["kind"], -1), record["step"])
    return largest


def read_metrics(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a metrics file, in order; only those of one ``kind`` if given."""
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return [record for record in records if kind is None or record["kind"] == kind]


def why_not_online() -> str:
    """The reason why W&B cannot be reached, or "" if it seems to be there. Never waits for more than 3 seconds."""
    import wandb

    if not (os.environ.get("WANDB_API_KEY") or wandb.api.api_key):
        return "no API key: run `wandb login`"
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy", "ALL_PROXY")):
        return ""  # only W&B's own client knows the way through a proxy
    address = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        port = address.port or (80 if address.scheme == "http" else 443)
        socket.create_connection((address.hostname or "", port), timeout=3).close()
    except OSError as error:
        return f"{address.hostname} cannot be reached: {error}"
    return ""


def _flatten(numbers: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in numbers.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}/")
        elif isinstance(value, (list, tuple)):
            flat |= {f"{prefix}{name}/{i}": item for i, item in enumerate(value)}
        elif value is not None:
            flat[f"{prefix}{name}"] = value
    return flat


def _parse(text: str) -> list[tuple[str, dict[str, Any]]]:
    """The whole lines of a metrics file with their records; anything else is left out."""
    records = []
    for line in text.splitlines():
        try:
            record = json.loads(line)
            records.append((line, {**record, "step": int(record["step"]), "kind": str(record["kind"])}))
        except (ValueError, KeyError, TypeError):
            continue
    return records


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
