"""One node over time: how active it was, and how far from its usual place."""

from __future__ import annotations

import csv
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist.results.nodes import Node, find_node
from toffee_dist.results.plot import Panel, draw_image, draw_text
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.changes import read_p_value
from toffee_dist.storage.files import replacing
from toffee_dist.storage.vectors import CompactTable, read_node_rows
from toffee_dist.timegrid import TimeGrid


@dataclass(frozen=True, eq=False)
class NodeTrajectory:
    """The vectors of one node, a row per step.

    Attributes
    ----------
    node : which node
    grid : the steps as times
    vectors : (steps, rank)
    noise : (steps,), the length that each vector would have if the node's events were unrelated; None of a
        trajectory by ALS
    p_value : the chance that a node which keeps still moves as far; None where changes were not looked
        for, or where it has too few links
    """

    node: Node
    grid: TimeGrid
    vectors: NDArray[Any]
    noise: NDArray[np.float32] | None = None
    p_value: float | None = None

    @property
    def lengths(self) -> NDArray[np.float64]:
        """The length of the vector at each step: how much the node did."""
        return np.asarray(np.linalg.norm(self.vectors.astype(np.float64), axis=1))

    @property
    def cosines(self) -> NDArray[np.float64]:
        """The cosine at each step with the sum over time: 1 where the node is where it usually is."""
        total = self.vectors.sum(axis=0, dtype=np.float64)
        scale = self.lengths * np.linalg.norm(total)
        product = self.vectors.astype(np.float64) @ total
        return np.asarray(np.divide(product, scale, out=np.zeros_like(product), where=scale > 0))

    def panels(self) -> list[Panel]:
        """Return both curves, for plotting."""
        name = str(self.node.node_id)
        return [
            Panel(f"{name}: length of its vector", self.lengths),
            Panel(f"{name}: cosine with its sum over time", self.cosines),
        ]

    def text(self, width: int = 80) -> str:
        """Return both curves as plain characters, at most `width` wide."""
        ends = self.grid.show(0), self.grid.show(self.grid.n_steps - 1)
        drawn = [draw_text(panel, ends, width) for panel in self.panels()]
        if self.p_value is not None:
            drawn.append(textwrap.fill(self.verdict(), width))
        return "\n\n".join(drawn)

    def verdict(self) -> str:
        """Say whether the node moves, or whether that may be noise."""
        assert self.p_value is not None
        moves = "It moves" if self.p_value < 0.05 else "That it moves may be noise"
        return f"{moves}: p = {self.p_value:.3f} for a node that links as it always does."

    def write_png(self, path: Path) -> None:
        """Draw both curves into a PNG file."""
        with replacing(path) as temporary:
            draw_image(self.panels(), (self.grid.show(0), self.grid.show(self.grid.n_steps - 1)), temporary)

    def write_csv(self, path: Path) -> None:
        """Write a row per step: step, start, length, cosine, and the vector."""
        with replacing(path) as temporary, temporary.open("w", newline="") as file:
            rows = csv.writer(file)
            rank = self.vectors.shape[1]
            named = ["step", "start", "length", "cosine"] + ["noise"] * (self.noise is not None)
            rows.writerow([*named, *(f"v{c}" for c in range(rank))])
            figures = zip(self.lengths, self.cosines, self.vectors, strict=True)
            for step, (length, cosine, vector) in enumerate(figures):
                level = [] if self.noise is None else [f"{self.noise[step]:.6g}"]
                rows.writerow([step, self.grid.show(step), f"{length:.6g}", f"{cosine:.6g}", *level, *vector])


def read_trajectory(run: PublishedRun, node: object, space: str | None = None) -> NodeTrajectory:
    """Return the trajectory of one node, from a run with that output."""
    table = run.vectors("trajectory")
    found = find_node(run, node, space)
    [vectors] = read_node_rows(table, [found.row])
    p_value = read_p_value(run.folder, found.row)
    if not isinstance(table, CompactTable):
        return NodeTrajectory(found, run.grid, vectors, None, p_value)
    compact = table.compact
    [noise] = compact.noise(found.row, found.row + 1, np.arange(run.n_steps))
    return NodeTrajectory(found, run.grid, vectors, noise, p_value)
