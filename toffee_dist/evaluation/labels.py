"""Labels of nodes per window: does a vector of a step know them, and does what was learnt early hold later.

    labels          k-means on the vectors of a step, adjusted Rand index against the labels
    later-windows   a classifier of half of the nodes in the first half of the steps, asked about the other
                    half of the nodes at each later step: the share of right answers

A static vector knows every node that it was trained on, so nodes are kept apart as well as steps. Asked are
nodes that are active at a step, at steps that are not nearly empty.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.evaluation.events import Events, Int64s
from toffee_dist.evaluation.steps import StepCell
from toffee_dist.models import find_model
from toffee_dist.models.base import VectorsInTime
from toffee_dist.settings import FitSettings
from toffee_dist.storage.parquet import scan_parquet
from toffee_dist.tasks import Say
from toffee_dist.tensor import TemporalTensor

# Steps that are asked about, at the most; spread evenly over time.
LABEL_STEPS = 70
# A step counts where this share of the busiest step's nodes is active.
BUSY = 0.5
# Steps of the first half that a classifier learns from, at the most, and its penalties: the best of them on
# folds of the nodes that it may learn from.
LEARN_STEPS, PENALTIES, FOLDS = 12, (1.0, 10.0, 100.0), 3
# A first line longer than this is no header.
LINE_CHARACTERS = 1 << 16
# What labels are looked for in unless models are named: method, and the model in time.
LABEL_MODELS = {
    "trajectory": "toffee",
    "trajectory-als": "toffee-als",
    "static": "static",
    "snapshot-svd": "snapshot",
    "unfolded-svd": "uase",
}


def label_steps(
    tensor: TemporalTensor,
    labels: Int64s,
    options: FitSettings,
    show: Callable[[int], str] = str,
    say: Say = lambda line: None,
    methods: Mapping[str, tuple[str, float | None]] | None = None,
) -> list[StepCell]:
    """Compare the vectors of each step with labels; see the module.

    Parameters
    ----------
    tensor
        The graph.
    labels : (n_steps, n_nodes)
        The label of every node at every step; -1 where it has none.
    options
        Uses the rank, λ and the seed.
    show
        The name of a step.
    methods
        A model in time and its smoothing, by the name to show; by default those of `LABEL_MODELS`.

    Returns
    -------
    cells
        Of every method and step the adjusted Rand index (question ``labels``), and of every step of the later
        half the share of right labels (``later-windows``), where both halves have two labels.
    """
    steps, asked = asked_labels(tensor, labels)
    cells = []
    for method, (name, smoothing) in (methods or {m: (n, None) for m, n in LABEL_MODELS.items()}).items():
        fit = find_model(name).fit_in_time
        assert fit is not None
        found = fit(tensor, options, smoothing)
        for t in steps:
            mark = rand_index(found.vectors(t), asked[t], options.seed)
            cells.append(StepCell("labels", method, t, show(t), mark))
        later = later_windows(found, steps, asked, options.seed)
        cells += [StepCell("later-windows", method, t, show(t), mark) for t, mark in later.items()]
        say(f"labels: {method} done")
    return cells


def asked_labels(tensor: TemporalTensor, labels: Int64s) -> tuple[list[int], Int64s]:
    """Return the steps to ask about, and the labels of the nodes that are active at each, else -1."""
    if labels.shape != (tensor.n_steps, tensor.n_nodes):
        raise InputError(
            "labels",
            got=labels.shape,
            allowed=f"{tensor.n_steps} steps × {tensor.n_nodes} nodes",
            remedy="Give a label for every step and node.",
        )
    pair = tensor.entry_pairs
    active = np.zeros(labels.shape, dtype=bool)
    active[tensor.steps, tensor.sources[pair]] = True
    active[tensor.steps, tensor.indices[pair]] = True
    asked = np.where(active, labels, -1)
    counts = (asked >= 0).sum(axis=1)
    busy = np.flatnonzero(counts >= BUSY * counts.max(initial=0))
    useful = [int(t) for t in busy if len(np.unique(asked[t][asked[t] >= 0])) > 1]
    if not useful:
        raise InputError(
            "labels",
            got="no step with two labels",
            allowed="at least one such step",
            remedy="Where all nodes are alike there is nothing to find: check the labels.",
        )
    spread = np.unique(np.linspace(0, len(useful) - 1, LABEL_STEPS).round().astype(int))
    return [useful[k] for k in spread], asked


def later_windows(found: VectorsInTime, steps: list[int], asked: Int64s, seed: int) -> dict[int, float]:
    """Return the share of right labels at each later step, of nodes that the classifier never saw."""
    # Saves start-up time.
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, GroupKFold

    half = len(steps) // 2
    spread = np.unique(np.linspace(0, max(half - 1, 0), LEARN_STEPS).round().astype(int))
    early, late = [steps[k] for k in spread if k < half], steps[half:]
    shown = learning_nodes(asked, seed)

    def examples(t: int, nodes: NDArray[np.bool_]) -> tuple[Any, Int64s]:
        rows = np.flatnonzero((asked[t] >= 0) & nodes)
        vectors = np.asarray(found.vectors(t), dtype=np.float64)[rows]
        # How busy a node is at a step is not its label.
        sizes = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.divide(vectors, sizes, out=np.zeros_like(vectors), where=sizes > 0), rows

    learnt = [examples(t, shown) for t in early]
    node = np.concatenate([rows for _, rows in learnt]) if learnt else np.empty(0, dtype=np.int64)
    right = np.concatenate([asked[t][rows] for t, (_, rows) in zip(early, learnt, strict=True)] or [node])
    if len(np.unique(right)) < 2 or len(np.unique(node)) < FOLDS:
        return {}
    # Vectors of one node resemble each other: folds of nodes, not of examples.
    model = GridSearchCV(
        LogisticRegression(max_iter=1000), {"C": list(PENALTIES)}, cv=GroupKFold(FOLDS), error_score=0.0
    )
    model.fit(np.concatenate([vectors for vectors, _ in learnt]), right, groups=node)
    marks = {}
    for t in late:
        vectors, rows = examples(t, ~shown)
        if len(rows):
            marks[t] = float(np.mean(model.predict(vectors) == asked[t][rows]))
    return marks


def learning_nodes(asked: Int64s, seed: int) -> NDArray[np.bool_]:
    """Return which nodes may be learnt from: a random half of those that have a label somewhere."""
    labelled = np.flatnonzero((asked >= 0).any(axis=0))
    chosen = np.random.default_rng([seed, 1]).permutation(labelled)[: len(labelled) // 2]
    return np.isin(np.arange(asked.shape[1]), chosen)


def rand_index(vectors: Any, labels: Int64s, seed: int) -> float:
    """Return the adjusted Rand index of k-means on the labelled nodes against their labels."""
    # Saves start-up time.
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    known = labels >= 0
    rows = np.asarray(vectors)[known]
    count = min(len(np.unique(labels[known])), len(np.unique(rows, axis=0)))
    found = KMeans(count, n_init=10, random_state=seed).fit_predict(rows)
    return float(adjusted_rand_score(labels[known], found))


def read_labels(path: Path, events: Events) -> Int64s:
    """Read labels of nodes, for all steps or for each.

    Parameters
    ----------
    path
        Parquet or CSV with the columns ``node``, ``label`` and, where labels change, ``step`` (from 0); or
        columns separated by tabs, where without a header the first is the node and the second its label.
    events
        Whose nodes and steps these are.

    Returns
    -------
    (n_steps, n_nodes of the tensor), -1 where a node has no label
    """
    try:
        table = scan_parquet([path]).collect() if path.suffix == ".parquet" else _read_text(path)
        table = table.select(
            pl.col("node").cast(events.ids.dtype),
            pl.col("label").rank("dense").cast(pl.Int64) - 1,
            (pl.col("step") if "step" in table.columns else pl.lit(None)).cast(pl.Int64).alias("step"),
        )
    except (pl.exceptions.PolarsError, pa.ArrowException, OSError) as error:
        raise InputError(
            f"cannot read labels from {path}",
            got=str(error).splitlines()[0],
            allowed="Parquet, CSV or TSV with node, label and, where labels change, step",
            remedy="Write a header: node,label or node,step,label.",
        ) from None
    grid = events.grid()
    nodes = np.unique(np.concatenate([events.source, events.target]))
    rows = pl.DataFrame({"node": events.ids.gather(nodes), "row": np.arange(len(nodes))})
    table = table.join(rows, on="node", how="inner")
    outside = table.filter((pl.col("step") < 0) | (pl.col("step") >= grid.n_steps))
    if table.is_empty() or not outside.is_empty():
        raise InputError(
            f"labels of {path}",
            got="no node of the graph" if table.is_empty() else f"step {outside['step'][0]}",
            allowed=f"nodes of the graph, steps 0 to {grid.n_steps - 1}",
            remedy="Write ids and steps as the edges have them.",
        )
    labels = np.full((grid.n_steps, len(nodes)), -1)
    always = table.filter(pl.col("step").is_null())
    labels[:, always["row"].to_numpy()] = always["label"].to_numpy()
    some = table.filter(pl.col("step").is_not_null())
    labels[some["step"].to_numpy(), some["row"].to_numpy()] = some["label"].to_numpy()
    return labels


def _read_text(path: Path) -> pl.DataFrame:
    """Read a table of text, its separator and header found in the first line."""
    with path.open(encoding="utf-8", errors="replace") as file:
        first = file.readline(LINE_CHARACTERS).rstrip("\r\n")
    words = first.split("\t")
    if len(words) < 2:
        return pl.read_csv(path, glob=False)
    named = "node" in words and "label" in words
    # Ids may be words further down: all columns are text until they meet those of the graph.
    table = pl.read_csv(path, glob=False, separator="\t", has_header=named, infer_schema=False)
    return table if named else table.rename(dict(zip(table.columns[:2], ("node", "label"), strict=True)))
