"""RESCAL: X(t) ≈ A R_t Aᵀ, one real A for all snapshots, by alternating least squares.

    f = ½ Σ_t ‖X_t − A R_t Aᵀ‖² + λ_A/2 ‖A‖² + λ_R/2 Σ_t ‖R_t‖²
    R_t ← argmin given A
    A ← Σ_t (X_t A R_tᵀ + X_tᵀ A R_t) · (Σ_t R_t G R_tᵀ + R_tᵀ G R_t + λ_A I)⁻¹,   G = AᵀA

Three things make it fast. Turning A by the eigenvectors of G changes nothing (not even the penalty) and makes
G = diag(w): then R_t = (AᵀX_tA)_ij / (w_i w_j + λ_R), entry by entry. A snapshot touches few nodes, so every
product runs over its active rows only; those of a block of snapshots are stacked, and X_t A of the whole
block is one sparse product. And R_t is made, used and forgotten inside the sweep of its block.

What is n-sized goes through storage, r×r sums through the records of the tasks:

    cut      one task: the snapshots → block-*.npz, rows-*.npy (the nodes that a block touches)
    start    one task: the first A
    sweep    a map over the blocks: numerator-*.npy, what a block adds to Σ_t X_t A R_tᵀ + X_tᵀ A R_t
    update   one task: numerators in the order of the blocks → the next A, turned
    vectors  a map over the reductions: A and Σ_t w_t R_t → the vectors

A sweep with its A is a folder. `state.json` names the last one that lowered the objective: a fit that was
interrupted goes on from there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.solvers import SliceFactors, SliceReport
from toffee_dist.kernels.solvers.als import DAMPINGS, REG_FLOOR
from toffee_dist.kernels.solvers.base import Operator, Small, Tall, gram, times
from toffee_dist.kernels.solvers.closed_form import leading_eigenpairs
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, reductions
from toffee_dist.models.toffee import to_block
from toffee_dist.models.tsvd import decomposition_cost
from toffee_dist.settings import FitSettings, SolverSettings
from toffee_dist.storage.files import fetched, remove_tree, replacing, save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import Sizes, open_tensor
from toffee_dist.tasks import RunTasks
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Bytes of AᵀX_tA that a block of snapshots may take. Measured on email: 2 to 8 MiB alike, 32 a fifth slower.
BLOCK_BYTES = 8 * 2**20
A_FILE, STATE = "A.npy", "state.json"
_SIDE_ARRAYS = ("data", "indices", "indptr", "shape", "nodes", "ends")


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
    """Some snapshots that are not empty.

    Attributes
    ----------
    weights : (reductions, snapshots), how much each counts in every reduction
    sides : one where X_t is symmetric, else two
    """

    weights: Floats
    sides: tuple[Side, ...]

    @property
    def rows(self) -> Ints:
        """The nodes that the snapshots touch, ascending."""
        return np.unique(np.concatenate([side.nodes for side in self.sides]))


@dataclass(frozen=True)
class CutTask:
    """The cutting of the snapshots into blocks.

    Parameters
    ----------
    tensor, work
        Folders of the staged tensor and of the work.
    reduce
        Which sums of R_t are wanted.
    options
        Rank and precision decide how many snapshots a block has.
    """

    tensor: str
    work: str
    reduce: str
    options: SolverSettings


@dataclass(frozen=True)
class CutRecord:
    """How many nodes and blocks there are, whether X is directed, and ‖X‖."""

    n_nodes: int
    n_blocks: int
    directed: bool
    size: float


@dataclass(frozen=True)
class StartTask:
    """The first A: that of a file, or the leading eigenvectors of Σ_t X_t + X_tᵀ.

    Parameters
    ----------
    tensor, sweep
        Folders of the staged tensor and of the first sweep.
    size
        ‖X‖.
    options
        How to solve X/‖X‖.
    given
        File of an A for X itself; empty: none.
    """

    tensor: str
    sweep: str
    size: float
    options: SolverSettings
    given: str


@dataclass(frozen=True, eq=False)
class GramRecord:
    """AᵀA (r, r) of an A on storage, and the eigenvalues w (r,) that it has after A was turned."""

    G: Small
    w: Floats


@dataclass(frozen=True, eq=False)
class SweepTask:
    """One block against one A whose Gram matrix is diag(w).

    Parameters
    ----------
    work, sweep
        Folders of the blocks and of the sweep, which has the A.
    block
        Number of the block.
    w, inverse : (r,) and (r, r)
        R_t = (AᵀX_tA)∘inverse.
    """

    work: str
    sweep: str
    block: int
    w: Floats
    inverse: Small


@dataclass(frozen=True, eq=False)
class SweepRecord:
    """The sums of a block, beside its numerator, which is on storage.

    Attributes
    ----------
    normal : (r, r)     Σ_t R_t G R_tᵀ + R_tᵀ G R_t
    squares : (r, r)    Σ_t (AᵀX_tA)∘(AᵀX_tA): all that the objective needs
    reduced : (reductions, r, r)   Σ_t w_t R_t
    """

    normal: Small
    squares: Small
    reduced: Small


@dataclass(frozen=True, eq=False)
class UpdateTask:
    """The next A from the numerators of a sweep.

    Parameters
    ----------
    work, sweep
        Folders of the blocks and of the sweep.
    target
        Folder of the next sweep, which gets the A.
    n_blocks
        How many blocks there are.
    inverse : (r, r)
        (Σ_t R_t G R_tᵀ + R_tᵀ G R_t + λ_A I)⁻¹.
    share
        How much of the A of the sweep is kept.
    """

    work: str
    sweep: str
    target: str
    n_blocks: int
    inverse: Small
    share: float


@dataclass(frozen=True, eq=False)
class VectorsTask:
    """The vectors of one reduction.

    Parameters
    ----------
    reduction
        Where they go.
    A, scale
        File of the A of X/‖X‖, and what it is multiplied by.
    core : (rank, rank)
        Σ_t w_t R_t.
    directed
        Whether X is.
    report
        How the fit went.
    """

    reduction: ReductionTask
    A: str
    scale: float
    core: Small
    directed: bool
    report: FitReport


@dataclass(frozen=True, eq=False)
class RescalFit:
    """Where A is, the cores Σ_t w_t R_t (reductions, rank, rank), whether X is directed, and how it went.

    ``history`` holds the objective at the start and after every iteration. The A on storage is that of
    X/‖X‖; `read_factor` returns that of X, padded to the rank.
    """

    A: Path
    scale: float
    cores: Small
    directed: bool
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

    def read_factor(self) -> Tall:
        """Return A (n, rank)."""
        return _read_scaled(self.A, self.scale, self.cores.shape[-1])


def fit_rescal(context: FitContext) -> FitReport:
    """Fit RESCAL; the vectors are A·Σ_t R_t, in the canonical gauge or raw."""
    wanted = context.reduction_tasks()
    missing = [number for number, task in enumerate(wanted) if not task.finished()]
    if not missing:
        return wanted[0].read_report()
    began = time.perf_counter()
    work = to_path(context.folder) / f"{context.name}-work"
    options = context.options
    fitted = solve_rescal(context.tensor, work, options, options.reduce, context.run)
    seconds = time.perf_counter() - began
    report = FitReport(fitted.objective, fitted.iterations, seconds, fitted.converged)
    items = [
        VectorsTask(
            wanted[number], str(fitted.A), fitted.scale, fitted.cores[number], fitted.directed, report
        )
        for number in missing
    ]
    for _ in context.run(write_vectors, items):
        pass
    remove_tree(work)
    return report


def solve_rescal(
    tensor: str,
    work: Path,
    options: SolverSettings,
    reduce: str,
    run: RunTasks,
    start: Path | None = None,
) -> RescalFit:
    """Run ALS over all snapshots until it converges; the objective falls at every iteration.

    Parameters
    ----------
    tensor
        Folder of the staged tensor; empty snapshots cost nothing.
    work
        Folder for blocks and sweeps; a state that is there is gone on from.
    options
        Uses rank, λ, ``tol``, ``max_iter``, ``precision`` and ``seed``. λ below `REG_FLOOR` counts as that.
    reduce
        Which sums of R_t are wanted.
    run
        Where the tasks run.
    start
        File of the first A; by default the leading eigenvectors of Σ_t X_t + X_tᵀ.
    """
    work.mkdir(parents=True, exist_ok=True)
    [found] = run(cut, [CutTask(tensor, str(work), reduce, options)])
    rank, size = min(options.rank, found.n_nodes), found.size
    # As for a slice: ‖X‖ = 1, A and R scaled by c^{1/3}, λ by c^{4/3}, f by c².
    floor = REG_FLOOR[np.finfo(options.dtype).bits]
    reg_a, reg_r = (max(reg / size ** (4 / 3), floor) if size else floor for reg in _regs(options))
    sweeps = _Sweeps(
        work, found.n_blocks, options.model_copy(update={"rank": rank, "reg_a": reg_a, "reg_r": reg_r}), run
    )
    state = _State.read(work)
    if state is None:
        given = "" if start is None else str(start)
        task = StartTask(tensor, str(sweeps.folder(0)), size, sweeps.options, given)
        [record] = run(start_sweep, [task])
        sums, value = sweeps.sweep(0, record, reduce.count("+") + 1)
        # A graph without entries has nothing to fit.
        state = _State(0, sums, [value if size else 0.0], converged=size == 0)
        state.write(work)
    while len(state.history) <= options.max_iter and not state.converged:
        new = sweeps.iterate(state)
        new.write(work)
        if new.number != state.number:
            # Only now: until the new state was written, a resumed fit would have gone on from the old one.
            remove_tree(sweeps.folder(state.number))
        state = new
    scale, missing = float(np.cbrt(size)), options.rank - rank
    cores = np.pad(state.sums.reduced * scale, ((0, 0), (0, missing), (0, missing)))
    history = [value * size**2 for value in state.history]
    A = sweeps.folder(state.number) / A_FILE
    return RescalFit(A, scale, cores, found.directed, history, state.converged)


def _regs(options: SolverSettings) -> tuple[float, float]:
    return options.reg_a, options.reg_r


@dataclass(frozen=True, eq=False)
class _Sums:
    """What a sweep over all blocks gives, beside the numerators on storage."""

    normal: Small
    reduced: Small


@dataclass(frozen=True, eq=False)
class _State:
    """The last sweep that lowered the objective, and the objectives so far (of X/‖X‖)."""

    number: int
    sums: _Sums
    history: list[float]
    converged: bool

    def write(self, work: Path) -> None:
        """Leave it for a fit that goes on; the files of its sweep are whole by now."""
        arrays = _sum_paths(work, self.number)
        save_array(arrays[0], self.sums.normal)
        save_array(arrays[1], self.sums.reduced)
        data = {"number": self.number, "history": self.history, "converged": self.converged}
        write_json(work / STATE, data)

    @classmethod
    def read(cls, work: Path) -> _State | None:
        """Return what an interrupted fit left; None where that is nothing."""
        if not (work / STATE).exists():
            return None
        data = json.loads((work / STATE).read_text())
        normal, reduced = (load_rows(path) for path in _sum_paths(work, data["number"]))
        return cls(sums=_Sums(normal, reduced), **data)


@dataclass(frozen=True, eq=False)
class _Sweeps:
    """The sweeps of one fit: tasks for what is n-sized, r×r algebra here."""

    work: Path
    n_blocks: int
    options: SolverSettings
    run: RunTasks

    def folder(self, number: int) -> Path:
        """Return the folder of a sweep.

        A number is never used for another A: a late task must not write over the files of a newer sweep.
        """
        folder = _sweep_path(self.work, number)
        folder.mkdir(exist_ok=True)
        return folder

    def iterate(self, state: _State) -> _State:
        """Return the state after one more iteration."""
        inverse = self._invert(state.sums.normal)
        source, value = str(self.folder(state.number)), state.history[-1]
        # The update replaces A in both its places at once and may overshoot; a shorter step then lowers f.
        for number, share in enumerate(DAMPINGS, start=state.number + 1):
            target = self.folder(number)
            task = UpdateTask(str(self.work), source, str(target), self.n_blocks, inverse, share)
            [record] = self.run(update, [task])
            sums, found = self.sweep(number, record, len(state.sums.reduced))
            if found < value:
                converged = value - found <= self.options.tol * found
                return _State(number, sums, [*state.history, found], converged)
            remove_tree(target)
        return replace(state, converged=True)

    def sweep(self, number: int, record: GramRecord, n_reductions: int) -> tuple[_Sums, float]:
        """Find the best R_t for the A of a sweep; return the sums of all blocks, and the objective."""
        G, w = record.G, record.w
        eps = float(np.finfo(self.options.dtype).eps)
        present = w > eps * w[-1]
        w = np.where(present, w, 0.0)
        scale = np.multiply.outer(w, w) + self.options.reg_r
        usable = np.logical_and.outer(present, present)
        inverse = np.divide(1.0, scale, out=np.zeros_like(scale), where=usable)
        folder = str(self.folder(number))
        tasks = (SweepTask(str(self.work), folder, block, w, inverse) for block in range(self.n_blocks))
        # In the order of the blocks, so that the sums do not depend on who was first.
        normal, squares, reduced = np.zeros_like(G), np.zeros_like(G), np.zeros((n_reductions, *G.shape))
        for found in self.run(sweep, tasks):
            normal += found.normal
            squares += found.squares
            reduced += found.reduced
        # With R = M∘K: Σ ⟨R, M⟩ = ⟨K, Q⟩, Σ ⟨R, GRG⟩ = ⟨K² w wᵀ, Q⟩, Σ ‖R‖² = ⟨K², Q⟩, Q = Σ_t M∘M; ‖X‖ = 1.
        misfit = 1.0 - 2.0 * float((inverse * squares).sum())
        misfit += float((inverse**2 * np.multiply.outer(w, w) * squares).sum())
        penalty = self.options.reg_a * float(np.trace(G))
        penalty += self.options.reg_r * float((inverse**2 * squares).sum())
        return _Sums(normal, reduced), 0.5 * (misfit + penalty)

    def _invert(self, normal: Small) -> Small:
        N = normal.copy()
        # A ridge at the rounding error of the tall arrays: spare rank makes N singular.
        ridge = np.finfo(self.options.dtype).eps * np.trace(N) / len(N)
        N[np.diag_indices_from(N)] += self.options.reg_a + max(float(ridge), np.finfo(np.float64).tiny)
        return np.asarray(np.linalg.inv(N))


def cut(task: CutTask) -> CutRecord:
    """Cut the snapshots that have entries into blocks, of X/‖X‖."""
    work = to_path(task.work)
    done = work / "cut.json"
    if done.exists():
        return CutRecord(**json.loads(done.read_text()))
    tensor, dtype = open_tensor(task.tensor), task.options.dtype
    size = float(np.linalg.norm(tensor.values))
    count = 0
    if size > 0:
        weights = np.stack(reductions(task.reduce, tensor.n_steps))
        per_block = snapshots_per_block(tensor.n_nodes, task.options.rank, dtype.itemsize)
        for block in iter_blocks(tensor, per_block, dtype, size, weights):
            save_block(block, _block_path(work, count))
            save_array(_rows_path(work, count), block.rows)
            count += 1
    record = CutRecord(tensor.n_nodes, count, tensor.directed, size)
    write_json(done, asdict(record))
    return record


def snapshots_per_block(n_nodes: int, rank: int, itemsize: int) -> int:
    """Return how many snapshots a block has at the most."""
    return max(1, BLOCK_BYTES // (itemsize * min(rank, n_nodes) ** 2))


def start_sweep(task: StartTask) -> GramRecord:
    """Leave the first A."""
    options = task.options
    if task.given:
        A = load_rows(to_path(task.given)) / options.dtype.type(np.cbrt(task.size))
    else:
        tensor = open_tensor(task.tensor)
        if task.size > 0:
            A = _leading(replace(tensor, values=tensor.values / task.size), options)
        else:
            A = np.zeros((tensor.n_nodes, options.rank))
    return _leave(A.astype(options.dtype), to_path(task.sweep))


def _leading(tensor: TemporalTensor, options: SolverSettings) -> Tall:
    ((_, values),) = iter_values(tensor, [0])
    total = slice_matrix(tensor, values)
    both = Operator(sp.csr_matrix(total + total.T), (options.seed, 0))
    if both.norm2 == 0:
        return np.asarray(both.random(options.rank).tall)
    _, U = leading_eigenpairs(both, options.rank)
    return U


def _leave(A: Tall, sweep: Path) -> GramRecord:
    """Turn A so that its Gram matrix is diagonal, and leave it."""
    # Here and not with the other r×r algebra: turning A later would be another pass over it.
    G = gram(A, A)
    w, W = np.linalg.eigh(G)
    save_array(sweep / A_FILE, times(A, W))
    return GramRecord(G, w)


def sweep(task: SweepTask) -> SweepRecord:
    """Find the R_t of one block's snapshots; leave what they add to the next A."""
    work, folder = to_path(task.work), to_path(task.sweep)
    block = load_block(_block_path(work, task.block))
    numerator, record = sweep_block(block, load_rows(folder / A_FILE), task.w, task.inverse)
    rows = load_rows(_rows_path(work, task.block))
    save_array(_numerator_path(folder, task.block), numerator[rows])
    return record


