"""Kill `toffee embed` of a real graph at random moments, go on with `toffee resume`, and compare the bytes.

    python benchmarks/kills.py --kills 50 [--log FILE --minutes 5]

Killed (SIGKILL) is the client, one worker, or every worker; on threads, on local processes and on a cluster.
The graph is email by weeks with trajectory and factors: a whole batch of its frequencies is transformed by an
FFT, and what is left of one directly. The last line is JSON. With a log the kills may be done in pieces: what
the log has is not done again, and the last line counts everything.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from fixed_jobs import COMMAND, digest
from graphs import DATA, SOURCES

from toffee_dist.errors import InputError
from toffee_dist.storage.runs import RunFolder, find_latest, find_unfinished, list_runs

OPTIONS = "--time-unit=s --step=7d --rank=8 --outputs=trajectory,factors --freqs=all --no-report --wait=30"
ENVIRONMENT = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
WORKERS = 2
# Seconds that any command may take.
PATIENCE = 300
# Resumes that a run may need after one kill; more would be a run that does not go on.
RESUMES = 3
# Who is killed, and where.
WAYS = (
    ("threads", "client"),
    ("processes", "client"),
    ("processes", "worker"),
    ("processes", "all workers"),
    ("cluster", "client"),
    ("cluster", "worker"),
    ("cluster", "all workers"),
)


def start(*words: str) -> subprocess.Popen[str]:
    """Start a program in a group of its own."""
    return subprocess.Popen(
        list(words),
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE if words[: len(COMMAND)] == tuple(COMMAND) else subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """End a program that we started, and its children."""
    if process.poll() is None:
        os.killpg(process.pid, 15)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait(10)


@contextmanager
def open_cluster() -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """Give the address of a cluster on the loopback, and the nannies of its workers."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    dask = [sys.executable, "-m", "dask"]
    address = f"tcp://127.0.0.1:{port}"
    quiet = ("--no-dashboard", "--dashboard-address=127.0.0.1:0")
    started = [start(*dask, "scheduler", f"--host={address}", *quiet)]
    options = ("--nthreads=1", "--host=127.0.0.1", "--memory-limit=0", "--no-dashboard", "--nanny")
    started += [start(*dask, "worker", address, *options) for _ in range(WORKERS)]
    try:
        yield address, started[1:]
    finally:
        for process in reversed(started):
            stop(process)


def worker_processes(parents: list[subprocess.Popen[str]]) -> list[psutil.Process]:
    """Return the processes of workers that were started by these."""
    found = [child for parent in parents for child in psutil.Process(parent.pid).children(recursive=True)]
    return [child for child in found if any("spawn_main" in word for word in _words(child))]


def _words(process: psutil.Process) -> list[str]:
    try:
        return list(process.cmdline())
    except psutil.Error:
        return []


def digests(run: RunFolder) -> dict[str, str]:
    """Return the digest of every Parquet file that readers of a run see."""
    return {str(path.relative_to(run.path)): digest(path) for path in run.result_files("*.parquet")}


