"""How far nodes moved since an earlier run: three maps over blocks of nodes, and a table that is streamed.

degrees   how connected nodes are in both runs → what counts as well connected
sample    well-connected nodes at random, whose neighbours are compared
blocks    cosines and norms, and their sums; the vectors of the sample
table     a row per node, with the ids of those that moved most
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from toffee_dist.batch.node_stats import place_of
from toffee_dist.batch.write_outputs import published_vectors
from toffee_dist.kernels.align import (
    SubspaceAngles,
    cosine_quantiles,
    neighbour_overlap,
    ratio_quantiles,
    row_cosines,
)
from toffee_dist.kernels.sample import Sample, Tally, draw, tally_cosines, tally_ratios
from toffee_dist.limits import LIMITS
from toffee_dist.storage import parquet
from toffee_dist.storage.changes import read_p_value, read_p_values
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.files import save_array
from toffee_dist.storage.manifest import Drift, Mover
from toffee_dist.storage.parquet import GROUP_ROWS
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import ZeroSlice, load_rows
from toffee_dist.tasks import RunTasks

# Nodes among which neighbours are looked for, how many of them are asked, and movers that are named.
CANDIDATES, QUERIES, MOVERS = 5000, 300, 20
STATES = ("stayed", "new", "left", "returned", "absent")
# Of every node, for the table.
STATE, COSINE, NORM, BEFORE = "drift_state", "drift_cosine", "drift_norm", "drift_before"


@dataclass(frozen=True)
class DriftTask:
    """One block of nodes of two runs, as published.

    Parameters
    ----------
    run, earlier
        The two.
    zero
        Where this run's vectors come from.
    table
        Whether to leave drift.parquet.
    seed
        Of the sample of nodes whose neighbours are compared.
    bounds, index
        Where rows are cut, and which block.
    rows_at_once
        Rows of that table that are held at once.
    busy
        The degree from which a node is well connected, once that is known.
    sample
        The rows whose vectors are wanted, once they are chosen.
    movers
        The rows whose ids are wanted.
    """

    run: str
    earlier: str
    zero: ZeroSlice
    table: bool
    seed: int
    bounds: tuple[int, ...]
    index: int = 0
    rows_at_once: int = LIMITS.table_rows
    busy: float = 0.0
    sample: NDArray[np.int64] | None = None
    movers: tuple[int, ...] = ()

    @property
    def folder(self) -> RunFolder:
        """The later run."""
        return RunFolder.at(self.run)

    @property
    def before(self) -> EarlierRows:
        """The earlier run."""
        return EarlierRows(self.folder, RunFolder.at(self.earlier))

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [start, stop) of the block."""
        return self.bounds[self.index], self.bounds[self.index + 1]

    def blocks(self) -> list[DriftTask]:
        """Return all blocks."""
        return [replace(self, index=index) for index in range(len(self.bounds) - 1)]

    def degrees(self, earlier: EarlierRows) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the degrees of the block's nodes before, as far as they were there, and now."""
        return earlier.degrees(*self.rows), load_rows(self.folder.node_stat("degree"), *self.rows)


def measure_drift(run: RunTasks, task: DriftTask) -> Drift:
    """Compare two runs node by node, and leave a table of it."""
    degrees = _add_up(list(run(count_degrees, task.blocks())))
    # A node that is well connected in both runs has a direction; of one with one or two edges a large move is
    # no news.
    task = replace(task, busy=degrees.quantile(0.5) if degrees.total else 0.0)
    chosen = Sample.merge(list(run(choose_sample, task.blocks())), CANDIDATES)
    task = replace(task, sample=np.sort(chosen.rows))
    parts: list[DriftSums] = list(run(measure_block, task.blocks()))
    movers = sorted(mover for part in parts for mover in part.movers)[:MOVERS]
    [ids] = run(write_table, [replace(task, sample=None, movers=tuple(row for _, row, _ in movers))])
    earlier = task.before
    states = np.sum([part.states for part in parts], axis=0)
    counted = dict(zip(STATES, states.tolist(), strict=True))
    angles = SubspaceAngles(parts[0].angles.rank)
    for part in parts:
        angles.join(part.angles)
    with threadpool_limits(1, user_api="blas"):
        degrees_apart = angles.degrees()
        overlap = _overlap(parts)
    return Drift(
        earlier=earlier.earlier.run_id,
        nodes=sum(part.ratios.total for part in parts),
        new=counted["new"],
        left=counted["left"],
        returned=counted["returned"],
        expired=earlier.expired,
        cosine=cosine_quantiles(_add_up([part.cosines for part in parts])),
        norm_ratio=ratio_quantiles(_add_up([part.ratios for part in parts])),
        overlap10=overlap,
        angle_mean=float(degrees_apart.mean()) if len(degrees_apart) else 0.0,
        angle_max=float(degrees_apart.max(initial=0.0)),
        movers=[
            Mover(node_id=name, row=row, cosine=cosine, degree=degree, p_value=p)
            for (name, p), (cosine, row, degree) in zip(ids, movers, strict=True)
        ],
    )


def _add_up(parts: Sequence[Tally]) -> Tally:
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def count_degrees(task: DriftTask) -> Tally:
    """Count the smaller degrees of the nodes of a block that have edges in both runs."""
    before, now = task.degrees(task.before)
    both = np.minimum(before, now[: len(before)])
    return Tally.of(both[both > 0])


