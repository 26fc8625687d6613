"""Which pairs link on a given coming day: what the other frequencies are worth there.

The last steps of each graph are held out and predicted from the steps before; average precision over all
pairs of known nodes, mean over the steps. The communities of `planted` differ between weekdays and weekends.
"""

from __future__ import annotations

import argparse

import numpy as np
import polars as pl
from evaluate import read
from planted import planted_graph
from report import one_thread, print_json, print_table

from toffee_dist.evaluation import Events
from toffee_dist.evaluation.report import to_frame
from toffee_dist.evaluation.steps import FutureConfig, StepCell, future_links
from toffee_dist.settings import FitSettings
from toffee_dist.timegrid import TimeScale

# Graph: rank, steps to predict, steps of the rhythm.
CASES = {
    "planted": (16, 14, 7),
    "fb-forum": (64, 14, 7),
    "email": (64, 28, 7),
    "workplace": (32, 24, 24),
}


def planted() -> Events:
    graph = planted_graph("weekly", 2.6, 0)
    i, j, t = graph.tensor.to_coo().coords
    rows = np.argsort(t, kind="stable")
    rows = rows[i[rows] < j[rows]]
    ids = pl.Series(range(graph.tensor.n_nodes))
    return Events(ids, i[rows], j[rows], t[rows] * 86_400, None, TimeScale(1, True), "1d", directed=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", nargs="+", default=list(CASES), choices=list(CASES))
    arguments = parser.parse_args()
    one_thread()
    found: dict[str, dict[str, float]] = {}
    for name in arguments.graphs:
        rank, horizon, period = CASES[name]
        events = planted() if name == "planted" else read(name, step="3600" if name == "workplace" else None)
        print(name)
        cells = future_links(events, FutureConfig(horizon, period), FitSettings(rank=rank), print)
        means = to_frame(cells, StepCell).group_by("method", maintain_order=True).agg(pl.col("mark").mean())
        found[name] = {method: round(mark, 4) for method, mark in means.iter_rows()}
    methods = list(next(iter(found.values())))
    rows: list[list[object]] = [
        [method, *(f"{marks[method]:.4f}" for marks in found.values())] for method in methods
    ]
    print_table("Links of a coming step: average precision", ["method", *found], rows)
    print_json(found)


if __name__ == "__main__":
    main()
