"""The recipes of deploy/slurm/ on a real Slurm: a controller and two nodes here (deploy/slurm/local.py).

`make slurm-test` installs Slurm from Debian's packages and runs these; elsewhere they are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import DEPLOY
from tests.harness.clusters import at_every_slice, digests, job, slow_slices
from tests.harness.commands import wait_until
from tests.harness.refreshes import night, write_days
from toffee_dist.batch.pipeline import start_run
from toffee_dist.demo import make_graph
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.runs import find_run, list_runs

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(400)]

# A file beside its neighbours, not a module of a package.
specification = importlib.util.spec_from_file_location("slurm_local", DEPLOY / "slurm" / "local.py")
assert specification is not None
assert specification.loader is not None
local = importlib.util.module_from_spec(specification)
sys.modules["slurm_local"] = local
specification.loader.exec_module(local)

BIN = Path(sys.executable).parent
RECIPE = DEPLOY / "slurm" / "toffee.sbatch"
SECONDS = 240
DEMO = {"step": "6h", "undirected": True, "rank": 16, "freqs": "lowest:16"}
TOML = (
    'inputs = ["{edges}"]\nstep = "6h"\nundirected = true\nrank = 16\nfreqs = "lowest:16"\n'
    'outputs = ["embedding", "trajectory"]\ntrajectory_by = "als"\n'
)


@pytest.fixture(scope="module")
def slurm() -> Iterator[Any]:
    if reason := local.why_not():
        pytest.skip(f"no Slurm: {reason}")
    with local.cluster() as made:
        yield made
    assert not made.find_processes()
    assert not made.folder.exists()


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    edges = tmp_path_factory.mktemp("demo") / "edges.parquet"
    make_graph()[0].write_parquet(edges)
    return edges


@pytest.fixture(scope="module")
def undisturbed(demo: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return digests(start_run(job(demo, tmp_path_factory.mktemp("threads"), **DEMO)).run.path)


def submit(slurm: Any, folder: Path, *options: str, **variables: str) -> str:
    """Submit the recipe; return the number of its job."""
    environment = {"TOFFEE_BIN": str(BIN), "TOFFEE_DEPLOY": str(DEPLOY), "OUT": str(folder / "vectors")}
    command = ["sbatch", "--parsable", "--nodes=2", "--cpus-per-task=1", "--mem=1500M", "--time=10"]
    done = subprocess.run(
        [*command, f"--output={folder / 'slurm.out'}", *options, str(RECIPE)],
        env=os.environ | slurm.environment | environment | variables,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def state_of(slurm: Any, number: str) -> dict[str, str]:
    """Return what Slurm says of a job."""
    return dict(re.findall(r"(\w+)=(\S*)", slurm.run("scontrol", "show", "job", number)))


def finish(slurm: Any, number: str, folder: Path, code: int = 0) -> dict[str, str]:
    """Wait until a job has ended, for good, and look at its exit code."""

    def ended() -> dict[str, str] | None:
        state = state_of(slurm, number)
        over = state["JobState"] in ("COMPLETED", "FAILED", "TIMEOUT", "CANCELLED", "NODE_FAIL")
        return state if over else None

    state: dict[str, str] = wait_until(ended, SECONDS)
    said = (folder / "slurm.out").read_text()
    assert state["ExitCode"] == f"{code}:0", said
    assert state["JobState"] == ("FAILED" if code else "COMPLETED")
    assert "Traceback" not in said
    # Neither certificates nor processes stay.
    assert not list(folder.glob(".toffee-*"))
    wait_until(lambda: not slurm.find_processes())
    return state


def slices(out: Path) -> int:
    return len(list(out.glob("runs/*/work/slices/0*.json")))


@pytest.mark.job
def test_the_demo_and_exit_codes(slurm: Any, demo: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    config = tmp_path / "embed.toml"
    config.write_text(TOML.format(edges=demo))
    finish(slurm, submit(slurm, tmp_path, CONFIG=str(config)), tmp_path)
    assert digests(find_run(tmp_path / "vectors").path) == undisturbed
    # What a second try would not change ends as it is, and everybody can see the code.
    config.write_text(TOML.format(edges=tmp_path / "nothing.parquet"))
    number = submit(slurm, tmp_path, CONFIG=str(config))
    state = finish(slurm, number, tmp_path, code=3)
    assert state["Restarts"] == "0"
    assert "FAILED" in slurm.run("squeue", "--states=all", f"--jobs={number}", "--format=%T")
    assert "FAILED" in slurm.run("sacct", "--completion", f"--jobs={number}")


@pytest.mark.job
def test_a_refresh(slurm: Any, tmp_path: Path) -> None:
    edges, config = write_days(tmp_path / "edges", 0, 31), tmp_path / "nightly.toml"
    for day in ("2026-02-03", "2026-02-04"):
        config.write_text(f'inputs = ["{edges}"]\nrank = 8\nlast = "28d"\nas_of = "{day}"\n')
        finish(slurm, submit(slurm, tmp_path, JOB="refresh", CONFIG=str(config)), tmp_path)
        refresh(night(edges, tmp_path / "threads", as_of=day))
    runs = zip(list_runs(tmp_path / "threads"), list_runs(tmp_path / "vectors"), strict=True)
    assert all(digests(mine.path) == digests(theirs.path) for mine, theirs in runs)
    # A limit that is broken is exit code 6, of Slurm too.
    write_days(edges, 31, 32, nodes=500, seed=7)
    config.write_text(config.read_text().replace("2026-02-04", "2026-02-05") + "min_cosine = 0.9999\n")
    finish(slurm, submit(slurm, tmp_path, JOB="refresh", CONFIG=str(config)), tmp_path, code=6)


@pytest.mark.job
def test_a_node_is_killed_and_the_job_requeued(
    slurm: Any, demo: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    config, out = tmp_path / "embed.toml", tmp_path / "vectors"
    config.write_text(TOML.format(edges=demo))
    slow = slow_slices(tmp_path / "slow.py", 0.5)
    number = submit(slurm, tmp_path, CONFIG=str(config), **slow)
    wait_until(lambda: slices(out) >= 4, 60)
    slurm.kill_node("n2")
    slurm.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=killed")
    wait_until(lambda: state_of(slurm, number)["Restarts"] == "1", 60)
    done = slices(out)
    assert done >= 4
    slurm.start_node("n2")
    wait_until(lambda: "down" not in slurm.run("sinfo", "--noheader", "--format=%T"), 60)
    state = finish(slurm, number, tmp_path)
    assert state["Restarts"] == "1"
    assert digests(find_run(out).path) == undisturbed
    [run] = list_runs(out)
    assert run.complete


@pytest.mark.job
def test_the_time_limit_and_the_requeue(
    slurm: Any, demo: Path, undisturbed: dict[str, str], tmp_path: Path
) -> None:
    config, out = tmp_path / "embed.toml", tmp_path / "vectors"
    config.write_text(TOML.format(edges=demo))
    # A minute is the least; Slurm's warning comes half a minute before its end, or a little earlier.
    wait = 'time.sleep(0 if int(os.environ.get("SLURM_RESTART_COUNT", 0)) else 4)'
    slow = at_every_slice(tmp_path / "slow.py", wait)
    number = submit(slurm, tmp_path, "--time=1", "--signal=B:TERM@30", CONFIG=str(config), **slow)
    wait_until(lambda: state_of(slurm, number)["Restarts"] == "1", 120)
    # The second start has the time that it takes, however busy this machine is.
    slurm.run("scontrol", "update", f"JobId={number}", "TimeLimit=10")
    state = finish(slurm, number, tmp_path)
    assert state["Restarts"] == "1"
    assert "exit code 5: into the queue again (1 of 3)" in (tmp_path / "slurm.out").read_text()
    assert digests(find_run(out).path) == undisturbed
    [run] = list_runs(out)
    assert run.complete


@pytest.mark.job
def test_jobqueue(slurm: Any, demo: Path, undisturbed: dict[str, str], tmp_path: Path) -> None:
    """Workers are Slurm jobs of their own; one of them is cancelled while it works."""
    pytest.importorskip("dask_jobqueue")
    options = ["--cores=1", "--memory=1500MB", "--walltime=00:30:00", "--most=2", "--interface=lo"]
    where = [sys.executable, str(DEPLOY / "slurm" / "jobqueue.py"), *options, f"--shared={tmp_path}", "--"]
    environment = os.environ | slurm.environment | slow_slices(tmp_path / "slow.py", 0.2)
    words = ["--step=6h", "--undirected", "--rank=16", "--freqs=lowest:16", "--trajectory-by=als"]
    words += ["--outputs=embedding,trajectory"]
    out = tmp_path / "vectors"
    before = set(slurm.run("squeue", "--noheader", "--format=%i", "--states=all").split())
    process = subprocess.Popen(
        [*where, "embed", str(demo), f"--out={out}", *words],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    wait_until(lambda: slices(out) >= 4, 90)
    [number, *_] = slurm.run("squeue", "--noheader", "--format=%i", "--states=running").split()
    slurm.run("scancel", number)
    _, said = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, said
    assert digests(find_run(out).path) == undisturbed
    after = set(slurm.run("squeue", "--noheader", "--format=%i", "--states=all").split())
    assert len(after - before) >= 2
    wait_until(lambda: not slurm.find_processes())

    edges = write_days(tmp_path / "edges", 0, 30)
    done = subprocess.run(
        [*where, "refresh", str(edges), f"--out={tmp_path / 'nights'}", "--rank=8", "--last=28d", "--json"],
        env=os.environ | slurm.environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["state"] == "published"
    refresh(night(edges, tmp_path / "threads"))
    assert digests(find_run(tmp_path / "nights").path) == digests(find_run(tmp_path / "threads").path)


def test_nothing_stays(slurm: Any) -> None:
    """The script by itself: its exit code is the command's, and its daemons end with it."""
    command = ["bash", "-c", "echo $SLURM_CONF; srun --nodes=2 --mem=100 hostname; exit 7"]
    done = subprocess.run(
        [sys.executable, str(DEPLOY / "slurm" / "local.py"), "--nodes=2", "--", *command],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    folder = Path(done.stdout.splitlines()[0]).parent
    assert not folder.exists()
    assert len(done.stdout.splitlines()) == 3
