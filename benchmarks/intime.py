"""Who is linked at a step, and when is a pair linked: hidden entries of real graphs, ours beside its rivals.

The protocol of `toffee evaluate --protocol in-time` (`toffee_dist.evaluation.in_time`): a fifth of the (pair,
step) entries hidden, AUC against other pairs at the same step (who) and the same pair at other steps (when).
Graphs are read as undirected, pairs weighted by log, rank 64. Bandwidths, and for every model how its scores
relate to activity, are chosen on a validation part. With `--validation` everything happens inside the entries
that models may see: defaults are to be chosen there. `--first-seed` draws other hidden entries: 0 was looked
at while scoring was decided, so figures to be trusted come from another one. The last line has per graph the
[who, when] of every model, half the width of their 95 % intervals, and the seconds of a fit.
"""

from __future__ import annotations

import argparse

import numpy as np
from graphs import DAY, load_graph
from report import one_thread, print_json, print_table

from toffee_dist.evaluation.in_time import Entries, InTimeCell, draw_questions, mark_model
from toffee_dist.settings import FitSettings

STEPS = {
    "email": DAY,
    "fb-forum": DAY,
    "workplace": 3600,
    "school": 900,
    "hypertext": 900,
    "mathoverflow": 7 * DAY,
}
RANK = 64
MODELS = {
    "toffee": "ours",
    "toffee-pairs": "with_pairs",
    "toffee-als": "als",
    "uase": "uase",
    "ipp": "ipp",
    "snapshot": "snapshot",
    "static": "static",
    "pair-count": "pair_count",
}
# An SVD of each of 337 graphs of 24,759 nodes.
LEFT_OUT = {"mathoverflow": ("snapshot",)}


def measure(name: str, models: list[str], seeds: range, weight: str, validation: bool) -> list[InTimeCell]:
    graph = load_graph(name, self_loops=False)
    entries = Entries.of(graph.tensor(STEPS[name], directed=False, pair_weight="raw"))
    cells = []
    for seed in seeds:
        questions = draw_questions(entries, seed)
        if validation:
            questions = draw_questions(questions.known, seed)
        for model in models:
            if model in LEFT_OUT.get(name, ()):
                continue
            cell = mark_model(model, questions, weight, FitSettings(rank=RANK), seed)  # type: ignore[arg-type]
            cells.append(cell)
            who, when = (
                f"who {cell.who:.4f} ± {1.96 * cell.who_error:.4f}",
                f"when {cell.when:.4f} ± {1.96 * cell.when_error:.4f}",
            )
            print(
                f"{name:>12} {model:>12}  {who}  {when}  {cell.fit_seconds:7.1f} s  {cell.settings}",
                flush=True,
            )
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0, help="of the draw of hidden entries")
    parser.add_argument("--weight", default="log", choices=["raw", "log", "unit"])
    parser.add_argument("--validation", action="store_true")
    arguments = parser.parse_args()
    one_thread()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    result: dict[str, dict[str, object]] = {}
    rows = []
    for name in arguments.graphs:
        found = measure(name, arguments.models, seeds, arguments.weight, arguments.validation)
        half_width: dict[str, list[float]] = {}
        result[name] = {}
        row: list[object] = [name]
        for model in arguments.models:
            own = [cell for cell in found if cell.model == model]
            if not own:
                row.append("-")
                continue
            who, when = (
                round(float(np.mean([getattr(c, mark) for c in own])), 4) for mark in ("who", "when")
            )
            row.append(f"{who:.3f} / {when:.3f}")
            result[name][MODELS[model]] = [who, when]
            # Draws of the same graph overlap: the interval of one, not that of their mean.
            errors = (float(np.mean([getattr(c, f"{mark}_error") for c in own])) for mark in ("who", "when"))
            half_width[MODELS[model]] = [round(1.96 * error, 4) for error in errors]
            seconds = round(float(np.mean([cell.fit_seconds for cell in own])), 2)
            if model in ("toffee", "toffee-als"):
                result[name]["seconds" if model == "toffee" else "als_seconds"] = seconds
        result[name]["half_width"] = half_width
        rows.append(row)
    print_table(
        f"AUC, who / when, seeds {seeds.start} to {seeds.stop - 1}", ["graph", *arguments.models], rows
    )
    print_json(result)


if __name__ == "__main__":
    main()