def sweep_block(block: SnapshotBlock, A: Tall, w: Floats, inverse: Small) -> tuple[Tall, SweepRecord]:
    """Return Σ_t X_t A R_tᵀ + X_tᵀ A R_t (n, r) and the sums of one block."""
    dtype, rank = A.dtype, A.shape[1]
    left = block.sides[0]
    XA, A_rows = left.matrix @ A, A[left.nodes]
    M = np.empty((block.weights.shape[1], rank, rank), dtype)
    spans = list(zip(left.ends[:-1], left.ends[1:], strict=True))
    for t, (a, b) in enumerate(spans):
        np.matmul(A_rows[a:b].T, XA[a:b], out=M[t])
    squares = np.einsum("tij,tij->ij", M, M).astype(np.float64)
    M *= inverse.astype(dtype)
    R = M
    reduced = np.tensordot(block.weights, R, axes=1)
    root = np.sqrt(w).astype(dtype)
    # Σ_t R_t diag(w) R_tᵀ = B Bᵀ with the R_t √w side by side: one product for the block.
    B = (R * root).transpose(1, 0, 2).reshape(rank, -1)
    normal = (B @ B.T).astype(np.float64)
    for t, (a, b) in enumerate(spans):
        XA[a:b] = XA[a:b] @ R[t].T
    numerator = left.gather(XA)
    if len(block.sides) == 1:
        return 2 * numerator, SweepRecord(2 * normal, squares, reduced)
    right = block.sides[1]
    B = (R * root[:, None]).reshape(-1, rank)
    normal += (B.T @ B).astype(np.float64)
    XtA = right.matrix @ A
    for t, (a, b) in enumerate(zip(right.ends[:-1], right.ends[1:], strict=True)):
        XtA[a:b] = XtA[a:b] @ R[t]
    numerator += right.gather(XtA)
    return numerator, SweepRecord(normal, squares, reduced)


