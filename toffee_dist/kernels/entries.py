"""Entries of blocks of nodes, and their rows on a basis: what a trajectory is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Ints, TemporalTensor


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """y_i(t) of a block of nodes, where a node has entries at a step.

    Attributes
    ----------
    node, step : (R,), sorted by node, then step; nodes count from the start of the block
    values : (R, r), y
    noise : (R, r), Σ_j X(i,j,t)²·V_jl²: the variance of y_i(t)_l if its events were unrelated
    """

    n_nodes: int
    n_steps: int
    node: Ints
    step: Ints
    values: NDArray[np.floating[Any]]
    noise: NDArray[np.floating[Any]]

    @property
    def rank(self) -> int:
        """Number of directions."""
        return int(self.values.shape[1])

    def direction(self, c: int) -> sp.csr_matrix[Any]:
        """Return y of direction c as a sparse matrix, nodes×steps."""
        shape = (self.n_nodes, self.n_steps)
        starts = np.searchsorted(self.node, np.arange(self.n_nodes + 1))
        return sp.csr_matrix((self.values[:, c], self.step, starts), shape=shape, copy=False)

    def take(self, nodes: Ints) -> ActiveRows:
        """Return the rows of some nodes, which then count from 0 in this order."""
        starts = np.searchsorted(self.node, np.arange(self.n_nodes + 1))
        counts = np.diff(starts)[nodes]
        first = np.repeat(starts[nodes] - np.cumsum(counts) + counts, counts)
        at = first + np.arange(counts.sum())
        node = np.repeat(np.arange(len(nodes)), counts)
        return ActiveRows(len(nodes), self.n_steps, node, self.step[at], self.values[at], self.noise[at])

    def between(self, start: int, stop: int) -> ActiveRows:
        """Return the rows of the steps [start, stop) alone, which then count from 0."""
        if (start, stop) == (0, self.n_steps):
            return self
        kept = (self.step >= start) & (self.step < stop)
        columns = (self.node[kept], self.step[kept] - start, self.values[kept], self.noise[kept])
        return ActiveRows(self.n_nodes, stop - start, *columns)


def project_rows(block: TemporalTensor, V: Any) -> ActiveRows:
    """Multiply the entries of a block of nodes by the basis.

    Parameters
    ----------
    block
        The tensor of some sources (`TemporalTensor.take_rows`), or of all.
    V : (n, r)
        The basis, of all nodes, or what gives rows of it by their numbers: only the rows of targets are read.
    """
    return NodeEntries.of(block).project(lambda targets: V[targets])


@dataclass(frozen=True, eq=False)
class NodeEntries:
    """Entries (node, target, step, value) of a block of nodes, sorted by node, target and step."""

    n_nodes: int
    n_steps: int
    node: Ints
    target: Ints
    step: Ints
    value: NDArray[np.floating[Any]]

    @classmethod
    def of(cls, block: TemporalTensor) -> NodeEntries:
        """Return the entries of a tensor of some sources, or of all."""
        pair = block.entry_pairs
        return cls(
            block.n_nodes,
            block.n_steps,
            block.sources[pair].astype(np.int64),
            np.asarray(block.indices)[pair],
            np.asarray(block.steps),
            np.asarray(block.values, dtype=np.float64),
        )

    def since(self, step: int) -> NodeEntries:
        """Return those of this step or later; steps count as before."""
        late = self.step >= step
        columns = (self.node[late], self.target[late], self.step[late], self.value[late])
        return NodeEntries(self.n_nodes, self.n_steps, *columns)

    def pairs(self) -> ActiveRows:
        """Return the entries of every pair, a row each, as if there were one direction."""
        new = np.append(True, (np.diff(self.node) != 0) | (np.diff(self.target) != 0))[: len(self.node)]
        value = self.value[:, None].astype(np.float64)
        return ActiveRows(
            int(new.sum()), self.n_steps, np.cumsum(new) - 1, self.step, value, np.square(value)
        )

    def project(self, take: Callable[[Ints], Tall], *, noise: bool = True) -> ActiveRows:
        """Multiply them by a basis, of which `take` gives the rows of some targets.

        Vectors alone need no noise: without it, which takes as long as they do, it has no columns.
        """
        targets, column = np.unique(self.target, return_inverse=True)
        V = np.asarray(take(targets))
        active, row = np.unique(self.node.astype(np.int64) * self.n_steps + self.step, return_inverse=True)
        order = np.argsort(row, kind="stable")
        starts = np.searchsorted(row[order], np.arange(len(active) + 1))
        value, column, shape = self.value[order].astype(np.float64), column[order], (len(active), len(V))
        y = sp.csr_matrix((value.astype(V.dtype), column, starts), shape=shape, copy=False) @ V
        # Squares of what single precision holds need double.
        squares = sp.csr_matrix((np.square(value), column, starts), shape=shape, copy=False)
        levels = np.asarray(squares @ np.square(V[:, slice(None if noise else 0)], dtype=np.float64))
        node, step = np.divmod(active, self.n_steps)
        return ActiveRows(self.n_nodes, self.n_steps, node, step, np.asarray(y), levels)


def find_pairs(tensor: TemporalTensor, i: Ints, j: Ints) -> NDArray[np.int64]:
    """Return the number of each pair in the order of the pattern; −1 where it never occurs."""
    known = tensor.sources.astype(np.int64) * tensor.n_nodes + tensor.indices
    asked = np.asarray(i, dtype=np.int64) * tensor.n_nodes + np.asarray(j, dtype=np.int64)
    if not len(known):
        return np.full(len(asked), -1)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[at] == asked, at, -1)
