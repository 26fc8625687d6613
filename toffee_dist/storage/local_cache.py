"""Local copies of what is on an object store and must be a memory map: one per machine, made once.

The folder is TOFFEE_CACHE, or one of our own in the temporary folder. The copies that were used last stay, at
most `KEEP` of them; a process that has mapped one that goes keeps what it has.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from toffee_dist.errors import ConfigError

# Tensors that stay: of a run, of the one after it, and one for a neighbour on the same machine.
KEEP = 3


@contextmanager
def cached_copy(key: str, build: Callable[[Path], None]) -> Iterator[Path]:
    """Give the local folder of a key, which nobody removes before the block ends.

    Parameters
    ----------
    key
        Names the content: equal keys have equal files.
    build
        Fills an empty folder. Of threads and processes that want the same one at once, one does it.
    """
    root, name = _root(), hashlib.sha256(key.encode()).hexdigest()[:32]
    with _lock(root / f"{name}.lock"):
        folder, temporary = root / name, root / f"{name}.tmp"
        if not folder.is_dir():
            _remove_oldest(root, name)
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(mode=0o700)
            try:
                build(temporary)
                os.rename(temporary, folder)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        os.utime(folder)
        yield folder


def _root() -> Path:
    root = Path(os.environ.get("TOFFEE_CACHE") or Path(tempfile.gettempdir()) / f"toffee-{os.getuid()}")
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    if root.lstat().st_uid != os.getuid():
        # Whoever owns the folder could change what we compute with.
        raise ConfigError(
            "folder for local copies",
            got=f"{root}, which belongs to somebody else",
            allowed="a folder of our own",
            remedy="Set TOFFEE_CACHE.",
        )
    return root


@contextmanager
def _lock(path: Path, *, wait: bool = True) -> Iterator[None]:
    """Hold a lock file; BlockingIOError where somebody else does and we do not wait."""
    while True:
        with open(path, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
            # The one before us may have removed the file that we waited for.
            same = False
            with suppress(FileNotFoundError):
                same = os.path.samestat(path.stat(), os.fstat(file.fileno()))
            if same:
                yield
                return


def _remove_oldest(root: Path, own: str) -> None:
    """Make room for one more."""
    names = {path.name.partition(".")[0] for path in root.iterdir() if path.is_dir()} - {own}
    used = {name: max(_age(root / name), _age(root / f"{name}.tmp")) for name in names}
    for name in sorted(names, key=lambda name: used[name])[: max(0, len(names) - KEEP + 1)]:
        # What is being made or opened at this moment is in use.
        with suppress(BlockingIOError), _lock(root / f"{name}.lock", wait=False):
            shutil.rmtree(root / name, ignore_errors=True)
            shutil.rmtree(root / f"{name}.tmp", ignore_errors=True)
            (root / f"{name}.lock").unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