def update(task: UpdateTask) -> GramRecord:
    """Add up the numerators, in the order of the blocks, and leave the next A."""
    work, folder = to_path(task.work), to_path(task.sweep)
    old = load_rows(folder / A_FILE)
    numerator = np.zeros_like(old)
    for block in range(task.n_blocks):
        # A row is in a block once, so this adds every number.
        numerator[load_rows(_rows_path(work, block))] += load_rows(_numerator_path(folder, block))
    A = times(numerator, task.inverse)
    if task.share > 0:
        kind = A.dtype.type
        A = np.asarray(A * kind(1 - task.share) + old * kind(task.share))
    return _leave(A, to_path(task.target))


def write_vectors(task: VectorsTask) -> None:
    """Leave the vectors of one reduction."""
    reduction, report = task.reduction, task.report
    A = _read_scaled(to_path(task.A), task.scale, reduction.options.rank)
    about = SliceReport(0, 0.0, report.objective or 0.0, None, None, 0, 0.0, "rescal", True)
    vectors = to_block(SliceFactors(A, task.core, about), reduction.options, task.directed)
    reduction.write(vectors, report)


def _read_scaled(path: Path, scale: float, rank: int) -> Tall:
    A = load_rows(path)
    return np.pad(A * A.dtype.type(scale), ((0, 0), (0, rank - A.shape[1])))


