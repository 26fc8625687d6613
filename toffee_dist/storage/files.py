"""Files: how one appears whole or not at all, on local storage or a store; .npy and JSON; whole folders."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import re
import shutil
import stat
import uuid
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, Self, cast

import numpy as np
from numpy.typing import DTypeLike, NDArray

from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.storage.disk import disk, drop_cache
from toffee_dist.storage.paths import RANGE_BYTES, Ranges, as_remote

# Bytes of a JSON file of ours; the largest have a name per input file or a number per step.
MAX_JSON_BYTES = 64 << 20

# Bytes of a file that are read at once for its checksum.
SEAL_BYTES = 1 << 22
# What an output folder that cannot be one says; anything else is storage that fails just now.
_NOT_A_PLACE = {
    errno.EACCES,
    errno.EEXIST,
    errno.EINVAL,
    errno.EISDIR,
    errno.ELOOP,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOTDIR,
    errno.EPERM,
    errno.EROFS,
}


@contextmanager
def replacing(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Give a local name to write to; on success the file appears at `path`, on failure nothing does.

    Parameters
    ----------
    path
        The file.
    durable
        Whether the file survives a power cut from then on. Not needed for what is only there until an ingest
        is complete, and for what has a checksum that tells whether it is whole.
    """
    there = as_remote(path)
    if there is not None:
        with TemporaryDirectory(prefix="toffee-") as folder:
            temporary = Path(folder) / path.name
            yield temporary
            disk().upload(there, temporary)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        if durable:
            disk().sync(temporary)
        disk().replace(temporary, path)
        if durable:
            disk().sync_folder(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def fetched(path: Path) -> Iterator[Path]:
    """Give a local name to read from: the file itself, or a copy for the time of the block."""
    there = as_remote(path)
    if there is None:
        yield path
        return
    with TemporaryDirectory(prefix="toffee-") as folder:
        copy = Path(folder) / path.name
        there.download(copy)
        yield copy


class ArrayWriter:
    """Rows that are appended to a new local .npy file, whose shape is known before them.

    Parameters
    ----------
    path
        The file.
    dtype, shape
        Of the whole array.
    """

    def __init__(self, path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
        self.dtype, self.shape, self._file = np.dtype(dtype), shape, open(path, "wb")
        # Version 1.0, whose header the range readers parse; rows in C order.
        header = {"descr": np.lib.format.dtype_to_descr(self.dtype), "fortran_order": False, "shape": shape}
        start = io.BytesIO()
        np.lib.format.write_array_header_1_0(start, header)
        self._file.write(start.getvalue())
        self.crc32 = zlib.crc32(start.getvalue())
        self.total_bytes = self._file.tell() + self.dtype.itemsize * math.prod(shape)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        written = self._file.tell()
        self._file.close()
        if kind is None and written != self.total_bytes:
            raise ValueError(f"{written:,} of {self.total_bytes:,} bytes of {self._file.name} were written")

    def append(self, rows: NDArray[Any]) -> None:
        """Write the next rows, as the type of the array."""
        data = np.ascontiguousarray(rows, dtype=self.dtype).reshape(-1).view(np.uint8).data
        self.crc32 = zlib.crc32(data, self.crc32)
        self._file.write(data)

    def fill_zeros(self) -> None:
        """Give the file its full size; what was not appended is zeros, and takes no space where it can."""
        self._file.truncate(self.total_bytes)
        self._file.seek(self.total_bytes)


def create_array(path: Path, dtype: DTypeLike, shape: tuple[int, ...]) -> None:
    """Make a local .npy file of zeros at its full size, for memory maps that fill it."""
    with ArrayWriter(path, dtype, shape) as writer:
        writer.fill_zeros()


class FileSeal(NamedTuple):
    """What tells whether a file is whole: its bytes, and the CRC-32 of all of them."""

    bytes: int
    crc32: int


def save_array(path: Path, array: NDArray[Any], *, durable: bool = True) -> FileSeal:
    """Write an array as .npy, whole or not at all; see `replacing`."""
    array = np.ascontiguousarray(array)
    with replacing(path, durable=durable) as temporary:
        with ArrayWriter(temporary, array.dtype, array.shape) as writer:
            writer.append(array)
        return FileSeal(writer.total_bytes, writer.crc32)


def seal_file(path: Path) -> FileSeal:
    """Return the seal of a file, from what is on the disk and not in the system's cache of it."""
    with fetched(path) as local:
        drop_cache(local)
        crc32 = size = 0
        with open(local, "rb") as file:
            while piece := file.read(SEAL_BYTES):
                crc32, size = zlib.crc32(piece, crc32), size + len(piece)
    return FileSeal(size, crc32)


def is_whole(path: Path, seal: FileSeal) -> bool:
    """Whether a file is there, as it was when it was sealed."""
    try:
        return path.stat().st_size == seal.bytes and seal_file(path) == seal
    except OSError:
        return False


def read_array(path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return rows [start, stop) of a .npy file, reading nothing else.

    Raises
    ------
    OSError, ValueError
        Where there is no such file, or it is not whole.
    """
    there = as_remote(path)
    with open(path, "rb") if there is None else Ranges(there) as file:
        shape, dtype = _read_header(file)
        row_bytes = dtype.itemsize * math.prod(shape[1:])
        stop = shape[0] if stop is None else stop
        if not 0 <= start <= stop <= shape[0]:
            raise ValueError(f"rows {start} to {stop} of {shape[0]}")
        # A damaged header may ask for any memory; the file says how much there can be. A store is asked only
        # where that would be much: it is one more request.
        if there is None or (stop - start) * row_bytes > RANGE_BYTES:
            _check_size(file.tell() + shape[0] * row_bytes, path.stat().st_size)
        rows = np.empty((stop - start, *shape[1:]), dtype)
        file.seek(start * row_bytes, os.SEEK_CUR)
        found = file.readinto(rows.reshape(-1).view(np.uint8)) if rows.nbytes else 0  # type: ignore[arg-type]
        if found != rows.nbytes:
            raise ValueError(f"{rows.nbytes - (found or 0)} bytes are missing")
        return rows


def map_array(path: Path) -> NDArray[Any]:
    """Return a .npy file as a memory map where storage is local, else what was read.

    Raises
    ------
    OSError, ValueError
        Where there is no such file, or it is not whole.
    """
    if as_remote(path) is not None:
        return read_array(path)
    shape, dtype, start = _find_numbers(path)
    # There is nothing to map of nothing.
    return (
        np.asarray(np.memmap(path, dtype, "r", start, shape)) if math.prod(shape) else np.empty(shape, dtype)
    )


def map_to_fill(path: Path) -> np.memmap[Any, np.dtype[Any]]:
    """Return a local .npy file that is not empty as a memory map that can be written to."""
    shape, dtype, start = _find_numbers(path)
    return np.memmap(path, dtype, "r+", start, shape)


def _find_numbers(path: Path) -> tuple[tuple[int, ...], np.dtype[Any], int]:
    """Return shape and type of a local .npy file, which must be whole, and where its numbers begin."""
    with open(path, "rb") as file:
        shape, dtype = _read_header(file)
        start = file.tell()
        _check_size(start + dtype.itemsize * math.prod(shape), os.fstat(file.fileno()).st_size)
    return shape, dtype, start


def _check_size(wanted: int, found: int) -> None:
    if wanted != found:
        raise ValueError(f"{abs(wanted - found)} bytes {'are missing' if wanted > found else 'too many'}")


def count_rows(path: Path) -> int:
    """Return how many rows a .npy file says it has.

    Raises
    ------
    OSError, ValueError
        Where there is no such file.
    """
    there = as_remote(path)
    with open(path, "rb") if there is None else Ranges(there) as file:
        shape, _ = _read_header(file)
        return shape[0]


# What NumPy writes before the numbers of an array in rows, version 1.0; nothing else is ours. Matched and not
# evaluated: anybody may have written it, and Python 3.11's parser fails at times when two threads use it.
_MAGIC = b"\x93NUMPY\x01\x00"
_HEADER = re.compile(
    rb"\{'descr': '([<>|][biufc]\d{1,2})', 'fortran_order': False, "
    rb"'shape': \((\d{1,18}(?:, \d{1,18})*),?\), \} *\n"
)


def _read_header(file: Any) -> tuple[tuple[int, ...], np.dtype[Any]]:
    """Return shape and type of a .npy file of ours, and stay where its numbers begin."""
    start = file.read(len(_MAGIC) + 2)
    text = file.read(int.from_bytes(start[len(_MAGIC) :], "little")) if start.startswith(_MAGIC) else start
    found = _HEADER.fullmatch(text)
    try:
        if found is None:
            raise TypeError(repr(text[:100]))
        return tuple(int(length) for length in found[2].split(b",")), np.dtype(found[1].decode())
    except TypeError as error:
        raise ValueError(f"not a .npy file of ours: {error}") from None


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole, and on storage before this returns."""
    text = json.dumps(data, indent=1) + "\n"
    there = as_remote(path)
    if there is not None:
        disk().put(there, text.encode())
        return
    with replacing(path) as temporary:
        temporary.write_text(text)


def read_text(path: Path, limit: int = MAX_JSON_BYTES) -> str:
    """Return a file of text; one that is larger, endless or no file is refused before it is read.

    Raises
    ------
    OSError, ValueError
        Where it cannot be read.
    """
    status = path.stat()
    if as_remote(path) is None and not stat.S_ISREG(status.st_mode):
        raise ValueError("not a regular file")
    if status.st_size > limit:
        raise ValueError(f"{status.st_size:,} bytes, more than {limit:,}")
    return path.read_text(encoding="utf-8")


def read_json(path: Path) -> Any:
    """Read JSON, or say what is wrong with the file."""
    try:
        return json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise InputError(
            f"cannot read {path}",
            got=f"{type(error).__name__}: {error}",
            allowed="a JSON file of ours",
            remedy="If it is damaged, use another run: toffee runs lists them.",
        ) from None


def storage_failed(error: OSError) -> UnfinishedError:
    """Return what is said of storage that fails after every retry."""
    return UnfinishedError(
        "storage failed",
        got=f"{error.strerror or error}: {error.filename or 'no file'}",
        remedy="Fix it, then try again; a run that had begun is finished by toffee resume.",
    )


def create_file(path: Path, data: bytes) -> None:
    """Write a file that must not be there yet, else raise FileExistsError; of two at once, one may."""
    there = as_remote(path)
    if there is not None:
        disk().put_new(there, data)
    else:
        disk().create(path, data)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file of text. Only one may do so at a time: a store replaces the whole file."""
    there = as_remote(path)
    if there is None:
        disk().append(path, f"{line}\n".encode())
    else:
        disk().put(there, ((path.read_text() if path.exists() else "") + line + "\n").encode())


def remove_file(path: Path) -> None:
    """Remove a file; one that is not there is no error."""
    disk().remove(path)


def list_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted, without links; none where there is no such folder."""
    there = as_remote(path)
    if there is not None:
        return [cast(Path, found) for found, kind in there.list() if kind == "directory"]
    return sorted(found for found in path.glob("*") if found.is_dir() and not found.is_symlink())


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, as far as that goes; of a link, the link alone."""
    there = as_remote(path)
    if there is None:
        if path.is_symlink():
            with suppress(OSError):
                disk().remove(path)
        else:
            disk().remove_tree(path)
    else:
        disk().remove_remote(there)


def passes_link(root: Path, path: Path) -> bool:
    """Whether a folder on the way from `root` to `path` is a link, which may lead anywhere."""
    if as_remote(path) is not None:
        return False
    between = path.relative_to(root).parents[:-1]
    return any((root / folder).is_symlink() for folder in between)


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder; what is in the target and has another name stays."""
    there, to = as_remote(source), as_remote(target)
    if there is not None and to is not None:
        for name in there.sizes():
            disk().copy(there / name, to / name)
        return
    for file in sorted(path for path in source.rglob("*") if path.is_file()):
        place = target / file.relative_to(source).as_posix()
        place.parent.mkdir(parents=True, exist_ok=True)
        with fetched(file) as local, replacing(place) as temporary:
            shutil.copyfile(local, temporary)


def move_tree(source: Path, target: Path) -> None:
    """Move a local folder to where there is none yet, durably: at once, or to a store, file by file."""
    if as_remote(target) is None:
        disk().move(source, target)
        disk().sync_folder(target.parent)
    else:
        copy_tree(source, target)


def sync_folders(path: Path, without: str = "") -> None:
    """Bring the names of a folder to the disk: its own, those above it that may be new, and those in it.

    Parameters
    ----------
    path
        A folder of OUT/runs; a store has none, and nothing is done there.
    without
        Name of a folder in it that does not matter.
    """
    if as_remote(path) is not None:
        return
    inner = [folder for folder in sorted(path.rglob("*")) if folder.is_dir()]
    for folder in (path.parent.parent, path.parent, path, *inner):
        if not (without and without in folder.relative_to(path.parent.parent).parts[2:3]):
            disk().sync_folder(folder)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where storage has no such thing."""
    there, to = as_remote(source), as_remote(target)
    if there is not None and to is not None:
        disk().copy(there, to)
        return
    with replacing(target) as temporary:
        try:
            os.link(source, temporary)
        except OSError:
            shutil.copyfile(source, temporary)


@contextmanager
def scratch(parent: Path, prefix: str, mode: int = 0o777) -> Iterator[Path]:
    """Give a folder that is gone afterwards."""
    folder = parent / f"{prefix}{uuid.uuid4().hex[:12]}"
    folder.mkdir(mode=mode)
    try:
        yield folder
    finally:
        remove_tree(folder)


def check_writable(out: Path) -> None:
    """Make a folder where there is none, and raise where we may not write to it.

    Raises
    ------
    ConfigError
        Where it cannot be a folder of ours, with nothing written.
    UnfinishedError
        Where storage fails, and may not the next time.
    """
    probe = out / f".toffee-{uuid.uuid4().hex[:12]}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        if error.errno not in _NOT_A_PLACE:
            raise storage_failed(error) from None
        raise ConfigError(
            "output folder",
            got=f"{out}: {error.strerror}",
            allowed="a folder or bucket that is there and can be written",
            remedy="Choose another --out, or see to the permissions.",
        ) from None


def check_parent(path: Path, option: str) -> None:
    """Raise unless a local file could be made there: its folder must exist.

    Raises
    ------
    ConfigError
        With nothing written.
    """
    if as_remote(path) is not None:
        return
    folder = path.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise ConfigError(
            option,
            got=f"{path}, whose folder {'cannot be written' if folder.is_dir() else 'does not exist'}",
            allowed="a path in a folder that exists and can be written",
            remedy=f"Make it first: mkdir -p {folder}",
        )
