"""The paper to the letter: every slice by its ALS, factors back in time, Σ_t A∗R (Eq. 5).

    A(t), R(t) = inverse transform of all A_k, R_k;   emb_i = Σ_t (A∗R)(i, :, t)

in raw axes, without a canonical gauge. The sum over time is the zero frequency, A_0·R_0, so `toffee` gets by
with one slice; here all are solved, transformed back and multiplied as the paper writes it.

    sizes    one task: how many nodes and steps there are
    solve    a task per frequency: A-*.npy, R-*.npy
    product  a map over blocks of nodes: rows of every A_k, and all R_k → rows-*.npy
    join     one task: the rows of all blocks → the vectors
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.kernels.spectrum import count_freqs, inverse_transform
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, one_role
from toffee_dist.settings import FitSettings, SolverSettings
from toffee_dist.storage.files import read_json, remove_tree, save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import (
    array_path,
    is_finished,
    load_rows,
    read_report,
    slice_name,
    write_slice,
)
from toffee_dist.storage.tensors import Sizes, open_tensor
from toffee_dist.tproduct import tproduct

SIZES = "sizes.json"
# Bytes of the rows of all slices, in both domains, that one task may hold.
BLOCK_BYTES = 256 * 2**20
# Bytes per row, step and column: A_k and A(t) in double, and what the t-product makes of them.
CELL_BYTES = 64


@dataclass(frozen=True)
class SliceTask:
    """One frequency, to transform and solve."""

    tensor: str
    work: str
    k: int
    options: SolverSettings

    def finished(self) -> bool:
        """Whether the slice is there."""
        return is_finished(to_path(self.work), slice_name(self.k))


@dataclass(frozen=True)
class ProductTask:
    """Σ_t A∗R of the nodes [start, stop)."""

    work: str
    block: int
    start: int
    stop: int
    n_steps: int

    @property
    def done(self) -> Path:
        """Where the rows go."""
        return to_path(self.work) / f"rows-{self.block:05d}.npy"


@dataclass(frozen=True)
class RowsTask:
    """The vectors, from the rows of all blocks."""

    reduction: ReductionTask
    work: str
    n_blocks: int
    n_freqs: int
    seconds: float


def fit_paper(context: FitContext) -> FitReport:
    """Fit the paper's model as the paper writes it."""
    [wanted] = context.reduction_tasks()
    if wanted.finished():
        return wanted.read_report()
    began = time.perf_counter()
    work = to_path(context.folder) / f"{context.name}-work"
    work.mkdir(parents=True, exist_ok=True)
    options = SolverSettings(
        **{name: getattr(context.options, name) for name in SolverSettings.model_fields if name != "solver"},
        solver="als",
    )
    if not (work / SIZES).exists():
        for _ in context.run(write_sizes, [SliceTask(context.tensor, str(work), 0, options)]):
            pass
    n_nodes, n_steps = read_json(work / SIZES)
    n_freqs = count_freqs(n_steps)
    slices = [SliceTask(context.tensor, str(work), k, options) for k in range(n_freqs)]
    for _ in context.run(solve, [task for task in slices if not task.finished()]):
        pass
    rows = rows_per_block(n_nodes, n_steps, options.rank)
    products = [
        ProductTask(str(work), block, start, min(start + rows, n_nodes), n_steps)
        for block, start in enumerate(range(0, n_nodes, rows))
    ]
    for _ in context.run(multiply, [task for task in products if not task.done.exists()]):
        pass
    seconds = time.perf_counter() - began
    [report] = context.run(join, [RowsTask(wanted, str(work), len(products), n_freqs, seconds)])
    remove_tree(work)
    return report  # type: ignore[no-any-return]


