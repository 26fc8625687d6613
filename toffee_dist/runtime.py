"""The runtime: where tasks run. The only module, with the pipeline, that imports distributed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, get_args

from toffee_dist.errors import ConfigError

Mode = Literal["threads", "processes"]

# Enough that no worker waits, few enough that a million items do not sit in the scheduler.
AHEAD = 256


@contextmanager
def cluster(
    mode: Mode = "threads", workers: int | None = None, *, reader_threads: int | None = None
) -> Iterator[Any]:
    """Give a `distributed.Client` on this machine, closed whatever happens.

    Parameters
    ----------
    mode
        ``threads`` start at once and share memory; ``processes`` do not share the interpreter's lock.
    workers
        Threads or processes; where absent, one a core.
    reader_threads
        Threads of the file reader inside each process; where absent, the cores are shared out.

    Yields
    ------
    client
        Without a dashboard; processes talk over the loopback interface, threads over no socket at all.
    """
    if mode not in get_args(Mode):
        raise ConfigError("mode", got=repr(mode), allowed=", ".join(get_args(Mode)))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    count = cores if workers is None else workers
    if count < 1:
        raise ConfigError("workers", got=count, allowed="at least 1")
    import dask
    from distributed import Client, LocalCluster

    settings = {
        # Threads that hold the interpreter for seconds are no news here.
        "distributed.admin.tick.limit": "60s",
        # Even without a dashboard an HTTP server starts: it serves nothing, on a free port of the loopback.
        "distributed.scheduler.http.routes": [],
        "distributed.worker.http.routes": [],
    }
    options: dict[str, Any] = {
        "scheduler_kwargs": {"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        "worker_dashboard_address": "127.0.0.1:0",
        "silence_logs": logging.CRITICAL,
        "memory_limit": 0,
    }
    if mode == "threads":
        options |= {"processes": False, "n_workers": 1, "threads_per_worker": count}
    else:
        # Processes × threads of the reader within one must not exceed the cores.
        inner = reader_threads or max(1, cores // count)
        environment = {"POLARS_MAX_THREADS": str(inner), "OPENBLAS_NUM_THREADS": "1"}
        options |= {"processes": True, "n_workers": count, "threads_per_worker": 1, "env": environment}
        options |= {"host": "127.0.0.1"}
    with dask.config.set(settings), LocalCluster(**options) as local, Client(local) as client:
        yield client


def runner(client: Any) -> Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]:
    """Turn a client into the plain callable that the stages take: run(function, items) → results in order."""

    def run(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        waiting: list[Any] = []
        source = iter(items)
        try:
            while True:
                for item in source:
                    waiting.append(client.submit(function, item, pure=False))
                    if len(waiting) >= AHEAD:
                        break
                if not waiting:
                    return
                yield waiting.pop(0).result()
        finally:
            # On failure the rest must not go on writing into a folder that is about to go.
            if waiting:
                client.cancel(waiting)

    return run
