"""The report: what it shows is what the tables say, it stays small, and no run is lost for its sake."""

from __future__ import annotations

import base64
import json
import math
import re
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.harness.clusters import digests, job, write_edges
from tests.harness.refreshes import night, write_days
from toffee_dist import load_run
from toffee_dist.batch import pipeline
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError, QualityError
from toffee_dist.progress import Progress
from toffee_dist.refresh.job import refresh
from toffee_dist.report import charts, gather, layout, sample, scene, stage, write
from toffee_dist.report.page import bullets, data_block, render, table
from toffee_dist.report.scene import label_step
from toffee_dist.report.task import ReportTask, try_report
from toffee_dist.storage import parquet
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import RunFolder
from toffee_dist.timegrid import TimeGrid, TimeScale, build_grid, name_period
from toffee_dist.words import hide_secrets

DAY = 86_400


class Told(Progress):
    """Remembers what was said."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


class Loads(HTMLParser):
    """Every tag of a page, and every address that a browser would fetch for one."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: Counter[str] = Counter()
        self.addresses: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        names = ("src", "href", "srcset", "data", "action", "poster")
        self.addresses += [value or "" for name, value in attrs if name in names]


def text_of(page: str) -> str:
    """Return what a person reads: the page without scripts, styles and tags."""
    return re.sub(r"<[^>]+>", " ", re.sub(r"(?s)<(script|style).*?</\1>", "", page))


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("edges") / "edges.parquet")


def page_of(folder: Path, **options: Any) -> str:
    """Run a job, and return its report."""
    run = start_run(job(options.pop("edges"), folder, report=True, **options)).run
    return (run.path / "report.html").read_text()


# Reading


@given(st.lists(st.integers(1, 5), min_size=1, max_size=12), st.data())
def test_rows_are_those_of_the_whole_table(groups: list[int], data: st.DataObject) -> None:
    total = sum(groups)
    rows = sorted(data.draw(st.sets(st.integers(0, total - 1), min_size=1)))
    schema = pa.schema({"value": pa.int64()})
    with tempfile.TemporaryDirectory() as folder:
        path, at = Path(folder) / "table.parquet", 0
        with pq.ParquetWriter(path, schema) as out:
            for size in groups:
                out.write_table(pa.table({"value": np.arange(at, at + size)}, schema))
                at += size
        found = parquet.take_rows(path, np.array(rows), ["value"])
    assert found["value"].to_pylist() == rows


def write_nodes(path: Path, degree: np.ndarray[Any, Any]) -> Path:
    parquet.write_parquet(path, {"degree": degree.astype(np.int64)})
    return path


def test_half_of_the_nodes_are_the_best_connected(tmp_path: Path) -> None:
    degree = np.random.default_rng(3).integers(0, 1000, size=5000)
    nodes = write_nodes(tmp_path / "nodes.parquet", degree)
    rows = sample.choose_nodes(nodes, seed=1, count=100)
    assert len(rows) == len(set(rows.tolist())) == 100
    assert degree[rows].min() > 0
    assert sorted(degree[rows[:50]]) == sorted(degree)[-50:]
    assert rows.tolist() == sample.choose_nodes(nodes, seed=1, count=100).tolist()
    assert rows[50:].tolist() != sample.choose_nodes(nodes, seed=2, count=100)[50:].tolist()
    # With room for all, all that have an edge are there.
    every = sample.choose_nodes(nodes, seed=1, count=10_000)
    assert sorted(every) == np.flatnonzero(degree).tolist()
    assert len(sample.choose_nodes(write_nodes(tmp_path / "cold.parquet", np.zeros(9)), seed=0)) == 0


