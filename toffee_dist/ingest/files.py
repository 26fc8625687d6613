"""Sources: from what the user names to an ordered list of files, and pieces of files that a task can read.

Order and pieces depend on the inputs alone, never on the number of workers.
"""

from __future__ import annotations

import glob
import hashlib
import os
import struct
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.limits import Limits
from toffee_dist.storage.files import storage_failed
from toffee_dist.storage.parquet import read_batches, read_schema, to_polars
from toffee_dist.storage.paths import RemotePath, to_path

Format = Literal["parquet", "ipc", "text"]
Codec = Literal["", "gzip", "zstd"]

_EXTENSIONS: dict[str, Format] = {
    ".parquet": "parquet",
    ".pq": "parquet",
    ".parq": "parquet",
    ".arrow": "ipc",
    ".ipc": "ipc",
    ".feather": "ipc",
    ".csv": "text",
    ".tsv": "text",
    ".txt": "text",
    ".edges": "text",
}
# Rows of one table; a footer that claims more is damaged, and would be cut into more tasks than memory holds.
MOST_ROWS = 1 << 36
# Bytes that one record batch of Arrow may become, and how many times those of its file, where that is more.
BOMB_BYTES, BOMB_RATIO = 256 << 20, 100
_CODECS: dict[str, Codec] = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True)
class SourceFile:
    """One file of edges.

    Parameters
    ----------
    path
        A local path or a URL, as the user would recognise it.
    size, stamp
        Bytes, and when or as which version it was written; both go in the fingerprint.
    format, codec
        How to read it.
    partition
        The key=value folders above it (hive partitions), usable as columns.
    """

    path: str
    size: int
    stamp: str
    format: Format
    codec: Codec
    partition: tuple[tuple[str, str], ...]

    @property
    def remote(self) -> bool:
        """Whether the file is behind a URL."""
        return "://" in self.path

    @property
    def layout(self) -> str:
        """Files with the same key are taken to have the same columns and separator."""
        stem, extension = os.path.splitext(self.path.lower())
        return os.path.splitext(stem)[1] if extension in _CODECS else extension


@dataclass(frozen=True)
class Fragment:
    """A piece of a file: bytes [start, stop) of text, rows [start, stop) of a table; stop -1 is the end.

    Of a whole table, `rows` is what its footer claims; -1 where nobody has looked.
    """

    index: int
    file: SourceFile
    start: int = 0
    stop: int = -1
    rows: int = -1

    def share(self, limits: Limits) -> float:
        """Return roughly how much of one task's reading it is; compressed text grows fourfold."""
        if self.file.format == "text":
            size = self.stop - self.start if self.stop >= 0 else self.file.size
            return size * (4 if self.file.codec else 1) / limits.text_bytes
        # Tables are split evenly: every piece is about a task's worth.
        return self.file.size / limits.table_bytes if self.stop < 0 else 1.0


class Listed(NamedTuple):
    """A file as a listing has it: nothing of it was read."""

    path: str
    size: int
    stamp: str


def find_files(inputs: Sequence[str]) -> tuple[list[SourceFile], list[str]]:
    """List the files behind the inputs and how to read them, which the first bytes of some say.

    Parameters and errors are those of `list_files`.

    Returns
    -------
    files, notes
        The notes say what was left out and why.
    """
    found, notes = list_files(inputs)
    return [_describe(*file) for file in found], notes


def list_files(inputs: Sequence[str]) -> tuple[list[Listed], list[str]]:
    """List the files behind the inputs, in the order given and by name inside a folder or glob; read none.

    Parameters
    ----------
    inputs
        Paths, folders (read recursively; names that start with . or _ are not data), globs or fsspec URLs.

    Returns
    -------
    files, notes
        The notes say what was left out and why.

    Raises
    ------
    InputError
        Where an input matches nothing or holds no file.
    """
    if not inputs:
        raise ConfigError("inputs", got="none", allowed="at least one file, folder, glob or URL")
    files: dict[str, Listed] = {}
    repeated = hidden = 0
    for text in inputs:
        found = 0
        for path, size, stamp in _expand(text):
            if size < 0:
                hidden += 1
                continue
            found += 1
            repeated += path in files
            files.setdefault(path, Listed(path, size, stamp))
        if not found:
            raise InputError(
                "no file to read",
                got=text,
                allowed="a file, a folder or glob that holds files, or an fsspec URL",
                remedy="Check the path; files whose names start with . or _ are not read.",
            )
    notes = [f"{repeated} files were named twice and are read once"] if repeated else []
    notes += [f"{hidden} files whose names start with . or _ are not read"] if hidden else []
    return list(files.values()), notes


