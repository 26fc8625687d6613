"""The task that seals a run: the bytes and the checksum of every file that readers may see."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from toffee_dist.errors import InputError
from toffee_dist.storage.files import FileSeal, is_whole, seal_file
from toffee_dist.storage.runs import RunFolder


@dataclass(frozen=True)
class SealTask:
    """The sealing of one run.

    Parameters
    ----------
    run
        Folder of the run.
    sealed
        Files that have a seal already, by their way from that folder.
    """

    run: str
    sealed: frozenset[str]


def seal_run(task: SealTask) -> dict[str, FileSeal]:
    """Return the seals of the other files, from what is on the disk."""
    run = RunFolder.at(task.run)
    files = {file_name(run, path): path for path in run.result_files("*")}
    return {name: seal_file(path) for name, path in sorted(files.items()) if name not in task.sealed}


def file_name(run: RunFolder, path: Path) -> str:
    """Return what a manifest calls a file of its run."""
    return path.relative_to(run.path).as_posix()


def check_run(run: RunFolder) -> int:
    """Compare every file of a published run with its manifest; return how many there are.

    Raises
    ------
    InputError
        Where files are missing or not what they were when the run was published, or where the run is of a
        version that kept no checksums.
    """
    files = run.read_manifest().files
    if not files:
        raise InputError(
            "this run cannot be verified",
            got=f"no checksums in the manifest of {run.run_id}",
            remedy="It was written by an earlier version; runs of this one have them.",
        )
    wrong = [
        name
        for name, found in files.items()
        if not is_whole(run.path / name, FileSeal(found.bytes, found.crc32))
    ]
    if wrong:
        shown = ", ".join(wrong[:5]) + (f" and {len(wrong) - 5:,} more" if len(wrong) > 5 else "")
        raise InputError(
            f"run {run.run_id} is damaged",
            got=f"{len(wrong):,} of {len(files):,} files are missing or changed: {shown}",
            remedy="Go back to a whole run with toffee rollback, or embed again.",
        )
    return len(files)
