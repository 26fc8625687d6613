"""The runtime: where tasks run, and what is checked before the first one does.

One engine for every mode, a `distributed` client; see `cluster`. The only module, with the pipeline, that
imports distributed.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from toffee_dist.config import RuntimeSettings
from toffee_dist.errors import ConfigError, ToffeeError, UnfinishedError
from toffee_dist.store import place
from toffee_dist.watchdog import ANSWER, Watch, diagnose, within

# Enough that no worker waits, few enough that a million items do not sit in the scheduler.
AHEAD = 256
# A task that raises is tried again this often; then the run ends, resumable.
RETRIES = 2
# Workers that may die under one task before it is taken for the cause.
ALLOWED_FAILURES = 3
# Seconds between two looks at whether there still is a cluster.
LOOK = 1.0
# Dask ends a worker whose process takes more than this share of its limit.
USABLE_SHARE = 0.95

# The environment of a worker process, as in deploy/worker.env. One thread of BLAS; and memory that a solver
# frees is kept for its next array: Dask's nanny trims it, and solving then takes 1.6 times as long.
WORKER_ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}

MODES = "auto, threads, processes, tcp://host:port, tls://host:port"

log = logging.getLogger(__name__)


def count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_mode(mode: str) -> str:
    """Return the mode, or say which there are."""
    if mode not in ("auto", "threads", "processes") and not mode.startswith(("tcp://", "tls://")):
        raise ConfigError("mode", got=repr(mode), allowed=MODES)
    return mode


@dataclass(frozen=True)
class Tls:
    """Files of a client's identity on a TLS cluster."""

    ca: str
    cert: str
    key: str

    @classmethod
    def choose(cls, ca: str | None, cert: str | None, key: str | None) -> Tls:
        """Return the files given, which must be all three and readable."""
        for name, path in (("tls_ca", ca), ("tls_cert", cert), ("tls_key", key)):
            if path is None or not os.access(path, os.R_OK):
                raise ConfigError(
                    name,
                    got="nothing" if path is None else f"{path}, which cannot be read",
                    allowed="a PEM file: a tls:// cluster knows its clients by their certificate",
                    remedy="Give --tls-ca, --tls-cert and --tls-key.",
                )
        assert ca is not None
        assert cert is not None
        assert key is not None
        return cls(ca, cert, key)


@contextmanager
def cluster(
    mode: str = "threads",
    workers: int | None = None,
    *,
    reader_threads: int | None = None,
    wait: float = 60.0,
    tls: Tls | None = None,
) -> Iterator[Any]:
    """Give a `distributed.Client`; a local cluster is closed whatever happens, a running one is left alone.

    Parameters
    ----------
    mode
        ``threads`` start at once and share memory; ``processes`` do not share the interpreter's lock;
        ``tcp://…`` and ``tls://…`` are running clusters.
    workers
        Threads or processes, where absent one a core; of a running cluster, how many must be there.
    reader_threads
        Threads of the file reader inside each process; where absent, the cores are shared out.
    wait
        Seconds to wait for workers.
    tls
        For ``tls://``.

    Yields
    ------
    client
        A local one has no dashboard; processes talk over the loopback interface, threads over no socket.
    """
    check_mode(mode)
    if workers is not None and workers < 1:
        raise ConfigError("workers", got=workers, allowed="at least 1")
    with ExitStack() as stack:
        if mode.startswith(("tcp://", "tls://")):
            client = stack.enter_context(_connect(mode, wait, tls))
            _wait_for_workers(client, workers or 1, wait)
        else:
            client = stack.enter_context(
                _local("threads" if mode == "auto" else mode, workers, reader_threads)
            )
        yield client


@contextmanager
def open_cluster(settings: RuntimeSettings) -> Iterator[Any]:
    """Give a client as the settings say; see `cluster`."""
    tls = None
    if settings.mode.startswith("tls://"):
        tls = Tls.choose(settings.tls_ca, settings.tls_cert, settings.tls_key)
    with cluster(settings.mode, settings.workers, wait=settings.wait, tls=tls) as client:
        if settings.stall:
            # From now on the scheduler remembers tasks that ended: the report of a stall shows them.
            client.get_task_stream(start=0, stop=0)
        yield client


