"""What a report shows of a run, gathered from its folder: small numbers, whatever the size of the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.kernels.align import unit_rows
from toffee_dist.kernels.communities import find_communities
from toffee_dist.kernels.frequencies import SIGNIFICANT
from toffee_dist.report.layout import Method, find_axes, lay_out
from toffee_dist.report.sample import choose_nodes, choose_paths
from toffee_dist.storage.files import read_json
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.parquet import GROUP_ROWS, open_parquet, reading, take_rows
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import slice_name
from toffee_dist.storage.vectors import open_vectors, read_node_rows, read_nodes
from toffee_dist.timegrid import TimeGrid

# Frequencies that a plot has at the most: of more, those of largest energy.
FREQS = 2000
# Rhythms that are named.
PEAKS = 6
# Bars of the histogram of turns, of a degree each.
DEGREES = 180

Numbers = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Paths:
    """Trajectories of some nodes of the map, on a plane of their own.

    Attributes
    ----------
    nodes : which nodes of the map, (p,)
    points : (p, steps, 2)
    moments : of the steps, as in `NodeMap.seen`
    share : of the variance, along each of the two axes
    """

    nodes: NDArray[np.int64]
    points: Numbers
    moments: Numbers
    share: tuple[float, float]


@dataclass(frozen=True, eq=False)
class NodeMap:
    """Some nodes on a plane.

    Attributes
    ----------
    ids : as a person knows them; with two spaces of nodes, with the name of the space before it
    degree, community : a number per node
    seen : the last step; in milliseconds of the wall clock where times are moments
    points : (nodes, 2)
    nearness : one sentence on what nearness means
    apart : silhouette of the communities
    paths : of some of them, where the run has trajectories
    """

    ids: list[str]
    degree: Numbers
    community: NDArray[np.int64]
    seen: Numbers
    points: Numbers
    nearness: str
    apart: float
    paths: Paths | None = None


@dataclass(frozen=True, eq=False)
class Facts:
    """All that a report shows.

    Attributes
    ----------
    manifest : of the run
    grid : its steps as times
    fit : a row per solved slice, with its seconds and the share of its energy that is left over
    frequencies : a row per frequency above 0; None without a trajectory
    peaks : those of the rows that are rhythms, most significant first
    nodes : the map; None where there is nothing to draw
    turns : how many nodes turned by 0 to 1, 1 to 2, … 180 degrees since the previous run
    """

    manifest: Manifest
    grid: TimeGrid
    fit: pl.DataFrame
    frequencies: pl.DataFrame | None
    peaks: pl.DataFrame | None
    nodes: NodeMap | None
    turns: NDArray[np.int64] | None


def gather(run: RunFolder, manifest: Manifest, method: Method = "pca") -> Facts:
    """Read what a report needs.

    Parameters
    ----------
    run
        Folder of a run whose tables are all there.
    manifest
        Of the run, or what will be it.
    method
        How the map is laid out.
    """
    grid = manifest.grid
    frequencies = peaks = None
    if run.frequencies.exists():
        frequencies = read_frame(run.frequencies).filter(pl.col("k") > 0)
        peaks = find_peaks(frequencies)
        frequencies = strongest(frequencies)
    return Facts(
        manifest=manifest,
        grid=grid,
        fit=_read_fit(run),
        frequencies=frequencies,
        peaks=peaks,
        nodes=draw_map(run, manifest, grid, method),
        turns=count_turns(run.drift),
    )


def read_frame(path: Path) -> pl.DataFrame:
    """Read a small table."""
    with reading(path), path.open("rb") as handle:
        return pl.read_parquet(handle)


def strongest(frame: pl.DataFrame) -> pl.DataFrame:
    """Return at most `FREQS` rows, those of largest energy, in the order of frequencies."""
    return frame.sort("energy", descending=True, maintain_order=True).head(FREQS).sort("k")


def find_peaks(frequencies: pl.DataFrame) -> pl.DataFrame:
    """Return the frequencies that stand out of the noise and of both their neighbours.

    A period that does not divide the span leaks into the frequencies beside it: only the top counts.
    """
    height = pl.col("significance")
    beside = pl.max_horizontal(height.shift(1).fill_null(-np.inf), height.shift(-1).fill_null(-np.inf))
    peaks = frequencies.sort("k").filter((height >= SIGNIFICANT) & (height > beside))
    return peaks.sort("significance", descending=True, maintain_order=True).head(PEAKS)


def count_turns(table: Path) -> NDArray[np.int64] | None:
    """Return how many nodes turned by how many degrees since the previous run, batch by batch."""
    if not table.exists():
        return None
    counts = np.zeros(DEGREES, dtype=np.int64)
    with reading(table), open_parquet(table) as file:
        for batch in file.iter_batches(batch_size=GROUP_ROWS, columns=["cosine"]):
            angles = np.degrees(np.arccos(np.clip(batch.column(0).drop_null().to_numpy(), -1.0, 1.0)))
            counts += np.histogram(angles, bins=DEGREES, range=(0.0, 180.0))[0]
    return counts


def _read_fit(run: RunFolder) -> pl.DataFrame:
    fit = read_frame(run.fit).filter(~pl.col("reduced"))
    seconds = read_json(run.timings)
    times = [seconds.get(slice_name(k), 0.0) for k in fit["k"]]
    # f_k = ½‖X_k − A_k R_k A_kᴴ‖² + …, of ½‖X_k‖² where A_k is zero; NaN where nothing is to be fitted.
    left = 2 * pl.col("objective") / pl.col("energy")
    return strongest(fit.with_columns(left=left, seconds=pl.Series(times, dtype=pl.Float64)))


def draw_map(run: RunFolder, manifest: Manifest, grid: TimeGrid, method: Method) -> NodeMap | None:
    """Choose nodes, and place them; None where no output has a vector per node."""
    outputs, seed = manifest.outputs, manifest.config.seed
    rows = choose_nodes(run.nodes, seed)
    if not len(rows) or not {"embedding", "trajectory"} & set(outputs):
        return None
    chosen, n_steps = choose_paths(rows, grid.n_steps, manifest.config.rank, seed)
    if "embedding" not in outputs:
        # The mean of a trajectory stands in for the one vector; it is read of the chosen nodes only.
        rows = chosen
    rows = np.sort(rows)
    trajectories = None
    if "trajectory" in outputs:
        chosen = np.sort(chosen)
        table = open_vectors(run, "trajectory", manifest)
        trajectories = read_node_rows(table, chosen, grid.n_steps - n_steps)
    if "embedding" in outputs:
        vectors = read_nodes(open_vectors(run, "embedding", manifest), rows)
        if "embedding_target" in outputs:
            # A node that is never a source has a vector as a target, in the same axes.
            silent = np.flatnonzero(~vectors.any(axis=1))
            if len(silent):
                vectors[silent] = read_nodes(open_vectors(run, "embedding_target", manifest), rows[silent])
    else:
        assert trajectories is not None
        vectors = trajectories.mean(axis=1)
    alive = vectors.any(axis=1)
    rows, vectors = rows[alive], vectors[alive]
    if not len(rows):
        return None
    directions = unit_rows(vectors)
    known = pl.DataFrame(take_rows(run.nodes, rows, _node_columns(manifest)))
    points, nearness = lay_out(directions, method, seed)
    community, apart = find_communities(directions, seed)
    found = NodeMap(
        ids=_names(known),
        degree=known["degree"].to_numpy(),
        community=community,
        seen=moments(grid, known["last_step"].to_numpy()),
        points=points,
        nearness=nearness,
        apart=apart,
    )
    if trajectories is None:
        return found
    shown = np.arange(grid.n_steps - n_steps, grid.n_steps)
    return replace(found, paths=_draw_paths(rows, chosen, trajectories, moments(grid, shown)))


def _node_columns(manifest: Manifest) -> list[str]:
    spaces = ["space"] if manifest.config.bipartite else []
    return ["node_id", "degree", "last_step", *spaces]


def _names(table: pl.DataFrame) -> list[str]:
    names = [str(name) for name in table["node_id"]]
    if "space" not in table.columns:
        return names
    return [f"{space} {name}" for space, name in zip(table["space"], names, strict=True)]


def _draw_paths(rows: Numbers, chosen: Numbers, trajectories: Numbers, when: Numbers) -> Paths | None:
    """Lay trajectories onto the plane where they vary most, each at its own root mean square length 1."""
    size = np.sqrt(np.einsum("psr,psr->p", trajectories, trajectories) / trajectories.shape[1])
    # A node that is never a source has no trajectory.
    present = (size > 0) & np.isin(chosen, rows)
    if not present.any():
        return None
    scaled = trajectories[present] / size[present, None, None]
    axes = find_axes(scaled.reshape(-1, scaled.shape[2]))
    return Paths(np.searchsorted(rows, chosen[present]), axes.project(scaled), when, axes.share)


def moments(grid: TimeGrid, steps: Sequence[int] | Numbers) -> NDArray[np.float64]:
    """Return when steps begin: milliseconds of the zone's wall clock, or plain numbers.

    Wall clocks, because a plot's axis knows no zones.
    """
    known: dict[int, float] = {}
    for step in {int(step) for step in steps}:
        units = grid.start(step) / grid.scale.ticks
        known[step] = 1000 * (units + _offset(units, grid.scale.zone)) if grid.scale.instant else units
    return np.array([known[int(step)] for step in steps], dtype=np.float64)


def _offset(seconds: float, zone: str) -> float:
    """Return how far the wall clock of a zone is ahead of UTC, in seconds."""
    try:
        moment = (datetime.fromtimestamp(0, UTC) + timedelta(seconds=seconds)).astimezone(ZoneInfo(zone))
    except (OverflowError, ValueError):
        return 0.0  # Outside the calendar.
    ahead = moment.utcoffset()
    return 0.0 if ahead is None else ahead.total_seconds()
