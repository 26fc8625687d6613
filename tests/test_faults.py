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
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import clusters
from tests.clusters import digests, job, preload, slow_slices, write_edges
from toffee_dist.pipeline import resume_run, start_run
from toffee_dist.slices import is_finished
from toffee_dist.store import RunFolder, find_unfinished, list_runs

pytestmark = pytest.mark.slow

OPTIONS = ["--rank=24", "--outputs=embedding,trajectory", "--freqs=all", "--keep-work", "--wait=15"]
N_SLICES = 31
SECONDS = 60


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("edges")
    return write_edges(folder / "edges.parquet", nodes=1500, events=20_000, days=60)


@pytest.fixture(scope="module")
def undisturbed(edges: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    config = job(edges, tmp_path_factory.mktemp("undisturbed"), rank=24)
    return digests(start_run(config).run.path)


@pytest.fixture
def slow_workers(tmp_path: Path) -> dict[str, str]:
    """An environment whose workers take a moment for every slice."""
    return slow_slices(tmp_path / "slow.py", 0.15)


@contextmanager
def toffee(*arguments: str, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Any]:
    """Run the command in a process of its own, which does not outlive the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "toffee_dist.cli", *arguments],
        env=os.environ | clusters.ENVIRONMENT | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        clusters.stop(process)
        process.communicate()


def embed(edges: Path, out: Path, mode: str, workers: int) -> list[str]:
    return ["embed", str(edges), f"--out={out}", f"--mode={mode}", f"--workers={workers}", *OPTIONS]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    assert "Traceback" not in err
    return process.returncode, out, err


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def finished(out: Path) -> dict[str, int]:
    """Return the finished slices of the only run, by name, with the inode of their factors."""
    runs = list_runs(out)
    if not runs:
        return {}
    folder = runs[-1].slices
    names = [path.stem for path in folder.glob("[0-9]*.json")]
    return {
        name: (folder / f"A-{name}.npy").stat().st_ino for name in names if is_finished(folder, name, "ARC")
    }


def after_some_slices(out: Path) -> dict[str, int]:
    """Wait until the run is in the middle of its slices; return those that are done."""
    done: dict[str, int] = wait_until(lambda: found if 4 <= len(found := finished(out)) else None)
    assert len(done) < N_SLICES
    return done


def only_run(out: Path) -> RunFolder:
    [run] = list_runs(out)
    return run


def check_complete(out: Path, before: dict[str, int], undisturbed: dict[str, str]) -> None:
    run = only_run(out)
    assert digests(run.path) == undisturbed
    assert json.loads((out / "latest.json").read_text())["run_id"] == run.run_id
    after = finished(out)
    assert len(after) == N_SLICES
    assert {name: after[name] for name in before} == before


def resume(out: Path, before: dict[str, int], undisturbed: dict[str, str], *, lost: int = 0) -> None:
    """Finish a run on threads, and see that only what is missing is done."""
    assert not (out / "latest.json").exists()
    now = finished(out)
    outcome = resume_run(find_unfinished(out), {"mode": "threads", "workers": 1})
    assert outcome.reused == len(now)
    assert outcome.solved == N_SLICES - len(now)
    assert len(now) >= len(before) - lost
    check_complete(out, {name: inode for name, inode in before.items() if name in now}, undisturbed)


def test_a_worker_killed(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with (
        clusters.cluster(workers=2, environment=slow_workers) as running,
        toffee(*embed(edges, out, running.address, 2)) as run,
    ):
        before = after_some_slices(out)
        running.workers[0].kill()
        code, _, err = finish(run)
        assert code == 0, err
    check_complete(out, before, undisturbed)


def test_every_worker_killed_once(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with toffee(
        *embed(edges, out, "processes", 2),
        environment=slow_workers,
    ) as run:
        before = after_some_slices(out)
        killed = worker_processes(run.pid)
        assert len(killed) == 2
        for process in killed:
            process.kill()
        code, _, err = finish(run)
        assert code == 0, err
    check_complete(out, before, undisturbed)


def worker_processes(pid: int) -> list[psutil.Process]:
    children = psutil.Process(pid).children(recursive=True)
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


def test_the_scheduler_killed(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with (
        clusters.cluster(workers=2, environment=slow_workers) as running,
        toffee(*embed(edges, out, running.address, 2)) as run,
    ):
        before = after_some_slices(out)
        running.scheduler.kill()
        code, _, err = finish(run)
        assert code == 5, err
        assert "toffee resume" in err
    resume(out, before, undisturbed)


def test_all_workers_gone_for_good(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with (
        clusters.cluster(workers=1, environment=slow_workers) as running,
        toffee(*embed(edges, out, running.address, 1), "--wait=3") as run,
    ):
        before = after_some_slices(out)
        running.workers[0].kill()
        code, _, err = finish(run)
        assert code == 5, err
        assert "no worker for 3 seconds" in err
    resume(out, before, undisturbed)


def test_the_client_killed(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], slow_workers: dict[str, str]
) -> None:
    out = tmp_path / "out"
    with toffee(
        *embed(edges, out, "processes", 2),
        environment=slow_workers,
    ) as run:
        before = after_some_slices(out)
        workers = worker_processes(run.pid)
        run.kill()
        run.wait(10)
        # Workers do not outlive their client.
        psutil.wait_procs(workers, timeout=20)
        assert not any(worker.is_running() for worker in workers)
    resume(out, before, undisturbed)


@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_and_a_truncated_slice(
    edges: Path,
    tmp_path: Path,
    undisturbed: dict[str, str],
    slow_workers: dict[str, str],
    stop: signal.Signals,
) -> None:
    out = tmp_path / "out"
    with toffee(
        *embed(edges, out, "threads", 1),
        environment=slow_workers,
    ) as run:
        before = after_some_slices(out)
        run.send_signal(stop)
        code, _, err = finish(run)
        assert code == 5, err
        assert "toffee resume" in err
    damaged = only_run(out).slices / f"A-{sorted(before)[1]}.npy"
    os.truncate(damaged, damaged.stat().st_size // 2)
    resume(out, before, undisturbed, lost=1)


FAILS = """
import os
from pathlib import Path
from toffee_dist import tasks
def failing(tensor, freqs, options, solve=tasks.solve_slices):
    for factors in solve(tensor, freqs, options):
        if factors.k == 7:
            count = Path(os.environ["COUNT"])
            failures = int(count.read_text()) if count.exists() else 0
            if failures < int(os.environ["FAILURES"]):
                count.write_text(str(failures + 1))
                raise RuntimeError("a passing weakness")
        yield factors
tasks.solve_slices = failing
"""


@pytest.mark.parametrize(("failures", "code"), [(2, 0), (3, 5)])
def test_a_task_that_fails(
    edges: Path, tmp_path: Path, undisturbed: dict[str, str], failures: int, code: int
) -> None:
    out = tmp_path / "out"
    environment = preload(tmp_path / "fails.py", FAILS)
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
        resume(out, finished(out), undisturbed)
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
            environment=preload(tmp_path / "fill.py", code),
        ) as run:
            found, _, err = finish(run)
        assert found == 5, err
        assert "No space left" in err
        (out / "ballast").unlink()
        resume(out, finished(out), undisturbed)
    finally:
        subprocess.run(["umount", str(out)], check=True)


FILL = """
from toffee_dist import tasks
def filling(tensor, freqs, options, solve=tasks.solve_slices):
    for factors in solve(tensor, freqs, options):
        if factors.k == 9:
            with open({ballast!r}, "wb", buffering=0) as file:
                try:
                    while file.write(bytes(65536)):
                        pass
                except OSError:
                    pass
        yield factors
tasks.solve_slices = filling
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
