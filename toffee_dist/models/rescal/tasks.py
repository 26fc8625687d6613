"""The tasks of RESCAL: what is n-sized is read from and left on storage, r×r sums are records."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.solvers import SliceFactors, SliceReport
from toffee_dist.kernels.solvers.base import Operator, Small, Tall, gram, times
from toffee_dist.kernels.solvers.closed_form import leading_eigenpairs
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.models.base import FitReport, ReductionTask, reductions
from toffee_dist.models.rescal.blocks import (
    SnapshotBlock,
    iter_blocks,
    load_block,
    save_block,
    snapshots_per_block,
)
from toffee_dist.models.toffee import to_block
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.files import save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.tensor import Floats, TemporalTensor

A_FILE = "A.npy"


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
    A = read_scaled(to_path(task.A), task.scale, reduction.options.rank)
    about = SliceReport(0, 0.0, report.objective or 0.0, None, None, 0, 0.0, "rescal", True)
    vectors = to_block(SliceFactors(A, task.core, about), reduction.options, task.directed)
    reduction.write(vectors, report)


def read_scaled(path: Path, scale: float, rank: int) -> Tall:
    """Return the A of X from a file of that of X/‖X‖, padded to the rank."""
    A = load_rows(path)
    return np.pad(A * A.dtype.type(scale), ((0, 0), (0, rank - A.shape[1])))


def _block_path(work: Path, block: int) -> Path:
    return work / f"block-{block:05d}.npz"


def _rows_path(work: Path, block: int) -> Path:
    return work / f"rows-{block:05d}.npy"


def _numerator_path(sweep: Path, block: int) -> Path:
    return sweep / f"numerator-{block:05d}.npy"