class Killing:
    """Runs of one graph that are killed.

    Parameters
    ----------
    folder
        For the runs.
    seed
        Of the moments and of who is killed.
    say
        Is told how each ended.
    """

    def __init__(self, folder: Path, seed: int, say: Callable[[str], None]) -> None:
        self.folder, self.seed, self.say = folder, seed, say
        self.rng = random.Random()
        out = folder / "undisturbed"
        run = self._embed(out, "threads")
        _wait_for_run(run, out)
        began = time.monotonic()
        code, text = self._finish(run)
        if code:
            raise SystemExit(f"the undisturbed run ended with {code}\n{text}")
        self.seconds = time.monotonic() - began
        self.expected = digests(_published(out))

    def _embed(self, out: Path, mode: str) -> subprocess.Popen[str]:
        words = ["embed", str(DATA / SOURCES["email"].file), f"--out={out}", *OPTIONS.split()]
        return start(*COMMAND, *words, f"--mode={mode}", f"--workers={WORKERS}")

    def _finish(self, process: subprocess.Popen[str]) -> tuple[int, str]:
        try:
            _, text = process.communicate(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            _, text = process.communicate()
        return process.returncode, text

    def kill(
        self, number: int, mode: str, who: str, cluster: tuple[str, list[Any]] | None
    ) -> tuple[bool, bool]:
        """Kill one run and go on with it; return whether it finished, and with the same bytes."""
        # Each has moments of its own, whatever was killed before.
        self.rng.seed(f"{self.seed} {number}")
        out = self.folder / "killed"
        while True:
            shutil.rmtree(out, ignore_errors=True)
            run, moment = self._embed(out, cluster[0] if cluster else mode), None
            try:
                moment = self._strike(run, out, who, cluster[1] if cluster else [run])
                if moment is not None:
                    break
            finally:
                if moment is None:
                    stop(run)
                    # Its pipe too: it is forgotten here.
                    run.communicate()
        code, text = self._finish(run)
        first, resumed = code, 0
        if code in (1, 2, 3):
            self.say(f"{mode}, {who} killed: exit {code}, {text.strip()[-300:]}")
            return False, False
        while code and resumed < RESUMES:
            resumed += 1
            code, text = self._go_on(out)
        finished = code == 0
        same = finished and digests(_published(out)) == self.expected
        how = (
            "same bytes" if same else "different" if finished else f"lost: exit {code} {text.strip()[-200:]}"
        )
        self.say(f"{mode}, {who} killed at {moment:.1f} s, exit {first}, resumed {resumed} times: {how}")
        return finished, same

    def _strike(self, run: subprocess.Popen[str], out: Path, who: str, parents: list[Any]) -> float | None:
        """Wait for a random moment of a run and kill somebody; return the moment, None where it was over."""
        _wait_for_run(run, out)
        moment = self.rng.uniform(0, self.seconds)
        try:
            run.wait(moment)
            return None
        except subprocess.TimeoutExpired:
            pass
        if who == "client":
            run.kill()
            return moment
        workers = worker_processes(parents)
        if not workers:
            return None
        for process in workers if who == "all workers" else [self.rng.choice(workers)]:
            process.kill()
        return moment

    def _go_on(self, out: Path) -> tuple[int, str]:
        """Resume a run; one that was killed before it said what it is of is started again.

        One that was killed when all was done, and only its process had not ended, needs nothing.
        """
        if find_latest(out) is not None and not _unfinished(out):
            return 0, ""
        if any(run.begun or run.complete for run in list_runs(out)):
            return self._finish(start(*COMMAND, "resume", str(out), "--mode=threads", f"--workers={WORKERS}"))
        return self._finish(self._embed(out, "threads"))


def _wait_for_run(process: subprocess.Popen[str], out: Path) -> None:
    """Wait until a run has begun: the start of Python is as long as the rest."""
    until = time.monotonic() + PATIENCE
    while not list_runs(out) and process.poll() is None and time.monotonic() < until:
        time.sleep(0.01)


def _unfinished(out: Path) -> bool:
    try:
        find_unfinished(out)
    except InputError:
        return False
    return True


def _published(out: Path) -> RunFolder:
    run = find_latest(out)
    assert run is not None
    return run


def run_kills(
    count: int,
    seed: int = 0,
    say: Callable[[str], None] = print,
    log: Path | None = None,
    minutes: float = 0,
) -> dict[str, int]:
    """Kill this many runs, one after the other in every way; return how many finished, and how many alike.

    Parameters
    ----------
    count
        How many.
    seed
        Of the moments.
    say
        Is told how each ended.
    log
        Has a line per kill: those of it are not done again, but counted.
    minutes
        After so many nothing new begins; 0: no limit.
    """
    until = time.monotonic() + 60 * minutes if minutes else float("inf")
    done = [json.loads(line) for line in log.read_text().splitlines()] if log and log.exists() else []
    with tempfile.TemporaryDirectory(prefix="toffee-") as name, open_cluster() as cluster:
        killing = Killing(Path(name), seed, say)
        for number in range(len(done), count):
            if time.monotonic() > until:
                break
            mode, who = WAYS[number % len(WAYS)]
            done.append(killing.kill(number, mode, who, cluster if mode == "cluster" else None))
            if log:
                with log.open("a") as file:
                    file.write(json.dumps(done[-1]) + "\n")
    return {
        "kills": len(done),
        "finished": sum(finished for finished, _ in done),
        "same_bytes": sum(same for _, same in done),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50, help="How many.")
    parser.add_argument("--seed", type=int, default=0, help="Of the moments.")
    parser.add_argument("--log", type=Path, help="Keep what was done, and go on from there.")
    parser.add_argument(
        "--minutes", type=float, default=0, help="Begin nothing after this long; 0: no limit."
    )
    arguments = parser.parse_args()
    result = run_kills(arguments.kills, arguments.seed, log=arguments.log, minutes=arguments.minutes)
    print(json.dumps(result))
    sys.exit(result["same_bytes"] != arguments.kills)


if __name__ == "__main__":
    main()
