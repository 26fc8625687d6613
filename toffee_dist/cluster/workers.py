"""The survey: what workers are, by their own account, and whether they can serve; before the first task."""

from __future__ import annotations

import platform
import sys
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toffee_dist.cluster.client import count_cores
from toffee_dist.cluster.mapping import lost
from toffee_dist.cluster.versions import check_versions, versions
from toffee_dist.errors import ConfigError

# Dask ends a worker whose process takes more than this share of its limit.
USABLE_SHARE = 0.95
# From here on the interpreter can be profiled without stopping for ever (python/cpython#106883).
PROFILED_SAFELY = (3, 11, 9)


@dataclass(frozen=True)
class Worker:
    """What a worker is, by its own account."""

    address: str
    threads: int
    blas_threads: int
    memory: int
    blas: str
    may_hang: bool = False


def ask_workers(client: Any, folder: Path) -> list[Worker]:
    """Ask every worker what it is and whether it shares our storage; raise where it cannot serve.

    Checked: versions (ours, Python's, NumPy's, SciPy's, Dask's); that a file of ours is seen there and one of
    its own is seen here; that threads × BLAS threads do not exceed the cores. More than one BLAS thread is
    allowed, but then bytes may differ from those of other machines.
    """
    token = uuid.uuid4().hex
    (folder / f".{token}.client").write_text(token)
    try:
        found = client.run(probe, folder, token, on_error="return")
        for address, answer in found.items():
            _check_answer(address, answer, folder, token)
        if not found:
            raise lost("no worker is left")
    except OSError as error:
        raise lost(str(error)) from None
    finally:
        for path in folder.glob(f".{token}.*"):
            path.unlink(missing_ok=True)
    info = client.scheduler_info(n_workers=-1)["workers"]
    hosts = [answer["host"] for answer in found.values()]
    workers = []
    for address, answer in sorted(found.items()):
        limit = int(info.get(address, {}).get("memory_limit") or 0)
        memory = int(limit * USABLE_SHARE) or answer["available"] // hosts.count(answer["host"])
        about = (answer["threads"], answer["blas_threads"], memory, answer["blas"], answer["may_hang"])
        workers.append(Worker(address, *about))
    return workers


def probe(folder: Path, token: str, dask_worker: Any = None) -> dict[str, Any]:
    """Run on a worker: say what it is, and leave a file."""
    # Saves start-up time.
    import psutil
    from distributed.system import MEMORY_LIMIT

    name = f".{token}.{uuid.uuid4().hex}"
    try:
        seen = (folder / f".{token}.client").read_text() == token
        (folder / name).write_text(token)
        problem = "" if seen else "our file reads differently there"
    except OSError as error:
        problem = str(error)
    taken = psutil.virtual_memory().total - psutil.virtual_memory().available
    return {
        "host": platform.node(),
        "threads": dask_worker.state.nthreads,
        "cores": count_cores(),
        "blas_threads": max((int(pool["num_threads"]) for pool in _blas_pools()), default=1),
        "blas": describe_blas(),
        "may_hang": "profile" in dask_worker.periodic_callbacks and sys.version_info < PROFILED_SAFELY,
        # A limit of the container counts, and so does what others already use.
        "available": min(MEMORY_LIMIT, psutil.virtual_memory().total) - taken,
        "versions": versions(),
        "file": name,
        "problem": problem,
    }


def describe_blas() -> str:
    """Return the libraries of linear algebra here, and for which processor each has chosen its code."""
    found = {
        f"{pool['internal_api']} {pool['version']} for {pool.get('architecture') or 'any processor'}"
        for pool in _blas_pools()
    }
    return ", ".join(sorted(found))


def _blas_pools() -> list[dict[str, Any]]:
    # Saves start-up time. Each of these libraries brings its own.
    import numpy  # noqa: F401
    import scipy.linalg  # noqa: F401
    from threadpoolctl import threadpool_info

    return [pool for pool in threadpool_info() if pool["user_api"] == "blas"]


def find_warnings(workers: Sequence[Worker]) -> list[str]:
    """Return what should be known of workers that can serve."""
    return [warning for warning in (compare_blas(workers), find_profiled(workers)) if warning]


def find_profiled(workers: Sequence[Worker]) -> str:
    """Return a warning where workers may hang for ever; empty where none may."""
    count = sum(worker.may_hang for worker in workers)
    if not count:
        return ""
    return (
        f"Warning: {count} of {len(workers)} workers run Dask's profiler, which in Python "
        f"{platform.python_version()} can stop a worker for ever (python/cpython#106883). Start workers with "
        "the environment of deploy/worker.env, or take Python 3.11.9 or newer."
    )


def compare_blas(workers: Sequence[Worker]) -> str:
    """Return a warning where workers compute by other libraries than we do; empty where all are equal.

    They add in another order, so that last digits differ: every result is right, but a run that is resumed or
    repeated elsewhere may have other bytes. (Seen: OpenBLAS for Haswell and for SkylakeX, in one image.)
    """
    here = describe_blas()
    others = sorted({worker.blas for worker in workers} - {here})
    if not others:
        return ""
    count = sum(worker.blas != here for worker in workers)
    return (
        f"Warning: {count} of {len(workers)} workers use another BLAS ({'; '.join(others)}) than this "
        f"process ({here}): the bytes of results may differ from those of other runs. Where they must not, "
        "set OPENBLAS_CORETYPE to one processor everywhere, or use machines of one kind."
    )


def find_dashboard(client: Any) -> str | None:
    """Return the address of the dashboard; the scheduler names a port even where it serves none."""
    try:
        return str(client.dashboard_link) if client.run_on_scheduler(serves_dashboard) else None
    except OSError as error:
        raise lost(str(error)) from None


def serves_dashboard(dask_scheduler: Any = None) -> bool:
    """Run on a scheduler: say whether pages were added to its HTTP server."""
    return bool(dask_scheduler.http_application.applications)


def peak_bytes(client: Any) -> int | None:
    """Return the most memory that one worker process had so far, where the system tells."""
    try:
        found = client.run(high_water, on_error="return").values()
    except OSError:
        return None
    return max((peak for peak in found if isinstance(peak, int)), default=None)


def high_water() -> int:
    """Run on a worker: return its largest resident set."""
    # Not that of getrusage, which counts what the parent had before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def _check_answer(address: str, answer: Any, folder: Path, token: str) -> None:
    # A connection that broke: the worker is gone, and nothing is wrong with what was asked for.
    if isinstance(answer, OSError):
        raise lost(f"worker {address}: {answer}")
    if isinstance(answer, BaseException):
        raise ConfigError(
            f"worker {address} cannot run our tasks",
            got=f"{type(answer).__name__}: {answer}",
            allowed="the same toffee_dist on every worker",
            remedy="Install it there.",
        )
    check_versions(f"worker {address}", answer["versions"])
    if answer["problem"] or not (folder / answer["file"]).exists():
        raise ConfigError(
            f"storage of worker {address}",
            got=answer["problem"] or "a file that it wrote is not seen here",
            allowed=f"{folder}, readable and writable on every machine of the run",
            remedy="Mount it there, or choose another --out.",
        )
    if answer["threads"] * answer["blas_threads"] > answer["cores"] and answer["blas_threads"] > 1:
        raise ConfigError(
            f"BLAS threads of worker {address}",
            got=f"{answer['threads']} threads × {answer['blas_threads']} of BLAS on {answer['cores']} cores",
            allowed="no more than the cores",
            remedy="Start workers with OPENBLAS_NUM_THREADS=1 (deploy/worker.env).",
        )
