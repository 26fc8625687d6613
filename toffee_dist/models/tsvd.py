"""t-SVD: the truncated SVD of every frequency slice; for sums over time, U_0·S_0 of the zero slice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import scipy.sparse.linalg as sla

from toffee_dist.edges import Run
from toffee_dist.gauge import CommonBasis
from toffee_dist.models.base import ModelEmbedding, ModelOptions, canonical_block, reductions
from toffee_dist.solvers.base import Operator
from toffee_dist.solvers.closed_form import DENSE_SINGULAR_SHARE, DENSE_SIZE, leading_eigenpairs
from toffee_dist.spectrum import iter_values, slice_matrix
from toffee_dist.tensor import TemporalTensor


def fit_tsvd(
    tensor: TemporalTensor, options: ModelOptions, run: Run, work: Path | None = None
) -> ModelEmbedding:
    """Fit t-SVD: U·S, and V·S for the target role."""
    blocks = []
    for weights in reductions(options.reduce, tensor.n_steps):
        weighted = tensor.with_step_weights(weights)
        ((_, values),) = iter_values(weighted, [0])
        basis = truncated_svd(Operator(slice_matrix(tensor, values)), options, tensor.directed)
        blocks.append(canonical_block(basis, 1.0, options.rank, tensor.directed))
    return ModelEmbedding(tuple(blocks))


def truncated_svd(X: Operator, options: ModelOptions, directed: bool) -> CommonBasis:
    """Return the leading singular vectors, largest first; the largest entry of a column of U is positive."""
    rank, n = min(options.rank, X.n), X.n
    rng = np.random.default_rng([options.seed, 0])
    if X.norm2 == 0:
        empty = np.zeros((n, options.rank))
        return CommonBasis(empty, np.zeros(options.rank), empty)
    if not directed:
        # From eigenvectors: with eigenvalues s and −s, singular vectors of a symmetric X are not unique.
        values, U = leading_eigenpairs(X, rank, rng)
        S, V = np.abs(values), U * np.where(values < 0, -1.0, 1.0)
    elif n <= DENSE_SIZE or rank > DENSE_SINGULAR_SHARE * n:
        U, S, Vt = np.linalg.svd(X.dense())
        U, S, V = U[:, :rank], S[:rank], Vt[:rank].T
    else:
        U, S, Vt = sla.svds(X.matrix, k=rank, v0=X.random(rng, 1)[:, 0])
        U, S, V = U[:, ::-1], S[::-1], Vt[::-1].T
    largest = np.abs(U).argmax(axis=0)
    present = S > np.finfo(np.float64).eps * n * S[0]
    sign = np.where(U[largest, np.arange(rank)] < 0, -1.0, 1.0) * present
    missing = ((0, 0), (0, options.rank - rank))
    return CommonBasis(np.pad(U * sign, missing), np.pad(S * present, missing[1]), np.pad(V * sign, missing))