def iter_blocks(
    tensor: TemporalTensor, per_block: int, dtype: np.dtype[Any], size: float, weights: Floats
) -> Iterator[SnapshotBlock]:
    """Yield the snapshots of X/size that have entries, in blocks of at most this many.

    Parameters
    ----------
    tensor
        X.
    per_block, dtype, size
        Snapshots per block, the precision of their values, and what these are divided by.
    weights : (reductions, n_steps)
        How much each step counts in every reduction.
    """
    pair = tensor.entry_pairs
    i, j = tensor.sources[pair], tensor.indices[pair]
    order = np.argsort(tensor.steps, kind="stable")
    steps, starts = np.unique(tensor.steps[order], return_index=True)
    ends = np.append(starts, tensor.n_entries)
    for first in range(0, len(steps), per_block):
        own = steps[first : first + per_block]
        events = order[ends[first] : ends[first + len(own)]]
        local = np.searchsorted(own, tensor.steps[events])
        values = (tensor.values[events] / size).astype(dtype)
        sides = (
            [(i[events], j[events])]
            if not tensor.directed
            else [(i[events], j[events]), (j[events], i[events])]
        )
        built = tuple(
            _side(local, rows, columns, values, len(own), tensor.n_nodes) for rows, columns in sides
        )
        yield SnapshotBlock(weights[:, own], built)


