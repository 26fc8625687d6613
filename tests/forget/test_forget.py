"""Erasure: nothing of an id is left, readers see whole runs, and whatever cuts it short, it goes on."""

from __future__ import annotations

import base64
import html
import json
import os
import shutil
import urllib.parse
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from disks import FaultyDisk, WatchedDisk

from tests.harness import s3
from tests.harness.refreshes import DAY, FIRST, night, write_day, write_days
from toffee_dist import load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.batch.seal import check_run
from toffee_dist.cli import cli
from toffee_dist.errors import UnfinishedError
from toffee_dist.forget.job import forget
from toffee_dist.forget.rewrite import erase, rewrite_json
from toffee_dist.refresh.history import roll_back
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import JobConfig
from toffee_dist.storage.disk import using_disk
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import find_latest, list_runs

PERSON = "Zoë <zoe@example.org> & co"


def add_person(edges: Path, days: range) -> None:
    """Give the person, who also is who moves the most, edges of every day."""
    for day in days:
        frame = pl.DataFrame(
            {
                "source": [PERSON] * 9 + ["n00003"],
                "target": [f"n{(day * 37 + k) % 240:05d}" for k in range(9)] + [PERSON],
                "time": [FIRST + day * DAY + k for k in range(10)],
            }
        )
        frame.write_parquet(edges / f"person-{day:03d}.parquet")


def forms(text: str) -> list[bytes]:
    """Return every way in which we could have written an id."""
    ways = [text, html.escape(text), json.dumps(text)[1:-1], json.dumps(html.escape(text))[1:-1]]
    ways += [html.escape(text, quote=False), urllib.parse.quote(text), repr(text)[1:-1]]
    ways.append(json.dumps(text)[1:-1].replace("<", "\\u003c").replace(">", "\\u003e"))
    found = [way.encode() for way in ways] + [text.encode("utf-16-le"), text.encode("utf-32-le")]
    return [*found, base64.b64encode(text.encode())[:-4], text.encode().hex().encode()]


def find_left(folder: Path, text: str) -> list[str]:
    """Return the files below a folder that have an id in them, Parquet and Arrow decoded too."""
    left = []
    for path in sorted(folder.rglob("*")):
        if not path.is_file():
            continue
        data = path.read_bytes()
        if any(form in data for form in forms(text)):
            left.append(str(path))
        elif path.suffix == ".parquet":
            table = pq.read_table(path)
            said = json.dumps(
                [table.to_pylist(), str(table.schema.metadata)], default=str, ensure_ascii=False
            )
            left += [str(path)] * (text in said)
        elif path.suffix == ".arrow":
            left += [str(path)] * (text in str(pl.read_ipc(path).to_dicts()))
        left += [str(path)] * (text in path.name)
    return left


