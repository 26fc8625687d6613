"""Random temporal graphs for property tests: tiny, with every awkward shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from toffee_dist import TemporalTensor


@dataclass(frozen=True)
class Events:
    """Rows of events and the sizes; `tensor` builds what they describe."""

    source: NDArray[np.int64]
    target: NDArray[np.int64]
    step: NDArray[np.int64]
    weight: NDArray[np.float64]
    n_nodes: int
    n_steps: int
    directed: bool

    def tensor(self, **kwargs: Any) -> TemporalTensor:
        return TemporalTensor.from_events(
            self.source,
            self.target,
            self.step,
            self.weight,
            n_nodes=self.n_nodes,
            n_steps=self.n_steps,
            directed=self.directed,
            **kwargs,
        )


ORDINARY = st.floats(0.1, 10.0)
# Single precision ends at 1e38: these must neither overflow nor vanish.
EXTREME = st.sampled_from([1e-30, 1e-12, 1.0, 1e12, 1e30])


@st.composite
def events(draw: st.DrawFn, weights: st.SearchStrategy[float] = ORDINARY) -> Events:
    """Graphs with one node, one step, empty snapshots, self-loops, duplicates or no event at all."""
    n_nodes = draw(st.integers(1, 7))
    n_steps = draw(st.integers(1, 8))
    node, step = st.integers(0, n_nodes - 1), st.integers(0, n_steps - 1)
    rows = draw(st.lists(st.tuples(node, node, step, weights), max_size=30))
    columns = list(zip(*rows, strict=True)) if rows else [(), (), (), ()]
    i, j, t = (np.array(column, dtype=np.int64) for column in columns[:3])
    return Events(i, j, t, np.array(columns[3], dtype=float), n_nodes, n_steps, draw(st.booleans()))


def random_tensor(
    seed: int, n_nodes: int, n_steps: int, n_events: int, *, directed: bool = True, **kwargs: Any
) -> TemporalTensor:
    """A graph without structure, of any size."""
    rng = np.random.default_rng(seed)
    i, j = rng.integers(0, n_nodes, (2, n_events))
    t = rng.integers(0, n_steps, n_events)
    return TemporalTensor.from_events(i, j, t, n_nodes=n_nodes, n_steps=n_steps, directed=directed, **kwargs)
