"""The tasks that write results: a part is some rows of one output, from those rows of its slices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from toffee_dist.batch.trajectory import ActiveTask, Dense, count_active, write_vectors
from toffee_dist.kernels.solvers.base import Tall, times
from toffee_dist.kernels.spectrum import count_freqs, inverse_transform, node_energies
from toffee_dist.storage import parquet
from toffee_dist.storage.files import FileSeal, seal_file
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import Role, ZeroSlice, array_path, load_rows, slice_name
from toffee_dist.storage.spaces import SPACE_COLUMN
from toffee_dist.storage.tensors import open_tensor

OutputFolder = Literal[
    "embedding", "embedding_target", "trajectory", "factors/A_time", "factors/A_freq", "spectrum"
]


def role_of(output: OutputFolder) -> Role:
    """Return the role that an output of one vector per node is of."""
    return "target" if output == "embedding_target" else "source"


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
        Where one vector per node comes from; for outputs of one vector per node.
    raw
        Of a trajectory: the paper's A_k·R_k instead of the common basis.
    rotated
        Whether vectors are turned by the rotation of the run, which must be there.
    dense
        Of a filtered trajectory: what is written.
    space_id
        The space that its vectors are in.
    lists
        Whether vectors are plain lists.
    """

    run: str
    output: OutputFolder
    index: int
    start: int
    stop: int
    freqs: tuple[int, ...] = ()
    zero: ZeroSlice | None = None
    raw: bool = False
    rotated: bool = False
    dense: Dense | None = None
    space_id: str = ""
    lists: bool = False

    @property
    def folder(self) -> RunFolder:
        """The run."""
        return RunFolder.at(self.run)

    @property
    def path(self) -> Path:
        """Where the part goes."""
        return self.folder.part(self.output, self.index)

    @cached_property
    def ids(self) -> dict[str, pa.Array]:
        """The ids of the rows, and their space where there are two."""
        return read_ids(self.folder.staged.nodes, self.start, self.stop)

    def check(self, n_steps: int, bipartite: bool) -> CheckTask:
        """Return the task that reads the part back."""
        active = None
        columns = ["node_id", *(["space"] if bipartite else []), *COLUMNS[self.output]]
        if self.zero is not None and not self.zero.fitted:
            columns.remove("residual")
        each = {"trajectory": n_steps, "factors/A_time": n_steps, "factors/A_freq": len(self.freqs)}
        if self.dense is not None:
            each["trajectory"] = len(self.dense.steps)
            columns.append("noise")
            if self.dense.nodes == "active":
                active = ActiveTask(self.run, self.start, self.stop, self.dense.steps)
        columns.append(SPACE_COLUMN)
        rows = (self.stop - self.start) * each.get(self.output, 1)
        return CheckTask(str(self.path), rows, tuple(columns), active)


def write_part(task: PartTask) -> int:
    """Write one part unless it is there; return its rows."""
    if not task.path.exists():
        table = parquet.with_space(WRITERS[task.output](task), task.space_id)
        parquet.write_parquet(task.path, parquet.as_lists(table) if task.lists else table)
    return task.stop - task.start


def published_vectors(
    run: RunFolder, zero: ZeroSlice, role: Role, rotated: bool, start: int, stop: int
) -> tuple[Tall, Tall]:
    """Return vectors as they are published, in the axes of the previous run, and which nodes are cold."""
    array = zero.read_vectors(run.slices, role, start, stop)
    if rotated:
        array = times(array, load_rows(run.rotation))
    cold = load_rows(run.node_stat(f"{role}_cold"), start, stop)
    # A node without edges has no direction: what rounding left of it must not look like one.
    array[cold] = 0
    return np.asarray(array, dtype=np.float32), cold


def _one_vector(task: PartTask) -> dict[str, Any]:
    """One vector per node, and how far it can be trusted."""
    assert task.zero is not None
    run, role, rows = task.folder, role_of(task.output), (task.start, task.stop)
    array, cold = published_vectors(run, task.zero, role, task.rotated, *rows)
    last = load_rows(run.node_stat("last"), *rows)
    columns = task.ids | {
        "embedding": parquet.vectors(array),
        "degree": load_rows(run.node_stat("degree"), *rows),
        "last_step": pa.array(last, mask=last < 0),
        "is_cold": cold,
    }
    if task.zero.fitted:
        columns["residual"] = load_rows(run.node_stat(f"{role}_residual"), *rows)
    return columns


