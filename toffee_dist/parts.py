"""The tasks that write results: a part is some rows of one output, from those rows of its slices."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import polars as pl
import pyarrow as pa

from toffee_dist import registry, writer
from toffee_dist.slices import (
    MODEL,
    array_path,
    read_rows,
    slice_name,
)
from toffee_dist.solvers.base import times
from toffee_dist.spectrum import inverse_transform, node_energies
from toffee_dist.staging import open_tensor
from toffee_dist.store import place
from toffee_dist.tensor import TemporalTensor

# The r×r rotation of a run, beside its manifest.
ROTATION = "rotation.npy"

Part = Literal["embedding", "embedding_target", "trajectory", "factors/A_time", "factors/A_freq", "spectrum"]


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
