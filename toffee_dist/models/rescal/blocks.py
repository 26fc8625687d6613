"""The snapshots that have entries, in blocks: only their active rows, stacked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.storage.files import fetched, replacing
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Bytes of AᵀX_tA that a block of snapshots may take. Measured on email: 2 to 8 MiB alike, 32 a fifth slower.
BLOCK_BYTES = 8 * 2**20
_SIDE_ARRAYS = ("data", "indices", "indptr", "shape", "nodes", "ends")


@dataclass(frozen=True, eq=False)
class Side:
    """The active rows of a block's snapshots, stacked: X_t, or X_tᵀ, without the rows that are empty.

    Attributes
    ----------
    matrix : (active rows, n) csr_matrix
    nodes : the node of every active row
    ends : (snapshots + 1,) where each snapshot's rows begin and end
    """

    matrix: sp.csr_matrix[Any]
    nodes: Ints
    ends: Ints

    def gather(self, stack: Tall) -> Tall:
        """Add up the rows of a stack by node, (n, columns)."""
        n = self.matrix.shape[1]
        ones = np.ones(len(self.nodes), dtype=stack.dtype)
        chosen = sp.csc_matrix((ones, self.nodes, np.arange(len(self.nodes) + 1)), shape=(n, len(self.nodes)))
        return np.asarray(chosen @ stack)


@dataclass(frozen=True, eq=False)
class SnapshotBlock:
    """Some snapshots that are not empty.

    Attributes
    ----------
    weights : (reductions, snapshots), how much each counts in every reduction
    sides : one where X_t is symmetric, else two
    """

    weights: Floats
    sides: tuple[Side, ...]

    @property
    def rows(self) -> Ints:
        """The nodes that the snapshots touch, ascending."""
        return np.unique(np.concatenate([side.nodes for side in self.sides]))


def snapshots_per_block(n_nodes: int, rank: int, itemsize: int) -> int:
    """Return how many snapshots a block has at the most."""
    return max(1, BLOCK_BYTES // (itemsize * min(rank, n_nodes) ** 2))


def iter_blocks(
    tensor: TemporalTensor, per_block: int, dtype: np.dtype[Any], size: float, weights: Floats
) -> Iterator[SnapshotBlock]:
    """Yield the snapshots of X/size that have entries, in blocks of at most this many.

    Parameters
    ----------
    tensor
        X.
    per_block, dtype, size
        Snapshots per block, the precision of their values, and what these are divided by.
    weights : (reductions, n_steps)
        How much each step counts in every reduction.
    """
    pair = tensor.entry_pairs
    i, j = tensor.sources[pair], tensor.indices[pair]
    order = np.argsort(tensor.steps, kind="stable")
    steps, starts = np.unique(tensor.steps[order], return_index=True)
    ends = np.append(starts, tensor.n_entries)
    for first in range(0, len(steps), per_block):
        own = steps[first : first + per_block]
        events = order[ends[first] : ends[first + len(own)]]
        local = np.searchsorted(own, tensor.steps[events])
        values = (tensor.values[events] / size).astype(dtype)
        sides = (
            [(i[events], j[events])]
            if not tensor.directed
            else [(i[events], j[events]), (j[events], i[events])]
        )
        built = tuple(
            _side(local, rows, columns, values, len(own), tensor.n_nodes) for rows, columns in sides
        )
        yield SnapshotBlock(weights[:, own], built)


def _side(t: Ints, rows: Ints, columns: Ints, values: Any, n_snapshots: int, n_nodes: int) -> Side:
    keys = t.astype(np.int64) * n_nodes + rows
    active, which = np.unique(keys, return_inverse=True)
    matrix = sp.csr_matrix((values, (which, columns)), shape=(len(active), n_nodes))
    ends = np.searchsorted(active // n_nodes, np.arange(n_snapshots + 1))
    return Side(matrix, active % n_nodes, ends)


def save_block(block: SnapshotBlock, path: Path) -> None:
    """Write a block."""
    arrays: dict[str, Any] = {"weights": block.weights}
    for k, side in enumerate(block.sides):
        matrix = side.matrix
        parts = (matrix.data, matrix.indices, matrix.indptr, matrix.shape, side.nodes, side.ends)
        arrays |= {f"{name}{k}": part for name, part in zip(_SIDE_ARRAYS, parts, strict=True)}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


def load_block(path: Path) -> SnapshotBlock:
    """Read what `save_block` wrote."""
    with fetched(path) as local, np.load(local, allow_pickle=False) as arrays:
        sides = []
        for k in range(2):
            if f"data{k}" in arrays:
                data, indices, indptr, shape, nodes, ends = (arrays[f"{name}{k}"] for name in _SIDE_ARRAYS)
                sides.append(Side(sp.csr_matrix((data, indices, indptr), shape=tuple(shape)), nodes, ends))
        return SnapshotBlock(arrays["weights"], tuple(sides))
