"""The filter in time, formula by formula: loops over nodes, directions, frequencies and entries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rows_in_time(X: Array, V: Array) -> Array:
    """y_i(t) = Σ_j X(i,j,t) V_j, shape (n, T, r)."""
    return np.stack([X[:, :, t] @ V for t in range(X.shape[2])], axis=1)


def noise(X: Array, V: Array) -> Array:
    """N_l = Σ_entries w²·V_jl²."""
    return np.array(
        [sum((X[:, j] ** 2).sum() * V[j, c] ** 2 for j in range(len(V))) for c in range(V.shape[1])]
    )


def energies(y: Array, length: int, patterns: Array | None = None) -> Array:
    """E_kl = Σ_i |Σ_t (y_il(t) − mean − patterns)·exp(−2πi·k·t/length)|², shape (length//2 + 1, r)."""
    n, T, r = y.shape
    E = np.zeros((length // 2 + 1, r))
    for k in range(len(E)):
        wave = np.exp(-2j * np.pi * k * np.arange(T) / length)
        for i in range(n):
            for c in range(r):
                left = y[i, :, c] - y[i, :, c].mean()
                for b in [] if patterns is None else patterns.T:
                    left = left - (y[i, :, c] @ b) * b
                E[k, c] += abs((left * wave).sum()) ** 2
    return E


def noise_left(patterns: Array, length: int) -> Array:
    """The share of white noise that is left at every frequency: ‖(I − BBᵀ) wave‖² / T."""
    T = len(patterns)
    found = []
    for k in range(length // 2 + 1):
        wave = np.exp(-2j * np.pi * k * np.arange(T) / length)
        left = wave - patterns @ (patterns.T @ wave)
        found.append(np.vdot(left, left).real / T)
    return np.array(found)


def kernel(E: Array, N: Array, length: int, n_lags: int, strength: float, left: Array | None = None) -> Array:
    """κ_l(lag) = irfft of max(0, 1 − β·N_l/E_kl), shape (n_lags, r)."""
    g = np.zeros_like(E)
    for k, c in np.ndindex(E.shape):
        floor = strength * N[c] * (1.0 if left is None else left[k])
        g[k, c] = max(0.0, 1 - floor / E[k, c]) if E[k, c] > 0 else 0.0
    return np.fft.irfft(g, length, axis=0)[:n_lags]


def two_sided(kappa: Array, patterns: Array | None = None, gains: Array | None = None) -> Array:
    """H = P K P + 1/T + Σ_m g_m b_m b_mᵀ of one direction, K of κ, P = I − 11ᵀ/T − Σ_m b_m b_mᵀ."""
    T = len(kappa)
    K = np.array([[kappa[abs(t - s)] for s in range(T)] for t in range(T)])
    P, own = np.eye(T) - 1 / T, np.zeros((T, T))
    if patterns is not None and gains is not None:
        for b, g in zip(patterns.T, gains, strict=True):
            P = P - np.outer(b, b)
            own += g * np.outer(b, b)
    return np.asarray(P @ K @ P + 1 / T + own)


def pattern_gains(X: Array, V: Array, patterns: Array, strength: float) -> Array:
    """max(0, 1 − β·N/E) of every pattern and direction: E = Σ_i (b·y_il)², N = Σ_entries b(t)²·w²·V_jl²."""
    y, found = rows_in_time(X, V), np.zeros((patterns.shape[1], V.shape[1]))
    for m, c in np.ndindex(found.shape):
        b = patterns[:, m]
        E = sum((b @ y[i, :, c]) ** 2 for i in range(len(y)))
        N = sum(b[t] ** 2 * X[i, j, t] ** 2 * V[j, c] ** 2 for i, j, t in zip(*np.nonzero(X), strict=True))
        found[m, c] = max(0.0, 1 - strength * N / E) if E > 0 else 0.0
    return found


def pattern_sums(X: Array, V: Array) -> Array:
    """G(s, t) = Σ_i y⊥_i(s)·y⊥_i(t), less what every entry adds to it alone."""
    y, T = rows_in_time(X, V), X.shape[2]
    G = np.zeros((T, T))
    for i in range(len(X)):
        mean = y[i].sum(axis=0)
        size = np.linalg.norm(mean)
        P = np.eye(V.shape[1]) - (np.outer(mean, mean) / size**2 if size > 0 else 0)
        G += y[i] @ P @ y[i].T
        for j, t in zip(*np.nonzero(X[i]), strict=True):
            G[t, t] -= X[i, j, t] ** 2 * V[j] @ P @ V[j]
    return G


def steadiness(X: Array, V: Array, H: Array) -> tuple[Array, Array]:
    """Means of nodes, and 1 − W_i/M_i: M of Z = H y about them, W of events at any step, each alone."""
    n, _, T = X.shape
    y = rows_in_time(X, V)
    mean, share = y.sum(axis=1) / T, np.zeros(n)
    for i in range(n):
        moved = sum(np.sum((H[c] @ y[i, :, c] - mean[i, c]) ** 2) for c in range(V.shape[1]))
        unrelated = sum(
            X[i, j, t] ** 2 * V[j, c] ** 2 * np.sum((H[c][:, s] - 1 / T) ** 2) / T
            for j, t in zip(*np.nonzero(X[i]), strict=True)
            for c in range(V.shape[1])
            for s in range(T)
        )
        share[i] = max(0.0, 1 - unrelated / moved) if moved > 0 else 0.0
    return mean, share


def causal_row(kappa: Array, t: int, n_steps: int, reach: int | None = None) -> Array:
    """The weights of steps at step t: about the mean of the last `reach`, κ at lag 0 and 2κ beyond."""
    first = 0 if reach is None else max(0, t + 1 - reach)
    one_sided = np.zeros(n_steps)
    for s in range(first, t + 1):
        one_sided[s] = kappa[0] if s == t else 2 * kappa[t - s]
    out = one_sided.copy()
    out[first : t + 1] += (1 - one_sided.sum()) / (t + 1 - first)
    return out


def chain_moments(n_steps: int, reach: int) -> list[int]:
    """When a chain learns its gains: whenever a quarter of what it reaches is new."""
    found = [1]
    while found[-1] <= n_steps:
        found.append(found[-1] + max(1, int(np.ceil(min(found[-1], reach) / 4))))
    return found


def chain_trajectory(X: Array, V: Array, reach: int, padded: Callable[[int], int]) -> Array:
    """Z of all steps of a causal chain whose kernel reaches so far, from all entries there ever were."""
    T = X.shape[2]
    y = rows_in_time(X, V)
    Z = np.zeros_like(y)
    for t in range(T):
        moment = max(at for at in chain_moments(T, reach) if at <= t + 1)
        past = X[:, :, max(0, moment - reach) : moment]
        length = padded(past.shape[2])
        kappa = np.zeros((reach, V.shape[1]))
        kappa[: past.shape[2]] = kernel(
            energies(rows_in_time(past, V), length), noise(past, V), length, past.shape[2], 1.0
        )
        for c in range(V.shape[1]):
            Z[:, t, c] = y[:, :, c] @ causal_row(kappa[:, c], t, T, reach)
    return Z


def link_parts(entries: list[tuple[int, int, float]], B: Array, H: Array, Q: Array) -> dict[str, Any]:
    """What each neighbour and each step adds to Σ over entries (target, step, value) of (w·B_j ∘ H_s) Q."""
    by_node: dict[int, Array] = {}
    by_step: dict[int, Array] = {}
    total = np.zeros(Q.shape[1])
    for target, step, value in entries:
        part = np.array([value * B[target, c] * H[step, c] for c in range(B.shape[1])]) @ Q
        by_node[target] = by_node.get(target, 0) + part
        by_step[step] = by_step.get(step, 0) + part
        total += part
    return {"links": by_node, "steps": by_step, "total": total}


def rhythm_part(Z: Array, k: int, t: int) -> Array:
    """The wave of frequency k in a path Z (T, r), at step t: what a path without it would lack there."""
    T = len(Z)
    hat = np.fft.fft(Z, axis=0)
    alone = np.zeros_like(hat)
    for index in {k, (T - k) % T}:
        alone[index] = hat[index]
    return np.asarray(np.fft.ifft(alone, axis=0).real[t])
