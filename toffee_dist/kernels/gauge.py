"""One basis for every slice: what A R Aᴴ is, not how it happens to be factored.

A → AQ, R → Q⁻¹RQ⁻ᴴ changes no fit, for any invertible Q, separately in every slice. So raw A·R has
arbitrary axes. The product M = A R Aᴴ is unique, and so are its singular vectors, up to sign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.base import SliceFactors, Small, Tall, gram, times
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


def common_basis(zero: SliceFactors) -> CommonBasis:
    """Return the singular vectors of M_0, from the factors of the (real) zero slice.

    A = Q T (thin QR);  T R Tᵀ = P S Wᵀ (small);  U = QP, V = QW.
    """
    Q, T = np.linalg.qr(zero.A)
    T = T.astype(np.float64)
    P, S, Wt = np.linalg.svd(T @ zero.R @ T.T)
    present = S > np.finfo(zero.A.dtype).eps * len(zero.A) * S[0]
    U, V = times(Q, P), times(Q, Wt.T)
    largest = np.abs(U).argmax(axis=0)
    sign = np.where(U[largest, np.arange(U.shape[1])] < 0, -1, 1) * present
    rank = zero.A.shape[1]
    return CommonBasis(
        _pad(U * sign.astype(U.dtype), rank),
        _pad(S * present, rank),
        _pad(V * sign.astype(V.dtype), rank),
    )


def _pad(array: NDArray[Any], columns: int) -> NDArray[Any]:
    """Append zero columns: a QR of n×r with n < r has only n."""
    missing = columns - array.shape[-1]
    return np.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, missing)]) if missing else array


def project(factors: SliceFactors, V: Tall) -> Small:
    """Return R_k (A_kᴴ V), r×r: A_k times it is M_k V, the slice in the common basis."""
    return np.asarray(factors.R @ gram(factors.A, V.astype(factors.A.dtype)))
