"""Entries: from scanned rows to the staged tensor's blocks, by sorting.

An entry is one 64-bit word, (source, target, step), so that sorting words groups what repeats. Rows of the
tensor are cut into bins, bins are gathered into blocks; a bin is merged by one task, in an order that depends
on its values only. That makes float sums equal to the last bit however the rows arrived.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.ingest.registry import read_ipc, resolve
from toffee_dist.ingest.scan import ScanPart
from toffee_dist.limits import Limits
from toffee_dist.settings import Entry, PairWeight
from toffee_dist.storage.files import read_array, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.tensors import TensorBlock, block_path
from toffee_dist.tensor import TemporalTensor, index_dtype
from toffee_dist.timegrid import TimeGrid

MAX_BINS = 1 << 18
WORD_BITS = 64

Words = NDArray[np.uint64]


@dataclass(frozen=True)
class Packing:
    """How an entry becomes a word, and how rows are cut into bins.

    Parameters
    ----------
    n_nodes, n_steps
        The sizes of the tensor.
    n_bins
        Bin b holds the rows [b·bin_rows, (b+1)·bin_rows); words count rows from there.
    """

    n_nodes: int
    n_steps: int
    n_bins: int

    @classmethod
    def choose(cls, n_nodes: int, n_steps: int, n_entries: int, limits: Limits) -> Packing:
        """Take enough bins for memory, and for the words to hold what they must."""
        column_bits = (n_nodes - 1).bit_length() + (n_steps - 1).bit_length()
        most_rows = 1 << (WORD_BITS - column_bits)
        wanted = max(1, min(-(-n_entries // limits.bin_entries), MAX_BINS), -(-n_nodes // most_rows))
        return cls(n_nodes, n_steps, min(wanted, n_nodes))

    @property
    def bin_rows(self) -> int:
        """Rows of a bin."""
        return -(-self.n_nodes // self.n_bins)

    @property
    def dtype(self) -> type[np.signedinteger[Any]]:
        """What rows and steps fit in: half the memory for all but the largest graphs."""
        return index_dtype(self.n_nodes, self.n_steps)

    @property
    def step_bits(self) -> int:
        """Bits of a step."""
        return (self.n_steps - 1).bit_length()

    @property
    def pair_bits(self) -> int:
        """Bits of a target and a step."""
        return (self.n_nodes - 1).bit_length() + self.step_bits


def pack(
    packing: Packing, i: NDArray[Any], j: NDArray[Any], t: NDArray[Any], value: NDArray[Any] | None
) -> tuple[Words, NDArray[np.float64] | None, NDArray[np.int64]]:
    """Return words sorted within their bins, the values in the same order, and where each bin starts."""
    words = (j.astype(np.uint64) << np.uint64(packing.step_bits)) | t.astype(np.uint64)
    bounds = np.minimum(np.arange(packing.n_bins + 1) * packing.bin_rows, packing.n_nodes)
    if packing.pair_bits + (packing.n_nodes - 1).bit_length() <= WORD_BITS:
        words |= i.astype(np.uint64) << np.uint64(packing.pair_bits)
        if value is None:
            words.sort()
        else:
            order = np.argsort(words)
            words, value = words[order], value[order]
        edges = bounds.astype(np.uint64) << np.uint64(packing.pair_bits)
        starts = np.searchsorted(words, edges[:-1])
        starts = np.append(starts, len(words)).astype(np.int64)
        words -= np.repeat(edges[:-1], np.diff(starts))
        return words, value, starts
    order = np.lexsort((words, i))
    i, words = i[order], words[order]
    starts = np.searchsorted(i, bounds).astype(np.int64)
    within = i - np.repeat(bounds[:-1], np.diff(starts))
    words |= within.astype(np.uint64) << np.uint64(packing.pair_bits)
    return words, None if value is None else value[order], starts


@dataclass(frozen=True)
class MapTask:
    """The mapping of one part: ids to rows, times to steps, rows to sorted words."""

    part: ScanPart
    lookups: tuple[tuple[tuple[str, int, int, int], ...], ...]
    """A space: for each bucket its rows file, the part's range in it, and the bucket's first new row."""
    work: str
    packing: Packing
    grid: TimeGrid
    directed: bool
    entry: Entry

    @property
    def words_path(self) -> Path:
        """Where the words go."""
        return to_path(self.work) / f"{self.part.name}.words.npy"

    @property
    def values_path(self) -> Path:
        """Where the values go, for count and sum."""
        return to_path(self.work) / f"{self.part.name}.values.npy"

    @property
    def starts_path(self) -> Path:
        """Where the starts of the bins go."""
        return to_path(self.work) / f"{self.part.name}.starts.npy"


def map_part(task: MapTask) -> int:
    """Write the sorted words of one part; return its self-loops."""
    frame = read_ipc(task.part.rows_path(task.work))
    tables = []
    for space in task.lookups:
        pieces = [resolve(read_array(to_path(path), a, b), base) for path, a, b, base in space]
        tables.append(np.concatenate(pieces).astype(task.packing.dtype))
    i = tables[0][frame["source"].to_numpy()]
    j = tables[-1][frame["target"].to_numpy()]
    t = task.grid.steps_of(frame["time"].to_numpy())
    loops = i == j
    value: NDArray[Any] | None = None
    if task.entry == "sum":
        value = frame["weight"].to_numpy() if "weight" in frame.columns else np.ones(len(i))
    if not task.directed:
        # Both halves are made here, of the same rows: each then sums the same values in the same order.
        off = ~loops
        i, j = np.concatenate([i, j[off]]), np.concatenate([j, i[off]])
        t = np.concatenate([t, t[off]])
        value = None if value is None else np.concatenate([value, value[off]])
    words, value, starts = pack(task.packing, i, j, t, value)
    if task.entry != "sum":
        first = _first_of_runs(words, starts)
        if task.entry == "count":
            value = np.diff(np.append(first, len(words))).astype(np.float64)
        words, starts = words[first], np.searchsorted(first, starts)
    save_array(task.words_path, words, durable=False)
    save_array(task.starts_path, starts, durable=False)
    if value is not None:
        save_array(task.values_path, value, durable=False)
    return int(loops.sum())


def _first_of_runs(words: Words, starts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where a new entry starts; equal words in two bins are two entries."""
    new = np.empty(len(words), dtype=bool)
    new[:1] = True
    np.not_equal(words[1:], words[:-1], out=new[1:])
    new[starts[:-1][starts[:-1] < len(words)]] = True
    return np.flatnonzero(new)


