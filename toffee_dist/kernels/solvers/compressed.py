"""Compress, solve the small core, lift, polish.

A two-sided Krylov basis Q = [U V] of the slice (block Golub-Kahan-Lanczos) holds nearly all that a
rank-r factorisation can use. The core M = QᴴXQ is a small dense slice: solving it to convergence costs
nothing that depends on n. A = Q·Â then needs few full ALS steps, where a random start needs dozens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from toffee_dist.kernels.solvers.als import minimise
from toffee_dist.kernels.solvers.base import Operator, Small, Solution, Tall, gram, times
from toffee_dist.settings import SolverSettings

# Columns of a Krylov block: SpMM of 8 columns takes twice the time of one; wider blocks find less.
BLOCK = 8
# Columns of U and of V, and of the core, as multiples of the rank. Measured on mathoverflow (k = 1, 52, 150,
# rank 64) for shares from 1 to 2.5: less needs more full steps, more costs more than it saves.
BASIS_SHARE, CORE_SHARE = 2, 2
# Up to this many nodes, or times the rank, a basis would be as large as the slice, which is its own core.
WHOLE_SIZE, WHOLE_SHARE = 128, 4
# Iterations on the core at the most; it converges within 20 to 60.
CORE_MAX_ITER = 200


def solve_compressed(X: Operator, options: SolverSettings, rng: np.random.Generator) -> Solution:
    """Solve a slice from a small core; a slice that is itself small is its own core."""
    rank = options.rank
    if X.n <= max(WHOLE_SIZE, WHOLE_SHARE * rank):
        matrix = X.matrix.toarray() if X.sparse else X.matrix
        start = _leading_directions(X.dense(), rank).astype(X.dtype)
        return minimise(Operator(matrix), start, options)
    return minimise(X, _lifted_start(X, options, rng), options)


def _lifted_start(X: Operator, options: SolverSettings, rng: np.random.Generator) -> Tall:
    """Solve the core and lift it; the basis is gone when the full steps begin."""
    rank = options.rank
    # A multiple of the block, so that the basis ends with a whole one.
    basis = krylov_basis(X, BLOCK * -(-BASIS_SHARE * rank // BLOCK), rng)
    core, K = basis.core(X, CORE_SHARE * rank)
    core = core.astype(X.dtype)
    start = np.eye(len(core), rank, dtype=X.dtype)
    small = minimise(Operator(core), start, options.model_copy(update={"max_iter": CORE_MAX_ITER}))
    return basis.lift(K @ small.A)


def _leading_directions(M: Small, rank: int) -> Small:
    """Return the leading eigenvectors of M Mᴴ + Mᴴ M: what both sides of M need most."""
    _, vectors = np.linalg.eigh(M @ M.conj().T + M.conj().T @ M)
    return vectors[:, ::-1][:, :rank]


@dataclass(frozen=True, eq=False)
class KrylovBasis:
    """Orthonormal U (n×m) and V (n×(m+b)) with X·V[:, :m] = U B and Xᴴ·U = V L."""

    U: Tall
    V: Tall
    B: Small
    L: Small

    def core(self, X: Operator, size: int) -> tuple[Small, Small]:
        """Return M = QᴴXQ for an orthonormal Q = [U V]·K of `size` columns, and K.

        Of [U V]ᴴ X [U V], three blocks follow from the recurrences; only Vᴴ X U needs the slice.
        """
        m = self.U.shape[1]
        W_all = gram(self.V, self.U)
        W = W_all[:m]
        VXU = gram(self.V[:, :m], X.apply(self.U))
        C = np.block([[self.L.conj().T @ W_all, self.B], [VXU, W @ self.B]])
        # [U V]ᴴ[U V] = [I Wᴴ; W I], W = P diag(σ) Qᴴ, has the eigenvectors [Q; ±P]/√2 and values 1 ± σ.
        P, sigma, Qh = np.linalg.svd(W)
        Q = Qh.conj().T
        # U and V overlap: drop the directions that they share to the rounding error of the basis.
        own = sigma < 1 - 1e-3
        plus, minus = np.vstack([Q, P]), np.vstack([Q, -P])[:, own]
        K = np.hstack([plus / np.sqrt(2 * (1 + sigma)), minus / np.sqrt(2 * (1 - sigma[own]))])
        M = K.conj().T @ C @ K
        lead = _leading_directions(M, size)
        return lead.conj().T @ M @ lead, K @ lead

    def lift(self, S: Small) -> Tall:
        """Return [U V]·S."""
        m = self.U.shape[1]
        A = times(self.U, S[:m])
        A += times(self.V[:, :m], S[m:])
        return A


def krylov_basis(X: Operator, columns: int, rng: np.random.Generator) -> KrylovBasis:
    """Run block Golub-Kahan-Lanczos from a random block, with full orthogonalisation."""
    U = np.empty((X.n, columns), X.dtype)
    V = np.empty((X.n, columns + BLOCK), X.dtype)
    B = np.zeros((columns, columns), np.result_type(X.dtype, np.float64))
    L = np.zeros((columns + BLOCK, columns), B.dtype)
    V[:, :BLOCK], _, _ = _orthonormalise(X.random(rng, BLOCK), V[:, :0], X, rng)
    for start in range(0, columns, BLOCK):
        now, after = start + BLOCK, start + 2 * BLOCK
        block, following = slice(start, now), slice(now, after)
        U[:, block], B[:start, block], B[block, block] = _orthonormalise(
            X.apply(V[:, block]), U[:, :start], X, rng
        )
        V[:, following], L[:now, block], L[following, block] = _orthonormalise(
            X.adjoint(U[:, block]), V[:, :now], X, rng
        )
    return KrylovBasis(U, V, B, L)


def _orthonormalise(Y: Tall, basis: Tall, X: Operator, rng: np.random.Generator) -> tuple[Tall, Small, Small]:
    """Return Q, c, S with Y = basis·c + Q·S, Q orthonormal and orthogonal to the basis.

    Directions in which Y has nothing left are filled with random ones (and a zero row of S).
    """
    eps = np.finfo(Y.dtype).eps
    size = float(np.linalg.norm(Y))
    c = gram(basis, Y)
    Y = Y - times(basis, c)
    w, Z = np.linalg.eigh(gram(Y, Y))
    # A remainder of under a thousand roundings of Y would not be orthogonal to the basis: it is noise.
    alive = (w > 10 * eps * w[-1]) & (w > (1000 * eps * size) ** 2)
    root = np.sqrt(w[alive])
    Q = times(Y, Z[:, alive] / root)
    S = np.zeros(Z.shape, Z.dtype)
    S[alive] = root[:, None] * Z[:, alive].conj().T
    if not alive.all():
        fresh, _, _ = _orthonormalise(X.random(rng, int((~alive).sum())), np.hstack([basis, Q]), X, rng)
        Q = np.hstack([fresh, Q])
    return Q, c, S
