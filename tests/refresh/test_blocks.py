"""A refresh in blocks of nodes: rotation, held-out links and drift as in one, and as plain loops say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tests import naive
from tests.harness.clusters import digests
from tests.harness.refreshes import DAY, FIRST, night, write_days
from toffee_dist import load_run
from toffee_dist.errors import UnfinishedError
from toffee_dist.kernels.align import QUANTILES
from toffee_dist.limits import Limits
from toffee_dist.refresh import align, drift, links
from toffee_dist.refresh.job import refresh, resume_refresh
from toffee_dist.storage.runs import find_unfinished, list_runs

MANY = Limits(block_work=1700)


def make_chain(edges: Path, out: Path, limits: Limits, **options: Any) -> Any:
    """Refresh twice, nodes expiring; return the record of the last."""
    more: dict[str, Any] = {
        "outputs": ("embedding",),
        "precision": "double",
        "max_iter": 5,
        "keep_work": True,
    }
    for day in (28, 42):
        config = night(edges, out, as_of=str(FIRST + day * DAY), expire="30d", **more | options)
        refresh(config, limits=limits)
    return list_runs(out)[-1].read_manifest().refresh


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nights") / "edges"
    # Some nodes are of the first days only: they expire. Others come later.
    write_days(folder, 0, 5, nodes=260, events=300, name="-old", seed=1)
    write_days(folder, 0, 36, nodes=200, events=300)
    return write_days(folder, 36, 42, nodes=240, events=300)


@pytest.mark.job
@pytest.mark.parametrize("undirected", [False, True])
def test_any_number_of_blocks(edges: Path, tmp_path: Path, undirected: bool) -> None:
    one = make_chain(edges, tmp_path / "one", Limits(), undirected=undirected)
    many = make_chain(edges, tmp_path / "many", MANY, undirected=undirected)
    assert len(list((list_runs(tmp_path / "many")[-1].work / "activity").glob("degree.*.npy"))) > 3
    assert one.expired == many.expired > 0
    for name in ("nodes", "mean_cosine", "unaligned"):
        assert getattr(many.alignment, name) == pytest.approx(getattr(one.alignment, name), abs=1e-4)
    assert (many.links.links, many.links.steps) == (one.links.links, one.links.steps)
    assert many.links.links > 100
    assert many.links.before == pytest.approx(one.links.before, abs=1e-3)
    assert many.links.now == pytest.approx(one.links.now, abs=1e-3)
    for mine, theirs in zip(many.drift, one.drift, strict=True):
        for name in ("nodes", "new", "left", "returned", "expired"):
            assert getattr(mine, name) == getattr(theirs, name), name
        for name in ("cosine", "norm_ratio"):
            assert getattr(mine, name) == pytest.approx(getattr(theirs, name), abs=1e-3)
        assert mine.overlap10 == pytest.approx(theirs.overlap10, abs=0.02)
        assert mine.angle_mean == pytest.approx(theirs.angle_mean, abs=0.05)
        assert [mover.node_id for mover in mine.movers][:5] == [mover.node_id for mover in theirs.movers][:5]


@pytest.mark.job
def test_drift_is_what_published_vectors_say(edges: Path, tmp_path: Path) -> None:
    record = make_chain(edges, tmp_path, MANY).drift[0]
    runs = [load_run(folder.path) for folder in list_runs(tmp_path)[-2:]]
    tables = [{row["node_id"]: row for row in run.embedding.polars().collect().to_dicts()} for run in runs]
    # A node that was forgotten and comes back is a new one.
    earlier, later = list_runs(tmp_path)[-2:]
    kept = later.read_kept(earlier.run_id)
    assert kept is not None
    before = {name: row for (name, row), here in zip(tables[0].items(), kept, strict=True) if here}
    expected = naive.drift(before, tables[1])
    assert record.nodes == len(expected["cosines"])
    assert (record.new, record.left, record.returned) == tuple(
        expected["states"].count(state) for state in ("new", "left", "returned")
    )
    np.testing.assert_allclose(
        list(record.cosine.values()), np.quantile(list(expected["cosines"].values()), QUANTILES), atol=2e-5
    )
    np.testing.assert_allclose(
        list(record.norm_ratio.values()), np.quantile(expected["ratios"], QUANTILES), rtol=3e-4
    )
    assert [mover.node_id for mover in record.movers] == expected["movers"][: drift.MOVERS]
    table = pl.read_parquet(list_runs(tmp_path)[-1].drift)
    found = {row["node_id"]: row["cosine"] for row in table.to_dicts() if row["cosine"] is not None}
    assert found == pytest.approx(expected["cosines"], abs=1e-5)


@pytest.mark.job
@pytest.mark.parametrize("place", [(align, "align_block"), (links, "look_up"), (drift, "measure_block")])
def test_killed_between_blocks(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[Any, str]
) -> None:
    module, name = place
    more = {"outputs": ("embedding",)}
    for out in ("whole", "cut"):
        refresh(night(edges, tmp_path / out, as_of=str(FIRST + 28 * DAY), **more), limits=MANY)
    config = night(edges, tmp_path / "whole", as_of=str(FIRST + 35 * DAY), **more)
    refresh(config, limits=MANY)
    real = getattr(module, name)

    def fail(task: Any) -> Any:
        if task.index == 2:
            raise OSError(5, "disk gone")
        return real(task)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, fail)
        with pytest.raises(UnfinishedError, match="disk gone"):
            refresh(config.model_copy(update={"out": str(tmp_path / "cut")}), limits=MANY)
    resume_refresh(find_unfinished(tmp_path / "cut"), {"mode": "threads", "workers": 1}, limits=MANY)
    whole, cut = (list_runs(tmp_path / out)[-1].path for out in ("whole", "cut"))
    assert digests(cut) == digests(whole)
