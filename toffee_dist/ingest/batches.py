"""Readers: from pieces of files to frames of raw columns, in bounded memory.

Large files come in blocks, small ones together: a frame holds a block of one file, or many small files of one
shape. Nothing is judged here: what a value means, and whether it is one, is the question of `validate.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import polars as pl

from toffee_dist.ingest.files import Fragment, SourceFile, naming, refuse_changed
from toffee_dist.ingest.tables import open_table
from toffee_dist.ingest.text import Cut, Layout, cut_lines, from_partition, local_file, read_lines
from toffee_dist.limits import Limits

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


def read_fragments(
    fragments: Sequence[Fragment], layouts: Mapping[str, Layout], limits: Limits
) -> Iterator[Batch]:
    """Read fragments in order.

    Text columns, and those of hive partitions, are strings; columns of tables keep their type.

    Raises
    ------
    InputError
        For a file that is damaged, is not what its name says, or lacks a column; it names the file.
    """
    held: list[tuple[Fragment, bytes | pl.DataFrame, int]] = []
    held_key: object = None
    load = 0.0
    rows_before: dict[int, int] = {}
    for fragment in fragments:
        # A kind of file without a layout had only empty files.
        layout = layouts.get(fragment.file.layout)
        for data, key, comments in _read(fragment, layout, limits) if layout else ():
            if held and (key is None or key != held_key or len(held) >= BATCH or load >= 1):
                yield _join(held, held_key, rows_before)
                held, load = [], 0.0
            held.append((fragment, data, comments))
            held_key = key
            load += _share(data, limits)
            if not _is_small(data, key):
                yield _join(held, held_key, rows_before)
                held, load = [], 0.0
    if held:
        yield _join(held, held_key, rows_before)


def _read(
    fragment: Fragment, layout: Layout, limits: Limits
) -> Iterator[tuple[bytes | pl.DataFrame, object, int]]:
    """Yield lines or frames of one fragment, what must be equal to join two of them, and comment lines."""
    file = fragment.file
    with naming(file), local_file(file) as local:
        here = replace(fragment, file=local)
        if file.format == "text":
            yield from read_lines(here, layout, file, limits)
        else:
            for frame in _read_table(here, layout, file, limits.batch_rows):
                yield frame, tuple(frame.schema.items()), 0
        refuse_changed(file)


def _share(data: bytes | pl.DataFrame, limits: Limits) -> float:
    """Return how much of what may be held at once this is."""
    if isinstance(data, pl.DataFrame):
        return data.height / limits.batch_rows
    return len(data) / limits.text_block_bytes


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


def _read_table(
    fragment: Fragment, layout: Layout, shown: SourceFile, batch_rows: int
) -> Iterator[pl.DataFrame]:
    file = fragment.file
    assert file.format != "text"
    with open_table(file.path, file.size, file.format) as table:
        schema = table.schema
        names = schema.names()
        exprs = []
        for role, column in layout.columns().items():
            if isinstance(column, int) and column < len(names):
                exprs.append(pl.col(names[column]).alias(role))
            elif column in schema:
                exprs.append(pl.col(str(column)).alias(role))
            else:
                exprs.append(pl.lit(from_partition(column, names, shown)).alias(role))
        # Columns that are the same in all rows have no name in the file.
        read = sorted({name for expr in exprs for name in expr.meta.root_names()})
        stop = fragment.stop
        # Bytes say nothing of rows: equal values take none.
        if stop < 0:
            stop = fragment.rows if fragment.rows >= 0 else table.rows
        for frame in table.read(read, fragment.start, stop, batch_rows):
            yield frame.select(exprs)
