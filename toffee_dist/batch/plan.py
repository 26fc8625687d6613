"""A plan: the stages of a job with their tasks, bytes and seconds, and whether they fit.

Nothing here depends on the workers, so tasks and bytes of results do not either.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from toffee_dist.batch.trajectory import Dense
from toffee_dist.errors import TooLargeError
from toffee_dist.settings import ModelSettings
from toffee_dist.storage.manifest import Summary
from toffee_dist.units import MIB, show_bytes

# A process with our libraries after one small job, 212 MiB measured, and what polars and Arrow keep of the
# memory that the ingest has freed: 80 to 150 measured in ten runs of tests/batch/test_memory.py's many nodes,
# by chance (everything else is given back after every task).
BASE_BYTES = 384 * MIB
# Seconds of a job however small its graph is: the command, its workers and its page. 1,000 nodes take 3.8
# with threads and 6.1 with two processes (benchmarks/large.py --only sizes --sizes 0.001).
SECONDS_START = 5.0
# Below this many seconds of solving, processes start more slowly than they save.
PROCESSES_PAY = 10.0


@dataclass(frozen=True)
class Shape:
    """The sizes of a tensor, counted or estimated; the rows of dense parts, where they were counted."""

    n_nodes: int
    n_steps: int
    n_pairs: int
    n_entries: int
    directed: bool
    rows: int
    exact: bool
    n_dense: int | None = None

    @classmethod
    def of(cls, summary: Summary, directed: bool) -> Shape:
        """Return the sizes of a staged tensor."""
        return cls(
            summary.nodes,
            summary.steps,
            summary.pairs,
            summary.entries,
            directed,
            rows=summary.rows,
            exact=True,
        )

    def dense(self, settings: ModelSettings) -> Dense:
        """Return what of a filtered trajectory is written as Parquet."""
        return Dense.asked(settings, self.n_nodes, self.n_steps, self.n_entries)

    def dense_bytes(self, settings: ModelSettings) -> int:
        """Return what that takes, at the most."""
        dense = self.dense(settings)
        rows = dense.most_rows(self.n_nodes, self.n_entries) if self.n_dense is None else self.n_dense
        return dense.bytes(rows, settings.rank)

    @property
    def mapped_bytes(self) -> int:
        """What the staged tensor takes on storage, and at the most in every process that maps it."""
        index = 4 if max(self.n_nodes, self.n_pairs, self.n_entries) < 2**31 else 8
        return index * (self.n_nodes + 2 * self.n_pairs + self.n_entries) + 8 * self.n_entries


@dataclass(frozen=True)
class Stage:
    """One map of the job.

    Parameters
    ----------
    name, why
        What it does, and what for.
    tasks
        How many tasks, at the most.
    task_bytes
        What one of them holds at the most, beside the process and the mapped tensor.
    seconds
        On one core.
    disk
        Bytes that it leaves.
    passes
        How often all tasks run, one pass after the other.
    moved
        Bytes that its passes read from and write to storage; 0 where that is no more than its disk.
    """

    name: str
    why: str
    tasks: int
    task_bytes: int
    seconds: float
    disk: int
    passes: int = 1
    moved: int = 0

    def seconds_with(self, workers: int, bandwidth: float) -> float:
        """Return the seconds with so many workers of one thread, and so many bytes per second for each."""
        width = max(1, min(workers, self.tasks))
        # Whole rounds of tasks: three tasks take two workers as long as four.
        rounds = math.ceil(self.tasks / width) / max(self.tasks, 1)
        return self.seconds * rounds + max(self.moved, 2 * self.disk) / (bandwidth * width)


@dataclass(frozen=True)
class Plan:
    """What will be done."""

    shape: Shape
    rank: int
    outputs: tuple[str, ...]
    n_freqs: int
    stages: tuple[Stage, ...]
    mapped_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def task_bytes(self) -> int:
        """The largest task."""
        return max(stage.task_bytes for stage in self.stages)

    @property
    def seconds(self) -> float:
        """On one core."""
        return SECONDS_START + sum(stage.seconds for stage in self.stages)

    @property
    def disk(self) -> int:
        """Bytes of storage, work included."""
        return sum(stage.disk for stage in self.stages)

    def worker_bytes(self, threads: int = 1) -> int:
        """Return the projected peak of a worker process with this many threads."""
        busy = max(min(threads, stage.tasks) * stage.task_bytes for stage in self.stages)
        return BASE_BYTES + self.mapped_bytes + busy

    def seconds_with(self, workers: int, bandwidth: float) -> float:
        """Return the seconds with so many workers of one thread, and so many bytes per second for each."""
        return SECONDS_START + sum(stage.seconds_with(workers, bandwidth) for stage in self.stages)

    def fitting_threads(self, memory: int, threads: int) -> int:
        """Return how many of these threads fit into the memory of one process."""
        return max(
            (count for count in range(1, threads + 1) if self.worker_bytes(count) <= memory), default=0
        )

    def choose_mode(self, cores: int, memory: int) -> tuple[str, int]:
        """Return the mode and the workers of ``auto``: processes where solving in parallel pays."""
        solving = [stage for stage in self.stages if stage.name == "solve"]
        pays = cores > 1 and any(s.tasks > 1 and s.seconds > PROCESSES_PAY for s in solving)
        if pays:
            return "processes", max(1, min(cores, memory // self.worker_bytes()))
        return "threads", max(1, self.fitting_threads(memory, cores))

    def check_memory(self, memory: int, threads: int, where: str) -> None:
        """Raise unless the job fits into every worker."""
        need = self.worker_bytes(threads)
        if need <= memory:
            return
        largest = max(self.stages, key=lambda stage: min(threads, stage.tasks) * stage.task_bytes)
        fitting = self.fitting_threads(memory, threads)
        if fitting >= 1:
            remedy = f"Use at most {fitting} threads per worker (--workers {fitting})."
        else:
            remedy = f"Take workers with {show_bytes(need)} or more, a smaller --rank, or fewer --outputs."
        raise TooLargeError(
            f"not enough memory in {where}",
            got=f"{show_bytes(memory)}; projected peak {show_bytes(need)}: "
            f"{show_bytes(self.mapped_bytes)} of mapped tensor and {min(threads, largest.tasks)} × "
            f"{show_bytes(largest.task_bytes)} ({largest.name}, rank {self.rank}, "
            f"{self.shape.n_nodes:,} nodes)",
            allowed="a projection that fits",
            remedy=remedy,
        )

    def check_disk(self, free: int) -> None:
        """Raise unless storage has room for work and results."""
        if self.disk > free:
            largest = max(self.stages, key=lambda stage: stage.disk)
            raise TooLargeError(
                "not enough storage for the run",
                got=f"{show_bytes(free)} free; needed {show_bytes(self.disk)}, of which "
                f"{show_bytes(largest.disk)} for {largest.name}",
                allowed="room for slices and results",
                remedy="Make room, or ask for fewer --outputs, --freqs or --dense steps.",
            )