@contextmanager
def _local(mode: str, workers: int | None, reader_threads: int | None) -> Iterator[Any]:
    import dask
    from distributed import Client, LocalCluster
    from threadpoolctl import threadpool_limits

    cores = count_cores()
    count = workers or cores
    settings: dict[str, Any] = {
        # Threads that hold the interpreter for seconds are no news here.
        "distributed.admin.tick.limit": "60s",
        # Even without a dashboard an HTTP server starts: it serves nothing, on a free port of the loopback.
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
        "distributed.scheduler.allowed-failures": ALLOWED_FAILURES,
    }
    options: dict[str, Any] = {
        "scheduler_kwargs": {"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        "worker_dashboard_address": "127.0.0.1:0",
        "silence_logs": logging.CRITICAL,
        # The plan is checked against the memory there is; spilling and pausing know nothing of maps.
        "memory_limit": 0,
    }
    if mode == "threads":
        options |= {"processes": False, "n_workers": 1, "threads_per_worker": count}
    else:
        # Processes × threads of the reader within one must not exceed the cores.
        inner = reader_threads or max(1, cores // count)
        options |= {"processes": True, "n_workers": count, "threads_per_worker": 1, "host": "127.0.0.1"}
        options["env"] = WORKER_ENVIRONMENT | {"POLARS_MAX_THREADS": str(inner)}
        settings["distributed.nanny.pre-spawn-environ"] = WORKER_ENVIRONMENT
    # On the main thread, around the run: other threads cannot set it. One thread of BLAS is also what
    # makes the bytes the same in every mode.
    with (
        threadpool_limits(1, user_api="blas"),
        dask.config.set(settings),
        LocalCluster(**options) as local,
        Client(local) as client,
    ):
        yield client


@contextmanager
def _connect(address: str, wait: float, tls: Tls | None) -> Iterator[Any]:
    import dask
    from distributed import Client
    from distributed.security import Security

    security = None
    if address.startswith("tls://"):
        if tls is None:
            raise ConfigError(
                "certificates for a tls:// cluster",
                got="none",
                allowed="an authority, a certificate and its key",
                remedy="Give --tls-ca, --tls-cert and --tls-key.",
            )
        security = Security(
            tls_ca_file=tls.ca, tls_client_cert=tls.cert, tls_client_key=tls.key, require_encryption=True
        )
    _silence()
    with dask.config.set({"distributed.comm.timeouts.connect": f"{wait}s"}):
        try:
            client = Client(address, security=security, timeout=wait, set_as_default=False)
        except (OSError, TimeoutError, ValueError) as error:
            raise UnfinishedError(
                f"cannot connect to {address}",
                got=str(error).splitlines()[0] if str(error) else type(error).__name__,
                allowed="a scheduler of this address that trusts our certificate"
                if security
                else "a scheduler of this address",
                remedy="Is it running, and is tcp:// or tls:// right?",
            ) from None
    try:
        yield client
    finally:
        # Of a scheduler that is gone nobody says goodbye.
        client.close(timeout=2)


def _silence() -> None:
    """Let our one message speak: of a lost connection, the libraries log a page of tracebacks each."""
    for name in ("distributed", "tornado", "asyncio", *logging.root.manager.loggerDict):
        if name.partition(".")[0] in ("distributed", "tornado", "asyncio"):
            logging.getLogger(name).setLevel(logging.CRITICAL)


def _wait_for_workers(client: Any, count: int, wait: float) -> None:
    try:
        client.wait_for_workers(count, timeout=wait)
    except (TimeoutError, OSError):
        raise UnfinishedError(
            "workers",
            got=f"fewer than {count} within {wait:g} seconds",
            allowed=f"at least {count}",
            remedy="Start workers, or wait longer with --wait.",
        ) from None


Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]


def runner(
    client: Any,
    *,
    wait: float = 60.0,
    stall: float = 0.0,
    diagnostics: Path | None = None,
    done: Callable[[], None] = lambda: None,
) -> Run:
    """Turn a client into the plain callable that the stages take: run(function, items) → results in order.

    A task that raises is tried again, unless it says that the input or configuration is wrong. All workers
    gone for `wait` seconds, the scheduler gone, or `stall` seconds in which no task ends and none begins,
    end the run with `UnfinishedError`.

    Parameters
    ----------
    client
        Where the tasks run.
    wait
        Seconds for new workers to come when all are gone.
    stall
        Seconds without progress; 0 waits for ever.
    diagnostics
        Folder for what is known of the cluster after a stall.
    done
        Called after every task.
    """

    def run(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        waiting: deque[tuple[Any, Any]] = deque()
        source = iter(items)
        # What the dashboard and the logs call the tasks; a partial is called what it calls.
        name = getattr(getattr(function, "func", function), "__name__", "task")
        try:
            while True:
                for item in source:
                    key = f"{name}-{uuid.uuid4().hex}"
                    future = client.submit(_attempt, function, item, key=key, pure=False, retries=RETRIES)
                    waiting.append((future, item))
                    if len(waiting) >= AHEAD:
                        break
                if not waiting:
                    return
                try:
                    result = _result(client, waiting[0][0], wait, Watch(stall))
                except _StallError:
                    raise _explain_stall(client, stall, diagnostics, waiting) from None
                waiting.popleft()
                done()
                yield result
        finally:
            # On failure the rest must not go on writing into a folder that is about to go.
            if waiting and client.status == "running":
                with suppress(TimeoutError, OSError):
                    within(ANSWER, lambda: client.cancel([future for future, _ in waiting]))

    return run


class _StallError(Exception):
    """Nothing has happened for too long."""


def _explain_stall(
    client: Any, stall: float, folder: Path | None, waiting: Iterable[tuple[Any, Any]]
) -> UnfinishedError:
    where = "no folder"
    if folder is not None:
        diagnose(client, folder, {future.key: item for future, item in waiting})
        where = str(folder)
    return UnfinishedError(
        "the job makes no progress",
        got=f"no task that ended or began for {stall:g} seconds; diagnostics in {where}",
        allowed="a task that ends or begins within --stall seconds",
        remedy="Restart the workers that hang, then go on with toffee resume.",
    )


@dataclass(frozen=True)
class _Refused:
    """An answer of a task that no second try will change."""

    error: ToffeeError


class TaskError(Exception):
    """What went wrong in a task, in words: the error itself may not be able to travel."""


def _attempt(function: Callable[[Any], Any], item: Any) -> Any:
    problem: Exception
    try:
        return function(item)
    except UnfinishedError as error:
        problem = error
    except ToffeeError as error:
        return _Refused(error)
    except OSError as error:
        problem = OSError(error.errno, error.strerror or str(error), error.filename)
    except Exception as error:
        if os.environ.get("TOFFEE_DEBUG"):
            log.exception("a task failed")
        problem = TaskError(f"{type(error).__name__}: {error}")
    # Raised here, without the frames it came through: a client that cannot rebuild those waits for ever.
    raise problem


def _result(client: Any, future: Any, wait: float, watch: Watch) -> Any:
    from distributed import CancelledError, KilledWorker
    from distributed.comm import CommClosedError

    try:
        _await(client, future, wait, watch)
        result = future.result()
    except (CancelledError, CommClosedError):
        raise _lost("the scheduler is gone") from None
    except KilledWorker as error:
        raise UnfinishedError(
            "a task lost its worker again and again",
            got=f"{ALLOWED_FAILURES + 1} workers died under {error.task}",
            allowed="workers that live as long as their task",
            remedy="Out of memory? See toffee plan; then go on with toffee resume.",
        ) from None
    except OSError as error:
        raise UnfinishedError(
            "storage failed",
            got=f"{error}",
            allowed="a folder that every worker can read and write, with space",
            remedy="Make room or mend it, then go on with toffee resume.",
        ) from None
    except (ToffeeError, _StallError):
        raise
    except Exception as error:
        raise UnfinishedError(
            f"a task failed {RETRIES + 1} times",
            got=str(error) if isinstance(error, TaskError) else f"{type(error).__name__}: {error}",
            allowed="an answer",
            remedy="Workers started with TOFFEE_DEBUG=1 log the details; toffee resume tries again.",
        ) from None
    if isinstance(result, _Refused):
        raise result.error
    return result


def _await(client: Any, future: Any, wait: float, watch: Watch) -> None:
    """Wait for a future as long as there is somebody to work on it, and work is being done."""
    alone_since: float | None = None
    # Not future.result(timeout): what times out there is reported as an exception that nobody took.
    finished = threading.Event()
    future.add_done_callback(lambda _: finished.set())
    while future.status == "pending":
        if finished.wait(LOOK):
            return
        processing = _processing(client)
        alone_since = None if processing else (alone_since or time.monotonic())
        if alone_since is not None and time.monotonic() - alone_since > wait:
            raise _lost(f"no worker for {wait:g} seconds")
        if watch.stalled(processing):
            raise _StallError


def _lost(got: str) -> UnfinishedError:
    return UnfinishedError(
        "the cluster is lost",
        got=got,
        allowed="a scheduler and at least one worker",
        remedy="Start them again, then go on with toffee resume.",
    )


def _processing(client: Any) -> dict[str, Any]:
    """Return the tasks of every worker; nothing where nobody answers."""
    try:
        return dict(within(ANSWER, client.processing))
    except OSError:
        return {}


@dataclass(frozen=True)
class Worker:
    """What a worker is, by its own account."""

    address: str
    threads: int
    blas_threads: int
    memory: int


def survey(client: Any, folder: Path) -> list[Worker]:
    """Ask every worker what it is and whether it shares our storage; raise where it cannot serve.

    Checked: versions (ours, Python's, NumPy's, SciPy's, Dask's); that a file of ours is seen there and one of
    its own is seen here; that threads × BLAS threads do not exceed the cores. More than one BLAS thread is
    allowed, but then bytes may differ from those of other machines.
    """
    token = uuid.uuid4().hex
    (folder / f".{token}.client").write_text(token)
    try:
        found = client.run(probe, str(folder), token, on_error="return")
        for address, answer in found.items():
            _check_answer(address, answer, folder, token)
    except OSError as error:
        raise _lost(str(error)) from None
    finally:
        for path in folder.glob(f".{token}.*"):
            path.unlink(missing_ok=True)
    info = client.scheduler_info(n_workers=-1)["workers"]
    hosts = [answer["host"] for answer in found.values()]
    workers = []
    for address, answer in sorted(found.items()):
        limit = int(info.get(address, {}).get("memory_limit") or 0)
        memory = int(limit * USABLE_SHARE) or answer["available"] // hosts.count(answer["host"])
        workers.append(Worker(address, answer["threads"], answer["blas_threads"], memory))
    return workers


def probe(folder: str, token: str, dask_worker: Any = None) -> dict[str, Any]:
    """Run on a worker: say what it is, and leave a file."""
    import psutil
    from distributed.system import MEMORY_LIMIT
    from threadpoolctl import threadpool_info

    name = f".{token}.{uuid.uuid4().hex}"
    try:
        seen = (place(folder) / f".{token}.client").read_text() == token
        (place(folder) / name).write_text(token)
        problem = "" if seen else "our file reads differently there"
    except OSError as error:
        problem = str(error)
    taken = psutil.virtual_memory().total - psutil.virtual_memory().available
    return {
        "host": platform.node(),
        "threads": dask_worker.state.nthreads,
        "cores": count_cores(),
        "blas_threads": max(
            (pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"), default=1
        ),
        # A limit of the container counts, and so does what others already use.
        "available": min(MEMORY_LIMIT, psutil.virtual_memory().total) - taken,
        "versions": versions(),
        "file": name,
        "problem": problem,
    }


def peak_bytes(client: Any) -> int | None:
    """Return the most memory that one worker process had so far, where the system tells."""
    try:
        found = client.run(_high_water, on_error="return").values()
    except OSError:
        return None
    return max((peak for peak in found if isinstance(peak, int)), default=None)


def _high_water() -> int:
    """Run on a worker: return its largest resident set."""
    # Not that of getrusage, which counts what the parent had before exec.
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


def versions() -> dict[str, str]:
    """Return the versions that must be the same on every machine of a run."""
    import dask
    import distributed
    import numpy
    import scipy

    from toffee_dist import __version__

    return {
        "toffee_dist": __version__,
        "python": ".".join(platform.python_version_tuple()[:2]),
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
        "dask": dask.__version__,
        "distributed": distributed.__version__,
    }


def _check_answer(address: str, answer: Any, folder: Path, token: str) -> None:
    if isinstance(answer, BaseException):
        raise ConfigError(
            f"worker {address} cannot run our tasks",
            got=f"{type(answer).__name__}: {answer}",
            allowed="the same toffee_dist on every worker",
            remedy="Install it there.",
        )
    for name, version in versions().items():
        if answer["versions"].get(name) != version:
            raise ConfigError(
                f"{name} of worker {address}",
                got=answer["versions"].get(name, "none"),
                allowed=f"{version}, as here",
                remedy="Run client, scheduler and workers from one environment or image.",
            )
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
