"""The map as data for the script of the page, and in words for its reader."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from datetime import date
from html import escape
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.report.charts import COLOURS
from toffee_dist.report.gather import NodeMap
from toffee_dist.report.stage import Drawn, Paths
from toffee_dist.timegrid import TimeGrid
from toffee_dist.words import show_line

# Scripts of the map, in their order.
PLAYER = ("player.js",)
# The longest path in units of the map, and the size of a dot that is drawn largest.
_LIMIT, _LARGEST = 32_767, 2.5


def make_scene(nodes: NodeMap, grid: TimeGrid, *, live: bool = False) -> dict[str, Any]:
    """Return what the script needs: small numbers as base64, ids as text without control characters."""
    return {
        "live": live,
        "ids": [show_line(name) for name in nodes.ids],
        "degree": nodes.degree.tolist(),
        "seen": [label_step(grid, int(step)) if step >= 0 else "" for step in nodes.last_step],
        "last": nodes.last_step.tolist(),
        "colours": list(COLOURS),
        "all": {"xy": pack_points(nodes.points, extent(nodes.points)), "group": pack(nodes.community)},
        "time": None if nodes.paths is None else _in_time(nodes.paths, grid, nodes.moments),
        "why": {
            str(at): one | ({"move": _label_move(one["move"], grid)} if "move" in one else {})
            for at, one in nodes.why.items()
        },
    }


def _in_time(paths: Paths, grid: TimeGrid, moments: Sequence[int]) -> dict[str, Any]:
    steps = range(paths.first, grid.n_steps)
    return {
        "nodes": paths.nodes.tolist(),
        "first": paths.first,
        "labels": [label_step(grid, step) for step in steps],
        **pack_paths(paths.drawn, extent(paths.drawn.points)),
        "activity": [float(f"{value:.4g}") for value in paths.activity],
        "counted": paths.counted,
        "change": [float(f"{value:.4g}") for value in paths.change],
        "moments": [step - paths.first for step in moments if step >= paths.first],
    }


def extent(points: NDArray[Any]) -> float:
    """Return the largest coordinate: what the limits of packed points stand for."""
    return float(np.abs(points).max(initial=0.0)) or 1.0


def pack_paths(drawn: Drawn, limit: float) -> dict[str, str]:
    """Return places, sizes and communities of nodes, node by node, step by step."""
    sizes = np.clip(drawn.size / _LARGEST, 0, 1) * 255
    return {
        "xy": pack_points(drawn.points, limit),
        "size": pack(sizes.round()),
        "group": pack(drawn.community),
    }


def pack_points(points: NDArray[Any], limit: float) -> str:
    """Return points as 16-bit numbers in base64; those beyond the limit are at the edge."""
    scaled = np.clip(np.nan_to_num(points) / limit, -1, 1) * _LIMIT
    return b64encode(scaled.round().astype("<i2").tobytes()).decode()


def pack(numbers: NDArray[Any]) -> str:
    """Return numbers from 0 to 255 in base64."""
    return b64encode(np.asarray(numbers).astype(np.uint8).tobytes()).decode()


def label_step(grid: TimeGrid, step: int) -> str:
    """Return when a step begins, as short as can be: with its weekday, without midnight and seconds of 0.

    Examples
    --------
    >>> from toffee_dist.timegrid import TimeScale, build_grid
    >>> label_step(build_grid("6h", 0, 86400, TimeScale(1, True)), 1)
    'Thu 1970-01-01 06:00'
    >>> label_step(build_grid("1d", 0, 86400, TimeScale(1, True)), 1)
    'Fri 1970-01-02'
    """
    shown = grid.show(step)
    day, found, clock = shown.partition("T")
    if not grid.scale.instant or not found:
        return shown
    clock = clock.partition("+")[0].partition("-")[0].removesuffix(":00")
    whole_days = grid.step[-1:] in ("d", "w") and clock == "00:00"
    return f"{date.fromisoformat(day):%a} {day}" + ("" if whole_days else f" {clock}")


def _label_move(move: dict[str, Any], grid: TimeGrid) -> dict[str, Any]:
    step = move["step"]
    return {
        "from": label_step(grid, step - 1),
        "to": label_step(grid, step),
        "step": step,
        "links": move["links"],
    }


def describe(nodes: NodeMap, grid: TimeGrid, every: int) -> str:
    """Return in words what is drawn, and how to read it.

    Parameters
    ----------
    nodes
        The map.
    grid
        Its steps.
    every
        How many nodes have edges.
    """
    sample = "All nodes with edges are here."
    if len(nodes.ids) < every:
        sample = (
            f"Here are {len(nodes.ids):,} of the {every:,} nodes with edges: half of them the best "
            "connected, the others drawn at random."
        )
    lines = []
    paths = nodes.paths
    if paths is not None:
        steps, moving = grid.n_steps - paths.first, len(paths.nodes)
        last = f" and the last {steps:,} of {grid.n_steps:,} steps" if paths.first else ""
        axes, groups = paths.stage.axes, paths.stage.communities
        lines.append(
            "<b>Step by step.</b> Each dot is a node at the step shown; nodes whose vectors point the same "
            "way at that step, because they meet the same others, are near each other. All steps share one "
            "basis: a dot that moves has moved in the vectors. Large dots do more than usual for them, small "
            "ones less; who does little is drawn towards the middle. The plane keeps "
            f"{sum(axes.share):.0%} of the variation. "
            f"{_groups(len(groups.centres), groups.apart, 'at any step')} Here are {moving:,} nodes{last}."
        )
    lines.append(
        f"<b>Over all time.</b> The one vector of each node, at length 1. {escape(nodes.nearness)} {sample} "
        f"{_groups(int(nodes.community.max()) + 1, nodes.apart, 'over all time')}"
        + (" Its colours are not those of the steps." if paths is not None else "")
    )
    if grid.scale.instant:
        lines[-1] += f" Times are those of {escape(grid.scale.zone)}."
    lines.append(
        "<b>Keys.</b> Space plays and pauses, ← and → go a step (with Shift ten), Home and End to the ends, "
        "/ searches, Esc lets go of all nodes; wheel or + and − zoom, dragging moves, 0 shows everything."
    )
    return "".join(f'<p class="says">{line}</p>' for line in lines)


def _groups(count: int, apart: float, when: str) -> str:
    if count < 2:
        return "No number of communities separates these nodes."
    return (
        f"The {count} communities are groups of directions {when}, found by k-means, that number because it "
        f"separates them best (silhouette {apart:.2f}; 1 is clean, 0 is none)."
    )