@pytest.fixture(scope="module")
def season(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make edges, and a folder of two refreshes with every output, an index, a report and work kept."""
    folder = tmp_path_factory.mktemp("forget")
    edges = write_days(folder / "edges", 0, 30)
    add_person(edges, range(30))
    options = {"outputs": ("embedding", "trajectory", "factors", "spectrum"), "report": True}
    refresh(night(edges, folder / "out", **options))
    write_day(edges, 30)
    add_person(edges, range(30, 31))
    refresh(night(edges, folder / "out", **options))
    load_run(folder / "out").build_index()
    return folder


@pytest.fixture
def out(season: Path, tmp_path: Path) -> Path:
    shutil.copytree(season / "out", tmp_path / "out")
    return tmp_path / "out"


def test_nothing_of_an_id_is_left(season: Path, out: Path, tmp_path: Path) -> None:
    assert len(find_left(out, PERSON)) > 10  # The search finds what is there.
    before = load_run(out)
    before.export("numpy", tmp_path / "copy")
    [row] = before.nodes.polars().filter(pl.col("node_id") == PERSON).select("row").collect()["row"]
    others = np.setdiff1d(np.arange(before.n_nodes), [row])
    kept = before.embedding.numpy()[others]
    moved = before.trajectory.numpy()[:, others]
    log = out / "refresh.jsonl"
    log.write_text(log.read_text() + json.dumps({"reason": f"a broken row of {PERSON!r}"}) + "\n")

    done = CliRunner().invoke(cli, ["forget", str(out), PERSON, "--json"], catch_exceptions=False)
    assert done.exit_code == 0
    found = json.loads(done.output)

    assert find_left(out, PERSON) == []
    assert json.loads(log.read_text().splitlines()[-1]) == {"reason": "a broken row of 'a forgotten node'"}
    after = load_run(out)
    for run in list_runs(out):
        assert check_run(run) > 5
    # Everybody else is as before, and the row is nobody's.
    assert np.array_equal(after.embedding.numpy()[others], kept)
    assert np.array_equal(after.trajectory.numpy()[:, others], moved)
    for name in before.manifest.outputs:
        array = after.table(name).numpy()
        assert not array[:, row].any() if array.ndim == 3 else not array[row].any()
    index = np.load(after.folder.index("embedding"))
    assert not index[row].any()
    assert np.array_equal(index[others], kept)
    nodes = after.nodes.polars().collect()
    assert nodes["node_id"][row].startswith("forgotten-")
    assert nodes["degree"][row] == 0
    assert nodes["last_seen"][row] is None
    assert set(before.path.glob("*")) == set()
    # The receipt: which files of which runs, before and after, and where copies went.
    assert [len(run["files"]) > 5 and run["nodes"] for run in found["runs"]] == [1, 1]
    assert [note["to"] for note in found["exports"]] == [str(tmp_path / "copy")]
    files = {file["name"]: file for file in found["runs"][-1]["files"]}
    assert {
        "index/embedding.npy",
        "report.html",
        "manifest.json",
        "factors/A_time/part-00000.parquet",
    } <= set(files)
    was, now = files["nodes.parquet"]["before"], files["nodes.parquet"]["after"]
    assert was == before.manifest.files["nodes.parquet"].to_json()
    assert now != was
    assert found["state"] == "done"
    assert Path(found["receipt"]).exists()

    # A later refresh of the same edges leaves the id out, and everybody keeps their rows.
    edges = tmp_path / "edges"
    shutil.copytree(season / "edges", edges)
    write_day(edges, 31)
    add_person(edges, range(31, 32))
    outputs = ("embedding", "trajectory", "factors", "spectrum")
    refresh(night(edges, out, outputs=outputs, report=True))
    assert find_left(out, PERSON) == []
    later = load_run(out)
    assert later.manifest.summary.forgotten >= 10
    assert later.nodes.polars().collect()["node_id"][: len(nodes)].equals(nodes["node_id"])
    assert later.manifest.refresh is not None
    assert later.manifest.refresh.previous == after.manifest.run_id


def test_a_trajectory_by_filter_loses_the_entries(season: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = {"outputs": ("embedding", "trajectory"), "dense": "last:2", "undirected": True, "rank": 4}
    settings = {"inputs": (str(season / "edges"),), "out": str(out), "mode": "threads", "workers": 1}
    start_run(JobConfig.read(settings | options | {"keep_work": True, "report": False}))
    before = load_run(out)
    assert find_left(before.path / "work", PERSON)
    [row] = before.nodes.polars().filter(pl.col("node_id") == PERSON).select("row").collect()["row"]
    forget(out, [PERSON])
    assert find_left(out, PERSON) == []
    after = load_run(out)
    assert not (after.path / "work").exists()
    for name in ("target", "value", "step"):
        assert np.load(after.path / f"compact/00000-{name}.npy").shape[0] < (before.manifest.summary.entries)
    starts, target = (np.load(after.path / f"compact/00000-{name}.npy") for name in ("starts", "target"))
    assert starts[row] == starts[row + 1]
    assert row not in target
    activity = np.load(after.path / "compact/activity.npy")
    assert activity.sum() == len(target)
    assert not after.trajectory.numpy()[:, row].any()
    check_run(after.folder)


def test_when_a_node_was_active_is_forgotten(season: Path, tmp_path: Path) -> None:
    """Where rows are of active nodes only, a row without numbers would still say when the node was."""
    out = tmp_path / "out"
    options = {"outputs": ("embedding", "trajectory"), "dense_nodes": "active", "dense_precision": "half"}
    settings = {"inputs": (str(season / "edges"),), "out": str(out), "mode": "threads", "workers": 1}
    start_run(JobConfig.read(settings | options | {"undirected": True, "rank": 4, "report": False}))
    before = load_run(out).trajectory.arrow()
    theirs = pc.not_equal(before["node_id"], PERSON)
    assert before.num_rows > before.filter(theirs).num_rows
    forget(out, [PERSON])
    assert find_left(out, PERSON) == []
    after = load_run(out)
    # The others have the same rows, and nobody else has any.
    assert after.trajectory.arrow().equals(before.filter(theirs))
    assert after.trajectory.arrow().schema.field("embedding").type.value_type == pa.float16()
    check_run(after.folder)


def test_numbers_are_ids_too(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    source, target = rng.integers(10**9, 10**9 + 30, (2, 400))
    frame = pl.DataFrame({"source": source, "target": target, "time": np.arange(400) // 20})
    frame.write_parquet(tmp_path / "edges.parquet")
    out = tmp_path / "out"
    settings = {"inputs": (str(tmp_path / "edges.parquet"),), "out": str(out), "rank": 3, "step": "1"}
    config = JobConfig.read(settings | {"mode": "threads", "workers": 1, "report": False})
    start_run(config)
    done = forget(out, ["1000000007", "unknown", "1000000007"])
    assert [run.nodes for run in done.receipt.runs] == [1]
    nodes = load_run(out).nodes.polars().collect()["node_id"]
    assert 1_000_000_007 not in nodes.to_list()
    assert nodes.n_unique() == len(nodes) == 30
    assert load_run(out).neighbors("1000000003", 40).height == 28
    start_run(config)
    assert 1_000_000_007 not in load_run(out).nodes.polars().collect()["node_id"].to_list()


def test_a_json_file_says_nothing_of_them_any_more(tmp_path: Path) -> None:
    said = {"nodes": [{"node_id": PERSON, "p": 0.1}, {"node_id": "bob"}], "why": [f"by {PERSON}"], "n": 7}
    (tmp_path / "a.json").write_text(json.dumps(said))
    assert rewrite_json(tmp_path / "a.json", tmp_path / "b.json", {PERSON: ""}) == 2
    wanted = {"nodes": [{"node_id": "bob"}], "why": ["by a forgotten node"], "n": 7}
    assert json.loads((tmp_path / "b.json").read_text()) == wanted
    assert rewrite_json(tmp_path / "b.json", tmp_path / "c.json", {PERSON: ""}) == 0
    assert (tmp_path / "b.json").samefile(tmp_path / "c.json")


@pytest.mark.parametrize("number", [pa.float32(), pa.float16()])
@pytest.mark.parametrize("make", [partial(pa.list_, list_size=2), pa.list_])
def test_vectors_of_either_kind_become_zeros(make: Callable[..., pa.DataType], number: pa.DataType) -> None:
    kind = make(number)
    rows = [[number.to_pandas_dtype()(n) for n in row] for row in ([9, 9], [1, 2], [3, 4], [5, 6])]
    column = pa.array(rows, kind).slice(1)
    found = erase(column, np.array([False, True, False]))
    assert found.type == kind
    assert found.to_pylist() == [[1, 2], [0, 0], [5, 6]]


def test_a_dry_run_changes_nothing(out: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    done = CliRunner().invoke(cli, ["forget", str(out), PERSON, "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "1 nodes" in done.output
    assert "to remove" in done.output
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_what_cannot_be_forgotten(tmp_path: Path, out: Path) -> None:
    def say(*words: str) -> tuple[int, str]:
        done = CliRunner().invoke(cli, ["forget", *words])
        return getattr(done.exception, "exit_code", done.exit_code), f"{done.output}{done.exception}"

    assert say(str(out))[0] == 2
    code, words = say(str(tmp_path / "nowhere"), "x")
    assert code == 3
    assert "no runs to erase from" in words
    code, words = say(str(out), "--file", str(tmp_path / "none.txt"))
    assert code == 3
    assert "none.txt" in words


def test_on_a_store(season: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOFFEE_CACHE", str(tmp_path / "cache"))
    with s3.server("moto") as port, s3.proxy(port) as proxy, s3.use(proxy.port) as fs:
        fs.mkdir(s3.BUCKET)
        url = f"s3://{s3.BUCKET}/out"
        settings = {
            "inputs": (str(season / "edges"),),
            "out": url,
            "mode": "threads",
            "workers": 1,
            "rank": 4,
        }
        options = {"outputs": ("embedding", "trajectory"), "dense": "last:2", "report": False}
        start_run(JobConfig.read(settings | options))
        before = load_run(url)
        done = forget(to_path(url), [PERSON])
        assert done.receipt.runs[0].nodes == 1
        fs.get(url, str(tmp_path / "copy"), recursive=True)
        assert find_left(tmp_path / "copy", PERSON) == []
        after = load_run(url)
        assert after.manifest.run_id != before.manifest.run_id
        assert check_run(after.folder) > 5
        assert after.trajectory.numpy().shape == (31, 241, 4)
        assert len(list_runs(to_path(url))) == 1


def _fork(work: object) -> int:
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert callable(work)
            work()
            code = 0
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.slow
def test_killed_at_any_write_it_goes_on(tmp_path: Path) -> None:
    """At every change of storage the process ends; readers see a whole run, and the same command finishes."""
    edges = write_days(tmp_path / "edges", 0, 6, events=100, nodes=30)
    add_person(edges, range(6))
    base = tmp_path / "base"
    for _ in range(2):
        options = {"last": "5d", "rank": 3, "trajectory_by": "filter", "outputs": ("embedding", "trajectory")}
        refresh(night(edges, base, **options))
        write_day(edges, 6, events=100, nodes=30)
    disk = WatchedDisk()
    shutil.copytree(base, tmp_path / "dry")
    with using_disk(disk):
        forget(tmp_path / "dry", [PERSON])
    wanted = load_run(tmp_path / "dry").embedding.numpy()
    assert disk.changes > 60
    for at in range(1, disk.changes + 1):
        out = tmp_path / f"killed-{at}"
        shutil.copytree(base, out)

        def work(out: Path = out, at: int = at) -> None:
            with using_disk(FaultyDisk("exit", at, on=False)):
                forget(out, [PERSON])

        assert _fork(work) == 9, at
        latest = find_latest(out)
        assert latest is not None
        assert check_run(latest) > 5, at
        receipts = list((out / "forgotten").glob("*.json"))
        if receipts and json.loads(receipts[0].read_text())["state"] != "done":
            # What would follow an old run, or publish one, waits for the end of the erasure.
            config = night(edges, out, **options)
            for command in (
                partial(refresh, config),
                partial(start_run, config.only(JobConfig)),
                partial(roll_back, out),
                partial(forget, out, ["somebody else"]),
            ):
                with pytest.raises(UnfinishedError, match="cut short"):
                    command()
        done = forget(out, [PERSON])
        assert done.receipt.state == "done"
        assert find_left(out, PERSON) == [], at
        assert all(check_run(run) for run in list_runs(out)), at
        assert len(list_runs(out)) == 2
        assert np.array_equal(load_run(out).embedding.numpy(), wanted), at
        shutil.rmtree(out)
