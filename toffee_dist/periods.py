"""Periods in the words of a person: ``every 7.0 days``, from steps and the grid that they are steps of."""

from __future__ import annotations

from toffee_dist.timegrid import TimeGrid

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
    >>> from toffee_dist.timegrid import TimeScale, build_grid
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
