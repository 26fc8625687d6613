"""Sources: from what the user names to an ordered list of files, and pieces of files that a task can read.

Order and pieces depend on the inputs alone, never on the number of workers.
"""

from __future__ import annotations

import glob
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import polars as pl

from toffee_dist.errors import InputError
from toffee_dist.remote import RemotePath
from toffee_dist.store import place, storage_failed

Format = Literal["parquet", "ipc", "text"]
Codec = Literal["", "gzip", "zstd"]

# What one task reads: seconds of work, and rows that fit in memory many times over.
TABLE_BYTES = 32 << 20
TEXT_BYTES = 128 << 20
FILES_A_TASK = 1000

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
    def layout(self) -> str:
        """Files with the same key are taken to have the same columns and separator."""
        stem, extension = os.path.splitext(self.path.lower())
        return os.path.splitext(stem)[1] if extension in _CODECS else extension


@dataclass(frozen=True)
class Fragment:
    """A piece of a file: bytes [start, stop) of text, rows [start, stop) of a table; stop -1 is the end."""

    index: int
    file: SourceFile
    start: int = 0
    stop: int = -1

    @property
    def bytes(self) -> int:
        """Roughly how much there is to read, as if it were not compressed."""
        if self.file.format == "text":
            size = self.stop - self.start if self.stop >= 0 else self.file.size
            return size * (4 if self.file.codec else 1)
        # Tables are split evenly: every piece is about a task's worth.
        return self.file.size if self.stop < 0 else TABLE_BYTES


def find_files(inputs: Sequence[str]) -> tuple[list[SourceFile], list[str]]:
    """List the files behind the inputs, in the order given and by name inside a folder or glob.

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
    files: dict[str, SourceFile] = {}
    repeated = hidden = 0
    for text in inputs:
        found = 0
        for path, size, stamp in _expand(text):
            if size < 0:
                hidden += 1
                continue
            found += 1
            repeated += path in files
            if path not in files:
                files[path] = _describe(path, size, stamp)
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


def list_fragments(files: Sequence[SourceFile]) -> list[Fragment]:
    """Cut large local files into pieces; small, compressed and remote ones stay whole."""
    fragments: list[Fragment] = []
    for file in files:
        limit = TEXT_BYTES if file.format == "text" else TABLE_BYTES
        whole = file.remote or file.codec or file.size <= 2 * limit
        if whole:
            fragments.append(Fragment(len(fragments), file))
            continue
        total = file.size if file.format == "text" else count_table_rows(file)
        pieces = -(-file.size // limit)
        bounds = [total * piece // pieces for piece in range(pieces + 1)]
        for start, stop in pairwise(bounds):
            fragments.append(Fragment(len(fragments), file, start, stop))
    return fragments


def group_fragments(fragments: Sequence[Fragment]) -> Iterator[list[Fragment]]:
    """Gather neighbours into the work of one task: a bounded number of bytes and of files."""
    group: list[Fragment] = []
    load = 0.0
    for fragment in fragments:
        share = fragment.bytes / (TEXT_BYTES if fragment.file.format == "text" else TABLE_BYTES)
        if group and (load + share > 1.25 or len(group) == FILES_A_TASK):
            yield group
            group, load = [], 0.0
        group.append(fragment)
        load += share
    if group:
        yield group


def fingerprint(files: Sequence[SourceFile]) -> str:
    """Return a digest of which files were read, in which order, and of which size and age."""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.path}\0{file.size}\0{file.stamp}\n".encode())
    return digest.hexdigest()


def count_table_rows(file: SourceFile) -> int:
    """Return the number of rows that the footer of a local table claims."""
    try:
        return int(scan_table(file.format, file.path).select(pl.len()).collect().item())
    except (pl.exceptions.PolarsError, OSError) as error:
        raise unreadable(file, error) from None


def scan_table(format: Format, path: str) -> pl.LazyFrame:
    """Open a local Parquet or Arrow file without reading it."""
    # Names with * or [ are names here: globs were expanded before.
    if format == "parquet":
        return pl.scan_parquet(path, glob=False, hive_partitioning=False)
    return pl.scan_ipc(path, hive_partitioning=False)


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
        with place(path).open("rb") as handle:
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