def _over_time(task: PartTask) -> dict[str, Any]:
    """One vector per node and step: irfft over k of A_k C_k (trajectory) or of A_k (the paper's factors)."""
    run = task.folder
    n_steps = open_tensor(run.staged.tensor).n_steps
    small = None if task.output == "factors/A_time" else ("R" if task.raw else "C")
    Q = load_rows(run.rotation) if task.rotated and small is not None else None
    hat = None
    for at, k in enumerate(task.freqs):
        A = load_rows(array_path(run.slices, "A", slice_name(k)), task.start, task.stop)
        if small is not None:
            C = load_rows(array_path(run.slices, small, slice_name(k)))
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
        "embedding": parquet.vectors(Z),
    }


def _over_frequency(task: PartTask) -> dict[str, Any]:
    """A_k of every node and frequency, real and imaginary."""
    rows, slices = task.stop - task.start, task.folder.slices
    parts = [load_rows(array_path(slices, "A", slice_name(k)), task.start, task.stop) for k in task.freqs]
    A = np.stack(parts, axis=1).reshape(rows * len(parts), -1)
    del parts
    return _repeated(task, len(task.freqs)) | {
        "k": np.tile(np.array(task.freqs, dtype=np.int32), rows),
        "real": parquet.vectors(np.ascontiguousarray(A.real)),
        "imag": parquet.vectors(np.ascontiguousarray(A.imag)),
    }


def _spectrum(task: PartTask) -> dict[str, Any]:
    """Energy of every node at every frequency, from the pairs of the node as a source."""
    tensor = open_tensor(task.folder.staged.tensor)
    return task.ids | {"energy": parquet.vectors(node_energies(tensor.take_rows(task.start, task.stop)))}


def _repeated(task: PartTask, times_each: int) -> dict[str, pa.Array]:
    at = pa.array(np.repeat(np.arange(task.stop - task.start), times_each))
    return {name: column.take(at) for name, column in task.ids.items()}


def _trajectory(task: PartTask) -> dict[str, Any]:
    """One vector per node and step: filtered, or from slices."""
    if task.dense is not None:
        return write_vectors(task.folder, task.start, task.stop, task.dense, task.rotated)
    return _over_time(task)


WRITERS: dict[OutputFolder, Callable[[PartTask], dict[str, Any]]] = {
    "embedding": _one_vector,
    "embedding_target": _one_vector,
    "trajectory": _trajectory,
    "factors/A_time": _over_time,
    "factors/A_freq": _over_frequency,
    "spectrum": _spectrum,
}
COLUMNS: dict[OutputFolder, list[str]] = {
    "embedding": ["embedding", "degree", "last_step", "is_cold", "residual"],
    "embedding_target": ["embedding", "degree", "last_step", "is_cold", "residual"],
    "trajectory": ["step", "embedding"],
    "factors/A_time": ["step", "embedding"],
    "factors/A_freq": ["k", "real", "imag"],
    "spectrum": ["energy"],
}


def freqs_of(output: OutputFolder, chosen: tuple[int, ...], n_steps: int) -> tuple[int, ...]:
    """Return the frequencies that an output is made of: those of the trajectory, all, or none."""
    if output == "trajectory":
        return chosen
    return tuple(range(count_freqs(n_steps))) if output.startswith("factors") else ()


@dataclass(frozen=True)
class CheckTask:
    """The reading back of one part, which has so many rows, or those that are active."""

    path: str
    rows: int
    columns: tuple[str, ...]
    active: ActiveTask | None = None


def check_part(task: CheckTask) -> FileSeal:
    """Raise unless a part is whole and finite, as it is on the disk; return its seal."""
    path = to_path(task.path)
    seal = seal_file(path)
    rows = task.rows if task.active is None else count_active(task.active)
    parquet.check_parquet(path, rows, list(task.columns))
    return seal
