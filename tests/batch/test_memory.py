"""Memory: what a worker takes at its peak is at most what the plan says, and not much less."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from tests.harness.clusters import job, write_edges
from tests.harness.memory import watching
from tests.harness.refreshes import DAY, FIRST, night, write_day
from toffee_dist.batch.pipeline import start_run
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.stages import make_plan
from toffee_dist.cluster.client import cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.runs import RunFolder

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

BOTH = ("embedding", "trajectory")


def peak_and_projection(
    folder: Path, *, nodes: int, events: int, days: int, **options: Any
) -> tuple[int, int]:
    edges = write_edges(folder / "edges.parquet", nodes=nodes, events=events, days=days)
    with watching() as peaks:
        outcome = start_run(job(edges, folder / "out", mode="processes", workers=1, **options))
    return max(peaks.values()), outcome.plan.worker_bytes()


MANY_NODES = {"nodes": 200_000, "events": 600_000, "days": 20, "rank": 48, "outputs": ("embedding",)}
MANY_EVENTS = {"nodes": 500, "events": 60_000, "days": 60, "rank": 32, "outputs": BOTH}
MANY_SLICES = {"nodes": 20_000, "events": 100_000, "days": 15, "rank": 64, "outputs": BOTH}

# More columns than nodes: what counts are r×r arrays, those of the factors all at once.
HIGH_RANK = {"nodes": 30, "events": 900, "days": 8, "rank": 1200, "outputs": ("factors",)}


@pytest.mark.job
@pytest.mark.parametrize("shape", [MANY_NODES, MANY_EVENTS, MANY_SLICES, HIGH_RANK])
def test_peak_is_below_the_projection(tmp_path: Path, shape: dict[str, Any]) -> None:
    peak, projected = peak_and_projection(tmp_path, **shape)
    assert peak <= projected <= 2 * peak


@pytest.mark.job
def test_peak_of_a_refresh_is_below_the_projection(tmp_path: Path) -> None:
    edges = tmp_path / "edges"
    for day in range(8):
        write_day(edges, day, nodes=60_000, events=80_000)
    for day in (7, 8):
        options = {"last": "7d", "rank": 48, "mode": "processes", "as_of": str(FIRST + day * DAY)}
        config = night(edges, tmp_path / "out", **options)
        with watching() as peaks:
            done = refresh(config)
        folder = tmp_path / "out" / "runs" / done.run
        projected = make_plan(shape_of(folder), config).worker_bytes()
        assert max(peaks.values()) <= projected <= 2 * max(peaks.values())


def test_freed_memory_is_given_back_between_tasks() -> None:
    with cluster("processes", 1) as client:
        run = runner(client)
        before, held = next(run(fill_and_free, [0])), next(run(fill_and_free, [2**28]))
        [after] = client.run(resident).values()
    assert held > before + 2**27
    assert after < before + 2**26


def fill_and_free(size: int) -> int:
    """Hold so many bytes in pieces too small for maps of their own; return the resident set then."""
    pieces = [np.ones(2**13) for _ in range(size // 2**16)]
    found = resident()
    del pieces
    return found


def resident() -> int:
    return int(psutil.Process().memory_info().rss)


def shape_of(run: Path) -> Shape:
    return Shape.of(RunFolder(run).read_manifest().summary, directed=True)


@pytest.mark.job
def test_steps_cost_no_memory(tmp_path: Path) -> None:
    shape: dict[str, Any] = {
        "nodes": 5000,
        "events": 50_000,
        "rank": 32,
        "outputs": BOTH,
        "freqs": "lowest:8",
    }
    for name in ("few", "many"):
        (tmp_path / name).mkdir()
    few, _ = peak_and_projection(tmp_path / "few", days=50, **shape)
    many, projected = peak_and_projection(tmp_path / "many", days=1000, **shape)
    assert many < 1.3 * few
    assert many <= projected
