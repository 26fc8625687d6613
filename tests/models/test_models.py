"""Every model against its slow twin, and what they all promise alike."""

from __future__ import annotations

import json
import pickle
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.harness.clusters import job, write_edges
from tests.harness.memory import watching
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import ConfigError, TemporalTensor, Toffee
from toffee_dist.batch.pipeline import start_run
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.show_plan import describe_plan
from toffee_dist.batch.stages import make_plan
from toffee_dist.cluster.client import cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.errors import TooLargeError
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.models import MODELS, FitContext, find_model, fit, fit_staged, reductions
from toffee_dist.models.paper import CELL_BYTES
from toffee_dist.models.rescal import RescalFit, solve_rescal
from toffee_dist.models.rescal.blocks import iter_blocks, load_block, save_block
from toffee_dist.settings import (
    MODEL_OUTPUTS,
    FitSettings,
    JobConfig,
    ModelName,
    ModelSettings,
    SolverSettings,
)
from toffee_dist.storage.slices import MODEL, ZeroSlice
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import run_here

VECTORS = [name for name, model in MODELS.items() if model.fit]

NEIGHBOURHOODS = ["toffee-paper", "tne", "ctdne", "htne", "hnip"]


def quick(model: str, **options: Any) -> FitSettings:
    """Options with which a small graph is fitted at once, of several blocks where the model can."""
    if MODELS[model].reduces:
        options.setdefault("reduce", "sum+decay:50%")
    return FitSettings(walks=3, walk_length=8, window=3, epochs=2, snapshots=3, **options)


DOUBLE = SolverSettings(rank=3, reg_a=0.02, reg_r=0.05, precision="double", tol=1e-12, max_iter=12)


def rescal(
    tensor: TemporalTensor, options: SolverSettings, reduce: str = "sum", start: Any = None
) -> tuple[RescalFit, Any]:
    """Solve in this process; return how it went, and A."""
    with tempfile.TemporaryDirectory(prefix="toffee-") as name:
        folder = Path(name)
        stage_tensor(tensor, folder / "tensor")
        given = None
        if start is not None:
            given = folder / "start.npy"
            np.save(given, start)
        found = solve_rescal(str(folder / "tensor"), folder / "work", options, reduce, run_here, given)
        return found, found.read_factor()


