"""Graphs with communities that are known."""

from __future__ import annotations

import numpy as np

from toffee_dist.tensor import TemporalTensor


def communities(seed: int = 0, n_steps: int = 24, n_nodes: int = 60) -> TemporalTensor:
    """Two ways of grouping, which take turns every six steps."""
    rng = np.random.default_rng(seed)
    groups = rng.integers(0, 3, (2, n_nodes))
    i, j, t = [], [], []
    for step in range(n_steps):
        group = groups[step // 6 % 2]
        a, b = np.triu_indices(n_nodes, 1)
        linked = rng.random(len(a)) < np.where(group[a] == group[b], 0.15, 0.01)
        i.append(a[linked])
        j.append(b[linked])
        t.append(np.full(int(linked.sum()), step))
    rows = (np.concatenate(column) for column in (i, j, t))
    return TemporalTensor.from_events(
        *rows, n_nodes=n_nodes, n_steps=n_steps, directed=False, pair_weight="raw"
    )
