"""Vectors for nodes that came after a run: from their edges, against the vectors as they are.

The zero slice is X ≈ M = U S Vᵀ: a new row x of it belongs to x V = (U S)_new, and to the embedding U·S^{2/3}

    e = x V S^{−1/3} = x F S^{−1},   F = V·S^{2/3} the published vectors of the targets.

Published vectors are turned by Q: e = x F (Qᵀ diag(w) Q), with w = 1/S where the fit is exact. Elsewhere 1/S
blows up the columns that are noise, so w is found from the nodes of the run; of an undirected graph it
carries the signs of the eigenvalues. Targets are the same with the roles exchanged.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.solvers.base import Small, Tall
from toffee_dist.tensor import Floats


class FoldSums:
    """w: for each column the factor with which P = X F·S^{−2/3} comes nearest to U·S^{2/3}.

    Least squares over the nodes of the run, then S^{−2/3}: w = ⟨US, P⟩ / (‖P‖² S). Where the slice is fitted
    exactly, P = ±US and w = ±1/S; columns that are noise for a new node are damped. Both sums are taken over
    blocks of nodes.
    """

    @staticmethod
    def of(US: Tall, P: Tall) -> Floats:
        """Return ⟨US, P⟩ and ‖P‖² of every column, of some nodes."""
        # Sums in double, without a copy of the arrays in double.
        return np.stack([np.einsum("ir,ir->r", left, P, dtype=np.float64) for left in (US, P)])

    @staticmethod
    def weights(sums: Floats, S: Floats) -> Floats:
        """Return w from the sums over all nodes; X, US and P may be divided by one number."""
        scale = sums[1] * S
        return np.asarray(np.divide(sums[0], scale, out=np.zeros(len(S)), where=scale > 0))


def fold_rows(x: Any, blocks: Iterable[tuple[int, Tall]], weights: Floats, rotation: Small | None) -> Tall:
    """Return the vectors of new rows.

    Parameters
    ----------
    x : (m, n) sparse matrix
        The new nodes' rows of the zero slice, towards the nodes of the run.
    blocks
        (first row, vectors) of the other role, in the order of rows.
    weights
        w, a number per column.
    rotation
        Q, or None.
    """
    x = sp.csc_matrix(x)
    total = np.zeros((x.shape[0], len(weights)))
    for start, F in blocks:
        total += x[:, start : start + len(F)] @ F.astype(np.float64)
    Q = np.eye(len(weights)) if rotation is None else rotation
    return np.asarray(total @ (Q.T @ (weights[:, None] * Q)))
