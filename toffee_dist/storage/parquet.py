"""Parquet out: vectors as lists, ids as the user knows them, the same bytes for the same data.

And in: local files by their paths, what is behind a URL by the ranges that a reader asks for. Pyarrow
decodes, and all of it is checked before anybody follows an offset: damaged files made polars' own reader end
the process (benchmarks/fuzz.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from numpy.typing import NDArray
from polars.io.plugins import register_io_source

from toffee_dist.errors import InputError, QualityError, UnfinishedError
from toffee_dist.storage.files import fetched, remove_file, replacing
from toffee_dist.storage.paths import Ranges, as_remote
from toffee_dist.storage.spaces import SPACE_COLUMN, SPACE_KEY

if TYPE_CHECKING:
    import pyarrow.dataset as ds

# Rows of a row group: what a reader decodes at once, and what the writer holds beside the table.
GROUP_ROWS = 16_384
# Rows that are decoded at once, where nobody asks for fewer.
BATCH_ROWS = 1 << 18


def vectors(array: NDArray[Any]) -> pa.FixedSizeListArray:
    """Return an (m, r) array as a column of m lists of length r, without a copy where it is contiguous.

    Examples
    --------
    >>> vectors(np.zeros((2, 3), dtype=np.float32)).type
    FixedSizeListType(fixed_size_list<item: float>[3])
    """
    return pa.FixedSizeListArray.from_arrays(pa.array(np.ravel(array)), array.shape[1])


def as_lists(table: pa.Table) -> pa.Table:
    """Return a table whose vectors are plain lists, without a copy of their numbers.

    Examples
    --------
    >>> as_lists(pa.table({"v": vectors(np.zeros((2, 3), dtype=np.float32))})).schema.field("v").type
    ListType(list<item: float>)
    """
    for field in list_columns(table.schema):
        if not pa.types.is_fixed_size_list(field.type):
            continue
        column, at = table[field.name].combine_chunks(), table.schema.get_field_index(field.name)
        offsets = np.arange(len(column) + 1, dtype=np.int64) * field.type.list_size
        narrow = offsets[-1] <= np.iinfo(np.int32).max
        kind, dtype = (pa.ListArray, np.int32) if narrow else (pa.LargeListArray, np.int64)
        table = table.set_column(
            at, field.name, kind.from_arrays(pa.array(offsets.astype(dtype)), column.flatten())
        )
    return table


def to_matrix(column: pa.ChunkedArray | pa.Array, length: int) -> NDArray[Any]:
    """Return a column of lists, all of this length, as an (m, length) array.

    Raises
    ------
    ValueError
        Where some have another length, or are null.
    """
    if isinstance(column, pa.ChunkedArray):
        column = column.combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(column)
    if column.null_count or (len(column) and pc.any(pc.not_equal(lengths, length)).as_py()):
        raise ValueError(f"vectors that are not of length {length}")
    return np.asarray(flat.reshape(len(column), length))


def with_space(columns: Mapping[str, Any], space_id: str) -> pa.Table:
    """Return columns as a table that says, in its metadata and in a column, which space its vectors are in.

    Examples
    --------
    >>> with_space({"node_id": ["a", "b"]}, "5e0c").column("space_id").to_pylist()
    ['5e0c', '5e0c']
    """
    table = pa.table(dict(columns))
    # One word for all rows, and a byte per row beside it.
    constant = pa.DictionaryArray.from_arrays(np.zeros(len(table), np.int8), [space_id])
    return table.append_column(SPACE_COLUMN, constant).replace_schema_metadata({SPACE_KEY: space_id})


def read_space(schema: pa.Schema) -> str | None:
    """Return which space the vectors of a file are in, by its metadata; None where it does not say."""
    found = (schema.metadata or {}).get(SPACE_KEY.encode())
    return None if found is None else str(found, "utf-8", "replace")


def write_parquet(path: Path, columns: Mapping[str, Any] | pa.Table) -> int:
    """Write one file, whole or not at all; return its rows."""
    table = columns if isinstance(columns, pa.Table) else pa.table(dict(columns))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        _write(temporary, table.schema, [table])
    return int(table.num_rows)


def write_stream(path: Path, tables: Iterator[pa.Table]) -> None:
    """Write one file from tables that come one after the other, at least one."""
    first = next(tables)
    with replacing(path) as temporary:
        _write(temporary, first.schema, chain([first], tables))


def _write(path: Path, schema: pa.Schema, tables: Iterable[pa.Table]) -> None:
    lists = {field.name for field in list_columns(schema)}
    plain = [field.name for field in schema if field.name not in lists]
    # Vectors do not compress; everything else does.
    codecs = {name: "zstd" for name in plain} | {f"{name}.list.element": "none" for name in lists}
    with pq.ParquetWriter(
        path, schema, compression=codecs, use_dictionary=plain, write_statistics=plain
    ) as writer:
        for table in tables:
            writer.write_table(table, row_group_size=GROUP_ROWS)


def check_parquet(path: Path, rows: int, columns: list[str]) -> None:
    """Read a part back, and raise unless it has these rows and columns and only finite numbers.

    Raises
    ------
    UnfinishedError
        For a damaged file, which is removed so that `toffee resume` writes it again.
    QualityError
        For numbers that are not finite.
    """
    try:
        with fetched(path) as local:
            _check(local, rows, columns)
    except (OSError, ValueError, pa.ArrowException) as error:
        remove_file(path)
        raise UnfinishedError(
            f"a part of the output is damaged: {path.name}",
            got=str(error).splitlines()[0],
            allowed=f"{rows} rows of {', '.join(columns)}",
            remedy="toffee resume writes it again.",
        ) from None


def _check(path: Path, rows: int, columns: list[str]) -> None:
    file = pq.ParquetFile(path)
    found = file.metadata.num_rows, file.schema_arrow.names
    if found != (rows, columns):
        raise ValueError(f"{found[0]} rows of {', '.join(found[1])}")
    for batch in file.iter_batches(batch_size=GROUP_ROWS):
        for name in columns:
            column = batch.column(name)
            if is_vector(column.type):
                column = column.flatten()
            if pa.types.is_floating(column.type) and not np.isfinite(column.to_numpy()).all():
                raise QualityError(
                    f"{path.name} holds numbers that are not finite",
                    got=f"NaN or infinity in {name}",
                    allowed="finite numbers",
                    remedy="Nothing was published. Try --precision double.",
                )


# What readers raise of a table that is missing or not what it should be.
_DAMAGE = (
    pl.exceptions.PolarsError,
    pa.ArrowException,
    FileNotFoundError,
    EOFError,
    KeyError,
    UnicodeDecodeError,
)


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn what a missing or damaged table of a run makes the readers raise into an error that names it."""
    try:
        yield
    except _DAMAGE as error:
        raise _damaged(path, error) from None
    except OSError as error:
        # pyarrow says so of damaged bytes too; a store that fails stays one.
        if as_remote(path) is not None or error.errno is not None:
            raise
        raise _damaged(path, error) from None
    except BaseException as error:
        # A Rust panic is not an Exception.
        if type(error).__name__ == "PanicException":
            raise _damaged(path, error) from None
        raise


