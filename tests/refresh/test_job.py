"""The nightly refresh: the same rows and axes, published only when it is good."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.harness import ROOT
from tests.harness.refreshes import DAY, FIRST, night, write_day, write_days
from toffee_dist import load_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError, QualityError, UnfinishedError
from toffee_dist.kernels.align import row_cosines
from toffee_dist.refresh import drift
from toffee_dist.refresh.history import describe_runs, roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.refresh.window import find_window
from toffee_dist.storage.lock import hold_lock
from toffee_dist.storage.runs import find_run, find_unfinished, list_runs, point_to
from toffee_dist.timegrid import TimeScale


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    return write_days(tmp_path / "edges", 0, 30)


@pytest.mark.job
@pytest.mark.parametrize("undirected", [True, False])
def test_two_nights(edges: Path, tmp_path: Path, undirected: bool) -> None:
    out = tmp_path / "out"
    # Afresh, so that tonight's fit is to the digit that of a run on its own.
    options: dict[str, Any] = {
        "undirected": undirected,
        "outputs": ("embedding", "trajectory"),
        "warm": False,
        # Rows in another order start elsewhere: what both converge to is compared.
        "tol": 1e-6,
    }
    refresh(night(edges, out, **options))
    first = load_run(out)
    assert first.n_steps == 28
    assert first.grid.show(0).startswith("2026-01-07")
    nodes = first.nodes.polars().collect()
    # Day 30 brings new nodes whose names sort before all others.
    write_day(edges, 30)
    fresh = pl.DataFrame({"source": ["a1", "a2"], "target": ["n00001", "a1"], "time": FIRST + 30 * DAY})
    fresh.write_parquet(edges / "new.parquet")
    done = refresh(night(edges, out, **options))
    second = load_run(out)
    assert done.state == "published"
    assert done.run == second.path.name
    assert second.grid.show(0).startswith("2026-01-08")
    later = second.nodes.polars().collect()
    assert later["node_id"][: nodes.height].to_list() == nodes["node_id"].to_list()
    assert later["node_id"][nodes.height :].to_list() == ["a1", "a2"]

    # The published vectors are tonight's own, turned by one rotation.
    Q = np.load(second.path / "rotation.npy")
    np.testing.assert_allclose(Q @ Q.T, np.eye(8), atol=1e-12)
    alone = refresh(night(edges, tmp_path / "alone", known=None, **options))
    E = load_run(tmp_path / "alone")
    order = {name: row for row, name in enumerate(E.nodes.polars().collect()["node_id"])}
    rows = [order[name] for name in later["node_id"]]
    np.testing.assert_allclose(
        np.abs(E.embedding.numpy()[rows] @ E.embedding.numpy()[rows].T),
        np.abs(second.embedding.numpy() @ second.embedding.numpy().T),
        rtol=1e-2,
        atol=1e-2,
    )
    if not undirected:
        np.testing.assert_allclose(
            E.embedding.numpy()[rows] @ E.embedding_target.numpy()[rows].T,
            second.embedding.numpy() @ second.embedding_target.numpy().T,
            rtol=1e-2,
            atol=1e-2,
        )
    # All steps are turned with it: their sum is U·S·Q, where the embedding is U·S^{2/3}·Q.
    total = second.trajectory.numpy().sum(axis=0) @ Q.T
    vectors = second.embedding.numpy() @ Q.T
    ratio = np.linalg.norm(total, axis=0) / np.linalg.norm(vectors, axis=0)
    np.testing.assert_allclose(total, vectors * ratio, atol=1e-2 * np.abs(total).max())
    assert alone.record.previous == ""

    told = done.record.drift[0]
    shared = row_cosines(second.embedding.numpy()[: nodes.height], first.embedding.numpy())
    assert told.cosine["p50"] == pytest.approx(np.nanmedian(shared), abs=1e-5)
    assert told.new == 2
    assert told.cosine["p50"] > 0.9
    table = pl.read_parquet(second.path / "drift.parquet")
    assert table["node_id"].to_list() == later["node_id"].to_list()
    assert table["state"].to_list()[-2:] == ["new", "new"]
    np.testing.assert_allclose(table["cosine"].drop_nulls(), shared[np.isfinite(shared)], atol=1e-5)
    movers = told.movers
    assert movers[0].cosine <= movers[-1].cosine
    assert movers[0].node_id == later["node_id"][movers[0].row]
    links = done.record.links
    assert links is not None
    assert links.steps == 1
    assert links.links > 100
    assert min(links.now or 0, links.before or 0) > 0.7


@pytest.mark.job
def test_confidence_columns_and_cold_nodes(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    pl.DataFrame({"source": ["gone"], "target": ["n00001"], "time": [FIRST + 3 * DAY]}).write_parquet(
        edges / "gone.parquet"
    )
    refresh(night(edges, out))
    write_days(edges, 30, 36)
    done = refresh(night(edges, out))
    run = load_run(out)
    table = run.embedding.polars().collect()
    nodes = run.nodes.polars().collect()
    assert table["degree"].to_list() == nodes["degree"].to_list()
    assert table["last_step"].to_list() == nodes["last_step"].to_list()
    row = nodes["node_id"].to_list().index("gone")
    assert table["is_cold"][row]
    assert table["last_step"][row] is None
    assert not np.any(run.embedding.numpy()[row])
    assert done.record.drift[0].left == 1
    assert (np.any(run.embedding.numpy(), axis=1) == ~table["is_cold"].to_numpy()).all()
    assert table["residual"].is_between(0, 1.001).all()
    # A node whose row is fitted worse than another's has the larger residual: not all alike.
    assert np.std(table["residual"].to_numpy()) > 0.01


@pytest.mark.job
def test_residual_against_a_dense_fit(edges: Path, tmp_path: Path) -> None:
    from toffee_dist.kernels.spectrum import iter_values, slice_matrix
    from toffee_dist.storage.tensors import open_tensor

    refresh(night(edges, tmp_path / "out", keep_work=True))
    run = load_run(tmp_path / "out")
    tensor = open_tensor(run.path / "work" / "ingest" / "tensor")
    [(_, values)] = iter_values(tensor, [0])
    X = slice_matrix(tensor, values).toarray()
    A, R = (np.load(run.path / "work" / "slices" / f"{name}-0000000.npy") for name in "AR")
    miss = X - A @ R @ A.T
    for table, axis in ((run.embedding, 1), (run.embedding_target, 0)):
        expected = np.square(miss).sum(axis=axis) / np.square(X).sum(axis=axis)
        np.testing.assert_allclose(table.polars().collect()["residual"], expected, rtol=1e-3)
    share = 1 - np.square(miss).sum() / np.square(X).sum()
    assert run.manifest.metrics.energy_share == pytest.approx(share, rel=1e-3)


@pytest.mark.job
def test_the_same_night_twice_does_no_work(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = refresh(night(edges, out))
    before = (out / "latest.json").stat().st_mtime_ns
    again = refresh(night(edges, out))
    assert again.state == "unchanged"
    assert again.run == first.run
    assert len(list_runs(out)) == 1
    assert (out / "latest.json").stat().st_mtime_ns == before
    lines = [json.loads(line) for line in (out / "refresh.jsonl").read_text().splitlines()]
    assert [line["state"] for line in lines] == ["published", "unchanged"]
    metrics = (out / "refresh.prom").read_text()
    assert "toffee_refresh_success 1.0\n" in metrics
    assert "toffee_refresh_nodes 240.0\n" in metrics


@pytest.mark.job
def test_late_edges_are_picked_up(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = refresh(night(edges, out))
    write_day(edges, 20, name="-late", events=50, seed=1)
    second = refresh(night(edges, out))
    assert second.state == "published"
    assert second.manifest.summary.used == first.manifest.summary.used + 50
    assert second.manifest.grid == first.manifest.grid
    # No new step: the run before has seen the links, and would be asked for what it knows.
    assert second.record.links is None


@pytest.mark.job
def test_a_bad_night_is_not_published(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = refresh(night(edges, out))
    pointer = (out / "latest.json").read_bytes()
    # The files of all days are lost but the newest.
    for path in edges.iterdir():
        path.unlink()
    write_day(edges, 30, nodes=60, events=100)
    for _ in range(2):
        with pytest.raises(QualityError, match=r"active nodes .* of the previous run's") as raised:
            refresh(night(edges, out, min_coverage=0.5))
        assert raised.value.exit_code == 6
        assert (out / "latest.json").read_bytes() == pointer
        assert len(list_runs(out)) == 2
    assert load_run(out).path.name == first.run
    assert [line.state for line in describe_runs(out)] == ["published", "rejected"]
    assert "toffee_refresh_rejected 1.0\n" in (out / "refresh.prom").read_text()
    # Other limits judge the same run again; nothing is computed.
    loose = {"min_coverage": 0.0, "min_cosine": -1.0, "max_energy_drop": 1.0, "max_auc_drop": 1.0}
    done = refresh(night(edges, out, **loose))
    assert done.state == "published"
    assert len(list_runs(out)) == 2
    assert load_run(out).path.name == done.run == list_runs(out)[-1].run_id


@pytest.mark.job
def test_vectors_that_foretell_nothing_are_not_published(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toffee_dist.batch import solve
    from toffee_dist.kernels.solvers import solve_slices

    out = tmp_path / "out"
    refresh(night(edges, out))
    write_day(edges, 30)

    def shuffled(tensor: Any, freqs: Any, options: Any, *starts: Any) -> Any:
        for factors in solve_slices(tensor, freqs, options, *starts):
            np.random.default_rng(0).shuffle(factors.A)
            yield factors

    monkeypatch.setattr(solve, "solve_slices", shuffled)
    with pytest.raises(
        QualityError, match=r"median cosine .*; share of energy .*; held-out links: AUC 0\.[45]"
    ):
        refresh(night(edges, out))


@pytest.mark.job
def test_a_clock_moved_back(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refresh(night(edges, out))
    shutil.move(edges / "day-029.parquet", tmp_path)
    with pytest.raises(InputError, match="the window would move back"):
        refresh(night(edges, out))
    assert refresh(night(edges, out, as_of="2026-02-03")).state == "published"


@pytest.mark.job
def test_a_damaged_last_run_is_refused(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = refresh(night(edges, out))
    write_day(edges, 30)
    second = refresh(night(edges, out))
    write_day(edges, 31)
    part = find_run(out).path / "embedding" / "part-00000.parquet"
    os.truncate(part, part.stat().st_size // 2)
    with pytest.raises(InputError, match=r"damaged.*toffee rollback.*--fresh"):
        refresh(night(edges, out))
    assert find_run(out).run_id == second.run
    assert roll_back(out).run_id == first.run
    done = refresh(night(edges, out))
    assert done.record.previous == first.run
    for name in ("registry", "manifest.json"):
        victim = find_run(out).path / name
        shutil.move(victim, tmp_path / "aside")
        write_day(edges, 32)
        with pytest.raises(InputError, match=r"damaged.*toffee rollback.*--fresh"):
            refresh(night(edges, out))
        shutil.move(tmp_path / "aside", victim)
    assert refresh(night(edges, out, fresh=True)).record.previous == ""


@pytest.mark.job
def test_a_rollback_stays(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    first = refresh(night(edges, out))
    write_day(edges, 30)
    second = refresh(night(edges, out))
    assert roll_back(out).run_id == first.run
    again = refresh(night(edges, out))
    assert (again.state, again.run) == ("unchanged", first.run)
    assert find_run(out).run_id == first.run
    assert roll_back(out, second.run).run_id == second.run
    with pytest.raises(InputError, match="no run to go back to"):
        roll_back(out, "nonsense")
    write_day(edges, 31)
    assert refresh(night(edges, out)).record.previous == second.run


@pytest.mark.job
def test_other_settings_are_another_chain(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    refresh(night(edges, out))
    with pytest.raises(ConfigError, match="rank = 4 after 8"):
        refresh(night(edges, out, rank=4))
    assert refresh(night(edges, out, rank=4, fresh=True)).state == "published"
    for options, words in (
        ({"step": "3d"}, "step of a refresh"),
        ({"step": "bins:4"}, "step of a refresh"),
        ({"last": "30d", "step": "1w"}, "a multiple of the step"),
        ({"last": None}, "Add --last"),
        ({"until": "2026-01-01"}, "last and as_of"),
        ({"reference": "none"}, "reference"),
    ):
        with pytest.raises(ConfigError, match=words):
            refresh(night(write_days(tmp_path / "more", 0, 30), out, rank=4, **options))
    with pytest.raises(ConfigError, match="outputs of a refresh"):
        night(edges, out, outputs=("spectrum",))


@pytest.mark.parametrize(
    ("options", "newest", "now", "expected"),
    [
        # The day of the newest edge is not over: yesterday is the last complete one.
        ({"step": "1d", "last": "2d"}, 10.5, 10.6, (8, 10)),
        ({"step": "1d", "last": "2d"}, 10.5, 11.0, (9, 11)),
        # Nothing came for a while: the window ends with the newest edge.
        ({"step": "1d", "last": "2d"}, 10.5, 20.0, (9, 11)),
        ({"step": "1d", "last": "2d", "as_of": "2026-01-10"}, 10.5, 20.0, (3, 5)),
        ({"step": "1w", "last": "2w"}, 17.0, 22.0, (7, 21)),
        ({"step": "1w", "last": "14d"}, 17.0, 20.9, (0, 14)),
        ({"step": "6h", "last": "1d"}, 10.6, 10.7, (9.5, 10.5)),
    ],
)
def test_windows(
    tmp_path: Path, options: dict[str, str], newest: float, now: float, expected: tuple[float, float]
) -> None:
    config = night(tmp_path, tmp_path, **options)
    ticks = [int(FIRST + day * DAY) for day in (newest, now, *expected)]
    window = find_window(config, TimeScale(1, True), ticks[0], ticks[1])
    assert [window.since, window.until] == ticks[2:]


def test_windows_of_plain_numbers(tmp_path: Path) -> None:
    window = find_window(night(tmp_path, tmp_path, step="10", last="30"), TimeScale(1, False), 57)
    assert (window.since, window.until) == (30, 60)


@pytest.mark.job
def test_old_runs_go_and_the_reference_stays(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    names = []
    for day in range(30, 35):
        names.append(refresh(night(edges, out, keep=2)).run)
        write_day(edges, day)
    assert [run.run_id for run in list_runs(out)] == [names[0], *names[-2:]]
    told = load_run(out).manifest.refresh
    assert told is not None
    assert [one.earlier for one in told.drift] == [names[-2], names[0]]


@pytest.mark.job
def test_the_lock(edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with hold_lock(out), pytest.raises(UnfinishedError, match=f"process {os.getpid()} on"):
        refresh(night(edges, out))
    assert not (out / "refresh.lock").exists()
    with hold_lock(out):
        lock = json.loads((out / "refresh.lock").read_text())
    for stale in (lock | {"pid": 2**22 + 1}, lock | {"started": lock["started"] - 100}, {"pid": "?"}):
        (out / "refresh.lock").write_text(json.dumps(stale))
        assert refresh(night(edges, out)).state in ("published", "unchanged")
    (out / "refresh.lock").write_text(json.dumps(lock | {"host": "elsewhere"}))
    with pytest.raises(UnfinishedError, match="on elsewhere"):
        refresh(night(edges, out))


@pytest.mark.job
def test_a_warm_night_takes_fewer_iterations_to_the_same_fit(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "outputs": ("embedding", "trajectory"),
        "freqs": "lowest:6",
        "tol": 1e-5,
        "max_iter": 500,
    }
    edges = write_days(tmp_path / "edges", 0, 30, nodes=600, events=3000)
    for name in ("warm", "cold"):
        refresh(night(edges, tmp_path / name, **options))
    write_day(edges, 30, nodes=630, events=3000)
    warm = refresh(night(edges, tmp_path / "warm", **options))
    cold = refresh(night(edges, tmp_path / "cold", warm=False, **options))
    fits = {name: load_run(tmp_path / name).fit.polars().collect() for name in ("warm", "cold")}
    assert fits["warm"]["solver"].to_list() == ["warm"] * 6
    assert "warm" not in fits["cold"]["solver"].to_list()
    np.testing.assert_allclose(fits["warm"]["objective"], fits["cold"]["objective"], rtol=1e-3)
    assert fits["warm"]["iterations"].sum() < fits["cold"]["iterations"].sum()
    saved = warm.record.saved
    assert saved is not None
    assert saved.slices == 6
    assert saved.iterations > 0
    assert cold.record.cold == "asked for"
    # Slices are kept of the latest run only.
    assert [run.warm.exists() for run in list_runs(tmp_path / "warm")] == [False, True]
    # A window of another length has other frequencies.
    other = refresh(night(edges, tmp_path / "warm", **options | {"last": "21d"}))
    assert other.record.cold == "21 steps of 1d after 28 steps of 1d"
    assert "warm" not in load_run(tmp_path / "warm").fit.polars().collect()["solver"].to_list()


@pytest.mark.job
@pytest.mark.cluster
def test_the_job_of_the_scheduler(edges: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "jobs/nightly.py",
        "jobs/nightly.toml",
        "--rank=8",
        "--last=28d",
        "--mode=threads",
    ]
    command += [f"--out={tmp_path / 'out'}", "--workers=1"]
    # The file's inputs are of no use here, and a list is replaced by what is given.
    text = (ROOT / "jobs" / "nightly.toml").read_text().replace("edges/", str(edges))
    (tmp_path / "nightly.toml").write_text(text)
    command[2] = str(tmp_path / "nightly.toml")
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["state"] == "published"
    assert told == json.loads((tmp_path / "out" / "refresh.jsonl").read_text())
    for arguments, word in ((["runs"], "published"), (["rollback"], "no run to go back to")):
        command = [sys.executable, "-m", "toffee_dist.cli", *arguments, str(tmp_path / "out")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert word in done.stdout + done.stderr
    assert done.returncode == 3


@pytest.mark.job
def test_nodes_unseen_for_long_are_kept_marked_and_forgotten(tmp_path: Path) -> None:
    edges = write_days(tmp_path / "edges", 0, 60)
    # Four nodes that only the first days know; two of them come first in the order of ids.
    gone = ["a-first", "a-second", "n00100x", "z-last"]
    rng = np.random.default_rng(0)
    pl.DataFrame(
        {
            "source": gone * 10,
            "target": [f"n{v:05d}" for v in rng.integers(240, size=40)],
            "time": [FIRST + 3 * DAY] * 40,
        }
    ).write_parquet(edges / "extra.parquet")
    outs = {}
    for name, expire in (("keep", None), ("forget", "40d")):
        out = outs[name] = tmp_path / name
        for day in (28, 38, 50, 51):
            done = refresh(night(edges, out, as_of=str(FIRST + day * DAY), expire=expire))
            if day == 38:
                # Out of the window: marked, and its last moment is still known.
                nodes = load_run(out).nodes.polars().collect().filter(pl.col("node_id").is_in(gone))
                assert nodes["degree"].to_list() == [0] * 4
                assert nodes["last_step"].null_count() == 4
                assert nodes["last_seen"].dt.epoch("s").to_list() == [FIRST + 3 * DAY] * 4
            if day == 50 and expire:
                assert done.to_json()["expired"] == 4
            assert done.record.cold == "" or day == 28
            if day > 28:
                # Rows of both nights are the same nodes, also where rows moved up.
                assert min(found.cosine["p50"] for found in done.record.drift) > 0.9
                assert done.record.links is not None
                assert (done.record.links.now or 0) > 0.8
        assert done.record.expired == (4 if expire else 0)
        assert done.to_json()["warm_slices"] == 1
    kept, forgot = (load_run(outs[name]) for name in ("keep", "forget"))
    ids = kept.nodes.polars().collect()["node_id"]
    alive = ~ids.is_in(gone)
    assert forgot.nodes.polars().collect()["node_id"].to_list() == ids.filter(alive).to_list()
    np.testing.assert_allclose(
        forgot.embedding.numpy(),
        kept.embedding.numpy()[alive.to_numpy()],
        atol=2e-2 * kept.embedding.numpy().max(),
    )
    # A run from before is no reference any more, unless the chain has carried it along.
    first, second = (run.run_id for run in list_runs(outs["forget"])[:2])
    config = night(edges, outs["forget"], as_of=str(FIRST + 52 * DAY), expire="40d")
    with pytest.raises(ConfigError, match="nodes were forgotten"):
        refresh(config.model_copy(update={"reference": second}))
    assert refresh(config.model_copy(update={"reference": first})).state == "published"
    with pytest.raises(ConfigError, match="at least 28d"):
        refresh(config.model_copy(update={"expire": "7d"}))


@pytest.mark.job
def test_resume_of_a_night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, out = write_days(tmp_path / "edges", 0, 31), tmp_path / "out"
    for day in (28, 29):
        refresh(night(edges, out, as_of=str(FIRST + day * DAY)))
    with monkeypatch.context() as patch:
        patch.setattr(drift, "measure_block", _fail)
        with pytest.raises(UnfinishedError):
            refresh(night(edges, out, as_of=str(FIRST + 30 * DAY)))
    cut, other = find_unfinished(out), load_run(out).path.name
    # After a rollback it follows a run that is not published: it must not take the place of the one that is.
    roll_back(out)
    refused = CliRunner().invoke(cli, ["resume", str(out)])
    assert isinstance(refused.exception, InputError)
    assert "of an earlier refresh" in str(refused.exception)
    roll_back(out, other)
    done = CliRunner().invoke(cli, ["resume", str(out), "--json"], catch_exceptions=False)
    assert json.loads(done.stdout.splitlines()[-1])["run"] == cut.run_id == load_run(out).path.name
    assert not (out / "refresh.lock").exists()


@pytest.mark.job
def test_a_run_published_meanwhile_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges, out = write_days(tmp_path / "edges", 0, 31), tmp_path / "out"
    for day in (28, 29):
        refresh(night(edges, out, as_of=str(FIRST + day * DAY)))
    first = list_runs(out)[0]
    measure = drift.measure_block

    def publish_another(task: Any) -> Any:
        # As somebody would who took over a lock that was not renewed.
        point_to(first)
        return measure(task)

    monkeypatch.setattr(drift, "measure_block", publish_another)
    with pytest.raises(UnfinishedError, match="published meanwhile"):
        refresh(night(edges, out, as_of=str(FIRST + 30 * DAY)))
    assert find_run(out).run_id == first.run_id


def _fail(task: Any) -> Any:
    raise OSError(5, "disk gone")
