"""The basis of all energy: equal to its slow twin, and it sees what the sum over time does not."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.harness.strategies import random_tensor
from toffee_dist import TemporalTensor, Toffee
from toffee_dist.kernels.energy_basis import energy_basis

N_NODES, N_STEPS = 80, 30
GROUP = np.where(np.random.default_rng(0).permutation(N_NODES) < N_NODES // 2, 1.0, -1.0)


@pytest.mark.parametrize("n_nodes", [8, 60])
def test_equal_to_its_slow_twin(n_nodes: int) -> None:
    """Few directions of many nodes (Lanczos) and many of few (dense): eigenvectors of the same matrix."""
    tensor = random_tensor(0, n_nodes, 9, 40 * n_nodes)
    X = np.asarray(tensor.to_coo().todense())
    energy = sum(X[:, :, t].T @ X[:, :, t] for t in range(9)) - np.diag((X**2).sum(axis=(0, 2)))
    values = np.sort(np.linalg.eigvalsh(energy))[::-1]
    V = energy_basis(tensor, 4).astype(np.float64)
    # A direction with less energy than noise leaves is no direction.
    np.testing.assert_allclose(V.T @ V, np.diag(values[:4] > 0), atol=1e-5)
    np.testing.assert_allclose(np.diag(V.T @ energy @ V), np.maximum(values[:4], 0), rtol=1e-3)


def cancelling() -> TemporalTensor:
    """Two groups that keep to themselves in the first half and to each other in the second: a flat sum."""
    rng = np.random.default_rng(1)
    a, b = np.triu_indices(N_NODES, 1)
    alike = GROUP[a] == GROUP[b]
    links = [rng.random(len(a)) < np.where(alike == (t < N_STEPS // 2), 0.25, 0.05) for t in range(N_STEPS)]
    t, pair = np.nonzero(np.stack(links))
    return TemporalTensor.from_events(
        a[pair], b[pair], t, n_nodes=N_NODES, n_steps=N_STEPS, directed=False, pair_weight="raw"
    )


@pytest.mark.parametrize(("basis", "seen"), [("energy", True), ("sum", False)])
def test_what_cancels_in_the_sum_is_seen(basis: Literal["sum", "energy"], seen: bool) -> None:
    Z: NDArray[Any] = np.asarray(Toffee(rank=4, basis=basis, seed=0).fit(cancelling()).trajectory())
    # How much of the vectors of a step is the groups: the largest share over the directions.
    moved = Z - Z.mean(axis=1, keepdims=True)
    shares = np.square(np.einsum("n,tnr->tr", GROUP, moved)) / N_NODES
    share = float(np.mean(shares.max(axis=1) / np.square(moved).sum(axis=(1, 2))))
    assert (share > 0.5) == seen, share
    assert share > 0.5 or share < 0.3, share
