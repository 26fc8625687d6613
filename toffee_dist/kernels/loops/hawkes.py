"""HTNE: neighbours as a Hawkes process, stochastic gradients in closed form, one thread."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.loops.compiled import compiled
from toffee_dist.kernels.loops.draws import draw, seed_state

# Beyond this exponent the growing kernel would overflow; the public code returns infinity there.
LARGEST_EXPONENT = 30.0


@compiled
def train_epoch(
    ends: NDArray[np.int64],
    sources: NDArray[np.int32],
    targets: NDArray[np.int32],
    times: NDArray[np.float64],
    order: NDArray[np.int64],
    history: int,
    negatives: int,
    rate: float,
    decaying: bool,
    seed: int,
    epoch: int,
    chance: NDArray[np.float64],
    other: NDArray[np.int64],
    vectors: NDArray[np.float32],
    delta: NDArray[np.float64],
) -> float:
    """Learn from every link once, in this order; return the mean loss of a link.

        λ(x) = −‖s−x‖² + Σ_h a_h κ_h (−‖h−x‖²),   a = softmax_h(−‖s−h‖²),   κ_h = exp(∓δ_s (t − t_h))
        loss = −log σ(λ(x)) − Σ_negatives log σ(−λ(x'))

    Parameters
    ----------
    ends, sources, targets, times
        The links by node and then by time; the history of a link are the ones before it.
    decaying
        Whether an older neighbour counts less (−δ); the public code has the opposite sign.
    chance, other
        Table of the negatives.
    vectors, delta : (n, r) and (n,)
        Learnt in place.
    """
    state = np.empty(1, np.uint64)
    seed_state(state, seed, epoch)
    rank = vectors.shape[1]
    asked = np.empty(negatives + 1, np.int64)
    gradient_s, gradient_h = np.empty(rank, np.float32), np.empty((history, rank), np.float32)
    gradient_x = np.empty((negatives + 1, rank), np.float32)
    a, kappa, near, c = np.empty(history), np.empty(history), np.empty(history), np.empty(history)
    loss = 0.0
    for link in order:
        s = sources[link]
        first = max(ends[s], link - history)
        asked[0] = targets[link]
        for number in range(negatives):
            asked[number + 1] = draw(state, chance, other)
        value, slope = _gradients(
            *(vectors, targets, times, first, link, s, asked, delta[s], decaying),
            *(gradient_s, gradient_h, gradient_x, a, kappa, near, c),
        )
        loss += value
        move = np.float32(rate)
        _add(vectors[s], gradient_s, move)
        for h in range(link - first):
            _add(vectors[targets[first + h]], gradient_h[h], move)
        for number in range(negatives + 1):
            _add(vectors[asked[number]], gradient_x[number], move)
        # The decay is not negative: otherwise an older neighbour would count more.
        delta[s] = max(0.0, delta[s] - rate * slope) if decaying else delta[s] - rate * slope
    return float(loss / max(order.shape[0], 1))


@compiled
def _gradients(
    vectors: Any,
    targets: Any,
    times: Any,
    first: int,
    link: int,
    s: int,
    asked: Any,
    delta: float,
    decaying: bool,
    gradient_s: Any,
    gradient_h: Any,
    gradient_x: Any,
    a: Any,
    kappa: Any,
    near: Any,
    c: Any,
) -> tuple[float, float]:
    """Fill the gradients of one link; return its loss, and the derivative by δ_s."""
    rank, count = vectors.shape[1], link - first
    sign = -1.0 if decaying else 1.0
    S = vectors[s]
    gradient_s[:] = np.float32(0)
    best = -np.inf
    for h in range(count):
        gradient_h[h, :] = np.float32(0)
        near[h] = -_distance(S, vectors[targets[first + h]])
        best = max(best, near[h])
        gap = times[link] - times[first + h]
        kappa[h] = math.exp(min(sign * delta * gap, LARGEST_EXPONENT))
    total = 0.0
    for h in range(count):
        a[h] = math.exp(near[h] - best)
        total += a[h]
    for h in range(count):
        a[h] /= total
    loss = slope = 0.0
    for number in range(asked.shape[0]):
        x = vectors[asked[number]]
        score, mean = -_distance(S, x), 0.0
        for h in range(count):
            c[h] = -kappa[h] * _distance(vectors[targets[first + h]], x)
            mean += a[h] * c[h]
        score += mean
        side = 1.0 if number == 0 else -1.0
        y = side * score
        small = math.exp(-abs(y))
        loss += math.log1p(small) + max(-y, 0.0)
        miss = 1.0 / (1.0 + small) if y < 0 else small / (1.0 + small)
        # g = ∂loss/∂λ.
        g = -side * miss
        gx = gradient_x[number]
        g2 = np.float32(2.0 * g)
        for k in range(rank):
            # ∂λ/∂x = 2(s−x) + …,   ∂λ/∂s = −2(s−x) + …
            part = g2 * (S[k] - x[k])
            gx[k] = part
            gradient_s[k] -= part
        for h in range(count):
            H, gh = vectors[targets[first + h]], gradient_h[h]
            # λ through the distance to the neighbour, and through its attention.
            through = np.float32(2.0 * g * a[h] * kappa[h])
            attention = np.float32(2.0 * g * a[h] * (c[h] - mean))
            for k in range(rank):
                pull, turn = through * (x[k] - H[k]), attention * (S[k] - H[k])
                gx[k] -= pull
                gh[k] += pull + turn
                gradient_s[k] -= turn
            slope += g * a[h] * c[h] * sign * (times[link] - times[first + h])
    return loss, slope


@compiled
def _distance(u: Any, v: Any) -> float:
    total = np.float32(0)
    for k in range(u.shape[0]):
        total += (u[k] - v[k]) * (u[k] - v[k])
    return np.float64(total)


@compiled
def _add(v: Any, gradient: Any, rate: Any) -> None:
    for k in range(v.shape[0]):
        v[k] -= rate * gradient[k]
