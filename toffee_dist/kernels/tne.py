"""TNE: non-negative vectors of length 1 whose products are the links of a snapshot.

    f = Σ_τ ‖G_τ − Z_τ Z_τᵀ‖² + λ Σ_τ Σ_u (1 − z_τ(u)·z_{τ−1}(u)),   Z_τ ≥ 0, ‖z_τ(u)‖ = 1

G_τ is 0/1 and symmetric, and its diagonal counts as it is. Rows of nodes that have no link up to τ are zero
and take no part in the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.tensor import Floats

# Draws of a start of one-hot rows, of which the best is taken (the public code's number).
START_DRAWS = 300


def snapshot_misfit(G: sp.csr_matrix[Any], Z: Floats) -> float:
    """Return ‖G − ZZᵀ‖² without forming ZZᵀ."""
    cross = float(np.einsum("ur,ur->", G @ Z, Z))
    return float(G.nnz - 2.0 * cross + np.square(Z.T @ Z).sum())


def roughness(Z: Floats, other: Floats) -> float:
    """Return Σ_u 1 − z(u)·z'(u) over the rows that both have."""
    both = Z.any(axis=1) & other.any(axis=1)
    return float(both.sum() - np.einsum("ur,ur->", Z[both], other[both]))


def start_rows(G: sp.csr_matrix[Any], live: NDArray[np.bool_], rank: int, seed: int) -> Floats:
    """Return the best of many draws of one-hot rows."""
    rng = np.random.default_rng([seed, 0])
    coo = G.tocoo()
    best, chosen = np.inf, np.zeros(len(live), np.int64)
    for _ in range(START_DRAWS):
        column = rng.integers(0, rank, len(live))
        # ‖G − ZZᵀ‖² = |G| − 2·#(links in one column) + Σ (size of a column)².
        inside = np.count_nonzero(column[coo.row] == column[coo.col])
        sizes = np.bincount(column[live], minlength=rank)
        value = float(np.square(sizes).sum() - 2 * inside)
        if value < best:
            best, chosen = value, column
    Z = np.zeros((len(live), rank))
    Z[np.flatnonzero(live), chosen[live]] = 1.0
    return Z


def join_rows(G: sp.csr_matrix[Any], Z: Floats, live: NDArray[np.bool_], seed: int, number: int) -> Floats:
    """Return Z with rows for nodes that are new: the direction of their neighbours, or one drawn column."""
    new = live & ~Z.any(axis=1)
    rows = np.asarray(G @ Z)
    sizes = np.linalg.norm(rows, axis=1)
    drawn = np.random.default_rng([seed, number]).integers(0, Z.shape[1], len(live))
    out = Z.copy()
    near, alone = new & (sizes > 0), new & (sizes == 0)
    out[near] = rows[near] / sizes[near, None]
    out[np.flatnonzero(alone), drawn[alone]] = 1.0
    return out


def fit_snapshot(
    G: sp.csr_matrix[Any],
    start: Floats,
    pull: Floats,
    *,
    passes: int,
    tol: float,
    published: bool,
) -> tuple[Floats, list[float]]:
    """Move Z until a pass lowers the objective by less than `tol` of it.

    Parameters
    ----------
    G : (n, n)
        One snapshot, 0/1, symmetric.
    start : (n, r)
        The first Z; rows of zeros stay so.
    pull : (n, r)
        λ times the vectors of the snapshots before and after.
    published
        The public code's step and projection, instead of ours, under which the objective never rises.

    Returns
    -------
    Z
    history
        ‖G − ZZᵀ‖² − ⟨pull, Z⟩ at the start and after every pass.
    """
    # Saves start-up time: numba takes half a second to load.
    from toffee_dist.kernels.loops.tne import move_rows, move_rows_as_published

    off = sp.csr_matrix(G - sp.diags_array(G.diagonal()))
    off.eliminate_zeros()
    ends, neighbours = off.indptr.astype(np.int64), off.indices.astype(np.int32)
    live: NDArray[np.bool_] = np.asarray(start.any(axis=1))
    Z = np.ascontiguousarray(start, dtype=np.float64)
    Z = Z.copy() if Z is start else Z

    def value() -> float:
        return snapshot_misfit(G, Z) - float(np.einsum("ur,ur->", pull, Z))

    history = [value()]
    largest = max(float(np.linalg.norm(Z.T @ Z, 2)), 1.0)
    steps = np.full(len(Z), 1.0 / (4.0 * largest))
    old, momentum = Z.copy(), 1.0
    for _ in range(passes):
        gram = Z.T @ Z
        if published:
            following = (1.0 + np.sqrt(4.0 * momentum**2 + 1.0)) / 2.0
            step = 1.0 / (4.0 * float(np.linalg.norm(gram, 2)))
            move_rows_as_published(
                ends, neighbours, pull, live, Z, gram, old, (momentum - 1.0) / following, step
            )
            momentum = following
        else:
            move_rows(ends, neighbours, pull, live, Z, gram, steps)
        history.append(value())
        if abs(history[-2] - history[-1]) <= tol * max(abs(history[-1]), 1.0):
            break
    return Z, history
