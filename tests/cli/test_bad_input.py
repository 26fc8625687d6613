"""Bad input is bad input: exit code 2 or 3 at once, in bounded memory, with nothing left; never a hang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest

from tests.harness import clusters
from tests.harness.refreshes import write_days
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cli import main
from toffee_dist.cluster.mapping import TaskError, _attempt, _result, _StallError
from toffee_dist.cluster.watchdog import Watch
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest.files import find_files, list_fragments
from toffee_dist.limits import LIMITS
from toffee_dist.results.run import load_run
from toffee_dist.settings import EdgeSettings, JobConfig, RuntimeSettings
from toffee_dist.storage.files import read_array, read_json, save_array
from toffee_dist.storage.runs import RunFolder, list_runs
from toffee_dist.timegrid import TimeScale, build_grid, last_window

MIB = 2**20


def run_toffee(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Run the command here; return its exit code and what it says."""
    code = 0
    try:
        main(list(arguments))
    except SystemExit as stop:
        code = int(stop.code or 0)
    return code, capsys.readouterr().err


def child(*arguments: str, seconds: float = 60) -> tuple[int, str, int]:
    """Run the command in a process of its own; return exit code, words and its peak memory in bytes."""
    watch = "import resource,sys; from toffee_dist.cli import main\ntry: main(sys.argv[1:])\nfinally: "
    watch += "print('PEAK', [l.split()[1] for l in open('/proc/self/status') if l.startswith('VmHWM')][0])"
    done = subprocess.run(
        [sys.executable, "-c", watch, *arguments],
        env=os.environ | clusters.ENVIRONMENT | {"POLARS_MAX_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    peak = int(done.stdout.rpartition("PEAK ")[2]) * 1024
    return done.returncode, done.stderr, peak


def edges(path: Path, time: pl.Series) -> Path:
    n = len(time)
    frame = pl.DataFrame({"source": np.arange(n) % 7, "target": np.arange(n) * 3 % 7, "time": time})
    frame.write_ipc(path) if path.suffix == ".arrow" else frame.write_parquet(path)
    return path


# Point 8: one extreme date.


def extreme(kind: str) -> pl.Series:
    if kind.startswith("date"):
        days = np.arange(20, dtype=np.int32) + 19_000
        days[5] = {"date max": 2**31 - 1, "date min": -(2**31), "date 5877611": 2_146_764_179}[kind]
        return pl.Series(days).cast(pl.Date)
    unit: Any = kind.split()[0]
    per_second = {"ms": 10**3, "us": 10**6}[unit]
    stamps = (np.arange(20) * 86_400 + 1_700_000_000) * per_second
    # The year 148108, and the limits of 64 bits.
    stamps[5] = {"148108": 4_611_686_018_427 * per_second, "max": 2**63 - 1, "min": -(2**63)}[kind.split()[1]]
    return pl.Series(stamps).cast(pl.Datetime(unit))


KINDS = ("date max", "date min", "date 5877611", "ms 148108", "ms max", "us 148108", "us min")


@pytest.mark.cluster
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_an_extreme_date_is_an_invalid_row(tmp_path: Path, mode: str) -> None:
    kinds = KINDS if mode == "threads" else KINDS[:1]
    for kind in kinds:
        file = edges(tmp_path / f"{kind}.parquet", extreme(kind))
        out = tmp_path / "out"
        options = (f"--mode={mode}", "--workers=1", "--rank=2", "--stall=20", "--no-report")
        code, err, _ = child("embed", str(file), "--out", str(out), *options)
        assert code == 3, err
        assert f"{file}, row 6: time is out of range" in err
        assert not list_runs(out)


def test_the_others_are_read_without_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = edges(tmp_path / "e.arrow", extreme("date max"))
    code, err = run_toffee(
        "ingest", str(file), "--out", str(tmp_path / "out"), "--on-bad-rows", "skip", capsys=capsys
    )
    assert code == 0, err


class Panic(BaseException):
    """As a Rust library's panic is: no Exception."""


def test_a_panic_in_a_task_is_told_and_an_interrupt_stays_one() -> None:
    def raising(error: BaseException) -> None:
        raise error

    with pytest.raises(TaskError, match="Panic: out of range"):
        _attempt(raising, Panic("out of range"))
    for kind in (KeyboardInterrupt, SystemExit):
        with pytest.raises(kind):
            _attempt(raising, kind())


class DoneButSilent:
    """A future that is done, and whose answer never arrives."""

    status = "finished"

    def add_done_callback(self, call: Any) -> None:
        call(self)

    def result(self) -> None:
        threading.Event().wait(30)


def test_the_wait_for_an_answer_is_watched_too() -> None:
    begun = time.monotonic()
    with pytest.raises(_StallError):
        _result(object(), DoneButSilent(), 60.0, Watch(0.2))
    assert time.monotonic() - begun < 10


# Point 9: memory.


def bomb(path: Path, rows: int) -> Path:
    """Write a kilobyte of Parquet with so many equal rows, in one row group."""
    columns = {
        name: pl.repeat(at, rows, dtype=pl.Int64, eager=True)
        for at, name in enumerate(("source", "target", "time"))
    }
    frame = pl.DataFrame(columns)
    frame.write_parquet(path, row_group_size=rows, data_page_size=1 << 40, statistics=False)
    assert path.stat().st_size < rows // 100
    return path


@pytest.mark.slow
@pytest.mark.cluster
def test_equal_rows_take_no_memory(tmp_path: Path) -> None:
    file = bomb(tmp_path / "bomb.parquet", 20_000_000)
    options = ("--mode=threads", "--workers=1", "--step=1")
    code, err, peak = child("ingest", str(file), "--out", str(tmp_path / "out"), *options, seconds=200)
    assert code == 0, err
    assert peak < 600 * MIB


def test_tables_are_cut_by_their_rows(tmp_path: Path) -> None:
    file = bomb(tmp_path / "bomb.parquet", 10_000_000)
    pieces = list_fragments(find_files([str(file)])[0], LIMITS)
    assert [piece.stop - piece.start for piece in pieces] == [3_333_333, 3_333_333, 3_333_334]
    small = edges(tmp_path / "small.arrow", pl.Series(range(20)))
    [whole] = list_fragments(find_files([str(small)])[0], LIMITS)
    assert (whole.start, whole.stop, whole.rows) == (0, -1, 20)


@pytest.mark.cluster
def test_an_arrow_file_that_would_take_gigabytes_is_refused(tmp_path: Path) -> None:
    rows = 12_000_000
    batch = pa.record_batch(dict.fromkeys(("source", "target", "time"), pa.array(np.zeros(rows, np.int64))))
    file = tmp_path / "bomb.arrow"
    with pa.ipc.new_file(file, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_batch(batch)
    assert file.stat().st_size < MIB
    code, err, peak = child("ingest", str(file), "--out", str(tmp_path / "out"), "--mode=threads")
    assert code == 3, err
    assert "a record batch of 12,000,000 rows" in err
    assert peak < 400 * MIB


@pytest.mark.cluster
@pytest.mark.parametrize("place", ["first", "between"])
def test_blank_lines_cost_little(tmp_path: Path, place: str) -> None:
    blank = b"\n" * 40_000_000
    lines = (
        (blank + b"a,b,1\nb,c,2\n")
        if place == "first"
        else (b"a,b,1\n" + blank + b" \n\t\nb,c,2\n" + blank[:99])
    )
    (tmp_path / "e.csv").write_bytes(lines)
    out = tmp_path / "out"
    options = ("--mode=threads", "--workers=1", "--step=1", "--json")
    code, err, peak = child("ingest", str(tmp_path / "e.csv"), "--out", str(out), *options)
    assert code == 0, err
    assert read_json(out / "ingest.json")["summary"]["rows"] == 2
    assert peak < 600 * MIB


def test_long_runs_of_spaces_cost_little(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.txt").write_bytes(b"a b 1\n" + b"b" + b" " * 200_000 + b"c 2\n")
    begun = time.monotonic()
    code, err = run_toffee(
        "ingest", str(tmp_path / "e.txt"), "--out", str(tmp_path / "out"), "--step=1", capsys=capsys
    )
    assert code == 0, err
    assert time.monotonic() - begun < 20


# Point 10: wrong codes.


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        (["--separator", "ab"], 2, "separator: got 'ab'"),
        (["--separator", ""], 2, "separator: got ''"),
        (["--separator", "é"], 2, "separator: got 'é'"),
        (["--step", "99999999999999999999d"], 2, "step: got '99999999999999999999d'"),
        (["--step", "9" * 5000], 2, "step: got"),
        (["--last", "99999999999d"], 2, "last: got '99999999999d'"),
        (["--last", "9000000d"], 2, "last: got"),
        (["--wait", "inf"], 2, "wait: got inf"),
        (["--wait", "nan"], 2, "wait: got nan"),
        (["--stall", "inf"], 2, "stall: got inf"),
        (["--mode", "tcp://"], 2, "mode: got 'tcp://'"),
        (["--mode", "tcp://host"], 2, "mode: got 'tcp://host'"),
        (["--mode", "tls://host:port"], 2, "mode: got 'tls://host:port'"),
        (["--workers", "10000"], 2, "workers: got 10,000"),
        (["--workers", "10000", "--mode", "processes"], 2, "workers: got 10,000"),
        (["--rank", "9" * 30], 2, "rank: got"),
        (["--since", "9" * 30], 2, "--since: got"),
        (["--config", "/dev/zero"], 2, "not a regular file"),
    ],
)
def test_wrong_options_are_refused_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], code: int, words: str
) -> None:
    (tmp_path / "e.csv").write_text("a,b,2024-01-01\nb,c,2024-01-02\n")
    out = tmp_path / "out"
    found, err = run_toffee("embed", str(tmp_path / "e.csv"), "--out", str(out), *options, capsys=capsys)
    assert (found, words in err) == (code, True), err
    assert not list_runs(out)


