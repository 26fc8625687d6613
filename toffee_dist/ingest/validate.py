"""Rows: from raw columns to valid edges, with every row that is not one counted, by kind, with examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import polars as pl

from toffee_dist.errors import InputError
from toffee_dist.ingest.batches import Batch, Piece
from toffee_dist.ingest.columns import IdKind, Schema, id_kind_of
from toffee_dist.ingest.files import SourceFile
from toffee_dist.tensor import LARGEST_WEIGHT, SMALLEST_WEIGHT

MAX_EXAMPLES = 5
# Bytes of an id. Ids are in every table, page and answer: one of 10 MB made a report of 23 MB and an answer
# of 315 MB. URLs of 2 to 4 KB are the longest ids that make sense.
LONGEST_ID = 4096
# Ticks stay well inside int64, so that differences of two of them do too.
LARGEST_TICK = 1 << 61
# Dates and timestamps are of the years 1 to 9999, which the calendars of Python and of our zones can show. In
# seconds since 1970; a column of days or milliseconds holds far more, and casting that makes polars panic.
FIRST_SECOND, LAST_SECOND = -62_135_596_800, 253_402_300_799

_ID_TYPES: dict[IdKind, pl.DataType] = {
    "integer": pl.Int64(),
    "unsigned": pl.UInt64(),
    "string": pl.String(),
}


@dataclass(frozen=True)
class BadRow:
    """One row that is no edge: where it is (rows count from 1 in a file), and why."""

    fragment: int
    path: str
    row: int
    kind: str
    value: str

    def __str__(self) -> str:
        return f"{self.path}, row {self.row:,}: {self.kind} ({self.value})"


@dataclass
class BadRows:
    """How many rows are no edges, by kind, and the first few of them."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: list[BadRow] = field(default_factory=list)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.counts.values())


def clean_rows(batch: Batch, schema: Schema, bad: BadRows) -> pl.DataFrame:
    """Return the valid rows as source, target (ids), time (int64 ticks) and weight (float64, if read).

    Parameters
    ----------
    batch
        The columns as `readers.read_fragments` gives them.
    bad
        Is added to.

    Raises
    ------
    InputError
        Where a whole column is of the wrong type; that is no matter of single rows.
    """
    raw, file = batch.frame, batch.pieces[0].fragment.file
    checks: list[tuple[str, str, pl.Expr]] = []
    columns: list[pl.Expr] = []
    for role in ("source", "target"):
        kind = schema.source_ids if role == "source" else schema.target_ids
        column, found = _ids(role, raw.schema[role], kind, schema, file)
        columns.append(column.alias(f"_{role}"))
        checks += found
    time, found = _ticks(raw.schema["time"], schema, file)
    columns.append(time.alias("_time"))
    checks += found
    if "weight" in raw.columns:
        weight, found = _weights(raw.schema["weight"], file)
        columns.append(weight.alias("_weight"))
        checks += found
    frame = raw.with_columns(columns)
    # A row is bad for the first reason that holds, so that the counts add up to the rows.
    reason = pl.lit(None, dtype=pl.UInt8)
    for number in reversed(range(len(checks))):
        reason = pl.when(checks[number][2]).then(pl.lit(number, dtype=pl.UInt8)).otherwise(reason)
    frame = frame.with_columns(reason.alias("_bad"))
    clean = [pl.col(f"_{role}").alias(role) for role in raw.columns]
    if frame["_bad"].null_count() == frame.height:
        return frame.select(clean)
    wrong = frame.with_row_index("_row").filter(pl.col("_bad").is_not_null())
    for number, count in wrong["_bad"].value_counts().iter_rows():
        bad.counts[checks[number][0]] += count
    examples = wrong.head(max(0, MAX_EXAMPLES - len(bad.examples)))
    for row in _presentable(examples).iter_rows(named=True):
        kind, role, _ = checks[row["_bad"]]
        value = row[role]
        shown = "nothing" if value is None else repr(value) if raw.schema[role] == pl.String else str(value)
        piece, within = _locate(batch.pieces, row["_row"])
        place = (piece.fragment.index, piece.fragment.file.path, piece.first + within + 1)
        bad.examples.append(BadRow(*place, kind, shown[:100]))
    return frame.filter(pl.col("_bad").is_null()).select(clean)


