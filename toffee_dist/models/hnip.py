"""HNIP (Qiu et al., AAAI '20), reconstructed: neither its code nor its text is public.

What is known: temporal walks with exponential decay make a high-order proximity matrix, and a guided
auto-encoder turns its rows into vectors. Everything else here is our choice:

- The walks are those of `ctdne`, with the chance of a later link ∝ exp(−decay·t), time from 0 to 1.
- Two nodes at most ``window`` links apart on a walk add exp(−decay·Δt), Δt the time between them, to the
  proximity of both; a node is no neighbour of itself.
- A row is log(1 + proximity), divided by its largest entry.
- The auto-encoder and its guide are those of kernels/autoencoder.py, with the weights of its `Guide`.

    index, walk    as in `ctdne`
    proximity      a map over the blocks of walks: pairs-*.npy, sums-*.npy
    train          one task
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.autoencoder import train_autoencoder
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, one_role
from toffee_dist.models.ctdne import LINKS, read_blocks, walk_all, walk_costs
from toffee_dist.settings import FitSettings
from toffee_dist.storage.files import remove_tree, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import Sizes

EPOCHS, RATE, DECAY = 50, 1e-3, 1.0
# Rows that the auto-encoder learns from at once.
BATCH = 256


@dataclass(frozen=True)
class ProximityTask:
    """What the walks of one block add to the proximity.

    Parameters
    ----------
    work
        Folder of the walks.
    block
        Number of the block.
    n_nodes
        Of the graph.
    window, decay
        How far apart two nodes may be, and how fast their proximity falls with the time between them.
    """

    work: str
    block: int
    n_nodes: int
    window: int
    decay: float

    @property
    def done(self) -> Path:
        """The file that says that the block was added up."""
        return to_path(self.work) / f"sums-{self.block:05d}.npy"


@dataclass(frozen=True)
class EncodeTask:
    """The learning from the proximity."""

    reduction: ReductionTask
    work: str
    n_nodes: int
    n_blocks: int


def fit_hnip(context: FitContext) -> FitReport:
    """Fit the reconstruction of HNIP: walks, proximity, auto-encoder."""
    [wanted] = context.reduction_tasks()
    if wanted.finished():
        return wanted.read_report()
    options = context.options
    decay = DECAY if options.walk_decay is None else options.walk_decay
    work = to_path(context.folder) / f"{context.name}-work"
    found, n_blocks = walk_all(context, work, decay, timed=True)
    tasks = [
        ProximityTask(str(work), block, found.n_nodes, options.window, decay) for block in range(n_blocks)
    ]
    for _ in context.run(add_up, [task for task in tasks if not task.done.exists()]):
        pass
    [report] = context.run(encode, [EncodeTask(wanted, str(work), found.n_nodes, n_blocks)])
    remove_tree(work)
    return report  # type: ignore[no-any-return]


def add_up(task: ProximityTask) -> None:
    """Leave the pairs of nodes that meet on the walks of a block, and their proximity."""
    work = to_path(task.work)
    if task.done.exists():
        return
    nodes, steps, lengths = (
        load_rows(work / f"{name}-{task.block:05d}.npy") for name in ("nodes", "steps", "lengths")
    )
    every = load_rows(work / f"{LINKS[3]}.npy")
    first, last = (int(every.min()), int(every.max())) if len(every) else (0, 0)
    pairs, sums = meetings(
        nodes, (steps - first) / max(last - first, 1), lengths, task.n_nodes, task.window, task.decay
    )
    save_array(work / f"pairs-{task.block:05d}.npy", pairs)
    save_array(task.done, sums)


def meetings(
    nodes: Any, times: Any, lengths: Any, n_nodes: int, window: int, decay: float
) -> tuple[Any, Any]:
    """Return the pairs u·n + v of nodes that meet on walks, and Σ exp(−decay·Δt) of each.

    Parameters
    ----------
    nodes, times : (tokens,)
        The nodes of all walks, and when each was reached, from 0 to 1.
    lengths
        Nodes of every walk.
    """
    walk = np.repeat(np.arange(len(lengths)), lengths)
    pairs: Any = np.empty(0, np.int64)
    sums: Any = np.empty(0)
    for apart in range(1, window + 1):
        same = np.flatnonzero(walk[apart:] == walk[:-apart])
        u, v = nodes[same].astype(np.int64), nodes[same + apart].astype(np.int64)
        weight = np.exp(-decay * (times[same + apart] - times[same]))
        off = u != v
        pairs = np.concatenate([pairs, u[off] * n_nodes + v[off], v[off] * n_nodes + u[off]])
        sums = np.concatenate([sums, weight[off], weight[off]])
        # Folded at every distance, so that what is held stays near the number of distinct pairs.
        pairs, which = np.unique(pairs, return_inverse=True)
        sums = np.bincount(which, sums, minlength=len(pairs))
    return pairs, sums


def scale_rows(pairs: Any, sums: Any, n_nodes: int) -> sp.csr_matrix[Any]:
    """Return the matrix whose rows are encoded: log(1 + proximity), the largest entry of a row 1."""
    distinct, which = np.unique(pairs, return_inverse=True)
    values = np.log1p(np.bincount(which, sums, minlength=len(distinct)))
    shape = (n_nodes, n_nodes)
    P = sp.csr_matrix((values, (distinct // n_nodes, distinct % n_nodes)), shape=shape)
    largest = P.max(axis=1).toarray().ravel()
    counts = np.diff(P.indptr)
    P.data /= np.repeat(largest, counts)
    return sp.csr_matrix(P.astype(np.float32))


def encode(task: EncodeTask) -> FitReport:
    """Learn from the proximity, and leave the vectors."""
    began = time.perf_counter()
    work, options = to_path(task.work), task.reduction.options
    pairs = read_blocks(work, "pairs", task.n_blocks, np.int64)
    sums = read_blocks(work, "sums", task.n_blocks, np.float64)
    vectors, losses = train_autoencoder(
        scale_rows(pairs, sums, task.n_nodes),
        options.rank,
        epochs=options.epochs or EPOCHS,
        rate=options.learning_rate or RATE,
        batch=BATCH,
        seed=options.seed,
    )
    seconds = time.perf_counter() - began
    report = FitReport(losses[-1] if losses else None, len(losses), seconds, converged=True)
    task.reduction.write(one_role(vectors), report)
    return report


# Rough: on the six graphs of the paper the estimate is 1.2 to 2.4 times what was measured
# (benchmarks/paper.py).
# Seconds of a multiplication and an addition in single precision; of a pair of nodes on a walk.
FLOP_SECONDS, MEETING_SECONDS = 4e-11, 3e-7
# Nodes of a walk, for the pairs that meet: means of 3.5 to 12 were measured on the graphs of the paper.
USUAL_LENGTH = 16


def hnip_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes."""
    stages, tokens = walk_costs(sizes, options, timed=True)
    n, rank = sizes.n_nodes, options.rank
    n_tasks = stages[-1].tasks
    length = min(options.walk_length, sizes.n_steps + 1, USUAL_LENGTH)
    # Both orders of the pairs of nodes that are near on a walk.
    near = 2 * sum(length - apart for apart in range(1, min(options.window, length - 1) + 1))
    met = min(options.walks * n * near, n * n)
    in_task = min(-(-met // n_tasks) * 2, met)
    epochs = options.epochs or EPOCHS
    tall = 4 * n * rank
    return [
        *stages,
        Cost(
            "proximity",
            "which nodes meet on the walks",
            tasks=n_tasks,
            task_bytes=72 * in_task + 64 * (tokens // n_tasks),
            seconds=MEETING_SECONDS * tokens * options.window,
            disk=16 * met,
        ),
        Cost(
            "hnip",
            "guided auto-encoder of the rows of the proximity",
            tasks=1,
            # The matrix while it is made; W of both outer layers with gradient, moments and their work.
            task_bytes=64 * met + 6 * 4 * 2 * n * 2 * rank + 8 * 4 * min(BATCH, n) * n + 4 * tall,
            # Forward and backward through the dense layer of the output, and Adam on both outer layers.
            seconds=epochs * (FLOP_SECONDS * 3 * n * n * 2 * rank + 1.2e-8 * (-(-n // BATCH)) * 4 * n * rank),
            disk=tall,
        ),
    ]
