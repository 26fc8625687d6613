"""CTDNE (Nguyen et al., WWW '18 companion): skip-gram on walks that respect time.

    index    one task: the links by node and time → ends.npy, sources.npy, targets.npy, steps.npy
    walk     a map over blocks of walks: nodes-*.npy, lengths-*.npy
    train    one task: skip-gram in the order of the walks → the vectors

A walk depends on the seed and its number alone, so the blocks may be cut anywhere. Walks follow the direction
of the links; there is one vector per node.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from toffee_dist.kernels.skipgram import train_skipgram
from toffee_dist.kernels.walks import TimedLinks, draw_walks, shortest_walk
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, one_role
from toffee_dist.models.htne import COMPILE_SECONDS, COMPILER_BYTES, LINK_BYTES
from toffee_dist.settings import FitSettings
from toffee_dist.storage.files import read_json, remove_tree, save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import Sizes, open_tensor

# word2vec's, and as many epochs as gensim makes by default. The published single epoch has not converged: on
# validation parts (1, 5 and 20 epochs) email .896, .928, .901, wildbird .800, .880, .885, school .867, .914,
# .913, workplace .870, .899, .901, fb-forum .793, .799, .779, hypertext .788, .765, .764.
NEGATIVES, EPOCHS, RATE = 5, 5, 0.025
# Walks of one task.
WALKS_PER_TASK = 50_000
LINKS = ("ends", "sources", "targets", "steps")
INDEX = "links.json"


@dataclass(frozen=True)
class IndexTask:
    """The sorting of the links of a staged tensor, into a folder."""

    tensor: str
    work: str


@dataclass(frozen=True)
class IndexRecord:
    """Nodes of the graph, and how many of them have links."""

    n_nodes: int
    n_linked: int


@dataclass(frozen=True)
class WalkTask:
    """Some walks, by their numbers.

    Parameters
    ----------
    work
        Folder of the links and of the walks.
    block, first, count
        Number of the block, and of its walks.
    decay
        How fast the chance of a later link falls.
    options
        The rest of how to walk.
    timed
        Whether to leave the steps of the links of the walks too.
    """

    work: str
    block: int
    first: int
    count: int
    decay: float
    options: FitSettings
    timed: bool = False

    @property
    def done(self) -> Path:
        """The file that says that the block is there."""
        return to_path(self.work) / f"lengths-{self.block:05d}.npy"


@dataclass(frozen=True)
class TrainTask:
    """The learning from all walks."""

    reduction: ReductionTask
    work: str
    n_nodes: int
    n_blocks: int


def fit_ctdne(context: FitContext) -> FitReport:
    """Fit CTDNE: walks, then skip-gram."""
    [wanted] = context.reduction_tasks()
    if wanted.finished():
        return wanted.read_report()
    work = to_path(context.folder) / f"{context.name}-work"
    found, n_blocks = walk_all(context, work, context.options.walk_decay or 0.0)
    [report] = context.run(train, [TrainTask(wanted, str(work), found.n_nodes, n_blocks)])
    remove_tree(work)
    return report  # type: ignore[no-any-return]


def walk_all(
    context: FitContext, work: Path, decay: float, *, timed: bool = False
) -> tuple[IndexRecord, int]:
    """Leave all walks in a folder; return what the graph is like, and the number of blocks."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / INDEX).exists():
        for _ in context.run(index, [IndexTask(context.tensor, str(work))]):
            pass
    found = IndexRecord(**read_json(work / INDEX))
    total = context.options.walks * found.n_linked
    tasks = [
        WalkTask(str(work), block, first, min(WALKS_PER_TASK, total - first), decay, context.options, timed)
        for block, first in enumerate(range(0, total, WALKS_PER_TASK))
    ]
    for _ in context.run(walk, [task for task in tasks if not task.done.exists()]):
        pass
    return found, len(tasks)


def index(task: IndexTask) -> None:
    """Sort the links, and leave them."""
    work = to_path(task.work)
    tensor = open_tensor(task.tensor)
    links = TimedLinks.of(tensor)
    for name in LINKS:
        save_array(work / f"{name}.npy", getattr(links, name))
    met = np.zeros(tensor.n_nodes, bool)
    met[links.sources] = met[links.targets] = True
    # Last: it says that the links are there.
    write_json(work / INDEX, asdict(IndexRecord(tensor.n_nodes, int(met.sum()))))


