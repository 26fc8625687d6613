"""The runtime: where tasks run, and how they are waited for.

One engine for every mode, a `distributed` client; see `cluster`. What needs distributed by name is here, and
in `workers` and `watchdog` beside it.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from toffee_dist.cluster.versions import check_scheduler
from toffee_dist.errors import ConfigError, UnfinishedError
from toffee_dist.settings import RuntimeSettings

# Workers that may die under one task before it is taken for the cause.
ALLOWED_FAILURES = 3
# Seconds between two looks for the workers of a local cluster: threads are there after 10 ms.
LOOK_LOCALLY = 0.005

# The environment of a worker process, as in deploy/worker.env. One thread of BLAS; memory that a solver frees
# is kept for its next array (Dask's nanny trims it, and solving then takes 1.6 times as long); no profiler,
# which looks at all stacks a hundred times per second: in Python 3.11 before 3.11.9 that may stop the whole
# process for ever (python/cpython#106883), the watch of stalls included. It has stopped a test of ours.
WORKER_ENVIRONMENT = {
    "DASK_DISTRIBUTED__WORKER__PROFILE__ENABLED": "False",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "MALLOC_TRIM_THRESHOLD_": str(2**28),
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
}

# More workers than this are a slip of the finger: each is a process of 200 MB, or a thread that waits.
WORKERS_PER_CORE, MANY_WORKERS = 4, 64

MODES = "auto, threads, processes, tcp://host:port, tls://host:port"


def count_cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_mode(mode: str, workers: int | None = None) -> None:
    """Raise unless there is such a mode, and this machine can be meant to have so many workers."""
    local = mode in ("auto", "threads", "processes")
    if not local and not _is_address(mode):
        raise ConfigError("mode", got=repr(mode), allowed=MODES)
    most = max(WORKERS_PER_CORE * count_cores(), MANY_WORKERS) if local else sys.maxsize
    if workers is not None and not 1 <= workers <= most:
        raise ConfigError(
            "workers",
            got=f"{workers:,}",
            allowed=f"1 to {most:,} on this machine of {count_cores()} cores" if local else "at least 1",
            remedy="Leave --workers out: one per core.",
        )


def _is_address(mode: str) -> bool:
    """Tell whether a mode is tcp://host:port or tls://host:port."""
    try:
        parts = urlsplit(mode)
        return parts.scheme in ("tcp", "tls") and bool(parts.hostname) and parts.port is not None
    except ValueError:
        return False


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
        Threads or processes, where absent one per core; of a running cluster, how many must be there.
    reader_threads
        Threads of the file reader inside each process; where absent, the cores are shared out.
    wait
        Seconds to wait for workers.
    tls
        For ``tls://``.

    Yields
    ------
    client
        A local one has no dashboard. Processes talk over the loopback interface, encrypted, and to those
        alone that have the key of this cluster; threads over no socket.
    """
    # Saves start-up time.
    from threadpoolctl import threadpool_limits

    check_mode(mode, workers)
    with ExitStack() as stack:
        # On the main thread, around the run: other threads cannot set it. One thread of BLAS is also what
        # makes the bytes the same in every mode; beside a running cluster, small matrices are solved here.
        stack.enter_context(threadpool_limits(1, user_api="blas"))
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
        # Before anything else is asked of it: another version may not know what we ask.
        if tls or settings.mode.startswith("tcp://"):
            check_scheduler(client)
        if settings.stall:
            # From now on the scheduler remembers tasks that ended: the report of a stall shows them.
            client.get_task_stream(start=0, stop=0)
        yield client


@contextmanager
def _local(mode: str, workers: int | None, reader_threads: int | None, wait: float) -> Iterator[Any]:
    # Saves start-up time.
    import dask
    from distributed import Client, LocalCluster
    from distributed.security import Security

    cores = count_cores()
    count = workers or cores
    settings: dict[str, Any] = {
        # Threads that hold the interpreter for seconds are no news here.
        "distributed.admin.tick.limit": "60s",
        # As in `WORKER_ENVIRONMENT`: workers that are threads are in this process.
        "distributed.worker.profile.enabled": False,
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
        options |= {"processes": False, "threads_per_worker": count, "protocol": "inproc://"}
    else:
        # Processes × threads of the reader within one must not exceed the cores.
        inner = reader_threads or max(1, cores // count)
        options |= {"processes": True, "threads_per_worker": 1, "host": "127.0.0.1", "protocol": "tls://"}
        # Whoever may speak to a scheduler, a nanny or a worker runs code in it, and every user of the machine
        # reaches the loopback. The key is made for this cluster and stays in the memory of its processes.
        options["security"] = Security.temporary()
        options["env"] = WORKER_ENVIRONMENT | {"POLARS_MAX_THREADS": str(inner)}
        settings["distributed.nanny.pre-spawn-environ"] = WORKER_ENVIRONMENT
    with dask.config.set(settings), ExitStack() as stack:
        with warnings.catch_warnings():
            # Nothing is spilled there: how long a busy disk takes to make it is no news.
            warnings.filterwarnings("ignore", message="Creating scratch directories is taking")
            local = stack.enter_context(LocalCluster(**options))
            client = stack.enter_context(Client(local))
            # A worker whose HTTP server has an address is taken to want a dashboard: 0.7 s to load.
            local.new_spec["options"]["dashboard"] = False
            processes = 1 if mode == "threads" else count
            local.scale(processes)
            _wait_for_local_workers(local.scheduler, processes, wait)
        local.sync(_close_http, local)
        yield client


async def _close_http(local: Any) -> None:
    """Close the HTTP servers of a local cluster in this process, which serve nothing."""
    for server in (local.scheduler, *local.workers.values()):
        # A nanny has none.
        if hasattr(server, "http_server"):
            server.http_server.stop()


@contextmanager
def _connect(address: str, wait: float, tls: Tls | None) -> Iterator[Any]:
    # Saves start-up time.
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


def _wait_for_local_workers(scheduler: Any, count: int, wait: float) -> None:
    """Wait for workers of a scheduler in this process; the client would look ten times per second only."""
    until = time.monotonic() + wait
    while len(scheduler.running) < count:
        if time.monotonic() > until:
            raise _too_few(count, wait)
        time.sleep(LOOK_LOCALLY)


def _wait_for_workers(client: Any, count: int, wait: float) -> None:
    try:
        client.wait_for_workers(count, timeout=wait)
    except (TimeoutError, OSError):
        raise _too_few(count, wait) from None


def _too_few(count: int, wait: float) -> UnfinishedError:
    return UnfinishedError(
        "workers",
        got=f"fewer than {count} within {wait:g} seconds",
        allowed=f"at least {count}",
        remedy="Start workers, or wait longer with --wait.",
    )
