"""The node registry: any id → row, sorted, append-only, and never in one place at once.

New nodes get rows in the order of their ids (sources before targets where they are two spaces), after all
known nodes, whose rows never change. So rows do not depend on files, tasks or arrival. It is a sample sort:
every scan task leaves its distinct ids sorted, a bucket is a range of ids, and the task of a bucket sees only
that range of each list.
"""

from __future__ import annotations

import glob
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.limits import Limits
from toffee_dist.storage.files import fetched, replacing, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import Id, read_registry

SAMPLES = 256
Codes = NDArray[np.uint32]
_INT_BITS = 64


def encode_ids(columns: Sequence[pl.Series]) -> tuple[pl.Series, list[Codes]]:
    """Return the sorted distinct ids of some columns of one type, and every value as a position among them.

    Examples
    --------
    >>> ids, codes = encode_ids([pl.Series([7, 3]), pl.Series([3, 9])])
    >>> ids.to_list(), [c.tolist() for c in codes]
    ([3, 7, 9], [[1, 0], [0, 2]])
    """
    joined = columns[0] if len(columns) == 1 else pl.concat([column.alias("id") for column in columns])
    joined = joined.alias("id").rechunk()
    if not len(joined):
        return joined, [np.empty(0, dtype=np.uint32) for _ in columns]
    if joined.dtype == pl.String:
        ids, codes = _encode_strings(joined)
    else:
        found, codes = _encode_integers(joined.to_numpy())
        ids = pl.Series("id", found)
    return ids, np.split(codes, np.cumsum([len(column) for column in columns])[:-1])


def _encode_integers(values: NDArray[Any]) -> tuple[NDArray[Any], Codes]:
    lo, hi = int(values.min()), int(values.max())
    index_bits = len(values).bit_length()
    if (hi - lo).bit_length() + index_bits <= _INT_BITS:
        # Value and position in one word: sorting words is 5× faster than sorting an index.
        words = (values - values.dtype.type(lo)).astype(np.uint64) << np.uint64(index_bits)
        words |= np.arange(len(values), dtype=np.uint64)
        words.sort()
        order = (words & np.uint64((1 << index_bits) - 1)).astype(np.int64)
        words >>= np.uint64(index_bits)
        sorted_values = words.astype(values.dtype) + values.dtype.type(lo)
    else:
        order = np.argsort(values)
        sorted_values = values[order]
    new = np.empty(len(values), dtype=bool)
    new[0] = True
    np.not_equal(sorted_values[1:], sorted_values[:-1], out=new[1:])
    codes = np.empty(len(values), dtype=np.uint32)
    codes[order] = np.cumsum(new, dtype=np.uint32) - np.uint32(1)
    return sorted_values[new], codes


def _encode_strings(values: pl.Series) -> tuple[pl.Series, Codes]:
    # Sort an index by hash, not by text: comparing words is far cheaper than comparing strings.
    _, hashed = _encode_integers(values.hash(0).to_numpy())
    first = np.empty(int(hashed.max()) + 1, dtype=np.int64)
    first[hashed[::-1]] = np.arange(len(values) - 1, -1, -1)
    distinct = values.gather(first)
    if not (distinct.gather(hashed) == values).all():  # Two ids with one hash: take the slow way.
        table = values.unique().sort().to_frame().with_row_index("code")
        codes = values.to_frame().join(table, on="id", how="left", maintain_order="left")["code"]
        return table["id"], codes.to_numpy()
    order = distinct.arg_sort().to_numpy()
    rank = np.empty(len(order), dtype=np.uint32)
    rank[order] = np.arange(len(order), dtype=np.uint32)
    return distinct.gather(order), rank[hashed]


def sample_ids(ids: pl.Series) -> list[Id]:
    """Return a few ids at equal distances of a sorted list, for choosing buckets."""
    if not len(ids):
        return []
    at = np.linspace(0, len(ids) - 1, min(SAMPLES, len(ids))).astype(np.int64)
    return list(ids.gather(at))


