"""Records of long decoding passes, kept batch by batch: a kill costs the batch that was running, nothing else.

A pass is a name and a list of batches; the result of each batch is one file, written whole when the batch is done. A
pass started again reads what is there. The batches must be the same ones again (same prompts, same size): a batch's
rows are decoded together, so that its composition may show in the last bits of a number.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from jetspec_train.artifacts.files import atomic_json, atomic_write, make_folder, read_json, stable_hash
from jetspec_train.artifacts.manifest import differing_keys

IDENTITY = "identity.json"
T = TypeVar("T")


class Passes:
    """The passes of one piece of work in ``folder``. Records of other settings (``identity``) are removed."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        self.folder = folder
        path = folder / IDENTITY
        if path.exists() and differing_keys(read_json(path, "The identity of earlier records"), identity):
            print(f"{folder}: the records there were made with other settings and are made again")
            shutil.rmtree(folder)
        make_folder(folder)
        atomic_json(path, dict(identity))

    def run(
        self,
        name: str,
        batches: Sequence[T],
        work: Callable[[T], Sequence[Mapping[str, Any]]],
        settings: Any = None,
    ) -> Iterator[list[dict[str, Any]]]:
        """The records of each batch in turn, read if they are there, else made by ``work`` and kept.

        ``settings``: what the records depend on beside ``identity`` (temperatures fitted on an earlier pass).
        """
        key = stable_hash([name, settings])[:12]
        for number, batch in enumerate(batches):
            path = self.folder / f"{name}-{key}-{number:05d}.jsonl"
            if not path.exists():
                begun = time.monotonic()
                records = work(batch)
                head = {"seconds": round(time.monotonic() - begun, 3)}
                lines = [json.dumps(line, allow_nan=False) for line in (head, *records)]
                atomic_write(path, "\n".join(lines) + "\n")
            yield _read(path)[1:]

    def seconds(self) -> float:
        """Working time of all batches kept, over all attempts."""
        return sum(_read(path, first=True)[0]["seconds"] for path in self.folder.glob("*.jsonl"))

    def remove(self) -> None:
        shutil.rmtree(self.folder)


def _read(path: Path, first: bool = False) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as file:
        return [json.loads(file.readline())] if first else [json.loads(line) for line in file]
