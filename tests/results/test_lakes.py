"""Snapshots in tables of others, each written and read by the real program."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner

from tests.harness import ROOT
from tests.harness.clusters import job
from tests.harness.refreshes import DAY, FIRST, night, write_day, write_days
from toffee_dist import Run, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.limits import Limits
from toffee_dist.refresh.job import refresh
from toffee_dist.results import lakes
from toffee_dist.results.snapshots import step_ends, take_snapshot
from toffee_dist.storage.manifest import write_record
from toffee_dist.storage.parquet import GROUP_ROWS
from toffee_dist.storage.runs import list_runs
from toffee_dist.timegrid import TimeScale, build_grid

pytestmark = pytest.mark.job
NOT_HERE = "make ecosystem-test installs it"
# NUL, control characters, line breaks, quotes, letters of several bytes.
ODD = [
    "a",
    "a\0",
    "a\0b",
    "\x1b[31m",
    "line\nbreak",
    "cr\r\n",
    "tab\t",
    "quote'\"",
    "漢字",
    "\\",
    "{}",
    "$x",
    "'; DROP",
]


def write(folder: Path, ids: list[Any], **options: Any) -> Run:
    rng = np.random.default_rng(0)
    source, target = rng.integers(len(ids), size=(2, 400))
    frame = {"source": [ids[i] for i in source], "target": [ids[i] for i in target]}
    time = FIRST + rng.integers(10, size=400) * DAY
    pl.DataFrame(frame | {"time": time}).write_parquet(folder / "edges.parquet")
    config = job(folder / "edges.parquet", folder / "out", rank=4, **options)
    start_run(config, limits=Limits(part_bytes=1 << 9))
    return load_run(folder / "out")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("odd"), [*ODD, *(f"n{i}" for i in range(20))])


@pytest.fixture(scope="module")
def nights(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs of one space, and one of another."""
    folder = tmp_path_factory.mktemp("nights")
    edges, out = write_days(folder / "edges", 0, 30, nodes=60, events=200), folder / "out"
    for day, fresh in ((30, False), (31, False), (32, True)):
        options = {"outputs": ("embedding", "trajectory"), "rank": 4, "trajectory_by": "filter"}
        refresh(night(edges, out, fresh=fresh, min_cosine=-1.0, **options))
        write_day(edges, day, nodes=60, events=200)
    return [load_run(run.path) for run in list_runs(out)]


def naive_rows(run: Run, *, steps: bool = False, at: int | None = None) -> list[dict[str, Any]]:
    """What a snapshot should have, row by row."""
    ids = run.nodes.polars().sort("row").collect()["node_id"].to_list()
    starts = run.steps.polars().collect()["start"].to_list()
    ends = [*starts[1:], starts[-1] + timedelta(days=1)]
    common = {"created": datetime.fromisoformat(run.manifest.finished), "run_id": run.manifest.run_id}
    found = []
    wanted = range(run.n_steps) if steps else [at]
    Z = run.trajectory.numpy() if steps or at is not None else run.embedding.numpy()[None]
    for row, name in enumerate(ids):
        for step in wanted:
            one: dict[str, Any] = {"node_id": name, "embedding": Z[step or 0][row].tolist(), **common}
            one["event_timestamp"] = ends[-1 if step is None else step]
            one["space_id"] = run.manifest.space_of("embedding" if step is None else "trajectory")
            found.append(one | ({} if step is None else {"step": step}))
    return found


def assert_rows(frame: pl.DataFrame, expected: list[dict[str, Any]]) -> None:
    keys = [name for name in ("run_id", "node_id", "step") if name in frame.columns]
    frame = frame.with_columns(pl.col("embedding").cast(pl.List(pl.Float32))).sort(keys)
    mine = pl.DataFrame(
        expected, schema_overrides={"embedding": pl.List(pl.Float32)}, infer_schema_length=None
    )
    mine = mine.select(frame.columns).sort(keys)
    for name in frame.columns:
        assert frame[name].to_list() == mine[name].to_list(), name


@pytest.mark.parametrize("lists", ["fixed", "list"])
def test_a_parquet_file(odd: Run, tmp_path: Path, lists: Any) -> None:
    asked: dict[str, Any] = {"one": {}, "steps": {"steps": True}, "then": {"at": 3}}
    for name, options in asked.items():
        [path] = odd.export("parquet", tmp_path / f"{name}.parquet", vectors=lists, **options)
        assert_rows(pl.read_parquet(path), naive_rows(odd, **options))
        kind = pq.read_schema(path).field("embedding").type
        assert pa.types.is_fixed_size_list(kind) == (lists == "fixed")
    assert pq.read_schema(path).metadata[b"toffee.space_id"].decode() == odd.manifest.space_of("trajectory")


