"""Whether the documentation site is whole: `python docs/check_site.py build/site`.

Every link inside it leads to a page and a place on it, nothing is loaded from elsewhere, and the search knows
every page.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# What a browser loads by itself; a link of <a> is for people.
LOADS = {"script", "link", "img", "iframe", "source", "video", "audio"}


class Page(HTMLParser):
    """The names of places on a page, and where it points to: (tag, address)."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = set()
        self.links: list[tuple[str, str]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note ids and addresses."""
        for name, value in attrs:
            if value and name in ("id", "name"):
                self.places.add(value)
            elif value and name in ("href", "src"):
                self.links.append((tag, value))


@cache
def read_page(path: Path) -> Page:
    """Read one page, once."""
    return Page(path.read_text())


def find_problems(site: Path) -> list[str]:
    """Return what is wrong with a site, in words."""
    site = site.resolve()
    pages = sorted(page for page in site.rglob("*.html") if "_static" not in page.parts)
    problems = [f"{site}: no pages"] if not pages else []
    for page in pages:
        for tag, address in read_page(page).links:
            problem = _check(site, page, tag, address)
            if problem:
                problems.append(f"{page.relative_to(site)}: {address}: {problem}")
    index = site / "searchindex.js"
    if not index.exists():
        return [*problems, "searchindex.js: missing"]
    known = set(json.loads(index.read_text().removeprefix("Search.setIndex(").removesuffix(")"))["docnames"])
    shown = {str(page.relative_to(site).with_suffix("")) for page in pages if "_modules" not in page.parts}
    missing = shown - known - {"index", "search", "genindex", "py-modindex"}
    return problems + [f"{name}: the search does not know it" for name in sorted(missing)]


def _check(site: Path, page: Path, tag: str, address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme == "data" or (parts.scheme and tag not in LOADS):
        return ""
    if parts.scheme or parts.netloc:
        return "loaded from elsewhere"
    target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    if not target.is_relative_to(site) or not target.is_file():
        return "no such file"
    if tag == "a" and parts.fragment and target.suffix == ".html":
        place = unquote(parts.fragment)
        if place not in read_page(target).places:
            return "no such place on the page"
    return ""


if __name__ == "__main__":
    found = find_problems(Path(sys.argv[1]))
    print("\n".join(found) or f"{sys.argv[1]}: every link leads somewhere, nothing is loaded from elsewhere")
    sys.exit(bool(found))
