"""Vectors from elsewhere beside those of a run: of another run, or of a file such as `toffee fold-in` writes.

They are taken only where they say that they are of the run's space.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.results.nodes import choose_output, find_nodes
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.parquet import open_parquet, read_space, reading, scan_parquet, to_matrix
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.runs import find_run
from toffee_dist.storage.spaces import SPACE_COLUMN, check_space
from toffee_dist.storage.vectors import Vectors, read_nodes

REMEDY = (
    "Take the vectors of a run of the same chain, or those that toffee fold-in makes for this run; after "
    "toffee refresh --fresh, or with another rank, weighting or gauge, stored vectors must be made again."
)


def read_outside(
    run: PublishedRun, where: str, names: Sequence[object], output: str, space: str | None = None
) -> Vectors:
    """Return the vectors of some nodes from elsewhere, (names, rank), in the space of the run.

    Parameters
    ----------
    run
        The run that they are to be compared with.
    where
        A folder of runs, a run, or a Parquet file with the columns node_id, embedding and space_id.
    names
        Ids of nodes there; the run itself need not know them.
    output
        ``embedding`` or ``embedding_target``: which column or output.
    space
        Of a graph with two sides: where the ids are.

    Raises
    ------
    InputError
        Where they are of another space, or do not say of which; where a node is not there.
    """
    path = to_path(where)
    if path.is_file():
        return _read_file(run, path, names, output, space)
    other = PublishedRun(find_run(path))
    expect_space(run, other.manifest.space_of(output), f"run {other.manifest.run_id}", output)
    rows = [node.row for node in find_nodes(other, names, space)]
    return read_nodes(other.vectors(output), rows)


def expect_space(run: PublishedRun, found: str, what: str, output: str = "embedding") -> None:
    """Raise unless vectors from elsewhere are in the space of an output of the run."""
    check_space(run.manifest.space_of(output), found, what, f"run {run.manifest.run_id}", REMEDY)


def refuse_moment(at: int | str | None) -> None:
    """Raise where vectors from elsewhere are asked for at a step: they are one per node."""
    if at is not None:
        raise ConfigError(
            "vectors from elsewhere at a step",
            got=repr(at),
            allowed="no step: one vector per node",
            remedy="Leave --at or --from out.",
        )


def _read_file(
    run: PublishedRun, path: Path, names: Sequence[object], output: str, space: str | None
) -> Vectors:
    with reading(path):
        with open_parquet(path) as file:
            schema = file.schema_arrow
        by_file = read_space(schema) or ""
        for column in ("node_id", output):
            if column not in schema.names:
                raise KeyError(f"no column {column}")
        frame = scan_parquet([path])
        wanted = pl.Series("name", [str(name) for name in names])
        found = frame.filter(pl.col("node_id").cast(pl.String).is_in(wanted.unique().implode()))
        if space is not None and "space" in schema.names:
            found = found.filter(pl.col("space") == space)
        columns = [pl.col("node_id").cast(pl.String), pl.col(output)]
        ids = pl.col(SPACE_COLUMN).cast(pl.String) if SPACE_COLUMN in schema.names else pl.lit(by_file)
        table = found.select(*columns, ids.alias(SPACE_COLUMN)).head(2 * len(names) + 1).collect()
    for found_id in table[SPACE_COLUMN].unique():
        expect_space(run, found_id or "", str(path), output)
    rows = {name: at for at, name in enumerate(table["node_id"])}
    missing = next((name for name in wanted if name not in rows), None)
    if missing is not None or len(rows) != table.height:
        raise InputError(
            f"nodes of {path}",
            got=f"{missing!r} is not there" if missing is not None else "an id that is there twice",
            allowed="one row for each node that is asked for",
            remedy="Look at its column node_id.",
        )
    try:
        vectors = to_matrix(table[output].to_arrow(), run.rank)[[rows[name] for name in wanted]]
    except (ValueError, AttributeError, NotImplementedError):
        vectors = np.full((1, 1), np.nan)
    if vectors.shape[1] != run.rank or not np.isfinite(vectors).all():
        raise InputError(
            f"vectors of {path}",
            got="other lengths, or numbers that are not finite",
            allowed=f"{run.rank} finite numbers each",
            remedy="Make the file again with toffee fold-in.",
        )
    return np.asarray(vectors, dtype=np.float32)


def join_runs(run: PublishedRun, earlier: PublishedRun, role: str = "source") -> pl.LazyFrame:
    """Return the nodes that two runs share with both vectors: node_id, (space,) embedding, embedding_before.

    Raises
    ------
    InputError
        Where the two are of different spaces.
    """
    output, _ = choose_output(run, None, role)
    expect_space(run, earlier.manifest.space_of(output), f"run {earlier.manifest.run_id}", output)
    keys = ["node_id", *(["space"] if run.manifest.config.bipartite else [])]
    now, then = (one.table(output).polars().select(*keys, "embedding") for one in (run, earlier))
    return now.join(then, on=keys, suffix="_before", maintain_order="left")
