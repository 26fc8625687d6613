"""A filtered trajectory as a job: its blocks, its two forms, its readers, what it resumes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests.harness.clusters import digests, job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist import Run, Toffee, load_run
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.batch.plan import Shape, make_plan
from toffee_dist.batch.show_plan import describe_plan
from toffee_dist.batch.trajectory import dense_steps
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import JobConfig
from toffee_dist.storage.compact import write_entries
from toffee_dist.storage.runs import find_unfinished
from toffee_dist.storage.tensors import open_tensor

# Several blocks of a small run, few enough that patterns are looked for in all of them.
SMALL = Limits(part_bytes=1 << 17)


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet", nodes=90, events=3000)


def filtered(edges: Path, out: Path, **options: Any) -> JobConfig:
    return job(edges, out, **{"trajectory_by": "filter", "keep_work": True, **options})


def parquet_vectors(run: Run) -> np.ndarray:
    """The vectors of the dense parts, (nodes, steps, rank), in the order of rows."""
    table = run.trajectory.polars().collect()
    vectors = table["embedding"].to_numpy()
    return vectors.reshape(run.n_nodes, -1, run.rank)


@pytest.mark.job
@pytest.mark.parametrize(
    "options",
    [{}, {"undirected": True}, {"causal": True}, {"basis": "energy", "undirected": True}, {"denoise": 3.0}],
)
def test_the_run_holds_the_trajectory_of_the_estimator(
    edges: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    start_run(filtered(edges, tmp_path, **options), limits=SMALL)
    run = load_run(tmp_path)
    assert len(list((run.path / "compact").glob("*-value.npy"))) > 1
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    settings = {name: value for name, value in options.items() if name != "undirected"}
    Z = Toffee(rank=8, **settings).fit(tensor).trajectory()
    # Axes are free up to a sign where the basis is; lengths and products are not.
    found = run.trajectory.numpy()
    np.testing.assert_allclose(np.abs(found), np.abs(Z), atol=1e-4)
    # Compact and dense are the same vectors.
    np.testing.assert_allclose(parquet_vectors(run).transpose(1, 0, 2), found, atol=1e-5)
    node = run.nodes.polars().sort("row").collect()["node_id"][7]
    np.testing.assert_allclose(run.trajectory_of(node).vectors, found[:, 7], atol=1e-6)
    assert run.manifest.config.model_extra is not None
    expected = "raw" if options.get("causal") else "log"
    assert run.manifest.config.model_extra["pair_weight"] == expected


@pytest.mark.job
def test_blocks_change_no_more_than_rounding(edges: Path, tmp_path: Path) -> None:
    for name, limits in (("one", Limits()), ("many", SMALL)):
        start_run(filtered(edges, tmp_path / name), limits=limits)
    one, many = (load_run(tmp_path / name).trajectory.numpy() for name in ("one", "many"))
    np.testing.assert_allclose(one, many, atol=1e-6)


@pytest.mark.job
@pytest.mark.cluster
def test_threads_and_processes_give_the_same_bytes(edges: Path, tmp_path: Path) -> None:
    for mode in ("threads", "processes"):
        start_run(filtered(edges, tmp_path / mode, mode=mode, workers=2), limits=SMALL)
    threads, processes = (digests(load_run(tmp_path / mode).path) for mode in ("threads", "processes"))
    assert any(name.startswith("compact/") for name in threads)
    assert threads == processes


@pytest.mark.job
def test_a_run_cut_short_goes_on_with_the_blocks_it_lacks(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_run(filtered(edges, tmp_path / "whole"), limits=SMALL)
    done: list[int] = []
    write = write_entries

    def stop_at_two(folder: Path, block: int, *rest: Any) -> None:
        if block == 2 and 2 not in done:
            done.append(2)
            raise KeyboardInterrupt
        done.append(block)
        write(folder, block, *rest)

    monkeypatch.setattr("toffee_dist.batch.trajectory.write_entries", stop_at_two)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        start_run(filtered(edges, tmp_path / "cut"), limits=SMALL)
    before = done.count(0)
    resume_run(find_unfinished(tmp_path / "cut"), {"mode": "threads", "workers": 1}, limits=SMALL)
    assert (before, done.count(0)) == (1, 1)
    assert digests(load_run(tmp_path / "cut").path) == digests(load_run(tmp_path / "whole").path)


@pytest.mark.job
def test_steps_that_are_asked_for_are_written(edges: Path, tmp_path: Path) -> None:
    start_run(filtered(edges, tmp_path / "some", dense="last:3"), limits=SMALL)
    start_run(filtered(edges, tmp_path / "none", dense="none"), limits=SMALL)
    some, none = load_run(tmp_path / "some"), load_run(tmp_path / "none")
    table = some.trajectory.polars().collect()
    assert table["step"].unique().sort().to_list() == [some.n_steps - 3, some.n_steps - 2, some.n_steps - 1]
    whole = none.trajectory.numpy()
    np.testing.assert_allclose(parquet_vectors(some).transpose(1, 0, 2), whole[-3:], atol=1e-5)
    assert (table["noise"] >= 0).all()
    with pytest.raises(InputError, match="--dense"):
        none.trajectory.polars()
    assert none.neighbors("n00001", 3, at=5).height == 3
    np.testing.assert_array_equal(none.trajectory.dask().compute(scheduler="sync"), whole)


def test_steps_by_their_words() -> None:
    assert dense_steps("all", 10, 4, 8) == (0, 1, 2, 3)
    assert dense_steps("auto", 10, 4, 8) == (0, 1, 2, 3)
    assert dense_steps("auto", 10**6, 365, 64) == ()
    assert dense_steps("last:9", 10, 4, 8) == (0, 1, 2, 3)
    for wrong in ("last:0", "every:", "some", "1,x", "-1"):
        with pytest.raises(ConfigError, match="dense"):
            JobConfig.read({"dense": wrong})


def test_a_causal_trajectory_takes_no_weight_that_knows_the_future() -> None:
    outputs = ("embedding", "trajectory")
    assert JobConfig.read({"outputs": outputs}).pair_weight == "log"
    assert JobConfig.read({"outputs": outputs, "causal": True}).pair_weight == "raw"
    assert JobConfig.read({"outputs": outputs, "trajectory_by": "als"}).pair_weight == "unit"
    assert JobConfig.read({}).pair_weight == "unit"
    with pytest.raises(ConfigError, match="knows what comes after"):
        JobConfig.read({"outputs": outputs, "causal": True, "pair_weight": "log"})
    for name, value in (("causal", True), ("basis", "energy")):
        with pytest.raises(ConfigError, match="trajectory_by filter"):
            JobConfig.read({name: value, "trajectory_by": "als"})


def test_the_plan_shows_both_ways_and_both_forms() -> None:
    shape = Shape(24_759, 337, 228_000, 336_000, True, 506_550, exact=True)
    asked = {"outputs": ("embedding", "trajectory"), "rank": 64}
    plan = make_plan(shape, JobConfig.read(asked))
    assert plan.n_freqs == 1
    (note,) = plan.notes
    assert "by als" in note
    assert "compact" in note
    assert note in describe_plan(plan, 1, 1e9)
    stages = {stage.name: stage for stage in plan.stages}
    # 2.1 GB of Parquet are a surprise; the compact form is not.
    assert "trajectory" not in stages
    assert stages["filter"].disk < 2.1e9 / 20
    dense = make_plan(shape, JobConfig.read({**asked, "dense": "all"}))
    assert dense.disk > 2e9
    als = make_plan(shape, JobConfig.read({**asked, "trajectory_by": "als"}))
    assert als.n_freqs == 169
    assert als.seconds > 10 * plan.seconds


@pytest.mark.job
def test_damage_is_named(edges: Path, tmp_path: Path) -> None:
    start_run(filtered(edges, tmp_path, keep_work=False))
    compact = load_run(tmp_path).path / "compact"
    whole = {path: path.read_bytes() for path in compact.iterdir()}
    header = json.loads(whole[compact / "header.json"])
    damages = {
        "header.json": [b"{}", b"[", json.dumps({**header, "cuts": [0, 7]}).encode()],
        "kernel.npy": [b"", whole[compact / "kernel.npy"][:200]],
        "00000-basis.npy": [b"", whole[compact / "00000-basis.npy"][:-100]],
        "00000-target.npy": [b"\x00", whole[compact / "00000-target.npy"][:-8]],
    }
    for name, contents in damages.items():
        for content in contents:
            (compact / name).write_bytes(content)
            with pytest.raises(InputError, match=r"damaged|JSON"):
                load_run(tmp_path).neighbors("n00001", at=3)
            (compact / name).write_bytes(whole[compact / name])
    assert load_run(tmp_path).neighbors("n00001", 3, at=3).height == 3


@pytest.mark.job
def test_refreshes_stay_aligned(tmp_path: Path) -> None:
    """The trajectory is turned with the embedding: shared days of two nights have nearly the same vectors."""
    data = write_days(tmp_path / "edges", 0, 30)
    options: dict[str, Any] = {"outputs": ("embedding", "trajectory"), "undirected": True}
    refresh(night(data, tmp_path / "out", **options))
    first = load_run(tmp_path / "out").trajectory.numpy()
    write_days(data, 30, 31)
    refresh(night(data, tmp_path / "out", **options))
    run = load_run(tmp_path / "out")
    assert (run.path / "rotation.npy").exists()
    now = run.trajectory.numpy()
    shared = min(len(first), len(now)) - 1
    before, after = first[-shared:].mean(axis=0), now[-shared - 1 : -1].mean(axis=0)
    n = min(len(before), len(after))
    before, after = before[:n], after[:n]
    sizes = np.linalg.norm(before, axis=1) * np.linalg.norm(after, axis=1)
    cosines = (before * after).sum(axis=1)[sizes > 0] / sizes[sizes > 0]
    assert np.median(cosines) > 0.9
    np.testing.assert_allclose(parquet_vectors(run).transpose(1, 0, 2), now, atol=1e-5)


def test_edges_of_one_step_and_of_one_node(tmp_path: Path) -> None:
    table = pl.DataFrame({"source": [1, 1, 2], "target": [1, 2, 1], "time": [5, 5, 5]})
    table.write_parquet(tmp_path / "e.parquet")
    config = filtered(tmp_path / "e.parquet", tmp_path / "out", time_unit="number", step="1", rank=3)
    start_run(config)
    run = load_run(tmp_path / "out")
    assert run.trajectory.numpy().shape == (1, 2, 3)
    np.testing.assert_allclose(run.trajectory.numpy().sum(axis=0), run.trajectory.numpy()[0])
