"""The tasks that set a run beside an earlier one: its rotation, how far nodes moved, which links it foretold.

Rows never change between two runs of a chain, so row i is the same node in both. Like all tasks these take
paths, leave files and return small records; vectors pass through in blocks of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from toffee_dist import writer
from toffee_dist.align import (
    Alignment,
    SubspaceAngles,
    degree_weights,
    neighbour_overlap,
    quantiles,
    rank_auc,
    row_cosines,
)
from toffee_dist.errors import InputError
from toffee_dist.expiry import Mask, read_kept
from toffee_dist.parts import ROTATION, Part, read_ids, read_vectors, turned_vectors
from toffee_dist.slices import HELD, array_path, read_reports, read_rows
from toffee_dist.staging import open_tensor
from toffee_dist.store import RunFolder, fetched, link_or_copy, place, read_json, save_array, write_json
from toffee_dist.tables import TABLE_ROWS
from toffee_dist.tensor import TemporalTensor
from toffee_dist.writer import GROUP_ROWS, open_dataset

# Nodes among which neighbours are looked for, how many of them are asked, and movers that are named.
CANDIDATES, QUERIES, MOVERS = 5000, 300, 20
# Beside the slices kept: iterations and seconds of each when it was last solved afresh.
COLD = "cold.json"
# Held-out links that are scored at the most.
LINKS = 20_000


def iter_vectors(run: Path, output: Part, kept: Mask | None = None) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (first row, vectors) of a published run, in the order of rows.

    With `kept`, only the rows that a later run still has, and its rows of them.

    Raises
    ------
    InputError
        Where a part is missing or damaged: the earlier run is not what its manifest says.
    """
    at = row = 0
    for path in sorted((run / output).glob("part-*.parquet")):
        try:
            with fetched(path) as local:
                file = pq.ParquetFile(local)
                for batch in file.iter_batches(batch_size=GROUP_ROWS, columns=["embedding"]):
                    column = batch.column(0)
                    vectors = column.flatten().to_numpy().reshape(len(column), -1)
                    if kept is not None:
                        vectors = vectors[kept[at : at + len(column)]]
                    yield row, vectors
                    at += len(column)
                    row += len(vectors)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise damaged(run, f"{output}/{path.name}: {str(error).splitlines()[0]}") from None
    rows = read_json(run / "manifest.json")["summary"]["nodes"]
    if at != rows:
        raise damaged(run, f"{at:,} of {rows:,} rows in {output}")


def damaged(run: Path, found: str) -> InputError:
    """Return what is said of an earlier run that cannot be followed, and the way out."""
    return InputError(
        f"the run to follow, {run.name}, is damaged",
        got=found,
        allowed="a run as it was published",
        remedy="Go back to a whole one with toffee rollback, or start a new chain with --fresh.",
    )


def read_column(run: Path, name: str, kept: Mask | None = None) -> NDArray[Any]:
    """Return a column of a published run's nodes, or of those that are kept; -1 where it is null."""
    try:
        table = open_dataset([run / "nodes.parquet"]).to_table(columns=[name])
        column = table[name].fill_null(-1).to_numpy()
        return np.asarray(column if kept is None else column[kept])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged(run, f"nodes.parquet: {str(error).splitlines()[0]}") from None


@dataclass(frozen=True)
class AlignTask:
    """The rotation of a run onto the one before."""

    run: str
    previous: str
    outputs: tuple[Part, ...]
    zero: str
    gauge: str


def align_run(task: AlignTask) -> dict[str, Any]:
    """Leave the rotation, r×r; return over how many nodes it was found, and how well they then agree."""
    run, previous = RunFolder(place(task.run)), place(task.previous)
    degree = read_rows(run.work / "activity" / "degree.npy")
    kept = read_kept(run.path, previous.name)
    before = read_column(previous, "degree", kept)
    weights = np.asarray(np.minimum(before, degree[: len(before)]) > 0, dtype=np.float64)
    sums: Alignment | None = None
    # Both roles of a directed graph are in one basis: they turn together.
    for output in task.outputs:
        for start, vectors in iter_vectors(previous, output, kept):
            stop = start + len(vectors)
            now = read_vectors(run.slices, output, task.zero, task.gauge, start, stop)
            sums = sums or Alignment(now.shape[1])
            sums.add(now, vectors, weights[start:stop])
    assert sums is not None
    Q = sums.rotation()
    save_array(run.path / ROTATION, Q)
    return {"nodes": sums.nodes, "mean_cosine": sums.fit(Q), "unaligned": sums.fit(np.eye(sums.rank))}


@dataclass(frozen=True)
class DriftTask:
    """What moved between an earlier run and this one, as published.

    Parameters
    ----------
    run, earlier
        The two.
    zero, gauge
        Where tonight's vectors come from.
    table
        Whether to leave drift.parquet.
    seed
        Of the sample of nodes whose neighbours are compared.
    """

    run: str
    earlier: str
    zero: str
    gauge: str
    table: bool
    seed: int


