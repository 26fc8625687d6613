"""Nodes in time: where each of some nodes is drawn at every step, how large, and in which colour.

One plane for all steps, in the common basis: what moves on the page moved in the vectors. A node's vector is
drawn by its direction; where it is much shorter than usual it says little, and is drawn towards the middle:

    p_i(t) = Z_i(t) / √(‖Z_i(t)‖² + (m_i/2)²),    m_i the root mean square length of the node's vectors

The plane and the communities are found from a sample of (node, step), then everything is placed block by
block: a trajectory of any length never is in memory whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.report.layout import Axes, Communities, find_axes, find_communities
from toffee_dist.storage.vectors import CompactTable, VectorTable, read_node_rows

# Numbers of vectors that are in memory at once, and directions that the communities come from.
BLOCK_NUMBERS, LEARNT = 2_000_000, 5_000

Numbers = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Drawn:
    """Some nodes at every step.

    Attributes
    ----------
    points : (nodes, steps, 2)
    size : (nodes, steps), the length of the vector, 1 is usual for the node
    community : (nodes, steps)
    turn : (nodes, steps), how far it moved since the step before
    """

    points: Numbers
    size: Numbers
    community: NDArray[np.int64]
    turn: Numbers


@dataclass(frozen=True, eq=False)
class Stage:
    """How vectors of steps are drawn: the plane, and the communities of all steps together."""

    axes: Axes
    communities: Communities

    def draw(self, Z: Numbers) -> Drawn:
        """Place the vectors of some nodes, (nodes, steps, r)."""
        directions, size = soften(Z)
        turn = np.zeros(size.shape)
        turn[:, 1:] = np.linalg.norm(np.diff(directions, axis=1), axis=2)
        return Drawn(self.axes.project(directions), size, self.communities.label(directions), turn)


def soften(Z: Numbers) -> tuple[Numbers, Numbers]:
    """Return directions of vectors (nodes, steps, r), shorter where they say little, and their lengths."""
    lengths = np.linalg.norm(Z.astype(np.float64), axis=2)
    usual = np.sqrt(np.square(lengths).mean(axis=1, keepdims=True))
    scale = np.sqrt(np.square(lengths) + np.square(usual / 2))
    size = np.divide(lengths, usual, out=np.zeros_like(lengths), where=usual > 0)
    return Z / np.where(scale > 0, scale, 1.0).astype(Z.dtype)[:, :, None], size


@dataclass(frozen=True, eq=False)
class Paths:
    """Nodes that move on the map.

    Attributes
    ----------
    nodes : which nodes of the map, (p,)
    rows : which rows of the run they are, (p,)
    first : the first step that is shown
    drawn : where they are
    activity : (steps,), how much happened at each step in the whole graph
    counted : whether that is links; else the mean length of the vectors
    stage : how others are drawn
    """

    nodes: NDArray[np.int64]
    rows: NDArray[np.int64]
    first: int
    drawn: Drawn
    activity: Numbers
    counted: bool
    stage: Stage

    @property
    def change(self) -> Numbers:
        """How far the nodes move at each step, on average, (steps,)."""
        return np.asarray(self.drawn.turn.mean(axis=0))


def read_blocks(table: VectorTable, rows: Numbers, first: int) -> Iterator[tuple[slice, Numbers]]:
    """Yield the vectors of some nodes from a step on, a block of nodes at a time."""
    steps = table.each - first
    size = max(1, BLOCK_NUMBERS // (steps * table.length))
    for start in range(0, len(rows), size):
        part = slice(start, min(start + size, len(rows)))
        yield part, read_node_rows(table, rows[part], first)


def draw_paths(table: VectorTable, rows: Numbers, first: int, seed: int) -> Paths | None:
    """Place nodes at every step from `first` on; None where no vector of theirs is there.

    Parameters
    ----------
    table
        The trajectory.
    rows
        Of the nodes, ascending; `nodes` of the result counts in these.
    seed
        Of the sample that the plane is found from.
    """
    stage = set_stage(table, rows, first, seed)
    if stage is None:
        return None
    parts = [stage.draw(Z) for _, Z in read_blocks(table, rows, first)]
    columns = ("points", "size", "community", "turn")
    drawn = Drawn(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))
    # A node that is never a source has no trajectory.
    present = np.flatnonzero(drawn.size.any(axis=1))
    drawn = Drawn(*(getattr(drawn, name)[present] for name in columns))
    counted = isinstance(table, CompactTable)
    activity = drawn.size.mean(axis=0)
    if isinstance(table, CompactTable):
        activity = table.compact.activity[first:]
    return Paths(present, np.asarray(rows)[present], first, drawn, activity, counted, stage)


def set_stage(table: VectorTable, rows: Numbers, first: int, seed: int) -> Stage | None:
    """Find the plane and the communities from some vectors of some of the nodes."""
    rng = np.random.default_rng([seed, 3])
    steps = table.each - first
    few = np.sort(rng.permutation(rows)[: max(1, BLOCK_NUMBERS // (steps * table.length))])
    directions, size = soften(read_node_rows(table, few, first))
    directions = directions[size > 0]
    if not len(directions):
        return None
    # The plane comes from all of them: a covariance is quick, k-means is not.
    sample = directions[rng.permutation(len(directions))[:LEARNT]].astype(np.float64)
    return Stage(find_axes(directions), find_communities(sample, seed))
