"""The tasks that solve slices.

Like all tasks they take paths, leave files, return a small record, and know nothing of Dask. One that finds
its result on storage does nothing: so a retry, a lost worker or a resumed run never does finished work again.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toffee_dist.kernels.embedding import SUM, TimeWeights
from toffee_dist.kernels.gauge import common_basis, project
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import (
    NO_STARTS,
    Starts,
    array_path,
    extend_slice,
    is_finished,
    load_rows,
    read_slice,
    slice_name,
    write_slice,
)
from toffee_dist.storage.tensors import open_tensor


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
    weights
        Weights in time that the tensor is multiplied by first.
    slice
        Name of the slice on storage, of a single frequency; empty: that of its frequency.
    projected
        Whether to project on the common basis, which must be there.
    starts
        What to start from.
    """

    tensor: str
    slices: str
    freqs: tuple[int, ...]
    options: SolverSettings
    weights: TimeWeights = SUM
    slice: str = ""
    projected: bool = False
    starts: Starts = NO_STARTS

    def name(self, k: int) -> str:
        """Return the name of the slice of frequency k."""
        return self.slice or slice_name(k)

    @property
    def arrays(self) -> str:
        """The arrays that each slice must have."""
        return "ARC" if self.projected else "AR"

    def missing(self) -> list[int]:
        """Return the frequencies whose slices are not finished yet."""
        folder = to_path(self.slices)
        return [k for k in self.freqs if not is_finished(folder, self.name(k), self.arrays)]


def solve_batch(task: SolveTask) -> int:
    """Solve the slices of a task that are not there yet; return how many that were."""
    folder, missing = to_path(task.slices), task.missing()
    if not missing:
        return 0
    tensor = task.weights.apply(open_tensor(task.tensor))
    V = load_rows(array_path(folder, "V", slice_name(0))) if task.projected else None

    def start(k: int) -> np.ndarray | None:
        return task.starts.read(task.name(k), tensor.n_nodes, task.options.rank)

    # The whole batch is named: what is missing must come out as if nothing had been there.
    for factors in solve_slices(tensor, task.freqs, task.options, start, missing):
        write_slice(folder, task.name(factors.k), factors, None if V is None else {"C": project(factors, V)})
    return len(missing)


@dataclass(frozen=True)
class BasisTask:
    """The singular vectors of one solved zero slice."""

    slices: str
    name: str


def write_basis(task: BasisTask) -> None:
    """Add U, S, V and the projection to a zero slice."""
    folder = to_path(task.slices)
    if is_finished(folder, task.name, "ARUSVC"):
        return
    zero = read_slice(folder, task.name)
    basis = common_basis(zero)
    more = {"U": basis.U, "S": basis.S, "V": basis.V, "C": project(zero, basis.V)}
    extend_slice(folder, task.name, more)
