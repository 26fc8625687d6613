"""The rows of a temporal graph in the order of time: what an evaluation cuts into past and future."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.ingest.prepare import list_tasks, read_window
from toffee_dist.ingest.registry import positions, read_ipc
from toffee_dist.ingest.scan import ScanPart, scan
from toffee_dist.ingest.summary import gather_bad, refuse_bad
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import EdgeSettings, Entry, PairWeight
from toffee_dist.tasks import RunTasks, Say, run_here
from toffee_dist.tensor import TemporalTensor
from toffee_dist.timegrid import TimeGrid, TimeScale, build_grid

Int64s = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Past:
    """What a model may see: a tensor of the nodes that the learning part has, and nothing else.

    Attributes
    ----------
    nodes : the row of every node of the tensor in the whole graph
    grid : the steps of the learning part
    """

    tensor: TemporalTensor
    nodes: Int64s
    grid: TimeGrid


@dataclass(frozen=True, eq=False)
class Events:
    """Edges sorted by time; rows of the same time keep the order in which they were read.

    Attributes
    ----------
    ids : the id of every node, in the order of the rows of nodes
    source, target, time : rows of nodes, and ticks
    weight : for ``entry="sum"``
    n_sources : with two spaces of nodes, how many rows are sources; else None
    """

    ids: pl.Series
    source: Int64s
    target: Int64s
    time: Int64s
    weight: NDArray[np.float64] | None
    scale: TimeScale
    step: str
    directed: bool
    entry: Entry = "binary"
    pair_weight: PairWeight = "unit"
    since: int | None = None
    n_sources: int | None = None

    @property
    def n_nodes(self) -> int:
        """Nodes of the whole graph."""
        return len(self.ids)

    def __len__(self) -> int:
        return len(self.time)

    def head(self, count: int) -> Events:
        """Return the first rows: what has happened up to then. Nodes keep their rows."""
        weight = None if self.weight is None else self.weight[:count]
        parts = {name: getattr(self, name)[:count] for name in ("source", "target", "time")}
        return replace(self, weight=weight, **parts)

    def keys(self, rows: slice = slice(None)) -> Int64s:
        """Return a number for the pair of every row; undirected pairs have one number for both orders."""
        return pair_keys(self.source[rows], self.target[rows], self.n_nodes, self.directed)

    def grid(self) -> TimeGrid:
        """Lay the grid of steps over these rows."""
        distinct = np.unique(self.time) if self.step == "distinct" else None
        lo, hi = int(self.time[0]), int(self.time[-1])
        return build_grid(self.step, lo, hi, self.scale, since=self.since, distinct=distinct)

    def past(self, grid: TimeGrid | None = None) -> Past:
        """Build the tensor of these rows, on their own nodes."""
        grid = self.grid() if grid is None else grid
        nodes, rows = np.unique(np.concatenate([self.source, self.target]), return_inverse=True)
        tensor = TemporalTensor.from_events(
            rows[: len(self)],
            rows[len(self) :],
            grid.steps_of(self.time),
            self.weight,
            n_nodes=len(nodes),
            n_steps=grid.n_steps,
            directed=self.directed,
            entry=self.entry,
            pair_weight=self.pair_weight,
        )
        return Past(tensor, nodes, grid)

    def fingerprint(self) -> str:
        """Return a hash of the rows and ids: splits belong to one graph, read in one way."""
        digest = hashlib.sha256(f"{self.directed} {self.n_sources} {self.ids.dtype}".encode())
        for part in (self.source, self.target, self.time):
            digest.update(np.ascontiguousarray(part).tobytes())
        digest.update("\0".join(str(name) for name in self.ids).encode())
        return digest.hexdigest()[:16]


def pair_keys(i: Int64s, j: Int64s, n_nodes: int, directed: bool) -> Int64s:
    """Return i·n + j; the smaller row first where the order means nothing."""
    if directed:
        return i * n_nodes + j
    return np.minimum(i, j) * n_nodes + np.maximum(i, j)


def read_events(
    settings: EdgeSettings,
    run: RunTasks = run_here,
    say: Say = lambda line: None,
    limits: Limits = LIMITS,
) -> Events:
    """Read edges by the same options and rules as `ingest`, and sort them by time.

    Raises
    ------
    ConfigError, InputError
        As `ingest` does.
    """
    with tempfile.TemporaryDirectory(prefix="toffee-") as work:
        reading = list_tasks(settings, work, say, limits)
        found = list(run(scan, reading.tasks))
        bad = gather_bad(found, reading.tasks)
        if settings.on_bad_rows == "error":
            refuse_bad(bad, sum(record.rows for record in found))
        parts = [part for record in found for part in record.parts]
        if not parts:
            raise _nothing(sum(record.rows for record in found))
        ids, frame, n_sources = _gather(parts, work, settings.bipartite)
    time = frame["time"].to_numpy()
    lo, hi = int(time.min()), int(time.max())
    scale = reading.find_scale(settings, lo, hi, say)
    since, until = read_window(settings, scale, hi)
    wanted = pl.col("time") >= (lo if since is None else since)
    frame = frame.filter(wanted if until is None else wanted & (pl.col("time") < until))
    if frame.is_empty():
        raise _nothing(len(time))
    frame = frame.sort("time", maintain_order=True)
    return Events(
        ids,
        frame["source"].to_numpy(),
        frame["target"].to_numpy(),
        frame["time"].to_numpy(),
        frame["weight"].to_numpy() if "weight" in frame.columns else None,
        scale,
        settings.step,
        settings.directed,
        settings.entry,
        settings.weight_of_pairs,
        since,
        n_sources,
    )


def _gather(
    parts: Sequence[ScanPart], work: str, bipartite: bool
) -> tuple[pl.Series, pl.DataFrame, int | None]:
    """Give every id a row in the order of the ids, and return the rows of all parts."""
    spaces = range(1 + bipartite)
    part_ids = [[read_ipc(part.ids_path(work, s))["id"] for s in spaces] for part in parts]
    ids = [pl.concat([own[s] for own in part_ids]).unique().sort() for s in spaces]
    frames = []
    for part, own in zip(parts, part_ids, strict=True):
        rows = read_ipc(part.rows_path(work))
        lookups = [positions(ids[s], own[s]) for s in spaces]
        source, target = lookups[0], lookups[-1] + (len(ids[0]) if bipartite else 0)
        columns: dict[str, Any] = {
            "source": source[rows["source"].to_numpy()],
            "target": target[rows["target"].to_numpy()],
        }
        frames.append(rows.with_columns(**{name: pl.Series(values) for name, values in columns.items()}))
    # Two spaces may hold ids of two types; as text they fit one column.
    every = ids[0] if not bipartite else pl.concat([part.cast(pl.String) for part in ids])
    return every, pl.concat(frames), len(ids[0]) if bipartite else None


def _nothing(rows: int) -> InputError:
    return InputError(
        "no edges to work with",
        got=f"{rows:,} rows",
        allowed="at least one valid row inside the window",
        remedy="Check --since, --until and --last.",
    )
