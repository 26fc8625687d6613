"""Every export is read back by the program it is for, or by that program's rules."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.harness import postgres
from tests.harness.clusters import job
from tests.harness.postgres import Postgres
from toffee_dist import Run, load_run
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.limits import Limits
from toffee_dist.results.export import temporal_arrays

pytestmark = pytest.mark.job

# Ids that break formats which are written carelessly.
ODD = ["plain", "a\\b", "tab\there", "line\nbreak", "cr\rhere", "quote'\"", "comma,", "漢字", "\\N", "\\."]


def write(folder: Path, ids: list[Any], **options: Any) -> Run:
    rng = np.random.default_rng(0)
    source, target = rng.integers(len(ids), size=(2, 300))
    frame = pl.DataFrame(
        {
            "source": [ids[i] for i in source],
            "target": [ids[i] for i in target],
            "time": 1_767_571_200 + rng.integers(20, size=300) * 86400,
        }
    )
    frame.write_parquet(folder / "edges.parquet")
    config = job(folder / "edges.parquet", folder / "out", rank=4, **options)
    start_run(config, limits=Limits(part_bytes=1 << 9))
    return load_run(folder / "out")


@pytest.fixture(scope="module")
def odd(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("odd"), [*ODD, *(f"n{i}" for i in range(40))])


@pytest.fixture(scope="module")
def numbers(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return write(tmp_path_factory.mktemp("numbers"), list(range(0, 900, 20)), undirected=True)


def ids_of(run: Run) -> list[Any]:
    return run.nodes.polars().sort("row").collect()["node_id"].to_list()


def test_word2vec(numbers: Run, odd: Run, tmp_path: Path) -> None:
    path, beside = numbers.export("word2vec", tmp_path / "vectors.txt")
    assert json.loads(beside.read_text())["space_id"] == numbers.space_id
    head, *lines = path.read_text().splitlines()
    assert head == f"{numbers.n_nodes} 4"
    assert [line.split(" ")[0] for line in lines] == [str(i) for i in ids_of(numbers)]
    found = np.array([[float(x) for x in line.split(" ")[1:]] for line in lines], dtype=np.float32)
    np.testing.assert_array_equal(found, numbers.embedding.numpy())
    with pytest.raises(InputError, match="word2vec text cannot hold"):
        odd.export("word2vec", tmp_path / "odd.txt")
    # Whole or not at all.
    assert sorted(item.name for item in tmp_path.iterdir()) == ["vectors.txt", "vectors.txt.json"]


def test_numpy(odd: Run, numbers: Run, tmp_path: Path) -> None:
    for run in (odd, numbers):
        to = tmp_path / run.path.name
        run.export("numpy", to)
        vectors, ids = (np.load(to / f"{name}.npy", allow_pickle=False) for name in ("vectors", "ids"))
        assert vectors.flags.c_contiguous
        np.testing.assert_array_equal(vectors, run.embedding.numpy())
        assert ids.tolist() == ids_of(run)
        assert json.loads((to / "space.json").read_text())["space_id"] == run.space_id
    odd.export("numpy", tmp_path / "targets", role="target")
    targets = np.load(tmp_path / "targets" / "vectors.npy", allow_pickle=False)
    np.testing.assert_array_equal(targets, odd.embedding_target.numpy())
    odd.export("numpy", tmp_path / "then", at=3)
    then = np.load(tmp_path / "then" / "vectors.npy", allow_pickle=False)
    np.testing.assert_array_equal(then, odd.trajectory.numpy()[3])


FAISS = """
import json, sys
import faiss, numpy as np
vectors, ids = (np.load(f"{sys.argv[1]}/{name}.npy", allow_pickle=False) for name in ("vectors", "ids"))
index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
index.add_with_ids(vectors, ids)
scores, found = index.search(vectors[7:8], 6)
print(json.dumps({"asked": int(ids[7]), "found": found[0].tolist(), "scores": scores[0].tolist()}))
"""


@pytest.mark.cluster
def test_faiss_finds_the_neighbours_that_we_find(numbers: Run, tmp_path: Path) -> None:
    if importlib.util.find_spec("faiss") is None:
        pytest.skip("faiss-cpu is not installed")
    numbers.export("faiss", tmp_path / "matrix")
    # In a process of its own: it brings threads along, which the jobs of other tests would refuse.
    command = [sys.executable, "-c", FAISS, str(tmp_path / "matrix")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    answer = json.loads(done.stdout)
    ours = numbers.neighbors(answer["asked"], 5)
    assert answer["found"][0] == answer["asked"]
    np.testing.assert_allclose(answer["scores"][1:], ours["similarity"], atol=1e-6)


def test_duckdb_reads_the_parquet_files(odd: Run, tmp_path: Path) -> None:
    [script] = odd.export("duckdb", tmp_path / "views.sql")
    with duckdb.connect() as connection:
        connection.execute(script.read_text())
        rows = connection.execute("SELECT node_id, embedding, space_id FROM embedding").fetchall()
        assert sorted(row[0] for row in rows) == sorted(ids_of(odd))
        assert {row[2] for row in rows} == {odd.space_id}
        [(count,)] = connection.execute("SELECT count(*) FROM trajectory WHERE step = 3").fetchall()
        assert count == odd.n_nodes
        near = connection.execute(
            "SELECT b.node_id FROM embedding a, embedding b "
            "WHERE a.node_id = 'n3' AND b.node_id != 'n3' AND NOT b.is_cold "
            "ORDER BY array_cosine_similarity(a.embedding::FLOAT[4], b.embedding::FLOAT[4]) DESC LIMIT 3"
        ).fetchall()
    assert [row[0] for row in near] == odd.neighbors("n3", 3)["node_id"].to_list()


def parse_copy(text: str) -> tuple[str, list[list[str]]]:
    """Read a script by the rules of COPY's text format: backslash escapes, tabs, a line `\\.` at the end."""
    head, _, data = text.partition("FROM stdin;\n")
    body, end, rest = data.rpartition("\\.\n")
    assert end
    assert rest == "COMMIT;\n"
    names = {"t": "\t", "n": "\n", "r": "\r", "b": "\b", "f": "\f", "v": "\v", "\\": "\\"}

    def unescape(field: str) -> str:
        assert field != "\\N"
        return re.sub(r"\\(.)", lambda match: names[match[1]], field)

    return head, [[unescape(field) for field in line.split("\t")] for line in body.split("\n")[:-1]]


