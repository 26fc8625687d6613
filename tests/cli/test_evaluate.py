"""The command and the job: what they print, how they fail, what they leave behind."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.harness import ROOT, clusters
from toffee_dist.cli import main
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.job import ALL_MODELS, EvaluateSettings, parse_grid

Toffee = Callable[..., tuple[int, str, str]]


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    source = rng.integers(0, 30, 800)
    target = np.where(
        rng.random(800) < 0.8, source // 10 * 10 + rng.integers(0, 10, 800), rng.integers(0, 30, 800)
    )
    table = pl.DataFrame({"source": source, "target": target, "time": np.sort(rng.integers(0, 60, 800))})
    table.write_parquet(tmp_path / "edges.parquet")
    return tmp_path / "edges.parquet"


@pytest.fixture
def toffee(capsys: pytest.CaptureFixture[str]) -> Toffee:
    def run(*arguments: str) -> tuple[int, str, str]:
        code = 0
        try:
            main(["evaluate", *arguments])
        except SystemExit as stop:
            code = int(stop.code or 0)
        captured = capsys.readouterr()
        assert "Traceback" not in captured.err
        return code, captured.out, captured.err

    return run


@pytest.mark.job
def test_tables_and_files(toffee: Toffee, edges: Path, tmp_path: Path) -> None:
    out = tmp_path / "quality"
    protocols = [word for name in ("link-paper", "link-new", "link-hard") for word in ("--protocol", name)]
    code, text, _ = toffee(
        str(edges),
        "--out",
        str(out),
        "--step",
        "1",
        "--rank",
        "8",
        "--seeds",
        "2",
        *protocols,
        "--future",
        "7",
    )
    assert code == 0
    for line in ("link-paper: Micro-F1", "link-new: ", "link-hard: ", "toffee-", "rescal", "rhythm-decayed"):
        assert line in text
    cells = pl.read_parquet(out / "cells.parquet")
    assert cells.height == 3 * 2 * (4 * 5 + 2)
    result = json.loads((out / "result.json").read_text())
    assert len(result["cells"]) == cells.height
    assert result["summary"][0]["micro_f1_sd"] >= 0
    assert pl.read_parquet(out / "steps.parquet").height == 7 * 11
    assert "report.html" in {path.name for path in out.iterdir()}
    assert len(list((out / "splits").glob("*.parquet"))) == 6


@pytest.mark.job
def test_json_splits_and_grid(toffee: Toffee, edges: Path, tmp_path: Path) -> None:
    common = [
        str(edges),
        "--step",
        "1",
        "--undirected",
        "--seeds",
        "1",
        "--model",
        "toffee",
        "--features",
        "hadamard",
    ]
    common += ["--json", "--splits", str(tmp_path / "splits")]
    code, text, said = toffee(
        *common, "--out", str(tmp_path / "a"), "--grid", "rank=2,8", "--grid", "reg=1e-4,0.1"
    )
    assert code == 0
    assert "chosen on the validation part" in said
    summary = json.loads(text)["summary"]
    assert [row["part"] for row in summary] == ["validation"] * 4 + ["test"]
    code, text, _ = toffee(*common, "--out", str(tmp_path / "b"), "--rank", "8")
    assert code == 0
    assert len(list((tmp_path / "splits").glob("*.parquet"))) == 1
    code, _, said = toffee(
        *common[:2], "2", *common[3:], "--out", str(tmp_path / "c"), "--rank", "8", "--until", "30"
    )
    assert code == 3
    assert "another graph" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "edges.parquet", "splits"]


@pytest.mark.job
@pytest.mark.cluster
def test_models_on_processes(toffee: Toffee, edges: Path, tmp_path: Path) -> None:
    models = "rescal,tne,ctdne,htne,hnip,toffee-paper"
    common = [str(edges), "--step", "1", "--seeds", "1", "--models", models, "--rank", "4", "--json"]
    common += ["--epochs", "2", "--features", "hadamard", "--max-iter", "5"]
    here = toffee(*common, "--out", str(tmp_path / "a"))
    there = toffee(*common, "--out", str(tmp_path / "b"), "--workers", "2", "--cache", str(tmp_path / "kept"))
    marks = [[row["micro_f1"] for row in json.loads(text)["summary"]] for _, text, _ in (here, there)]
    assert len(marks[0]) == 6
    assert marks[0] == marks[1]
    assert sorted(path.name for path in (tmp_path / "kept").iterdir()) == ["cells", "fits"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--protocol", "link-easy"], 2, "protocol: got 'link-easy'"),
        (["--model", "gcn"], 2, "model: got 'gcn'"),
        (["--features", "cosine"], 2, "features: got 'cosine'"),
        (["--grid", "rank"], 2, "NAME=VALUE"),
        (["--grid", "rank=a"], 2, "grid of rank"),
        (["--grid", "entry=most"], 2, "binary, count, sum"),
        (["--grid", "entry=sum"], 2, "Add --entry sum"),
        (["--reduce", "decay:0"], 2, "reduce"),
        (["--rank", "0"], 2, "rank: got 0"),
        (["--protocol", "none"], 2, "needs --future or --labels"),
        (["--nonsense"], 2, "No such option"),
        (["--mode", "tcp://127.0.0.1:1"], 2, "Add --cache DIR"),
        (["--models", "all", "--reduce", "last:3"], 2, "reduce of model"),
        (["--future", "55"], 3, "two periods"),
        (["--labels", "nowhere.csv"], 3, "cannot read labels"),
        (["--source", "nothing"], 2, "--source: got nothing"),
    ],
)
def test_errors(
    toffee: Toffee, edges: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    base = ["--out", str(tmp_path / "out"), "--step", "1", "--seeds", "1", "--model", "toffee", "--rank", "4"]
    found, _, said = toffee(str(edges), *base, *arguments)
    assert (found, message in said) == (code, True), said
    assert [path.name for path in tmp_path.iterdir()] == ["edges.parquet"]


def test_too_few_links(toffee: Toffee, tmp_path: Path) -> None:
    (tmp_path / "few.csv").write_text("1,2,1\n2,3,2\n3,4,3\n4,1,4\n")
    code, _, said = toffee(str(tmp_path / "few.csv"), "--out", str(tmp_path / "out"), "--step", "1")
    assert code == 3
    assert "too few pairs for link-paper" in said
    assert [path.name for path in tmp_path.iterdir()] == ["few.csv"]


def test_an_output_that_exists_is_not_touched(toffee: Toffee, edges: Path, tmp_path: Path) -> None:
    code, _, said = toffee(str(edges), "--out", str(tmp_path))
    assert code == 2
    assert "which exists" in said
    code, _, said = toffee("nowhere.csv", "--out", str(tmp_path / "out"))
    assert code in (2, 3)
    assert "nowhere.csv" in said


def test_help_has_an_example(toffee: Toffee) -> None:
    code, text, _ = toffee("--help")
    assert code == 0
    assert "\n    toffee evaluate edges/*.parquet --out quality" in text


def test_grid_words() -> None:
    assert parse_grid(["pair_weight=unit,log"]) == {"pair_weight": ["unit", "log"]}
    with pytest.raises(ConfigError, match="rank, reg, entry, pair_weight, reduce"):
        parse_grid(["tol=1"])


def test_the_commented_toml_is_valid(tmp_path: Path) -> None:
    shipped = (ROOT / "jobs" / "evaluate.toml").read_text()
    plain = EvaluateSettings.read({}, str(ROOT / "jobs" / "evaluate.toml"))
    assert plain.inputs == ("edges/*.parquet",)
    for key in ("grid", "future", "splits", "period"):
        shipped = shipped.replace(f"# {key}", key)
    (tmp_path / "all.toml").write_text(shipped)
    whole = EvaluateSettings.read({"seeds": 1}, str(tmp_path / "all.toml")).job()
    assert whole.config.seeds == 1
    assert whole.future is not None
    assert whole.config.grid["rank"] == [32, 64, 128]


@pytest.mark.cluster
def test_the_job_runs(edges: Path, tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        f'inputs = "{edges}"\nstep = "1"\nseeds = 1\nmodel = "toffee,memory"\nrank = 4\nout = "nowhere"\n'
    )
    job = [sys.executable, str(ROOT / "jobs" / "evaluate.py")]
    done = subprocess.run(
        [*job, str(tmp_path / "e.toml"), "--out", str(tmp_path / "out")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "link-paper: Micro-F1" in done.stdout
    (tmp_path / "e.toml").write_text("rnak = 4\n")
    done = subprocess.run([*job, str(tmp_path / "e.toml")], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "Did you mean rank?" in done.stderr


@pytest.mark.job
@pytest.mark.cluster
def test_all_models_on_a_running_cluster(toffee: Toffee, edges: Path, tmp_path: Path) -> None:
    """The marks of this process, a row per model on the page, and nothing is fitted twice."""
    words = [str(edges), "--step=1", "--rank=4", "--seeds=2", "--models=all", "--features=average,hadamard"]
    words += ["--epochs=2", "--walks=3", "--snapshots=2", "--max-iter=5"]
    assert toffee(*words, f"--out={tmp_path / 'here'}")[0] == 0
    kept = f"--cache={tmp_path / 'kept'}"
    with clusters.cluster(workers=2) as running:
        code, text, _ = toffee(*words, f"--out={tmp_path / 'there'}", f"--mode={running.address}", kept)
        assert code == 0, text
    here, there = (pl.read_parquet(tmp_path / name / "cells.parquet") for name in ("here", "there"))
    shared = ["model", "features", "seed", "micro_f1", "roc_auc"]
    assert here.select(shared).equals(there.select(shared))
    assert here["model"].unique(maintain_order=True).to_list() == list(ALL_MODELS)
    page = (tmp_path / "there" / "report.html").read_text()
    assert "Micro-F1 against the time to fit" in page
    for model in ALL_MODELS:
        own = there.filter((pl.col("model") == model) & pl.col("features").is_in(["average", "score"]))
        marks = own["micro_f1"].to_numpy()
        assert f"<th>{model}</th>" in page
        assert f"{marks.mean():.4f} ± {marks.std(ddof=1):.4f}" in page
    # The cluster is gone, and is not needed: all is there.
    assert toffee(*words, f"--out={tmp_path / 'again'}", kept)[0] == 0
    assert pl.read_parquet(tmp_path / "again" / "cells.parquet").equals(there)
