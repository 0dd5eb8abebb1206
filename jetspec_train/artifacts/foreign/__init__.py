"""Drafts in other projects' forms: written so that their engines load them, read so that our decoder runs them."""

from jetspec_train.artifacts.foreign.draft import ForeignDraft, TargetFacts
from jetspec_train.artifacts.foreign.exporting import Draft, Exported, export_forms
from jetspec_train.artifacts.foreign.expressing import FORMS
from jetspec_train.artifacts.foreign.lint import Finding, lint
from jetspec_train.artifacts.foreign.options import ReadOptions
from jetspec_train.artifacts.foreign.reading import read_foreign

__all__ = [
    "FORMS",
    "Draft",
    "Exported",
    "Finding",
    "ForeignDraft",
    "ReadOptions",
    "TargetFacts",
    "export_forms",
    "lint",
    "read_foreign",
]