def test_nodes_come_from_few_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "GROUP_ROWS", 50)
    degree = np.random.default_rng(0).integers(1, 1000, size=5000)
    nodes = write_nodes(tmp_path / "nodes.parquet", degree)
    rows = sample.choose_nodes(nodes, seed=0, count=80, groups=8)
    assert len(rows) == 80
    assert len(set((rows // 50).tolist())) <= 8
    assert degree[rows].max() == degree.max()


def test_paths_are_bounded_in_nodes_steps_and_row_groups() -> None:
    rows = np.random.default_rng(0).permutation(1_000_000)[:4000]
    for n_steps, rank in ((1, 64), (30, 2), (365, 64), (2000, 512), (100_000, 2), (1_000_000, 512)):
        chosen, steps = sample.choose_paths(rows, n_steps, rank, seed=0)
        assert 1 <= steps <= n_steps
        assert sample.FEWEST_PATHS <= len(chosen) <= sample.PATHS
        assert len(chosen) * steps <= sample.PATH_POINTS
        assert len(chosen) * steps * rank <= sample.PATH_NUMBERS
        first, last = chosen * n_steps // parquet.GROUP_ROWS, (chosen + 1) * n_steps // parquet.GROUP_ROWS
        if n_steps < parquet.GROUP_ROWS:
            assert len(set(first.tolist())) <= sample.GROUPS
            assert (last - first <= 1).all()
        assert np.isin(chosen, rows).all()
        assert rows[0] in chosen


# Drawing


@given(st.integers(1, 6), st.integers(1, 40), st.integers(0, 99))
def test_axes_are_principal(rank: int, count: int, seed: int) -> None:
    vectors = np.random.default_rng(seed).normal(size=(count, rank)) * np.arange(1, rank + 1)
    axes = layout.find_axes(vectors)
    expected, share = naive.principal_plane(vectors)
    np.testing.assert_allclose(np.abs(axes.project(vectors)), np.abs(expected), atol=1e-6)
    np.testing.assert_allclose(axes.share, share, atol=1e-8)


def test_planted_communities_are_found() -> None:
    rng = np.random.default_rng(0)
    planted = np.repeat(np.arange(5), [60, 50, 40, 30, 20])
    vectors = np.eye(8)[planted] + 0.05 * rng.normal(size=(200, 8))
    found = layout.find_communities(vectors, seed=0)
    # Largest first: the very labels.
    assert found.label(vectors).tolist() == planted.tolist()
    assert found.apart > 0.8
    for few in (vectors[:1], vectors[:2], np.zeros((4, 8))):
        found = layout.find_communities(few, seed=0)
        assert found.label(few).tolist() == [0] * len(few)
        assert found.apart == 0


@given(st.lists(st.floats(-2, 40), min_size=1, max_size=30))
def test_peaks_are_above_noise_and_neighbours(heights: list[float]) -> None:
    frame = pl.DataFrame({"k": range(1, len(heights) + 1), "significance": heights})
    assert gather.find_peaks(frame)["k"].to_list() == naive.peaks(heights)


def test_periods_in_human_words() -> None:
    instants = TimeScale(1, True)
    hours = build_grid("6h", 0, 10 * DAY, instants)
    assert name_period(4, hours) == "every 24.0 hours"
    assert name_period(28, hours) == "every 7.0 days"
    assert name_period(90, build_grid("1s", 0, 1000, instants)) == "every 90.0 seconds"
    assert name_period(90, build_grid("1m", 0, 1000, instants)) == "every 90.0 minutes"
    # A day of the calendar has 24 hours on average, also where one has 23.
    athens = build_grid("1d", 1_774_000_000, 1_774_000_000 + 364 * DAY, TimeScale(1, True, "Europe/Athens"))
    assert name_period(7, athens) == "every 7.0 days"
    numbers = build_grid("5", 0, 99, TimeScale(1, False))
    assert name_period(3, numbers) == "every 15.0 units of time"
    assert name_period(2.5, build_grid("bins:10", 0, 99, TimeScale(1, False))) == "every 25.0 units of time"
    distinct = build_grid("distinct", 0, 9, instants, distinct=np.array([0, 3, 9]))
    assert name_period(1.5, distinct) == "every 1.5 steps"


def test_steps_are_labelled_by_the_wall_clock() -> None:
    # Midnight in Athens, on both sides of the change of clocks (29 March 2026).
    march = 1_774_648_800  # 2026-03-28 00:00 in Athens
    athens = build_grid("1d", march, march + 3 * DAY, TimeScale(1, True, "Europe/Athens"))
    assert [label_step(athens, step) for step in range(3)] == [
        "Sat 2026-03-28",
        "Sun 2026-03-29",
        "Mon 2026-03-30",
    ]
    west = build_grid("6h", march, march + DAY, TimeScale(1, True, "America/New_York"))
    assert label_step(west, 0) == "Fri 2026-03-27 18:00"
    assert label_step(build_grid("2", 1, 9, TimeScale(1, False)), 1) == "3"
    # Beyond the calendar.
    far = TimeGrid("1d", TimeScale(1, True), 1, 10**15, 10**15 + DAY, origin=10**15, width=DAY)
    assert label_step(far, 0) == "1000000000000000 s since 1970"


@given(st.integers(1, 4), st.integers(1, 6), st.integers(1, 3), st.integers(0, 99))
def test_directions_are_soft(n: int, T: int, r: int, seed: int) -> None:
    Z = np.random.default_rng(seed).normal(size=(n, T, r))
    directions, size = stage.soften(Z)
    expected = naive.soft_paths(Z.transpose(1, 0, 2))
    np.testing.assert_allclose(directions, expected[0])
    np.testing.assert_allclose(size, expected[1])
    assert not stage.soften(np.zeros((n, T, r)))[0].any()


def unpack(text: str, kind: str) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), kind)


@given(st.lists(st.floats(-3, 3), min_size=1, max_size=20))
def test_what_is_packed_is_what_was_there(values: list[float]) -> None:
    points = np.array(values)
    limit = scene.extent(points)
    found = unpack(scene.pack_points(points, limit), "<i2") / 32767 * limit
    np.testing.assert_allclose(found, points, atol=limit / 32767)


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6))
def test_ticks_are_round_and_inside(low: float, width: float) -> None:
    ticks = charts.round_numbers(low, low + width)
    assert 1 <= len(ticks) <= 6
    assert min(ticks) >= low - 1e-6 * width
    assert max(ticks) <= low + width * (1 + 1e-6)
    apart = np.diff(ticks)
    assert len(apart) == 0 or apart.max() - apart.min() <= 1e-6 * width


