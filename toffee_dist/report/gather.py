"""What a report shows of a run, gathered from its folder: small numbers, whatever the size of the graph."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.kernels.align import unit_rows
from toffee_dist.kernels.frequencies import SIGNIFICANT
from toffee_dist.report.layout import Method, find_communities, lay_out
from toffee_dist.report.sample import GROUPS, choose_nodes, choose_paths
from toffee_dist.report.stage import Paths, draw_paths, read_blocks
from toffee_dist.report.why import EXPLAINED, explain_node, name_neighbours, neighbour_rows
from toffee_dist.results.changes import has_changes, read_changes
from toffee_dist.storage.files import read_json
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.parquet import GROUP_ROWS, open_parquet, read_frame, reading, take_rows
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import slice_name
from toffee_dist.storage.vectors import CompactTable, open_vectors, read_nodes
from toffee_dist.timegrid import TimeGrid

# Frequencies that a plot has at the most: of more, those of largest energy.
FREQS = 2000
# Rhythms that are named.
PEAKS = 6
# Bars of the histogram of turns, of a degree each.
DEGREES = 180

Numbers = NDArray[Any]


@dataclass(frozen=True, eq=False)
class NodeMap:
    """Some nodes on a plane.

    Attributes
    ----------
    ids : as a person knows them; with two spaces of nodes, with the name of the space before it
    rows : of the run
    degree, community : a number per node
    last_step : when it was last seen; −1: not in the window
    points : (nodes, 2)
    nearness : one sentence on what nearness means
    apart : silhouette of the communities
    paths : of some of them, where the run has trajectories
    why : of some of them, by their number here: see `report.why`
    moments : steps from which on the graph as a whole is another
    """

    ids: list[str]
    rows: NDArray[np.int64]
    degree: Numbers
    community: NDArray[np.int64]
    last_step: NDArray[np.int64]
    points: Numbers
    nearness: str
    apart: float
    paths: Paths | None = None
    why: dict[int, dict[str, Any]] = field(default_factory=dict)
    moments: tuple[int, ...] = ()


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
        with reading(run.frequencies):
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
    seconds = read_json(run.timings)
    # f_k = ½‖X_k − A_k R_k A_kᴴ‖² + …, of ½‖X_k‖² where A_k is zero; NaN where nothing is to be fitted.
    left = 2 * pl.col("objective") / pl.col("energy")
    with reading(run.fit):
        fit = read_frame(run.fit).filter(~pl.col("reduced"))
        times = [seconds.get(slice_name(k), 0.0) for k in fit["k"].cast(pl.Int64)]
        return strongest(fit.with_columns(left=left, seconds=pl.Series(times, dtype=pl.Float64)))


def draw_map(run: RunFolder, manifest: Manifest, grid: TimeGrid, method: Method) -> NodeMap | None:
    """Choose nodes, and place them; None where no output has a vector per node."""
    outputs, seed = manifest.outputs, manifest.config.seed
    rows = choose_nodes(run.nodes, seed)
    if not len(rows) or not {"embedding", "trajectory"} & set(outputs):
        return None
    table = open_vectors(run, "trajectory", manifest) if "trajectory" in outputs else None
    # The compact form has what a node needs by itself: nothing else is read for it.
    groups = len(rows) if isinstance(table, CompactTable) else GROUPS
    chosen, n_steps = choose_paths(rows, grid.n_steps, manifest.config.rank, seed, groups)
    if "embedding" not in outputs:
        # The mean of a trajectory stands in for the one vector; it is read of the chosen nodes only.
        rows = chosen
    rows = np.sort(rows)
    first = grid.n_steps - n_steps
    if "embedding" in outputs:
        vectors = read_nodes(open_vectors(run, "embedding", manifest), rows)
        if "embedding_target" in outputs:
            # A node that is never a source has a vector as a target, in the same axes.
            silent = np.flatnonzero(~vectors.any(axis=1))
            if len(silent):
                vectors[silent] = read_nodes(open_vectors(run, "embedding_target", manifest), rows[silent])
    else:
        assert table is not None
        vectors = np.concatenate([Z.mean(axis=1) for _, Z in read_blocks(table, rows, first)])
    alive = vectors.any(axis=1)
    rows, vectors = rows[alive], vectors[alive]
    if not len(rows):
        return None
    directions = unit_rows(vectors)
    known = pl.DataFrame(take_rows(run.nodes, rows, _node_columns(manifest)))
    points, nearness = lay_out(directions, method, seed)
    communities = find_communities(directions, seed)
    found = NodeMap(
        ids=_names(known),
        rows=rows,
        degree=known["degree"].to_numpy(),
        community=communities.label(directions),
        last_step=known["last_step"].fill_null(-1).to_numpy().astype(np.int64),
        points=points,
        nearness=nearness,
        apart=communities.apart,
    )
    paths = None if table is None else draw_paths(table, np.intersect1d(chosen, rows), first, seed)
    if table is None or paths is None:
        return found
    paths = replace(paths, nodes=np.searchsorted(rows, paths.rows))
    why = _explain(run, manifest, grid, table, found) if isinstance(table, CompactTable) else {}
    changed = read_changes(run, grid).moments["step"].to_list() if has_changes(run) else []
    return replace(found, paths=paths, why=why, moments=tuple(sorted(changed)))


def _explain(
    run: RunFolder, manifest: Manifest, grid: TimeGrid, table: CompactTable, nodes: NodeMap
) -> dict[int, dict[str, Any]]:
    """Return what the page tells of the nodes with the most neighbours."""
    best = np.argsort(-nodes.degree, kind="stable")[:EXPLAINED].tolist()
    found = [explain_node(table.compact, int(nodes.rows[at]), grid) for at in best]
    rows = neighbour_rows(found)
    if len(rows):
        known = pl.DataFrame(take_rows(run.nodes, rows, _node_columns(manifest)))
        name_neighbours(found, pl.Series(_names(known)), rows)
    return {at: one for at, one in zip(best, found, strict=True) if one["links"]}


def _node_columns(manifest: Manifest) -> list[str]:
    spaces = ["space"] if manifest.config.bipartite else []
    return ["node_id", "degree", "last_step", *spaces]


def _names(table: pl.DataFrame) -> list[str]:
    names = [str(name) for name in table["node_id"]]
    if "space" not in table.columns:
        return names
    return [f"{space} {name}" for space, name in zip(table["space"], names, strict=True)]
