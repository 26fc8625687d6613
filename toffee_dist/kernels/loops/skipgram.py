"""Skip-gram with negative sampling, one thread, in the order of the walks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.loops.compiled import compiled
from toffee_dist.kernels.loops.draws import below, draw, seed_state


@compiled
def train_epoch(
    tokens: NDArray[np.int32],
    ends: NDArray[np.int64],
    order: NDArray[np.int64],
    window: int,
    negatives: int,
    rate: float,
    last_rate: float,
    seed: int,
    epoch: int,
    chance: NDArray[np.float64],
    other: NDArray[np.int64],
    inner: NDArray[np.float32],
    outer: NDArray[np.float32],
) -> float:
    """Learn from every walk once; return the mean loss of a pair.

        loss = −log σ(u·v) − Σ_negatives log σ(−u·v')

    with u of the neighbour in `inner` and v of the node in `outer`. The window of a node is drawn from
    1 … window, as word2vec does: near neighbours count more. The rate falls linearly from `rate` to
    `last_rate`.
    """
    state = np.empty(1, np.uint64)
    seed_state(state, seed, epoch)
    error = np.empty(inner.shape[1], np.float32)
    loss, pairs = 0.0, 0
    n_walks = order.shape[0]
    for at in range(n_walks):
        walk = tokens[ends[order[at]] : ends[order[at] + 1]]
        count = walk.shape[0]
        step = np.float32(rate + (last_rate - rate) * at / n_walks)
        for i in range(count):
            reach = 1 + below(state, window)
            for j in range(max(0, i - reach), min(count, i + reach + 1)):
                if j != i:
                    loss += _learn(
                        inner[walk[j]], outer, walk[i], negatives, step, state, chance, other, error
                    )
                    pairs += 1
    return loss / max(pairs, 1)


@compiled
def _learn(
    u: Any,
    outer: Any,
    node: int,
    negatives: int,
    step: Any,
    state: Any,
    chance: Any,
    other: Any,
    error: Any,
) -> float:
    loss = 0.0
    error[:] = np.float32(0)
    for number in range(negatives + 1):
        target = node
        if number > 0:
            target = draw(state, chance, other)
            if target == node:
                continue
        v = outer[target]
        dot = np.float32(0)
        for k in range(u.shape[0]):
            dot += u[k] * v[k]
        sign = 1.0 if number == 0 else -1.0
        # log(1 + e^{−x}) that does not overflow.
        x = sign * np.float64(dot)
        small = math.exp(-abs(x))
        loss += math.log1p(small) + max(-x, 0.0)
        miss = 1.0 / (1.0 + small) if x < 0 else small / (1.0 + small)
        g = np.float32(sign * miss) * step
        for k in range(u.shape[0]):
            error[k] += g * v[k]
            v[k] += g * u[k]
    for k in range(u.shape[0]):
        u[k] += error[k]
    return loss
