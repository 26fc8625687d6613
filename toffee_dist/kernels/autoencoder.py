"""A guided auto-encoder of the rows of a sparse matrix: rows → 2r → r → 2r → rows.

    loss = Σ_u ‖(x̂_u − x_u) ∘ b_u‖² + α Σ_{u,v in a batch} x_uv ‖y_u − y_v‖² + ν Σ ‖W‖²

b is β where x is not zero, else 1: most entries are zero, and a zero is no news. y are the r numbers in the
middle; the second sum guides them: nodes that meet on walks are pulled together. tanh between the layers,
logistic at the end, Adam, batches of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Guide:
    """The weights of the loss: α of the pull, β of non-zeros, ν of the decay of W."""

    pull: float = 0.1
    nonzero: float = 10.0
    decay: float = 1e-4


@dataclass
class Adam:
    """Adam's moments of one array."""

    rate: float
    first: Array = field(init=False)
    second: Array = field(init=False)
    count: int = 0

    def move(self, W: Array, gradient: Array) -> None:
        """Move W against its gradient."""
        if self.count == 0:
            self.first, self.second = np.zeros_like(W), np.zeros_like(W)
        self.count += 1
        self.first += np.float32(0.1) * (gradient - self.first)
        self.second += np.float32(0.001) * (gradient * gradient - self.second)
        step = self.rate * np.sqrt(1.0 - 0.999**self.count) / (1.0 - 0.9**self.count)
        W -= np.float32(step) * self.first / (np.sqrt(self.second) + np.float32(1e-8))


def start_weights(n: int, rank: int, seed: int) -> list[Array]:
    """Return W and b of the four layers, Glorot's uniform start."""
    sizes = [n, 2 * rank, rank, 2 * rank, n]
    rng = np.random.default_rng([seed, 0])
    weights: list[Array] = []
    for rows, columns in pairwise(sizes):
        limit = np.sqrt(6.0 / (rows + columns))
        weights += [
            rng.uniform(-limit, limit, (rows, columns)).astype(np.float32),
            np.zeros(columns, np.float32),
        ]
    return weights


def encode(X: sp.csr_matrix[Any], weights: list[Array]) -> Array:
    """Return y of every row, (rows, r)."""
    hidden = np.tanh(X @ weights[0] + weights[1])
    return np.asarray(np.tanh(hidden @ weights[2] + weights[3]), dtype=np.float32)


def loss_and_gradients(
    X: sp.csr_matrix[Any], near: sp.csr_matrix[Any], weights: list[Array], guide: Guide
) -> tuple[float, list[Array]]:
    """Return the loss of some rows, and its gradient by every array of `weights`.

    Parameters
    ----------
    X : (batch, n)
    near : (batch, batch)
        The entries of X among the rows themselves, symmetric.
    """
    W1, b1, W2, b2, W3, b3, W4, b4 = weights
    one = W1.dtype.type(1)
    h1 = np.tanh(X @ W1 + b1)
    y = np.tanh(h1 @ W2 + b2)
    h3 = np.tanh(y @ W3 + b3)
    out = one / (one + np.exp(-(h3 @ W4 + b4)))
    error = out.copy()
    rows = np.repeat(np.arange(X.shape[0]), np.diff(X.indptr))
    # x̂ − x, and β² times that where x is not zero.
    error[rows, X.indices] = (error[rows, X.indices] - X.data) * W1.dtype.type(guide.nonzero)
    loss = float(np.einsum("un,un->", error, error, dtype=np.float64))
    error[rows, X.indices] *= W1.dtype.type(guide.nonzero)
    # Σ_uv x_uv ‖y_u − y_v‖² = 2 tr(Yᵀ L Y), L = D − near.
    degree = np.asarray(near.sum(axis=1)).ravel().astype(W1.dtype)
    Ly = degree[:, None] * y - near @ y
    loss += 2.0 * guide.pull * float(np.einsum("ur,ur->", y, Ly, dtype=np.float64))
    loss += guide.decay * sum(float(np.square(W, dtype=np.float64).sum()) for W in (W1, W2, W3, W4))
    two = W1.dtype.type(2)
    d4 = two * error * out * (one - out)
    d3 = (d4 @ W4.T) * (one - h3 * h3)
    d2 = (d3 @ W3.T + W1.dtype.type(4.0 * guide.pull) * Ly) * (one - y * y)
    d1 = (d2 @ W2.T) * (one - h1 * h1)
    fade = W1.dtype.type(2.0 * guide.decay)
    gradients = [
        X.T @ d1 + fade * W1,
        d1.sum(axis=0),
        h1.T @ d2 + fade * W2,
        d2.sum(axis=0),
        y.T @ d3 + fade * W3,
        d3.sum(axis=0),
        h3.T @ d4 + fade * W4,
        d4.sum(axis=0),
    ]
    return loss, [np.asarray(gradient) for gradient in gradients]


def train_autoencoder(
    X: sp.csr_matrix[Any],
    rank: int,
    *,
    epochs: int,
    rate: float,
    batch: int,
    seed: int,
    guide: Guide | None = None,
) -> tuple[Array, list[float]]:
    """Return y of every row, (n, rank), and the mean loss of a row in every epoch; empty rows have zeros."""
    n = X.shape[0]
    met = np.flatnonzero(np.diff(X.indptr))
    Y = np.zeros((n, rank), np.float32)
    if not len(met):
        return Y, []
    guide = guide or Guide()
    weights = start_weights(n, rank, seed)
    movers = [Adam(rate) for _ in weights]
    rng = np.random.default_rng([seed, 1])
    losses = []
    for _ in range(epochs):
        order, total = rng.permutation(met), 0.0
        for start in range(0, len(order), batch):
            rows = np.sort(order[start : start + batch])
            part = sp.csr_matrix(X[rows])
            near = sp.csr_matrix(part[:, rows])
            loss, gradients = loss_and_gradients(part, sp.csr_matrix((near + near.T) / 2), weights, guide)
            total += loss
            for mover, W, gradient in zip(movers, weights, gradients, strict=True):
                # The mean of the rows: a step does not depend on the size of a batch.
                mover.move(W, gradient / np.float32(len(rows)))
        losses.append(total / len(order))
    Y[met] = encode(sp.csr_matrix(X[met]), weights)
    return Y, losses
