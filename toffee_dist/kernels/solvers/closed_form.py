"""The exact optimum of a Hermitian slice, and the lower bound that it gives for every other slice.

The penalty of a product A R Aᴴ with singular values x_i is at least c Σ x_i^{2/3} (Hölder for Schatten
norms), with equality for Hermitian products. So the problem separates over the singular values:

    c = (3/2)·2^{−2/3}·λ_A^{2/3}·λ_R^{1/3}
    x_i = argmin_x ½(σ_i − x)² + c·x^{2/3}
    optimum (Hermitian) or lower bound (any X) = Σ_{i≤r} [½(σ_i − x_i)² + c·x_i^{2/3}] + ½ Σ_{i>r} σ_i²
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError
from toffee_dist.kernels.solvers.base import Operator, Solution, Tall
from toffee_dist.settings import SolverSettings
from toffee_dist.tensor import Floats

# Up to this size, or when more than this share of the spectrum is wanted, a dense decomposition is faster
# than ARPACK (measured: n from 200 to 1,600, shares from 0.05 to 0.3; email, n 986, r 128: 0.09 s to 0.23 s).
DENSE_SIZE, DENSE_EIGEN_SHARE, DENSE_SINGULAR_SHARE = 400, 0.2, 0.1


def solve_closed_form(X: Operator, options: SolverSettings, rng: np.random.Generator) -> Solution:
    """Solve a Hermitian slice exactly, from its eigenvalues of largest magnitude."""
    if not is_hermitian(X):
        raise ConfigError(
            "solver closed_form on a slice that is not Hermitian",
            got="a directed graph, or a frequency other than 0 and Nyquist",
            allowed="k = 0 or Nyquist of an undirected graph",
            remedy='Use solver="auto".',
        )
    s, U = leading_eigenpairs(X, options.rank, rng)
    x = shrink(np.abs(s), options)
    # d_i = (2 λ_R x_i² / λ_A)^{1/6};   A = U diag(d),   R = diag(sign(s_i)·x_i / d_i²)
    ratio = options.reg_r / options.reg_a if options.reg_a > 0 else 1.0
    d = (2.0 * ratio * x**2) ** (1 / 6)
    R = np.diag(np.sign(s) * np.divide(x, d**2, out=np.zeros_like(x), where=d > 0))
    A = (U * d).astype(X.dtype)
    value = lower_bound(X.norm2, np.abs(s), options)
    return Solution(A, R, value, iterations=0, converged=True, bound=value)


def is_hermitian(X: Operator) -> bool:
    """Whether X = Xᴴ exactly."""
    difference = X.matrix - X.matrix.conj().T
    return bool(abs(difference).max() == 0) if X.n else True


def bound_slice(X: Operator, options: SolverSettings, rng: np.random.Generator) -> float:
    """Return the lower bound of the objective over every A and R of this rank."""
    return lower_bound(X.norm2, _leading_singular_values(X, options.rank, rng), options)


def lower_bound(norm2: float, sigma: Floats, options: SolverSettings) -> float:
    """Return the bound from ‖X‖² and the r leading singular values."""
    x = shrink(sigma, options)
    head = 0.5 * (sigma - x) ** 2 + penalty_constant(options) * np.cbrt(x) ** 2
    # Σ_{i>r} σ_i² = ‖X‖² − Σ_{i≤r} σ_i², which rounding may take below zero.
    tail = max(norm2 - float(np.square(sigma).sum()), 0.0)
    return float(head.sum() + 0.5 * tail)


def penalty_constant(options: SolverSettings) -> float:
    """Return c."""
    return float(1.5 * 2 ** (-2 / 3) * options.reg_a ** (2 / 3) * options.reg_r ** (1 / 3))


def shrink(sigma: Floats, options: SolverSettings) -> Floats:
    """Return x_i = argmin_{x≥0} ½(σ_i − x)² + c·x^{2/3}."""
    c = penalty_constant(options)
    if c == 0:
        return sigma.copy()
    # Stationary: x − σ + (2/3)c·x^{−1/3} = 0; with y = x^{1/3}: g(y) = y⁴ − σ y + (2/3)c = 0. g is convex,
    # so Newton from the right falls to the larger root, which is the minimum, if there is one.
    y = np.cbrt(sigma)
    lowest = np.cbrt(sigma / 4)
    exists = lowest**4 - sigma * lowest + 2 / 3 * c < 0
    for _ in range(60):
        slope = 4 * y**3 - sigma
        step = np.divide(
            y**4 - sigma * y + 2 / 3 * c, slope, out=np.zeros_like(y), where=exists & (slope > 0)
        )
        y -= step
        if not np.any(np.abs(step) > 1e-15 * y):
            break
    x = np.where(exists, y**3, 0.0)
    better = 0.5 * (sigma - x) ** 2 + c * np.cbrt(x) ** 2 < 0.5 * sigma**2
    return np.asarray(np.where(better, x, 0.0))


def _use_dense(X: Operator, rank: int, share: float) -> bool:
    return X.n <= DENSE_SIZE or rank > share * X.n


def leading_eigenpairs(X: Operator, rank: int, rng: np.random.Generator) -> tuple[Floats, Tall]:
    """Return the eigenvalues of largest magnitude of a Hermitian X, and their vectors, largest first."""
    if _use_dense(X, rank, DENSE_EIGEN_SHARE):
        s, U = np.linalg.eigh(X.dense())
    else:
        start = X.random(rng, 1)[:, 0]
        s, U = sla.eigsh(X.matrix, k=rank, which="LM", v0=start, tol=_tolerance(X.dtype))
    order = np.argsort(-np.abs(s), kind="stable")[:rank]
    return s[order].astype(np.float64), U[:, order]


def _leading_singular_values(X: Operator, rank: int, rng: np.random.Generator) -> Floats:
    if _use_dense(X, rank, DENSE_SINGULAR_SHARE):
        sigma: NDArray[Any] = np.linalg.svd(X.dense(), compute_uv=False)
    else:
        # In double: a value that is too small would make the bound too large.
        double = X.matrix.astype(np.result_type(X.dtype, np.float64))
        start = X.random(rng, 1)[:, 0].astype(double.dtype)
        tol = _tolerance(double.dtype)
        _, sigma, _ = sla.svds(double, k=rank, v0=start, tol=tol)
    return np.sort(sigma)[::-1][:rank].astype(np.float64)


def _tolerance(dtype: np.dtype[Any]) -> float:
    return float(10 * np.finfo(dtype).eps)
