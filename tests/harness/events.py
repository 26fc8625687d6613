"""Events of made-up graphs, for tests of evaluations."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.evaluation import Events
from toffee_dist.timegrid import TimeScale


def make_events(seed: int, n_nodes: int = 40, n_rows: int = 600, **changes: Any) -> Events:
    """Communities that keep to themselves, over 40 days; ids are strings with gaps."""
    rng = np.random.default_rng(seed)
    source, other = rng.integers(0, n_nodes, (2, n_rows))
    target = np.where(rng.random(n_rows) < 0.8, source // 10 * 10 + other % 10, other)
    time = np.sort(rng.integers(0, 40, n_rows)) * 86_400
    ids = pl.Series([f"n{3 * k:04d}" for k in range(n_nodes)])
    base = Events(ids, source, target, time, None, TimeScale(1, True), "1d", directed=False)
    return replace(base, **changes)
