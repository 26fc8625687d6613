"""Runs on storage: the name of every file of a run, which run readers see, and how one becomes visible.

OUT/latest.json             pointer to the published run; replaced last
OUT/runs/<run_id>/          one run; complete when it has a manifest.json, which also says if it was rejected
OUT/runs/<run_id>/work/     job.json (what was asked for), staged tensor, slices; gone after publishing
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.settings import RUN_NAME
from toffee_dist.storage.files import (
    check_writable,
    list_folders,
    passes_link,
    read_array,
    remove_tree,
    sync_folders,
)
from toffee_dist.storage.manifest import (
    IngestRecord,
    JobRecord,
    LaterFormatError,
    Manifest,
    Pointer,
    read_record,
    write_record,
)
from toffee_dist.storage.paths import to_path

_LATEST, _RUNS, _MANIFEST = "latest.json", "runs", "manifest.json"
# What `new_run` calls a run. Whatever else is beside the runs is not ours.
_NEW_NAME = re.compile(r"\d{8}T\d{6}\.\d{6}-[0-9a-f]{4}")

Mask = NDArray[np.bool_]


@dataclass(frozen=True)
class StagedEdges:
    """The places of one ingest: the tensor, the registry and the record of both."""

    path: Path

    @property
    def tensor(self) -> Path:
        """The staged tensor."""
        return self.path / "tensor"

    @property
    def nodes(self) -> Path:
        """The node registry."""
        return self.path / "nodes"

    @property
    def work(self) -> Path:
        """What is needed until the ingest is complete."""
        return self.path / "work"

    @property
    def record(self) -> Path:
        """What was read and what came out; written last, so it marks a whole ingest."""
        return self.path / "ingest.json"

    @property
    def complete(self) -> bool:
        """Whether the ingest is complete."""
        return self.record.exists()

    def read(self) -> IngestRecord:
        """Return the record."""
        return read_record(self.record, IngestRecord)


@dataclass(frozen=True)
class RunFolder:
    """The places of one run."""

    path: Path

    @classmethod
    def at(cls, path: str) -> RunFolder:
        """Return the run of a path or URL, as tasks carry it."""
        return cls(to_path(path))

    @property
    def run_id(self) -> str:
        """Its name: the time it began, and a random word."""
        return self.path.name

    @property
    def out(self) -> Path:
        """The folder of all runs and of the pointer."""
        return self.path.parent.parent

    # What readers see.

    @property
    def manifest(self) -> Path:
        """What makes a run visible."""
        return self.path / _MANIFEST

    @property
    def nodes(self) -> Path:
        """A row per node."""
        return self.path / "nodes.parquet"

    @property
    def steps(self) -> Path:
        """A row per step."""
        return self.path / "steps.parquet"

    @property
    def fit(self) -> Path:
        """A row per solved slice."""
        return self.path / "fit.parquet"

    @property
    def timings(self) -> Path:
        """Seconds per solved slice, which differ from run to run and so are no part of the tables."""
        return self.path / "timings.json"

    @property
    def frequencies(self) -> Path:
        """A row per frequency: what each is worth to the trajectory."""
        return self.path / "frequencies.parquet"

    @property
    def compact(self) -> Path:
        """The trajectory as what it is: entries, basis and kernels; see `storage.compact`."""
        return self.path / "compact"

    @property
    def drift(self) -> Path:
        """A row per node: how far it moved since the previous run."""
        return self.path / "drift.parquet"

    @property
    def change_table(self) -> Path:
        """A row per node: its community, and whether it changes; see `storage.changes`."""
        return self.path / "changes.parquet"

    @property
    def changes(self) -> Path:
        """What is significant of it, and all other tests: the alert file."""
        return self.path / "changes.json"

    @property
    def report(self) -> Path:
        """The page about the run."""
        return self.path / "report.html"

    @property
    def rotation(self) -> Path:
        """The r×r rotation of the vectors onto those of the previous run."""
        return self.path / "rotation.npy"

    @property
    def fold_weights(self) -> Path:
        """The weights with which vectors of new nodes are made, a row per role; see `refresh.fold_in`."""
        return self.path / "fold.npy"

    @property
    def registry(self) -> Path:
        """The rows of all nodes, which a later run extends."""
        return self.path / "registry"

    @property
    def warm(self) -> Path:
        """What the solves of the next refresh start from; of the latest run of a chain."""
        return self.path / "warm"

    @property
    def diagnostics(self) -> Path:
        """What was known of the cluster when the run stalled; goes with the run."""
        return self.path / "diagnostics"

    def index(self, output: str) -> Path:
        """Return where the vectors of an output are once more, for quick queries."""
        return self.path / "index" / f"{output}.npy"

    def index_record(self, output: str) -> Path:
        """Return where the index says of which run and space it is; without it, it is none."""
        return self.path / "index" / f"{output}.json"

    def kept(self, earlier: str) -> Path:
        """Return where the run says which rows of an earlier run it still has."""
        return self.path / f"kept-{earlier}.npy"

    def part(self, output: str, index: int) -> Path:
        """Return where one part of an output is."""
        return self.path / output / f"part-{index:05d}.parquet"

    def parts(self, output: str) -> list[Path]:
        """Return the parts of an output that are there, in the order of rows."""
        return sorted((self.path / output).glob("part-*.parquet"))

    def core(self, name: str) -> Path:
        """Return where ``R_time`` or ``R_freq`` is."""
        return self.path / "factors" / f"{name}.parquet"

    def result_files(self, pattern: str) -> list[Path]:
        """Return the files of this pattern at any depth that readers may see, but for the manifest."""
        found = []
        for file in self.path.rglob(pattern):
            top = file.relative_to(self.path).parts[0]
            if file.is_file() and top not in ("work", "warm", "diagnostics", "index", _MANIFEST):
                found.append(file)
        return found

    # What is needed until publishing.

    @property
    def work(self) -> Path:
        """What is needed until publishing."""
        return self.path / "work"

    @property
    def job(self) -> Path:
        """What was asked for."""
        return self.work / "job.json"

    @property
    def staged(self) -> StagedEdges:
        """The staged tensor, the registry and the grid."""
        return StagedEdges(self.work / "ingest")

    @property
    def slices(self) -> Path:
        """One set of files per solved slice."""
        return self.work / "slices"

    @property
    def draft(self) -> Path:
        """The manifest as it will be, for the report."""
        return self.work / _MANIFEST

    @property
    def known(self) -> RunFolder:
        """The nodes that the run keeps of the previous one, as a run that `known` can name."""
        return RunFolder(self.work / "known")

    def node_stat(self, name: str) -> Path:
        """Return where a number per node is, by its name: degree, first, last, source_cold and the like."""
        return self.work / "activity" / f"{name}.npy"

    @property
    def node_record(self) -> Path:
        """The figures of all nodes together; written last."""
        return self.work / "activity" / "record.json"

    # What it is.

    @property
    def complete(self) -> bool:
        """Whether the run has a manifest."""
        return self.manifest.exists()

    @property
    def begun(self) -> bool:
        """Whether the run says what was asked for."""
        return self.job.exists()

    def read_manifest(self) -> Manifest:
        """Return all that is known about a complete run."""
        return read_record(self.manifest, Manifest)

    def write_manifest(self, manifest: Manifest) -> None:
        """Make the run complete: its manifest is replaced at once. Readers see it after `point_to`."""
        # A manifest that survives a power cut must not name files whose folders did not.
        sync_folders(self.path, without="work")
        write_record(self.manifest, manifest)

    def read_job(self) -> JobRecord:
        """Return what was asked for."""
        return read_record(self.job, JobRecord)

    def write_job(self, job: JobRecord) -> None:
        """Record what was asked for, so that the run can be resumed."""
        write_record(self.job, job)

    def read_kept(self, earlier: str) -> Mask | None:
        """Return the rows of an earlier run that this one still has; None: all.

        Rows are never reordered: those that stay come first here, in their order.
        """
        path = self.kept(earlier)
        if not path.exists():
            return None
        before = get_run(self.out, earlier)
        kept = self._read_small(path, (before.read_manifest().summary.nodes,) if before.complete else None)
        if kept.dtype != bool:
            raise self._damaged(path, f"{kept.dtype} instead of bool")
        return kept

    def read_rotation(self, rank: int) -> NDArray[Any] | None:
        """Return the rotation of the vectors onto those of the previous run; None: there is none."""
        return self._read_small(self.rotation, (rank, rank)) if self.rotation.exists() else None

    def read_fold_weights(self, rank: int) -> NDArray[Any]:
        """Return the weights with which vectors of new nodes are made, a row per role."""
        return self._read_small(self.fold_weights, (2, rank))

    def _read_small(self, path: Path, shape: tuple[int, ...] | None) -> NDArray[Any]:
        """Read a small array of a complete run, which nobody makes again."""
        try:
            found = read_array(path)
        except (FileNotFoundError, ValueError) as error:
            raise self._damaged(path, str(error)) from None
        if shape is not None and found.shape != shape:
            raise self._damaged(path, f"shape {found.shape} instead of {shape}")
        return found

    def _damaged(self, path: Path, found: str) -> InputError:
        return InputError(
            f"{path.name} of run {self.run_id} is damaged",
            got=found,
            remedy="Use another run: toffee runs lists them; toffee rollback goes back to one.",
        )

    def remove(self, path: Path) -> None:
        """Remove a folder of the run, or all of it; never what a link in OUT leads to."""
        if not passes_link(self.out, path):
            remove_tree(path)

    def remove_work(self) -> None:
        """Remove what only the computation needed; readers never look there."""
        self.remove(self.work)


def read_pointer(out: Path) -> Pointer | None:
    """Return which run of a folder is published; None where none ever was."""
    path = out / _LATEST
    return read_record(path, Pointer) if path.exists() else None


def point_to(run: RunFolder, withdrawn: tuple[str, ...] | None = None) -> None:
    """Make a complete run the one that readers of OUT see.

    `withdrawn` are others that must not be: where absent, those of the pointer so far.
    """
    if withdrawn is None:
        withdrawn = tuple(name for name in _withdrawn(run.out) if name != run.run_id)
    pointer = Pointer(run_id=run.run_id, path=f"{_RUNS}/{run.run_id}", withdrawn=withdrawn)
    write_record(run.out / _LATEST, pointer)


def _withdrawn(out: Path) -> tuple[str, ...]:
    """Return the runs that were withdrawn; none where the pointer is damaged, which a new one repairs."""
    try:
        pointer = read_pointer(out)
    except LaterFormatError:
        raise
    except InputError:
        return ()
    return () if pointer is None else pointer.withdrawn


def published_at(out: Path) -> float | None:
    """Return when the pointer was last replaced, in seconds since 1970; None where there is none."""
    path = out / _LATEST
    return path.stat().st_mtime if path.exists() else None


def get_run(out: Path, run_id: str) -> RunFolder:
    """Return the run of this name, whether it is there or not.

    Raises
    ------
    InputError
        Where it is a path: names come from files that others may have written.
    """
    if re.fullmatch(RUN_NAME, run_id) is None:
        raise InputError(
            "name of a run",
            got=repr(run_id),
            allowed="a plain name, such as 20260105T020000.000000-1a2b",
            remedy="toffee runs lists them.",
        )
    return RunFolder(out.absolute() / _RUNS / run_id)


def new_run(out: Path) -> RunFolder:
    """Make the folder of a new run; not in a folder whose pointer a later program wrote."""
    _withdrawn(out)
    # The time first, so that names sort by age; the word, so that two at once do not meet.
    run = get_run(out, f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:4]}")
    if passes_link(run.out, run.path):
        raise ConfigError(
            "folder of the runs",
            got=f"{run.path.parent}, which is a link",
            allowed="a folder: old runs are removed from it, and links are not followed",
            remedy="Let OUT itself be the link.",
        )
    check_writable(run.path.parent)
    run.slices.mkdir(parents=True)
    return run


def list_runs(out: Path) -> list[RunFolder]:
    """Return the runs of a folder, oldest first; links and folders of other names are none."""
    found = list_folders(out / _RUNS)
    return [RunFolder(path.absolute()) for path in found if _NEW_NAME.fullmatch(path.name)]


def find_latest(out: Path) -> RunFolder | None:
    """Return the published run of a folder, or None where there never was one."""
    pointer = read_pointer(out)
    return None if pointer is None else get_run(out, pointer.run_id)


def find_run(path: Path) -> RunFolder:
    """Return the published run of OUT, or the run that the path itself is."""
    path = path.absolute()
    latest = find_latest(path)
    if latest is not None:
        return latest
    run = RunFolder(path)
    if run.complete or run.work.exists():
        return run
    raise InputError(
        "no run",
        got=f"{path}",
        allowed=f"a folder with {_LATEST}, or a run's own folder with {_MANIFEST}",
        remedy="An unfinished run is finished by toffee resume."
        if list_runs(path)
        else "Make one with toffee embed INPUT --out DIR.",
    )


def find_unfinished(path: Path) -> RunFolder:
    """Return the newest run of OUT that did not get to its end, or the run that the path itself is."""
    path = path.absolute()
    for run in (RunFolder(path), *reversed(list_runs(path))):
        if run.begun and (not run.complete or lacks_pointer(run)):
            return run
    raise InputError(
        "nothing to resume",
        got=f"{path}",
        allowed="a folder with an unfinished run",
        remedy="Start one with toffee embed." if not list_runs(path) else "Every run in it is complete.",
    )


def lacks_pointer(run: RunFolder) -> bool:
    """Whether a run with its work was stopped after its manifest and before the pointer.

    One that was published, and is not any more, is older than the one that is, or was withdrawn.
    """
    try:
        if run.read_manifest().state != "published":
            return False
        pointer = read_pointer(run.out)
    except InputError:
        return False
    return pointer is None or (run.run_id > pointer.run_id and run.run_id not in pointer.withdrawn)
