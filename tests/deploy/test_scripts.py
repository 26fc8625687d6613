"""Every script of jobs/ and benchmarks/ runs, at its smallest size, and says what it should."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.harness.clusters import write_edges
from toffee_dist import load_run
from toffee_dist.settings import JobConfig

pytestmark = pytest.mark.cluster


def run(*command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def last_line(output: str) -> Any:
    return json.loads(output.strip().splitlines()[-1])


@pytest.mark.job
def test_demo_finds_what_was_planted(tmp_path: Path) -> None:
    output = run("jobs/demo.py", str(tmp_path / "demo"))
    assert "every 7.0 days" in output
    assert "every 24.0 hours" in output
    assert "1.00 from its vector then" in output
    assert (load_run(tmp_path / "demo" / "vectors").path / "report.html").exists()
    assert "report.html (open it in a browser)" in output
    # A second time it replaces the first; a folder of something else it leaves alone.
    run("jobs/demo.py", str(tmp_path / "demo"))
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thing").touch()
    refused = subprocess.run(
        [sys.executable, "-m", "toffee_dist.cli", "demo", "--out", str(tmp_path / "other")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert refused.returncode == 2
    assert "holds other things" in refused.stderr


@pytest.mark.job
def test_embed_job(tmp_path: Path) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=600)
    out = tmp_path / "out"
    job = ["jobs/embed.py", "jobs/embed.toml", f"--out={out}", "--rank=4", str(edges)]
    assert "published" in run(*job)
    assert load_run(out).rank == 4
    assert JobConfig.read({}, str(ROOT / "jobs" / "embed.toml")).outputs == ("embedding", "trajectory")
    # Lines that are commented out are valid too.
    text = (ROOT / "jobs" / "embed.toml").read_text().replace('mode = "auto"', "")
    for key in ("mode", "tls_ca", "tls_cert", "tls_key"):
        text = text.replace(f"# {key} =", f"{key} =")
    (tmp_path / "all.toml").write_text(text)
    assert JobConfig.read({}, str(tmp_path / "all.toml")).mode.startswith("tls://")


@pytest.mark.slow
def test_scaling_benchmark() -> None:
    small = ["--nodes", "400", "--events", "4000", "--days", "30", "--rank", "8", "--repeats", "1"]
    result = last_line(run("benchmarks/scaling.py", *small))
    assert set(result) == {"two_process_speedup", "threads_speedup", "overhead"}
    large = last_line(run("benchmarks/scaling.py", "--large", *small[:4], "--rank", "8"))
    assert large["nodes"] <= 400
    assert large["peak_mib"] > 100


@pytest.mark.slow
@pytest.mark.data
def test_solver_benchmark(shared_data: Path) -> None:
    result = last_line(run("benchmarks/solver.py", "--quick"))
    assert {"compressed_speedup", "small_speedup"} < set(result)
    assert result["email_gap"] < 0.003


@pytest.mark.slow
@pytest.mark.data
def test_quality_benchmark(shared_data: Path) -> None:
    result = last_line(run("benchmarks/quality.py", "--seeds", "10", "--graphs", "hypertext", "workplace"))
    assert result["hypertext"]["toffee"] >= 0.9046 - 0.003
    assert result["workplace"]["toffee"] >= 0.9468 - 0.003
    for scores in result.values():
        assert scores["toffee"] > scores["raw"] + 0.05


@pytest.mark.slow
def test_rhythm_benchmark() -> None:
    cases = last_line(run("benchmarks/rhythm.py", "--seeds", "1", "--degrees", "0.66", "--still", "5"))
    for case in cases:
        assert case["auto"] >= 0.88
        assert case["auto"] > max(case["static"], case["unfolded_svd"], case["snapshot_svd"], case["raw"])
    assert cases[0]["weekly_found"]


@pytest.mark.slow
@pytest.mark.data
def test_defaults_benchmark(shared_data: Path) -> None:
    result = last_line(run("benchmarks/defaults.py", "--seeds", "1", "--graphs", "workplace", "--quick"))
    assert result["binary unit 0.01"] > result["count raw 0.01"]


@pytest.mark.slow
@pytest.mark.data
def test_rescal_benchmark(shared_data: Path) -> None:
    result = last_line(run("benchmarks/rescal.py", "--iterations", "1", "--repeats", "1"))
    assert "speedup" in result
    assert result["objective_difference"] < 1e-4


@pytest.mark.slow
@pytest.mark.data
def test_models_benchmark(shared_data: Path) -> None:
    result = last_line(run("benchmarks/models.py", "--graph", "workplace"))
    assert result["ctdne"] >= 5
    assert result["htne"] >= 10


@pytest.mark.slow
@pytest.mark.data
def test_paper_benchmark_goes_on(shared_data: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture.svg"
    command = ["--seeds", "1", "--graphs", "wildbird", "--systems", "tne", "toffee", "memory"]
    command += ["--keep", str(tmp_path / "kept"), "--picture", str(picture)]
    first = run("benchmarks/paper.py", *command)
    assert "(0.7018)" in first
    assert last_line(run("benchmarks/paper.py", *command)) == last_line(first)
    assert "toffee" in picture.read_text()


@pytest.mark.slow
@pytest.mark.data
def test_evaluate_benchmark(shared_data: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    command = ["--seeds", "3", "--graphs", "workplace", "--page", str(page)]
    output = run("benchmarks/evaluate.py", *command)
    assert "protocol link-paper" in output
    assert "the paper says" in output
    scores = last_line(output)["workplace"]
    assert all(scores["toffee"] >= score - 0.003 for score in scores.values())
    assert page.exists()


@pytest.mark.slow
def test_future_benchmark() -> None:
    marks = last_line(run("benchmarks/future.py", "--graphs", "planted"))["planted"]
    assert marks["chosen"] > marks["decayed"] > marks["count"]


@pytest.mark.slow
@pytest.mark.cluster
def test_security_benchmark() -> None:
    result = last_line(run("benchmarks/security.py", "--repeats", "1", "--workers", "1"))
    assert result["processes_start_seconds"] > 0
    assert "tls_start_seconds" in result


@pytest.mark.slow
@pytest.mark.job
def test_syncing_benchmark() -> None:
    sizes = ("--nodes=300", "--events=3000", "--rank=4", "--repeats=1")
    result = last_line(run("benchmarks/syncing.py", *sizes))
    assert result["syncs"] > 20
    assert 0 <= result["share"] < 1
    assert {"cost", "plain_seconds", "synced_seconds"} <= result.keys()


@pytest.mark.slow
@pytest.mark.job
def test_large_graphs_benchmark() -> None:
    sizes = last_line(run("benchmarks/large.py", "--only=sizes", "--sizes=0.001,0.002", "--undirected"))[
        "sizes"
    ]
    assert list(sizes) == ["0.001", "0.002"]
    for found in sizes.values():
        assert 0 < found["peak_mib"] <= found["planned_mib"]
        assert found["seconds"] > 0
    gap = last_line(run("benchmarks/large.py", "--only=gap", "--gap-nodes=2000", "--rank=16"))
    assert 0 <= gap["energy_gap"] < 1e-4


def test_makefile_reads_the_worker_environment() -> None:
    settings = (ROOT / "deploy" / "worker.env").read_text().split()
    assert {"OPENBLAS_NUM_THREADS=1", "OMP_NUM_THREADS=1"} <= set(settings)
    shown = subprocess.run(
        ["make", "--dry-run", "--print-data-base", "clean"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "OPENBLAS_NUM_THREADS=1" in shown.replace(" ", "")
