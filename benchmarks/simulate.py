"""Whole jobs on a simulated cluster that is as unruly as a seed says: the same bytes, whatever happens.

    python benchmarks/simulate.py --seeds 1000

Tasks run in any order; some twice, and both copies write in turns; some answers come late, some are lost, and
the task runs again; workers die between two writes, or are taken for dead and go on, even past the end of the
job; clients are killed, and the run is resumed. Every choice comes from the seed, which is printed where a
run is lost or differs from an undisturbed one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import polars as pl
from fixed_jobs import digest
from threadpoolctl import threadpool_limits

from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.cluster.client import ALLOWED_FAILURES
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import JobConfig, RefreshConfig
from toffee_dist.storage.runs import RunFolder, find_latest, find_unfinished

# Many tasks of every kind, of a graph of a few nodes.
SMALL = Limits(
    max_batch=4,
    part_bytes=9000,
    bucket_ids=8,
    bin_entries=100,
    block_entries=250,
    batch_rows=100,
    table_rows=9,
)
# The same, and every slice in several blocks of nodes.
BLOCKS = replace(SMALL, block_work=150, slice_bytes=0)
WORKERS = 3
DAY = 86_400


class _WorkerDied(SystemExit):
    """Ends a task between two writes, as the end of its process would: no guard of a task catches it."""


class _ClientKilled(BaseException):
    """Ends a client while it waits for a task."""


_running = threading.local()


class _Attempt:
    """One attempt at a task, in a thread of its own that moves only when it is told to.

    It moves from one write to the next: what is written under a temporary name becomes visible in between.
    """

    def __init__(self, future: _Future, deadly: int | None) -> None:
        self.future = future
        self.left = deadly
        self.ended = False
        self.result: Any = None
        self.error: BaseException | None = None
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        _running.attempt = self
        self._go.acquire()
        try:
            self.result = self.future.function(*self.future.arguments)
        except BaseException as error:
            self.error = error
        self.ended = True
        self._back.release()

    def move(self) -> None:
        """Let it go on to its next write, or to its end."""
        self._go.release()
        self._back.acquire()
        if self.ended:
            self._thread.join()

    def pause(self) -> None:
        """Wait to be told to go on; the attempt itself calls this before and after every write."""
        self._back.release()
        self._go.acquire()
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise _WorkerDied


@dataclass(eq=False)
class _Future:
    """What the client gives for a task; looking at its status lets the simulation go on."""

    cluster: SimulatedCluster
    key: str
    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    retries: int
    deaths: int = 0
    over: bool = False
    value: Any = None
    error: BaseException | None = None

    @property
    def status(self) -> str:
        self.cluster.go_on_until(self)
        return "finished" if self.error is None else "error"

    def add_done_callback(self, function: Callable[[Any], Any]) -> None:
        """Nobody waits here: the status is known when it is asked for."""

    def result(self) -> Any:
        """Return the answer, or raise what the task raised."""
        if self.error is not None:
            raise self.error
        return self.value


@dataclass
class SimulatedCluster:
    """What our code uses of a client, and a scheduler with workers behind it that obey a seed.

    Parameters
    ----------
    seed
        Of every choice.
    kill_after
        Moves after which the client is killed; None: it is not.

    Attributes
    ----------
    seen : how often each kind of trouble came
    """

    seed: int
    kill_after: int | None = None
    status: str = "running"
    seen: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self._rng = random.Random(self.seed)
        self._queue: list[_Future] = []
        self._busy: list[_Attempt] = []
        # Attempts that nobody waits for any more, and answers that are on their way.
        self._forgotten: list[_Attempt] = []
        self._late: list[_Attempt] = []

    # What our code asks a client for.

    def submit(
        self, function: Callable[..., Any], *arguments: Any, key: str, pure: bool, retries: int
    ) -> _Future:
        """Take a task."""
        future = _Future(self, key, function, arguments, retries)
        self._queue.append(future)
        return future

    def cancel(self, futures: list[_Future]) -> None:
        """Forget tasks; those that run go on unheeded."""
        self._queue = [future for future in self._queue if future not in futures]
        for attempt in [attempt for attempt in self._busy if attempt.future in futures]:
            self._forget(attempt)

    def processing(self) -> dict[str, Any]:
        """Return who works on what."""
        return {"simulated": [attempt.future.key for attempt in self._busy]}

    def run(self, function: Callable[..., Any], *arguments: Any, on_error: str = "raise") -> dict[str, Any]:
        """Run a function on the one worker that is shown."""
        if "dask_worker" in function.__code__.co_varnames:
            arguments = (*arguments, _Worker())
        return {"simulated": function(*arguments)}

    def run_on_scheduler(self, function: Callable[..., Any]) -> bool:
        """Return that there is no dashboard, which is all that is ever asked."""
        return False

    def scheduler_info(self, n_workers: int) -> dict[str, Any]:
        """Return nothing about limits of memory."""
        return {"workers": {}}

    # What happens behind it.

    def go_on_until(self, future: _Future) -> None:
        """Let things happen until a task is over."""
        while not future.over:
            if self.kill_after is not None:
                self.kill_after -= 1
                if self.kill_after < 0:
                    self._drop_all()
                    raise _ClientKilled
            self._step()

    def drain(self) -> None:
        """Let every attempt that nobody waits for come to its end."""
        while self._forgotten:
            self._move_forgotten()

    def _chance(self, share: float, what: str) -> bool:
        happens = self._rng.random() < share
        self.seen[what] += happens
        return happens

    def _step(self) -> None:
        moves: list[Callable[[], None]] = []
        if self._queue and len(self._busy) < WORKERS:
            moves += [self._start] * 2
        if self._busy:
            moves += [self._move] * 4
        if self._forgotten:
            moves.append(self._move_forgotten)
        if self._late:
            moves.append(self._deliver)
        self._rng.choice(moves)()

    def _start(self) -> None:
        future = self._queue.pop(self._rng.randrange(len(self._queue)))
        deadly = None
        if future.deaths < ALLOWED_FAILURES and self._chance(0.1, "died"):
            deadly = self._rng.randrange(6)
        self._busy.append(_Attempt(future, deadly))
        if self._chance(0.1, "twice"):
            self._forgotten.append(_Attempt(future, None))

    def _move(self) -> None:
        attempt = self._rng.choice(self._busy)
        attempt.move()
        if attempt.ended:
            self._busy.remove(attempt)
            self._answer(attempt)
        elif attempt.future.deaths < ALLOWED_FAILURES and self._chance(0.02, "taken for dead"):
            attempt.future.deaths += 1
            self._forget(attempt)
            self._queue.append(attempt.future)

    def _answer(self, attempt: _Attempt) -> None:
        future = attempt.future
        died = isinstance(attempt.error, _WorkerDied)
        if died or (future.deaths < ALLOWED_FAILURES and self._chance(0.05, "lost")):
            future.deaths += 1
            self._queue.append(future)
        elif self._chance(0.1, "late"):
            self._late.append(attempt)
        else:
            self._settle(attempt)

    def _deliver(self) -> None:
        attempt = self._rng.choice(self._late)
        self._late.remove(attempt)
        self._settle(attempt)

    def _settle(self, attempt: _Attempt) -> None:
        future = attempt.future
        if attempt.error is not None and future.retries:
            future.retries -= 1
            self._queue.append(future)
            return
        future.over, future.value, future.error = True, attempt.result, attempt.error

    def _forget(self, attempt: _Attempt) -> None:
        self._busy.remove(attempt)
        self._forgotten.append(attempt)

    def _move_forgotten(self) -> None:
        attempt = self._rng.choice(self._forgotten)
        attempt.move()
        if attempt.ended:
            self._forgotten.remove(attempt)

    def _drop_all(self) -> None:
        self._queue, self._late, self.kill_after = [], [], None
        self._forgotten += self._busy
        self._busy = []


class _Worker:
    """What a task finds out about its worker."""

    class state:  # noqa: N801
        """Of a worker with one thread."""

        nthreads = 1

    # No profiler.
    periodic_callbacks: ClassVar[dict[str, Any]] = {}


@contextmanager
def simulated(cluster: SimulatedCluster) -> Iterator[SimulatedCluster]:
    """Let every job of this process run on a simulated cluster."""

    @contextmanager
    def open_it(settings: Any) -> Iterator[SimulatedCluster]:
        yield cluster

    real = os.replace

    def replace(source: Any, target: Any) -> None:
        attempt: _Attempt | None = getattr(_running, "attempt", None)
        if attempt is None:
            real(source, target)
            return
        attempt.pause()
        real(source, target)
        attempt.pause()

    with (
        patch("os.replace", replace),
        patch("toffee_dist.batch.job.open_cluster", open_it),
        patch("toffee_dist.refresh.job.open_cluster", open_it),
        # Of tasks of a millisecond it would be most of the time.
        patch("toffee_dist.cluster.mapping.give_back", lambda: None),
        threadpool_limits(1, user_api="blas"),
    ):
        yield cluster


def write_days(folder: Path, start: int, stop: int, nodes: int = 16, events: int = 60) -> None:
    """Write a file of edges per day, in communities of four nodes.

    So many that a whole batch of frequencies is transformed by an FFT, and one of two frequencies directly.
    """
    folder.mkdir(exist_ok=True)
    for day in range(start, stop):
        rng = np.random.default_rng(day)
        source = rng.integers(nodes, size=events)
        target = (source // 4 * 4 + rng.integers(4, size=events) + (rng.random(events) < 0.2)) % nodes
        seconds = 1_767_571_200 + day * DAY + rng.integers(DAY, size=events)
        frame = {"source": source, "target": target, "time": seconds}
        pl.DataFrame(frame).write_parquet(folder / f"day-{day:03d}.parquet")


def digests(run: RunFolder) -> dict[str, str]:
    """Return the digest of every Parquet file that readers of a run see."""
    return {str(path.relative_to(run.path)): digest(path) for path in run.result_files("*.parquet")}


@dataclass(frozen=True)
class Bench:
    """Jobs with what an undisturbed run of each gives: embeddings, and a refresh after another.

    Parameters
    ----------
    folder
        Holds their edges, and the folder of runs that the refresh finds.
    """

    folder: Path
    expected: dict[str, dict[str, str]] = field(default_factory=dict)

    def prepare(self, *kinds: str) -> None:
        """Write the edges, and run jobs of these kinds, or of all, undisturbed."""
        # Some nodes have left when the refresh comes, and it forgets them.
        write_days(self.folder / "edges", 1, 2, nodes=24)
        write_days(self.folder / "edges", 2, 8)
        refresh(self.night(self.folder / "before"), limits=SMALL)
        write_days(self.folder / "edges", 8, 9, nodes=20)
        for kind in kinds or KINDS:
            out = self.make_out(kind, "undisturbed")
            self.expected[kind] = digests(self.run(kind, out))

    def make_out(self, kind: str, name: str) -> Path:
        """Make the folder of runs of a job."""
        out = self.folder / f"{kind}-{name}"
        if kind == "refresh":
            shutil.copytree(self.folder / "before", out)
        return out

    def embed_in_blocks(self, out: Path) -> JobConfig:
        """Return the settings of an embedding whose slices take few passes, of a dozen tasks each."""
        few = {"outputs": ("embedding", "trajectory"), "freqs": "lowest:2", "max_iter": 2}
        return JobConfig.read({**self._options(out), **few})

    def embed(self, out: Path) -> JobConfig:
        """Return the settings of an embedding with every output."""
        outputs = ("embedding", "trajectory", "factors", "spectrum")
        return JobConfig.read({**self._options(out), "outputs": outputs, "freqs": "lowest:4"})

    def night(self, out: Path) -> RefreshConfig:
        """Return the settings of a refresh."""
        limits = {"min_cosine": -1.0, "max_auc_drop": 1.0, "max_energy_drop": 1.0}
        more = {"last": "7d", "outputs": ("embedding", "trajectory"), "freqs": "lowest:4", "expire": "7d"}
        return RefreshConfig.read({**self._options(out), **limits, **more})

    def _options(self, out: Path) -> dict[str, Any]:
        place = {"inputs": (str(self.folder / "edges"),), "out": str(out), "mode": "threads", "workers": 1}
        return {**place, "rank": 3, "report": False, "stall": 0}

    def run(self, kind: str, out: Path, again: bool = False) -> RunFolder:
        """Run a job, or what is left of one; return what readers then see."""
        if kind == "refresh":
            refresh(self.night(out), limits=SMALL)
        elif again:
            resume_run(find_unfinished(out), {}, limits=LIMITS_OF[kind])
        else:
            config = self.embed_in_blocks(out) if kind == "blocks" else self.embed(out)
            start_run(config, limits=LIMITS_OF[kind])
        found = find_latest(out)
        assert found is not None
        return found

    def run_through(self, kind: str, out: Path) -> tuple[RunFolder, int]:
        """Run a job, again where its client is killed; return what readers then see, and the kills."""
        try:
            return self.run(kind, out), 0
        except _ClientKilled:
            return self.run(kind, out, again=True), 1

    def run_seed(self, seed: int, kind: str = "") -> tuple[str, Counter[str]]:
        """Run a job as a seed says; return what is wrong with it, empty where nothing is, and what it met."""
        rng = random.Random(seed)
        kind = kind or rng.choice(KINDS)
        out = self.make_out(kind, f"{seed}")
        cluster = SimulatedCluster(seed, rng.randrange(400) if rng.random() < 0.3 else None)
        try:
            with simulated(cluster):
                run, kills = self.run_through(kind, out)
                cluster.seen["client killed"] += kills
                found = digests(run)
                cluster.drain()
                later = digests(run)
        except Exception as error:
            return f"lost: {type(error).__name__}: {error}", cluster.seen
        finally:
            shutil.rmtree(out, ignore_errors=True)
        expected = self.expected[kind]
        wrong = sorted(name for name in expected if found.get(name) != expected[name])
        if wrong or set(found) != set(expected):
            return f"different: {', '.join(wrong) or sorted(set(found) ^ set(expected))}", cluster.seen
        if later != found:
            return "different: what was published changed afterwards", cluster.seen
        return "", cluster.seen


KINDS = ("embed", "blocks", "refresh")
LIMITS_OF = {"embed": SMALL, "blocks": BLOCKS, "refresh": SMALL}


def run_seeds(count: int, first: int = 0, say: Callable[[str], None] = print) -> dict[str, int]:
    """Run jobs of `count` seeds; say which failed; return how many were lost and how many differ."""
    result = {"seeds": 0, "different": 0, "lost": 0}
    seen: Counter[str] = Counter()
    # In memory where the system has such a place: thousands of files are made and removed.
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(prefix="toffee-", dir=memory if memory.is_dir() else None) as name:
        bench = Bench(Path(name))
        bench.prepare()
        for seed in range(first, first + count):
            wrong, met = bench.run_seed(seed)
            seen += met
            result["seeds"] += 1
            if wrong:
                result[wrong.partition(":")[0]] += 1
                say(f"seed {seed}: {wrong}")
    return result | {f"met {what}": count for what, count in sorted(seen.items())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1000, help="How many.")
    parser.add_argument("--first", type=int, default=0, help="The first of them: to see one again.")
    arguments = parser.parse_args()
    began = time.monotonic()
    result = run_seeds(arguments.seeds, arguments.first)
    print(f"{time.monotonic() - began:.0f} s", file=sys.stderr)
    print(json.dumps(result))
    sys.exit(bool(result["different"] or result["lost"]))


if __name__ == "__main__":
    main()
