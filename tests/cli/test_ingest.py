"""The command: what it prints, how it fails, what it leaves behind; hostile files above all."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness import ROOT
from toffee_dist.cli import main

FRAME = pl.DataFrame({"source": [1, 2, 3], "target": [2, 3, 1], "time": [0, 1, 2]})
GIGABYTE = 1 << 30

Toffee = Callable[..., tuple[int, str, str]]


@pytest.fixture
def toffee(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Toffee:
    """Run the command in this process with --out; return exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(["ingest", "--out", str(tmp_path / "out"), "--workers", "1", *arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


def assert_nothing_left(folder: Path, *inputs: str) -> None:
    assert sorted(path.name for path in folder.iterdir()) == sorted(inputs)


def test_summary_and_guesses(toffee: Toffee, tmp_path: Path) -> None:
    (tmp_path / "e.csv").write_text("# c\na,b,1700000000\nb,b,1700090000\na,b,1700000001\n")
    code, out, err = toffee(str(tmp_path / "e.csv"))
    assert code == 0
    assert "no header, separated by ','" in err
    assert "time: epoch seconds, guessed" in err
    assert "node ids: string, guessed" in err
    for line in ("3 in 1 files", "self-loops      1 (kept)", "duplicates      1", "comment lines   1"):
        assert line in out
    manifest = json.loads((tmp_path / "out" / "ingest.json").read_text())
    assert manifest["summary"]["pairs"] == 2
    assert manifest["grid"]["n_steps"] == 2
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["ingest.json", "nodes", "tensor"]


def test_json(toffee: Toffee, tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "e.parquet")
    code, out, _ = toffee(str(tmp_path / "e.parquet"), "--step", "1", "--json")
    assert code == 0
    assert json.loads(out)["rows"] == 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--step", "1y"], "step: got '1y'"),
        (["--zone", "Nowhere"], "IANA"),
        (["--entry", "max"], "Invalid value for '--entry'"),
        (["--workers", "0"], "workers: got 0"),
        (["--source", "nothing"], "--source: got nothing"),
        (["--last", "1d", "--since", "1"], "one of them"),
        (["--weight", "time"], "Add --entry sum"),
        (["--known", "nowhere"], "earlier ingest"),
        (["--nonsense"], "No such option"),
    ],
)
def test_usage_is_exit_code_2(toffee: Toffee, tmp_path: Path, arguments: list[str], message: str) -> None:
    FRAME.write_parquet(tmp_path / "e.parquet")
    code, _, err = toffee(str(tmp_path / "e.parquet"), "--time-unit", "number", *arguments)
    assert code == 2
    assert message in err
    assert_nothing_left(tmp_path, "e.parquet")


def truncated_parquet() -> bytes:
    import io

    buffer = io.BytesIO()
    FRAME.write_parquet(buffer)
    return buffer.getvalue()[:-40]


