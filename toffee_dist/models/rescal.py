"""RESCAL: X(t) ≈ A R_t Aᵀ, one real A for all snapshots, by alternating least squares.

    f = ½ Σ_t ‖X_t − A R_t Aᵀ‖² + λ_A/2 ‖A‖² + λ_R/2 Σ_t ‖R_t‖²
    R_t ← argmin given A
    A ← Σ_t (X_t A R_tᵀ + X_tᵀ A R_t) · (Σ_t R_t G R_tᵀ + R_tᵀ G R_t + λ_A I)⁻¹,   G = AᵀA

Three things make it fast. Turning A by the eigenvectors of G changes nothing (not even the penalty) and makes
G = diag(w): then R_t = (AᵀX_tA)_ij / (w_i w_j + λ_R), entry by entry. A snapshot touches few nodes, so every
product runs over its active rows only; those of a block of snapshots are stacked, and X_t A of the whole
block is one sparse product. And R_t is made, used and forgotten inside the sweep of its block: an iteration
is one map over blocks of snapshots, whose records are summed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.edges import Run
from toffee_dist.models.base import ModelEmbedding, ModelOptions, reductions
from toffee_dist.models.toffee import to_block
from toffee_dist.solvers import SliceFactors, SliceReport
from toffee_dist.solvers.als import DAMPINGS, REG_FLOOR
from toffee_dist.solvers.base import Operator, Small, SolveOptions, Tall, gram, times
from toffee_dist.solvers.closed_form import leading_eigenpairs
from toffee_dist.spectrum import iter_values, slice_matrix
from toffee_dist.store import fetched, read_array, replacing, save_array
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Bytes of AᵀX_tA that a block of snapshots may take. Measured on email: 2 to 8 MiB alike, 32 a fifth slower.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class Side:
    """The active rows of a block's snapshots, stacked: X_t, or X_tᵀ, without the rows that are empty.

    Attributes
    ----------
    matrix : (active rows, n) csr_matrix
    nodes : the node of every active row
    ends : (snapshots + 1,) where each snapshot's rows begin and end
    """

    matrix: sp.csr_matrix[Any]
    nodes: Ints
    ends: Ints

    def gather(self, stack: Tall) -> Tall:
        """Add up the rows of a stack by node, (n, columns)."""
        n = self.matrix.shape[1]
        ones = np.ones(len(self.nodes), dtype=stack.dtype)
        chosen = sp.csc_matrix((ones, self.nodes, np.arange(len(self.nodes) + 1)), shape=(n, len(self.nodes)))
        return np.asarray(chosen @ stack)


@dataclass(frozen=True, eq=False)
class SnapshotBlock:
    """Some snapshots that are not empty: their steps and their sides (one where X_t is symmetric)."""

    steps: Ints
    sides: tuple[Side, ...]


@dataclass(frozen=True, eq=False)
class SweepTask:
    """One block against one A whose Gram matrix is diag(w); block and A themselves, or files of them."""

    block: SnapshotBlock | Path
    A: Tall | Path
    w: Floats
    inverse: Small
    reduce: Floats


@dataclass(frozen=True, eq=False)
class SweepRecord:
    """What a block adds.

    Attributes
    ----------
    numerator : (n, r)  Σ_t X_t A R_tᵀ + X_tᵀ A R_t
    normal : (r, r)     Σ_t R_t G R_tᵀ + R_tᵀ G R_t
    squares : (r, r)    Σ_t (AᵀX_tA)∘(AᵀX_tA): all that the objective needs
    reduced : (reductions, r, r)   Σ_t w_t R_t
    """

    numerator: Tall
    normal: Small
    squares: Small
    reduced: Small


def fit_rescal(
    tensor: TemporalTensor, options: ModelOptions, run: Run, work: Path | None = None
) -> ModelEmbedding:
    """Fit RESCAL; the vectors are A·Σ_t R_t, in the canonical gauge or raw."""
    weights = np.stack(reductions(options.reduce, tensor.n_steps))
    fitted = solve_rescal(tensor, options.solve(), weights, run, work)
    blocks = []
    for core in fitted.cores:
        report = SliceReport(0, 0.0, fitted.objective, None, None, fitted.iterations, 0.0, "rescal", True)
        blocks.append(to_block(SliceFactors(fitted.A, core, report), options, tensor.directed))
    return ModelEmbedding(tuple(blocks), fitted.objective, fitted.iterations)


@dataclass(frozen=True, eq=False)
class RescalFit:
    """A (n, r), the cores Σ_t w_t R_t of every reduction (reductions, r, r), and how it went.

    ``history`` holds the objective at the start and after every iteration.
    """

    A: Tall
    cores: Small
    history: list[float]
    converged: bool

    @property
    def objective(self) -> float:
        """The last objective."""
        return self.history[-1]

    @property
    def iterations(self) -> int:
        """How many iterations were made."""
        return len(self.history) - 1


def solve_rescal(
    tensor: TemporalTensor,
    options: SolveOptions,
    weights: Floats,
    run: Run,
    work: Path | None = None,
    start: Tall | None = None,
) -> RescalFit:
    """Run ALS over all snapshots until it converges; the objective falls at every iteration.

    Parameters
    ----------
    tensor
        The snapshots; empty ones cost nothing.
    options
        Uses rank, λ, ``tol``, ``max_iter``, ``precision`` and ``seed``. λ below `REG_FLOOR` counts as that.
    weights : (reductions, n_steps)
        Which sums of R_t are wanted.
    run, work
        Where the sweeps run, and a folder for blocks and A where that is not this process.
    start
        The first A; by default the leading eigenvectors of Σ_t X_t + X_tᵀ.
    """
    n, rank = tensor.n_nodes, min(options.rank, tensor.n_nodes)
    size = float(np.linalg.norm(tensor.values))
    if size == 0:
        cores = np.zeros((len(weights), options.rank, options.rank))
        return RescalFit(np.zeros((n, options.rank), options.dtype), cores, [0.0], True)
    # As for a slice: ‖X‖ = 1, A and R scaled by c^{1/3}, λ by c^{4/3}, f by c².
    floor = REG_FLOOR[np.finfo(options.dtype).bits]
    reg_a, reg_r = (max(reg / size ** (4 / 3), floor) for reg in (options.reg_a, options.reg_r))
    solve = replace(options, rank=rank, reg_a=reg_a, reg_r=reg_r)
    scaled = replace(tensor, values=tensor.values / size)
    per_block = max(1, BLOCK_BYTES // (options.dtype.itemsize * rank**2))
    built = build_blocks(scaled, per_block, options.dtype)
    blocks: list[SnapshotBlock | Path] = list(built)
    if work is not None:
        blocks = [save_block(block, work / f"block-{k:05d}.npz") for k, block in enumerate(built)]
    if start is None:
        start = _start(scaled, solve)
    else:
        start = start / options.dtype.type(np.cbrt(size))

    def sweep_all(A: Tall) -> _State:
        return _evaluate(A, blocks, weights, solve, run, work)

    state = sweep_all(start.astype(options.dtype))
    history = [state.objective]
    converged = False
    while len(history) <= options.max_iter and not converged:
        plain = _update(state, solve)
        # The update replaces A in both its places at once and may overshoot; a shorter step then lowers f.
        tries = (sweep_all(_blend(plain, state.A, share)) for share in DAMPINGS)
        new = next((found for found in tries if found.objective < history[-1]), None)
        if new is None:
            converged = True
            break
        converged = history[-1] - new.objective <= options.tol * new.objective
        state = new
        history.append(new.objective)
    scale, missing = np.cbrt(size), options.rank - rank
    A = np.pad(state.A * options.dtype.type(scale), ((0, 0), (0, missing)))
    cores = np.pad(state.reduced * scale, ((0, 0), (0, missing), (0, missing)))
    return RescalFit(A, cores, [value * size**2 for value in history], converged)


@dataclass(frozen=True, eq=False)
class _State:
    """A with AᵀA = diag(w), and what a sweep over all snapshots gives for it."""

    A: Tall
    numerator: Tall
    normal: Small
    reduced: Small
    objective: float


def _evaluate(
    A: Tall,
    blocks: Sequence[SnapshotBlock | Path],
    weights: Floats,
    options: SolveOptions,
    run: Run,
    work: Path | None,
) -> _State:
    """Turn A so that its Gram matrix is diagonal, find the best R_t, and add up what the blocks say."""
    G = gram(A, A)
    w, W = np.linalg.eigh(G)
    A = times(A, W)
    eps = float(np.finfo(A.dtype).eps)
    present = w > eps * w[-1]
    w = np.where(present, w, 0.0)
    scale = np.multiply.outer(w, w) + options.reg_r
    usable = np.logical_and.outer(present, present)
    inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=usable)
    there: Tall | Path = A
    if work is not None:
        there = work / "A.npy"
        save_array(there, A)
    tasks = (SweepTask(block, there, w, inverse, weights) for block in blocks)
    # In the order of the blocks, so that the sums do not depend on who was first.
    numerator, normal = np.zeros_like(A), np.zeros_like(G)
    squares, reduced = np.zeros_like(G), np.zeros((len(weights), *G.shape))
    for record in run(sweep, tasks):
        numerator += record.numerator
        normal += record.normal
        squares += record.squares
        reduced += record.reduced
    # With R = M∘K: Σ ⟨R, M⟩ = ⟨K, Q⟩, Σ ⟨R, GRG⟩ = ⟨K² w wᵀ, Q⟩, Σ ‖R‖² = ⟨K², Q⟩, Q = Σ_t M∘M; ‖X‖ = 1.
    misfit = 1.0 - 2.0 * float((inverse * squares).sum())
    misfit += float((inverse**2 * np.multiply.outer(w, w) * squares).sum())
    penalty = options.reg_a * float(np.trace(G)) + options.reg_r * float((inverse**2 * squares).sum())
    return _State(A, numerator, normal, reduced, 0.5 * (misfit + penalty))


def sweep(task: SweepTask) -> SweepRecord:
    """Find the R_t of one block's snapshots, and what they add to the next A."""
    block = task.block if isinstance(task.block, SnapshotBlock) else load_block(task.block)
    A = task.A if isinstance(task.A, np.ndarray) else read_array(task.A)
    dtype, rank = A.dtype, A.shape[1]
    left = block.sides[0]
    XA, A_rows = left.matrix @ A, A[left.nodes]
    M = np.empty((len(block.steps), rank, rank), dtype)
    spans = list(zip(left.ends[:-1], left.ends[1:], strict=True))
    for t, (a, b) in enumerate(spans):
        np.matmul(A_rows[a:b].T, XA[a:b], out=M[t])
    squares = np.einsum("tij,tij->ij", M, M).astype(np.float64)
    M *= task.inverse.astype(dtype)
    R = M
    reduced = np.tensordot(task.reduce[:, block.steps], R, axes=1)
    root = np.sqrt(task.w).astype(dtype)
    # Σ_t R_t diag(w) R_tᵀ = B Bᵀ with the R_t √w side by side: one product for the block.
    B = (R * root).transpose(1, 0, 2).reshape(rank, -1)
    normal = (B @ B.T).astype(np.float64)
    for t, (a, b) in enumerate(spans):
        XA[a:b] = XA[a:b] @ R[t].T
    numerator = left.gather(XA)
    if len(block.sides) == 1:
        return SweepRecord(2 * numerator, 2 * normal, squares, reduced)
    right = block.sides[1]
    B = (R * root[:, None]).reshape(-1, rank)
    normal += (B.T @ B).astype(np.float64)
    XtA = right.matrix @ A
    for t, (a, b) in enumerate(zip(right.ends[:-1], right.ends[1:], strict=True)):
        XtA[a:b] = XtA[a:b] @ R[t]
    numerator += right.gather(XtA)
    return SweepRecord(numerator, normal, squares, reduced)


