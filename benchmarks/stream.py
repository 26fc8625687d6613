"""A generated stream of edges of any size, for measuring the whole job."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl

FIRST = 1_767_571_200  # Monday 2026-01-05 00:00 UTC
CHUNK = 2_000_000


def write_stream(folder: Path, *, nodes: int, events: int, days: int, seed: int = 0) -> Path:
    """Write Parquet files of edges: communities of a hundred nodes, a weekly rhythm, a few busy nodes."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    for index, start in enumerate(range(0, events, CHUNK)):
        count = min(CHUNK, events - start)
        # Squared uniform numbers: low ids are busy, high ones are not.
        source = (nodes * rng.random(count) ** 2).astype(np.int64)
        day = rng.integers(days, size=count)
        # At weekends everybody is in another community.
        home = source // 100 + np.where(day % 7 >= 5, 37, 0)
        near = (home * 100 + rng.integers(100, size=count)) % nodes
        far = (nodes * rng.random(count) ** 2).astype(np.int64)
        frame = pl.DataFrame(
            {
                "source": source,
                "target": np.where(rng.random(count) < 0.8, near, far),
                "time": FIRST + day * 86_400 + rng.integers(86_400, size=count),
            }
        )
        frame.write_parquet(folder / f"edges-{index:03d}.parquet")
    return folder
