"""`load_run`: everything that a run holds, and every question to it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.results.changes import Changes, read_changes
from toffee_dist.results.export import export_run
from toffee_dist.results.index import build_index
from toffee_dist.results.neighbors import Metric, neighbors
from toffee_dist.results.published import PublishedRun
from toffee_dist.results.rhythm import Rhythm, find_rhythm
from toffee_dist.results.score import score_pairs
from toffee_dist.results.trajectory import NodeTrajectory, read_trajectory
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import find_run
from toffee_dist.storage.slices import Role


class Run(PublishedRun):
    """A published run: its manifest, its tables, and questions to it.

    Attributes
    ----------
    folder, path : the places of the run, and its folder
    manifest : what was asked for, read and found
    """

    def neighbors(
        self,
        node: object,
        k: int = 10,
        *,
        at: int | str | None = None,
        metric: Metric = "cosine",
        role: Role | None = None,
        space: str | None = None,
    ) -> pl.DataFrame:
        """Return the k nearest nodes of a node, over all time or at a step or moment.

        See `toffee_dist.results.neighbors.neighbors`.
        """
        return neighbors(self, node, k, at=at, metric=metric, role=role, space=space)

    def trajectory_of(self, node: object, space: str | None = None) -> NodeTrajectory:
        """Return one node over time: its vectors, their lengths, plots of them."""
        return read_trajectory(self, node, space)

    def rhythm_of(self, node: object, k: int = 10, space: str | None = None) -> Rhythm:
        """Return the periods a node lives by, and the k nodes most like it."""
        return find_rhythm(self, node, k, space)

    def changes(self, rate: float = 0.05) -> Changes:
        """Return nodes, communities, rhythms and moments that changed, at a false discovery rate.

        See `toffee_dist.results.changes.read_changes`.
        """
        return read_changes(self.folder, self.grid, rate)

    def score(
        self,
        sources: Sequence[object],
        targets: Sequence[object],
        at: int | str | None = None,
        *,
        memory: bool = True,
    ) -> NDArray[np.float64]:
        """Return the model's own score of pairs, summed over time or at a step or moment."""
        return score_pairs(self, sources, targets, at, memory=memory)

    def build_index(self) -> list[Path]:
        """Write the vectors once more for quick queries; see `toffee_dist.results.index`."""
        return build_index(self)

    def export(
        self, form: str, to: Path | str, *, at: int | str | None = None, role: str = "source"
    ) -> list[Path]:
        """Hand the vectors on to another program; see `toffee_dist.results.export.export_run`."""
        return export_run(self, form, Path(to), at=at, role=role)


def load_run(path: Path | str) -> Run:
    """Open a run: that which OUT's latest.json points to, or the one in the folder given.

    Examples
    --------
    >>> run = load_run("out")  # doctest: +SKIP
    >>> run.embedding.numpy().shape  # doctest: +SKIP
    (1899, 128)
    """
    return Run(find_run(to_path(path)))