def _locate(pieces: Sequence[Piece], row: int) -> tuple[Piece, int]:
    """Return the piece that a row of a batch is in, and the row within it."""
    for piece in pieces:
        if row < piece.rows:
            return piece, row
        row -= piece.rows
    return pieces[-1], row + pieces[-1].rows


def _wrong_type(role: str, dtype: object, allowed: str, file: SourceFile) -> InputError:
    return InputError(
        f"{role} column of {file.path} changed its type",
        got=str(dtype),
        allowed=f"{allowed}, as in the first file",
        remedy="Read files of one schema at a time, or cast the column; --ids string reads all ids as text.",
    )


def _ids(
    role: str, dtype: pl.DataType, kind: IdKind, schema: Schema, file: SourceFile
) -> tuple[pl.Expr, list[tuple[str, str, pl.Expr]]]:
    column = pl.col(role)
    missing = column.is_null() | (column == "") if file.format == "text" else column.is_null()
    checks = [(f"{role} is null", role, missing)]
    if file.format == "text" or (dtype == pl.String and kind == "string"):
        if kind == "string":
            checks.append(_too_long(role, column))
        ids = column if kind == "string" else column.cast(_ID_TYPES[kind], strict=False)
        if kind != "string" and schema.plain_integers:
            odd = column.str.contains(r"^(-?0\d|\+|-0$)")
            checks.append((f"{role} is not a plain integer", role, odd | ids.is_null()))
        return ids, [*checks, (f"{role} is not an integer", role, ids.is_null())]
    found = id_kind_of(dtype)
    if found is None or (found == "string") != (kind == "string"):
        # Integers that are asked for as strings are an answer; strings among integers are not.
        if not (kind == "string" and dtype.is_integer() and not schema.plain_integers):
            raise _wrong_type(role, dtype, kind, file)
    ids = column.cast(_ID_TYPES[kind], strict=False)
    if kind == "string":
        checks.append(_too_long(role, ids))
    return ids, [*checks, (f"{role} is outside the range of {kind} ids", role, ids.is_null())]


def _too_long(role: str, ids: pl.Expr) -> tuple[str, str, pl.Expr]:
    return f"{role} is longer than {LONGEST_ID:,} bytes", role, ids.str.len_bytes() > LONGEST_ID


def _in_calendar(dtype: pl.DataType) -> pl.Expr:
    """Tell which dates or timestamps are of the years 1 to 9999, by their numbers and without a cast."""
    number = pl.col("time").to_physical()
    if isinstance(dtype, pl.Datetime):
        per_second = {"ms": 10**3, "us": 10**6, "ns": 10**9}[dtype.time_unit]
        first, last = FIRST_SECOND * per_second, (LAST_SECOND + 1) * per_second - 1
        # Nanoseconds in 64 bits never leave the calendar.
        first, last = max(first, -(2**63)), min(last, 2**63 - 1)
    else:
        first, last = FIRST_SECOND // 86400, LAST_SECOND // 86400
    return number.is_between(pl.lit(first, dtype=pl.Int64), pl.lit(last, dtype=pl.Int64))


def _presentable(rows: pl.DataFrame) -> pl.DataFrame:
    """Return rows whose dates Python can hold: those outside the calendar become words."""
    dtype = rows.schema["time"]
    if not isinstance(dtype, pl.Date | pl.Datetime):
        return rows
    unit = dtype.time_unit if isinstance(dtype, pl.Datetime) else "days"
    number = pl.format(f"{{}} {unit} since 1970", pl.col("time").to_physical())
    inside = _in_calendar(dtype)
    text = pl.when(inside).then(pl.col("time")).otherwise(None).cast(pl.String)
    return rows.with_columns(time=pl.when(inside).then(text).otherwise(number))


