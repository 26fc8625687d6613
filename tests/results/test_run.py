"""Questions to a run: exact against naive twins, ids as users write them, clear refusals."""

from __future__ import annotations

import csv
import difflib
import json
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from tests import naive
from tests.harness import ROOT
from tests.harness.clusters import job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist import Run, Toffee, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli, main
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.kernels.filter import PairFilter
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.results import nodes, rhythm
from toffee_dist.results.neighbors import search
from toffee_dist.storage import parquet
from toffee_dist.storage.manifest import Manifest, Metrics, RunConfig, Summary
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.storage.vectors import IndexBlock, RowGroup, iter_vectors, read_node_rows, read_nodes
from toffee_dist.timegrid import TimeScale, build_grid

ALL = ("embedding", "trajectory", "spectrum")
# Several parts of a small run.
SMALL = Limits(part_bytes=1 << 14)


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet", nodes=120, events=4000)


@pytest.fixture(scope="module")
def runs(edges: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Run]:
    """A directed run and an undirected one, in several parts, with their work."""
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_ROWS", 100)
        for undirected in (True, False):
            options: dict[str, Any] = {
                "undirected": undirected,
                "outputs": ALL,
                "keep_work": True,
                "trajectory_by": "filter",
            }
            start_run(job(edges, folder / str(undirected), **options), limits=SMALL)
    return {undirected: load_run(folder / str(undirected)) for undirected in (True, False)}


@pytest.fixture
def run(runs: dict[bool, Run]) -> Run:
    return runs[True]


def ids_of(run: Run) -> list[str]:
    return run.nodes.polars().sort("row").collect()["node_id"].to_list()


@pytest.mark.job
@pytest.mark.parametrize("metric", ["cosine", "dot"])
@pytest.mark.parametrize("at", [None, 0, 17])
def test_neighbors_are_those_of_a_loop(run: Run, metric: Any, at: int | None) -> None:
    table = run.embedding.numpy() if at is None else run.trajectory.numpy()[at]
    ids = ids_of(run)
    for row in (0, 41, 119):
        found = run.neighbors(ids[row], 7, at=at, metric=metric)
        expected = naive.neighbors(table, row, 7, metric)
        assert found["node_id"].to_list() == [ids[i] for i, _ in expected]
        np.testing.assert_allclose(found["similarity"], [s for _, s in expected], rtol=1e-9)


class ArrayBlock:
    """A block of an array in memory."""

    def __init__(self, array: Any, first: int, stop: int) -> None:
        self.array, self.first, self.stop = array, first, stop

    def read(self) -> Any:
        return self.array[self.first : self.stop]


@given(st.integers(1, 40), st.integers(1, 6), st.integers(1, 12), st.integers(0, 2**32 - 1), st.data())
def test_blocks_and_ties_change_nothing(n: int, r: int, k: int, seed: int, data: st.DataObject) -> None:
    rng = np.random.default_rng(seed)
    # Few distinct vectors, some of them zero: many ties.
    table = rng.integers(-1, 2, (n, r)).astype(np.float32) * np.float32(0.1)
    cuts = sorted({0, n, *data.draw(st.lists(st.integers(0, n), max_size=5))})
    blocks = [ArrayBlock(table, a, b) for a, b in pairwise(cuts)]
    row = data.draw(st.integers(0, n - 1))
    metric: Any = data.draw(st.sampled_from(["cosine", "dot"]))
    if not table[row].any():
        return
    found, scores = search(blocks, table[row], k, metric, without=row)
    expected = naive.neighbors(table, row, k, metric)
    np.testing.assert_allclose(scores, [s for _, s in expected], atol=1e-12)
    # Vectors of the same direction may differ in the last digit, and then either may come last.
    every = dict(naive.neighbors(table, row, n, metric))
    np.testing.assert_allclose(scores, [every[i] for i in found.tolist()], atol=1e-12)
    for i, j in pairwise(found.tolist()):
        assert i < j or not np.array_equal(table[i], table[j])


