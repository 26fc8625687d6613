"""Warm starts: what a run leaves for the solves of the next one, and what its own start saved."""

from __future__ import annotations

from dataclasses import dataclass

from toffee_dist.storage.files import link_or_copy, read_json, write_json
from toffee_dist.storage.manifest import SavedRecord
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import array_files, read_reports

# Beside the slices kept: iterations and seconds of each when it was last solved from scratch. Written last
# and removed first: without it they are not all there.
COLD = "cold.json"


@dataclass(frozen=True)
class KeepTask:
    """The keeping of slices for the next refresh.

    Parameters
    ----------
    run
        The run.
    names
        Its slices.
    warm
        Folder that they were started from; empty: from nothing.
    """

    run: str
    names: tuple[str, ...]
    warm: str


def keep_slices(task: KeepTask) -> SavedRecord | None:
    """Keep every A, and what its slice took when it was last solved from scratch.

    Returns how many slices had a start, and the iterations and seconds that this saved against that time.
    """
    run = RunFolder.at(task.run)
    run.warm.mkdir(exist_ok=True)
    known = to_path(task.warm) / COLD
    before = read_json(known) if task.warm and known.exists() else {}
    cold: dict[str, list[float]] = {}
    slices, iterations, seconds = 0, 0, 0.0
    for name, report in zip(task.names, read_reports(run.slices, task.names), strict=True):
        for source in array_files(run.slices, "A", name):
            own = run.warm / source.name
            if not own.exists():
                link_or_copy(source, own)
        if report.solver != "warm":
            cold[name] = [report.iterations, report.seconds]
            continue
        slices += 1
        if name in before:
            cold[name] = before[name]
            iterations += before[name][0] - report.iterations
            seconds += before[name][1] - report.seconds
    write_json(run.warm / COLD, cold)
    return SavedRecord(slices=slices, iterations=iterations, seconds=seconds) if task.warm else None
