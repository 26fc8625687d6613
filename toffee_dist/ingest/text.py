"""Text: whole lines out of files of any length, compressed or not, and columns out of lines."""

from __future__ import annotations

import csv
import gzip
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import IO, cast

import polars as pl
import zstandard

from toffee_dist.errors import InputError
from toffee_dist.ingest.files import Fragment, SourceFile, naming
from toffee_dist.limits import Limits
from toffee_dist.storage.files import fetched
from toffee_dist.storage.paths import HEAD_BYTES, Ranges, RemotePath, to_path

LONGEST_LINE = 8 << 20

Column = str | int
"""A column by name, or by position from 0."""


@dataclass(frozen=True)
class Layout:
    """Where the four columns are in files of one kind.

    Parameters
    ----------
    source, target, time, weight
        Columns by name or position; weight None where it is not read.
    header
        Text: whether the first line names the columns.
    separator
        Text: one character; a space stands for any run of spaces and tabs. Empty for tables.
    """

    source: Column
    target: Column
    time: Column
    weight: Column | None = None
    header: bool = False
    separator: str = ""

    def columns(self) -> dict[str, Column]:
        """Return the columns to read, by role."""
        found: dict[str, Column] = {"source": self.source, "target": self.target, "time": self.time}
        return found if self.weight is None else {**found, "weight": self.weight}


@dataclass(frozen=True)
class Cut:
    """How lines become columns: (role, position) pairs, or (role, value) where a folder's name says it."""

    separator: str
    columns: tuple[tuple[str, int | str], ...]


_MARK = b"\xef\xbb\xbf"
_COMMENT = (b"#", b"%")
_SPACE = re.compile(rb"[ \t\r\n]*")
_SPACES = bytes.maketrans(b"\t", b" ")
# One match for a run of blank lines: a list of 40 million matches takes gigabytes.
_BLANK = re.compile(rb"(?m)^[ \t\n]*\n")


@contextmanager
def local_file(file: SourceFile) -> Iterator[SourceFile]:
    """Give a file that can be read in pieces: fetched for the time of the block, where it must be."""
    if not file.fetched:
        yield file
        return
    with fetched(to_path(file.path)) as path:
        yield replace(file, path=str(path))


def read_head(file: SourceFile, limits: Limits) -> tuple[list[bytes], int]:
    """Return the first whole lines of a text file after its comments, and how many of those there are."""
    with naming(file), local_file(file) as local, _open(local) as handle:
        head, _, comments = _find_start(handle, file, limits)
        rest = handle.read(1)
    if rest and b"\n" not in head and b"\r" not in head:
        raise _long_line(file, limits.head_bytes)
    lines = head.splitlines()
    if rest and len(lines) > 1:
        lines = lines[:-1]
    return [line for line in lines if line.strip()], comments


def split_lines(lines: list[bytes], separator: str, file: SourceFile) -> list[list[str]]:
    """Return the fields of some lines, for a look at them; quoted fields may go over several lines."""
    text = [line.decode("utf-8", "replace") for line in lines]
    if separator == " ":
        return [line.split() for line in text]
    try:
        rows = list(csv.reader([f"{line}\n" for line in text], delimiter=separator))
    except csv.Error:
        raise _long_line(file, csv.field_size_limit()) from None
    return [[field.strip(" \t") for field in row] for row in rows if row]


