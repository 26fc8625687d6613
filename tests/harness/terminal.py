"""What a terminal would act upon."""

from __future__ import annotations

import unicodedata

TITLE, CLIPBOARD = "\x1b]0;owned\x07", "\x1b]52;c;cm0gLXJm\x07"


def commands(text: str) -> set[str]:
    """Return what a terminal could act upon, beside tabs and line breaks."""
    marks = {"\u061c", "\u200e", "\u200f", *map(chr, range(0x202A, 0x202F)), *map(chr, range(0x2066, 0x206A))}
    bad = ("Cc", "Cs", "Zl", "Zp")
    return {c for c in text if c in marks or (unicodedata.category(c) in bad and c not in "\n\t")}
