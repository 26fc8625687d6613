"""How fast the solvers are: the same slices, precision and thread, in one run; CPU seconds.

(a) mathoverflow by weeks, rank 64: `compressed` to the objective that `als` from random has after 60
iterations. (b) workplace by hours, rank 64, 32 slices: `auto` to the objective that `als` from random has
after 100. (c) email by days, rank 128: all 403 slices with `auto`, and the gap to the best objective found.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from graphs import load_graph
from report import one_thread, print_json, print_table, timed

from toffee_dist import TemporalTensor
from toffee_dist.kernels.solvers import SliceReport, solve_slice, solve_slices
from toffee_dist.kernels.spectrum import count_freqs, iter_values, slice_matrix
from toffee_dist.settings import SolverSettings


def _report(matrix: Any, k: int, options: SolverSettings) -> SliceReport:
    return solve_slice(matrix, k, options).report


def reach(
    tensor: TemporalTensor, k: int, rank: int, iterations: int, fast: SolverSettings, repeats: int
) -> tuple[float, float, SliceReport, SliceReport]:
    """Return seconds of plain ALS, seconds of the other solver to its objective, and both reports."""
    ((_, values),) = iter_values(tensor, [k])
    matrix = slice_matrix(tensor, values)
    plain = SolverSettings(rank=rank, solver="als", tol=1e-12, max_iter=iterations)
    target = _report(matrix, k, plain).objective
    for limit in range(1, iterations + 1):
        options = fast.changed(rank=rank, max_iter=limit)
        if _report(matrix, k, options).objective <= target:
            break
    (als_seconds, als), (seconds, found) = timed(
        partial(_report, matrix, k, plain), partial(_report, matrix, k, options), repeats=repeats
    )
    return als_seconds, seconds if found.objective <= target else float("inf"), als, found


def large(freqs: Sequence[int], repeats: int, pair_weight: str) -> float:
    tensor = load_graph("mathoverflow", self_loops=False).tensor(7 * 86_400, pair_weight=pair_weight)
    rows, speedups = [], []
    for k in freqs:
        fast = SolverSettings(solver="compressed", tol=2e-5)
        slow_s, fast_s, als, found = reach(tensor, k, 64, 60, fast, repeats)
        speedups.append(slow_s / fast_s)
        gain = 1 - found.objective / als.objective
        rows.append(
            [k, f"{slow_s:.2f}", f"{fast_s:.2f}", found.iterations, f"{gain:.5f}", f"{slow_s / fast_s:.1f}x"]
        )
    header = ["k", "als 60 its, s", "compressed, s", "full steps", "lower by", "speedup"]
    print_table(f"(a) {tensor}, pair_weight={pair_weight}, rank 64", header, rows)
    return min(speedups)


def small(n_slices: int, repeats: int) -> float:
    tensor = load_graph("workplace").tensor(3600, directed=False)
    freqs = np.linspace(1, count_freqs(tensor.n_steps) - 2, n_slices).round().astype(int)
    slow_total, fast_total, steps = 0.0, 0.0, []
    for k in freqs:
        slow_s, fast_s, _, found = reach(tensor, int(k), 64, 100, SolverSettings(tol=1e-6), repeats)
        slow_total += slow_s
        fast_total += fast_s
        steps.append(found.iterations)
    rows = [[n_slices, f"{slow_total:.2f}", f"{fast_total:.2f}", f"{np.mean(steps):.1f}"]]
    rows[0].append(f"{slow_total / fast_total:.1f}x")
    header = ["slices", "als 100 its, s", "auto, s", "iterations", "speedup"]
    print_table(f"(b) {tensor}, rank 64", header, rows)
    return slow_total / fast_total


def whole(stride: int, reference: int) -> tuple[float, float]:
    """Solve every stride-th slice of email, and every reference-th of those much longer."""
    tensor = load_graph("email").tensor(86_400)
    freqs = list(range(0, count_freqs(tensor.n_steps), stride))
    options = SolverSettings(rank=128)
    ((seconds, found),) = timed(lambda: [f.report for f in solve_slices(tensor, freqs, options)])
    gaps = []
    for report in found[::reference]:
        longer = options.changed(tol=1e-7, max_iter=500)
        rivals = [longer.changed(seed=1), longer.changed(solver="als", max_iter=300)]
        best = min(next(solve_slices(tensor, [report.k], rival)).report.objective for rival in rivals)
        gaps.append(max(report.objective / min(best, report.objective) - 1, 0.0))
    iterations = np.mean([report.iterations for report in found])
    converged = sum(report.converged for report in found)
    header = ["slices", "seconds", "s a slice", "full steps", "converged", "compared", "mean gap", "worst"]
    row = [len(found), f"{seconds:.0f}", f"{seconds / len(found):.2f}", f"{iterations:.1f}", converged]
    row += [len(gaps), f"{np.mean(gaps):.5f}", f"{max(gaps):.5f}"]
    print_table(f"(c) {tensor}, rank 128, auto", header, [row])
    return seconds, float(np.mean(gaps))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one slice of each: does it run?")
    parser.add_argument("--pair-weight", default="raw", help="of (a): raw is the paper's adjacency")
    arguments = parser.parse_args()
    one_thread()
    if arguments.quick:
        result = (large([52], 1, arguments.pair_weight), small(2, 1), *whole(200, 2))
    else:
        result = (large([1, 52, 150], 3, arguments.pair_weight), small(32, 3), *whole(1, 26))
    names = ("compressed_speedup", "small_speedup", "email_seconds", "email_gap")
    print_json({name: round(value, 5) for name, value in zip(names, result, strict=True)})


if __name__ == "__main__":
    main()
