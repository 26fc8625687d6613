"""The node registry on storage: which id has which row; written by `ingest.registry`, read by everybody."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa

from toffee_dist.errors import InputError
from toffee_dist.storage.parquet import collect, reading, scan_parquet
from toffee_dist.storage.paths import to_path

Id = int | str


def registry_files(folder: Path) -> tuple[str, ...]:
    """List the parts of a registry on storage, in the order of their ids."""
    return tuple(str(path) for path in sorted(folder.glob("part-*.parquet")))


def read_registry(
    files: Sequence[str], space: int, lo: Id | None = None, hi: Id | None = None
) -> pl.DataFrame:
    """Read id and row of one space, ids in [lo, hi), from a registry's parts."""
    own = [path for path in map(to_path, files) if path.name.startswith(f"part-{space}-")]
    if not own:
        return pl.DataFrame({"id": [], "row": pl.Series([], dtype=pl.Int64)})
    frame = scan_parquet(own).select("id", "row")
    if lo is not None:
        frame = frame.filter(pl.col("id") >= lo)
    if hi is not None:
        frame = frame.filter(pl.col("id") < hi)
    with reading(own[0]):
        try:
            return frame.collect()
        except pl.exceptions.PolarsError as error:
            raise InputError(
                "cannot read the registry",
                got=str(error).splitlines()[0],
                allowed="a registry with ids of the same type",
                remedy="Start a new one.",
            ) from None


def count_spaces(files: Sequence[str]) -> int:
    """Return 2 for a registry of two spaces, else 1."""
    return 1 + any(to_path(name).name.startswith("part-1-") for name in files)


def read_node_rows(files: Sequence[str], start: int, stop: int) -> pl.DataFrame:
    """Read id, row and space of the rows [start, stop), in the order of rows.

    Ids of two spaces that are of two kinds come as text.
    """
    frames = []
    for name in files:
        with reading(to_path(name)):
            frame = scan_parquet([to_path(name)]).select("id", "row", "space")
            frames.append(frame.filter(pl.col("row").is_between(start, stop, closed="left")).collect())
    if len({frame.schema["id"] for frame in frames}) > 1:
        frames = [frame.with_columns(pl.col("id").cast(pl.String)) for frame in frames]
    table = pl.concat(frames).sort("row") if frames else pl.DataFrame({"row": []})
    if not np.array_equal(table["row"].to_numpy(), np.arange(start, stop)):
        raise InputError(
            "the registry does not hold every row",
            got=f"{table.height} of the rows {start} to {stop - 1}",
            allowed="each row once",
            remedy="Ingest the edges again.",
        )
    return table


def count_known(files: Sequence[str]) -> int:
    """Return the number of rows that are taken: the next new node gets this one."""
    if not files:
        return 0
    paths = [to_path(name) for name in files]
    return int(collect(paths[0], scan_parquet(paths).select(pl.len())).item())


def read_ids(nodes: Path, start: int, stop: int) -> dict[str, pa.Array]:
    """Return the ids of the rows [start, stop), in the order of rows."""
    files = registry_files(nodes)
    table = read_node_rows(files, start, stop)
    columns = {"node_id": _plain_ids(table["id"])}
    if count_spaces(files) > 1:
        names = np.array(["source", "target"])
        columns["space"] = pa.array(names[table["space"].to_numpy()])
    return columns


def _plain_ids(ids: pl.Series) -> pa.Array:
    array = ids.to_arrow()
    return array.cast(pa.string()) if ids.dtype == pl.String else array