@dataclass(frozen=True)
class Mover:
    """A node whose direction changed a lot."""

    node_id: Any
    row: int
    cosine: float
    degree: int


@dataclass(frozen=True)
class Drift:
    """How far tonight's vectors are from earlier ones.

    Nodes are ``new`` (no row before), ``left`` (had edges, have none), ``returned`` (the reverse),
    ``expired`` (had a row, are forgotten) or stayed.
    """

    earlier: str
    nodes: int
    new: int
    left: int
    returned: int
    expired: int
    cosine: dict[str, float]
    norm_ratio: dict[str, float]
    overlap10: float | None
    angle_mean: float
    angle_max: float
    movers: list[Mover] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)


def measure_drift(task: DriftTask) -> Drift:
    """Compare two runs node by node, and leave a table of it."""
    run, earlier = RunFolder(place(task.run)), place(task.earlier)
    degree = read_rows(run.work / "activity" / "degree.npy")
    still = read_kept(run.path, earlier.name)
    before = read_column(earlier, "degree", still)
    n, shared = len(degree), len(before)
    cosine, norm, norm_before = np.full(n, np.nan), np.zeros(n), np.zeros(n)
    weights = degree_weights(before, degree[:shared])
    sample = _sample(weights, task.seed)
    kept: list[list[NDArray[Any]]] = [[], []]
    angles: SubspaceAngles | None = None

    def tonight(start: int, stop: int) -> NDArray[Any]:
        E, _ = turned_vectors(run.path, "embedding", task.zero, task.gauge, True, start, stop)
        norm[start:stop] = np.linalg.norm(E, axis=1)
        return E

    for start, F in iter_vectors(earlier, "embedding", still):
        stop = start + len(F)
        E = tonight(start, stop)
        angles = angles or SubspaceAngles(F.shape[1])
        angles.add(E, F)
        cosine[start:stop] = row_cosines(E, F)
        norm_before[start:stop] = np.linalg.norm(F, axis=1)
        own = sample[(sample >= start) & (sample < stop)] - start
        kept[0].append(E[own])
        kept[1].append(F[own])
    for start in range(shared, n, GROUP_ROWS):
        tonight(start, min(start + GROUP_ROWS, n))
    assert angles is not None
    had, has = before > 0, degree[:shared] > 0
    state = np.full(n, "new", dtype=object)
    state[:shared] = np.select(
        [had & ~has, has & ~had, ~has & ~had], ["left", "returned", "absent"], default="stayed"
    )
    overlap = None
    if len(sample) > 1:
        queries = np.linspace(0, len(sample) - 1, min(QUERIES, len(sample))).astype(np.int64)
        E, F = (np.concatenate(part) for part in kept)
        overlap = float(neighbour_overlap(E, F, queries).mean())
    # Of nodes with one or two edges a large move is no news.
    known = np.flatnonzero(np.isfinite(cosine[:shared]))
    busy = known[weights[known] >= (np.median(weights[known]) if len(known) else 0)]
    movers = busy[np.argsort(cosine[busy], kind="stable")][:MOVERS]
    ids = dict.fromkeys(movers.tolist())

    def tables() -> Iterator[pa.Table]:
        for start in range(0, n, TABLE_ROWS):
            stop = min(start + TABLE_ROWS, n)
            rows = slice(start, stop)
            columns = read_ids(run.ingest / "nodes", start, stop)
            ids.update({r: columns["node_id"][r - start].as_py() for r in ids if start <= r < stop})
            columns |= {
                "row": pa.array(np.arange(start, stop)),
                "state": pa.array(state[rows], type=pa.string()),
                "cosine": pa.array(cosine[rows], mask=~np.isfinite(cosine[rows])),
                "norm_before": pa.array(norm_before[rows]),
                "norm": pa.array(norm[rows]),
            }
            yield pa.table(columns)

    if task.table:
        stream = tables()
        head = next(stream)
        writer.write_stream(run.path / "drift.parquet", head.schema, chain([head], stream))
    else:
        for _ in tables():
            pass
    both = (norm > 0) & (norm_before > 0)
    return Drift(
        earlier=earlier.name,
        nodes=int(both.sum()),
        new=n - shared,
        left=int((state == "left").sum()),
        returned=int((state == "returned").sum()),
        expired=0 if still is None else int((~still).sum()),
        cosine=quantiles(cosine),
        norm_ratio=quantiles(norm[both] / norm_before[both]),
        overlap10=overlap,
        angle_mean=float(angles.degrees().mean()) if len(angles.degrees()) else 0.0,
        angle_max=float(angles.degrees().max(initial=0.0)),
        movers=[Mover(ids[r], r, float(cosine[r]), int(degree[r])) for r in movers.tolist()],
    )


