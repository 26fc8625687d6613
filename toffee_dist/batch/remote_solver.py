"""Solving slices on a client, through a folder that its workers share: for the estimator."""

from __future__ import annotations

import tempfile
import uuid
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

from toffee_dist.batch.plan import Shape
from toffee_dist.batch.solve import SolveTask, solve_batch
from toffee_dist.batch.stages import batch_freqs
from toffee_dist.cluster.mapping import runner
from toffee_dist.cluster.workers import ask_workers
from toffee_dist.kernels.embedding import TimeWeights
from toffee_dist.kernels.solvers import SliceFactors
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.files import check_writable, remove_tree
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import REDUCED, read_slice
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import RunTasks
from toffee_dist.tensor import TemporalTensor


class RemoteSolver:
    """A client and a folder that its workers share: where an estimator has its slices solved."""

    def __init__(self, client: Any, storage: str | None) -> None:
        self.path = to_path(storage or tempfile.gettempdir()) / f"toffee-{uuid.uuid4().hex[:12]}"
        self.path.mkdir(mode=0o700)
        check_writable(self.path)
        # Gone with the estimator.
        weakref.finalize(self, remove_tree, self.path)
        self.run: RunTasks = runner(client)
        self._staged: TemporalTensor | None = None
        ask_workers(client, self.path)

    def solve(
        self, tensor: TemporalTensor, freqs: Sequence[int], options: SolverSettings, reduce: str = "sum"
    ) -> Iterator[SliceFactors]:
        """Yield solved slices in the order of `freqs`; the factors come through storage."""
        if self._staged is not tensor:
            stage_tensor(tensor, self.path / "tensor")
            self._staged = tensor
        slices = self.path / "slices"
        slices.mkdir(exist_ok=True)
        shape = Shape(
            tensor.n_nodes, tensor.n_steps, tensor.n_pairs, tensor.n_entries, tensor.directed, 0, exact=True
        )
        tasks = [
            SolveTask(
                str(self.path / "tensor"),
                str(slices),
                batch,
                options,
                TimeWeights(reduce),
                slice="" if reduce == "sum" else REDUCED,
            )
            for batch in batch_freqs(list(freqs), shape, options.rank)
        ]
        for task, _ in zip(tasks, self.run(solve_batch, tasks), strict=True):
            for k in task.freqs:
                yield read_slice(slices, task.name(k))
