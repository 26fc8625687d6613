"""Sources: from what the user names to an ordered list of files, and pieces of files that a task can read.

Order and pieces depend on the inputs alone, never on the number of workers.
"""

from __future__ import annotations

import glob
import hashlib
import os
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import polars as pl
import pyarrow as pa
import zstandard

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest.tables import open_table
from toffee_dist.limits import Limits
from toffee_dist.storage.files import storage_failed
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
    def fetched(self) -> bool:
        """Whether whoever reads it fetches all of it: it is behind a URL, and cannot be read by ranges."""
        return self.remote and (self.format == "ipc" or bool(self.codec))

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
    """Cut large files into pieces; small ones, and those that cannot be read in pieces, stay whole.

    Tables are large by their bytes or by their rows: a kilobyte of Parquet can hold 60 million equal rows.
    """
    fragments: list[Fragment] = []
    for file in files:
        bounds, rows = _cut(file, limits)
        if len(bounds) <= 2:
            fragments.append(Fragment(len(fragments), file, rows=rows))
            continue
        for start, stop in pairwise(bounds):
            fragments.append(Fragment(len(fragments), file, start, stop))
    return fragments


def _cut(file: SourceFile, limits: Limits) -> tuple[list[int], int]:
    """Return where the pieces of a file begin and the last one ends; and its rows, -1 where nobody looked."""
    if file.format == "text":
        pieces = 1 if file.codec else _pieces(file.size, limits.text_bytes)
        return _spread(file.size, pieces), -1
    pieces = _pieces(file.size, limits.table_bytes)
    # One by one, requests for the footers of thousands of small files would take longer than the job.
    if file.fetched or (file.remote and pieces == 1):
        return [], -1
    with naming(file), open_table(file.path, file.size, file.format) as table:
        bounds = _spread(table.rows, max(pieces, _pieces(table.rows, limits.task_rows)))
        if file.remote:
            # A row group is transferred whole: to one task.
            bounds = sorted({table.bounds[bisect_right(table.bounds, row) - 1] for row in bounds})
        return bounds, table.rows


def _spread(total: int, pieces: int) -> list[int]:
    return [total * piece // pieces for piece in range(pieces + 1)]


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


@contextmanager
def naming(file: SourceFile) -> Iterator[None]:
    """Turn what a damaged file makes the readers raise into an error that names the file."""
    try:
        yield
    except OSError as error:
        lost = isinstance(error, FileNotFoundError | PermissionError)
        if file.remote and error.filename == file.path and not lost:
            # The store, not the file.
            raise storage_failed(error) from None
        refuse_changed(file)
        raise unreadable(file, error) from None
    except (
        pl.exceptions.PolarsError,
        pa.ArrowException,
        EOFError,
        zlib.error,
        zstandard.ZstdError,
        UnicodeDecodeError,
    ) as error:
        refuse_changed(file)
        raise unreadable(file, error) from None
    except BaseException as error:
        # A Rust panic is not an Exception; a damaged file must not look like a bug.
        if type(error).__name__ == "PanicException":
            raise unreadable(file, error) from None
        raise


def refuse_changed(file: SourceFile) -> None:
    """Raise where a file behind a URL is not what was listed: ranges of two versions may have been read."""
    if not file.remote:
        return
    there = RemotePath(file.path)
    try:
        with there.failing():
            info = there.fs.info(there.key)
    except (FileNotFoundError, PermissionError) as error:
        raise unreadable(file, error) from None
    except OSError as error:
        raise storage_failed(error) from None
    size, stamp = _size_and_stamp(info)
    # Azure quotes what it says of one object, and not what it lists.
    if (size, stamp.strip('"')) != (file.size, file.stamp.strip('"')):
        raise InputError(
            f"{file.path} changed while it was read",
            got=f"{size:,} bytes, version {stamp or 'unknown'}",
            allowed=f"the file that the job began with: {file.size:,} bytes, version {file.stamp}",
            remedy="Start again when nobody writes to it.",
        )


def _size_and_stamp(info: dict[str, Any]) -> tuple[int, str]:
    """Return the bytes of a file on a store, and which version it is, as far as the store says."""
    keys = ("ETag", "etag", "LastModified", "updated", "created", "mtime")
    stamp = next((info[key] for key in keys if info.get(key)), "")
    # A listing may have the number, and a look at the one file the moment.
    return int(info.get("size") or 0), str(stamp.timestamp() if hasattr(stamp, "timestamp") else stamp)


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
            size, stamp = _size_and_stamp(info)
            yield fs.unstrip_protocol(name), -1 if is_hidden else size, stamp


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