def test_pgvector(odd: Run, numbers: Run, tmp_path: Path) -> None:
    for run, kind in ((odd, "text"), (numbers, "bigint")):
        [script] = run.export("pgvector", tmp_path / f"{kind}.sql")
        head, rows = parse_copy(script.read_bytes().decode())
        assert f"node_id {kind} NOT NULL" in head
        assert "embedding vector(4)" in head
        assert [row[0] for row in rows] == [str(i) for i in ids_of(run)]
        found = np.array([[float(x) for x in row[1].strip("[]").split(",")] for row in rows], np.float32)
        np.testing.assert_array_equal(found, run.embedding.numpy())


@pytest.fixture(scope="module")
def running() -> Iterator[Postgres]:
    programs = postgres.find_programs()
    if programs is None:
        pytest.skip("no PostgreSQL here: neither the package pgserver nor the system's")
    with postgres.server(programs) as server:
        yield server


def hostile_ids(mark: Path) -> list[str]:
    """Return ids that psql would act upon if it read them as a script: as SQL, and as commands of its own."""
    sql = [
        "CREATE TABLE owned();",
        "; DROP TABLE kept; --",
        "'); DROP TABLE kept; --",
        "$$; CREATE TABLE owned();",
    ]
    shell = [
        f"\\! touch {mark}",
        f"\\o {mark}",
        f"x\n\\! touch {mark}",
        f"x\r\n\\! touch {mark}\n",
        "\\q",
        "\\i /etc/passwd",
    ]
    ends = [
        "\\.",
        "\\.\nCREATE TABLE owned();",
        "\\N",
        "tab\there",
        "\t\t",
        "back\\",
        "\\\\.",
        "line\nbreak",
        "\x1a",
    ]
    return [*sql, *shell, *ends, *ODD]


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("hostile")
    # Where the server's user may write.
    mark = Path("/tmp") / f"toffee-{folder.parent.name}-{folder.name}"
    ids = sorted({*hostile_ids(mark), *(f"n{i}" for i in range(20))})
    return write(folder, ids, outputs=("embedding",)), mark


