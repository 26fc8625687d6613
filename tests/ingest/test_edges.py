"""The ingest against pandas: every source, id, time and grid; any split; threads and processes."""

from __future__ import annotations

import gzip
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import polars as pl
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests import naive_edges
from tests.harness.tables import FILES, TIME_KINDS, Table, tables, write
from tests.naive_edges import assert_same
from toffee_dist import ConfigError, InputError, TemporalTensor
from toffee_dist.cluster.client import cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.ingest import aggregate
from toffee_dist.ingest.aggregate import Packing, pack
from toffee_dist.ingest.job import ingest
from toffee_dist.ingest.summary import Ingested
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import EdgeSettings, TimeUnit
from toffee_dist.storage.tensors import open_tensor, stage_tensor
from toffee_dist.tasks import RunTasks, run_here
from toffee_dist.timegrid import TimeGrid

CALENDAR_STEPS = ("1d", "1w", "6h", "2d", "distinct", "bins:5")
NUMBER_STEPS = ("7", "1", "distinct", "bins:5")
ENTRIES = st.sampled_from(["binary", "count", "sum"])
PAIR_WEIGHTS = st.sampled_from(["raw", "log", "unit"])
# Many parts, buckets, bins and blocks of few rows.
SMALL = Limits(
    table_bytes=5000,
    text_bytes=5000,
    batch_rows=250,
    text_block_bytes=3000,
    bucket_ids=250,
    bin_entries=100,
    block_entries=400,
)


def options_for(table: Table, kind: str) -> dict[str, Any]:
    text = kind not in ("parquet", "arrow")
    ids = "string" if table.id_kind in ("string", "categorical") else "integer"
    said: dict[str, Any] = {"ids": ids} if text else {}
    if kind == "plain.csv":
        said |= {"source": "1", "target": "2", "time": "3", "header": "no"}
    return {"zone": table.zone, **said}


def read_nodes(folder: Path) -> dict[tuple[int, Any], int]:
    frame = pl.concat(pl.read_parquet(path) for path in sorted((folder / "nodes").glob("*.parquet")))
    return {(space, node): row for node, row, space in frame.select("id", "row", "space").iter_rows()}


def check(result: Ingested, expected: naive_edges.Expected, n_rows: int) -> None:
    assert_same(result.tensor(), expected.tensor)
    assert read_nodes(result.folder) == expected.rows
    summary = result.summary
    assert summary.rows == summary.used == n_rows
    assert (summary.self_loops, summary.duplicates) == (expected.self_loops, expected.duplicates)
    assert summary.empty_steps == expected.tensor.n_steps - len(set(expected.tensor.steps.tolist()))


