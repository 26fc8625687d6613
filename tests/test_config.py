"""Options, TOML and defaults: one set of names, flags win, and mistakes are named."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest

from tests.clusters import write_edges
from toffee_dist.cli import cli, main
from toffee_dist.config import EdgeSettings, JobConfig, ModelSettings, RuntimeSettings
from toffee_dist.errors import ConfigError


def read(text: str, tmp_path: Path, **given: Any) -> JobConfig:
    file = tmp_path / "job.toml"
    file.write_text(text)
    return JobConfig.read(given, str(file))


def test_flags_override_the_file_and_the_file_the_defaults(tmp_path: Path) -> None:
    config = read('rank = 32\npair-weight = "log"\noutputs = ["embedding", "spectrum"]', tmp_path, rank=16)
    assert (config.rank, config.pair_weight, config.outputs) == (16, "log", ("embedding", "spectrum"))
    assert config.step == "1d"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rnak = 3", r"unknown name in .*: got rnak.*Did you mean rank\?"),
        ('entry = "max"', "entry in .*: got 'max'; allowed: binary, count, sum"),
        ("rank = 0", "rank: got 0"),
        ('rank = "many"', "rank in .*: got 'many'"),
        ('outputs = "vectors"', "outputs"),
        ('freqs = "best:3"', "freqs: got 'best:3'"),
        ('reduce = "last"', "reduce: got 'last'"),
        ("reg_a = 0.0", "both positive or both zero"),
        ("rank = ", "TOML"),
        ('step = "1y"', "step: got '1y'"),
    ],
)
def test_mistakes_are_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(text, tmp_path, inputs=("x",)).ingest_config()


def test_where_it_runs_is_not_what_it_is() -> None:
    one = JobConfig.read({"inputs": ("a",), "mode": "threads", "out": "x"})
    assert one.identity() == JobConfig.read({"inputs": ("a",), "mode": "processes"}).identity()
    assert one.identity() != JobConfig.read({"inputs": ("a",), "rank": 7}).identity()


def test_every_setting_is_an_option_and_says_what_it_is() -> None:
    options = {parameter.name: parameter for parameter in cli.commands["embed"].params}
    for group in (EdgeSettings, ModelSettings, RuntimeSettings, JobConfig):
        for name, field in group.model_fields.items():
            assert field.description
            assert name in options
    assert isinstance(options["rank"], click.Option)
    assert "[default: 128]" in (options["rank"].help or "")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"toffee {command}" in text


def test_plan_embed_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = write_edges(tmp_path / "e.parquet", nodes=200, events=3000)
    config = tmp_path / "job.toml"
    config.write_text(
        f'inputs = ["{edges}"]\nout = "{tmp_path / "out"}"\nrank = 8\nmode = "threads"\n'
        'outputs = "embedding,trajectory"\nfreqs = "lowest:5"\n'
    )
    main(["plan", "--config", str(config)])
    text = capsys.readouterr().out
    assert "about 200" in text
    assert "at most 5 will be solved" in text
    main(["plan", "--config", str(config), "--json"])
    plan = json.loads(capsys.readouterr().out)
    assert plan["n_freqs"] == 5
    assert plan["worker_bytes"]["1"] > plan["task_bytes"]
    for memory, code in (("100MiB", 4), ("plenty", 2)):
        with pytest.raises(SystemExit) as stopped:
            main(["plan", "--config", str(config), "--memory", memory])
        assert stopped.value.code == code
    capsys.readouterr()
    main(["plan", "--config", str(config), "--memory", "8GiB", "--json"])
    assert json.loads(capsys.readouterr().out) == plan
    main(["embed", "--config", str(config), "--json"])
    done = json.loads(capsys.readouterr().out)
    assert done["solved"] == 5
    assert done["energy_kept"] < 1
    main(["inspect", str(tmp_path / "out"), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["state"] == "published"
    assert found["outputs"] == ["embedding", "embedding_target", "trajectory"]
    main(["inspect", str(tmp_path / "out")])
    assert "rank       8" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stopped:
        main(["resume", str(tmp_path / "out")])
    assert stopped.value.code == 3
    assert "Every run in it is complete" in capsys.readouterr().err


def test_estimates_are_near(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = write_edges(tmp_path / "e.parquet", nodes=40_000, events=200_000)
    main(["plan", str(edges), "--json", "--mode", "threads"])
    plan = json.loads(capsys.readouterr().out)
    main(["ingest", str(edges), "--json", "--mode", "threads", "--out", str(tmp_path / "staged")])
    exact = json.loads(capsys.readouterr().out)
    shape = plan["shape"]
    assert shape["n_nodes"] == pytest.approx(exact["nodes"], rel=0.06)
    assert shape["n_pairs"] == pytest.approx(exact["pairs"], rel=0.06)
    assert shape["n_steps"] == exact["steps"]
    assert shape["n_events"] >= exact["entries"]


def test_progress_is_lines_where_there_is_no_terminal(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "e.parquet", nodes=50, events=300)
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "toffee_dist.cli",
            "embed",
            str(edges),
            "--out",
            str(tmp_path / "out"),
            "--rank=4",
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "solve zero: 1 tasks in" in done.stderr
    assert "published" in done.stdout


def test_progress_is_a_bar_on_a_terminal(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "e.parquet", nodes=50, events=300)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "toffee_dist.cli", "embed", str(edges), f"--out={tmp_path / 'out'}"]
    process = subprocess.Popen(
        [*command, "--rank=4"], stderr=theirs, stdout=subprocess.DEVNULL, env=os.environ | {"COLUMNS": "120"}
    )
    os.close(theirs)
    text = b""
    while True:
        try:
            piece = os.read(ours, 65536)
        except OSError:  # The other end is closed.
            break
        if not piece:
            break
        text += piece
    assert process.wait(60) == 0
    assert "━" in text.decode()
    assert "1/1" in text.decode()