@given(st.lists(st.integers(0, 119), max_size=12), st.integers(0, 39), st.integers(1, 40))
def test_one_reader_for_all(runs: dict[bool, Run], rows: list[int], first: int, count: int) -> None:
    run, stop = runs[False], min(first + count, 40)
    whole, embedding = run.trajectory.numpy().transpose(1, 0, 2), run.embedding.numpy()
    table = run.vectors("trajectory")
    assert (table.n_nodes, table.each, table.length) == (120, 40, run.rank)
    np.testing.assert_array_equal(read_nodes(run.vectors("embedding"), rows), embedding[rows])
    np.testing.assert_array_equal(read_nodes(table, rows, step=first), whole[rows, first])
    np.testing.assert_array_equal(read_node_rows(table, rows, first, stop), whole[rows, first:stop])


def test_blocks_are_the_whole(runs: dict[bool, Run]) -> None:
    for run in runs.values():
        table = run.vectors("embedding")
        assert len(table.files) > 1
        assert all(isinstance(block, RowGroup) for block in table.blocks())
        embedding = run.embedding.numpy()
        np.testing.assert_array_equal(np.concatenate([v for _, v in iter_vectors(table)]), embedding)
        kept = np.random.default_rng(0).random(run.n_nodes) < 0.7
        found = list(iter_vectors(table, kept))
        assert [first for first, _ in found] == np.cumsum([0, *(len(v) for _, v in found[:-1])]).tolist()
        np.testing.assert_array_equal(np.concatenate([v for _, v in found]), embedding[kept])
        for output in ("embedding", "trajectory", "spectrum"):
            lazy, array = run.table(output).dask(), run.table(output).numpy()
            assert (lazy.shape, lazy.dtype) == (array.shape, array.dtype)
            np.testing.assert_array_equal(lazy.compute(scheduler="sync"), array)
        with pytest.raises(ValueError, match="which of them"):
            next(run.vectors("trajectory").blocks())
        with pytest.raises(InputError, match="no vectors"):
            run.nodes.numpy()


def test_a_damaged_part_is_told_in_one_wording(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 300, 4)
    part = run.folder.part("embedding", 0)
    whole = part.read_bytes()
    readers = (run.embedding.numpy, lambda: run.neighbors("person-0000001"), run.build_index)
    footer = 8 + int.from_bytes(whole[-8:-4], "little")
    # Without an end, with nothing but the footer, and no file.
    for data in (whole[:-9], bytes(len(whole) - footer) + whole[-footer:], None):
        part.unlink(missing_ok=True)
        if data is not None:
            part.write_bytes(data)
        for read in readers:
            with pytest.raises(InputError, match=r"run .* is damaged.*embedding.*toffee rollback"):
                read()
    vectors = parquet.vectors(np.zeros((299, 4), np.float32))
    parquet.write_parquet(part, {"embedding": vectors})
    for read in readers:
        with pytest.raises(InputError, match="299 of 300 rows in embedding"):
            read()


def test_a_run_behind_a_url_answers_alike(edges: Path, runs: dict[bool, Run]) -> None:
    outputs = (*ALL, "factors")
    where = to_path("memory://asked")
    config = job(edges, where, undirected=True, outputs=outputs, trajectory_by="filter")
    start_run(config, limits=SMALL)
    there, here = load_run("memory://asked"), runs[True]
    assert len(there.embedding.files) > 1
    assert "memory://asked" in there.embedding._repr_html_()
    assert there.neighbors("n00003").equals(here.neighbors("n00003"))
    assert there.neighbors("n00003", at=5).equals(here.neighbors("n00003", at=5))
    np.testing.assert_array_equal(there.trajectory.dask().compute(scheduler="sync"), here.trajectory.numpy())
    np.testing.assert_array_equal(there.trajectory_of("n00003").vectors, here.trajectory_of("n00003").vectors)
    A, R = there.factors("A_freq").numpy(), there.factors("R_freq").numpy()
    assert (A.dtype.name, R.dtype.name) == ("complex64", "complex128")
    rows = read_node_rows(there.vectors("factors/A_freq"), [7, 3])
    np.testing.assert_array_equal(rows, A.transpose(1, 0, 2)[[7, 3]])


def test_reading_a_run_needs_none_of_what_made_it() -> None:
    code = "import sys, toffee_dist.results.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    packages = {".".join(name.split(".")[:2]) for name in done.stdout.split()}
    assert "toffee_dist.results" in packages
    for other in ("ingest", "batch", "refresh", "cluster", "report"):
        assert f"toffee_dist.{other}" not in packages
    # What takes long to start, and no question needs.
    assert not {"distributed", "bokeh", "sklearn"} & {name.split(".")[0] for name in packages}


