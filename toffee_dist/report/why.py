"""What the page tells of some nodes: who makes their vector, who made their largest move, their rhythms."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.kernels.explain import LinkSum
from toffee_dist.storage.compact import CompactTrajectory
from toffee_dist.tensor import Floats
from toffee_dist.timegrid import TimeGrid, name_period

# Nodes that the page explains, those with the most neighbours; neighbours and rhythms of each.
EXPLAINED, NEIGHBOURS, RHYTHMS = 150, 5, 3
# A rhythm with less of the movement than this is not worth a line.
LEAST = 0.05


def explain_node(compact: CompactTrajectory, row: int, grid: TimeGrid) -> dict[str, Any]:
    """Return shares of a node's neighbours in its mean vector and in its largest move, and of its rhythms.

    The mean of all steps is the sum over the node's entries of w·V_j times the mean of the kernel: 1/T where
    it is two-sided, since every column then sums to 1. Neighbours are rows.
    """
    T = compact.n_steps
    path = compact.read(row, row + 1, np.arange(T))[0].astype(np.float64)
    found: dict[str, Any] = {"links": _links(compact, row, compact.mean_weights, path.mean(axis=0))}
    if T > 1 and path.any():
        to = 1 + int(np.linalg.norm(np.diff(path, axis=0), axis=1).argmax())
        weights = compact.weights(to) - compact.weights(to - 1)
        found["move"] = {"step": to, "links": _links(compact, row, weights, path[to] - path[to - 1])}
        # Energy by frequency, without the mean: m_k·‖Ẑ_k‖².
        energy = np.square(np.abs(np.fft.rfft(path, axis=0)[1:])).sum(axis=1)
        energy[: (T - 1) // 2] *= 2
        total = energy.sum()
        best = np.argsort(-energy, kind="stable")[:RHYTHMS] if total > 0 else np.empty(0, np.int64)
        found["rhythms"] = [
            [
                "a slow change over the window" if at == 0 else name_period(T / (at + 1), grid),
                round(float(energy[at] / total), 3),
            ]
            for at in best
            if energy[at] >= LEAST * total
        ]
    return found


def _links(compact: CompactTrajectory, row: int, weights: Floats, vector: Floats) -> list[list[Any]]:
    """Return the rows of the neighbours with the largest shares of a vector, and the shares."""
    entries = compact.entries(row, row + 1)
    length = float(vector @ vector)
    if not len(entries.step) or not length > 0:
        return []
    turn = np.eye(compact.rank) if compact.rotation is None else compact.rotation.astype(np.float64)
    along = LinkSum(entries, compact.basis, weights, turn).along(vector / length)
    nodes, place = np.unique(entries.target, return_inverse=True)
    shares = np.bincount(place, along, minlength=len(nodes)).astype(np.float64)
    best = np.argsort(-np.abs(shares), kind="stable")[:NEIGHBOURS]
    return [[int(nodes[at]), round(float(shares[at]), 3)] for at in best]


def neighbour_rows(found: list[dict[str, Any]]) -> NDArray[np.int64]:
    """Return the rows of all neighbours that are named, ascending."""
    pairs = [pair for one in found for pair in [*one["links"], *one.get("move", {}).get("links", [])]]
    return np.unique(np.array([row for row, _ in pairs], dtype=np.int64))


def name_neighbours(found: list[dict[str, Any]], names: pl.Series, rows: NDArray[np.int64]) -> None:
    """Put names in the place of rows."""
    for one in found:
        for pairs in (one["links"], one.get("move", {}).get("links", [])):
            for pair in pairs:
                pair[0] = names[int(np.searchsorted(rows, pair[0]))]
