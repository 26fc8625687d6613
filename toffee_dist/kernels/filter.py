"""The trajectory as a filter in time: a vector per node and step, without solving any other slice (fact 9).

With V the common basis and y_i(t) = Σ_j X(i,j,t) V_j, a node's vector at a step is a smoothed y_i. The gain
of frequency k in direction l is Wiener's,

    g_kl = max(0, 1 − β·N_l / E_kl),    E_kl = Σ_i |ŷ_il(k)|²,    N_l = Σ_entries w²·V_jl²

where N_l is exactly what unrelated events leave in direction l at every frequency: a noise floor that is
known, not fitted. Gains are a kernel in time, κ_l = irfft(g_·l), so that

    Z_i(t)_l = Σ over the entries (i, j, s) of node i of  w·V_jl·H_l(t, s)

The mean over time, and patterns in time that many nodes share (`kernels.patterns`), are set aside, each with
a gain of its own; the rest is transformed at twice the length, so the last step does not speak of the first.
Σ_t Z_i(t) = Σ_t y_i(t) holds exactly. The causal kernel uses nothing after t, its gains included, and no
patterns. A causal chain appends steps: its kernel reaches back as far as its window is long, so that the
entries of two windows are all that a vector of the last one needs.

Blocks of nodes: energies of a block (F×r numbers, summed over blocks) first, then the rows of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
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

    def between(self, start: int, stop: int) -> ActiveRows:
        """Return the rows of the steps [start, stop) alone, which then count from 0."""
        if (start, stop) == (0, self.n_steps):
            return self
        kept = (self.step >= start) & (self.step < stop)
        columns = (self.node[kept], self.step[kept] - start, self.values[kept], self.noise[kept])
        return ActiveRows(self.n_nodes, stop - start, *columns)


def project_rows(block: TemporalTensor, V: Any) -> ActiveRows:
    """Multiply the entries of a block of nodes by the basis.

    Parameters
    ----------
    block
        The tensor of some sources (`TemporalTensor.take_rows`), or of all.
    V : (n, r)
        The basis, of all nodes, or what gives rows of it by their numbers: only the rows of targets are read.
    """
    return NodeEntries.of(block).project(lambda targets: V[targets])


@dataclass(frozen=True, eq=False)
class NodeEntries:
    """Entries (node, target, step, value) of a block of nodes, sorted by node, target and step."""

    n_nodes: int
    n_steps: int
    node: Ints
    target: Ints
    step: Ints
    value: NDArray[np.floating[Any]]

    @classmethod
    def of(cls, block: TemporalTensor) -> NodeEntries:
        """Return the entries of a tensor of some sources, or of all."""
        pair = block.entry_pairs
        return cls(
            block.n_nodes,
            block.n_steps,
            block.sources[pair].astype(np.int64),
            np.asarray(block.indices)[pair],
            np.asarray(block.steps),
            np.asarray(block.values, dtype=np.float64),
        )

    def since(self, step: int) -> NodeEntries:
        """Return those of this step or later; steps count as before."""
        late = self.step >= step
        columns = (self.node[late], self.target[late], self.step[late], self.value[late])
        return NodeEntries(self.n_nodes, self.n_steps, *columns)

    def pairs(self) -> ActiveRows:
        """Return the entries of every pair, a row each, as if there were one direction."""
        new = np.append(True, (np.diff(self.node) != 0) | (np.diff(self.target) != 0))[: len(self.node)]
        value = self.value[:, None].astype(np.float64)
        return ActiveRows(
            int(new.sum()), self.n_steps, np.cumsum(new) - 1, self.step, value, np.square(value)
        )

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
    signal : (F, r), E_kl of what is left without mean and patterns, at the length `padded_length`
    noise : (r,), N_l
    pattern_signal, pattern_noise : (q, r), the same of every pattern
    """

    signal: Floats
    noise: Floats
    pattern_signal: Floats
    pattern_noise: Floats

    def __add__(self, other: Energies) -> Energies:
        return Energies(
            self.signal + other.signal,
            self.noise + other.noise,
            self.pattern_signal + other.pattern_signal,
            self.pattern_noise + other.pattern_noise,
        )


