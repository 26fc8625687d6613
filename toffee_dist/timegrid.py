"""Time: what the numbers of a time column mean, and which step of the grid each one falls in.

Inside, a time is an int64 count of ticks: since 1970-01-01 UTC for instants, plain units for numbers. A grid
maps ticks to steps 0..T-1 and a step back to a time that a person can read. Steps without edges exist.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, date, datetime, time, timedelta
from typing import Any, Self, get_args
from zoneinfo import ZoneInfo

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.settings import (
    DURATIONS,
    LONGEST_NUMBER,
    MAX_STEPS,
    SECONDS,
    TimeUnit,
    check_step,
    check_zone,
    is_count,
    parse_duration,
)

PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}
UNIT_NAMES = {"s": "epoch seconds", "ms": "epoch ms", "us": "epoch µs", "ns": "epoch ns"}

_EPOCH = date(1970, 1, 1)

# Ticks are within ±2⁶¹ (ingest/validate.py): this is beyond all of them, and fits 64 bits.
FAR = 1 << 62

Int64s = NDArray[np.int64]


@dataclass(frozen=True)
class TimeScale:
    """What one tick of a time column is.

    Parameters
    ----------
    ticks
        Ticks a second (instants) or ticks a unit (plain numbers).
    instant
        Whether times are moments since 1970-01-01 UTC; False: numbers without a calendar.
    zone
        Whose days and weeks the grid follows, and whose wall clock timestamps without a zone show.
    """

    ticks: int
    instant: bool
    zone: str = "UTC"

    def __post_init__(self) -> None:
        """Refuse what no column has; a scale may come from a damaged file."""
        if not 1 <= self.ticks <= 10**15:
            raise ValueError(f"{self.ticks} ticks")
        check_zone(self.zone)

    def show(self, tick: int) -> str:
        """Return the tick as a person would write it."""
        if not self.instant:
            whole, rest = divmod(tick, self.ticks)
            return str(whole) if rest == 0 else str(tick / self.ticks)
        seconds, rest = divmod(tick, self.ticks)
        try:
            text = (datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)).astimezone(
                ZoneInfo(self.zone)
            )
        except (OverflowError, ValueError):
            return f"{seconds} s since 1970"
        digits = len(str(self.ticks)) - 1
        fraction = f".{rest:0{digits}d}".rstrip("0") if rest else ""
        return text.strftime("%Y-%m-%dT%H:%M:%S") + fraction + text.strftime("%z")


def choose_scale(
    lo: int, hi: int, per_unit: int, per_second: int, unit: TimeUnit, zone: str
) -> tuple[TimeScale, str]:
    """Decide what the ticks of a column are, and say why.

    Parameters
    ----------
    lo, hi
        The smallest and largest tick.
    per_unit
        Ticks a unit of a numeric column (1, or 10⁶ where the column holds fractions).
    per_second
        Ticks a second of a column of dates or timestamps; 0 for numeric columns.
    unit
        What the user said; ``auto`` looks at the magnitude.

    Returns
    -------
    scale, note
        The note is empty where nothing was guessed.
    """
    if unit not in get_args(TimeUnit):
        raise ConfigError("time unit", got=repr(unit), allowed=", ".join(get_args(TimeUnit)))
    if per_second:
        if unit != "auto":
            raise ConfigError(
                "time unit for a column of dates or timestamps",
                got=unit,
                allowed="auto",
                remedy="Leave --time-unit out: the column says what it holds.",
            )
        return TimeScale(per_second, True, zone), ""
    if unit != "auto":
        instant = unit != "number"
        return TimeScale(per_unit * PER_SECOND.get(unit, 1), instant, zone), ""
    largest = max(abs(lo), abs(hi)) // per_unit
    # 1973 to 5138 in each unit: three decades apart, so that no two units overlap.
    bounds = {"number": 10**8, "s": 10**11, "ms": 10**14, "us": 10**17}
    name = next((unit for unit, bound in bounds.items() if largest < bound), "ns")
    named = UNIT_NAMES.get(name, "plain numbers")
    note = f"time: {named}, guessed from values up to {largest} (--time-unit says otherwise)"
    return TimeScale(per_unit * PER_SECOND.get(name, 1), name != "number", zone), note


@dataclass(frozen=True)
class TimeGrid:
    """The steps 0..T-1 of a tensor, as times.

    Parameters
    ----------
    step
        What was asked for: ``1d``, ``bins:64``, ``distinct``.
    scale
        What a tick is.
    n_steps
        T.
    since, until
        Ticks outside [since, until) are outside the grid.
    origin, width
        Step t covers [origin + t·width, origin + (t+1)·width), where all steps are equally long.
    edges
        Otherwise the T+1 boundaries; for ``distinct`` the T times themselves.

    Examples
    --------
    >>> grid = build_grid("1d", 0, 3 * 86400, TimeScale(1, True))
    >>> grid.n_steps, grid.steps_of(np.array([0, 86400, -1])).tolist(), grid.show(3)
    (4, [0, 1, -1], '1970-01-04T00:00:00+0000')
    """

    step: str
    scale: TimeScale
    n_steps: int
    since: int
    until: int
    origin: int = 0
    width: int = 0
    edges: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse a grid whose parts contradict each other; it may come from a damaged file."""
        edges = 0 if self.width else self.n_steps + (self.step != "distinct")
        if not 0 <= self.n_steps <= MAX_STEPS or self.width < 0 or len(self.edges) != edges:
            raise ValueError(f"{self.n_steps} steps of width {self.width} with {len(self.edges)} boundaries")
        # What is beyond 64 bits, or beyond what all steps can add up to, was never written.
        if max(map(abs, (self.since, self.until, self.origin, *self.edges))) >= 2 * FAR:
            raise ValueError("a moment that no column holds")

    def steps_of(self, ticks: Int64s) -> Int64s:
        """Return the step of every tick; -1 for a tick outside the grid."""
        if self.width:
            steps = (ticks - self.origin) // min(self.width, FAR)
        else:
            edges = np.array(self.edges, dtype=np.int64)
            steps = np.searchsorted(edges, ticks, side="right").astype(np.int64) - 1
            if self.step == "distinct":
                steps[edges[steps] != ticks] = -1
        steps[(ticks < self.since) | (ticks >= self.until)] = -1
        return steps

    def start(self, step: int) -> int:
        """Return the first tick of a step."""
        return self.origin + step * self.width if self.width else self.edges[step]

    def show(self, step: int) -> str:
        """Return the first moment of a step as a person would write it."""
        return self.scale.show(self.start(step))

    def to_json(self) -> dict[str, Any]:
        """Return plain types, for a manifest."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Rebuild from `to_json`."""
        fields = dict(data)
        return cls(**{**fields, "scale": TimeScale(**fields["scale"]), "edges": tuple(fields["edges"])})


