"""What keeps a folder of runs in order: the lock, retention, rollback, and figures for those who watch it."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from toffee_dist.errors import InputError, UnfinishedError
from toffee_dist.store import LATEST, RunFolder, list_runs, point_to, read_json, replacing, write_json

LOCK, GUARD, LOG, METRICS = "refresh.lock", ".refresh.guard", "refresh.jsonl", "refresh.prom"
# A folder of a run without any file of ours is older than this before it counts as left over.
LEFT_OVER_SECONDS = 86_400


@contextmanager
def hold_lock(out: Path) -> Iterator[None]:
    """Be the only one that changes which run is published, or say who is.

    The lock names its process by host, number and start: a process that has ended, or whose number another
    one has now, holds nothing. Of a process on another host we cannot tell.

    Raises
    ------
    UnfinishedError
        Where somebody else holds it.
    """
    path, own = out / LOCK, _this_process()
    # Looking and taking are one: else two that find the same stale lock would both take it.
    with open(out / GUARD, "w") as guard:
        fcntl.flock(guard, fcntl.LOCK_EX)
        holder = _read_lock(path)
        if holder is not None and not _is_stale(holder):
            raise UnfinishedError(
                "another refresh of this folder is under way",
                got=f"process {holder['pid']} on {holder['host']} since {holder['since']}",
                allowed="one at a time",
                remedy=f"Wait for it; if it is gone, with its machine, remove {path}.",
            )
        write_json(path, own)
    try:
        yield
    finally:
        if _read_lock(path) == own:
            path.unlink(missing_ok=True)


def _this_process() -> dict[str, Any]:
    started = psutil.Process().create_time()
    since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"host": socket.gethostname(), "pid": os.getpid(), "started": started, "since": since}


def _read_lock(path: Path) -> dict[str, Any] | None:
    try:
        lock = json.loads(path.read_text())
        return {name: lock[name] for name in ("host", "pid", "started", "since")}
    except (OSError, ValueError, KeyError, TypeError):
        # Locks appear whole: what cannot be read is not one.
        return None


def _is_stale(holder: Mapping[str, Any]) -> bool:
    if holder["host"] != socket.gethostname():
        return False
    try:
        # Start times are counted from the boot: a clock that was set moves them a little.
        started = float(psutil.Process(int(holder["pid"])).create_time())
        return abs(started - float(holder["started"])) > 1.0
    except (psutil.NoSuchProcess, ValueError):
        return True
    except psutil.AccessDenied:
        return False


def describe_runs(out: Path) -> list[dict[str, Any]]:
    """Return every run of a folder, oldest first: its state, and the figures that tell them apart."""
    current = read_json(out / LATEST).get("run_id") if (out / LATEST).exists() else None
    found = []
    for run in list_runs(out):
        row: dict[str, Any] = {"run": run.run_id, "state": "unfinished", "latest": run.run_id == current}
        if run.published:
            try:
                manifest = read_json(run.manifest)
                refresh = manifest.get("refresh", {})
                drift = refresh.get("drift") or [{}]
                row |= {
                    "state": manifest["state"],
                    "first": manifest["summary"]["first"],
                    "last": manifest["summary"]["last"],
                    "nodes": manifest["summary"]["nodes"],
                    "cosine": drift[0].get("cosine", {}).get("p50"),
                    "reasons": refresh.get("reasons", []),
                }
            except (InputError, KeyError):
                row["state"] = "damaged"
        found.append(row)
    return found


def roll_back(out: Path, to: str | None = None) -> RunFolder:
    """Publish an earlier run again, or any complete run by its name; return it.

    The runs after it are withdrawn: a refresh of the same night does not publish them again.

    Raises
    ------
    InputError
        Where there is no such run, or it is not whole.
    """
    with hold_lock(out):
        pointer = read_json(out / LATEST) if (out / LATEST).exists() else {"run_id": ""}
        complete = [row["run"] for row in describe_runs(out) if row["state"] in ("published", "rejected")]
        published = [row["run"] for row in describe_runs(out) if row["state"] == "published"]
        earlier = [name for name in published if name < pointer["run_id"]]
        name = to if to is not None else (earlier[-1] if earlier else None)
        if name is None or name not in complete:
            raise InputError(
                "no run to go back to",
                got=repr(to) if to is not None else f"{len(earlier)} published runs before this one",
                allowed=", ".join(complete[-5:]) or "a complete run",
                remedy="toffee runs lists them.",
            )
        run = RunFolder(out.absolute() / "runs" / name)
        manifest = read_json(run.manifest)
        for output in manifest["outputs"]:
            if not any((run.path / output).glob("part-*.parquet")):
                raise InputError(
                    f"run {name} is not whole",
                    got=f"nothing in {output}",
                    allowed="a run as it was published",
                    remedy="Choose another run: toffee runs lists them.",
                )
        if manifest["state"] != "published":
            write_json(run.manifest, manifest | {"state": "published", "forced": True})
        withdrawn = [*pointer.get("withdrawn", []), *(other for other in published if other > name)]
        point_to(run, tuple(sorted({*withdrawn} - {name})))
        return run


def remove_old_runs(out: Path, keep: int) -> list[str]:
    """Remove what is not needed any more; return the names of the runs.

    Kept are the published run, its reference, the newest `keep` runs that were published and as many that
    were rejected, and unfinished runs that are no refresh (`toffee resume` may go on with them).
    """
    latest = str(read_json(out / LATEST)["run_id"])
    current = read_json(out / "runs" / latest / "manifest.json")
    needed = {latest, current.get("refresh", {}).get("reference") or latest}
    states = {row["run"]: row["state"] for row in describe_runs(out)}
    for state in ("published", "rejected"):
        needed |= set([name for name in states if states[name] == state][-keep:])
    removed = []
    for run in list_runs(out):
        if run.run_id != latest and run.published:
            # Only the next night starts from slices, and they are larger than the results.
            shutil.rmtree(run.warm, ignore_errors=True)
        if run.run_id in needed or (not run.published and not _is_left_over(run)):
            continue
        # Without its manifest it is no run any more, whatever happens then.
        run.manifest.unlink(missing_ok=True)
        shutil.rmtree(run.path, ignore_errors=True)
        removed.append(run.run_id)
    return removed


def _is_left_over(run: RunFolder) -> bool:
    """Whether an unfinished run is an abandoned refresh, or a folder that was being made or removed."""
    if (run.work / "job.json").exists():
        return "following" in run.read_job()
    return time.time() - run.path.stat().st_mtime > LEFT_OVER_SECONDS


def append_log(out: Path, line: Mapping[str, Any]) -> None:
    """Add one JSON line to the log of refreshes; a line is written at once."""
    with open(out / LOG, "a") as file:
        file.write(json.dumps(line) + "\n")


def write_metrics(out: Path, line: Mapping[str, Any]) -> None:
    """Replace the Prometheus text file with the figures of the last refresh."""
    good = line["state"] in ("published", "unchanged")
    figures = {
        "success": float(good),
        "rejected": float(line["state"] == "rejected"),
        "finished_timestamp_seconds": time.time(),
    }
    if (out / LATEST).exists():
        figures["published_timestamp_seconds"] = (out / LATEST).stat().st_mtime
    figures |= {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    text = "".join(
        f"# TYPE toffee_refresh_{name} gauge\ntoffee_refresh_{name} {value!r}\n"
        for name, value in figures.items()
    )
    with replacing(out / METRICS) as temporary:
        temporary.write_text(text)
