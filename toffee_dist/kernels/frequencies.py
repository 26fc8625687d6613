"""Which frequencies an output needs, and which of them carry more than noise (facts 1 and 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.fft
from numpy.typing import NDArray

from toffee_dist.kernels.gauge import CommonBasis
from toffee_dist.kernels.spectrum import count_freqs, multiplicities, slice_energies
from toffee_dist.settings import parse_freqs
from toffee_dist.tensor import Floats, TemporalTensor

# Standard deviations above the floor. Measured on planted graphs (benchmarks/rhythm.py): with 6, graphs
# without a rhythm give none (0 of 120 do), and from 3 to 8 the week is found in every weekly one.
SIGNIFICANT = 6.0
# Directions of the common basis in which energy is looked for: the test loses power with more.
TEST_DIRECTIONS = 16
# With fewer frequencies than this, the median is no noise floor; the analytic one is used.
ENOUGH_FREQS = 16


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
    """Choose the frequencies of a trajectory.

    Parameters
    ----------
    tensor
        The tensor.
    spec
        ``auto``: those whose structure stands out of the noise floor; ``all``; ``lowest:K``: 0 … K−1;
        ``strongest:K``: the K of largest energy, 0 among them.
    basis
        Singular vectors of the zero slice; ``auto`` looks for energy in their directions.
    """
    kind, count = parse_freqs(spec)
    n_freqs = count_freqs(tensor.n_steps)
    energies, scores = slice_energies(tensor), significances(tensor, basis)
    if kind == "all":
        freqs = np.arange(n_freqs)
    elif kind == "lowest":
        freqs = np.arange(min(count, n_freqs))
    elif kind == "strongest":
        others = 1 + np.argsort(-energies[1:], kind="stable")[: count - 1]
        freqs = np.sort(np.append(others, 0))
    else:
        freqs = np.flatnonzero(scores >= SIGNIFICANT)
    return FrequencyChoice([int(k) for k in freqs], energies, scores, tensor.n_steps)


def significances(tensor: TemporalTensor, basis: CommonBasis) -> Floats:
    """Return how far each frequency stands out of noise, in standard deviations (infinite for k = 0).

    The statistic is Q_k = ‖Uᵀ X_k V‖² in the leading directions of the common basis: noise spreads over
    all directions, structure does not, so this sees a rhythm that the whole ‖X_k‖² hides (measured:
    111 deviations against 3 at mean degree 0.66). It is the transform of C(t) = Uᵀ X(t) V, which takes
    one pass over the events. Structure outside the directions of the zero slice is not seen.
    """
    U, V = (array[:, :TEST_DIRECTIONS].astype(np.float64) for array in (basis.U, basis.V))
    pair = tensor.entry_pairs
    by_step = np.argsort(tensor.steps, kind="stable")
    i, j = tensor.sources, tensor.indices
    ends = np.searchsorted(tensor.steps[by_step], np.arange(tensor.n_steps + 1))
    C = np.empty((tensor.n_steps, U.shape[1], V.shape[1]))
    for t in range(tensor.n_steps):
        events = by_step[ends[t] : ends[t + 1]]
        C[t] = (U[i[pair[events]]] * tensor.values[events, None]).T @ V[j[pair[events]]]
    Q = np.square(np.abs(scipy.fft.rfft(C, axis=0))).sum(axis=(1, 2))
    score = np.full(len(Q), np.inf)
    if len(Q) == 1:
        return score
    floor, spread = _shuffled_floor(tensor, U, V)
    others = Q[1:]
    deviation = np.full(len(others), spread * floor)
    if len(others) >= ENOUGH_FREQS:
        # Real events come in bursts, which raises the whole spectrum: take the floor from the data.
        floor = float(np.median(others))
        mad = 1.4826 * float(np.median(np.abs(others - floor)))
        deviation = np.full(len(others), max(mad, spread * floor))
    if tensor.n_steps % 2 == 0:
        deviation[-1] *= np.sqrt(2.0)  # a real slice has half the degrees of freedom
    above = others - floor
    # Rounding error of a spectrum that is exactly flat is no rhythm.
    real = above > 1e-9 * Q[0]
    score[1:] = np.where(real, above / np.maximum(deviation, np.finfo(np.float64).tiny), 0.0)
    return score


def _shuffled_floor(tensor: TemporalTensor, U: Floats, V: Floats) -> tuple[float, float]:
    """Return the mean of Q_k, k > 0, if each pair's steps were shuffled, and its relative deviation.

    Shuffling keeps X_0, hence U and V. With v = (Σ_t x² − (Σ_t x)²/T)·T/(T−1) of a tube, the mean is
    Σ v_ij |U_i|² |V_j|², plus Σ v_ij (U_i·U_j)(V_i·V_j) where X(i,j) and X(j,i) are the same tube. The
    deviation takes the weights as separable.
    """
    n_steps, i, j = tensor.n_steps, tensor.sources, tensor.indices
    starts = tensor.tube_ptr[:-1]
    if tensor.n_entries == 0:
        return 0.0, 0.0
    squares = np.add.reduceat(np.square(tensor.values), starts)
    totals = np.add.reduceat(tensor.values, starts)
    v = np.maximum(squares - totals**2 / n_steps, 0.0) * n_steps / (n_steps - 1)
    left, right = np.square(U).sum(axis=1)[i], np.square(V).sum(axis=1)[j]
    independent = float((v * left * right).sum())
    if independent <= 0:
        return 0.0, 0.0
    row_weight = np.bincount(i, v * right, minlength=tensor.n_nodes)
    column_weight = np.bincount(j, v * left, minlength=tensor.n_nodes)
    S_U = U.T @ (U * row_weight[:, None])
    S_V = V.T @ (V * column_weight[:, None])
    relative = np.linalg.norm(S_U) * np.linalg.norm(S_V) / independent**2
    if tensor.directed:
        return independent, float(relative)
    two = v * (i != j)  # a self-loop is one entry, not two
    mirrored = float((two * (U[i] * U[j]).sum(axis=1) * (V[i] * V[j]).sum(axis=1)).sum())
    return independent + mirrored, float(np.sqrt(2.0) * relative)
