"""Where a result came from: package versions and the revision of this source tree."""

from __future__ import annotations

import functools
import platform
import subprocess
from importlib import metadata
from pathlib import Path

RECORDED_PACKAGES = (
    "jetspec-train",
    "torch",
    "transformers",
    "safetensors",
    "datasets",
    "pyarrow",
    "numpy",
    "deepspeed",
    "peft",
    "trl",
)


@functools.cache
def package_version(name: str) -> str | None:
    """Installed version of a distribution, None when it is not installed; nothing is imported."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def package_versions(names: tuple[str, ...] = RECORDED_PACKAGES) -> dict[str, str]:
    """Versions of Python and of the installed packages among ``names``."""
    found = {name: package_version(name) for name in names}
    return {"python": platform.python_version(), **{name: v for name, v in found.items() if v is not None}}


@functools.cache
def git_revision() -> str | None:
    """Commit of the checkout that this package runs from, '-dirty' appended when files were changed.

    None outside a checkout (an installed wheel) or without git.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        revision = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=True
        ).stdout.strip()
        changed = subprocess.run(
            ["git", "-C", str(root), "status", "--porcelain", "--untracked-files=no"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
    return revision + ("-dirty" if changed else "")
