"""The tasks that solve slices.

Like all tasks they take paths, leave files, return a small record, and know nothing of Dask. One that finds
its result on storage does nothing: so a retry, a lost worker or a resumed run never does finished work again.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from toffee_dist import writer
from toffee_dist.embedding import step_weights
from toffee_dist.errors import UnfinishedError
from toffee_dist.frequencies import choose_freqs
from toffee_dist.gauge import CommonBasis, common_basis, project
from toffee_dist.slices import (
    HELD,
    REDUCED,
    array_path,
    extend_slice,
    is_finished,
    read_rows,
    read_slice,
    slice_name,
    write_slice,
)
from toffee_dist.solvers import SolveOptions, solve_slices
from toffee_dist.staging import open_tensor
from toffee_dist.store import place, replacing
from toffee_dist.tensor import TemporalTensor


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