@pytest.mark.job
@pytest.mark.parametrize("words", [["trajectory"], ["neighbors", "--at", "5"]])
def test_a_question_in_time_loads_little(runs: dict[bool, Run], words: list[str]) -> None:
    """Most of the second that such a command may take is the start of Python and its imports."""
    command = [words[0], str(runs[True].path), "n00003", *words[1:]]
    code = "import sys; from toffee_dist.cli import main; main(sys.argv[1:]); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *command], capture_output=True, text=True, check=True
    ).stdout
    loaded = {name.split(".")[0] for name in done.splitlines()[-1].split()}
    assert {"polars", "toffee_dist"} <= loaded
    # pandas came with pa.array and empty_table: a quarter of a second.
    slow = {"pandas", "dask", "distributed", "sparse", "numba", "sklearn", "bokeh", "matplotlib"}
    assert not slow & loaded


@pytest.mark.job
def test_index_gives_the_same_answers(runs: dict[bool, Run]) -> None:
    for run in runs.values():
        before = [run.neighbors("n00003"), run.neighbors("n00003", role="target")]
        scores, similar = run.score(["n00001"], ["n00006"]), run.rhythm_of("n00003").similar
        files = run.build_index()
        try:
            for file in files:
                table = run.table(file.stem).numpy()
                np.testing.assert_array_equal(np.load(file, allow_pickle=False), table.astype(np.float32))
            assert isinstance(next(run.vectors("embedding").blocks()), IndexBlock)
            after = [run.neighbors("n00003"), run.neighbors("n00003", role="target")]
            assert before[0].equals(after[0])
            assert before[1].equals(after[1])
            np.testing.assert_allclose(run.score(["n00001"], ["n00006"]), scores, rtol=1e-5)
            assert run.rhythm_of("n00003").similar["node_id"].to_list() == similar["node_id"].to_list()
            files[0].write_bytes(files[0].read_bytes()[:-100])
            with pytest.raises(InputError, match=r"damaged.*toffee index"):
                run.neighbors("n00003")
            # A damaged index is made again from the parts.
            run.build_index()
            assert run.neighbors("n00003").equals(before[0])
        finally:
            for file in files:
                file.unlink()


@pytest.mark.job
@pytest.mark.parametrize("undirected", [True, False])
def test_scores_are_entries_of_the_fit(runs: dict[bool, Run], undirected: bool) -> None:
    run, ids = runs[undirected], ids_of(runs[undirected])
    model = Toffee(rank=8, freqs="all").fit(open_tensor(run.path / "work" / "ingest" / "tensor"))
    rng = np.random.default_rng(0)
    i, j = rng.integers(len(ids), size=(2, 200))
    sources, targets = [ids[a] for a in i], [ids[b] for b in j]
    np.testing.assert_allclose(run.score(sources, targets), model.score_pairs(i, j), atol=1e-4)
    # At a step: the filtered rows in the common basis, Z(t) Vᵀ.
    V = model._basis().V.astype(np.float64)
    Z = model.trajectory().astype(np.float64)
    seen = (Z[5] @ V.T)[i, j]
    if undirected:
        seen = (seen + (Z[5] @ V.T)[j, i]) / 2
    np.testing.assert_allclose(run.score(sources, targets, at=5, memory=False), seen, atol=1e-4)
    # And what the pair itself did.
    own = PairFilter.learn(model._tensor).at(5, i, j)
    np.testing.assert_allclose(run.score(sources, targets, at=5), seen + own, atol=1e-4)
    # Pairs that link on a day score higher on it than others.
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    tubes = tensor.tubes[:, [5]].toarray().ravel() > 0
    linked = run.score([ids[a] for a in tensor.sources[tubes]], [ids[b] for b in tensor.indices[tubes]], at=5)
    assert np.median(linked) > np.quantile(seen, 0.8)


