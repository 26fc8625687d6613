"""The store: where runs live, which one readers see, and how a file appears whole or not at all.

OUT/latest.json             pointer to the published run; replaced last
OUT/runs/<run_id>/          one run; complete when it has a manifest.json, which also says if it was rejected
OUT/runs/<run_id>/work/     job.json (what was asked for), staged tensor, slices; gone after publishing
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError, UnfinishedError
from toffee_dist.remote import Ranges, RemotePath

FORMAT = 1
LATEST, MANIFEST, JOB = "latest.json", "manifest.json", "job.json"
# Written last by an ingest.
INGESTED = "ingest.json"


def place(text: str | Path) -> Path:
    """Return where a text points: a local path, or a `RemotePath` for a URL.

    That one is typed as a Path, since it stands wherever a Path does. It has no file on this machine: what
    needs one goes through `replacing` and `fetched`.

    Examples
    --------
    >>> place("file:///vectors"), place("memory://vectors/runs/")
    (PosixPath('/vectors'), RemotePath(url='memory://vectors/runs'))
    """
    if not isinstance(text, str):
        return text
    text = text.removeprefix("file://")
    return cast(Path, RemotePath(text)) if "://" in text else Path(text)


def remote(path: Path) -> RemotePath | None:
    """Return the path as what it is where it is behind a URL, else None."""
    found: Any = path
    return found if isinstance(found, RemotePath) else None


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a local name to write to; on success the file appears at `path`, on failure nothing does."""
    there = remote(path)
    if there is not None:
        with TemporaryDirectory(prefix="toffee-") as folder:
            temporary = Path(folder) / path.name
            yield temporary
            there.upload(temporary)
        return
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def fetched(path: Path) -> Iterator[Path]:
    """Give a local name to read from: the file itself, or a copy for the time of the block."""
    there = remote(path)
    if there is None:
        yield path
        return
    with TemporaryDirectory(prefix="toffee-") as folder:
        copy = Path(folder) / path.name
        there.download(copy)
        yield copy


def save_array(path: Path, array: NDArray[Any]) -> int:
    """Write an array as .npy, whole or not at all; return its bytes."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
        return file.tell()


def read_array(path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return rows [start, stop) of a .npy file, reading nothing else.

    Raises
    ------
    OSError, ValueError
        Where there is no such file, or it is not whole.
    """
    there = remote(path)
    with open(path, "rb") if there is None else Ranges(there) as file:
        major, _ = np.lib.format.read_magic(file)
        read = np.lib.format.read_array_header_1_0 if major == 1 else np.lib.format.read_array_header_2_0
        shape, fortran, dtype = read(file)
        if fortran or dtype.hasobject:
            raise ValueError("not an array of ours")
        stop = shape[0] if stop is None else stop
        row_bytes = dtype.itemsize * int(np.prod(shape[1:], dtype=np.int64))
        rows = np.empty((stop - start, *shape[1:]), dtype)
        file.seek(start * row_bytes, os.SEEK_CUR)
        found = file.readinto(rows.reshape(-1).view(np.uint8)) if rows.nbytes else 0  # type: ignore[arg-type]
        if found != rows.nbytes:
            raise ValueError(f"{rows.nbytes - (found or 0)} bytes are missing")
        return rows


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole, and on storage before this returns."""
    text = json.dumps(data, indent=1) + "\n"
    if remote(path) is not None:
        path.write_text(text)
        return
    with replacing(path) as temporary, open(temporary, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def read_json(path: Path) -> Any:
    """Read JSON, or say what is wrong with the file."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
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
        allowed="storage that answers",
        remedy="Mend it, then try again; a run that had begun is finished by toffee resume.",
    )


def create_file(path: Path, data: bytes) -> None:
    """Write a file that must not be there yet, else raise FileExistsError; of two at once, one may."""
    there = remote(path)
    if there is not None:
        there.create(data)
        return
    with open(path, "xb") as file:
        file.write(data)


def append_line(path: Path, line: str) -> None:
    """Add a line to a file of text. Only one may do so at a time: a store replaces the whole file."""
    if remote(path) is None:
        with open(path, "a") as file:
            file.write(line + "\n")
        return
    path.write_text((path.read_text() if path.exists() else "") + line + "\n")


def list_folders(path: Path) -> list[Path]:
    """Return the folders in a folder, sorted; none where there is no such folder."""
    there = remote(path)
    if there is not None:
        return [cast(Path, found) for found, kind in there.list() if kind == "directory"]
    return sorted(found for found in path.glob("*") if found.is_dir())


def remove_tree(path: Path) -> None:
    """Remove a folder and all that is in it, as far as that goes."""
    there = remote(path)
    if there is None:
        shutil.rmtree(path, ignore_errors=True)
        return
    with suppress(OSError):
        there.remove_tree()


def copy_tree(source: Path, target: Path) -> None:
    """Copy a folder; what is in the target and has another name stays."""
    there, to = remote(source), remote(target)
    if to is None:
        shutil.copytree(source, target, dirs_exist_ok=True)
    elif there is None:
        for file in sorted(path for path in source.rglob("*") if path.is_file()):
            (to / file.relative_to(source).as_posix()).upload(file)
    else:
        for name in there.sizes():
            (there / name).copy(to / name)


