"""Time: units, calendars, windows."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toffee_dist import ConfigError, InputError
from toffee_dist.settings import check_zone
from toffee_dist.timegrid import (
    TimeGrid,
    TimeScale,
    build_grid,
    choose_scale,
    last_window,
    parse_moment,
)

SECONDS = TimeScale(1, True)
NUMBERS = TimeScale(1, False)


def at(text: str, zone: str = "UTC") -> int:
    return int(datetime.fromisoformat(text).replace(tzinfo=ZoneInfo(zone)).timestamp())


@pytest.mark.parametrize(
    ("value", "ticks", "instant", "named"),
    [
        (86_400, 1, False, "plain numbers"),
        (1_700_000_000, 1, True, "epoch seconds"),
        (1_700_000_000_000, 10**3, True, "epoch ms"),
        (1_700_000_000_000_000, 10**6, True, "epoch µs"),
        (1_700_000_000_000_000_000, 10**9, True, "epoch ns"),
    ],
)
def test_units_are_guessed_and_said(value: int, ticks: int, instant: bool, named: str) -> None:
    scale, note = choose_scale(0, value, 1, 0, "auto", "UTC")
    assert (scale.ticks, scale.instant) == (ticks, instant)
    assert named in note
    assert str(value) in note


def test_units_that_are_said_are_not_guessed() -> None:
    assert choose_scale(0, 5, 1, 0, "ms", "UTC") == (TimeScale(1000, True), "")
    assert choose_scale(0, 5, 1, 0, "number", "UTC") == (TimeScale(1, False), "")
    with pytest.raises(ConfigError, match="Leave --time-unit out"):
        choose_scale(0, 5, 1, 10**6, "s", "UTC")
    with pytest.raises(ConfigError, match="IANA"):
        check_zone("Mars/Olympus")


def test_a_day_of_the_zone_is_not_always_24_hours() -> None:
    scale = TimeScale(1, True, "Europe/Athens")
    lo, hi = at("2024-03-30T12:00", "Europe/Athens"), at("2024-04-01T12:00", "Europe/Athens")
    grid = build_grid("1d", lo, hi, scale)
    assert grid.n_steps == 3
    assert np.diff(grid.edges).tolist() == [86400, 23 * 3600, 86400]
    assert grid.show(1) == "2024-03-31T00:00:00+0200"
    assert grid.show(2) == "2024-04-01T00:00:00+0300"


def test_weeks_start_on_monday() -> None:
    sunday, monday = at("2024-01-07T23:59:59"), at("2024-01-08T00:00")
    grid = build_grid("1w", sunday, monday, SECONDS)
    assert grid.steps_of(np.array([sunday, monday])).tolist() == [0, 1]
    assert grid.show(0) == "2024-01-01T00:00:00+0000"


def test_hours_count_from_midnight() -> None:
    lo = at("2024-01-07T07:00")
    grid = build_grid("6h", lo, at("2024-01-08T07:00"), SECONDS)
    assert (grid.show(0), grid.n_steps) == ("2024-01-07T06:00:00+0000", 5)


@given(
    st.lists(st.integers(-(10**6), 10**6), min_size=1, max_size=30),
    st.sampled_from(["1d", "3d", "1w", "2w", "5h", "90m", "distinct", "bins:7", "bins:1"]),
    st.sampled_from(["UTC", "Asia/Kathmandu", "America/Sao_Paulo"]),
)
def test_every_time_is_in_its_step(times: list[int], step: str, zone: str) -> None:
    ticks = np.array(times)
    scale = TimeScale(1, True, zone)
    grid = build_grid(step, min(times), max(times), scale, distinct=np.unique(ticks))
    steps = grid.steps_of(ticks)
    assert steps.min() >= 0
    assert steps.max() < grid.n_steps
    for time, index in zip(times, steps.tolist(), strict=True):
        assert grid.start(index) <= time
        assert index == grid.n_steps - 1 or time < grid.start(index + 1)
    assert grid.steps_of(np.array([min(times) - 1, max(times) + 1])).tolist() == [-1, -1]
    assert TimeGrid.from_json(json.loads(json.dumps(grid.to_json()))) == grid


@given(st.integers(-50, 50), st.integers(1, 40), st.integers(1, 12))
def test_bins_are_equal(lo: int, span: int, n_bins: int) -> None:
    times = np.arange(lo, lo + span)
    grid = build_grid(f"bins:{n_bins}", lo, lo + span - 1, NUMBERS)
    assert grid.steps_of(times).tolist() == [(time - lo) * n_bins // span for time in times.tolist()]


def test_a_window_has_its_empty_steps() -> None:
    grid = build_grid("1d", 90_000, 90_001, SECONDS, since=0, until=5 * 86400)
    assert grid.n_steps == 5
    assert grid.steps_of(np.array([-1, 0, 90_000, 5 * 86400])).tolist() == [-1, 0, 1, -1]


@pytest.mark.parametrize(
    ("last", "since"),
    [
        ("1d", "2024-01-10T00:00"),
        ("90d", "2023-10-13T00:00"),
        ("1w", "2024-01-08T00:00"),
        ("2w", "2024-01-01T00:00"),
        ("6h", "2024-01-10T07:00"),
    ],
)
def test_last(last: str, since: str) -> None:
    newest = at("2024-01-10T12:30")
    assert last_window(last, newest, SECONDS) == at(since)


def test_last_of_numbers() -> None:
    assert last_window("10", 99, NUMBERS) == 90
    with pytest.raises(ConfigError, match="plain numbers"):
        last_window("10d", 99, NUMBERS)
    with pytest.raises(ConfigError, match="6h, 1d, 1w"):
        last_window("ten days", 99, SECONDS)


def test_moments() -> None:
    assert parse_moment("2024-01-01", SECONDS, "--since") == at("2024-01-01")
    assert parse_moment("2024-01-01T02:00+02:00", SECONDS, "--since") == at("2024-01-01")
    athens = TimeScale(10**3, True, "Europe/Athens")
    assert parse_moment("2024-01-01", athens, "--since") == 1000 * (at("2024-01-01") - 7200)
    assert parse_moment("1700000000", SECONDS, "--since") == 1_700_000_000
    assert parse_moment("20240101", SECONDS, "--since") == at("2024-01-01")
    assert parse_moment("7", TimeScale(10**6, False), "--since") == 7 * 10**6
    with pytest.raises(ConfigError, match="--until: got 'soon'"):
        parse_moment("soon", SECONDS, "--until")


@pytest.mark.parametrize("step", ["", "1", "d", "0d", "1y", "bins:0", "bins:x", "-1d", "1.5d"])
def test_steps_that_cannot_be(step: str) -> None:
    with pytest.raises(ConfigError, match="step"):
        build_grid(step, 0, 10, SECONDS)


def test_durations_need_a_calendar() -> None:
    with pytest.raises(ConfigError, match="--time-unit s"):
        build_grid("1d", 0, 10, NUMBERS)


@pytest.mark.parametrize("step", ["1s", "distinct"])
def test_too_many_steps(step: str) -> None:
    with pytest.raises(InputError, match="at most 1,000,000"):
        build_grid(step, 0, 10**7, SECONDS, distinct=np.arange(10**6 + 1))


def test_shown_times() -> None:
    assert TimeScale(10**9, True).show(1_500_000_000) == "1970-01-01T00:00:01.5+0000"
    assert TimeScale(10**6, False).show(1_500_000) == "1.5"
    assert TimeScale(1, True).show(10**15) == f"{10**15} s since 1970"
    assert datetime.fromtimestamp(0, UTC).year == 1970
    unit: Any = "years"
    with pytest.raises(ConfigError, match="time unit"):
        choose_scale(0, 1, 1, 0, unit, "UTC")