def _damaged(path: Path, error: BaseException) -> InputError:
    return InputError(
        f"the table {path.parent.name}/{path.name} is damaged",
        got=(str(error).strip() or type(error).__name__).splitlines()[0][:200],
        remedy="Use another run: toffee runs lists them; toffee rollback goes back to one.",
    )


@contextmanager
def open_parquet(path: Path, metadata: pq.FileMetaData | None = None) -> Iterator[pq.ParquetFile]:
    """Open one file, of which only what is asked for is read; with its footer, where that is known."""
    with _open_bytes(path) as source:
        yield pq.ParquetFile(source, metadata=metadata)


def _open_bytes(path: Path, size: int | None = None) -> Any:
    there = as_remote(path)
    if there is None:
        return pa.OSFile(str(path))
    return Ranges(there, there.stat().st_size if size is None else size)


class OpenRows:
    """An open file, whose footer was read; the rest is read as it is asked for."""

    def __init__(self, source: Any) -> None:
        self._source, self._metadata = source, pq.read_metadata(source)
        self.schema: pa.Schema = self._metadata.schema.to_arrow_schema()
        groups = range(self._metadata.num_row_groups)
        # Rows of every row group.
        self.counts: list[int] = [self._metadata.row_group(number).num_rows for number in groups]
        if sum(self.counts) != self._metadata.num_rows:
            raise pa.ArrowInvalid(
                f"a footer that claims {self._metadata.num_rows:,} rows, in groups of {sum(self.counts):,}"
            )

    def read(
        self,
        columns: Sequence[str] | None = None,
        start: int = 0,
        stop: int | None = None,
        batch_rows: int = BATCH_ROWS,
    ) -> Iterator[pl.DataFrame]:
        """Yield rows; see `read_batches`."""
        # A text of a megabyte that a million rows repeat takes a kilobyte of a file; decoded as places in a
        # list of texts, it takes a megabyte of memory and not a terabyte.
        text = [field.name for field in self.schema if _is_text(field.type)]
        file = pq.ParquetFile(self._source, metadata=self._metadata, read_dictionary=text)
        groups, skipped, at = [], 0, 0
        for number, rows in enumerate(self.counts):
            after = at + rows
            if after <= start:
                skipped = after
            elif stop is None or at < stop:
                groups.append(number)
            at = after
        names = self.schema.names if columns is None else list(columns)
        at = skipped
        for batch in file.iter_batches(batch_rows, groups, names, use_threads=False):
            # Offsets, lengths and letters that lead elsewhere are refused here.
            batch.validate(full=True)
            after = at + batch.num_rows
            low, high = max(start, at), after if stop is None else min(stop, after)
            if low < high:
                yield _to_frame(batch.slice(low - at, high - low), self.schema)
            at = after


