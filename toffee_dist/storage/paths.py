"""Paths behind a URL: what of `pathlib.Path` we use, on any file system that fsspec knows.

An object store has no folders, no rename and no append. What it has is enough: an object appears whole or not
at all, and is seen by everybody from then on. So nothing here is cached, and making a folder does nothing.

Every failure is an `OSError`: requests were tried again before (see `ATTEMPTS`), and callers know what to do
with a disk that fails.
"""

from __future__ import annotations

import errno
import fnmatch
import io
import os
import posixpath
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, cast

import fsspec

from toffee_dist.errors import ConfigError

S3 = ("s3://", "s3a://")
# How often botocore sends a request, unless AWS_MAX_ATTEMPTS says otherwise: with exponential backoff and
# jitter, when it is throttled, times out, or the server fails. s3fs does that up to five times over where it
# is told to slow down or an answer breaks off.
ATTEMPTS = 4
# Seconds to connect, and between two pieces of an answer.
CONNECT_TIMEOUT, READ_TIMEOUT = 10.0, 30.0
# Bytes of one range, or of one part of an upload, that is held beside its place; and how many parts at once.
RANGE_BYTES, UPLOADS_AT_ONCE = 16 << 20, 2
# How stores say that the condition of a write did not hold; s3fs knows only the long form of the first, which
# Ceph's gateway does not send.
REFUSED = ("PreconditionFailed", "ConditionalRequestConflict")
# Bytes of the first range; and of files that are better read by one request than by a few.
HEAD_BYTES, WHOLE_BYTES = 64 << 10, 1 << 20


def options(protocol: str) -> dict[str, Any]:
    """Return what every file system of ours is made with; credentials come from the environment."""
    found: dict[str, Any] = {"use_listings_cache": False}
    if f"{protocol}://" in S3:
        found["config_kwargs"] = {
            "retries": {
                "mode": os.environ.get("AWS_RETRY_MODE", "standard"),
                "total_max_attempts": int(os.environ.get("AWS_MAX_ATTEMPTS", ATTEMPTS)),
            },
            "connect_timeout": CONNECT_TIMEOUT,
            "read_timeout": READ_TIMEOUT,
        }
        found |= {"default_block_size": RANGE_BYTES, "max_concurrency": UPLOADS_AT_ONCE}
        # Readers of Parquet ask for the ranges they need; reading ahead would fetch what is not.
        found["default_cache_type"] = "none"
    return found


@cache
def open_filesystem(protocol: str) -> Any:
    """Return the file system of a protocol, one per process.

    Raises
    ------
    ConfigError
        Where fsspec does not know it, or what it needs is not installed.
    """
    try:
        return fsspec.filesystem(protocol, **options(protocol))
    except (ImportError, ValueError) as error:
        s3 = f"{protocol}://" in S3
        raise ConfigError(
            f"storage of kind {protocol}://",
            got=str(error),
            allowed="what fsspec can open here",
            remedy="Install it: pip install 'toffee_dist[s3]'." if s3 else "Install fsspec's package for it.",
        ) from None


@dataclass(frozen=True)
class Status:
    """Size and age of a file, under the names of `os.stat_result`."""

    st_size: int
    st_mtime: float


