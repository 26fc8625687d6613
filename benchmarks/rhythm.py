"""Communities that change in time: what the other frequencies are for (fact 8).

400 nodes in 4 communities over 70 days, rank 16: each node has one community for weekdays and one for
weekends, or one for each half. k-means on the vectors of each day, adjusted Rand index against the day's
communities, mean over all days and seeds. `filter` is the default trajectory; `auto` and `all` are ALS
slices of the frequencies that stand out of the noise, and of all.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from planted import N_COMMUNITIES, Pattern, PlantedGraph, planted_graph
from report import one_thread, print_json, print_table
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from toffee_dist import TemporalTensor, Toffee

RANK = 16
Array = NDArray[Any]


def snapshots(tensor: TemporalTensor) -> Array:
    return np.asarray(tensor.to_coo().todense()).transpose(2, 0, 1)


def snapshot_svd(tensor: TemporalTensor) -> Iterable[Array]:
    """Yield U·S of every day's snapshot alone."""
    for X in snapshots(tensor):
        U, s, _ = np.linalg.svd(X)
        yield U[:, :RANK] * s[:RANK]


def unfolded_svd(tensor: TemporalTensor) -> Iterable[Array]:
    """Yield the day's block of the right vectors of [X(1) … X(T)] (UASE)."""
    X = snapshots(tensor)
    _, s, Vt = np.linalg.svd(np.hstack(list(X)), full_matrices=False)
    right = Vt[:RANK].T * np.sqrt(s[:RANK])
    return list(right.reshape(len(X), -1, RANK))


def score(vectors: Iterable[Array], graph: PlantedGraph) -> float:
    scores = []
    for day, rows in enumerate(vectors):
        means = KMeans(N_COMMUNITIES, n_init=10, random_state=0)
        scores.append(adjusted_rand_score(graph.labels[day], means.fit_predict(rows)))
    return float(np.mean(scores))


def measure(pattern: Pattern, degree: float, seed: int) -> tuple[dict[str, float], list[int]]:
    graph = planted_graph(pattern, degree, seed)
    model = Toffee(rank=RANK, trajectory_by="als").fit(graph.tensor)
    n_steps = graph.tensor.n_steps
    every = Toffee(rank=RANK, freqs="all", trajectory_by="als").fit(graph.tensor)
    found = {
        "filter": score(Toffee(rank=RANK).fit(graph.tensor).trajectory(), graph),
        "auto": score(model.trajectory(), graph),
        "all": score(every.trajectory(), graph),
        "static": score([model.embedding_] * n_steps, graph),
        "snapshot_svd": score(snapshot_svd(graph.tensor), graph),
        "unfolded_svd": score(unfolded_svd(graph.tensor), graph),
        "raw": score(Toffee(rank=RANK, gauge="none", freqs="all").fit(graph.tensor).trajectory(), graph),
    }
    return found, model.freqs_.freqs


def false_alarms(degree: float, n_graphs: int) -> int:
    """Return how many graphs without any change are given a rhythm or a pattern all the same."""
    seeds = range(1000, 1000 + n_graphs)
    models = (Toffee(rank=RANK).fit(planted_graph("none", degree, seed).tensor) for seed in seeds)
    return sum(model.freqs_.freqs != [0] or model.patterns_.shape[1] > 0 for model in models)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--degrees", type=float, nargs="+", default=[2.6, 1.3, 0.66, 0.33])
    parser.add_argument("--still", type=int, default=40, help="graphs without a rhythm, a degree")
    arguments = parser.parse_args()
    one_thread()
    rows, cases = [], []
    patterns: tuple[Pattern, ...] = ("weekly", "change")
    for degree in arguments.degrees:
        for pattern in patterns:
            runs = [measure(pattern, degree, seed) for seed in range(arguments.seeds)]
            mean = {name: round(float(np.mean([run[name] for run, _ in runs])), 4) for name in runs[0][0]}
            freqs = [chosen for _, chosen in runs]
            case = {"degree": degree, "pattern": pattern, **mean, "freqs": freqs}
            if pattern == "weekly":
                case["weekly_found"] = all(graph_freqs.count(10) for graph_freqs in freqs)
            cases.append(case)
            rows.append([degree, pattern, *mean.values(), " ".join(map(str, freqs[0]))])
    header = ["degree", "pattern", *mean, "frequencies (seed 0)"]
    print_table("Adjusted Rand index a day", header, rows)
    alarms = {degree: false_alarms(degree, arguments.still) for degree in arguments.degrees}
    title = f"Graphs of {arguments.still} without a rhythm in which auto or the filter sees one"
    print_table(title, list(map(str, alarms)), [list(alarms.values())])
    print_json(cases)


if __name__ == "__main__":
    main()
