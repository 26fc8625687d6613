"""Sources: what is found, how it is cut, what the columns are taken to be."""

from __future__ import annotations

import gzip
import io
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import fsspec
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toffee_dist import ConfigError, InputError
from toffee_dist.ingest.batches import read_fragments
from toffee_dist.ingest.columns import guess_schema
from toffee_dist.ingest.files import Fragment, find_files, fingerprint, group_fragments, list_fragments
from toffee_dist.ingest.job import ingest
from toffee_dist.ingest.summary import Ingested
from toffee_dist.ingest.text import Layout
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import EdgeSettings
from toffee_dist.storage.paths import to_path
from toffee_dist.tasks import run_here

FRAME = pl.DataFrame({"source": [1, 2, 3], "target": [2, 3, 1], "time": [0, 1, 2]})


def guess(path: Path, content: str, **options: Any) -> tuple[Layout, list[str]]:
    path.write_text(content)
    files, _ = find_files([str(path)])
    schema, notes = guess_schema(files, EdgeSettings(**options), LIMITS)
    return next(iter(schema.layouts.values())), notes


def ingest_one(tmp_path: Path, *inputs: str, **options: Any) -> Ingested:
    return ingest(EdgeSettings(inputs=inputs, step=options.pop("step", "1"), **options), tmp_path / "out")


