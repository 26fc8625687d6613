"""How much of every frequency and direction is kept: energies against a noise floor that is known.

Energies of a block of nodes are F×r numbers; those of all blocks, added up, give the gains. The gains of a
causal filter are learnt anew as time passes, from what is over.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.entries import ActiveRows
from toffee_dist.tensor import Floats, Ints

# Numbers of rows×steps that are transformed at once.
BLOCK_NUMBERS = 1 << 22
# Nanoseconds per direction: of an FFT per number and log2 of its length, and of two active steps of one row;
# measured on email and fb-forum by days and mathoverflow by weeks: .22 to .25, and 2.5 to 3.1.
FFT_COST, LAG_COST = 0.23, 2.8
# The causal gains are learnt again when the past has grown by this share. They then never change.
EPOCH_GROWTH = 1.25


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
    own = np.square(patterns).T @ sum_by(rows.step, rows.noise, rows.n_steps)
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
            lags += sum_by(rows.step[two] - rows.step[one], products, T)
        apart += 1
    signal = scipy.fft.rfft(circular(lags, length), axis=0).real
    # |ŷ − Σ_m c_m b̂_m|² = |ŷ|² − 2 Re Σ_m conj(b̂_m) ŷ c_m + |Σ_m c_m b̂_m|², summed over nodes.
    starts = np.searchsorted(rows.node, np.arange(rows.n_nodes + 1))
    shape = (rows.n_nodes, len(rows.node))
    shares = []
    hats = scipy.fft.rfft(aside, length, axis=0)
    for m in range(aside.shape[1]):
        by_node = sp.csr_matrix((aside[rows.step, m], np.arange(shape[1]), starts), shape=shape)
        shares.append(np.asarray(by_node @ rows.values, dtype=np.float64))
        crossed = scipy.fft.rfft(sum_by(rows.step, shares[m][rows.node] * rows.values, T), length, axis=0)
        signal -= 2 * (hats[:, m, None].conj() * crossed).real
    for m, one in enumerate(shares):
        for other, two in enumerate(shares):
            signal += np.outer((hats[:, m].conj() * hats[:, other]).real, (one * two).sum(axis=0))
    return np.maximum(signal, 0.0), np.stack([np.square(share).sum(axis=0) for share in shares])


def sum_by(key: Ints, values: NDArray[Any], count: int) -> Floats:
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


def epoch_energies(
    rows: ActiveRows, span: Span, causal: bool, patterns: Floats | None = None
) -> list[Energies]:
    """Return the energies of a block at every epoch."""
    aside = None if causal else patterns
    return [block_energies(rows.between(*span.past(at)), aside) for at in span.epochs(causal)]


def add_energies(left: Sequence[Energies], right: Sequence[Energies]) -> list[Energies]:
    """Add the energies of two blocks, epoch by epoch; an empty list counts as zero."""
    return [a + b for a, b in zip(left, right, strict=True)] if left else list(right)


def circular(lags: Floats, length: int) -> Floats:
    """Return the even sequence of a length whose first half are these lags."""
    T = len(lags)
    found = np.zeros((length, *lags.shape[1:]))
    found[:T] = lags
    found[length - T + 1 :] += lags[:0:-1]
    return found