@contextmanager
def open_rows(path: Path, size: int | None = None) -> Iterator[OpenRows]:
    """Open one file for its rows; with its bytes, where they are known, a store is not asked for them."""
    with _open_bytes(path, size) as source:
        yield OpenRows(source)


def read_schema(path: Path) -> pl.Schema:
    """Return the names and types of the columns of one file."""
    with open_parquet(path) as file:
        # Not empty_table(), which imports pandas where there is one: a quarter of a second of a question.
        return to_polars(pa.Table.from_batches([], file.schema_arrow)).schema


def read_batches(
    path: Path,
    columns: Sequence[str] | None = None,
    start: int = 0,
    stop: int | None = None,
    batch_rows: int = BATCH_ROWS,
) -> Iterator[pl.DataFrame]:
    """Yield rows of one file.

    Parameters
    ----------
    path
        The file.
    columns
        The names of those to read; None: all.
    start, stop
        Which rows; None: to the end.
    batch_rows
        Rows that are decoded at once, and yielded at the most.

    Raises
    ------
    ArrowException, PolarsError, OSError
        For a damaged file.
    """
    with open_rows(path) as file:
        yield from file.read(columns, start, stop, batch_rows)


def _is_text(type: pa.DataType) -> bool:
    return bool(pa.types.is_string(type) or pa.types.is_large_string(type))


def _to_frame(batch: pa.RecordBatch, schema: pa.Schema) -> pl.DataFrame:
    """Return a batch as a frame of the types of the schema."""
    columns = []
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if pa.types.is_dictionary(column.type) and _is_text(schema.field(name).type):
            # Polars' texts are places too: nothing is repeated.
            texts = pl.Series(name, column.dictionary, dtype=pl.String)
            columns.append(texts.gather(pl.Series(column.indices)))
        else:
            columns.append(pl.Series(name, _to_single(column)))
    return pl.DataFrame(columns)