def test_files_folders_globs_and_twice(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "sub/c.parquet", "_SUCCESS", ".crc", "_delta/d.parquet"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        FRAME.write_parquet(tmp_path / name)
    files, notes = find_files([str(tmp_path / "b.parquet"), str(tmp_path), str(tmp_path / "*.parquet")])
    names = [os.path.relpath(file.path, tmp_path) for file in files]
    assert names == ["b.parquet", "a.parquet", "sub/c.parquet"]
    assert any("named twice" in note for note in notes)
    assert any("start with . or _" in note for note in notes)


@pytest.mark.parametrize("name", ["nothing.csv", "*.none", "empty"])
def test_nothing_to_read(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no file to read"):
        find_files([str(tmp_path / name)])


def test_formats_are_recognised_without_extensions(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a")
    FRAME.write_ipc(tmp_path / "b.data")
    (tmp_path / "c.edges").write_text("1 2 3\n")
    (tmp_path / "d").write_bytes(gzip.compress(b"1 2 3\n"))
    files, _ = find_files([str(tmp_path)])
    assert [(file.format, file.codec) for file in files] == [
        ("parquet", ""),
        ("ipc", ""),
        ("text", ""),
        ("text", "gzip"),
    ]


def test_fingerprint_follows_what_was_read(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("1,2,3\n")
    first = fingerprint(find_files([str(path)])[0])
    assert first == fingerprint(find_files([str(path)])[0])
    os.utime(path, ns=(1, 1))
    assert first != fingerprint(find_files([str(path)])[0])


def test_urls(tmp_path: Path) -> None:
    fs = fsspec.filesystem("memory")
    with fs.open("/edges/a.csv", "wb") as handle:
        handle.write(b"1,2,0\n2,3,1\n")
    with fs.open("/edges/b.parquet", "wb") as handle:
        FRAME.write_parquet(handle)
    result = ingest_one(tmp_path, "memory://edges")
    assert (result.summary.rows, result.summary.nodes, result.summary.files) == (5, 3, 2)
    some = EdgeSettings(inputs=("memory://edges/*.csv",), step="1")
    assert ingest(some, tmp_path / "glob").summary.rows == 2
    with pytest.raises(InputError, match="no file to read"):
        find_files(["memory://edges/none.csv"])
    with pytest.raises(ConfigError, match="storage of kind nosuch://"):
        find_files(["nosuch://edges"])


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_hive_partitions(tmp_path: Path, kind: str) -> None:
    for day in (1, 3):
        folder = tmp_path / "edges" / "year=2024" / f"date=2024-01-0{day}"
        folder.mkdir(parents=True)
        frame = FRAME.select("source", "target")
        if kind == "parquet":
            frame.write_parquet(folder / "part.parquet")
        else:
            frame.write_csv(folder / "part.csv")
    result = ingest_one(tmp_path, str(tmp_path / "edges"), step="1d")
    assert (result.summary.steps, result.summary.empty_steps, result.summary.used) == (3, 1, 6)
    assert result.grid.show(2) == "2024-01-03T00:00:00+0000"


@pytest.mark.parametrize(
    ("text", "layout"),
    [
        ("1 2 3\n", Layout(0, 1, 2, None, False, " ")),
        ("1\t2\t3\n", Layout(0, 1, 2, None, False, "\t")),
        ("  1   2 \t 3\n", Layout(0, 1, 2, None, False, " ")),
        ("1,2,3\n", Layout(0, 1, 2, None, False, ",")),
        ("1;2;3\n", Layout(0, 1, 2, None, False, ";")),
        ("% sym\n% 3 2\n1 2 0.5 3\n", Layout(0, 1, 3, 2, False, " ")),
        ("1 2 1700000000 1\n", Layout(0, 1, 2, 3, False, " ")),
        ("a,b,2024-01-01\n", Layout(0, 1, 2, None, False, ",")),
        ("source,target,time\na,b,3\n", Layout("source", "target", "time", None, True, ",")),
        ("src dst ts\na b 3\n", Layout("src", "dst", "ts", None, True, " ")),
        ("# x\nTime,W,V,U\n3,1,b,a\n", Layout("U", "V", "Time", "W", True, ",")),
        (
            "user_id,item_id,timestamp,state,f1,f2\n1,2,3.0,0,1,1\n",
            Layout("user_id", "item_id", "timestamp", None, True, ","),
        ),
    ],
)
def test_guesses(tmp_path: Path, text: str, layout: Layout) -> None:
    found, notes = guess(tmp_path / "e.txt", text, entry="sum")
    assert found == layout
    assert "source = " in notes[0]


def test_columns_that_are_said(tmp_path: Path) -> None:
    text = "a,b,c,d\n1,2,3,4\n"
    layout, _ = guess(tmp_path / "e.csv", text, source="b", target="4", time="1")
    assert (layout.source, layout.target, layout.time) == ("b", 3, 0)
    with pytest.raises(ConfigError, match="--source: got z; allowed: a, b, c, d"):
        guess(tmp_path / "e.csv", text, source="z")
    with pytest.raises(InputError, match="cannot tell which column"):
        guess(tmp_path / "e.csv", text)
    with pytest.raises(InputError, match="2 columns without names"):
        guess(tmp_path / "e.csv", "1,2\n3,4\n")
    with pytest.raises(InputError, match="cannot hold times: got 'x'"):
        guess(tmp_path / "e.csv", "source,target,time\n1,2,x\n")


def test_header_with_names_in_another_order(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("source,target,time\n1,2,0\n")
    (tmp_path / "b.csv").write_text("time,source,target\n9,1,2\n")
    result = ingest_one(tmp_path, str(tmp_path / "*.csv"))
    assert (result.summary.nodes, result.summary.steps) == (2, 10)


def test_ids_of_two_types(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    FRAME.with_columns(pl.col("source", "target").cast(pl.String)).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(InputError, match=r"b.parquet changed its type: got String; allowed: integer"):
        ingest_one(tmp_path, str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet"))
    with pytest.raises(InputError, match=r"a.parquet changed its type: got Int64; allowed: string"):
        ingest_one(tmp_path, str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet"))
    result = ingest_one(tmp_path, str(tmp_path / "*.parquet"), ids="string")
    assert (result.summary.nodes, result.summary.duplicates) == (3, 3)
    mixed = FRAME.with_columns(pl.col("target").cast(pl.String))
    mixed.write_parquet(tmp_path / "m.parquet")
    with pytest.raises(InputError, match="--bipartite"):
        ingest(EdgeSettings(inputs=(str(tmp_path / "m.parquet"),), step="1"), tmp_path / "x")
    config = EdgeSettings(inputs=(str(tmp_path / "m.parquet"),), bipartite=True, step="1")
    two = ingest(config, tmp_path / "x")
    assert (two.summary.nodes, two.summary.self_loops) == (6, 0)


@pytest.mark.parametrize("dtype", [pl.Float64, pl.Boolean, pl.Date])
def test_columns_that_cannot_be_ids(tmp_path: Path, dtype: Any) -> None:
    FRAME.with_columns(pl.col("source").cast(pl.Int32).cast(dtype)).write_parquet(tmp_path / "a.parquet")
    with pytest.raises(InputError, match="cannot hold node ids"):
        ingest_one(tmp_path, str(tmp_path / "a.parquet"))


def test_widths_of_integers_mix(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    FRAME.cast(pl.Int16).write_parquet(tmp_path / "b.parquet")
    FRAME.write_csv(tmp_path / "c.csv")
    FRAME.cast(pl.UInt8).write_ipc(tmp_path / "d.arrow")
    result = ingest_one(tmp_path, str(tmp_path))
    assert (result.summary.nodes, result.summary.duplicates) == (3, 9)


def test_finer_timestamps_than_the_first_file(tmp_path: Path) -> None:
    stamps = FRAME.with_columns(pl.col("time").cast(pl.Datetime("us")))
    stamps.write_parquet(tmp_path / "a.parquet")
    stamps.cast({"time": pl.Datetime("ns")}).write_parquet(tmp_path / "b.parquet")
    with pytest.raises(InputError, match="changed its type"):
        ingest_one(tmp_path, str(tmp_path), step="1d")
    reverse = [str(tmp_path / "b.parquet"), str(tmp_path / "a.parquet")]
    assert ingest_one(tmp_path, *reverse, step="1d").summary.duplicates == 3


def test_hours_that_clocks_repeat_or_skip(tmp_path: Path) -> None:
    rows = "a,b,2024-03-31T03:30:00\na,b,2024-10-27T03:30:00\na,b,2024-10-27T04:30:00\n"
    (tmp_path / "e.csv").write_text(rows)
    with pytest.raises(InputError, match="row 1: time cannot be read"):
        ingest_one(tmp_path, str(tmp_path / "e.csv"), zone="Europe/Athens", step="1h")
    result = ingest_one(
        tmp_path, str(tmp_path / "e.csv"), zone="Europe/Athens", step="1h", on_bad_rows="skip"
    )
    # 03:30 comes twice that night; the first is meant, so two hours lie between it and 04:30.
    assert result.tensor().steps.tolist() == [0, 2]


@given(
    st.lists(st.integers(0, 10**6), min_size=1, max_size=60),
    st.integers(1, 40),
    st.integers(8, 64),
    st.booleans(),
    st.sampled_from([b"\n", b"\r\n"]),
    st.booleans(),
)
def test_pieces_of_text_are_the_whole(
    tmp_path_factory: pytest.TempPathFactory,
    times: list[int],
    size: int,
    block: int,
    last: bool,
    end: bytes,
    remote: bool,
) -> None:
    path = to_path("memory://pieces/e.csv") if remote else tmp_path_factory.mktemp("t") / "e.csv"
    data = end.join(b"1,2,%d" % time for time in times) + (end if last else b"")
    path.write_bytes(b"# comment" + end + data)
    limits = Limits(text_bytes=size, head_bytes=16, text_block_bytes=block)
    fragments = list_fragments(find_files([str(path)])[0], limits)
    seen, comments = [], 0
    for batch in read_fragments(fragments, {".csv": Layout(0, 1, 2, separator=",")}, limits):
        seen += batch.frame["time"].to_list()
        comments += batch.comments
        assert sum(piece.rows for piece in batch.pieces) == batch.frame.height
    assert seen == [str(time) for time in times]
    assert comments == 1


@given(st.lists(st.integers(0, 30), min_size=1, max_size=8), st.integers(1, 50), st.integers(1, 20))
def test_pieces_of_a_table_are_whole_row_groups_where_it_is_remote(
    groups: list[int], task_rows: int, batch_rows: int
) -> None:
    path, times, data = to_path("memory://pieces/e.parquet"), list(range(sum(groups))), io.BytesIO()
    schema = pa.schema([(name, pa.int64()) for name in ("source", "target", "time")])
    with pq.ParquetWriter(data, schema) as writer:
        for rows, stop in zip(groups, accumulate(groups), strict=True):
            own = times[stop - rows : stop]
            writer.write_table(pa.table([own] * 3, schema))
    path.write_bytes(data.getvalue())
    limits = Limits(table_bytes=100, task_rows=task_rows, batch_rows=batch_rows)
    fragments = list_fragments(find_files([str(path)])[0], limits)
    assert {fragment.start for fragment in fragments} <= {0, *accumulate(groups)}
    assert len(fragments) == 1 or sum(fragment.stop - fragment.start for fragment in fragments) == len(times)
    layouts = {".parquet": Layout("source", "target", "time")}
    frames = [batch.frame for batch in read_fragments(fragments, layouts, limits)]
    assert [time for frame in frames for time in frame["time"].to_list()] == times


@pytest.mark.parametrize("name", ["a.parquet", "a.csv", "a.csv.gz", "a.arrow"])
@pytest.mark.parametrize("size", ["the same size", "another size"])
def test_a_file_behind_a_url_that_changes_while_it_is_read(tmp_path: Path, name: str, size: str) -> None:
    path = to_path(f"memory://changing/{name}")

    def write(frame: pl.DataFrame) -> None:
        data = io.BytesIO()
        if name == "a.parquet":
            frame.write_parquet(data)
        elif name == "a.arrow":
            frame.write_ipc(data)
        else:
            frame.write_csv(data)
        path.write_bytes(gzip.compress(data.getvalue()) if name.endswith("gz") else data.getvalue())

    def run(function: Callable[[Any], Any], tasks: Iterable[Any]) -> Iterator[Any]:
        """Have it replaced before the tasks read it, after it was listed and looked at."""
        other = FRAME.select("source", "target", time=2 - pl.col("time"))
        write(other if size == "the same size" else pl.concat([other] * 9))
        return run_here(function, tasks)

    write(FRAME)
    settings = EdgeSettings(inputs=(str(path),), step="1")
    assert ingest(settings, tmp_path / "as-it-was").summary.rows == 3
    with pytest.raises(InputError, match=rf"{name} changed while it was read"):
        ingest(settings, tmp_path / "out", run)
    assert not (tmp_path / "out").exists()


def test_tasks_are_bounded_and_keep_the_order(tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    file = find_files([str(tmp_path)])[0][0]
    fragments = [Fragment(index, file) for index in range(2500)]
    groups = list(group_fragments(fragments, LIMITS))
    assert [fragment.index for group in groups for fragment in group] == list(range(2500))
    assert max(len(group) for group in groups) <= LIMITS.files_per_task
    assert len(groups) == 3


def test_marks_quotes_and_blank_lines(tmp_path: Path) -> None:
    text = '\ufeffsource,target,time\r\n"a,1","b ""x""",1\r\n"a\nb",c,2\r\n\r\n'
    (tmp_path / "e.csv").write_bytes(text.encode())
    result = ingest_one(tmp_path, str(tmp_path / "e.csv"))
    nodes = pl.read_parquet(tmp_path / "out" / "nodes")["id"].to_list()
    assert nodes == sorted(["a,1", 'b "x"', "a\nb", "c"])
    assert result.summary.rows == 2


def test_quoted_line_breaks_are_refused_where_they_would_be_cut(tmp_path: Path) -> None:
    rows = '"a\nb",c,2\n' + "x,y,3\n" * 20
    (tmp_path / "e.csv").write_text("source,target,time\n" + rows)
    config = EdgeSettings(inputs=(str(tmp_path / "e.csv"),), step="1")
    assert ingest(config, tmp_path / "whole").summary.rows == 21
    with pytest.raises(InputError, match=r"quoted line break.*one row per line in text files above"):
        ingest(config, tmp_path / "blocks", limits=Limits(text_block_bytes=100))
    with pytest.raises(InputError, match="above 16 MiB"):
        ingest(config, tmp_path / "pieces", limits=Limits(text_bytes=30))


def test_commas_in_ids_are_no_separator(tmp_path: Path) -> None:
    file = tmp_path / "edges.txt"
    file.write_text("source target time weight\n" + ", , 2024-03-20 0.0\n" * 17)
    schema, _ = guess_schema(find_files([str(file)])[0], EdgeSettings(), LIMITS)
    [layout] = schema.layouts.values()
    assert layout.separator == " "
