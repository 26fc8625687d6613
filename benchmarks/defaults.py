"""What the defaults of entry, pair_weight, λ and tol were chosen from.

Link prediction on validation parts cut from the learning time (the test parts are not read), for every
graph; and for tol, what stopping earlier or later costs and gains on slices of email and mathoverflow.
"""

from __future__ import annotations

import argparse

import numpy as np
from graphs import SOURCES, load_graph
from links import best_operator, draw_all
from report import one_thread, print_json, print_table

from toffee_dist import Toffee
from toffee_dist.evaluation.protocols import Split
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.settings import SolverSettings

WEIGHTS = [("binary", "unit"), ("binary", "log"), ("binary", "raw"), ("count", "log"), ("count", "raw")]
REGS = [0.0, 1e-4, 1e-2, 1e-1, 1.0]


def by_graph(name: str, seeds: int) -> dict[str, float]:
    """Return the best operator's F1 for every entry and pair_weight at λ = 0.01, and for every λ."""
    graph, source = load_graph(name), SOURCES[name]
    split = Split.validation(len(graph.time))
    examples = draw_all(graph, split, seeds)
    cases = [(entry, weight, 1e-2) for entry, weight in WEIGHTS]
    cases += [(*WEIGHTS[0], reg) for reg in REGS if reg != 1e-2]
    found = {}
    for entry, weight, reg in cases:
        learn = slice(0, split.learn)
        tensor = graph.tensor(source.step, learn, directed=False, entry=entry, pair_weight=weight)
        model = Toffee(rank=source.rank, reg_a=reg, reg_r=reg).fit(tensor)
        found[f"{entry} {weight} {reg:g}"] = best_operator(model.embedding_, examples)[0]
    return found


def by_tolerance() -> list[list[object]]:
    """Return seconds and the gap to the best objective found, for every tol."""
    rows: list[list[object]] = []
    for name, rank, freqs in (("email", 128, [3, 115, 300]), ("mathoverflow", 64, [1, 52, 150])):
        tensor = load_graph(name, self_loops=False).tensor(SOURCES[name].step)
        base = SolverSettings(rank=rank, max_iter=500)
        best = {f.k: f.report.objective for f in solve_slices(tensor, freqs, base.changed(tol=1e-7))}
        for tol in (1e-2, 1e-3, 1e-4, 1e-5):
            reports = [f.report for f in solve_slices(tensor, freqs, base.changed(tol=tol))]
            gaps = [report.objective / best[report.k] - 1 for report in reports]
            seconds = np.mean([report.seconds for report in reports])
            steps = np.mean([report.iterations for report in reports])
            rows.append([name, f"{tol:g}", f"{seconds:.2f}", f"{steps:.1f}", f"{np.mean(gaps):.5f}"])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--graphs", nargs="+", default=list(SOURCES), choices=list(SOURCES))
    parser.add_argument("--quick", action="store_true", help="leave the tolerances out")
    arguments = parser.parse_args()
    one_thread()
    found = {name: by_graph(name, arguments.seeds) for name in arguments.graphs}
    rows: list[list[object]] = []
    for case in next(iter(found.values())):
        scores = [found[name][case] for name in arguments.graphs]
        rows.append([case, *(f"{score:.4f}" for score in scores), f"{np.mean(scores):.4f}"])
    print_table("Validation Micro-F1: entry, pair_weight, λ", ["case", *arguments.graphs, "mean"], rows)
    if not arguments.quick:
        header = ["graph", "tol", "s a slice", "full steps", "above the best"]
        print_table("Tolerance, three slices each", header, by_tolerance())
    print_json({row[0]: float(str(row[-1])) for row in rows})


if __name__ == "__main__":
    main()
