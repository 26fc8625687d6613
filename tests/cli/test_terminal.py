"""Ids, names and values of strangers on a terminal: nothing that a command prints is a command itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness.terminal import CLIPBOARD, TITLE, commands
from toffee_dist.cli import main
from toffee_dist.storage.runs import find_run

pytestmark = pytest.mark.job

EVIL = f"{TITLE}a{CLIPBOARD}"
# A direction turned round, a C1 command, and a line that was never printed.
TURNED, LINES = "\u202eb\u2066\x9b2J", "c\npublished   /nowhere\r\x7f"
IDS = [EVIL, TURNED, LINES, *(f"n{i}" for i in range(20))]

Ask = Callable[..., str]


@pytest.fixture
def ask(capsys: pytest.CaptureFixture[str]) -> Ask:
    """Run a command in this process; return all that it printed."""

    def run(*words: str, code: int = 0) -> str:
        try:
            main(list(words))
            found = 0
        except SystemExit as end:
            found = int(end.code or 0)
        said = "".join(capsys.readouterr())
        assert found == code, said
        assert not commands(said), [said]
        return said

    return run


def write_edges(folder: Path, names: tuple[str, str, str] = ("source", "target", "time")) -> Path:
    rng = np.random.default_rng(0)
    source, target = rng.integers(len(IDS), size=(2, 600))
    columns = [
        [IDS[i] for i in source],
        [IDS[i] for i in target],
        1_767_571_200 + rng.integers(30, size=600) * 86400,
    ]
    path = folder / f"edges-{EVIL.replace('/', '')}.parquet"
    pl.DataFrame(dict(zip(names, columns, strict=True))).write_parquet(path)
    return path


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("terminal")
    edges = write_edges(folder)
    options = ["--rank=4", "--outputs=embedding,trajectory,spectrum", "--mode=threads", "--workers=1"]
    main(["embed", str(edges), f"--out={folder / 'out'}", *options])
    return folder / "out"


def test_answers(out: Path, ask: Ask, tmp_path: Path) -> None:
    near = ask("neighbors", str(out), "n1", "-k", "22")
    assert "\\x1b]0;owned\\x07" in near
    assert "\\u202e" in near
    # An id stays in its line: a header and a line per neighbour.
    assert len(near.splitlines()) == 23
    for node in (EVIL, TURNED, LINES):
        ask("neighbors", str(out), node)
        ask("neighbors", str(out), node, "--json")
        ask("trajectory", str(out), node)
        ask("similar-periods", str(out), node)
        pairs = tmp_path / "pairs.parquet"
        pl.DataFrame({"source": [node], "target": ["n1"]}).write_parquet(pairs)
        assert len(ask("score", str(out), str(pairs)).splitlines()) == 2
    ask("export", str(out), "--format=numpy", f"--to={tmp_path / EVIL.replace('/', '')}")
    ask("report", str(out), f"--to={tmp_path / TURNED}")
    assert not commands((tmp_path / TURNED).read_text())


def test_errors(out: Path, ask: Ask, tmp_path: Path) -> None:
    assert "\\x1b]0;owned" in ask("neighbors", str(out), f"no{EVIL}", code=3)
    ask("neighbors", str(out), "n1", f"--at={EVIL}", code=3)
    ask("embed", f"{tmp_path}/{EVIL}", f"--out={tmp_path / 'x'}", code=3)
    # What click itself says of words that it does not know.
    for words in (
        ["neighbors", str(out), "n1", f"--{EVIL}"],
        [EVIL],
        ["neighbors", str(out), "n1", f"--role={EVIL}"],
    ):
        assert "\\x1b" in ask(*words, code=2)
    ask("runs", f"{tmp_path}/{EVIL}")
    ask("plan", str(out), f"--config={tmp_path}/{EVIL}", code=2)


def test_names_of_files_and_columns(ask: Ask, tmp_path: Path) -> None:
    odd = write_edges(tmp_path, (f"from{EVIL}", "to\u202e", "when\r"))
    assert "\\x1b]0;owned" in ask("plan", str(odd), "--mode=threads", code=3)
    assert "\\x1b]0;owned" in ask("plan", str(odd), "--source=nobody", "--mode=threads", code=2)
    columns = [f"--source=from{EVIL}", "--target=to\u202e", "--time=when\r"]
    ask("ingest", str(odd), *columns, f"--out={tmp_path / 'staged'}", "--mode=threads", "--workers=1")
    damaged = tmp_path / f"damaged{TITLE}.parquet"
    damaged.write_bytes(b"PAR1 and nothing else PAR1")
    assert "\\x1b]0;owned" in ask("plan", str(damaged), "--mode=threads", code=3)
    rows = tmp_path / f"rows{TITLE}.csv"
    rows.write_text(f"source,target,time\na,b,1\nc,d,{CLIPBOARD}\ne,f,2\n")
    ask("ingest", str(rows), f"--out={tmp_path / 'bad'}", "--mode=threads", "--workers=1", code=3)
    skip = ["--on-bad-rows=skip", "--step=1", "--mode=threads", "--workers=1"]
    assert "\\x1b]52" in ask("ingest", str(rows), f"--out={tmp_path / 'skipped'}", *skip)


def test_values_of_a_manifest(out: Path, ask: Ask) -> None:
    run = find_run(out)
    before = run.manifest.read_text()
    data = json.loads(before)
    data["summary"] |= {"first": EVIL, "last": LINES}
    data["versions"] = {EVIL: TURNED}
    stray = out / "runs" / f"20260101T000000.000000-{EVIL.replace('/', '')}\nline"
    stray.mkdir()
    try:
        run.manifest.write_text(json.dumps(data))
        assert "\\x1b]0;owned" in ask("runs", str(out))
        # A folder whose name is no name of a run is none.
        assert len(ask("runs", str(out)).splitlines()) == 1
        assert "\\x1b]0;owned" in ask("inspect", str(out))
        ask("inspect", str(out), "--json")
        data["state"] = EVIL
        run.manifest.write_text(json.dumps(data))
        ask("inspect", str(out), code=3)
    finally:
        run.manifest.write_text(before)
        stray.rmdir()
