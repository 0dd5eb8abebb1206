"""The report's figures: drawn once, kept as PNG for papers and as SVG inside the page.

Colours are Okabe and Ito's colour-blind safe set; shapes and labels carry the same information, so no
figure depends on colour alone. Text and axes use a marker colour that becomes ``currentColor`` in the
SVG, which follows the reader's light or dark mode.
"""

from __future__ import annotations

import base64
import io
import warnings
from collections.abc import Callable, Sequence
from typing import Any

PALETTE = ["#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C8C8C"]
MARKERS = ["o", "s", "^", "D", "v", "P", "X"]
INK = "#12ab34"  # replaced by currentColor; any colour that no figure uses
STYLE = "svg{color:#1b1f24}@media(prefers-color-scheme:dark){svg{color:#e8eaed}}"
CONTEXT_MARK = 2048  # tokens of context beyond which gains are said to fall


def _draw(paint: Callable[[Any, Any], None], *, height: float = 3.4, ink: str) -> Any:
    """A figure of phone-friendly proportions with ``ink`` for all text and lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    settings: Any = {
        "font.size": 11,
        "svg.fonttype": "none",
        "svg.hashsalt": "report",
        "font.family": "sans-serif",
        "text.color": ink,
        "axes.labelcolor": ink,
        "axes.edgecolor": ink,
        "xtick.color": ink,
        "ytick.color": ink,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "legend.frameon": False,
    }
    with matplotlib.rc_context(settings), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a missing glyph in a domain's name is no reason to stop
        figure = Figure(figsize=(6.6, height), layout="constrained")
        paint(figure.add_subplot(), ink)
    return figure


def render(paint: Callable[[Any, Any], None], *, height: float = 3.4) -> tuple[bytes, str]:
    """``(PNG bytes on white, SVG data URI that follows the reader's colour scheme)``."""
    import matplotlib

    png, svg = io.BytesIO(), io.BytesIO()
    _draw(paint, height=height, ink="#1b1f24").savefig(png, format="png", dpi=150, facecolor="white")
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "report"}):
        _draw(paint, height=height, ink=INK).savefig(svg, format="svg", transparent=True, metadata={"Date": None})
    text = svg.getvalue().decode("utf-8").replace(INK, "currentColor")
    start = text.index("<svg")
    opened = text.index(">", start) + 1
    text = f"{text[start:opened]}<style>{STYLE}</style>{text[opened:]}"
    return png.getvalue(), "data:image/svg+xml;base64," + base64.b64encode(text.encode("utf-8")).decode("ascii")


def _with_interval(
    axis: Any, value: float, interval: Sequence[float] | None, y: float, color: str, marker: str
) -> None:
    if interval is not None:
        axis.plot(interval, [y, y], color=color, linewidth=2.5, solid_capstyle="round")
    axis.plot([value], [y], marker=marker, color=color, markersize=8)


def speedups(report: dict[str, Any]) -> tuple[Callable[[Any, Any], None], int]:
    """Speedup over plain decoding: each contender overall, then the draft by domain."""
    rows = []
    for name, figures in report["overall"]["contenders"].items():
        if name != report["baseline"] and figures["speedup"] is not None:
            rows.append((name, figures["speedup"], figures["speedup_ci95"], 0 if name == report["main"] else 6))
    if len(report["domains"]) > 1:
        for name, figures in report["domains"].items():
            if figures["speedup"] is not None:
                rows.append((f"{report['main']}: {name}", figures["speedup"], figures["speedup_ci95"], 1))

    def paint(axis: Any, ink: str) -> None:
        for index, (_label, value, interval, color) in enumerate(rows):
            y = len(rows) - 1 - index
            _with_interval(axis, value, interval, y, PALETTE[color], MARKERS[color])
            axis.annotate(f"{value:.2f}x", (value, y), xytext=(0, 7), textcoords="offset points", ha="center")
        axis.axvline(1.0, color=ink, linestyle="--", linewidth=1)
        axis.set_yticks(range(len(rows)), [row[0] for row in reversed(rows)])
        axis.set_ylim(-0.6, len(rows) - 0.2)
        axis.set_xlabel("speedup over plain decoding (95 % interval over prompts)")

    return paint, len(rows)


