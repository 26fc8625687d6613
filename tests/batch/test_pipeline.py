"""The batch job: the same bytes wherever it runs, and the same numbers as the library."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import dask.array as da
import numpy as np
import polars as pl
import pytest

from tests.harness import clusters
from tests.harness.clusters import digests, job, write_edges
from toffee_dist import Toffee, load_run, models
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.stages import make_plan
from toffee_dist.cluster import workers
from toffee_dist.cluster.versions import versions
from toffee_dist.errors import ConfigError, InputError, TooLargeError, UnfinishedError
from toffee_dist.limits import Limits
from toffee_dist.progress import Progress
from toffee_dist.settings import FitSettings
from toffee_dist.storage.runs import find_unfinished, list_runs
from toffee_dist.storage.tensors import open_tensor

ALL = ("embedding", "trajectory", "factors", "spectrum")


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet")


# A small job is cut into many tasks, as a large one is.
SMALL = Limits(max_batch=4, part_bytes=1 << 18)


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_same_bytes_in_every_mode(edges: Path, tmp_path: Path) -> None:
    found = {}
    for mode, count in (("threads", 1), ("threads", 4), ("processes", 1), ("processes", 2)):
        config = job(edges, tmp_path / f"{mode}-{count}", mode=mode, workers=count, outputs=ALL)
        found[f"{mode} {count}"] = digests(start_run(config, limits=SMALL).run.path)
    with clusters.cluster(workers=2) as running:
        config = job(edges, tmp_path / "cluster", mode=running.address, workers=2, outputs=ALL)
        found["cluster"] = digests(start_run(config, limits=SMALL).run.path)
    first = found["threads 1"]
    assert len([name for name in first if name.startswith("trajectory")]) > 3
    assert len([name for name in first if name.startswith("factors/A_freq")]) > 3
    for where, files in found.items():
        assert files == first, where


@pytest.mark.job
@pytest.mark.parametrize(
    "options",
    [
        {"undirected": True},
        {"undirected": False, "freqs": "auto"},
        {"undirected": False, "gauge": "none", "precision": "double"},
        {"undirected": True, "reduce": "decay:10", "freqs": "strongest:3"},
    ],
)
def test_agrees_with_the_library(edges: Path, tmp_path: Path, options: dict[str, Any]) -> None:
    outcome = start_run(job(edges, tmp_path, outputs=ALL, keep_work=True, **options), limits=SMALL)
    run = load_run(tmp_path)
    config = run.manifest.config.to_json()
    model = Toffee(
        trajectory_by="als",
        **{name: config[name] for name in ("rank", "gauge", "reduce", "freqs", "precision", "seed")},
    ).fit(open_tensor(outcome.run.staged.tensor))
    close: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}
    np.testing.assert_allclose(run.embedding.numpy(), model.embedding_, **close)
    if not options["undirected"] and config["gauge"] == "canonical":
        np.testing.assert_allclose(run.embedding_target.numpy(), model.embedding_target_, **close)
    np.testing.assert_allclose(run.trajectory.numpy(), model.trajectory(), **close)
    np.testing.assert_allclose(run.spectrum.numpy(), model.spectrum(), **close)
    domains: tuple[tuple[Literal["time", "frequency"], str], ...] = (("time", "time"), ("frequency", "freq"))
    for domain, short in domains:
        A, R = model.factors(domain)
        np.testing.assert_allclose(run.factors(f"A_{short}").numpy(), A, **close)
        np.testing.assert_allclose(
            run.factors(f"R_{short}").numpy(), R.reshape(len(R), -1), rtol=1e-4, atol=1e-4
        )
    fit = run.fit.polars().collect()
    report = model.fit_report_
    assert sorted(fit["k"].to_list()) == sorted(report["k"].to_list())
    assert fit["objective"].sum() == pytest.approx(report["objective"].sum())


@pytest.mark.job
@pytest.mark.parametrize("undirected", [True, False])
@pytest.mark.parametrize("model", ["toffee-", "tsvd", "rescal", "tne", "ctdne", "htne", "hnip"])
def test_other_models(edges: Path, tmp_path: Path, model: str, undirected: bool) -> None:
    config = job(
        edges,
        tmp_path,
        model=model,
        outputs=("embedding",),
        undirected=undirected,
        keep_work=True,
        max_iter=5,
        epochs=2,
    )
    outcome = start_run(config)
    run = load_run(tmp_path)
    tensor = open_tensor(outcome.run.staged.tensor)
    found = models.fit(model, tensor, FitSettings(rank=8, max_iter=5, epochs=2))
    np.testing.assert_allclose(run.embedding.numpy(), found.source, rtol=1e-5, atol=1e-6)
    assert run.embedding.numpy().any()
    if not undirected:
        wanted = found.source if found.target is None else found.target
        np.testing.assert_allclose(run.embedding_target.numpy(), wanted, rtol=1e-5, atol=1e-6)
    if model != "toffee-":
        with pytest.raises(ConfigError, match=f"outputs of model {model}"):
            job(edges, tmp_path, model=model, outputs=("trajectory",))


@pytest.mark.job
def test_a_run_can_be_read_in_every_form(edges: Path, tmp_path: Path) -> None:
    start_run(job(edges, tmp_path), limits=SMALL)
    run = load_run(tmp_path)
    source = pl.read_parquet(edges)
    ids = sorted({*source["source"], *source["target"]})
    Z = run.embedding.numpy()
    assert Z.shape == (run.n_nodes, run.rank)
    assert Z.dtype == np.float32
    frame = run.embedding.polars().collect()
    assert frame["node_id"].to_list() == ids
    assert frame["embedding"].dtype == pl.Array(pl.Float32, run.rank)
    np.testing.assert_array_equal(frame["embedding"].to_numpy(), Z)
    np.testing.assert_array_equal(np.stack(run.embedding.pandas()["embedding"]), Z)
    assert run.embedding.arrow().schema.field("embedding").type.list_size == run.rank
    array = run.trajectory.dask()
    assert isinstance(array, da.Array)
    assert array.npartitions > 1
    np.testing.assert_array_equal(array.compute(scheduler="synchronous"), run.trajectory.numpy())
    # The table's rows, node after node and step after step, are what the array says.
    row = run.trajectory.polars().filter(pl.col("node_id") == ids[7], pl.col("step") == 5).collect()
    np.testing.assert_array_equal(row["embedding"][0].to_numpy(), run.trajectory.numpy()[5, 7])
    nodes = run.nodes.polars().collect()
    assert nodes["node_id"].to_list() == ids
    day = (pl.col("time") // 86400).alias("day")
    ends = pl.concat(
        [source.select(pl.col(side).alias("node_id"), day) for side in ("source", "target")]
    ).group_by("node_id")
    seen = ends.agg(pl.col("day").min().alias("first"), pl.col("day").max().alias("last")).sort("node_id")
    first_day = source.select(day)["day"].min()
    assert nodes["first_step"].to_list() == [d - first_day for d in seen["first"]]
    assert nodes["last_step"].to_list() == [d - first_day for d in seen["last"]]
    assert (nodes["last_seen"].dt.epoch("d") == nodes["last_step"] + first_day).all()
    pairs = source.select("source", "target").unique()
    expected = dict.fromkeys(ids, 0)
    for i, j in pairs.iter_rows():
        expected[i] += 1
        expected[j] += 1
    assert dict(zip(nodes["node_id"], nodes["degree"], strict=True)) == expected
    assert run.steps.polars().collect().height == run.n_steps
    assert "Run(" in repr(run)
    with pytest.raises(InputError, match="--outputs spectrum"):
        _ = run.spectrum
    with pytest.raises(InputError, match="R_freq"):
        run.factors("B")


@pytest.mark.job
def test_two_spaces_of_nodes_and_two_kinds_of_ids(tmp_path: Path) -> None:
    frame = pl.DataFrame({"user": ["a", "b", "a"], "item": [7, 7, 9], "time": [0, 1, 2]})
    frame.write_parquet(tmp_path / "e.parquet")
    config = job(
        tmp_path / "e.parquet",
        tmp_path / "out",
        bipartite=True,
        time_unit="number",
        step="1",
        rank=2,
        source="user",
        target="item",
    )
    start_run(config)
    table = load_run(tmp_path / "out").embedding.polars().collect()
    assert table["node_id"].to_list() == ["a", "b", "7", "9"]
    assert table["space"].to_list() == ["source", "source", "target", "target"]


@pytest.mark.job
def test_published_at_the_end_and_nothing_left_over(edges: Path, tmp_path: Path) -> None:
    outcome = start_run(job(edges, tmp_path, outputs=("embedding",)))
    assert json.loads((tmp_path / "latest.json").read_text())["run_id"] == outcome.run.run_id
    assert not outcome.run.work.exists()
    assert outcome.solved == 1
    assert [path for path in tmp_path.rglob(".*")] == []
    manifest = load_run(tmp_path).manifest
    assert manifest.config.rank == 8
    assert manifest.versions["toffee_dist"]
    assert len(manifest.fingerprint) == 64


@pytest.mark.job
def test_a_spectrum_needs_no_solving(edges: Path, tmp_path: Path) -> None:
    outcome = start_run(job(edges, tmp_path, outputs=("spectrum",)))
    assert outcome.solved == outcome.reused == 0
    assert load_run(tmp_path).spectrum.numpy().shape == (300, 21)


@pytest.mark.job
def test_bad_input_and_bad_config_leave_nothing(tmp_path: Path, edges: Path) -> None:
    pl.DataFrame({"source": [1, None], "target": [1, 2], "time": [0, 1]}).write_parquet(
        tmp_path / "b.parquet"
    )
    out = tmp_path / "out"
    with pytest.raises(InputError, match="1 of 2 rows are invalid"):
        start_run(job(tmp_path / "b.parquet", out))
    assert list_runs(out) == []
    with pytest.raises(ConfigError, match="mode: got 'ssh://x'"):
        start_run(job(edges, out, mode="ssh://x"))
    with pytest.raises(UnfinishedError, match="cannot connect to tcp:"):
        start_run(job(edges, out, mode="tcp://127.0.0.1:1", wait=1.0))
    with pytest.raises(ConfigError, match="--tls-ca"):
        start_run(job(edges, out, mode="tls://127.0.0.1:1", wait=1.0))
    with pytest.raises(InputError, match="nothing to resume"):
        find_unfinished(tmp_path / "nowhere")


@pytest.mark.job
def test_too_large_a_job_is_refused_before_its_edges_are_sorted(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(task: Any) -> int:
        raise AssertionError("reading for hours came before the refusal")

    # The task that comes after the nodes are counted.
    monkeypatch.setattr("toffee_dist.ingest.job.map_part", never)
    with pytest.raises(
        TooLargeError, match=r"not enough memory in worker.*projected peak .* rank 1024"
    ) as caught:
        start_run(job(edges, tmp_path, rank=1024, memory="300MiB"))
    assert caught.value.exit_code == 4
    assert list_runs(tmp_path) == []


def test_too_many_threads_are_refused_with_the_number_that_fits(edges: Path) -> None:
    shape = Shape(3 * 10**5, 100, 3 * 10**6, 3 * 10**6, True, 3 * 10**6, exact=True)
    large = make_plan(shape, job(edges, Path("out"), rank=64))
    need = [large.worker_bytes(threads) for threads in (1, 2, 8)]
    assert need[0] < need[1] < need[2]
    with pytest.raises(TooLargeError, match=r"8 × .*\(solve, rank 64, 300,000 nodes\).*--workers 2"):
        large.check_memory(need[1], 8, "worker x")
    large.check_memory(need[1], 2, "worker x")
    assert large.choose_mode(8, need[0]) == ("processes", 1)


@pytest.mark.job
def test_changed_input_is_not_resumed(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "e.parquet", events=500)
    with pytest.raises(UnfinishedError):
        start_run(job(edges, tmp_path / "out", mode="tcp://127.0.0.1:1", wait=1.0))
    write_edges(edges, events=501)
    with pytest.raises(InputError, match="the input changed"):
        resume_run(find_unfinished(tmp_path / "out"), {"mode": "threads"})


@contextmanager
def reading(out: Path, seen: list[str], problems: list[str]) -> Iterator[None]:
    """Read whatever OUT's pointer shows, again and again, as a consumer would."""
    finished = threading.Event()

    def read() -> None:
        while not finished.is_set():
            if not (out / "latest.json").exists():
                time.sleep(0.001)
                continue
            try:
                run = load_run(out)
                if run.embedding.numpy().shape != (run.n_nodes, run.rank):
                    problems.append("a partial embedding")
                if run.fit.polars().collect().height != 21:
                    problems.append("a partial fit")
                seen.append(run.manifest.run_id)
            except Exception as error:
                problems.append(repr(error))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        finished.set()
        reader.join()