@pytest.mark.job
def test_scores_by_als_are_entries_of_the_fit(edges: Path, tmp_path: Path) -> None:
    """At a step: the fit seen through the common basis, irfft(M_k) V Vᵀ."""
    start_run(job(edges, tmp_path, keep_work=True))
    run = load_run(tmp_path)
    ids = ids_of(run)
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    model = Toffee(rank=8, freqs="all", trajectory_by="als").fit(tensor)
    i, j = np.random.default_rng(0).integers(len(ids), size=(2, 100))
    Z, V = model.trajectory().astype(np.float64), model._basis().V.astype(np.float64)
    scores = run.score([ids[a] for a in i], [ids[b] for b in j], at=5)
    np.testing.assert_allclose(scores, (Z[5] @ V.T)[i, j], atol=1e-4)
    np.testing.assert_allclose(run.trajectory.numpy(), Z, atol=1e-5)


@pytest.mark.job
@pytest.mark.parametrize("options", [{"undirected": True, "freqs": "strongest:4"}, {"reduce": "decay:5"}])
def test_scores_at_a_step_are_whole_with_factors(
    edges: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    outputs = ("embedding", "trajectory", "factors") if "freqs" in options else ("embedding", "factors")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parquet, "GROUP_ROWS", 100)
        start_run(
            job(edges, tmp_path, outputs=outputs, keep_work=True, **options),
            limits=SMALL,
        )
    run, freqs = load_run(tmp_path), options.get("freqs", "all")
    ids = ids_of(run)
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    model = Toffee(rank=8, freqs=freqs, trajectory_by="als").fit(tensor)
    i, j = np.random.default_rng(0).integers(len(ids), size=(2, 50))
    scores = run.score([ids[a] for a in i], [ids[b] for b in j], at=7)
    np.testing.assert_allclose(scores, model.score_pairs(i, j, step=7), atol=1e-4)


@pytest.mark.job
def test_scores_survive_the_rotation_of_a_refresh(tmp_path: Path) -> None:
    data = write_days(tmp_path / "edges", 0, 30)
    options: dict[str, Any] = {"outputs": ("embedding", "trajectory"), "freqs": "all", "keep_work": True}
    refresh(night(data, tmp_path / "out", undirected=True, **options))
    write_days(data, 30, 31)
    refresh(night(data, tmp_path / "out", undirected=True, **options))
    run = load_run(tmp_path / "out")
    assert (run.path / "rotation.npy").exists()
    ids = ids_of(run)
    model = Toffee(rank=8).fit(open_tensor(run.path / "work" / "ingest" / "tensor"))
    i, j = np.random.default_rng(0).integers(len(ids), size=(2, 100))
    scores = run.score([ids[a] for a in i], [ids[b] for b in j])
    np.testing.assert_allclose(scores, model.score_pairs(i, j), atol=1e-4)