def test_the_blocks_of_a_long_trajectory_join(odd: Run, tmp_path: Path) -> None:
    """One by ALS, whose row groups begin in the middle of a node's steps."""
    ids = [f"n{i}" for i in range(40)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("toffee_dist.storage.parquet.GROUP_ROWS", 7)
        assert GROUP_ROWS > 7
        run = write(tmp_path, ids, outputs=("embedding", "trajectory"), trajectory_by="als")
    [path] = run.export("parquet", tmp_path / "steps.parquet", steps=True)
    assert_rows(pl.read_parquet(path), naive_rows(run, steps=True))


@pytest.mark.parametrize("step", ["1d", "1w", "bins:4", "distinct", "6h"])
def test_nothing_of_a_step_is_after_its_timestamp(step: str) -> None:
    times = FIRST + np.sort(np.random.default_rng(1).integers(20 * DAY, size=50))
    grid = build_grid(step, int(times[0]), int(times[-1]), TimeScale(1, True), distinct=np.unique(times))
    ends = step_ends(grid)
    for tick, at in zip(times, grid.steps_of(times.astype(np.int64)), strict=True):
        assert tick * 10**6 < ends[at]
        assert at == 0 or tick * 10**6 >= ends[at - 1] or step == "distinct"


def test_features_are_joined_as_of_a_moment(nights: list[Run], tmp_path: Path) -> None:
    """As polars and DuckDB join them: the newest vector that ended by then, never a later one."""
    for number, run in enumerate(nights[:2]):
        run.export("parquet", tmp_path / f"night-{number}.parquet")
    first, second = (take_snapshot(run) for run in nights[:2])
    ends = [int(step_ends(each.run.grid)[-1]) for each in (first, second)]
    assert ends[1] - ends[0] == DAY * 10**6
    asked = [ends[0] - 1, ends[0], ends[1] - 1, ends[1] + DAY * 10**6]
    moments = pl.Series("when", asked, dtype=pl.Int64).cast(pl.Datetime("us", "UTC"))
    wanted = [None, nights[0].manifest.run_id, nights[0].manifest.run_id, nights[1].manifest.run_id]
    features = pl.read_parquet(tmp_path / "night-*.parquet").sort("event_timestamp", "created")
    labels = pl.DataFrame({"node_id": ["n00001"] * 4}).with_columns(moments).sort("when")
    joined = labels.join_asof(features, left_on="when", right_on="event_timestamp", by="node_id")
    assert joined["run_id"].to_list() == wanted
    with duckdb.connect() as connection:
        connection.execute("SET TimeZone = 'UTC'")
        connection.register("labels", labels.to_arrow())
        query = f"""
            SELECT f.run_id FROM labels ASOF LEFT JOIN '{tmp_path}/night-*.parquet' f
            ON labels.node_id = f.node_id AND labels.when >= f.event_timestamp ORDER BY labels.when
        """
        assert [row[0] for row in connection.execute(query).fetchall()] == wanted


def test_one_liners_of_the_docs(nights: list[Run], tmp_path: Path) -> None:
    """What docs/ask.md says of DuckDB and polars, on the files of a run."""
    assert int(duckdb.__version__.split(".")[0]) >= 1
    run = nights[1]
    ours = run.neighbors("n00001", 5)
    page = (ROOT / "docs" / "ask.md").read_text()
    [sql] = [block.partition("```")[0] for block in page.split("```sql\n")[1:]]
    with duckdb.connect() as connection:
        found = connection.execute(sql.replace("vectors/runs/RUN", str(run.path)).replace("alice", "n00001"))
        rows = found.fetchall()
    assert [row[0] for row in rows] == ours["node_id"].to_list()
    np.testing.assert_allclose([row[1] for row in rows], ours["similarity"], atol=1e-6)
    scan = pl.scan_parquet(f"{run.path}/embedding/*.parquet").filter(~pl.col("is_cold")).collect()
    assert scan.height == run.embedding.polars().filter(~pl.col("is_cold")).collect().height


def grow(form: str, nights: list[Run], to: Path) -> None:
    """Add two nights, each twice, and try a third of another space."""
    first, second, other = nights
    for run in (first, first, second, first, second):
        run.export(form, to)
    with pytest.raises(InputError, match="vectors of another space") as refused:
        other.export(form, to)
    assert "Choose a new --to" in str(refused.value)
    with pytest.raises(ConfigError, match="a table of embedding, to which trajectory cannot be added"):
        first.export(form, to, steps=True)
    (to.parent / "strange").mkdir()
    (to.parent / "strange" / "file").write_text("mine")
    with pytest.raises(ConfigError, match="a table that toffee export made"):
        first.export(form, to.parent / "strange")


@pytest.mark.ecosystem
def test_delta(nights: list[Run], odd: Run, tmp_path: Path) -> None:
    delta = pytest.importorskip("deltalake", reason=NOT_HERE)
    grow("delta", nights, tmp_path / "table")
    table = delta.DeltaTable(str(tmp_path / "table"))
    # Two commits: what was there is not added again.
    assert table.version() == 1
    assert [entry["run_id"] for entry in reversed(table.history())] == [
        run.manifest.run_id for run in nights[:2]
    ]
    assert_rows(pl.read_delta(str(tmp_path / "table")), [*naive_rows(nights[0]), *naive_rows(nights[1])])
    odd.export("delta", tmp_path / "odd", steps=True)
    assert_rows(pl.read_delta(str(tmp_path / "odd")), naive_rows(odd, steps=True))


@pytest.mark.ecosystem
def test_lance(nights: list[Run], odd: Run, tmp_path: Path) -> None:
    lance = pytest.importorskip("lance", reason=NOT_HERE)
    grow("lance", nights, tmp_path / "table")
    found = lance.dataset(str(tmp_path / "table"))
    assert_rows(pl.DataFrame(found.to_table()), [*naive_rows(nights[0]), *naive_rows(nights[1])])
    # Its own search finds the neighbours that we find.
    run = nights[1]
    row = run.nodes.polars().sort("row").collect()["node_id"].to_list().index("n00001")
    query = run.embedding.numpy()[row]
    near = found.to_table(
        columns=["node_id"],
        nearest={"column": "embedding", "q": query, "k": 6, "metric": "cosine"},
        filter=f"run_id = '{run.manifest.run_id}'",
        prefilter=True,
    )
    assert near["node_id"].to_pylist()[1:] == run.neighbors("n00001", 5)["node_id"].to_list()
    odd.export("lance", tmp_path / "odd", steps=True)
    assert_rows(pl.DataFrame(lance.dataset(str(tmp_path / "odd")).to_table()), naive_rows(odd, steps=True))


@pytest.mark.ecosystem
def test_clickhouse(odd: Run, tmp_path: Path) -> None:
    pytest.importorskip("chdb", reason=NOT_HERE)
    [path] = odd.export("parquet", tmp_path / "table.parquet", vectors="list")
    query = f"SELECT node_id, embedding, space_id FROM file('{path}') FORMAT JSONEachRow"
    # In a process of its own: it brings a whole server along.
    code = "import sys, chdb; sys.stdout.write(str(chdb.query(sys.argv[1])))"
    done = subprocess.run([sys.executable, "-c", code, query], capture_output=True, timeout=120, check=True)
    rows = [json.loads(line) for line in done.stdout.decode().splitlines()]
    expected = naive_rows(odd)
    assert [row["node_id"] for row in rows] == [row["node_id"] for row in expected]
    found = np.array([row["embedding"] for row in rows], np.float32)
    np.testing.assert_array_equal(found, np.array([row["embedding"] for row in expected], np.float32))


# What a user of a feature store does, in Feast's own environment.
FEAST = """
import json, sys
from datetime import datetime
import pandas as pd
from feast import FeatureStore
store = FeatureStore(repo_path=".")
asked = json.load(sys.stdin)
names = ["embedding", "run_id", "space_id"]
features = [f"toffee_embedding:{name}" for name in names]
when = pd.to_datetime(asked["when"], utc=True)
entities = pd.DataFrame({"node_id": asked["nodes"], "event_timestamp": when})
past = store.get_historical_features(entity_df=entities, features=features).to_df()
past = past.sort_values("event_timestamp", kind="stable")
store.materialize(datetime.fromisoformat(asked["since"]), datetime.fromisoformat(asked["until"]))
rows = [{"node_id": name} for name in asked["online"]]
now = store.get_online_features(features=features, entity_rows=rows).to_dict()

def plain(value):
    if isinstance(value, str) or value is None:
        return value
    return [float(x) for x in value] if hasattr(value, "__len__") else None

past = {name: [plain(value) for value in past[name].astype(object)] for name in names}
print(json.dumps({"past": past, "now": now}))
"""


@pytest.mark.ecosystem
@pytest.mark.slow
def test_feast(nights: list[Run], odd: Run, tmp_path: Path) -> None:
    """`feast apply` takes what was written; historical and online requests get the vectors that we have."""
    folder = Path(os.environ.get("TOFFEE_FEAST", ROOT / ".venv-feast" / "bin"))
    if not (folder / "feast").exists():
        pytest.skip(f"no Feast: {NOT_HERE}")
    grow("feast", nights, tmp_path / "repo")
    repo = tmp_path / "repo"
    assert len(list((repo / "data" / "vectors").iterdir())) == 2
    quiet = {"FEAST_USAGE": "False", "PATH": os.environ["PATH"], "HOME": str(tmp_path)}
    options: dict[str, Any] = {
        "cwd": repo,
        "env": quiet,
        "capture_output": True,
        "text": True,
        "timeout": 250,
    }
    done = subprocess.run([folder / "feast", "apply"], check=False, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    ends = [datetime.fromtimestamp(step_ends(run.grid)[-1] / 10**6, UTC) for run in nights[:2]]
    when = [ends[0] - timedelta(seconds=1), ends[0], ends[1] - timedelta(seconds=1), ends[1]]
    asked = {
        "nodes": ["n00001"] * 4,
        "when": [moment.isoformat() for moment in when],
        "since": (ends[0] - timedelta(days=1)).isoformat(),
        "until": (ends[1] + timedelta(days=1)).isoformat(),
        "online": ["n00001", "n00002", "nobody"],
    }
    done = subprocess.run(
        [folder / "python", "-W", "ignore", "-c", FEAST], input=json.dumps(asked), check=False, **options
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout.splitlines()[-1])
    first, second = ({row["node_id"]: row["embedding"] for row in naive_rows(run)} for run in nights[:2])
    names = [run.manifest.run_id for run in nights[:2]]
    # A moment before the first night has no vector: Feast leaves its row out.
    assert answer["past"]["run_id"] == [names[0], names[0], names[1]]
    for found, expected in zip(answer["past"]["embedding"], (first, first, second), strict=True):
        np.testing.assert_allclose(found, expected["n00001"], rtol=1e-6)
    now = answer["now"]
    assert now["run_id"] == [names[1], names[1], None]
    assert now["space_id"] == [nights[1].space_id] * 2 + [None]
    for at, name in enumerate(("n00001", "n00002")):
        np.testing.assert_allclose(now["embedding"][at], second[name], rtol=1e-6)
    # Nothing of an id is in what Feast runs.
    odd.export("feast", tmp_path / "odd")
    text = (tmp_path / "odd" / "toffee_features.py").read_text()
    compile(text, "features", "exec")
    assert "DROP" not in text


def test_a_missing_package_is_named(odd: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for form, package in (("delta", "deltalake"), ("lance", "lance")):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ConfigError, match=rf"pip install 'toffee_dist\[{form}\]'"):
            odd.export(form, tmp_path / form)
    assert list(tmp_path.iterdir()) == []


def test_what_tables_cannot_hold_is_refused(odd: Run, tmp_path: Path) -> None:
    numbers = write(tmp_path, list(range(30)), outputs=("embedding",), time_unit="number", step="86400")
    with pytest.raises(InputError, match="Feast needs moments"):
        numbers.export("feast", tmp_path / "repo")
    [path] = numbers.export("parquet", tmp_path / "numbers.parquet")
    assert "event_timestamp" not in pl.read_parquet_schema(path)
    with pytest.raises(InputError, match="this run has no trajectory"):
        numbers.export("parquet", tmp_path / "steps.parquet", steps=True)
    with pytest.raises(ConfigError, match="--steps: got format numpy"):
        odd.export("numpy", tmp_path / "matrix", steps=True)
    with pytest.raises(ConfigError, match="all steps: got also --at 3"):
        odd.export("parquet", tmp_path / "both", steps=True, at=3)
    # A name that would lead out of the repository, or out of a query.
    data = odd.manifest.replaced(run_id="../../x' OR 1=1")
    copy = tmp_path / "copy"
    copy.mkdir()
    write_record(copy / "manifest.json", data)
    for form in lakes.LAKES:
        with pytest.raises(InputError, match="name of a run"):
            load_run(copy).export(form, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_command(nights: list[Run], tmp_path: Path) -> None:
    words = [
        "export",
        str(nights[1].path),
        "--format",
        "parquet",
        "--to",
        str(tmp_path / "x.parquet"),
        "--steps",
    ]
    done = CliRunner().invoke(cli, [*words, "--vectors", "list", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["space_id"] == nights[1].space_id
    assert pl.read_parquet(tmp_path / "x.parquet").height == nights[1].n_nodes * nights[1].n_steps
