"""Explanations add up: links, steps and rhythms to the published vector, directions to the score."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests import naive_filter
from tests.harness.clusters import job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist import Run, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.kernels import explain as kernel
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.explain import LinkSum, RhythmSum
from toffee_dist.refresh.job import refresh
from toffee_dist.report.why import explain_node
from toffee_dist.results.explain import Explanation, Parts, _show

KINDS: dict[str, dict[str, Any]] = {
    "undirected": {"undirected": True},
    "directed": {},
    "causal": {"undirected": True, "causal": True},
    "decay": {"undirected": True, "reduce": "decay:10"},
    "bipartite": {"bipartite": True},
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("explain")
    edges = write_edges(folder / "edges.parquet", nodes=60, events=1500, days=30)
    found = {}
    for name, options in KINDS.items():
        start_run(job(edges, folder / name, trajectory_by="filter", **options))
        found[name] = load_run(folder / name)
    days = write_days(folder / "days", 0, 29)
    for until in ("2026-02-02", "2026-02-03"):
        refresh(
            night(
                days,
                folder / "nights",
                as_of=until,
                outputs=("embedding", "trajectory"),
                trajectory_by="filter",
            )
        )
    found["refreshed"] = load_run(folder / "nights")
    assert found["refreshed"].folder.rotation.exists()
    for until in ("2026-01-26", "2026-02-02"):
        chain: dict[str, Any] = {"outputs": ("embedding", "trajectory"), "trajectory_by": "filter"}
        refresh(night(days, folder / "chain", as_of=until, last="21d", causal=True, **chain))
    found["appended"] = load_run(folder / "chain")
    return found


def rows_of(run: Run) -> dict[str, int]:
    table = run.nodes.polars().collect()
    return dict(zip(table["node_id"], table["row"], strict=True))


@given(st.data())
def test_parts_are_those_of_plain_loops(data: st.DataObject) -> None:
    n, T, r = (data.draw(st.integers(1, most)) for most in (6, 7, 4))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    cells = sorted(data.draw(st.sets(st.tuples(st.integers(0, n - 1), st.integers(0, T - 1)), min_size=1)))
    entries = [(j, s, float(rng.normal())) for j, s in cells]
    B, H, Q = rng.normal(size=(n, r)), rng.normal(size=(T, r)), rng.normal(size=(r, r))
    target, step = (np.array(column) for column in zip(*cells, strict=True))
    value = np.array([w for *_, w in entries])
    own = NodeEntries(1, T, np.zeros(len(cells), dtype=np.int64), target, step, value)
    total = LinkSum(own, lambda nodes: B[nodes], H, Q)
    expected = naive_filter.link_parts(entries, B, H, Q)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernel, "CHUNK", data.draw(st.integers(1, 9)))
        np.testing.assert_allclose(total.total(), expected["total"], atol=1e-12)
        for key, name in ((target, "links"), (step, "steps")):
            keys = np.array(data.draw(st.permutations(sorted(expected[name]))))
            np.testing.assert_allclose(
                total.parts(key, keys), [expected[name][int(one)] for one in keys], atol=1e-12
            )
        along = total.along(expected["total"])
    assert along.sum() == pytest.approx(expected["total"] @ expected["total"])


@given(st.integers(1, 9), st.integers(0, 99), st.data())
def test_rhythms_add_up_to_the_path(T: int, seed: int, data: st.DataObject) -> None:
    Z = np.random.default_rng(seed).normal(size=(T, 3))
    t, earlier = data.draw(st.integers(0, T - 1)), data.draw(st.none() | st.integers(0, T - 1))
    freqs = np.arange(T // 2 + 1)
    parts = RhythmSum(Z, t, earlier).parts(freqs)
    vector = Z[t] - (0 if earlier is None else Z[earlier])
    np.testing.assert_allclose(parts.sum(axis=0), vector, atol=1e-12)
    for k in freqs.tolist():
        expected = naive_filter.rhythm_part(Z, k, t)
        expected = expected - (0 if earlier is None else naive_filter.rhythm_part(Z, k, earlier))
        np.testing.assert_allclose(parts[k], expected, atol=1e-12)
    np.testing.assert_allclose(RhythmSum(Z, t, earlier).along(vector), parts @ vector, atol=1e-12)


def check_sum(parts: Parts, vector: Any, rest: Any, scale: float) -> None:
    """Assert that parts, the others and the rest are the vector, to 1e-6 of `scale`, and shares are 1."""
    gap = np.linalg.norm(parts.vectors.sum(axis=0) + parts.others + rest - vector)
    assert gap <= 1e-6 * scale
    share = float(parts.table["share"].sum()) + parts.others_share + rest @ vector / (vector @ vector)
    assert share == pytest.approx(1, abs=1e-5)


@pytest.mark.job
@pytest.mark.parametrize("name", [*KINDS, "refreshed", "appended"])
def test_links_steps_and_rhythms_add_up_to_the_vector(runs: dict[str, Run], name: str) -> None:
    run = runs[name]
    Z, E = run.trajectory.numpy(), run.embedding.numpy()
    ids = run.nodes.polars().sort("row").collect()
    active = np.flatnonzero(np.abs(Z).sum(axis=(0, 2)))[::9]
    space = "source" if name == "bipartite" else None
    for row in active.tolist():
        node = ids["node_id"][row]
        for at, between in ((5, None), (-1, None), (None, (3, 20)), (None, None)):
            found = run.explain(node, at=at, between=between, k=3, space=space)
            if at is not None:
                vector = Z[at, row]
            elif between is not None:
                vector = Z[between[1], row] - Z[between[0], row]
            else:
                vector = E[row]
            vector = vector.astype(np.float64)
            np.testing.assert_allclose(found.vector, vector, atol=1e-6 * np.abs(Z[:, row]).max() + 1e-9)
            if not found.vector.any():
                continue
            # A move is a difference of two published vectors, in single precision.
            ends = [vector] if between is None else [Z[step, row] for step in between]
            scale = max(float(np.linalg.norm(end)) for end in ends)
            check_sum(found.links, found.vector, found.rest, scale)
            check_sum(found.steps, found.vector, found.rest, scale)
            if found.rhythms is None:
                assert (at, between) == (None, None)
            else:
                assert not found.rest.any()
                check_sum(found.rhythms, found.vector, found.rest, scale)


@pytest.mark.job
def test_the_one_vector_is_its_links_where_the_fit_is_exact(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=12, events=500, days=10)
    # All of the spectrum, so that the slice is fitted, but for the regularisation.
    start_run(
        job(edges, tmp_path / "out", undirected=True, rank=12, trajectory_by="filter", reg_a=0.0, reg_r=0.0)
    )
    run = load_run(tmp_path / "out")
    for node in ("n00000", "n00005"):
        assert abs(run.explain(node).rest_share) < 1e-3


@pytest.mark.job
def test_the_table_tells_who_and_when(runs: dict[str, Run]) -> None:
    run = runs["undirected"]
    found = run.explain("n00003", at=10, k=1000)
    assert isinstance(found, Explanation)
    compact = run.vectors("trajectory").compact  # type: ignore[attr-defined]
    entries = compact.entries(3, 4)
    names = run.nodes.polars().sort("row").collect()["node_id"].to_list()
    assert names[3] == "n00003"
    table = {row["node_id"]: row for row in found.links.table.iter_rows(named=True)}
    assert set(table) == {names[j] for j in entries.target}
    for j in np.unique(entries.target):
        steps = entries.step[entries.target == j]
        row = table[names[j]]
        assert row["links"] == len(steps)
        assert (row["first"], row["last"]) == (
            run.grid.show(int(steps.min())),
            run.grid.show(int(steps.max())),
        )
    assert found.links.n_others == found.steps.n_others == 0
    assert np.abs(found.links.others).max() < 1e-12
    sizes = found.links.table["share"].abs().to_list()
    assert sizes == sorted(sizes, reverse=True)
    assert sorted(found.steps.table["step"]) == np.unique(entries.step).tolist()
    assert "always: the mean of all steps" in found.rhythms.table["period"].to_list()  # type: ignore[union-attr]


@pytest.mark.job
def test_links_before_the_window_of_a_chain_are_told_by_their_time(runs: dict[str, Run]) -> None:
    run = runs["appended"]
    compact = run.vectors("trajectory").compact  # type: ignore[attr-defined]
    assert (compact.before, compact.n_steps, run.n_steps) == (7, 21, 21)
    found = run.explain("n00003", at=0, k=1000)
    steps, starts = (found.steps.table.sort("step")[name].to_list() for name in ("step", "start"))
    assert steps[0] < 0 <= steps[-1]
    # The first window began on the 5th, this one on the 12th.
    assert "2026-01-05" < starts[0] < run.grid.show(0) <= starts[-1]
    assert starts == sorted(starts)
    assert min(found.links.table["first"].to_list()) == starts[0]
    # The one vector is of the window.
    assert min(run.explain("n00003", k=1000).steps.table["step"].to_list()) >= 0
    # Where days are of a calendar, how long before the window.
    row = rows_of(run)["n00003"]
    grid = replace(run.grid, width=0, edges=tuple(run.grid.start(t) for t in range(22)))
    assert _show(grid, -2) == "2 steps before the window"
    assert _show(grid, 3) == run.grid.show(3)
    # The page tells who makes the mean of a node's path.
    total = LinkSum(compact.entries(row, row + 1), compact.basis, compact.mean_weights, np.eye(run.rank))
    path = compact.read(row, row + 1, np.arange(21))[0]
    np.testing.assert_allclose(total.total(), path.mean(axis=0), atol=1e-5 * np.abs(path).max())
    shares = explain_node(compact, row, run.grid)
    assert shares["links"]
    assert shares["move"]["links"]
    everyone = compact.entries(0, run.n_nodes)
    assert compact.activity.tolist() == np.bincount(everyone.step, minlength=28)[7:].tolist()


@pytest.mark.job
def test_directions_add_up_to_the_score(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        at: Any
        for at in (None,) if name == "decay" else (None, 5):
            for memory in (True, False):
                [score] = run.score(["n00001"], ["n00006"], at, memory=memory)
                found = run.explain_score("n00001", "n00006", at, memory=memory, k=3)
                assert found.score == pytest.approx(score, rel=1e-9)
                total = float(found.directions["part"].sum()) + found.others + found.own
                assert total == pytest.approx(score, rel=1e-9, abs=1e-12)
    # A direction is about the nodes with the largest entries in it.
    run = runs["undirected"]
    E = np.abs(run.embedding.numpy())
    names = run.nodes.polars().sort("row").collect()["node_id"].to_list()
    for row in run.explain_score("n00001", "n00006").directions.iter_rows(named=True):
        top = np.argsort(-E[:, row["direction"] - 1], kind="stable")[:3]
        assert row["about"] == [names[at] for at in top]


@pytest.mark.job
def test_the_commands(runs: dict[str, Run]) -> None:
    run = runs["undirected"]
    call = CliRunner().invoke
    said = call(cli, ["explain", str(run.path), "n00003", "--at", "10", "-k", "2"]).output
    assert said.startswith(f"n00003: the vector at {run.grid.show(10)}, of length ")
    for word in ("By links:", "By steps:", "By rhythms:", "others: "):
        assert word in said
    said = call(cli, ["explain", str(run.path), "n00003", "--between", "3", "10", "--json"]).output
    found = json.loads(said)
    assert found["about"].startswith("from ")
    shares = sum(row["share"] for row in found["links"]) + found["other_links"]["share"]
    assert shares == pytest.approx(1, abs=1e-5)
    said = call(cli, ["explain", str(run.path), "n00003"]).output
    assert "the vector over all time" in said
    assert "Not from its links" in said
    said = call(cli, ["score", str(run.path), "n00001,n00006", "--at", "5", "--explain"]).output
    assert "direction" in said
    assert "all other directions" in said
    [pair] = json.loads(call(cli, ["score", str(run.path), "n00001,n00006", "--explain", "--json"]).output)[
        "scores"
    ]
    assert sum(row["part"] for row in pair["directions"]) + pair["others"] == pytest.approx(pair["score"])


@pytest.mark.job
def test_what_cannot_be_explained_is_refused(runs: dict[str, Run], tmp_path: Path) -> None:
    run = runs["undirected"]
    with pytest.raises(ConfigError, match="one of them"):
        run.explain("n00003", at=1, between=(1, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        run.explain("n00003", k=0)
    with pytest.raises(InputError, match="unknown node"):
        run.explain("nobody")
    edges = write_edges(tmp_path / "edges.parquet", nodes=30, events=300, days=10)
    start_run(job(edges, tmp_path / "als", outputs=("embedding", "trajectory", "factors")))
    slices = load_run(tmp_path / "als")
    with pytest.raises(InputError, match="--trajectory-by filter"):
        slices.explain("n00003")
    with pytest.raises(InputError, match="by factors"):
        slices.explain_score("n00001", "n00002", at=3)
    bipartite = runs["bipartite"]
    with pytest.raises(InputError, match="no links to explain"):
        bipartite.explain("n00003", space="target")
