"""The basis of all energy, in one task or in blocks of nodes (see kernels/energy_basis.py).

In blocks, BᵀB − D = L·F with F = [B; I] and L = [Bᵀ, −D]: both are sparse matrices in blocks of rows, as the
two sides of a slice are, and a product is two passes of `batch.sharded`. Block i of F has the rows of its
sources and steps, then those of I of its nodes; block i of L has its nodes as targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits

from toffee_dist.batch.blocks import BlockMatrix, MatrixTask, find_size, matrix_folder, stable_order
from toffee_dist.batch.sharded import ShardedArrays, is_there
from toffee_dist.kernels.embedding import SUM
from toffee_dist.kernels.energy_basis import Unfolded, energy_basis, find_axes, noise_of, unfold
from toffee_dist.kernels.solvers import slice_dtype
from toffee_dist.kernels.solvers.base import Built, Term
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.blocks import MatrixRows, read_sealed_record, write_bounds, write_sealed_record
from toffee_dist.storage.files import remove_tree
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import array_path, is_finished, load_rows, write_arrays, write_sealed
from toffee_dist.storage.tensors import open_rows, open_tensor
from toffee_dist.tasks import RunTasks
from toffee_dist.tensor import index_dtype

# Name of the basis of all energy beside that of the sum.
ENERGY = "energy"


@dataclass(frozen=True)
class EnergyTask:
    """The basis of all energy.

    Parameters
    ----------
    tensor, slices
        Folders of the staged tensor and of the slices.
    options
        Rank, precision and seed.
    """

    tensor: str
    slices: str
    options: SolverSettings


def write_basis(task: EnergyTask) -> None:
    """Leave V of all energy, unless it is there."""
    folder = to_path(task.slices)
    if is_finished(folder, ENERGY, "V"):
        return
    V = energy_basis(open_tensor(task.tensor), task.options)
    write_arrays(folder, ENERGY, {"V": V})


def solve_in_blocks(run: RunTasks, task: EnergyTask, bounds: tuple[int, ...]) -> dict[str, int]:
    """Leave what `write_basis` would, in blocks of nodes; return the passes that it took."""
    folder = to_path(task.slices)
    if is_there(run, folder, ENERGY, "V"):
        return {}
    write_bounds(folder, bounds)
    matrix = cut_energy(run, task, bounds)
    passes = folder / f"passes-{ENERGY}"
    X = ShardedEnergy(matrix, passes, run, (task.options.seed, 0))
    # The small matrices decide the bytes of the large ones: one thread, as in the workers.
    with threadpool_limits(1, user_api="blas"):
        if matrix.first.size > 0:
            tall, small = find_axes(X, task.options.rank)
        else:
            tall, small = X.random(1).tall, np.zeros((1, task.options.rank))
        blocks = X.store(tall, small, array_path(folder, "V", ENERGY))
    write_sealed(folder, ENERGY, {"report": {}}, {f"V.{index}": seal for index, seal in blocks.items()})
    remove_tree(passes)
    remove_tree(to_path(matrix.first.folder))
    return X.counts()


class ShardedEnergy(ShardedArrays):
    """BᵀB − D in blocks on storage: X is F, and Xh is L."""

    present = ("Xh",)

    def build(self, *terms: Term, against: Sequence[str] = (), own: bool = False, keep: bool = True) -> Built:
        """Return the sum of terms; one times the matrix is a pass with F, and in the sum one with L."""
        whole, between = [], []
        for term in terms:
            if term.by:
                between.append(super().build(Term(term.tall, by="X")).tall)
                term = Term(between[-1], term.small, "Xh")
            whole.append(term)
        found = super().build(*whole, against=against, own=own, keep=keep)
        self.keep_only([tall for tall in self._live if tall not in between])
        return found


def cut_energy(run: RunTasks, task: EnergyTask, bounds: tuple[int, ...]) -> BlockMatrix:
    """Cut F and L into blocks, with B divided by its norm, or do what is left of that."""
    folder = matrix_folder(to_path(task.slices), ENERGY)
    folder.mkdir(parents=True, exist_ok=True)
    dtype = slice_dtype(task.options, real=True)
    first = MatrixTask(task.tensor, str(folder), bounds, 0, 0, SUM, dtype.str, directed=True)
    size = find_size(run, first, measure_block)
    # What has no entries is divided by nothing.
    blocks = BlockMatrix(replace(first, size=size or 1.0)).tasks()
    rows = tuple(run(cut_block, blocks))
    for _ in run(turn_block, [TurnTask(block, rows) for block in blocks]):
        pass
    return BlockMatrix(replace(first, size=size))


def measure_block(task: MatrixTask) -> float:
    """Return Σ w² of a block of B."""
    return float(np.square(_read(task).values).sum())


def _read(task: MatrixTask) -> Unfolded:
    return unfold(open_rows(task.tensor, *task.rows))


def cut_block(task: MatrixTask) -> int:
    """Leave the rows of a block of F, and its entries of B in the order of columns; return how many of B."""
    known = read_sealed_record(task.record("X"))
    if known is not None:
        return int(known["rows"])
    B = _read(task)
    values = (B.values / task.size).astype(task.dtype)
    start, stop = task.rows
    count, dtype = len(B.indptr) - 1, index_dtype(task.bounds[-1])
    F = MatrixRows(
        np.append(B.indptr, B.indptr[-1] + np.arange(1, stop - start + 1)),
        np.append(B.indices, np.arange(start, stop)).astype(dtype),
        np.append(values, np.ones(stop - start, values.dtype)),
    )
    order = stable_order(B.indices)
    targets, sources = B.indices[order], np.repeat(np.arange(count), np.diff(B.indptr))[order]
    both = np.stack([targets, sources], axis=1).astype(index_dtype(task.bounds[-1], count))
    piece = MatrixRows(np.searchsorted(targets, task.bounds), both, values[order])
    seals = task.matrix.save("X", task.index, F) | task.matrix.save("piece", task.index, piece)
    write_sealed_record(task.record("X"), {"rows": count}, seals)
    return count


@dataclass(frozen=True)
class TurnTask:
    """One block of L, and how many rows of B every block of F has."""

    block: MatrixTask
    rows: tuple[int, ...]


def turn_block(task: TurnTask) -> None:
    """Leave the rows of a block of L, from the pieces of all, unless they are there."""
    block, (start, stop) = task.block, task.block.rows
    if read_sealed_record(block.record("Xh")) is not None:
        return
    # Where the rows of every block of F begin.
    begins = np.append(0, np.cumsum(np.array(task.rows) + np.diff(block.bounds)))
    targets, columns, values = [], [], []
    for index, begin in enumerate(begins[:-1]):
        offsets = load_rows(block.matrix.array("piece", index, "indptr"))
        own = int(offsets[block.index]), int(offsets[block.index + 1])
        both = load_rows(block.matrix.array("piece", index, "indices"), *own)
        targets.append(both[:, 0] - start)
        columns.append(both[:, 1].astype(np.int64) + begin)
        values.append(load_rows(block.matrix.array("piece", index, "values"), *own))
    noise = noise_of(np.concatenate(targets), np.concatenate(values), stop - start)
    # −D comes behind the rows of B of its own block: columns ascend.
    noisy, at = np.flatnonzero(noise), block.index + 1
    targets.insert(at, noisy)
    columns.insert(at, begins[block.index] + task.rows[block.index] + noisy)
    values.insert(at, -noise[noisy])
    every = np.concatenate(targets)
    order = stable_order(every)
    indptr = np.append(0, np.cumsum(np.bincount(every, minlength=stop - start)))
    L = MatrixRows(
        indptr,
        np.concatenate(columns)[order].astype(index_dtype(int(begins[-1]))),
        np.concatenate(values)[order],
    )
    write_sealed_record(block.record("Xh"), {}, block.matrix.save("Xh", block.index, L))