def choose_buckets(
    samples: Sequence[tuple[int, Sequence[Id]]], limits: Limits
) -> list[tuple[Id | None, Id | None]]:
    """Cut the ids into ranges [lo, hi) of about `Limits.bucket_ids`, from (count, sample) of each list.

    Where the cuts are changes who does the work, and nothing else.
    """
    total = sum(count for count, _ in samples)
    n_buckets = -(-total // limits.bucket_ids)
    if n_buckets <= 1:
        return [(None, None)]
    weighted = sorted((item, count / len(sample)) for count, sample in samples for item in sample)
    reached = np.cumsum([weight for _, weight in weighted])
    marks = np.searchsorted(reached, reached[-1] * np.arange(1, n_buckets) / n_buckets)
    cuts = sorted({weighted[mark][0] for mark in marks})
    return list(zip([None, *cuts], [*cuts, None], strict=True))


@dataclass(frozen=True)
class BucketTask:
    """The merging of one range of ids of one space, from every part."""

    index: int
    space: int
    lo: Id | None
    hi: Id | None
    parts: tuple[str, ...]
    known: tuple[str, ...]
    work: str

    @property
    def ids_path(self) -> Path:
        """Where the ids of the bucket go, with rows that are not final yet."""
        return to_path(self.work) / f"bucket-{self.space}-{self.index:05d}.arrow"

    @property
    def rows_path(self) -> Path:
        """Where the row of every id of every part goes, part after part."""
        return to_path(self.work) / f"bucket-{self.space}-{self.index:05d}.npy"


@dataclass(frozen=True)
class BucketRecord:
    """What came out: ids that have no row yet, all ids, and where each part's rows start."""

    n_new: int
    n_ids: int
    offsets: tuple[int, ...]


def merge_bucket(task: BucketTask) -> BucketRecord:
    """Merge one range of ids, and give every id of every part its row.

    A known id keeps its row. The k-th new id of the bucket is written as -1-k, since only after all
    buckets are counted is it known where its rows start; `resolve` does that.
    """
    slices = [_range(read_ipc(to_path(path))["id"], task.lo, task.hi) for path in task.parts]
    known = read_registry(task.known, task.space, task.lo, task.hi)
    if len(known):
        seen = {str(part.dtype) for part in [*slices, known["id"]] if len(part)}
        if len(seen) > 1:
            raise InputError(
                "node ids changed their type since the registry was written",
                got=" and ".join(sorted(seen)),
                allowed="the type of the registry",
                remedy="Cast the ids, use --ids, or start a new registry.",
            )
    fresh = pl.concat(slices).unique()
    table = pl.DataFrame({"id": fresh})
    table = table.join(known, on="id", how="anti").sort("id") if len(known) else table.sort("id")
    n_new = table.height
    table = table.with_columns((-1 - pl.int_range(pl.len())).cast(pl.Int64).alias("row"))
    if len(known):
        table = pl.concat([table, known.with_columns(pl.col("id").cast(fresh.dtype))]).sort("id")
    rows = table["row"].to_numpy()
    found = [rows[positions(table["id"], part)] for part in slices]
    save_array(task.rows_path, np.concatenate(found) if found else np.empty(0, dtype=np.int64), durable=False)
    with replacing(task.ids_path, durable=False) as path:
        table.write_ipc(path)
    offsets = np.concatenate([[0], np.cumsum([len(part) for part in slices])])
    return BucketRecord(n_new, table.height, tuple(int(offset) for offset in offsets))


def read_ipc(path: Path) -> pl.DataFrame:
    """Read an Arrow file; the frame is a map of it, also of a copy that is already gone."""
    with fetched(path) as local:
        # Polars takes a name for a pattern, and has no other way to map a file.
        return pl.read_ipc(glob.escape(str(local)))


def positions(ids: pl.Series, wanted: pl.Series) -> NDArray[np.int64]:
    """Return where each wanted id is in sorted ids that hold them all; wanted is sorted too."""
    if ids.dtype == pl.String:
        table = ids.alias("id").to_frame().with_row_index("at")
        joined = wanted.alias("id").to_frame().join(table, on="id", how="left", maintain_order="left")
        return joined["at"].cast(pl.Int64).to_numpy()
    return np.searchsorted(ids.to_numpy(), wanted.to_numpy()).astype(np.int64)


def resolve(rows: NDArray[np.int64], base: int) -> NDArray[np.int64]:
    """Return final rows: known ones as they are, the k-th new one as base + k."""
    return np.where(rows < 0, base - 1 - rows, rows)


def write_bucket(item: tuple[BucketTask, int, str]) -> str:
    """Write the registry's part of one bucket as Parquet: id, row, space; return its name."""
    task, base, folder = item
    table = read_ipc(task.ids_path)
    rows = resolve(table["row"].to_numpy(), base)
    path = to_path(folder) / f"part-{task.space}-{task.index:05d}.parquet"
    table = table.select("id", pl.Series("row", rows), pl.lit(task.space, dtype=pl.UInt8).alias("space"))
    with replacing(path) as temporary:
        table.write_parquet(temporary)
    return path.name


def _range(ids: pl.Series, lo: Id | None, hi: Id | None) -> pl.Series:
    start = 0 if lo is None else int(ids.search_sorted(lo, side="left"))
    stop = len(ids) if hi is None else int(ids.search_sorted(hi, side="left"))
    return ids.slice(start, stop - start)
