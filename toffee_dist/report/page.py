"""A page: sections of words, tables and plots in one file that loads nothing, in light and dark."""

from __future__ import annotations

import os
import sys
import webbrowser
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from bokeh.embed import components
from bokeh.models import Widget
from bokeh.resources import Resources
from bokeh.themes import Theme

from toffee_dist.storage.paths import as_remote
from toffee_dist.words import show_text

# The greys of text and lines are readable on both papers; plots are transparent.
_GREY = "#7d838c"
_THEME = {
    "attrs": {
        "Plot": {"background_fill_color": None, "border_fill_color": None, "outline_line_color": None},
        "Title": {"text_color": _GREY, "text_font_size": "14px"},
        "Axis": {
            "axis_line_color": _GREY,
            "major_tick_line_color": _GREY,
            "minor_tick_line_color": None,
            "axis_label_text_color": _GREY,
            "axis_label_text_font_style": "normal",
            "major_label_text_color": _GREY,
            "major_label_text_font_size": "12px",
        },
        "CategoricalAxis": {"group_text_color": _GREY},
        "Grid": {"grid_line_color": _GREY, "grid_line_alpha": 0.2},
        "Legend": {
            "background_fill_color": None,
            "border_line_color": None,
            "label_text_color": _GREY,
        },
        "BaseColorBar": {
            "background_fill_color": None,
            "major_label_text_color": _GREY,
            "title_text_color": _GREY,
            "title_text_font_style": "normal",
        },
    }
}
# Enforced by the browser: scripts and styles of the page itself, and nothing from anywhere else. Bokeh builds
# functions from the text of its callbacks, hence unsafe-eval.
_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline' 'unsafe-eval'; style-src 'unsafe-inline'; "
    "img-src data: blob:; font-src data:; form-action 'none'; base-uri 'none'"
)


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Parameters
    ----------
    title
        Plain text.
    says
        What it shows, in a sentence or two of plain text.
    html
        Tables and the like, whose text is escaped already.
    plots
        Bokeh models, below it.
    """

    title: str
    says: str = ""
    html: str = ""
    plots: tuple[Any, ...] = ()


def _shown(text: str) -> str:
    """Return text of anybody as part of a page: no markup, no control characters."""
    return escape(show_text(text))


def asset(name: str) -> str:
    """Return a script or style sheet of ours."""
    return files(__package__).joinpath("assets", name).read_text(encoding="utf-8")


def table(rows: Iterable[Sequence[object]], header: Sequence[str] = (), caption: str = "") -> str:
    """Return a table; without a header the first cell of each row is the name of the others.

    Examples
    --------
    >>> table([("<b>", 1)])
    '<table><tbody><tr><th scope="row">&lt;b&gt;</th><td>1</td></tr></tbody></table>'
    """
    head = f"<caption>{_shown(caption)}</caption>" if caption else ""
    if header:
        head += f"<thead><tr>{''.join(f'<th>{_shown(name)}</th>' for name in header)}</tr></thead>"
    body = ""
    for row in rows:
        first, *others = [_shown(str(cell)) for cell in row]
        lead = f"<td>{first}</td>" if header else f'<th scope="row">{first}</th>'
        body += f"<tr>{lead}{''.join(f'<td>{cell}</td>' for cell in others)}</tr>"
    return f"<table>{head}<tbody>{body}</tbody></table>"


def bullets(lines: Iterable[str]) -> str:
    """Return remarks as a list, or nothing."""
    items = "".join(f"<li>{_shown(line)}</li>" for line in lines)
    return f'<ul class="notes">{items}</ul>' if items else ""


def render(title: str, subtitle: str, sections: Sequence[Section]) -> str:
    """Return the whole page.

    Bokeh's own script is part of it, 1.3 MB, and 0.4 MB more where there are fields to fill in.
    """
    plots = [plot for section in sections for plot in section.plots]
    head = script = ""
    divs: list[str] = []
    if plots:
        widgets = any(isinstance(model, Widget) for plot in plots for model in plot.references())
        head = Resources(
            mode="inline", components=["bokeh", *(["bokeh-widgets"] if widgets else [])]
        ).render()
        script, found = components(plots, theme=Theme(json=_THEME))
        divs = list(found)
    body = ""
    for section in sections:
        own = "".join(divs.pop(0) for _ in section.plots)
        says = f'<p class="says">{_shown(section.says)}</p>' if section.says else ""
        body += f"<section><h2>{_shown(section.title)}</h2>{says}{section.html}{own}</section>\n"
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{_shown(title)}</title>
<style>{asset("page.css")}</style>
{head}
</head>
<body>
<h1>{_shown(title)}</h1>
<p class="soft">{_shown(subtitle)}</p>
{body}{script}
</body>
</html>
"""


def has_display() -> bool:
    """Tell whether a page can be shown to somebody here."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


def open_page(path: Path) -> bool:
    """Show a page in the user's browser; False where there is none, nowhere to show it, or no local file."""
    return has_display() and as_remote(path) is None and webbrowser.open(path.absolute().as_uri())
