"""Workers that come and go: told to stop, at the end of their lifetime, or gone without a word."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import DEPLOY, clusters
from tests.harness.clusters import digests, job, slow_slices, write_edges
from tests.harness.commands import embed, finish, finished_slices, only_run, toffee, wait_until
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cluster.client import cluster

pytestmark = [pytest.mark.slow, pytest.mark.cluster]

SECONDS = 150
LEAVING = ("--nanny", "--preload-nanny=toffee_dist.cluster.retire")
# Everything of deploy/dask.yaml but its TLS.
SETTINGS = {
    "DASK_CONFIG": str(DEPLOY / "dask.yaml"),
    "DASK_DISTRIBUTED__COMM__REQUIRE_ENCRYPTION": "false",
}


def wait_for_file(path: str) -> str:
    while not Path(path).exists():
        time.sleep(0.1)
    return "done"


def test_a_worker_told_to_stop_gives_its_task_back(tmp_path: Path) -> None:
    """Its task is begun again elsewhere, and nobody counts a death under it."""
    go = tmp_path / "go"
    with clusters.cluster(workers=0, environment=SETTINGS) as running:
        processes = {name: running.add_worker(*LEAVING, f"--name={name}") for name in ("one", "two")}
        with cluster(running.address, 2, wait=SECONDS) as client:
            task = client.submit(wait_for_file, str(go), pure=False)
            first = wait_until(lambda: find_worker(client, ""), SECONDS)
            processes[first].send_signal(signal.SIGTERM)
            wait_until(lambda: find_worker(client, first), SECONDS)
            deaths = client.run_on_scheduler(count_deaths)
            go.touch()
            assert task.result(timeout=SECONDS) == "done"
    assert deaths == 0


def find_worker(client: Any, stopped: str) -> str:
    """Return the name of the worker that has the task, once it is not that one."""
    names = client.run_on_scheduler(list_busy)
    return next((name for name in names if name != stopped), "")


def list_busy(dask_scheduler: Any = None) -> list[str]:
    return [str(worker.name) for worker in dask_scheduler.workers.values() if worker.processing]


def count_deaths(dask_scheduler: Any = None) -> int:
    return sum(task.suspicious for task in dask_scheduler.tasks.values())


@pytest.mark.job
def test_workers_of_short_life_and_one_that_is_lost(tmp_path: Path) -> None:
    """Spot machines: each worker leaves after some seconds and comes again; one goes without a word."""
    edges = write_edges(tmp_path / "edges.parquet", nodes=300, events=6000, days=60)
    out = tmp_path / "out"
    expected = digests(start_run(job(edges, tmp_path / "threads", rank=24)).run.path)
    environment = SETTINGS | slow_slices(tmp_path / "slow.py", 0.5)
    with clusters.cluster(workers=0, environment=environment) as running:
        for _ in range(2):
            running.add_worker(*LEAVING, "--lifetime=8s", "--lifetime-stagger=3s", "--lifetime-restart")
        lost = running.add_worker("--no-nanny")
        # All of them may be starting again at once, on a machine that is slow to start them.
        with toffee(*embed(edges, out, running.address, 2), "--wait=120") as run:
            wait_until(lambda: len(finished_slices(out)) >= 4, SECONDS)
            lost.kill()
            _, err = run.communicate(timeout=SECONDS)
            code = run.returncode
    assert code == 0, err
    assert digests(only_run(out).path) == expected


@pytest.mark.job
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_nothing_listens_beyond_the_loopback(tmp_path: Path, mode: str) -> None:
    """All sockets of a local run, dashboard or not, its workers' too."""
    edges = write_edges(tmp_path / "edges.parquet", nodes=300, events=6000, days=60)
    out = tmp_path / "out"
    environment = slow_slices(tmp_path / "slow.py", 0.1)
    with toffee(*embed(edges, out, mode, 2), environment=environment) as run:
        wait_until(lambda: len(finished_slices(out)) >= 2, SECONDS)
        main = psutil.Process(run.pid)
        sockets = [
            connection.laddr.ip
            for process in (main, *main.children(recursive=True))
            for connection in process.net_connections(kind="inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        run.send_signal(signal.SIGTERM)
        code, _, err = finish(run)
    assert code == 5, err
    assert set(sockets) <= {"127.0.0.1", "::1"}
    if mode == "processes":
        assert sockets


def test_a_closed_cluster_does_not_keep_its_workers() -> None:
    """Leaving asks a scheduler that may be gone: the worker ends all the same."""
    with clusters.cluster(workers=1, environment=SETTINGS, nanny=True) as running:
        with cluster(running.address):
            pass
        running.scheduler.kill()
        running.scheduler.wait(10)
        running.workers[0].send_signal(signal.SIGTERM)
        running.workers[0].wait(60)


def test_the_settings_are_known_to_dask() -> None:
    """Every name of deploy/dask.yaml is one that Dask has: it says nothing of one that it does not know."""
    code = (
        "import dask.config, distributed, yaml, sys\n"
        "def names(tree, at=()):\n"
        "    for key, value in tree.items():\n"
        "        if isinstance(value, dict): yield from names(value, (*at, key))\n"
        "        else: yield '.'.join((*at, key))\n"
        "for name in names(yaml.safe_load(open(sys.argv[1]))):\n"
        "    dask.config.get(name)\n"
        "    print(name)\n"
    )
    plain = {name: value for name, value in os.environ.items() if not name.startswith("DASK_")}
    done = subprocess.run(
        [sys.executable, "-c", code, str(DEPLOY / "dask.yaml")],
        env=plain,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "distributed.comm.timeouts.tcp" in done.stdout.split()