@pytest.mark.cluster
@pytest.mark.parametrize("way", ["file", "standard input"])
def test_postgres_without_the_extension_runs_nothing_of_the_data(
    running: Postgres, hostile: tuple[Run, Path], tmp_path: Path, way: str
) -> None:
    run, mark = hostile
    [script] = run.export("pgvector", tmp_path / "vectors.sql")
    # May make tables, but no extension: that fails, whether or not this server has pgvector.
    running.ask("DROP TABLE IF EXISTS kept; DROP ROLE IF EXISTS plain; DROP EXTENSION IF EXISTS vector")
    running.ask("CREATE ROLE plain LOGIN; GRANT ALL ON SCHEMA public TO plain; CREATE TABLE kept()")
    running.ask("ALTER TABLE kept OWNER TO plain")
    try:
        text = script.read_bytes().decode()
        copy = running.socket / "vectors.sql"
        copy.write_bytes(text.encode())
        done = (
            running.psql("-f", str(copy), role="plain")
            if way == "file"
            else running.psql(role="plain", stdin=text)
        )
        assert done.returncode == 3, done.stderr
        assert "extension" in done.stderr
        # One complaint: nothing after it was read.
        assert done.stderr.count("ERROR") == 1
        assert running.ask("SELECT relname FROM pg_class WHERE relnamespace = 'public'::regnamespace") == [
            "kept"
        ]
        assert not mark.exists()
    finally:
        mark.unlink(missing_ok=True)
        running.ask("DROP TABLE IF EXISTS kept, owned; DROP OWNED BY plain; DROP ROLE plain")


@pytest.mark.cluster
def test_postgres_reads_what_was_written(
    running: Postgres, hostile: tuple[Run, Path], tmp_path: Path
) -> None:
    if not running.programs.vector:
        pytest.skip("this PostgreSQL has no pgvector; the package pgserver has")
    run, mark = hostile
    [script] = run.export("pgvector", tmp_path / "vectors.sql")
    copy = running.socket / "vectors.sql"
    whole = script.read_bytes()
    try:
        # Of a script that fails at its last row nothing stays.
        copy.write_bytes(b"[no number".join(whole.rsplit(b"[", 1)))
        assert running.psql("-f", str(copy)).returncode == 3
        assert running.ask("SELECT relname FROM pg_class WHERE relname = 'toffee_embedding'") == []
        assert running.ask("SELECT extname FROM pg_extension WHERE extname = 'vector'") == []
        copy.write_bytes(whole)
        # The script says its encoding itself.
        done = running.psql("-f", str(copy), "-v", "ECHO=none")
        assert done.returncode == 0, done.stderr
        rows = running.ask(
            "SELECT json_build_object('id', node_id, 'v', embedding::text) FROM toffee_embedding"
        )
        found = {row["id"]: json.loads(row["v"]) for row in map(json.loads, rows)}
        vectors = run.embedding.numpy()
        assert set(found) == set(ids_of(run))
        for name, vector in zip(ids_of(run), vectors, strict=True):
            np.testing.assert_array_equal(np.array(found[name], np.float32), vector)
        assert not mark.exists()
        assert running.ask("SELECT DISTINCT space_id FROM toffee_embedding") == [run.space_id]
        # Vectors of another space are refused by the database.
        other = f"INSERT INTO toffee_embedding VALUES ('other', '[1,2,3,4]', '{'0' * 32}')"
        mixed = running.psql("-c", other)
        assert mixed.returncode == 1
        assert "violates check constraint" in mixed.stderr
        # Its own index finds the neighbours that we find, and so does a scan.
        running.ask("CREATE INDEX ON toffee_embedding USING hnsw (embedding vector_cosine_ops)")
        ours = run.neighbors("n3", 5)
        [query] = running.ask("SELECT embedding::text FROM toffee_embedding WHERE node_id = 'n3'")
        asked = (
            f"SELECT json_build_array(node_id, 1 - (embedding <=> '{query}')) FROM toffee_embedding "
            "WHERE node_id <> 'n3' AND vector_norm(embedding) > 0 "
            f"ORDER BY embedding <=> '{query}' LIMIT 5"
        )
        for way, plan in (("seqscan", "Index Scan"), ("indexscan", "Sort")):
            running.ask(f"ALTER ROLE owner SET enable_{way} = off")
            assert any(plan in line for line in running.ask(f"EXPLAIN {asked}"))
            near = [json.loads(row) for row in running.ask(asked)]
            running.ask(f"ALTER ROLE owner RESET enable_{way}")
            assert [row[0] for row in near] == ours["node_id"].to_list()
            np.testing.assert_allclose([row[1] for row in near], ours["similarity"], atol=1e-6)
        # A second time: the table is there, nothing is added, nothing is run.
        again = running.psql("-f", str(copy))
        assert again.returncode == 3
        assert again.stderr.count("ERROR") == 1
        assert running.ask("SELECT count(*) FROM toffee_embedding") == [str(run.n_nodes)]
        assert running.ask("SELECT relname FROM pg_class WHERE relname = 'owned'") == []
    finally:
        mark.unlink(missing_ok=True)
        running.ask("DROP TABLE IF EXISTS toffee_embedding; DROP EXTENSION IF EXISTS vector CASCADE")