@pytest.mark.job
def test_readers_see_whole_runs_only(edges: Path, tmp_path: Path) -> None:
    seen: list[str] = []
    problems: list[str] = []
    with reading(tmp_path, seen, problems):
        for seed in range(4):
            start_run(job(edges, tmp_path, seed=seed), limits=SMALL)
    assert problems == []
    assert len(set(seen)) >= 2


class Counting(Progress):
    """Counts the tasks of a run."""

    tasks = 0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[Callable[[], None]]:
        def done() -> None:
            self.tasks += 1

        yield done


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_little_passes_through_the_client(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bytes that the client's sockets carry do not grow with the data: a record a task, both ways."""
    from distributed.comm.tcp import TCP

    carried = {"in": 0, "out": 0}
    read, write = TCP.read, TCP.write

    def size(message: Any) -> int:
        from distributed.utils import nbytes

        if isinstance(message, dict):
            return sum(size(value) for value in message.values())
        if isinstance(message, list | tuple | set):
            return sum(size(value) for value in message)
        frames = getattr(message, "frames", None)
        if frames is not None:
            return sum(nbytes(frame) for frame in frames)
        return nbytes(message) if isinstance(message, bytes | bytearray | memoryview) else 50

    async def counted_read(self: Any, *args: Any, **kwargs: Any) -> Any:
        message = await read(self, *args, **kwargs)
        carried["in"] += size(message)
        return message

    async def counted_write(self: Any, message: Any, *args: Any, **kwargs: Any) -> Any:
        carried["out"] += size(message)
        return await write(self, message, *args, **kwargs)

    monkeypatch.setattr(TCP, "read", counted_read)
    monkeypatch.setattr(TCP, "write", counted_write)
    big = write_edges(tmp_path / "big.parquet", nodes=5000, events=100_000)
    counting = Counting()
    with clusters.cluster(workers=1) as running:
        outcome = start_run(job(big, tmp_path / "out", mode=running.address, rank=16), counting, limits=SMALL)
    files = sum(p.stat().st_size for p in outcome.run.path.rglob("*.parquet"))
    assert files > 10_000_000
    assert carried["in"] > 1000  # It did count.
    assert counting.tasks > 100
    assert (carried["in"] + carried["out"]) / counting.tasks < 5000


@pytest.mark.job
@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ({"blas_threads": 2, "cores": 2, "threads": 2}, "OPENBLAS_NUM_THREADS=1"),
        ({"versions": {"toffee_dist": "0.0.1"}}, r"toffee_dist of worker .*got 0\.0\.1"),
        ({"versions": versions() | {"python": "3.9"}}, r"python of worker .*got 3\.9; allowed: 3\."),
        ({"versions": versions() | {"dask": "2024.1.0"}}, r"dask of worker .*got 2024\.1\.0"),
        ({"problem": "[Errno 13] Permission denied"}, r"storage of worker .*Permission denied"),
        ({"file": ".elsewhere"}, "a file that it wrote is not seen here"),
    ],
)
def test_workers_that_cannot_serve_are_refused(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any], message: str
) -> None:
    real = workers.probe

    def other(folder: Path, token: str, dask_worker: Any = None) -> dict[str, Any]:
        return real(folder, token, dask_worker) | answer

    monkeypatch.setattr(workers, "probe", other)
    with pytest.raises(ConfigError, match=message):
        start_run(job(edges, tmp_path))
    assert list_runs(tmp_path) == []


@pytest.mark.job
@pytest.mark.cluster
def test_a_dashboard_is_named_where_there_is_one(edges: Path, tmp_path: Path) -> None:
    from distributed import LocalCluster

    said: list[str] = []

    class Said(Progress):
        def say(self, text: str) -> None:
            said.append(text)

    start_run(job(edges, tmp_path / "out", mode="threads"), Said())
    assert not any("dashboard" in text for text in said)
    with LocalCluster(
        n_workers=1,
        processes=False,
        protocol="tcp",
        host="127.0.0.1",
        dashboard_address="127.0.0.1:0",
        worker_dashboard_address="127.0.0.1:0",
    ) as local:
        start_run(job(edges, tmp_path / "out", mode=local.scheduler_address), Said())
        (line,) = (text for text in said if "dashboard" in text)
        with urllib.request.urlopen(line.partition(": ")[2], timeout=10) as page:
            assert page.status == 200
