"""TNE: one pass over the rows of Z, each moved by a projected gradient step while the others stay."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.kernels.loops.compiled import compiled

# Halvings of a step before a row stays where it is.
MOST_HALVINGS = 30
# What the public code adds to a row after it has subtracted the smallest entry.
PUBLISHED_FLOOR = 1e-4


@compiled
def move_rows(
    ends: NDArray[np.int64],
    neighbours: NDArray[np.int32],
    pull: NDArray[np.float64],
    live: NDArray[np.bool_],
    Z: NDArray[np.float64],
    gram: NDArray[np.float64],
    steps: NDArray[np.float64],
) -> None:
    """Move every live row of Z once; the objective falls or stays.

        q(z) = −b·z + 2 zᵀMz,   b = 4 Σ_{v∈N(u)} z_v + pull_u,   M = Σ_{v≠u} z_v z_vᵀ,   z ≥ 0, ‖z‖ = 1

    A step is good where q is below its quadratic model: the projection minimises the model over the set, so q
    then cannot rise. Steps are remembered by row, doubled after a good one and halved until one is.

    Parameters
    ----------
    ends, neighbours
        The links of every node, without itself.
    pull : (n, r)
        λ times the row's vectors in the snapshots before and after.
    live : (n,)
        Which rows take part; the others are zero.
    Z, gram, steps : (n, r), (r, r), (n,)
        Changed in place; gram = ZᵀZ.
    """
    rank = Z.shape[1]
    b, slope, y = np.empty(rank), np.empty(rank), np.empty(rank)
    Mz, My = np.empty(rank), np.empty(rank)
    for u in range(Z.shape[0]):
        if not live[u]:
            continue
        z = Z[u]
        _linear(ends, neighbours, pull, Z, u, b)
        # M = gram − z zᵀ.
        _times(gram, z, Mz)
        square = _dot(z, z)
        for k in range(rank):
            Mz[k] -= square * z[k]
            slope[k] = 4.0 * Mz[k] - b[k]
        value = 2.0 * _dot(z, Mz) - _dot(b, z)
        moved = False
        for _ in range(MOST_HALVINGS):
            step = steps[u]
            for k in range(rank):
                y[k] = z[k] - step * slope[k]
            _project(y)
            _times(gram, y, My)
            inner = _dot(z, y)
            far = first = 0.0
            for k in range(rank):
                My[k] -= inner * z[k]
                far += (y[k] - z[k]) * (y[k] - z[k])
                first += slope[k] * (y[k] - z[k])
            if far == 0.0:
                break
            found = 2.0 * _dot(y, My) - _dot(b, y)
            if found <= value + first + far / (2.0 * step) and found <= value:
                moved = True
                break
            steps[u] = step / 2.0
        if moved:
            for i in range(rank):
                for j in range(rank):
                    gram[i, j] += y[i] * y[j] - z[i] * z[j]
            for k in range(rank):
                z[k] = y[k]
            steps[u] *= 2.0


@compiled
def move_rows_as_published(
    ends: NDArray[np.int64],
    neighbours: NDArray[np.int32],
    pull: NDArray[np.float64],
    live: NDArray[np.bool_],
    Z: NDArray[np.float64],
    gram: NDArray[np.float64],
    old: NDArray[np.float64],
    weight: float,
    step: float,
) -> None:
    """Move every live row as the public code does: step 1/L from an extrapolated point, and its projection.

    The projection subtracts the row's smallest entry and adds 1e-4, which is not the nearest point: the
    objective may rise. `old` is Z one pass earlier, and gets the Z of this one's start.
    """
    rank = Z.shape[1]
    b, y, My, z = np.empty(rank), np.empty(rank), np.empty(rank), np.empty(rank)
    for u in range(Z.shape[0]):
        if not live[u]:
            continue
        _linear(ends, neighbours, pull, Z, u, b)
        for k in range(rank):
            z[k] = Z[u, k]
            y[k] = z[k] + weight * (z[k] - old[u, k])
            old[u, k] = z[k]
        _times(gram, y, My)
        inner = _dot(z, y)
        smallest = np.inf
        for k in range(rank):
            y[k] -= step * (4.0 * (My[k] - inner * z[k]) - b[k])
            smallest = min(smallest, y[k])
        for k in range(rank):
            y[k] += PUBLISHED_FLOOR - smallest
        size = np.sqrt(_dot(y, y))
        for k in range(rank):
            y[k] /= size
            Z[u, k] = y[k]
        for i in range(rank):
            for j in range(rank):
                gram[i, j] += y[i] * y[j] - z[i] * z[j]


@compiled
def _linear(ends: Any, neighbours: Any, pull: Any, Z: Any, u: int, b: Any) -> None:
    for k in range(b.shape[0]):
        b[k] = 0.0
    for at in range(ends[u], ends[u + 1]):
        v = Z[neighbours[at]]
        for k in range(b.shape[0]):
            b[k] += v[k]
    for k in range(b.shape[0]):
        b[k] = 4.0 * b[k] + pull[u, k]


@compiled
def _project(y: Any) -> None:
    """Move y to the nearest vector of length 1 without negative entries."""
    size, best = 0.0, 0
    for k in range(y.shape[0]):
        if y[k] > y[best]:
            best = k
        size += max(y[k], 0.0) ** 2
    if size > 0.0:
        size = np.sqrt(size)
        for k in range(y.shape[0]):
            y[k] = max(y[k], 0.0) / size
    else:
        for k in range(y.shape[0]):
            y[k] = 0.0
        y[best] = 1.0


@compiled
def _times(M: Any, z: Any, out: Any) -> None:
    for i in range(out.shape[0]):
        out[i] = _dot(M[i], z)


@compiled
def _dot(u: Any, v: Any) -> float:
    total = 0.0
    for k in range(u.shape[0]):
        total += u[k] * v[k]
    return total