def read_lines(
    fragment: Fragment, layout: Layout, shown: SourceFile, limits: Limits
) -> Iterator[tuple[bytes, Cut, int]]:
    """Yield blocks of whole lines without header and comments, how to cut them, and the comments before."""
    file = fragment.file
    with _open(file) as handle:
        # Blank lines, comments and an 0xFEFF mark come off; the header is the first line that stays.
        head, begin, comments = _find_start(handle, shown, limits)
        names: list[str] = []
        if layout.header and head.strip():
            line = head.split(b"\n", 1)[0]
            if len(line) >= limits.head_bytes:
                raise _long_line(shown, limits.head_bytes)
            names = split_lines([line.strip(b"\r")], layout.separator, shown)[0]
            begin += min(len(line) + 1, len(head))
            head = head[len(line) + 1 :]
        positions = ((role, _position(col, names, shown)) for role, col in layout.columns().items())
        cut = Cut(layout.separator, tuple(positions))
        comments_here = comments if fragment.start == 0 else 0
        limit = -1
        if fragment.start <= begin:
            pending = head
            if fragment.stop >= 0:
                limit = max(fragment.stop - begin, 0)
        else:
            # The line that the piece starts in belongs to the piece before.
            handle.seek(fragment.start - 1)
            skipped = handle.readline(LONGEST_LINE)
            if not skipped.endswith(b"\n") and len(skipped) == LONGEST_LINE:
                raise _long_line(shown)
            pending, limit = b"", max(fragment.stop - fragment.start - len(skipped) + 1, 0)
        size = limits.text_block_bytes
        for block in _blocks(handle, pending, limit, shown, size):
            # Whether rows could be cut in two: where a file comes in pieces, or in more than one block.
            cuttable = fragment.stop >= 0 or len(block) > size // 2
            if cuttable and layout.separator != " ":
                _refuse_cut_rows(block, shown, size)
            lines = _tidy(block, layout.separator, shown)
            if lines:
                yield lines, cut, comments_here
                comments_here = 0
        if comments_here:
            yield b"", cut, comments_here


def _blocks(handle: IO[bytes], pending: bytes, limit: int, shown: SourceFile, size: int) -> Iterator[bytes]:
    """Yield blocks of whole lines; where limit ≥ 0, only lines that start within so many bytes."""
    while limit != 0:
        # Of a piece, no more than its last line needs.
        read = handle.read(min(size, max(limit - len(pending), HEAD_BYTES)) if limit > 0 else size)
        data = pending + read
        if not data:
            return
        if 0 < limit <= len(data):
            end = data.find(b"\n", limit - 1) + 1
            if end or not read:
                yield data[:end] if end else data
                return
        elif not read:
            yield data
            return
        end = data.rfind(b"\n") + 1
        pending = data[end:]
        if len(pending) > LONGEST_LINE:
            raise _long_line(shown)
        if end:
            yield data[:end]
            limit -= end if limit > 0 else 0


def _refuse_cut_rows(block: bytes, shown: SourceFile, size: int) -> None:
    """Raise where a quoted value goes over a line break: its row may be in two blocks."""
    if b'"' not in block:
        return
    block = block.replace(b"\r", b"\n")
    at = block.find(b'"')
    while at >= 0:
        end = block.find(b"\n", at)
        end = len(block) if end < 0 else end
        if block.count(b'"', at, end) % 2:
            raise _quoted_break(shown, size)
        at = block.find(b'"', end)


def _quoted_break(shown: SourceFile, size: int) -> InputError:
    return InputError(
        f"a quoted line break in {shown.path}",
        got="a line with an odd number of quotes in a file that is read in blocks",
        allowed=f"one row per line in text files above {size >> 21} MiB",
        remedy="Convert the file to Parquet first.",
    )


def _tidy(block: bytes, separator: str, shown: SourceFile) -> bytes:
    """Give lines one kind of ending, one space between fields, and no blank ones among them."""
    _check_text(block, shown)
    if b"\r" in block:
        block = block.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    if separator == " ":
        if b"\t" in block or b"  " in block or b"\n " in block or b" \n" in block or block[:1] == b" ":
            block = _squeeze(block.translate(_SPACES), b" ")
            block = block.replace(b" \n", b"\n").replace(b"\n ", b"\n").strip(b" ")
    if b'"' in block and separator != " ":
        block = block.strip(b"\n")  # A blank line further inside may be part of a quoted value.
    elif block[:1] in b"\n \t" or b"\n\n" in block or b"\n " in block or b"\n\t" in block:
        block = _squeeze(block + b"\n", b"\n")
        if b"\n " in block or b"\n\t" in block or block[:1] in b" \t":
            block = _BLANK.sub(b"", block)
        block = block.lstrip(b"\n")
    return block if not block or block.endswith(b"\n") else block + b"\n"


def _squeeze(block: bytes, letter: bytes) -> bytes:
    """Make one of every run of a letter, in as many passes as the longest run has binary digits."""
    while letter + letter in block:
        block = block.replace(letter + letter, letter)
    return block


