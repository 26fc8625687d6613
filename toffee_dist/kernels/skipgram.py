"""Skip-gram with negative sampling on walks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

# Of word2vec: the rate that the last walk is learnt with, and the power of the counts that negatives follow.
LAST_RATE, NEGATIVE_POWER = 1e-4, 0.75


def negative_table(counts: NDArray[np.integer[Any]]) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return the table from which a node is drawn ∝ count^¾."""
    # Saves start-up time: numba takes half a second to load.
    from toffee_dist.kernels.loops.draws import fill_alias

    chance, other = np.empty(len(counts)), np.empty(len(counts), np.int64)
    fill_alias(counts.astype(np.float64) ** NEGATIVE_POWER, chance, other)
    return chance, other


def train_skipgram(
    tokens: NDArray[np.int32],
    ends: NDArray[np.int64],
    n_nodes: int,
    rank: int,
    *,
    window: int,
    negatives: int,
    epochs: int,
    rate: float,
    seed: int,
) -> tuple[NDArray[np.float32], list[float]]:
    """Return a vector per node, (n_nodes, rank), and the mean loss of every epoch.

    Nodes that no walk meets have zeros.

    Parameters
    ----------
    tokens, ends
        The nodes of all walks, one after the other, and where each walk begins and ends.
    """
    counts = np.bincount(tokens, minlength=n_nodes)
    met = counts > 0
    inner = np.zeros((n_nodes, rank), np.float32)
    rng = np.random.default_rng([seed, 0])
    inner[met] = (rng.random((int(met.sum()), rank), dtype=np.float32) - np.float32(0.5)) / np.float32(rank)
    if not met.any():
        return inner, []
    # Saves start-up time: numba takes half a second to load.
    from toffee_dist.kernels.loops.skipgram import train_epoch

    outer = np.zeros((n_nodes, rank), np.float32)
    chance, other = negative_table(counts)
    losses = []
    for epoch in range(epochs):
        order = rng.permutation(len(ends) - 1)
        high, low = (rate + (LAST_RATE - rate) * (epoch + part) / epochs for part in (0, 1))
        loss = train_epoch(
            *(tokens, ends, order, window, negatives, high, low, seed, epoch + 1),
            *(chance, other, inner, outer),
        )
        losses.append(float(loss))
    return inner, losses