def to_polars(table: pa.Table) -> pl.DataFrame:
    """Return a table as a frame."""
    found = pl.from_arrow(
        pa.Table.from_arrays([_to_single(column) for column in table.columns], table.column_names)
    )
    assert isinstance(found, pl.DataFrame)
    return found


def _to_single(column: pa.Array | pa.ChunkedArray) -> pa.Array | pa.ChunkedArray:
    """Return vectors in half precision in single: polars 1.20 panics over them."""
    kind = column.type
    if not (is_vector(kind) and pa.types.is_float16(kind.value_type)):
        return column
    if pa.types.is_fixed_size_list(kind):
        return column.cast(pa.list_(pa.float32(), kind.list_size))
    return column.cast((pa.list_ if pa.types.is_list(kind) else pa.large_list)(pa.float32()))


def list_columns(schema: pa.Schema) -> list[pa.Field]:
    """Return the columns of a table that are vectors."""
    return [field for field in schema if is_vector(field.type)]


def is_vector(kind: pa.DataType) -> bool:
    """Whether values of this type are vectors: lists of numbers, of a fixed size or not."""
    lists = (pa.types.is_fixed_size_list, pa.types.is_list, pa.types.is_large_list)
    return any(test(kind) for test in lists) and pa.types.is_floating(kind.value_type)


def take_rows(path: Path, rows: NDArray[np.int64], columns: list[str]) -> pa.Table:
    """Return some rows of a file, which must ascend; reads only the row groups that hold them."""
    parts, at = [], 0
    with reading(path), open_parquet(path) as file:
        for number in range(file.num_row_groups):
            stop = at + file.metadata.row_group(number).num_rows
            own = rows[np.searchsorted(rows, at) : np.searchsorted(rows, stop)]
            if len(own):
                group = file.read_row_group(number, columns=columns)
                group.validate(full=True)
                # Not pa.array, which imports pandas too.
                parts.append(group.take(pl.Series(own - at).to_arrow()))
            at = stop
    return pa.concat_tables(parts)


def read_columns(path: Path, columns: list[str]) -> pa.Table:
    """Return some columns of a table of a run."""
    with reading(path):
        table = open_dataset([path]).to_table(columns=columns)
        table.validate(full=True)
        return table


def collect(path: Path, frame: pl.LazyFrame) -> pl.DataFrame:
    """Read what a lazy frame asks of a table of a run."""
    with reading(path):
        return frame.collect()


def open_dataset(files: Sequence[Path]) -> ds.Dataset:
    """Return Parquet files as one Arrow dataset."""
    # For the start-up time of jobs: it takes a third of a second (it brings pandas, where there is one).
    import pyarrow.dataset as ds

    there = as_remote(files[0])
    if there is None:
        return ds.dataset([str(file) for file in files], format="parquet")
    keys = [there.fs._strip_protocol(str(file)) for file in files]
    return ds.dataset(keys, format="parquet", filesystem=there.fs)


def scan_parquet(files: Sequence[Path]) -> pl.LazyFrame:
    """Return Parquet files of the same columns as one lazy frame; only the first one's footer is read."""

    def read(
        names: list[str] | None, predicate: pl.Expr | None, n_rows: int | None, _: int | None
    ) -> Iterator[pl.DataFrame]:
        for path in files:
            for frame in read_batches(path, names, 0, n_rows):
                if n_rows is not None:
                    n_rows -= frame.height
                yield frame if predicate is None else frame.filter(predicate)

    with reading(files[0]):
        return register_io_source(read, schema=read_schema(files[0]))


def read_frame(path: Path) -> pl.DataFrame:
    """Read a whole table of a run."""
    with reading(path):
        return scan_parquet([path]).collect()