def damaged_parquet() -> bytes:
    import io

    buffer = io.BytesIO()
    pl.DataFrame({"source": range(5000), "target": range(5000), "time": range(5000)}).write_parquet(buffer)
    data = bytearray(buffer.getvalue())
    data[4:2000] = np.random.default_rng(0).integers(0, 256, 1996, dtype=np.uint8).tobytes()
    return bytes(data)


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("e.parquet", b"", "cannot read"),
        ("e.parquet", b"PAR1", "cannot read"),
        ("e.parquet", truncated_parquet(), "as Parquet"),
        ("e.parquet", damaged_parquet(), "as Parquet"),
        ("e.arrow", b"ARROW1 and then nothing", "as Arrow IPC"),
        ("e.csv", bytes(range(256)) * 50, "not a text file"),
        ("e.csv", b"\xff\xfe\xfd,\xfa,1\n" * 50, "cannot"),
        ("e.csv", b"", "no rows"),
        ("e.csv", b"\n\n\n", "no rows"),
        ("e.csv", b"# only a comment\n", "no rows"),
        ("e.csv", b"source,target,time\n", "no rows"),
        ("e.csv.gz", gzip.compress(b"1,2,3\n" * 1000, mtime=0)[:-20], "cannot read"),
        ("e.csv.gz", b"1,2,3\n", "cannot read"),
        ("e.csv.zst", b"1,2,3\n", "cannot read"),
        ("e.csv", b"<html>\n<body>not found</body>\n</html>\n", "cannot tell which column"),
        ("e.parquet.gz", b"x", "Decompress it first"),
    ],
)
def test_hostile_files(toffee: Toffee, tmp_path: Path, name: str, data: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(data)
    code, _, err = toffee(str(tmp_path / name), "--step", "1")
    assert code == 3, err
    assert message in err
    assert_nothing_left(tmp_path, name)


def test_one_bad_file_among_good_ones(toffee: Toffee, tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(truncated_parquet())
    code, _, err = toffee(str(tmp_path / "*.parquet"), "--step", "1")
    assert code == 3
    assert "b.parquet" in err
    assert_nothing_left(tmp_path, "a.parquet", "b.parquet")


@pytest.mark.parametrize("kind", ["parquet", "csv"])
def test_wrong_schema_in_one_file(toffee: Toffee, tmp_path: Path, kind: str) -> None:
    for name, frame in (("a", FRAME), ("b", FRAME.rename({"target": "other"}))):
        frame.write_parquet(tmp_path / f"{name}.{kind}") if kind == "parquet" else frame.write_csv(
            tmp_path / f"{name}.{kind}"
        )
    code, _, err = toffee(str(tmp_path / f"*.{kind}"), "--step", "1")
    assert code == 3
    assert "has no such column: got target; allowed: source, other, time" in err
    assert_nothing_left(tmp_path, f"a.{kind}", f"b.{kind}")


def test_column_that_changes_type(toffee: Toffee, tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "a.parquet")
    FRAME.with_columns(pl.col("time").cast(pl.Datetime("us"))).write_parquet(tmp_path / "b.parquet")
    code, _, err = toffee(str(tmp_path / "*.parquet"), "--step", "1")
    assert code == 3
    assert "time column of" in err
    assert "changed its type" in err


def test_empty_folder(toffee: Toffee, tmp_path: Path) -> None:
    (tmp_path / "none").mkdir()
    code, _, err = toffee(str(tmp_path / "none"))
    assert code == 3
    assert "no file to read" in err


def test_output_that_cannot_be_written(toffee: Toffee, tmp_path: Path) -> None:
    FRAME.write_parquet(tmp_path / "e.parquet")
    (tmp_path / "file").write_text("")
    code, _, err = toffee(str(tmp_path / "e.parquet"), "--out", str(tmp_path / "file" / "out"))
    assert code == 2
    assert "output folder" in err


@pytest.mark.slow
@pytest.mark.parametrize("lead", [b"", b"1,2,3\n" * 100_000])
def test_a_line_of_a_gigabyte(toffee: Toffee, tmp_path: Path, lead: bytes) -> None:
    path = tmp_path / "e.csv"
    with open(path, "wb") as handle:
        handle.write(lead)
        for _ in range(64):
            handle.write(b"7" * (GIGABYTE // 64))
    code, _, err = toffee(str(path), "--step", "1")
    path.unlink()
    assert code == 3
    assert "too long" in err
    assert_nothing_left(tmp_path)


def test_a_long_line_that_is_compressed(toffee: Toffee, tmp_path: Path) -> None:
    data = b"1,2,3\n" * 100_000 + b"7" * (40 << 20) + b"\n"
    (tmp_path / "e.csv.gz").write_bytes(gzip.compress(data, 1))
    code, _, err = toffee(str(tmp_path / "e.csv.gz"), "--step", "1")
    assert code == 3
    assert "too long" in err
    assert_nothing_left(tmp_path, "e.csv.gz")


@pytest.mark.slow
def test_tens_of_thousands_of_tiny_files(toffee: Toffee, tmp_path: Path) -> None:
    folder = tmp_path / "tiny"
    folder.mkdir()
    for index in range(20_000):
        with open(folder / f"{index:06d}.csv", "w") as handle:
            handle.write(f"source,target,time\n{index},{index + 1},{index % 10}\n")
    (folder / "010000.csv").write_text("source,target,time\n10000,10001,x\n")
    code, out, _ = toffee(str(folder), "--step", "1", "--json", "--on-bad-rows", "skip")
    assert code == 0
    summary = json.loads(out)
    assert (summary["files"], summary["used"], summary["nodes"]) == (20_000, 19_999, 20_001)
    assert "010000.csv, row 1: time cannot be read ('x')" in summary["examples"][0]


@pytest.mark.cluster
def test_benchmark_runs(tmp_path: Path) -> None:
    script = ROOT / "benchmarks" / "ingest.py"
    command = [sys.executable, str(script), "--rows", "20000", "--repeats", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    figures = json.loads(done.stdout.splitlines()[-1])
    assert set(figures) == {"polars_ratio", "two_process_speedup", "peak_mib"}


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["threads", "processes"])
def test_modes_of_the_real_command(tmp_path: Path, mode: str) -> None:
    for index in range(5):
        FRAME.with_columns(pl.col("source") + index).write_parquet(tmp_path / f"{index}.parquet")
    command = [sys.executable, "-m", "toffee_dist.cli", "ingest", str(tmp_path / "*.parquet"), "--json"]
    command += ["--out", str(tmp_path / "out"), "--mode", mode, "--workers", "2", "--step", "1"]
    if mode == "threads":
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["rows"] == 15
    (tmp_path / "2.parquet").write_bytes(truncated_parquet())
    command[command.index(str(tmp_path / "out"))] = str(tmp_path / "again")
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 3
    assert "2.parquet as Parquet" in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 3, done.stderr
    assert not [path for path in tmp_path.iterdir() if "again" in path.name]