def choose_blocks(per_bin: NDArray[np.int64], limits: Limits) -> list[tuple[int, int]]:
    """Gather neighbouring bins into blocks of about `Limits.block_entries`."""
    blocks: list[tuple[int, int]] = []
    first, held = 0, 0
    for index, count in enumerate(per_bin):
        if index > first and held + count > limits.block_entries:
            blocks.append((first, index))
            first, held = index, 0
        held += int(count)
    return [*blocks, (first, len(per_bin))]


@dataclass(frozen=True)
class BlockTask:
    """The merging of some bins into one block of rows."""

    index: int
    bins: tuple[int, int]
    parts: tuple[str, ...]
    work: str
    blocks: str
    """Folder that the block goes to."""
    packing: Packing
    directed: bool
    entry: Entry
    pair_weight: PairWeight

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [first, last) of the block."""
        first, last = (min(at * self.packing.bin_rows, self.packing.n_nodes) for at in self.bins)
        return first, last

    @property
    def name(self) -> str:
        """What the files of the block are called."""
        return f"block-{self.index:06d}"


@dataclass(frozen=True)
class BlockRecord:
    """What is in a block; of its steps a bit each, whether it has entries."""

    n_pairs: int
    n_entries: int
    n_distinct: int
    n_cancelled: int
    steps: bytes


def merge_block(task: BlockTask) -> BlockRecord:
    """Merge the entries of a block's rows from every part, and write the block's arrays."""
    parts = [_read_part(task, name) for name in task.parts]
    merged = [_merge_bin(task, at, parts) for at in range(*task.bins)]
    i, j, t, value = (np.concatenate(column) for column in zip(*merged, strict=True))
    upper = slice(None) if task.directed else i <= j
    n_distinct = len(value[upper])
    present = value != 0
    n_cancelled = n_distinct - int(np.count_nonzero(present[upper]))
    if not present.all():
        i, j, t, value = i[present], j[present], t[present], value[present]
    first_row, last_row = task.rows
    changed = np.empty(len(i), dtype=bool)
    changed[:1] = True
    np.logical_or(i[1:] != i[:-1], j[1:] != j[:-1], out=changed[1:])
    first = np.flatnonzero(changed)
    per_row = np.bincount(i[first] - first_row, minlength=last_row - first_row)
    short = index_dtype(len(i))
    tensor = TemporalTensor(
        n_nodes=last_row - first_row,
        n_steps=task.packing.n_steps,
        directed=True,
        indptr=np.concatenate([[0], np.cumsum(per_row)]).astype(short),
        indices=j[first],
        tube_ptr=np.append(first, len(i)).astype(short),
        steps=t,
        values=value,
    ).with_pair_weight(task.pair_weight)
    # Pointers without their first zero: what they point at is shifted when the blocks are joined.
    for name, array in (
        ("indptr", tensor.indptr[1:]),
        ("indices", tensor.indices),
        ("tube_ptr", tensor.tube_ptr[1:]),
        ("steps", tensor.steps),
        ("values", tensor.values),
    ):
        save_array(block_path(to_path(task.blocks), task.name, name), array, durable=False)
    used = np.zeros(task.packing.n_steps, dtype=bool)
    used[t] = True
    return BlockRecord(tensor.n_pairs, tensor.n_entries, n_distinct, n_cancelled, np.packbits(used).tobytes())


PartBins = tuple[NDArray[np.int64], Words, NDArray[np.float64]]
"""Where some bins of a part start, their words, and their values (none for binary)."""


def _merge_bin(
    task: BlockTask, at: int, parts: Sequence[PartBins]
) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[np.float64]]:
    own = [
        (words[starts[k] : starts[k + 1]], values[starts[k] : starts[k + 1]])
        for k in [at - task.bins[0]]
        for starts, words, values in parts
    ]
    words, values = (np.concatenate(column) for column in zip(*own, strict=True))
    if task.entry == "binary":
        words.sort()
        words = words[_first_of_runs(words, np.zeros(1, dtype=np.int64))]
        value = np.ones(len(words))
    else:
        # By value inside an entry, as TemporalTensor.from_events does: the sum is then always the same.
        order = np.lexsort((values, words))
        words, values = words[order], values[order]
        first = _first_of_runs(words, np.zeros(1, dtype=np.int64))
        value = np.add.reduceat(values, first) if len(first) else np.empty(0)
        words = words[first]
    packing = task.packing
    dtype = packing.dtype
    t = (words & np.uint64((1 << packing.step_bits) - 1)).astype(dtype)
    words >>= np.uint64(packing.step_bits)
    node_bits = packing.pair_bits - packing.step_bits
    j = (words & np.uint64((1 << node_bits) - 1)).astype(dtype)
    words >>= np.uint64(node_bits)
    i = words.astype(dtype)
    i += dtype(at * packing.bin_rows)
    return i, j, t, value


def _read_part(task: BlockTask, name: str) -> PartBins:
    """Read the bins of a block, which are neighbours, from one part."""
    work, (first, last) = to_path(task.work), task.bins
    starts = read_array(work / f"{name}.starts.npy", first, last + 1)
    rows = int(starts[0]), int(starts[-1])
    words, values = np.empty(0, dtype=np.uint64), np.empty(0)
    if rows[0] < rows[1]:
        words = read_array(work / f"{name}.words.npy", *rows)
        if task.entry != "binary":
            values = read_array(work / f"{name}.values.npy", *rows)
    return starts - starts[0], words, values


def count_bins(parts: Sequence[MapTask], n_bins: int) -> NDArray[np.int64]:
    """Sum the entries of every bin over the parts."""
    total = np.zeros(n_bins, dtype=np.int64)
    for part in parts:
        total += np.diff(read_array(part.starts_path))
    return total


def list_blocks(tasks: Sequence[BlockTask], records: Sequence[BlockRecord]) -> list[TensorBlock]:
    """Say where in the tensor each block belongs."""
    pairs = accumulate((record.n_pairs for record in records), initial=0)
    entries = accumulate((record.n_entries for record in records), initial=0)
    return [
        TensorBlock(task.name, task.rows[0], *before)
        for task, before in zip(tasks, zip(pairs, entries, strict=True), strict=False)
    ]
