"""One basis for every slice: what A R Aᴴ is, not how it happens to be factored.

A → AQ, R → Q⁻¹RQ⁻ᴴ changes no fit, for any invertible Q, separately in every slice. So raw A·R has
arbitrary axes. The product M = A R Aᴴ is unique, and so are its singular vectors, up to sign.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.base import (
    Arrays,
    Built,
    Handle,
    SliceFactors,
    Small,
    Tall,
    TallSpace,
    Term,
    gram,
    times,
)
from toffee_dist.tensor import Floats


@dataclass(frozen=True, eq=False)
class CommonBasis:
    """M_0 = U diag(S) Vᵀ: the singular vectors of the zero slice, largest first.

    The largest entry of every column of U is positive. Columns beyond the rank of M_0 are zero: there
    a basis would be arbitrary.
    """

    U: Tall
    S: Floats
    V: Tall

    def embedding(self) -> NDArray[np.float32]:
        """Return the canonical embedding, source role: U·S^{2/3}."""
        return np.asarray(canonical_vectors(self.U, self.S), dtype=np.float32)

    def embedding_target(self) -> NDArray[np.float32]:
        """Return the canonical embedding, target role: V·S^{2/3}."""
        return np.asarray(canonical_vectors(self.V, self.S), dtype=np.float32)


def canonical_vectors(vectors: Tall, S: Floats) -> Tall:
    """Return rows of U·S^{2/3}, or of V·S^{2/3}: the canonical embedding of a role.

    At the optimum of the regularised objective A·R equals it, up to a rotation and a scale.
    """
    return np.asarray(vectors * (np.cbrt(S) ** 2).astype(vectors.dtype))


@dataclass(frozen=True, eq=False)
class BasisFactors:
    """The common basis where the tall arrays are: U = Q·P, M_0 = U diag(S) Vᵀ, V = Q·W, Q tall."""

    Q: Handle
    P: Small
    S: Floats
    W: Small
    C: Small


def find_basis(X: TallSpace, A: Handle, G: Small, R: Small, small: Small | None = None) -> BasisFactors:
    """Return the singular vectors of M_0 = A R Aᵀ, and C = R (Aᵀ V), the slice in that basis.

    Where the A that is meant is A·small, G is AᵀA without it.

    A = Q T with T small (the eigenvectors of AᵀA, twice: once leaves the rounding of a badly scaled A);
    T R Tᵀ = P S Wᵀ (small);  U = QP, V = QW. The largest entry of every column of U is positive.
    """
    rank, eps = len(R), np.finfo(X.dtype).eps
    Q, T = _orthonormal(X, A, G, eps)
    Q, T2 = _orthonormal(X, Q.tall, Q.own, eps)
    T = T2 @ T
    if small is not None:
        T = T @ small
    P, S, Wt = np.linalg.svd(T @ R @ T.T)
    W = Wt.T
    present = S > eps * X.n * S[0] if len(S) else S > 0
    sign = np.where(X.largest(Q.tall, P) < 0, -1.0, 1.0) * present
    AtV = T.T @ (W * sign)
    missing = ((0, 0), (0, rank - len(S)))
    return BasisFactors(
        Q.tall,
        np.pad(P * sign, missing),
        np.pad(S * present, missing[1]),
        np.pad(W * sign, missing),
        np.pad(R @ AtV, missing),
    )


def _orthonormal(X: TallSpace, A: Handle, G: Small, eps: float) -> tuple[Built, Small]:
    """Return Q and T with A = Q·T, from G = AᵀA; directions that A does not have are left out."""
    w, E = np.linalg.eigh(G)
    # Single precision leaves eps² of the largest direction; what is that small has no direction of its own.
    present = w > eps**1.5 * w[-1] if len(w) and w[-1] > 0 else np.zeros(len(w), dtype=bool)
    root = np.sqrt(w[present])
    return X.build(Term(A, E[:, present] / root), own=True), root[:, None] * E[:, present].T


def common_basis(zero: SliceFactors) -> CommonBasis:
    """Return the singular vectors of M_0, from the factors of the (real) zero slice in memory."""
    A = zero.A
    found = find_basis(Arrays(len(A), A.dtype), A, gram(A, A), zero.R)
    return CommonBasis(times(found.Q, found.P), found.S, times(found.Q, found.W))


def project(factors: SliceFactors, V: Tall) -> Small:
    """Return R_k (A_kᴴ V), r×r: A_k times it is M_k V, the slice in the common basis."""
    return np.asarray(factors.R @ gram(factors.A, V.astype(factors.A.dtype)))
