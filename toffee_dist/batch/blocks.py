"""Cutting a slice into blocks of nodes: about equal work, each with all its columns, and the adjoint's too.

Where rows are cut depends on the tensor and the limits alone, never on the workers, so results do not either.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.kernels.embedding import TimeWeights
from toffee_dist.kernels.solvers import slice_dtype
from toffee_dist.kernels.spectrum import is_real, iter_values
from toffee_dist.limits import Limits
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.blocks import MatrixFolder, Rows, read_sealed_record, write_sealed_record
from toffee_dist.storage.files import read_json, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import open_rows, read_cuts, read_kind
from toffee_dist.tasks import RunTasks
from toffee_dist.tensor import TemporalTensor, index_dtype

# What a row costs beside its pairs, as so many of them: of one pass of a million nodes with 18.5 million
# pairs, products take 0.28 s and the orthonormalisation 0.27 s.
ROW_PAIRS = 16
# With more blocks than this, blocks become larger instead: enough for as many workers as will be found.
MANY_BLOCKS = 64


def work_of_a_block(n_nodes: int, n_pairs: int, limits: Limits) -> int:
    """Return how much work one block has at the most, in pairs."""
    total = n_pairs + ROW_PAIRS * n_nodes
    return min(max(limits.block_work, total // MANY_BLOCKS), max(limits.max_block_work, limits.block_work))


def count_blocks(n_nodes: int, n_pairs: int, limits: Limits) -> int:
    """Return how many blocks a tensor is cut into, at the most."""
    total = n_pairs + ROW_PAIRS * n_nodes
    return max(1, min(n_nodes, -(-total // work_of_a_block(n_nodes, n_pairs, limits))))


def cut_rows(cuts: Sequence[tuple[int, int]], limits: Limits) -> tuple[int, ...]:
    """Return the rows at which a tensor is cut: 0, …, n, with about the same work between any two.

    Parameters
    ----------
    cuts
        (row, pairs before it), as the staged tensor tells them; between two, pairs count as spread evenly.
    limits
        How much one block has.
    """
    rows, pairs = (np.array(column, dtype=np.float64) for column in zip(*cuts, strict=True))
    work = pairs + ROW_PAIRS * rows
    count = count_blocks(int(rows[-1]), int(pairs[-1]), limits)
    wanted = np.arange(1, count) * work[-1] / count
    inner = np.interp(wanted, work, rows).astype(np.int64)
    return tuple(int(row) for row in np.unique([0, *inner, int(rows[-1])]))


def find_bounds(tensor: str, limits: Limits) -> tuple[int, ...]:
    """Return where a staged tensor is cut."""
    return cut_rows(read_cuts(tensor), limits)


@dataclass(frozen=True)
class MatrixTask:
    """One block of one slice.

    Parameters
    ----------
    tensor, folder
        Folders of the staged tensor and of the matrix.
    bounds, index
        Where rows are cut, and which block.
    k, weights
        Which slice: its frequency, and weights in time that the tensor is multiplied by first.
    size
        Its norm, by which it is divided; 0: not known yet.
    dtype
        Of its values.
    directed
        Whether the adjoint is another matrix.
    """

    tensor: str
    folder: str
    bounds: tuple[int, ...]
    index: int
    k: int
    weights: TimeWeights
    dtype: str
    directed: bool
    size: float = 0.0

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [start, stop) of the block."""
        return self.bounds[self.index], self.bounds[self.index + 1]

    @property
    def matrix(self) -> MatrixFolder:
        """Where the matrix is."""
        return MatrixFolder(to_path(self.folder))

    @property
    def alone(self) -> bool:
        """Whether there is no other block: nothing is cut then, and nothing on storage."""
        return len(self.bounds) == 2

    def record(self, side: str) -> Path:
        """Return where the record of a side of the block is."""
        return to_path(self.folder) / f"{side}.{self.index:05d}.json"


def measure_block(task: MatrixTask) -> float:
    """Return Σ|x|² of a block."""
    return float(np.square(np.abs(_read_values(task)[1]), dtype=np.float64).sum())


def _read_values(task: MatrixTask) -> tuple[TemporalTensor, NDArray[Any]]:
    tensor = open_rows(task.tensor, *task.rows)
    [(_, values)] = iter_values(task.weights.apply(tensor), [task.k])
    return tensor, values


def read_block(task: MatrixTask) -> Rows:
    """Return the rows of a block from the tensor, divided by the norm of the slice where it is known."""
    tensor, values = _read_values(task)
    steps, tubes = np.asarray(tensor.steps), np.asarray(tensor.tube_ptr)
    return Rows(
        np.asarray(tensor.indptr, np.int64),
        np.asarray(tensor.indices),
        (values / task.size if task.size else values).astype(task.dtype),
        steps[tubes[:-1]].astype(np.int32),
        steps[tubes[1:] - 1].astype(np.int32),
    )


