"""Links by node and time: what walks and histories are made of.

    links of node i:  ends[i] … ends[i+1],  by step, and in the order of the pairs within a step

The value of an entry plays no part: a link is there or not.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from toffee_dist.tensor import Floats, TemporalTensor

# Draws of a walk that comes out too short, before it is left out.
ATTEMPTS = 10


@dataclass(frozen=True, eq=False)
class TimedLinks:
    """The links of a graph, by node and then by step.

    Attributes
    ----------
    ends : (n_nodes + 1,)
    sources, targets : (n_links,)
    steps : (n_links,)
    """

    ends: NDArray[np.int64]
    sources: NDArray[np.int32]
    targets: NDArray[np.int32]
    steps: NDArray[np.int64]

    @classmethod
    def of(cls, tensor: TemporalTensor, *, both_ways: bool = False) -> TimedLinks:
        """Sort the entries of a tensor.

        Parameters
        ----------
        both_ways
            Of a directed graph, also give every link to its target, as a link back.
        """
        pair = tensor.entry_pairs
        i, j = np.asarray(tensor.sources[pair]), np.asarray(tensor.indices[pair])
        t = np.asarray(tensor.steps, dtype=np.int64)
        if both_ways and tensor.directed:
            off = i != j
            i, j, t = np.append(i, j[off]), np.append(j, i[off]), np.append(t, t[off])
        order = np.lexsort((j, t, i))
        ends = np.concatenate([[0], np.cumsum(np.bincount(i, minlength=tensor.n_nodes))]).astype(np.int64)
        return cls(ends, i[order].astype(np.int32), j[order].astype(np.int32), t[order])

    @property
    def times(self) -> Floats:
        """The steps as times from 0 (the first link) to 1 (the last)."""
        if not len(self.steps):
            return np.empty(0)
        first, last = int(self.steps.min()), int(self.steps.max())
        return (self.steps - first) / max(last - first, 1)

    def degrees(self) -> NDArray[np.int64]:
        """Return the number of links of every node."""
        return np.diff(self.ends)


def sum_later(links: TimedLinks, decay: float) -> Floats:
    """Return Σ exp(−decay·t) over every link and those after it of the same node; empty for no decay.

    exp(−decay·(t − t₀)) ∝ exp(−decay·t): one sum serves walks that arrive at any t₀. Summed from the latest,
    so that small weights keep their digits.
    """
    if decay == 0:
        return np.empty(0)
    weights = np.exp(-decay * links.times)
    found = np.empty_like(weights)
    for start, stop in zip(links.ends[:-1], links.ends[1:], strict=True):
        found[start:stop] = np.cumsum(weights[start:stop][::-1])[::-1]
    return found


def shortest_walk(links: TimedLinks, window: int) -> int:
    """Return the fewest nodes of a walk that is kept: the window, where time is long enough for it.

    A walk has at most one node more than there are distinct steps; half of that is asked for at the most.
    """
    longest = len(np.unique(links.steps)) + 1
    return max(2, min(window, (longest + 1) // 2))


def draw_walks(
    links: TimedLinks,
    first: int,
    count: int,
    *,
    length: int,
    shortest: int,
    decay: float,
    seed: int,
) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Draw the walks numbered first … first+count, (count, length) nodes and (count, length−1) steps.

    A walk starts with a link drawn uniformly and goes on with a strictly later link of the node it is at,
    drawn uniformly (``decay`` 0) or ∝ exp(−decay·(t − t₀)), time from 0 to 1. Rows end with -1; a walk that
    came out shorter than `shortest` in all attempts is -1 throughout. A walk depends on the seed and its
    number alone.
    """
    walks = np.full((count, length), -1, np.int32)
    times = np.full((count, length - 1), -1, np.int64)
    if len(links.targets):
        # Saves start-up time: numba takes half a second to load.
        from toffee_dist.kernels.loops.walks import walk_block

        later = sum_later(links, decay)
        walk_block(
            links.ends,
            links.sources,
            links.targets,
            links.steps,
            later,
            seed,
            first,
            shortest,
            ATTEMPTS,
            walks,
            times,
        )
    return walks, times