def test_a_chart_escapes_and_leaves_out_what_is_no_number() -> None:
    chart = charts.Chart("<x>", charts.Axis("<a>", 0, 1), charts.Axis("", 0, 1, names=("<n>",)))
    chart.dot(0.5, math.nan, "#fff", "gone")
    chart.dot(0.5, 0.5, "#fff", "<t>")
    chart.line([(0, 0), (1, 1)], "#fff", "<l>")
    chart.text(0.9, 0.5, "<w>")
    chart.name("<c>", "#fff")
    drawn = chart.svg()
    assert "gone" not in drawn
    assert "nan" not in drawn
    for word in ("x", "a", "n", "t", "l", "w", "c"):
        assert f"<{word}>" not in drawn
        assert f"&lt;{word}&gt;" in drawn


def test_a_page_sends_nothing_anywhere() -> None:
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]+)"', render("title", "", []))
    rules = dict(rule.split(maxsplit=1) for rule in policy.split("; "))
    # default-src says nothing of forms, nor of what relative addresses are relative to.
    for name in ("default-src", "form-action", "base-uri", "connect-src"):
        assert rules[name] == "'none'"
    # Scripts and styles by their digests: what an id brings along does not run.
    for name in ("script-src", "style-src"):
        assert re.fullmatch(r"'sha256-[\w+/=]+'", rules[name])
    assert "connect-src 'self'" in render("title", "", [], live=True)


def test_text_of_users_is_escaped() -> None:
    evil = "<script>alert('1')</script>"
    for html in (
        table([(evil, evil)]),
        table([(evil,)], (evil,), evil),
        bullets([evil]),
        render(evil, evil, []),
        data_block("x", [evil]),
    ):
        assert "<script>alert" not in html
        assert "</script>" not in html.removesuffix("</script>").replace("</script>\n</body>", "")
    turned = "\x1b]0;x\x07\u202e"
    assert "\\x1b]0;x\\x07\\u202e" in table([(turned, 1)])
    inputs = str(["s3://me:secret@host/a?sig=1", "gs://b/c"])
    assert hide_secrets(inputs) == "['s3://…@host/a?…', 'gs://b/c']"


