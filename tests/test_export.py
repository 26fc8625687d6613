"""Every export is read back by the program it is for, or by that program's rules."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import polars as pl
import pytest
from click.testing import CliRunner

from tests.clusters import job
from toffee_dist import Run, load_run, plan
from toffee_dist.cli import cli
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.export import temporal_arrays
from toffee_dist.pipeline import start_run

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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plan, "PART_BYTES", 1 << 9)
        start_run(job(folder / "edges.parquet", folder / "out", rank=4, **options))
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
    [path] = numbers.export("word2vec", tmp_path / "vectors.txt")
    head, *lines = path.read_text().splitlines()
    assert head == f"{numbers.n_nodes} 4"
    assert [line.split(" ")[0] for line in lines] == [str(i) for i in ids_of(numbers)]
    found = np.array([[float(x) for x in line.split(" ")[1:]] for line in lines], dtype=np.float32)
    np.testing.assert_array_equal(found, numbers.embedding.numpy())
    with pytest.raises(InputError, match="word2vec text cannot hold"):
        odd.export("word2vec", tmp_path / "odd.txt")
    # Whole or not at all.
    assert [item.name for item in tmp_path.iterdir()] == ["vectors.txt"]


def test_numpy(odd: Run, numbers: Run, tmp_path: Path) -> None:
    for run in (odd, numbers):
        to = tmp_path / run.path.name
        run.export("numpy", to)
        vectors, ids = (np.load(to / f"{name}.npy", allow_pickle=False) for name in ("vectors", "ids"))
        assert vectors.flags.c_contiguous
        np.testing.assert_array_equal(vectors, run.embedding.numpy())
        assert ids.tolist() == ids_of(run)
    odd.export("numpy", tmp_path / "targets", role="target")
    targets = np.load(tmp_path / "targets" / "vectors.npy", allow_pickle=False)
    np.testing.assert_array_equal(targets, odd.embedding_target.numpy())
    odd.export("numpy", tmp_path / "then", at=3)
    then = np.load(tmp_path / "then" / "vectors.npy", allow_pickle=False)
    np.testing.assert_array_equal(then, odd.trajectory.numpy()[3])


def test_faiss_finds_the_neighbours_that_we_find(numbers: Run, tmp_path: Path) -> None:
    faiss = pytest.importorskip("faiss", reason="faiss-cpu is not installed")
    numbers.export("faiss", tmp_path / "matrix")
    vectors = np.load(tmp_path / "matrix" / "vectors.npy", allow_pickle=False)
    ids = np.load(tmp_path / "matrix" / "ids.npy", allow_pickle=False)
    index = faiss.IndexIDMap(faiss.IndexFlatIP(vectors.shape[1]))
    index.add_with_ids(vectors, ids)
    scores, found = index.search(vectors[7:8], 6)
    ours = numbers.neighbors(ids[7], 5)
    assert found[0].tolist()[0] == ids[7]
    np.testing.assert_allclose(scores[0][1:], ours["similarity"], atol=1e-6)


def test_duckdb_reads_the_parquet_files(odd: Run, tmp_path: Path) -> None:
    [script] = odd.export("duckdb", tmp_path / "views.sql")
    with duckdb.connect() as connection:
        connection.execute(script.read_text())
        rows = connection.execute("SELECT node_id, embedding FROM embedding").fetchall()
        assert sorted(row[0] for row in rows) == sorted(ids_of(odd))
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
    assert not rest
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
    [path] = run.export("word2vec", tmp_path / "vectors.txt")
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
    with pytest.raises(InputError, match="no embedding_target"):
        numbers.export("numpy", tmp_path / "x", role="target")
    done = CliRunner().invoke(
        cli, ["export", str(numbers.path), "--format", "numpy", "--to", str(tmp_path / "m"), "--json"]
    )
    assert done.exit_code == 0
    assert "ids.npy" in done.output
