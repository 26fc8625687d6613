"""Why a vector is what it is: which links, steps and rhythms made it, or its move; and why a pair scores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.kernels.embedding import step_weights
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.explain import LinkSum, RhythmSum
from toffee_dist.results.neighbors import Best, describe_rows
from toffee_dist.results.nodes import Node, find_node, find_step
from toffee_dist.results.published import PublishedRun
from toffee_dist.results.score import find_pair_rows, score_parts
from toffee_dist.storage.compact import CompactTrajectory
from toffee_dist.storage.vectors import CompactTable, VectorBlock, map_blocks, read_nodes
from toffee_dist.tensor import Floats, Ints
from toffee_dist.timegrid import TimeGrid, name_period


@dataclass(frozen=True, eq=False)
class Parts:
    """What a vector is a sum of, largest shares first; what is not in the table is in `others`.

    Attributes
    ----------
    table : a row per part; `share` is how far it goes in the direction of the vector, of 1
    vectors : (rows, rank), the parts themselves
    n_others : how many parts are not in the table
    others : (rank,), their sum
    others_share : its share
    """

    table: pl.DataFrame
    vectors: Floats
    n_others: int
    others: Floats
    others_share: float


@dataclass(frozen=True, eq=False)
class Explanation:
    """What made a vector, or its move.

    Attributes
    ----------
    node : whose vector
    about : what is explained, in words
    vector : (rank,), as the run publishes it
    links : by neighbour: node_id, (space,) links, first, last, share
    steps : by step: step, start, links, share
    rhythms : by frequency: k, period, share; none over all time, which is the zero frequency
    rest : (rank,), what no link explains: over all time, what the solver left over; at steps nothing
    rest_share : its share
    """

    node: Node
    about: str
    vector: Floats
    links: Parts
    steps: Parts
    rhythms: Parts | None
    rest: Floats
    rest_share: float

    @property
    def length(self) -> float:
        """The length of the vector."""
        return float(np.linalg.norm(self.vector))

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        found: dict[str, Any] = {
            "node": self.node.node_id,
            "about": self.about,
            "length": self.length,
            "vector": self.vector.tolist(),
        }
        for name in ("links", "steps", "rhythms"):
            parts: Parts | None = getattr(self, name)
            found[name] = [] if parts is None else parts.table.to_dicts()
            found[f"other_{name}"] = (
                None if parts is None else {"count": parts.n_others, "share": parts.others_share}
            )
        return found | {"rest_share": self.rest_share}


def explain(
    run: PublishedRun,
    node: object,
    *,
    at: int | str | None = None,
    between: tuple[int | str, int | str] | None = None,
    k: int = 10,
    space: str | None = None,
) -> Explanation:
    """Return which links, steps and rhythms made the vector of a node, or its move.

    Parameters
    ----------
    run
        A run with a filtered trajectory: it has the links of every node.
    node
        Its id.
    at
        A step or a moment: the vector of the trajectory then.
    between
        Two steps or moments: how the vector moved from the first to the second. Without either, the one
        vector per node.
    k
        How many links, steps and rhythms are told one by one.
    space
        Where the id is, if both sides of the graph have it.
    """
    if at is not None and between is not None:
        raise ConfigError(
            "what to explain", got="at and between", allowed="one of them", remedy="Leave one out."
        )
    if k < 1:
        raise ConfigError("k", got=k, allowed="at least 1", remedy="Ask for one link or more.")
    compact = _links_of(run)
    found = find_node(run, node, space)
    grid, rank = run.grid, run.rank
    entries = compact.entries(found.row, found.row + 1)
    if at is None and between is None:
        # The one vector is of the window alone.
        entries = entries.since(compact.before)
    if not len(entries.step):
        raise InputError(
            f"{node!r} has no links to explain",
            got="no edges from it in the window",
            allowed="a node with edges" + (" as a source" if compact.directed else ""),
            remedy="toffee neighbors --role target compares nodes as targets." if compact.directed else "",
        )
    rhythm: RhythmSum | None = None
    if at is None and between is None:
        about = "over all time"
        vector, total = _over_all_time(run, entries, found.row)
    else:
        first, last = (None, at) if between is None else between
        step = find_step(grid, last)  # type: ignore[arg-type]
        earlier = None if first is None else find_step(grid, first)
        weights = compact.weights(step)
        path = compact.read(found.row, found.row + 1, np.arange(run.n_steps))[0].astype(np.float64)
        vector = path[step]
        about = f"at {grid.show(step)}"
        if earlier is not None:
            weights = weights - compact.weights(earlier)
            vector = vector - path[earlier]
            about = f"from {grid.show(earlier)} to {grid.show(step)}"
        turn = np.eye(rank) if compact.rotation is None else np.asarray(compact.rotation, dtype=np.float64)
        total = LinkSum(entries, compact.basis, weights, turn)
        rhythm = RhythmSum(path, step, earlier)
    length = float(vector @ vector)
    direction = vector / length if length > 0 else np.zeros(rank)
    along = total.along(direction)
    everything = total.total()
    links = _by_link(run, total, everything, along, k, compact.before)
    steps = _by_step(grid, total, everything, along, k, compact.before)
    rest = vector - everything if rhythm is None else np.zeros(rank)
    return Explanation(
        found,
        about,
        vector,
        links,
        steps,
        None if rhythm is None else _by_rhythm(grid, rhythm, direction, k),
        rest,
        float(rest @ direction),
    )


def _links_of(run: PublishedRun) -> CompactTrajectory:
    table = run.vectors("trajectory") if "trajectory" in run.manifest.outputs else None
    if not isinstance(table, CompactTable):
        raise InputError(
            "this run does not have the links of its nodes",
            got=f"outputs {', '.join(run.manifest.outputs)}, without a filtered trajectory",
            allowed="a trajectory made by the filter",
            remedy="Embed again with --outputs embedding,trajectory and --trajectory-by filter.",
        )
    return table.compact


def _over_all_time(run: PublishedRun, entries: NodeEntries, row: int) -> tuple[Floats, LinkSum]:
    """Return the one vector of a node, and the sum over its links that it is, but for the solver's rest."""
    table = run.vectors("embedding")
    if not run.folder.fold_weights.exists():
        raise InputError(
            "the one vector per node of this run is no sum over links",
            got=f"model {run.manifest.config.model}, gauge {run.manifest.config.gauge}",
            allowed="model toffee or toffee-, gauge canonical",
            remedy="Explain a step with --at, or a move with --between.",
        )
    others = run.vectors("embedding_target") if run.manifest.directed else table
    rotation = run.folder.read_rotation(run.rank)
    Q = np.eye(run.rank) if rotation is None else np.asarray(rotation, dtype=np.float64)
    weights = run.folder.read_fold_weights(run.rank)[0]
    in_time = step_weights(run.manifest.config.reduce, run.n_steps)
    H = np.ones((run.n_steps, 1)) if in_time is None else in_time[:, None]
    H = np.pad(H, [(entries.n_steps - run.n_steps, 0), (0, 0)])
    [vector] = read_nodes(table, [row]).astype(np.float64)
    return vector, LinkSum(entries, lambda nodes: read_nodes(others, nodes), H, Q.T @ (weights[:, None] * Q))