def list_fragments(files: Sequence[SourceFile], limits: Limits) -> list[Fragment]:
    """Cut large local files into pieces; small, compressed and remote ones stay whole.

    Tables are large by their bytes or by their rows: a kilobyte of Parquet can hold 60 million equal rows.
    """
    fragments: list[Fragment] = []
    for file in files:
        if file.format == "text":
            total, pieces = file.size, _pieces(file.size, limits.text_bytes)
        elif not file.remote:
            total = count_table_rows(file)
            pieces = max(_pieces(file.size, limits.table_bytes), _pieces(total, limits.task_rows))
        if file.remote or file.codec or pieces == 1:
            rows = -1 if file.remote or file.format == "text" else total
            fragments.append(Fragment(len(fragments), file, rows=rows))
            continue
        bounds = [total * piece // pieces for piece in range(pieces + 1)]
        for start, stop in pairwise(bounds):
            fragments.append(Fragment(len(fragments), file, start, stop))
    return fragments


def _pieces(size: int, limit: int) -> int:
    """Return into how many pieces of about `limit` something is cut; up to twice that is one."""
    return 1 if size <= 2 * limit else -(-size // limit)


def group_fragments(fragments: Sequence[Fragment], limits: Limits) -> Iterator[list[Fragment]]:
    """Gather neighbours into the work of one task: a bounded number of bytes and of files."""
    group: list[Fragment] = []
    load = 0.0
    for fragment in fragments:
        share = fragment.share(limits)
        if group and (load + share > 1.25 or len(group) == limits.files_per_task):
            yield group
            group, load = [], 0.0
        group.append(fragment)
        load += share
    if group:
        yield group


def fingerprint(files: Sequence[SourceFile | Listed]) -> str:
    """Return a digest of which files were read, in which order, and of which size and age."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.size}\0{file.stamp}\n".encode())
    return digest.hexdigest()


def count_table_rows(file: SourceFile) -> int:
    """Return the number of rows that the footer of a local table claims."""
    with naming(file):
        if file.format == "parquet":
            # Without polars' plan: this is done for every file, before the first task.
            rows = int(pq.read_metadata(file.path).num_rows)
        else:
            rows = sum(count_batch_rows(file.path))
    if not 0 <= rows <= MOST_ROWS:
        raise unreadable(file, ValueError(f"a footer that claims {rows:,} rows"))
    return rows


def read_table_schema(file: SourceFile) -> pl.Schema:
    """Return the columns of a local table and their types, without reading it."""
    if file.format == "parquet":
        return read_schema(to_path(file.path))
    with open_ipc(file.path) as reader:
        return to_polars(reader.schema.empty_table()).schema


def read_table_rows(
    file: SourceFile, start: int, stop: int, columns: Sequence[pl.Expr], batch_rows: int
) -> Iterator[pl.DataFrame]:
    """Yield some columns of the rows [start, stop) of a local table, at most so many rows at once."""
    # Columns that are the same in all rows have no name in the file.
    names = sorted({name for column in columns for name in column.meta.root_names()})
    if file.format == "parquet":
        frames = read_batches(to_path(file.path), names, start, stop, batch_rows)
    else:
        frames = _read_ipc(file.path, names, start, stop, batch_rows)
    for frame in frames:
        yield frame.select(columns)


def _read_ipc(path: str, names: list[str], start: int, stop: int, batch_rows: int) -> Iterator[pl.DataFrame]:
    at = 0
    counts = count_batch_rows(path)
    with open_ipc(path) as reader:
        for number, rows in enumerate(counts):
            if at < stop and at + rows > start:
                batch = reader.get_batch(number)
                # Offsets and lengths that point elsewhere are refused here, before anything follows them.
                batch.validate(full=True)
                for first in range(max(start - at, 0), min(stop - at, rows), batch_rows):
                    piece = batch.slice(first, min(batch_rows, stop - at - first))
                    yield to_polars(pa.Table.from_batches([piece])).select(names)
            at += rows


@contextmanager
def open_ipc(path: str) -> Iterator[pa.RecordBatchFileReader]:
    """Open a local Arrow file, mapped.

    By pyarrow: a damaged file makes polars panic, which ends a thread of its engine; the next query of the
    same process may then wait for ever.
    """
    options = pa.ipc.IpcReadOptions(use_threads=False)
    with pa.memory_map(path) as source, pa.ipc.open_file(source, options=options) as reader:
        yield reader


def count_batch_rows(path: str) -> list[int]:
    """Return the rows of every record batch of a local Arrow file; nothing is decompressed.

    Raises
    ------
    ArrowInvalid
        Where a small file would take much memory: compressed batches are read whole.
    """
    with open_ipc(path) as reader:
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


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Turn what a damaged file makes the readers raise into an error that names the file."""
    try:
        yield
    except (
        pl.exceptions.PolarsError,
        pa.ArrowException,
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


def unreadable(file: SourceFile, error: BaseException) -> InputError:
    """Turn a reader's complaint into one that names the file."""
    names = {"parquet": "Parquet", "ipc": "Arrow IPC", "text": "text"}
    first = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
    return InputError(
        f"cannot read {file.path} as {names[file.format]}",
        got=first,
        allowed="a complete file of that format",
        remedy="Was it written to the end? Leave it out, or write it again.",
    )


def _expand(text: str) -> Iterator[tuple[str, int, str]]:
    """Yield (path, size, stamp) of the files behind one input; size -1 for a hidden file in a folder."""
    text = text.removeprefix("file://")
    if "://" in text:
        yield from _expand_url(text)
        return
    if os.path.isdir(text):
        for folder, folders, names in os.walk(text):
            folders.sort()
            folders[:] = [name for name in folders if not name.startswith((".", "_"))]
            for name in sorted(names):
                path = os.path.join(folder, name)
                if name.startswith((".", "_")):
                    yield path, -1, ""
                else:
                    yield _stat(path)
    elif os.path.exists(text):
        yield _stat(text)
    else:
        yield from (_stat(path) for path in sorted(glob.glob(text, recursive=True)) if os.path.isfile(path))


def _stat(path: str) -> tuple[str, int, str]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise InputError(
            f"cannot read {path}",
            got=error.strerror,
            allowed="a file that can be read",
            remedy="Check that it exists and that you may read it.",
        ) from None
    return os.path.abspath(path), status.st_size, str(status.st_mtime_ns)


def _expand_url(url: str) -> Iterator[tuple[str, int, str]]:
    there = RemotePath(url)
    fs, path = there.fs, there.key
    try:
        with there.failing():
            if glob.has_magic(path):
                found: dict[str, Any] = fs.glob(path, detail=True)
            elif fs.isdir(path):
                found = fs.find(path, detail=True)
            else:
                found = {path: fs.info(path)} if fs.exists(path) else {}
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(
            f"cannot list {url}",
            got=error.strerror,
            allowed="a URL that can be read",
            remedy="Check the URL and the credentials.",
        ) from None
    except OSError as error:
        raise storage_failed(error) from None
    for name, info in sorted(found.items()):
        if info["type"] == "file":
            is_hidden = os.path.basename(name).startswith((".", "_")) and len(found) > 1
            size = -1 if is_hidden else int(info.get("size") or 0)
            stamps = (
                info.get(key) for key in ("ETag", "etag", "LastModified", "updated", "created", "mtime")
            )
            yield fs.unstrip_protocol(name), size, str(next((stamp for stamp in stamps if stamp), ""))


def _describe(path: str, size: int, stamp: str) -> SourceFile:
    parts = [part.split("=", 1) for part in path.split("/")[:-1] if "=" in part]
    partition = tuple((key, value) for key, value in parts)
    stem, extension = os.path.splitext(path.lower())
    codec: Codec = _CODECS.get(extension, "")
    format = _EXTENSIONS.get(os.path.splitext(stem)[1] if codec else extension)
    if format is None:
        format, codec = _sniff(path, codec)
    if codec and format != "text":
        raise InputError(
            f"{path} is a compressed file of a format that compresses itself",
            got=f"{codec} of {format}",
            allowed=".gz and .zst for text only",
            remedy="Decompress it first.",
        )
    return SourceFile(path, size, stamp, format, codec, partition)


def _sniff(path: str, codec: Codec) -> tuple[Format, Codec]:
    """Recognise a file of unknown extension by its first bytes."""
    try:
        with to_path(path).open("rb") as handle:
            head = handle.read(6)
    except OSError as error:
        raise InputError(
            f"cannot read {path}",
            got=error,
            allowed="a file that can be read",
            remedy="Check the address and the rights to it.",
        ) from None
    if head[:4] == b"PAR1":
        return "parquet", codec
    if head == b"ARROW1":
        return "ipc", codec
    if head[:2] == b"\x1f\x8b":
        return "text", "gzip"
    if head[:4] == b"\x28\xb5\x2f\xfd":
        return "text", "zstd"
    return "text", codec