def _sample(weights: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Return rows of well-connected nodes, in order: those at or above the median weight, at random."""
    alive = np.flatnonzero(weights > 0)
    if not len(alive):
        return alive
    alive = alive[weights[alive] >= np.median(weights[alive])]
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(alive, min(CANDIDATES, len(alive)), replace=False))


@dataclass(frozen=True)
class KeepTask:
    """The keeping of slices for the next night.

    Parameters
    ----------
    run
        The run.
    names
        Its slices.
    warm
        Folder that they were started from; empty: from nothing.
    """

    run: str
    names: tuple[str, ...]
    warm: str


def keep_slices(task: KeepTask) -> dict[str, Any] | None:
    """Keep every A, and what its slice took when it was last solved afresh.

    Returns how many slices had a start, and the iterations and seconds that this saved against that time.
    """
    run = RunFolder(place(task.run))
    run.warm.mkdir(exist_ok=True)
    known = place(task.warm) / COLD
    before = read_json(known) if task.warm and known.exists() else {}
    cold, saved = {}, {"slices": 0, "iterations": 0, "seconds": 0.0}
    for name, report in zip(task.names, read_reports(run.slices, task.names), strict=True):
        own = array_path(run.warm, "A", name)
        if not own.exists():
            link_or_copy(array_path(run.slices, "A", name), own)
        if report.solver != "warm":
            cold[name] = [report.iterations, report.seconds]
            continue
        saved["slices"] += 1
        if name in before:
            cold[name] = before[name]
            saved["iterations"] += before[name][0] - report.iterations
            saved["seconds"] += before[name][1] - report.seconds
    write_json(run.warm / COLD, cold)
    return saved if task.warm else None


@dataclass(frozen=True)
class LinksTask:
    """The links of the last steps, foretold by the run before and by tonight's vectors without those steps.

    Parameters
    ----------
    run, previous
        Tonight's run, with the slice that has not seen the held-out steps, and the run before.
    holdout
        How many steps at the end.
    outputs, gauge
        Which roles have vectors, and what these are.
    seed
        Of the sample and of the pairs without a link.
    """

    run: str
    previous: str
    holdout: int
    outputs: tuple[Part, ...]
    gauge: str
    seed: int


def score_links(task: LinksTask) -> dict[str, Any]:
    """Return the AUC of both, and how many links they were asked for.

    Scores are products of vectors. The pairs without a link have the same sources and the same targets in
    another order: knowing who is busy does not help.
    """
    run, previous = RunFolder(place(task.run)), place(task.previous)
    tensor = open_tensor(run.ingest / "tensor")
    rng = np.random.default_rng([task.seed, tensor.n_steps])
    source, target = late_pairs(tensor, tensor.n_steps - task.holdout)
    # Nodes that both could know: an unknown node is no fault of either.
    kept = read_kept(run.path, previous.name)
    known = read_column(previous, "degree", kept) > 0
    seen = np.zeros(tensor.n_nodes, dtype=bool)
    seen[: len(known)] = known
    both = seen[source] & seen[target] & (source != target)
    linked = source * tensor.n_nodes + target
    source, target = source[both], target[both]
    if len(source) > LINKS:
        chosen = np.sort(rng.choice(len(source), LINKS, replace=False))
        source, target = source[chosen], target[chosen]
    other = rng.permutation(target)
    apart = (source != other) & ~np.isin(source * tensor.n_nodes + other, linked)
    found: dict[str, Any] = {"links": len(source), "steps": task.holdout, "before": None, "now": None}
    if not apart.any():
        return found
    # One role or two: the last one is the targets'.
    outputs = (task.outputs[0], task.outputs[-1])
    nodes = np.unique(np.concatenate([source, target]))
    at = {name: np.searchsorted(nodes, rows) for name, rows in (("i", source), ("j", target), ("o", other))}
    for name in ("before", "now"):
        if name == "before":
            E, F = (_gather(iter_vectors(previous, output, kept), nodes) for output in outputs)
        else:
            E, F = (
                read_vectors(run.slices, output, HELD, task.gauge, 0, tensor.n_nodes)[nodes]
                for output in outputs
            )
        yes = np.einsum("ir,ir->i", E[at["i"]], F[at["j"]], dtype=np.float64)
        no = np.einsum("ir,ir->i", E[at["i"][apart]], F[at["o"][apart]], dtype=np.float64)
        found[name] = rank_auc(yes, no)
    return found


def late_pairs(tensor: TemporalTensor, first: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the pairs with an entry at a step from `first` on."""
    # Steps of a pair are in order: the last one tells.
    late = np.flatnonzero(np.asarray(tensor.steps[np.asarray(tensor.tube_ptr[1:]) - 1]) >= first)
    source = np.searchsorted(tensor.indptr, late, side="right") - 1
    return source.astype(np.int64), np.asarray(tensor.indices[late], dtype=np.int64)


def _gather(blocks: Iterator[tuple[int, NDArray[Any]]], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows, in order, of vectors that come in blocks."""
    parts = []
    for start, vectors in blocks:
        parts.append(vectors[rows[(rows >= start) & (rows < start + len(vectors))] - start])
    return np.concatenate(parts)
