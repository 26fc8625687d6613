"""The rotation of a run onto the previous one: a map over blocks of nodes, summed in their order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from threadpoolctl import threadpool_limits

from toffee_dist.batch.node_stats import place_of
from toffee_dist.batch.write_outputs import OutputFolder, role_of
from toffee_dist.kernels.align import Alignment
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.files import save_array
from toffee_dist.storage.manifest import AlignmentRecord
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import ZeroSlice, load_rows

# Which nodes had edges in the previous run: a number per node, as the degree is.
KNOWN = "known_before"


@dataclass(frozen=True)
class AlignTask:
    """One block of nodes.

    Parameters
    ----------
    run, previous
        Folders of the two runs.
    outputs, zero
        Which roles have vectors, and where those of the new run are.
    bounds, index
        Where rows are cut, and which block.
    """

    run: str
    previous: str
    outputs: tuple[OutputFolder, ...]
    zero: ZeroSlice
    bounds: tuple[int, ...]
    index: int = 0

    @property
    def rows(self) -> tuple[int, int]:
        """The rows [start, stop) of the block."""
        return self.bounds[self.index], self.bounds[self.index + 1]


def align_block(task: AlignTask) -> Alignment | None:
    """Return the sums of a block, None where no node of it was there before; leave which had edges then."""
    run, (start, stop) = RunFolder.at(task.run), task.rows
    earlier = EarlierRows(run, RunFolder.at(task.previous))
    before, degree = earlier.degrees(start, stop), load_rows(run.node_stat("degree"), start, stop)
    known = np.zeros(stop - start, dtype=bool)
    known[: len(before)] = before > 0
    save_array(place_of(run, KNOWN, task.bounds, task.index), known, durable=False)
    weights = np.asarray(known & (degree > 0), dtype=np.float64)
    sums: Alignment | None = None
    # Both roles of a directed graph are in one basis: they turn together.
    for output in task.outputs:
        for first, vectors in earlier.vectors(output, start, stop):
            last = first + len(vectors)
            now = task.zero.read_vectors(run.slices, role_of(output), first, last)
            sums = sums or Alignment(now.shape[1])
            sums.add(now, vectors, weights[first - start : last - start])
    return sums


def write_rotation(run: RunFolder, rank: int, parts: Sequence[Alignment | None]) -> AlignmentRecord:
    """Leave the rotation, r×r; return over how many nodes it was found, and how well they then agree."""
    total = Alignment(rank)
    for part in parts:
        if part is not None:
            total.join(part)
    # The small matrix decides the bytes of all vectors: one thread, as in the workers.
    with threadpool_limits(1, user_api="blas"):
        Q = total.rotation()
        found = AlignmentRecord(
            nodes=total.nodes, mean_cosine=total.fit(Q), unaligned=total.fit(np.eye(rank))
        )
    save_array(run.rotation, Q)
    return found