def by_column(rows: Rows, start: int, bounds: Sequence[int]) -> Rows:
    """Return the entries of a block in the order of columns: where each block of those begins, both ends."""
    order = stable_order(rows.indices)
    targets = rows.indices[order]
    sources = np.repeat(np.arange(len(rows.indptr) - 1), np.diff(rows.indptr))[order] + start
    both = np.stack([targets, sources], axis=1).astype(index_dtype(bounds[-1]))
    return Rows(
        np.searchsorted(targets, bounds),
        both,
        rows.values[order].conj(),
        rows.begins[order],
        rows.ends[order],
    )


def join_pieces(pieces: Sequence[Sequence[NDArray[Any]]], start: int, stop: int) -> Rows:
    """Return rows of the adjoint from pieces in the order of their sources, so that columns are in order."""
    both, values, begins, ends = (np.concatenate(column) for column in zip(*pieces, strict=True))
    order = stable_order(both[:, 0])
    indptr = np.zeros(stop - start + 1, np.int64)
    np.cumsum(np.bincount(both[:, 0] - start, minlength=stop - start), out=indptr[1:])
    return Rows(indptr, np.ascontiguousarray(both[order, 1]), values[order], begins[order], ends[order])


def turn_rows(rows: Rows, n_nodes: int) -> Rows:
    """Return the adjoint of a matrix that is one block."""
    piece = by_column(rows, 0, (0, n_nodes))
    return join_pieces([piece[1:]], 0, n_nodes)


def cut_block(task: MatrixTask) -> bool:
    """Leave the rows of a block, and its entries in the order of columns; return whether it was missing."""
    if read_sealed_record(task.record("X")) is not None:
        return False
    rows = read_block(task)
    seals = task.matrix.save("X", task.index, rows)
    if task.directed:
        piece = by_column(rows, task.rows[0], task.bounds)
        seals |= task.matrix.save("piece", task.index, piece)
    write_sealed_record(task.record("X"), {}, seals)
    return True


def turn_block(task: MatrixTask) -> bool:
    """Leave the rows of a block of the adjoint, from the pieces of all; return whether it was missing."""
    if read_sealed_record(task.record("Xh")) is not None:
        return False
    pieces = []
    for index in range(len(task.bounds) - 1):
        offsets = load_rows(task.matrix.array("piece", index, "indptr"))
        own = int(offsets[task.index]), int(offsets[task.index + 1])
        arrays = (task.matrix.array("piece", index, name) for name in Rows._fields[1:])
        pieces.append([load_rows(path, *own) for path in arrays])
    rows = join_pieces(pieces, *task.rows)
    write_sealed_record(task.record("Xh"), {}, task.matrix.save("Xh", task.index, rows))
    return True


def stable_order(keys: NDArray[Any]) -> NDArray[np.int64]:
    """Return the order that sorts keys, equal ones as they are: by sorting words of key and position."""
    bits = max(len(keys).bit_length(), 1)
    words = (keys.astype(np.uint64) << np.uint64(bits)) | np.arange(len(keys), dtype=np.uint64)
    words.sort()
    return (words & np.uint64((1 << bits) - 1)).astype(np.int64)


@dataclass(frozen=True)
class BlockMatrix:
    """A slice in blocks on storage, divided by its norm.

    Parameters
    ----------
    first
        Its first block, which has all that the others have but the number.
    """

    first: MatrixTask

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.first.bounds) - 1

    def tasks(self) -> list[MatrixTask]:
        """Return all blocks."""
        return [replace(self.first, index=index) for index in range(self.count)]

    def side(self, by: str) -> str:
        """Return the name of X or its adjoint among the files."""
        return by if self.first.directed else "X"


def matrix_folder(slices: Path, name: str) -> Path:
    """Return where the matrix of a slice is."""
    return slices / f"matrix-{name}"


def find_size(run: RunTasks, first: MatrixTask, measure: Callable[[MatrixTask], float]) -> float:
    """Return the norm of a matrix, from Σ|x|² of every block; what was found is written down."""
    record = to_path(first.folder) / "size.json"
    try:
        return float(read_json(record)["size"])
    except (InputError, ValueError, KeyError, TypeError):
        size = float(np.sqrt(sum(run(measure, BlockMatrix(first).tasks()))))
        write_json(record, {"size": size})
        return size


def cut_matrix(
    run: RunTasks,
    tensor: Path,
    folder: Path,
    bounds: tuple[int, ...],
    options: SolverSettings,
    k: int,
    weights: TimeWeights,
) -> BlockMatrix:
    """Cut a slice of a staged tensor into blocks, or what is left of that."""
    folder.mkdir(parents=True, exist_ok=True)
    directed, n_steps = read_kind(tensor)
    real = is_real(k, n_steps)
    dtype = slice_dtype(options, real)
    first = MatrixTask(str(tensor), str(folder), bounds, 0, k, weights, dtype.str, directed or not real)
    size = find_size(run, first, measure_block)
    # A slice without entries is divided by nothing.
    matrix = BlockMatrix(replace(first, size=size or 1.0))
    for function in (cut_block, turn_block) if first.directed else (cut_block,):
        for _ in run(function, matrix.tasks()):
            pass
    return BlockMatrix(replace(first, size=size))
