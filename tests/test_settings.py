"""Options, TOML and defaults: one set of names, flags win, and mistakes are named."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import pty
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from pydantic import ValidationError

import toffee_dist
from tests.harness.clusters import write_edges
from toffee_dist import Toffee
from toffee_dist.cli import cli, main
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.job import EvaluateSettings
from toffee_dist.settings import (
    EdgeSettings,
    FitSettings,
    JobConfig,
    ModelSettings,
    RefreshSettings,
    RivalSettings,
    RuntimeSettings,
    Settings,
    SolverSettings,
)

PACKAGE = Path(toffee_dist.__file__).parent


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
        read(text, tmp_path, inputs=("x",))


def test_where_it_runs_is_not_what_it_is() -> None:
    one = JobConfig.read({"inputs": ("a",), "mode": "threads", "out": "x"})
    assert one.identity() == JobConfig.read({"inputs": ("a",), "mode": "processes"}).identity()
    assert one.identity() != JobConfig.read({"inputs": ("a",), "rank": 7}).identity()


def all_settings() -> list[type[Settings]]:
    """Return every class of settings of the package."""
    found, waiting = [], [Settings]
    for kind in waiting:
        children = [child for child in kind.__subclasses__() if child.__module__.startswith("toffee_dist.")]
        found += children
        waiting += children
    return list(dict.fromkeys(found))


def test_settings_import_nothing_of_ours_but_errors() -> None:
    tree = ast.parse((PACKAGE / "settings.py").read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found.add(node.module or "")
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    assert {name for name in found if name.startswith("toffee_dist")} == {"toffee_dist.errors"}
    other = {name.partition(".")[0] for name in found} - set(sys.stdlib_module_names)
    assert other == {"toffee_dist", "pydantic", "numpy"}


def test_every_option_is_declared_once() -> None:
    """Where a name is declared twice, one class builds on the other and says more of the same thing."""
    kinds = all_settings()
    assert {EdgeSettings, SolverSettings, RefreshSettings, EvaluateSettings} <= {*kinds}
    declared: dict[str, list[type[Settings]]] = {}
    for kind in kinds:
        for name in kind.__annotations__:
            declared.setdefault(name, []).append(kind)
    twice = set()
    for name, owners in declared.items():
        for one, other in combinations(owners, 2):
            if not issubclass(one, other) and not issubclass(other, one):
                twice.add(name)
    # An evaluation compares several models.
    assert twice == {"model"}


@pytest.mark.parametrize("kind", [SolverSettings, FitSettings, EdgeSettings, JobConfig])
def test_settings_are_values(kind: type[Settings]) -> None:
    one, other = kind(), pickle.loads(pickle.dumps(kind()))
    assert one == other
    assert {one: 1}[other] == 1
    with pytest.raises(ValidationError, match="frozen"):
        setattr(one, next(iter(kind.model_fields)), 1)


def test_settings_made_in_python_are_checked_like_those_of_a_file() -> None:
    with pytest.raises(ConfigError, match="entry: got 'max'; allowed: binary, count, sum"):
        EdgeSettings(inputs="x", entry="max")
    with pytest.raises(ConfigError, match=r"unknown name: got rnak.*Did you mean rank\?"):
        SolverSettings(**{"rnak": 3})
    with pytest.raises(ConfigError, match="rank: got True; allowed: a whole number"):
        SolverSettings(rank=True)
    with pytest.raises(ConfigError, match="seed: got -1"):
        SolverSettings().changed(seed=-1)
    assert SolverSettings(rank=np.int64(7)).rank == 7
    assert JobConfig(rank=7, reduce="last:3").only(FitSettings) == FitSettings(rank=7, reduce="last:3")
    minus = JobConfig(rank=7, model="toffee-").solver_settings()
    assert minus == SolverSettings(rank=7, reg_a=0.0, reg_r=0.0)


def test_the_estimator_has_the_options_of_the_settings() -> None:
    """Names and defaults; a batch job says beyond them which results to write, and of which model."""
    given = inspect.signature(Toffee.__init__).parameters
    defaults = {name: parameter.default for name, parameter in given.items() if name != "self"}
    fields = ModelSettings.model_fields.items()
    dense = {"dense", "dense_nodes", "dense_precision"}
    others = {"outputs", "model", "vectors", *dense, *RivalSettings.model_fields}
    assert defaults == {name: field.default for name, field in fields if name not in others}


def test_every_setting_is_an_option_and_says_what_it_is() -> None:
    options = {parameter.name: parameter for parameter in cli.commands["embed"].params}
    for group in (EdgeSettings, ModelSettings, RuntimeSettings, JobConfig):
        for name, field in group.model_fields.items():
            assert field.description
            assert field.description[0].isupper() or field.description[0] == "("
            assert field.description.endswith(".")
            assert name in options
    assert isinstance(options["rank"], click.Option)
    assert "[default: 128]" in (options["rank"].help or "")


@pytest.mark.parametrize("command", sorted(cli.commands))
def test_help_has_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([command, "--help"])
    text = capsys.readouterr().out
    assert "Example:" in text
    assert f"toffee {command}" in text


@pytest.mark.job
def test_plan_embed_and_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    edges = write_edges(tmp_path / "e.parquet", nodes=200, events=3000)
    config = tmp_path / "job.toml"
    config.write_text(
        f'inputs = ["{edges}"]\nout = "{tmp_path / "out"}"\nrank = 8\nmode = "threads"\n'
        'outputs = "embedding,trajectory"\nfreqs = "lowest:5"\ntrajectory_by = "als"\n'
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
    assert shape["n_entries"] >= exact["entries"]


@pytest.mark.cluster
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
    assert "solve zero: 1 task in" in done.stderr
    assert "published" in done.stdout


@pytest.mark.cluster
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
