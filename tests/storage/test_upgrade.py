"""Runs of the previous version (format 1), kept as a fixture: read, resumed, refreshed, rolled back by this.

The archive was written by the version before modules had packages (57ad49e): 60 nodes, 21 files of a day
each; `embed` is a published run, `unfinished` one that was interrupted while it solved slices, `nights` two
refreshes.
"""

from __future__ import annotations

import json
import tarfile
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness import ROOT
from tests.harness.clusters import digests, job
from tests.harness.refreshes import night
from toffee_dist import load_run
from toffee_dist.batch.inspect_run import inspect_run
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.cli import main
from toffee_dist.errors import InputError
from toffee_dist.refresh.history import describe_runs, roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RuntimeSettings
from toffee_dist.storage.manifest import FORMAT
from toffee_dist.storage.runs import find_unfinished, list_runs
from toffee_dist.storage.tensors import open_tensor


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(ROOT / "tests" / "fixtures" / "format-1.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path / "format-1"


def forget_last_day(old: Path) -> None:
    """Remove the file that came after `embed` and `unfinished`, and before the second night."""
    (old / "edges" / "day-020.parquet").unlink()


@pytest.mark.job
def test_it_is_read(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = load_run(old / "embed")
    vectors = run.embedding.numpy()
    assert vectors.shape == (60, 4)
    assert run.trajectory.numpy().shape == (20, 60, 4)
    assert np.isfinite(vectors).all()
    assert inspect_run(old / "embed")["state"] == "published"
    for command in (["runs"], ["neighbors", "n003"], ["score", "n003,n004"]):
        main([command[0], str(old / "embed"), *command[1:], "--json"])
        assert json.loads(capsys.readouterr().out)
    # What this version makes of the same edges, to the digits of single precision.
    forget_last_day(old)
    fresh = start_run(job(old / "edges", old / "fresh", rank=4)).run
    same = load_run(fresh.path.parents[1])
    np.testing.assert_allclose(np.abs(same.embedding.numpy()), np.abs(vectors), atol=2e-3)


@pytest.mark.job
def test_it_is_resumed(old: Path) -> None:
    """The vectors are those of an undisturbed run of this version: what has no checksum is computed again."""
    done = resume_run(find_unfinished(old / "unfinished"), RuntimeSettings(mode="threads").model_dump())
    forget_last_day(old)
    fresh = start_run(job(old / "edges", old / "fresh", rank=4))
    ours, theirs = digests(done.run.path), digests(fresh.run.path)
    assert set(ours) == set(theirs)
    assert ours["trajectory/part-00000.parquet"] == theirs["trajectory/part-00000.parquet"]
    # Residuals were written before the interruption: by the previous version, whose last digits are others.
    for name in ("embedding", "embedding_target"):
        mine, fresh_one = (pl.read_parquet(one.run.path / name) for one in (done, fresh))
        assert mine.drop("residual").equals(fresh_one.drop("residual"))
        np.testing.assert_allclose(mine["residual"], fresh_one["residual"], atol=1e-5)


@pytest.mark.job
def test_it_is_refreshed_and_rolled_back(old: Path) -> None:
    out = old / "nights"
    before = describe_runs(out)
    assert [row.latest for row in before] == [False, True]
    options = {"rank": 4, "last": "14d", "as_of": "2026-01-26", "min_links": 5}
    done = refresh(night(old / "edges", out, **options))
    assert done.state == "published"
    # It goes on from the last run of the version before: its vectors, its slices, its basis.
    assert done.record.previous == before[-1].run
    assert done.record.drift
    assert all(drift.cosine["p50"] > 0.9 for drift in done.record.drift)
    assert done.record.saved is not None
    assert done.record.saved.slices == 1
    assert roll_back(out).run_id == before[-1].run
    assert roll_back(out).run_id == before[0].run
    assert load_run(out).embedding.numpy().shape[1] == 4


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("embed/runs/*/manifest.json", ["inspect", "embed"]),
        ("embed/runs/*/manifest.json", ["neighbors", "embed", "n003"]),
        ("embed/latest.json", ["inspect", "embed"]),
        ("embed/latest.json", ["rollback", "embed"]),
        ("embed/latest.json", ["embed", "edges", "--out=embed", "--rank=4"]),
        ("nights/latest.json", ["refresh", "edges", "--out=nights", "--rank=4", "--last=14d"]),
        ("unfinished/runs/*/work/job.json", ["resume", "unfinished"]),
        ("unfinished/runs/*/work/ingest/ingest.json", ["resume", "unfinished"]),
        ("unfinished/runs/*/work/ingest/tensor/header.json", ["resume", "unfinished", "--mode=threads"]),
    ],
)
def test_a_later_format_is_refused(
    old: Path,
    file: str,
    command: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    [path] = old.glob(file)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"format": FORMAT + 1}))
    monkeypatch.chdir(old)
    with pytest.raises(SystemExit) as ended:
        main(command)
    said = " ".join(capsys.readouterr().err.split())
    assert ended.value.code == 3, said
    assert "has a later format" in said
    assert f"got {FORMAT + 1}; allowed: up to {FORMAT}" in said
    assert "the version of toffee_dist that wrote it, or a later one" in said


def test_a_later_tensor_is_refused(old: Path) -> None:
    [header] = old.glob("unfinished/runs/*/work/ingest/tensor/header.json")
    header.write_text(json.dumps(json.loads(header.read_text()) | {"format": FORMAT + 1}))
    with pytest.raises(InputError, match="has a later format"):
        open_tensor(header.parent)


@pytest.mark.job
def test_its_space_has_an_id_that_the_chain_keeps(old: Path) -> None:
    """By the first run of its chain; what this version adds to the chain is of the same space."""
    alone = load_run(old / "embed").space_id
    first, second = (load_run(run.path) for run in list_runs(old / "nights"))
    assert first.space_id == second.space_id != alone
    assert load_run(old / "embed").space_id == alone
    refresh(night(old / "edges", old / "nights", rank=4, last="14d", as_of="2026-01-26", min_links=5))
    third = load_run(old / "nights")
    assert third.manifest.run_id not in (first.manifest.run_id, second.manifest.run_id)
    assert third.space_id == second.space_id
    # Its files say it; those of before do not, and are read by the word of their manifest.
    assert "space_id" in third.embedding.schema()
    assert "space_id" not in second.embedding.schema()
    assert third.join(second).collect().height == second.n_nodes
    with pytest.raises(InputError, match="vectors of another space"):
        load_run(old / "embed", third.space_id)
