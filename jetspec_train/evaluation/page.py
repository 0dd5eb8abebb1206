"""The report as one self-contained HTML page: no script, no network, no file beside it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from typing import Any

from jetspec_train.artifacts.files import readable_bytes


def number(value: Any, digits: int = 2) -> str:
    """A figure for people; a dash where it is undefined."""
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: Any, digits: int = 0) -> str:
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def milliseconds(value: Any) -> str:
    return "–" if value is None else f"{1000 * value:,.1f} ms"


def interval(value: Any) -> str:
    return "" if value is None else f"{value[0]:.2f} – {value[1]:.2f}"


def whole(value: Any) -> str:
    return "–" if value is None else f"{value:,.0f}"


def megabytes(value: Any) -> str:
    return "–" if value is None else readable_bytes(value)


def token_text(value: str | None) -> str:
    """A token as it can be seen: line breaks and tabs become signs, an empty token a dot."""
    if value is None:
        return ""
    return value.replace("\n", "↵").replace("\t", "⇥") or "·"


def render_page(report: Mapping[str, Any], figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Fill ``templates/report.html.j2``; every value is escaped, prompts and outputs included."""
    import jinja2

    source = resources.files("jetspec_train.evaluation").joinpath("templates/report.html.j2").read_text("utf-8")
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters.update(
        number=number,
        percent=percent,
        milliseconds=milliseconds,
        interval=interval,
        whole=whole,
        megabytes=megabytes,
        token=token_text,
    )
    return environment.from_string(source).render(r=report, figures=figures)
