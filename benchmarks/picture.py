"""A scatter plot as SVG, for documents: logarithmic x, a name beside every point."""

from __future__ import annotations

import math
from collections.abc import Mapping
from html import escape

GREY = "#7d838c"
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 420, 70, 120, 40, 60


def scatter(points: Mapping[str, tuple[float, float]], title: str, x_label: str, y_label: str) -> str:
    """Return an SVG of named points (x, y), x > 0."""
    logs = {name: math.log10(x) for name, (x, _) in points.items()}
    x_low, x_high = math.floor(min(logs.values())), math.ceil(max(logs.values()))
    x_high = max(x_high, x_low + 1)
    ys = [y for _, y in points.values()]
    y_low, y_high = math.floor(min(ys) * 50) / 50, math.ceil(max(ys) * 50) / 50
    y_high = max(y_high, y_low + 0.02)

    def at(x: float, y: float) -> tuple[float, float]:
        across = LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - LEFT - RIGHT)
        return across, HEIGHT - BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - TOP - BOTTOM)

    parts = []
    for power in range(x_low, x_high + 1):
        x, bottom = at(power, y_low)
        parts.append(_line(x, x, TOP, bottom))
        parts.append(f'<text x="{x:.1f}" y="{bottom + 20:.1f}" text-anchor="middle">{10.0**power:g}</text>')
    steps = round((y_high - y_low) / 0.02)
    for step in range(0, steps + 1, max(1, steps // 6)):
        value = y_low + step * 0.02
        left, y = at(x_low, value)
        parts.append(_line(left, WIDTH - RIGHT, y, y))
        parts.append(f'<text x="{left - 8}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    taken: list[tuple[float, float]] = []
    for name, (_, mark) in sorted(points.items(), key=lambda item: -item[1][1]):
        x, y = at(logs[name], mark)
        words = y + 4
        # Names that would lie on each other move down.
        while any(abs(words - other) < 13 and abs(x - near) < 90 for near, other in taken):
            words += 13
        taken.append((x, words))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#1f77b4"/>')
        parts.append(f'<text x="{x + 9:.1f}" y="{words:.1f}">{escape(name)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(
        f'<text x="{middle}" y="{TOP - 16}" text-anchor="middle" font-size="15">{escape(title)}</text>'
    )
    parts.append(f'<text x="{middle}" y="{HEIGHT - 14}" text-anchor="middle">{escape(x_label)}</text>')
    y_middle = (TOP + HEIGHT - BOTTOM) / 2
    parts.append(
        f'<text transform="translate(18 {y_middle}) rotate(-90)" text-anchor="middle">'
        f"{escape(y_label)}</text>"
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        f'font-size="12" fill="{GREY}">\n{body}\n</svg>\n'
    )


def _line(x1: float, x2: float, y1: float, y2: float) -> str:
    ends = f'x1="{x1:.1f}" x2="{x2:.1f}" y1="{y1:.1f}" y2="{y2:.1f}"'
    return f'<line {ends} stroke="{GREY}" opacity=".25"/>'
