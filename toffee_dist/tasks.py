"""The tasks of a run: each takes paths, leaves files, and returns a small record. They know nothing of Dask.

A task that finds its result on storage does nothing: so a retry, a lost worker or a resumed run never does
finished work again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from toffee_dist import registry, writer
from toffee_dist.embedding import step_weights
from toffee_dist.errors import UnfinishedError
from toffee_dist.expiry import read_kept
from toffee_dist.frequencies import choose_freqs
from toffee_dist.gauge import CommonBasis, common_basis, project
from toffee_dist.slices import (
    HELD,
    MODEL,
    REDUCED,
    array_path,
    extend_slice,
    is_finished,
    read_reports,
    read_rows,
    read_slice,
    slice_name,
    write_slice,
)
from toffee_dist.solvers import SolveOptions, solve_slices
from toffee_dist.solvers.base import times
from toffee_dist.spectrum import inverse_transform, iter_values, node_energies, slice_matrix
from toffee_dist.staging import open_tensor
from toffee_dist.store import place, replacing, save_array, write_json
from toffee_dist.tensor import TemporalTensor
from toffee_dist.timegrid import TimeGrid

# The r×r rotation of a run, beside its manifest.
ROTATION = "rotation.npy"
# And the weights with which vectors of new nodes are made, a row a role; see `fold`.
FOLD = "fold.npy"

Part = Literal["embedding", "embedding_target", "trajectory", "factors/A_time", "factors/A_freq", "spectrum"]


@dataclass(frozen=True)
class SolveTask:
    """Some frequencies to transform and solve.

    Parameters
    ----------
    tensor, slices
        Folders of the staged tensor and of the slices.
    freqs
        The frequencies; the task transforms the tubes of these only.
    options
        How to solve.
    reduce
        Weights in time: the zero slice of the weighted tensor, kept under its own name.
    projected
        Whether to project on the common basis, which must be there.
    holdout
        Steps at the end that the zero slice must not see, for testing; kept under its own name.
    warm
        Folder of the A of last night's slices, to start from; empty: start afresh.
    kept
        File with the rows of last night that are still there; empty: all.
    """

    tensor: str
    slices: str
    freqs: tuple[int, ...]
    options: SolveOptions
    reduce: str = "sum"
    projected: bool = False
    holdout: int = 0
    warm: str = ""
    kept: str = ""

    def name(self, k: int) -> str:
        """Return the name of the slice of frequency k."""
        if self.holdout:
            return HELD
        return slice_name(k) if self.reduce == "sum" else REDUCED

    @property
    def arrays(self) -> str:
        """The arrays that each slice must have."""
        return "ARC" if self.projected else "AR"


def solve_batch(task: SolveTask) -> int:
    """Solve the slices of a task that are not there yet; return how many that were."""
    folder = place(task.slices)
    missing = [k for k in task.freqs if not is_finished(folder, task.name(k), task.arrays)]
    if not missing:
        return 0
    tensor = weigh_steps(open_tensor(task.tensor), task.reduce, task.holdout)
    V = read_rows(array_path(folder, "V", slice_name(0))) if task.projected else None
    solved = solve_slices(tensor, missing, task.options)
    if task.warm:
        solved = solve_slices(tensor, missing, task.options, lambda k: read_start(task, k, tensor.n_nodes))
    for factors in solved:
        write_slice(folder, task.name(factors.k), factors, None if V is None else {"C": project(factors, V)})
    return len(missing)


def read_start(task: SolveTask, k: int, n_nodes: int) -> np.ndarray[Any, Any] | None:
    """Return last night's A of a slice, new nodes as zeros; None where there is none that fits."""
    # Last night's own slice has not seen the steps that are held out.
    name = replace(task, holdout=0).name(k)
    try:
        A = read_rows(array_path(place(task.warm), "A", name))
        A = A[read_rows(place(task.kept))] if task.kept else A
    except UnfinishedError:
        return None
    if A.ndim != 2 or A.shape[1] != task.options.rank or len(A) > n_nodes or not np.isfinite(A).all():
        return None
    return np.pad(A, [(0, n_nodes - len(A)), (0, 0)])


def weigh_steps(tensor: TemporalTensor, reduce: str, holdout: int = 0) -> TemporalTensor:
    """Return the tensor weighted in time, its last `holdout` steps with nothing."""
    weights = step_weights(reduce, tensor.n_steps - holdout)
    if holdout:
        weights = np.append(
            np.ones(tensor.n_steps - holdout) if weights is None else weights, [0.0] * holdout
        )
    return tensor if weights is None else tensor.with_step_weights(weights)


