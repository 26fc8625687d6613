"""Crashes, counted: the run completes or ends with its exit code, resumes, and gives the same bytes.

Real processes are killed: workers, the scheduler, the client. Slices that were finished before a crash keep
their files, to the inode, which is how "not solved again" is counted.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.harness import clusters
from tests.harness.clusters import at_every_slice, digests, job, slow_slices, write_edges
from tests.harness.commands import embed, finish, finished_slices, only_run, toffee, wait_until
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.storage.runs import find_unfinished

pytestmark = [pytest.mark.slow, pytest.mark.cluster, pytest.mark.job]

N_SLICES = 31


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    return write_edges(folder / "edges.parquet", nodes=300, events=6000, days=60)


@pytest.fixture(scope="module")
def undisturbed(edges: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = job(edges, tmp_path_factory.mktemp("undisturbed"), rank=24)
    return digests(start_run(config).run.path)


@pytest.fixture
def slow_workers(tmp_path: Path) -> dict[str, str]:
    """An environment whose workers take a moment for every slice."""
    return slow_slices(tmp_path / "slow.py", 0.1)


def after_some_slices(out: Path) -> dict[str, int]:
    """Wait until the run is in the middle of its slices; return those that are done."""
    done: dict[str, int] = wait_until(lambda: found if 4 <= len(found := finished_slices(out)) else None)
    assert len(done) < N_SLICES
    return done


def check_complete(out: Path, before: dict[str, int], undisturbed: dict[str, str]) -> None:
    run = only_run(out)
    assert digests(run.path) == undisturbed
    assert json.loads((out / "latest.json").read_text())["run_id"] == run.run_id
    after = finished_slices(out)
    assert len(after) == N_SLICES
    assert {name: after[name] for name in before} == before


def resume(out: Path, before: dict[str, int], undisturbed: dict[str, str], *, lost: int = 0) -> None:
    """Finish a run on threads, and see that only what is missing is done."""
    assert not (out / "latest.json").exists()
    now = finished_slices(out)
    outcome = resume_run(find_unfinished(out), {"mode": "threads", "workers": 1})
    assert outcome.reused == len(now)
    assert outcome.solved == N_SLICES - len(now)
    assert len(now) >= len(before) - lost
    check_complete(out, {name: inode for name, inode in before.items() if name in now}, undisturbed)


def worker_processes(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


Act = Callable[[Any, clusters.Cluster], None]
"""What happens in the middle of a run, to the command and to its cluster (which local runs do not have)."""


def kill_a_worker(run: Any, running: clusters.Cluster) -> None:
    running.workers[0].kill()


def kill_the_scheduler(run: Any, running: clusters.Cluster) -> None:
    running.scheduler.kill()


def kill_every_worker(run: Any, running: clusters.Cluster) -> None:
    killed = worker_processes(run.pid)
    assert len(killed) == 2
    for process in killed:
        process.kill()


def kill_the_client(run: Any, running: clusters.Cluster) -> None:
    workers = worker_processes(run.pid)
    run.kill()
    run.wait(10)
    # Workers do not outlive their client.
    psutil.wait_procs(workers, timeout=20)
    assert not any(worker.is_running() for worker in workers)


def interrupt(run: Any, running: clusters.Cluster) -> None:
    run.send_signal(signal.SIGINT)


def terminate(run: Any, running: clusters.Cluster) -> None:
    run.send_signal(signal.SIGTERM)


@dataclass(frozen=True)
class Death:
    """Who dies in the middle of a run, and how the command ends.

    Where its code is not 0 the run is resumed on threads, `lost` slices after one of their files was cut in
    half. A command that is killed has no code.
    """

    act: Act
    mode: str
    workers: int
    code: int | None
    said: str = ""
    lost: int = 0
    options: tuple[str, ...] = ()


DEATHS = {
    "a worker": Death(kill_a_worker, "cluster", 2, 0),
    "every worker once": Death(kill_every_worker, "processes", 2, 0),
    "the only worker for good": Death(
        kill_a_worker, "cluster", 1, 5, "no worker for 3 seconds", options=("--wait=3",)
    ),
    "the scheduler": Death(kill_the_scheduler, "cluster", 2, 5, "toffee resume"),
    "the client": Death(kill_the_client, "processes", 2, None),
    "SIGINT and a truncated slice": Death(interrupt, "threads", 1, 5, "toffee resume", lost=1),
    "SIGTERM and a truncated slice": Death(terminate, "threads", 1, 5, "toffee resume", lost=1),
}


@pytest.mark.parametrize("death", DEATHS.values(), ids=DEATHS.keys())
def test_who_dies(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str], death: Death
) -> None:
    out = tmp_path / "out"
    with ExitStack() as stack:
        running: Any = None
        if death.mode == "cluster":
            running = stack.enter_context(clusters.cluster(death.workers, environment=slow_workers))
        mode = running.address if running else death.mode
        command = [*embed(edges, out, mode, death.workers), *death.options]
        run = stack.enter_context(toffee(*command, environment=slow_workers))
        before = after_some_slices(out)
        death.act(run, running)
        if death.code is not None:
            code, _, err = finish(run)
            assert code == death.code, err
            assert death.said in err
    for name in sorted(before)[1 : 1 + death.lost]:
        damaged = only_run(out).slices / f"A-{name}.npy"
        os.truncate(damaged, damaged.stat().st_size // 2)
    if death.code == 0:
        check_complete(out, before, undisturbed)
    else:
        resume(out, before, undisturbed, lost=death.lost)


FAILS = """
if factors.k == 7:
    count = Path(os.environ["COUNT"])
    failures = int(count.read_text()) if count.exists() else 0
    if failures < int(os.environ["FAILURES"]):
        count.write_text(str(failures + 1))
        raise RuntimeError("a passing weakness")