@pytest.mark.job
def test_trajectory_of_a_node(run: Run, tmp_path: Path) -> None:
    found = run.trajectory_of("n00041")
    np.testing.assert_array_equal(found.vectors, run.trajectory.numpy()[:, 41])
    np.testing.assert_allclose(found.lengths, np.linalg.norm(found.vectors, axis=1), rtol=1e-6)
    assert np.abs(found.cosines).max() <= 1 + 1e-9
    for width in (30, 80):
        assert max(len(line) for line in found.text(width).splitlines()) <= width
    assert found.text().isascii()
    found.write_csv(tmp_path / "one.csv")
    with (tmp_path / "one.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == run.n_steps
    np.testing.assert_allclose([float(row["v3"]) for row in rows], found.vectors[:, 3])
    assert rows[2]["start"] == run.grid.show(2)
    odd = replace(found, node=nodes.Node(0, "漢字 é"))
    odd.write_png(tmp_path / "one.png")
    with Image.open(tmp_path / "one.png") as image:
        assert image.format == "PNG"
        assert len(set(image.convert("RGB").resize((90, 52)).get_flattened_data())) > 5


def planted_week(folder: Path, seed: int = 0) -> Path:
    """Half of the nodes meet at weekends only, the others on any day."""
    rng = np.random.default_rng(seed)
    day, source, target = rng.integers(84, size=9000), *rng.integers(60, size=(2, 9000))
    keep = (source >= 30) | (day % 7 >= 5)
    target = source // 10 * 10 + target % 10
    frame = pl.DataFrame(
        {
            "source": source[keep],
            "target": target[keep],
            "time": 1_767_571_200 + day[keep] * 86400,
        }
    )
    frame.write_parquet(folder / "week.parquet")
    return folder / "week.parquet"


@pytest.mark.job
def test_rhythm_finds_the_week_and_who_shares_it(tmp_path: Path) -> None:
    options: dict[str, Any] = {"outputs": ("spectrum",), "pair_weight": "raw"}
    start_run(job(planted_week(tmp_path), tmp_path / "out", **options))
    run = load_run(tmp_path / "out")
    without = 0
    for node in range(60):
        found = run.rhythm_of(node, k=5)
        periods = found.periods["period"].to_list()
        if node < 30:
            assert "every 7.0 days" in periods
            assert all(other < 30 for other in found.similar["node_id"])
        else:
            without += not periods
    # Noise passes for a rhythm about once in twenty nodes.
    assert without >= 27
    # Integers are ids as they are, and as text.
    assert run.rhythm_of("3").periods.equals(run.rhythm_of(3).periods)


def test_noise_has_no_rhythm() -> None:
    rng = np.random.default_rng(0)
    said = 0
    for _ in range(400):
        x = (rng.random((20, 120)) < 0.1).astype(float)
        energies = np.square(np.abs(np.fft.rfft(x, axis=1))).sum(axis=0)
        said += bool((rhythm.rhythm_chances(energies, 120)[0] < rhythm.CHANCE).any())
    assert said <= 0.08 * 400
    assert rhythm.rhythm_chances(np.ones(50), 98)[0].min() > 0.5
    assert rhythm.rhythm_chances(np.zeros(50), 98)[0].tolist() == [1.0] * 50


def test_chances_of_short_spectra_are_what_they_say() -> None:
    # Twenty frequencies tell the floor only roughly; taken for known, it gave p < .05 in 15 % of such graphs.
    rng = np.random.default_rng(1)
    said = 0
    for _ in range(300):
        x = (rng.random((15, 40)) < 0.07).astype(float)
        energies = np.square(np.abs(np.fft.rfft(x, axis=1))).sum(axis=0)
        said += bool((rhythm.rhythm_chances(energies, 40)[0] < 0.05).any())
    assert 0.01 * 300 <= said <= 0.08 * 300


@pytest.mark.job
def test_two_spaces(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "user": [f"u{v}" for v in rng.integers(30, size=900)],
            "item": [f"{'u' if v < 2 else 'i'}{v}" for v in rng.integers(20, size=900)],
            "time": 1_767_571_200 + rng.integers(30, size=900) * 86400,
        }
    )
    frame.write_parquet(tmp_path / "edges.parquet")
    start_run(job(tmp_path / "edges.parquet", tmp_path / "out", bipartite=True, outputs=("embedding",)))
    run = load_run(tmp_path / "out")
    # An item is near items, in the role that items have.
    near = run.neighbors("i7")
    assert set(near["space"]) == {"target"}
    assert set(run.neighbors("u9")["space"]) == {"source"}
    with pytest.raises(InputError, match="--space"):
        run.neighbors("u1")
    assert set(run.neighbors("u1", space="target")["space"]) == {"target"}
    assert run.score(["u1"], ["u1"]).shape == (1,)


@pytest.mark.job
def test_unknown_nodes_get_suggestions(run: Run) -> None:
    slips = {"n0.041": "n00041", "n000x41": "n00041", "x00077": "n00077", "N00012": "n00012"}
    for wrong, meant in slips.items():
        with pytest.raises(InputError, match=f"Did you mean {meant}"):
            run.neighbors(wrong)
    with pytest.raises(InputError, match=r"nodes\.parquet"):
        run.neighbors("漢字")


