"""What keeps a folder of runs in order: the lock, retention, rollback, and figures for those who watch it."""

from __future__ import annotations

import json
import logging
import os
import random
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from toffee_dist.errors import InputError, UnfinishedError
from toffee_dist.store import (
    LATEST,
    RunFolder,
    append_line,
    create_file,
    list_runs,
    point_to,
    read_json,
    remove_tree,
    replacing,
    write_json,
)

LOCK, LOG, METRICS = "refresh.lock", "refresh.jsonl", "refresh.prom"
# A folder of a run without any file of ours is older than this before it counts as left over.
LEFT_OVER_SECONDS = 86_400
# The holder of the lock says that often that it is alive; one that has not for so long holds nothing.
RENEW_SECONDS, LEASE_SECONDS = 30.0, 600.0
# How often we try to take over a lock that others want to take over at the same moment.
TRIES = 5

log = logging.getLogger(__name__)


@contextmanager
def hold_lock(out: Path) -> Iterator[None]:
    """Be the only one that changes which run is published, or say who is.

    The lock is a lease: a thread renews it for as long as the block lasts. A lock that was not renewed for
    `LEASE_SECONDS` is stale; so is at once that of a process of this host (by number and start) that has
    ended. Clocks of hosts must agree to within minutes.

    Raises
    ------
    UnfinishedError
        Where somebody else holds it.
    """
    path, own = out / LOCK, _this_process()
    _take(path, own)
    over = threading.Event()
    renewing = threading.Thread(target=_renew, args=(path, own, over), daemon=True, name="toffee-lock")
    renewing.start()
    try:
        yield
    finally:
        over.set()
        renewing.join()
        # Storage that fails now fails others too, and the lock will be stale.
        with suppress(OSError):
            holder = _read_lock(path)
            if holder is not None and holder["token"] == own["token"]:
                path.unlink(missing_ok=True)


def _take(path: Path, own: Mapping[str, Any]) -> None:
    for attempt in range(TRIES):
        holder = _read_lock(path)
        if holder is None and not path.exists():
            try:
                create_file(path, _content(own))
                return
            except FileExistsError:
                holder = _read_lock(path)
            if holder is None:
                continue
            if holder["token"] == own["token"]:
                # The first answer was lost on the way, and the request was sent again.
                return
        if holder is not None and not _is_stale(holder):
            raise UnfinishedError(
                "another refresh of this folder is under way",
                got=f"process {holder['pid']} on {holder['host']} since {holder['since']}",
                allowed="one at a time",
                remedy=f"Wait for it; if it is gone, its lock counts for nothing after "
                f"{LEASE_SECONDS / 60:g} minutes, or remove {path}.",
            )
        if _take_over(path, own, holder):
            return
        time.sleep(random.uniform(0.1, 2.0**attempt))
    raise UnfinishedError(
        "others want the lock of this folder too",
        got=f"{TRIES} tries to take over {path}",
        allowed="one at a time",
        remedy="Try again.",
    )


def _take_over(path: Path, own: Mapping[str, Any], stale: Mapping[str, Any] | None) -> bool:
    """Replace a stale lock, unless somebody else is about to.

    Whoever wants to says so first, in a file of its own, and then looks: of two at once at least one sees the
    other and leaves it. Whoever comes later sees the claim or, when that is gone, the new lock.
    """
    claim = path.parent / f"{path.name}.{own['token']}"
    _write_lock(claim, own)
    try:
        others = [other for other in path.parent.glob(f"{path.name}.*") if other.name != claim.name]
        for other in others:
            holder = _read_lock(other)
            if holder is not None and not _is_stale(holder):
                return False
        if _read_lock(path) != stale or not path.exists():
            return False
        _write_lock(path, own)
        for other in others:
            other.unlink(missing_ok=True)
        return True
    finally:
        claim.unlink(missing_ok=True)


def _renew(path: Path, own: Mapping[str, Any], over: threading.Event) -> None:
    """Say again and again that we are alive, until it is over or the lock is not ours any more."""
    seen = time.monotonic()
    while not over.wait(RENEW_SECONDS):
        with suppress(OSError):
            holder = _read_lock(path)
            if (
                holder is None
                or holder["token"] != own["token"]
                or time.monotonic() - seen > LEASE_SECONDS / 2
            ):
                # After so long a sleep somebody may just be taking over.
                log.warning("the lock %s was lost", path)
                return
            _write_lock(path, own)
            seen = time.monotonic()


def _this_process() -> dict[str, Any]:
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "started": psutil.Process().create_time(),
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "token": uuid.uuid4().hex,
    }


def _content(own: Mapping[str, Any]) -> bytes:
    return (json.dumps({**own, "seen": time.time()}, indent=1) + "\n").encode()


def _write_lock(path: Path, own: Mapping[str, Any]) -> None:
    with replacing(path) as temporary:
        temporary.write_bytes(_content(own))


def _read_lock(path: Path) -> dict[str, Any] | None:
    """Return a lock; None for what is not there, or is no lock of ours."""
    for last in (False, True):
        try:
            lock = json.loads(path.read_text())
            return {name: lock[name] for name in ("host", "pid", "started", "since", "token", "seen")}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            if not last:
                # In a folder it is empty for the moment between being made and being written.
                time.sleep(0.2)
    return None


def _is_stale(holder: Mapping[str, Any]) -> bool:
    try:
        if abs(time.time() - float(holder["seen"])) > LEASE_SECONDS:
            return True
        if holder["host"] != socket.gethostname():
            return False
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
            remove_tree(run.warm)
        if run.run_id in needed or (not run.published and not _is_left_over(run)):
            continue
        # Without its manifest it is no run any more, whatever happens then.
        run.manifest.unlink(missing_ok=True)
        remove_tree(run.path)
        removed.append(run.run_id)
    return removed


def _is_left_over(run: RunFolder) -> bool:
    """Whether an unfinished run is an abandoned refresh, or a folder that was being made or removed."""
    if (run.work / "job.json").exists():
        return "following" in run.read_job()
    # Its name is when it began.
    began = datetime.strptime(run.run_id.partition("-")[0], "%Y%m%dT%H%M%S.%f").replace(tzinfo=UTC)
    return time.time() - began.timestamp() > LEFT_OVER_SECONDS


def append_log(out: Path, line: Mapping[str, Any]) -> None:
    """Add one JSON line to the log of refreshes; a line is written at once."""
    append_line(out / LOG, json.dumps(line))


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
