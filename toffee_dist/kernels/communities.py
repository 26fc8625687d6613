"""Which nodes belong together: k-means on the directions of vectors."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from toffee_dist.tensor import Floats, Ints

# As many communities as can be told apart by colour.
MOST_COMMUNITIES = 7
# Nodes that the number of communities is judged on.
JUDGED = 1000
# Starts of k-means, and rounds of each at the most.
STARTS, ROUNDS = 3, 50


def find_communities(directions: Floats, seed: int) -> tuple[NDArray[np.int64], float]:
    """Return the community of each node, largest first, and how well apart they are (silhouette, −1 … 1).

    k-means on the directions; of 2 to 7 communities, as many as have the best silhouette.

    Parameters
    ----------
    directions : (nodes, r)
        Vectors at length 1: who a node is with, not how much.
    seed
        Of the starts, and of the nodes that the number is judged on.
    """
    directions = np.asarray(directions, dtype=np.float64)
    different = len(np.unique(directions.round(6), axis=0))
    judged = np.random.default_rng(seed).permutation(len(directions))[:JUDGED]
    apart = _distances(directions[judged], directions[judged])
    best, labels = 0.0, np.zeros(len(directions), dtype=np.int64)
    for count in range(2, min(MOST_COMMUNITIES, different - 1) + 1):
        found = k_means(directions, count, seed)
        if len(np.unique(found[judged])) < 2:
            continue
        score = silhouette(apart, found[judged])
        if score > best:
            best, labels = score, found
    sizes = np.bincount(labels)
    rank = np.empty_like(sizes)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    return rank[labels], best


def k_means(rows: Floats, count: int, seed: int) -> NDArray[np.int64]:
    """Return the label of every row: Lloyd's rounds from k-means++ starts, the best of a few."""
    rng = np.random.default_rng([seed, count])
    best, labels = np.inf, np.zeros(len(rows), dtype=np.int64)
    for _ in range(STARTS):
        centres = rows[[int(rng.integers(len(rows)))]]
        while len(centres) < count:
            nearest = _distances(rows, centres).min(axis=1) ** 2
            total = float(nearest.sum())
            chosen = rng.choice(len(rows), p=nearest / total) if total > 0 else rng.integers(len(rows))
            centres = np.vstack([centres, rows[[int(chosen)]]])
        found = np.full(len(rows), -1)
        for _ in range(ROUNDS):
            now = nearest_centres(rows, centres)
            if (now == found).all():
                break
            found = now
            centres = centres_of(rows, found, count)
        cost = float(np.square(_distances(rows, centres)[np.arange(len(rows)), found]).sum())
        if cost < best:
            best, labels = cost, found
    return labels


def centres_of(rows: Floats, labels: Ints, count: int) -> Floats:
    """Return the mean of the rows of each label; of a label without rows, zeros."""
    # A product with zeros and ones: 7 times as fast as adding row by row.
    members = (labels == np.arange(count)[:, None]).astype(np.float64)
    return np.asarray(members @ rows / np.maximum(members.sum(axis=1), 1)[:, None])


def nearest_centres(rows: Floats, centres: Floats) -> NDArray[np.int64]:
    """Return the nearest centre of every row."""
    # The square of the distance, but for that of the row.
    return np.asarray((np.square(centres).sum(axis=1) - rows @ (2 * centres.T)).argmin(axis=1))


def silhouette(distances: Floats, labels: Ints) -> float:
    """Return the mean of (b − a) / max(a, b): a the distance to the own label, b to the nearest other one.

    A row that is alone in its label counts 0.
    """
    names, label = np.unique(labels, return_inverse=True)
    sizes = np.bincount(label)
    to_label = np.stack([distances[:, label == c].sum(axis=1) for c in range(len(names))], axis=1)
    at = np.arange(len(label))
    own = to_label[at, label] / np.maximum(sizes[label] - 1, 1)
    others = to_label / sizes
    others[at, label] = np.inf
    nearest = others.min(axis=1)
    scale = np.maximum(own, nearest)
    score = np.divide(nearest - own, scale, out=np.zeros(len(label)), where=(scale > 0) & (sizes[label] > 1))
    return float(score.mean())


def _distances(rows: Floats, centres: Floats) -> Floats:
    squares = np.square(rows).sum(axis=1)[:, None] + np.square(centres).sum(axis=1) - 2 * rows @ centres.T
    return np.asarray(np.sqrt(np.maximum(squares, 0.0)))
