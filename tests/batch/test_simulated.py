"""Whole jobs on a simulated cluster: tasks in any order, twice, late, lost, half done; the same bytes."""

from __future__ import annotations

from pathlib import Path

import pytest
from simulate import KINDS, Bench, SimulatedCluster, digests, run_seeds, simulated

pytestmark = [pytest.mark.slow, pytest.mark.job]


def test_a_few_dozen_seeds() -> None:
    said: list[str] = []
    result = run_seeds(24, say=said.append)
    assert said == []
    assert (result["seeds"], result["different"], result["lost"]) == (24, 0, 0)
    # Every kind of trouble came, more than once.
    troubles = ("died", "twice", "late", "lost", "taken for dead", "client killed")
    assert all(result[f"met {trouble}"] > 1 for trouble in troubles)


@pytest.mark.parametrize("kind", KINDS)
def test_a_client_that_is_killed_anywhere(kind: str, tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.prepare(kind)
    for seed, moves in enumerate(range(3, 400, 45)):
        out = bench.make_out(kind, f"{moves}")
        with simulated(SimulatedCluster(seed, kill_after=moves)) as cluster:
            run, kills = bench.run_through(kind, out)
            cluster.drain()
        assert digests(run) == bench.expected[kind], moves
        assert kills == (cluster.kill_after is None)


def test_a_seed_repeats(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.prepare("refresh")
    assert bench.run_seed(7, "refresh") == bench.run_seed(7, "refresh")


def test_what_differs_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation is no use where it does not see a task that depends on what was there."""
    from toffee_dist.batch import solve
    from toffee_dist.kernels.solvers import solve_slices as real

    bench = Bench(tmp_path)
    bench.prepare("embed")

    def only_missing(tensor, freqs, options, start, missing):  # type: ignore[no-untyped-def]
        return real(tensor, missing, options, start)

    monkeypatch.setattr(solve, "solve_slices", only_missing)
    # About one seed in seven stops a batch where it matters.
    assert any(bench.run_seed(seed, "embed")[0].startswith("different: ") for seed in range(60))
