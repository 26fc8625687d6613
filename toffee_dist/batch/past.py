"""What the trajectory of a run goes on from: nothing, unless it is of a causal chain, which appends steps.

Entries of steps that the previous run had come from its compact form, so that what it published stays as it
is; those of new steps come from the staged tensor.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.filter import TimeKernel
from toffee_dist.kernels.gains import Span
from toffee_dist.storage.compact import CompactTrajectory
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.vectors import CompactTable, damaged, open_vectors


@dataclass(frozen=True)
class Past:
    """What is known before the steps of a run.

    Parameters
    ----------
    age, before, learnt
        As in `kernels.gains.Span`; of a run that is of no causal chain, zeros.
    run
        Folder of the previous run, to whose trajectory steps are appended; empty: there is none.
    new
        How many steps are appended.
    space_id
        The space of that trajectory.
    basis
        Where the basis of the chain is, a row per node; empty: it begins with that of the run.
    """

    age: int = 0
    before: int = 0
    learnt: int = 0
    run: str = ""
    new: int = 0
    space_id: str = ""
    basis: str = ""

    def span(self, n_steps: int) -> Span:
        """Return the steps that entries are of, where the window has so many."""
        return Span(n_steps, self.before, self.age, self.learnt)

    def count(self, n_nodes: int, run: RunFolder) -> NDArray[np.int64]:
        """Return how many entries every node of a run has here, at the most."""
        found = np.zeros(n_nodes, dtype=np.int64)
        if self.run:
            rows = self._rows(run).rows(0, n_nodes)
            found[: len(rows)] = self.compact.counts[rows]
        return found

    def join(self, entries: NodeEntries, start: int, stop: int, run: RunFolder) -> NodeEntries:
        """Return the entries of the nodes [start, stop): new steps from `entries`, earlier ones from here."""
        if not self.run:
            return entries
        earlier, span = self._rows(run), self.span(entries.n_steps)
        late = entries.since(entries.n_steps - self.new)
        parts = [(late.node, late.target, late.step + span.before, late.value)]
        rows = earlier.rows(start, stop)
        if len(rows):
            old = self.compact.entries_of(rows)
            step = old.step + (self.compact.kernel.span.first - span.first)
            kept = step >= 0
            target = earlier.find(old.target[kept])
            if len(target) and target.min() < 0:
                raise damaged(earlier.earlier, "compact/: links of nodes that were forgotten")
            parts.append((old.node[kept], target, step[kept], old.value[kept]))
        node, target, step, value = (np.concatenate(column) for column in zip(*parts, strict=True))
        order = np.lexsort((step, target, node))
        target = target[order].astype(entries.target.dtype)
        return NodeEntries(stop - start, span.n_steps, node[order], target, step[order], value[order])

    def kernels(self) -> tuple[TimeKernel | None, TimeKernel | None]:
        """Return the kernels of the chain, and that of pairs; None where it begins."""
        return (self.compact.kernel, self.compact.pair_kernel) if self.run else (None, None)

    @cached_property
    def compact(self) -> CompactTrajectory:
        """The trajectory of the previous run."""
        table = open_vectors(RunFolder.at(self.run), "trajectory")
        assert isinstance(table, CompactTable)
        return table.compact

    def _rows(self, run: RunFolder) -> EarlierRows:
        return EarlierRows(run, RunFolder.at(self.run))


NO_PAST = Past()
