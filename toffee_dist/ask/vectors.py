"""Rows of a run's vectors from disk, in blocks: from its Parquet parts, or from the index where there is one.

Decoding lists from Parquet takes 1.5 s for 1,000,000 × 128 on one core, reading the same floats from the
index 0.3 s. The index is the vectors of an output as one .npy file, which a published run never changes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from toffee_dist.errors import InputError, UnfinishedError
from toffee_dist.slices import read_rows
from toffee_dist.store import replacing

if TYPE_CHECKING:
    from toffee_dist.run import Run, Table

INDEX = "index"
# Bytes that one block of the index holds: few enough to stay in a core's cache between two passes.
BLOCK_BYTES = 2 * 2**20
# Threads that read and multiply; blocks in memory are at most twice as many.
THREADS = min(2, os.cpu_count() or 1)

Vectors = NDArray[Any]
T = TypeVar("T")


class Block(Protocol):
    """Vectors of the nodes [first, stop), read when asked for."""

    @property
    def first(self) -> int:
        """The first row."""

    @property
    def stop(self) -> int:
        """The row after the last."""

    def read(self) -> Vectors:
        """Return them, (stop - first, length)."""


@dataclass(frozen=True)
class IndexBlock:
    """A range of rows of the index."""

    path: Path
    first: int
    stop: int

    def read(self) -> Vectors:
        """Read the rows, and nothing else."""
        try:
            return read_rows(self.path, self.first, self.stop)
        except UnfinishedError as error:
            raise _damaged(self.path, error) from None


@dataclass(frozen=True)
class GroupBlock:
    """A row group of a Parquet part; over time, the rows of one step among it.

    Parameters
    ----------
    path, group
        The part, and the number of the row group.
    start, end
        Rows of the table that it holds.
    step, n_steps
        The step wanted, of how many a node has; 0 of 1 where a node has one vector.
    """

    path: Path
    group: int
    start: int
    end: int
    step: int = 0
    n_steps: int = 1

    @property
    def first(self) -> int:
        """The first node whose row of the step is here."""
        return -((self.step - self.start) // self.n_steps)

    @property
    def stop(self) -> int:
        """The node after the last."""
        return -((self.step - self.end) // self.n_steps)

    def read(self) -> Vectors:
        """Decode the row group, and keep the rows of the step."""
        try:
            with self.path.open("rb") as source:
                file = pq.ParquetFile(source)
                name = _vector_column(file)
                column = file.read_row_group(self.group, columns=[name], use_threads=False)[name]
                vectors = column.combine_chunks().flatten().to_numpy().reshape(self.end - self.start, -1)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise _damaged(self.path, error) from None
        rows = slice(self.first * self.n_steps + self.step - self.start, None, self.n_steps)
        return np.asarray(vectors[rows])


def _vector_column(file: pq.ParquetFile) -> str:
    return str(next(f.name for f in file.schema_arrow if pa.types.is_fixed_size_list(f.type)))


def _damaged(path: Path, error: Exception) -> InputError:
    return InputError(
        f"cannot read {path.parent.name}/{path.name}",
        got=str(error).splitlines()[0],
        allowed="the file as it was written",
        remedy="Make an index again with toffee index; for other files go back with toffee rollback.",
    )


def index_path(run: Run, output: str) -> Path:
    """Return where the index of an output is."""
    return run.path / INDEX / f"{output}.npy"


def find_blocks(run: Run, output: str, step: int | None = None) -> Sequence[Block]:
    """Return the blocks of an output, in the order of rows: of its index, or else of its parts.

    Parameters
    ----------
    run
        A published run.
    output
        ``embedding``, ``embedding_target``, ``spectrum``, or ``trajectory`` with a step.
    step
        Of a trajectory.
    """
    table: Table = getattr(run, output)
    path = index_path(run, output)
    if step is None and path.exists():
        rows = max(1, BLOCK_BYTES // (4 * table.shape[-1]))
        return [
            IndexBlock(path, first, min(first + rows, run.n_nodes)) for first in range(0, run.n_nodes, rows)
        ]
    return list(_groups(table.files, step or 0, run.n_steps if step is not None else 1))


def _groups(files: Iterable[Path], step: int, n_steps: int) -> Iterator[GroupBlock]:
    start = 0
    for path in files:
        try:
            with path.open("rb") as source:
                metadata = pq.ParquetFile(source).metadata
        except (OSError, ValueError, pa.ArrowException) as error:
            raise _damaged(path, error) from None
        for group in range(metadata.num_row_groups):
            end = start + metadata.row_group(group).num_rows
            yield GroupBlock(path, group, start, end, step, n_steps)
            start = end


def map_blocks(function: Callable[[Block], T], blocks: Iterable[Block]) -> Iterator[T]:
    """Yield what a function makes of each block, in their order; a few are in memory at once."""
    remaining = iter(blocks)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(function, block) for block in islice(remaining, 2 * THREADS)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(function, block) for block in islice(remaining, 1)]


def read_nodes(run: Run, output: str, rows: Any, step: int | None = None) -> Vectors:
    """Return the vectors of some nodes, (len(rows), length), reading only the blocks that hold them."""
    wanted, where = np.unique(np.asarray(rows, dtype=np.int64), return_inverse=True)
    out: Vectors | None = None

    def pick(block: Block) -> tuple[int, int, Vectors | None]:
        start, stop = np.searchsorted(wanted, [block.first, block.stop])
        held = wanted[start:stop] - block.first
        return int(start), int(stop), block.read()[held] if len(held) else None

    for start, stop, found in map_blocks(pick, find_blocks(run, output, step)):
        if found is not None:
            out = np.empty((len(wanted), found.shape[1]), found.dtype) if out is None else out
            out[start:stop] = found
    return np.empty((0, 0)) if out is None else out[where]


def read_steps(run: Run, row: int) -> Vectors:
    """Return the vectors of one node over time, (steps, rank): they are neighbours in one part."""
    first, stop = row * run.n_steps, (row + 1) * run.n_steps
    parts = []
    for group in _groups(run.trajectory.files, 0, 1):
        if group.end > first and group.start < stop:
            parts.append(group.read()[max(first - group.start, 0) : stop - group.start])
    return np.concatenate(parts)


def build_index(run: Run) -> list[Path]:
    """Write the index of every output that has one vector a node; return the files.

    They appear whole or not at all; queries use them from then on.
    """
    paths = []
    for output in ("embedding", "embedding_target", "spectrum"):
        if output in run.manifest["outputs"]:
            path = index_path(run, output)
            path.parent.mkdir(exist_ok=True)
            with replacing(path) as temporary:
                write_matrix(run, output, temporary)
            paths.append(path)
    return paths


def write_matrix(run: Run, output: str, path: Path, step: int | None = None) -> None:
    """Write the vectors of an output as one contiguous float32 .npy file, block after block."""
    table: Table = getattr(run, output)
    header = {"descr": "<f4", "fortran_order": False, "shape": (run.n_nodes, table.shape[-1])}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)
        blocks = find_blocks(run, output, step)
        for vectors in map_blocks(lambda block: block.read(), blocks):
            file.write(np.ascontiguousarray(vectors, dtype="<f4").data)
