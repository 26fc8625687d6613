"""Axes of a trajectory from the energy of all steps instead of their sum: those of UASE, freed of noise.

They are the leading eigenvectors of Σ_t X(t)ᵀX(t) − diag(Σ_entries w²) = BᵀB − D, where B has a row for every
source and step. The diagonal that is taken away is exactly what unrelated events would leave. (1/T) Σ_k m_k
X_kᴴX_k is the same sum (Parseval): this basis sees what cancels in the sum over time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.solvers import slice_dtype
from toffee_dist.kernels.solvers.base import Arrays, Built, Handle, Small, Tall, TallSpace, Term
from toffee_dist.kernels.solvers.closed_form import DENSE_EIGEN_SHARE, use_dense
from toffee_dist.kernels.solvers.krylov import EigenSpace
from toffee_dist.settings import SolverSettings
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# An energy of so many roundings of the largest is none.
ROUNDINGS = 100


class Unfolded(NamedTuple):
    """B in CSR form, with sorted columns."""

    indptr: Ints
    indices: Ints
    values: Floats


def unfold(tensor: TemporalTensor) -> Unfolded:
    """Return the rows of B that have two targets or more, in the order of sources and steps.

    A row with one target adds to the diagonal only, of which D takes the same away.
    """
    pair = tensor.entry_pairs
    key = tensor.sources[pair].astype(np.int64) * tensor.n_steps + tensor.steps
    order = np.argsort(key, kind="stable")
    _, counts = np.unique(key, return_counts=True)
    several = counts > 1
    kept = order[np.repeat(several, counts)]
    indptr = np.append(0, np.cumsum(counts[several]))
    return Unfolded(indptr, np.asarray(tensor.indices)[pair[kept]], np.asarray(tensor.values)[kept])


def energy_basis(tensor: TemporalTensor, options: SolverSettings) -> NDArray[Any]:
    """Return the axes in memory, those of most energy first, (n, rank); zeros where there is no energy."""
    n, rank, dtype = tensor.n_nodes, options.rank, slice_dtype(options, real=True)
    rows = unfold(tensor)
    size = float(np.linalg.norm(rows.values))
    if size == 0:
        return np.zeros((n, rank), dtype)
    shape = len(rows.indptr) - 1, n
    B = sp.csr_matrix(((rows.values / size).astype(dtype), rows.indices, rows.indptr), shape=shape)
    X = EnergyOperator(B, (options.seed, 0))
    if use_dense(X, rank, DENSE_EIGEN_SHARE):
        values, vectors = np.linalg.eigh(X.dense())
        tall, small = _settle(X, vectors[:, ::-1][:, :rank].astype(dtype), values[::-1][:rank], rank)
    else:
        tall, small = find_axes(X, rank)
    return np.asarray(X.build(Term(tall, small)).tall)


def find_axes(X: TallSpace, rank: int) -> tuple[Handle, Small]:
    """Return the axes wherever BᵀB − D is, as a tall array times a small one with `rank` columns."""
    space = EigenSpace(X, min(rank, X.n), positive=True)
    return _settle(X, space.vectors().tall, space.values, rank)


def _settle(X: TallSpace, vectors: Handle, values: Floats, rank: int) -> tuple[Handle, Small]:
    """Let the largest entry of every axis be positive; one with less energy than noise leaves is none."""
    found = len(values)
    sign = np.where(X.largest(vectors, np.eye(found)) < 0, -1.0, 1.0)
    least = ROUNDINGS * np.finfo(X.dtype).eps * np.abs(values).max(initial=0.0)
    return vectors, np.eye(found, rank) * (sign * (values > least))[:, None]


class EnergyOperator(Arrays):
    """BᵀB − D in memory.

    Parameters
    ----------
    B : (m, n) csr_matrix
        The unfolded tensor.
    seed
        Names its random numbers.
    """

    def __init__(self, B: Any, seed: Sequence[int]) -> None:
        super().__init__(int(B.shape[1]), B.dtype, seed)
        self._B = B
        self._noise = noise_of(B.indices, B.data, self.n)

    def _multiply(self, tall: Tall, by: str) -> Tall:
        return np.asarray(self._B.T @ (self._B @ tall) - self._noise[:, None] * tall)

    def random(self, columns: int) -> Built:
        """Return random rows of the nodes that take part."""
        Y = super().random(columns).tall
        Y[self._noise == 0] = 0
        return Built(Y, self.gram(Y, Y), [])

    def dense(self) -> Small:
        """Return it as a dense array in double."""
        B = self._B.astype(np.float64)
        return np.asarray((B.T @ B).toarray()) - np.diag(self._noise.astype(np.float64))


def noise_of(targets: Ints, values: NDArray[Any], n: int) -> NDArray[Any]:
    """Return the diagonal of D: Σ w² of every target, in the precision of the values."""
    return np.bincount(targets, np.square(values, dtype=np.float64), minlength=n).astype(values.dtype)
