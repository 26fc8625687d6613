"""Walks that respect time: every link is strictly later than the one before."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.loops.compiled import compiled
from toffee_dist.kernels.loops.draws import below, seed_state, uniform


@compiled
def walk_block(
    ends: NDArray[np.int64],
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    steps: NDArray[np.int64],
    later: NDArray[np.float64],
    seed: int,
    first: int,
    shortest: int,
    attempts: int,
    walks: NDArray[np.int32],
    times: NDArray[np.int64],
) -> None:
    """Draw the walks numbered from `first`; a row of `walks` is nodes, then -1.

    Parameters
    ----------
    ends : (n+1,) where the links of every node begin and end
    sources, targets, steps : (m,) the links, by node and then by step
    later : (m,)
        Σ exp(−decay·t) over the link and those after it of the same node; empty draws uniformly.
    shortest, attempts
        A walk of fewer nodes is drawn again, this many times in all, and left out after that.
    walks, times : (count, length) and (count, length−1)
        Get the nodes, and the step of each link.
    """
    n_links, length = targets.shape[0], walks.shape[1]
    biased = later.shape[0] > 0
    state = np.empty(1, np.uint64)
    for row in range(walks.shape[0]):
        seed_state(state, seed, first + row)
        count = 0
        for _ in range(attempts):
            link = below(state, n_links)
            walks[row, 0] = sources[link]
            walks[row, 1] = targets[link]
            times[row, 0] = steps[link]
            count = 2
            while count < length:
                node, now = walks[row, count - 1], times[row, count - 2]
                low, stop = ends[node], ends[node + 1]
                high = stop
                while low < high:
                    middle = (low + high) // 2
                    if steps[middle] > now:
                        high = middle
                    else:
                        low = middle + 1
                if low == stop:
                    break
                if biased:
                    link = _drawn_late(later, low, stop, uniform(state))
                else:
                    link = low + below(state, stop - low)
                walks[row, count] = targets[link]
                times[row, count - 1] = steps[link]
                count += 1
            if count >= shortest:
                break
        if count < shortest:
            count = 0
        walks[row, count:] = -1


@compiled
def _drawn_late(later: Any, start: int, stop: int, chance: float) -> int:
    """Draw a link of [start, stop) by its weight; `later` falls from start to stop."""
    # The last link whose sum from there on exceeds what is left.
    wanted = later[start] * (1.0 - chance)
    low, high = start, stop
    while low < high:
        middle = (low + high) // 2
        if later[middle] >= wanted:
            low = middle + 1
        else:
            high = middle
    return max(low - 1, start)
