"""How far chance goes: the tail of a sum of squares, and the false discovery rate of many answers at once.

Whether a node moves, a community, the whole graph, or whether a rhythm is there: each statistic of
`kernels.changes` is a quadratic form of sums over many events. Where nothing changes, it is distributed like
Σ_i w_i·χ²_1 with weights that are known. The tail comes from the saddlepoint of its cumulants
K(z) = −½ Σ log(1 − 2zw) (Lugannani and Rice; Kuonen 1999): right to a few per cent of p, however small p is.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy.special import ndtr

from toffee_dist.tensor import Floats

# Steps of the search for the saddlepoint at the most: each halves the interval or better; ten are usual.
STEPS = 60
# The saddlepoint is found where K' is right to this share.
CLOSE = 1e-12
# So near to the mean (in z·standard deviation) the formula is 0/0; its limit is used.
NEAR_MEAN = 1e-3
# Numbers of (row, weight, factor) that are worked on at once.
AT_ONCE = 1 << 20


def quadratic_tail(x: ArrayLike, weights: ArrayLike, factors: ArrayLike = (1.0,)) -> Floats:
    """Return P(Σ_ij w_i·f_j·χ²_1 ≥ x), row by row.

    Parameters
    ----------
    x : (rows,)
        What was seen.
    weights : (rows, m)
        Not negative; a row of zeros has chance 1 unless x is positive.
    factors : (q,)
        Common to all rows.
    """
    x, W = np.atleast_1d(np.asarray(x, dtype=np.float64)), np.atleast_2d(np.asarray(weights, np.float64))
    f = np.asarray(factors, dtype=np.float64)
    found = np.empty(len(x))
    size = max(1, AT_ONCE // max(W.shape[1] * len(f), 1))
    for start in range(0, len(x), size):
        rows = slice(start, start + size)
        found[rows] = _tail(x[rows], W[rows], f)
    return found


def _tail(x: Floats, W: Floats, f: Floats) -> Floats:
    W = np.maximum(W, 0.0)
    scale = W.max(axis=1, initial=0.0) * f.max(initial=0.0)
    alive = scale > 0
    found = np.where(x > 0, 0.0, 1.0)
    if not alive.any():
        return found
    w = (W[alive, :, None] * f).reshape(int(alive.sum()), -1) / scale[alive, None]
    seen = x[alive] / scale[alive]
    mean = w.sum(axis=1)
    # K'(z) = Σ w/(1 − 2zw) grows from 0 (z → −∞) to ∞ (z → 1/2, the largest weight being 1): bisect it.
    low, high = -w.shape[1] / np.maximum(2 * seen, 1e-300), np.full(len(seen), 0.5)
    z = np.zeros(len(seen))
    for _ in range(STEPS):
        left = 1 - 2 * z[:, None] * w
        slope = (w / left).sum(axis=1)
        # A row that is there stays: what becomes of it must not depend on the others.
        there = np.abs(slope - seen) <= CLOSE * seen
        if there.all():
            break
        above = slope > seen
        high, low = np.where(above, z, high), np.where(above, low, z)
        with np.errstate(divide="ignore", over="ignore"):
            step = z - (slope - seen) / (2 * np.square(w / left).sum(axis=1))
        inside = (step > low) & (step < high)
        z = np.where(there, z, np.where(inside, step, (low + high) / 2))
    left = 1 - 2 * z[:, None] * w
    K = -0.5 * np.log(left).sum(axis=1)
    curve = 2 * np.square(w / left).sum(axis=1)
    root = np.sign(z) * np.sqrt(np.maximum(2 * (z * seen - K), 0.0))
    tilt = z * np.sqrt(curve)
    near = np.abs(tilt) < NEAR_MEAN
    with np.errstate(divide="ignore", invalid="ignore"):
        p = ndtr(-(root + np.log(tilt / root) / root))
    # Its limit at the mean: half, less a third cumulant.
    third, second = 8 * (w**3).sum(axis=1), 2 * np.square(w).sum(axis=1)
    limit = 0.5 - third / (6 * np.sqrt(2 * np.pi) * second**1.5) - (seen - mean) / np.sqrt(2 * np.pi * second)
    found[alive] = np.where(seen <= 0, 1.0, np.clip(np.where(near, limit, p), 0.0, 1.0))
    return found


def discovery_rates(p: ArrayLike) -> Floats:
    """Return q of every p: the smallest false discovery rate at which it is on the list.

    Benjamini and Hochberg: of p sorted, q_(i) = min over j ≥ i of p_(j)·m/j.

    Examples
    --------
    >>> discovery_rates([0.01, 0.04, 0.03, 1.0]).tolist()
    [0.04, 0.05333333333333334, 0.05333333333333334, 1.0]
    """
    p = np.asarray(p, dtype=np.float64)
    order = np.argsort(p, kind="stable")
    ranked = p[order] * len(p) / np.arange(1, len(p) + 1)
    found: NDArray[np.float64] = np.empty(len(p))
    found[order] = np.minimum.accumulate(ranked[::-1])[::-1]
    return np.minimum(found, 1.0)
