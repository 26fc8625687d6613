"""The basis of all energy: equal to its slow twin, and it sees what the sum over time does not."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.harness.strategies import random_tensor
from toffee_dist import TemporalTensor, Toffee
from toffee_dist.kernels.energy_basis import energy_basis
from toffee_dist.settings import SolverSettings

N_NODES, N_STEPS = 80, 30
GROUP = np.where(np.random.default_rng(0).permutation(N_NODES) < N_NODES // 2, 1.0, -1.0)


def slow_energy(tensor: TemporalTensor) -> NDArray[np.float64]:
    """Σ_t X(t)ᵀX(t) − diag(Σ w²), step by step."""
    X = np.asarray(tensor.to_coo().todense())
    steps = range(tensor.n_steps)
    return np.asarray(sum(X[:, :, t].T @ X[:, :, t] for t in steps) - np.diag((X**2).sum(axis=(0, 2))))


@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize(("n_nodes", "events"), [(8, 320), (60, 2400), (500, 6000)])
def test_equal_to_its_slow_twin(n_nodes: int, events: int, precision: Literal["single", "double"]) -> None:
    """Few directions of many nodes (Krylov) and many of few (dense): eigenvectors of the same matrix."""
    tensor = random_tensor(0, n_nodes, 9, events)
    energy = slow_energy(tensor)
    values = np.sort(np.linalg.eigvalsh(energy))[::-1]
    V = energy_basis(tensor, SolverSettings(rank=4, precision=precision)).astype(np.float64)
    # A direction with less energy than noise leaves is no direction.
    np.testing.assert_allclose(V.T @ V, np.diag(values[:4] > 0), atol=1e-5)
    np.testing.assert_allclose(np.diag(V.T @ energy @ V), np.maximum(values[:4], 0), rtol=1e-3)


def test_the_largest_energies_and_not_those_of_largest_magnitude() -> None:
    """A star at every step: one node's noise makes the eigenvalue of largest magnitude negative."""
    n, steps = 450, 6
    rng = np.random.default_rng(0)
    hub = np.zeros(n * steps, dtype=np.int64)
    source, t = np.tile(np.arange(n), steps), np.repeat(np.arange(steps), n)
    other = rng.integers(1, n, n * steps)
    tensor = TemporalTensor.from_events(
        np.append(source, source), np.append(hub, other), np.append(t, t), n_nodes=n, n_steps=steps
    )
    energy = slow_energy(tensor)
    values = np.linalg.eigvalsh(energy)
    assert values[0] < -0.8 * values[-1]
    V = energy_basis(tensor, SolverSettings(rank=3, precision="double"))
    np.testing.assert_allclose(np.diag(V.T @ energy @ V), values[::-1][:3], rtol=1e-4)


def test_without_company_there_is_no_energy() -> None:
    """Sources with one target at a step, whoever it is: nothing but the diagonal, which is taken away."""
    tensor = TemporalTensor.from_events(
        np.array([0, 1, 1]), np.array([1, 2, 0]), np.array([0, 0, 1]), n_nodes=4, n_steps=2
    )
    assert not slow_energy(tensor).any()
    assert not energy_basis(tensor, SolverSettings(rank=2)).any()


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
