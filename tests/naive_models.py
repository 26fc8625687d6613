"""Slow and obvious twins of the models that learn from neighbourhoods: loops over Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
MASK = (1 << 64) - 1


class Draws:
    """SplitMix64, stream `number` of a seed."""

    def __init__(self, seed: int, number: int) -> None:
        self.state = seed
        self.bits()
        self.state = self.bits() ^ number
        self.state = self.bits()

    def bits(self) -> int:
        self.state = (self.state + 0x9E3779B97F4A7C15) & MASK
        z = self.state
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
        return z ^ (z >> 31)

    def uniform(self) -> float:
        return (self.bits() >> 11) * 2.0**-53

    def below(self, count: int) -> int:
        return int(self.uniform() * count)

    def pick(self, chance: Array, other: Array) -> int:
        k = self.below(len(chance))
        return k if self.uniform() < chance[k] else int(other[k])


def timed_links(X: Array, both_ways: bool = False) -> list[tuple[int, int, int]]:
    """Every non-zero (i, t, j) of a dense n×n×T tensor, sorted; with `both_ways`, each also as (j, t, i)."""
    forth = [(int(i), int(t), int(j)) for i, j, t in zip(*np.nonzero(X), strict=True)]
    back = [(j, t, i) for i, t, j in forth if i != j] if both_ways else []
    return sorted([*forth, *back])


def next_chances(
    links: list[tuple[int, int, int]], node: int, now: int, decay: float
) -> dict[tuple[int, int], float]:
    """The probability of every strictly later link (step, neighbour) of a node."""
    steps = [t for _, t, _ in links]
    span = max(max(steps) - min(steps), 1)
    later = [(t, j) for i, t, j in links if i == node and t > now]
    weights = [math.exp(-decay * (t - min(steps)) / span) for t, _ in later]
    return {key: w / sum(weights) for key, w in zip(later, weights, strict=True)}


def walk(
    links: list[tuple[int, int, int]],
    seed: int,
    number: int,
    length: int,
    shortest: int,
    attempts: int,
    decay: float,
) -> list[int]:
    """One walk, link by link; empty where every attempt was too short."""
    draws = Draws(seed, number)
    for _ in range(attempts):
        i, now, j = links[draws.below(len(links))]
        nodes = [i, j]
        while len(nodes) < length:
            later = [(t, b) for a, t, b in links if a == nodes[-1] and t > now]
            if not later:
                break
            chance = draws.uniform()
            if decay == 0:
                k = int(chance * len(later))
            else:
                shares = list(next_chances(links, nodes[-1], now, decay).values())
                total, k = 0.0, -1
                while total <= chance and k < len(shares) - 1:
                    k += 1
                    total += shares[k]
            now, node = later[k]
            nodes.append(node)
        if len(nodes) >= shortest:
            return nodes
    return []


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + math.exp(-x))


def skipgram_loss(u: Array, v: Array, negatives: list[Array]) -> float:
    """−log σ(u·v) − Σ log σ(−u·v')."""
    return -math.log(sigmoid(float(u @ v))) - sum(math.log(sigmoid(-float(u @ w))) for w in negatives)


def skipgram_epoch(
    walks: list[list[int]],
    window: int,
    negatives: int,
    rate: float,
    last_rate: float,
    seed: int,
    epoch: int,
    chance: Array,
    other: Array,
    inner: Array,
    outer: Array,
) -> float:
    """One epoch over walks in this order, one number at a time; changes inner and outer."""
    draws = Draws(seed, epoch)
    losses = []
    for at, nodes in enumerate(walks):
        step = rate + (last_rate - rate) * at / len(walks)
        for i, node in enumerate(nodes):
            reach = 1 + draws.below(window)
            for j in range(max(0, i - reach), min(len(nodes), i + reach + 1)):
                if j == i:
                    continue
                u, loss = inner[nodes[j]], 0.0
                error = np.zeros_like(u)
                targets = [(node, 1.0)]
                for _ in range(negatives):
                    drawn = draws.pick(chance, other)
                    if drawn != node:
                        targets.append((drawn, 0.0))
                for target, label in targets:
                    p = sigmoid(float(u @ outer[target]))
                    loss -= math.log(p if label else 1 - p)
                    g = (label - p) * step
                    error += g * outer[target]
                    outer[target] += g * u
                u += error
                losses.append(loss)
    return float(np.mean(losses)) if losses else 0.0


def hawkes_intensity(
    s: Array, x: Array, history: list[tuple[Array, float]], delta: float, sign: float
) -> float:
    """λ = −‖s−x‖² + Σ_h a_h (−‖h−x‖²) exp(sign·δ·gap),  a = softmax_h(−‖s−h‖²)."""
    value = -float((s - x) @ (s - x))
    if history:
        near = [math.exp(-float((s - h) @ (s - h))) for h, _ in history]
        for (h, gap), a in zip(history, near, strict=True):
            value += a / sum(near) * -float((h - x) @ (h - x)) * math.exp(sign * delta * gap)
    return value


def hawkes_loss(
    V: Array, delta: Array, s: int, asked: list[int], history: list[tuple[int, float]], sign: float
) -> float:
    """−log σ(λ of the first node asked about) − Σ log σ(−λ of the others)."""
    past = [(V[h], gap) for h, gap in history]
    scores = [hawkes_intensity(V[s], V[x], past, delta[s], sign) for x in asked]
    return -math.log(sigmoid(scores[0])) - sum(math.log(sigmoid(-score)) for score in scores[1:])


def numerical_gradient(f: Callable[[Array], float], x: Array, h: float = 1e-6) -> Array:
    """Central differences of a function of an array."""
    out = np.zeros_like(x, dtype=float)
    for at in np.ndindex(*x.shape):
        high, low = x.astype(float).copy(), x.astype(float).copy()
        high[at] += h
        low[at] -= h
        out[at] = (f(high) - f(low)) / (2 * h)
    return out


def hawkes_epoch(
    links: list[tuple[int, int, int]],
    order: Array,
    history: int,
    negatives: int,
    rate: float,
    decaying: bool,
    seed: int,
    epoch: int,
    chance: Array,
    other: Array,
    V: Array,
    delta: Array,
) -> float:
    """One epoch, each step by finite differences of the loss; changes V and delta."""
    draws = Draws(seed, epoch)
    steps = [t for _, t, _ in links]
    span = max(max(steps) - min(steps), 1)
    sign = -1.0 if decaying else 1.0
    losses = []
    for at in order:
        s, t, x = links[at]
        own = [k for k in range(at) if links[k][0] == s][-history:]
        past = [(links[k][2], (t - links[k][1]) / span) for k in own]
        asked = [x, *(draws.pick(chance, other) for _ in range(negatives))]

        # The kernel treats every place of a node as its own variable and adds the gradients up: the same.
        both = np.concatenate([V.ravel(), delta])

        def loss(values: Array, s: int = s, asked: list[int] = asked, past: Any = past) -> float:
            vectors, decays = values[: V.size].reshape(V.shape), values[V.size :]
            return hawkes_loss(vectors, decays, s, asked, past, sign)

        losses.append(loss(both))
        both -= rate * numerical_gradient(loss, both)
        V[:], delta[:] = both[: V.size].reshape(V.shape), both[V.size :]
        if decaying:
            np.maximum(delta, 0.0, out=delta)
    return float(np.mean(losses))


def tne_objective(G: list[Array], Z: list[Array], smoothness: float) -> float:
    """Σ_τ ‖G_τ − Z_τZ_τᵀ‖² + λ Σ_τ Σ_u (1 − z_τ(u)·z_{τ−1}(u)) over rows that both have."""
    value = 0.0
    for snapshot, rows in zip(G, Z, strict=True):
        for u in range(len(rows)):
            for v in range(len(rows)):
                value += (snapshot[u, v] - rows[u] @ rows[v]) ** 2
    for before, rows in pairwise(Z):
        for u in range(len(rows)):
            if before[u].any() and rows[u].any():
                value += smoothness * (1 - before[u] @ rows[u])
    return float(value)


def tne_pass(G: Array, Z: Array, pull: Array, steps: Array) -> None:
    """One pass of projected gradient steps over the rows, each with a searched step; changes Z and steps."""
    for u in range(len(Z)):
        if not Z[u].any():
            continue

        def value(z: Array, u: int = u) -> float:
            far = sum(float(G[u, v] - z @ Z[v]) ** 2 for v in range(len(Z)) if v != u)
            return 2 * far - float(pull[u] @ z)

        slope = -4 * sum(
            ((G[u, v] - Z[u] @ Z[v]) * Z[v] for v in range(len(Z)) if v != u), np.zeros(Z.shape[1])
        )
        slope = slope - pull[u]
        for _ in range(30):
            y = np.maximum(Z[u] - steps[u] * slope, 0.0)
            if y.any():
                y /= np.linalg.norm(y)
            else:
                y[np.argmax(Z[u] - steps[u] * slope)] = 1.0
            move = y - Z[u]
            if not move.any():
                break
            model = value(Z[u]) + slope @ move + move @ move / (2 * steps[u])
            if value(y) <= model and value(y) <= value(Z[u]):
                Z[u] = y
                steps[u] *= 2
                break
            steps[u] /= 2


def tne_published_pass(G: Array, Z: Array, pull: Array, old: Array, weight: float, step: float) -> None:
    """One pass of the public code's steps over the rows; changes Z and old."""
    for u in range(len(Z)):
        y = Z[u] + weight * (Z[u] - old[u])
        old[u] = Z[u]
        slope = -4 * sum(((G[u, v] - y @ Z[v]) * Z[v] for v in range(len(Z)) if v != u), np.zeros(Z.shape[1]))
        y = y - step * (slope - pull[u])
        y = y - y.min() + 1e-4
        Z[u] = y / np.linalg.norm(y)


def snapshot(X: Array, start: int, stop: int) -> Array:
    """The 0/1 symmetric graph of the steps [start, stop)."""
    seen = (X[:, :, start:stop] != 0).any(axis=2)
    return np.asarray((seen | seen.T), dtype=float)


def meetings(walks: list[list[int]], times: list[list[float]], n: int, window: int, decay: float) -> Array:
    """Dense Σ exp(−decay·Δt) of nodes that meet on walks at most `window` links apart."""
    P = np.zeros((n, n))
    for nodes, when in zip(walks, times, strict=True):
        for i in range(len(nodes)):
            for j in range(i + 1, min(len(nodes), i + window + 1)):
                if nodes[i] != nodes[j]:
                    weight = math.exp(-decay * (when[j] - when[i]))
                    P[nodes[i], nodes[j]] += weight
                    P[nodes[j], nodes[i]] += weight
    return P


def autoencoder_loss(X: Array, near: Array, weights: list[Array], guide: Any) -> float:
    """The loss of kernels/autoencoder.py, entry by entry."""
    W1, b1, W2, b2, W3, b3, W4, b4 = weights
    loss = guide.decay * sum(float((W**2).sum()) for W in (W1, W2, W3, W4))
    Y = []
    for x in X:
        y = np.tanh(np.tanh(x @ W1 + b1) @ W2 + b2)
        out = 1 / (1 + np.exp(-(np.tanh(y @ W3 + b3) @ W4 + b4)))
        loss += sum((guide.nonzero if x[k] != 0 else 1) ** 2 * (out[k] - x[k]) ** 2 for k in range(len(x)))
        Y.append(y)
    for u in range(len(X)):
        for v in range(len(X)):
            loss += guide.pull * near[u, v] * float((Y[u] - Y[v]) @ (Y[u] - Y[v]))
    return float(loss)
