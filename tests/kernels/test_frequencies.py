"""The choice of frequencies: exact where it is arithmetic, right where it is statistics."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planted import planted_graph

from tests import naive
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import TemporalTensor, Toffee
from toffee_dist.kernels import frequencies
from toffee_dist.kernels.frequencies import SIGNIFICANT, ChoiceSums, choose_freqs, significances
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.kernels.spectrum import multiplicities
from toffee_dist.settings import SolverSettings


@given(events())
def test_energy_kept_is_exact(rows: Events) -> None:
    tensor = rows.tensor(entry="count")
    (zero,) = solve_slices(tensor, [0], SolverSettings(rank=2))
    X_hat = naive.slices(np.asarray(tensor.to_coo().todense()))
    energy = (np.abs(X_hat) ** 2).sum(axis=(1, 2))
    for spec in ("strongest:3", "lowest:2", "all"):
        choice = choose_freqs(tensor, spec, common_basis(zero))
        np.testing.assert_allclose(choice.energies, energy, atol=1e-9)
        m = multiplicities(np.arange(len(energy)), rows.n_steps)
        if energy.sum() > 0:
            share = (m * energy)[choice.freqs].sum() / (m * energy).sum()
            assert choice.energy_kept == pytest.approx(share)
        if spec == "strongest:3":
            rest = [k for k in range(1, len(energy)) if k not in choice.freqs]
            kept = [k for k in choice.freqs if k > 0]
            assert not rest or not kept or energy[kept].min() >= energy[rest].max() - 1e-9


@pytest.mark.parametrize("directed", [True, False])
def test_the_statistic_is_the_energy_in_the_common_basis(directed: bool) -> None:
    tensor = random_tensor(0, 30, 40, 900, directed=directed)
    (zero,) = solve_slices(tensor, [0], SolverSettings(rank=4, precision="double"))
    basis = common_basis(zero)
    X_hat = naive.slices(np.asarray(tensor.to_coo().todense()))
    Q = np.array([np.linalg.norm(basis.U.T @ X_k @ basis.V) ** 2 for X_k in X_hat])
    score = significances(tensor, basis)
    # The score is affine in Q between 1 and T/2 wherever it is positive, and 0 elsewhere.
    inner, median = Q[1:-1], np.median(Q[1:])
    above = inner > median
    assert np.isinf(score[0])
    ratio = score[1:-1][above] / (inner - median)[above]
    np.testing.assert_allclose(ratio, ratio[0], rtol=1e-6)
    assert not score[1:-1][~above].any()


@given(
    seed=st.integers(0, 1000),
    directed=st.booleans(),
    cuts=st.lists(st.integers(0, 12), max_size=3),
    few=st.booleans(),
)
def test_sums_of_blocks_add_up(seed: int, directed: bool, cuts: list[int], few: bool) -> None:
    tensor = random_tensor(seed, 12, 7, 60, directed=directed, pair_weight="raw")
    rng = np.random.default_rng(seed)
    U, V = (rng.standard_normal((12, 3)) for _ in range(2))
    bounds = sorted({0, *cuts, 12})
    tiles = [(a, U[a:b], V[a:b]) for a, b in pairwise(bounds)]
    with pytest.MonkeyPatch.context() as patch:
        if few:
            # A few entries at a time.
            patch.setattr(frequencies, "BLOCK_BYTES", 1000)
        sums = [
            ChoiceSums.of_block(tensor.take_rows(a, b), tile, tiles, directed)
            for (a, b), tile in zip(pairwise(bounds), tiles, strict=True)
        ]
    total = sums[0]
    for more in sums[1:]:
        total += more
    expected = naive.choice_sums(np.asarray(tensor.to_coo().todense()), U, V, directed)
    for name, value in expected.items():
        np.testing.assert_allclose(getattr(total, name), value, atol=1e-8, err_msg=name)


@pytest.mark.parametrize("directed", [True, False])
def test_the_analytic_floor_is_the_mean_over_shuffles(directed: bool) -> None:
    n_steps = 6
    tensor = random_tensor(1, 15, n_steps, 200, directed=directed, pair_weight="raw")
    (zero,) = solve_slices(tensor, [0], SolverSettings(rank=3, precision="double"))
    basis = common_basis(zero)
    floor, spread = ChoiceSums.of(tensor, basis.U, basis.V).shuffled_floor()
    X = np.asarray(tensor.to_coo().todense())
    rng = np.random.default_rng(0)
    found = []
    for _ in range(1500):
        shuffled = np.zeros_like(X)
        for i, j in zip(*np.nonzero(X.sum(axis=2)), strict=True):
            shuffled[i, j] = rng.permutation(X[i, j])
            if not directed:
                shuffled[j, i] = shuffled[i, j]
        X_1 = np.fft.rfft(shuffled, axis=2)[:, :, 1]
        found.append(np.linalg.norm(basis.U.T @ X_1 @ basis.V) ** 2)
    assert floor == pytest.approx(np.mean(found), rel=0.05)
    # The deviation takes the weights as separable: right to a factor of two.
    assert spread * floor == pytest.approx(np.std(found), rel=0.5)


@pytest.mark.parametrize("degree", [2.6, 0.66])
@pytest.mark.parametrize("seed", [0, 1])
def test_auto_finds_the_week_and_nothing_where_there_is_nothing(degree: float, seed: int) -> None:
    weekly = Toffee(rank=16).fit(planted_graph("weekly", degree, seed).tensor)
    assert 10 in weekly.freqs_.freqs  # 70 days, every 7
    assert set(weekly.freqs_.freqs) <= {0, 10, 20, 30}
    rhythms = weekly.freqs_.rhythms()
    assert rhythms["period_steps"][0] == 7.0
    assert rhythms["significance"][0] > SIGNIFICANT
    still = Toffee(rank=16).fit(planted_graph("none", degree, seed).tensor)
    assert still.freqs_.freqs == [0]
    assert len(still.freqs_.rhythms()["k"]) == 0


def test_few_steps_use_the_analytic_floor() -> None:
    # Two alternating communities over 4 steps: k = 2 (every 2 steps) must stand out of 2 frequencies.
    rng = np.random.default_rng(0)
    i, j = rng.integers(0, 60, (2, 6000))
    t = rng.integers(0, 4, 6000)
    inside = np.where(t % 2 == 0, i % 2 == j % 2, i % 3 == j % 3)
    tensor = TemporalTensor.from_events(
        i[inside], j[inside], t[inside], n_nodes=60, n_steps=4, directed=False
    )
    model = Toffee(rank=8).fit(tensor)
    assert model.freqs_.freqs == [0, 2]
    score = significances(tensor, model._basis())
    assert score[1] < SIGNIFICANT < score[2]