@dataclass(frozen=True)
class BasisTask:
    """The singular vectors of one solved zero slice."""

    slices: str
    name: str


def write_basis(task: BasisTask) -> None:
    """Add U, S, V and the projection to a zero slice."""
    folder = place(task.slices)
    if is_finished(folder, task.name, "ARUSVC"):
        return
    zero = read_slice(folder, task.name)
    basis = common_basis(zero)
    more = {"U": basis.U, "S": basis.S, "V": basis.V, "C": project(zero, basis.V)}
    extend_slice(folder, task.name, more)


@dataclass(frozen=True)
class ChoiceTask:
    """The choice of frequencies, which needs the basis of the zero slice."""

    tensor: str
    slices: str
    freqs: str
    out: str


@dataclass(frozen=True)
class ChoiceRecord:
    """The frequencies chosen, and their exact share of the energy."""

    freqs: tuple[int, ...]
    energy_kept: float


def choose(task: ChoiceTask) -> ChoiceRecord:
    """Choose the frequencies of the trajectory; leave a table with what each is worth."""
    tensor, folder = open_tensor(task.tensor), place(task.slices)
    record = folder / "choice.json"
    if record.exists():
        data = json.loads(record.read_text())
        return ChoiceRecord(tuple(data["freqs"]), data["energy_kept"])
    U, S, V = (read_rows(array_path(folder, key, slice_name(0))) for key in "USV")
    choice = choose_freqs(tensor, task.freqs, CommonBasis(U, S, V))
    n_freqs = len(choice.energies)
    k = np.arange(n_freqs)
    writer.write_parquet(
        place(task.out) / "frequencies.parquet",
        {
            "k": k.astype(np.int32),
            "period_steps": np.divide(tensor.n_steps, k, out=np.full(n_freqs, np.inf), where=k > 0),
            "energy": choice.energies,
            "significance": choice.significances,
            "chosen": np.isin(k, choice.freqs),
        },
    )
    found = ChoiceRecord(tuple(choice.freqs), choice.energy_kept)
    with replacing(record) as temporary:
        temporary.write_text(json.dumps(asdict(found)))
    return found


@dataclass(frozen=True)
class PartTask:
    """One part of one output: the rows [start, stop) of the nodes.

    Parameters
    ----------
    run
        Folder of the run.
    output
        Which output.
    index, start, stop
        Number and rows of the part.
    freqs
        Frequencies that the output is made of.
    zero
        Name of the slice that one vector a node comes from.
    gauge
        ``canonical`` or ``none``.
    rotated
        Whether vectors are turned by the rotation of the run, which must be there.
    """

    run: str
    output: Part
    index: int
    start: int
    stop: int
    freqs: tuple[int, ...]
    zero: str
    gauge: str
    rotated: bool = False

    @property
    def path(self) -> Path:
        """Where the part goes."""
        return place(self.run) / self.output / f"part-{self.index:05d}.parquet"

    @property
    def slices(self) -> Path:
        """Where the slices are."""
        return place(self.run) / "work" / "slices"

    @property
    def ingest(self) -> Path:
        """Where the tensor and the registry are."""
        return place(self.run) / "work" / "ingest"

    @cached_property
    def ids(self) -> dict[str, pa.Array]:
        """The ids of the rows, and their space where there are two."""
        return read_ids(self.ingest / "nodes", self.start, self.stop)


def write_part(task: PartTask) -> int:
    """Write one part unless it is there; return its rows."""
    if not task.path.exists():
        writer.write_parquet(task.path, PARTS[task.output](task))
    return task.stop - task.start


def read_vectors(
    slices: Path, output: Part, zero: str, gauge: str, start: int, stop: int
) -> np.ndarray[Any, Any]:
    """Return one vector a node: U·S^{2/3} (sources), V·S^{2/3} (targets), or the paper's A_0·R_0."""
    if gauge == "none":
        A = read_rows(array_path(slices, "A", zero), start, stop)
        return times(A, read_rows(array_path(slices, "R", zero)))
    key = "V" if output == "embedding_target" else "U"
    array = read_rows(array_path(slices, key, zero), start, stop)
    S = read_rows(array_path(slices, "S", zero))
    array *= (np.cbrt(S) ** 2).astype(array.dtype)
    return array


