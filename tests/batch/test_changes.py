"""Changes as a job: what a run and a refresh leave, what readers and the command say of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.harness.clusters import digests, job
from tests.harness.refreshes import night, write_days
from toffee_dist import load_run
from toffee_dist.batch.changes import read_clock, watched_sums
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.batch.seal import check_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.kernels.changes import Events, pair_variances
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.storage.runs import find_unfinished
from toffee_dist.tensor import TemporalTensor

SMALL = Limits(part_bytes=1 << 16)
DAYS, CHANGE = 42, 25


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two communities of 30; node 0 goes over to the other, and the second one links to a third later on."""
    rng = np.random.default_rng(0)
    rows = []
    for t in range(DAYS):
        for i in range(60):
            own = i // 30
            if i == 0:
                own = int(t >= CHANGE)
            for _ in range(2):
                j = int(rng.integers(30)) + 30 * own
                rows.append((f"n{i:02d}", f"n{j:02d}", t))
    source, target, time = zip(*rows, strict=True)
    path = tmp_path_factory.mktemp("edges") / "edges.parquet"
    pl.DataFrame({"source": source, "target": target, "time": time}).write_parquet(path)
    return path


def watched(edges: Path, out: Path, **options: Any) -> Any:
    asked = {"time_unit": "number", "step": "1", "outputs": ("embedding", "trajectory"), "undirected": True}
    return job(edges, out, **{**asked, "trajectory_by": "filter", **options})


@pytest.mark.job
@pytest.mark.parametrize("undirected", [True, False])
def test_the_node_that_moves_is_named(edges: Path, tmp_path: Path, undirected: bool) -> None:
    start_run(watched(edges, tmp_path, undirected=undirected), limits=SMALL)
    run = load_run(tmp_path)
    found = run.changes()
    assert found.nodes["node_id"][0] == "n00"
    assert abs(found.nodes["step"][0] - CHANGE) <= 1
    assert found.nodes.height <= 6
    assert found.nodes["start"][0] == run.grid.show(found.nodes["step"][0])
    table = pl.read_parquet(run.path / "changes.parquet")
    assert table["row"].to_list() == list(range(run.n_nodes))
    assert table["community"].n_unique() == 2
    alert = json.loads((run.path / "changes.json").read_text())
    assert alert["nodes"][0]["node_id"] == "n00"
    assert {"changes.json", "changes.parquet"} <= set(run.manifest.files)
    assert check_run(run.folder) > 0
    # The trajectory says the same p.
    assert run.trajectory_of("n00").p_value == pytest.approx(found.nodes["p_value"][0])
    # A smaller rate lists no more; one that is no rate is refused.
    assert set(run.changes(0.001).nodes["node_id"]) <= set(found.nodes["node_id"])
    for rate in (0.0, 0.5):
        with pytest.raises(ConfigError, match="rate"):
            run.changes(rate)
    said = CliRunner().invoke(cli, ["changes", str(tmp_path)])
    assert said.exit_code == 0
    assert "n00" in said.output
    # A moment is found in the graph as a whole, or in what is left beside another: no share of the tests.
    assert f"moments: {found.moments.height}\n" in said.output
    assert f"nodes: {found.nodes.height} of {found.tested['nodes']} tested\n" in said.output
    asked = CliRunner().invoke(cli, ["changes", str(tmp_path), "--json"])
    assert json.loads(asked.output)["nodes"][0]["node_id"] == "n00"