def test_a_backslash_and_a_t_is_a_tab(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "e.tsv").write_text("a\tb\t1\nb\tc\t2\n")
    command = ["ingest", str(tmp_path / "e.tsv"), "--out", str(tmp_path / "out"), "--step=1", "--workers=1"]
    code, err = run_toffee(*command, "--separator", "\\t", capsys=capsys)
    assert code == 0, err
    assert "separated by tabs" in err


@pytest.mark.parametrize("step", ["1d", "1w", "6h"])
@pytest.mark.parametrize("day", ["9999-12-31", "0001-01-01"])
def test_the_ends_of_the_calendar_in_a_zone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], step: str, day: str
) -> None:
    (tmp_path / "e.csv").write_text(f"a,b,{day}\nb,c,{day}\n")
    command = ["embed", str(tmp_path / "e.csv"), "--out", str(tmp_path / "out"), f"--step={step}", "--rank=2"]
    code, err = run_toffee(*command, "--zone=Europe/Athens", "--workers=1", "--no-report", capsys=capsys)
    assert code in (0, 3), err
    if code:
        assert "time outside the calendar" in err
        assert not list_runs(tmp_path / "out")


def test_certificates_have_an_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, err = run_toffee("certs", str(tmp_path / "certs"), "--days", "3700000", capsys=capsys)
    assert code == 2, err
    assert not (tmp_path / "certs").exists()


