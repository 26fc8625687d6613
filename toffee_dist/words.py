"""Text that others wrote, made fit to be shown and kept: no control characters, no secrets.

Ids, names of files and columns, and what readers say come from strangers. On a terminal their control
characters are commands (a title, a clipboard, a line that was never printed); in files and logs a signed
URL is a key that lies about.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

# What stands for a secret.
MASK = "…"

# C0 and C1, DEL, marks and overrides of direction, separators of lines and paragraphs, halves of pairs
# (which no terminal's encoding can hold).
_CONTROLS = "\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT, _IN_LINE = re.compile(f"[{_CONTROLS}]"), re.compile(f"[{_CONTROLS}\t\n]")

# What stands between :// and @ of an address, or after its ?, may be a password or a signature. Where no
# browser goes, a ? without a = is a glob's. Lengths are bounded, so that no text takes long to look at.
_USER = re.compile(r"://[^/@\s]{0,256}@")
_QUERY = re.compile(
    r"((https?)?://[^?\s'\"`<>]{0,1100}\?)(?(2)|(?=[^\s'\"]{0,4096}=))[^\s'\"`<>]*[^\s'\"`<>;,.)\]}]",
    re.IGNORECASE,
)
_NAMES = r"(?:password|passwd|passphrase|secret|token|signature|credential|(?:api|access)[_-]?key)[\w-]{0,40}"
_NAMES = rf"(?:{_NAMES}|\bsig|\bpwd)"
# NAME=value, and "NAME": "value" as dicts and JSON have it.
_PAIR = re.compile(
    rf"({_NAMES}['\"]?\s{{0,3}}[:=]\s{{0,3}}(['\"])|{_NAMES}=)(?(2)[^'\"]*|[^\s'\"&;,)\]}}]+)", re.IGNORECASE
)
_BEARER = re.compile(r"\b(bearer\s{1,3})[\w.~+/=-]{8,}", re.IGNORECASE)
_AWS_KEY = re.compile(r"\b(?:AKIA|ASIA)[A-Z0-9]{12,}")


def show_text(text: str) -> str:
    r"""Return text whose control characters are visible; tabs and line breaks stay.

    Examples
    --------
    >>> print(show_text("\x1b]0;title\x07\nnext"))
    \x1b]0;title\x07
    next
    """
    return _IN_TEXT.sub(_escape, text)


def show_line(text: str) -> str:
    r"""Return text as part of a line: tabs and line breaks are visible too.

    Examples
    --------
    >>> print(show_line("a\n\u202eb"))
    a\n\u202eb
    """
    return _IN_LINE.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    return ascii(match[0])[1:-1]


def hide_addresses(text: str) -> str:
    """Return text in which addresses have no user names, passwords and signatures; for code and pages."""
    text = _QUERY.sub(rf"\1{MASK}", _USER.sub(f"://{MASK}@", text))
    return _AWS_KEY.sub(MASK, text)


def hide_secrets(text: str) -> str:
    """Return text without what looks like a credential: in addresses, and after words such as password=.

    Examples
    --------
    >>> hide_secrets("https://me:secret@host/edges.csv?sig=abc and part-?.csv")
    'https://…@host/edges.csv?… and part-?.csv'
    >>> hide_secrets("s3://bucket/part-?.csv, AWS_SECRET_ACCESS_KEY=abc/def, Authorization: Bearer abcdefgh")
    's3://bucket/part-?.csv, AWS_SECRET_ACCESS_KEY=…, Authorization: Bearer …'
    """
    text = _PAIR.sub(rf"\1{MASK}", hide_addresses(text))
    return _BEARER.sub(rf"\1{MASK}", text)


def hide_in(values: Any) -> Any:
    """Return plain values, and lists and dicts of them, with `hide_secrets` done to every text.

    Examples
    --------
    >>> hide_in({"inputs": ["https://host/a?sig=b"], "rank": 8})
    {'inputs': ['https://host/a?…'], 'rank': 8}
    """
    if isinstance(values, str):
        return hide_secrets(values)
    if isinstance(values, Mapping):
        return {name: hide_in(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return type(values)(hide_in(value) for value in values)
    return values