def with_mean(patterns: Floats) -> Floats:
    """Return what is set aside: the mean, then the patterns, (T, q + 1)."""
    T = len(patterns)
    return np.column_stack([np.full(T, 1 / np.sqrt(max(T, 1))), patterns])


def no_patterns(n_steps: int) -> Floats:
    """Return the patterns of a window that has none, (T, 0)."""
    return np.zeros((n_steps, 0))


def padded_length(n_steps: int) -> int:
    """Return the length of the transform: no lag of the window wraps around."""
    return int(scipy.fft.next_fast_len(max(2 * n_steps - 1, 1), real=True))


def block_energies(rows: ActiveRows, patterns: Floats | None = None) -> Energies:
    """Return the energies of a block: E_kl = Σ_i |rfft(y_il − mean − patterns)|², N_l, and of the patterns.

    By an FFT of every row, or, where rows have few active steps, from the products of two of them: energies
    are the transform of the autocorrelation.
    """
    if patterns is None:
        patterns = no_patterns(rows.n_steps)
    counts = np.bincount(rows.node, minlength=1).astype(np.float64)
    length = padded_length(rows.n_steps)
    fft = FFT_COST * np.count_nonzero(counts) * length * np.log2(max(length, 2))
    by_lags = LAG_COST * float((counts * (counts - 1)).sum()) / 2 <= fft
    signal, aside = (_lag_energies if by_lags else _fft_energies)(rows, with_mean(patterns), length)
    noise = rows.noise.sum(axis=0, dtype=np.float64)
    own = np.square(patterns).T @ _sum_by(rows.step, rows.noise, rows.n_steps)
    return Energies(signal, noise, aside[1:], np.asarray(own))


def _lag_energies(rows: ActiveRows, aside: Floats, length: int) -> tuple[Floats, Floats]:
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
    signal = scipy.fft.rfft(_circular(lags, length), axis=0).real
    # |ŷ − Σ_m c_m b̂_m|² = |ŷ|² − 2 Re Σ_m conj(b̂_m) ŷ c_m + |Σ_m c_m b̂_m|², summed over nodes.
    starts = np.searchsorted(rows.node, np.arange(rows.n_nodes + 1))
    shape = (rows.n_nodes, len(rows.node))
    shares = []
    hats = scipy.fft.rfft(aside, length, axis=0)
    for m in range(aside.shape[1]):
        by_node = sp.csr_matrix((aside[rows.step, m], np.arange(shape[1]), starts), shape=shape)
        shares.append(np.asarray(by_node @ rows.values, dtype=np.float64))
        crossed = scipy.fft.rfft(_sum_by(rows.step, shares[m][rows.node] * rows.values, T), length, axis=0)
        signal -= 2 * (hats[:, m, None].conj() * crossed).real
    for m, one in enumerate(shares):
        for other, two in enumerate(shares):
            signal += np.outer((hats[:, m].conj() * hats[:, other]).real, (one * two).sum(axis=0))
    return np.maximum(signal, 0.0), np.stack([np.square(share).sum(axis=0) for share in shares])


def _sum_by(key: Ints, values: NDArray[Any], count: int) -> Floats:
    """Return the sums of the rows of each key, (count, columns)."""
    order = np.arange(len(key))
    ones = np.ones(len(key))
    return np.asarray(
        sp.csr_matrix((ones, (key, order)), shape=(count, len(key))) @ values.astype(np.float64)
    )


