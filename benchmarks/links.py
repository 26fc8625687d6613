"""Link prediction by the paper's protocol, honest by construction.

Sort by time; learn on the first 75 % of the temporal links; positives are the remaining 25 % (repeated
links stay repeated), with as many negatives drawn from pairs that never link; edge features by four
operators; logistic regression (standardised features) on a random 75 % of these examples, Micro-F1 on the
other 25 %. Read so, "was this pair seen before" gives the same figures as in the published comparison.

All graphs are read as undirected, as the peers' figures are; `both_roles` also uses directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from graphs import Graph
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

Array = NDArray[Any]
OPERATORS: dict[str, Callable[[Array, Array], Array]] = {
    "average": lambda a, b: (a + b) / 2,
    "hadamard": lambda a, b: a * b,
    "weighted-l1": lambda a, b: np.abs(a - b),
    "weighted-l2": lambda a, b: (a - b) ** 2,
}
SHARE = 0.75


@dataclass(frozen=True, eq=False)
class Examples:
    """Distinct pairs with their label, and how often each stands in the training and the test part.

    Weights instead of repeated rows: the same classifier and the same score, for far less work.
    """

    source: Array
    target: Array
    linked: Array
    train: Array
    test: Array


@dataclass(frozen=True)
class Split:
    """Rows [0, learn) of a graph to learn from, [learn, end) to predict."""

    learn: int
    end: int

    @classmethod
    def test(cls, graph: Graph) -> Split:
        """Cut as the paper does."""
        return cls(int(SHARE * len(graph.time)), len(graph.time))

    @classmethod
    def validation(cls, graph: Graph) -> Split:
        """Cut the learning part the same way: for choosing, without a look at the test part."""
        end = int(SHARE * len(graph.time))
        return cls(int(SHARE * end), end)


def draw_examples(graph: Graph, split: Split, seeds: range) -> Iterator[Examples]:
    """Yield the examples of every seed."""
    n = graph.n_nodes
    known = np.unique(_keys(graph.source[: split.end], graph.target[: split.end], n))
    positive = _keys(graph.source[split.learn : split.end], graph.target[split.learn : split.end], n)
    for seed in seeds:
        rng = np.random.default_rng(seed)
        negative = np.empty(0, dtype=np.int64)
        while len(negative) < len(positive):
            i, j = rng.integers(0, n, (2, 2 * len(positive)))
            drawn = _keys(i[i != j], j[i != j], n)
            negative = np.append(negative, drawn[~np.isin(drawn, known)])
        keys = np.concatenate([positive, negative[: len(positive)]])
        linked = np.repeat([1, 0], len(positive))
        distinct, which = np.unique(keys * 2 + linked, return_inverse=True)
        order = rng.permutation(len(keys))
        cut = int(SHARE * len(keys))
        weights = [np.bincount(which[part], minlength=len(distinct)) for part in (order[:cut], order[cut:])]
        pair, label = distinct // 2, distinct % 2
        yield Examples(pair // n, pair % n, label, *weights)


def _keys(i: Array, j: Array, n: int) -> Array:
    return np.minimum(i, j) * n + np.maximum(i, j)


def micro_f1(features: Callable[[Examples], Array], examples: list[Examples]) -> float:
    """Return the mean Micro-F1 over the seeds."""
    scores = []
    for example in examples:
        F = features(example).astype(np.float64)
        mean = np.average(F, axis=0, weights=example.train)
        deviation = np.sqrt(np.average((F - mean) ** 2, axis=0, weights=example.train))
        F = (F - mean) / np.where(deviation > 1e-12, deviation, 1.0)
        seen, unseen = example.train > 0, example.test > 0
        model = LogisticRegression(solver="newton-cholesky", max_iter=300)
        model.fit(F[seen], example.linked[seen], sample_weight=example.train[seen])
        right = model.predict(F[unseen]) == example.linked[unseen]
        scores.append(np.average(right, weights=example.test[unseen]))
    return float(np.mean(scores))


def best_operator(vectors: Array, examples: list[Examples]) -> tuple[float, str]:
    """Return the best operator's Micro-F1 and its name, for one vector a node."""
    return _best(lambda op, e: op(vectors[e.source], vectors[e.target]), examples)


def both_roles(S: Array, T: Array, examples: list[Examples]) -> tuple[float, str]:
    """Return the same for a vector a role: op(S_i, T_j) beside op(T_i, S_j)."""
    return _best(
        lambda op, e: np.hstack([op(S[e.source], T[e.target]), op(T[e.source], S[e.target])]), examples
    )


def _best(
    features: Callable[[Callable[[Array, Array], Array], Examples], Array], examples: list[Examples]
) -> tuple[float, str]:
    scores = {}
    for name, operator in OPERATORS.items():
        scores[name] = micro_f1(lambda e, operator=operator: features(operator, e), examples)  # type: ignore[misc]
    best = max(scores, key=lambda name: scores[name])
    return scores[best], best


def memory(graph: Graph, split: Split, examples: list[Examples]) -> float:
    """Return the Micro-F1 of "this pair was seen before"."""
    n = graph.n_nodes
    seen = np.unique(_keys(graph.source[: split.learn], graph.target[: split.learn], n))
    scores = []
    for e in examples:
        guess = np.isin(_keys(e.source, e.target, n), seen)
        scores.append(np.average(guess == e.linked, weights=e.test))
    return float(np.mean(scores))
