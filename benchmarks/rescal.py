"""RESCAL on email by days: ours against a straightforward scipy loop, the same updates from the same start.

The loop is what one writes: a sparse product per snapshot and side, dense r×r algebra per snapshot, one dense
solve for A. It skips empty days too. In double precision and in single, like ours.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from graphs import DAY, load_graph
from numpy.typing import NDArray
from report import one_thread, print_json, print_table, timed

from toffee_dist import TemporalTensor
from toffee_dist.models.rescal import solve_rescal
from toffee_dist.settings import SolverSettings
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tasks import run_here

RANK = 128
REG = 0.01
Array = NDArray[Any]


def snapshots(tensor: TemporalTensor, dtype: Any) -> list[Any]:
    pair = tensor.entry_pairs
    i, j, shape = tensor.sources[pair], tensor.indices[pair], (tensor.n_nodes, tensor.n_nodes)
    found = []
    for t in np.unique(tensor.steps):
        at = tensor.steps == t
        found.append(sp.csr_matrix((tensor.values[at].astype(dtype), (i[at], j[at])), shape=shape))
    return found


def straightforward(X: list[Any], A: Array, iterations: int) -> list[float]:
    """Run ALS and return the objective at the start and after every iteration."""
    history = []
    eye = np.eye(A.shape[1], dtype=A.dtype)
    norm2 = sum(float(np.square(matrix.data).sum()) for matrix in X)
    for iteration in range(iterations + 1):
        G = A.T @ A
        w, V = np.linalg.eigh(G)
        inverse = 1 / (np.multiply.outer(w, w) + REG)
        numerator, normal, value = np.zeros_like(A), REG * eye, norm2 + REG * np.trace(G)
        for matrix in X:
            XA, XtA = matrix @ A, matrix.T @ A
            C = A.T @ XA
            R = V @ ((V.T @ C @ V) * inverse) @ V.T
            numerator += XA @ R.T + XtA @ R
            GR = G @ R
            normal += R @ G @ R.T + R.T @ GR
            value += float((R * (GR @ G)).sum() - 2 * (R * C).sum() + REG * np.square(R).sum())
        history.append(0.5 * value)
        if iteration < iterations:
            A = np.linalg.solve(normal, numerator.T).T
    return history


def ours_in_files(tensor: TemporalTensor, options: SolverSettings, start: Array) -> list[float]:
    """Fit through a folder, as every fit does, and return the objectives."""
    with tempfile.TemporaryDirectory(prefix="toffee-") as name:
        folder = Path(name)
        stage_tensor(tensor, folder / "tensor")
        np.save(folder / "start.npy", start)
        work = folder / "work"
        return solve_rescal(
            str(folder / "tensor"), work, options, "sum", run_here, folder / "start.npy"
        ).history


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    arguments = parser.parse_args()
    one_thread()
    tensor = load_graph("email").tensor(DAY)
    start = np.random.default_rng(0).standard_normal((tensor.n_nodes, RANK)) / np.sqrt(tensor.n_nodes)
    options = SolverSettings(rank=RANK, reg_a=REG, reg_r=REG, tol=1e-12, max_iter=arguments.iterations)
    double, single = (snapshots(tensor, dtype) for dtype in (np.float64, np.float32))
    results = timed(
        lambda: ours_in_files(tensor, options, start),
        lambda: straightforward(double, start, arguments.iterations),
        lambda: straightforward(single, start.astype(np.float32), arguments.iterations),
        repeats=arguments.repeats,
    )
    (ours, history), (loop, reference), (loop_single, _) = results
    sweeps = arguments.iterations + 1
    rows: list[list[object]] = []
    names = ("toffee_dist, single", "loop, double", "loop, single")
    for name, (seconds, values) in zip(names, results, strict=True):
        rows.append(
            [name, f"{seconds:.2f}", f"{seconds / sweeps:.2f}", f"{seconds / ours:.2f}", f"{values[-1]:.2f}"]
        )
    print_table(
        f"RESCAL, email by days ({len(double)} of {tensor.n_steps} days have edges), rank {RANK}",
        ["", "CPU s", "per sweep", "times ours", "objective"],
        rows,
    )
    difference = max(abs(a / b - 1) for a, b in zip(history, reference, strict=True))
    print(f"largest relative difference of the objectives from the loop in double: {difference:.1e}")
    print_json(
        {
            "speedup": round(loop / ours, 2),
            "speedup_single": round(loop_single / ours, 2),
            "seconds": round(ours, 2),
            "objective_difference": difference,
        }
    )


if __name__ == "__main__":
    main()
