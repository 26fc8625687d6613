"""Where the nodes of a report are drawn: vectors onto a plane, and which of them belong together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from sklearn.cluster import MiniBatchKMeans
from sklearn.metrics import silhouette_score
from threadpoolctl import threadpool_limits

from toffee_dist.errors import ConfigError

Method = Literal["pca", "umap"]
Plane = NDArray[np.float64]

# As many communities as can be told apart by colour and number.
MOST_COMMUNITIES = 12
# Nodes that the number of communities is judged on.
JUDGED = 1000


@dataclass(frozen=True, eq=False)
class Axes:
    """The plane that keeps most of the variance of some vectors.

    Attributes
    ----------
    mean : (r,)
    directions : (r, 2), unit columns; the largest entry of each is positive
    share : of the variance, along each of the two
    """

    mean: NDArray[np.float64]
    directions: NDArray[np.float64]
    share: tuple[float, float]

    def project(self, vectors: NDArray[Any]) -> Plane:
        """Return the coordinates (m, 2) of vectors (m, r)."""
        return np.asarray(vectors @ self.directions.astype(vectors.dtype) - self.mean @ self.directions)


def find_axes(vectors: NDArray[Any]) -> Axes:
    """Return the two leading principal axes, from the r×r covariance: vectors may be many.

    Examples
    --------
    >>> axes = find_axes(np.array([[0.0, 0.0, 0.0], [0.0, 2.0, 0.0], [0.0, 4.0, 0.0]]))
    >>> axes.project(np.array([[0.0, 3.0, 0.0]])).tolist(), axes.share
    ([[1.0, 0.0]], (1.0, 0.0))
    """
    mean = vectors.mean(axis=0, dtype=np.float64)
    centred = vectors - mean.astype(vectors.dtype)
    values, columns = np.linalg.eigh((centred.T @ centred).astype(np.float64))
    rank = len(values)
    directions = np.zeros((rank, 2))
    directions[:, : min(rank, 2)] = columns[:, ::-1][:, :2]
    largest = np.abs(directions).argmax(axis=0)
    directions *= np.where(directions[largest, [0, 1]] < 0, -1, 1)
    shares = np.zeros(2)
    total = np.maximum(values, 0).sum()
    if total > 0:
        shares[: min(rank, 2)] = np.maximum(values[::-1][:2], 0) / total
    return Axes(mean, directions, (float(shares[0]), float(shares[1])))


def lay_out(directions: NDArray[np.float64], method: Method, seed: int) -> tuple[Plane, str]:
    """Return where to draw each node (m, 2), and one sentence on what nearness means there.

    Parameters
    ----------
    directions
        Vectors at length 1: who a node is with, not how much.
    """
    if method == "umap":
        return _place_umap(directions, seed), (
            "UMAP keeps neighbours together; distances between groups mean little."
        )
    axes = find_axes(directions)
    share = sum(axes.share)
    return axes.project(directions), (
        f"The two axes are the leading principal components, with {share:.0%} of the variance: "
        "nodes far apart here differ, nodes close together here may still differ in other directions."
    )


def _place_umap(directions: NDArray[np.float64], seed: int) -> Plane:
    try:
        # Need not be installed; for start-up time where it is, since it compiles when it is imported.
        import umap
    except ImportError:
        raise ConfigError(
            "map", got="umap, which is not installed", allowed="pca", remedy="Or: pip install umap-learn."
        ) from None
    if len(directions) < 5:
        # Too few to have neighbours.
        return find_axes(directions).project(directions)
    model = umap.UMAP(metric="cosine", random_state=seed, n_jobs=1, n_neighbors=min(15, len(directions) - 1))
    return np.asarray(model.fit_transform(directions), dtype=np.float64)


@dataclass(frozen=True, eq=False)
class Communities:
    """Groups of directions, largest first.

    Attributes
    ----------
    centres : (groups, r)
    apart : how well apart they are (silhouette, −1 … 1); 0 where there is one group only
    """

    centres: NDArray[np.float64]
    apart: float

    def label(self, directions: NDArray[Any]) -> NDArray[np.int64]:
        """Return the group of each direction: that of the nearest centre."""
        products = directions @ self.centres.T.astype(directions.dtype)
        return np.asarray((2 * products - np.square(self.centres).sum(axis=1)).argmax(axis=-1))


def find_communities(directions: NDArray[np.float64], seed: int) -> Communities:
    """Group directions by k-means: of 2 to `MOST_COMMUNITIES` groups, as many as have the best silhouette."""
    different = len(np.unique(directions.round(6), axis=0))
    judged = np.random.default_rng(seed).permutation(len(directions))[:JUDGED]
    best = Communities(directions.mean(axis=0, keepdims=True), 0.0)
    for count in range(2, min(MOST_COMMUNITIES, different - 1) + 1):
        # One thread: batches are small, and threads that wait for each other take longer than the work.
        with threadpool_limits(1):
            model = MiniBatchKMeans(count, n_init=3, random_state=seed).fit(directions)
        if len(np.unique(model.labels_[judged])) < 2:
            continue
        score = float(silhouette_score(directions[judged], model.labels_[judged]))
        if score > best.apart:
            order = np.argsort(-np.bincount(model.labels_, minlength=count), kind="stable")
            best = Communities(model.cluster_centers_[order].astype(np.float64), score)
    return best
