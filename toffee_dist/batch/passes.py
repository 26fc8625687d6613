"""One block of one pass over a slice in blocks of nodes: what a task reads, computes, writes and returns.

It multiplies its rows of X with the tiles of a tall array, adds other tall arrays times small ones, writes
its rows, and returns sums over them. What it leaves is written down under a seal, so that a pass that was
cut short goes on with the blocks that are missing (`batch.sharded`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.base import Small, Tall, add_up, gram, largest_entries, random_rows
from toffee_dist.kernels.spmm import multiply_tiles
from toffee_dist.storage.blocks import (
    MatrixFolder,
    block_of,
    pack_array,
    read_sealed_record,
    unpack_array,
    write_sealed_record,
)
from toffee_dist.storage.files import FileSeal, map_array, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import Starts, load_rows


@dataclass(frozen=True)
class TermSpec:
    """One term of a sum: path of a tall array, shape of its small matrix, what multiplies it first."""

    tall: str
    shape: tuple[int, int] | None
    by: str


@dataclass(frozen=True)
class PassTask:
    """One block of one pass.

    Parameters
    ----------
    matrix, bounds, index
        Folder of the slice, where rows are cut, and which block.
    out
        Path of the tall array that is made; empty: none is kept.
    record
        Where the pass writes down what each block has left.
    terms, smalls
        What is added up, and the file with the small matrices of the terms, one after the other.
    sides
        The files of X and of its adjoint.
    present
        Those of them in whose rows a node has entries if it takes part.
    against, own
        Tall arrays to be multiplied with, and whether with itself.
    largest
        Whether the entries of largest magnitude are looked for.
    random
        Seed of random rows instead of terms, with the number of columns and their type.
    starts
        What to start from instead of terms: slice, rank.
    """

    matrix: str
    bounds: tuple[int, ...]
    index: int
    out: str
    record: str
    terms: tuple[TermSpec, ...] = ()
    smalls: str = ""
    sides: tuple[tuple[str, str], ...] = ()
    present: tuple[str, ...] = ()
    against: tuple[str, ...] = ()
    own: bool = False
    largest: bool = False
    random: tuple[tuple[int, ...], int, str] | None = None
    starts: tuple[Starts, str, int, str] | None = None

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [start, stop) of the block."""
        return self.bounds[self.index], self.bounds[self.index + 1]


@dataclass(frozen=True)
class PassRecord:
    """What a block leaves of a pass.

    Parameters
    ----------
    arrays
        Small matrices, one per thing asked for.
    made
        Whether it was made now.
    fits
        Whether there was what to start from.
    seal
        Of the rows, where they were written.
    moved
        Bytes of tall arrays and of the matrix that it has opened, and written.
    """

    arrays: tuple[NDArray[Any], ...]
    made: bool = True
    fits: bool = True
    seal: FileSeal | None = None
    moved: int = 0


def run_pass(task: PassTask) -> PassRecord:
    """Do one block of a pass, unless it is there."""
    record = to_path(f"{task.record}.{task.index:05d}.json") if task.record else None
    if record is not None and (found := read_sealed_record(record)) is not None:
        return PassRecord(tuple(unpack_array(packed) for packed in found["arrays"]), made=False)
    opened = _Opened()
    Y = _compute(task, opened)
    if Y is None:
        return PassRecord((), fits=False)
    arrays = [gram(opened.map(block_of(to_path(path), task.index)), Y) for path in task.against]
    if task.own:
        arrays.insert(0, gram(Y, Y))
    if task.largest:
        arrays.append(largest_entries(Y))
    path, seal = block_of(to_path(task.out), task.index), None
    if task.out:
        seal = save_array(path, Y, durable=False)
    if record is not None:
        data = {"arrays": [pack_array(array) for array in arrays]}
        write_sealed_record(record, data, {} if seal is None else {path.name: seal})
    written = 0 if seal is None else seal.bytes
    return PassRecord(tuple(arrays), seal=seal, moved=opened.bytes + written)


class _Opened:
    """Opens arrays, and counts their bytes: what a store would send."""

    def __init__(self) -> None:
        self.bytes = 0

    def map(self, path: Path) -> NDArray[Any]:
        """Return an array on storage."""
        array = map_array(path)
        self.bytes += array.nbytes
        return array


def _compute(task: PassTask, opened: _Opened) -> Tall | None:
    """Return the rows of a block."""
    start, stop = task.rows
    if task.random is not None:
        seed, columns, dtype = task.random
        Y = random_rows(seed, start, stop, columns, np.dtype(dtype))
        # Nodes without edges (in a chain of windows, those that have left) take no part.
        matrix = MatrixFolder(to_path(task.matrix))
        files = (dict(task.sides)[by] for by in task.present)
        counts = [np.diff(map_array(matrix.array(side, task.index, "indptr"))) for side in files]
        Y[sum(counts) == 0] = 0
        return Y
    if task.starts is not None:
        starts, name, rank, dtype = task.starts
        A = starts.read_block(name, start, stop, task.bounds[-1], rank)
        return None if A is None else A.astype(dtype)
    return add_up(_parts(task, opened))


def _parts(task: PassTask, opened: _Opened) -> Iterator[tuple[Tall, Small | float | None]]:
    """Yield the block's rows of every term, and what they are multiplied by."""
    smalls = load_rows(to_path(task.smalls))
    at = 0
    for spec in task.terms:
        part = (
            _multiply(task, spec, opened) if spec.by else opened.map(block_of(to_path(spec.tall), task.index))
        )
        if spec.shape is None:
            yield part, None
            continue
        count = spec.shape[0] * spec.shape[1]
        small = smalls[at : at + count].reshape(spec.shape)
        at += count
        if part.dtype.kind == "f":
            small = small.real
        # A number was written as a matrix, which fits one column alone.
        number = spec.shape == (1, 1) and part.shape[1] > 1
        yield part, float(small[0, 0].real) if number else small


def _multiply(task: PassTask, spec: TermSpec, opened: _Opened) -> Tall:
    """Return the block's rows of X, or of its adjoint, times a tall array that comes block by block."""
    indptr, indices, values = MatrixFolder(to_path(task.matrix)).load_matrix(
        dict(task.sides)[spec.by], task.index
    )
    opened.bytes += indptr.nbytes + indices.nbytes + values.nbytes
    tall = to_path(spec.tall)
    columns = map_array(block_of(tall, task.index)).shape[1]
    return multiply_tiles(indptr, indices, values, _tiles(tall, len(task.bounds) - 1, opened), columns)


def _tiles(tall: Path, count: int, opened: _Opened) -> Iterator[tuple[int, int, Tall]]:
    """Yield the blocks of a tall array, each with the rows that it has."""
    first = 0
    for index in range(count):
        tile = opened.map(block_of(tall, index))
        yield first, first + len(tile), tile
        first += len(tile)


@dataclass(frozen=True)
class CheckTask:
    """The reading back of one block of a tall array."""

    record: str


def check_block(task: CheckTask) -> bool:
    """Whether a block is whole."""
    return read_sealed_record(to_path(task.record)) is not None
