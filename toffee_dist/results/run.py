"""`load_run`: everything that a run holds, and every question to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.results.changes import Changes, read_changes
from toffee_dist.results.classifier import Label, NodeClassifier, train_classifier
from toffee_dist.results.explain import Explanation, ScoreExplanation, explain, explain_score
from toffee_dist.results.export import export_run
from toffee_dist.results.index import build_index
from toffee_dist.results.neighbors import Metric, neighbors
from toffee_dist.results.outside import join_runs
from toffee_dist.results.published import PublishedRun
from toffee_dist.results.rhythm import Rhythm, find_rhythm
from toffee_dist.results.score import score_pairs
from toffee_dist.results.trajectory import NodeTrajectory, read_trajectory
from toffee_dist.settings import VectorLists
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import find_run
from toffee_dist.storage.slices import Role

if TYPE_CHECKING:
    from toffee_dist.report.notebook import Explorer


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
        where: str | None = None,
    ) -> pl.DataFrame:
        """Return the k nearest nodes of a node, over all time or at a step or moment.

        See `toffee_dist.results.neighbors.neighbors`.
        """
        return neighbors(self, node, k, at=at, metric=metric, role=role, space=space, where=where)

    def join(self, earlier: PublishedRun, role: Role = "source") -> pl.LazyFrame:
        """Return the nodes that this run and an earlier one share, with both vectors; of one space only."""
        return join_runs(self, earlier, role)

    def train_classifier(self, labels: Mapping[Any, Label], role: Role = "source") -> NodeClassifier:
        """Train a classifier of nodes, which later runs of the same space can use."""
        return train_classifier(self, labels, role)

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
        where: str | None = None,
    ) -> NDArray[np.float64]:
        """Return the model's own score of pairs, summed over time or at a step or moment."""
        return score_pairs(self, sources, targets, at, memory=memory, where=where)

    def explain(
        self,
        node: object,
        *,
        at: int | str | None = None,
        between: tuple[int | str, int | str] | None = None,
        k: int = 10,
        space: str | None = None,
    ) -> Explanation:
        """Return which links, steps and rhythms made a node's vector, or its move between two steps.

        See `toffee_dist.results.explain.explain`.
        """
        return explain(self, node, at=at, between=between, k=k, space=space)

    def explain_score(
        self,
        source: object,
        target: object,
        at: int | str | None = None,
        *,
        memory: bool = True,
        k: int = 5,
    ) -> ScoreExplanation:
        """Return which common directions make the score of a pair.

        See `toffee_dist.results.explain.explain_score`.
        """
        return explain_score(self, source, target, at, memory=memory, k=k)

    def explore(self, height: int = 780) -> Explorer:
        """Return the page of the run, which plays its steps; in a notebook it shows itself inline.

        Parameters
        ----------
        height
            Of the frame, in pixels.
        """
        # Saves start-up time.
        from toffee_dist.report.notebook import Explorer

        return Explorer(self.folder, self.manifest, height)

    def build_index(self) -> list[Path]:
        """Write the vectors once more for quick queries; see `toffee_dist.results.index`."""
        return build_index(self)

    def export(
        self,
        form: str,
        to: Path | str,
        *,
        at: int | str | None = None,
        role: str = "source",
        steps: bool = False,
        vectors: VectorLists | None = None,
    ) -> list[Path]:
        """Hand the vectors on to another program; see `toffee_dist.results.export.export_run`."""
        return export_run(self, form, Path(to), at=at, role=role, steps=steps, vectors=vectors)


def load_run(path: Path | str, space_id: str | None = None) -> Run:
    """Open a run: that which OUT's latest.json points to, or the one in the folder given.

    Parameters
    ----------
    path
        A folder of runs, or a run.
    space_id
        Id of the space that stored vectors are in, where the run is to be used beside them: an error unless
        it is the run's.

    Examples
    --------
    >>> run = load_run("out")  # doctest: +SKIP
    >>> run.embedding.numpy().shape  # doctest: +SKIP
    (1899, 128)
    """
    run = Run(find_run(to_path(path)))
    if space_id is not None:
        run.expect_space(space_id)
    return run
