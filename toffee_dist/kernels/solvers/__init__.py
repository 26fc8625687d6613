"""Solvers of one frequency slice, X_k ≈ A_k R_k A_kᴴ, behind one interface.

A batch of frequencies is the unit of work: `solve_slices` transforms the tubes of its frequencies only,
and every slice stops at its own convergence. Nothing here knows of Dask.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.als import minimise, solve_als
from toffee_dist.kernels.solvers.base import (
    Handle,
    Operator,
    Slice,
    SliceFactors,
    SliceReport,
    Small,
    Solver,
    Tall,
    Term,
)
from toffee_dist.kernels.solvers.closed_form import bound_slice, solve_closed_form
from toffee_dist.kernels.solvers.compressed import solve_compressed
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.settings import SolverName, SolverSettings
from toffee_dist.tensor import TemporalTensor

__all__ = ["SliceFactors", "SliceReport", "solve_slice", "solve_slices"]

SOLVERS: dict[SolverName, Solver] = {
    "als": solve_als,
    "closed_form": solve_closed_form,
    "compressed": solve_compressed,
}


def solve_slices(
    tensor: TemporalTensor,
    freqs: Sequence[int],
    options: SolverSettings,
    starts: Callable[[int], Tall | None] = lambda k: None,
    wanted: Collection[int] | None = None,
) -> Iterator[SliceFactors]:
    """Transform and solve a batch of frequencies, one at a time, in the order given.

    `starts` gives the A that a frequency starts from, or None; see `solve_slice`. Where only some of the
    batch are `wanted`, they are, to the bit, what the whole batch would have. Nodes without an edge (in a
    chain of windows, those that have left) take no part: their rows of A are zero.
    """
    n = tensor.n_nodes
    present = np.diff(tensor.indptr) > 0
    present[tensor.indices] = True
    nodes = np.flatnonzero(present)
    some = 0 < len(nodes) < n
    if some:
        tensor = keep_nodes(tensor, nodes)
    for k, values in iter_values(tensor, freqs, wanted):
        start = starts(k)
        if start is not None and some:
            start = start[nodes]
        factors = solve_slice(slice_matrix(tensor, values), k, options, start)
        if some:
            A = np.zeros((n, options.rank), factors.A.dtype)
            A[nodes] = factors.A
            factors = replace(factors, A=A)
        yield factors


def keep_nodes(tensor: TemporalTensor, nodes: NDArray[np.int64]) -> TemporalTensor:
    """Return the tensor of some nodes in their order, where the others have no edge; events are shared."""
    row = np.zeros(tensor.n_nodes, dtype=tensor.indices.dtype)
    row[nodes] = np.arange(len(nodes))
    # A row that goes is empty, so each that stays ends where the next one begins.
    ends = np.append(tensor.indptr[nodes], tensor.indptr[-1])
    indptr = ends.astype(tensor.indptr.dtype)
    return replace(tensor, n_nodes=len(nodes), indptr=indptr, indices=row[tensor.indices])


def solve_slice(matrix: Any, k: int, options: SolverSettings, start: Tall | None = None) -> SliceFactors:
    """Solve one slice in memory.

    Parameters
    ----------
    matrix : (n, n) csr_matrix or ndarray, in double
        X_k; real for k = 0 and Nyquist.
    k
        The frequency: it names the slice and, with the seed, its random numbers.
    options
        How to solve.
    start : (n, rank) array, optional
        The A of a slice like this one; see `fit_slice`.
    """
    began = time.perf_counter()
    n, rank = matrix.shape[0], options.rank
    values = np.asarray(getattr(matrix, "data", matrix) if hasattr(matrix, "indptr") else matrix)
    size = float(np.linalg.norm(values))
    dtype = slice_dtype(options, values.dtype.kind == "f")
    if size == 0:
        report = zero_report(k, options, time.perf_counter() - began)
        return SliceFactors(np.zeros((n, rank), dtype), np.zeros((rank, rank)), report)
    X = Operator((matrix / size).astype(dtype), (options.seed, k))
    # A slice has at most n columns of its own.
    near = None if start is None else start[:, : min(rank, n)].astype(dtype)
    fit = fit_slice(X, size, k, options, near)
    A = X.build(Term(fit.A, fit.small)).tall
    return SliceFactors(A, fit.R, replace(fit.report, seconds=time.perf_counter() - began))


def slice_dtype(options: SolverSettings, real: bool) -> np.dtype[Any]:
    """Return the type of a slice's tall arrays."""
    return options.dtype if real else np.result_type(options.dtype, np.complex64)


def zero_report(k: int, options: SolverSettings, seconds: float) -> SliceReport:
    """Return the report of a slice without entries."""
    bound = 0.0 if options.bound else None
    return SliceReport(k, 0.0, 0.0, bound, bound, 0, seconds, "zero", True)


@dataclass(frozen=True, eq=False)
class Fit:
    """Factors of a slice where its tall arrays are: the A asked for is A·small; G is AᴴA without it."""

    A: Handle
    small: Small
    G: Small
    R: Small
    report: SliceReport


def fit_slice(X: Slice, size: float, k: int, options: SolverSettings, start: Handle | None = None) -> Fit:
    """Solve a slice wherever it is.

    X/c with c = ‖X‖ is what is given, so that single precision serves weights of any size. With
    A = c^{1/3}·A', R = c^{1/3}·R' and λ = c^{4/3}·λ', the objective is c² times that of the scaled problem.

    Parameters
    ----------
    X
        The slice, divided by its norm.
    size
        Its norm.
    k, options
        As in `solve_slice`.
    start
        The A of a slice like this one, such as that of the previous window: a window that has moved by s
        steps multiplies X_k by exp(2πi·k·s/T), which R takes up (it is solved for first), so A serves as it
        is. Where a closed form exists, it needs no start.
    """
    began = time.perf_counter()
    scale = float(np.cbrt(size))
    scaled = options.model_copy(
        update={
            "rank": min(options.rank, X.n),
            "reg_a": options.reg_a / size ** (4 / 3),
            "reg_r": options.reg_r / size ** (4 / 3),
        }
    )
    name = options.solver
    if name == "auto":
        # Complex slices of a real tensor are not Hermitian; real ones are if the graph is undirected.
        name = "closed_form" if X.dtype.kind == "f" and X.hermitian else "compressed"
    warm = start is not None and name != "closed_form"
    if warm:
        # Near the answer from the first step on: one short step is enough.
        near = X.build(Term(start, 1 / scale), own=True)
        solution = minimise(X, near.tall, scaled, patience=1, G=near.own)
    else:
        solution = SOLVERS[name](X, scaled)
    bound = solution.bound
    if bound is None and options.bound:
        X.keep_only([solution.A])
        bound = bound_slice(X, scaled)
    rank = len(solution.R)
    R = np.zeros((options.rank, options.rank), solution.R.dtype)
    R[:rank, :rank] = solution.R * scale
    small = np.eye(rank, options.rank) * scale
    report = SliceReport(
        k=k,
        energy=size**2,
        objective=solution.objective * size**2,
        bound=None if bound is None else bound * size**2,
        gap=None if not bound else (solution.objective - bound) / bound,
        iterations=solution.iterations,
        seconds=time.perf_counter() - began,
        solver="warm" if warm else name,
        converged=solution.converged,
    )
    return Fit(solution.A, small, solution.G, R, report)
