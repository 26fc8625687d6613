"""What a user sees first: one screen of help, examples that run, errors that say what to do, any terminal."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import polars as pl
import pytest

from tests.harness import ROOT
from tests.harness.examples import EMBED, PEOPLE, call, leave_a_run_unfinished, write_edges
from toffee_dist.cli import cli, main
from toffee_dist.report.serve import PageServer

PACKAGE = ROOT / "toffee_dist"


def command(name: str) -> click.Command:
    """Return a command, loaded."""
    found = cli.get_command(click.Context(cli), name)
    assert found is not None
    return found


def examples(command: click.Command) -> list[str]:
    """Return the lines of a command's example."""
    _, found, text = (command.help or "").partition("Example:\n")
    return re.findall(r"^ *(toffee .*)$", text, re.MULTILINE) if found else []


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that examples speak of: edges of a hundred days, and their vectors."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "edges").mkdir()
    for month, days in enumerate((range(0, 31), range(31, 60), range(60, 100))):
        write_edges(folder / "edges" / f"{month}.parquet", days)
    pl.read_parquet(folder / "edges" / "*.parquet").write_csv(folder / "mail.csv")
    write_edges(folder / "today.parquet", range(100, 101), [*PEOPLE, "dave", "erin"])
    (folder / "pairs.csv").write_text("alice,bob\nbob,carol\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for line in examples(command("embed")):
            call(line)
    return folder


@pytest.mark.job
@pytest.mark.parametrize("name", [name for name in cli.commands if name != "embed"])
def test_examples_run(name: str, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    lines = examples(command(name))
    assert lines, f"toffee {name} --help has no example"
    assert any(line.split()[1] == name for line in lines)
    if name == "resume":
        leave_a_run_unfinished(monkeypatch)
    if name == "rollback":
        call(EMBED)
    if name == "serve":
        monkeypatch.setattr(PageServer, "serve_forever", lambda *_, **__: None)
    if name == "refresh":
        call("toffee refresh edges/ --out nights --last 90d --rank 64 --as-of 2024-04-05")
        lines = [line.replace("--out vectors", "--out nights") for line in lines]
    for line in lines:
        call(line)


def test_every_command_is_in_a_section_of_one_screen(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "80")
        main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 29, "one line of 30 is the prompt"
    assert max(len(line) for line in lines) <= 80
    for name in cli.commands:
        assert sum(f" {name} " in line[:27] for line in lines) == 1, name
    assert "..." not in "".join(lines[1:]), "a text was cut short: give the command a short_help"


@pytest.mark.parametrize("name", ["", *cli.commands])
def test_narrow_terminals(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    main([*([name] if name else []), "--help"])
    text = capsys.readouterr().out
    # Lines to copy stay whole; so do words and names of options.
    head, _, rest = text.partition("Options:\n")
    prose = [
        line for line in head.splitlines() if not re.match(r" *(toffee|python|bash:|zsh:|fish:) ?", line)
    ]
    long = [line for line in prose if len(line) > 40 and " " in line.strip()]
    assert not long
    assert rest or not name


def help_sections(command: str, capsys: pytest.CaptureFixture[str]) -> dict[str, list[str]]:
    """Return the lines of the help by the title of their section."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "200")
        main([command, "--help"])
    found: dict[str, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        if re.fullmatch(r"[A-Z]\w+:", line):
            found[line[:-1]] = []
        elif found and line.strip():
            found[list(found)[-1]].append(line.strip())
    return found


@pytest.mark.parametrize(
    ("command", "own"),
    [
        ("ingest", ["Input", "Time", "Cluster"]),
        ("plan", ["Input", "Time", "Model", "Output", "Cluster"]),
        ("embed", ["Input", "Time", "Model", "Output", "Cluster"]),
        ("refresh", ["Input", "Time", "Model", "Refresh", "Output", "Cluster"]),
        ("evaluate", ["Input", "Time", "Model", "Evaluation", "Cluster"]),
        ("resume", ["Cluster"]),
        ("fold-in", ["Cluster"]),
    ],
)
def test_options_come_in_groups(command: str, own: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    found = help_sections(command, capsys)
    assert list(found) == ["Options", *own]
    if command not in ("plan", "resume"):
        assert found["Options"][0].startswith(("--out DIR", "--to FILE"))
        assert found["Options"][0].endswith("[required]")
    if command != "evaluate":
        assert re.search(r"--stall FLOAT .*0: never\.\s+\[default: 14400\]", " ".join(found["Cluster"]))
    if "Model" in own:
        assert re.search(r"--seed INTEGER +Random seed\.  \[default: 0\]", " ".join(found["Model"]))


@pytest.mark.parametrize("command", list(cli.commands))
def test_no_default_is_empty(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = "\n".join(line for lines in help_sections(command, capsys).values() for line in lines)
    assert not re.search(r"\[default:\s*\]|\[default: (None|True|False|\(\))\]", text)


def test_a_missing_folder_is_named(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may be in the file, so that the command line alone cannot tell that it is missing."""
    for command in ("ingest", "embed", "refresh", "evaluate"):
        with pytest.raises(SystemExit) as stop:
            main([command, str(place / "mail.csv")])
        assert stop.value.code == 2
        assert "--out" in capsys.readouterr().err


@pytest.mark.cluster
def test_no_escape_codes_where_they_are_not_wanted(tmp_path: Path) -> None:
    environment = os.environ | {"NO_COLOR": "1", "COLUMNS": "40"}
    write_edges(tmp_path / "edges.parquet", range(0, 10))
    for words in (
        ["embed", "edges.parquet", "--out", "out", "--rank", "2"],
        ["runs", "out"],
        ["neighbors", "out", "alise"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", "toffee_dist.cli", *words],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert "\x1b" not in done.stdout + done.stderr
    assert "Did you mean alice" in done.stderr


def test_completion(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for shell in ("bash", "zsh", "fish"):
        main(["completion", shell])
        script = capsys.readouterr().out
        assert "_TOFFEE_COMPLETE" in script
    # What the script asks for when a user presses the key.
    monkeypatch.setenv("_TOFFEE_COMPLETE", "bash_complete")
    for words, number, expected in (
        ("toffee ne", "1", "neighbors"),
        ("toffee embed --pair", "2", "--pair-weight"),
    ):
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", number)
        with pytest.raises(SystemExit):
            cli.main(args=[], prog_name="toffee")
        assert expected in capsys.readouterr().out


def errors_without_remedy() -> list[str]:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and re.fullmatch(
                r"(Input|TooLarge|Unfinished|Quality|NotFitted)Error", getattr(node.func, "id", "")
            ):
                if "remedy" not in {keyword.arg for keyword in node.keywords}:
                    found.append(f"{path.name}:{node.lineno}")
    return found


def test_every_error_about_data_has_a_remedy() -> None:
    """A wrong option is explained by --help, to which the command line points; data need their own words."""
    assert errors_without_remedy() == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["embed", "x.parquet", "--out", "y", "--freqs", "some"], "toffee embed --help"),
        (["plan", "x.parquet", "--reduce", "all"], "toffee plan --help"),
        (["embed", "x.parquet", "--out", "y", "--rank", "-1"], "toffee embed --help"),
    ],
)
def test_wrong_options_point_to_their_help(
    words: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        main(words)
    assert stop.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.cluster
def test_nothing_slow_is_loaded_before_it_is_needed() -> None:
    """What a command waits for at its start, and every worker of every job."""
    code = "import sys, toffee_dist.cli, toffee_dist.batch.pipeline; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "polars" in loaded.split()
    assert not {"sparse", "numba", "pandas", "pyarrow.dataset", "sklearn", "bokeh"} & {*loaded.split()}