@pytest.mark.job
def test_blocks_and_interruptions_change_nothing(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from toffee_dist.batch import changes

    start_run(watched(edges, tmp_path / "whole"), limits=SMALL)
    judge = changes.judge_changes

    def stop(task: Any) -> Any:
        monkeypatch.setattr(changes, "judge_changes", judge)
        raise KeyboardInterrupt

    monkeypatch.setattr(changes, "judge_changes", stop)
    with pytest.raises(BaseException):  # noqa: B017, PT011
        start_run(watched(edges, tmp_path / "cut"), limits=SMALL)
    resume_run(find_unfinished(tmp_path / "cut"), {"mode": "threads", "workers": 1}, limits=SMALL)
    whole, cut = (load_run(tmp_path / name).path for name in ("whole", "cut"))
    assert digests(cut)["changes.parquet"] == digests(whole)["changes.parquet"]
    assert (cut / "changes.json").read_bytes() == (whole / "changes.json").read_bytes()
    start_run(watched(edges, tmp_path / "one"))
    one, many = (
        pl.read_parquet(load_run(tmp_path / name).path / "changes.parquet") for name in ("one", "whole")
    )
    np.testing.assert_allclose(one["p_value"].to_numpy(), many["p_value"].to_numpy(), rtol=1e-6, atol=1e-12)


@pytest.mark.job
def test_runs_without_them_and_damaged_ones(edges: Path, tmp_path: Path) -> None:
    start_run(watched(edges, tmp_path / "none", outputs=("embedding",)))
    with pytest.raises(InputError, match="--outputs trajectory"):
        load_run(tmp_path / "none").changes()
    start_run(watched(edges, tmp_path / "some"))
    path = load_run(tmp_path / "some").path
    for name, content in (("changes.json", b"{}"), ("changes.json", b"["), ("changes.parquet", b"PAR1")):
        whole = (path / name).read_bytes()
        (path / name).write_bytes(content)
        with pytest.raises(InputError):
            load_run(tmp_path / "some").changes()
        (path / name).write_bytes(whole)


@pytest.mark.job
def test_a_refresh_says_what_is_new(tmp_path: Path) -> None:
    data = write_days(tmp_path / "edges", 0, 30)
    options: dict[str, Any] = {"undirected": True}
    refresh(night(data, tmp_path / "out", **options))
    first = json.loads((load_run(tmp_path / "out").path / "changes.json").read_text())
    write_days(data, 30, 31)
    refresh(night(data, tmp_path / "out", **options))
    run = load_run(tmp_path / "out")
    second = json.loads((run.path / "changes.json").read_text())
    known = {node["node_id"] for node in first["nodes"]}
    assert all(node["new"] == (node["node_id"] not in known) for node in second["nodes"])
    drift = pl.read_parquet(run.path / "drift.parquet")
    table = pl.read_parquet(run.path / "changes.parquet")
    assert drift["p_value"].to_list() == table["p_value"].to_list()
    assert drift["p_value"].drop_nulls().len() > 0


def test_a_refresh_refuses_axes_that_it_cannot_keep(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "outputs": ("embedding", "trajectory"),
        "trajectory_by": "filter",
        "basis": "energy",
    }
    config = night(tmp_path, tmp_path / "out", **options)
    with pytest.raises(ConfigError, match="basis of a refresh"):
        refresh(config)


@pytest.mark.parametrize("directed", [True, False])
def test_sums_of_communities_and_graph_are_their_loops(directed: bool) -> None:
    rng = np.random.default_rng(5)
    i, j, t = rng.integers(0, 12, 150), rng.integers(0, 12, 150), rng.integers(0, 9, 150)
    tensor = TemporalTensor.from_events(
        i, j, t, n_nodes=12, n_steps=9, directed=directed, entry="count", pair_weight="raw"
    )
    U, V = (np.linalg.qr(rng.standard_normal((12, 5)))[0] for _ in range(2))
    labels = rng.integers(0, 3, 12)
    pair = tensor.entry_pairs
    node, target = tensor.sources[pair].astype(np.int64), np.asarray(tensor.indices)[pair]
    step, value = np.asarray(tensor.steps, dtype=np.int64), np.asarray(tensor.values, dtype=np.float64)
    clock = read_clock(tensor)
    source, to, v, c, _ = pair_variances(NodeEntries(12, 9, node, target, step, value), clock.spread)
    once = np.ones(len(source), dtype=bool) if directed else source <= to
    events = Events(9, np.asarray(pair), step, value, v, c).of(once)
    graph, *groups = watched_sums(events, source[once], to[once], U, V, labels, directed)
    X = np.asarray(tensor.to_coo().todense())
    for at in range(9):
        for label, sums in enumerate(groups):
            expected = X[labels == label, :, at].sum(axis=0) @ V
            np.testing.assert_allclose(sums.rows[at], expected, atol=1e-9)
        if directed:
            np.testing.assert_allclose(graph.rows[at], (U.T @ X[:, :, at] @ V).ravel(), atol=1e-9)
    counts = [(X[:, :, at] > 0).sum() for at in range(9)]
    if not directed:
        counts = [(np.triu(X[:, :, at]) > 0).sum() for at in range(9)]
    assert clock.activity.tolist() == counts
