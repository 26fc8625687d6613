"""The scan: read fragments, keep the valid rows, and leave them on storage with ids as small numbers.

Ids are looked at once, here: a part of the rows is written with each id as its position in the sorted list of
the part's distinct ids. Later maps carry that short list, never the ids of every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import polars as pl

from toffee_dist.ingest import distinct_count
from toffee_dist.ingest.batches import read_fragments
from toffee_dist.ingest.columns import Schema
from toffee_dist.ingest.files import Fragment
from toffee_dist.ingest.registry import encode_ids, sample_ids
from toffee_dist.ingest.validate import BadRows, clean_rows
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import MAX_STEPS
from toffee_dist.storage.files import replacing, save_array
from toffee_dist.storage.forgotten import Forgotten
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import Id


@dataclass(frozen=True)
class ScanTask:
    """What one task reads.

    Parameters
    ----------
    since, until
        Rows outside [since, until) are counted and left out; None is open.
    keep
        False only looks: counts and the range of time, nothing written.
    estimate
        Whether to estimate the numbers of nodes, pairs and distinct times.
    directed
        Of the pairs that are estimated.
    distinct
        Whether to collect the distinct times.
    limits
        How much is read at once.
    forgotten
        Rows with these ids are counted and left out.
    """

    index: int
    fragments: tuple[Fragment, ...]
    schema: Schema
    work: str
    bipartite: bool = False
    since: int | None = None
    until: int | None = None
    keep: bool = True
    distinct: bool = False
    estimate: bool = False
    directed: bool = True
    limits: Limits = LIMITS
    forgotten: Forgotten | None = None


@dataclass(frozen=True)
class ScanPart:
    """Some of the valid rows on storage: positions of source and target, time, weight."""

    name: str
    rows: int
    counts: tuple[int, ...]
    samples: tuple[list[Id], ...]

    def rows_path(self, work: str) -> Path:
        """Where the rows are."""
        return to_path(work) / f"{self.name}.rows.arrow"

    def ids_path(self, work: str, space: int) -> Path:
        """Where the sorted distinct ids of one space are."""
        return to_path(work) / f"{self.name}.ids{space}.arrow"

    def times_path(self, work: str) -> Path:
        """Where the distinct times are."""
        return to_path(work) / f"{self.name}.times.npy"


@dataclass
class ScanRecord:
    """What one task found."""

    fragment_rows: list[tuple[int, int]] = field(default_factory=list)
    parts: list[ScanPart] = field(default_factory=list)
    bad: BadRows = field(default_factory=BadRows)
    rows: int = 0
    comments: int = 0
    outside: int = 0
    forgotten: int = 0
    lo: int | None = None
    hi: int | None = None
    sketches: dict[str, distinct_count.Hashes] = field(default_factory=dict)


def scan(task: ScanTask) -> ScanRecord:
    """Read the fragments of a task into parts of at most about `Limits.batch_rows` rows each."""
    record = ScanRecord()
    waiting: list[pl.DataFrame] = []
    held = 0
    for frame in _valid_rows(task, record):
        if held and held + frame.height > task.limits.batch_rows:
            _write_part(pl.concat(waiting), task, record)
            waiting, held = [], 0
        waiting.append(frame)
        held += frame.height
    if held:
        _write_part(pl.concat(waiting), task, record)
    return record


def _valid_rows(task: ScanTask, record: ScanRecord) -> Iterator[pl.DataFrame]:
    rows: dict[int, int] = {}
    for batch in read_fragments(task.fragments, task.schema.layouts, task.limits):
        frame = clean_rows(batch, task.schema, record.bad)
        record.comments += batch.comments
        record.rows += batch.frame.height
        for piece in batch.pieces:
            rows[piece.fragment.index] = piece.first + piece.rows
        before = frame.height
        if task.since is not None:
            frame = frame.filter(pl.col("time") >= task.since)
        if task.until is not None:
            frame = frame.filter(pl.col("time") < task.until)
        record.outside += before - frame.height
        if task.forgotten is not None:
            gone = task.forgotten.find(frame["source"]) | task.forgotten.find(frame["target"])
            record.forgotten += int(gone.sum())
            frame = frame.filter(~gone)
        if frame.height:
            lo, hi = int(frame["time"].min()), int(frame["time"].max())  # type: ignore[arg-type]
            record.lo = lo if record.lo is None else min(lo, record.lo)
            record.hi = hi if record.hi is None else max(hi, record.hi)
            if task.estimate:
                _sketch(frame, task, record)
            if task.keep:
                yield frame
    record.fragment_rows = sorted(rows.items())


def _sketch(frame: pl.DataFrame, task: ScanTask, record: ScanRecord) -> None:
    source = distinct_count.hash_ids(frame["source"])
    target = distinct_count.hash_ids(frame["target"], seed=int(task.bipartite))
    if not task.directed:
        source, target = np.minimum(source, target), np.maximum(source, target)
    found = {
        "nodes": np.concatenate([source, target]),
        "pairs": distinct_count.hash_pairs(source, target),
        "times": distinct_count.hash_ids(frame["time"]),
    }
    for name, hashes in found.items():
        record.sketches[name] = distinct_count.add(record.sketches.get(name, distinct_count.empty()), hashes)


def _write_part(frame: pl.DataFrame, task: ScanTask, record: ScanRecord) -> None:
    name = f"part-{task.index:06d}-{len(record.parts):04d}"
    groups = (
        [[frame["source"]], [frame["target"]]] if task.bipartite else [[frame["source"], frame["target"]]]
    )
    encoded = [encode_ids(group) for group in groups]
    ids = [found for found, _ in encoded]
    source, target = [codes for _, found in encoded for codes in found]
    part = ScanPart(
        name, frame.height, tuple(len(found) for found in ids), tuple(sample_ids(found) for found in ids)
    )
    for space, found in enumerate(ids):
        with replacing(part.ids_path(task.work, space), durable=False) as path:
            found.alias("id").to_frame().write_ipc(path)
    columns = {"source": source, "target": target, "time": frame["time"]}
    if "weight" in frame.columns:
        columns["weight"] = frame["weight"]
    with replacing(part.rows_path(task.work), durable=False) as path:
        pl.DataFrame(columns).write_ipc(path)
    if task.distinct:
        times = frame["time"].unique().sort().to_numpy()
        save_array(part.times_path(task.work), times[: MAX_STEPS + 1], durable=False)
    record.parts.append(part)
