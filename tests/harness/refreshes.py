"""A growing folder of edges, a file a day, for tests of the nightly refresh."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.settings import RefreshConfig

FIRST = 1_767_571_200  # Monday 2026-01-05 00:00 UTC
DAY = 86_400


def write_day(
    folder: Path, day: int, *, nodes: int = 240, events: int = 900, name: str = "", seed: int = 0
) -> None:
    """Write one day: communities of 30 nodes, of which a few move house as the weeks go by."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng([seed, day, nodes])
    source = (nodes * rng.random(events) ** 1.5).astype(np.int64)
    home = (source // 30 + (source % 30 < day / 20)) * 30
    near = (home + rng.integers(30, size=events)) % nodes
    target = np.where(rng.random(events) < 0.85, near, rng.integers(nodes, size=events))
    pl.DataFrame(
        {
            "source": [f"n{v:05d}" for v in source],
            "target": [f"n{v:05d}" for v in target],
            "time": FIRST + day * DAY + rng.integers(DAY, size=events),
        }
    ).write_parquet(folder / f"day-{day:03d}{name}.parquet")


def write_days(folder: Path, start: int, stop: int, **options: Any) -> Path:
    for day in range(start, stop):
        write_day(folder, day, **options)
    return folder


def night(edges: Path, out: Path, **options: Any) -> RefreshConfig:
    settings: dict[str, Any] = {
        "inputs": (str(edges),),
        "out": str(out),
        "rank": 8,
        "last": "28d",
        "mode": "threads",
        "workers": 1,
        "wait": 30.0,
        "report": False,
        # Slices of many frequencies: there is more to interrupt, to keep and to start from.
        "trajectory_by": "als",
    }
    return RefreshConfig.read(settings | options)
