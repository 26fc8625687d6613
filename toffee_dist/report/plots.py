"""The charts of a report, from what was gathered."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.kernels.frequencies import SIGNIFICANT
from toffee_dist.report.charts import COLOURS, GREY, Axis, Chart, across
from toffee_dist.timegrid import TimeGrid, name_period

GOOD, BAD = COLOURS[0], COLOURS[5]


def draw_rhythms(frequencies: pl.DataFrame, peaks: pl.DataFrame, grid: TimeGrid) -> str:
    """Return how far every frequency stands out of noise, the peaks by name."""
    k, height = frequencies["k"].to_list(), frequencies["significance"].to_list()
    low, high = across([*height, SIGNIFICANT], room=0.12)
    chart = Chart(
        "How far every frequency stands out of noise",
        Axis("how many times in the window", 0, max(k) * 1.02),
        Axis("standard deviations above noise", low, high),
    )
    chart.name("in the trajectory", GOOD)
    chart.name("left out", GREY)
    for row in frequencies.iter_rows(named=True):
        at, up, period = row["k"], row["significance"], name_period(row["period_steps"], grid)
        colour = GOOD if row["chosen"] else GREY
        title = f"{period}: {up:.1f} above noise, k = {at}"
        half = max(k) * 0.0012
        chart.bar(at - half, at + half, min(up, 0.0), max(up, 0.0), colour)
        chart.dot(at, up, colour, title)
    chart.rule(SIGNIFICANT)
    for row in peaks.iter_rows(named=True):
        chart.text(row["k"], row["significance"], name_period(row["period_steps"], grid))
    return chart.svg()


def draw_fit(fit: pl.DataFrame, grid: TimeGrid) -> str:
    """Return what the fit leaves of every frequency and, where bounds are known, the gap to them."""
    columns = [("left", "share left over")]
    if fit["gap"].drop_nulls().len() > 1:
        columns.append(("gap", "gap to the lower bound"))
    found = ""
    for name, label in columns:
        values = fit[name].fill_null(np.nan).to_list()
        chart = Chart(
            f"{label} of every frequency",
            Axis("how many times in the window", -0.5, max(fit["k"]) * 1.02 + 0.5),
            Axis(label, *across(values), percent=True),
            height=200,
        )
        chart.name("converged", GOOD)
        if not fit["converged"].all():
            chart.name("stopped early", BAD)
        for row, value in zip(fit.iter_rows(named=True), values, strict=True):
            k = row["k"]
            period = name_period(grid.n_steps / k, grid) if k else "the sum over time"
            solver = f"{row['solver']}, {row['iterations']:,} iterations, {row['seconds']:.2f} s"
            title = f"{period}: {value:.2%} ({solver}), k = {k}"
            chart.dot(k, value, GOOD if row["converged"] else BAD, title)
        found += chart.svg()
    return found


def draw_turns(turns: NDArray[np.int64]) -> str:
    """Return the histogram of the angles between a node's vectors in two runs, as far as there are any."""
    last = max(10, int(np.flatnonzero(turns).max(initial=0)) + 1)
    shown = turns[:last].tolist()
    chart = Chart(
        "How many nodes turned by how many degrees",
        Axis("degrees that a node turned by", 0, last),
        Axis("nodes", *across(shown)),
        height=180,
    )
    for degree, count in enumerate(shown):
        title = f"turned by {degree}° to {degree + 1}°: {count:,} nodes"
        chart.bar(degree + 0.05, degree + 0.95, 0, count, GOOD, title)
    return chart.svg()


def draw_seconds(seconds: Mapping[str, float]) -> str:
    """Return how long each stage took, in the order of the run."""
    stages = list(seconds)
    chart = Chart(
        "Seconds of every stage",
        Axis("seconds", *across(list(seconds.values()))),
        Axis("", len(stages) - 0.4, -0.6, names=tuple(stages)),
        height=60 + 20 * len(stages),
        left=130,
    )
    for at, (stage, value) in enumerate(seconds.items()):
        chart.bar(0, value, at + 0.35, at - 0.35, GOOD, f"{stage}: {value:.2f} s")
    return chart.svg()