def dense(tensor: TemporalTensor) -> Any:
    return np.asarray(tensor.to_coo().todense())


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("per_block", [1, 3, 100])
def test_rescal_makes_the_updates_of_its_twin(
    directed: bool, per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toffee_dist.models.rescal.blocks.BLOCK_BYTES", per_block * 8 * 9)
    tensor = random_tensor(1, 9, 7, 60, directed=directed)
    start = np.random.default_rng(0).standard_normal((9, 3))
    found, ours = rescal(tensor, DOUBLE, start=start)
    A, R, history = naive.rescal(dense(tensor), start, 0.02, 0.05, 12)
    np.testing.assert_allclose(found.history, history, rtol=1e-9)
    core = ours @ found.cores[0] @ ours.T
    np.testing.assert_allclose(core, A @ R.sum(axis=0) @ A.T, atol=1e-8)


@given(events(), st.integers(1, 9), st.sampled_from([0.0, 0.01, 1.0]))
def test_rescal_falls_and_its_objective_is_the_definition(graph: Events, rank: int, reg: float) -> None:
    tensor = graph.tensor()
    options = SolverSettings(rank=rank, reg_a=reg, reg_r=reg, precision="double", max_iter=8)
    # Sums over the last 1, 2, … steps: their differences are the R_t, the last one first.
    reduce = "+".join(f"last:{count}" for count in range(1, tensor.n_steps + 1))
    found, A = rescal(tensor, options, reduce)
    cores = np.diff(found.cores, axis=0, prepend=0.0)[::-1]
    assert A.shape == (tensor.n_nodes, rank)
    assert all(later < earlier for earlier, later in zip(found.history, found.history[1:], strict=False))
    value = naive.rescal_objective(dense(tensor), A, cores, reg, reg)
    assert found.objective == pytest.approx(value, rel=1e-6, abs=1e-6 * np.square(tensor.values).sum())


def test_rescal_finds_what_was_planted() -> None:
    rng = np.random.default_rng(3)
    A, R = rng.random((20, 2)), rng.random((6, 2, 2))
    X = np.einsum("ir,trs,js->ijt", A, R, A)
    i, j, t = (index.ravel() for index in np.indices(X.shape))
    tensor = TemporalTensor.from_events(i, j, t, X.ravel(), entry="sum", pair_weight="raw")
    options = SolverSettings(rank=2, reg_a=0.0, reg_r=0.0, precision="double", tol=1e-12, max_iter=500)
    found, _ = rescal(tensor, options)
    assert 2 * found.objective / np.square(X).sum() < 1e-5


@pytest.mark.cluster
@pytest.mark.parametrize("model", VECTORS)
def test_workers_give_the_same_to_the_bit(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toffee_dist.models.rescal.blocks.BLOCK_BYTES", 3 * 4 * 16)
    tensor = random_tensor(2, 30, 12, 300)
    monkeypatch.setattr("toffee_dist.models.ctdne.WALKS_PER_TASK", 20)
    options = quick(model, rank=4, max_iter=5)
    here = fit(model, tensor, options)
    with cluster("threads", 2) as client:
        there = fit(model, tensor, options, runner(client), tmp_path)
    assert here.source.tobytes() == there.source.tobytes()
    assert (here.objective, here.iterations) == (there.objective, there.iterations)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("model", VECTORS)
def test_nothing_large_goes_through_the_scheduler(
    model: str, directed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("toffee_dist.models.rescal.blocks.BLOCK_BYTES", 2 * 4 * 64)
    # The network of hnip has as many inputs as there are nodes.
    rank, n_nodes = (8, 8000) if model != "hnip" else (32, 2000)
    stage_tensor(random_tensor(3, n_nodes, 6, 20_000, directed=directed), tmp_path / "tensor")
    largest = 0

    def weigh(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        nonlocal largest
        for item in items:
            result = function(item)
            largest = max(largest, len(pickle.dumps(item)), len(pickle.dumps(result)))
            yield result

    monkeypatch.setattr("toffee_dist.models.ctdne.WALKS_PER_TASK", 5000)
    options = quick(model, rank=rank, max_iter=2, reduce="sum")
    fit_staged(model, FitContext(str(tmp_path / "tensor"), str(tmp_path / "fit"), options, weigh))
    assert 4 * n_nodes * rank > 200_000
    # A few arrays of r×r numbers, and names.
    assert 0 < largest < 10_000 + 8 * 8 * rank**2


class KilledError(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("model", VECTORS)
def test_a_fit_that_was_killed_goes_on(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toffee_dist.models.rescal.blocks.BLOCK_BYTES", 3 * 4 * 16)
    stage_tensor(random_tensor(2, 30, 12, 300), tmp_path / "tensor")
    monkeypatch.setattr("toffee_dist.models.ctdne.WALKS_PER_TASK", 20)
    options = quick(model, rank=4, max_iter=6)
    counts = {"done": 0, "allowed": 0}

    def counted(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if counts["done"] == counts["allowed"]:
                raise KilledError
            counts["done"] += 1
            yield function(item)

    def context(name: str) -> FitContext:
        return FitContext(str(tmp_path / "tensor"), str(tmp_path / name), options, counted)

    counts["allowed"] = 10**6
    whole = context("whole").read_embedding(fit_staged(model, context("whole")))
    tasks = counts["done"]
    done = 0
    for _ in range(tasks):
        # Twelve tasks are at least one iteration of rescal with its blocks: each life gets further.
        counts.update(done=0, allowed=1 if tasks < 12 else 12)
        try:
            report = fit_staged(model, context("again"))
        except KilledError:
            done += counts["done"]
            continue
        done += counts["done"]
        break
    again = context("again").read_embedding(report)
    assert again.source.tobytes() == whole.source.tobytes()
    assert (again.objective, again.iterations) == (whole.objective, whole.iterations)
    # What was finished was not done again.
    assert done < 3 * tasks
    counts.update(done=0, allowed=0)
    assert fit_staged(model, context("again")) == report


@pytest.mark.parametrize("model", VECTORS)
def test_what_a_fit_leaves(model: str, tmp_path: Path) -> None:
    stage_tensor(random_tensor(2, 30, 12, 300), tmp_path / "tensor")
    context = FitContext(str(tmp_path / "tensor"), str(tmp_path / "fit"), FitSettings(rank=4))
    report = fit_staged(model, context)
    left = {path.name for path in (tmp_path / "fit").iterdir()}
    assert left == {f"{array}-{MODEL}.npy" for array in ("source", "target", "weights")} | {f"{MODEL}.json"}
    written = json.loads((tmp_path / "fit" / f"{MODEL}.json").read_text())["report"]
    assert set(written) == {"objective", "iterations", "seconds", "converged"}
    found = context.read_embedding(report)
    zero = ZeroSlice(MODEL, "given")
    assert np.array_equal(zero.read_vectors(tmp_path / "fit", "source", 3, 9), found.source[3:9])
    assert (found.target is not None) == MODELS[model].two_roles
    wanted = found.source if found.target is None else found.target
    assert np.array_equal(zero.read_vectors(tmp_path / "fit", "target"), wanted)


@pytest.mark.parametrize("model", ["tsvd", "rescal", *NEIGHBOURHOODS])
def test_the_plan_knows_other_models(model: str) -> None:
    shape = Shape(10**6, 365, 10**7, 2 * 10**7, directed=True, rows=10**8, exact=True)
    plan = make_plan(shape, ModelSettings(model=model, rank=128))
    own = model.removeprefix("toffee-")
    stages = {stage.name: stage for stage in plan.stages if stage.name.startswith(own)}
    roles = 2 if MODELS[model].two_roles else 1
    assert "solve zero" not in {stage.name for stage in plan.stages}
    assert f"\n{own}" in describe_plan(plan, 1, 1e9)
    # At the least A or U and V once, and minutes.
    assert max(stage.task_bytes for stage in stages.values()) > roles * 4 * 10**6 * 128
    assert sum(stage.seconds for stage in stages.values()) > 100
    assert sum(stage.disk for stage in stages.values()) >= roles * 4 * 10**6 * 128
    with pytest.raises(TooLargeError, match=own):
        plan.check_memory(2**31, 1, "a worker")
    spectrum = make_plan(shape, ModelSettings(model=model, outputs=("spectrum",)))
    assert not [stage for stage in spectrum.stages if stage.name.startswith(own)]


@pytest.mark.slow
@pytest.mark.cluster
@pytest.mark.parametrize("model", ["tsvd", "rescal", *NEIGHBOURHOODS])
def test_peak_of_another_model_is_below_the_projection(model: str, tmp_path: Path) -> None:
    # The reconstruction of hnip is for graphs whose n×n fits the time: its network has n inputs.
    nodes = 4_000 if model == "hnip" else 20_000
    edges = write_edges(tmp_path / "edges.parquet", nodes=nodes, events=20 * nodes, days=60)
    options = {"model": model, "rank": 48, "max_iter": 3, "epochs": 2, "outputs": ("embedding",)}
    config = job(edges, tmp_path / "out", mode="processes", workers=1, **options)
    with watching() as peaks:
        outcome = start_run(config)
    projected = make_plan(outcome.plan.shape, config).worker_bytes()
    assert max(peaks.values()) <= projected <= 3 * max(peaks.values())


def test_settings_and_models_agree() -> None:
    assert list(get_args(ModelName)) == list(MODEL_OUTPUTS) == VECTORS
    for model in MODELS.values():
        # Vectors, or only scores, or a vector per step and nothing else.
        assert (model.fit is None) == (model.score is not None or "in time" in model.about)
        assert model.fit is not None or model.score is not None or model.fit_in_time is not None
        assert ("embedding" in model.outputs) == (model.fit is not None)
        # Only the solved slices have anything over time; what the batch job fits otherwise, it must plan.
        assert ("trajectory" in model.outputs) == model.from_zero_slice
        assert (model.costs is not None) == (model.fit is not None and not model.from_zero_slice)


def test_blocks_survive_storage(tmp_path: Path) -> None:
    tensor = random_tensor(2, 10, 5, 40)
    for block in iter_blocks(tensor, 2, np.dtype(np.float32), 3.0, np.ones((2, 5))):
        save_block(block, tmp_path / "b.npz")
        again = load_block(tmp_path / "b.npz")
        assert np.array_equal(again.weights, block.weights)
        for old, new in zip(block.sides, again.sides, strict=True):
            assert np.array_equal(old.matrix.toarray(), new.matrix.toarray())
            assert np.array_equal(old.nodes, new.nodes)
            assert np.array_equal(old.ends, new.ends)


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("n_nodes", [12, 450])
def test_tsvd_is_numpys(directed: bool, n_nodes: int) -> None:
    # Counts: no two singular values are then the same.
    tensor = random_tensor(5, n_nodes, 4, 9 * n_nodes, directed=directed, entry="count", pair_weight="raw")
    found = fit("tsvd", tensor, FitSettings(rank=4))
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
    found = fit("toffee", tensor, FitSettings(rank=5))
    estimator = Toffee(rank=5).fit(tensor)
    np.testing.assert_allclose(found.source, estimator.embedding_, atol=1e-5)
    i, j = np.divmod(np.arange(1600), 40)
    np.testing.assert_allclose(found.score(i, j), estimator.score_pairs(i, j), atol=1e-4)
    if directed:
        assert found.target is not None
        np.testing.assert_allclose(found.target, estimator.embedding_target_, atol=1e-5)
    raw = fit("toffee", tensor, FitSettings(rank=5, gauge="none"))
    np.testing.assert_allclose(raw.source, Toffee(rank=5, gauge="none").fit(tensor).embedding_, atol=1e-5)


def test_toffee_minus_has_no_regularisation() -> None:
    tensor = random_tensor(7, 40, 6, 300, directed=False)
    heavy = FitSettings(rank=5, reg_a=5.0, reg_r=5.0)
    assert np.linalg.norm(fit("toffee", tensor, heavy).source) < np.linalg.norm(
        fit("toffee-", tensor, heavy).source
    )
    plain = fit("toffee-", tensor, heavy)
    np.testing.assert_allclose(
        plain.source, fit("toffee", tensor, FitSettings(rank=5, reg_a=0.0, reg_r=0.0)).source
    )


def test_oversampling_helps_the_roles_of_a_directed_graph() -> None:
    tensor = random_tensor(9, 60, 3, 900)
    X = dense(tensor).sum(axis=2)
    i, j = np.divmod(np.arange(3600), 60)

    def misfit(oversample: int) -> float:
        found = fit("toffee", tensor, FitSettings(rank=10, oversample=oversample, reg_a=1e-4, reg_r=1e-4))
        assert found.source.shape == (60, 10)
        return float(np.linalg.norm(X.ravel() - found.score(i, j)))

    assert misfit(2) < misfit(1)


@given(
    events(), st.sampled_from(VECTORS), st.integers(1, 9), st.sampled_from(["sum", "sum+decay:50%", "last:1"])
)
def test_vectors_of_any_graph(graph: Events, model: str, rank: int, reduce: str) -> None:
    tensor = graph.tensor()
    reduce = reduce if MODELS[model].reduces else "sum"
    options = quick(model, rank=rank, reduce=reduce, max_iter=5)
    found = fit(model, tensor, options)
    blocks = reduce.count("+") + 1
    assert found.source.shape == (tensor.n_nodes, blocks * rank)
    assert found.source.dtype == np.float32
    assert np.isfinite(found.source).all()
    assert (found.target is not None) == (tensor.directed and MODELS[model].two_roles)
    assert found.source.tobytes() == fit(model, tensor, options).source.tobytes()


def test_spread_puts_nodes_at_their_rows() -> None:
    found = fit("toffee", random_tensor(1, 5, 2, 20), FitSettings(rank=2))
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
        (
            lambda: find_model("gcn"),
            "allowed: toffee, toffee-, toffee-paper, tsvd, rescal, tne, ctdne, htne, hnip, memory, degree",
        ),
        (
            lambda: fit("memory", random_tensor(0, 3, 1, 3)),
            "allowed: toffee, toffee-, toffee-paper, tsvd, rescal",
        ),
        (
            lambda: fit("htne", random_tensor(0, 3, 1, 3), FitSettings(reduce="last:1")),
            "reduce of model htne",
        ),
        (lambda: FitSettings(walks=0), "walks"),
        (lambda: FitSettings(walk_length=1), "walk_length"),
        (lambda: FitSettings(walk_decay=-1.0), "walk_decay"),
        (lambda: FitSettings(kernel="flat"), "decaying, growing"),
        (lambda: FitSettings(rank=0), "rank"),
        (lambda: FitSettings(gauge="raw"), "canonical, none"),
        (lambda: FitSettings(oversample=0), "oversample"),
        (lambda: FitSettings(reduce="sum+never"), "reduce"),
        (lambda: FitSettings(reduce="decay:x%"), "reduce"),
    ],
)
def test_errors_say_what_is_allowed(call: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        call()


@given(events(), st.integers(1, 5))
def test_the_paper_to_the_letter(graph: Events, rank: int) -> None:
    """Eq. 5 by circular convolution of the inverse transforms, all in loops."""
    tensor = graph.tensor(entry="count", pair_weight="raw")
    options = FitSettings(rank=rank, precision="double", max_iter=5)
    found = fit("toffee-paper", tensor, options)
    solver = SolverSettings(rank=rank, precision="double", max_iter=5, solver="als")
    slices = {f.k: f for f in solve_slices(tensor, range(tensor.n_steps // 2 + 1), solver)}
    T = tensor.n_steps
    A, R = np.zeros((tensor.n_nodes, rank, T)), np.zeros((rank, rank, T))
    for t, k in product(range(T), range(T)):
        factors = slices[min(k, T - k)]
        wave = np.exp(2j * np.pi * k * t / T) / T
        for out, hat in ((A, factors.A), (R, factors.R)):
            out[:, :, t] += ((hat if k <= T // 2 else hat.conj()) * wave).real
    expected = naive.tproduct(A, R).sum(axis=2)
    np.testing.assert_allclose(found.source, expected, rtol=2e-6, atol=1e-6 * np.abs(expected).max(initial=1))
    # A sum over time is the zero frequency (fact 1).
    np.testing.assert_allclose(
        expected, (slices[0].A @ slices[0].R).real, atol=1e-9 * (1 + np.abs(expected).max(initial=0))
    )


def test_the_paper_has_a_task_per_slice_and_blocks_of_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor = random_tensor(2, 30, 12, 300, entry="count", pair_weight="raw")
    options = FitSettings(rank=4)
    whole = fit("toffee-paper", tensor, options)
    stage_tensor(tensor, tmp_path / "tensor")
    counts: dict[str, int] = {}

    def counted(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            counts[function.__name__] = counts.get(function.__name__, 0) + 1
            yield function(item)

    # Seven nodes per block.
    monkeypatch.setattr("toffee_dist.models.paper.BLOCK_BYTES", 7 * CELL_BYTES * 12 * 4)
    context = FitContext(str(tmp_path / "tensor"), str(tmp_path / "fit"), options, counted)
    found = context.read_embedding(fit_staged("toffee-paper", context))
    assert counts == {"write_sizes": 1, "solve": 7, "multiply": 5, "join": 1}
    np.testing.assert_allclose(found.source, whole.source, rtol=1e-6, atol=1e-6)


def test_the_estimator_of_the_paper_is_its_model() -> None:
    tensor = random_tensor(7, 20, 6, 100, entry="count", pair_weight="raw")
    found = fit("toffee-paper", tensor, FitSettings(rank=4))
    np.testing.assert_allclose(Toffee.paper(4).fit(tensor).embedding_, found.source, atol=1e-4)


def test_the_preset_of_the_paper() -> None:
    config = JobConfig(preset="paper", rank=7)
    assert (config.model, config.entry, config.pair_weight, config.gauge) == (
        "toffee-paper",
        "count",
        "raw",
        "none",
    )
    assert JobConfig(preset="paper", pair_weight="log").pair_weight == "log"
    assert JobConfig().model == "toffee"
    assert config.changed(rank=8).entry == "count"
    with pytest.raises(ConfigError, match=r"preset.*paper"):
        JobConfig(preset="thesis")
