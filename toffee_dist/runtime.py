"""The runtime: where tasks run, and how they are waited for.

One engine for every mode, a `distributed` client; see `cluster`. What needs distributed by name is here, and
in `survey` and `watchdog` beside it.
"""

from __future__ import annotations

import ctypes
import logging
import os
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
from toffee_dist.watchdog import ANSWER, STALL, Watch, diagnose, within

# Enough that no worker waits, few enough that a million items do not sit in the scheduler.
AHEAD = 256
# A task that raises is tried again this often; then the run ends, resumable.
RETRIES = 2
# Workers that may die under one task before it is taken for the cause.
ALLOWED_FAILURES = 3
# Seconds between two looks at whether there still is a cluster.
LOOK = 1.0

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
                _local("threads" if mode == "auto" else mode, workers, reader_threads, wait)
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
def _local(mode: str, workers: int | None, reader_threads: int | None, wait: float) -> Iterator[Any]:
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
        # They come below.
        "n_workers": 0,
    }
    if mode == "threads":
        options |= {"processes": False, "threads_per_worker": count}
    else:
        # Processes × threads of the reader within one must not exceed the cores.
        inner = reader_threads or max(1, cores // count)
        options |= {"processes": True, "threads_per_worker": 1, "host": "127.0.0.1"}
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
        # A worker whose HTTP server has an address is taken to want a dashboard, which takes 0.7 s to load.
        local.new_spec["options"]["dashboard"] = False
        processes = 1 if mode == "threads" else count
        local.scale(processes)
        _wait_for_workers(client, processes, wait)
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
    stall: float = STALL,
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
    try:
        return _guard(function, item)
    finally:
        give_back()


def give_back() -> None:
    """Return to the system what a task has freed: what one stage leaves must not add to the next one's peak.

    Between tasks, not within: it takes 1 to 4 ms, where the nanny's trimming on every free makes solving
    1.6 times as slow.
    """
    import pyarrow as pa

    pa.default_memory_pool().release_unused()
    # glibc's; other systems do as they do.
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def _guard(function: Callable[[Any], Any], item: Any) -> Any:
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
        raise lost("the scheduler is gone") from None
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
            raise lost(f"no worker for {wait:g} seconds")
        if watch.stalled(processing):
            raise _StallError


def lost(got: str) -> UnfinishedError:
    """Return what is said of a cluster that is gone."""
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
