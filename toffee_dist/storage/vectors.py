"""THE reader of published vectors: in blocks of nodes, from the Parquet parts of an output or from its index.

Decoding lists from Parquet takes 1.5 s for 1,000,000 × 128 on one core, reading the same floats from the
index 0.3 s. The index is the vectors of an output as one .npy file, which a published run never changes.

Whatever is asked for, a few blocks are in memory at once, beside what is returned.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import ArrayLike, NDArray

from toffee_dist.errors import InputError
from toffee_dist.kernels.spectrum import count_freqs
from toffee_dist.storage.compact import HEADER, CompactTrajectory
from toffee_dist.storage.files import fetched, read_array
from toffee_dist.storage.manifest import IndexRecord, Manifest, read_record
from toffee_dist.storage.parquet import list_columns, open_parquet, to_matrix
from toffee_dist.storage.runs import Mask, RunFolder
from toffee_dist.storage.spaces import SPACE_KEY, check_space
from toffee_dist.words import show_line

# Bytes that one block of the index holds: few enough to stay in a core's cache between two passes.
BLOCK_BYTES = 2 * 2**20
# Threads that read and multiply; blocks in memory are at most twice as many.
THREADS = min(2, os.cpu_count() or 1)

WHOLE = "Go back to a whole run with toffee rollback."

Vectors = NDArray[Any]
T = TypeVar("T")


@dataclass(frozen=True)
class VectorTable:
    """The vectors of one output of a published run; nothing is read until it is asked for.

    Parameters
    ----------
    run
        Its folder.
    output
        A folder of parts, or ``factors/R_time`` or ``factors/R_freq``, which is one file.
    shape
        (nodes, length), or (nodes, each, length) where every node has several rows: a row per step or a row
        per frequency, which are neighbours in the table. (R has a row per step or frequency, and no nodes.)
    space_id
        The space that the vectors are in, by the manifest; what says another is refused. (R is in none.)
    """

    run: RunFolder
    output: str
    shape: tuple[int, ...]
    space_id: str = ""

    @property
    def n_nodes(self) -> int:
        """How many nodes it has."""
        return self.shape[0]

    @property
    def each(self) -> int:
        """How many rows each node has."""
        return self.shape[1] if len(self.shape) == 3 else 1

    @property
    def length(self) -> int:
        """The length of a vector."""
        return self.shape[-1]

    @property
    def path(self) -> Path:
        """The folder of its parts, or its file."""
        return self.run.core(self._core) if self._core else self.run.path / self.output

    @cached_property
    def files(self) -> list[Path]:
        """Its files, in the order of rows."""
        return [self.path] if self._core else self.run.parts(self.output)

    @property
    def _core(self) -> str:
        name = self.output.removeprefix("factors/")
        return name if name in ("R_time", "R_freq") else ""

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers; two columns of lists are real and imaginary parts."""
        for group in self.groups():
            return group.dtype
        return np.dtype(np.float32)

    def groups(self, step: int | None = None, *, fetch: bool = False) -> Iterator[RowGroup]:
        """Yield its row groups in the order of rows, with one row per node or with all rows.

        Parameters
        ----------
        step
            Of a table with several rows per node: which of them is wanted; None: all.
        fetch
            Bring each file of a store here once, for the time that its row groups are yielded; for those who
            read all of them, one after the other.

        Raises
        ------
        InputError
            Where a part is missing or damaged: the run is not what its manifest says.
        """
        start, expected = 0, self.n_nodes * self.each
        for path in self.files:
            with fetched(path) if fetch else nullcontext(path) as local:
                for group in self.groups_in(local, start, step):
                    if group.end > expected:
                        raise damaged(self.run, f"more than {expected:,} rows in {self.output}")
                    yield group
                    start = group.end
        if start != expected:
            raise damaged(self.run, f"{start:,} of {expected:,} rows in {self.output}")

    def groups_in(self, path: Path, start: int = 0, step: int | None = None) -> Iterator[RowGroup]:
        """Yield the row groups of one file, the first of which begins with the row `start` of the table."""
        try:
            with open_parquet(path) as file:
                metadata = file.metadata
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.damaged(path, error) from None
        self.check_space((metadata.metadata or {}).get(SPACE_KEY.encode()), f"{self.output}/{path.name}")
        for number in range(metadata.num_row_groups):
            end = start + metadata.row_group(number).num_rows
            yield RowGroup(self, path, metadata, number, start, end, step)
            start = end

    def damaged(self, path: Path, error: Exception) -> InputError:
        """Return what is said of a file of it that cannot be read."""
        return damaged(self.run, f"{self.output}/{path.name}: {first_line(error)}")

    def check_space(self, found: bytes | str | None, what: str, remedy: str = WHOLE) -> None:
        """Raise where a file of the run says another space than its manifest.

        Files of runs that were made before there were ids say none.
        """
        if found is not None and self.space_id:
            word = found.decode("utf-8", "replace") if isinstance(found, bytes) else str(found)
            check_space(self.space_id, word, what, f"run {self.run.run_id}", remedy)

    def _find_index(self) -> Path | None:
        """Return the index of this output; None where there is none that says what it is of."""
        path, record = self.run.index(self.output), self.run.index_record(self.output)
        if not path.exists() or not record.exists():
            return None
        of = read_record(record, IndexRecord)
        name, remedy = f"index/{path.name}", "Make the index of this run again with toffee index."
        self.check_space(of.space_id, name, remedy)
        if of.run_id != self.run.run_id:
            raise damaged(self.run, f"{name} is of run {show_line(of.run_id)}", remedy)
        return path

    def blocks(self, step: int | None = None) -> Iterator[VectorBlock]:
        """Yield blocks of one vector per node in the order of nodes: of the index, or else of the parts.

        Parameters
        ----------
        step
            Of a table with several rows per node: which of them.
        """
        if step is None and self.each > 1:
            raise ValueError(f"{self.output} has {self.each} rows per node: which of them?")
        index = self._find_index() if step is None else None
        if index is None:
            yield from self.groups(step)
            return
        rows = max(1, BLOCK_BYTES // (4 * self.length))
        for first in range(0, self.n_nodes, rows):
            yield IndexBlock(self.run, index, first, min(first + rows, self.n_nodes), self.length)


def open_vectors(run: RunFolder, output: str, manifest: Manifest | None = None) -> VectorTable:
    """Return the vectors of an output of a run, whose manifest is read where it is not given.

    Raises
    ------
    InputError
        Where the run has no such output.
    """
    manifest = run.read_manifest() if manifest is None else manifest
    n_nodes, n_steps, rank = manifest.summary.nodes, manifest.summary.steps, manifest.config.rank
    shapes = {
        "embedding": (n_nodes, rank),
        "embedding_target": (n_nodes, rank),
        "trajectory": (n_nodes, n_steps, rank),
        "spectrum": (n_nodes, count_freqs(n_steps)),
        "factors/A_time": (n_nodes, n_steps, rank),
        "factors/A_freq": (n_nodes, count_freqs(n_steps), rank),
        "factors/R_time": (n_steps, rank * rank),
        "factors/R_freq": (count_freqs(n_steps), rank * rank),
    }
    # R is there with A, and is no output of its own.
    if output not in shapes or output.replace("/R_", "/A_") not in manifest.outputs:
        raise InputError(
            f"this run has no {output}",
            got=", ".join(manifest.outputs),
            allowed="what was asked for",
            remedy=f"Ask for it with --outputs {output.partition('/')[0].removesuffix('_target')}.",
        )
    space_id = "" if "/R_" in output else manifest.space_of(output)
    if output == "trajectory" and (run.compact / HEADER).exists():
        return CompactTable(run, output, shapes[output], space_id)
    return VectorTable(run, output, shapes[output], space_id)


@dataclass(frozen=True)
class CompactTable(VectorTable):
    """A trajectory that is made of its compact form when it is asked for; `files` are the parts beside it."""

    @cached_property
    def compact(self) -> CompactTrajectory:
        """The compact form, in the axes of the run."""
        found = CompactTrajectory(self.run.compact, self.run.read_rotation(self.length))
        if (found.n_nodes, found.n_steps, found.rank) != self.shape:
            got = f"{found.n_nodes:,} nodes, {found.n_steps:,} steps, rank {found.rank} in compact/"
            raise damaged(self.run, got)
        self.check_space(found.space_id, f"compact/{HEADER}")
        return found

    @cached_property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""
        return np.dtype(np.float32)

    def groups(self, step: int | None = None, *, fetch: bool = False) -> Iterator[CompactBlock]:  # type: ignore[override]
        """Yield blocks of nodes, with one row per node or with all steps."""
        for first, stop in self.compact.ranges(1 if step is not None else self.each):
            yield CompactBlock(self, first, stop, step)

    def blocks(self, step: int | None = None) -> Iterator[VectorBlock]:
        """Yield blocks of one vector per node at a step."""
        if step is None:
            raise ValueError(f"{self.output} has {self.each} rows per node: which of them?")
        yield from self.groups(step)


@dataclass(frozen=True, eq=False)
class CompactBlock:
    """The vectors of the nodes [first, stop) of a compact trajectory: at one step, or at all."""

    table: CompactTable
    first: int
    stop: int
    step: int | None = None

    @property
    def start(self) -> int:
        """The first row."""
        return self.first * self.table.each

    @property
    def end(self) -> int:
        """The row after the last."""
        return self.stop * self.table.each

    def read(self) -> Vectors:
        """Make them: (nodes, length), or (nodes·steps, length)."""
        steps = np.arange(self.table.each) if self.step is None else np.array([self.step])
        return self.table.compact.read(self.first, self.stop, steps).reshape(-1, self.table.length)


class VectorBlock(Protocol):
    """Vectors of the nodes [first, stop), one per node, read when asked for."""

    @property
    def first(self) -> int:
        """The first node."""

    @property
    def stop(self) -> int:
        """The node after the last."""

    def read(self) -> Vectors:
        """Return them, (stop - first, length)."""


@dataclass(frozen=True)
class IndexBlock:
    """A range of rows of the index."""

    run: RunFolder
    path: Path
    first: int
    stop: int
    length: int

    def read(self) -> Vectors:
        """Read the rows, and nothing else."""
        try:
            rows = read_array(self.path, self.first, self.stop)
            if rows.shape[1:] != (self.length,) or rows.dtype != np.float32:
                raise ValueError(f"{rows.dtype} rows of shape {rows.shape[1:]} instead of {self.length}")
            return rows
        except (OSError, ValueError) as error:
            found = f"index/{self.path.name}: {first_line(error)}"
            raise damaged(self.run, found, remedy="Make its index again with toffee index.") from None


@dataclass(frozen=True, eq=False)
class RowGroup:
    """A row group of a Parquet file of vectors; over time, the rows of one step among it.

    Parameters
    ----------
    table
        Which vectors.
    path, metadata, number
        The file, its footer, and the number of the row group.
    start, end
        Rows of the table that it holds.
    step
        The row of each node that is wanted; None: all of them.
    """

    table: VectorTable
    path: Path
    metadata: pq.FileMetaData
    number: int
    start: int
    end: int
    step: int | None = None

    @property
    def first(self) -> int:
        """The first node whose wanted row is here."""
        return self._node(self.start)

    @property
    def stop(self) -> int:
        """The node after the last."""
        return self._node(self.end)

    def _node(self, row: int) -> int:
        """Return the first node whose wanted row is this one or a later one."""
        return row if self.step is None else -((self.step - row) // self.table.each)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The type of its numbers."""
        try:
            lists = list_columns(self.metadata.schema.to_arrow_schema())
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.table.damaged(self.path, error) from None
        if not lists:
            raise self.table.damaged(self.path, ValueError("no column of vectors"))
        real = np.dtype(lists[0].type.value_type.to_pandas_dtype())
        return np.result_type(real, np.complex64) if len(lists) > 1 else real

    def read(self) -> Vectors:
        """Decode the row group, and keep the rows that are wanted."""
        try:
            with open_parquet(self.path, self.metadata) as file:
                names = [field.name for field in list_columns(file.schema_arrow)]
                columns = file.read_row_group(self.number, columns=names, use_threads=False)
            real, *imag = (to_matrix(columns[name], self.table.length) for name in names)
            vectors = real.reshape(self.end - self.start, self.table.length)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise self.table.damaged(self.path, error) from None
        if imag:
            vectors = vectors + imag[0] * np.complex64(1j)
        if self.step is None:
            return np.asarray(vectors)
        each = self.table.each
        return np.asarray(vectors[self.first * each + self.step - self.start :: each])


def damaged(
    run: RunFolder,
    found: str,
    remedy: str = "Go back to a whole one with toffee rollback, or start a new chain with --fresh.",
) -> InputError:
    """Return what is said of a published run that is not what it was."""
    return InputError(f"run {run.run_id} is damaged", got=found, remedy=remedy)


def first_line(error: Exception) -> str:
    """Return what an error says, in one line."""
    return str(error).partition("\n")[0] or type(error).__name__


def iter_vectors(table: VectorTable, kept: Mask | None = None) -> Iterator[tuple[int, Vectors]]:
    """Yield (first row, vectors) in the order of rows, one row group after the other.

    The parts are read even where there is an index: sums over the blocks must not depend on it.

    Parameters
    ----------
    table
        Which vectors.
    kept
        The rows that a later run still has: only these are yielded, and the first row is that run's.
    """
    first = 0
    for group in table.groups(fetch=True):
        vectors = group.read()
        if kept is not None:
            vectors = vectors[kept[group.start : group.end]]
        yield first, vectors
        first += len(vectors)


def map_blocks(function: Callable[[VectorBlock], T], blocks: Iterable[VectorBlock]) -> Iterator[T]:
    """Yield what a function makes of each block, in their order; a few are in memory at once."""
    remaining = iter(blocks)
    with ThreadPoolExecutor(THREADS) as pool:
        waiting = [pool.submit(function, block) for block in islice(remaining, 2 * THREADS)]
        while waiting:
            yield waiting.pop(0).result()
            waiting += [pool.submit(function, block) for block in islice(remaining, 1)]


def read_nodes(table: VectorTable, nodes: ArrayLike, step: int | None = None) -> Vectors:
    """Return one vector of each of some nodes, (len(nodes), length); reads only the blocks that hold them."""
    if isinstance(table, CompactTable):
        assert step is not None
        return np.asarray(table.compact.read_nodes(np.asarray(nodes), np.array([step]))[:, 0])
    wanted, where = np.unique(np.asarray(nodes, dtype=np.int64), return_inverse=True)
    found = [np.empty((0, table.length), np.float32)]

    def holding() -> Iterator[VectorBlock]:
        for block in table.blocks(step):
            if len(wanted) and block.first > wanted[-1]:
                return
            lowest, highest = np.searchsorted(wanted, [block.first, block.stop])
            if lowest < highest:
                yield block

    def pick(block: VectorBlock) -> Vectors:
        lowest, highest = np.searchsorted(wanted, [block.first, block.stop])
        return np.asarray(block.read()[wanted[lowest:highest] - block.first])

    found += map_blocks(pick, holding())
    return np.concatenate(found[1:] or found)[where]


def read_node_rows(table: VectorTable, nodes: ArrayLike, first: int = 0, stop: int | None = None) -> Vectors:
    """Return the rows [first, stop) of each of some nodes, (len(nodes), stop - first, length).

    What a node has is in neighbouring rows, so few row groups are read.
    """
    stop = table.each if stop is None else stop
    if isinstance(table, CompactTable):
        return table.compact.read_nodes(np.asarray(nodes), np.arange(first, stop))
    wanted, where = np.unique(np.asarray(nodes, dtype=np.int64), return_inverse=True)
    begins = wanted * table.each + first
    out = np.empty((len(wanted), stop - first, table.length), table.dtype)
    for group in table.groups():
        if not len(wanted) or group.start >= begins[-1] + stop - first:
            break
        lowest = np.searchsorted(begins + stop - first, group.start, side="right")
        highest = np.searchsorted(begins, group.end)
        if lowest >= highest:
            continue
        vectors = group.read()
        for at in range(lowest, highest):
            low, high = max(begins[at], group.start), min(begins[at] + stop - first, group.end)
            out[at, low - begins[at] : high - begins[at]] = vectors[low - group.start : high - group.start]
    return out[where]


def read_whole(table: VectorTable) -> Vectors:
    """Return all of it, in the shape of the table."""
    # The shape is the manifest's word: a damaged one must not reserve memory for what is not there.
    rows_there = sum(group.end - group.start for group in table.groups())
    if rows_there != math.prod(table.shape[:-1]):
        raise InputError(
            "the vectors of a run are not whole",
            got=f"{rows_there:,} rows; the manifest has {math.prod(table.shape[:-1]):,}",
            remedy="Use another run: toffee runs lists them.",
        )
    out = np.empty(table.shape, table.dtype)
    rows = out.reshape(-1, table.length)
    for at, vectors in iter_vectors(table):
        rows[at : at + len(vectors)] = vectors
    return out


def list_pieces(table: VectorTable) -> list[tuple[int, Callable[[], Vectors]]]:
    """Return how many nodes each file or block holds, and what reads it: (nodes, …)."""
    if isinstance(table, CompactTable):
        return [(block.stop - block.first, partial(_read_block, block)) for block in table.groups()]
    rows = dict.fromkeys(table.files, 0)
    for group in table.groups():
        rows[group.path] += group.end - group.start
    return [(count // table.each, partial(_read_part, table, path)) for path, count in rows.items()]


def _read_part(table: VectorTable, path: Path) -> Vectors:
    with fetched(path) as local:
        parts = [group.read() for group in table.groups_in(local)]
    return np.concatenate(parts).reshape(-1, *table.shape[1:])


def _read_block(block: CompactBlock) -> Vectors:
    return block.read().reshape(-1, *block.table.shape[1:])
