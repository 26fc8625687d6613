"""Workers whose linear algebra is another: said, and allowed."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
from threadpoolctl import threadpool_info, threadpool_limits

from tests.harness import clusters
from tests.harness.clusters import job, write_edges
from toffee_dist.batch.pipeline import start_run
from toffee_dist.cluster.client import cluster
from toffee_dist.cluster.workers import Worker, compare_blas, describe_blas
from toffee_dist.progress import Progress


class Said(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_the_warning_counts_who_differs() -> None:
    here = describe_blas()
    assert here
    same = [Worker(f"tls://{number}", 1, 1, 0, here) for number in range(3)]
    assert compare_blas(same) == ""
    said = compare_blas([*same, Worker("tls://x", 1, 1, 0, "mkl 2025 for any processor")])
    assert said.startswith("Warning: 1 of 4 workers use another BLAS (mkl 2025 for any processor)")
    assert "bytes of results may differ" in said


@pytest.mark.job
@pytest.mark.cluster
@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of x86")
def test_a_worker_with_another_blas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenBLAS takes the code of another processor, as on an older machine."""
    if "openblas" not in describe_blas():
        pytest.skip("this is no OpenBLAS")
    edges, said = write_edges(tmp_path / "edges.parquet", nodes=60, events=800), Said()
    with clusters.cluster(workers=1, environment={"OPENBLAS_CORETYPE": "Nehalem"}) as running:
        outcome = start_run(job(edges, tmp_path / "out", mode=running.address, rank=4), said)
    assert outcome.run.complete
    [warning] = [line for line in said.lines if line.startswith("Warning")]
    assert "1 of 1 workers" in warning
    assert "for Nehalem" in warning


@pytest.mark.cluster
def test_beside_a_running_cluster_this_process_has_one_thread() -> None:
    """What a fit solves here, between its tasks, decides the bytes of what the workers do next."""

    def count() -> set[int]:
        return {found["num_threads"] for found in threadpool_info() if found["user_api"] == "blas"}

    with clusters.cluster(workers=1) as running, threadpool_limits(2, user_api="blas"):
        assert count() == {2}
        with cluster(running.address):
            assert count() == {1}
        assert count() == {2}