def fake_run(folder: Path, n: int, rank: int, integers: bool = False) -> Run:
    """A published run of random vectors, written as a run's tasks would."""
    rng = np.random.default_rng(0)
    ids = pa.array(np.arange(n) * 3 if integers else [f"person-{i:07d}" for i in range(n)])
    parquet.write_parquet(
        folder / "nodes.parquet", {"node_id": ids, "row": np.arange(n), "degree": np.ones(n, np.int64)}
    )
    for part, start in enumerate(range(0, n, 100_000)):
        rows = slice(start, min(start + 100_000, n))
        columns = {
            "node_id": ids[rows.start : rows.stop],
            "embedding": parquet.vectors(
                rng.standard_normal((rows.stop - rows.start, rank), dtype=np.float32)
            ),
        }
        parquet.write_parquet(folder / "embedding" / f"part-{part:05d}.parquet", columns)
    grid = build_grid("1d", 0, 9 * 86400, TimeScale(1, True))
    config = RunConfig(
        inputs=(),
        outputs=("embedding",),
        rank=rank,
        model="toffee",
        gauge="canonical",
        reduce="sum",
        seed=0,
        bipartite=False,
    )
    counts = ("files", "rows", "comments", "outside", "used", "self_loops", "duplicates", "cancelled")
    more = ("new_nodes", "pairs", "entries", "empty_steps")
    summary: dict[str, Any] = dict.fromkeys((*counts, *more), 0) | {"nodes": n, "steps": 10, "density": 0.0}
    texts: dict[str, Any] = {"first": "", "last": "", "fingerprint": "", "examples": [], "skipped": {}}
    manifest = Manifest(
        run_id="fake",
        state="published",
        begun="",
        finished="",
        config=config,
        identity="",
        fingerprint="",
        versions={},
        directed=False,
        summary=Summary(**summary, **texts),
        grid=grid,
        outputs=("embedding",),
        metrics=Metrics(nodes=n, steps=10, solved=0, reused=0, seconds={}),
    )
    RunFolder(folder).write_manifest(manifest)
    return Run(RunFolder(folder))


def test_a_large_run_is_asked_in_one_pass_and_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = fake_run(tmp_path, 200_000, 64)
    run.build_index()
    blocks = list(run.vectors("embedding").blocks())
    assert len(blocks) > 3
    read: list[int] = []

    def counted(block: IndexBlock, read_block: Any = IndexBlock.read) -> Any:
        read.append(block.first)
        return read_block(block)

    with monkeypatch.context() as patch:
        patch.setattr(IndexBlock, "read", counted)
        found = run.neighbors("person-0123456")
    assert found.height == 10
    # Every block once, and once more the one that holds the node.
    holding = max(block.first for block in blocks if block.first <= 123_456)
    assert sorted(read) == sorted([*(block.first for block in blocks), holding])
    tracemalloc.start()
    run.neighbors("person-0123456")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 30 * 2**20 < 200_000 * 64 * 4
    compared: list[str] = []

    class Counted(difflib.SequenceMatcher[str]):
        def __init__(self, junk: None, name: str, other: str) -> None:
            compared.append(other)
            super().__init__(junk, name, other)

    monkeypatch.setattr(difflib, "SequenceMatcher", Counted)
    assert nodes.suggest(run, "person-01234x6")[0] == "person-0123406"
    # Of 200,000 ids few are compared letter by letter.
    assert len(compared) <= nodes.CANDIDATES


def test_integers_as_ids(tmp_path: Path) -> None:
    run = fake_run(tmp_path, 300, 4, integers=True)
    assert run.neighbors("30").equals(run.neighbors(30))
    with pytest.raises(InputError, match=r"integers.*Did you mean"):
        run.neighbors(31)
    with pytest.raises(InputError, match="integers"):
        run.neighbors("alice")
    with pytest.raises(InputError):
        run.neighbors(2**70)


@pytest.mark.job
def test_steps_and_moments(run: Run) -> None:
    grid = run.grid
    for step in (0, 7, 39):
        assert nodes.find_step(grid, step) == nodes.find_step(grid, str(step)) == step
        assert nodes.find_step(grid, grid.show(step)[:10]) == step
        assert nodes.find_step(grid, grid.show(step)[:10] + "T23:59") == step
    assert nodes.find_step(grid, -1) == 39
    for wrong in ("40", "2031-01-01", "1999-12-31", "soon", "-41"):
        with pytest.raises(InputError, match="0 to 39, or a moment"):
            nodes.find_step(grid, wrong)
    numbers = build_grid("5", 0, 99, TimeScale(1, False))
    assert nodes.find_step(numbers, 3) == 3
    zone = build_grid("1d", 1_711_500_000, 1_712_500_000, TimeScale(1, True, "Europe/Athens"))
    assert nodes.find_step(zone, zone.show(4)[:10]) == 4