def _largest(shares: Floats, k: int) -> NDArray[np.int64]:
    return np.argsort(-np.abs(shares), kind="stable")[:k]


def _show(grid: TimeGrid, step: int) -> str:
    """Return when a step begins; one before the window where that can be told."""
    return grid.show(step) if step >= 0 or grid.width else f"{-step} steps before the window"


def _by_link(
    run: PublishedRun, total: LinkSum, everything: Floats, along: Floats, k: int, before: int
) -> Parts:
    entries, step = total.entries, total.entries.step - before
    nodes, place = np.unique(entries.target, return_inverse=True)
    shares = np.bincount(place, along, minlength=len(nodes)).astype(np.float64)
    chosen = _largest(shares, k)
    count = np.bincount(place, minlength=len(nodes))
    first, last = np.full(len(nodes), run.n_steps), np.full(len(nodes), -before)
    np.minimum.at(first, place, step)
    np.maximum.at(last, place, step)
    columns: dict[str, Any] = {
        "links": count[chosen],
        "first": [_show(run.grid, int(at)) for at in first[chosen]],
        "last": [_show(run.grid, int(at)) for at in last[chosen]],
        "share": shares[chosen],
    }
    table = describe_rows(run, nodes[chosen].astype(np.int64), **columns)
    return _parts(table, total.parts(entries.target, nodes[chosen]), everything, shares)


def _by_step(grid: TimeGrid, total: LinkSum, everything: Floats, along: Floats, k: int, before: int) -> Parts:
    step = total.entries.step - before
    steps, place = np.unique(step, return_inverse=True)
    shares = np.bincount(place, along, minlength=len(steps)).astype(np.float64)
    chosen = _largest(shares, k)
    table = pl.DataFrame(
        {
            "step": steps[chosen],
            "start": [_show(grid, int(at)) for at in steps[chosen]],
            "links": np.bincount(place, minlength=len(steps))[chosen],
            "share": shares[chosen],
        }
    )
    return _parts(table, total.parts(step, steps[chosen]), everything, shares)


