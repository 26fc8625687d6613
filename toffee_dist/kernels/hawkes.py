"""HTNE: vectors under which the next neighbour of a node is likely, given its last ones."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.skipgram import negative_table
from toffee_dist.kernels.walks import TimedLinks


def train_hawkes(
    links: TimedLinks,
    rank: int,
    *,
    history: int,
    negatives: int,
    epochs: int,
    rate: float,
    decaying: bool,
    seed: int,
) -> tuple[NDArray[np.float32], list[float]]:
    """Return a vector per node, (n_nodes, rank), and the mean loss of every epoch.

    Nodes without links have zeros. Links are learnt from in a new order in every epoch.
    """
    n_nodes = len(links.ends) - 1
    counts = np.bincount(links.targets, minlength=n_nodes)
    met = (counts + links.degrees()) > 0
    vectors = np.zeros((n_nodes, rank), np.float32)
    rng = np.random.default_rng([seed, 0])
    # As the public code starts: uniform in ±1/r, δ = 1.
    vectors[met] = rng.uniform(-1.0 / rank, 1.0 / rank, (int(met.sum()), rank)).astype(np.float32)
    if not met.any():
        return vectors, []
    # Saves start-up time: numba takes half a second to load.
    from toffee_dist.kernels.loops.hawkes import train_epoch

    delta = np.ones(n_nodes)
    table = negative_table(counts)
    arrays: Any = (links.ends, links.sources, links.targets, links.times)
    losses = []
    for epoch in range(epochs):
        order = rng.permutation(len(links.targets))
        loss = train_epoch(
            *(*arrays, order, history, negatives, rate, decaying, seed, epoch + 1, *table, vectors, delta)
        )
        losses.append(float(loss))
    return vectors, losses
