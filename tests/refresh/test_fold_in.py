"""New nodes folded into a run: against dense algebra, and against the run that knew them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness.refreshes import night, write_day, write_days
from toffee_dist import load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.errors import InputError
from toffee_dist.kernels.align import row_cosines
from toffee_dist.kernels.fold import fold_rows
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.refresh.fold_in import FoldConfig, fold_in
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.tensors import open_tensor

pytestmark = pytest.mark.job

LOCAL = {"mode": "threads", "workers": 1}


@pytest.mark.parametrize("undirected", [True, False])
def test_known_nodes_fold_to_where_they_are(tmp_path: Path, undirected: bool) -> None:
    """With λ = 0, X V = U S of a Hermitian slice: folding gives back the vectors, signs and all."""
    edges, out = write_days(tmp_path / "edges", 0, 30), tmp_path / "out"
    options = {"undirected": undirected, "model": "toffee-", "rank": 24}
    refresh(night(edges, out, **options))
    write_day(edges, 30)
    refresh(night(edges, out, keep_work=True, **options))
    run = load_run(out)
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    [(_, values)] = iter_values(tensor, [0])
    X = slice_matrix(tensor, values)
    E = run.embedding.numpy()
    F = E if undirected else run.embedding_target.numpy()
    w, Q = (np.load(run.path / name) for name in ("fold.npy", "rotation.npy"))
    if undirected:
        assert (w < 0).any()  # Negative eigenvalues are there, so their signs are tested.
    blocks = [(0, F[:100]), (100, F[100:])]
    found = fold_rows(X, blocks, w[0], Q)
    if undirected:
        np.testing.assert_allclose(found, E, atol=2e-3)
    else:
        # Column by column, no factor comes nearer.
        P, wanted = X @ F @ Q.T, E @ Q.T
        best = [np.linalg.lstsq(p[:, None], e, rcond=None)[0][0] for p, e in zip(P.T, wanted.T, strict=True)]
        np.testing.assert_allclose(w[0], best, rtol=1e-2, atol=1e-4)
        assert np.median(row_cosines(found, E)) > 0.9


@pytest.mark.parametrize("undirected", [True, False])
def test_new_nodes_go_where_a_full_run_puts_them(tmp_path: Path, undirected: bool) -> None:
    whole = pl.read_parquet(write_days(tmp_path / "whole", 0, 28))
    fresh = [f"n{v:05d}" for v in range(0, 240, 24)]
    mine = pl.col("source").is_in(fresh) | pl.col("target").is_in(fresh)
    for name, frame in (("old", whole.filter(~mine)), ("new", whole.filter(mine)), ("all", whole)):
        frame.write_parquet(tmp_path / f"{name}.parquet")
    alone = pl.DataFrame({"source": ["x"], "target": ["y"], "time": whole["time"][:1]})
    pl.concat([whole.filter(mine), alone]).write_parquet(tmp_path / "new.parquet")
    for name in ("old", "all"):
        start_run(night(tmp_path / f"{name}.parquet", tmp_path / name, undirected=undirected, last=None))
    config = FoldConfig.read({"inputs": (str(tmp_path / "new.parquet"),), **LOCAL})
    found = fold_in(tmp_path / "old", config, tmp_path / "folded.parquet")
    assert (found["new"], found["cold"]) == (12, 2)
    table = pl.read_parquet(tmp_path / "folded.parquet")
    assert table["node_id"].to_list() == [*fresh, "x", "y"]
    assert table["is_cold"].to_list() == [False] * 10 + [True] * 2
    vectors = table["embedding"].to_numpy()
    assert not vectors[10:].any()
    # Whom they are nearest to, in the old run, is whom a run that knew them has them nearest to.
    old, full = load_run(tmp_path / "old"), load_run(tmp_path / "all")
    names = old.nodes.polars().collect()["node_id"].to_list()
    rows = {name: row for row, name in enumerate(full.nodes.polars().collect()["node_id"])}
    E = full.embedding.numpy()
    agree = []
    for vector, name in zip(vectors[:10], fresh, strict=True):
        here = row_cosines(old.embedding.numpy(), np.broadcast_to(vector, old.embedding.shape))
        there = row_cosines(E, np.broadcast_to(E[rows[name]], E.shape))[[rows[n] for n in names]]
        agree.append(np.corrcoef(here, there)[0, 1])
    assert np.median(agree) > 0.8


def test_runs_that_cannot_take_in_nodes_say_so(tmp_path: Path) -> None:
    edges = write_days(tmp_path / "edges", 0, 28)
    start_run(night(edges, tmp_path / "out", gauge="none", last=None))
    with pytest.raises(InputError, match="gauge canonical"):
        fold_in(tmp_path / "out", FoldConfig.read({"inputs": (str(edges),), **LOCAL}), tmp_path / "f.parquet")
