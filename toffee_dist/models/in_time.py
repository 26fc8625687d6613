"""Vectors in time, ours and what others do: a vector per node and step, and a score of a pair at a step.

All of them are a projection Z(t) of something smoothed on a basis V that all steps share (UASE, IPP, ours),
or of one step alone (`snapshot`), or of the sum (`static`). The score of a pair is the entry of Z(t)·Vᵀ; on
undirected graphs the mean of both orders.

How far a score is relative to the activity of a step (`Projected.power`) is chosen on a validation part, for
all models alike; where there is none, ours uses `ACTIVITY_POWER`. Ours knows the noise of every node, and
can count its movement as far as it stands out of that (`Projected.steadied`): who is linked at a step, one
pair beside another, is told better so; when a pair is linked, one step beside another, is told worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla

from toffee_dist.kernels.embedding import trajectory
from toffee_dist.kernels.entries import ActiveRows, find_pairs, project_rows
from toffee_dist.kernels.filter import PairFilter, TimeKernel, filter_rows, steadiness
from toffee_dist.kernels.frequencies import choose_freqs
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.patterns import learn_filter
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.models.base import Float32s, RoleVectors, Rows, StepVectors, VectorsInTime
from toffee_dist.settings import FitSettings
from toffee_dist.tensor import Floats, TemporalTensor

# Weights of a kernel below this share of its largest are left out.
NEGLIGIBLE = 1e-4
# The score of a pair at a step, Z_i(t)·v_j, is divided by this power of ‖Z_i(t)‖: a node that is busy at a
# step is not closer to everybody. Mean of who and when on validation entries of school, workplace, hypertext,
# fb-forum and email: .726 with 0, .735 with ½, .736 with ¾, .733 with 1.
ACTIVITY_POWER = 0.75
# Bytes of vectors of neighbouring steps that are kept.
KEPT_BYTES = 256 * 2**20


@dataclass(frozen=True, eq=False)
class Projected:
    """Rows that move in one basis that does not.

    Parameters
    ----------
    at
        Gives Z(t), (n, r).
    basis : (n, r)
    directed
        Whether (i, j) and (j, i) are two questions.
    power
        Of the activity that a score is divided by: 0 gives the entries of Z(t)·Vᵀ, 1 a cosine.
    steadiness
        Gives every node's mean vector, and the share of its movement that is its own (`kernels.filter`).
    steadied
        Whether movement counts by that share. Who on validation entries of fb-forum, workplace, school,
        hypertext and email (5 draws, email 1), each with its best power: .9041 .8602 .9409 .7666 .9665
        without, .9092 .8623 .9411 .7684 .9704 with; when .5512 .5635 .7025 .5784 .5897 without, .5375 .5496
        .6948 .5611 .5811 with.
    """

    at: Callable[[int], Float32s]
    basis: Float32s
    directed: bool
    power: float = 0.0
    steadiness: Callable[[], tuple[Floats, Floats]] | None = None
    steadied: bool = False

    def scored(self, power: float, steadied: bool = False) -> Projected:
        """Return it with another power, and steadied where it knows how."""
        return replace(self, power=power, steadied=steadied and self.steadiness is not None)

    def read(self, step: int) -> Float32s:
        """Return what is scored: Z(t), steadied or as it is."""
        Z = self.at(step)
        if self.steadiness is None or not self.steadied:
            return Z
        mean, share = self.steadiness()
        return np.asarray(mean + share[:, None] * (Z - mean), dtype=np.float32)

    def vectors(self, step: int) -> Float32s:
        """Return Z(t)."""
        return self.at(step)

    def score(self, step: int, i: Rows, j: Rows) -> Floats:
        """Return Z_i(t)·v_j / ‖Z_i(t)‖^power, or the mean of it and the same of (j, i)."""
        return projected_scores(self.read(step), self.basis, i, j, self.directed, self.power)


def projected_scores(
    Z: Float32s,
    V: Float32s,
    i: Rows,
    j: Rows,
    directed: bool,
    power: float = ACTIVITY_POWER,
    own: Floats | None = None,
) -> Floats:
    """Return the scores of pairs at one step.

    (Z_i·v_j + own_ij) / ‖Z_i‖^power; on undirected graphs the mean of it and the same of (j, i).

    Parameters
    ----------
    Z, V
        Vectors of the step, and the basis.
    i, j
        The pairs.
    own
        What a pair's own entries tell of its rate at this step, beside the low rank.
    """
    sizes = np.linalg.norm(Z, axis=1).astype(np.float64) ** power
    weights = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    rate = np.zeros(len(i)) if own is None else own
    scores = (np.einsum("pr,pr->p", Z[i], V[j]) + rate) * weights[i]
    if not directed:
        scores = (scores + (np.einsum("pr,pr->p", Z[j], V[i]) + rate) * weights[j]) / 2
    return np.asarray(scores, dtype=np.float64)


def fit_filter(tensor: TemporalTensor, options: FitSettings, strength: float | None) -> VectorsInTime:
    """Fit ours: the common basis of the sum, and the filter in time."""
    (zero,) = solve_slices(tensor, [0], options.changed(rank=min(options.rank, tensor.n_nodes)))
    return filter_in_time(tensor, np.asarray(common_basis(zero).V), strength)


def filter_in_time(
    tensor: TemporalTensor, V: Float32s, strength: float | None = None, *, causal: bool = False
) -> Projected:
    """Filter the rows of a graph in time, on a basis."""
    rows, kernel = learn_filter(tensor, V, causal=causal, strength=1.0 if strength is None else strength)
    found = Filtered(rows, kernel)
    steady = None if causal else found.steadiness
    return Projected(found, V, tensor.directed, ACTIVITY_POWER, steady)


class Filtered:
    """Steps of the filter; neighbouring steps are made at once, and the last ones kept."""

    def __init__(self, rows: ActiveRows, kernel: TimeKernel) -> None:
        self.rows, self.kernel = rows, kernel
        self._size = max(1, KEPT_BYTES // max(1, 4 * rows.n_nodes * rows.rank))
        self._first, self._kept = -1, np.empty(0, dtype=np.float32)

    def __call__(self, step: int) -> Float32s:
        """Return Z(t)."""
        first = step - step % self._size
        if first != self._first:
            steps = np.arange(first, min(first + self._size, self.rows.n_steps))
            Z = filter_rows(self.rows, self.kernel, steps)
            self._first, self._kept = first, np.ascontiguousarray(Z.transpose(1, 0, 2), dtype=np.float32)
        return np.asarray(self._kept[step - first])

    @cached_property
    def _steadiness(self) -> tuple[Floats, Floats]:
        return steadiness(self.rows, self.kernel)

    def steadiness(self) -> tuple[Floats, Floats]:
        """Return every node's mean vector, and the share of its movement that is its own."""
        return self._steadiness


