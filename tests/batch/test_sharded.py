"""Slices in blocks of nodes: any number of blocks gives the same result, the same number the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import scipy.sparse as sp
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.clusters import Stopped, digests, job, write_edges
from toffee_dist import load_run
from toffee_dist.batch.blocks import cut_rows
from toffee_dist.batch.job import Job
from toffee_dist.batch.passes import run_pass
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.errors import UnfinishedError
from toffee_dist.kernels.spmm import multiply_tiles
from toffee_dist.limits import Limits
from toffee_dist.storage.blocks import block_of
from toffee_dist.storage.runs import find_unfinished

FEW, MANY = Limits(block_work=5000), Limits(block_work=1700)


@given(
    seed=st.integers(0, 1000),
    cuts=st.lists(st.integers(0, 30), max_size=4),
    columns=st.integers(1, 5),
    kind=st.sampled_from(["f4", "f8", "c8", "c16"]),
)
def test_products_in_tiles_have_the_bits_of_the_whole(
    seed: int, cuts: list[int], columns: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    X = sp.csr_matrix(sp.random(20, 30, 0.2, rng=rng).toarray().astype(kind))
    Q = rng.standard_normal((30, columns)).astype(kind)
    bounds = sorted({0, *cuts, 30})
    tiles = ((a, b, Q[a:b]) for a, b in pairwise(bounds))
    found = multiply_tiles(X.indptr, X.indices, X.data, tiles, columns)
    assert found.tobytes() == (X @ Q).tobytes()
    np.testing.assert_allclose(found, X.toarray() @ Q, rtol=1e-4, atol=1e-5)


@given(
    pieces=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 2000)), min_size=1, max_size=6),
    work=st.integers(100, 5000),
)
def test_blocks_have_about_the_same_work(pieces: list[tuple[int, int]], work: int) -> None:
    rows, pairs = np.cumsum([(0, 0), *pieces], axis=0).T
    bounds = cut_rows(list(zip(rows.tolist(), pairs.tolist(), strict=True)), Limits(block_work=work))
    assert bounds[0] == 0
    assert bounds[-1] == rows[-1]
    assert list(bounds) == sorted(set(bounds))
    total = pairs[-1] + 16 * rows[-1]
    assert len(bounds) - 1 <= max(1, -(-total // work))
    # Between two cuts of the tensor pairs count as spread evenly; a row is never cut.
    done = np.interp(bounds, rows, pairs) + 16 * np.array(bounds)
    one = max((count / length for length, count in pieces), default=0) + 16
    assert np.diff(done).max() <= total / max(1, -(-total // work)) + 2 * one + 1e-6


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("sharded") / "edges.parquet", nodes=250, events=5000, days=12)


def options(**more: Any) -> dict[str, Any]:
    return {
        "precision": "double",
        "tol": 1e-9,
        "rank": 6,
        "outputs": ("embedding",),
        "keep_work": True,
    } | more


@pytest.mark.job
@pytest.mark.parametrize("undirected", [False, True])
@pytest.mark.parametrize("reduce", ["sum", "decay:3", "last:4"])
def test_any_number_of_blocks(edges: Path, tmp_path: Path, undirected: bool, reduce: str) -> None:
    found = []
    for name, limits in (("one", Limits()), ("few", FEW), ("many", MANY)):
        config = job(edges, tmp_path / name, **options(undirected=undirected, reduce=reduce))
        found.append((start_run(config, limits=limits), load_run(tmp_path / name)))
    (one, whole), *others = found
    assert not one.passes
    expected = whole.embedding.polars().collect()
    for outcome, run in others:
        assert outcome.passes["passes"] > 10
        np.testing.assert_allclose(run.embedding.numpy(), whole.embedding.numpy(), atol=1e-5)
        table = run.embedding.polars().collect()
        for column in ("node_id", "degree", "last_step", "is_cold"):
            assert table[column].to_list() == expected[column].to_list(), column
        np.testing.assert_allclose(table["residual"], expected["residual"], atol=1e-5)
        assert outcome.figures["energy_share"] == pytest.approx(one.figures["energy_share"], abs=1e-9)
        folds, known_folds = (np.load(each.path / "fold.npy") for each in (run, whole))
        np.testing.assert_allclose(folds, known_folds, rtol=1e-6)
        fit, known = (each.fit.polars().collect().to_dicts()[0] for each in (run, whole))
        assert fit["objective"] == pytest.approx(known["objective"], rel=1e-9)


@pytest.mark.job
@pytest.mark.parametrize("rank", [1, 3])
@pytest.mark.parametrize("undirected", [False, True])
def test_slices_of_other_frequencies(edges: Path, tmp_path: Path, undirected: bool, rank: int) -> None:
    outputs = ("factors", "trajectory")
    more = options(undirected=undirected, outputs=outputs, freqs="all", max_iter=2, rank=rank)
    start_run(job(edges, tmp_path / "one", **more))
    outcome = start_run(job(edges, tmp_path / "cut", **more), limits=Limits(block_work=5000, slice_bytes=0))
    assert outcome.solved == 7
    one, cut = load_run(tmp_path / "one"), load_run(tmp_path / "cut")
    fits = [run.fit.polars().collect() for run in (one, cut)]
    assert fits[0]["solver"].to_list() == fits[1]["solver"].to_list()
    np.testing.assert_allclose(fits[1]["objective"], fits[0]["objective"], rtol=1e-9)
    np.testing.assert_allclose(cut.trajectory.numpy(), one.trajectory.numpy(), atol=1e-5)


@pytest.mark.job
@pytest.mark.parametrize("undirected", [False, True])
def test_trajectories_and_the_choice_of_frequencies(edges: Path, tmp_path: Path, undirected: bool) -> None:
    more = options(undirected=undirected, outputs=("trajectory",), dense="all")
    tables, vectors = [], []
    for name, limits in (("one", Limits()), ("many", MANY)):
        start_run(job(edges, tmp_path / name, **more), limits=limits)
        run = load_run(tmp_path / name)
        tables.append(run.frequencies.polars().collect())
        vectors.append(run.trajectory.numpy())
    for column in ("energy", "significance"):
        np.testing.assert_allclose(tables[1][column], tables[0][column], rtol=1e-6, atol=1e-4)
    assert tables[1]["chosen"].to_list() == tables[0]["chosen"].to_list()
    np.testing.assert_allclose(vectors[1], vectors[0], atol=1e-5)


@pytest.mark.job
@pytest.mark.slow
def test_the_same_bytes_in_every_mode(edges: Path, tmp_path: Path) -> None:
    found = []
    for mode, workers in (("threads", 1), ("threads", 3), ("processes", 2)):
        config = job(edges, tmp_path / f"{mode}-{workers}", rank=6, mode=mode, workers=workers)
        found.append(digests(start_run(config, limits=MANY).run.path))
    assert found[0] == found[1] == found[2]


@pytest.mark.job
@pytest.mark.parametrize("undirected", [False, True])
def test_the_plan_knows_passes_and_bytes(tmp_path: Path, undirected: bool) -> None:
    # Communities of all sizes: without any structure there is no gap, and passes go on.
    rng = np.random.default_rng(0)
    source = (4000 * rng.random(40_000) ** 2).astype(np.int64)
    inside = rng.random(40_000) < 0.9
    target = np.where(
        inside, source // 100 * 100 + rng.integers(100, size=40_000), rng.integers(4000, size=40_000)
    )
    path = tmp_path / "edges.parquet"
    time = rng.integers(12 * 86_400, size=40_000)
    pl.DataFrame({"source": source, "target": target, "time": time}).write_parquet(path)
    config = job(
        path, tmp_path / "out", rank=16, undirected=undirected, outputs=("embedding",), time_unit="s"
    )
    done = start_run(config, limits=Limits(block_work=20_000))
    [stage] = [stage for stage in done.plan.stages if stage.name == "solve zero"]
    assert stage.tasks > 3
    assert 1 / 1.6 < done.passes["passes"] / stage.passes < 1.6
    assert 1 / 1.6 < done.passes["moved"] / stage.moved < 1.6


def stop_after(monkeypatch: pytest.MonkeyPatch, passes: int, blocks: int) -> None:
    """Let a client die in the middle of a pass, when so many blocks of it are done."""
    real = Job.tasks
    seen = {"passes": 0}

    def tasks(self: Job, done: Callable[[], None]) -> Callable[..., Iterator[Any]]:
        run = real(self, done)

        def counted(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
            if function is not run_pass:
                yield from run(function, items)
                return
            seen["passes"] += 1
            for index, item in enumerate(items):
                if seen["passes"] == passes and index == blocks:
                    raise Stopped
                yield from run(function, [item])

        return counted

    monkeypatch.setattr(Job, "tasks", tasks)


@pytest.mark.job
@pytest.mark.parametrize("undirected", [False, True])
def test_a_pass_killed_in_the_middle_goes_on_there(
    edges: Path, tmp_path: Path, undirected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"rank": 6, "outputs": ("embedding",), "undirected": undirected}
    whole = start_run(job(edges, tmp_path / "whole", **more), limits=MANY)
    for passes, blocks in ((1, 1), (9, 2), (17, 0)):
        out = tmp_path / f"killed-{passes}"
        with monkeypatch.context() as patch:
            stop_after(patch, passes, blocks)
            with pytest.raises(Stopped):
                start_run(job(edges, out, **more), limits=MANY)
        done = resume_run(find_unfinished(out), {"mode": "threads", "workers": 1}, limits=MANY)
        assert done.passes["reused"] == passes - 1
        assert done.passes["blocks_reused"] == blocks
        assert done.passes["passes"] == whole.passes["passes"]
        assert digests(done.run.path) == digests(whole.run.path)


@pytest.mark.job
def test_rows_that_a_power_cut_took_are_made_again(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    more = {"rank": 6, "outputs": ("embedding",)}
    whole = start_run(job(edges, tmp_path / "whole", **more), limits=MANY)
    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        stop_after(patch, 12, 1)
        with pytest.raises(Stopped):
            start_run(job(edges, out, **more), limits=MANY)
    unfinished = find_unfinished(out)
    # As large as it was, and full of zeros: what a file system may leave that was not synced.
    [folder] = unfinished.slices.glob("passes-*")
    lost = block_of(folder / "t00003.npy", 1)
    lost.write_bytes(bytes(lost.stat().st_size))
    done = resume_run(unfinished, {"mode": "threads", "workers": 1}, limits=MANY)
    assert done.passes["reused"] == 0
    assert digests(done.run.path) == digests(whole.run.path)


@pytest.mark.job
def test_blocks_of_a_finished_slice_are_checked(edges: Path, tmp_path: Path, monkeypatch: Any) -> None:
    from toffee_dist.batch import pipeline

    more = {"rank": 6, "outputs": ("embedding",)}
    whole = start_run(job(edges, tmp_path / "whole", **more), limits=MANY)
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "write_parts", _fail)
        with pytest.raises(UnfinishedError):
            start_run(job(edges, tmp_path / "out", **more), limits=MANY)
    unfinished = find_unfinished(tmp_path / "out")
    same = resume_run(unfinished, {"mode": "threads", "workers": 1, "keep_work": True}, limits=MANY)
    assert (same.solved, same.reused) == (0, 1)
    assert digests(same.run.path) == digests(whole.run.path)


def _fail(*_: Any) -> None:
    raise UnfinishedError("stopped", got="by the test")
