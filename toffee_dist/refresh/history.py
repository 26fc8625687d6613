"""The runs of a folder: which there are, going back to an earlier one, and removing old ones."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toffee_dist.errors import InputError
from toffee_dist.refresh.warm import COLD
from toffee_dist.storage.compact import HEADER
from toffee_dist.storage.files import passes_link, remove_file
from toffee_dist.storage.forgotten import check_no_erasure
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.runs import RunFolder, get_run, list_runs, point_to, read_pointer

# A folder of a run without any file of ours is older than this before it counts as left over.
LEFT_OVER_SECONDS = 86_400


@dataclass(frozen=True)
class RunLine:
    """One run of a folder: its state, and the figures that tell runs apart.

    The state is ``published``, ``rejected``, ``unfinished`` or ``damaged``.
    """

    run: str
    state: str
    latest: bool
    nodes: int | None = None
    first: str = ""
    last: str = ""
    cosine: float | None = None
    reasons: tuple[str, ...] = ()
    space_id: str = ""

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return asdict(self)


def describe_runs(out: Path) -> list[RunLine]:
    """Return every run of a folder, oldest first."""
    pointer = read_pointer(out)
    current = None if pointer is None else pointer.run_id
    return [_describe(run, run.run_id == current) for run in list_runs(out)]


def _describe(run: RunFolder, latest: bool) -> RunLine:
    if not run.complete:
        return RunLine(run.run_id, "unfinished", latest)
    try:
        manifest = run.read_manifest()
    except InputError:
        return RunLine(run.run_id, "damaged", latest)
    summary, refresh = manifest.summary, manifest.refresh
    drift = [] if refresh is None else refresh.drift
    return RunLine(
        run.run_id,
        manifest.state,
        latest,
        summary.nodes,
        summary.first,
        summary.last,
        drift[0].cosine.get("p50") if drift else None,
        () if refresh is None else tuple(refresh.reasons),
        manifest.space_id,
    )


def roll_back(out: Path, to: str | None = None) -> RunFolder:
    """Publish an earlier run again, or any complete run by its name; return it.

    The runs after it are withdrawn: neither a refresh of the same input nor a later rollback publishes them
    again, unless by their name.

    Raises
    ------
    InputError
        Where there is no such run, or it is not whole.
    """
    with hold_lock(out):
        check_no_erasure(out)
        pointer = read_pointer(out)
        current = "" if pointer is None else pointer.run_id
        lines = describe_runs(out)
        complete = [line.run for line in lines if line.state in ("published", "rejected")]
        published = [line.run for line in lines if line.state == "published"]
        gone = set() if pointer is None else set(pointer.withdrawn)
        earlier = [name for name in published if name < current and name not in gone]
        name = to if to is not None else (earlier[-1] if earlier else None)
        if name is None or name not in complete:
            raise InputError(
                "no run to go back to",
                got=repr(to) if to is not None else f"{len(earlier)} published runs before this one",
                allowed=", ".join(complete[-5:]) or "a complete run",
                remedy="toffee runs lists them.",
            )
        run = get_run(out, name)
        manifest = run.read_manifest()
        for output in manifest.outputs:
            compact = output == "trajectory" and (run.compact / HEADER).exists()
            if not (compact or run.parts(output)):
                raise InputError(
                    f"run {name} is not whole",
                    got=f"nothing in {output}",
                    allowed="a run as it was published",
                    remedy="Choose another run: toffee runs lists them.",
                )
        if manifest.state != "published":
            run.write_manifest(manifest.replaced(state="published", forced=True))
        gone = {other for other in published if other in gone or other > name} - {name}
        point_to(run, tuple(sorted(gone)))
        return run


def remove_old_runs(out: Path, keep: int) -> list[str]:
    """Remove what is not needed any more; return the names of the runs.

    Kept are the published run, its reference, the newest `keep` runs that were published, as many that were
    withdrawn and as many that were rejected, and unfinished runs that are no refresh (`toffee resume` may go
    on with them).
    """
    pointer = read_pointer(out)
    assert pointer is not None
    latest = get_run(out, pointer.run_id)
    refresh = latest.read_manifest().refresh
    needed = {latest.run_id, (refresh.reference if refresh is not None else "") or latest.run_id}
    states = {line.run: line.state for line in describe_runs(out)}
    states |= {name: "withdrawn" for name in pointer.withdrawn if states.get(name) == "published"}
    for state in ("published", "withdrawn", "rejected"):
        needed |= set([name for name in states if states[name] == state][-keep:])
    removed = []
    for run in list_runs(out):
        if run != latest and run.complete:
            # Only the next refresh starts from slices, and they are larger than the results. From some of
            # them none must start, should this end here.
            if not passes_link(run.out, run.warm):
                remove_file(run.warm / COLD)
            run.remove(run.warm)
        if run.run_id in needed or (not run.complete and not _is_left_over(run)):
            continue
        if passes_link(run.out, run.path):
            continue
        # Without them it is no run any more, and nothing to resume, whatever happens then.
        remove_file(run.job)
        remove_file(run.manifest)
        run.remove(run.path)
        removed.append(run.run_id)
    return removed


def _is_left_over(run: RunFolder) -> bool:
    """Whether an unfinished run is an abandoned refresh, or a folder that was being made or removed."""
    try:
        if run.begun:
            return run.read_job().following is not None
        # Its name is when it began.
        began = datetime.strptime(run.run_id.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    except ValueError:
        # What we cannot read may be somebody's.
        return False
    return time.time() - began.timestamp() > LEFT_OVER_SECONDS
