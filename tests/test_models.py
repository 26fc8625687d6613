"""Every model against its slow twin, and what they all promise alike."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.strategies import Events, events, random_tensor
from toffee_dist import ConfigError, TemporalTensor, Toffee
from toffee_dist.edges import run_here
from toffee_dist.models import MODELS, ModelOptions, find_model, fit, reductions
from toffee_dist.models.rescal import build_blocks, load_block, save_block, solve_rescal
from toffee_dist.runtime import cluster, runner
from toffee_dist.solvers import SolveOptions

VECTORS = [name for name, model in MODELS.items() if model.fit]
DOUBLE = SolveOptions(rank=3, reg_a=0.02, reg_r=0.05, precision="double", tol=1e-12, max_iter=12)


def dense(tensor: TemporalTensor) -> Any:
    return np.asarray(tensor.to_coo().todense())


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("per_block", [1, 3, 100])
def test_rescal_makes_the_updates_of_its_twin(
    directed: bool, per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toffee_dist.models.rescal.BLOCK_BYTES", per_block * 8 * 9)
    tensor = random_tensor(1, 9, 7, 60, directed=directed)
    start = np.random.default_rng(0).standard_normal((9, 3))
    found = solve_rescal(tensor, DOUBLE, np.ones((1, 7)), run_here, start=start)
    A, R, history = naive.rescal(dense(tensor), start, 0.02, 0.05, 12)
    np.testing.assert_allclose(found.history, history, rtol=1e-9)
    core = found.A @ found.cores[0] @ found.A.T
    np.testing.assert_allclose(core, A @ R.sum(axis=0) @ A.T, atol=1e-8)


@given(events(), st.integers(1, 9), st.sampled_from([0.0, 0.01, 1.0]))
def test_rescal_falls_and_its_objective_is_the_definition(graph: Events, rank: int, reg: float) -> None:
    tensor = graph.tensor()
    options = SolveOptions(rank=rank, reg_a=reg, reg_r=reg, precision="double", max_iter=8)
    # A weight a step: the cores are then the R_t themselves.
    found = solve_rescal(tensor, options, np.eye(tensor.n_steps), run_here)
    assert found.A.shape == (tensor.n_nodes, rank)
    assert all(later < earlier for earlier, later in zip(found.history, found.history[1:], strict=False))
    value = naive.rescal_objective(dense(tensor), found.A, found.cores, reg, reg)
    assert found.objective == pytest.approx(value, rel=1e-6, abs=1e-6 * np.square(tensor.values).sum())


def test_rescal_finds_what_was_planted() -> None:
    rng = np.random.default_rng(3)
    A, R = rng.random((20, 2)), rng.random((6, 2, 2))
    X = np.einsum("ir,trs,js->ijt", A, R, A)
    i, j, t = (index.ravel() for index in np.indices(X.shape))
    tensor = TemporalTensor.from_events(i, j, t, X.ravel(), entry="sum", pair_weight="raw")
    options = SolveOptions(rank=2, reg_a=0.0, reg_r=0.0, precision="double", tol=1e-12, max_iter=500)
    found = solve_rescal(tensor, options, np.ones((1, 6)), run_here)
    assert 2 * found.objective / np.square(X).sum() < 1e-5


def test_rescal_on_workers_is_the_same_to_the_bit(tmp_path: Path) -> None:
    tensor = random_tensor(2, 30, 12, 300)
    options = ModelOptions(rank=4, max_iter=5)
    here = fit("rescal", tensor, options).source
    with cluster("threads", 2) as client:
        there = fit("rescal", tensor, options, runner(client), tmp_path).source
    assert here.tobytes() == there.tobytes()
    assert list(tmp_path.glob("block-*.npz"))


def test_blocks_survive_storage(tmp_path: Path) -> None:
    tensor = random_tensor(2, 10, 5, 40)
    for block in build_blocks(tensor, 2, np.dtype(np.float32)):
        again = load_block(save_block(block, tmp_path / "b.npz"))
        assert np.array_equal(again.steps, block.steps)
        for old, new in zip(block.sides, again.sides, strict=True):
            assert np.array_equal(old.matrix.toarray(), new.matrix.toarray())
            assert np.array_equal(old.nodes, new.nodes)
            assert np.array_equal(old.ends, new.ends)


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("n_nodes", [12, 450])
def test_tsvd_is_numpys(directed: bool, n_nodes: int) -> None:
    # Counts: no two singular values are then the same.
    tensor = random_tensor(5, n_nodes, 4, 9 * n_nodes, directed=directed, entry="count", pair_weight="raw")
    found = fit("tsvd", tensor, ModelOptions(rank=4))
    U, S, V = naive.zero_slice_svd(dense(tensor), 4)
    # Singular vectors have a sign; products of both sides do not.
    np.testing.assert_allclose(np.abs(found.source), np.abs(U * S), atol=2e-4)
    i, j = np.divmod(np.arange(n_nodes * n_nodes), n_nodes)
    score = found.score(i, j).reshape(n_nodes, n_nodes)
    np.testing.assert_allclose(score, (U * S) @ V.T, atol=2e-4)
    assert (found.target is None) == (not directed)


@pytest.mark.parametrize("directed", [True, False])
def test_toffee_is_the_estimator(directed: bool) -> None:
    tensor = random_tensor(7, 40, 6, 300, directed=directed)
    found = fit("toffee", tensor, ModelOptions(rank=5))
    estimator = Toffee(rank=5).fit(tensor)
    np.testing.assert_allclose(found.source, estimator.embedding_, atol=1e-5)
    i, j = np.divmod(np.arange(1600), 40)
    np.testing.assert_allclose(found.score(i, j), estimator.score_pairs(i, j), atol=1e-4)
    if directed:
        assert found.target is not None
        np.testing.assert_allclose(found.target, estimator.embedding_target_, atol=1e-5)
    raw = fit("toffee", tensor, ModelOptions(rank=5, gauge="none"))
    np.testing.assert_allclose(raw.source, Toffee(rank=5, gauge="none").fit(tensor).embedding_, atol=1e-5)


def test_toffee_minus_has_no_regularisation() -> None:
    tensor = random_tensor(7, 40, 6, 300, directed=False)
    heavy = ModelOptions(rank=5, reg_a=5.0, reg_r=5.0)
    assert np.linalg.norm(fit("toffee", tensor, heavy).source) < np.linalg.norm(
        fit("toffee-", tensor, heavy).source
    )
    plain = fit("toffee-", tensor, heavy)
    np.testing.assert_allclose(plain.source, fit("toffee", tensor, ModelOptions(5, 0.0, 0.0)).source)


def test_oversampling_helps_the_roles_of_a_directed_graph() -> None:
    tensor = random_tensor(9, 60, 3, 900)
    X = dense(tensor).sum(axis=2)
    i, j = np.divmod(np.arange(3600), 60)

    def misfit(oversample: int) -> float:
        found = fit("toffee", tensor, ModelOptions(rank=10, oversample=oversample, reg_a=1e-4, reg_r=1e-4))
        assert found.source.shape == (60, 10)
        return float(np.linalg.norm(X.ravel() - found.score(i, j)))

    assert misfit(2) < misfit(1)


@given(
    events(), st.sampled_from(VECTORS), st.integers(1, 9), st.sampled_from(["sum", "sum+decay:50%", "last:1"])
)
def test_vectors_of_any_graph(graph: Events, model: str, rank: int, reduce: str) -> None:
    tensor = graph.tensor()
    options = ModelOptions(rank=rank, reduce=reduce, max_iter=5)
    found = fit(model, tensor, options)
    blocks = reduce.count("+") + 1
    assert found.source.shape == (tensor.n_nodes, blocks * rank)
    assert found.source.dtype == np.float32
    assert np.isfinite(found.source).all()
    assert (found.target is not None) == tensor.directed
    assert found.source.tobytes() == fit(model, tensor, options).source.tobytes()


def test_spread_puts_nodes_at_their_rows() -> None:
    found = fit("toffee", random_tensor(1, 5, 2, 20), ModelOptions(rank=2))
    wide = found.spread(np.array([1, 3, 4, 6, 7]), 9)
    assert np.array_equal(wide.source[[1, 3, 4, 6, 7]], found.source)
    assert not wide.source[[0, 2, 5, 8]].any()
    assert wide.target is not None
    assert found.target is not None
    assert np.array_equal(wide.target[[1, 3, 4, 6, 7]], found.target)


@given(events())
def test_controls_count(graph: Events) -> None:
    tensor = graph.tensor()
    n = tensor.n_nodes
    i, j = np.divmod(np.arange(n * n), n)
    seen = (dense(tensor) != 0).any(axis=2)
    memory, degree = find_model("memory").score, find_model("degree").score
    assert memory is not None
    assert degree is not None
    assert np.array_equal(memory(tensor, i, j).reshape(n, n), seen)
    expected = np.add.outer(np.log1p(seen.sum(axis=1)), np.log1p(seen.sum(axis=0)))
    np.testing.assert_allclose(degree(tensor, i, j).reshape(n, n), expected)


def test_reductions_by_share() -> None:
    whole, late = reductions("sum+decay:50%", 4)
    assert whole.tolist() == [1, 1, 1, 1]
    np.testing.assert_allclose(late, 0.5 ** (np.arange(4)[::-1] / 2))
    assert reductions("last:1%", 5)[0].tolist() == [0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: find_model("gcn"), "allowed: toffee, toffee-, tsvd, rescal, memory, degree"),
        (lambda: fit("memory", random_tensor(0, 3, 1, 3)), "allowed: toffee, toffee-, tsvd, rescal"),
        (lambda: ModelOptions(rank=0), "rank"),
        (lambda: ModelOptions(gauge="raw"), "canonical, none"),  # type: ignore[arg-type]
        (lambda: ModelOptions(oversample=0), "oversample"),
        (lambda: ModelOptions(reduce="sum+never"), "reduce"),
        (lambda: ModelOptions(reduce="decay:x%"), "reduce"),
    ],
)
def test_errors_say_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()
