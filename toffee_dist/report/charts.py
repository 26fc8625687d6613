"""Small charts as SVG, for which a page needs no script: axes with round numbers, marks with titles.

Every mark has a title, which browsers show under the mouse. Colours are attributes, text and lines take those
of the page, so that a chart is readable on light and dark paper.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

from toffee_dist.words import show_text

# Colours that most people can tell apart on light and dark paper: the first seven also colour-blind people
# (Okabe and Ito, without black).
COLOURS = (
    "#0072b2",
    "#e69f00",
    "#009e73",
    "#cc79a7",
    "#56b4e9",
    "#d55e00",
    "#c9b700",
    "#7b5ac5",
    "#8c564b",
    "#2fb3a3",
    "#a8326b",
    "#7f8c1f",
)
GREY = "#7d838c"
# Units of the drawing; the page makes it as wide as itself.
WIDTH = 720
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 12, 40


@dataclass(frozen=True)
class Axis:
    """What an axis shows.

    Parameters
    ----------
    label
        In words.
    low, high
        Its ends.
    log
        Whether equal lengths are equal ratios; both ends are then above 0.
    percent
        Whether numbers are shares.
    names
        Instead of numbers: a name per place 0, 1, 2 …
    """

    label: str
    low: float
    high: float
    log: bool = False
    percent: bool = False
    names: tuple[str, ...] = ()

    def place(self, value: float) -> float:
        """Return where a value is between the ends, 0 to 1."""
        if self.log:
            low, high, value = (math.log(max(v, 1e-300)) for v in (self.low, self.high, value))
        else:
            low, high = self.low, self.high
        return (value - low) / (high - low) if high != low else 0.5

    def ticks(self) -> list[tuple[float, str]]:
        """Return round numbers between the ends, and how they are written."""
        if self.names:
            return [(place, show_text(name)) for place, name in enumerate(self.names)]
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            every = max(1, (last - first) // 6)
            tens = [10.0**power for power in range(first, last + 1, every)]
            return [(ten, f"{ten:g}") for ten in tens if self.low <= ten <= self.high]
        return [(value, self._show(value)) for value in round_numbers(self.low, self.high)]

    def _show(self, value: float) -> str:
        return f"{100 * value:.6g} %" if self.percent else f"{value:,.10g}"


def round_numbers(low: float, high: float, most: int = 6) -> list[float]:
    """Return multiples of 1, 2 or 5 times a power of ten between two ends, at most so many.

    Examples
    --------
    >>> round_numbers(0, 100), round_numbers(0.1, 0.35), round_numbers(2, 2)
    ([0.0, 20.0, 40.0, 60.0, 80.0, 100.0], [0.1, 0.15, 0.2, 0.25, 0.3, 0.35], [2])
    """
    if not (math.isfinite(low) and math.isfinite(high) and high > low):
        return [low] if math.isfinite(low) else []
    rough = (high - low) / most
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(
        power * factor for factor in (1, 2, 5, 10, 20) if (high - low) / (power * factor) <= most - 1 + 1e-9
    )
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(count * step, 12) for count in range(first, last + 1)]


@dataclass
class Chart:
    """A chart that marks are added to, then `svg`.

    Parameters
    ----------
    says
        What it shows, for those who cannot see it.
    x, y
        The axes.
    height
        In units of which the width has 720.
    left
        Room for the words of the y axis.
    """

    says: str
    x: Axis
    y: Axis
    height: int = 220
    left: int = LEFT
    _marks: list[str] = field(default_factory=list)
    _legend: dict[str, str] = field(default_factory=dict)

    def _at(self, x: float, y: float) -> tuple[float, float]:
        across = self.left + self.x.place(x) * (WIDTH - self.left - RIGHT)
        return across, self.height - BOTTOM - self.y.place(y) * (self.height - TOP - BOTTOM)

    def name(self, label: str, colour: str) -> None:
        """Say what a colour means."""
        self._legend[label] = colour

    def dot(self, x: float, y: float, colour: str, title: str = "") -> None:
        """Draw a dot; nothing where a coordinate is no number."""
        if math.isfinite(x) and math.isfinite(y):
            cx, cy = self._at(x, y)
            self._add(f'<circle cx="{cx:.1f}" cy="{cy:.1f}" r="3.2" fill="{colour}"', "circle", title)

    def bar(self, x0: float, x1: float, y0: float, y1: float, colour: str, title: str = "") -> None:
        """Draw a filled rectangle."""
        (left, bottom), (right, top) = self._at(x0, y0), self._at(x1, y1)
        size = f'width="{max(right - left, 0.5):.1f}" height="{max(bottom - top, 0):.1f}"'
        self._add(f'<rect x="{left:.1f}" y="{top:.1f}" {size} fill="{colour}"', "rect", title)

    def line(self, points: Iterable[tuple[float, float]], colour: str, title: str = "") -> None:
        """Draw a line through points."""
        places = [self._at(x, y) for x, y in points if math.isfinite(x) and math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        self._add(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.8"', "polyline", title
        )

    def rule(self, y: float) -> None:
        """Draw a dashed line across."""
        (left, at), (right, _) = self._at(self.x.low, y), self._at(self.x.high, y)
        self._marks.append(
            f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{at:.1f}" y2="{at:.1f}" stroke="{GREY}" '
            'stroke-dasharray="5 4"/>'
        )

    def text(self, x: float, y: float, words: str) -> None:
        """Write words beside a point."""
        at, up = self._at(x, y)
        end = ' text-anchor="end"' if self.x.place(x) > 0.8 else ""
        shift = -6 if end else 6
        self._marks.append(f'<text x="{at + shift:.1f}" y="{up - 3:.1f}"{end}>{_shown(words)}</text>')

    def _add(self, opening: str, tag: str, title: str) -> None:
        self._marks.append(f"{opening}><title>{_shown(title)}</title></{tag}>" if title else f"{opening}/>")

    def svg(self) -> str:
        """Return the chart, its legend above it."""
        foot, right = self.height - BOTTOM, WIDTH - RIGHT
        lines = []
        turned = len(self.x.names) > 6
        for value, shown in self.x.ticks():
            at, _ = self._at(value, self.y.low)
            where = f'x="{at:.1f}" y="{foot + 14}"'
            if turned:
                where = f'transform="translate({at + 3:.1f} {foot + 8}) rotate(-40)"'
            middle = "end" if turned else "middle"
            lines.append(f'<text {where} text-anchor="{middle}">{_shown(shown)}</text>')
        for value, shown in self.y.ticks():
            _, at = self._at(self.x.low, value)
            if not self.y.names:
                ends = f'x1="{self.left}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"'
                lines.append(f'<line class="grid" {ends}/>')
            lines.append(
                f'<text x="{self.left - 6}" y="{at + 3.5:.1f}" text-anchor="end">{_shown(shown)}</text>'
            )
        middle_x, middle_y = (self.left + right) / 2, (TOP + foot) / 2
        under = f'x="{middle_x:.0f}" y="{self.height - 8}"'
        labels = f'<text {under} text-anchor="middle">{_shown(self.x.label)}</text>'
        if self.y.label:
            turn = f'transform="translate(12 {middle_y:.0f}) rotate(-90)"'
            labels += f'<text {turn} text-anchor="middle">{_shown(self.y.label)}</text>'
        extra = 60 if turned else 0
        legend = "".join(
            f'<span><svg viewBox="0 0 10 10" class="dot"><circle cx="5" cy="5" r="5" fill="{colour}"/></svg>'
            f"{_shown(label)}</span>"
            for label, colour in self._legend.items()
        )
        legend = f'<p class="legend">{legend}</p>' if legend else ""
        return (
            f'{legend}<svg class="chart" viewBox="0 0 {WIDTH} {self.height + extra}" role="img" '
            f'aria-label="{_shown(self.says)}">{"".join(lines)}{labels}{"".join(self._marks)}</svg>'
        )


def across(values: Sequence[float], *, zero: bool = True, room: float = 0.06) -> tuple[float, float]:
    """Return ends of an axis that values fit between, with some room; with zero, from 0 on."""
    known = [value for value in values if math.isfinite(value)] or [0.0]
    low, high = min(known), max(known)
    if zero:
        low = min(low, 0.0)
    edge = room * (high - low) or abs(high) * room or 1.0
    return (low if zero and low == 0 else low - edge), high + edge


def _shown(text: str) -> str:
    return escape(show_text(text))
