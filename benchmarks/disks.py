"""Disks that fail, and disks that remember; every change of storage goes through them (storage/disk.py)."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from toffee_dist.storage.disk import Disk

Fault = Literal["EIO", "ENOSPC", "torn", "exit"]
FAULTS: tuple[tuple[Fault, bool], ...] = (
    ("EIO", False),
    ("EIO", True),
    ("ENOSPC", False),
    ("ENOSPC", True),
    ("torn", False),
    ("torn", True),
    # Nothing comes after it, so once is all.
    ("exit", False),
)
CHANGES = ("create", "append", "sync", "sync_folder", "replace", "move", "remove", "remove_tree")


class WatchedDisk(Disk):
    """A disk that is told of every change before it is made."""

    def __init__(self) -> None:
        self.changes = 0
        self._lock = threading.Lock()

    def before(self, change: str, *arguments: Any) -> None:
        """Look at a change; what is raised here comes instead of it."""

    def watched(self, change: str, *arguments: Any) -> None:
        """Make a change."""
        with self._lock:
            self.changes += 1
            self.before(change, *arguments)
            getattr(Disk, change)(self, *arguments)


def _watch(change: str) -> Callable[..., None]:
    def call(self: WatchedDisk, *arguments: Any) -> None:
        self.watched(change, *arguments)

    return call


for _change in CHANGES:
    setattr(WatchedDisk, _change, _watch(_change))


class FaultyDisk(WatchedDisk):
    """A disk whose change number `at` (from 1) fails, and with `on` every one after it too."""

    def __init__(self, fault: Fault, at: int, on: bool) -> None:
        super().__init__()
        self.fault, self.at, self.on = fault, at, on

    def before(self, change: str, *arguments: Any) -> None:
        """Fail, where it is time."""
        if self.changes != self.at and not (self.on and self.changes > self.at):
            return
        if self.fault == "exit":
            os._exit(9)
        if self.fault == "torn":
            _tear(change, *arguments)
        number = errno.ENOSPC if self.fault == "ENOSPC" else errno.EIO
        raise OSError(number, os.strerror(number), str(arguments[0]))


def _tear(change: str, *arguments: Any) -> None:
    """Do half of a change."""
    path = arguments[0]
    if change in ("create", "append"):
        data = arguments[1]
        with open(path, "xb" if change == "create" else "ab") as file:
            file.write(data[: len(data) // 2])
    elif change in ("replace", "sync"):
        os.truncate(path, path.stat().st_size // 2)


@dataclass(frozen=True)
class CrashState:
    """What a power cut after a change could leave below a folder."""

    change: str
    kind: str
    files: dict[Path, bytes]


class RememberingDisk(WatchedDisk):
    """A disk that keeps, after every change below a folder, what a power cut could leave of it.

    A model of what POSIX promises: the content of a file survives once it was synced, and a name once the
    folder that holds it was, and every folder above it likewise. Three states per change: everything reached
    the disk; all names did, but data that was not synced are zeros; and only what is promised.
    """

    def __init__(self, root: Path) -> None:
        super().__init__()
        self.root = root
        self.states: list[CrashState] = []
        self._synced = self._read()
        # What each name is sure to hold, and the folders that are sure to be there.
        self._bound = dict(self._synced)
        self._folders = {path for path in root.rglob("*") if path.is_dir()} | {root}

    def _read(self) -> dict[Path, bytes]:
        return {path: path.read_bytes() for path in self.root.rglob("*") if path.is_file()}

    def watched(self, change: str, *arguments: Any) -> None:
        """Make a change, and note what is sure from then on."""
        with self._lock:
            self.changes += 1
            path: Path = arguments[0]
            whole = self._synced.get(path)
            held = path.read_bytes() if change == "replace" else b""
            getattr(Disk, change)(self, *arguments)
            if self.root != path and self.root not in path.parents:
                return
            now = self._read()
            if change in ("sync", "append"):
                self._synced[path] = now[path]
                if path in self._bound:
                    self._bound[path] = now[path]
            elif change == "replace" and whole == held:
                # It was synced under its temporary name, and not written to since.
                self._synced[arguments[1]] = held
            elif change == "move":
                for old in [known for known in self._synced if path in known.parents]:
                    self._synced[arguments[1] / old.relative_to(path)] = self._synced[old]
                self._folders |= {
                    arguments[1] / f.relative_to(path) for f in self._folders if path in f.parents
                }
                self._bound |= {
                    arguments[1] / f.relative_to(path): data
                    for f, data in self._bound.items()
                    if path in f.parents
                }
            elif change == "sync_folder":
                present = set(path.iterdir())
                self._bound = {f: data for f, data in self._bound.items() if f.parent != path}
                self._bound |= {f: self._sure(f, now) for f in present if f in now}
                self._folders = {f for f in self._folders if f.parent != path}
                self._folders |= {f for f in present if f.is_dir()}
            self._remember(change, now)

    def _sure(self, path: Path, now: dict[Path, bytes]) -> bytes:
        """Return what a file is sure to hold once its name is: nothing, where it was not synced."""
        return now[path] if self._synced.get(path) == now[path] else b""

    def _remember(self, change: str, now: dict[Path, bytes]) -> None:
        zeroed = {
            path: data if self._synced.get(path) == data else bytes(len(data)) for path, data in now.items()
        }
        promised = {
            path: data
            for path, data in self._bound.items()
            if all(folder in self._folders for folder in path.parents if self.root in folder.parents)
        }
        for kind, files in (("everything", now), ("zeroed", zeroed), ("promised", promised)):
            if not self.states or files != self.states[-1].files:
                self.states.append(CrashState(change, kind, files))
