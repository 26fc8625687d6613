"""Link prediction on the six graphs of the paper: is the embedding any good, and why.

`toffee` is the canonical embedding with all defaults; `raw` the same model in the paper's raw gauge, from
the paper's solver; `tsvd` U·S of the same zero slice; `both roles` adds directions where a graph has them.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import scipy.sparse.linalg as sla
from graphs import SOURCES, load_graph
from links import best_operator, both_roles, draw_all, memory
from numpy.typing import NDArray
from report import one_thread, print_json, print_table, timed

from toffee_dist import TemporalTensor, Toffee
from toffee_dist.evaluation.protocols import Split
from toffee_dist.kernels.spectrum import iter_values, slice_matrix

# The best row of the published comparison (peers.md, c): t-SVD of 0/1 pair totals.
PEERS = {
    "fb-forum": 0.8917,
    "email": 0.9419,
    "school": 0.9579,
    "hypertext": 0.9046,
    "workplace": 0.9468,
    "wildbird": 0.9070,
}


def tsvd(tensor: TemporalTensor, rank: int) -> NDArray[Any]:
    ((_, values),) = iter_values(tensor, [0])
    U, s, _ = sla.svds(slice_matrix(tensor, values), k=min(rank, tensor.n_nodes - 1), rng=0)
    return np.asarray(U * s)


def measure(name: str, seeds: int) -> tuple[list[object], dict[str, float]]:
    graph, source = load_graph(name), SOURCES[name]
    split = Split.test(len(graph.time))
    learn = slice(0, split.learn)
    tensor = graph.tensor(source.step, learn, directed=False)
    examples = draw_all(graph, split, seeds)
    rank = source.rank
    ((seconds, model),) = timed(lambda: Toffee(rank=rank).fit(tensor))
    toffee, operator = best_operator(model.embedding_, examples)
    raw = best_operator(Toffee(rank=rank, solver="als", gauge="none").fit(tensor).embedding_, examples)[0]
    rival = best_operator(tsvd(tensor, rank), examples)[0]
    roles = "-"
    if source.directed:
        # One basis of rank r holds about r/2 directions a role: solve 2r, keep the leading r of each.
        directed = Toffee(rank=min(2 * rank, graph.n_nodes)).fit(graph.tensor(source.step, learn))
        pair = (directed.embedding_[:, :rank], directed.embedding_target_[:, :rank])
        roles = f"{both_roles(*pair, examples)[0]:.4f}"
    scores = {"toffee": round(toffee, 4), "raw": round(raw, 4), "tsvd": round(rival, 4)}
    seen = f"{memory(graph, split, examples):.4f}"
    row: list[object] = [name, f"{seconds:.2f}", f"{toffee:.4f}", operator, PEERS[name]]
    row += [f"{toffee - PEERS[name]:+.4f}", scores["raw"], scores["tsvd"], seen, roles]
    return row, scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--graphs", nargs="+", default=list(PEERS), choices=list(PEERS))
    arguments = parser.parse_args()
    one_thread()
    results = {name: measure(name, arguments.seeds) for name in arguments.graphs}
    header = ["graph", "fit, s", "toffee", "operator", "best peer", "difference", "raw", "tsvd"]
    header += ["memory", "both roles"]
    title = f"Micro-F1 of the best operator, mean of {arguments.seeds} seeds"
    print_table(title, header, [row for row, _ in results.values()])
    print_json({name: scores for name, (_, scores) in results.items()})


if __name__ == "__main__":
    main()