def _update(state: _State, options: SolveOptions) -> Tall:
    N = state.normal.copy()
    # A ridge at the rounding error of the tall arrays: spare rank makes N singular.
    ridge = np.finfo(state.A.dtype).eps * np.trace(N) / len(N)
    N[np.diag_indices_from(N)] += options.reg_a + max(float(ridge), np.finfo(np.float64).tiny)
    return times(state.numerator, np.linalg.inv(N))


def _blend(new: Tall, old: Tall, share: float) -> Tall:
    scale = new.dtype.type
    return new if share == 0 else np.asarray(new * scale(1 - share) + old * scale(share))


def _start(tensor: TemporalTensor, options: SolveOptions) -> Tall:
    ((_, values),) = iter_values(tensor, [0])
    total = slice_matrix(tensor, values)
    both = Operator(sp.csr_matrix(total + total.T))
    if both.norm2 == 0:
        return np.asarray(both.random(np.random.default_rng([options.seed, 0]), options.rank))
    _, U = leading_eigenpairs(both, options.rank, np.random.default_rng([options.seed, 0]))
    return U


def build_blocks(tensor: TemporalTensor, per_block: int, dtype: np.dtype[Any]) -> list[SnapshotBlock]:
    """Cut the snapshots that have entries into blocks of at most this many."""
    pair = np.repeat(np.arange(tensor.n_pairs), np.diff(tensor.tube_ptr))
    i, j = tensor.sources[pair], tensor.indices[pair]
    order = np.argsort(tensor.steps, kind="stable")
    steps, starts = np.unique(tensor.steps[order], return_index=True)
    ends = np.append(starts, tensor.n_events)
    blocks = []
    for first in range(0, len(steps), per_block):
        own = steps[first : first + per_block]
        events = order[ends[first] : ends[first + len(own)]]
        local = np.searchsorted(own, tensor.steps[events])
        values = tensor.values[events].astype(dtype)
        sides = (
            [(i[events], j[events])]
            if not tensor.directed
            else [(i[events], j[events]), (j[events], i[events])]
        )
        built = tuple(
            _side(local, rows, columns, values, len(own), tensor.n_nodes) for rows, columns in sides
        )
        blocks.append(SnapshotBlock(own, built))
    return blocks


