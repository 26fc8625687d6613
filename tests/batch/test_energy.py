"""The basis of all energy in blocks of nodes: equal to that of one task, and resumable, to the byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.harness.clusters import Stopped, digests, job, write_edges
from tests.harness.strategies import random_tensor
from toffee_dist import TemporalTensor, load_run
from toffee_dist.batch import energy
from toffee_dist.batch.pipeline import start_run
from toffee_dist.batch.plan import Shape
from toffee_dist.batch.stages import make_plan
from toffee_dist.kernels.energy_basis import energy_basis
from toffee_dist.limits import Limits
from toffee_dist.settings import JobConfig, SolverSettings
from toffee_dist.storage.slices import array_path, load_rows
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import run_here

OPTIONS: dict[str, Any] = {
    "rank": 4,
    "outputs": ("trajectory",),
    "trajectory_by": "filter",
    "basis": "energy",
    "mode": "threads",
}


def staged(tensor: TemporalTensor, folder: Path, **options: Any) -> energy.EnergyTask:
    stage_tensor(tensor, folder / "tensor")
    (folder / "slices").mkdir(exist_ok=True)
    settings = SolverSettings(rank=5, precision="double").changed(**options)
    return energy.EnergyTask(str(folder / "tensor"), str(folder / "slices"), settings)


def basis_of(task: energy.EnergyTask) -> np.ndarray:
    return load_rows(array_path(Path(task.slices), "V", energy.ENERGY))


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("bounds", [(0, 120), (0, 50, 120), (0, 7, 30, 60, 61, 120)])
def test_any_number_of_blocks(tmp_path: Path, bounds: tuple[int, ...], directed: bool) -> None:
    tensor = random_tensor(3, 120, 6, 1500, directed=directed)
    task = staged(tensor, tmp_path)
    counts = energy.solve_in_blocks(run_here, task, bounds)
    assert counts["passes"] > 10
    np.testing.assert_allclose(basis_of(task), energy_basis(tensor, task.options), atol=1e-5)
    # It is there: nothing is done again, and nothing else is left.
    assert energy.solve_in_blocks(run_here, task, bounds) == {}
    assert not [path for path in (tmp_path / "slices").iterdir() if path.is_dir()]


@pytest.mark.parametrize("bounds", [(0, 50, 120), (0, 7, 30, 60, 61, 120)])
def test_a_product_in_blocks_is_that_of_the_matrix(tmp_path: Path, bounds: tuple[int, ...]) -> None:
    tensor = random_tensor(3, 120, 6, 1500)
    matrix = energy.cut_energy(run_here, staged(tensor, tmp_path), bounds)
    X = np.asarray(tensor.to_coo().todense())
    slow = sum(X[:, :, t].T @ X[:, :, t] for t in range(6)) - np.diag((X**2).sum(axis=(0, 2)))
    F, L = (_stacked(matrix, side, bounds) for side in ("X", "Xh"))
    product = L(F(np.eye(120)))
    np.testing.assert_allclose(product * matrix.first.size**2, slow, atol=1e-9 * np.abs(slow).max())


def _stacked(matrix: Any, side: str, bounds: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    """The rows of all blocks, as what multiplies a dense array."""

    def multiply(Q: np.ndarray) -> np.ndarray:
        rows = []
        for index in range(len(bounds) - 1):
            indptr, indices, values = matrix.first.matrix.load_matrix(side, index)
            for a, b in pairwise(indptr):
                assert (np.diff(indices[a:b]) > 0).all()
                rows.append(values[a:b] @ Q[indices[a:b]])
        return np.array(rows)

    return multiply


def test_nothing_to_find(tmp_path: Path) -> None:
    lonely = TemporalTensor.from_events(
        np.array([0, 1, 2]), np.array([1, 2, 0]), np.array([0, 0, 1]), n_nodes=5, n_steps=2
    )
    task = staged(lonely, tmp_path)
    energy.solve_in_blocks(run_here, task, (0, 2, 5))
    V = basis_of(task)
    assert V.shape == (5, 5)
    assert not V.any()


@pytest.mark.parametrize("tasks", [1, 4, 9, 30, 61])
def test_killed_anywhere_it_goes_on_there(tmp_path: Path, tasks: int) -> None:
    """Killed after so many tasks, in cutting as in the middle of a pass: the bytes of one that was not."""
    tensor, bounds = random_tensor(3, 120, 6, 1500), (0, 50, 90, 120)
    whole = staged(tensor, tmp_path / "whole", precision="single")
    counts = energy.solve_in_blocks(run_here, whole, bounds)
    task = staged(tensor, tmp_path / "killed", precision="single")
    done: list[str] = []

    def run_some(function: Callable[[Any], Any], items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            if len(done) == tasks:
                raise Stopped
            done.append(function.__name__)
            yield function(item)

    with pytest.raises(Stopped):
        energy.solve_in_blocks(run_some, task, bounds)
    again = energy.solve_in_blocks(run_here, task, bounds)
    passes = done.count("run_pass")
    assert (again["reused"], again["blocks_reused"]) == divmod(passes, 3)
    assert again["passes"] == counts["passes"]
    assert basis_of(task).tobytes() == basis_of(whole).tobytes()


@pytest.fixture(scope="module")
def edges(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_edges(tmp_path_factory.mktemp("energy") / "edges.parquet", nodes=250, events=5000, days=12)


@pytest.mark.job
def test_a_job_has_the_same_bytes_however_many_threads(edges: Path, tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        config = job(edges, tmp_path / f"threads-{workers}", workers=workers, dense="all", **OPTIONS)
        outcome = start_run(config, limits=Limits(block_work=1700))
        assert "energy basis" in outcome.seconds
        found.append(digests(outcome.run.path))
    assert found[0] == found[1]


@pytest.mark.job
def test_trajectories_of_any_number_of_blocks(edges: Path, tmp_path: Path) -> None:
    vectors = []
    for blocks, work in ((1, Limits().block_work), (2, 5000), (5, 1500)):
        config = job(edges, tmp_path / str(blocks), precision="double", keep_work=True, **OPTIONS)
        outcome = start_run(config, limits=Limits(block_work=work))
        assert len(list(outcome.run.slices.glob("V-energy*.npy"))) == blocks
        vectors.append(load_run(outcome.run.out).trajectory.numpy())
    for other in vectors[1:]:
        np.testing.assert_allclose(other, vectors[0], atol=1e-5)


def test_the_plan_knows_the_passes_and_that_no_task_holds_all_nodes() -> None:
    config = JobConfig.read({"outputs": ("trajectory",), "basis": "energy", "rank": 64})
    small, large = (
        {
            stage.name: stage
            for stage in make_plan(Shape(n, 50, 10 * n, 20 * n, True, 0, exact=True), config).stages
        }
        for n in (20_000, 20_000_000)
    )
    assert (small["energy basis"].tasks, small["energy basis"].passes) == (1, 1)
    stage = large["energy basis"]
    assert stage.tasks > 10
    assert stage.passes > 50
    assert stage.task_bytes < 4 * 20_000_000 * 64 / 2
    assert stage.moved > stage.disk > 0
