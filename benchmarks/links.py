"""Marks for vectors that come from anywhere, by the paper's protocol (`toffee_dist.evaluation.protocols`).

`benchmarks/evaluate.py` judges the models that users have; this judges variants that they do not have: other
gauges, other weights, two roles at once. All graphs are read as undirected, as the peers' figures are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import polars as pl
from graphs import Graph
from numpy.typing import NDArray

from toffee_dist.evaluation.classify import mark
from toffee_dist.evaluation.events import Events, pair_keys
from toffee_dist.evaluation.features import OPERATORS, Features
from toffee_dist.evaluation.protocols import Examples, Split, draw_examples
from toffee_dist.timegrid import TimeScale

Array = NDArray[Any]
Operator = Callable[[Array, Array], Array]


def draw_all(graph: Graph, split: Split, seeds: int) -> list[Examples]:
    """Return the examples of every seed."""
    ids = pl.Series(np.arange(graph.n_nodes))
    events = Events(
        ids, graph.source, graph.target, graph.time, None, TimeScale(1, instant=False), "1", directed=False
    )
    return [draw_examples(events, split, "link-paper", seed) for seed in range(seeds)]


def best_operator(vectors: Array, examples: list[Examples]) -> tuple[float, str]:
    """Return the best operator's mean Micro-F1 and its name, for one vector a node."""
    return _best(lambda op, e: op(vectors[e.source], vectors[e.target]), examples)


def both_roles(S: Array, T: Array, examples: list[Examples]) -> tuple[float, str]:
    """Return the same for a vector a role: op(S_i, T_j) beside op(T_i, S_j)."""
    return _best(
        lambda op, e: np.hstack([op(S[e.source], T[e.target]), op(T[e.source], S[e.target])]), examples
    )


def _best(columns: Callable[[Operator, Examples], Array], examples: list[Examples]) -> tuple[float, str]:
    scores = {
        name: float(np.mean([mark(_only(columns(operator, e)), e).micro_f1 for e in examples]))
        for name, operator in OPERATORS.items()
    }
    best = max(scores, key=lambda name: scores[name])
    return scores[best], best


def _only(operators: Array) -> Features:
    return Features(operators.astype(np.float32), np.empty((len(operators), 0)))


def memory(graph: Graph, split: Split, examples: list[Examples]) -> float:
    """Return the Micro-F1 of "this pair was seen before"."""
    n = graph.n_nodes
    seen = np.unique(pair_keys(graph.source[: split.learn], graph.target[: split.learn], n, directed=False))
    scores = []
    for e in examples:
        guess = np.isin(pair_keys(e.source, e.target, n, directed=False), seen)
        scores.append(np.average(guess == e.linked, weights=e.test))
    return float(np.mean(scores))
