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
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError

FORMAT = 1
LATEST, MANIFEST, JOB = "latest.json", "manifest.json", "job.json"


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a name to write to; on success the file appears at `path`, on failure nothing does."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def save_array(path: Path, array: NDArray[Any]) -> int:
    """Write an array as .npy, whole or not at all; return its bytes."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.lib.format.write_array(file, np.ascontiguousarray(array), allow_pickle=False)
        return file.tell()


def write_json(path: Path, data: Any) -> None:
    """Write JSON whole, and on the disk before this returns."""
    with replacing(path) as temporary, open(temporary, "w") as file:
        json.dump(data, file, indent=1)
        file.write("\n")
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
    def slices(self) -> Path:
        """One set of files a solved slice."""
        return self.work / "slices"

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
        shutil.rmtree(self.work, ignore_errors=True)


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
    try:
        run.slices.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "output folder",
            got=f"{out}: {error.strerror}",
            allowed="a folder that can be written",
            remedy="Choose another --out.",
        ) from None
    return run


def list_runs(out: Path) -> list[RunFolder]:
    """Return the runs of a folder, oldest first."""
    return [RunFolder(path.absolute()) for path in sorted((out / "runs").glob("*")) if path.is_dir()]


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