@settings(max_examples=5 * settings().max_examples)
@given(tables(), st.data())
def test_round_trip(table: Table, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(FILES), label="file")
    step = data.draw(st.sampled_from(CALENDAR_STEPS if table.instant else NUMBER_STEPS), label="step")
    directed, bipartite = data.draw(st.booleans()), data.draw(st.booleans())
    entry: Any = data.draw(ENTRIES)
    pair_weight: Any = data.draw(PAIR_WEIGHTS)
    # Text has no type for integers beyond 64 bits with sign; a # in the first place is a comment.
    assume(not (table.id_kind == "unsigned" and kind not in ("parquet", "arrow")))
    assume(not (kind == "plain.csv" and str(table.frame["source"][0]).startswith(("#", "%"))))
    weight = {"weight": "4" if kind == "plain.csv" else "weight"} if entry == "sum" else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(table.frame, folder / f"edges.{kind}")
        config = EdgeSettings(
            inputs=(str(folder / f"edges.{kind}"),),
            bipartite=bipartite,
            undirected=not directed,
            entry=entry,
            pair_weight=pair_weight,
            step=step,
            time_unit=cast(TimeUnit, table.unit),
            **options_for(table, kind),
            **weight,
        )
        result = ingest(config, folder / "out")
        expected = naive_edges.expect(
            table.exact,
            step=step,
            zone=table.zone if table.instant else None,
            directed=directed,
            bipartite=bipartite,
            entry=entry,
            pair_weight=pair_weight,
        )
        if step == "bins:5" and table.instant:
            # Bins are cut in ticks of the column; the oracle must count in the same ones.
            ticks = 10**9 // result.grid.scale.ticks
            exact = table.exact.assign(time=[time // ticks for time in table.exact["time"]])
            expected = naive_edges.expect(
                exact,
                step=step,
                zone=None,
                directed=directed,
                bipartite=bipartite,
                entry=entry,
                pair_weight=pair_weight,
            )
        check(result, expected, len(table.exact))
        assert TimeGrid.from_json(json.loads(json.dumps(result.grid.to_json()))) == result.grid
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


@given(tables(id_kinds=("integer", "gaps", "categorical"), max_rows=40), st.data())
def test_any_split_gives_the_same_bits(table: Table, data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(["parquet", "arrow", "csv", "tsv.zst"]))
    order = data.draw(st.permutations(range(table.frame.height)))
    cuts = sorted(data.draw(st.lists(st.integers(0, table.frame.height), max_size=5)))
    config: dict[str, Any] = {
        **options_for(table, kind),
        "weight": "weight",
        "entry": "sum",
        "step": "bins:4",
        "time_unit": table.unit,
        "undirected": data.draw(st.booleans()),
        "pair_weight": data.draw(PAIR_WEIGHTS),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(table.frame, folder / f"whole.{kind}")
        whole = ingest(EdgeSettings(inputs=(str(folder / f"whole.{kind}"),), **config), folder / "whole")
        (folder / "split").mkdir()
        shuffled = table.frame[order]
        for index, (a, b) in enumerate(zip([0, *cuts], [*cuts, table.frame.height], strict=True)):
            # A table of no rows is no trouble; text of no rows still has its header.
            write(shuffled[a:b], folder / "split" / f"{index}.{kind}")
        split = ingest(EdgeSettings(inputs=(str(folder / "split"),), **config), folder / "out")
        assert_same(split.tensor(), whole.tensor())
        assert read_nodes(split.folder) == read_nodes(whole.folder)


def random_frame(seed: int, n_rows: int, n_ids: int) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    ids = rng.integers(-(2**62), 2**62, n_ids)
    return pl.DataFrame(
        {
            "src": ids[rng.integers(0, n_ids, n_rows)],
            "dst": ids[(n_ids * rng.random(n_rows) ** 3).astype(int)],
            "ts": 1_700_000_000 + rng.integers(0, 40 * 86400, n_rows),
            "w": rng.normal(size=n_rows),
        }
    )


def split_files(frame: pl.DataFrame, folder: Path, n_files: int) -> str:
    folder.mkdir()
    for index in range(n_files):
        frame[index::n_files].write_parquet(folder / f"{index}.parquet")
    return str(folder)


@pytest.fixture(scope="module")
def clusters() -> Iterator[dict[str, RunTasks]]:
    with cluster("threads", 3) as threads, cluster("processes", 2) as processes:
        yield {"here": run_here, "threads": runner(threads), "processes": runner(processes)}


@pytest.mark.cluster
@pytest.mark.parametrize("entry", ["binary", "count", "sum"])
@pytest.mark.parametrize("directed", [True, False])
def test_threads_and_processes_give_the_same_bits(
    clusters: dict[str, RunTasks], tmp_path: Path, entry: Any, directed: bool
) -> None:
    frame = random_frame(1, 20_000, 500)
    results = []
    for index, (n_files, where) in enumerate(
        [(1, "here"), (7, "threads"), (13, "processes"), (2, "processes")]
    ):
        folder = split_files(frame, tmp_path / str(index), n_files)
        config = EdgeSettings(inputs=(folder,), entry=entry, undirected=not directed)
        results.append(ingest(config, tmp_path / f"out{index}", clusters[where]))
    for result in results[1:]:
        assert_same(result.tensor(), results[0].tensor())
        assert read_nodes(result.folder) == read_nodes(results[0].folder)


@pytest.mark.parametrize("kind", ["parquet", "csv", "csv.gz"])
@pytest.mark.parametrize("entry", ["binary", "count", "sum"])
@pytest.mark.parametrize("bipartite", [True, False])
def test_many_small_tasks_give_the_same_bits(tmp_path: Path, kind: str, entry: Any, bipartite: bool) -> None:
    frame = random_frame(2, 1500, 300).rename({"src": "source", "dst": "target", "ts": "time", "w": "weight"})
    write(frame, tmp_path / f"edges.{kind}")
    config = EdgeSettings(
        inputs=(str(tmp_path / f"edges.{kind}"),),
        ids="integer",
        entry=entry,
        bipartite=bipartite,
        undirected=not bipartite,
    )
    counted: list[str] = []

    def run(function: Any, items: Any) -> Iterator[Any]:
        for item in items:
            counted.append(function.__name__)
            yield function(item)

    result = ingest(config, tmp_path / "out", run, limits=SMALL)
    assert counted.count("merge_bucket") > 1
    assert counted.count("merge_block") > 1
    assert counted.count("scan") > 1 or kind == "csv.gz"
    exact = frame.to_pandas().assign(time=[t * 10**9 for t in frame["time"]])
    options = {"step": "1d", "zone": "UTC", "directed": bipartite, "bipartite": bipartite}
    expected = naive_edges.expect(exact, **options, entry=entry, pair_weight="unit")  # type: ignore[arg-type]
    check(result, expected, 1500)


@given(st.integers(0, 2**32), st.integers(2, 70), st.integers(1, 9), st.booleans())
def test_words_too_long_for_one_sort(seed: int, n_nodes: int, n_steps: int, weighted: bool) -> None:
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, n_nodes, (2, 50))
    t = rng.integers(0, n_steps, 50)
    value = rng.normal(size=50) if weighted else None
    packing = Packing(n_nodes, n_steps, min(5, n_nodes))
    whole = pack(packing, i, j, t, value)
    bits = aggregate.WORD_BITS
    try:
        aggregate.WORD_BITS = 1
        short = pack(packing, i, j, t, value)
    finally:
        aggregate.WORD_BITS = bits
    np.testing.assert_array_equal(whole[0], short[0])
    np.testing.assert_array_equal(whole[2], short[2])


@pytest.mark.parametrize("entry", ["binary", "count"])
def test_equal_words_in_two_bins_are_two_entries(tmp_path: Path, entry: Any) -> None:
    limits = Limits(bin_entries=1)
    result = simple(tmp_path, "a,a,0\nb,a,0\n", step="1", entry=entry, pair_weight="raw", limits=limits)
    wanted = TemporalTensor.from_events([0, 1], [0, 0], [0, 0], entry=entry, pair_weight="raw")
    assert_same(result.tensor(), wanted)


def test_bins_are_enough_for_the_words() -> None:
    packing = Packing.choose(10**9, 1000, 10**6, LIMITS)
    assert packing.pair_bits + (packing.bin_rows - 1).bit_length() <= 64
    assert packing.n_bins * packing.bin_rows >= 10**9


@pytest.mark.parametrize(("n_nodes", "n_events"), [(10**6, 10**7), (10**7, 10**8)])
def test_a_block_is_bounded_where_low_ids_are_the_busy_ones(n_nodes: int, n_events: int) -> None:
    packing = Packing.choose(n_nodes, 90, n_events, LIMITS)
    # A share x of the rows has the square root of x of the events, as old users have in many a graph.
    bounds = np.minimum(np.arange(packing.n_bins + 1) * packing.bin_rows / n_nodes, 1)
    per_bin = np.diff(n_events * np.sqrt(bounds)).astype(np.int64)
    blocks = aggregate.choose_blocks(per_bin, LIMITS)
    assert max(per_bin[first:last].sum() for first, last in blocks) < 2 * LIMITS.block_entries


def simple(
    tmp_path: Path, rows: str, name: str = "edges.csv", limits: Limits = LIMITS, **options: Any
) -> Ingested:
    (tmp_path / name).write_text(rows)
    settings = EdgeSettings(inputs=(str(tmp_path / name),), **options)
    return ingest(settings, tmp_path / "out", limits=limits)


def test_self_loops_duplicates_and_unsorted_time(tmp_path: Path) -> None:
    result = simple(tmp_path, "a,b,5\na,a,1\na,b,5\nb,a,0\n", entry="count", pair_weight="raw", step="1")
    assert (result.summary.self_loops, result.summary.duplicates, result.summary.steps) == (1, 1, 6)
    wanted = TemporalTensor.from_events(
        [0, 0, 0, 1], [1, 0, 1, 0], [5, 1, 5, 0], entry="count", pair_weight="raw"
    )
    assert_same(result.tensor(), wanted)


def test_negative_weights_are_for_sums(tmp_path: Path) -> None:
    rows = "u,v,w,t\n1,2,-1.5,0\n1,2,1.5,0\n2,1,-3,1\n"
    result = simple(tmp_path, rows, entry="sum", pair_weight="raw", step="1")
    assert result.tensor().values.tolist() == [-3.0]
    assert (result.summary.cancelled, result.summary.nodes) == (1, 2)
    with pytest.raises(ConfigError, match="--entry sum"):
        EdgeSettings(inputs=("x",), weight="w", entry="binary")


def test_all_sums_cancel(tmp_path: Path) -> None:
    rows = "u,v,w,t\n1,2,-1.5,0\n1,2,1.5,0\n"
    result = simple(tmp_path, rows, entry="sum", step="1")
    assert (result.tensor().n_entries, result.tensor().n_nodes, result.summary.empty_steps) == (0, 2, 1)


@pytest.mark.parametrize(
    ("row", "kind"),
    [
        (",b,3,1", "source is null"),
        ("a,,3,1", "target is null"),
        ("a,b,,1", "time is null"),
        ("a,b,soon,1", "time cannot be read"),
        ("a,b,3,", "weight is null"),
        ("a,b,3,nan", "weight is not a number"),
        ("a,b,3,x", "weight is not a number"),
        ("a,b,3,-inf", "weight is infinite"),
        ("a,b,3,1e99", "weight is outside"),
        ("a,b,9223372036854775807,1", "time is out of range"),
    ],
)
def test_bad_rows(tmp_path: Path, row: str, kind: str) -> None:
    rows = "source,target,time,weight\nx,y,1,1\n" + row + "\nx,z,2,1\n"
    with pytest.raises(InputError, match="1 of 3 rows are invalid") as caught:
        simple(tmp_path, rows, entry="sum", step="1")
    assert kind in str(caught.value)
    assert "row 2" in str(caught.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["edges.csv"]
    result = simple(tmp_path, rows, entry="sum", step="1", on_bad_rows="skip")
    assert sum(result.summary.skipped.values()) == 1
    assert (result.summary.rows, result.summary.used, result.summary.nodes) == (3, 2, 3)
    assert kind in result.summary.examples[0]


@pytest.mark.parametrize("bad", [None, float("nan"), float("inf")])
def test_bad_rows_of_tables(tmp_path: Path, bad: float | None) -> None:
    frame = pl.DataFrame({"u": [1, 2, 3], "v": [2, 3, 1], "w": [1.0, bad, 2.0], "t": [1.0, 2.0, bad]})
    frame.write_parquet(tmp_path / "e.parquet")
    config = EdgeSettings(inputs=(str(tmp_path / "e.parquet"),), entry="sum", step="1", on_bad_rows="skip")
    summary = ingest(config, tmp_path / "out").summary
    assert (summary.used, sum(summary.skipped.values())) == (1, 2)


@pytest.mark.parametrize(("piece", "block"), [(1000, 1 << 20), (1 << 20, 100), (1000, 100)])
def test_rows_of_bad_rows_count_from_the_start_of_the_file(tmp_path: Path, piece: int, block: int) -> None:
    limits = Limits(text_bytes=piece, text_block_bytes=block, head_bytes=300)
    lines = [f"{k},{k + 1},{k}" for k in range(1000)]
    lines[737] = "1,2,x"
    with pytest.raises(InputError, match="row 738: time cannot be read"):
        simple(tmp_path, "\n".join(lines), step="1", limits=limits)


def test_integers_that_are_not_plain(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k + 1},{k}\n" for k in range(1500)) + "007,1,3\n"
    with pytest.raises(InputError, match="not a plain integer"):
        simple(tmp_path, rows, step="1")
    result = simple(tmp_path, rows, step="1", ids="string")
    assert result.summary.nodes == 1502


def test_window(tmp_path: Path) -> None:
    rows = "".join(f"{k},{k + 1},2024-01-{k:02d}T12:00:00\n" for k in range(1, 31))
    result = simple(tmp_path, rows, since="2024-01-11", until="2024-01-21")
    assert (result.summary.outside, result.summary.used, result.summary.steps) == (20, 10, 10)
    assert result.summary.nodes == 11
    last = ingest(EdgeSettings(inputs=(str(tmp_path / "edges.csv"),), last="7d"), tmp_path / "last")
    assert (last.summary.steps, last.summary.used, last.summary.nodes) == (7, 7, 8)
    assert last.grid.show(0) == "2024-01-24T00:00:00+0000"
    with pytest.raises(InputError, match="outside the window"):
        ingest(EdgeSettings(inputs=(str(tmp_path / "edges.csv"),), since="2030-01-01"), tmp_path / "none")
    config = EdgeSettings(inputs=(str(tmp_path / "edges.csv"),), since="2024-02-01", until="2024-01-01")
    with pytest.raises(ConfigError, match="since before until"):
        ingest(config, tmp_path / "none")
    with pytest.raises(ConfigError, match="one of them"):
        EdgeSettings(inputs=("x",), since="1", last="7d")


def test_empty_steps_exist(tmp_path: Path) -> None:
    result = simple(tmp_path, "1,2,2024-01-01\n1,2,2024-01-10\n")
    assert (result.summary.steps, result.summary.empty_steps) == (10, 8)
    assert result.tensor().steps.tolist() == [0, 9]


def test_known_nodes_keep_their_rows(tmp_path: Path) -> None:
    first = simple(tmp_path, "m,c,1\nc,x,2\n", step="1")
    (tmp_path / "more.csv").write_text("a,m,1\nz,b,2\n")
    config = EdgeSettings(inputs=(str(tmp_path / "more.csv"),), step="1", known=str(first.folder))
    second = ingest(config, tmp_path / "second")
    before, after = read_nodes(first.folder), read_nodes(second.folder)
    assert before == {(0, "c"): 0, (0, "m"): 1, (0, "x"): 2}
    assert after == {**before, (0, "a"): 3, (0, "b"): 4, (0, "z"): 5}
    assert (second.summary.nodes, second.summary.new_nodes) == (6, 3)
    (tmp_path / "ints.csv").write_text("1,2,1\n")
    with pytest.raises(InputError, match="changed their type"):
        ingest(config.changed(inputs=(str(tmp_path / "ints.csv"),)), tmp_path / "x")


@pytest.mark.parametrize("nested", [True, False])
def test_ingests_of_the_version_before_are_known(tmp_path: Path, nested: bool) -> None:
    first = simple(tmp_path, "m,c,1\nc,x,2\n", step="1")
    manifest = json.loads((first.folder / "ingest.json").read_text())
    assert (manifest["config"]["step"], manifest["config"]["bipartite"]) == ("1", False)
    assert set(manifest["config"]) == set(EdgeSettings.model_fields)
    if nested:
        manifest["config"] = {"columns": {"bipartite": False}}
        (first.folder / "ingest.json").write_text(json.dumps(manifest))
    config = EdgeSettings(inputs=(str(tmp_path / "edges.csv"),), step="1", known=str(first.folder))
    assert ingest(config, tmp_path / "second").summary.new_nodes == 0
    with pytest.raises(ConfigError, match="one space of nodes"):
        ingest(config.changed(bipartite=True), tmp_path / "third")


def test_no_inputs_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inputs: got none"):
        ingest(EdgeSettings(), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_existing_output_is_refused(tmp_path: Path) -> None:
    simple(tmp_path, "1,2,3\n", step="1")
    with pytest.raises(ConfigError, match="not empty"):
        simple(tmp_path, "1,2,3\n", step="1")


def test_staged_tensor(tmp_path: Path) -> None:
    tensor = TemporalTensor.from_events([0, 1], [1, 1], [0, 2])
    stage_tensor(tensor, tmp_path / "t")
    opened = open_tensor(tmp_path / "t")
    assert_same(opened, tensor)
    assert isinstance(opened.values.base, np.memmap)
    (tmp_path / "t" / "steps.npy").write_bytes(b"junk")
    with pytest.raises(InputError, match="no staged tensor"):
        open_tensor(tmp_path / "t")


@pytest.mark.data
@pytest.mark.parametrize(
    ("name", "options", "rows", "nodes", "steps", "empty", "pairs", "loops"),
    [
        ("fb-forum.edges", {}, 33_720, 899, 165, 0, 7_089, None),
        (
            "fb-forum.edges",
            {"zone": "America/Los_Angeles"},
            33_720,
            899,
            166,
            0,
            7_089,
            None,
        ),
        ("email-Eu-core-temporal.txt.gz", {"time_unit": "s"}, 332_334, 986, 804, 804 - 526, 24_929, 0),
        (
            "ia-primary-school-proximity.edges",
            {"step": "distinct", "undirected": True},
            125_773,
            242,
            3_100,
            0,
            None,
            0,
        ),
        (
            "ia-contacts_hypertext2009.edges",
            {"step": "distinct", "undirected": True},
            20_818,
            113,
            5_246,
            0,
            None,
            0,
        ),
        (
            "ia-workplace-contacts.edges",
            {"step": "distinct", "undirected": True},
            9_827,
            92,
            7_104,
            0,
            None,
            0,
        ),
        (
            "aves-wildbird-network.edges",
            {"step": "1", "undirected": True, "entry": "sum"},
            11_900,
            202,
            6,
            0,
            None,
            0,
        ),
        ("sx-mathoverflow.txt.gz", {"step": "1w"}, 506_550, 24_818, 336, 0, 239_978, 116_109),
        ("sx-mathoverflow.txt.gz", {"step": "1d"}, 506_550, 24_818, 2_351, 1, 239_978, 116_109),
    ],
)
def test_real_graphs(
    shared_data: Path,
    tmp_path: Path,
    name: str,
    options: dict[str, Any],
    rows: int,
    nodes: int,
    steps: int,
    empty: int | None,
    pairs: int | None,
    loops: int | None,
) -> None:
    summary = ingest(EdgeSettings(inputs=(str(shared_data / name),), **options), tmp_path / "out").summary
    assert (summary.rows, summary.used, summary.nodes, summary.steps) == (rows, rows, nodes, steps)
    assert empty is None or summary.empty_steps == empty
    assert pairs is None or summary.pairs == pairs
    assert loops is None or summary.self_loops == loops
    # The README of the data names no pairs: count them, and the self-loops, line by line.
    path = shared_data / name
    lines = gzip.open(path, "rt") if path.suffix == ".gz" else path.open()
    with lines:
        links = [tuple(line.replace(",", " ").split()[:2]) for line in lines]
    assert summary.self_loops == sum(i == j for i, j in links)
    both = [(j, i) for i, j in links] if options.get("undirected") else []
    assert summary.pairs == len({*links, *both})


def test_short_lines_are_bad_rows(tmp_path: Path) -> None:
    rows = "source,target,time\n" + "x,y,1\n" * 30 + "x,y\n\n   \nx,y,2,more\n"
    with pytest.raises(InputError, match=r"1 of 32 rows.*\n.*row 31: time is null"):
        simple(tmp_path, rows, step="1")


def test_time_kinds_are_all_generated() -> None:
    assert len(set(TIME_KINDS)) == 11
