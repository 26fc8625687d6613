"""Real clusters for tests: `dask scheduler` and `dask worker` as processes of their own, on the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent, indent
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.settings import JobConfig

ENVIRONMENT = {
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
    "DASK_DISTRIBUTED__SCHEDULER__HTTP__ROUTES": "[]",
    "DASK_DISTRIBUTED__ADMIN__TICK__LIMIT": "60s",
}


class Stopped(BaseException):
    """The end of a client."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Cluster:
    """A scheduler and its workers; every process is ended with the test."""

    address: str
    scheduler: subprocess.Popen[bytes]
    security: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    workers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def add_worker(
        self, *options: str, address: str | None = None, security: Sequence[str] | None = None
    ) -> subprocess.Popen[bytes]:
        worker = start(
            "worker",
            address or self.address,
            "--nthreads=1",
            "--host=127.0.0.1",
            "--no-dashboard",
            "--memory-limit=0",
            *(self.security if security is None else security),
            *options,
            environment=self.environment,
        )
        self.workers.append(worker)
        return worker


def start(
    program: str, *arguments: str, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "dask", program, *arguments],
        env=os.environ | ENVIRONMENT | (environment or {}),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A group of its own, so that a nanny's children end with it.
        start_new_session=True,
    )


def stop(process: subprocess.Popen[Any]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(5)


def security_options(folder: Path, role: str) -> tuple[str, ...]:
    return (
        f"--tls-ca-file={folder / 'ca.pem'}",
        f"--tls-cert={folder / f'{role}.pem'}",
        f"--tls-key={folder / f'{role}-key.pem'}",
    )


@contextmanager
def cluster(
    workers: int = 2,
    *,
    certificates: Path | None = None,
    environment: dict[str, str] | None = None,
    nanny: bool = False,
) -> Iterator[Cluster]:
    """Start a scheduler and workers; `certificates` is a folder of `toffee certs`."""
    protocol = "tls" if certificates else "tcp"
    port = free_port()
    scheduler = start(
        "scheduler",
        f"--host={protocol}://127.0.0.1:{port}",
        "--no-dashboard",
        "--dashboard-address=127.0.0.1:0",
        *(security_options(certificates, "scheduler") if certificates else ()),
        environment=environment,
    )
    made = Cluster(
        f"{protocol}://127.0.0.1:{port}",
        scheduler,
        security_options(certificates, "worker") if certificates else (),
        environment or {},
    )
    try:
        wait_for_port(port)
        for _ in range(workers):
            made.add_worker("--nanny" if nanny else "--no-nanny")
        yield made
    finally:
        for process in [*made.workers, scheduler]:
            stop(process)


def wait_for_port(port: int, seconds: float = 30) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        with socket.socket() as probe:
            probe.settimeout(1)
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)
    raise TimeoutError(f"nothing listens on port {port}")


def write_edges(path: Path, *, nodes: int = 300, events: int = 6000, days: int = 40, seed: int = 0) -> Path:
    """Write a graph with communities that differ on weekends."""
    rng = np.random.default_rng(seed)
    day = rng.integers(days, size=events)
    source = rng.integers(nodes, size=events)
    other = rng.integers(nodes, size=events)
    shift = np.where(day % 7 >= 5, 7, 0)
    near = (source + 5 * rng.integers(1, 8, size=events) + shift) % nodes
    target = np.where(rng.random(events) < 0.8, near, other)
    frame = pl.DataFrame(
        {
            "source": [f"n{v:05d}" for v in source],
            "target": [f"n{v:05d}" for v in target],
            "time": 1_700_000_000 // 86400 * 86400 + day * 86400 + rng.integers(86400, size=events),
        }
    )
    frame.write_parquet(path)
    return path


def job(edges: Path, out: Path, **options: Any) -> JobConfig:
    settings: dict[str, Any] = {
        "inputs": (str(edges),),
        "out": str(out),
        "rank": 8,
        "outputs": ("embedding", "trajectory"),
        # A slice per frequency: much for one small job to do. tests/batch/test_trajectory.py has the filter.
        "trajectory_by": "als",
        "freqs": "all",
        "mode": "threads",
        "workers": 1,
        "wait": 30.0,
        "report": False,
    }
    return JobConfig.read(settings | options)


def digests(run: Path) -> dict[str, str]:
    """Return a digest of every Parquet file of a run, and of its compact trajectory, by its name."""
    files = sorted(path for path in run.rglob("*.parquet") if "work" not in path.relative_to(run).parts)
    files += sorted((run / "compact").glob("*"))
    return {str(p.relative_to(run)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def preload(path: Path, code: str) -> dict[str, str]:
    """Return an environment whose workers, of any cluster, load some code when they start."""
    path.write_text(code)
    return {"DASK_DISTRIBUTED__WORKER__PRELOAD": json.dumps([str(path)])}


def at_every_slice(path: Path, code: str) -> dict[str, str]:
    """Return an environment whose workers run some code with the `factors` of every slice."""
    return preload(
        path,
        f"""
import os, time
from pathlib import Path
from toffee_dist.batch import solve
def at_every_slice(*given, solve_slices=solve.solve_slices):
    for factors in solve_slices(*given):
{indent(dedent(code).strip(), " " * 8)}
        yield factors
# A process with two clusters, one after the other, loads this twice.
if solve.solve_slices.__name__ != "at_every_slice":
    solve.solve_slices = at_every_slice
""",
    )


def slow_slices(path: Path, seconds: float) -> dict[str, str]:
    """Return an environment whose workers take a moment for every slice, so that a test can act between."""
    return at_every_slice(path, f"time.sleep({seconds})")
