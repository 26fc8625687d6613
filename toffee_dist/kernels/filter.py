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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from toffee_dist.kernels.entries import ActiveRows, NodeEntries, find_pairs
from toffee_dist.kernels.gains import (
    BLOCK_NUMBERS,
    FFT_COST,
    Energies,
    Span,
    add_energies,
    circular,
    epoch_energies,
    gains,
    no_patterns,
    noise_left,
    padded_length,
    sum_by,
    with_mean,
)
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Nanoseconds per direction and step: of an active (node, step) in a sparse product, and of any in a dense
# one; measured on the same graphs in single precision: 1.1 to 1.3, and .021 to .024.
SPARSE_COST, DENSE_COST = 1.2, 0.022
# Nanoseconds per direction and number of H, which both products need: what decides for one node. Measured
# with 165, 336 and 804 steps: 2.2, 6.4 and 4.0.
MATRIX_COST = 4.0
# Up to this many steps are made one by one.
FEW_STEPS = 4
# Numbers of nodes × steps × directions that are made at once where all steps are needed.
STEADY_NUMBERS = 1 << 24


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
        hat = scipy.fft.rfft(circular(self.lags[0], length), axis=0)[:, None]
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
        hat = scipy.fft.rfft(circular(self.lags[0, :, c], length)).real.astype(y.dtype)
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


def noise_levels(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[np.float32]:
    """Return the noise of every vector, (n_nodes, len(steps)): its length if the events were unrelated.

    noise_i(t)² = Σ_l N_il·Σ_s H_l(t, s)², with N_il = Σ over the node's entries of w²·V_jl² / T: the variance
    that its own events would leave if each had come at any step, alone. Of a chain these are the events of
    the steps that reach t, over as many steps: nothing after t counts.
    """
    if kernel.age:
        return _past_noise(rows, kernel, steps)
    own = sum_by(rows.node, rows.noise, rows.n_nodes)
    return np.sqrt(own / max(rows.n_steps, 1) @ kernel.spread[steps].T).astype(np.float32)


def steadiness(rows: ActiveRows, kernel: TimeKernel) -> tuple[Floats, Floats]:
    """Return every node's mean vector, (n, r), and how much of its movement about that is its own, (n,).

    s_i = max(0, 1 − W_i/M_i), as James and Stein shrink: M_i = Σ_t ‖Z_i(t) − mean‖², and W_i is what that
    would be on average if the events of the node were unrelated,

        W_i = Σ_l N_il·(Σ_t,s H_l(t, s)² − 1)/T,    N_il = Σ over the node's entries of w²·V_jl²

    Gains tell how far a direction can be trusted, of all nodes together; this tells how far a node can. A
    two-sided kernel: with a causal one it would know the future.
    """
    T = max(rows.n_steps, 1)
    own = sum_by(rows.node, rows.noise, rows.n_nodes)
    mean = sum_by(rows.node, rows.values, rows.n_nodes) / T
    noise = own @ (kernel.spread.sum(axis=0) - 1) / T
    moved = np.zeros(rows.n_nodes)
    size = max(1, STEADY_NUMBERS // max(1, rows.n_nodes * rows.rank))
    for start in range(0, rows.n_steps, size):
        Z = filter_rows(rows, kernel, np.arange(start, min(start + size, rows.n_steps)))
        moved += np.square(Z - mean[:, None], dtype=np.float64).sum(axis=(1, 2))
    share = 1 - np.divide(noise, moved, out=np.ones_like(moved), where=moved > 0)
    return mean, np.maximum(share, 0.0)


def _past_noise(rows: ActiveRows, kernel: TimeKernel, steps: Ints) -> NDArray[np.float32]:
    """Return the noise of the vectors of a chain, added up as in `filter_rows`."""
    squares = np.zeros((rows.n_nodes, len(steps)))
    events, mean = replace(rows, values=rows.noise), replace(kernel, lags=np.zeros_like(kernel.lags))
    H = mean.matrix(0, steps)
    for c in range(rows.rank):
        spread = np.cumsum(np.square(kernel.matrix(c, steps)), axis=1)[:, -1]
        squares += (events.direction(c) @ H.T) * spread
    return np.sqrt(squares).astype(np.float32)


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
