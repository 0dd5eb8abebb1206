"""Files that are either whole or absent: atomic writes, hashes, free space, line-by-line records.

A reader never sees a half-written file: data goes to a temporary name in the same folder, reaches
the disk, and is renamed. Append-only records (``.jsonl``) may lose their last line in a crash;
``read_jsonl`` skips such a torn line and ``append_jsonl`` starts a fresh one.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_train.artifacts.errors import UserError

PathLike = str | os.PathLike[str]

_UNWRITABLE = {
    errno.ENOSPC: "the disk is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EACCES: "no permission to write there",
    errno.EPERM: "no permission to write there",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
}


@contextlib.contextmanager
def writing(path: PathLike) -> Iterator[None]:
    """Turn the operating system's refusals to write ``path`` into a UserError."""
    try:
        yield
    except OSError as error:
        reason = _UNWRITABLE.get(error.errno or 0)
        if reason is None:
            raise
        raise UserError(f"Cannot write {path}: {reason}. Choose another run_dir=... or make room.") from error


def make_folder(path: PathLike) -> Path:
    """Create a folder and its parents; raises UserError when that is not possible."""
    folder = Path(path)
    with writing(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            raise UserError(f"{folder} is a file, but a folder is needed there. Move the file away.") from error
    return folder


def _sync_folder(folder: Path) -> None:
    """Make a rename durable; some network file systems do not support this, which is harmless."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def atomic_write(path: PathLike, data: str | bytes) -> Path:
    """Write ``data`` (text as UTF-8) so that ``path`` holds either its old or its new content."""
    target = Path(path)
    make_folder(target.parent)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    payload = data.encode("utf-8") if isinstance(data, str) else data
    with writing(target):
        try:
            with open(temporary, "wb") as file:
                file.write(payload)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            with contextlib.suppress(FileNotFoundError):
                temporary.unlink()
    _sync_folder(target.parent)
    return target


def atomic_json(path: PathLike, value: Any) -> Path:
    """``atomic_write`` of readable JSON. NaN and infinity are refused: other readers choke on them."""
    text = json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False, default=_plain)
    return atomic_write(path, text + "\n")


def publish_folder(temporary: PathLike, final: PathLike) -> Path:
    """Move a finished temporary folder to its final name, replacing an earlier one.

    A reader sees the old folder, for an instant none, then the whole new one; never a mixture.
    """
    source, target = Path(temporary), Path(final)
    retired = target.with_name(f".{target.name}.{os.getpid()}.old")
    with writing(target):
        if target.exists():
            os.replace(target, retired)
        os.replace(source, target)
    _sync_folder(target.parent)
    shutil.rmtree(retired, ignore_errors=True)
    return target


def sha256_file(path: PathLike) -> str:
    """SHA-256 of a file's bytes, as lower-case hex."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _plain(value: Any) -> Any:
    """What JSON does not know by itself: dataclasses, paths, tuples inside them, numpy scalars."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def stable_hash(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON of ``value``: equal content gives equal hashes everywhere."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_plain)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def read_json(path: PathLike, what: str) -> Any:
    """Parse a JSON file; a missing or broken one is a UserError that names it (``what`` it is)."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{what} {path} does not exist.") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"{what} {path} is not valid JSON ({error}). It may be half-copied; fetch it again.") from error


def readable_bytes(count: float) -> str:
    """1536 -> '1.5 kB' (decimal units, as disks are sold and as df -H prints)."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")


def readable_seconds(seconds: float) -> str:
    """75 -> '1 min 15 s'."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.1f} s"
    hours, minutes = divmod(whole // 60, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole % 60} s"


def free_bytes(path: PathLike) -> int:
    """Free bytes on the disk that holds ``path``, which need not exist yet."""
    folder = Path(path).absolute()
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def require_free_space(path: PathLike, bytes_needed: float, what: str) -> None:
    """Refuse to begin work that the disk cannot hold.

    Raises UserError naming what needs the space, how much it needs, and how much there is.
    """
    available = free_bytes(path)
    if available < bytes_needed:
        raise UserError(
            f"{what} needs about {readable_bytes(bytes_needed)} on the disk of {path}, but only "
            f"{readable_bytes(available)} are free. Make room or choose another run_dir=..."
        )


def append_jsonl(path: PathLike, value: Any) -> None:
    """Append one record as one line; after a crash inside an earlier write, start a fresh line."""
    target = Path(path)
    make_folder(target.parent)
    line = json.dumps(value, ensure_ascii=False, default=_plain) + "\n"
    with writing(target), open(target, "ab+") as file:
        if file.tell() > 0:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                line = "\n" + line
        file.write(line.encode("utf-8", "backslashreplace"))


def read_jsonl(path: PathLike) -> Iterator[Any]:
    """The records of a ``.jsonl`` file in order; lines torn by a crash and an absent file give none."""
    with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
        for line in file:
            with contextlib.suppress(ValueError):
                yield json.loads(line)
