"""The trajectory as a filter in time: a vector per node and step, without solving any other slice (fact 9).

With V the common basis and y_i(t) = Σ_j X(i,j,t) V_j, a node's vector at a step is a smoothed y_i. The gain
of frequency k in direction l is Wiener's,

    g_kl = max(0, 1 − β·N_l / E_kl),    E_kl = Σ_i |ŷ_il(k)|²,    N_l = Σ_entries w²·V_jl²

where N_l is exactly what unrelated events leave in direction l at every frequency: a noise floor that is
known, not fitted. Gains are a kernel in time, κ_l = irfft(g_·l), so that

    Z_i(t)_l = Σ over the entries (i, j, s) of node i of  w·V_jl·H_l(t, s)

The mean over time is set aside and the rest is transformed at twice the length, so the last step does not
speak of the first; Σ_t Z_i(t) = Σ_t y_i(t) holds exactly. The causal kernel uses nothing after t, its gains
included.

Blocks of nodes: energies of a block (F×r numbers, summed over blocks) first, then the rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import scipy.fft
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Numbers of rows×steps that are transformed at once.
BLOCK_NUMBERS = 1 << 22
# Nanoseconds per direction: of an FFT per number and log2 of its length, and of two active steps of one row;
# measured on email and fb-forum by days and mathoverflow by weeks: .22 to .25, and 2.5 to 3.1.
FFT_COST, LAG_COST = 0.23, 2.8
# Nanoseconds per direction and step: of an active (node, step) in a sparse product, and of any in a dense
# one; measured on the same graphs in single precision: 1.1 to 1.3, and .021 to .024.
SPARSE_COST, DENSE_COST = 1.2, 0.022
# Nanoseconds per direction and number of H, which both products need: what decides for one node. Measured
# with 165, 336 and 804 steps: 2.2, 6.4 and 4.0.
MATRIX_COST = 4.0
# Up to this many steps are made one by one.
FEW_STEPS = 4
# The causal gains are learnt again when the past has grown by this share. They then never change.
EPOCH_GROWTH = 1.25


@dataclass(frozen=True, eq=False)
class ActiveRows:
    """y_i(t) of a block of nodes, where a node has entries at a step.

    Attributes
    ----------
    node, step : (R,), sorted by node, then step; nodes count from the start of the block
    values : (R, r), y
    noise : (R, r), Σ_j X(i,j,t)²·V_jl²: the variance of y_i(t)_l if its events were unrelated
    """

    n_nodes: int
    n_steps: int
    node: Ints
    step: Ints
    values: NDArray[np.floating[Any]]
    noise: NDArray[np.floating[Any]]

    @property
    def rank(self) -> int:
        """Number of directions."""
        return int(self.values.shape[1])

    def direction(self, c: int) -> sp.csr_matrix[Any]:
        """Return y of direction c as a sparse matrix, nodes×steps."""
        shape = (self.n_nodes, self.n_steps)
        starts = np.searchsorted(self.node, np.arange(self.n_nodes + 1))
        return sp.csr_matrix((self.values[:, c], self.step, starts), shape=shape, copy=False)

    def take(self, nodes: Ints) -> ActiveRows:
        """Return the rows of some nodes, which then count from 0 in this order."""
        starts = np.searchsorted(self.node, np.arange(self.n_nodes + 1))
        counts = np.diff(starts)[nodes]
        first = np.repeat(starts[nodes] - np.cumsum(counts) + counts, counts)
        at = first + np.arange(counts.sum())
        node = np.repeat(np.arange(len(nodes)), counts)
        return ActiveRows(len(nodes), self.n_steps, node, self.step[at], self.values[at], self.noise[at])

    def until(self, step: int) -> ActiveRows:
        """Return the rows before this step alone."""
        kept = self.step < step
        return ActiveRows(
            self.n_nodes, step, self.node[kept], self.step[kept], self.values[kept], self.noise[kept]
        )


def project_rows(block: TemporalTensor, V: Any) -> ActiveRows:
    """Multiply the entries of a block of nodes by the basis.

    Parameters
    ----------
    block
        The tensor of some sources (`TemporalTensor.take_rows`), or of all.
    V : (n, r)
        The basis, of all nodes, or what gives rows of it by their numbers: only the rows of targets are read.
    """
    pair = block.entry_pairs
    entries = NodeEntries(
        block.n_nodes,
        block.n_steps,
        block.sources[pair].astype(np.int64),
        np.asarray(block.indices)[pair],
        np.asarray(block.steps),
        np.asarray(block.values, dtype=np.float64),
    )
    return entries.project(lambda targets: V[targets])


@dataclass(frozen=True, eq=False)
class NodeEntries:
    """Entries (node, target, step, value) of a block of nodes, sorted by node."""

    n_nodes: int
    n_steps: int
    node: Ints
    target: Ints
    step: Ints
    value: NDArray[np.floating[Any]]

    def project(self, take: Callable[[Ints], Tall], *, noise: bool = True) -> ActiveRows:
        """Multiply them by a basis, of which `take` gives the rows of some targets.

        Vectors alone need no noise: without it, which takes as long as they do, it has no columns.
        """
        targets, column = np.unique(self.target, return_inverse=True)
        V = np.asarray(take(targets))
        active, row = np.unique(self.node.astype(np.int64) * self.n_steps + self.step, return_inverse=True)
        order = np.argsort(row, kind="stable")
        starts = np.searchsorted(row[order], np.arange(len(active) + 1))
        value, column, shape = self.value[order].astype(np.float64), column[order], (len(active), len(V))
        y = sp.csr_matrix((value.astype(V.dtype), column, starts), shape=shape, copy=False) @ V
        # Squares of what single precision holds need double.
        squares = sp.csr_matrix((np.square(value), column, starts), shape=shape, copy=False)
        levels = np.asarray(squares @ np.square(V[:, slice(None if noise else 0)], dtype=np.float64))
        node, step = np.divmod(active, self.n_steps)
        return ActiveRows(self.n_nodes, self.n_steps, node, step, np.asarray(y), levels)


@dataclass(frozen=True, eq=False)
class Energies:
    """What the gains come from; those of blocks add up.

    Attributes
    ----------
    signal : (F, r), E_kl of the deviations from the mean, transformed at the length `padded_length`
    noise : (r,), N_l
    """

    signal: Floats
    noise: Floats

    def __add__(self, other: Energies) -> Energies:
        return Energies(self.signal + other.signal, self.noise + other.noise)


def padded_length(n_steps: int) -> int:
    """Return the length of the transform: no lag of the window wraps around."""
    return int(scipy.fft.next_fast_len(max(2 * n_steps - 1, 1), real=True))


def block_energies(rows: ActiveRows) -> Energies:
    """Return the energies of a block: E_kl = Σ_i |rfft(y_il − mean)|², N_l.

    By an FFT of every row, or, where rows have few active steps, from the products of two of them: energies
    are the transform of the autocorrelation.
    """
    noise = rows.noise.sum(axis=0, dtype=np.float64)
    counts = np.bincount(rows.node, minlength=1).astype(np.float64)
    length = padded_length(rows.n_steps)
    fft = FFT_COST * np.count_nonzero(counts) * length * np.log2(max(length, 2))
    if LAG_COST * float((counts * (counts - 1)).sum()) / 2 <= fft:
        return Energies(_lag_energies(rows, length), noise)
    return Energies(_fft_energies(rows, length), noise)


def _lag_energies(rows: ActiveRows, length: int) -> Floats:
    T = rows.n_steps
    lags = np.zeros((T, rows.rank))
    size = max(1, BLOCK_NUMBERS // max(rows.rank, 1))
    lags[0] = np.square(rows.values, dtype=np.float64).sum(axis=0)
    first, apart = np.arange(len(rows.node)), 1
    while len(first):
        first = first[first + apart < len(rows.node)]
        first = first[rows.node[first + apart] == rows.node[first]]
        for start in range(0, len(first), size):
            one = first[start : start + size]
            two = one + apart
            products = rows.values[one].astype(np.float64) * rows.values[two]
            lags += _sum_by(rows.step[two] - rows.step[one], products, T)
        apart += 1
    # Of deviations from the mean m_i: y y' becomes y y' − m_i (y + y') + m_i², over T − lag pairs of steps.
    starts = np.searchsorted(rows.node, np.arange(rows.n_nodes + 1))
    ones = np.ones(len(rows.node))
    by_node = sp.csr_matrix((ones, np.arange(len(ones)), starts), shape=(rows.n_nodes, len(ones)))
    means = np.asarray(by_node @ rows.values, dtype=np.float64) / T
    cross = np.zeros((T + 1, rows.rank))
    np.cumsum(_sum_by(rows.step, means[rows.node] * rows.values, T), axis=0, out=cross[1:])
    lag = np.arange(T)
    lags -= cross[T - lag] + cross[T] - cross[lag]
    lags += (T - lag)[:, None] * (cross[T] / T)
    return np.maximum(scipy.fft.rfft(_circular(lags, length), axis=0).real, 0.0)


def _sum_by(key: Ints, values: NDArray[Any], count: int) -> Floats:
    """Return the sums of the rows of each key, (count, columns)."""
    order = np.arange(len(key))
    ones = np.ones(len(key))
    return np.asarray(
        sp.csr_matrix((ones, (key, order)), shape=(count, len(key))) @ values.astype(np.float64)
    )


def _fft_energies(rows: ActiveRows, length: int) -> Floats:
    signal = np.zeros((length // 2 + 1, rows.rank))
    size = max(1, BLOCK_NUMBERS // length)
    # Of nodes without entries nothing comes.
    present = np.unique(rows.node)
    # Energies are squares: in single precision they are taken of numbers up to 1.
    scale = float(np.abs(rows.values).max(initial=0.0)) or 1.0
    for c in range(rows.rank):
        y = rows.direction(c)
        for start in range(0, len(present), size):
            part = y[present[start : start + size]].toarray()
            part /= scale
            part -= part.mean(axis=1, keepdims=True)
            hat = scipy.fft.rfft(part, length, axis=1)
            signal[:, c] += (np.square(hat.real) + np.square(hat.imag)).sum(axis=0, dtype=np.float64)
    return signal * scale**2


def gains(energies: Energies, strength: float = 1.0) -> Floats:
    """Return g_kl = max(0, 1 − β·N_l/E_kl), (F, r); zero where there is no energy.

    Parameters
    ----------
    energies
        Of all nodes.
    strength
        β: 1 reconstructs best, more is steadier; as it grows, every vector becomes the mean over time.
    """
    signal, floor = energies.signal, strength * energies.noise
    ratio = np.divide(floor, signal, out=np.ones_like(signal), where=signal > 0)
    return np.maximum(0.0, 1.0 - ratio)


def epochs(n_steps: int, causal: bool) -> tuple[int, ...]:
    """Return the moments (number of steps that are over) at which gains are learnt.

    Two-sided: once, from all steps. Causal: again whenever the past has grown by a quarter.

    Examples
    --------
    >>> epochs(10, causal=False)
    (10,)
    >>> epochs(10, causal=True)
    (1, 2, 3, 4, 5, 7, 9)
    """
    if not causal:
        return (n_steps,)
    found, at = [], 1
    while at <= n_steps:
        found.append(at)
        at = max(at + 1, int(np.ceil(at * EPOCH_GROWTH)))
    return tuple(found)


@dataclass(frozen=True, eq=False)
class TimeKernel:
    """H_l(t, s): how much an entry at step s counts at step t, in direction l.

    Two-sided, κ about the mean of all steps, both sides centred, so that every column sums to 1:

        H(t, s) = κ(t−s) − a(t) − a(s) + mean(a) + 1/T,    a(t) = mean_s κ(t−s)

    Causal, for s ≤ t only, about the mean of the past, κ⁺ = κ at lag 0 and 2κ beyond:

        H(t, s) = κ⁺(t−s) + (1 − Σ_{u≤t} κ⁺(t−u)) / (t+1)

    Parameters
    ----------
    lags : (epochs, T, r)
        κ_l at lags 0 … T−1, of every epoch; it is symmetric.
    epochs : (epochs,)
        From how many steps each was learnt; step t uses the last with at most t+1. Two-sided: one, T.
    causal
        Whether nothing after a step counts.
    """

    lags: Floats
    epochs: tuple[int, ...]
    causal: bool

    @property
    def n_steps(self) -> int:
        """T."""
        return int(self.lags.shape[1])

    @property
    def rank(self) -> int:
        """Number of directions."""
        return int(self.lags.shape[2])

    @classmethod
    def learn(cls, energies: Sequence[Energies], n_steps: int, causal: bool, strength: float) -> TimeKernel:
        """Turn the energies of every epoch into kernels."""
        moments = epochs(n_steps, causal)
        rank = len(energies[0].noise)
        lags = np.zeros((len(moments), n_steps, rank))
        for at, (moment, found) in enumerate(zip(moments, energies, strict=True)):
            length = padded_length(moment)
            lags[at, :moment] = scipy.fft.irfft(gains(found, strength), length, axis=0)[:moment]
        return cls(lags, moments, causal)

    @cached_property
    def _means(self) -> Floats:
        """a(t) = mean_s κ(t−s), (T, r), of the two-sided kernel."""
        # Σ_s κ(t−s) is the sum of the lags 0 … t, and of the lags 1 … T−1−t.
        sums = np.cumsum(self.lags[0], axis=0)
        return np.asarray((sums + sums[::-1] - self.lags[0, 0]) / self.n_steps)

    def matrix(self, c: int, steps: Ints) -> Floats:
        """Return H of direction c at some steps, (len(steps), T)."""
        t, s = np.asarray(steps)[:, None], np.arange(self.n_steps)[None]
        if not self.causal:
            a = self._means[:, c]
            return np.asarray(self.lags[0, np.abs(t - s), c] - a[t] - a[s] + a.mean() + 1 / self.n_steps)
        epoch = np.searchsorted(self.epochs, np.asarray(steps) + 1, side="right") - 1
        lag = t - s
        H = np.where(lag >= 0, self.lags[epoch[:, None], np.abs(lag), c], 0.0)
        H *= np.where(lag > 0, 2.0, 1.0)
        rest = (1.0 - H.sum(axis=1)) / (np.asarray(steps) + 1)
        return np.asarray(H + np.where(lag >= 0, rest[:, None], 0.0))

    def weights(self, step: int) -> Floats:
        """Return H of all directions at one step, (T, r)."""
        T, s = self.n_steps, np.arange(self.n_steps)
        if not self.causal:
            a = self._means
            return np.asarray(self.lags[0, np.abs(step - s)] - a[step] - a + a.mean(axis=0) + 1 / T)
        epoch = int(np.searchsorted(self.epochs, step + 1, side="right")) - 1
        H = np.zeros((T, self.rank))
        H[: step + 1] = self.lags[epoch, step::-1] if step else self.lags[epoch, :1]
        H[:step] *= 2.0
        H[: step + 1] += (1.0 - H.sum(axis=0)) / (step + 1)
        return H

    @cached_property
    def spread(self) -> Floats:
        """Σ_s H_l(t, s)², (T, r): how much of a constant noise reaches a step."""
        T = self.n_steps
        if self.causal:
            return np.stack([np.square(self.weights(t)).sum(axis=0) for t in range(T)])
        # H(t, s) = κ(t−s) − a(s) + b(t), squared and summed over s term by term.
        kappa, a = self.lags[0], self._means
        b = a.mean(axis=0) + 1 / T - a
        squares = np.cumsum(np.square(kappa), axis=0)
        length = padded_length(T)
        hats = scipy.fft.rfft(_circular(kappa, length), axis=0) * scipy.fft.rfft(a, length, axis=0)
        cross = scipy.fft.irfft(hats, length, axis=0)[:T]
        found = squares + squares[::-1] - np.square(kappa[0]) + np.square(a).sum(axis=0) - 2 * cross
        return np.asarray(np.maximum(found + T * b**2 + 2 * b * (T * a - a.sum(axis=0)), 0.0))


def learn_kernel(
    blocks: Iterable[ActiveRows], n_steps: int, *, causal: bool = False, strength: float = 1.0
) -> TimeKernel:
    """Learn the kernel from the rows of all blocks."""
    found: list[Energies] = []
    for rows in blocks:
        found = add_energies(found, epoch_energies(rows, causal))
    return TimeKernel.learn(found, n_steps, causal, strength)


def epoch_energies(rows: ActiveRows, causal: bool) -> list[Energies]:
    """Return the energies of a block at every epoch."""
    moments = epochs(rows.n_steps, causal)
    return [block_energies(rows if at == rows.n_steps else rows.until(at)) for at in moments]


def add_energies(left: Sequence[Energies], right: Sequence[Energies]) -> list[Energies]:
    """Add the energies of two blocks, epoch by epoch; an empty list counts as zero."""
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)


def filter_rows(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[Any]:
    """Return the vectors of a block's nodes at some steps, (n_nodes, len(steps), r).

    Z_l = Y_l H_lᵀ: of few steps by weights of the active rows, else by a product per direction, sparse or
    dense, or by transforms of whole rows; whichever is cheapest.
    """
    T, asked, active = rows.n_steps, len(steps), len(rows.node)
    out = np.zeros((rows.n_nodes, asked, rows.rank), dtype=rows.values.dtype)
    if not active:
        return out
    present, starts = np.unique(rows.node, return_index=True)
    if asked <= FEW_STEPS:
        for at, step in enumerate(steps):
            weights = kernel.weights(int(step)).astype(out.dtype)
            out[present, at] = np.add.reduceat(rows.values * weights[rows.step], starts, axis=0)
        return out
    length = padded_length(T)
    matrix = MATRIX_COST * T * asked
    costs = {
        "sparse": SPARSE_COST * active * asked + matrix,
        "dense": DENSE_COST * len(present) * T * asked + matrix,
        "fft": np.inf if kernel.causal else 3 * FFT_COST * len(present) * length * np.log2(max(length, 2)),
    }
    how = min(costs, key=lambda name: costs[name])
    size = max(1, BLOCK_NUMBERS // length)
    for c in range(rows.rank):
        y = rows.direction(c)
        if how == "fft":
            hat = scipy.fft.rfft(_circular(kernel.lags[0, :, c], length)).real.astype(out.dtype)
            for start in range(0, len(present), size):
                nodes = present[start : start + size]
                out[nodes, :, c] = _filter_by_fft(y[nodes].toarray(), hat, length)[:, steps]
        else:
            H = kernel.matrix(c, steps).astype(out.dtype)
            out[present, :, c] = (y[present].toarray() if how == "dense" else y[present]) @ H.T
    return out


def _circular(lags: Floats, length: int) -> Floats:
    """Return the even sequence of a length whose first half are these lags."""
    T = len(lags)
    found = np.zeros((length, *lags.shape[1:]))
    found[:T] = lags
    found[length - T + 1 :] += lags[:0:-1]
    return found


def _filter_by_fft(y: NDArray[Any], hat: NDArray[Any], length: int) -> NDArray[Any]:
    """Return mean + P K (y − mean), of whole rows."""
    mean = y.mean(axis=1, keepdims=True)
    moved = scipy.fft.irfft(scipy.fft.rfft(y - mean, length, axis=1) * hat, length, axis=1)[:, : y.shape[1]]
    return np.asarray(mean + moved - moved.mean(axis=1, keepdims=True), dtype=y.dtype)


def noise_levels(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[np.float32]:
    """Return the noise of every vector, (n_nodes, len(steps)): its length if the events were unrelated.

    noise_i(t)² = Σ_l N_il·Σ_s H_l(t, s)², with N_il = Σ over the node's entries of w²·V_jl² / T: the variance
    that its own events would leave if each had come at any step, alone.
    """
    own = np.zeros((rows.n_nodes, rows.rank))
    np.add.at(own, rows.node, rows.noise)
    return np.sqrt(own / max(rows.n_steps, 1) @ kernel.spread[steps].T).astype(np.float32)


def find_pairs(tensor: TemporalTensor, i: Ints, j: Ints) -> NDArray[np.int64]:
    """Return the number of each pair in the order of the pattern; −1 where it never occurs."""
    known = tensor.sources.astype(np.int64) * tensor.n_nodes + tensor.indices
    asked = np.asarray(i, dtype=np.int64) * tensor.n_nodes + np.asarray(j, dtype=np.int64)
    if not len(known):
        return np.full(len(asked), -1)
    at = np.minimum(np.searchsorted(known, asked), len(known) - 1)
    return np.where(known[at] == asked, at, -1)


@dataclass(frozen=True, eq=False)
class PairFilter:
    """A known pair's own rate in time: its tube, filtered with the gain pooled over all pairs.

    g_k = max(0, 1 − β·Σ w² / Σ_pairs |x_k|²): both this and the low rank estimate the entry of a pair.
    """

    tensor: TemporalTensor
    kernel: TimeKernel

    @classmethod
    def learn(cls, tensor: TemporalTensor, *, causal: bool = False, strength: float = 1.0) -> PairFilter:
        """Learn the kernel of the pairs."""
        values = np.asarray(tensor.values, dtype=np.float64)[:, None]
        sizes = (tensor.n_pairs, tensor.n_steps, tensor.entry_pairs, np.asarray(tensor.steps))
        rows = ActiveRows(*sizes, values, np.square(values))
        return cls(tensor, learn_kernel([rows], tensor.n_steps, causal=causal, strength=strength))

    def at(self, step: int, i: Ints, j: Ints) -> Floats:
        """Return the filtered entries of pairs at a step; 0 for pairs that never occur."""
        found, asked = np.zeros(len(i)), find_pairs(self.tensor, i, j)
        known = asked >= 0
        H = self.kernel.weights(step)[:, 0]
        found[known] = np.asarray(self.tensor.tubes[asked[known]] @ H)
        return found