def move_tree(source: Path, target: Path) -> None:
    """Move a local folder to where there is none yet: at once, or to a store, file by file."""
    if remote(target) is None:
        os.rename(source, target)
    else:
        copy_tree(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where storage has no such thing."""
    there, to = remote(source), remote(target)
    if there is not None and to is not None:
        there.copy(to)
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


@dataclass(frozen=True)
class RunFolder:
    """The places of one run."""

    path: Path

    @property
    def run_id(self) -> str:
        """Its name: the time it began, and a random word."""
        return self.path.name

    @property
    def out(self) -> Path:
        """The folder of all runs and of the pointer."""
        return self.path.parent.parent

    @property
    def work(self) -> Path:
        """What is needed until publishing."""
        return self.path / "work"

    @property
    def ingest(self) -> Path:
        """The staged tensor, the registry and the grid."""
        return self.work / "ingest"

    @property
    def staged(self) -> bool:
        """Whether the ingest is complete."""
        return (self.ingest / INGESTED).exists()

    @property
    def slices(self) -> Path:
        """One set of files a solved slice."""
        return self.work / "slices"

    @property
    def diagnostics(self) -> Path:
        """What was known of the cluster when the run stalled; goes with the run."""
        return self.path / "diagnostics"

    @property
    def registry(self) -> Path:
        """The rows of all nodes, which a later run extends."""
        return self.path / "registry"

    @property
    def warm(self) -> Path:
        """What the solves of the next night start from; of the latest run of a chain."""
        return self.path / "warm"

    @property
    def manifest(self) -> Path:
        """What makes a run visible."""
        return self.path / MANIFEST

    @property
    def published(self) -> bool:
        """Whether the run is complete."""
        return self.manifest.exists()

    def write_job(self, data: dict[str, Any]) -> None:
        """Record what was asked for, so that the run can be resumed."""
        write_json(self.work / JOB, data)

    def read_job(self) -> dict[str, Any]:
        """Return what was asked for."""
        job: dict[str, Any] = read_json(self.work / JOB)
        return job

    def complete(self, manifest: dict[str, Any]) -> None:
        """Make the run whole: its manifest is replaced at once. Readers see it after `point_to`."""
        write_json(self.manifest, {"format": FORMAT, "run_id": self.run_id, **manifest})

    def remove_work(self) -> None:
        """Remove what only the computation needed; readers never look there."""
        remove_tree(self.work)


def point_to(run: RunFolder, withdrawn: tuple[str, ...] = ()) -> None:
    """Make a complete run the one that readers of OUT see; `withdrawn` are newer ones that must not be."""
    pointer: dict[str, Any] = {"format": FORMAT, "run_id": run.run_id, "path": f"runs/{run.run_id}"}
    if withdrawn:
        pointer["withdrawn"] = list(withdrawn)
    write_json(run.out / LATEST, pointer)


def new_run(out: Path) -> RunFolder:
    """Make the folder of a new run."""
    # The time first, so that names sort by age; the word, so that two at once do not meet.
    name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:4]}"
    run = RunFolder(out.absolute() / "runs" / name)
    check_writable(run.path.parent)
    run.slices.mkdir(parents=True)
    return run


def check_writable(out: Path) -> None:
    """Make a folder where there is none, and raise where we may not write to it.

    Raises
    ------
    ConfigError
        With nothing written.
    """
    probe = out / f".toffee-{uuid.uuid4().hex[:12]}"
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise ConfigError(
            "output folder",
            got=f"{out}: {error.strerror}",
            allowed="a folder or bucket that is there and can be written",
            remedy="Choose another --out, or see to the permissions.",
        ) from None


def list_runs(out: Path) -> list[RunFolder]:
    """Return the runs of a folder, oldest first."""
    return [RunFolder(path.absolute()) for path in list_folders(out / "runs")]


def find_run(path: Path) -> RunFolder:
    """Return the published run of OUT, or the run that the path itself is."""
    path = path.absolute()
    if (path / LATEST).exists():
        pointer = read_json(path / LATEST)
        return RunFolder(path / "runs" / str(pointer["run_id"]))
    if (path / MANIFEST).exists() or (path / "work").exists():
        return RunFolder(path)
    raise InputError(
        "no run",
        got=f"{path}",
        allowed=f"a folder with {LATEST}, or a run's own folder with {MANIFEST}",
        remedy="An unfinished run is finished by toffee resume."
        if list_runs(path)
        else "Make one with toffee embed INPUT --out DIR.",
    )


def find_unfinished(path: Path) -> RunFolder:
    """Return the newest run of OUT that is not complete, or the run that the path itself is."""
    path = path.absolute()
    if (path / "work" / JOB).exists() and not (path / MANIFEST).exists():
        return RunFolder(path)
    unfinished = [run for run in list_runs(path) if (run.work / JOB).exists() and not run.published]
    if unfinished:
        return unfinished[-1]
    raise InputError(
        "nothing to resume",
        got=f"{path}",
        allowed="a folder with an unfinished run",
        remedy="Start one with toffee embed." if not list_runs(path) else "Every run in it is complete.",
    )
