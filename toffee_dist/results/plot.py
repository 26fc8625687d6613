"""Curves over time as plain characters, or as a PNG file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

HEIGHT = 8
# Of a PNG: the size of a panel, and the margin around its curve, in pixels.
PANEL_SIZE, MARGIN = (900, 260), 48
INK, GREY, BLUE = (30, 30, 30), (190, 190, 190), (31, 119, 180)


@dataclass(frozen=True, eq=False)
class Panel:
    """One curve and its title."""

    title: str
    values: NDArray[np.float64]


def shorten(values: NDArray[np.float64], columns: int) -> NDArray[np.float64]:
    """Return at most so many values: means over equal stretches."""
    if len(values) <= columns:
        return values
    ends = np.linspace(0, len(values), columns + 1).astype(np.int64)
    return np.add.reduceat(values, ends[:-1]) / np.diff(ends)


def draw_text(panel: Panel, ends: tuple[str, str], width: int = 80) -> str:
    """Return a curve as lines of at most `width` plain characters.

    Examples
    --------
    >>> print(draw_text(Panel("up", np.array([0.0, 1.0, 2.0])), ("a", "b"), 24))
    up
           2 |  *
             |  *
             |  *
             |  *
             | **
             | **
             | **
           0 |***
             +---
              a b
    """
    label = 8
    columns = shorten(panel.values, max(width - label - 2, 1))
    lowest, highest = float(columns.min()), float(columns.max())
    span = highest - lowest
    # Every column has at least one mark, so that nothing looks like a gap.
    heights = np.ones(len(columns), dtype=np.int64)
    if span > 0:
        heights += np.floor((columns - lowest) / span * (HEIGHT - 1)).astype(np.int64)
    lines = [panel.title[:width]]
    for level in range(HEIGHT, 0, -1):
        name = f"{highest:.3g}" if level == HEIGHT else f"{lowest:.3g}" if level == 1 else ""
        marks = "".join("*" if height >= level else " " for height in heights)
        lines.append(f"{name:>{label}} |{marks}".rstrip())
    lines.append(" " * label + " +" + "-" * len(columns))
    start, end = ends
    room = len(columns) - len(start) - len(end)
    below = start + " " * max(room, 1) + end if len(start) + len(end) < width - label - 2 else start
    lines.append((" " * (label + 2) + below)[:width])
    return "\n".join(lines)


def draw_image(panels: Sequence[Panel], ends: tuple[str, str], path: Path) -> None:
    """Draw panels below each other into a PNG file. Pillow is there with Bokeh; nothing larger is needed."""
    # For the start-up time of all other questions.
    from PIL import Image, ImageDraw

    width, height = PANEL_SIZE
    image = Image.new("RGB", (width, height * len(panels)), "white")
    draw = ImageDraw.Draw(image)
    for number, panel in enumerate(panels):
        top, bottom = number * height + MARGIN, (number + 1) * height - MARGIN
        left, right = MARGIN * 2, width - MARGIN
        values = shorten(panel.values, right - left)
        lowest, highest = float(values.min()), float(values.max())
        span = highest - lowest or 1.0
        x = np.linspace(left, right, len(values)) if len(values) > 1 else np.array([left, right])
        y = bottom - (np.resize(values, len(x)) - lowest) / span * (bottom - top)
        draw.rectangle((left, top, right, bottom), outline=GREY)
        draw.line([(float(a), float(b)) for a, b in zip(x, y, strict=True)], fill=BLUE, width=2)
        draw.text((left, top - 20), panel.title, fill=INK)
        draw.text((MARGIN // 3, top - 6), f"{highest:.3g}", fill=INK)
        draw.text((MARGIN // 3, bottom - 6), f"{lowest:.3g}", fill=INK)
        draw.text((left, bottom + 8), ends[0], fill=INK)
        draw.text((right - 6 * len(ends[1]), bottom + 8), ends[1], fill=INK)
    image.save(path, format="PNG")