def rows_per_block(n_nodes: int, n_steps: int, rank: int) -> int:
    """Return how many nodes a task of the product has."""
    return max(1, min(n_nodes, BLOCK_BYTES // (CELL_BYTES * n_steps * rank)))


def write_sizes(task: SliceTask) -> None:
    """Leave how many nodes and steps there are."""
    tensor = open_tensor(task.tensor)
    write_json(to_path(task.work) / SIZES, [tensor.n_nodes, tensor.n_steps])


def solve(task: SliceTask) -> None:
    """Solve one slice, unless it is there."""
    if not task.finished():
        (factors,) = solve_slices(open_tensor(task.tensor), [task.k], task.options)
        write_slice(to_path(task.work), slice_name(task.k), factors)


def multiply(task: ProductTask) -> None:
    """Leave the rows of one block."""
    work = to_path(task.work)
    names = [slice_name(k) for k in range(count_freqs(task.n_steps))]
    A = np.stack([load_rows(array_path(work, "A", name), task.start, task.stop) for name in names])
    R = np.stack([load_rows(array_path(work, "R", name)) for name in names])
    save_array(task.done, sum_product(A, R, task.n_steps))


def sum_product(A_hat: NDArray[Any], R_hat: NDArray[Any], n_steps: int) -> NDArray[np.float64]:
    """Return Σ_t (A∗R)(:, :, t) of the slices of A (F, rows, r) and R (F, r, r), by way of time."""
    freqs = range(len(A_hat))
    A, R = (
        np.moveaxis(inverse_transform(hat.astype(np.complex128), freqs, n_steps), 0, 2).real
        for hat in (A_hat, R_hat)
    )
    return np.asarray(tproduct(A, R).sum(axis=2))


def join(task: RowsTask) -> FitReport:
    """Leave the vectors; the objective is the total one, (1/T) Σ_k m_k f_k."""
    work = to_path(task.work)
    _, n_steps = read_json(work / SIZES)
    reports = [read_report(work, slice_name(k)) for k in range(task.n_freqs)]
    twice = [1.0 if k == 0 or 2 * k == n_steps else 2.0 for k in range(task.n_freqs)]
    objective = sum(m * report.objective for m, report in zip(twice, reports, strict=True)) / n_steps
    parts = [load_rows(work / f"rows-{block:05d}.npy") for block in range(task.n_blocks)]
    found = FitReport(
        float(objective),
        sum(report.iterations for report in reports),
        task.seconds,
        all(report.converged for report in reports),
    )
    task.reduction.write(one_role(np.concatenate(parts)), found)
    return found


# Seconds of a slice by plain ALS: per n·r², pair·r and r³ of an iteration, and of what every slice has
# (files, transform); iterations until it settles. From wildbird, email, hypertext (benchmarks/paper.py) and
# mathoverflow (benchmarks/systems.py): the estimate is 1 to 2 times what was measured.
TALL_SECONDS, PAIR_SECONDS, SMALL_SECONDS, USUAL_ITERATIONS, SLICE_SECONDS = 4e-10, 4e-10, 5e-9, 60, 0.03


def paper_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes."""
    n, n_steps, rank = sizes.n_nodes, sizes.n_steps, options.rank
    n_freqs, item = count_freqs(n_steps), 2 * options.dtype.itemsize
    iterations = min(options.max_iter, USUAL_ITERATIONS)
    used = min(rank, n)
    one = SLICE_SECONDS + iterations * (
        TALL_SECONDS * n * used**2 + PAIR_SECONDS * sizes.n_pairs * used + SMALL_SECONDS * used**3
    )
    rows = rows_per_block(n, n_steps, rank)
    tall = n * rank
    return [
        Cost(
            "paper solve",
            "every frequency by plain ALS",
            tasks=n_freqs,
            task_bytes=(48 + 4 * item) * sizes.n_pairs
            + 8 * sizes.n_entries
            + 12 * tall * item
            + 12 * 16 * (2 * rank) ** 2,
            seconds=n_freqs * one,
            disk=n_freqs * item * (tall + rank**2),
        ),
        Cost(
            "paper product",
            "A∗R in time, one task per block of nodes",
            tasks=-(-n // rows),
            task_bytes=CELL_BYTES * n_steps * rank * (rows + rank),
            seconds=2e-9 * n_freqs * tall * rank + 5e-8 * n_freqs * tall,
            disk=8 * tall,
        ),
        Cost("paper join", "the vectors", 1, 28 * tall, 4e-8 * tall, 4 * tall),
    ]