"""


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 5)])
def test_a_task_that_fails(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], failures: int, code: int
) -> None:
    out = tmp_path / "out"
    environment = at_every_slice(tmp_path / "fails.py", FAILS)
    environment |= {"COUNT": str(tmp_path / "count"), "FAILURES": str(failures)}
    with toffee(
        *embed(edges, out, "processes", 1),
        environment=environment,
    ) as run:
        found, _, err = finish(run)
    assert found == code, err
    assert (tmp_path / "count").read_text() == str(failures)
    if code:
        assert "a passing weakness" in err
        resume(out, finished_slices(out), undisturbed)
    else:
        check_complete(out, {}, undisturbed)


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root only")
def test_a_full_disk(edges: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    out = tmp_path / "small"
    out.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(out)], check=False)
    if mounted.returncode:
        pytest.skip("this machine lets nobody mount a file system")
    try:
        # The plan would refuse so small a disk; here somebody else fills it while the run is under way.
        code = FILL.format(ballast=str(out / "ballast"))
        with toffee(
            *embed(edges, out, "processes", 1),
            environment=at_every_slice(tmp_path / "fill.py", code),
        ) as run:
            found, _, err = finish(run)
        assert found == 5, err
        assert "No space left" in err
        (out / "ballast").unlink()
        resume(out, finished_slices(out), undisturbed)
    finally:
        subprocess.run(["umount", str(out)], check=True)


FILL = """
if factors.k == 9:
    with open({ballast!r}, "wb", buffering=0) as file:
        try:
            while file.write(bytes(65536)):
                pass
        except OSError:
            pass
"""


def test_no_permission(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    """Not allowed to write: at the start nothing happens, in the middle the run can be resumed."""
    out = tmp_path / "out"
    out.mkdir(mode=0o555)
    arguments = embed(edges, out, "threads", 1)
    with toffee(*arguments, environment=slow_workers, preexec_fn=obey_permissions) as run:
        code, _, err = finish(run)
    assert code == 2, err
    assert "Permission denied" in err
    assert list(out.iterdir()) == []
    out.chmod(0o755)
    with toffee(*arguments, environment=slow_workers, preexec_fn=obey_permissions) as run:
        before = after_some_slices(out)
        only_run(out).slices.chmod(0o555)
        code, _, err = finish(run)
    assert code == 5, err
    assert "Permission denied" in err
    only_run(out).slices.chmod(0o755)
    resume(out, before, undisturbed)


def obey_permissions() -> None:
    """Give up root's right to write anywhere (CAP_DAC_OVERRIDE), where we are root."""
    if os.geteuid() == 0:
        prctl, drop_from_bounding_set, dac_override = ctypes.CDLL(None).prctl, 24, 1
        prctl(drop_from_bounding_set, dac_override, 0, 0, 0)