def _side(t: Ints, rows: Ints, columns: Ints, values: Any, n_snapshots: int, n_nodes: int) -> Side:
    keys = t.astype(np.int64) * n_nodes + rows
    active, which = np.unique(keys, return_inverse=True)
    matrix = sp.csr_matrix((values, (which, columns)), shape=(len(active), n_nodes))
    ends = np.searchsorted(active // n_nodes, np.arange(n_snapshots + 1))
    return Side(matrix, active % n_nodes, ends)


def save_block(block: SnapshotBlock, path: Path) -> Path:
    """Write a block, for tasks that run elsewhere."""
    arrays: dict[str, Any] = {"steps": block.steps}
    for k, side in enumerate(block.sides):
        matrix = side.matrix
        parts = (matrix.data, matrix.indices, matrix.indptr, matrix.shape, side.nodes, side.ends)
        arrays |= {f"{name}{k}": part for name, part in zip(_PARTS, parts, strict=True)}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)
    return path


def load_block(path: Path) -> SnapshotBlock:
    """Read what `save_block` wrote."""
    with fetched(path) as local, np.load(local, allow_pickle=False) as arrays:
        sides = []
        for k in range(2):
            if f"data{k}" in arrays:
                data, indices, indptr, shape, nodes, ends = (arrays[f"{name}{k}"] for name in _PARTS)
                sides.append(Side(sp.csr_matrix((data, indices, indptr), shape=tuple(shape)), nodes, ends))
        return SnapshotBlock(arrays["steps"], tuple(sides))


_PARTS = ("data", "indices", "indptr", "shape", "nodes", "ends")