def walk(task: WalkTask) -> None:
    """Draw the walks of a block, unless they are there."""
    work, options = to_path(task.work), task.options
    if task.done.exists():
        return
    links = TimedLinks(*(load_rows(work / f"{name}.npy") for name in LINKS))
    walks, steps = draw_walks(
        links,
        task.first,
        task.count,
        length=options.walk_length,
        shortest=shortest_walk(links, options.shortest_walk),
        decay=task.decay,
        seed=options.seed,
    )
    present = walks >= 0
    if task.timed:
        # A kept walk has one step less than nodes; its first node has the step of the first link.
        timed = np.hstack([steps[:, :1], steps])
        save_array(work / f"steps-{task.block:05d}.npy", timed[present])
    save_array(work / f"nodes-{task.block:05d}.npy", walks[present])
    lengths = present.sum(axis=1)
    # Last: it says that the block is there.
    save_array(task.done, lengths[lengths > 0].astype(np.int32))


def read_blocks(work: Path, name: str, n_blocks: int, dtype: type) -> np.ndarray:
    """Return an array of all blocks, one after the other."""
    parts = [load_rows(work / f"{name}-{block:05d}.npy") for block in range(n_blocks)]
    return np.concatenate(parts) if parts else np.empty(0, dtype)


def train(task: TrainTask) -> FitReport:
    """Learn from the walks, and leave the vectors."""
    began = time.perf_counter()
    work, options = to_path(task.work), task.reduction.options
    tokens = read_blocks(work, "nodes", task.n_blocks, np.int32)
    lengths = read_blocks(work, "lengths", task.n_blocks, np.int32)
    vectors, losses = train_skipgram(
        tokens,
        np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]),
        task.n_nodes,
        options.rank,
        window=options.window,
        negatives=options.negatives or NEGATIVES,
        epochs=options.epochs or EPOCHS,
        rate=options.learning_rate or RATE,
        seed=options.seed,
    )
    seconds = time.perf_counter() - began
    report = FitReport(losses[-1] if losses else None, len(losses), seconds, converged=True)
    task.reduction.write(one_role(vectors), report)
    return report


# Rough, on the safe side, and for walks of full length: on the six graphs of the paper the estimate is 4 to
# 10 times what was measured (benchmarks/paper.py).
# Seconds per node of a walk that is drawn; of learning, per pair of nodes, candidate and column.
WALK_SECONDS, PAIR_SECONDS = 2e-7, 5e-10


def walk_costs(sizes: Sizes, options: FitSettings, *, timed: bool = False) -> tuple[list[Cost], int]:
    """Return what walking takes, and how many nodes all walks have at the most."""
    total = options.walks * sizes.n_nodes
    # A walk has at most a node more than there are steps.
    length = min(options.walk_length, sizes.n_steps + 1)
    n_tasks = max(1, -(-total // WALKS_PER_TASK))
    tokens = total * length
    in_task = min(total, WALKS_PER_TASK)
    item = 12 if timed else 4
    return [
        Cost(
            "walk index",
            "links by node and time",
            tasks=1,
            task_bytes=LINK_BYTES * sizes.n_entries,
            seconds=3e-7 * sizes.n_entries,
            disk=16 * sizes.n_entries,
        ),
        Cost(
            "walk",
            f"{options.walks} walks per node, in blocks",
            tasks=n_tasks,
            # Nodes and steps of full rows, which ones are there, and what is kept of them.
            task_bytes=COMPILER_BYTES + 40 * sizes.n_entries + in_task * options.walk_length * (25 + item),
            seconds=n_tasks * COMPILE_SECONDS / 5 + WALK_SECONDS * tokens,
            disk=item * tokens,
        ),
    ], tokens


def ctdne_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes; the walks are taken to be as long as time permits, which few are."""
    stages, tokens = walk_costs(sizes, options)
    tall = 4 * sizes.n_nodes * options.rank
    # A node meets about the window's number of neighbours: half a window on each side, on average.
    pairs = tokens * (options.window + 1) * (options.epochs or EPOCHS)
    learning = Cost(
        "ctdne",
        "skip-gram, one walk after the other",
        tasks=1,
        task_bytes=COMPILER_BYTES + 24 * tokens + 4 * tall,
        seconds=PAIR_SECONDS * pairs * (1 + (options.negatives or NEGATIVES)) * options.rank
        + COMPILE_SECONDS,
        disk=tall,
    )
    return [*stages, learning]