def _by_rhythm(grid: TimeGrid, total: RhythmSum, direction: Floats, k: int) -> Parts:
    shares = total.along(direction)
    chosen = _largest(shares, k)
    table = pl.DataFrame(
        {
            "k": chosen,
            "period": [name_rhythm(int(freq), grid) for freq in chosen],
            "share": shares[chosen],
        }
    )
    everything = total.path[total.step] - (0 if total.earlier is None else total.path[total.earlier])
    return _parts(table, total.parts(chosen), np.asarray(everything, dtype=np.float64), shares)


def name_rhythm(k: int, grid: TimeGrid) -> str:
    """Return what a frequency is in words."""
    if k < 2:
        return "a slow change over the window" if k else "always: the mean of all steps"
    return name_period(grid.n_steps / k, grid)


def _parts(table: pl.DataFrame, vectors: Floats, total: Floats, shares: Floats) -> Parts:
    others = total - vectors.sum(axis=0)
    left = float(shares.sum() - table["share"].sum())
    return Parts(table, vectors, len(shares) - len(vectors), others, left)


@dataclass(frozen=True, eq=False)
class ScoreExplanation:
    """What the score of a pair is made of.

    Attributes
    ----------
    score : the model's own, as `Run.score` has it
    directions : a row per common direction, largest first: direction (the first is the strongest of the
        graph), part, and the ids of the nodes that it is most about
    others : what the other directions add
    own : what this pair's own links add, at a step of a filtered trajectory
    """

    score: float
    directions: pl.DataFrame
    others: float
    own: float

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return {
            "score": self.score,
            "directions": self.directions.to_dicts(),
            "others": self.others,
            "own": self.own,
        }


# Nodes that stand for a direction.
TYPICAL = 3


def explain_score(
    run: PublishedRun,
    source: object,
    target: object,
    at: int | str | None = None,
    *,
    memory: bool = True,
    k: int = 5,
) -> ScoreExplanation:
    """Return which common directions make the score of a pair: Σ_l of one product per direction.

    Parameters
    ----------
    run
        As of `score_pairs`, without the output factors where a step is asked for.
    source, target
        Ids.
    at
        A step or a moment; None sums over time.
    memory
        At a step: whether what the pair itself did counts.
    k
        How many directions are told one by one.
    """
    if at is not None and "factors/A_freq" in run.manifest.outputs:
        raise InputError(
            "a score by factors is no sum over common directions",
            got="a run with the output factors, at a step",
            allowed="the score over all time, or a run with a trajectory and no factors",
            remedy="Leave --at or --explain out.",
        )
    i, j = find_pair_rows(run, [source], [target])
    parts, rates = score_parts(run, None if at is None else find_step(run.grid, at))(i, j)
    products, own = parts[0], float(rates[0]) if memory else 0.0
    chosen = _largest(products, k)
    table = pl.DataFrame(
        {"direction": chosen + 1, "part": products[chosen], "about": _typical_nodes(run, chosen)},
        schema_overrides={"about": pl.List(pl.String)},
    )
    others = float(products.sum() - products[chosen].sum())
    return ScoreExplanation(float(products.sum()) + own, table, others, own)


def _typical_nodes(run: PublishedRun, directions: Ints) -> list[list[str]]:
    """Return the ids of the nodes with the largest entries along some directions, of all nodes, in blocks."""
    table = run.vectors("embedding_target" if run.manifest.directed else "embedding")
    rotation = run.folder.read_rotation(run.rank)
    turn = (np.eye(run.rank) if rotation is None else rotation.T)[:, directions].astype(np.float32)
    best = [Best(TYPICAL, np.empty(0, np.int64), np.empty(0)) for _ in directions]

    def top(block: VectorBlock) -> list[tuple[NDArray[np.int64], Floats]]:
        sizes = np.abs(block.read() @ turn).astype(np.float64)
        rows = [np.argsort(-column, kind="stable")[:TYPICAL] for column in sizes.T]
        return [(block.first + own, sizes[own, at]) for at, own in enumerate(rows)]

    for found in map_blocks(top, table.blocks()):
        for one, (rows, sizes) in zip(best, found, strict=True):
            one.add(rows, sizes)
    every = np.concatenate([one.rows for one in best]) if best else np.empty(0, np.int64)
    names = iter(str(name) for name in describe_rows(run, every)["node_id"])
    return [[next(names) for _ in one.rows] for one in best]