def test_far_windows_and_wide_steps_fit_64_bits() -> None:
    nanoseconds, numbers = TimeScale(10**9, True), TimeScale(10**6, False)
    grid = build_grid("3660000d", 0, 10**18, nanoseconds)
    assert grid.steps_of(np.array([0, 10**18])).tolist() == [0, 0]
    assert np.int64(last_window("80000000h", 10**18, nanoseconds)) < 0
    assert np.int64(last_window("9" * 18, 5, numbers)) < 0


def test_long_ids_are_invalid_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    long = "x" * 5000
    frame = pl.DataFrame({"source": ["a", long], "target": ["b", "c"], "time": [1, 2]})
    frame.write_parquet(tmp_path / "e.parquet")
    frame.select(pl.all().reverse()).write_csv(tmp_path / "e.csv")
    for name, row in (("e.parquet", 2), ("e.csv", 1)):
        command = ["ingest", str(tmp_path / name), "--out", str(tmp_path / "out"), "--step=1", "--workers=1"]
        code, err = run_toffee(*command, capsys=capsys)
        assert code == 3, err
        assert f"{name}, row {row}: source is longer than 4,096 bytes" in err
        assert len(err) < 2000


# Bombs.


def test_configurations_that_are_none(tmp_path: Path) -> None:
    deep, large, fifo = tmp_path / "deep.toml", tmp_path / "large.toml", tmp_path / "fifo"
    deep.write_text("a = " + "[" * 50_000)
    large.write_bytes(b"#" * (2 << 20))
    os.mkfifo(fifo)
    number = tmp_path / "number.toml"
    number.write_text("rank = " + "9" * 5000)
    for file in (deep, large, fifo, number, Path("/dev/zero"), tmp_path):
        with pytest.raises(ConfigError, match="config file"):
            EdgeSettings.read({}, str(file))


