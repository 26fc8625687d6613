"""Readers: from pieces of files to frames of raw columns, in bounded memory.

Large files come in blocks, small ones together: a frame holds a block of one file, or many small files of one
shape. Nothing is judged here: what a value means, and whether it is one, is the question of `rows.py`.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import polars as pl
import zstandard

from toffee_dist.sources import Fragment, SourceFile, scan_table, unreadable
from toffee_dist.text import Cut, Layout, cut_lines, from_partition, local_copy, read_lines

BLOCK_ROWS = 1 << 21
SMALL_BYTES = 1 << 18
SMALL_ROWS = 1 << 14
BATCH = 1024


@dataclass(frozen=True)
class Piece:
    """Some rows of a frame: where they come from."""

    fragment: Fragment
    first: int
    """Rows of the fragment before these."""
    rows: int


@dataclass(frozen=True)
class Batch:
    """Raw columns source, target, time (and weight); the pieces they are made of, in order."""

    frame: pl.DataFrame
    pieces: tuple[Piece, ...]
    comments: int


def read_fragments(fragments: Sequence[Fragment], layouts: Mapping[str, Layout]) -> Iterator[Batch]:
    """Read fragments in order.

    Text columns, and those of hive partitions, are strings; columns of tables keep their type.

    Raises
    ------
    InputError
        For a file that is damaged, is not what its name says, or lacks a column; it names the file.
    """
    held: list[tuple[Fragment, bytes | pl.DataFrame, int]] = []
    held_key: object = None
    rows_before: dict[int, int] = {}
    for fragment in fragments:
        # A kind of file without a layout had only empty files.
        layout = layouts.get(fragment.file.layout)
        for data, key, comments in _read(fragment, layout) if layout else ():
            if held and (key is None or key != held_key or len(held) >= BATCH):
                yield _join(held, held_key, rows_before)
                held = []
            held.append((fragment, data, comments))
            held_key = key
            if not _is_small(data, key):
                yield _join(held, held_key, rows_before)
                held = []
    if held:
        yield _join(held, held_key, rows_before)


def _read(fragment: Fragment, layout: Layout) -> Iterator[tuple[bytes | pl.DataFrame, object, int]]:
    """Yield lines or frames of one fragment, what must be equal to join two of them, and comment lines."""
    file = fragment.file
    with naming(file), local_copy(file) as local:
        here = replace(fragment, file=local)
        if file.format == "text":
            yield from read_lines(here, layout, file)
        else:
            for frame in _read_table(here, layout, file):
                yield frame, tuple(frame.schema.items()), 0


def _is_small(data: bytes | pl.DataFrame, key: object) -> bool:
    if isinstance(data, pl.DataFrame):
        return data.height <= SMALL_ROWS
    # Where quotes are, a line may not be a row, and rows could not be told apart again.
    quoted = isinstance(key, Cut) and key.separator != " " and b'"' in data
    return len(data) <= SMALL_BYTES and not quoted


def _join(
    held: list[tuple[Fragment, bytes | pl.DataFrame, int]], key: object, rows_before: dict[int, int]
) -> Batch:
    """Make one frame of what is held, and say which rows are whose."""
    if isinstance(key, Cut):
        frame = _cut_all(held, key)
    else:
        frame = pl.concat([data for _, data, _ in held if isinstance(data, pl.DataFrame)])
    pieces = []
    for fragment, data, _ in held:
        rows = data.height if isinstance(data, pl.DataFrame) else data.count(b"\n")
        rows = frame.height if len(held) == 1 else rows
        pieces.append(Piece(fragment, rows_before.get(fragment.index, 0), rows))
        rows_before[fragment.index] = pieces[-1].first + rows
    return Batch(frame, tuple(pieces), sum(comments for _, _, comments in held))


def _cut_all(held: list[tuple[Fragment, bytes | pl.DataFrame, int]], cut: Cut) -> pl.DataFrame:
    blocks = [data for _, data, _ in held if isinstance(data, bytes)]
    try:
        frame = cut_lines(b"".join(blocks), cut)
        if len(held) == 1 or frame.height == sum(block.count(b"\n") for block in blocks):
            return frame
    except pl.exceptions.PolarsError:
        pass
    # One of them is damaged: one at a time tells which.
    frames = []
    for (fragment, _, _), block in zip(held, blocks, strict=True):
        with naming(fragment.file):
            frames.append(cut_lines(block, cut))
    return pl.concat(frames)


def _read_table(fragment: Fragment, layout: Layout, shown: SourceFile) -> Iterator[pl.DataFrame]:
    frame = scan_table(fragment.file.format, fragment.file.path)
    schema = frame.collect_schema()
    names = schema.names()
    exprs = []
    for role, column in layout.columns().items():
        if isinstance(column, int) and column < len(names):
            exprs.append(pl.col(names[column]).alias(role))
        elif column in schema:
            exprs.append(pl.col(str(column)).alias(role))
        else:
            exprs.append(pl.lit(from_partition(column, names, shown)).alias(role))
    start, stop = fragment.start, fragment.stop
    if stop < 0 and fragment.file.size < SMALL_BYTES:
        yield frame.select(exprs).collect()
        return
    if stop < 0:
        stop = int(frame.select(pl.len()).collect().item())
    for first in range(start, stop, BLOCK_ROWS):
        yield frame.slice(first, min(BLOCK_ROWS, stop - first)).select(exprs).collect()


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Turn what a damaged file makes the readers raise into an error that names the file."""
    try:
        yield
    except (
        pl.exceptions.PolarsError,
        OSError,
        EOFError,
        zlib.error,
        zstandard.ZstdError,
        UnicodeDecodeError,
    ) as error:
        raise unreadable(file, error) from None
    except BaseException as error:
        # A Rust panic is not an Exception; a damaged file must not look like a bug.
        if type(error).__name__ == "PanicException":
            raise unreadable(file, error) from None
        raise