def cut_lines(lines: bytes, cut: Cut) -> pl.DataFrame:
    """Cut tidy lines into the wanted columns, all strings; a field that is not there is null."""
    # A first line of our own fixes the number of columns, whatever the first row looks like.
    width = max([at for _, at in cut.columns if isinstance(at, int)], default=0) + 1
    names = [f"c{position}" for position in range(width)]
    frame = pl.read_csv(
        io.BytesIO(cut.separator.join(names).encode() + b"\n" + lines),
        separator=cut.separator,
        quote_char=None if cut.separator == " " else '"',
        infer_schema=False,
        truncate_ragged_lines=True,
    )
    return frame.select(
        (pl.col(f"c{at}").str.strip_chars(" \t") if isinstance(at, int) else pl.lit(at)).alias(role)
        for role, at in cut.columns
    )


def _position(column: Column, names: list[str], shown: SourceFile) -> int | str:
    if isinstance(column, int):
        return column
    if column in names:
        return names.index(column)
    return from_partition(column, names, shown)


def from_partition(column: Column, names: list[str], shown: SourceFile) -> str:
    """Return the value of a column that is not in the file but in the name of a folder above it."""
    values = dict(shown.partition)
    if isinstance(column, str) and column in values:
        return values[column]
    raise InputError(
        f"{shown.path} has no such column",
        got=column + 1 if isinstance(column, int) else column,
        allowed=", ".join([*names, *values]) or "columns by position",
        remedy="Name the columns with --source, --target, --time and --weight; all files must have them.",
    )


def _open(file: SourceFile) -> IO[bytes]:
    if file.codec == "gzip":
        return cast(IO[bytes], gzip.open(file.path, "rb"))
    if file.remote:
        return io.BufferedReader(Ranges(RemotePath(file.path), file.size), HEAD_BYTES)
    handle = open(file.path, "rb")
    if file.codec == "zstd":
        stream = zstandard.ZstdDecompressor().stream_reader(handle, read_across_frames=True, closefd=True)
        return io.BufferedReader(stream, 1 << 20)
    return handle


def _find_start(handle: IO[bytes], shown: SourceFile, limits: Limits) -> tuple[bytes, int, int]:
    """Read up to the first line that is neither blank nor starts with # or %, however far that is.

    Returns
    -------
    head, begin, comments
        The text from that line on, of at most `Limits.head_bytes`; where it begins in the file; and how many
        comments there are before it.
    """
    head, begin, comments = handle.read(limits.head_bytes), 0, 0
    if head.startswith(_MARK):
        head, begin = head[len(_MARK) :] + handle.read(len(_MARK)), len(_MARK)
    while True:
        _check_text(head, shown)
        start, found = _skip_comments(head)
        head, begin, comments = head[start:], begin + start, comments + found
        more = handle.read(limits.head_bytes - len(head)) if start else b""
        if not more:
            break
        head += more
    if head[:1] in _COMMENT:
        if len(head) >= limits.head_bytes:
            raise _long_line(shown, limits.head_bytes)
        head, begin, comments = b"", begin + len(head), comments + 1
    return head, begin, comments


def _skip_comments(head: bytes) -> tuple[int, int]:
    """Return where the first line is that is neither blank nor a whole comment; and the comments before."""
    start, comments = 0, 0
    while True:
        match = _SPACE.match(head, start)
        content = match.end() if match else start
        start = max(start, head.rfind(b"\n", start, content) + 1, head.rfind(b"\r", start, content) + 1)
        end = head.find(b"\n", start)
        if head[start : start + 1] not in _COMMENT or end < 0:
            return start, comments
        start, comments = end + 1, comments + 1


def _check_text(data: bytes, file: SourceFile) -> bytes:
    if b"\0" in data:
        raise InputError(
            f"{file.path} is not a text file",
            got="bytes that no text holds",
            allowed="Parquet, Arrow IPC, or UTF-8 text, also as .gz or .zst",
            remedy="Leave it out, or give it the extension of what it is.",
        )
    return data


def _long_line(file: SourceFile, limit: int = LONGEST_LINE) -> InputError:
    return InputError(
        f"a line of {file.path} is too long",
        got=f"more than {limit >> 10:,} KiB without a line break",
        allowed="one edge a line",
        remedy="Is this really a text file of edges?",
    )