def turned_vectors(
    run: Path, output: Part, zero: str, gauge: str, rotated: bool, start: int, stop: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return vectors as they are published, in the axes of the run before, and which nodes are cold."""
    array = read_vectors(run / "work" / "slices", output, zero, gauge, start, stop)
    if rotated:
        array = times(array, read_rows(run / ROTATION))
    role = "target" if output == "embedding_target" else "source"
    cold = read_rows(run / "work" / "activity" / f"{role}_cold.npy", start, stop)
    # A node without edges has no direction: what rounding left of it must not look like one.
    array[cold] = 0
    return np.asarray(array, dtype=np.float32), cold


def _one_vector(task: PartTask) -> dict[str, Any]:
    """One vector a node, and how far it can be trusted."""
    rows = task.start, task.stop
    run, activity = place(task.run), place(task.run) / "work" / "activity"
    array, cold = turned_vectors(run, task.output, task.zero, task.gauge, task.rotated, *rows)
    last = read_rows(activity / "last.npy", *rows)
    columns = task.ids | {
        "embedding": writer.vectors(array),
        "degree": read_rows(activity / "degree.npy", *rows),
        "last_step": pa.array(last, mask=last < 0),
        "is_cold": cold,
    }
    if task.zero != MODEL:
        role = "target" if task.output == "embedding_target" else "source"
        columns["residual"] = read_rows(activity / f"{role}_residual.npy", *rows)
    return columns


def _over_time(task: PartTask) -> dict[str, Any]:
    """One vector a node and step: irfft over k of A_k C_k (trajectory) or of A_k (the paper's factors)."""
    n_steps = open_tensor(task.ingest / "tensor").n_steps
    small = None if task.output == "factors/A_time" else ("R" if task.gauge == "none" else "C")
    Q = read_rows(place(task.run) / ROTATION) if task.rotated and small is not None else None
    hat = None
    for at, k in enumerate(task.freqs):
        A = read_rows(array_path(task.slices, "A", slice_name(k)), task.start, task.stop)
        if small is not None:
            C = read_rows(array_path(task.slices, small, slice_name(k)))
            A = times(A, C if Q is None else C @ Q)
        if hat is None:
            dtype = np.result_type(A, np.complex64) if len(task.freqs) > 1 else A.dtype
            hat = np.empty((len(task.freqs), *A.shape), dtype)
        hat[at] = A
    assert hat is not None
    Z = inverse_transform(hat, task.freqs, n_steps)
    del hat
    # A node's steps are neighbours: one read gives a trajectory.
    Z = np.asarray(Z.transpose(1, 0, 2).reshape(-1, Z.shape[2]), dtype=np.float32)
    rows = task.stop - task.start
    return _repeated(task, n_steps) | {
        "step": np.tile(np.arange(n_steps, dtype=np.int32), rows),
        "embedding": writer.vectors(Z),
    }


def _over_frequency(task: PartTask) -> dict[str, Any]:
    """A_k of every node and frequency, real and imaginary."""
    rows = task.stop - task.start
    parts = [
        read_rows(array_path(task.slices, "A", slice_name(k)), task.start, task.stop) for k in task.freqs
    ]
    A = np.stack(parts, axis=1).reshape(rows * len(parts), -1)
    del parts
    return _repeated(task, len(task.freqs)) | {
        "k": np.tile(np.array(task.freqs, dtype=np.int32), rows),
        "real": writer.vectors(np.ascontiguousarray(A.real)),
        "imag": writer.vectors(np.ascontiguousarray(A.imag)),
    }


def _spectrum(task: PartTask) -> dict[str, Any]:
    """Energy of every node at every frequency, from the pairs of the node as a source."""
    energies = node_energies(take_rows(open_tensor(task.ingest / "tensor"), task.start, task.stop))
    return task.ids | {"energy": writer.vectors(energies)}


def _repeated(task: PartTask, times_each: int) -> dict[str, pa.Array]:
    at = pa.array(np.repeat(np.arange(task.stop - task.start), times_each))
    return {name: column.take(at) for name, column in task.ids.items()}


PARTS = {
    "embedding": _one_vector,
    "embedding_target": _one_vector,
    "trajectory": _over_time,
    "factors/A_time": _over_time,
    "factors/A_freq": _over_frequency,
    "spectrum": _spectrum,
}
COLUMNS: dict[Part, list[str]] = {
    "embedding": ["embedding", "degree", "last_step", "is_cold", "residual"],
    "embedding_target": ["embedding", "degree", "last_step", "is_cold", "residual"],
    "trajectory": ["step", "embedding"],
    "factors/A_time": ["step", "embedding"],
    "factors/A_freq": ["k", "real", "imag"],
    "spectrum": ["energy"],
}


@dataclass(frozen=True)
class ActivityTask:
    """What is known of every node beside its vector.

    Parameters
    ----------
    run
        Folder of the run.
    zero
        Slice that one vector a node comes from; empty where there is none.
    reduce
        Weights in time of that slice.
    gauge
        What the vectors are; new nodes can be given canonical ones.
    """

    run: str
    zero: str
    reduce: str
    gauge: str


def write_activity(task: ActivityTask) -> dict[str, Any]:
    """Leave degree, first and last step of every node; for each role whether it is cold, and its residual.

    A node is cold in a role where it has no edge in it. The residual is the share of its row x_i of the zero
    slice that the fit m_i leaves: ‖x_i − m_i‖² / ‖x_i‖², 1 where there is nothing to fit. With M = U S Vᵀ,
    ‖m_i‖² = ‖(US)_i‖² and ⟨x_i, m_i⟩ = (US)_i·(XV)_i; for targets the same of Mᵀ.
    """
    run = place(task.run)
    folder, slices = run / "work" / "activity", run / "work" / "slices"
    record = folder / "record.json"
    if record.exists():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    folder.mkdir(exist_ok=True)
    tensor = open_tensor(run / "work" / "ingest" / "tensor")
    degree, first, last = node_activity(tensor)
    arrays = {"degree": degree, "first": first, "last": last}
    folds: list[Any] = []
    found: dict[str, Any] = {"active": int((degree > 0).sum())}
    if task.zero:
        [(_, values)] = iter_values(weigh_steps(tensor, task.reduce), [0])
        matrix = slice_matrix(tensor, values)
        for role, X in (("source", matrix), ("target", matrix.T)):
            energy = np.asarray(X.multiply(X).sum(axis=1)).ravel()
            arrays[f"{role}_cold"] = energy == 0
            if task.zero != MODEL:
                keys = ("U", "V") if role == "source" else ("V", "U")
                left, right = (read_rows(array_path(slices, key, task.zero)) for key in keys)
                # Of an undirected graph both roles have the published vectors of the source.
                others = right if tensor.directed else left.copy()
                S = read_rows(array_path(slices, "S", task.zero))
                left *= S.astype(left.dtype)
                product = np.einsum("ir,ir->i", left, X @ right, dtype=np.float64)
                folds.append(fold_weights(left, S, X @ others))
                missed = energy - 2 * product + np.square(left, dtype=np.float64).sum(axis=1)
                share = np.divide(missed, energy, out=np.ones_like(energy), where=energy > 0)
                arrays[f"{role}_residual"] = np.maximum(share, 0).astype(np.float32)
                found["energy_share"] = 1 - float(missed[energy > 0].sum() / max(energy.sum(), 1e-300))
    if folds and task.gauge == "canonical":
        save_array(run / FOLD, np.stack(folds))
    for name, array in arrays.items():
        save_array(folder / f"{name}.npy", array)
    write_json(record, found)
    return found


def fold_weights(US: Any, S: Any, P: Any) -> np.ndarray[Any, Any]:
    """Return w of `fold`: for each column the factor with which P = X F·S^{−2/3} comes nearest to U·S^{2/3}.

    Least squares over the nodes of the run, then S^{−2/3}: w = ⟨US, P⟩ / (‖P‖² S). Where the slice is fitted
    exactly, P = ±US and w = ±1/S; columns that are noise for a new node are damped.
    """
    scale = np.square(P, dtype=np.float64).sum(axis=0) * S
    num = np.einsum("ir,ir->r", US, P, dtype=np.float64)
    return np.asarray(np.divide(num, scale, out=np.zeros(len(S)), where=scale > 0))


@dataclass(frozen=True)
class CheckTask:
    """The reading back of one part."""

    path: str
    rows: int
    columns: tuple[str, ...]


def check_part(task: CheckTask) -> int:
    """Raise unless a part is whole and finite; return its bytes."""
    path = place(task.path)
    writer.check_parquet(path, task.rows, list(task.columns))
    return path.stat().st_size


def take_rows(tensor: TemporalTensor, start: int, stop: int) -> TemporalTensor:
    """Return the tensor of the sources [start, stop) alone, as rows 0 …; its arrays stay maps."""
    pairs = slice(int(tensor.indptr[start]), int(tensor.indptr[stop]))
    events = slice(int(tensor.tube_ptr[pairs.start]), int(tensor.tube_ptr[pairs.stop]))
    return TemporalTensor(
        n_nodes=stop - start,
        n_steps=tensor.n_steps,
        directed=True,
        indptr=np.asarray(tensor.indptr[start : stop + 1]) - tensor.indptr[start],
        indices=tensor.indices[pairs],
        tube_ptr=np.asarray(tensor.tube_ptr[pairs.start : pairs.stop + 1]) - tensor.tube_ptr[pairs.start],
        steps=tensor.steps[events],
        values=tensor.values[events],
    )


def read_ids(nodes: Path, start: int, stop: int) -> dict[str, pa.Array]:
    """Return the ids of the rows [start, stop), in the order of rows."""
    files = registry.registry_files(nodes)
    table = registry.read_rows(files, start, stop)
    columns = {"node_id": _plain_ids(table["id"])}
    if registry.count_spaces(files) > 1:
        names = np.array(["source", "target"])
        columns["space"] = pa.array(names[table["space"].to_numpy()])
    return columns


def _plain_ids(ids: pl.Series) -> pa.Array:
    array = ids.to_arrow()
    return array.cast(pa.string()) if ids.dtype == pl.String else array


@dataclass(frozen=True)
class TablesTask:
    """The small tables of a run."""

    run: str
    grid: TimeGrid
    names: tuple[str, ...]
    factors: tuple[int, ...]
    previous: str = ""


# Rows of the node table, and pairs, that are held at once.
TABLE_ROWS, TABLE_PAIRS = 1 << 20, 1 << 22


def write_tables(task: TablesTask) -> dict[str, Any]:
    """Write nodes, steps, fit and, where asked for, the cores R; return figures of the fit."""
    run = place(task.run)
    slices = run / "work" / "slices"
    reports = read_reports(slices, task.names)
    fit = [asdict(report) for report in reports]
    # Seconds differ from run to run, and the Parquet files of equal runs are equal: they have their own file.
    seconds = {name: row.pop("seconds") for name, row in zip(task.names, fit, strict=True)}
    frame = pl.DataFrame(fit, schema=FIT_SCHEMA).with_columns(
        reduced=pl.Series([name == REDUCED for name in task.names], dtype=pl.Boolean)
    )
    writer.write_parquet(run / "fit.parquet", {name: frame[name].to_arrow() for name in frame.columns})
    with replacing(run / "timings.json") as temporary:
        temporary.write_text(json.dumps(seconds, indent=1) + "\n")
    n_steps = task.grid.n_steps
    writer.write_parquet(
        run / "steps.parquet",
        {"step": np.arange(n_steps, dtype=np.int32), "start": step_starts(task.grid)},
    )
    if task.factors:
        _write_cores(run, task.factors, n_steps)
    write_nodes(run, task.grid, task.previous)
    gaps = [report.gap for report in reports if report.gap is not None]
    return {
        "slices": len(reports),
        "converged": sum(report.converged for report in reports),
        "iterations": sum(report.iterations for report in reports),
        "solve_seconds": round(sum(seconds.values()), 3),
        "mean_gap": float(np.mean(gaps)) if gaps else None,
    }


FIT_SCHEMA = {
    "k": pl.Int32,
    "energy": pl.Float64,
    "objective": pl.Float64,
    "bound": pl.Float64,
    "gap": pl.Float64,
    "iterations": pl.Int32,
    "solver": pl.String,
    "converged": pl.Boolean,
}


def _write_cores(run: Path, freqs: tuple[int, ...], n_steps: int) -> None:
    """Write R in frequency and in time; T·r² numbers."""
    R = np.stack([read_rows(array_path(run / "work" / "slices", "R", slice_name(k))) for k in freqs])
    flat = R.reshape(len(freqs), -1).astype(np.complex128)
    writer.write_parquet(
        run / "factors" / "R_freq.parquet",
        {
            "k": np.array(freqs, dtype=np.int32),
            "real": writer.vectors(np.ascontiguousarray(flat.real)),
            "imag": writer.vectors(np.ascontiguousarray(flat.imag)),
        },
    )
    in_time = np.asarray(inverse_transform(flat, freqs, n_steps))
    writer.write_parquet(
        run / "factors" / "R_time.parquet",
        {"step": np.arange(n_steps, dtype=np.int32), "embedding": writer.vectors(in_time)},
    )


def write_nodes(run: Path, grid: TimeGrid, previous: str = "") -> None:
    """Write nodes.parquet: node_id, row, degree, first and last step, and the moments they begin at.

    Steps are those of the window. Moments reach back to the runs before: a node that has left keeps them.
    """
    tensor = open_tensor(run / "work" / "ingest" / "tensor")
    activity = run / "work" / "activity"
    degree, first, last = (read_rows(activity / f"{name}.npy") for name in ("degree", "first", "last"))
    starts = step_starts(grid)
    earlier = _earlier_moments(run, place(previous)) if previous else None

    def tables() -> Iterator[pa.Table]:
        for start in range(0, tensor.n_nodes, TABLE_ROWS):
            stop = min(start + TABLE_ROWS, tensor.n_nodes)
            rows = slice(start, stop)
            seen = {"first": first[rows], "last": last[rows]}
            columns = read_ids(run / "work" / "ingest" / "nodes", start, stop)
            columns |= {
                "row": pa.array(np.arange(start, stop, dtype=np.int64)),
                "degree": pa.array(degree[rows]),
            }
            for name, steps in seen.items():
                # A node that is known but has no edge in the window was never seen.
                mask = steps < 0
                columns[f"{name}_step"] = pa.array(steps, mask=mask)
                moments = starts.take(pa.array(np.maximum(steps, 0), mask=mask))
                if earlier is not None:
                    before = earlier[f"{name}_seen"].slice(start, stop - start).combine_chunks()
                    before = pa.concat_arrays([before, pa.nulls(stop - start - len(before), before.type)])
                    first_known = (moments, before) if name == "last" else (before, moments)
                    moments = pc.coalesce(*first_known)
                columns[f"{name}_seen"] = moments
            yield pa.table(columns)

    stream = tables()
    head = next(stream)

    def whole() -> Iterator[pa.Table]:
        yield head
        yield from stream

    writer.write_stream(run / "nodes.parquet", head.schema, whole())


def _earlier_moments(run: Path, previous: Path) -> pa.Table:
    """Return when the nodes of the run before were first and last seen, in tonight's rows."""
    table = writer.open_dataset([previous / "nodes.parquet"]).to_table(columns=["first_seen", "last_seen"])
    kept = read_kept(run, previous.name)
    return table if kept is None else table.filter(pa.array(kept))


def node_activity(
    tensor: TemporalTensor,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return each node's degree, first and last step (-1 where it has none), as source or as target.

    The degree counts pairs: of an undirected graph its neighbours, of a directed one both directions.
    """
    n = tensor.n_nodes
    degree = np.zeros(n, dtype=np.int64)
    first = np.full(n, tensor.n_steps, dtype=np.int32)
    last = np.full(n, -1, dtype=np.int32)
    for start in range(0, tensor.n_pairs, TABLE_PAIRS):
        pairs = slice(start, min(start + TABLE_PAIRS, tensor.n_pairs))
        i = np.searchsorted(tensor.indptr, np.arange(pairs.start, pairs.stop), side="right") - 1
        j = np.asarray(tensor.indices[pairs])
        begins = tensor.steps[tensor.tube_ptr[pairs]].astype(np.int32)
        ends = tensor.steps[tensor.tube_ptr[pairs.start + 1 : pairs.stop + 1] - 1].astype(np.int32)
        degree += np.bincount(i, minlength=n)
        sides = (i, j) if tensor.directed else (i,)
        if tensor.directed:
            degree += np.bincount(j, minlength=n)
        for side in sides:
            np.minimum.at(first, side, begins)
            np.maximum.at(last, side, ends)
    first[last < 0] = -1
    return degree, first, last


def step_starts(grid: TimeGrid) -> pa.Array:
    """Return the first moment of every step: timestamps in UTC, or plain numbers."""
    starts = np.array([grid.start(step) for step in range(grid.n_steps)], dtype=np.int64)
    ticks = grid.scale.ticks
    if not grid.scale.instant:
        return pa.array(starts if ticks == 1 else starts / ticks)
    micros = starts * (10**6 // ticks) if ticks <= 10**6 else starts // (ticks // 10**6)
    return pa.array(micros, type=pa.timestamp("us", tz="UTC"))
