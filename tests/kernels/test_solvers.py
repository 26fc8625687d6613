"""Solvers against Kronecker least squares, dense objectives, exact optima and lower bounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import naive
from tests.harness.strategies import random_tensor
from toffee_dist import ConfigError, TemporalTensor
from toffee_dist.kernels import spectrum
from toffee_dist.kernels.solvers import als, closed_form, compressed, krylov, solve_slice, solve_slices
from toffee_dist.kernels.solvers.base import Operator, gram, random_rows
from toffee_dist.kernels.spectrum import count_freqs
from toffee_dist.settings import SolverSettings

DOUBLE = SolverSettings(rank=3, precision="double", tol=1e-12, max_iter=400)


def random_matrix(seed: int, n: int, *, kind: str = "complex", density: float = 1.0) -> NDArray[Any]:
    """A random slice: complex, real, or Hermitian of either sort."""
    rng = np.random.default_rng(seed)
    X: NDArray[Any] = rng.standard_normal((n, n))
    if "complex" in kind:
        X = X + 1j * rng.standard_normal((n, n))
    if "hermitian" in kind:
        X = X + X.conj().T
    mask = rng.random((n, n)) < density
    return X * (mask | mask.T)


def low_rank(seed: int, n: int, rank: int, *, real: bool = False) -> NDArray[Any]:
    """A R Aᴴ, exactly."""
    rng = np.random.default_rng(seed)
    A, R = rng.standard_normal((n, rank)), rng.standard_normal((rank, rank))
    if not real:
        A = A + 1j * rng.standard_normal((n, rank))
        R = R + 1j * rng.standard_normal((rank, rank))
    return A @ R @ A.conj().T


@pytest.mark.parametrize("reg", [0.0, 0.3])
@pytest.mark.parametrize("kind", ["real", "complex"])
def test_updates_are_the_least_squares_solutions(kind: str, reg: float) -> None:
    X = random_matrix(0, 6, kind=kind)
    A = random_matrix(1, 6, kind=kind)[:, :3]
    options = DOUBLE.changed(reg_a=reg, reg_r=reg)
    state = als._evaluate(Operator(X), A, gram(A, A), options)
    np.testing.assert_allclose(state.R, naive.best_core(X, A, reg), atol=1e-10)
    np.testing.assert_allclose(state.objective, naive.objective(X, A, state.R, reg, reg))
    expected = naive.best_update(X, A, state.R, reg)
    np.testing.assert_allclose(als._update(Operator(X), state, options).tall, expected, atol=1e-9)


@pytest.mark.parametrize("reg", [0.0, 0.3])
def test_als_follows_its_slow_twin(reg: float) -> None:
    X, start = random_matrix(2, 8), random_matrix(3, 8)[:, :3]
    options = DOUBLE.changed(reg_a=reg, reg_r=reg)
    X, start = X / np.linalg.norm(X), start / 4
    slow = naive.als(X, start, reg, reg, iterations=8)
    for iterations in (1, 3, 8):
        fast = als.minimise(Operator(X), start, options.changed(max_iter=iterations), momentum=False)
        np.testing.assert_allclose(fast.objective, slow[iterations], rtol=1e-7)


@pytest.mark.parametrize("momentum", [False, True])
@pytest.mark.parametrize("precision", ["single", "double"])
@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 12),
    rank=st.integers(1, 4),
    kind=st.sampled_from(["real", "complex", "real hermitian", "complex hermitian"]),
    reg=st.sampled_from([0.0, 1e-4, 0.1, 10.0]),
)
def test_objective_never_rises(
    momentum: bool, precision: Any, seed: int, n: int, rank: int, kind: str, reg: float
) -> None:
    options = DOUBLE.changed(rank=min(rank, n), reg_a=reg, reg_r=reg, precision=precision)
    matrix = random_matrix(seed, n, kind=kind, density=0.5)
    matrix = matrix / max(float(np.linalg.norm(matrix)), 1.0)
    kind_of = np.complex64 if matrix.dtype.kind == "c" else np.float32
    X = Operator(matrix.astype(kind_of if precision == "single" else matrix.dtype))
    start = Operator(X.matrix, (seed,)).random(options.rank).tall
    # λ = 0 works with a floor: what falls is the objective with that much regularisation.
    floor = als.REG_FLOOR[np.finfo(X.dtype).bits] if reg == 0 else 0.0
    last = np.inf
    for iterations in range(1, 9):
        found = als.minimise(X, start, options.changed(max_iter=iterations), momentum=momentum)
        size = np.linalg.norm(found.A) ** 2 + np.linalg.norm(found.R) ** 2
        now = found.objective + floor / 2 * float(size)
        assert now <= last + (4 * np.finfo(X.dtype).eps * X.norm2 if floor else 0.0)
        last = now


def test_plain_updates_can_overshoot_and_are_then_damped() -> None:
    X, start = random_matrix(0, 7, kind="real", density=0.5), np.random.default_rng(0).standard_normal((7, 1))
    rises = np.diff(naive.als(X, start, 0.0, 0.0, iterations=40)).max()
    assert rises > 1e-4
    options = DOUBLE.changed(rank=1, reg_a=0.0, reg_r=0.0)
    found = als.minimise(Operator(X), start, options, momentum=False)
    assert found.converged
    state = als._evaluate(Operator(X), found.A, found.G, options)
    slope = als._update(Operator(X), state, options).tall - found.A
    assert np.linalg.norm(slope) < 1e-4 * np.linalg.norm(found.A)


@pytest.mark.parametrize("real", [True, False])
@pytest.mark.parametrize(("n", "rank"), [(5, 5), (30, 4), (150, 5), (200, 20)])
def test_auto_recovers_planted_slices(n: int, rank: int, real: bool) -> None:
    X = low_rank(n, n, rank, real=real)
    options = DOUBLE.changed(rank=rank, reg_a=0.0, reg_r=0.0)
    found = solve_slice(sp.csr_matrix(X), 0, options)
    M = found.A @ found.R @ found.A.conj().T
    assert np.linalg.norm(M - X) < 1e-6 * np.linalg.norm(X)
    assert found.report.converged


def test_auto_recovers_with_rank_to_spare() -> None:
    X = low_rank(7, 120, 3)
    for precision, error in (("double", 1e-6), ("single", 2e-3)):
        options = DOUBLE.changed(rank=8, reg_a=0.0, reg_r=0.0, precision=precision)
        found = solve_slice(sp.csr_matrix(X), 3, options)
        M = found.A @ found.R @ found.A.conj().T
        assert np.linalg.norm(M - X) < error * np.linalg.norm(X)


@pytest.mark.parametrize("kind", ["real hermitian", "complex hermitian"])
@pytest.mark.parametrize(("n", "reg"), [(12, 0.0), (12, 1e-3), (12, 0.5), (12, 5.0), (450, 0.5)])
def test_closed_form_is_its_factors_objective_and_the_optimum(kind: str, n: int, reg: float) -> None:
    matrix = random_matrix(5, n, kind=kind, density=1.0 if n < 100 else 0.02)
    options = DOUBLE.changed(rank=4, reg_a=reg, reg_r=2 * reg, solver="closed_form", bound=True)
    exact = solve_slice(sp.csr_matrix(matrix), 0, options)
    explicit = naive.objective(matrix, exact.A, exact.R, reg, 2 * reg)
    assert exact.report.objective == pytest.approx(explicit, rel=1e-10)
    assert exact.report.bound == pytest.approx(exact.report.objective, rel=1e-8)
    assert exact.report.bound is not None
    assert exact.report.bound <= exact.report.objective
    for seed in range(3):
        other = solve_slice(sp.csr_matrix(matrix), 0, options.changed(solver="als", seed=seed))
        assert other.report.objective >= exact.report.objective * (1 - 1e-10)


def test_als_reaches_the_closed_form_when_regularisation_is_small() -> None:
    matrix = random_matrix(8, 20, kind="real hermitian")
    options = DOUBLE.changed(rank=4, reg_a=1e-3, reg_r=1e-3)
    exact = solve_slice(matrix, 0, options).report
    assert exact.solver == "closed_form"
    found = solve_slice(matrix, 0, options.changed(solver="compressed", max_iter=5000)).report
    assert found.objective == pytest.approx(exact.objective, rel=1e-6)


def test_closed_form_refuses_other_slices() -> None:
    with pytest.raises(ConfigError, match=r"not Hermitian.*auto"):
        solve_slice(random_matrix(0, 5), 1, DOUBLE.changed(solver="closed_form"))


@given(st.floats(0.01, 20), st.floats(1e-6, 30))
def test_shrinkage_is_the_minimum(sigma: float, reg: float) -> None:
    options = DOUBLE.changed(reg_a=reg, reg_r=reg)
    c = closed_form.penalty_constant(options)
    x = float(closed_form.shrink(np.array([sigma]), options)[0])
    grid = naive.shrink(sigma, c)
    value = (sigma - x) ** 2 / 2 + c * np.cbrt(x) ** 2
    assert value <= (sigma - grid) ** 2 / 2 + c * np.cbrt(grid) ** 2 + 1e-12 * sigma**2


@given(
    seed=st.integers(0, 10**6),
    n=st.integers(1, 10),
    rank=st.integers(1, 5),
    reg=st.sampled_from([0.0, 1e-3, 0.3, 4.0]),
)
def test_bound_is_below_every_objective(seed: int, n: int, rank: int, reg: float) -> None:
    X = random_matrix(seed, n, density=0.6)
    options = DOUBLE.changed(rank=rank, reg_a=reg, reg_r=reg, bound=True)
    for solver in ("auto", "als"):
        report = solve_slice(X, 1, options.changed(solver=solver)).report
        assert report.bound is not None
        assert report.bound <= report.objective + 1e-9 * report.energy
        expected = naive.bound(X, min(rank, n), reg, reg)
        assert report.bound == pytest.approx(expected, rel=1e-6, abs=1e-9 * report.energy)
        if report.bound > 0:
            assert report.gap == pytest.approx((report.objective - report.bound) / report.bound)


def test_bound_of_a_large_slice_by_a_krylov_space() -> None:
    X = random_matrix(3, 500, density=0.02)
    options = DOUBLE.changed(rank=6, reg_a=0.2, reg_r=0.2, bound=True, solver="als", max_iter=3)
    report = solve_slice(sp.csr_matrix(X), 1, options).report
    assert report.bound == pytest.approx(naive.bound(X, 6, 0.2, 0.2), rel=1e-6)


@pytest.mark.parametrize("solver", ["auto", "als", "compressed"])
def test_a_batch_equals_a_loop_of_single_slices(solver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(4, 200, 9, 1500)
    options = SolverSettings(rank=6, solver=solver)
    freqs = list(range(count_freqs(tensor.n_steps)))
    # One path for both: a batch may be worth an FFT where one frequency is not, and round otherwise.
    monkeypatch.setattr(spectrum, "DIRECT_COST", 0.0)
    batch = list(solve_slices(tensor, freqs, options))
    for k, together in zip(freqs, batch, strict=True):
        (alone,) = solve_slices(tensor, [k], options)
        assert alone.A.tobytes() == together.A.tobytes()
        assert alone.R.tobytes() == together.R.tobytes()
        assert alone.report.objective == together.report.objective
    assert len({found.report.iterations for found in batch}) > 1  # each stops at its own convergence


def test_same_seed_same_bytes_other_seed_other_start() -> None:
    tensor = random_tensor(5, 200, 8, 1500)
    options = SolverSettings(rank=6)
    (a,), (b,), (c,) = (list(solve_slices(tensor, [2], options.changed(seed=seed))) for seed in (1, 1, 2))
    assert a.A.tobytes() == b.A.tobytes()
    assert a.R.tobytes() == b.R.tobytes()
    assert a.A.tobytes() != c.A.tobytes()


@pytest.mark.parametrize("directed", [True, False])
def test_real_slices_are_solved_in_real_arithmetic(directed: bool) -> None:
    tensor = random_tensor(6, 80, 6, 400, directed=directed)
    zero, other, nyquist = solve_slices(tensor, [0, 1, 3], SolverSettings(rank=4))
    assert zero.A.dtype == nyquist.A.dtype == np.float32
    assert zero.R.dtype == nyquist.R.dtype == np.float64
    assert other.A.dtype == np.complex64
    assert other.R.dtype == np.complex128
    expected = "compressed" if directed else "closed_form"
    assert [zero.report.solver, nyquist.report.solver] == [expected] * 2
    assert other.report.solver == "compressed"


@given(scale=st.sampled_from([1e-30, 1e-9, 1.0, 1e9, 1e30]), seed=st.integers(0, 100), real=st.booleans())
def test_scaling_the_data_and_lambda_scales_the_answer(scale: float, seed: int, real: bool) -> None:
    X = random_matrix(seed, 9, kind="real" if real else "complex")
    options = SolverSettings(rank=3, reg_a=0.05, reg_r=0.05)
    # f(cX; c^{4/3} λ) = c² f(X; λ), with A and R both times c^{1/3}.
    larger = options.changed(reg_a=0.05 * scale ** (4 / 3), reg_r=0.05 * scale ** (4 / 3))
    one, two = solve_slice(X, 1, options), solve_slice(X * scale, 1, larger)
    assert np.isfinite(two.A).all()
    assert two.report.objective == pytest.approx(one.report.objective * scale**2, rel=1e-4)


@pytest.mark.parametrize("solver", ["auto", "als", "compressed", "closed_form"])
def test_zero_slices_and_spare_rank(solver: Any) -> None:
    options = SolverSettings(rank=6, solver=solver, bound=True)
    zero = solve_slice(sp.csr_matrix((4, 4)), 0, options)
    assert zero.A.shape == (4, 6)
    assert not zero.A.any()
    assert (zero.report.objective, zero.report.bound, zero.report.converged) == (0.0, 0.0, True)
    spare = solve_slice(np.eye(4), 0, options)
    assert spare.A.shape == (4, 6)
    assert spare.R.shape == (6, 6)
    assert not spare.A[:, 4:].any()


def columns_of(basis: krylov.Basis) -> NDArray[Any]:
    return np.asarray(basis.X.build(*basis.terms(np.eye(basis.columns))).tall)


@pytest.mark.parametrize("n", [100, 300])
@pytest.mark.parametrize("rank_of_X", [3, None])
def test_two_sided_bases_hold_their_recurrences(n: int, rank_of_X: int | None) -> None:
    # Rank 3 is less than a block: the basis must go on with fresh directions.
    matrix = low_rank(1, n, rank_of_X) if rank_of_X else random_matrix(2, n, density=0.1)
    X = Operator(matrix / np.linalg.norm(matrix))
    space = krylov.TwoSided(X, 8)
    for _ in range(3):
        space.step()
    U, V = columns_of(space.U), columns_of(space.V)
    assert (U.shape[1], V.shape[1]) == (24, 32)
    np.testing.assert_allclose(gram(U, U), np.eye(24), atol=1e-6)
    np.testing.assert_allclose(gram(V, V), np.eye(32), atol=1e-6)
    np.testing.assert_allclose(X.apply(V[:, :24]), U @ space.B, atol=1e-6)
    np.testing.assert_allclose(X.matrix.conj().T @ U, V @ space.L, atol=1e-6)
    core, K = compressed.find_core(space, 16)
    Q = np.hstack([U, V[:, :24]]) @ K
    np.testing.assert_allclose(gram(Q, Q), np.eye(16), atol=1e-5)
    np.testing.assert_allclose(core, gram(Q, X.apply(Q)), atol=1e-5)


def many_components(n: int) -> NDArray[Any]:
    """Single edges: the eigenvalues 1 and −1, n/2 times each; a Krylov space of a block closes at once."""
    return np.kron(np.eye(n // 2), np.array([[0.0, 1.0], [1.0, 0.0]]))


@pytest.mark.parametrize("precision", ["single", "double"])
@pytest.mark.parametrize("kind", ["random", "low rank", "components", "tiny"])
def test_eigenvalues_of_a_krylov_space(kind: str, precision: str) -> None:
    n, rank = (7, 7) if kind == "tiny" else (600, 12)
    if kind == "components":
        matrix = many_components(n)
    elif kind == "low rank":
        half = np.random.default_rng(0).standard_normal((n, 5))
        matrix = half @ np.diag([5.0, -4, 3, 2, 1]) @ half.T
    else:
        matrix = random_matrix(1, n, kind="real hermitian", density=0.05 if kind == "random" else 1.0)
    matrix = matrix / np.linalg.norm(matrix)
    exact = np.linalg.eigvalsh(matrix)
    exact = exact[np.argsort(-np.abs(exact))][:rank]
    X = Operator(sp.csr_matrix(matrix).astype(np.float32 if precision == "single" else np.float64))
    space = krylov.EigenSpace(X, rank)
    U = space.vectors().tall
    energy, best = np.square(space.values).sum(), np.square(exact).sum()
    tol = 1e-4 if precision == "single" else 1e-9
    assert space.converged
    assert -1e-5 * best <= best - energy <= tol * best
    # What may be left is not less than what is.
    assert best - energy <= space.left + 1e-5 * best
    np.testing.assert_allclose(gram(U, U), np.eye(rank), atol=1e-3)
    residual = np.linalg.norm(matrix @ U - U * space.values, axis=0)
    assert residual.max() < (0.05 if precision == "single" else 1e-3) * abs(exact[0])


def test_singular_values_of_a_krylov_space() -> None:
    matrix = random_matrix(1, 600, kind="real", density=0.05)
    exact = np.linalg.svd(matrix / np.linalg.norm(matrix), compute_uv=False)[:12]
    sigma, left = krylov.leading_singular_values(Operator(matrix / np.linalg.norm(matrix)), 12)
    missing = np.square(exact).sum() - np.square(sigma).sum()
    assert -1e-12 <= missing <= left + 1e-12
    np.testing.assert_allclose(sigma, exact, rtol=1e-6)


@given(cut=st.integers(0, 40), columns=st.integers(1, 5), kind=st.sampled_from(["f4", "f8", "c8", "c16"]))
def test_random_rows_do_not_depend_on_where_they_are_cut(cut: int, columns: int, kind: str) -> None:
    whole = random_rows([3, 1], 0, 40, columns, np.dtype(kind))
    parts = [random_rows([3, 1], a, b, columns, np.dtype(kind)) for a, b in ((0, cut), (cut, 40))]
    assert np.concatenate(parts).tobytes() == whole.tobytes()
    assert whole.std() > 0.3


def test_compressed_beats_als_of_equal_iterations() -> None:
    tensor = random_tensor(9, 400, 6, 4000)
    options = SolverSettings(rank=8, tol=1e-9, max_iter=10)
    (als_,) = solve_slices(tensor, [1], options.changed(solver="als"))
    (fast,) = solve_slices(tensor, [1], options.changed(solver="compressed"))
    assert fast.report.objective < als_.report.objective


def test_a_slice_that_does_not_converge_says_so() -> None:
    tensor = random_tensor(9, 100, 6, 800)
    (found,) = solve_slices(tensor, [1], SolverSettings(rank=8, tol=1e-9, max_iter=2, solver="als"))
    assert found.report.iterations == 2
    assert not found.report.converged


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank: got 0; allowed: an integer from 1"),
        ({"rank": 1.5}, "rank: got 1.5"),
        ({"reg_a": -1.0}, "reg_a: got -1.0"),
        ({"reg_a": np.nan}, "reg_a: got nan"),
        ({"reg_a": 0.0}, "both positive or both zero"),
        ({"tol": 0.0}, "tol: got 0.0"),
        ({"max_iter": 0}, "max_iter: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"solver": "sgd"}, "solver: got 'sgd'; allowed: auto, als, closed_form, compressed"),
        ({"precision": "half"}, "precision: got 'half'"),
    ],
)
def test_options_are_checked(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SolverSettings(**change)


@pytest.mark.parametrize("k", [0, 3])
def test_a_warm_start_serves_a_window_that_moved(k: int) -> None:
    """X_k·exp(iφ), and a little noise: A of the slice before is nearly the answer, R takes up the phase."""
    X = random_matrix(1, 60, kind="real" if k == 0 else "complex", density=0.3)
    options = DOUBLE.changed(rank=5, tol=1e-6)
    before = solve_slice(X, k, options)
    moved = X * (1 if k == 0 else np.exp(0.7j)) + 1e-3 * random_matrix(2, 60, kind="real")
    cold = solve_slice(moved, k, options)
    warm = solve_slice(moved, k, options, before.A)
    assert warm.report.solver == "warm"
    assert warm.report.objective == pytest.approx(cold.report.objective, rel=1e-2)
    assert warm.report.iterations < cold.report.iterations / 2
    fit = naive.objective(moved, warm.A, warm.R, DOUBLE.reg_a, DOUBLE.reg_r)
    assert warm.report.objective == pytest.approx(fit, rel=1e-6)


@pytest.mark.parametrize("directed", [True, False])
def test_nodes_without_edges_take_no_part(directed: bool) -> None:
    rng = np.random.default_rng(3)
    i, j, step = rng.integers(40, size=400), rng.integers(40, size=400), rng.integers(8, size=400)
    place = np.sort(rng.choice(100, 40, replace=False))
    small = TemporalTensor.from_events(i, j, step, n_nodes=40, n_steps=8, directed=directed)
    large = TemporalTensor.from_events(place[i], place[j], step, n_nodes=100, n_steps=8, directed=directed)
    options = SolverSettings(rank=6)
    start = rng.standard_normal((100, 6))
    for starts in (lambda k: None, lambda k: start):
        few = lambda k, starts=starts: None if starts(k) is None else starts(k)[place]  # noqa: E731
        for one, other in zip(
            solve_slices(small, [0, 1, 4], options, few),
            solve_slices(large, [0, 1, 4], options, starts),
            strict=True,
        ):
            np.testing.assert_array_equal(other.A[place], one.A)
            assert not np.delete(other.A, place, axis=0).any()
            assert other.report.objective == one.report.objective
    nothing = TemporalTensor.from_events([], [], [], n_nodes=5, n_steps=4)
    assert [factors.A.shape for factors in solve_slices(nothing, [0, 1], options)] == [(5, 6), (5, 6)]
