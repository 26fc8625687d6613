"""Which frequencies an output needs, and which of them carry more than noise (facts 1 and 8)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from toffee_dist.kernels.gauge import CommonBasis
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.kernels.spectrum import BLOCK_BYTES, count_freqs, multiplicities, slice_energies
from toffee_dist.settings import parse_freqs
from toffee_dist.tensor import Floats, TemporalTensor

# Standard deviations above the floor. Measured on planted graphs (benchmarks/rhythm.py): with 6, graphs
# without a rhythm give none (0 of 120 do), and from 3 to 8 the week is found in every weekly one.
SIGNIFICANT = 6.0
# Directions of the common basis in which energy is looked for: the test loses power with more.
TEST_DIRECTIONS = 16
# With fewer frequencies than this, the median is no noise floor; the analytic one is used.
ENOUGH_FREQS = 16

BasisRows = tuple[int, Tall, Tall]
"""Rows of U and V of the common basis, and which row of the graph the first of them is."""


@dataclass(frozen=True, eq=False)
class FrequencyChoice:
    """The frequencies to solve, and what they are worth.

    Attributes
    ----------
    freqs : ascending, always with 0 (the common basis comes from it)
    energies : ‖X_k‖² for k = 0 … T//2
    significances : how far each frequency stands out of noise, in standard deviations
    n_steps : T
    """

    freqs: list[int]
    energies: Floats
    significances: Floats
    n_steps: int

    @property
    def energy_kept(self) -> float:
        """The exact share of ‖X‖² in these frequencies: Σ_{k chosen} m_k ‖X_k‖² / Σ_k m_k ‖X_k‖²."""
        shares = self.energies * multiplicities(np.arange(len(self.energies)), self.n_steps)
        total = float(shares.sum())
        return float(shares[self.freqs].sum()) / total if total > 0 else 1.0

    def rhythms(self) -> dict[str, NDArray[Any]]:
        """Return k, period, energy, significance of the chosen frequencies above 0, most significant first.

        A period that does not divide the span leaks into neighbouring frequencies, and a rhythm that is
        no sine has harmonics: 7, 3.5 and 2.3 days tell of one week.
        """
        chosen = np.array([k for k in self.freqs if k > 0], dtype=np.int64)
        chosen = chosen[np.argsort(-self.significances[chosen], kind="stable")]
        return {
            "k": chosen,
            "period_steps": self.n_steps / np.maximum(chosen, 1),
            "energy": self.energies[chosen],
            "significance": self.significances[chosen],
        }


def choose_freqs(tensor: TemporalTensor, spec: str, basis: CommonBasis) -> FrequencyChoice:
    """Choose the frequencies of a trajectory, of a tensor and a basis in memory; see `choose`."""
    return choose(ChoiceSums.of(tensor, basis.U, basis.V), spec, tensor.n_steps)


def choose(sums: ChoiceSums, spec: str, n_steps: int) -> FrequencyChoice:
    """Choose the frequencies of a trajectory.

    Parameters
    ----------
    sums
        Of all nodes.
    spec
        ``auto``: those whose structure stands out of the noise floor; ``all``; ``lowest:K``: 0 … K−1;
        ``strongest:K``: the K of largest energy, 0 among them.
    n_steps
        T.
    """
    kind, count = parse_freqs(spec)
    n_freqs = count_freqs(n_steps)
    energies, scores = sums.energies, sums.significances()
    if kind == "all":
        freqs = np.arange(n_freqs)
    elif kind == "lowest":
        freqs = np.arange(min(count, n_freqs))
    elif kind == "strongest":
        others = 1 + np.argsort(-energies[1:], kind="stable")[: count - 1]
        freqs = np.sort(np.append(others, 0))
    else:
        freqs = np.flatnonzero(scores >= SIGNIFICANT)
    return FrequencyChoice([int(k) for k in freqs], energies, scores, n_steps)


def significances(tensor: TemporalTensor, basis: CommonBasis) -> Floats:
    """Return how far each frequency stands out of noise, of a tensor and a basis in memory."""
    return ChoiceSums.of(tensor, basis.U, basis.V).significances()


@dataclass(frozen=True, eq=False)
class ChoiceSums:
    """What a choice of frequencies is made from: sums over pairs, so those of blocks of nodes add up.

    With U, V the leading directions of the common basis and v = (Σ_t x² − (Σ_t x)²/T)·T/(T−1) of a tube:

    Attributes
    ----------
    energies : ‖X_k‖² for k = 0 … T//2
    core : (T, d, d), C(t) = Uᵀ X(t) V
    shuffled : Σ v_ij |U_i|² |V_j|², and where X(i,j) and X(j,i) are the same tube Σ v_ij (U_i·U_j)(V_i·V_j)
    spreads : (2, d, d), Σ v_ij |V_j|² U_iU_iᵀ and Σ v_ij |U_i|² V_jV_jᵀ
    directed : whether the graph is
    """

    energies: Floats
    core: Floats
    shuffled: Floats
    spreads: Floats
    directed: bool

    @classmethod
    def of(cls, tensor: TemporalTensor, U: Tall, V: Tall) -> ChoiceSums:
        """Return the sums of all nodes, in memory."""
        return cls.of_block(tensor, (0, U, V), [(0, U, V)], tensor.directed)

    @classmethod
    def of_block(
        cls, block: TemporalTensor, own: BasisRows, tiles: Iterable[BasisRows], directed: bool
    ) -> ChoiceSums:
        """Return the sums of some nodes.

        Parameters
        ----------
        block
            Their tensor: rows count from 0, columns are those of the graph.
        own
            Their rows of the common basis.
        tiles
            All rows of the common basis, in order, one after the other.
        directed
            Whether the graph is.
        """
        start, *bases = own
        Ui, Vi = (_leading(array) for array in bases)
        left, depth = np.square(Ui).sum(axis=1), Ui.shape[1]
        core = np.zeros((block.n_steps, depth, depth))
        shuffled, spreads = np.zeros(2), np.zeros((2, depth, depth))
        columns, rows = np.asarray(block.indices), np.zeros(len(Ui))
        for first, *tile in tiles:
            Uj, Vj = (_leading(array) for array in tile)
            right, weights = np.square(Vj).sum(axis=1), np.zeros(len(Vj))
            inside = np.flatnonzero((columns >= first) & (columns < first + len(Vj)))
            for pairs in _cut(block, inside, BLOCK_BYTES // (64 * depth)):
                piece = _Piece(block, pairs, first)
                i, j, v = piece.i, piece.j, piece.shuffled_energy()
                piece.add_core(core, Ui, Vj)
                shuffled[0] += float((v * left[i] * right[j]).sum())
                rows += np.bincount(i, v * right[j], minlength=len(Ui))
                weights += np.bincount(j, v * left[i], minlength=len(Vj))
                if not directed:
                    # A self-loop is one entry, not two.
                    two = v * (i + start != j + first)
                    both = np.einsum("pd,pd->p", Ui[i], Uj[j]) * np.einsum("pd,pd->p", Vi[i], Vj[j])
                    shuffled[1] += float((two * both).sum())
            spreads[1] += Vj.T @ (Vj * weights[:, None])
        spreads[0] += Ui.T @ (Ui * rows[:, None])
        return cls(slice_energies(block), core, shuffled, spreads, directed)

    def __add__(self, other: ChoiceSums) -> ChoiceSums:
        """Return the sums of both."""
        return ChoiceSums(
            self.energies + other.energies,
            self.core + other.core,
            self.shuffled + other.shuffled,
            self.spreads + other.spreads,
            self.directed,
        )

    def significances(self) -> Floats:
        """Return how far each frequency stands out of noise, in standard deviations (infinite for k = 0).

        The statistic is Q_k = ‖Uᵀ X_k V‖² in the leading directions of the common basis: noise spreads over
        all directions, structure does not, so this sees a rhythm that the whole ‖X_k‖² hides (measured:
        111 deviations against 3 at mean degree 0.66). It is the transform of C(t) = Uᵀ X(t) V, which takes
        one pass over the events. Structure outside the directions of the zero slice is not seen.
        """
        n_steps = len(self.core)
        Q = np.square(np.abs(scipy.fft.rfft(self.core, axis=0))).sum(axis=(1, 2))
        score = np.full(len(Q), np.inf)
        if len(Q) == 1:
            return score
        floor, spread = self.shuffled_floor()
        others = Q[1:]
        deviation = np.full(len(others), spread * floor)
        if len(others) >= ENOUGH_FREQS:
            # Real events come in bursts, which raises the whole spectrum: take the floor from the data.
            floor = float(np.median(others))
            mad = 1.4826 * float(np.median(np.abs(others - floor)))
            deviation = np.full(len(others), max(mad, spread * floor))
        if n_steps % 2 == 0:
            deviation[-1] *= np.sqrt(2.0)  # a real slice has half the degrees of freedom
        above = others - floor
        # Rounding error of a spectrum that is exactly flat is no rhythm.
        real = above > 1e-9 * Q[0]
        score[1:] = np.where(real, above / np.maximum(deviation, np.finfo(np.float64).tiny), 0.0)
        return score

    def shuffled_floor(self) -> tuple[float, float]:
        """Return the mean of Q_k, k > 0, if each pair's steps were shuffled, and its relative deviation.

        Shuffling keeps X_0, hence U and V. The deviation takes the weights as separable.
        """
        independent, mirrored = (float(value) for value in self.shuffled)
        if independent <= 0:
            return 0.0, 0.0
        relative = float(np.linalg.norm(self.spreads[0]) * np.linalg.norm(self.spreads[1])) / independent**2
        return independent + mirrored, relative if self.directed else float(np.sqrt(2.0)) * relative


class _Piece:
    """Some pairs of a block: i (rows of the block), j (rows of a tile), and the entries of their tubes."""

    def __init__(self, block: TemporalTensor, pairs: NDArray[np.int64], first: int) -> None:
        self.i = np.searchsorted(block.indptr, pairs, side="right") - 1
        self.j = np.asarray(block.indices[pairs], dtype=np.int64) - first
        begins = np.asarray(block.tube_ptr[pairs], dtype=np.int64)
        self.counts = np.asarray(block.tube_ptr[pairs + 1], dtype=np.int64) - begins
        self.starts = np.cumsum(self.counts) - self.counts
        entries = np.repeat(begins - self.starts, self.counts) + np.arange(self.counts.sum())
        self.steps = np.asarray(block.steps[entries])
        self.values = np.asarray(block.values[entries], dtype=np.float64)
        self.n_steps = block.n_steps

    def add_core(self, core: Floats, Ui: Floats, Vj: Floats) -> None:
        """Add Σ x U_i V_jᵀ of every step."""
        pair = np.repeat(np.arange(len(self.i)), self.counts)
        by_step = np.argsort(self.steps, kind="stable")
        active, begins = np.unique(self.steps[by_step], return_index=True)
        for t, events in zip(active.tolist(), np.split(by_step, begins[1:]), strict=True):
            i, j = self.i[pair[events]], self.j[pair[events]]
            core[t] += (Ui[i] * self.values[events, None]).T @ Vj[j]

    def shuffled_energy(self) -> Floats:
        """Return v of every tube."""
        squares = np.add.reduceat(np.square(self.values), self.starts)
        totals = np.add.reduceat(self.values, self.starts)
        # With one step there is nothing to shuffle, and no frequency to judge.
        scale = self.n_steps / max(self.n_steps - 1, 1)
        return np.asarray(np.maximum(squares - totals**2 / self.n_steps, 0.0) * scale)


def _cut(block: TemporalTensor, pairs: NDArray[np.int64], most: int) -> Iterator[NDArray[np.int64]]:
    """Yield some of these pairs at a time, with about so many entries; a single pair has at most T."""
    ends = np.cumsum(np.asarray(block.tube_ptr[pairs + 1], np.int64) - np.asarray(block.tube_ptr[pairs]))
    at = 0
    while at < len(pairs):
        done = int(ends[at - 1]) if at else 0
        stop = max(at + 1, int(np.searchsorted(ends, done + most, side="right")))
        yield pairs[at:stop]
        at = stop


def _leading(array: Any) -> Floats:
    """Return the leading directions of some rows of a basis, in double."""
    return np.asarray(array[:, :TEST_DIRECTIONS], dtype=np.float64)
