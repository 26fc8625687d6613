"""The registry: rows by sorted id, in ranges, append-only."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from toffee_dist import InputError
from toffee_dist.ingest.registry import (
    BucketTask,
    choose_buckets,
    encode_ids,
    merge_bucket,
    resolve,
    sample_ids,
    write_bucket,
)
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.storage.registry import count_known, read_registry, registry_files

INTS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9))
TEXTS = st.text(max_size=3)


@given(st.one_of(st.lists(INTS), st.lists(TEXTS)), st.integers(0, 30))
def test_encode(values: list[Any], cut: int) -> None:
    dtype = pl.Int64 if values and isinstance(values[0], int) else pl.String
    column = pl.Series("x", values, dtype=dtype)
    ids, codes = encode_ids([column[:cut], column[cut:]])
    assert ids.to_list() == sorted(set(values))
    assert [ids[int(code)] for part in codes for code in part] == values


def test_encode_when_hashes_collide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pl.Series, "hash", lambda self, seed: pl.Series([7] * len(self), dtype=pl.UInt64))
    ids, codes = encode_ids([pl.Series(["b", "a", "b"])])
    assert (ids.to_list(), codes[0].tolist()) == (["a", "b"], [1, 0, 1])


def build(
    lists: list[list[Any]], folder: Path, known: tuple[str, ...] = (), limits: Limits = LIMITS
) -> tuple[dict[Any, int], list[list[int]]]:
    """Run the buckets as the ingest does; return id → row, and the rows of every list."""
    work = folder / "work"
    work.mkdir()
    dtype = pl.String if any(isinstance(x, str) for part in lists for x in part) else pl.Int64
    parts = [pl.Series("id", sorted(set(values)), dtype=dtype) for values in lists]
    for index, part in enumerate(parts):
        part.to_frame().write_ipc(work / f"{index}.arrow")
    paths = tuple(str(work / f"{index}.arrow") for index in range(len(parts)))
    ranges = choose_buckets([(len(part), sample_ids(part)) for part in parts], limits)
    tasks = [BucketTask(k, 0, lo, hi, paths, known, str(work)) for k, (lo, hi) in enumerate(ranges)]
    records = [merge_bucket(task) for task in tasks]
    base = count_known(known)
    nodes = folder / "nodes"
    nodes.mkdir()
    rows: list[list[int]] = [[] for _ in parts]
    for task, record in zip(tasks, records, strict=True):
        write_bucket((task, base, str(nodes)))
        resolved = resolve(np.load(task.rows_path), base)
        for index in range(len(parts)):
            rows[index] += resolved[record.offsets[index] : record.offsets[index + 1]].tolist()
        base += record.n_new
    table = read_registry(registry_files(nodes), 0)
    return dict(table.select("id", "row").iter_rows()), rows


@given(
    st.one_of(
        st.lists(st.lists(INTS), min_size=1, max_size=4), st.lists(st.lists(TEXTS), min_size=1, max_size=4)
    ),
    st.integers(1, 6),
)
def test_rows_do_not_depend_on_buckets(lists: list[list[Any]], size: int) -> None:
    limits = Limits(bucket_ids=size)
    with tempfile.TemporaryDirectory() as name:
        found, rows = build(lists, Path(name), limits=limits)
    everything = sorted({value for values in lists for value in values})
    assert found == {value: row for row, value in enumerate(everything)}
    for values, got in zip(lists, rows, strict=True):
        assert got == [found[value] for value in sorted(set(values))]


@given(st.lists(INTS, min_size=1), st.lists(INTS), st.integers(1, 6))
def test_known_rows_never_change(old: list[int], new: list[int], size: int) -> None:
    limits = Limits(bucket_ids=size)
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "a").mkdir()
        (Path(name) / "b").mkdir()
        before, _ = build([old], Path(name) / "a", limits=limits)
        known = registry_files(Path(name) / "a" / "nodes")
        after, rows = build([new, old[:2]], Path(name) / "b", known, limits)
    fresh = sorted(set(new) - set(old))
    assert after == {**before, **{value: len(before) + k for k, value in enumerate(fresh)}}
    assert rows[0] == [after[value] for value in sorted(set(new))]


def test_buckets_are_of_similar_size() -> None:
    rng = np.random.default_rng(0)
    skewed = pl.Series(np.unique((1e15 * rng.random(100_000) ** 8).astype(np.int64)))
    ranges = choose_buckets([(len(skewed), sample_ids(skewed))], Limits(bucket_ids=10_000))
    sizes = [
        len(
            skewed.filter(
                (skewed >= (lo if lo is not None else -1)) & (skewed < (hi if hi is not None else 2**62))
            )
        )
        for lo, hi in ranges
    ]
    assert sum(sizes) == len(skewed)
    assert max(sizes) < 15_000


def test_ids_of_another_type_than_the_registry(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    build([[1, 2]], tmp_path / "a")
    with pytest.raises(InputError, match="changed their type"):
        build([["x"]], tmp_path / "b", registry_files(tmp_path / "a" / "nodes"))
