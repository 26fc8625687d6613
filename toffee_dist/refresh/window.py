"""The window of a refresh: which steps are complete, which of them count, and which nodes are too old."""

from __future__ import annotations

import time
from dataclasses import dataclass

from toffee_dist.errors import ConfigError
from toffee_dist.settings import SECONDS, RefreshConfig, is_count, parse_duration
from toffee_dist.timegrid import TimeScale, build_grid, last_window, parse_moment


@dataclass(frozen=True)
class Window:
    """The steps [since, until) of a refresh, in ticks."""

    scale: TimeScale
    since: int
    until: int

    @property
    def texts(self) -> tuple[str, str]:
        """Both ends, as --since and --until read them."""
        return self.scale.show(self.since), self.scale.show(self.until)


def find_window(config: RefreshConfig, scale: TimeScale, newest: int, now: int | None = None) -> Window:
    """Return the window of a refresh: the last complete step and those before it.

    A step is complete when it is over: by --as-of, else by the clock. Without new edges the window ends with
    the step of the newest one. Times that are plain numbers have no clock: there all steps with edges count.

    Parameters
    ----------
    config
        ``step``, ``last`` and ``as_of``.
    scale, newest
        What a time is, and that of the newest edge.
    now
        The moment in ticks, for instants; default: the clock.
    """
    length = check_steps(config, scale)
    until = _step(config.step, newest, scale)[1]
    if config.as_of is not None:
        until = min(until, _step(config.step, parse_moment(config.as_of, scale, "--as-of"), scale)[0])
    elif scale.instant:
        clock = int(time.time() * scale.ticks) if now is None else now
        until = min(until, _step(config.step, clock, scale)[0])
    day = SECONDS["d"]
    if scale.instant and length % day == 0 and config.step[-1] in "dw":
        # Days of the calendar, of which some have 23 or 25 hours.
        return Window(scale, last_window(f"{length // day}d", until - 1, scale), until)
    return Window(scale, until - length * scale.ticks, until)


def check_steps(config: RefreshConfig, scale: TimeScale) -> int:
    """Refuse steps that would begin elsewhere in another refresh's window; return the window's length."""
    if config.since is not None or config.until is not None or config.known is not None:
        raise ConfigError(
            "since, until and known of a refresh",
            got="one of them",
            allowed="last and as_of",
            remedy="A refresh finds its window and its nodes itself.",
        )
    if config.last is None:
        raise ConfigError("last", got="nothing", allowed="a length such as 90d", remedy="Add --last 90d.")
    step, last = (_length(text, scale) for text in (config.step, config.last))
    day = SECONDS["d"]
    tiles = step is not None and (not scale.instant or step in (day, 7 * day) or day % step == 0)
    if step is None or not tiles:
        raise ConfigError(
            "step of a refresh",
            got=config.step,
            allowed="1w, 1d, hours, minutes or seconds that divide a day; a whole number for numbers",
            remedy="Other steps would begin elsewhere in every refresh.",
        )
    if last is None or last % step:
        raise ConfigError(
            "last", got=config.last, allowed=f"a multiple of the step, {config.step}, in its unit or another"
        )
    return last


def _length(text: str, scale: TimeScale) -> int | None:
    """Return seconds (instants) or units (numbers); None for what is neither."""
    if not scale.instant:
        return int(text) if is_count(text) else None
    duration = parse_duration(text)
    return duration[0] * SECONDS[duration[1]] or None if duration else None


def _step(step: str, tick: int, scale: TimeScale) -> tuple[int, int]:
    """Return the first tick of the step that holds a tick, and the first one after it."""
    if not scale.instant:
        width = int(step) * scale.ticks
        return tick // width * width, (tick // width + 1) * width
    grid = build_grid(step, tick, tick, scale)
    return grid.start(0), grid.start(0) + grid.width if grid.width else grid.edges[1]


def find_expiry(config: RefreshConfig, window: Window) -> int | None:
    """Return the tick before which a node must not have been seen last; None: nodes stay for ever."""
    if config.expire is None:
        return None
    length, last = (_length(text, window.scale) for text in (config.expire, config.last or ""))
    if length is None or last is None or length < last * (2 if config.appends else 1):
        least = f"{config.last}, the window's"
        if config.appends:
            least = f"twice {config.last}, the window's: a causal trajectory keeps the links of two windows"
        raise ConfigError(
            "expire",
            got=config.expire,
            allowed=f"a length of at least {least}",
            remedy="Write it as 365d, or leave it out to keep every node.",
        )
    return window.until - length * window.scale.ticks


def count_steps(step: str, since: int, window: Window) -> int:
    """Return how many steps of a window begin at `since` or later."""
    if window.until <= since:
        return 0
    if not window.scale.instant:
        return -(-(window.until - since) // (int(step) * window.scale.ticks))
    grid = build_grid(step, since, window.until - 1, window.scale)
    return grid.n_steps
