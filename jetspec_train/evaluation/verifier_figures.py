"""Figures of the verifier: is what it says true, and what could be skipped on its word?"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jetspec_train.evaluation.figures import MARKERS, PALETTE, render

Paint = Callable[[Any, Any], None]


def reliability(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> Paint:
    """Predicted against observed survival, one line per table; the diagonal is the truth."""

    def paint(axis: Any, ink: str) -> None:
        axis.plot([0, 1], [0, 1], color=ink, linestyle="--", linewidth=1)
        for index, (name, table) in enumerate(tables.items()):
            points = [(row["predicted"], row["observed"]) for row in table]
            if points:
                axis.plot(*zip(*points), marker=MARKERS[index], color=PALETTE[index], label=name, markersize=5)
        axis.set_xlim(0, 1)
        axis.set_ylim(0, 1)
        axis.set_xlabel("predicted survival")
        axis.set_ylabel("share accepted")
        if any(tables.values()):
            axis.legend(fontsize=9)

    return paint


def reliability_png(tables: Mapping[str, Sequence[Mapping[str, float]]]) -> bytes:
    """The diagram as PNG bytes; ``tables``: name -> ``judgement.reliability``."""
    named = {f"{name} calibration": table for name, table in tables.items()}
    return render(reliability(named), height=3.8)[0]


def precision_coverage(verification: Mapping[str, Any]) -> Paint:
    """How precise the slots above a threshold are, by how many there are; beside the best training-free score."""

    def paint(axis: Any, ink: str) -> None:
        for index, (name, curve) in enumerate(verification["curves"].items()):
            if curve:
                places = [(point["coverage"], point["precision"]) for point in curve]
                style, label = ("-", "--", ":", "-.")[index % 4], name.replace("_", " ")
                axis.plot(*zip(*places), color=PALETTE[index], linestyle=style, label=label)
        axis.axhline(0.992, color=ink, linestyle=":", linewidth=1)
        axis.annotate("99.2 %", (1.0, 0.992), xytext=(0, 3), ha="right", textcoords="offset points", fontsize=9)
        axis.set_xlim(0, 1)
        axis.set_xlabel("share of the drafted tokens above the threshold")
        axis.set_ylabel("share of them accepted")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)

    return paint


def by_position(verification: Mapping[str, Any]) -> Paint:
    """AUROC of the verifier by position in the block, beside the share accepted there."""

    def paint(axis: Any, ink: str) -> None:
        for index, (key, name) in enumerate((("auroc", "AUROC"), ("prior", "share accepted"))):
            points = [(p["position"], p[key]) for p in verification["positions"] if p[key] is not None]
            if points:
                axis.plot(*zip(*points), marker=MARKERS[index], color=PALETTE[index], label=name)
        axis.set_ylim(0, 1.02)
        axis.set_xticks([p["position"] for p in verification["positions"]])
        axis.set_xlabel("position in the block, given that the earlier ones were accepted")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)

    return paint


def verification_figures(verification: Mapping[str, Any]) -> list[tuple[str, Paint, float, str]]:
    """``(name, painter, height, caption)`` of the report's verification section."""
    wanted: list[tuple[str, Paint, float, str]] = []
    if verification["curves"]:
        text = "What could be passed without the target at which precision, by the verifier and without training."
        wanted.append(("precision_coverage", precision_coverage(verification), 3.6, text))
    if verification["reliability"]:
        tables = {"survival": verification["reliability"]}
        text = "Predicted survival of drafted prefixes against how often they were accepted."
        wanted.append(("reliability", reliability(tables), 3.8, text))
    if verification["positions"]:
        text = "How well the verifier ranks drafted tokens, by their position in the block."
        wanted.append(("verifier_by_position", by_position(verification), 3.2, text))
    return wanted
