"""Ids as the user knows them → rows of a run, and moments → steps."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.parquet import reading
from toffee_dist.storage.slices import Role
from toffee_dist.timegrid import TimeGrid, parse_moment

# Ids that are compared letter by letter, of those with the longest common beginning and end.
CANDIDATES = 300
# Letters of an id that suggestions look at.
LETTERS = 64


@dataclass(frozen=True)
class Node:
    """A node of a run: its row, its id, and its space where there are two."""

    row: int
    node_id: Any
    space: str | None = None


def find_node(run: PublishedRun, node: object, space: str | None = None) -> Node:
    """Return the node of an id.

    Parameters
    ----------
    run
        A published run.
    node
        Its id; text is read as an integer where the ids of the run are integers.
    space
        ``source`` or ``target``, of a run with two spaces of nodes that both have the id.
    """
    return find_nodes(run, [node], space)[0]


def find_nodes(run: PublishedRun, names: Sequence[object], space: str | None = None) -> list[Node]:
    """Return the nodes of some ids, in their order."""
    table, schema = run.nodes.polars(), run.nodes.schema()
    two_spaces = "space" in schema
    if space is not None and not two_spaces:
        raise ConfigError(
            "space", got=space, allowed="nothing: this run has one space of nodes", remedy="Leave it out."
        )
    with reading(run.nodes.path):
        wanted = [_as_id(name, schema["node_id"]) for name in names]
    ids = pl.Series("node_id", [item for item in wanted if item is not None], dtype=schema["node_id"])
    found = table.filter(pl.col("node_id").is_in(ids.unique().implode()))
    if space is not None:
        found = found.filter(pl.col("space") == space)
    columns = ["row", "node_id", *(["space"] if two_spaces else [])]
    nodes: dict[object, Node] = {}
    with reading(run.nodes.path):
        rows = run.nodes.collect(found.select(columns)).to_dicts()
        if not all(isinstance(row["row"], int) and 0 <= row["row"] < run.n_nodes for row in rows):
            raise EOFError("rows that the run does not have")
    for row in rows:
        node = Node(**row)
        if node.node_id in nodes:
            raise InputError(
                "two nodes have this id",
                got=repr(node.node_id),
                allowed="one, as a source or as a target",
                remedy="Say which with --space source or --space target.",
            )
        nodes[node.node_id] = node
    for name, item in zip(names, wanted, strict=True):
        if item is None or item not in nodes:
            raise _unknown(run, name, schema["node_id"])
    return [nodes[item] for item in wanted]


def _as_id(name: object, dtype: pl.DataType) -> Any:
    if dtype == pl.String:
        return str(name)
    try:
        number = int(str(name))
    except ValueError:
        return None
    lowest, highest = (-(2**63), 2**63 - 1) if dtype.is_signed_integer() else (0, 2**64 - 1)
    return number if lowest <= number <= highest else None


def _unknown(run: PublishedRun, name: object, dtype: pl.DataType) -> InputError:
    near = suggest(run, str(name))
    kind = "text" if dtype == pl.String else "integers"
    return InputError(
        "unknown node",
        got=repr(name),
        allowed=f"one of the {run.n_nodes:,} ids of the run, which are {kind}",
        remedy=f"Did you mean {' or '.join(near)}?" if near else "They are the node_id of nodes.parquet.",
    )


def suggest(run: PublishedRun, name: str, count: int = 3) -> list[str]:
    """Return the ids nearest to a name that no node has.

    A slip of the finger leaves most of an id as it was: the ids with the longest beginning and end in common
    are found among all of them, and only these are compared letter by letter.
    """
    ids = run.nodes.collect(run.nodes.polars().select(pl.col("node_id").cast(pl.String)))
    column = ids["node_id"].to_arrow().cast(pa.large_string())
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    _, offsets_buffer, data_buffer = column.buffers()
    if data_buffer is None or not name:
        return []
    offsets = np.frombuffer(offsets_buffer, np.int64)[column.offset : column.offset + len(column) + 1]
    data = np.frombuffer(data_buffer, np.uint8)
    starts, sizes = offsets[:-1], np.diff(offsets)
    letters = np.frombuffer(name.encode()[:LETTERS], np.uint8)
    shared = _common(data, starts, sizes, letters, 1) + _common(data, starts, sizes, letters, -1)
    likeness = np.minimum(shared, np.minimum(sizes, len(letters))) / np.maximum(sizes, len(letters))
    best = np.argsort(-likeness, kind="stable")[:CANDIDATES]
    candidates = list(dict.fromkeys(ids["node_id"].gather(best).drop_nulls()))
    ratios = {item: difflib.SequenceMatcher(None, name, item).ratio() for item in candidates}
    near = sorted((item for item in candidates if ratios[item] >= 0.5), key=lambda item: -ratios[item])
    return near[:count]


def _common(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    sizes: NDArray[np.int64],
    letters: NDArray[np.uint8],
    direction: int,
) -> NDArray[np.int64]:
    """Return how many letters each text shares with `letters`, from its beginning (1) or its end (-1)."""
    lengths = np.zeros(len(starts), dtype=np.int64)
    alive = np.arange(len(starts))
    for position, letter in enumerate(letters[::direction]):
        alive = alive[sizes[alive] > position]
        at = starts[alive] + (position if direction == 1 else sizes[alive] - 1 - position)
        alive = alive[data[at] == letter]
        if not len(alive):
            break
        lengths[alive] = position + 1
    return lengths


def find_step(grid: TimeGrid, at: int | str) -> int:
    """Return the step of a number (0 … T-1, from the end where negative) or of a moment inside the grid.

    Examples
    --------
    >>> from toffee_dist.timegrid import TimeScale, build_grid
    >>> grid = build_grid("1d", 0, 9 * 86400, TimeScale(1, True))
    >>> find_step(grid, 3), find_step(grid, "-1"), find_step(grid, "1970-01-04T15:00")
    (3, 9, 3)
    """
    text, T = str(at), grid.n_steps
    # The last step ends where the next would begin, also where the newest edge is earlier.
    end = grid.until if grid.step == "distinct" else grid.start(T)
    remedy = ""
    try:
        number = int(text)
    except ValueError:
        number = T
    if -T <= number < T:
        return number % T
    moments = grid.scale.instant
    if moments:
        try:
            tick = parse_moment(text, grid.scale, "step")
        except ConfigError:
            remedy = "Write a moment as 2024-03-01 or 2024-03-01T12:00."
        else:
            starts = np.array([grid.start(step) for step in range(T)], dtype=np.int64)
            if starts[0] <= tick < end:
                return int(np.searchsorted(starts, tick, side="right")) - 1
    raise InputError(
        "step",
        got=repr(at),
        allowed=f"0 to {T - 1}" + f", or a moment from {grid.show(0)} to {grid.scale.show(end)}" * moments,
        remedy=remedy or "The table steps.parquet of the run has every step and when it starts.",
    )


def choose_output(run: PublishedRun, at: int | str | None, role: str) -> tuple[str, int | None]:
    """Return which output holds the vectors of a role, and of which step."""
    if role not in get_args(Role):
        raise ConfigError("role", got=repr(role), allowed="source, target", remedy="Choose one of them.")
    if at is not None:
        if role == "target":
            raise ConfigError(
                "role at a step",
                got="target",
                allowed="source: a trajectory has nodes as sources",
                remedy="Leave --at or --role target out.",
            )
        return "trajectory", find_step(run.grid, at)
    # Both roles of an undirected graph are the same.
    return ("embedding_target" if role == "target" and run.manifest.directed else "embedding"), None
