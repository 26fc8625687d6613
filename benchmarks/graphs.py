"""The real graphs of ../shared/data, as arrays; read for measuring, never copied."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from toffee_dist import TemporalTensor

DATA = Path(__file__).parents[2] / "shared" / "data"


@dataclass(frozen=True)
class Source:
    """Where a graph is, and how the paper reads it."""

    file: str
    directed: bool
    rank: int
    step: int  # of the paper's time span, in the units of the file
    delimiter: str | None = ","
    time_column: int = 2


DAY = 86_400
SOURCES = {
    "fb-forum": Source("fb-forum.edges", True, 128, DAY),
    "email": Source("email-Eu-core-temporal.txt.gz", True, 128, DAY, None),
    "school": Source("ia-primary-school-proximity.edges", False, 128, 20),
    "hypertext": Source("ia-contacts_hypertext2009.edges", False, 64, 20),
    "workplace": Source("ia-workplace-contacts.edges", False, 64, 20),
    "wildbird": Source("aves-wildbird-network.edges", False, 128, 1, None, 3),
    "mathoverflow": Source("sx-mathoverflow.txt.gz", True, 64, 7 * DAY, None),
}


@dataclass(frozen=True, eq=False)
class Graph:
    """Rows of a file, sorted by time; node ids are 0 … n−1 in the order of the ids of the file."""

    name: str
    source: NDArray[np.int64]
    target: NDArray[np.int64]
    time: NDArray[np.int64]
    n_nodes: int

    def tensor(self, step: int, rows: slice = slice(None), **kwargs: Any) -> TemporalTensor:
        """Return the tensor of these rows with steps of this length."""
        steps = (self.time[rows] - self.time.min()) // step
        return TemporalTensor.from_events(
            self.source[rows], self.target[rows], steps, n_nodes=self.n_nodes, **kwargs
        )


def load_graph(name: str, *, self_loops: bool = True) -> Graph:
    """Read a graph, or end with a message where the data are absent."""
    source = SOURCES[name]
    path = DATA / source.file
    if not path.exists():
        sys.exit(f"{path} is not there: this benchmark needs the real graphs of ../shared/data")
    table = np.loadtxt(path, delimiter=source.delimiter, comments="%")
    if not self_loops:
        table = table[table[:, 0] != table[:, 1]]
    table = table[np.argsort(table[:, source.time_column], kind="stable")]
    ids, rows = np.unique(table[:, :2], return_inverse=True)
    rows = rows.reshape(-1, 2)
    time = table[:, source.time_column].astype(np.int64)
    return Graph(name, rows[:, 0], rows[:, 1], time, len(ids))
