"""A classifier of nodes by their vectors, which can be kept: it knows the space that it was trained in.

Weights of a logistic regression mean something in one space only. A kept classifier says in which, and does
not judge vectors of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from pydantic import Field, model_validator

from toffee_dist.errors import InputError
from toffee_dist.results.neighbors import describe_rows
from toffee_dist.results.nodes import choose_output, find_nodes
from toffee_dist.results.outside import expect_space
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.manifest import FORMAT, Record, SpaceId, read_record, write_record
from toffee_dist.storage.slices import Role
from toffee_dist.storage.vectors import Vectors, map_blocks, read_nodes
from toffee_dist.tensor import Floats

Label = str | int | bool


class ClassifierRecord(Record):
    """The file of a classifier: weights (classes, rank) and one offset each; two classes have one row."""

    format: int = FORMAT
    space_id: SpaceId
    run_id: str
    role: Role
    classes: list[Label] = Field(min_length=2, max_length=10_000)
    weights: list[list[float]]
    offsets: list[float]

    @model_validator(mode="after")
    def _check_sizes(self) -> ClassifierRecord:
        rows = 1 if len(self.classes) == 2 else len(self.classes)
        lengths = {len(row) for row in self.weights}
        if (len(self.weights), len(self.offsets), len(lengths)) != (rows, rows, 1):
            raise ValueError("weights, offsets and classes of different numbers")
        if not np.isfinite([*self.offsets, *(weight for row in self.weights for weight in row)]).all():
            raise ValueError("weights that are not finite")
        return self


@dataclass(frozen=True)
class NodeClassifier:
    """A logistic regression of labels on vectors, bound to the space of the run that it was trained on.

    Attributes
    ----------
    record : space, role, classes and weights
    """

    record: ClassifierRecord

    @property
    def space_id(self) -> str:
        """The space whose vectors it can judge."""
        return self.record.space_id

    def predict(self, run: PublishedRun, nodes: Sequence[object] | None = None) -> pl.DataFrame:
        """Return node_id, (space,) label and probability of some nodes, or of all that have a vector.

        Parameters
        ----------
        run
            A run of the same space: that of the training, or a later refresh.
        nodes
            Their ids; None: all with edges.

        Raises
        ------
        InputError
            Where the run is of another space.
        """
        output, _ = choose_output(run, None, self.record.role)
        what = f"classifier of run {self.record.run_id}"
        expect_space(run, self.space_id, what, output)
        table = run.vectors(output)
        if nodes is None:
            chances = np.concatenate(list(map_blocks(lambda b: self._judge(b.read()), table.blocks())))
            rows = np.flatnonzero(np.isfinite(chances).all(axis=1))
            chances = chances[rows]
        else:
            rows = np.array([node.row for node in find_nodes(run, nodes)], dtype=np.int64)
            chances = self._judge(read_nodes(table, rows))
        best = chances.argmax(axis=1) if len(rows) else np.empty(0, np.int64)
        labels = pl.Series("label", [self.record.classes[at] for at in best])
        frame = describe_rows(run, rows, probability=chances[np.arange(len(rows)), best])
        return frame.insert_column(frame.width - 1, labels)

    def _judge(self, vectors: Vectors) -> Floats:
        """Return the probability of every class, (nodes, classes); NaN where a node has no vector."""
        scores = vectors.astype(np.float64) @ np.array(self.record.weights).T + self.record.offsets
        if len(self.record.classes) == 2:
            scores = np.hstack([np.zeros_like(scores), scores])
        scores -= scores.max(axis=1, keepdims=True, initial=-np.inf)
        chances = np.exp(scores)
        chances /= chances.sum(axis=1, keepdims=True)
        chances[~vectors.any(axis=1)] = np.nan
        return np.asarray(chances)

    def save(self, path: Path | str) -> None:
        """Write it as JSON: numbers and words, nothing that runs when it is read."""
        write_record(Path(path), self.record)


def load_classifier(path: Path | str) -> NodeClassifier:
    """Read a classifier that was saved; an error says what is wrong with the file."""
    return NodeClassifier(read_record(Path(path), ClassifierRecord))


def train_classifier(run: PublishedRun, labels: Mapping[Any, Label], role: Role = "source") -> NodeClassifier:
    """Train a logistic regression on the vectors of some nodes.

    Parameters
    ----------
    run
        A published run with an embedding.
    labels
        A label for each of some ids; nodes without edges teach nothing, and are left out.
    role
        Of directed graphs: nodes as sources or as targets.
    """
    # Saves start-up time.
    from sklearn.linear_model import LogisticRegression

    output, _ = choose_output(run, None, role)
    rows = [node.row for node in find_nodes(run, list(labels))]
    vectors = read_nodes(run.vectors(output), rows).astype(np.float64)
    known = vectors.any(axis=1)
    values = list(labels.values())
    words = sorted({values[at] for at in np.flatnonzero(known)}, key=lambda label: (str(type(label)), label))
    if len(words) < 2:
        raise InputError(
            "labels",
            got=f"{len(words)} different ones, of nodes with edges",
            allowed="two or more",
            remedy="Label nodes of each kind.",
        )
    places = {word: at for at, word in enumerate(words)}
    targets = np.array([places[values[at]] for at in np.flatnonzero(known)])
    model = LogisticRegression(max_iter=1000).fit(vectors[known], targets)
    record = ClassifierRecord(
        space_id=run.manifest.space_of(output),
        run_id=run.manifest.run_id,
        role=role,
        classes=words,
        weights=model.coef_.tolist(),
        offsets=model.intercept_.tolist(),
    )
    return NodeClassifier(record)