def acceptance(report: dict[str, Any]) -> Callable[[Any, Any], None]:
    """Acceptance by position: conditional (solid) and prefix survival (dashed), per domain."""

    def paint(axis: Any, ink: str) -> None:
        shown = [*report["domains"].items()][: len(PALETTE) - 1]
        depth = 1
        for index, (name, figures) in enumerate(shown):
            for key, style, size in (("acceptance_rate_at", "-", 5), ("prefix_survival_at", "--", 3)):
                values = [(k + 1, v) for k, v in enumerate(figures[key]) if v is not None]
                if not values:
                    continue
                depth = max(depth, values[-1][0])
                label = name if style == "-" else None
                axis.plot(
                    *zip(*values), style, marker=MARKERS[index], color=PALETTE[index], label=label, markersize=size
                )
        axis.set_ylim(0, 1.02)
        axis.set_xticks(range(1, depth + 1))
        axis.set_xlabel("position in the block (solid: given the earlier ones; dashed: whole prefix)")
        axis.set_ylabel("share accepted")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)

    return paint


def time_share(report: dict[str, Any]) -> Callable[[Any, Any], None]:
    """Where decode time goes, by domain."""

    def paint(axis: Any, ink: str) -> None:
        names = list(report["domains"])
        for y, name in enumerate(reversed(names)):
            left = 0.0
            shares = report["domains"][name]["time_share"]
            for index, (part, hatch) in enumerate((("target", ""), ("draft", "//"), ("host", ".."))):
                value = shares[part] or 0.0
                axis.barh(
                    y, value, left=left, color=PALETTE[index], hatch=hatch, edgecolor="white", linewidth=0.5,
                    label=part if y == 0 else None, height=0.6,
                )  # fmt: skip
                if value > 0.05:
                    axis.text(left + value / 2, y, f"{100 * value:.0f} %", ha="center", va="center", color="white")
                left += value
        axis.set_yticks(range(len(names)), list(reversed(names)))
        axis.set_xlim(0, 1)
        axis.set_xlabel("share of decode time (prefill excluded)")
        axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))

    return paint


def cost_curve(report: dict[str, Any]) -> Callable[[Any, Any], None]:
    """Milliseconds of one target forward by the tokens it carries."""

    def paint(axis: Any, ink: str) -> None:
        curve = report["cost_curve"]["verify_seconds"]
        sizes = sorted(int(size) for size in curve)
        values = [1000 * curve[str(size)] for size in sizes]
        axis.plot(sizes, values, marker="o", color=PALETTE[0])
        for size, value in zip(sizes, values):
            axis.annotate(f"{value:.1f}", (size, value), xytext=(0, 7), textcoords="offset points", ha="center")
        draft = report["cost_curve"]["draft_seconds"]
        if draft:
            axis.axhline(1000 * draft, color=PALETTE[1], linestyle="--")
            axis.annotate("one draft forward", (sizes[-1], 1000 * draft), xytext=(0, 4), ha="right",
                          textcoords="offset points", color=PALETTE[1])  # fmt: skip
        axis.set_xscale("log", base=2)
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_ylim(0, 1.2 * max(values))
        axis.set_xlabel(f"tokens per target forward (context {report['cost_curve']['context']})")
        axis.set_ylabel("milliseconds")

    return paint


def gap(report: dict[str, Any]) -> Callable[[Any, Any], None]:
    """From the acceptance length down to the achieved speedup, cost by cost."""

    def paint(axis: Any, ink: str) -> None:
        steps = report["overall"]["bound"]["steps"]
        for y, step in enumerate(reversed(steps)):
            axis.barh(y, step["speedup"], color=PALETTE[0] if y else PALETTE[1], height=0.55)
            axis.text(step["speedup"], y, f" {step['speedup']:.2f}x", va="center")
        axis.axvline(1.0, color=ink, linestyle="--", linewidth=1)
        axis.set_yticks(range(len(steps)), [step["name"].replace(", ", ",\n") for step in reversed(steps)], fontsize=9)
        axis.set_xlim(0, 1.15 * max(step["speedup"] for step in steps))
        axis.set_xlabel("speedup")

    return paint