def _ticks(
    dtype: pl.DataType, schema: Schema, file: SourceFile
) -> tuple[pl.Expr, list[tuple[str, str, pl.Expr]]]:
    column = pl.col("time")
    checks = [("time is null", "time", column.is_null())]
    kind = schema.time
    if isinstance(dtype, pl.Date | pl.Datetime):
        inside = _in_calendar(dtype)
        checks.append(("time is out of range", "time", ~inside))
        column = pl.when(inside).then(column).otherwise(None)
    if dtype == pl.String:
        if kind == "integer":
            ticks = column.cast(pl.Int64, strict=False)
        elif kind == "float":
            ticks = _scaled(column.cast(pl.Float64, strict=False))
        elif kind in ("text", "date", "datetime"):
            ticks = _moments(column, schema)
        else:
            raise _wrong_type("time", dtype, kind, file)
    elif kind == "integer" and dtype.is_integer():
        ticks = column.cast(pl.Int64, strict=False)
    elif kind == "float" and dtype.is_numeric():
        ticks = _scaled(column.cast(pl.Float64, strict=False))
    elif kind == "date" and dtype == pl.Date:
        ticks = _localized(column.cast(pl.Datetime("us")), schema.zone)
    elif kind == "datetime" and isinstance(dtype, pl.Datetime):
        if dtype.time_unit == "ns" and schema.per_second != 10**9:
            raise _wrong_type("time", dtype, "timestamps of µs or coarser", file)
        unit: Literal["ns", "us"] = "ns" if schema.per_second == 10**9 else "us"
        if dtype.time_zone is None:
            ticks = _localized(column.dt.cast_time_unit(unit), schema.zone)
        else:
            ticks = column.dt.cast_time_unit(unit).cast(pl.Int64)
    else:
        raise _wrong_type("time", dtype, kind, file)
    outside = (ticks > LARGEST_TICK) | (ticks < -LARGEST_TICK)
    return ticks, [
        *checks,
        ("time cannot be read", "time", ticks.is_null()),
        ("time is out of range", "time", outside),
    ]


def _scaled(value: pl.Expr) -> pl.Expr:
    """Return numbers with fractions as ticks of 10⁻⁶; NaN, infinity and the too large become null."""
    scaled = (value * 1e6).round()
    return pl.when(scaled.abs() <= float(LARGEST_TICK)).then(scaled).otherwise(None).cast(pl.Int64)


def _localized(naive: pl.Expr, zone: str) -> pl.Expr:
    """Return moments of the zone's wall clock as ticks; a repeated hour is the first, a skipped one null."""
    if zone == "UTC":
        return naive.cast(pl.Int64)
    return naive.dt.replace_time_zone(zone, ambiguous="earliest", non_existent="null").cast(pl.Int64)


def _moments(column: pl.Expr, schema: Schema) -> pl.Expr:
    """Read ISO dates and timestamps, with or without zone, row by row as they come."""
    text = column.str.replace("T", " ", literal=True).str.replace_all("/", "-", literal=True)
    zone = text.str.extract(r":\d\d(?:\.\d+)? ?(Z|[+-]\d\d(?::?\d\d)?)$")
    body = text.str.replace(r"(:\d\d(?:\.\d+)?) ?(?:Z|[+-]\d\d(?::?\d\d)?)$", "$1")
    naive = pl.coalesce(
        body.str.to_datetime(form, time_unit="us", strict=False)
        for form in ("%Y-%m-%d %H:%M:%S%.f", "%Y-%m-%d %H:%M", "%Y-%m-%d")
    )
    sign = pl.when(zone.str.starts_with("-")).then(-1).otherwise(1)
    digits = zone.str.replace_all(r"\D", "")
    minutes = digits.str.slice(0, 2).cast(pl.Int64, strict=False).fill_null(0) * 60
    minutes += digits.str.slice(2, 2).cast(pl.Int64, strict=False).fill_null(0)
    shifted = naive.cast(pl.Int64) - sign * minutes * 60_000_000
    ticks = pl.when(zone.is_not_null()).then(shifted).otherwise(_localized(naive, schema.zone))
    return ticks * (schema.per_second // 10**6)


def _weights(dtype: pl.DataType, file: SourceFile) -> tuple[pl.Expr, list[tuple[str, str, pl.Expr]]]:
    column = pl.col("weight")
    if not (dtype == pl.String or dtype.is_numeric() or dtype == pl.Boolean):
        raise _wrong_type("weight", dtype, "numbers", file)
    value = column.cast(pl.Float64, strict=False)
    size = value.abs()
    outside = (size != 0) & ((size < SMALLEST_WEIGHT) | (size > LARGEST_WEIGHT))
    return value, [
        ("weight is null", "weight", column.is_null()),
        ("weight is not a number", "weight", value.is_null() | value.is_nan()),
        ("weight is infinite", "weight", value.is_infinite()),
        (f"weight is outside {SMALLEST_WEIGHT:g} to {LARGEST_WEIGHT:g}", "weight", outside),
    ]