@pytest.mark.job
def test_what_cannot_be_asked(run: Run, runs: dict[bool, Run], edges: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="metric"):
        run.neighbors("n00001", metric="euclid")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="at least 1"):
        run.neighbors("n00001", k=0)
    with pytest.raises(ConfigError, match="one space"):
        run.neighbors("n00001", space="target")
    with pytest.raises(ConfigError, match="trajectory has nodes as sources"):
        runs[False].neighbors("n00001", at=3, role="target")
    start_run(job(edges, tmp_path / "decayed", reduce="decay:5"))
    decayed = load_run(tmp_path / "decayed")
    assert np.isfinite(decayed.score(["n00001"], ["n00002"])).all()
    with pytest.raises(InputError, match="--outputs factors"):
        decayed.score(["n00001"], ["n00002"], at=3)
    start_run(job(edges, tmp_path / "tsvd", model="tsvd", outputs=("embedding",)))
    with pytest.raises(InputError, match="no score of its own"):
        load_run(tmp_path / "tsvd").score(["n00001"], ["n00002"])
    with pytest.raises(InputError, match="--outputs trajectory"):
        load_run(tmp_path / "tsvd").trajectory_of("n00001")
    with pytest.raises(InputError, match="equal lengths"):
        run.score(["n00001"], [])


@pytest.mark.job
def test_command_line(run: Run, tmp_path: Path) -> None:
    def ask(*words: str) -> Any:
        done = CliRunner().invoke(cli, [*words, "--json"], catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return json.loads(done.stdout)

    path = str(run.path)
    near = ask("neighbors", path, "n00003", "-k", "3", "--at", "5")["neighbors"]
    assert near == run.neighbors("n00003", 3, at=5).to_dicts()
    assert len(ask("trajectory", path, "n00003")["length"]) == run.n_steps
    assert ask("similar-periods", path, "n00003", "-k", "2")["similar"][0]["node_id"] != "n00003"
    expected = run.score(["n00003", "n00004"], ["n00008", "n00009"]).tolist()
    found = ask("score", path, "n00003,n00008", "n00004,n00009")["scores"]
    assert [row["score"] for row in found] == pytest.approx(expected)
    texts = {
        "a.csv": "source,target\nn00003,n00008\nn00004,n00009\n",
        "b.txt": "n00003 n00008\nn00004 n00009\n",
        "c.tsv": "n00003\tn00008\nn00004\tn00009",
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert ask("score", path, str(tmp_path / name))["scores"] == found
    pl.DataFrame(found).select("source", "target").write_parquet(tmp_path / "d.parquet")
    assert ask("score", path, str(tmp_path / "d.parquet"))["scores"] == found
    plain = CliRunner().invoke(cli, ["neighbors", path, "n00003"], catch_exceptions=False)
    assert plain.stdout.splitlines()[0].split() == ["node_id", "similarity"]
    for words in (
        ["trajectory", path, "n00003"],
        ["similar-periods", path, "n00003"],
        ["score", path, "n00003,n00008"],
    ):
        assert CliRunner().invoke(cli, words, catch_exceptions=False).stdout


@pytest.mark.job
@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["neighbors", "RUN", "n0003"], 3, "Did you mean"),
        (["neighbors", "RUN", "n00003", "--at", "never"], 3, "moment"),
        (["score", "RUN", "alone"], 2, "alice,bob"),
        (["score", "RUN", "EMPTY"], 3, "two columns"),
        (["neighbors", "nowhere", "n00003"], 3, "toffee embed"),
    ],
)
def test_errors_tell_the_next_step(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], code: int, said: str
) -> None:
    (tmp_path / "empty.csv").write_text("one\n")
    places = {"RUN": str(run.path), "EMPTY": str(tmp_path / "empty.csv")}
    with pytest.raises(SystemExit) as stop:
        main([places.get(word, word) for word in words])
    assert stop.value.code == code
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


@pytest.mark.cluster
def test_benchmark() -> None:
    command = [sys.executable, "benchmarks/neighbors.py", "--nodes", "3000", "--rank", "8", "--repeats", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=250, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"parquet", "index", "index, dot", "unknown node"}
    assert all(one["added_mib"] < 100 for one in found.values())
