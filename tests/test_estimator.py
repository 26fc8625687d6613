"""The estimator: what it promises, what it solves, and how it refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.base import clone

from tests.harness.strategies import EXTREME, Events, events, random_tensor
from toffee_dist import ConfigError, InputError, NotFittedError, TemporalTensor, Toffee
from toffee_dist.kernels.embedding import step_weights
from toffee_dist.storage.tensors import open_tensor, stage_tensor


@given(events(weights=EXTREME), st.integers(1, 9), st.sampled_from(["single", "double"]))
def test_any_graph_gives_finite_results(rows: Events, rank: int, precision: Any) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    model = Toffee(rank=rank, precision=precision, freqs="all", trajectory_by="als").fit(tensor)
    assert model.embedding_.shape == (rows.n_nodes, rank)
    assert model.embedding_.dtype == np.float32
    Z = model.trajectory()
    assert Z.shape == (rows.n_steps, rows.n_nodes, rank)
    assert np.isfinite(model.embedding_).all()
    assert np.isfinite(Z).all()
    if tensor.n_entries == 0:
        assert not model.embedding_.any()
    assert model.fit_report_["k"].to_list() == list(range(rows.n_steps // 2 + 1))


@given(events(), st.sampled_from(["auto", "all", "lowest:2", "strongest:2"]))
def test_every_choice_of_frequencies_works_on_every_graph(rows: Events, freqs: str) -> None:
    model = Toffee(rank=3, freqs=freqs, trajectory_by="als").fit(rows.tensor())
    chosen = model.freqs_
    assert chosen.freqs[0] == 0
    assert chosen.freqs == sorted(set(chosen.freqs))
    assert 0 <= chosen.energy_kept <= 1 + 1e-12
    assert model.trajectory().shape == (rows.n_steps, rows.n_nodes, 3)
    if freqs == "all":
        assert chosen.energy_kept == pytest.approx(1.0)


def test_only_what_is_asked_for_is_solved() -> None:
    model = Toffee(rank=4, freqs="lowest:3", trajectory_by="als").fit(random_tensor(0, 60, 10, 500))
    assert model.fit_report_["k"].to_list() == [0]
    model.score_pairs([0], [1])
    assert model.fit_report_["k"].to_list() == [0]
    before = model._slices[0]
    model.trajectory()
    assert model.fit_report_["k"].to_list() == [0, 1, 2]
    model.score_pairs([0], [1], step=3)
    model.factors()
    assert model.fit_report_["k"].to_list() == [0, 1, 2, 3, 4, 5]
    assert model._slices[0] is before


def test_same_seed_same_bytes() -> None:
    tensor = random_tensor(1, 60, 10, 500)
    runs = [Toffee(rank=4, seed=3, freqs="all").fit(tensor) for _ in range(2)]
    assert runs[0].embedding_.tobytes() == runs[1].embedding_.tobytes()
    assert runs[0].trajectory().tobytes() == runs[1].trajectory().tobytes()


@pytest.mark.parametrize("directed", [True, False])
def test_canonical_embedding_is_the_sum_of_the_trajectory_up_to_scale(directed: bool) -> None:
    tensor = random_tensor(2, 60, 7, 500, directed=directed)
    model = Toffee(rank=5, freqs="all", precision="double", trajectory_by="als").fit(tensor)
    basis = model._basis()
    summed = model.trajectory().sum(axis=0)
    np.testing.assert_allclose(summed, model.embedding_ * np.cbrt(basis.S), atol=1e-5)
    largest = np.abs(model.embedding_).argmax(axis=0)
    assert (model.embedding_[largest, np.arange(5)] > 0).all()


@given(events(), st.booleans(), st.sampled_from(["sum", "energy"]))
def test_the_filter_sums_to_the_sum(rows: Events, causal: bool, basis: Any) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    model = Toffee(rank=3, causal=causal, basis=basis, precision="double").fit(tensor)
    Z = model.trajectory()
    assert Z.shape == (rows.n_steps, rows.n_nodes, 3)
    assert np.isfinite(Z).all()
    # Nothing but the zero slice was solved.
    assert model.fit_report_["k"].to_list() == [0]
    V = model._filter()[0]
    if not causal:
        total = np.asarray(tensor.to_coo().todense()).sum(axis=2) @ V
        np.testing.assert_allclose(Z.sum(axis=0), total, atol=1e-4)
    some, last = np.array([rows.n_nodes - 1, 0, 0]), [rows.n_steps - 1]
    np.testing.assert_allclose(model.trajectory(some, last)[0], Z[-1, some], atol=1e-6)
    scores = model.score_pairs([0], [rows.n_nodes - 1], step=0)
    assert np.isfinite(scores).all()


def test_structure_that_cancels_in_the_sum_is_found_in_all_energy() -> None:
    """Two groups that link within on even steps and across on odd ones: the sum is flat."""
    rng = np.random.default_rng(0)
    group = np.arange(60) % 2
    i, j, t = [], [], []
    for step in range(40):
        a, b = np.triu_indices(60, 1)
        alike = (group[a] == group[b]) == (step % 2 == 0)
        linked = rng.random(len(a)) < np.where(alike, 0.12, 0.01)
        i.append(a[linked])
        j.append(b[linked])
        t.append(np.full(int(linked.sum()), step))
    rows = (np.concatenate(column) for column in (i, j, t))
    tensor = TemporalTensor.from_events(*rows, n_nodes=60, n_steps=40, directed=False, pair_weight="raw")

    def apart(basis: Any) -> float:
        Z = Toffee(rank=4, basis=basis).fit(tensor).trajectory()[10]
        means = np.stack([Z[group == g].mean(axis=0) for g in (0, 1)])
        within = np.sqrt(np.mean([np.square(Z[group == g] - means[g]).sum(axis=1).mean() for g in (0, 1)]))
        return float(np.linalg.norm(means[0] - means[1]) / within)

    assert apart("energy") > 3
    assert apart("energy") > 2 * apart("sum")


def test_target_role() -> None:
    directed = Toffee(rank=4).fit(random_tensor(3, 50, 4, 400))
    assert directed.embedding_target_.shape == (50, 4)
    assert not np.allclose(directed.embedding_target_, directed.embedding_)
    undirected = Toffee(rank=4).fit(random_tensor(3, 50, 4, 400, directed=False))
    assert not hasattr(undirected, "embedding_target_")
    with pytest.raises(NotFittedError, match=r"an undirected graph.*Use embedding_"):
        _ = undirected.embedding_target_
    with pytest.raises(NotFittedError, match="gauge='none'"):
        _ = Toffee(rank=4, gauge="none").fit(random_tensor(3, 50, 4, 400)).embedding_target_


def test_raw_gauge_is_a_times_r() -> None:
    tensor = random_tensor(4, 50, 4, 400)
    model = Toffee(rank=4, gauge="none", solver="als", freqs="all").fit(tensor)
    A, R = model.factors("frequency")
    np.testing.assert_allclose(model.embedding_, (A[0] @ R[0]).real, atol=1e-5)
    np.testing.assert_allclose(model.trajectory().sum(axis=0), model.embedding_, atol=1e-4)


def test_reduction_weights() -> None:
    np.testing.assert_array_equal(step_weights("last:2", 4), [0, 0, 1, 1])
    np.testing.assert_array_equal(step_weights("last:9", 2), [1, 1])
    np.testing.assert_allclose(np.asarray(step_weights("decay:2", 5)), 0.5 ** (np.array([4, 3, 2, 1, 0]) / 2))
    assert step_weights("sum", 3) is None


@pytest.mark.parametrize("reduce", ["last:2", "decay:1.5"])
def test_weighted_reductions_are_the_zero_slice_of_the_weighted_tensor(reduce: str) -> None:
    tensor = random_tensor(5, 40, 6, 300, directed=False, pair_weight="raw")
    weights = step_weights(reduce, 6)
    dense = np.asarray(tensor.to_coo().todense()) @ weights
    model = Toffee(rank=40, reduce=reduce, precision="double", reg_a=0, reg_r=0).fit(tensor)
    i, j = (index.ravel() for index in np.indices((40, 40)))
    # Rank n without regularisation fits exactly.
    np.testing.assert_allclose(model.score_pairs(i, j).reshape(40, 40), dense, atol=1e-8)
    np.testing.assert_allclose(model.embedding_ @ model.embedding_.T, _power(dense, 4 / 3), atol=1e-3)
    # The trajectory stays in the basis of the plain sum.
    assert model.fit_report_["k"].to_list() == [0]
    assert model.trajectory().shape == (6, 40, 40)


def _power(symmetric: Any, exponent: float) -> Any:
    s, U = np.linalg.eigh(symmetric)
    return (U * np.abs(s) ** exponent) @ U.T


def test_scores_at_a_step_find_the_links_of_that_step() -> None:
    tensor = random_tensor(6, 20, 5, 100, pair_weight="raw")
    model = Toffee(rank=20, reg_a=0, reg_r=0, precision="double", freqs="all", trajectory_by="als")
    model.fit(tensor)
    dense = np.asarray(tensor.to_coo().todense())
    i, j = (index.ravel() for index in np.indices((20, 20)))
    np.testing.assert_allclose(model.score_pairs(i, j, step=2).reshape(20, 20), dense[:, :, 2], atol=1e-5)
    np.testing.assert_allclose(model.spectrum()[:, 0], np.square(dense.sum(axis=2)).sum(axis=1))


def test_scikit_learn_manners() -> None:
    model = Toffee(rank=7, reg_a=0.5, solver="als")
    copy = clone(model)
    assert copy.get_params() == model.get_params()
    assert set(model.get_params()) >= {"rank", "reg_a", "reg_r", "solver", "gauge", "reduce", "seed"}
    assert "rank=7" in repr(model)
    assert model.set_params(rank=3).fit(random_tensor(0, 10, 3, 40)).embedding_.shape == (10, 3)


def test_parameters_changed_after_fit_wait_for_the_next() -> None:
    model = Toffee(rank=3, freqs="lowest:2").fit(random_tensor(0, 20, 6, 80))
    before = model.trajectory()
    model.set_params(rank=5, gauge="none", freqs="all", seed=9)
    assert model.trajectory().tobytes() == before.tobytes()
    assert model.factors()[0].shape == (6, 20, 3)


def test_report_has_bounds_where_asked() -> None:
    tensor = random_tensor(7, 60, 6, 400)
    report = Toffee(rank=4, bound=True).fit(tensor).fit_report_
    assert report.columns == [
        "k",
        "energy",
        "objective",
        "bound",
        "gap",
        "iterations",
        "seconds",
        "solver",
        "converged",
    ]
    assert report["bound"][0] <= report["objective"][0]
    assert report["gap"][0] >= 0
    assert Toffee(rank=4).fit(tensor).fit_report_["bound"][0] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rank": 0}, "rank: got 0"),
        ({"gauge": "raw"}, "gauge: got 'raw'; allowed: canonical, none"),
        ({"reduce": "mean"}, "reduce: got 'mean'; allowed: sum, last:N or decay:HALF_LIFE"),
        ({"reduce": "last:0"}, "reduce: got 'last:0'"),
        ({"reduce": "decay:-1"}, "reduce: got 'decay:-1'"),
        ({"reduce": "decay:x"}, "reduce: got 'decay:x'"),
        ({"freqs": "some"}, "freqs: got 'some'; allowed: auto, all, lowest:K or strongest:K"),
        ({"freqs": "lowest:0"}, "freqs: got 'lowest:0'"),
    ],
)
def test_bad_parameters(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Toffee(**change).fit(random_tensor(0, 10, 3, 40))


def test_bad_requests() -> None:
    with pytest.raises(NotFittedError, match="not fitted"):
        Toffee().trajectory()
    assert not hasattr(Toffee(), "fit_report_")
    model = Toffee(rank=2).fit(random_tensor(0, 10, 3, 40))
    with pytest.raises(InputError, match="source: got 10; allowed: 0 to 9"):
        model.score_pairs([10], [0])
    with pytest.raises(InputError, match="step: got 3; allowed: 0 to 2"):
        model.score_pairs([1], [0], step=3)
    with pytest.raises(InputError, match="equal lengths"):
        model.score_pairs([1, 2], [0])
    with pytest.raises(InputError, match="nodes: got float64"):
        model.trajectory(nodes=[0.5])
    with pytest.raises(ConfigError, match="domain"):
        model.factors("laplace")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="cannot read a tensor"):
        Toffee().fit(np.zeros((3, 3, 3)))


def test_one_node_one_step() -> None:
    lonely = TemporalTensor.from_events([0], [0], [0])
    model = Toffee(rank=3, reg_a=0, reg_r=0).fit(lonely)
    np.testing.assert_allclose(model.embedding_, [[1, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(model.trajectory(), [[[1, 0, 0]]], atol=1e-6)


def test_fit_on_a_staged_tensor_is_the_same(tmp_path: Path) -> None:
    tensor = random_tensor(8, 200, 6, 900)
    stage_tensor(tensor, tmp_path / "tensor")
    staged = open_tensor(tmp_path / "tensor")
    one, two = (Toffee(rank=5, freqs="lowest:2").fit(some) for some in (tensor, staged))
    assert one.embedding_.tobytes() == two.embedding_.tobytes()
    assert one.trajectory().tobytes() == two.trajectory().tobytes()


def edge_frame() -> pl.DataFrame:
    rng = np.random.default_rng(0)
    return pl.DataFrame(
        {
            "source": [f"n{v}" for v in rng.integers(20, size=300)],
            "target": [f"n{v}" for v in rng.integers(20, size=300)],
            "time": rng.integers(12, size=300),
        }
    )


def test_edges_in_every_form_give_the_same(tmp_path: Path) -> None:
    frame = edge_frame()
    frame.write_parquet(tmp_path / "e.parquet")
    forms = [frame, frame.lazy(), frame.to_pandas(), frame.to_arrow(), tmp_path / "e.parquet"]
    forms += [[str(tmp_path / "e.parquet")]]
    options: dict[str, Any] = {"step": "1", "time_unit": "number", "undirected": True}
    models = [Toffee(rank=4).fit(form, **options) for form in forms]
    assert models[0].node_ids_ == sorted({*frame["source"], *frame["target"]})
    for model in models[1:]:
        np.testing.assert_array_equal(model.embedding_, models[0].embedding_)
    assert models[0].trajectory().shape == (12, 20, 4)


@pytest.mark.cluster
def test_fit_on_a_client_gives_the_same_bytes(tmp_path: Path) -> None:
    from toffee_dist.cluster.client import cluster

    X = random_tensor(1, 30, 9, 400)
    for reduce in ("sum", "last:4"):
        here = Toffee(rank=4, freqs="all", reduce=reduce).fit(X)
        with cluster("threads", 2) as client:
            there = Toffee(rank=4, freqs="all", reduce=reduce).fit(X, client=client, storage=str(tmp_path))
            np.testing.assert_array_equal(there.embedding_, here.embedding_)
            np.testing.assert_array_equal(there.trajectory(), here.trajectory())
    del there
    assert list(tmp_path.iterdir()) == []


def test_options_of_edges_are_for_edges() -> None:
    X = random_tensor(1, 30, 9, 400)
    with pytest.raises(ConfigError, match="options of edges: got step"):
        Toffee(rank=4).fit(X, step="1d")
    with pytest.raises(ConfigError, match="Did you mean undirected"):
        Toffee(rank=4).fit(edge_frame(), undirekted=True)