def test_duckdb_runs_nothing_of_names(tmp_path: Path) -> None:
    folder = tmp_path / "o'ut\nCREATE TABLE owned(x int);--"
    folder.mkdir()
    run = write(folder, [f"n{i}" for i in range(20)], outputs=("embedding",))
    data = json.loads(run.folder.manifest.read_text())
    for name in (
        "x\nCREATE TABLE owned(x int);\n--",
        "x\r\nCREATE TABLE owned(x int);",
        "x\u2028CREATE TABLE owned(x int);",
    ):
        run.folder.manifest.write_text(json.dumps(data | {"run_id": name}))
        [script] = load_run(run.path).export("duckdb", tmp_path / "views.sql")
        with duckdb.connect() as connection:
            connection.execute(script.read_text())
            assert connection.execute("SELECT count(*) FROM embedding").fetchall() == [(20,)]
            made = connection.execute("SELECT table_name FROM duckdb_tables()").fetchall()
            assert made == []
        # A line per view after the comment: nothing of a name begins a line of its own.
        assert all(
            line.startswith(("-- ", "CREATE OR REPLACE VIEW "))
            for line in script.read_text().split("\n")[:-1]
        )
        script.unlink()


def test_ids_with_nul_are_refused_where_they_would_be_cut(tmp_path: Path) -> None:
    ids = ["a", "a\0", "a\0b", *(f"n{i}" for i in range(20))]
    run = write(tmp_path, ids, outputs=("embedding",))
    assert {"a", "a\0"} <= set(ids_of(run))
    for form in ("word2vec", "numpy", "faiss", "pgvector"):
        with pytest.raises(InputError, match=r"an id that .* cannot hold: got 'a\\x00b?'"):
            run.export(form, tmp_path / form)
        assert not list(tmp_path.glob(f"*{form}*")), "whole or not at all"
    [script] = run.export("duckdb", tmp_path / "views.sql")
    with duckdb.connect() as connection:
        connection.execute(script.read_text())
        rows = connection.execute("SELECT node_id FROM embedding").fetchall()
    assert {row[0] for row in rows} == set(ids)


def test_pyg_arrays(odd: Run) -> None:
    sources, targets = ["n1", "tab\there", "n2"], ["n4", "n1", "n2"]
    arrays = temporal_arrays(odd, sources, targets, np.array([5, 6, 7]))
    rows = [ids_of(odd).index(name) for name in sources]
    assert arrays["src"].tolist() == rows
    assert arrays["src"].dtype == arrays["dst"].dtype == arrays["t"].dtype == np.int64
    assert arrays["msg"].dtype == np.float32
    np.testing.assert_array_equal(arrays["msg"][:, :4], odd.embedding.numpy()[rows])
    np.testing.assert_array_equal(arrays["msg"][:, 4:], odd.embedding_target.numpy()[arrays["dst"]])
    with pytest.raises(InputError, match="equal lengths"):
        temporal_arrays(odd, ["n1"], ["n2"], np.array([1, 2]))


def test_two_spaces(tmp_path: Path) -> None:
    run = write(tmp_path, [f"x{i}" for i in range(20)], bipartite=True, outputs=("embedding",))
    run.export("numpy", tmp_path / "matrix")
    spaces = np.load(tmp_path / "matrix" / "spaces.npy", allow_pickle=False)
    assert spaces.tolist() == run.nodes.polars().sort("row").collect()["space"].to_list()
    path, _ = run.export("word2vec", tmp_path / "vectors.txt")
    names = [line.split(" ")[0] for line in path.read_text().splitlines()[1:]]
    assert names[0].startswith("source/x")
    assert len(set(names)) == run.n_nodes
    _, rows = parse_copy(run.export("pgvector", tmp_path / "v.sql")[0].read_text())
    assert {row[1] for row in rows} == {"source", "target"}


def test_what_is_refused(numbers: Run, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="format"):
        numbers.export("excel", tmp_path / "x")
    (tmp_path / "there").touch()
    with pytest.raises(ConfigError, match="which exists"):
        numbers.export("numpy", tmp_path / "there")
    with pytest.raises(ConfigError, match="mkdir"):
        numbers.export("numpy", tmp_path / "no" / "where")
    with pytest.raises(ConfigError, match="role"):
        numbers.export("numpy", tmp_path / "x", role="both")
    # Both roles of an undirected graph are the same.
    numbers.export("numpy", tmp_path / "x", role="target")
    vectors = np.load(tmp_path / "x" / "vectors.npy", allow_pickle=False)
    np.testing.assert_array_equal(vectors, numbers.embedding.numpy())
    done = CliRunner().invoke(
        cli, ["export", str(numbers.path), "--format", "numpy", "--to", str(tmp_path / "m"), "--json"]
    )
    assert done.exit_code == 0
    assert "ids.npy" in done.output
