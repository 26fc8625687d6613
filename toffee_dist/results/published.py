"""A published run as questions see it: its manifest, and its tables, which are read lazily."""

from __future__ import annotations

from toffee_dist.errors import InputError
from toffee_dist.results.tables import Table, html_facts
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.spaces import check_space
from toffee_dist.storage.vectors import VectorTable, open_vectors
from toffee_dist.timegrid import TimeGrid


class PublishedRun:
    """A published run.

    Attributes
    ----------
    folder, path : the places of the run, and its folder
    manifest : what was asked for, read and found
    """

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.path = folder, folder.path
        if not folder.complete:
            raise InputError(
                "this run is not finished",
                got=str(folder.path),
                allowed="a run with a manifest.json",
                remedy="Finish it with toffee resume.",
            )
        self.manifest: Manifest = folder.read_manifest()

    def __repr__(self) -> str:
        outputs = ", ".join(self.manifest.outputs)
        return f"Run({self.manifest.run_id}: {self.n_nodes:,} nodes, {self.n_steps:,} steps; {outputs})"

    def _repr_html_(self) -> str:
        """Say in a notebook what the run holds."""
        summary, config = self.manifest.summary, self.manifest.config
        facts = {
            "nodes": f"{self.n_nodes:,}",
            "steps": f"{self.n_steps:,}, {summary.first} to {summary.last}",
            "rank": self.rank,
            "model": f"{config.model}, {'directed' if self.manifest.directed else 'undirected'}",
            "outputs": ", ".join(self.manifest.outputs),
            "space": self.space_id,
            "folder": self.path,
            "look at it": "run.explore()",
        }
        return html_facts(f"Run {self.manifest.run_id}", facts)

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.manifest.summary.nodes

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return self.manifest.summary.steps

    @property
    def rank(self) -> int:
        """Length of a vector."""
        return self.manifest.config.rank

    @property
    def space_id(self) -> str:
        """The space that one vector per node is in: only vectors of one space may be compared."""
        return self.manifest.space_id

    def expect_space(self, space_id: str) -> None:
        """Raise unless the run is of this space: that of vectors which somebody has stored."""
        check_space(
            space_id,
            self.space_id,
            f"run {self.manifest.run_id}",
            "the stored vectors",
            "Take a run of that space (toffee runs --json lists them), or make what is stored again.",
        )

    @property
    def grid(self) -> TimeGrid:
        """The steps as times."""
        return self.manifest.grid

    @property
    def nodes(self) -> Table:
        """A row per node: node_id, row, degree, first and last seen."""
        return Table(self.folder.nodes)

    @property
    def steps(self) -> Table:
        """A row per step: when it starts."""
        return Table(self.folder.steps)

    @property
    def fit(self) -> Table:
        """A row per solved slice: energy, objective, bound, gap, iterations, solver, converged."""
        return Table(self.folder.fit)

    @property
    def frequencies(self) -> Table:
        """A row per frequency: period, energy, significance, chosen; of runs with a trajectory."""
        self.vectors("trajectory")  # Refused where the run has none.
        return Table(self.folder.frequencies)

    @property
    def embedding(self) -> Table:
        """One vector per node."""
        return self.table("embedding")

    @property
    def embedding_target(self) -> Table:
        """One vector per node in its role as a target; of directed graphs."""
        return self.table("embedding_target")

    @property
    def trajectory(self) -> Table:
        """One vector per node and step; `numpy` gives (steps, nodes, rank)."""
        return self.table("trajectory")

    @property
    def spectrum(self) -> Table:
        """Energy per node and frequency."""
        return self.table("spectrum")

    def factors(self, name: str) -> Table:
        """Return ``A_time``, ``R_time``, ``A_freq`` or ``R_freq``."""
        names = ("A_time", "A_freq", "R_time", "R_freq")
        if name not in names:
            raise InputError(
                "factors", got=repr(name), allowed=", ".join(names), remedy="Choose one of them."
            )
        return self.table(f"factors/{name}")

    def table(self, output: str) -> Table:
        """Return an output by its name in the manifest; an error says what the run has instead."""
        vectors = self.vectors(output)
        return Table(vectors.path, vectors)

    def vectors(self, output: str) -> VectorTable:
        """Return the vectors of an output, to be read in blocks."""
        return open_vectors(self.folder, output, self.manifest)