def _fft_energies(rows: ActiveRows, aside: Floats, length: int) -> tuple[Floats, Floats]:
    signal = np.zeros((length // 2 + 1, rows.rank))
    own = np.zeros((aside.shape[1], rows.rank))
    size = max(1, BLOCK_NUMBERS // length)
    # Of nodes without entries nothing comes.
    present = np.unique(rows.node)
    # Energies are squares: in single precision they are taken of numbers up to 1.
    scale = float(np.abs(rows.values).max(initial=0.0)) or 1.0
    B = aside.astype(rows.values.dtype)
    for c in range(rows.rank):
        y = rows.direction(c)
        for start in range(0, len(present), size):
            part = y[present[start : start + size]].toarray()
            part /= scale
            shares = part @ B
            part -= shares @ B.T
            hat = scipy.fft.rfft(part, length, axis=1)
            signal[:, c] += (np.square(hat.real) + np.square(hat.imag)).sum(axis=0, dtype=np.float64)
            own[:, c] += np.square(shares, dtype=np.float64).sum(axis=0)
    return signal * scale**2, own * scale**2


def gains(signal: Floats, noise: Floats, strength: float = 1.0) -> Floats:
    """Return g = max(0, 1 − β·N/E); zero where there is no energy.

    Parameters
    ----------
    signal, noise
        E and N, of all nodes.
    strength
        β: 1 reconstructs best, more is steadier; as it grows, every vector becomes the mean over time.
    """
    floor = strength * noise
    ratio = np.divide(floor, signal, out=np.ones_like(signal), where=signal > 0)
    return np.maximum(0.0, 1.0 - ratio)


def noise_left(patterns: Floats, length: int) -> Floats:
    """Return the share of noise that is left at every frequency without the patterns, (F, 1)."""
    hats = scipy.fft.rfft(patterns, length, axis=0)
    return np.asarray(1 - np.square(np.abs(hats)).sum(axis=1, keepdims=True) / max(len(patterns), 1))


@dataclass(frozen=True)
class Span:
    """The steps that the entries of a trajectory are of: its window and, of a causal chain, some before it.

    Parameters
    ----------
    window
        T. A causal chain, whose windows are all as long, reaches back as far.
    before
        Steps before the window.
    age
        Steps of the chain up to the end of the window; 0: the trajectory is of no chain.
    learnt
        The last moment of the chain at which gains were learnt before these steps came.
    """

    window: int
    before: int = 0
    age: int = 0
    learnt: int = 0

    @property
    def n_steps(self) -> int:
        """How many they are."""
        return self.before + self.window

    @property
    def first(self) -> int:
        """Steps of the chain before them all."""
        return self.age - self.n_steps if self.age else 0

    def append(self, new: int, learnt: int) -> Span:
        """Return the span after some new steps; what no step of its window reaches is left out.

        Examples
        --------
        >>> Span(4, age=4).append(3, 4), Span(4, age=4).append(3, 4).append(3, 7)
        (Span(window=4, before=3, age=7, learnt=4), Span(window=4, before=3, age=10, learnt=7))
        """
        age = self.age + new
        first = max(self.first, age - 2 * self.window + 1)
        return Span(self.window, age - self.window - first, age, learnt)

    def epochs(self, causal: bool) -> tuple[int, ...]:
        """Return the moments (number of steps that are over) at which gains are learnt.

        Two-sided: once, from all steps. Causal: again whenever the past, as far as the kernel reaches, has
        grown by a quarter, or a quarter of it is new.

        Examples
        --------
        >>> Span(10).epochs(causal=False)
        (10,)
        >>> Span(10).epochs(causal=True)
        (1, 2, 3, 4, 5, 7, 9)
        >>> Span(10, before=6, age=16, learnt=9).epochs(causal=True)
        (12, 15)
        """
        if not causal:
            return (self.window,)
        found, at = [], self.next_epoch(self.learnt)
        while at <= (self.age or self.window):
            found.append(at)
            at = self.next_epoch(at)
        return tuple(found)

    def next_epoch(self, moment: int) -> int:
        """Return the moment after this one at which causal gains are learnt."""
        return moment + max(1, math.ceil((EPOCH_GROWTH - 1) * min(moment, self.window)))

    def past(self, moment: int) -> tuple[int, int]:
        """Return the steps [start, stop) that are learnt from at a moment."""
        stop = moment - self.first
        return max(stop - self.window, 0), stop


@dataclass(frozen=True, eq=False)
class TimeKernel:
    """H_l(t, s): how much an entry at step s counts at step t, in direction l.

    Two-sided, with B the mean and the patterns, g their gains (1 of the mean), and K(t, s) = κ(t−s):

        H = B g Bᵀ + (I − BBᵀ) K (I − BBᵀ) = K − A Bᵀ − B Aᵀ + B C Bᵀ,    A = K B,   C = Bᵀ A + g

    Every column of it sums to 1.

    Causal, for the last n = min(t+1, T) steps up to t only, about their mean, κ⁺ = κ at lag 0 and 2κ beyond:

        H(t, s) = κ⁺(t−s) + (1 − Σ_{u<n} κ⁺(u)) / n

    with t counted from the first step of the chain.

    Parameters
    ----------
    lags : (epochs, T, r)
        κ_l at lags 0 … T−1, of every epoch; it is symmetric.
    epochs : (epochs,)
        The moments at which each was learnt; step t uses the last up to t+1. Two-sided: one, T.
    causal
        Whether nothing after a step counts.
    before, age
        Of a causal chain, as in `Span`; steps then count from the first of those before the window.
    patterns : (T, q)
        What is filtered as a whole beside the mean; a causal kernel has none.
    pattern_gains : (q, r)
        The gains of the patterns.
    """

    lags: Floats
    epochs: tuple[int, ...]
    causal: bool
    before: int = 0
    age: int = 0

    patterns: Floats | None = None
    pattern_gains: Floats | None = None

    @property
    def span(self) -> Span:
        """The steps that it is of."""
        return Span(int(self.lags.shape[1]), self.before, self.age)

    @property
    def n_steps(self) -> int:
        """T, and the steps before the window."""
        return self.span.n_steps

    @property
    def rank(self) -> int:
        """Number of directions."""
        return int(self.lags.shape[2])

    @classmethod
    def learn(
        cls,
        energies: Sequence[Energies],
        span: Span,
        causal: bool,
        strength: float,
        earlier: TimeKernel | None = None,
        patterns: Floats | None = None,
    ) -> TimeKernel:
        """Turn the energies of every epoch into kernels, beside those of the chain that are still used."""
        moments = span.epochs(causal)
        kept = [] if earlier is None else [earlier.lags]
        for moment, found in zip(moments, energies, strict=True):
            lags = np.zeros((1, span.window, len(found.noise)))
            steps = min(moment, span.window)
            length = padded_length(steps)
            left = 1.0 if causal or patterns is None else noise_left(patterns, length)
            floor = found.noise * left
            lags[0, :steps] = scipy.fft.irfft(gains(found.signal, floor, strength), length, axis=0)[:steps]
            kept.append(lags)
        if earlier is None:
            last = energies[-1]
            aside = (patterns, gains(last.pattern_signal, last.pattern_noise, strength))
            return cls(np.concatenate(kept), moments, causal, span.before, span.age, *aside)
        moments = earlier.epochs + moments
        used = int(np.searchsorted(moments, span.age - span.window + 1, side="right")) - 1
        return cls(np.concatenate(kept)[used:], moments[used:], causal, span.before, span.age)

    @property
    def aside(self) -> tuple[Floats, Floats]:
        """The patterns, (T, q), and their gains, (q, r); where there are none, with q = 0."""
        if self.patterns is None or self.pattern_gains is None:
            return no_patterns(self.n_steps), np.zeros((0, self.rank))
        return self.patterns, self.pattern_gains

    @cached_property
    def _aside(self) -> Floats:
        """B, (T, q + 1)."""
        return with_mean(self.aside[0])

    @cached_property
    def _gains(self) -> Floats:
        """The gains of the columns of B, (q + 1, r)."""
        return np.vstack([np.ones((1, self.rank)), self.aside[1]])

    def _smoothed(self, columns: Floats) -> Floats:
        """Return K times columns, (T, p, r), of every direction."""
        length = padded_length(self.n_steps)
        hat = scipy.fft.rfft(_circular(self.lags[0], length), axis=0)[:, None]
        return np.asarray(
            scipy.fft.irfft(hat * scipy.fft.rfft(columns, length, axis=0), length, axis=0)[: self.n_steps]
        )

    @cached_property
    def _around(self) -> tuple[Floats, Floats]:
        """A and B C − A, (T, q + 1, r): H is K, less A Bᵀ, plus B (B C − A)ᵀ."""
        B = self._aside
        A = self._smoothed(B[:, :, None])
        C = np.einsum("tm,tnr->mnr", B, A)
        C[np.diag_indices(len(C))] += self._gains
        return A, np.einsum("tm,mnr->tnr", B, C) - A

    def matrix(self, c: int, steps: Ints) -> Floats:
        """Return H of direction c at some steps, (len(steps), T)."""
        if self.causal:
            return self._causal(np.asarray(steps), c)
        t, s, B, (A, D) = np.asarray(steps)[:, None], np.arange(self.n_steps), self._aside, self._around
        return np.asarray(self.lags[0, np.abs(t - s), c] - A[steps, :, c] @ B.T + B[steps] @ D[:, :, c].T)

    def weights(self, step: int) -> Floats:
        """Return H of all directions at one step, (T, r)."""
        if self.causal:
            return np.asarray(self._causal(np.array([step]), slice(None))[0])
        s, B, (A, D) = np.arange(self.n_steps), self._aside, self._around
        around = np.einsum("m,smr->sr", B[step], D) - B @ A[step]
        return np.asarray(self.lags[0, np.abs(step - s)] + around)

    @cached_property
    def _one_sided(self) -> tuple[Floats, Floats]:
        """κ⁺ of every epoch and lag, and what is left for the mean of the last 1 … T steps, per step."""
        T = self.span.window
        kappa = self.lags * np.where(np.arange(T) > 0, 2.0, 1.0)[:, None]
        # A running sum: the same to the bit, wherever in a window a step is.
        return kappa, (1.0 - np.cumsum(kappa, axis=1)) / np.arange(1, T + 1)[:, None]

    def _causal(self, steps: Ints, c: int | slice) -> Floats:
        """Return H of some directions at some steps, (len(steps), n_steps), or with the directions last."""
        kappa, mean = self._one_sided
        over = self.span.first + steps + 1
        n = np.minimum(over, self.span.window)
        epoch = np.searchsorted(self.epochs, over, side="right") - 1
        lag = steps[:, None] - np.arange(self.n_steps)
        reached = (lag >= 0) & (lag < n[:, None])
        H = kappa[epoch[:, None], np.where(reached, lag, 0), c] + mean[epoch, n - 1, c][:, None]
        H[~reached] = 0.0
        return np.asarray(H)

    @cached_property
    def spread(self) -> Floats:
        """Σ_s H_l(t, s)², (T, r): how much of a constant noise reaches a step."""
        T = self.n_steps
        if self.causal:
            return np.stack([np.square(self.weights(t)).sum(axis=0) for t in range(T)])
        # H = K − A Bᵀ + B Dᵀ, squared and summed over s term by term; Bᵀ B = I and Bᵀ D = g.
        B, (A, D) = self._aside, self._around
        squares = np.cumsum(np.square(self.lags[0]), axis=0)
        found = squares + squares[::-1] - np.square(self.lags[0, 0]) - np.square(A).sum(axis=1)
        found += 2 * np.einsum("tm,tmr->tr", B, self._smoothed(D) - self._gains * A)
        found += np.einsum("tm,tn,mnr->tr", B, B, np.einsum("smr,snr->mnr", D, D))
        return np.asarray(np.maximum(found, 0.0))

    def filter_whole(self, y: NDArray[Any], c: int, length: int) -> NDArray[Any]:
        """Return H y of whole rows y, (n, T), by transforms."""
        B = self._aside.astype(y.dtype)
        hat = scipy.fft.rfft(_circular(self.lags[0, :, c], length)).real.astype(y.dtype)
        shares = y @ B
        rest = scipy.fft.rfft(y - shares @ B.T, length, axis=1)
        moved = scipy.fft.irfft(rest * hat, length, axis=1)[:, : self.n_steps]
        return np.asarray(moved + (shares * self._gains[:, c] - moved @ B) @ B.T, dtype=y.dtype)


def learn_kernel(
    blocks: Iterable[ActiveRows],
    n_steps: int,
    *,
    causal: bool = False,
    strength: float = 1.0,
    patterns: Floats | None = None,
) -> TimeKernel:
    """Learn the kernel from the rows of all blocks."""
    span, found = Span(n_steps), list[Energies]()
    for rows in blocks:
        found = add_energies(found, epoch_energies(rows, span, causal, patterns))
    return TimeKernel.learn(found, span, causal, strength, patterns=patterns)


def epoch_energies(
    rows: ActiveRows, span: Span, causal: bool, patterns: Floats | None = None
) -> list[Energies]:
    """Return the energies of a block at every epoch."""
    aside = None if causal else patterns
    return [block_energies(rows.between(*span.past(at)), aside) for at in span.epochs(causal)]


def add_energies(left: Sequence[Energies], right: Sequence[Energies]) -> list[Energies]:
    """Add the energies of two blocks, epoch by epoch; an empty list counts as zero."""
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)


def filter_rows(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[Any]:
    """Return the vectors of a block's nodes at some steps, (n_nodes, len(steps), r).

    Z_l = Y_l H_lᵀ: of few steps by weights of the active rows, else by a product per direction, sparse or
    dense, or by transforms of whole rows; whichever is cheapest. What a chain has published must stay the
    same to the bit: there always by the sparse product, which adds up the active steps of a row one by one,
    so that neither other rows nor steps of weight 0 before and after make a difference.
    """
    T, asked, active = rows.n_steps, len(steps), len(rows.node)
    out = np.zeros((rows.n_nodes, asked, rows.rank), dtype=rows.values.dtype)
    if not active:
        return out
    present, starts = np.unique(rows.node, return_index=True)
    if asked <= FEW_STEPS and not kernel.age:
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
    how = "sparse" if kernel.age else min(costs, key=lambda name: costs[name])
    size = max(1, BLOCK_NUMBERS // length)
    for c in range(rows.rank):
        y = rows.direction(c)
        if how == "fft":
            for start in range(0, len(present), size):
                nodes = present[start : start + size]
                out[nodes, :, c] = kernel.filter_whole(y[nodes].toarray(), c, length)[:, steps]
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


def noise_levels(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[np.float32]:
    """Return the noise of every vector, (n_nodes, len(steps)): its length if the events were unrelated.

    noise_i(t)² = Σ_l N_il·Σ_s H_l(t, s)², with N_il = Σ over the node's entries of w²·V_jl² / T: the variance
    that its own events would leave if each had come at any step, alone. Of a chain these are the events of
    the steps that reach t, over as many steps: nothing after t counts.
    """
    if kernel.age:
        return _past_noise(rows, kernel, steps)
    own = np.zeros((rows.n_nodes, rows.rank))
    np.add.at(own, rows.node, rows.noise)
    return np.sqrt(own / max(rows.n_steps, 1) @ kernel.spread[steps].T).astype(np.float32)


def _past_noise(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[np.float32]:
    """Return the noise of the vectors of a chain, added up as in `filter_rows`."""
    squares = np.zeros((rows.n_nodes, len(steps)))
    events, mean = replace(rows, values=rows.noise), replace(kernel, lags=np.zeros_like(kernel.lags))
    H = mean.matrix(0, steps)
    for c in range(rows.rank):
        spread = np.cumsum(np.square(kernel.matrix(c, steps)), axis=1)[:, -1]
        squares += (events.direction(c) @ H.T) * spread
    return np.sqrt(squares).astype(np.float32)


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
        rows = NodeEntries.of(tensor).pairs()
        return cls(tensor, learn_kernel([rows], tensor.n_steps, causal=causal, strength=strength))

    def at(self, step: int, i: Ints, j: Ints) -> Floats:
        """Return the filtered entries of pairs at a step; 0 for pairs that never occur."""
        found, asked = np.zeros(len(i)), find_pairs(self.tensor, i, j)
        known = asked >= 0
        H = self.kernel.weights(step)[:, 0]
        found[known] = np.asarray(self.tensor.tubes[asked[known]] @ H)
        return found
