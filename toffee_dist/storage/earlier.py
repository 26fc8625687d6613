"""Rows of an earlier run of a chain, by the rows that they have in a later one; only ranges of them are read.

Rows are never reordered: those that stay come first in the later run, in their order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.storage.parquet import take_rows
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.vectors import Vectors, damaged, open_vectors, read_nodes


@dataclass(frozen=True)
class EarlierRows:
    """What an earlier run says of the nodes of a later one.

    Parameters
    ----------
    run, earlier
        The later and the earlier run.
    """

    run: RunFolder
    earlier: RunFolder

    @cached_property
    def _kept(self) -> NDArray[np.int64] | None:
        """The rows of the earlier run that are still there; None: all."""
        kept = self.run.read_kept(self.earlier.run_id)
        return None if kept is None else np.flatnonzero(kept)

    @cached_property
    def _nodes(self) -> int:
        return self.earlier.read_manifest().summary.nodes

    @property
    def shared(self) -> int:
        """How many nodes both have: the first so many of the later run."""
        return self._nodes if self._kept is None else len(self._kept)

    @property
    def expired(self) -> int:
        """How many nodes of the earlier run the later one has forgotten."""
        return self._nodes - self.shared

    def rows(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the rows in the earlier run of those of [start, stop) that it has."""
        stop = max(start, min(stop, self.shared))
        return np.arange(start, stop) if self._kept is None else self._kept[start:stop]

    def find(self, rows: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """Return the rows in the later run of rows of the earlier one; -1 of nodes that it has forgotten."""
        if self._kept is None:
            return np.asarray(rows, dtype=np.int64)
        return np.where(np.isin(rows, self._kept), np.searchsorted(self._kept, rows), -1)

    def columns(self, names: list[str], start: int, stop: int) -> pa.Table | None:
        """Return columns of the node table of those of [start, stop) that it has; None where it has none."""
        rows = self.rows(start, stop)
        if not len(rows):
            return None
        try:
            table = take_rows(self.earlier.nodes, rows, names)
        except InputError as error:
            raise damaged(self.earlier, str(error).removesuffix(error.remedy).rstrip(". ")) from None
        if table.num_rows < len(rows):
            raise damaged(self.earlier, f"{self.earlier.nodes.name} without row {rows[table.num_rows]:,}")
        return table

    def degrees(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the degrees of those of [start, stop) that it has; -1 where one is null."""
        table = self.columns(["degree"], start, stop)
        if table is None:
            return np.zeros(0, np.int64)
        return np.asarray(table["degree"].fill_null(-1).to_numpy())

    def vectors(self, output: str, start: int, stop: int) -> Iterator[tuple[int, Vectors]]:
        """Yield (first row in the later run, vectors) of those of [start, stop) that it has, in order.

        The parts are read even where there is an index: sums over the blocks must not depend on it.
        """
        rows = self.rows(start, stop)
        for group in open_vectors(self.earlier, output).groups() if len(rows) else ():
            if group.start > rows[-1]:
                return
            first, last = np.searchsorted(rows, [group.start, group.end]).tolist()
            if first < last:
                yield start + first, group.read()[rows[first:last] - group.start]

    def take(self, output: str, rows: NDArray[np.int64]) -> NDArray[Any]:
        """Return the vectors of some rows of the later run, all of which it has."""
        own = rows if self._kept is None else self._kept[rows]
        return read_nodes(open_vectors(self.earlier, output), own)