def build_grid(
    step: str,
    lo: int,
    hi: int,
    scale: TimeScale,
    *,
    since: int | None = None,
    until: int | None = None,
    distinct: Int64s | None = None,
) -> TimeGrid:
    """Lay the grid over the data.

    Days and weeks are calendar days and weeks of the zone; a week starts on Monday. Shorter steps have a
    fixed length and count from the zone's midnight before the first edge. Where `since` is given the grid
    starts at the step that holds it; where `until` is given it ends with the step before it, edges or not.

    Parameters
    ----------
    step
        ``1d``, ``6h``, …; ``bins:N``; ``distinct``; a whole number for plain numbers.
    lo, hi
        The first and last tick of an edge inside the window.
    distinct
        The sorted distinct ticks, for ``distinct``.
    """
    check_step(step)
    lo = lo if since is None else since
    hi = hi if until is None else until - 1
    if step == "distinct":
        if distinct is None or len(distinct) > MAX_STEPS:
            raise _too_many("more distinct times", "--step 1d, or --step bins:1000")
        return TimeGrid(step, scale, len(distinct), lo, hi + 1, edges=tuple(distinct.tolist()))
    if step.startswith("bins:"):
        n_bins, span = int(step[5:]), hi + 1 - lo
        # floor((t-lo)·N/span) = k from the tick lo + ceil(k·span/N) on, in whole numbers.
        edges = tuple(lo - (-k * span) // n_bins for k in range(n_bins + 1))
        return TimeGrid(step, scale, n_bins, lo, hi + 1, edges=edges)
    if step.isdecimal():
        if scale.instant:
            raise ConfigError(
                "step for times that are moments", got=step, allowed=DURATIONS, remedy=f"Write {step}s?"
            )
        return _uniform(step, scale, lo - lo % scale.ticks, int(step) * scale.ticks, lo, hi + 1)
    count, unit = _split(step)
    if not scale.instant:
        raise ConfigError(
            "step for plain-number times",
            got=step,
            allowed="a whole number, distinct or bins:N",
            remedy="Say what a number is, for example --time-unit s.",
        )
    width = count * SECONDS[unit] * scale.ticks
    first = _local_day(lo, scale)
    if unit == "w":
        first = _monday(first)
    origin = _midnight(first, scale)
    if unit in "dw" and scale.zone != "UTC":
        days = count * (7 if unit == "w" else 1)
        n_steps = (_local_day(hi, scale) - first).days // days + 1
        _check_count(n_steps, step)
        try:
            edges = tuple(_midnight(first + timedelta(days=days * k), scale) for k in range(n_steps + 1))
        except OverflowError:
            raise _outside_calendar(f"a step that ends after {_local_day(hi, scale)}") from None
        return TimeGrid(step, scale, n_steps, lo, hi + 1, edges=edges)
    # Short steps: from midnight, but not a whole day of empty steps before the first edge.
    origin += 0 if unit in "dw" else (lo - origin) // width * width
    return _uniform(step, scale, origin, width, lo, hi + 1)


def parse_moment(text: str, scale: TimeScale, name: str) -> int:
    """Read --since or --until: a date, a timestamp, or a number as the time column holds it."""
    if re.fullmatch(rf"-?\d{{1,{LONGEST_NUMBER}}}", text) and not (scale.instant and len(text) == 8):
        tick = int(text) * (1 if scale.instant else scale.ticks)
        if abs(tick) <= FAR:
            return tick
    elif scale.instant:
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            pass
        else:
            if moment.tzinfo is None:
                moment = moment.replace(tzinfo=ZoneInfo(scale.zone))
            try:
                return _ticks(moment, scale)
            except OverflowError:
                pass  # The first or the last day of the calendar, seen from UTC.
    kinds = "a date, a timestamp or a number of the column" if scale.instant else "a whole number"
    raise ConfigError(name, got=repr(text), allowed=kinds)


def last_window(text: str, hi: int, scale: TimeScale) -> int:
    """Return the first tick of the rolling window of --last that ends with the tick `hi`.

    ``90d`` is 90 calendar days, the day of `hi` included; weeks, hours, … likewise.
    """
    if is_count(text) and not scale.instant:
        return max(hi - int(text) * scale.ticks + 1, -FAR)
    if (duration := parse_duration(text)) and scale.instant:
        count, unit = duration
        if count > 0:
            day = _local_day(hi, scale)
            if unit in "dw":
                try:
                    day -= timedelta(days=day.weekday() if unit == "w" else 0)
                    day -= timedelta(days=(count - 1) * (7 if unit == "w" else 1))
                except OverflowError:
                    raise ConfigError(
                        "--last", got=repr(text), allowed="a window that begins after the year 1"
                    ) from None
                return _midnight(day, scale)
            width = SECONDS[unit] * scale.ticks
            origin = _midnight(day, scale)
            return max(origin + ((hi - origin) // width - count + 1) * width, -FAR)
    kind = DURATIONS if scale.instant else "a whole number (the times are plain numbers)"
    raise ConfigError("--last", got=repr(text), allowed=kind)


def _monday(day: date) -> date:
    try:
        return day - timedelta(days=day.weekday())
    except OverflowError:
        raise _outside_calendar(f"the week of {day}") from None


def _uniform(step: str, scale: TimeScale, origin: int, width: int, since: int, until: int) -> TimeGrid:
    n_steps = (until - 1 - origin) // width + 1
    _check_count(n_steps, step)
    return TimeGrid(step, scale, n_steps, since, until, origin=origin, width=width)


def _check_count(n_steps: int, step: str) -> None:
    if n_steps > MAX_STEPS:
        raise _too_many(f"{n_steps:,} steps of {step}", "a longer --step, --since/--until or --time-unit")


def _too_many(got: str, remedy: str) -> InputError:
    return InputError(
        "too many steps in time", got=got, allowed=f"at most {MAX_STEPS:,}", remedy=f"Try {remedy}."
    )


def _split(duration: str) -> tuple[int, str]:
    found = parse_duration(duration)
    if found is None:
        raise ConfigError("duration", got=repr(duration), allowed=DURATIONS)
    return found


def _ticks(moment: datetime, scale: TimeScale) -> int:
    delta = moment - datetime(1970, 1, 1, tzinfo=UTC)
    micros = (delta.days * 86400 + delta.seconds) * 10**6 + delta.microseconds
    return micros * scale.ticks // 10**6


def _midnight(day: date, scale: TimeScale) -> int:
    if scale.zone == "UTC":
        return (day - _EPOCH).days * 86400 * scale.ticks
    try:
        return _ticks(datetime.combine(day, time(), ZoneInfo(scale.zone)), scale)
    except OverflowError:
        raise _outside_calendar(str(day)) from None


def _local_day(tick: int, scale: TimeScale) -> date:
    try:
        if scale.zone == "UTC":
            return _EPOCH + timedelta(days=tick // (86400 * scale.ticks))
        moment = datetime.fromtimestamp(0, UTC) + timedelta(seconds=tick // scale.ticks)
        return moment.astimezone(ZoneInfo(scale.zone)).date()
    except (OverflowError, ValueError):
        raise _outside_calendar(f"{tick // scale.ticks} s since 1970") from None


def _outside_calendar(got: str) -> InputError:
    return InputError(
        "time outside the calendar",
        got=got,
        allowed="years 1 to 9999",
        remedy="Is --time-unit right? --until leaves later edges out.",
    )


# From how many seconds on a unit is used: a day reads better as 24 hours, a fortnight as 14 days.
_UNITS = (
    ("years", 365.2425 * 86400, 730 * 86400),
    ("days", 86400.0, 48 * 3600),
    ("hours", 3600.0, 120 * 60),
    ("minutes", 60.0, 120),
    ("seconds", 1.0, 0),
)


def name_period(steps: float, grid: TimeGrid) -> str:
    """Return how often something happens that comes back after so many steps.

    Steps of unequal length (``distinct`` times) have no common measure: there it is steps.

    Examples
    --------
    >>> days = build_grid("1d", 0, 60 * 86400, TimeScale(1, True))
    >>> name_period(7, days), name_period(1, days), name_period(1461, days)
    ('every 7.0 days', 'every 24.0 hours', 'every 4.0 years')
    """
    if grid.step == "distinct":
        return f"every {steps:.1f} steps"
    width = grid.width or (grid.edges[-1] - grid.edges[0]) / grid.n_steps
    length = steps * width / grid.scale.ticks
    if not grid.scale.instant:
        return f"every {length:.1f} units of time"
    for name, seconds, least in _UNITS:
        if length >= least:
            return f"every {length / seconds:.1f} {name}"
    raise AssertionError("the last unit takes everything")