def choose_sample(task: DriftTask) -> Sample:
    """Return well-connected nodes of a block at random."""
    before, now = task.degrees(task.before)
    both = np.minimum(before, now[: len(before)])
    rows = task.rows[0] + np.flatnonzero((both > 0) & (both >= task.busy))
    return Sample.of(draw(rows, task.seed), rows, CANDIDATES)


@dataclass(frozen=True, eq=False)
class DriftSums:
    """What a block leaves.

    Attributes
    ----------
    states : how many nodes there are of each of `STATES`
    cosines, ratios : of the nodes that have vectors in both
    angles : between the spaces of both
    vectors : of the sample, now and before
    movers : (cosine, row, degree) of the well-connected nodes that turned most
    """

    states: NDArray[np.int64]
    cosines: Tally
    ratios: Tally
    angles: SubspaceAngles
    vectors: tuple[NDArray[Any], NDArray[Any]]
    movers: list[tuple[float, int, int]]


def measure_block(task: DriftTask) -> DriftSums:
    """Compare two runs, node by node, over one block."""
    run, (start, stop), earlier = task.folder, task.rows, task.before
    before, degree = task.degrees(earlier)
    shared = start + len(before)
    cosine = np.full(stop - start, np.nan)
    norm, norm_before = np.zeros(stop - start), np.zeros(stop - start)
    assert task.sample is not None
    kept: list[list[NDArray[Any]]] = [[], []]
    angles: SubspaceAngles | None = None

    def now(first: int, last: int) -> NDArray[Any]:
        E, _ = published_vectors(run, task.zero, "source", True, first, last)
        norm[first - start : last - start] = np.linalg.norm(E, axis=1)
        return E

    for first, F in earlier.vectors("embedding", start, stop):
        last = first + len(F)
        own = slice(first - start, last - start)
        E = now(first, last)
        angles = angles or SubspaceAngles(F.shape[1])
        angles.add(E, F)
        cosine[own] = row_cosines(E, F)
        norm_before[own] = np.linalg.norm(F, axis=1)
        chosen = task.sample[(task.sample >= first) & (task.sample < last)] - first
        kept[0].append(E[chosen])
        kept[1].append(F[chosen])
    E = np.zeros((0, 0), np.float32)
    for first in range(shared, stop, GROUP_ROWS):
        E = now(first, min(first + GROUP_ROWS, stop))
    angles = angles or SubspaceAngles(E.shape[1])
    had, has = before > 0, degree[: len(before)] > 0
    state = np.full(stop - start, STATES.index("new"), dtype=np.uint8)
    state[: len(before)] = np.select(
        [had & ~has, has & ~had, ~has & ~had],
        [STATES.index(name) for name in ("left", "returned", "absent")],
        default=STATES.index("stayed"),
    )
    if task.table:
        for name, array in ((STATE, state), (COSINE, cosine), (NORM, norm), (BEFORE, norm_before)):
            save_array(place_of(run, name, task.bounds, task.index), array, durable=False)
    both = (norm > 0) & (norm_before > 0)
    smaller = np.minimum(before, degree[: len(before)])
    busy = np.flatnonzero(np.isfinite(cosine[: len(before)]) & (smaller >= task.busy))
    most = busy[np.argsort(cosine[busy], kind="stable")][:MOVERS]
    empty = [np.zeros((0, angles.rank), np.float32)]
    return DriftSums(
        np.bincount(state, minlength=len(STATES)),
        tally_cosines(cosine),
        tally_ratios(norm[both] / norm_before[both]),
        angles,
        (np.concatenate(kept[0] or empty), np.concatenate(kept[1] or empty)),
        [(float(cosine[at]), int(start + at), int(degree[at])) for at in most],
    )


def _overlap(parts: Sequence[DriftSums]) -> float | None:
    """Return how many of their ten nearest the nodes of the sample have in both runs; None of too few."""
    E, F = (np.concatenate([part.vectors[at] for part in parts]) for at in (0, 1))
    if len(E) < 2:
        return None
    queries = np.linspace(0, len(E) - 1, min(QUERIES, len(E))).astype(np.int64)
    return float(neighbour_overlap(E, F, queries).mean())


def write_table(task: DriftTask) -> list[tuple[Any, float | None]]:
    """Write drift.parquet where it is wanted, some rows at a time; return id and p of the movers."""
    run = task.folder

    def tables() -> Iterator[pa.Table]:
        for start in range(0, task.bounds[-1], task.rows_at_once):
            stop = min(start + task.rows_at_once, task.bounds[-1])
            state, cosine, norm, before = (
                load_rows(run.node_stat(name), start, stop) for name in (STATE, COSINE, NORM, BEFORE)
            )
            columns = read_ids(run.staged.nodes, start, stop) | {
                "row": pa.array(np.arange(start, stop)),
                "state": pa.array(np.array(STATES, dtype=object)[state], type=pa.string()),
                "cosine": pa.array(cosine, mask=~np.isfinite(cosine)),
                "norm_before": pa.array(before),
                "norm": pa.array(norm),
                "p_value": read_p_values(run, start, stop),
            }
            yield pa.table(columns)

    if task.table:
        parquet.write_stream(run.drift, tables())
    ids = (read_ids(run.staged.nodes, row, row + 1)["node_id"][0].as_py() for row in task.movers)
    return [(name, read_p_value(run, row)) for name, row in zip(ids, task.movers, strict=True)]
