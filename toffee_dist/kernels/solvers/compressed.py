"""Compress, solve the small core, lift, polish.

A two-sided Krylov basis Q = [U V] of the slice (block Golub-Kahan-Lanczos) holds nearly all that a
rank-r factorisation can use. The core M = QᴴXQ is a small dense slice: solving it to convergence costs
nothing that depends on n. A = Q·Â then needs few full ALS steps, where a random start needs dozens.
"""

from __future__ import annotations

import numpy as np

from toffee_dist.kernels.solvers.als import minimise
from toffee_dist.kernels.solvers.base import Built, Operator, Slice, Small, Solution, Term
from toffee_dist.kernels.solvers.krylov import TwoSided
from toffee_dist.settings import SolverSettings

# Columns of a Krylov block: half of the rank, within these. mathoverflow at rank 64 (k = 1, 52, 150), CPU
# seconds of a slice with the 2 full steps that it then takes to the objective of 60 plain iterations: blocks
# of 32 columns .63, of 16 .69 (and .02 % lower). A year of it at rank 128, to the end: blocks of 32 columns
# 2.1 with 5 full steps, of 64 2.2 with 6; a million nodes in blocks of nodes: 30.5 and 33.0 seconds.
BLOCK_LEAST, BLOCK_MOST = 8, 32
# Columns of U and of V, and of the core, as multiples of the rank. Measured on mathoverflow (k = 1, 52, 150,
# rank 64) for shares from 1 to 2.5: less needs more full steps, more costs more than it saves.
BASIS_SHARE, CORE_SHARE = 2, 2
# Up to this many nodes, or times the rank, a basis would be as large as the slice, which is its own core.
WHOLE_SIZE, WHOLE_SHARE = 128, 4
# Iterations on the core at the most; it converges within 20 to 60.
CORE_MAX_ITER = 200


def solve_compressed(X: Slice, options: SolverSettings) -> Solution:
    """Solve a slice from a small core; a slice that is itself small is its own core."""
    rank = options.rank
    if isinstance(X, Operator) and X.n <= max(WHOLE_SIZE, WHOLE_SHARE * rank):
        whole = _leading_directions(X.dense(), rank).astype(X.dtype)
        matrix = X.matrix.toarray() if X.sparse else X.matrix
        return minimise(Operator(matrix), whole, options)
    start = _lifted_start(X, options)
    X.keep_only([start.tall])
    return minimise(X, start.tall, options, G=start.own)


def block_columns(rank: int) -> int:
    """Return the columns of a Krylov block."""
    return max(BLOCK_LEAST, min(-(-rank // 2), BLOCK_MOST))


def _lifted_start(X: Slice, options: SolverSettings) -> Built:
    """Solve the core and lift it; the basis is gone when the full steps begin."""
    rank = options.rank
    space = TwoSided(X, block_columns(rank))
    while space.U.columns < BASIS_SHARE * rank and not space.closed:
        space.step()
    core, K = find_core(space, CORE_SHARE * rank)
    core = core.astype(X.dtype)
    start = np.eye(len(core), rank, dtype=X.dtype)
    small = minimise(Operator(core), start, options.model_copy(update={"max_iter": CORE_MAX_ITER}))
    S, m = K @ small.A, space.U.columns
    return X.build(*space.U.terms(S[:m]), *space.V.terms(S[m:]), own=True)


def _leading_directions(M: Small, rank: int) -> Small:
    """Return the leading eigenvectors of M Mᴴ + Mᴴ M: what both sides of M need most."""
    _, vectors = np.linalg.eigh(M @ M.conj().T + M.conj().T @ M)
    return vectors[:, ::-1][:, :rank]


def find_core(space: TwoSided, size: int) -> tuple[Small, Small]:
    """Return M = QᴴXQ for an orthonormal Q = [U V]·K of `size` columns, and K.

    Of [U V]ᴴ X [U V], three blocks follow from the recurrences, UᴴXU = Lᴴ·VᴴU; only VᴴXU needs the slice.
    """
    X, U, V = space.X, space.U, space.V
    # As many columns of V as X was multiplied with.
    m, v = U.columns, space.B.shape[1]
    VU, VXU = (np.empty((rows, m), space.B.dtype) for rows in (V.columns, v))
    known = [Z for _, Z, _ in V.blocks(v)]
    for part, Z, S in U.blocks(m):
        VXU[:, part] = V.project(X.build(Term(Z, by="X"), against=known, keep=False).grams, v) @ S
        VU[:, part] = V.project(X.build(Term(Z), against=V.talls, keep=False).grams) @ S
    W = VU[:v]
    C = np.block([[space.L.conj().T @ VU[: len(space.L)], space.B], [VXU, W @ space.B]])
    # [U V]ᴴ[U V] = [I Wᴴ; W I], W = P diag(σ) Qᴴ, has the eigenvectors [Q; ±P]/√2 and values 1 ± σ; where one
    # side has more columns, [Q; 0] or [0; P] and value 1.
    P, sigma, Qh = np.linalg.svd(W)
    both, Q = len(sigma), Qh.conj().T
    # U and V overlap: drop the directions that they share to the rounding error of the basis.
    own = sigma < 1 - 1e-3
    pair, apart = np.sqrt(2 * (1 + sigma)), np.sqrt(2 * (1 - sigma[own]))
    p, q = P[:, :both], Q[:, :both]
    K = np.block(
        [
            [q / pair, q[:, own] / apart, Q[:, both:], np.zeros((m, v - both))],
            [p / pair, -p[:, own] / apart, np.zeros((v, m - both)), P[:, both:]],
        ]
    )
    M = K.conj().T @ C @ K
    lead = _leading_directions(M, min(size, len(M)))
    return lead.conj().T @ M @ lead, K @ lead
