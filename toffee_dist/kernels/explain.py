"""What a vector is made of: the links of its node, the steps that they came at, and the rhythms of its path.

A vector of the trajectory is exactly a sum over the node's own entries (fact 9), and so is a move between two
steps, and, up to what the solver left over, the one vector per node:

    v = Σ over the entries (j, s, w) of the node of  (w·B_j ∘ H_s) Q

    at step t        B = V, the basis,   H_s = H(t, s), the kernel           Q: the rotation of the run
    from t to t'     B = V               H_s = H(t', s) − H(t, s)
    over all time    B = F, the vectors  H_s = the weight of the step        Q = Qᵀ diag(w) Q, as in `fold`

Over time the same path is a sum over its frequencies, Z(t) = (1/T) Σ_k m_k Re(Ẑ_k·exp(2πi·k·t/T)).

The share of a part p is ⟨p, v⟩ / ‖v‖²: how far it goes in the direction of v. Shares add up to 1; a part that
pulls the other way has a negative share.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Floats, Ints

# Entries whose parts are in memory at once: a node may have as many links as the graph has nodes.
CHUNK = 1 << 14


@dataclass(frozen=True, eq=False)
class LinkSum:
    """v = Σ_entries (w·B_j ∘ H_s) Q.

    Parameters
    ----------
    entries
        Of one node, sorted by target.
    basis
        Gives the rows of B of some targets, in ascending order.
    weights : (T, r) or (T, 1)
        H.
    turn : (r, r)
        Q.
    """

    entries: NodeEntries
    basis: Callable[[Ints], Tall]
    weights: Floats
    turn: Floats

    def total(self) -> Floats:
        """Return v."""
        found = np.zeros(self.turn.shape[1])
        for _, parts in self._parts(np.arange(len(self.entries.step))):
            found += parts.sum(axis=0)
        return found

    def along(self, direction: Floats) -> Floats:
        """Return the product of every entry's part with a direction."""
        found = np.empty(len(self.entries.step))
        for chosen, parts in self._parts(np.arange(len(found))):
            found[chosen] = parts @ direction
        return found

    def parts(self, key: Ints, keys: Ints) -> Floats:
        """Return the sums of the parts whose `key`, a number per entry, is each of `keys`."""
        found = np.zeros((len(keys), self.turn.shape[1]))
        order = np.argsort(keys, kind="stable")
        ordered = np.asarray(keys)[order]
        for chosen, parts in self._parts(np.flatnonzero(np.isin(key, keys))):
            np.add.at(found, order[np.searchsorted(ordered, np.asarray(key)[chosen])], parts)
        return found

    def _parts(self, chosen: Ints) -> Iterator[tuple[Ints, Floats]]:
        for start in range(0, len(chosen), CHUNK):
            at = chosen[start : start + CHUNK]
            targets, row = np.unique(self.entries.target[at], return_inverse=True)
            B = np.asarray(self.basis(targets), dtype=np.float64)[row]
            scaled = self.entries.value[at].astype(np.float64)[:, None] * B
            yield at, scaled * self.weights[self.entries.step[at]] @ self.turn


@dataclass(frozen=True, eq=False)
class RhythmSum:
    """Z(t), or Z(t) − Z(earlier), as a sum over the frequencies 0 … T//2 of the path Z (T, r)."""

    path: Floats
    step: int
    earlier: int | None = None

    def along(self, direction: Floats) -> Floats:
        """Return the product of every frequency's part with a direction."""
        series = np.asarray(self.path, dtype=np.float64) @ direction
        return np.asarray((np.fft.rfft(series) * self._waves(np.arange(len(series) // 2 + 1))).real)

    def parts(self, freqs: Ints) -> Floats:
        """Return the parts of some frequencies."""
        T = len(self.path)
        # Ẑ_k = Σ_t Z(t)·exp(−2πi·k·t/T); phases modulo T stay exact.
        phases = np.exp(-2j * np.pi * (np.outer(freqs, np.arange(T)) % T) / T)
        hat = phases @ np.asarray(self.path, dtype=np.float64)
        return np.asarray((hat * self._waves(freqs)[:, None]).real)

    def _waves(self, freqs: Ints) -> Floats:
        T = len(self.path)
        twice = np.where((freqs == 0) | (2 * freqs == T), 1.0, 2.0) / T
        waves = np.exp(2j * np.pi * (freqs * self.step % T) / T)
        if self.earlier is not None:
            waves = waves - np.exp(2j * np.pi * (freqs * self.earlier % T) / T)
        return np.asarray(twice * waves)