def test_json_that_is_none(tmp_path: Path) -> None:
    deep, large, fifo, zero = (tmp_path / name for name in ("deep", "large", "fifo", "zero"))
    deep.write_text("[" * 100_000)
    os.mkfifo(fifo)
    zero.symlink_to("/dev/zero")
    with large.open("wb") as file:
        file.truncate(100 << 20)
    for path in (deep, large, fifo, zero, tmp_path):
        with pytest.raises(InputError, match="cannot read"):
            read_json(path)


# A published run that is damaged.


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = tmp_path_factory.mktemp("published")
    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"source": rng.integers(0, 9, 300), "target": rng.integers(0, 9, 300)})
    frame.with_columns(time=pl.Series(np.arange(300) * 3600)).write_parquet(folder / "e.parquet")
    options: Any = {"rank": 4, "mode": "threads", "workers": 1, "outputs": ("embedding", "trajectory")}
    config = JobConfig(inputs=(str(folder / "e.parquet"),), out=str(folder / "out"), time_unit="s", **options)
    run = start_run(config).run
    load_run(run.path).build_index()
    return run


def headers() -> dict[str, bytes]:
    def header(words: str) -> bytes:
        text = words.encode().ljust(117) + b"\n"
        return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64)

    form = "{{'descr': '{}', 'fortran_order': {}, 'shape': {}, }}"
    return {
        "huge": header(form.format("<f4", False, "(6000000000, 4)")),
        "object": header(form.format("|O", False, "(2, 4)")),
        "negative": header(form.format("<f4", False, "(-9, 4)")),
        "fortran": header(form.format("<f4", True, "(4, 4)")),
        "scalar": header(form.format("<f4", False, "()")),
        "nested": header("(" * 90),
        "short": header(form.format("<f4", False, "(9, 4)")),
        "empty": b"",
    }


@pytest.mark.parametrize("kind", list(headers()))
def test_damaged_arrays(tmp_path: Path, kind: str) -> None:
    (tmp_path / "a.npy").write_bytes(headers()[kind])
    with pytest.raises(ValueError, match=r"ours|missing"):
        read_array(tmp_path / "a.npy")