@dataclass(frozen=True, order=True)
class RemotePath:
    """A file or a folder behind a URL; stands wherever a `pathlib.Path` does.

    Examples
    --------
    >>> path = RemotePath("s3://bucket/runs/") / "one" / "manifest.json"
    >>> str(path), path.name, str(path.parent.parent)
    ('s3://bucket/runs/one/manifest.json', 'manifest.json', 's3://bucket/runs')
    """

    url: str

    def __post_init__(self) -> None:
        protocol, _, rest = self.url.partition("://")
        if "@" in rest.partition("/")[0]:
            raise ConfigError(
                "a URL with a user or password in it",
                got=f"{protocol}://…@…",
                allowed="a URL without",
                remedy="It would be written to manifests and logs: give credentials by the environment.",
            )
        object.__setattr__(self, "url", f"{protocol}://{rest.rstrip('/')}")

    def __str__(self) -> str:
        return self.url

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url}/{name}")

    @property
    def fs(self) -> Any:
        """The file system that it is on."""
        return open_filesystem(self.url.partition("://")[0])

    @property
    def key(self) -> str:
        """What the file system calls it."""
        return str(self.fs._strip_protocol(self.url))

    @property
    def name(self) -> str:
        """The last word."""
        return posixpath.basename(self.url)

    @property
    def parent(self) -> RemotePath:
        """The folder that it is in."""
        return RemotePath(posixpath.dirname(self.url))

    def absolute(self) -> RemotePath:
        """Return itself: a URL is absolute."""
        return self

    def relative_to(self, folder: RemotePath) -> Path:
        """Return the way from a folder to here."""
        return Path(self.url.removeprefix(f"{folder.url}/"))

    def exists(self) -> bool:
        """Whether there is an object of this name, or any below it."""
        with self.failing():
            return bool(self.fs.exists(self.key))

    def is_dir(self) -> bool:
        """Whether there is any object below it."""
        try:
            with self.failing():
                return str(self.fs.info(self.key)["type"]) == "directory"
        except FileNotFoundError:
            return False

    def is_file(self) -> bool:
        """Whether there is an object of this name."""
        try:
            with self.failing():
                return str(self.fs.info(self.key)["type"]) == "file"
        except FileNotFoundError:
            return False

    def stat(self) -> Status:
        """Return size and age."""
        with self.failing():
            info = self.fs.info(self.key)
            made = info.get("LastModified") or info.get("created") or info.get("mtime")
        return Status(int(info.get("size") or 0), made.timestamp() if hasattr(made, "timestamp") else 0.0)

    def iterdir(self) -> Iterator[RemotePath]:
        """Yield what is in the folder."""
        yield from (path for path, _ in self.list())

    def list(self) -> list[tuple[RemotePath, str]]:
        """Return what is in the folder, sorted, and whether each is a ``file`` or a ``directory``."""
        try:
            with self.failing():
                found = self.fs.ls(self.key, detail=True)
        except FileNotFoundError:
            return []
        # An empty object that marks the folder itself is not in it.
        kinds = {info["name"].rstrip("/"): info["type"] for info in found}
        kinds.pop(self.key, None)
        return [(self / posixpath.basename(name), kind) for name, kind in sorted(kinds.items())]

    def sizes(self) -> dict[str, int]:
        """Return all files at any depth: the way from here to each, and its bytes."""
        try:
            with self.failing():
                found = self.fs.find(self.key, detail=True)
        except FileNotFoundError:
            return {}
        start = len(self.key.rstrip("/")) + 1
        return {name[start:]: int(info["size"]) for name, info in sorted(found.items()) if name[start:]}

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files of the folder whose names match."""
        for path, kind in self.list():
            if kind == "file" and fnmatch.fnmatchcase(path.name, pattern):
                yield path

    def rglob(self, pattern: str) -> Iterator[RemotePath]:
        """Yield the files at any depth whose names match."""
        for name in self.sizes():
            if fnmatch.fnmatchcase(posixpath.basename(name), pattern):
                yield self / name

    def mkdir(self, mode: int = 0o777, parents: bool = False, exist_ok: bool = False) -> None:
        """Do nothing: a folder is there when something is in it."""

    def rmdir(self) -> None:
        """Do nothing: a folder is gone when nothing is in it."""

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        try:
            with self.failing():
                self.fs.rm_file(self.key)
        except FileNotFoundError:
            if not missing_ok:
                raise

    def read_bytes(self) -> bytes:
        """Return all of a file; a small one by one request."""
        head = self.read_range(0, HEAD_BYTES)
        if len(head) < HEAD_BYTES:
            return head
        with self.failing():
            return bytes(self.fs.cat_file(self.key))

    def read_range(self, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop), or those of them that there are."""
        try:
            with self.failing():
                return bytes(self.fs.cat_file(self.key, start=start, end=stop))
        except FileNotFoundError:
            raise
        except OSError:
            # A store refuses a range that begins at the end of the file.
            if self.stat().st_size <= start:
                return b""
            raise

    def read_text(self, encoding: str = "utf-8") -> str:
        """Return all of a file of text."""
        return self.read_bytes().decode(encoding)

    def write_bytes(self, data: bytes) -> int:
        """Replace the file, at once."""
        with self.failing():
            self.fs.pipe_file(self.key, data)
        return len(data)

    def write_text(self, text: str, encoding: str = "utf-8") -> int:
        """Replace the file, at once."""
        return self.write_bytes(text.encode(encoding))

    def create(self, data: bytes) -> None:
        """Write a file that must not be there yet, else raise FileExistsError; of two at once, one may."""
        with self.failing():
            try:
                self.fs.pipe_file(self.key, data, mode="create")
            except OSError as error:
                if _code(error) in REFUSED:
                    raise FileExistsError from None
                raise

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open a file for reading bytes; only what is asked for is fetched."""
        if mode != "rb":
            raise ValueError(f"mode {mode!r}: files behind a URL are written whole")
        with self.failing():
            handle: IO[bytes] = self.fs.open(self.key, "rb")
        return handle

    def upload(self, source: Path) -> None:
        """Replace the file by a local one, at once; large ones go in parts."""
        parts = {"chunksize": RANGE_BYTES} if self.url.startswith(S3) else {}
        with self.failing():
            self.fs.put_file(str(source), self.key, **parts)

    def download(self, target: Path) -> None:
        """Copy the file to a local one."""
        with self.failing():
            self.fs.get_file(self.key, str(target))

    def copy(self, target: RemotePath) -> None:
        """Copy the file; where both are on one store, it does that itself."""
        with self.failing():
            self.fs.cp_file(self.key, target.key)

    def remove_tree(self) -> None:
        """Remove every file at any depth."""
        names = [(self / name).key for name in self.sizes()]
        if names:
            with self.failing():
                self.fs.rm(names)

    @contextmanager
    def failing(self) -> Iterator[None]:
        """Turn what the libraries raise into OSErrors that name the URL."""
        try:
            yield
        except FileNotFoundError as error:
            said = f"{error} {_code(error)}".lower()
            what = "no such bucket" if "bucket" in said else "no such object"
            raise FileNotFoundError(errno.ENOENT, what, self.url) from None
        except FileExistsError:
            raise FileExistsError(errno.EEXIST, "the object exists", self.url) from None
        except PermissionError as error:
            raise PermissionError(errno.EACCES, f"not permitted: {_first_line(error)}", self.url) from None
        except (ConfigError, KeyboardInterrupt):
            raise
        except Exception as error:
            denied = type(error).__name__ in ("NoCredentialsError", "PartialCredentialsError")
            number = errno.EACCES if denied else getattr(error, "errno", None) or errno.EIO
            raise OSError(number, _first_line(error), self.url) from None


class Ranges(io.RawIOBase):
    """A file behind a URL that is read once, in a few pieces: a range a request, none of them kept.

    Parameters
    ----------
    path
        The file.
    size
        Its bytes. Where they are not known, headers, and all of small files, come with a first request.
    """

    def __init__(self, path: RemotePath, size: int | None = None) -> None:
        self.path, self.size, self.at = path, size, 0
        self.head = path.read_range(0, HEAD_BYTES) if size is None else b""
        if size is None and len(self.head) < HEAD_BYTES:
            self.size = len(self.head)

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return where the next byte is read."""
        return self.at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go there; nothing is read. From the end only where the size is known."""
        if whence == os.SEEK_END:
            if self.size is None:
                raise io.UnsupportedOperation("the size is not known")
            offset += self.size
        self.at = offset + (self.at if whence == os.SEEK_CUR else 0)
        return self.at

    def read(self, size: int = -1, /) -> bytes:
        """Return so many bytes; no more memory is asked for than the file has."""
        if self.size is not None:
            left = max(self.size - self.at, 0)
            size = left if size < 0 else min(size, left)
        return super().read(size) or b""

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; return fewer bytes than it holds only at the end of the file."""
        view, filled = memoryview(buffer).cast("B"), 0
        if self.size is not None:
            view = view[: max(self.size - self.at, 0)]
            if len(view) and not self.head and self.size <= WHOLE_BYTES:
                self.head = self.path.read_range(0, self.size)
        while filled < len(view):
            wanted = min(len(view) - filled, RANGE_BYTES)
            if self.at + wanted <= len(self.head):
                piece = self.head[self.at : self.at + wanted]
            else:
                piece = self.path.read_range(self.at, self.at + wanted)
            view[filled : filled + len(piece)] = piece
            filled, self.at = filled + len(piece), self.at + len(piece)
            if len(piece) < wanted:
                break
        return filled


def _first_line(error: Exception) -> str:
    text = str(error).strip()
    # Some stores send a code, and no words.
    if not text or text.endswith("None"):
        return _code(error) or type(error).__name__
    return text.splitlines()[0][:300]


def _code(error: BaseException) -> str:
    """Return the store's own name for a failure; empty where it gave none."""
    answer = getattr(error.__cause__, "response", None) or {}
    return str(answer.get("Error", {}).get("Code") or "")


def to_path(text: str | Path) -> Path:
    """Return where a text points: a local path, or a `RemotePath` for a URL.

    That one is typed as a Path, since it stands wherever a Path does. It has no file on this machine: what
    needs one goes through `replacing` and `fetched`.

    Examples
    --------
    >>> to_path("file:///vectors"), to_path("memory://vectors/runs/")
    (PosixPath('/vectors'), RemotePath(url='memory://vectors/runs'))
    """
    if not isinstance(text, str):
        return text
    text = text.removeprefix("file://")
    return cast(Path, RemotePath(text)) if "://" in text else Path(text)


def as_remote(path: Path) -> RemotePath | None:
    """Return the path as what it is where it is behind a URL, else None."""
    found: Any = path
    return found if isinstance(found, RemotePath) else None