# Runs


@pytest.mark.job
def test_everything_of_a_run_is_on_its_page(edges: Path, tmp_path: Path) -> None:
    page = page_of(tmp_path, edges=edges, undirected=True)
    run = load_run(tmp_path)
    words = text_of(page)
    for title in (
        "What this is",
        "Nodes in time",
        "Step by step",
        "Rhythms",
        "Fit by frequency",
        "Time and memory",
    ):
        assert title in words
    for fact in (
        "300 nodes over 40 steps of 1d",
        run.manifest.run_id,
        "6,000 in 1 files",
        "every 6.7 days",
    ):
        assert fact in words
    assert run.manifest.metrics.report == "report.html"
    assert run.manifest.metrics.seconds["report"] > 0
    assert (run.manifest.metrics.peak_bytes or 0) > 2**20
    assert f"{run.manifest.fingerprint}" in words
    # Nothing that a browser would fetch, and the browser is told not to.
    found = Loads(page)
    assert found.addresses == []
    assert not {"link", "img", "iframe", "object"} & set(found.tags)
    assert "default-src 'none'" in page
    assert "@import" not in page.partition("</style>")[0]
    assert len(page) < 1_000_000


@pytest.mark.job
def test_map_and_paths_are_those_of_the_tables(edges: Path, tmp_path: Path) -> None:
    start_run(job(edges, tmp_path, undirected=True))
    run = load_run(tmp_path)
    facts = gather.gather(run.folder, run.manifest)
    nodes = facts.nodes
    assert nodes is not None
    assert nodes.paths is not None
    known = run.nodes.polars().collect()
    by_id = {row["node_id"]: row for row in known.iter_rows(named=True)}
    assert sorted(nodes.ids) == sorted(by_id)
    for name, degree, last in zip(nodes.ids, nodes.degree, nodes.last_step, strict=True):
        assert (degree, last) == (by_id[name]["degree"], by_id[name]["last_step"])
    Z = run.trajectory.numpy()
    rows = [by_id[nodes.ids[at]]["row"] for at in nodes.paths.nodes]
    assert nodes.paths.rows.tolist() == rows
    drawn = nodes.paths.drawn
    assert drawn.points.shape == (len(rows), 40, 2)
    directions, size = naive.soft_paths(Z[:, rows])
    expected, share = naive.principal_plane(directions.reshape(-1, run.rank))
    np.testing.assert_allclose(np.abs(drawn.points.reshape(-1, 2)), np.abs(expected), rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(nodes.paths.stage.axes.share, share, rtol=1e-3)
    np.testing.assert_allclose(drawn.size, size, rtol=1e-4)
    moves = np.linalg.norm(np.diff(directions, axis=1), axis=2).mean(axis=0)
    np.testing.assert_allclose(nodes.paths.change, [0.0, *moves], rtol=1e-3)
    centres = nodes.paths.stage.communities.centres
    far = np.linalg.norm(directions[:, :, None] - centres, axis=3)
    np.testing.assert_allclose(
        np.take_along_axis(far, drawn.community[:, :, None], 2)[:, :, 0], far.min(axis=2), rtol=1e-4
    )
    assert facts.turns is None
    # What the fit leaves over and what it explains of the sum over time are one, but for regularisation.
    left, explained = facts.fit.filter(pl.col("k") == 0)["left"].item(), run.manifest.metrics.energy_share
    assert explained is not None
    assert left == pytest.approx(1 - explained, abs=0.01)


@pytest.mark.job
def test_moments_are_those_of_the_changes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    day, source = rng.integers(40, size=6000), rng.integers(60, size=6000)
    # From day 20 on everybody is with others.
    near = np.where(
        day < 20,
        source // 20 * 20 + rng.integers(20, size=6000),
        source % 3 + 3 * rng.integers(20, size=6000),
    )
    frame = pl.DataFrame({"source": source, "target": near, "time": 1_700_006_400 + day * DAY})
    frame.filter(pl.col("source") != pl.col("target")).write_parquet(tmp_path / "edges.parquet")
    start_run(job(tmp_path / "edges.parquet", tmp_path / "out", undirected=True, trajectory_by="filter"))
    run = load_run(tmp_path / "out")
    nodes = gather.gather(run.folder, run.manifest).nodes
    assert nodes is not None
    assert list(nodes.moments) == sorted(run.changes().moments["step"].to_list())
    assert any(abs(step - 20) <= 2 for step in nodes.moments)
    shown = scene.make_scene(nodes, run.grid)["time"]["moments"]
    assert shown == list(nodes.moments)


@pytest.mark.job
@pytest.mark.parametrize(
    ("options", "present", "absent"),
    [
        ({"outputs": ("embedding",)}, "Map of nodes", "Step by step"),
        ({"outputs": ("trajectory",), "freqs": "auto"}, "Nodes in time", "no vector"),
        ({"trajectory_by": "filter"}, "Nodes in time", "no vector"),
        ({"outputs": ("spectrum",)}, "no vector of a node", "Fit by frequency"),
        ({"outputs": ("embedding",), "model": "tsvd"}, "Map of nodes", "Fit by frequency"),
        ({"bipartite": True, "bound": True, "reduce": "last:5"}, "Rhythms", "no vector"),
        ({"step": "distinct", "freqs": "lowest:3"}, "Rhythms", "no vector"),
        ({"step": "bins:1"}, "the sum over time", "Rhythms"),
        ({"gauge": "none", "max_iter": 1}, "stopped at the limit", "no vector"),
        ({"zone": "Europe/Athens", "step": "1w"}, "Times are those of Europe/Athens", "no vector"),
    ],
)
def test_every_kind_of_run_has_a_page(
    edges: Path, tmp_path: Path, options: dict[str, Any], present: str, absent: str
) -> None:
    page = page_of(tmp_path, edges=edges, **options)
    assert present in text_of(page)
    assert absent not in text_of(page)


@pytest.mark.job
@pytest.mark.parametrize("rows", [[(1, 2, 0)], [(1, 1, 0)], [(1, 2, 0), (2, 3, 1)], [(1, 2, -1), (1, 2, 5)]])
def test_the_smallest_graphs_have_a_page(tmp_path: Path, rows: list[tuple[int, int, int]]) -> None:
    path = tmp_path / "edges.parquet"
    pl.DataFrame(rows, schema=["source", "target", "time"], orient="row").write_parquet(path)
    page = page_of(tmp_path / "out", edges=path, step="1", rank=2, undirected=True)
    assert "Nodes in time" in page


@pytest.mark.job
def test_two_spaces_and_mixed_ids(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {
            "source": rng.integers(20, size=400),
            "target": [f"</td><b>{v}" for v in rng.integers(20, size=400)],
            "time": rng.integers(10, size=400),
        }
    )
    frame.write_parquet(tmp_path / "edges.parquet")
    page = page_of(tmp_path / "out", edges=tmp_path / "edges.parquet", step="1", bipartite=True, rank=4)
    assert "</td><b>" not in page
    run = load_run(tmp_path / "out")
    nodes = gather.gather(run.folder, run.manifest).nodes
    assert nodes is not None
    # Targets have a vector too, and the words before ids tell the spaces apart.
    assert {"source 3", "target </td><b>3"} <= set(nodes.ids)
    assert len(nodes.ids) == 40


@pytest.mark.job
def test_bad_rows_are_told(tmp_path: Path) -> None:
    path = tmp_path / "edges.csv"
    good = "".join(f"{i},{i % 7},{i}\n" for i in range(30))
    path.write_text(f"source,target,time\n{good}<i>x,,3\n")
    page = page_of(
        tmp_path / "out",
        edges=path,
        step="1",
        rank=2,
        on_bad_rows="skip",
        ids="string",
        outputs=("embedding",),
    )
    assert "1 of 31 rows were invalid" in text_of(page)
    assert "<i>x" not in page


@pytest.mark.job
def test_drift_and_gate_of_a_refresh(tmp_path: Path) -> None:
    edges = write_days(tmp_path / "edges", 0, 29)
    out = tmp_path / "out"
    first = refresh(night(edges, out, as_of="2026-02-02", report=True))
    page = (out / "runs" / first.run / "report.html").read_text()
    assert "begins a chain" in page
    write_days(tmp_path / "edges", 29, 30)
    second = refresh(night(edges, out, as_of="2026-02-03", report=True))
    folder = out / "runs" / second.run
    page = text_of((folder / "report.html").read_text())
    assert "Within every limit" in page
    assert first.run in page
    mover = second.record.drift[0].movers[0]
    assert mover.node_id in page
    cosines = pl.read_parquet(folder / "drift.parquet")["cosine"].drop_nulls().to_list()
    facts = gather.gather(RunFolder(folder), second.manifest)
    assert facts.turns is not None
    angles = [math.degrees(math.acos(min(1.0, cosine))) for cosine in cosines]
    assert facts.turns.tolist() == naive.histogram(angles, 180, 0.0, 180.0)
    assert facts.turns.sum() == len(cosines) > 0
    # One that breaks a limit has its page too.
    write_days(tmp_path / "edges", 30, 31)
    with pytest.raises(QualityError):
        refresh(night(edges, out, as_of="2026-02-04", report=True, min_cosine=1.0))
    rejected = sorted((out / "runs").iterdir())[-1]
    assert "Not published when it was finished: median cosine" in text_of(
        (rejected / "report.html").read_text()
    )


@pytest.mark.job
def test_the_report_changes_no_byte_and_no_identity(edges: Path, tmp_path: Path) -> None:
    found = []
    for wanted in (True, False):
        config = job(edges, tmp_path / str(wanted), report=wanted)
        run = start_run(config).run
        assert (run.path / "report.html").exists() is wanted
        found.append((digests(run.path), config.identity(), json.loads(run.manifest.read_text())["identity"]))
    assert found[0] == found[1]


@pytest.mark.job
def test_a_run_behind_a_url_has_its_page(edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start_run(job(edges, to_path("memory://vectors"), report=True)).run
    page = (run.path / "report.html").read_text()
    assert "Nodes in time" in page
    monkeypatch.setenv("DISPLAY", ":0")
    done = CliRunner().invoke(cli, ["report", str(run.path), "--open"])
    assert done.output.startswith(f"{run.path}/report.html\nNo browser")
    assert len((run.path / "report.html").read_text()) == pytest.approx(len(page), rel=0.01)


@pytest.mark.job
@pytest.mark.cluster
def test_a_worker_process_writes_it(edges: Path, tmp_path: Path) -> None:
    run = start_run(job(edges, tmp_path, mode="processes", workers=1, report=True)).run
    assert "Nodes in time" in (run.path / "report.html").read_text()


@pytest.mark.job
@pytest.mark.parametrize("problem", [ValueError("no\nsuch colour"), MemoryError(), OSError(28, "no space")])
def test_a_failed_drawing_loses_no_run(
    edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, problem: Exception
) -> None:
    def fail(*_: Any) -> None:
        raise problem

    monkeypatch.setattr(write, "gather", fail)
    told = Told()
    outcome = start_run(job(edges, tmp_path, report=True), told)
    assert load_run(tmp_path).path == outcome.run.path
    assert not (outcome.run.path / "report.html").exists()
    assert "report" not in outcome.figures
    [line] = [line for line in told.lines if line.startswith("no report")]
    assert type(problem).__name__ in line
    assert "\n" not in line


@pytest.mark.job
def test_a_lost_task_loses_no_run(edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(task: ReportTask) -> str:
        raise OSError(5, "the disk is gone")

    monkeypatch.setattr(pipeline, "try_report", fail)
    told = Told()
    start_run(job(edges, tmp_path, report=True), told)
    assert load_run(tmp_path).manifest.state == "published"
    assert any(line.startswith("no report: storage failed") for line in told.lines)


def test_a_task_that_cannot_read_says_so(tmp_path: Path) -> None:
    problem = try_report(ReportTask(str(tmp_path), str(tmp_path / "manifest.json")))
    assert problem.startswith("InputError: cannot read")


# The command


@pytest.mark.job
def test_report_command(edges: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start_run(job(edges, tmp_path / "out"))
    run = load_run(tmp_path / "out")
    invoke = CliRunner().invoke
    done = invoke(cli, ["report", str(tmp_path / "out")])
    assert done.output.strip() == str(run.path / "report.html")
    assert "Nodes in time" in (run.path / "report.html").read_text()
    for name in ("DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    done = invoke(cli, ["report", str(run.path), "--to", str(tmp_path / "here.html"), "--open"])
    assert "open the file where there is one" in done.output
    assert (tmp_path / "here.html").exists()
    with pytest.raises(InputError, match="no run"):
        invoke(cli, ["report", str(tmp_path / "nothing")], catch_exceptions=False)


@pytest.mark.job
@pytest.mark.filterwarnings("ignore")  # Its own: of libraries that it could use.
def test_umap_where_it_is_installed(edges: Path, tmp_path: Path) -> None:
    start_run(job(edges, tmp_path, outputs=("embedding",)))
    run = load_run(tmp_path)
    try:
        import umap  # noqa: F401
    except ImportError:
        with pytest.raises(ConfigError, match="pip install umap-learn"):
            gather.gather(run.folder, run.manifest, "umap")
    else:
        nodes = gather.gather(run.folder, run.manifest, "umap").nodes
        assert nodes is not None
        assert "UMAP" in nodes.nearness
        assert nodes.points.shape == (len(nodes.ids), 2)


# Size


def fabricate(folder: Path, edges: Path, n: int, n_steps: int, rank: int) -> Path:
    """Make a run of many nodes out of a small one: its tables are as long as those of a large graph."""
    start_run(job(edges, folder / "small", undirected=True))
    small = load_run(folder / "small")
    run = folder / "large"
    run.mkdir()
    for name in ("fit.parquet", "frequencies.parquet", "timings.json"):
        (run / name).write_bytes((small.path / name).read_bytes())
    rng = np.random.default_rng(0)
    ids = pa.array([f"node-{v}" for v in range(n)])
    degree = (rng.pareto(1.2, size=n) * 3).astype(np.int64)
    last = rng.integers(n_steps, size=n).astype(np.int32)
    columns = {"node_id": ids, "row": np.arange(n), "degree": degree, "last_step": last}
    parquet.write_parquet(run / "nodes.parquet", columns)
    for part, start in enumerate(range(0, n, 120_000)):
        count = min(120_000, n - start)
        vectors = rng.normal(size=(count, rank)).astype(np.float32)
        name = f"part-{part:05d}.parquet"
        parquet.write_parquet(
            run / "embedding" / name,
            {"node_id": ids[start : start + count], "embedding": parquet.vectors(vectors)},
        )
        Z = np.repeat(vectors, n_steps, axis=0)
        parquet.write_parquet(run / "trajectory" / name, {"embedding": parquet.vectors(Z)})
    grid = replace(small.grid, n_steps=n_steps)
    assert isinstance(grid, TimeGrid)
    manifest = small.manifest.replaced(
        grid=grid,
        summary=small.manifest.summary.replaced(nodes=n, steps=n_steps),
        config=small.manifest.config.replaced(rank=rank),
        metrics=small.manifest.metrics.replaced(active=int((degree > 0).sum())),
    )
    RunFolder(run).write_manifest(manifest)
    return run


PEAK = """
import sys
import toffee_dist.batch.pipeline
from toffee_dist.cluster.workers import high_water
from toffee_dist.report.write import write_report
from toffee_dist.storage.runs import RunFolder
run = RunFolder.at(sys.argv[1])
before = high_water()
write_report(run, run.read_manifest(), run.report)
print(high_water() - before)
"""


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.slow
def test_large_graphs_have_small_pages(edges: Path, tmp_path: Path) -> None:
    from toffee_dist.batch.stages import INGEST_BYTES

    run = fabricate(tmp_path, edges, n=300_000, n_steps=12, rank=16)
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(run)], capture_output=True, text=True, timeout=240, check=True
    )
    page = (run / "report.html").read_text()
    assert len(page) < 5_000_000
    assert "4,000 of the" in text_of(page)
    # The projection of a worker has this much for a task of the ingest: a report needs no more.
    assert int(done.stdout) < INGEST_BYTES