COMMANDS = (
    ("index/embedding.npy", ["neighbors", "RUN", "1"]),
    ("fold.npy", ["fold-in", "RUN", "EDGES", "--to", "NEW"]),
    ("rotation.npy", ["score", "RUN", "1,2"]),
    ("nodes.parquet", ["neighbors", "RUN", "1"]),
    ("nodes.parquet", ["export", "RUN", "--format=numpy", "--to", "NEW"]),
    ("nodes.parquet", ["report", "RUN", "--to", "NEW"]),
    ("frequencies.parquet", ["report", "RUN", "--to", "NEW"]),
    ("embedding/part-00000.parquet", ["neighbors", "RUN", "1"]),
    ("compact/kernel.npy", ["trajectory", "RUN", "1"]),
    ("compact/00000-starts.npy", ["trajectory", "RUN", "1"]),
    ("compact/00000-target.npy", ["trajectory", "RUN", "1"]),
    ("compact/00000-value.npy", ["trajectory", "RUN", "1"]),
    ("compact/00000-basis.npy", ["trajectory", "RUN", "1"]),
    ("registry/part-0-00000.parquet", ["fold-in", "RUN", "EDGES", "--to", "NEW"]),
    ("manifest.json", ["inspect", "RUN"]),
)


@pytest.mark.job
@pytest.mark.parametrize(("file", "command"), COMMANDS)
def test_damaged_files_of_a_run_are_named(
    tmp_path: Path, published: RunFolder, capsys: pytest.CaptureFixture[str], file: str, command: list[str]
) -> None:
    rng = np.random.default_rng(1)
    pl.DataFrame({"source": [50, 1], "target": [1, 51], "time": [0, 1]}).write_parquet(tmp_path / "e.parquet")
    names = {"RUN": str(published.path), "EDGES": str(tmp_path / "e.parquet"), "NEW": str(tmp_path / "new")}
    words = [names.get(word, word) for word in command]
    path, index = published.path / file, published.index("embedding")
    kept = path.read_bytes() if path.exists() else None
    hidden = index.read_bytes()
    if file.startswith("embedding"):
        index.unlink()
    valid = kept or b"\x93NUMPY\x01\x00" + bytes(200)
    damages = [valid[: len(valid) // 2], b"", rng.bytes(500), valid[:40] + rng.bytes(60) + valid[100:]]
    damages += list(headers().values()) if file.endswith(".npy") else []
    try:
        for damage in damages:
            path.write_bytes(damage)
            code, err = run_toffee(*words, capsys=capsys)
            assert code in (0, 3), err
            assert code == 3 or damage is damages[3], err
            assert "bug" not in err
    finally:
        path.unlink() if kept is None else path.write_bytes(kept)
        index.write_bytes(hidden)


@pytest.mark.job
def test_a_table_of_nodes_that_says_nonsense(published: RunFolder, tmp_path: Path) -> None:
    """Found by the fuzzer: each was "a bug in toffee"."""
    run = RunFolder(shutil.copytree(published.path, tmp_path / "out" / "runs" / published.run_id))
    table = pl.read_parquet(run.nodes)
    node, row = table["node_id"][0], pl.col("row")
    for damaged in (
        table.rename({"node_id": "node_ie"}),
        table.with_columns(row=pl.lit(0, dtype=table.schema["row"])),
        table.with_columns(row=row + 10**6),
        table.with_columns(row=pl.lit(None, dtype=table.schema["row"])),
    ):
        damaged.write_parquet(run.nodes)
        with pytest.raises(InputError, match="damaged"):
            load_run(run.path).neighbors(node, 2)
    # Ids that are missing are no candidates for a suggestion.
    table.with_columns(node_id=pl.when(row > 0).then(pl.col("node_id"))).write_parquet(run.nodes)
    with pytest.raises(InputError, match="unknown node"):
        load_run(run.path).neighbors(f"{node}-not", 2)
    # A manifest that claims more than there is reserves no memory for it.
    summary = run.read_manifest().summary.model_copy(update={"nodes": 2**31})
    run.write_manifest(run.read_manifest().replaced(summary=summary))
    with pytest.raises(InputError, match=r"2,147,483,648"):
        load_run(run.path).embedding.numpy()


def test_strangers_among_the_runs(published: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    from toffee_dist.refresh.history import remove_old_runs

    stray, file = published.path.parent / "notes", published.path.parent / "README"
    stray.mkdir()
    file.write_text("x")
    try:
        for command in ("runs", "inspect", "report"):
            code, err = run_toffee(command, str(published.out), capsys=capsys)
            assert code == 0, err
        assert remove_old_runs(published.out, 1) == []
        assert stray.exists()
    finally:
        stray.rmdir()
        file.unlink()


@pytest.mark.parametrize(
    "command",
    [
        ["export", "RUN", "--format=numpy", "--to", "LOST"],
        ["fold-in", "RUN", "EDGES", "--to", "LOST"],
        ["trajectory", "RUN", "1", "--csv", "LOST"],
        ["trajectory", "RUN", "1", "--png", "LOST"],
        ["report", "RUN", "--to", "LOST"],
        ["evaluate", "EDGES", "--out", "NEW", "--splits", "LOST"],
    ],
)
def test_outputs_in_no_folder(
    tmp_path: Path, published: RunFolder, capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    edges(tmp_path / "e.parquet", pl.Series(range(20)))
    names = {"RUN": str(published.path), "EDGES": str(tmp_path / "e.parquet")}
    names |= {"NEW": str(tmp_path / "new"), "LOST": str(tmp_path / "nofolder" / "x")}
    code, err = run_toffee(*(names.get(word, word) for word in command), capsys=capsys)
    assert code == 2, err
    assert "does not exist" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e.parquet"]


def test_waits_are_bounded() -> None:
    for values in ({"wait": float("inf")}, {"wait": 1e300}, {"stall": float("nan")}):
        with pytest.raises(ConfigError):
            RuntimeSettings(**values)


def test_arrays_are_read_as_they_were_written(tmp_path: Path) -> None:
    save_array(tmp_path / "a.npy", np.arange(12.0).reshape(4, 3))
    assert read_array(tmp_path / "a.npy", 1, 3).tolist() == [[3, 4, 5], [6, 7, 8]]
    with pytest.raises(ValueError, match="rows 3 to 9 of 4"):
        read_array(tmp_path / "a.npy", 3, 9)


@pytest.mark.job
def test_names_that_look_like_patterns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder may be called [1]*: nothing expands its name, of edges, runs, labels or exports."""
    odd = tmp_path / "[1]*{a,b}?"
    days, nights = write_days(odd / "edges", 0, 9, nodes=40, events=200), odd / "nights"
    out, local = odd / "out", ("--mode=threads", "--workers=1", "--no-report")
    labels = odd / "labels.csv"
    ids = [f"n{number:05d}" for number in range(40)]
    pl.DataFrame({"node": ids, "label": [number // 20 for number in range(40)]}).write_csv(labels)
    night = ("refresh", str(days), f"--out={nights}", "--rank=4", "--last=7d", "--expire=7d", *local)
    quality = (f"--out={odd / 'quality'}", "--rank=4", "--model=toffee", f"--labels={labels}")

    def run(*words: str) -> None:
        code, err = run_toffee(*words, capsys=capsys)
        assert code == 0, (words, err)

    run("embed", str(days), f"--out={out}", "--rank=4", "--outputs=embedding,trajectory", *local)
    run("inspect", str(out), "--verify")
    run("neighbors", str(out), "n00001")
    run("export", str(out), f"--to={odd / 'vectors'}", "--format=numpy")
    run("report", str(out))
    run("plan", str(days / "day-000.parquet"), "--rank=4")
    run("evaluate", str(days), *quality)
    run(*night)
    write_days(days, 9, 18, nodes=20, events=200)
    run(*night, "--min-cosine=-1", "--max-auc-drop=1", "--max-energy-drop=1")
    # The nodes that left were forgotten, through the registry of the previous run.
    assert load_run(nights).n_nodes < 40
