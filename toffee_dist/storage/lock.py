"""The lock of a folder of runs: a lease that one process holds while it changes which run is published."""

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
from pathlib import Path
from typing import Any

import psutil

from toffee_dist.errors import UnfinishedError
from toffee_dist.storage.files import create_file, read_text, remove_file, replacing

LOCK = "refresh.lock"
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
    ended. How long ago that was is told by the clock of the storage alone: hosts may have any time.

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
                remove_file(path)


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
        if holder is not None and not _is_stale(path, holder):
            raise UnfinishedError(
                "another embed, refresh, resume or rollback of this folder is under way",
                got=f"process {holder['pid']} on {holder['host']} since {holder['since']}",
                remedy=f"Wait for it; if it is gone, its lock counts for nothing after "
                f"{LEASE_SECONDS / 60:g} minutes, or remove {path}.",
            )
        if _take_over(path, own, holder):
            return
        time.sleep(random.uniform(0.1, 2.0**attempt))
    raise UnfinishedError(
        "others want the lock of this folder too",
        got=f"{TRIES} tries to take over {path}",
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
            if holder is not None and not _is_stale(other, holder):
                return False
        if _read_lock(path) != stale or not path.exists():
            return False
        _write_lock(path, own)
        for other in others:
            remove_file(other)
        return True
    finally:
        remove_file(claim)


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
    with replacing(path, durable=False) as temporary:
        temporary.write_bytes(_content(own))


def _read_lock(path: Path) -> dict[str, Any] | None:
    """Return a lock; None for what is not there, or is no lock of ours."""
    for last in (False, True):
        try:
            lock = json.loads(read_text(path))
            return {name: lock[name] for name in ("host", "pid", "started", "since", "token", "seen")}
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, RecursionError):
            if not last:
                # In a folder it is empty for the moment between being made and being written.
                time.sleep(0.2)
    return None


def _is_stale(path: Path, holder: Mapping[str, Any]) -> bool:
    try:
        if _age(path, holder) > LEASE_SECONDS:
            return True
        if holder["host"] != socket.gethostname():
            return False
        # Start times are counted from the boot: a clock that was set moves them a little.
        started = float(psutil.Process(int(holder["pid"])).create_time())
        return abs(started - float(holder["started"])) > 1.0
    except (psutil.NoSuchProcess, ValueError, TypeError, OverflowError):
        return True
    except psutil.AccessDenied:
        return False


def _age(path: Path, holder: Mapping[str, Any]) -> float:
    """Return the seconds since a lock was written, by the clock of the storage, which a new file tells."""
    probe = path.parent / f".{path.name}-{uuid.uuid4().hex}"
    try:
        probe.write_bytes(b"")
        now, written = probe.stat().st_mtime, path.stat().st_mtime
    except FileNotFoundError:
        # It was removed meanwhile; whoever makes the next one is found by the next look.
        return 0.0
    finally:
        probe.unlink(missing_ok=True)
    # A store that does not tell has only what the holder wrote.
    return now - written if now and written else abs(time.time() - float(holder["seen"]))
