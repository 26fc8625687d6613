"""What every solver takes and gives: one frequency slice in, its factors and an honest report out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError

SolverName = Literal["auto", "als", "closed_form", "compressed"]
Precision = Literal["single", "double"]

Tall = NDArray[Any]  # n×r, real or complex, in the precision asked for
Small = NDArray[Any]  # r×r, real or complex, always double


@dataclass(frozen=True)
class SolveOptions:
    """How to solve slices; checked on construction.

    Parameters
    ----------
    rank
        r. Above n, the factors are those of rank n, padded with zeros.
    reg_a, reg_r
        λ_A and λ_R: both positive or both zero. (With one of them zero, scaling A up and R down, or
        the reverse, takes the other's penalty to zero: the minimum is not attained.)
    solver
        ``als`` is the paper's; ``closed_form`` is exact, for Hermitian slices; ``compressed`` solves a
        small core first; ``auto`` takes the closed form where it exists and ``compressed`` elsewhere.
    tol
        A slice has converged when an iteration lowers its objective by less than tol times the objective.
    max_iter
        Iterations on the full slice at the most. (``compressed`` spends its others on the core.)
    precision
        Of n-sized arrays; r-sized algebra is always in double.
    seed
        Slice k draws from the stream of (seed, k).
    bound
        Whether to compute the lower bound of each slice (its leading r singular values, exactly).
    """

    rank: int = 128
    reg_a: float = 0.01
    reg_r: float = 0.01
    solver: SolverName = "auto"
    tol: float = 1e-4
    max_iter: int = 100
    precision: Precision = "single"
    seed: int = 0
    bound: bool = False

    def __post_init__(self) -> None:
        _check("rank", self.rank, _is_int(self.rank) and self.rank >= 1, "an integer from 1")
        _check(
            "max_iter",
            self.max_iter,
            _is_int(self.max_iter) and self.max_iter >= 1,
            "an integer from 1",
        )
        _check("seed", self.seed, _is_int(self.seed) and self.seed >= 0, "an integer from 0")
        _check("tol", self.tol, 0 < self.tol < 1, "a number between 0 and 1")
        for name in ("reg_a", "reg_r"):
            value = getattr(self, name)
            _check(name, value, 0 <= value < np.inf, "a finite number from 0")
        regs = (self.reg_a, self.reg_r)
        _check("reg_a and reg_r", regs, (regs[0] > 0) == (regs[1] > 0), "both positive or both zero")
        for name, allowed in (
            ("solver", ("auto", "als", "closed_form", "compressed")),
            ("precision", ("single", "double")),
        ):
            value = getattr(self, name)
            _check(name, repr(value), value in allowed, ", ".join(allowed))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The real dtype of n-sized arrays."""
        return np.dtype(np.float32 if self.precision == "single" else np.float64)


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


Solver = Callable[[Operator, SolveOptions, np.random.Generator], Solution]


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _check(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(name, got=value, allowed=allowed)
