"""The one seam through which storage is changed: create, append, replace, remove, move, sync, upload.

Everything that is written goes through `disk()`, so that a test can count the changes, fail any one of them,
or keep a log of them and build every state that a power cut could leave (benchmarks/disks.py). Reading and
the making of folders, which lose nothing, do not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toffee_dist.storage.paths import RemotePath


class Disk:
    """Storage as it is. A durable change is on the disk, and not only in its cache, when the call returns."""

    def create(self, path: Path, data: bytes) -> None:
        """Write a file that must not be there yet, else raise FileExistsError; of two at once, one may."""
        with open(path, "xb") as file:
            file.write(data)

    def append(self, path: Path, data: bytes) -> None:
        """Add bytes to the end of a file, durably."""
        with open(path, "ab") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())

    def sync(self, path: Path) -> None:
        """Bring the content of a file to the disk."""
        _sync(path, os.O_RDONLY)

    def sync_folder(self, path: Path) -> None:
        """Bring the names in a folder to the disk."""
        _sync(path, os.O_RDONLY | os.O_DIRECTORY)

    def replace(self, temporary: Path, path: Path) -> None:
        """Give a file another name, at once, in place of what has it."""
        os.replace(temporary, path)

    def move(self, folder: Path, target: Path) -> None:
        """Give a folder another name, at once; there must be nothing of that name."""
        os.rename(folder, target)

    def remove(self, path: Path) -> None:
        """Remove a file; one that is not there is no error."""
        path.unlink(missing_ok=True)

    def remove_tree(self, path: Path) -> None:
        """Remove a folder and all that is in it, as far as that goes."""
        shutil.rmtree(path, ignore_errors=True)

    def upload(self, there: RemotePath, source: Path) -> None:
        """Replace a file behind a URL by a local one, at once."""
        there.upload(source)

    def put(self, there: RemotePath, data: bytes) -> None:
        """Replace a file behind a URL, at once."""
        there.write_bytes(data)

    def put_new(self, there: RemotePath, data: bytes) -> None:
        """Write a file behind a URL that must not be there yet, else raise FileExistsError."""
        there.create(data)

    def copy(self, there: RemotePath, target: RemotePath) -> None:
        """Copy a file behind a URL."""
        there.copy(target)

    def remove_remote(self, there: RemotePath) -> None:
        """Remove everything below a URL, as far as that goes."""
        with suppress(OSError):
            there.remove_tree()


def _sync(path: Path, flags: int) -> None:
    handle = os.open(path, flags)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


_disk = Disk()


def disk() -> Disk:
    """Return what every change goes through."""
    return _disk


@contextmanager
def using_disk(other: Disk) -> Iterator[None]:
    """Let every change of this process go through another one, for the time of the block."""
    global _disk
    before, _disk = _disk, other
    try:
        yield
    finally:
        _disk = before


def drop_cache(path: Path) -> None:
    """Forget what the system keeps of a local file: what is read next comes from the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
        # Not on every system.
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
