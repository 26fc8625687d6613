"""t-SVD: the truncated SVD of every frequency slice; for sums over time, U_0·S_0 of the zero slice."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import scipy.sparse.linalg as sla

from toffee_dist.kernels.gauge import CommonBasis
from toffee_dist.kernels.solvers.base import Operator
from toffee_dist.kernels.solvers.closed_form import DENSE_SINGULAR_SHARE, DENSE_SIZE, leading_eigenpairs
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.models.base import (
    Cost,
    FitContext,
    FitReport,
    ReductionTask,
    canonical_block,
    fit_reductions,
)
from toffee_dist.settings import FitSettings
from toffee_dist.storage.tensors import Sizes, open_tensor


def fit_tsvd(context: FitContext) -> FitReport:
    """Fit t-SVD: U·S, and V·S for the target role."""
    return fit_reductions(context, fit_slice)


def fit_slice(task: ReductionTask) -> FitReport:
    """Decompose the zero slice of one reduction, and leave its vectors."""
    began = time.perf_counter()
    tensor = open_tensor(task.tensor)
    weighted = tensor.with_step_weights(task.step_weights(tensor.n_steps))
    ((_, values),) = iter_values(weighted, [0])
    X = Operator(slice_matrix(tensor, values), (task.options.seed, 0))
    basis = truncated_svd(X, task.options, tensor.directed)
    vectors = canonical_block(basis, 1.0, task.options.rank, tensor.directed)
    report = FitReport(None, None, time.perf_counter() - began, converged=True)
    task.write(vectors, report)
    return report


def truncated_svd(X: Operator, options: FitSettings, directed: bool) -> CommonBasis:
    """Return the leading singular vectors, largest first; the largest entry of a column of U is positive."""
    rank, n = min(options.rank, X.n), X.n
    if X.norm2 == 0:
        empty = np.zeros((n, options.rank))
        return CommonBasis(empty, np.zeros(options.rank), empty)
    if not directed:
        # From eigenvectors: with eigenvalues s and −s, singular vectors of a symmetric X are not unique.
        values, U = leading_eigenpairs(X, rank)
        S, V = np.abs(values), U * np.where(values < 0, -1.0, 1.0)
    elif n <= DENSE_SIZE or rank > DENSE_SINGULAR_SHARE * n:
        U, S, Vt = np.linalg.svd(X.dense())
        U, S, V = U[:, :rank], S[:rank], Vt[:rank].T
    else:
        U, S, Vt = sla.svds(X.matrix, k=rank, v0=X.random(1).tall[:, 0])
        U, S, V = U[:, ::-1], S[::-1], Vt[::-1].T
    largest = np.abs(U).argmax(axis=0)
    present = S > np.finfo(np.float64).eps * n * S[0]
    sign = np.where(U[largest, np.arange(rank)] < 0, -1.0, 1.0) * present
    missing = ((0, 0), (0, options.rank - rank))
    return CommonBasis(np.pad(U * sign, missing), np.pad(S * present, missing[1]), np.pad(V * sign, missing))


def tsvd_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes."""
    n, rank = sizes.n_nodes, min(options.rank, sizes.n_nodes)
    bytes_, seconds = decomposition_cost(sizes, rank)
    # Vectors of both roles, in double and in single precision.
    tall = 24 * n * options.rank
    roles = 2 if directed else 1
    why = "singular vectors of the sum over time"
    return [Cost("tsvd", why, 1, bytes_ + tall, seconds, roles * 4 * n * options.rank)]


# Of the leading vectors of a zero slice in double, by ARPACK or dense: bytes per n·r (a Krylov basis of 2r
# columns, its work and the vectors), per pair, per entry and per n² of a dense one; seconds per n·r².
# Measured on email by days (r 128) and mathoverflow by weeks (r 64) and days (r 128), directed and not:
# peaks of 0.4 to 0.65 of this, 1.4e-8 to 3e-8 s.
TALL_BYTES, PAIR_BYTES, ENTRY_BYTES, DENSE_BYTES, TALL_SECONDS = 64, 96, 16, 48, 2e-8


def decomposition_cost(sizes: Sizes, rank: int) -> tuple[int, float]:
    """Return bytes and seconds of the leading eigenvectors or singular vectors of a zero slice."""
    n = sizes.n_nodes
    bytes_ = TALL_BYTES * n * rank + PAIR_BYTES * sizes.n_pairs + ENTRY_BYTES * sizes.n_entries
    if n <= DENSE_SIZE or rank > DENSE_SINGULAR_SHARE * n:
        bytes_ += DENSE_BYTES * n * n
    return bytes_, TALL_SECONDS * n * rank**2
