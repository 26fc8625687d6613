"""Random tables of edges, and every way to write them to files."""

from __future__ import annotations

import gzip
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pandas as pd
import polars as pl
import zstandard
from hypothesis import strategies as st

DAY_NS = 86400 * 10**9
START_NS = 1_711_500_000 * 10**9  # 2024-03-27: clocks in Europe change within the range.
ZONES = ("UTC", "Europe/Athens", "America/New_York")
FILES = (
    "parquet",
    "arrow",
    "csv",
    "tsv",
    "txt",
    "csv.gz",
    "tsv.zst",
    "plain.csv",
)
ID_KINDS = ("integer", "gaps", "unsigned", "int32", "string", "categorical")
TIME_KINDS = ("s", "ms", "us", "ns", "float", "number", "date", "datetime", "zoned", "text", "text_zoned")
# Not ready for text without quotes: no space inside, and no first character of a comment.
WORDS = st.text(st.characters(categories=("L", "N"), include_characters="-_.:@/é漢"), min_size=1, max_size=5)
ANY_TEXT = st.text(
    st.characters(codec="utf-8", exclude_categories=("Cc", "Cs", "Zl", "Zp", "Zs")), min_size=1, max_size=5
)


@dataclass
class Table:
    """`frame` as it is written; `exact` with times as whole numbers (ns, or plain); what to say about it."""

    frame: pl.DataFrame
    exact: pd.DataFrame
    id_kind: str
    time_kind: str
    zone: str
    unit: str

    @property
    def instant(self) -> bool:
        return self.time_kind != "number"


def _ids(kind: str) -> st.SearchStrategy[Any]:
    if kind == "integer":
        return st.integers(0, 8)
    if kind == "gaps":
        return st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(10**15, 10**15 + 4))
    if kind == "unsigned":
        return st.one_of(st.integers(2**64 - 4, 2**64 - 1), st.integers(0, 3))
    if kind == "int32":
        return st.integers(-5, 5)
    return ANY_TEXT if kind == "string" else WORDS


_DTYPES = {
    "integer": pl.Int64,
    "gaps": pl.Int64,
    "unsigned": pl.UInt64,
    "int32": pl.Int32,
    "string": pl.String,
    "categorical": pl.String,
}


@st.composite
def tables(draw: st.DrawFn, id_kinds: tuple[str, ...] = ID_KINDS, max_rows: int = 25) -> Table:
    id_kind = draw(st.sampled_from(id_kinds))
    time_kind = draw(st.sampled_from(TIME_KINDS))
    zone = draw(st.sampled_from(ZONES))
    n_rows = draw(st.integers(1, max_rows))
    pool = draw(st.lists(_ids(id_kind), min_size=1, max_size=6))
    many: Any = {"min_size": n_rows, "max_size": n_rows}
    source, target = (draw(st.lists(st.sampled_from(pool), **many)) for _ in range(2))
    weight = draw(st.lists(st.floats(-3, 3, width=32).filter(lambda w: w == 0 or abs(w) > 1e-6), **many))
    if time_kind == "number":
        exact = draw(st.lists(st.integers(-50, 50), **many))
        written: list[Any] = exact
        dtype: Any = pl.Int32
    elif time_kind == "date":
        days = draw(st.lists(st.integers(0, 40), **many))
        written = [datetime(2024, 3, 20).date() + pd.Timedelta(days=day) for day in days]
        exact = [pd.Timestamp(day).tz_localize(zone).value for day in written]
        dtype = pl.Date
    else:
        second = st.integers(0, 40 * 86400)
        if time_kind in ("datetime", "text"):
            # A wall clock away from the hours that clocks skip or repeat.
            second = st.builds(
                lambda d, s: d * 86400 + s, st.integers(0, 40), st.integers(5 * 3600, 20 * 3600)
            )
        seconds = draw(st.lists(second, **many))
        fine = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1, "float": 10**6}.get(time_kind, 10**3)
        parts = draw(st.lists(st.sampled_from([0, 1, 500_000_000, 999_999_999]), **many))
        exact = [
            START_NS // DAY_NS * DAY_NS + s * 10**9 + p // fine * fine
            for s, p in zip(seconds, parts, strict=True)
        ]
        written, dtype = _written(exact, time_kind)
        if time_kind in ("datetime", "text"):
            exact = [pd.Timestamp(time).tz_localize(zone).value for time in exact]
    frame = pl.DataFrame(
        {
            "source": pl.Series(source, dtype=_DTYPES[id_kind]),
            "target": pl.Series(target, dtype=_DTYPES[id_kind]),
            "time": pl.Series(written, dtype=dtype),
            "weight": weight,
        }
    )
    if id_kind == "categorical":
        frame = frame.with_columns(pl.col("source", "target").cast(pl.Categorical))
    plain = pd.DataFrame({"source": source, "target": target, "time": exact, "weight": weight}, dtype=object)
    unit = {"float": "s", "number": "number"}.get(time_kind, time_kind if len(time_kind) <= 2 else "auto")
    return Table(frame, plain, id_kind, time_kind, zone, unit)


def _written(exact: list[int], kind: str) -> tuple[list[Any], Any]:
    stamps = [
        datetime.fromtimestamp(ns // 10**9, UTC).replace(microsecond=ns // 1000 % 10**6) for ns in exact
    ]
    if kind in ("s", "ms", "us", "ns"):
        return [ns // {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}[kind] for ns in exact], pl.Int64
    if kind == "float":
        return [ns / 10**9 for ns in exact], pl.Float64
    if kind == "datetime":
        return [stamp.replace(tzinfo=None) for stamp in stamps], pl.Datetime("us")
    if kind == "zoned":
        return stamps, pl.Datetime("us", "UTC")
    if kind == "text":
        return [stamp.replace(tzinfo=None).isoformat() for stamp in stamps], pl.String
    shifted = [stamp.astimezone(pd.Timestamp("2024-01-01T00:00:00-03:30").tz) for stamp in stamps]
    return [stamp.isoformat() for stamp in shifted], pl.String


def write(frame: pl.DataFrame, path: Path) -> None:
    """Write by extension; plain.csv is without a header."""
    name = path.name
    if name.endswith(".parquet"):
        frame.write_parquet(path)
        return
    if name.endswith(".arrow"):
        frame.write_ipc(path)
        return
    separator = "," if ".csv" in name else "\t" if ".tsv" in name else " "
    text = frame.with_columns(pl.col(pl.Categorical).cast(pl.String))
    if any(isinstance(dtype, pl.Datetime) for dtype in text.dtypes):
        form = "%Y-%m-%dT%H:%M:%S%.6f" + ("Z" if text.schema["time"].time_zone else "")  # type: ignore[attr-defined]
        text = text.with_columns(pl.col("time").dt.to_string(form))
    data = text.write_csv(
        separator=separator,
        include_header=".plain." not in name,
        quote_style="never" if separator == " " else "necessary",
    ).encode()
    if ".plain." in name:
        data = b"% a comment\n# another\n" + data
    if name.endswith(".gz"):
        data = gzip.compress(data)
    elif name.endswith(".zst"):
        data = zstandard.compress(data)
    path.write_bytes(data)
