"""The tables of a run, in the form that suits: Arrow, polars, pandas, NumPy, dask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.storage import parquet
from toffee_dist.storage.vectors import VectorTable, list_pieces, read_whole

if TYPE_CHECKING:
    import pyarrow.dataset as ds


@dataclass(frozen=True)
class Table:
    """A table of a run on storage; nothing is read until it is asked for.

    Parameters
    ----------
    path
        A Parquet file, or a folder of parts.
    vectors
        The vectors in it, where there are some.
    """

    path: Path
    vectors: VectorTable | None = None

    def _repr_html_(self) -> str:
        """Say in a notebook what is there, without reading it."""
        name, _, suffix = self.path.name.partition(".")
        facts = {"file" if suffix else "folder": self.path, "shape": self.shape or "a table"}
        return html_facts(f"Table {name}", facts)

    @property
    def shape(self) -> tuple[int, ...]:
        """Rows, then the length of a vector; a middle number is what every node has (steps, frequencies)."""
        return () if self.vectors is None else self.vectors.shape

    @property
    def files(self) -> list[Path]:
        """The files, in the order of rows."""
        found = [self.path] if self.vectors is None else self.vectors.files
        if not found:
            raise InputError(
                f"{self.path.name} was not written as Parquet",
                got="its compact form only",
                allowed="numpy(), dask() and every question, which read that",
                remedy="For tables, embed again with --dense all, last:N, every:K or steps.",
            )
        return found

    def arrow(self) -> pa.Table:
        """Return all of it as an Arrow table."""
        with parquet.reading(self.path):
            table = self.dataset().to_table()
            table.validate(full=True)
            return table

    def dataset(self) -> ds.Dataset:
        """Return an Arrow dataset, for filters and batches."""
        return parquet.open_dataset(self.files)

    def polars(self) -> pl.LazyFrame:
        """Return a lazy polars frame."""
        return parquet.scan_parquet(self.files)

    def schema(self) -> pl.Schema:
        """Return the names and types of the columns."""
        with parquet.reading(self.path):
            return self.polars().collect_schema()

    def collect(self, frame: pl.LazyFrame) -> pl.DataFrame:
        """Read what a frame made of `polars` asks for; a damaged file is named."""
        return parquet.collect(self.path, frame)

    def pandas(self) -> Any:
        """Return a pandas frame (pandas must be installed)."""
        return self.arrow().to_pandas()

    def numpy(self) -> NDArray[Any]:
        """Return the vectors, in the order of rows: (nodes, rank), or (steps, nodes, rank) over time."""
        array = read_whole(self._vectors())
        return array.transpose(1, 0, 2) if array.ndim == 3 else array

    def dask(self) -> Any:
        """Return the vectors as a dask array with one chunk per part; the shape is that of `numpy`."""
        # For the start-up time of those who do not ask for it.
        import dask.array as da
        from dask import delayed

        vectors = self._vectors()
        chunks = [
            da.from_delayed(delayed(read, pure=True)(), (count, *vectors.shape[1:]), vectors.dtype)
            for count, read in list_pieces(vectors)
        ]
        array = da.concatenate(chunks, axis=0)
        return array.transpose(1, 0, 2) if array.ndim == 3 else array

    def _vectors(self) -> VectorTable:
        if self.vectors is None:
            raise InputError(
                f"{self.path.name} has no vectors",
                got="a table of other columns",
                allowed="an output of the run",
                remedy="Read it with polars(), pandas() or arrow().",
            )
        return self.vectors


def html_facts(title: str, facts: Mapping[str, object]) -> str:
    """Return a small table for a notebook; whatever a user wrote is escaped.

    Examples
    --------
    >>> html_facts("a<b", {"rank": 8})
    '<table><caption>a&lt;b</caption><tr><th>rank</th><td>8</td></tr></table>'
    """
    rows = "".join(f"<tr><th>{escape(k)}</th><td>{escape(str(v))}</td></tr>" for k, v in facts.items())
    return f"<table><caption>{escape(title)}</caption>{rows}</table>"
