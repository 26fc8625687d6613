"""What every solver takes and gives: one frequency slice in, its factors and an honest report out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.settings import SolverSettings

Tall = NDArray[Any]  # n×r, real or complex, in the precision asked for
Small = NDArray[Any]  # r×r, real or complex, always double


@dataclass(frozen=True)
class SliceReport:
    """What happened to one slice.

    ``gap`` is (objective − bound) / bound: how far above the optimum the slice can be at the most.
    ``bound`` and ``gap`` are None where no bound was asked for.
    """

    k: int
    energy: float
    objective: float
    bound: float | None
    gap: float | None
    iterations: int
    seconds: float
    solver: str
    converged: bool


@dataclass(frozen=True, eq=False)
class SliceFactors:
    """X_k ≈ A R Aᴴ: A is n×r in the precision asked for, R is r×r in double."""

    A: Tall
    R: Small
    report: SliceReport

    @property
    def k(self) -> int:
        """The frequency."""
        return self.report.k


class Operator:
    """A square matrix, sparse or dense, as the operations on tall arrays that solvers use.

    Attributes
    ----------
    n : size
    dtype : of the matrix and of every tall array of this problem
    norm2 : ‖X‖², in double
    """

    def __init__(self, matrix: Any) -> None:
        self.matrix = matrix
        self.sparse = bool(sp.issparse(matrix))
        self.n = int(matrix.shape[0])
        self.dtype: np.dtype[Any] = matrix.dtype
        values = matrix.data if self.sparse else matrix
        self.norm2 = float(np.square(np.abs(values), dtype=np.float64).sum())
        # conj() of a real matrix is the matrix itself; of a complex one, a second value array.
        self._adjoint = matrix.T if self.dtype.kind == "f" else matrix.conj().T

    @property
    def real(self) -> type[np.floating[Any]]:
        """The real scalar type of this precision."""
        return np.finfo(self.dtype).dtype.type

    def apply(self, A: Tall) -> Tall:
        """Return X·A."""
        return np.asarray(self.matrix @ A)

    def adjoint(self, A: Tall) -> Tall:
        """Return Xᴴ·A."""
        return np.asarray(self._adjoint @ A)

    def dense(self) -> Small:
        """Return X as a dense array in double."""
        matrix = self.matrix.toarray() if self.sparse else self.matrix
        return np.asarray(matrix, dtype=np.result_type(self.dtype, np.float64))

    def random(self, rng: np.random.Generator, columns: int) -> Tall:
        """Return an n×columns Gaussian array of the slice's own dtype."""
        sample = rng.standard_normal((self.n, columns))
        if self.dtype.kind == "c":
            sample = sample + 1j * rng.standard_normal((self.n, columns))
        return np.asarray(sample, dtype=self.dtype)


def gram(A: Tall, B: Tall) -> Small:
    """Return AᴴB in double (accumulated in the precision of the tall arrays)."""
    # conj() copies: take it of the narrower one.
    product = A.conj().T @ B if A.shape[1] <= B.shape[1] else (B.conj().T @ A).conj().T
    return product.astype(np.result_type(product.dtype, np.float64))


def times(A: Tall, S: Small) -> Tall:
    """Return A·S in the precision of A."""
    return np.asarray(A @ S.astype(A.dtype))


@dataclass(frozen=True, eq=False)
class Solution:
    """A solver's answer for one (scaled) slice."""

    A: Tall
    R: Small
    objective: float
    iterations: int
    converged: bool
    bound: float | None = None


Solver = Callable[[Operator, SolverSettings, np.random.Generator], Solution]
