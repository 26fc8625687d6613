"""A page: sections of words, tables and charts in one file that loads nothing, in light and dark."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import webbrowser
from base64 import b64encode
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path

from toffee_dist.storage.paths import as_remote
from toffee_dist.words import show_text

# What the browser enforces: this page's own script and style, known by their digests, and nothing else, from
# nowhere. A script that somebody's id brings along does not run.
_POLICY = (
    "default-src 'none'; script-src {script}; style-src {style}; connect-src {connect}; img-src data:; "
    "form-action 'none'; base-uri 'none'"
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
        Tables, charts and the like, whose text is escaped already.
    """

    title: str
    says: str = ""
    html: str = ""


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


def data_block(name: str, data: object) -> str:
    r"""Return data as part of a page, for its script: no text in it can end the block.

    Examples
    --------
    >>> data_block("x", ["</script>"])
    '<script type="application/json" id="x">["\\u003c/script>"]</script>'
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return f'<script type="application/json" id="{name}">{text}</script>'


def render(
    title: str, subtitle: str, sections: Sequence[Section], *, scripts: Sequence[str] = (), live: bool = False
) -> str:
    """Return the whole page.

    Parameters
    ----------
    title, subtitle
        Plain text.
    sections
        From top to bottom.
    scripts
        Assets that the page runs, in their order; that of the page itself comes first.
    live
        Whether the page may ask the server that it comes from.
    """
    body = ""
    for section in sections:
        says = f'<p class="says">{_shown(section.says)}</p>' if section.says else ""
        body += f"<section><h2>{_shown(section.title)}</h2>{says}{section.html}</section>\n"
    style, code = asset("page.css"), ";\n".join(asset(name) for name in ("theme.js", *scripts))
    policy = policy_of(style, code, live=live)
    icon = '<link rel="icon" href="data:,">\n' if live else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
{icon}<title>{_shown(title)}</title>
<style>{style}</style>
</head>
<body>
<header><h1>{_shown(title)}</h1>
<button id="theme" type="button" aria-label="Light or dark" title="Light or dark">◐</button></header>
<p class="soft">{_shown(subtitle)}</p>
{body}<script>{code}</script>
</body>
</html>
"""


def policy_of(style: str, code: str, *, live: bool) -> str:
    """Return the content security policy of a page with this style and script."""
    digests = [b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in (code, style)]
    script, look = (f"'sha256-{digest}'" for digest in digests)
    return _POLICY.format(script=script, style=look, connect="'self'" if live else "'none'")


def has_display() -> bool:
    """Tell whether a page can be shown to somebody here."""
    if sys.platform.startswith("linux"):
        return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
    return True


def open_page(path: Path) -> bool:
    """Show a page in the user's browser; False where there is none, nowhere to show it, or no local file."""
    return as_remote(path) is None and open_address(path.absolute().as_uri())


def open_address(address: str) -> bool:
    """Show an address in the user's browser; False where there is none, or nowhere to show it."""
    return has_display() and webbrowser.open(address)
