"""Several hosts, each with its own address, and TLS between them: jobs, hosts cut off, a refresh.

`make cluster-test`. The hosts are network namespaces of this machine (deploy/hosts.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import hosts
import psutil
import pytest

from tests.harness.clusters import digests, job, preload, slow_slices, write_edges
from tests.harness.commands import wait_until
from tests.harness.refreshes import night, write_days
from toffee_dist.batch.pipeline import start_run
from toffee_dist.demo import make_graph
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.runs import find_run, list_runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.cluster]

DEMO = {"step": "6h", "undirected": True, "rank": 16, "freqs": "lowest:48", "trajectory_by": "als"}
SECONDS = 240


BUCKET = "s3://graphs"
S3_PORT = 9000


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[hosts.Cluster]:
    """Six hosts: S3 storage, a scheduler, a client, and three workers whose slices take a moment."""
    if reason := hosts.why_not():
        pytest.skip(f"no hosts on this machine: {reason}")
    folder = tmp_path_factory.mktemp("hosts")
    with hosts.network() as network:
        storage = network.add("storage")
        environment = {
            **slow_slices(folder / "slow.py", 0.1),
            "AWS_ENDPOINT_URL": f"http://{storage.address}:{S3_PORT}",
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "NO_PROXY": "*",
            "no_proxy": "*",
        }
        with open(folder / "storage.log", "wb") as log:
            server = [sys.executable, "-m", "moto.server", "-H", storage.address, "-p", str(S3_PORT)]
            storage.start(*server, stdout=log, stderr=log)
        made = hosts.start_cluster(network, 3, folder, environment)
        ask_s3(made, f"fs.mkdir({BUCKET!r})", again=30)
        yield made
        for path in sorted(folder.glob("*.log")):
            print(path.name, path.read_text()[-2000:], sep="\n")


def ask_s3(cluster: hosts.Cluster, code: str, again: int = 0) -> str:
    """Run a line on the client's host, with an S3 file system `fs`: we are not on that network."""
    lines = f"""
import time, s3fs
for more in range({again}, -1, -1):
    try:
        fs = s3fs.S3FileSystem(skip_instance_cache=True)
        {code}
        break
    except Exception:
        if not more:
            raise
        time.sleep(1)
"""
    run = cluster.client.start(
        *(sys.executable, "-c", lines),
        environment=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    return finish(run)


def toffee(cluster: hosts.Cluster, *arguments: str, limits: Limits | None = None) -> subprocess.Popen[str]:
    """Start the command on the client's host, with other limits for `toffee embed` if any are given."""
    code = f"""
import functools, runpy
from toffee_dist.batch import pipeline
from toffee_dist.limits import Limits
pipeline.start_run = functools.partial(pipeline.start_run, limits={limits})
runpy.run_module("toffee_dist.cli", run_name="__main__")
"""
    program = ["-m", "toffee_dist.cli"] if limits is None else ["-c", code]
    return cluster.client.start(
        *(sys.executable, *program, *arguments, *cluster.options),
        environment=cluster.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(run: subprocess.Popen[str]) -> str:
    out, err = run.communicate(timeout=SECONDS)
    assert run.returncode == 0, err
    assert "Traceback" not in err
    return out


@pytest.mark.job
def test_the_job_with_a_host_cut_off(cluster: hosts.Cluster, tmp_path: Path) -> None:
    edges = tmp_path / "edges.parquet"
    make_graph()[0].write_parquet(edges)
    ask_s3(cluster, f"fs.put({str(edges)!r}, '{BUCKET}/edges/edges.parquet')")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in DEMO.items() if value is not True]
    where = [f"{BUCKET}/edges/", f"--out={BUCKET}/vectors", "--workers=3", "--wait=60"]
    run = toffee(cluster, "embed", *where, "--undirected", "--outputs=embedding,trajectory", *options)
    ask_s3(cluster, f"assert len(fs.glob('{BUCKET}/vectors/runs/*/work/slices/0*.json')) >= 6", again=90)
    assert run.poll() is None
    cluster.network.cut("worker-1")
    finish(run)
    expected = start_run(job(edges, tmp_path / "threads", **DEMO))
    ask_s3(cluster, f"fs.get('{BUCKET}/vectors', {str(tmp_path)!r}, recursive=True)")
    assert digests(find_run(tmp_path / "vectors").path) == digests(expected.run.path)


# Six blocks, twenty passes and some.
BLOCKS = Limits(block_work=1700)
MIDDLE = 9


@pytest.mark.job
def test_a_host_cut_off_in_the_middle_of_a_pass(cluster: hosts.Cluster, tmp_path: Path) -> None:
    """A new host stops at a block of a pass, is cut off there, and goes on without a network."""
    began, go_on, wrote = (tmp_path / name for name in ("began", "go-on", "wrote"))
    code = f"""
import os, time
from toffee_dist.batch import passes
def run_pass(task, run_pass=passes.run_pass):
    name = os.path.basename(task.record)
    if name < "pass-{MIDDLE:05d}":
        return run_pass(task)
    with open({str(began)!r}, "a") as file:
        print(name, task.index, file=file)
    until = time.monotonic() + {SECONDS}
    while not os.path.exists({str(go_on)!r}) and time.monotonic() < until:
        time.sleep(0.05)
    done = run_pass(task)
    open({str(wrote)!r}, "w").close()
    return done
passes.run_pass = run_pass
"""
    holding = cluster.environment | preload(tmp_path / "hold.py", code)
    worker = replace(cluster, environment=holding).add_worker("worker-4")
    wait_until(lambda: "Registered to" in (cluster.logs / "worker-4.log").read_text(), 60)
    edges = write_edges(tmp_path / "edges.parquet", nodes=250, events=5000, days=12)
    ask_s3(cluster, f"fs.put({str(edges)!r}, '{BUCKET}/blocks/edges.parquet')")
    out = f"{BUCKET}/sharded"
    where = [f"{BUCKET}/blocks/", f"--out={out}", "--workers=3", "--wait=60"]
    run = toffee(cluster, "embed", *where, "--undirected", "--rank=6", limits=BLOCKS)
    wait_until(lambda: run.poll() is not None or (began.exists() and "\n" in began.read_text()), SECONDS)
    assert run.poll() is None, run.communicate()
    name, index = began.read_text().split()
    # Passes are done one after the other: the store has all before this one, and of this one some blocks.
    passes = f"{out}/runs/*/work/slices/passes-*"
    ask_s3(cluster, f"assert len(fs.glob('{passes}/{name}.0*.json')) >= 2", again=60)
    cluster.network.cut("worker-4")
    stored = ask_s3(cluster, f"print(fs.glob('{passes}/{name}.0*.json'), fs.glob('{passes}/done-*'))")
    number = int(name.removeprefix("pass-"))
    assert stored.count("done-") == number
    assert stored.count(name) >= 2
    assert f"{name}.{int(index):05d}.json" not in stored
    go_on.touch()
    finish(run)
    # Another host has done that block.
    assert not wrote.exists()
    os.killpg(worker.pid, 9)
    options = {"undirected": True, "rank": 6, "outputs": ("embedding",)}
    expected = start_run(job(edges, tmp_path / "threads", **options), limits=BLOCKS)
    assert expected.passes["passes"] > number + 5
    ask_s3(cluster, f"fs.get({out!r}, {str(tmp_path)!r}, recursive=True)")
    assert digests(find_run(tmp_path / "sharded").path) == digests(expected.run.path)


@pytest.mark.job
def test_nights_on_the_hosts_that_are_left(cluster: hosts.Cluster, tmp_path: Path) -> None:
    edges = write_days(tmp_path / "edges", 0, 31)
    ask_s3(cluster, f"fs.put({str(edges)!r}, '{BUCKET}/days', recursive=True)")
    here, there = tmp_path / "threads", f"{BUCKET}/nights"
    for day in ("2026-02-03", "2026-02-04"):
        refresh(night(edges, here, as_of=day))
        command = ["refresh", f"{BUCKET}/days", f"--out={there}", "--rank=8", "--last=28d", f"--as-of={day}"]
        done = json.loads(finish(toffee(cluster, *command, "--json", "--workers=2")))
        assert done["state"] == "published"
    ask_s3(cluster, f"fs.get({there!r}, {str(tmp_path)!r}, recursive=True)")
    runs = zip(list_runs(here), list_runs(tmp_path / "nights"), strict=True)
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


def below(pid: int) -> list[psutil.Process]:
    found: list[psutil.Process] = psutil.Process(pid).children(recursive=True)
    return found
