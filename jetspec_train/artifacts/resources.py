"""Finds ``conf/`` and ``data_recipes/``: beside the package in a checkout, inside it in a wheel."""

from __future__ import annotations

from pathlib import Path

from jetspec_train.artifacts.errors import UserError


def resource_folder(name: str) -> Path:
    """The folder ``conf`` or ``data_recipes``, wherever the package was installed from.

    Raises UserError when neither place has it (a damaged installation).
    """
    package = Path(__file__).resolve().parents[1]
    candidates = [package / name, package.parent / name]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise UserError(
        f"The folder {name}/ is missing (looked in {candidates[0]} and {candidates[1]}). Reinstall jetspec-train."
    )
