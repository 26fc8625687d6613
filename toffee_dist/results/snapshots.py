"""A run as rows for the tables of others: who, when, which vector, of which run and space; block after block.

A snapshot can be added to a table that has those of earlier runs, and features can be joined as of a moment:

    node_id, (space,) (step,) embedding    whose vector, and which
    event_timestamp                        when its last edge could have happened: the end of its step, or of
                                           all steps
    created                                when the run was finished; of two rows with one moment, the later
    run_id, space_id                       whose word it is, and what it can be compared with
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pyarrow as pa

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.results.nodes import choose_output
from toffee_dist.results.published import PublishedRun
from toffee_dist.settings import VectorLists
from toffee_dist.storage.parquet import as_lists, vectors
from toffee_dist.storage.runs import get_run
from toffee_dist.storage.spaces import SPACE_KEY
from toffee_dist.storage.vectors import Vectors, VectorTable, map_blocks
from toffee_dist.timegrid import TimeGrid

# Microseconds since 1970, in UTC.
MOMENT = pa.timestamp("us", tz="UTC")
# The last moment that readers can write as a date, in microseconds.
_LAST = int(datetime(9999, 12, 31, tzinfo=UTC).timestamp()) * 10**6


@dataclass(frozen=True)
class Snapshot:
    """The vectors of a run, of all nodes.

    Parameters
    ----------
    run
        A published run.
    table
        One of its outputs.
    step
        Of a trajectory: which step; None: all.
    lists
        Whether vectors are lists of fixed size, or plain lists.
    """

    run: PublishedRun
    table: VectorTable
    step: int | None
    lists: VectorLists = "fixed"

    @property
    def space_id(self) -> str:
        """The space that its vectors are in."""
        return self.table.space_id

    @property
    def kind(self) -> str:
        """What its rows are: an output, or the steps of a trajectory one by one."""
        return self.table.output if self.step is None else f"{self.table.output}-step"

    @property
    def key(self) -> str:
        """Its name among the snapshots of a table: run and step."""
        step = "" if self.step is None else f"/{self.step}"
        return f"{self.run.manifest.run_id}{step}"

    @property
    def timed(self) -> bool:
        """Whether the run has moments: times that are plain numbers are none."""
        return self.run.grid.scale.instant

    @property
    def all_steps(self) -> bool:
        """Whether every node has a row per step."""
        return self.step is None and self.table.each > 1

    @property
    def schema(self) -> pa.Schema:
        """The columns, and the space in the metadata."""
        return self._table(self._no_ids(), 0, np.empty((0, self.table.length), np.float32)).schema

    def _no_ids(self) -> pa.Table:
        return self._ids(0, 0)

    def _ids(self, first: int, stop: int) -> pa.Table:
        nodes = self.run.nodes
        names = [name for name in ("node_id", "space") if name in nodes.schema()]
        frame = nodes.collect(nodes.polars().select(names).slice(first, stop - first))
        table = frame.to_arrow()
        # Polars' text has offsets of 64 bits, which not everybody reads.
        return table.cast(
            pa.schema(
                (f.name, pa.string() if pa.types.is_large_string(f.type) else _plain(f.type))
                for f in table.schema
            )
        )

    def _table(self, ids: pa.Table, start: int, array: Vectors) -> pa.Table:
        """Return rows from the row `start` of the output on; `ids` are of their nodes."""
        rows, run = len(array), self.run
        steps = np.full(rows, 0 if self.step is None else self.step, dtype=np.int32)
        if self.all_steps:
            at = start + np.arange(rows)
            ids = ids.take(pa.array(at // self.table.each - start // self.table.each))
            steps = (at % self.table.each).astype(np.int32)
        columns: dict[str, Any] = {name: ids[name] for name in ids.schema.names}
        if self.table.each > 1:
            columns["step"] = steps
        columns["embedding"] = vectors(np.ascontiguousarray(array, dtype=np.float32))
        if self.timed:
            ends = step_ends(run.grid)
            moments = ends[steps] if self.table.each > 1 else np.full(rows, ends[-1])
            columns["event_timestamp"] = pa.array(moments, type=MOMENT)
        columns["created"] = pa.array([_finished(run)] * rows, type=MOMENT)
        for name, text in (("run_id", run.manifest.run_id), ("space_id", self.space_id)):
            constant = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int8), [text])
            columns[name] = constant.cast(pa.string())
        table = pa.table(columns)
        table = as_lists(table) if self.lists == "list" else table
        return table.replace_schema_metadata({SPACE_KEY: self.space_id})

    def tables(self) -> Iterator[pa.Table]:
        """Yield its rows, a block of them at a time; at least one table."""
        yield self.schema.empty_table()
        if self.all_steps:
            each = self.table.each
            for group in self.table.groups():
                first, stop = group.start // each, -(-group.end // each)
                yield self._table(self._ids(first, stop), group.start, group.read())
            return
        blocks = (block for block in self.table.blocks(self.step) if block.stop > block.first)
        for first, array in map_blocks(lambda block: (block.first, block.read()), blocks):
            yield self._table(self._ids(first, first + len(array)), first, array)

    def reader(self, metadata: Mapping[str, str] | None = None) -> pa.RecordBatchReader:
        """Return its rows as a stream of Arrow batches, with more metadata where that is given."""
        schema = self.schema
        schema = schema.with_metadata({**schema.metadata, **(metadata or {})})
        tables = (table.replace_schema_metadata(schema.metadata) for table in self.tables())
        batches = (batch for table in tables for batch in table.to_batches())
        return pa.RecordBatchReader.from_batches(schema, batches)


def take_snapshot(
    run: PublishedRun,
    at: int | str | None = None,
    role: str = "source",
    *,
    steps: bool = False,
    lists: VectorLists = "fixed",
) -> Snapshot:
    """Return the vectors of a run as rows: one per node, those of a step, or one per node and step.

    Parameters
    ----------
    run
        A published run.
    at
        A step or a moment: the vectors of the trajectory then.
    role
        ``source`` or ``target``, of directed graphs.
    steps
        All steps of the trajectory.
    lists
        How Arrow says what a vector is.
    """
    # It becomes part of names of files and of queries, and comes from a file that others may have written.
    get_run(run.folder.out, run.manifest.run_id)
    if steps:
        if at is not None or role != "source":
            raise ConfigError(
                "all steps",
                got=f"also --at {at}" if at is not None else "role target",
                allowed="the trajectory of nodes as sources",
                remedy="Leave --at and --role out.",
            )
        return Snapshot(run, run.vectors("trajectory"), None, lists)
    output, step = choose_output(run, at, role)
    return Snapshot(run, run.vectors(output), step, lists)


def require_moments(snapshot: Snapshot, form: str) -> None:
    """Raise where a format needs moments and the run has none."""
    if not snapshot.timed:
        raise InputError(
            f"{form} needs moments",
            got="a run whose times are plain numbers",
            allowed="times that are dates or timestamps",
            remedy="Use --format parquet, delta or lance, which do without event_timestamp.",
        )


def step_ends(grid: TimeGrid) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the end of every step in microseconds since 1970: nothing of the step happens at or after it."""
    n, ticks = grid.n_steps, grid.scale.ticks
    if grid.width:
        ends = [grid.origin + (step + 1) * grid.width for step in range(n)]
    else:
        ends = [edge + 1 for edge in grid.edges] if grid.step == "distinct" else list(grid.edges[1:])
    # Rounded up: never before what the step has seen.
    return np.array([min(-(-end * 10**6 // ticks), _LAST) for end in ends], dtype=np.int64)


def _finished(run: PublishedRun) -> datetime:
    try:
        return datetime.fromisoformat(run.manifest.finished).astimezone(UTC)
    except (ValueError, OverflowError):
        raise InputError(
            f"the manifest of run {run.manifest.run_id} is damaged",
            got=f"finished at {run.manifest.finished!r}",
            remedy="Use another run: toffee runs lists them.",
        ) from None


def _plain(kind: pa.DataType) -> pa.DataType:
    """Return the type of ids as every table has it: unsigned integers of 64 bits are few programs' own."""
    if pa.types.is_integer(kind):
        return pa.uint64() if kind == pa.uint64() else pa.int64()
    return pa.string()
