"""A filtered trajectory as a job: its blocks, its two forms, its readers, what it resumes and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.harness.clusters import digests, job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist import Run, Toffee, load_run
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.show_plan import describe_plan
from toffee_dist.batch.stages import make_plan
from toffee_dist.batch.trajectory import Dense, write_vectors
from toffee_dist.errors import ConfigError, InputError, QualityError, TooLargeError, UnfinishedError
from toffee_dist.limits import Limits
from toffee_dist.refresh.history import roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import JobConfig
from toffee_dist.storage.compact import write_entries
from toffee_dist.storage.runs import find_unfinished
from toffee_dist.storage.tensors import open_tensor

# Several blocks of a small run.
SMALL = Limits(part_bytes=1 << 14)


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

    # An interrupt inside a worker may leave it waiting until the test times out.
    def stop_at_two(folder: Path, block: int, *rest: Any) -> None:
        if block == 2 and full:
            raise OSError("the disk is full")
        done.append(block)
        write(folder, block, *rest)

    monkeypatch.setattr("toffee_dist.batch.trajectory.write_entries", stop_at_two)
    full = True
    with pytest.raises(UnfinishedError):
        start_run(filtered(edges, tmp_path / "cut"), limits=SMALL)
    full, before = False, done.count(0)
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


def active_rows(run: Run) -> set[tuple[int, int]]:
    """The (row, step) of every node with an entry as a source, one entry at a time."""
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    found = set()
    for source in range(tensor.n_nodes):
        for pair in range(tensor.indptr[source], tensor.indptr[source + 1]):
            found |= {
                (source, int(step))
                for step in tensor.steps[tensor.tube_ptr[pair] : tensor.tube_ptr[pair + 1]]
            }
    return found


@pytest.mark.job
@pytest.mark.parametrize("precision", ["single", "half"])
@pytest.mark.parametrize(
    "options", [{}, {"undirected": True, "dense": "every:3"}, {"vectors": "list", "dense": "last:2"}]
)
def test_active_nodes_alone_are_written(
    edges: Path, tmp_path: Path, options: dict[str, Any], precision: str
) -> None:
    config = filtered(edges, tmp_path, dense_nodes="active", dense_precision=precision, **options)
    outcome = start_run(config, limits=SMALL)
    run = load_run(tmp_path)
    assert len(run.trajectory.files) > 1
    steps = Dense.asked(config, run.n_nodes, run.n_steps, 10**6).steps
    wanted = sorted(row for row in active_rows(run) if row[1] in steps)
    assert 0 < len(wanted) < run.n_nodes * len(steps)
    table = run.trajectory.arrow()
    ids = run.nodes.polars().sort("row").collect()["node_id"].to_list()
    found = list(zip(table["node_id"].to_pylist(), table["step"].to_pylist(), strict=True))
    assert found == [(ids[row], step) for row, step in wanted]
    half = precision == "half"
    assert table.schema.field("embedding").type.value_type == (pa.float16() if half else pa.float32())
    # The compact form is what all readers read: the numbers of the parts are those, rounded.
    rows, at = np.array(wanted).T
    expected = run.trajectory.numpy()[at, rows]
    vectors = np.array(run.trajectory.polars().collect()["embedding"].to_list(), dtype=np.float32)
    size = float(np.abs(expected).max())
    allowed = 1e-5 * size + (np.abs(expected) * 2.0**-11 + 2.0**-25 if half else 0.0)
    assert (np.abs(vectors - expected) <= allowed).all()
    noise = run.vectors("trajectory").compact.noise(0, run.n_nodes, np.arange(run.n_steps))  # type: ignore[attr-defined]
    np.testing.assert_allclose(table["noise"].to_numpy(), noise[rows, at], rtol=1e-4)
    assert run.neighbors(ids[rows[0]], 3, at=int(at[0])).height == 3
    assert outcome.plan.shape.n_dense == len(wanted)


@pytest.mark.job
def test_others_read_half_precision(edges: Path, tmp_path: Path) -> None:
    start_run(filtered(edges, tmp_path / "half", dense_nodes="active", dense_precision="half"))
    start_run(filtered(edges, tmp_path / "plain"))
    half, plain = load_run(tmp_path / "half"), load_run(tmp_path / "plain")
    numbers = half.trajectory.polars().collect()["embedding"].to_list()
    assert half.trajectory.pandas()["embedding"][0].dtype == np.float16
    [script] = half.export("duckdb", tmp_path / "views.sql")
    with duckdb.connect() as connection:
        connection.execute(script.read_text())
        asked = connection.execute("SELECT embedding FROM trajectory")
        assert [list(row[0]) for row in asked.fetchall()] == numbers
    # What is made of the compact form knows nothing of it.
    for name, run in (("half", half), ("plain", plain)):
        run.export("parquet", tmp_path / f"{name}.parquet", steps=True)
    kept = ["node_id", "step", "embedding"]
    made = [pq.read_table(tmp_path / f"{name}.parquet", columns=kept) for name in ("half", "plain")]
    assert made[0].replace_schema_metadata().equals(made[1].replace_schema_metadata())


@pytest.mark.job
def test_a_run_without_dense_parts_can_be_gone_back_to(edges: Path, tmp_path: Path) -> None:
    for _ in range(2):
        start_run(filtered(edges, tmp_path, dense="none"))
    newest = load_run(tmp_path).manifest.run_id
    assert roll_back(tmp_path).run_id < newest


@pytest.mark.job
def test_a_run_cut_short_writes_the_same_active_rows(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"dense_nodes": "active", "dense_precision": "half"}
    start_run(filtered(edges, tmp_path / "whole", **options), limits=SMALL)
    made: list[int] = []

    def write(run: Any, start: int, *rest: Any) -> Any:
        if len(made) == most:
            raise OSError("the disk is full")
        made.append(start)
        return write_vectors(run, start, *rest)

    monkeypatch.setattr("toffee_dist.batch.write_outputs.write_vectors", write)
    most = 2
    with pytest.raises(UnfinishedError):
        start_run(filtered(edges, tmp_path / "cut", **options), limits=SMALL)
    most = 10**6
    resume_run(find_unfinished(tmp_path / "cut"), {"mode": "threads", "workers": 1}, limits=SMALL)
    # What was written is not written again.
    assert len(made) == len({*made}) == len(load_run(tmp_path / "cut").trajectory.files) > 2
    assert digests(load_run(tmp_path / "cut").path) == digests(load_run(tmp_path / "whole").path)


@pytest.mark.job
def test_a_part_that_lacks_an_active_row_is_noticed(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lose_a_row(*task: Any) -> Any:
        return {name: column[1:] for name, column in write_vectors(*task).items()}

    monkeypatch.setattr("toffee_dist.batch.write_outputs.write_vectors", lose_a_row)
    with pytest.raises(UnfinishedError):
        start_run(filtered(edges, tmp_path, dense_nodes="active"))
    monkeypatch.undo()
    resume_run(find_unfinished(tmp_path), {"mode": "threads", "workers": 1})
    run = load_run(tmp_path)
    assert run.trajectory.arrow().num_rows == len(active_rows(run))


@pytest.mark.job
@pytest.mark.parametrize("nodes", ["all", "active"])
@pytest.mark.parametrize("precision", ["single", "half"])
def test_the_plan_knows_the_bytes_of_dense_parts(tmp_path: Path, nodes: str, precision: str) -> None:
    rng = np.random.default_rng(0)
    # Six entries per active node and step, so that a row per entry would be far too many.
    source, time = np.repeat(rng.integers(0, 300, 3000), 6), np.repeat(rng.integers(0, 40, 3000), 6)
    table = pl.DataFrame({"source": source, "target": rng.integers(0, 300, len(source)), "time": time})
    table.write_parquet(tmp_path / "edges.parquet")
    options: dict[str, Any] = {"time_unit": "number", "step": "1", "rank": 32}
    options |= {"dense_nodes": nodes, "dense_precision": precision}
    outcome = start_run(filtered(tmp_path / "edges.parquet", tmp_path / "out", **options))
    [planned] = [stage.disk for stage in outcome.plan.stages if stage.name == "trajectory"]
    measured = sum(file.stat().st_size for file in load_run(tmp_path / "out").trajectory.files)
    assert measured <= planned <= 2 * measured


@pytest.mark.job
def test_numbers_beyond_half_precision_are_refused(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    columns = {name: rng.integers(0, 20, 400) for name in ("source", "target", "time")}
    table = pl.DataFrame({**columns, "weight": rng.uniform(1e6, 2e6, 400)})
    table.write_parquet(tmp_path / "e.parquet")
    options: dict[str, Any] = {"entry": "sum", "weight": "weight", "pair_weight": "raw", "rank": 3}
    options |= {"time_unit": "number", "step": "1", "dense_precision": "half"}
    config = filtered(tmp_path / "e.parquet", tmp_path / "out", **options)
    with pytest.raises(QualityError, match=r"65,504.*--dense-precision single"):
        start_run(config)
    assert not (tmp_path / "out" / "latest.json").exists()
    start_run(config.changed(dense_precision="single"))


def test_steps_by_their_words() -> None:
    def steps(dense: str, n_nodes: int = 10, n_steps: int = 4, **options: Any) -> tuple[int, ...]:
        settings = JobConfig.read({"dense": dense, "rank": 64, **options})
        return Dense.asked(settings, n_nodes, n_steps, n_entries=10**5).steps

    assert steps("all") == steps("auto") == steps("last:9") == (0, 1, 2, 3)
    assert steps("none") == ()
    assert steps("last:2", n_steps=5) == (3, 4)
    assert steps("every:2", n_steps=5) == (0, 2, 4)
    assert steps("1,9", n_steps=5) == (1,)
    # Of a large graph all vectors are a surprise; its active nodes may be few.
    assert steps("auto", 10**6, 365) == ()
    assert len(steps("auto", 10**6, 365, dense_nodes="active")) == 365
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
    choices = {"causal": True, "basis": "energy", "dense_nodes": "active", "dense_precision": "half"}
    for name, value in choices.items():
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
    with pytest.raises(TooLargeError, match=r"2\.\d GiB for trajectory.*--dense"):
        dense.check_disk(10**9)
    half = make_plan(shape, JobConfig.read({**asked, "dense_nodes": "active", "dense_precision": "half"}))
    # A row per entry at the most.
    assert [stage.disk for stage in half.stages if stage.name == "trajectory"] == [336_000 * (2 * 64 + 20)]
    (note,) = half.notes
    assert "337 of 337 steps of active nodes in half precision as Parquet: 47.4 MiB at the most" in note
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