@dataclass(frozen=True, eq=False)
class WithPairs:
    """Scores with the memory of known pairs: the low rank, and the pair's own filtered entries beside it."""

    base: Projected
    pairs: PairFilter

    def scored(self, power: float) -> WithPairs:
        """Return it with another power; beside a pair's own rate, steadied vectors tell no more."""
        return replace(self, base=self.base.scored(power))

    def vectors(self, step: int) -> Float32s:
        """Return Z(t): a pair's memory is no part of a vector."""
        return self.base.vectors(step)

    def score(self, step: int, i: Rows, j: Rows) -> Floats:
        """Return the score of the low rank, plus the pair's own rate in the same units."""
        base = self.base
        Z, own = base.at(step), self.pairs.at(step, i, j)
        return projected_scores(Z, base.basis, i, j, base.directed, base.power, own)


def fit_filter_pairs(tensor: TemporalTensor, options: FitSettings, strength: float | None) -> VectorsInTime:
    """Fit ours, and the filter of the pairs."""
    base = fit_filter(tensor, options, strength)
    assert isinstance(base, Projected)
    return WithPairs(base, PairFilter.learn(tensor, strength=1.0 if strength is None else strength))


def fit_als(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit the paper's slices at the frequencies that stand out of the noise, in the common basis."""
    options = options.changed(rank=min(options.rank, tensor.n_nodes))
    (zero,) = solve_slices(tensor, [0], options)
    basis = common_basis(zero)
    chosen = choose_freqs(tensor, "auto", basis).freqs
    slices = {0: zero} | {f.k: f for f in solve_slices(tensor, [k for k in chosen if k], options)}
    Z = trajectory(slices, basis.V, tensor.n_steps)
    return Projected(lambda step: np.asarray(Z[step]), np.asarray(basis.V), tensor.directed, ACTIVITY_POWER)


def fit_uase(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit the unfolded adjacency spectral embedding (Gallagher, Jones, Rubin-Delanchy 2021).

    [X(1); …; X(T)] ≈ Y S Vᵀ; a node's vector at t is its row of X(t) V S^{−1/2}, the score (X(t) V Vᵀ)_ij.
    """
    stacked = _stack(tensor)
    V, S = _right_vectors(stacked.matrix, options)
    scale = np.divide(1.0, np.sqrt(S), out=np.zeros_like(S), where=S > 0)
    rows = project_rows(tensor, (V * scale).astype(np.float32))
    return Projected(_unsmoothed(rows), (V * np.sqrt(S)).astype(np.float32), tensor.directed)


def fit_ipp(tensor: TemporalTensor, options: FitSettings, bandwidth: float | None) -> VectorsInTime:
    """Fit intensity profile projection (Modell, Gallagher, Ceccherini, Whiteley, Rubin-Delanchy 2023).

    Λ(t) is X smoothed in time by a Gaussian of this many steps, V the leading eigenvectors of Σ_t Λ(t)ᵀΛ(t),
    and a node's vector at t its row of Λ(t) V.
    """
    width = 1.0 if bandwidth is None else bandwidth
    T = tensor.n_steps
    apart = np.subtract.outer(np.arange(T), np.arange(T))
    K = np.exp(-0.5 * np.square(apart / width))
    # A rate: what lies beyond the first and the last step is unknown, not empty.
    K = K / K.sum(axis=1, keepdims=True)
    stacked = _stack(tensor)
    # Λᵀ Λ = Bᵀ (KᵀK) B, B the stacked steps: only (node, step) with entries matter.
    B, smooth = stacked.matrix, stacked.blocks(K.T @ K)
    gram = sla.LinearOperator(
        (tensor.n_nodes, tensor.n_nodes),
        matvec=lambda v: np.asarray(B.T @ (smooth @ (B @ v))),
        matmat=lambda v: np.asarray(B.T @ (smooth @ (B @ v))),
        dtype=np.float64,
    )
    V = _leading_of(gram, options).astype(np.float32)
    rows = project_rows(tensor, V)
    kernel = K.astype(np.float32)
    starts = np.searchsorted(rows.node, np.arange(tensor.n_nodes + 1))

    def at(t: int) -> Float32s:
        shape = (tensor.n_nodes, len(rows.node))
        weights = sp.csr_matrix((kernel[t, rows.step], np.arange(len(rows.node)), starts), shape=shape)
        return np.asarray(weights @ rows.values, dtype=np.float32)

    return Projected(at, V, tensor.directed)


def fit_snapshot(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit a truncated SVD of every step alone: U·√S and V·√S."""
    stacked = _stack(tensor)

    def at(t: int) -> RoleVectors:
        here = stacked.step == t
        shape = (tensor.n_nodes, tensor.n_nodes)
        part = stacked.matrix[here].tocoo()
        X = sp.csr_matrix((part.data, (stacked.node[here][part.row], part.col)), shape=shape)
        V, S = _right_vectors(X, options)
        scale = np.divide(1.0, np.sqrt(S), out=np.zeros_like(S), where=S > 0)
        source, target = (X @ V) * scale, V * np.sqrt(S)
        return RoleVectors(source.astype(np.float32), target.astype(np.float32), np.ones(len(S)))

    return StepVectors(at)


def fit_static(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit the sum over time: the same vectors, X_0 V, and the same scores at every step."""
    (zero,) = solve_slices(tensor, [0], options.changed(rank=min(options.rank, tensor.n_nodes)))
    basis = common_basis(zero)
    Z = (basis.U * basis.S).astype(np.float32)
    return Projected(lambda step: Z, np.asarray(basis.V, dtype=np.float32), tensor.directed)


def pair_count(tensor: TemporalTensor, i: Rows, j: Rows) -> Floats:
    """Return the total of a pair over all steps."""
    totals = np.add.reduceat(tensor.values, tensor.tube_ptr[:-1]) if tensor.n_pairs else np.zeros(0)
    pair = find_pairs(tensor, i, j)
    return np.where(pair >= 0, np.append(totals, 0.0)[pair], 0.0)


@dataclass(frozen=True, eq=False)
class _Stacked:
    """[X(1); …; X(T)], only the rows that have entries, sorted by node, then step."""

    node: Rows
    step: Rows
    matrix: sp.csr_matrix[np.float64]

    def blocks(self, kernel: Floats) -> sp.csr_matrix[np.float64]:
        """Return kernel(s, s') between the rows of the same node, where it is not negligible."""
        least = NEGLIGIBLE * float(kernel.max())
        left, right = [np.arange(len(self.node))], [np.arange(len(self.node))]
        apart, first = 1, np.arange(len(self.node))
        while len(first):
            first = first[first + apart < len(self.node)]
            first = first[self.node[first + apart] == self.node[first]]
            near = first[kernel[self.step[first], self.step[first + apart]] > least]
            left += [near, near + apart]
            right += [near + apart, near]
            # A kernel that falls with the distance has nothing further on where it has nothing here.
            first, apart = near, apart + 1
        i, j = np.concatenate(left), np.concatenate(right)
        shape = (len(self.node), len(self.node))
        return sp.csr_matrix((kernel[self.step[i], self.step[j]], (i, j)), shape=shape)


def _stack(tensor: TemporalTensor) -> _Stacked:
    pair = tensor.entry_pairs
    key = tensor.sources[pair].astype(np.int64) * tensor.n_steps + tensor.steps
    active, row = np.unique(key, return_inverse=True)
    shape = (len(active), tensor.n_nodes)
    matrix = sp.csr_matrix((tensor.values, (row, tensor.indices[pair])), shape=shape)
    node, step = np.divmod(active, tensor.n_steps)
    return _Stacked(node, step, matrix)


def _unsmoothed(rows: ActiveRows) -> Callable[[int], Float32s]:
    def at(t: int) -> Float32s:
        here = rows.step == t
        Z = np.zeros((rows.n_nodes, rows.rank), dtype=np.float32)
        Z[rows.node[here]] = rows.values[here]
        return Z

    return at


def _right_vectors(matrix: sp.csr_matrix[np.float64], options: FitSettings) -> tuple[Floats, Floats]:
    """Return V, S of the leading right singular vectors, largest first."""
    gram = sp.csr_matrix(matrix.T @ matrix)
    V = _leading_of(gram, options)
    return V, np.sqrt(np.maximum(np.einsum("nr,nr->r", V, np.asarray(gram @ V)), 0.0))


def _leading_of(gram: sp.csr_matrix[np.float64] | sla.LinearOperator, options: FitSettings) -> Floats:
    """Return the leading eigenvectors of a symmetric positive matrix, largest first."""
    n = int(gram.shape[0])
    rank = min(options.rank, n)
    if rank > 0.2 * n or n < 3:
        values, vectors = np.linalg.eigh(np.asarray(gram @ np.eye(n)))
    else:
        start = np.random.default_rng(options.seed).standard_normal(n)
        values, vectors = sla.eigsh(gram, k=rank, v0=start, tol=1e-4)
    return np.asarray(vectors[:, np.argsort(-values)[:rank]])
