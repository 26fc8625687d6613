"""Doors of a local cluster: whoever can reach its ports, and is not of the job, runs nothing."""

from __future__ import annotations

import ast
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import dask
import distributed
import psutil
import pytest
from click.testing import CliRunner

from tests.harness import ROOT, clusters, commands
from tests.harness.clusters import job, write_edges
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.cluster import client as runtime
from toffee_dist.cluster.client import cluster

pytestmark = pytest.mark.cluster


def listening(root: psutil.Process) -> list[int]:
    """Return the ports that a process and its children listen on."""
    found = []
    for process in (root, *root.children(recursive=True)):
        with suppress(psutil.NoSuchProcess):
            found += [c.laddr.port for c in process.net_connections("inet") if c.status == "LISTEN"]
    return found


def break_in(ports: list[int], folder: Path) -> list[str]:
    """Let a stranger try every port; return what it has left in the folder, which is all that it did."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.harness.stranger", str(folder), *map(str, ports)]
    subprocess.run(command, cwd=ROOT, timeout=60, check=True, stderr=subprocess.DEVNULL)
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.slow
def test_strangers_run_nothing_in_local_processes(tmp_path: Path) -> None:
    before = set(listening(psutil.Process()))
    with cluster("processes", 1) as client:
        ports = [port for port in listening(psutil.Process()) if port not in before]
        # Scheduler, nanny and worker.
        assert len(ports) >= 3
        assert break_in(ports, tmp_path / "broken") == []
        addresses = [client.scheduler.address, *client.scheduler_info()["workers"]]
        addresses += client.run(lambda dask_worker: dask_worker.nanny).values()
        assert [address[:6] for address in addresses] == ["tls://"] * 3
        # Who is of the job is served as before, and nobody else was hurt.
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.mark.slow
@pytest.mark.job
def test_strangers_run_nothing_in_an_embed(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", events=2000)
    slow = clusters.slow_slices(tmp_path / "slow.py", 5.0)
    arguments = commands.embed(edges, tmp_path / "out", "processes", 1)
    with commands.toffee(*arguments, environment=slow) as running:
        process = psutil.Process(running.pid)
        commands.wait_until(lambda: (tmp_path / "out").exists() and len(listening(process)) >= 3)
        assert break_in(listening(process), tmp_path / "broken") == []
        assert running.poll() is None


@pytest.mark.parametrize("demanded", [False, True])
def test_threads_listen_nowhere(demanded: bool) -> None:
    before = set(listening(psutil.Process()))
    # A user's configuration of Dask may demand encryption: there is nothing to encrypt.
    assert distributed.config["distributed"]["comm"]["require-encryption"] is None
    with dask.config.set({"distributed.comm.require-encryption": demanded}), cluster("threads", 1) as client:
        assert set(listening(psutil.Process())) <= before
        assert client.submit(sum, [1, 2]).result() == 3


@pytest.fixture
def addresses(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where the schedulers of all clusters listen that are opened."""
    found: list[str] = []
    wait = runtime._wait_for_local_workers

    def seen(scheduler: Any, *rest: Any) -> None:
        found.append(scheduler.address)
        wait(scheduler, *rest)

    monkeypatch.setattr(runtime, "_wait_for_local_workers", seen)
    return found


def test_what_listens_is_opened_in_one_place() -> None:
    """Whoever opens a socket elsewhere must say here how it is guarded."""
    clusters_of_dask = "LocalCluster SpecCluster SSHCluster Scheduler Nanny Server listen"
    servers = "HTTPServer ThreadingHTTPServer TCPServer create_server start_server serve bind"
    opening = set(f"{clusters_of_dask} {servers}".split())
    found = set()
    package = ROOT / "toffee_dist"
    for path in package.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            opened = [node.func] if isinstance(node, ast.Call) else []
            opened += node.bases if isinstance(node, ast.ClassDef) else []
            for one in opened:
                name = getattr(one, "attr", getattr(one, "id", ""))
                found |= {(path.relative_to(package).as_posix(), name)} if name in opening else set()
    # The second is that of `toffee serve`; tests/report/test_serve.py has its guards.
    assert found == {("cluster/client.py", "LocalCluster"), ("report/serve.py", "ThreadingHTTPServer")}


@pytest.mark.slow
@pytest.mark.job
def test_every_command_with_processes_is_behind_tls(tmp_path: Path, addresses: list[str]) -> None:
    edges, out = write_edges(tmp_path / "edges.parquet", nodes=60, events=600), tmp_path / "out"
    start_run(job(edges, out, mode="processes"))
    here = ["--mode=processes", "--workers=1"]
    for arguments in (
        ["ingest", str(edges), f"--out={tmp_path / 'staged'}", *here],
        ["plan", str(edges), *here],
        ["refresh", str(edges), f"--out={tmp_path / 'nights'}", "--last=7d", "--rank=4", *here],
        ["fold-in", str(out), str(edges), f"--to={tmp_path / 'new.parquet'}", *here],
        ["evaluate", str(edges), f"--out={tmp_path / 'quality'}", "--rank=4", "--seeds=1", "--workers=1"],
    ):
        found = len(addresses)
        done = CliRunner().invoke(cli, arguments, catch_exceptions=False)
        assert done.exit_code == 0, done.output
        # A refresh looks at the edges first, and opens a cluster for that.
        assert len(addresses) == found + (2 if arguments[0] == "refresh" else 1), arguments
    assert len(addresses) == 7
    assert all(address.startswith("tls://127.0.0.1:") for address in addresses)
