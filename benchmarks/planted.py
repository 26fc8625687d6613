"""Planted temporal graphs: communities that change with a known rhythm (fact 8)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from toffee_dist import TemporalTensor

Pattern = Literal["weekly", "change", "none"]
N_NODES, N_COMMUNITIES, N_DAYS = 400, 4, 70
# A link inside a community is this many times as likely as one between two.
CONTRAST = 20.0


@dataclass(frozen=True, eq=False)
class PlantedGraph:
    """An undirected graph a day, and the community of every node on every day (days, nodes)."""

    tensor: TemporalTensor
    labels: NDArray[np.int64]


def planted_graph(pattern: Pattern, degree: float, seed: int, **kwargs: Any) -> PlantedGraph:
    """Draw a stochastic block model a day.

    Parameters
    ----------
    pattern
        ``weekly``: every node has a community for weekdays and another for weekends; ``change``: one for
        the first half, another for the second; ``none``: one for all days.
    degree
        Mean degree a day.
    seed
        Of the communities and of the links.
    **kwargs
        For `TemporalTensor.from_events`.
    """
    rng = np.random.default_rng(seed)
    first, second = rng.integers(N_COMMUNITIES, size=(2, N_NODES))
    day = np.arange(N_DAYS)
    other = {"weekly": day % 7 >= 5, "change": day >= N_DAYS // 2, "none": day < 0}[pattern]
    labels = np.where(other[:, None], second, first)
    size = N_NODES / N_COMMUNITIES
    between = degree / (CONTRAST * (size - 1) + N_NODES - size)
    i, j = np.triu_indices(N_NODES, 1)
    links = []
    for t in range(N_DAYS):
        chance = np.where(labels[t][i] == labels[t][j], CONTRAST * between, between)
        links.append(np.flatnonzero(rng.random(len(chance)) < chance))
    pair = np.concatenate(links)
    step = np.repeat(day, [len(chosen) for chosen in links])
    tensor = TemporalTensor.from_events(
        i[pair], j[pair], step, n_nodes=N_NODES, n_steps=N_DAYS, directed=False, **kwargs
    )
    return PlantedGraph(tensor, labels)