def _side(t: Ints, rows: Ints, columns: Ints, values: Any, n_snapshots: int, n_nodes: int) -> Side:
    keys = t.astype(np.int64) * n_nodes + rows
    active, which = np.unique(keys, return_inverse=True)
    matrix = sp.csr_matrix((values, (which, columns)), shape=(len(active), n_nodes))
    ends = np.searchsorted(active // n_nodes, np.arange(n_snapshots + 1))
    return Side(matrix, active % n_nodes, ends)


def save_block(block: SnapshotBlock, path: Path) -> None:
    """Write a block."""
    arrays: dict[str, Any] = {"weights": block.weights}
    for k, side in enumerate(block.sides):
        matrix = side.matrix
        parts = (matrix.data, matrix.indices, matrix.indptr, matrix.shape, side.nodes, side.ends)
        arrays |= {f"{name}{k}": part for name, part in zip(_SIDE_ARRAYS, parts, strict=True)}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez(file, **arrays)


def load_block(path: Path) -> SnapshotBlock:
    """Read what `save_block` wrote."""
    with fetched(path) as local, np.load(local, allow_pickle=False) as arrays:
        sides = []
        for k in range(2):
            if f"data{k}" in arrays:
                data, indices, indptr, shape, nodes, ends = (arrays[f"{name}{k}"] for name in _SIDE_ARRAYS)
                sides.append(Side(sp.csr_matrix((data, indices, indptr), shape=tuple(shape)), nodes, ends))
        return SnapshotBlock(arrays["weights"], tuple(sides))


def _block_path(work: Path, block: int) -> Path:
    return work / f"block-{block:05d}.npz"


def _rows_path(work: Path, block: int) -> Path:
    return work / f"rows-{block:05d}.npy"


def _sweep_path(work: Path, number: int) -> Path:
    return work / f"sweep-{number:05d}"


def _numerator_path(sweep: Path, block: int) -> Path:
    return sweep / f"numerator-{block:05d}.npy"


def _sum_paths(work: Path, number: int) -> tuple[Path, Path]:
    folder = _sweep_path(work, number)
    return folder / "normal.npy", folder / "reduced.npy"


# Seconds of a sweep per entry·r² and per step·r³; of cutting per entry; of an update and of the vectors per
# n·r². Fitted to email by days (r 128) and mathoverflow by weeks (r 64) and days (r 128), directed and not,
# to a factor of 2. Iterations to converge: 23 on email, 25 and 32 on smaller graphs (benchmarks/evaluate.py).
SWEEP_SECONDS, CORE_SECONDS, CUT_SECONDS, UPDATE_SECONDS, VECTORS_SECONDS = 2e-10, 5e-11, 6e-7, 3e-10, 2e-9
USUAL_ITERATIONS = 30
# How many times the mean the entries of the largest block may be: nothing is known of the snapshots before
# they are cut.
SKEW = 2


def rescal_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes.

    The bytes are those of a graph in which every entry has a row of its own in its snapshot; measured peaks
    were 0.35 to 0.8 of them. The disk is that of two sweeps whose blocks touch as many nodes as they can:
    right for email, five times too much for mathoverflow by days.
    """
    n, entries, sides = sizes.n_nodes, sizes.n_entries, 2 if directed else 1
    rank, item = min(options.rank, n), options.dtype.itemsize
    steps = min(sizes.n_steps, entries)
    per_block = snapshots_per_block(n, rank, item)
    n_blocks = max(1, -(-steps // per_block))
    in_block = entries if n_blocks == 1 else min(entries, SKEW * entries // n_blocks)
    sweeps = min(options.max_iter, USUAL_ITERATIONS) + 1
    tall, small = n * rank * item, min(per_block, steps) * rank**2 * item
    start_bytes, start_seconds = decomposition_cost(sizes, rank)
    touched = min(n_blocks * n, sides * entries)
    return [
        Cost(
            "rescal cut",
            "snapshots into blocks",
            tasks=1,
            # The order in time and both ends of every entry; a block and its sides.
            task_bytes=56 * entries + (32 + 48 * sides) * in_block,
            seconds=CUT_SECONDS * entries,
            disk=sides * 24 * entries,
        ),
        Cost(
            "rescal start",
            "leading eigenvectors of the sum over time",
            tasks=1,
            task_bytes=start_bytes,
            seconds=start_seconds,
            disk=0,
        ),
        Cost(
            "rescal sweep",
            f"per iteration (about {sweeps - 1} of them), a task per block of snapshots",
            tasks=n_blocks,
            # A, the numerator, its copies; AᵀX_tA and what becomes of it; X_tA and A of the active rows.
            task_bytes=5 * tall
            + 4 * small
            + (1 + sides) * rank * item * in_block
            + sides * 48 * in_block
            + 8 * 8 * rank**2,
            seconds=sweeps * (SWEEP_SECONDS * entries * rank**2 + CORE_SECONDS * steps * rank**3),
            disk=2 * (tall + rank * item * touched),
        ),
        Cost(
            "rescal update",
            "per iteration, the next A from what the blocks left",
            tasks=1,
            task_bytes=5 * tall + 8 * 8 * rank**2,
            seconds=sweeps * UPDATE_SECONDS * n * rank**2,
            disk=0,
        ),
        Cost(
            "rescal vectors",
            "A·Σ R_t in the gauge asked for",
            tasks=1,
            task_bytes=12 * n * options.rank * item + 16 * n * options.rank,
            seconds=VECTORS_SECONDS * n * rank**2,
            disk=sides * 4 * n * options.rank,
        ),
    ]
