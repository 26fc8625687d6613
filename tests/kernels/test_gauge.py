"""What must not depend on how a slice happens to be factored."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import TemporalTensor
from toffee_dist.kernels.embedding import factors_in_time, pair_scores, raw_embedding, trajectory
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.solvers import SliceFactors, solve_slices
from toffee_dist.kernels.spectrum import count_freqs
from toffee_dist.settings import SolverSettings

DOUBLE = SolverSettings(rank=4, precision="double", tol=1e-6)


def solve_all(tensor: TemporalTensor, options: SolverSettings = DOUBLE) -> dict[int, SliceFactors]:
    return {f.k: f for f in solve_slices(tensor, range(count_freqs(tensor.n_steps)), options)}


def regauge(factors: SliceFactors, seed: int) -> SliceFactors:
    """A → AQ, R → Q⁻¹RQ⁻ᴴ for a random invertible Q (real for real slices)."""
    rng = np.random.default_rng([seed, factors.k])
    r = len(factors.R)
    Q = rng.standard_normal((r, r))
    if factors.A.dtype.kind == "c":
        Q = Q + 1j * rng.standard_normal((r, r))
    inverse = np.linalg.inv(Q)
    return replace(factors, A=factors.A @ Q, R=inverse @ factors.R @ inverse.conj().T)


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("n_steps", [1, 6, 7])
@pytest.mark.parametrize("seed", range(3))
def test_canonical_results_do_not_depend_on_the_gauge(directed: bool, n_steps: int, seed: int) -> None:
    tensor = random_tensor(seed, 40, n_steps, 300, directed=directed)
    slices = solve_all(tensor)
    other = {k: regauge(f, seed) for k, f in slices.items()}
    one, two = common_basis(slices[0]), common_basis(other[0])
    # Compare what is published, in the scale of the data.
    for a, b in ((one.U, two.U), (one.V, two.V)):
        np.testing.assert_allclose(a * one.S ** (2 / 3), b * two.S ** (2 / 3), atol=1e-8)
    Z = trajectory(slices, one.V, n_steps)
    np.testing.assert_allclose(trajectory(other, two.V, n_steps), Z, atol=1e-8)
    # The raw gauge does depend on it: the check can fail.
    assert not np.allclose(raw_embedding(slices[0]), raw_embedding(other[0]), atol=1e-2)


def test_spare_columns_are_zero_in_every_gauge() -> None:
    # A star has a zero slice of rank 2: beyond that a basis would be arbitrary, and Z with it.
    leaves = np.arange(1, 9)
    tensor = TemporalTensor.from_events(np.zeros(8, int), leaves, leaves % 4, n_steps=4, directed=False)
    slices = solve_all(tensor, DOUBLE.changed(rank=5))
    for some in (slices, {k: regauge(f, 0) for k, f in slices.items()}):
        basis = common_basis(some[0])
        assert not basis.U[:, 2:].any()
        assert not trajectory(some, basis.V, 4)[:, :, 2:].any()


@given(events(), st.integers(1, 9))
def test_trajectory_sums_to_the_zero_slice(rows: Events, rank: int) -> None:
    tensor = rows.tensor(entry="count", pair_weight="raw")
    slices = solve_all(tensor, DOUBLE.changed(rank=rank))
    basis = common_basis(slices[0])
    Z = trajectory(slices, basis.V, rows.n_steps)
    assert Z.shape == (rows.n_steps, rows.n_nodes, rank)
    np.testing.assert_allclose(Z.sum(axis=0), basis.U * basis.S, atol=1e-8)
    zero = slices[0]
    np.testing.assert_allclose((basis.U * basis.S) @ basis.V.T, zero.A @ zero.R @ zero.A.T, atol=1e-8)


@given(events())
def test_trajectory_matches_its_definition(rows: Events) -> None:
    tensor = rows.tensor(entry="count")
    slices = solve_all(tensor)
    V = common_basis(slices[0]).V
    M_V = {k: f.A @ f.R @ f.A.conj().T @ V for k, f in slices.items()}
    Z = trajectory(slices, V, rows.n_steps)
    np.testing.assert_allclose(Z, naive.signal(M_V, rows.n_steps), atol=1e-9)
    nodes, steps = [rows.n_nodes - 1, 0], [rows.n_steps - 1]
    some = trajectory(slices, V, rows.n_steps, nodes, steps)
    np.testing.assert_allclose(some, Z[steps][:, nodes], atol=1e-12)


def test_trajectory_in_blocks_of_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(2, 50, 6, 300)
    slices = solve_all(tensor)
    V = common_basis(slices[0]).V
    whole = trajectory(slices, V, 6)
    monkeypatch.setattr("toffee_dist.kernels.embedding.BLOCK_BYTES", 16 * 4 * 10 * 7)
    np.testing.assert_allclose(trajectory(slices, V, 6), whole, atol=1e-12)


@pytest.mark.parametrize("n_steps", [1, 2, 5, 6])
def test_factors_in_time_are_real_and_rebuild_the_tensor(n_steps: int) -> None:
    # Rank n and no regularisation: the fit is exact, so A∗R∗Aᵀ must be X itself.
    tensor = random_tensor(3, 7, n_steps, 60, pair_weight="raw")
    slices = solve_all(tensor, DOUBLE.changed(rank=7, reg_a=0.0, reg_r=0.0))
    A, R = factors_in_time(slices, n_steps)
    assert A.dtype == R.dtype == np.float64
    A, R = A.transpose(1, 2, 0), R.transpose(1, 2, 0)
    X = naive.tproduct(naive.tproduct(A, R), naive.ttranspose(A))
    np.testing.assert_allclose(X, tensor.to_coo().todense(), atol=1e-6)
    # The paper's Eq. 5: the sum over time of A∗R is A_0 R_0.
    summed = naive.tproduct(A, R).sum(axis=2)
    np.testing.assert_allclose(summed, slices[0].A @ slices[0].R, atol=1e-9)


def test_planted_tensor_is_recovered() -> None:
    rng = np.random.default_rng(0)
    n, rank, n_steps = 40, 3, 8
    A = rng.standard_normal((n, rank, n_steps))
    R = rng.standard_normal((rank, rank, n_steps))
    X = naive.tproduct(naive.tproduct(A, R), naive.ttranspose(A))
    i, j, t = np.nonzero(X)
    tensor = TemporalTensor.from_events(
        i, j, t, X[i, j, t], n_nodes=n, n_steps=n_steps, entry="sum", pair_weight="raw"
    )
    slices = solve_all(tensor, DOUBLE.changed(rank=rank, reg_a=0.0, reg_r=0.0))
    B, S = factors_in_time(slices, n_steps)
    B, S = B.transpose(1, 2, 0), S.transpose(1, 2, 0)
    found = naive.tproduct(naive.tproduct(B, S), naive.ttranspose(B))
    assert np.linalg.norm(found - X) < 1e-6 * np.linalg.norm(X)


@given(events(), st.integers(0, 7))
def test_pair_scores_are_entries_of_the_model(rows: Events, step: int) -> None:
    tensor = rows.tensor(entry="count")
    slices = solve_all(tensor)
    M = {k: f.A @ f.R @ f.A.conj().T for k, f in slices.items()}
    n = rows.n_nodes
    i, j = (index.ravel() for index in np.indices((n, n)))
    total = pair_scores(slices, i, j, rows.n_steps, None)
    np.testing.assert_allclose(total.reshape(n, n), M[0].real, atol=1e-9)
    step %= rows.n_steps
    at_step = pair_scores(slices, i, j, rows.n_steps, step)
    np.testing.assert_allclose(at_step.reshape(n, n), naive.signal(M, rows.n_steps)[step], atol=1e-9)
