"""Axes of a trajectory from the energy of all steps instead of their sum: those of UASE, freed of noise."""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
import scipy.sparse.linalg as sla
from numpy.typing import NDArray

from toffee_dist.tensor import TemporalTensor


def energy_basis(tensor: TemporalTensor, rank: int, seed: int = 0) -> NDArray[np.float32]:
    """Return the leading eigenvectors of Σ_t X(t)ᵀX(t) − diag(Σ_entries w²), largest first, (n, rank).

    The diagonal that is taken away is exactly what unrelated events would leave. (1/T) Σ_k m_k X_kᴴX_k is the
    same sum (Parseval): this basis sees what cancels in the sum over time.
    """
    n = tensor.n_nodes
    pair = tensor.entry_pairs
    key = tensor.sources[pair].astype(np.int64) * tensor.n_steps + tensor.steps
    active, row = np.unique(key, return_inverse=True)
    values, columns = np.asarray(tensor.values), np.asarray(tensor.indices)[pair]
    B = sp.csr_matrix((values, (row, columns)), shape=(len(active), n))
    noise = np.bincount(columns, np.square(values), minlength=n)
    wanted = min(rank, n)
    if wanted > 0.2 * n or n < 3:
        energies, vectors = np.linalg.eigh((B.T @ B).toarray() - np.diag(noise))
    else:
        gram = sla.LinearOperator(
            (n, n), matvec=lambda v: np.asarray(B.T @ (B @ v)) - noise * np.ravel(v), dtype=np.float64
        )
        start = np.random.default_rng([seed, 0]).standard_normal(n)
        energies, vectors = sla.eigsh(gram, k=wanted, v0=start, which="LA", tol=1e-4)
    order = np.argsort(-energies)[:wanted]
    V = vectors[:, order] * (energies[order] > 0)
    largest = np.abs(V).argmax(axis=0)
    V = V * np.where(V[largest, np.arange(wanted)] < 0, -1.0, 1.0)
    return np.pad(V, ((0, 0), (0, rank - wanted))).astype(np.float32)
