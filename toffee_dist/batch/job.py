"""A run under way: what was asked for, where it goes, where its tasks run, and what was found so far."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from toffee_dist.batch.blocks import BlockMatrix, MatrixTask, cut_matrix, matrix_folder
from toffee_dist.batch.listeners import telling
from toffee_dist.batch.plan import Plan, Shape
from toffee_dist.batch.sharded import solve_sharded
from toffee_dist.batch.solve import BasisTask, SolveTask, solve_batch, write_basis
from toffee_dist.batch.stages import slices_in_blocks
from toffee_dist.cluster.client import open_cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.cluster.traces import Traces, open_traces
from toffee_dist.cluster.workers import Worker, ask_workers, find_dashboard, find_warnings, peak_bytes
from toffee_dist.kernels.embedding import TimeWeights
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.progress import Progress
from toffee_dist.settings import JobConfig
from toffee_dist.storage.files import FileSeal
from toffee_dist.storage.manifest import Metrics
from toffee_dist.storage.paths import as_remote
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.spaces import Spaces
from toffee_dist.tasks import RunTasks
from toffee_dist.timegrid import TimeGrid
from toffee_dist.units import parse_bytes


@dataclass
class Outcome:
    """What a run did, this time."""

    run: RunFolder
    plan: Plan
    solved: int = 0
    reused: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    passes: dict[str, int] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    figures: dict[str, Any] = field(default_factory=dict)

    def metrics(self) -> Metrics:
        """Return the figures, for the manifest."""
        return Metrics(
            nodes=self.plan.shape.n_nodes,
            steps=self.plan.shape.n_steps,
            solved=self.solved,
            reused=self.reused,
            seconds={name: round(value, 3) for name, value in self.seconds.items()},
            passes=self.passes or None,
            peaks=self.peaks or None,
            **self.figures,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {"run": str(self.run.path), **self.metrics().model_dump(mode="json", exclude_unset=True)}


class Job:
    """One run on one client.

    Attributes
    ----------
    config, run, progress, limits
        What was asked for, where it goes, who is shown how far it is, and the sizes of tasks.
    client, workers
        Where tasks run.
    shape, grid, bounds, plan, outcome
        Known when the edges are staged; `bounds` are the rows at which slices are cut into blocks.
    spaces
        Known when the vectors are; the ids of the spaces that they are in.
    slices : names of the slices that the run has, in the order of their solving
    seals : of the parts that were read back, by the way from the run to each
    """

    shape: Shape
    grid: TimeGrid
    bounds: tuple[int, ...]
    plan: Plan
    outcome: Outcome
    spaces: Spaces

    def __init__(
        self, config: JobConfig, run: RunFolder, progress: Progress, limits: Limits, stack: ExitStack
    ) -> None:
        self.config, self.run, self.progress, self.limits = config, run, progress, limits
        self.slices: list[str] = []
        self.seals: dict[str, FileSeal] = {}
        self._matrices: dict[str, BlockMatrix] = {}
        self._stack = stack
        self.client: Any = None
        self.workers: list[Worker] = []
        self.traces = Traces()

    def connect(self, config: JobConfig) -> None:
        """Open the cluster that the settings name, after closing the one that is open."""
        self._stack.close()
        self.client = self._stack.enter_context(open_cluster(config))
        self.workers = ask_workers(self.client, self.run.work)
        for warning in find_warnings(self.workers):
            self.progress.say(warning)

    def tasks(self, done: Callable[[], None]) -> RunTasks:
        """Return what runs tasks: patient as the settings say, with a place for diagnostics."""
        return runner(
            self.client,
            wait=self.config.wait,
            stall=self.config.stall,
            diagnostics=self.run.diagnostics,
            done=done,
        )

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[RunTasks]:
        """Give what runs the tasks of a stage; show how far it is, and add up its seconds."""
        began = time.monotonic()
        with self.traces.stage(name, self.client), self.progress.stage(name, total) as done:
            yield self.tasks(done)
        spent = self.outcome.seconds
        spent[name] = spent.get(name, 0.0) + time.monotonic() - began
        self.note_peak(name)

    def note_peak(self, name: str) -> None:
        """Write down the most memory that one worker had until the end of a stage."""
        peak = peak_bytes(self.client)
        if peak is not None:
            self.outcome.peaks[name] = peak

    def map(self, stage: str, function: Callable[[Any], Any], items: Iterable[Any]) -> list[Any]:
        """Run one map of tasks."""
        items = list(items)
        with self.stage(stage, len(items)) as run:
            return list(run(function, items))

    def solve(self, stage: str, items: Sequence[SolveTask], *, basis: bool = False) -> None:
        """Solve slices, each in one task or in blocks of nodes, and count those that were there already.

        Parameters
        ----------
        stage
            What it is called.
        items
            The slices.
        basis
            Whether to leave their singular vectors too: they are zero slices.
        """
        wanted = sum(len(item.freqs) for item in items)
        solved = 0
        if self.in_blocks(basis):
            with self.stage(stage) as run:
                for item in items:
                    for k in item.freqs:
                        cut = partial(self._cut, run, item.name(k), k, item.weights)
                        found = solve_sharded(run, replace(item, freqs=(k,)), self.bounds, cut)
                        solved += found.pop("solved")
                        self.add_passes(found)
        else:
            # Also those that seem to be there: whether a slice is whole, its task finds by the checksum.
            solved = sum(self.map(stage, solve_batch, items))
            if basis:
                tasks = [BasisTask(item.slices, item.name(0)) for item in items]
                self.map("basis", write_basis, tasks)
        self.outcome.solved += solved
        self.outcome.reused += wanted - solved

    def add_passes(self, found: Mapping[str, int]) -> None:
        """Add up passes over blocks, by what is counted of them."""
        for name, count in found.items():
            self.outcome.passes[name] = self.outcome.passes.get(name, 0) + count

    def in_blocks(self, zero: bool) -> bool:
        """Whether slices are cut into blocks: zero slices of a large graph, others where too large."""
        if len(self.bounds) == 2 or zero:
            return len(self.bounds) > 2
        return slices_in_blocks(self.shape, self.config, self.limits)

    def cut(self, run: RunTasks, name: str, weights: TimeWeights) -> list[MatrixTask]:
        """Return the blocks of a zero slice; of a graph that is one block, nothing is written."""
        if len(self.bounds) > 2:
            return self._cut(run, name, 0, weights).tasks()
        tensor, directed = str(self.run.staged.tensor), self.shape.directed
        return [MatrixTask(tensor, "", self.bounds, 0, 0, weights, "f8", directed)]

    def _cut(self, run: RunTasks, name: str, k: int, weights: TimeWeights) -> BlockMatrix:
        """Cut a slice into blocks, once: to see that they are whole, a resumed run reads all of them."""
        if name not in self._matrices:
            folder = matrix_folder(self.run.slices, name)
            tensor, options = self.run.staged.tensor, self.config.solver_settings()
            self._matrices[name] = cut_matrix(run, tensor, folder, self.bounds, options, k, weights)
        return self._matrices[name]

    def allowed_memory(self, found: int) -> int:
        """Return what a worker may use: what the user said, or what it has."""
        return found if self.config.memory is None else parse_bytes(self.config.memory)

    def check_memory(self, plan: Plan, threads: int | None = None) -> None:
        """Raise unless the plan fits into every worker."""
        for worker in self.workers:
            memory = self.allowed_memory(worker.memory)
            plan.check_memory(memory, threads or worker.threads, f"worker {worker.address}")


@contextmanager
def open_job(
    config: JobConfig, run: RunFolder, progress: Progress | None = None, limits: Limits = LIMITS
) -> Iterator[Job]:
    """Give the job of a run, connected; its cluster is closed whatever happens."""
    progress = progress or Progress()
    with (
        telling(config, run, progress),
        open_traces(config.traces, run.run_id) as traces,
        ExitStack() as stack,
    ):
        job = Job(config, run, progress, limits, stack)
        job.traces = traces
        job.connect(config)
        if dashboard := find_dashboard(job.client):
            job.progress.say(f"dashboard: {dashboard}")
        yield job


def free_bytes(folder: Path) -> int:
    """Return what is free where the run goes; a store has no end."""
    if as_remote(folder) is not None:
        return sys.maxsize
    status = os.statvfs(folder)
    return status.f_bavail * status.f_frsize
