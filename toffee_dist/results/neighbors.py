"""The nearest nodes, exactly: every vector is compared, block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.results.nodes import choose_output, find_node
from toffee_dist.results.outside import read_outside, refuse_moment
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.parquet import reading
from toffee_dist.storage.slices import Role
from toffee_dist.storage.vectors import VectorBlock, Vectors, map_blocks, read_nodes
from toffee_dist.tensor import Floats

Metric = Literal["cosine", "dot"]


def neighbors(
    run: PublishedRun,
    node: object,
    k: int = 10,
    *,
    at: int | str | None = None,
    metric: Metric = "cosine",
    role: Role | None = None,
    space: str | None = None,
    where: str | None = None,
) -> pl.DataFrame:
    """Return the k nearest nodes: node_id, (space,) similarity, nearest first, equal ones by row.

    Nodes without a vector (cold: no edges in this role) are nobody's neighbours.

    Parameters
    ----------
    run
        A published run.
    node
        Its id.
    k
        How many.
    at
        A step or a moment: vectors of the trajectory then, instead of the one vector per node.
    metric
        ``cosine``, or ``dot``, which favours active nodes.
    role
        Of directed graphs: compare nodes as sources or as targets. Default: source, or the side of the
        graph that the node is on where it has two.
    space
        Of a graph with two sides: where the id is, if both have it.
    where
        Where the node's vector is, if not in the run: another run, or a Parquet file as `toffee fold-in`
        writes it. It must be of the run's space. The nodes found are those of the run.
    """
    if metric not in get_args(Metric):
        raise ConfigError("metric", got=repr(metric), allowed="cosine, dot", remedy="Choose one of them.")
    if where is None:
        found = find_node(run, node, space)
        row, output, step = found.row, *choose_output(run, at, role or found.space or "source")
        vectors = run.vectors(output)
        [query] = read_nodes(vectors, [row], step)
    else:
        refuse_moment(at)
        row, output, step = -1, *choose_output(run, None, role or space or "source")
        vectors = run.vectors(output)
        [query] = read_outside(run, where, [node], output, space)
    if not query.any():
        raise InputError(
            f"{node!r} has no vector",
            got=f"zeros in {output}" + ("" if at is None else f" at {at}"),
            allowed="a node with edges in this role",
            remedy="Nothing is near it. Of a directed graph, try --role target or --role source.",
        )
    rows, scores = search(vectors.blocks(step), query, k, metric, without=row)
    return describe_rows(run, rows, similarity=scores)


def describe_rows(run: PublishedRun, rows: NDArray[np.int64], **columns: Floats) -> pl.DataFrame:
    """Return a table of some rows, in their order: node_id, space where there are two, and the columns."""
    table, schema = run.nodes.polars(), run.nodes.schema()
    names = [name for name in ("node_id", "space") if name in schema]
    wanted = pl.Series("row", rows)
    found = run.nodes.collect(table.filter(pl.col("row").is_in(wanted.implode())).select("row", *names))
    with reading(run.nodes.path):
        if found.height != wanted.n_unique():
            raise EOFError("rows that are missing, or there twice")
        joined = wanted.to_frame().join(
            found.cast({"row": pl.Int64}), on="row", how="left", maintain_order="left"
        )
        return joined.select(names).with_columns(pl.Series(name, data) for name, data in columns.items())


@dataclass
class Best:
    """The k best rows so far."""

    k: int
    rows: NDArray[np.int64]
    scores: Floats

    def add(self, rows: NDArray[np.int64], scores: Floats) -> None:
        """Keep the k best of what was there and what is new; equal scores by row."""
        rows, scores = np.append(self.rows, rows), np.append(self.scores, scores)
        order = np.lexsort([rows, -scores])[: self.k]
        self.rows, self.scores = rows[order], scores[order]


def search(
    blocks: Iterable[VectorBlock],
    query: Vectors,
    k: int,
    metric: Metric,
    *,
    without: int = -1,
    prepare: Callable[[Vectors], Vectors] = lambda vectors: vectors,
) -> tuple[NDArray[np.int64], Floats]:
    """Return the rows of the k vectors nearest to a query, and their scores in double precision.

    Products in single precision leave few candidates, with an error bound; these are computed again in
    double. So the order is the same whatever the blocks are, and equal vectors have equal scores.

    Parameters
    ----------
    blocks
        Of vectors, in any order: see `VectorTable.blocks`.
    query
        One vector.
    k
        How many rows at the most; zero vectors are left out.
    metric
        ``cosine`` or ``dot``.
    without
        A row to leave out.
    prepare
        What is made of vectors before they are compared, the query included.
    """
    if k < 1:
        raise ConfigError("k", got=k, allowed="at least 1", remedy="Ask for one neighbour or more.")
    target = prepare(query[None])[0].astype(np.float64)
    length = float(np.linalg.norm(target))
    target /= length if metric == "cosine" and length > 0 else 1.0
    single = target.astype(np.float32)
    # A product of r terms in single precision is off by at most about r·ε·|x|·|q|.
    slack = 2.0 * (len(target) + 4) * float(np.finfo(np.float32).eps) * float(np.linalg.norm(target))

    def best_of(block: VectorBlock) -> tuple[NDArray[np.int64], Floats]:
        vectors = prepare(block.read())
        lengths = np.sqrt(np.einsum("ir,ir->i", vectors, vectors))
        present = np.flatnonzero(lengths)
        present = present[present != without - block.first]
        scale = lengths[present] if metric == "cosine" else np.float32(1)
        scores = (vectors @ single)[present] / scale
        error = slack if metric == "cosine" else slack * lengths[present]
        if len(present) > k:
            threshold = np.partition(scores - error, len(present) - k)[len(present) - k]
            present = present[scores + error >= threshold]
        exact = vectors[present].astype(np.float64)
        products = (exact * target).sum(axis=1)
        if metric == "cosine":
            products /= np.sqrt(np.square(exact).sum(axis=1))
        return present + block.first, products

    best = Best(k, np.empty(0, np.int64), np.empty(0))
    for rows, scores in map_blocks(best_of, blocks):
        best.add(rows, scores)
    return best.rows, best.scores
