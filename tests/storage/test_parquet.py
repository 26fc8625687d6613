"""Parquet in: the same as polars' own reader says, of damaged files an error, of bombs no memory."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.harness.memory import high_water
from toffee_dist.errors import InputError
from toffee_dist.storage.parquet import read_batches, read_frame, read_schema, scan_parquet, take_rows

COLUMNS = st.fixed_dictionaries(
    {
        "id": st.lists(st.one_of(st.none(), st.text(max_size=5)), min_size=9, max_size=9),
        "row": st.lists(st.integers(-(2**63), 2**63 - 1), min_size=9, max_size=9),
        "time": st.lists(st.one_of(st.none(), st.datetimes()), min_size=9, max_size=9),
    }
)


@given(
    columns=COLUMNS,
    group=st.integers(1, 10),
    start=st.integers(0, 10),
    stop=st.integers(0, 10),
    batch=st.integers(1, 10),
    dictionary=st.booleans(),
)
def test_rows_are_those_of_polars(
    columns: dict[str, list[object]], group: int, start: int, stop: int, batch: int, dictionary: bool
) -> None:
    schema: dict[str, pl.DataType] = {"id": pl.String(), "row": pl.Int64(), "time": pl.Datetime("us")}
    frame = pl.DataFrame(columns, schema=schema)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.parquet"
        pq.write_table(frame.to_arrow(), path, row_group_size=group, use_dictionary=dictionary)
        theirs = pl.read_parquet(path)
        assert read_schema(path) == theirs.schema
        found = list(read_batches(path, ["row", "id"], start, stop, batch))
        assert all(0 < part.height <= batch for part in found)
        wanted = theirs.select("row", "id").slice(start, max(stop - start, 0))
        assert pl.concat([wanted.clear(), *found]).equals(wanted)
        twice = scan_parquet([path, path])
        assert twice.collect().equals(pl.concat([theirs, theirs]))
        late = twice.filter(pl.col("row") > 0).select("id").slice(1, 3).collect()
        assert late.equals(pl.concat([theirs, theirs]).filter(pl.col("row") > 0).select("id").slice(1, 3))
        assert twice.head(11).collect().equals(pl.concat([theirs, theirs]).head(11))


def test_a_text_that_many_rows_repeat_is_in_memory_once(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    texts = pa.DictionaryArray.from_arrays(pa.array(np.zeros(100_000, np.int32)), pa.array(["x" * 10**6]))
    pq.write_table(pa.table({"id": texts}), path, store_schema=False, compression="zstd")
    assert path.stat().st_size < 10_000
    before = high_water(os.getpid())
    [frame] = read_batches(path)
    assert frame["id"].str.len_bytes().cast(pl.Int64).sum() == 10**11
    assert high_water(os.getpid()) - before < 200 << 20


def test_texts_that_are_none_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"id": ["abcdefgh"] * 3}), path, compression="none", use_dictionary=False)
    path.write_bytes(path.read_bytes().replace(b"\x08\0\0\0abcdefgh", b"\x08\0\0\0abc\xff\xfefgh"))
    for read in (
        lambda: read_frame(path),
        lambda: scan_parquet([path]).collect(),
        lambda: take_rows(path, np.arange(2), ["id"]),
    ):
        with pytest.raises((InputError, pa.ArrowInvalid), match="UTF8"):
            read()
