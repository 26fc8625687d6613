"""Tables: Parquet and Arrow files, opened once for their columns, their rows, and some of both.

Parquet behind a URL is read by ranges: the footer, then the chunks of the columns that are asked for.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Literal

import polars as pl
import pyarrow as pa

from toffee_dist.storage.parquet import open_rows, to_polars
from toffee_dist.storage.paths import to_path

# Rows of one table; a footer that claims more is damaged, and would be cut into more tasks than memory holds.
MOST_ROWS = 1 << 36
# Bytes that one record batch of Arrow may become, and how many times those of its file, where that is more.
BOMB_BYTES, BOMB_RATIO = 256 << 20, 100


@dataclass(frozen=True)
class Table:
    """An open table.

    Parameters
    ----------
    columns
        Names and types.
    bounds
        The row that each row group or record batch begins at, and where the last one ends.
    read
        Yields the columns of some names, the rows [start, stop) of them, at most so many rows at once.
    """

    columns: pa.Schema
    bounds: list[int]
    read: Callable[[list[str], int, int, int], Iterator[pl.DataFrame]]

    @property
    def rows(self) -> int:
        """How many rows the footer claims."""
        return self.bounds[-1]

    @property
    def schema(self) -> pl.Schema:
        """The columns as polars has them."""
        return to_polars(self.columns.empty_table()).schema


@contextmanager
def open_table(path: str, size: int, format: Literal["parquet", "ipc"]) -> Iterator[Table]:
    """Open a table, which must be local unless it is Parquet; only its footer is read.

    Parameters
    ----------
    path, size
        Where it is, and its bytes as listed.
    format
        What it is.

    Raises
    ------
    ArrowException, PolarsError, OSError
        For a damaged file.
    """
    if format == "parquet":
        with open_rows(to_path(path), size) as file:
            yield Table(file.schema, _bounds(file.counts), file.read)
        return
    bounds = _bounds(_count_batch_rows(path))
    with _open_ipc(path) as reader:
        yield Table(reader.schema, bounds, partial(_read_ipc, reader, bounds))


def _bounds(counts: list[int]) -> list[int]:
    if not 0 <= sum(counts) <= MOST_ROWS or min(counts, default=0) < 0:
        raise pa.ArrowInvalid(f"a footer that claims {sum(counts):,} rows")
    return list(accumulate(counts, initial=0))


def _read_ipc(
    reader: pa.RecordBatchFileReader,
    bounds: list[int],
    names: list[str],
    start: int,
    stop: int,
    batch_rows: int,
) -> Iterator[pl.DataFrame]:
    for number, (at, after) in enumerate(pairwise(bounds)):
        if at < stop and after > start:
            batch = reader.get_batch(number)
            # Offsets and lengths that point elsewhere are refused here, before anything follows them.
            batch.validate(full=True)
            for first in range(max(start - at, 0), min(stop, after) - at, batch_rows):
                piece = batch.slice(first, min(batch_rows, stop - at - first))
                yield to_polars(pa.Table.from_batches([piece])).select(names)


@contextmanager
def _open_ipc(path: str) -> Iterator[pa.RecordBatchFileReader]:
    """Open a local Arrow file, mapped.

    By pyarrow: a damaged file makes polars panic, which ends a thread of its engine; the next query of the
    same process may then wait for ever.
    """
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(path) as source, pa.ipc.open_file(source, options=options) as reader:
        yield reader


def _count_batch_rows(path: str) -> list[int]:
    """Return the rows of every record batch of a local Arrow file; nothing is decompressed.

    Raises
    ------
    ArrowInvalid
        Where a small file would take much memory: compressed batches are read whole.
    """
    with _open_ipc(path) as reader:
        # Arrow has checked the footer then, and checks each message below; their bodies stay where they are.
        width = len(reader.schema)
    with pa.memory_map(path) as source:
        counts = [_batch_length(source, offset) for offset in _batch_offsets(source)]
    largest = 8 * max(counts, default=0) * width
    if largest > max(BOMB_BYTES, BOMB_RATIO * os.path.getsize(path)):
        raise pa.ArrowInvalid(f"a record batch of {max(counts):,} rows in {os.path.getsize(path):,} bytes")
    return counts


def _batch_offsets(source: pa.MemoryMappedFile) -> list[int]:
    """Return where the record batches of an Arrow file begin: field 3 of its footer."""
    source.seek(source.size() - 10)
    (size,) = struct.unpack_from("<i", source.read(4))
    source.seek(source.size() - 10 - size)
    footer = _FlatBuffer(source.read(size))
    vector = footer.field(footer.root, 3)
    if not vector:
        return []
    vector = footer.follow(vector)
    # A block is an offset, the length of the metadata (padded to 8 bytes) and that of the body.
    return [footer.number("<q", vector + 4 + 24 * at) for at in range(footer.number("<I", vector))]


def _batch_length(source: pa.MemoryMappedFile, offset: int) -> int:
    """Return the rows of a record batch: field 0 of the field 2 of its message."""
    source.seek(offset)
    message = pa.ipc.read_message(source)
    data = _FlatBuffer(message.metadata.to_pybytes())
    length = data.field(data.follow(data.field(data.root, 2)), 0)
    # A field that is left out is zero.
    rows = data.number("<q", length) if length else 0
    if message.type != "record batch" or rows < 0:
        raise pa.ArrowInvalid(f"a {message.type} of {rows:,} rows where a record batch should be")
    return rows


class _FlatBuffer:
    """What we need of flatbuffers, the format of Arrow's metadata: positions of fields, and numbers."""

    def __init__(self, data: bytes) -> None:
        self.data, self.root = data, 0
        self.root = self.follow(0)

    def number(self, form: str, at: int) -> int:
        """Return the number at a position."""
        try:
            return int(struct.unpack_from(form, self.data, at)[0])
        except struct.error as error:
            raise pa.ArrowInvalid(f"damaged metadata: {error}") from None

    def follow(self, at: int) -> int:
        """Return where the offset at a position points."""
        return at + self.number("<I", at)

    def field(self, table: int, index: int) -> int:
        """Return where a field of a table is; 0 where it was left out."""
        entries, at = table - self.number("<i", table), 4 + 2 * index
        offset = self.number("<H", entries + at) if at < self.number("<H", entries) else 0
        return table + offset if offset else 0
