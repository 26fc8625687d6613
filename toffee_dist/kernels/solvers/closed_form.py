"""The exact optimum of a Hermitian slice, and the lower bound that it gives for every other slice.

The penalty of a product A R Aᴴ with singular values x_i is at least c Σ x_i^{2/3} (Hölder for Schatten
norms), with equality for Hermitian products. So the problem separates over the singular values:

    c = (3/2)·2^{−2/3}·λ_A^{2/3}·λ_R^{1/3}
    x_i = argmin_x ½(σ_i − x)² + c·x^{2/3}
    optimum (Hermitian) or lower bound (any X) = Σ_{i≤r} [½(σ_i − x_i)² + c·x_i^{2/3}] + ½ Σ_{i>r} σ_i²
"""

from __future__ import annotations

import numpy as np

from toffee_dist.errors import ConfigError
from toffee_dist.kernels.solvers.base import Operator, Slice, Solution, Tall, TallSpace
from toffee_dist.kernels.solvers.krylov import EigenSpace, leading_singular_values
from toffee_dist.settings import SolverSettings
from toffee_dist.tensor import Floats

# Up to this size, or when more than this share of the spectrum is wanted, a dense decomposition is faster
# (measured: n from 200 to 1,600, shares from 0.05 to 0.3; email, n 986, r 128: 0.09 s to 0.23 s).
DENSE_SIZE, DENSE_EIGEN_SHARE, DENSE_SINGULAR_SHARE = 400, 0.2, 0.1


def solve_closed_form(X: Slice, options: SolverSettings) -> Solution:
    """Solve a Hermitian slice from its eigenvalues of largest magnitude.

    Exactly where the slice is small. Else by a Krylov space that ends when hardly any energy is left to find;
    what may be left is the difference between the objective and its bound.
    """
    if not X.hermitian:
        raise ConfigError(
            "solver closed_form on a slice that is not Hermitian",
            got="a directed graph, or a frequency other than 0 and Nyquist",
            allowed="k = 0 or Nyquist of an undirected graph",
            remedy='Use solver="auto".',
        )
    if isinstance(X, Operator) and use_dense(X, options.rank, DENSE_EIGEN_SHARE):
        s, U = _dense_eigenpairs(X, options.rank)
        d, R = _optimal_factors(s, options)
        A = (U * d).astype(X.dtype)
        value = lower_bound(X.norm2, np.abs(s), options)
        return Solution(A, R, X.gram(A, A), value, iterations=0, converged=True, bound=value)
    space = EigenSpace(X, options.rank)
    d, R = _optimal_factors(space.values, options)
    built = space.vectors(np.diag(d))
    value = lower_bound(X.norm2, np.abs(space.values), options)
    bound = max(value - 0.5 * space.left, 0.0) if np.isfinite(space.left) else None
    return Solution(built.tall, R, built.own, value, space.steps, space.converged, bound)


def _optimal_factors(s: Floats, options: SolverSettings) -> tuple[Floats, Floats]:
    """Return d and R with A = U diag(d): d_i = (2 λ_R x_i² / λ_A)^{1/6}, R = diag(sign(s_i)·x_i / d_i²)."""
    x = shrink(np.abs(s), options)
    ratio = options.reg_r / options.reg_a if options.reg_a > 0 else 1.0
    d = (2.0 * ratio * x**2) ** (1 / 6)
    R = np.diag(np.sign(s) * np.divide(x, d**2, out=np.zeros_like(x), where=d > 0))
    return d, R


def bound_slice(X: Slice, options: SolverSettings) -> float:
    """Return the lower bound of the objective over every A and R of this rank."""
    if isinstance(X, Operator) and use_dense(X, options.rank, DENSE_SINGULAR_SHARE):
        sigma = np.linalg.svd(X.dense(), compute_uv=False)[: options.rank]
        return lower_bound(X.norm2, sigma, options)
    sigma, left = leading_singular_values(X, options.rank)
    # What may be missing in the values would make the bound too large.
    return max(lower_bound(X.norm2, sigma, options) - 0.5 * left, 0.0)


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


def use_dense(X: TallSpace, rank: int, share: float) -> bool:
    """Whether a dense decomposition is faster, for so many of all values."""
    return X.n <= DENSE_SIZE or rank > share * X.n


def _dense_eigenpairs(X: Operator, rank: int) -> tuple[Floats, Tall]:
    s, U = np.linalg.eigh(X.dense())
    order = np.argsort(-np.abs(s), kind="stable")[:rank]
    return s[order].astype(np.float64), U[:, order]


def leading_eigenpairs(X: Operator, rank: int) -> tuple[Floats, Tall]:
    """Return the eigenvalues of largest magnitude of a Hermitian X, and their vectors, largest first."""
    if use_dense(X, rank, DENSE_EIGEN_SHARE):
        return _dense_eigenpairs(X, rank)
    space = EigenSpace(X, rank)
    return space.values, space.vectors().tall
