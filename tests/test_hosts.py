"""Several hosts, each with its own address, and TLS between them: the job, a host cut off, a refresh.

`make cluster-test`. The hosts are network namespaces of this machine (deploy/hosts.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import hosts
import psutil
import pytest

from tests.clusters import digests, job
from tests.nights import night, write_days
from tests.test_faults import wait_until
from toffee_dist.demo import make_graph
from toffee_dist.pipeline import start_run
from toffee_dist.refresh import refresh
from toffee_dist.slices import is_finished
from toffee_dist.store import list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DEMO = {"step": "6h", "undirected": True, "rank": 16, "freqs": "lowest:48"}
SECONDS = 240

# Makes every slice take a moment, so that a host can be cut off between two of them.
SLOW = """
import time
from toffee_dist import tasks
def slowly(*given, solve=tasks.solve_slices):
    for factors in solve(*given):
        time.sleep(0.1)
        yield factors
tasks.solve_slices = slowly
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    """Three hosts with a worker each, whose slices take a moment, a scheduler and a client."""
    if reason := hosts.why_not():
        pytest.skip(f"no hosts on this machine: {reason}")
    folder = tmp_path_factory.mktemp("hosts")
    (folder / "slow.py").write_text(SLOW)
    preload = json.dumps(["toffee_dist.leaving", str(folder / "slow.py")])
    with hosts.cluster(3, folder, {"DASK_DISTRIBUTED__WORKER__PRELOAD": preload}) as made:
        yield made
        for log in sorted(folder.glob("*.log")):
            print(log.name, log.read_text()[-2000:], sep="\n")


def toffee(cluster: hosts.Cluster, *arguments: str) -> subprocess.Popen[str]:
    """Start the command on the client's host."""
    return cluster.client.start(
        *(sys.executable, "-m", "toffee_dist.cli", *arguments, *cluster.options),
        environment=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=SECONDS)
    assert "Traceback" not in err
    assert run.returncode == 0, err
    return out


def count_slices(out: Path) -> int:
    runs = list_runs(out)
    folder = runs[-1].slices if runs else out
    return sum(is_finished(folder, path.stem, "ARC") for path in folder.glob("[0-9]*.json"))


def test_the_job_with_a_host_cut_off(cluster: hosts.Cluster, tmp_path: Path) -> None:
    edges, out = tmp_path / "edges.parquet", tmp_path / "out"
    make_graph()[0].write_parquet(edges)
    options = [f"--{name}={value}" for name, value in DEMO.items() if value is not True]
    command = ["embed", str(edges), f"--out={out}", "--undirected", "--outputs=embedding,trajectory"]
    run = toffee(cluster, *command, *options, "--workers=3", "--wait=60")
    wait_until(lambda: count_slices(out) >= 6, SECONDS)
    cluster.network.cut("worker-1")
    cut = time.monotonic()
    finish(run)
    print(f"finished {time.monotonic() - cut:.1f} s after worker-1 was cut off")
    expected = start_run(job(edges, tmp_path / "threads", **DEMO))
    [done] = list_runs(out)
    assert digests(done.path) == digests(expected.run.path)


def test_nights_on_the_hosts_that_are_left(cluster: hosts.Cluster, tmp_path: Path) -> None:
    edges = write_days(tmp_path / "edges", 0, 31)
    here, there = tmp_path / "threads", tmp_path / "hosts"
    for day in ("2026-02-03", "2026-02-04"):
        refresh(night(edges, here, as_of=day))
        command = ["refresh", str(edges), f"--out={there}", "--rank=8", "--last=28d", f"--as-of={day}"]
        done = json.loads(finish(toffee(cluster, *command, "--json", "--workers=2")))
        assert done["state"] == "published"
    runs = zip(list_runs(here), list_runs(there), strict=True)
    assert all(digests(mine.path) == digests(theirs.path) for mine, theirs in runs)


def test_nothing_stays(tmp_path: Path) -> None:
    """Even when it is killed: no process, and with the last process no namespace."""
    if reason := hosts.why_not():
        pytest.skip(f"no hosts on this machine: {reason}")
    script = Path(hosts.__file__)
    command = [sys.executable, str(script), "--workers=1", "--", "sleep", "600"]
    run = subprocess.Popen(command, start_new_session=True)
    try:
        started: list[psutil.Process] = wait_until(lambda: found if len(found := below(run.pid)) >= 7 else [])
        namespaces = {os.readlink(f"/proc/{process.pid}/ns/net") for process in started}
        assert len(namespaces) >= 4
    finally:
        run.kill()
        run.wait(10)
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive


def below(pid: int) -> list[Any]:
    return psutil.Process(pid).children(recursive=True)