def by_context(report: dict[str, Any]) -> Callable[[Any, Any], None]:
    """Each prompt's speedup against the length of its context (prompt + half of the answer)."""

    def paint(axis: Any, ink: str) -> None:
        longest = 0
        for index, name in enumerate(report["domains"]):
            points = []
            for record in report["records"]:
                plain, main = record["runs"].get(report["baseline"]), record["runs"].get(report["main"])
                if record["domain"] != name or not plain or not main or not plain["tokens"] or not main["tokens"]:
                    continue
                faster = (plain["seconds"] / plain["tokens"]) / (main["seconds"] / main["tokens"])
                points.append((record["prompt_tokens"] + main["tokens"] / 2, faster))
                longest = max(longest, points[-1][0])
            if points:
                color, marker = PALETTE[index % len(PALETTE)], MARKERS[index % len(MARKERS)]
                axis.scatter(*zip(*points), color=color, marker=marker, label=name, alpha=0.8)
        axis.axhline(1.0, color=ink, linestyle="--", linewidth=1)
        if longest > CONTEXT_MARK / 2:
            axis.axvline(CONTEXT_MARK, color=ink, linestyle=":", linewidth=1)
        axis.set_xlabel("context in the middle of the answer, tokens")
        axis.set_ylabel("speedup of the prompt")
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=9)

    return paint


def curve(name: str, points: Sequence[dict[str, Any]]) -> Callable[[Any, Any], None]:
    """Speedup against one condition, with intervals over prompts; equal steps for unequal values."""
    from jetspec_train.evaluation.curves import LABELS

    def paint(axis: Any, ink: str) -> None:
        places = range(len(points))
        axis.plot(places, [point["speedup"] for point in points], marker=MARKERS[0], color=PALETTE[0])
        for place, point in zip(places, points):
            if point["speedup_ci95"]:
                axis.plot([place, place], point["speedup_ci95"], color=PALETTE[0], linewidth=2)
            axis.annotate(f"{point['speedup']:.2f}x", (place, point["speedup"]), xytext=(6, 6),
                          textcoords="offset points")  # fmt: skip
        marks = [place for place, point in zip(places, points) if name == "context" and point["at"] == CONTEXT_MARK]
        if marks:
            axis.axvline(marks[0], color=ink, linestyle=":", linewidth=1)
        axis.axhline(1.0, color=ink, linestyle="--", linewidth=1)
        axis.set_xticks(places, [f"{point['at']:g}" for point in points])
        axis.set_xlim(-0.4, len(points) - 0.4)
        axis.set_xlabel(LABELS[name])
        axis.set_ylabel("speedup")

    return paint


def draw_all(report: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """``{name: {"png": bytes, "uri": str, "caption": str}}``; figures without data are left out."""
    paint, rows = speedups(report)
    domains = len(report["domains"])
    wanted: list[tuple[str, Callable[[Any, Any], None] | None, float, str]] = [
        ("speedup", paint if rows else None, 1.2 + 0.5 * rows, "Speedup over plain decoding, with 95 % intervals."),
        ("acceptance", acceptance(report), 3.4, "How often a drafted token is accepted, by its position in the block."),
        ("time_share", time_share(report), 1.4 + 0.5 * domains, "Where the decode time goes."),
    ]
    if report["cost_curve"] is not None:
        text = "What one target forward costs by the number of tokens that it checks."
        wanted.append(("cost_curve", cost_curve(report), 3.2, text))
    if report["overall"]["bound"] is not None:
        text = "What the acceptance length promises, and what each cost takes away from it."
        wanted.append(("gap", gap(report), 3.0, text))
    wanted.append(("by_context", by_context(report), 3.4, "Each prompt's speedup against the length of its context."))
    for name, points in report.get("curves", {}).items():
        shown = [point for point in points if point["speedup"] is not None]
        if shown:
            text = f"Speedup over plain decoding by {name}, on {shown[0]['answers']} answers each."
            wanted.append((f"curve_{name}", curve(name, shown), 3.2, text))
    if report["verification"] is not None:
        from jetspec_train.evaluation.verifier_figures import verification_figures

        wanted += verification_figures(report["verification"])
    drawn = {}
    for name, painter, height, caption in wanted:
        if painter is not None:
            png, uri = render(painter, height=height)
            drawn[name] = {"png": png, "uri": uri, "caption": caption}
    return drawn
