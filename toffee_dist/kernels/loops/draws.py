"""Random numbers inside compiled loops: SplitMix64, a stream per seed and number."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.loops.compiled import compiled

State = NDArray[np.uint64]

_STEP, _MIX_1, _MIX_2 = (
    np.uint64(0x9E3779B97F4A7C15),
    np.uint64(0xBF58476D1CE4E5B9),
    np.uint64(0x94D049BB133111EB),
)
_30, _27, _31, _11 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(11)


@compiled
def seed_state(state: State, seed: int, number: int) -> None:
    """Put a state at the start of stream `number` of a seed."""
    state[0] = np.uint64(seed)
    next_bits(state)
    state[0] = next_bits(state) ^ np.uint64(number)
    state[0] = next_bits(state)


@compiled
def next_bits(state: State) -> Any:
    """Return 64 random bits."""
    state[0] += _STEP
    z = state[0]
    z = (z ^ (z >> _30)) * _MIX_1
    z = (z ^ (z >> _27)) * _MIX_2
    return z ^ (z >> _31)


@compiled
def uniform(state: State) -> float:
    """Return a number from [0, 1)."""
    return np.float64(next_bits(state) >> _11) * 2.0**-53


@compiled
def below(state: State, count: int) -> int:
    """Return a whole number from [0, count)."""
    return int(uniform(state) * count)


@compiled
def fill_alias(weights: NDArray[np.float64], chance: NDArray[np.float64], other: NDArray[np.int64]) -> None:
    """Make the table from which `draw` draws k with probability weights[k] / Σ weights (Walker, Vose)."""
    n = weights.shape[0]
    total = weights.sum()
    small, large = np.empty(n, np.int64), np.empty(n, np.int64)
    n_small = n_large = 0
    for k in range(n):
        chance[k] = weights[k] * n / total
        other[k] = k
        if chance[k] < 1.0:
            small[n_small] = k
            n_small += 1
        else:
            large[n_large] = k
            n_large += 1
    while n_small > 0 and n_large > 0:
        n_small -= 1
        low, high = small[n_small], large[n_large - 1]
        other[low] = high
        chance[high] -= 1.0 - chance[low]
        if chance[high] < 1.0:
            n_large -= 1
            small[n_small] = high
            n_small += 1
    # What rounding has left over is certain.
    for k in range(n_large):
        chance[large[k]] = 1.0
    for k in range(n_small):
        chance[small[k]] = 1.0


@compiled
def draw(state: State, chance: NDArray[np.float64], other: NDArray[np.int64]) -> int:
    """Draw from a table of `fill_alias`."""
    k = below(state, chance.shape[0])
    return k if uniform(state) < chance[k] else int(other[k])
