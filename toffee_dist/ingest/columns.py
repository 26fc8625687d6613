"""Schema: which column is which, and of what kind. What is not said is guessed, and every guess is said."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import polars as pl

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest.files import SourceFile, naming
from toffee_dist.ingest.tables import open_table
from toffee_dist.ingest.text import Column, Layout, local_file, read_head, split_lines
from toffee_dist.limits import Limits
from toffee_dist.settings import EdgeSettings

IdKind = Literal["integer", "unsigned", "string"]
TimeKind = Literal["integer", "float", "date", "datetime", "text"]

NAMES = {
    "source": "source src u from from_id source_id src_id sender user user_id head node1 subject i",
    "target": "target dst v to to_id target_id dst_id receiver item item_id tail node2 object j dest",
    "time": "time t ts timestamp date datetime created_at event_time epoch unixtime day when",
    "weight": "weight w value amount count score rating",
}
_INTEGER = re.compile(r"0|-?[1-9]\d{0,18}")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
_DATE = re.compile(r"\d{4}[-/]\d{1,2}[-/]\d{1,2}([T ].*)?")
_SAMPLE_LINES = 1000


@dataclass(frozen=True)
class Schema:
    """The columns of all inputs, and what they hold.

    Parameters
    ----------
    layouts
        Where the columns are, by kind of file (`SourceFile.layout`).
    source_ids, target_ids
        What node ids are. Sources and targets that share one space have the same kind.
    plain_integers
        Whether the kind of ids was guessed; then 007 and +7 among integers are bad rows, never 7 in silence,
        and integers among strings are an error.
    time
        What the time column holds.
    per_second
        Ticks a second for dates and timestamps (10⁶, or 10⁹ for columns of nanoseconds), else 0.
    zone
        The wall clock of timestamps without a zone.
    """

    layouts: Mapping[str, Layout]
    source_ids: IdKind
    target_ids: IdKind
    plain_integers: bool
    time: TimeKind
    per_second: int
    zone: str

    @property
    def per_unit(self) -> int:
        """Ticks a unit of a numeric time column: fractions are kept to 10⁻⁶."""
        return 10**6 if self.time == "float" else 1


def guess_schema(
    files: Sequence[SourceFile], settings: EdgeSettings, limits: Limits
) -> tuple[Schema, list[str]]:
    """Look at the first file of every kind and decide what the columns are.

    What the settings say holds; None and ``auto`` are found out here. Weights that are not summed are not
    read.

    Returns
    -------
    schema, notes
        The notes are one line a guess, for the user to read.
    """
    layouts: dict[str, Layout] = {}
    notes: list[str] = []
    kinds: tuple[str, str, TimeKind, int] | None = None
    for file in files:
        # An empty text file, or a mere header, has nothing to say; another of its kind may.
        if file.layout in layouts or (file.size == 0 and file.format == "text"):
            continue
        if file.format == "text":
            seen = _look_at_text(file, settings, limits)
        else:
            seen = _look_at_table(file, settings)
        if seen is None:
            continue
        layout, found, said = seen
        layouts[file.layout] = layout
        notes += [f"{file.path}: {said}"]
        kinds = kinds or found
    if kinds is None:
        raise InputError(
            "no rows in the input",
            got=f"{len(files)} empty files",
            allowed="at least one edge",
            remedy="Check the path; empty files are allowed beside others.",
        )
    source_ids, target_ids, time, per_second = kinds
    if settings.ids != "auto":
        source_ids = target_ids = settings.ids
    elif not settings.bipartite and source_ids != target_ids:
        source_ids = target_ids = _common_kind(source_ids, target_ids, files[0])
    first = next(iter(layouts.values()))
    plain = settings.ids == "auto"
    if first.separator:
        said = source_ids if source_ids == target_ids else f"{source_ids} and {target_ids}"
        notes += [f"node ids: {said}" + (", guessed from the first lines (--ids says otherwise)" * plain)]
    if settings.entry == "sum" and first.weight is None:
        notes += ["no weight column: every row weighs 1"]
    return (
        Schema(layouts, _id_kind(source_ids), _id_kind(target_ids), plain, time, per_second, settings.zone),
        notes,
    )


def id_kind_of(dtype: pl.DataType) -> IdKind | None:
    """Return what ids of a table's column are; None where they cannot be ids."""
    if dtype == pl.UInt64:
        return "unsigned"
    if dtype.is_integer():
        return "integer"
    if dtype in (pl.String, pl.Categorical, pl.Enum):
        return "string"
    return None


def _id_kind(kind: str) -> IdKind:
    return "string" if kind == "string" else "unsigned" if kind == "unsigned" else "integer"


def _common_kind(source: str, target: str, file: SourceFile) -> IdKind:
    if file.format == "text":
        return "string"
    if "string" in (source, target):
        raise InputError(
            f"sources and targets of {file.path} are of two types",
            got=f"{source} and {target}",
            allowed="one type, since they share one space of nodes",
            remedy="Are these two kinds of nodes? Then say --bipartite.",
        )
    return "unsigned"


def _look_at_table(
    file: SourceFile, settings: EdgeSettings
) -> tuple[Layout, tuple[str, str, TimeKind, int], str]:
    assert file.format != "text"
    with naming(file), local_file(file) as local, open_table(local.path, file.size, file.format) as table:
        schema = table.schema
    names = schema.names()
    layout = _find_columns(file, names, settings)
    dtypes = {role: _dtype(column, names, schema) for role, column in layout.columns().items()}
    kinds = []
    for role in ("source", "target"):
        dtype = dtypes[role]
        kind = "string" if dtype is None else id_kind_of(dtype)
        if kind is None:
            raise InputError(
                f"{role} column of {file.path} cannot hold node ids",
                got=str(dtype),
                allowed="integers or strings",
                remedy="Cast it before writing (pandas: .astype('Int64')).",
            )
        kinds.append(kind)
    time, per_second = _time_of(dtypes["time"], file)
    if dtypes["time"] is None:
        value = dict(file.partition)[str(layout.time)]
        time, per_second = _time_of_text([value], file)
    return layout, (kinds[0], kinds[1], time, per_second), _say(layout, names)


def _dtype(column: Column, names: list[str], schema: pl.Schema) -> pl.DataType | None:
    """Return the type of a column, or None for one that comes from a partition."""
    name = names[column] if isinstance(column, int) else column
    return schema.get(name)


def _time_of(dtype: pl.DataType | None, file: SourceFile) -> tuple[TimeKind, int]:
    if dtype is None or dtype == pl.String:
        return "text", 10**6
    if dtype.is_integer():
        return "integer", 0
    if dtype.is_float():
        return "float", 0
    if dtype == pl.Date:
        return "date", 10**6
    if isinstance(dtype, pl.Datetime):
        return "datetime", 10**9 if dtype.time_unit == "ns" else 10**6
    raise InputError(
        f"time column of {file.path} cannot hold times",
        got=str(dtype),
        allowed="numbers, dates, timestamps or strings of them",
        remedy="Name another column with --time.",
    )


def _time_of_text(values: list[str], file: SourceFile) -> tuple[TimeKind, int]:
    filled = [value for value in values if value]
    if all(_is_integer(value) for value in filled):
        return "integer", 0
    # One unreadable value among many is a bad row; mostly unreadable is the wrong column.
    dates = sum(_DATE.fullmatch(value) is not None for value in filled)
    numbers = sum(_is_number(value) for value in filled)
    if 2 * max(dates, numbers) < len(filled):
        bad = next(value for value in filled if not _DATE.fullmatch(value) and not _is_number(value))
        raise InputError(
            f"time column of {file.path} cannot hold times",
            got=repr(bad[:100]),
            allowed="numbers, or dates and timestamps such as 2024-01-31 or 2024-01-31T12:00:00Z",
            remedy="Name the right column with --time.",
        )
    if dates > numbers:
        return "text", 10**6
    integers = sum(_is_integer(value) for value in filled)
    fractions = any(_is_number(value) and not _is_integer(value) for value in filled)
    return ("float", 0) if fractions and integers < len(filled) else ("integer", 0)


def _is_integer(value: str) -> bool:
    """Tell whether the text is how a 64-bit integer is written, and the only way to write it."""
    return _INTEGER.fullmatch(value) is not None and -(2**63) <= int(value) < 2**63


def _is_number(value: str) -> bool:
    return _NUMBER.fullmatch(value) is not None


def _look_at_text(
    file: SourceFile, settings: EdgeSettings, limits: Limits
) -> tuple[Layout, tuple[str, str, TimeKind, int], str] | None:
    lines, _ = read_head(file, limits)
    lines = lines[:_SAMPLE_LINES]
    if not lines:
        return None
    separator = _guess_separator(lines) if settings.separator == "auto" else settings.separator
    rows = split_lines(lines, separator, file)
    header = settings.header == "yes" or (settings.header == "auto" and _looks_like_header(rows))
    names = rows[0] if header else []
    data = rows[1:] if header else rows
    if not data:
        return None
    layout = _find_columns(file, names, settings, data)
    layout = replace(layout, header=header, separator=separator)
    partition = dict(file.partition)

    def values(column: Column) -> list[str]:
        if isinstance(column, str) and column not in names:
            return [partition[column]]
        at = names.index(column) if isinstance(column, str) else column
        return [row[at] for row in data if at < len(row)]

    ids = [
        "integer" if all(_is_integer(value) for value in values(column) if value) else "string"
        for column in (layout.source, layout.target)
    ]
    time, per_second = _time_of_text(values(layout.time), file)
    shown = {" ": "spaces or tabs", "\t": "tabs"}.get(separator, repr(separator))
    said = f"{'a header' if header else 'no header'}, separated by {shown}; {_say(layout, names)}"
    return layout, (ids[0], ids[1], time, per_second), said


def _guess_separator(lines: list[bytes]) -> str:
    """Take the first separator that cuts most of the first lines into three fields, or else into two.

    It must cut the very first line too: commas in the ids of a file that is separated by spaces do not make
    them its separator.
    """
    first = lines[:20]
    for fewest in (2, 1):
        for separator in ("\t", ",", ";", "|"):
            cut = sum(line.count(separator.encode()) >= fewest for line in first)
            if 2 * cut > len(first) and first[0].count(separator.encode()) >= fewest:
                return separator
        if 2 * sum(len(line.split()) > fewest for line in first) > len(first):
            return " "
    return " "


def _looks_like_header(rows: list[list[str]]) -> bool:
    """Tell whether the first row holds names: no number or date in it, but some in the second."""

    def plain(row: list[str]) -> list[bool]:
        return [_is_number(value) or _DATE.fullmatch(value) is not None for value in row]

    if any(plain(rows[0])) or not any(rows[0]):
        return False
    known = {name for names in NAMES.values() for name in names.split()}
    named = sum(value.lower() in known for value in rows[0])
    return named >= 2 or (len(rows) > 1 and any(plain(rows[1])))


def _find_columns(
    file: SourceFile, names: list[str], settings: EdgeSettings, rows: list[list[str]] | None = None
) -> Layout:
    """Decide where the columns are: what the user said, else known names, else the order u v [w] t."""
    partition = [key for key, _ in file.partition]
    available = [*names, *partition]
    width = len(names) or max((len(row) for row in rows or []), default=0)
    found: dict[str, Column] = {}
    for role in ("source", "target", "time", "weight"):
        said = getattr(settings, role)
        if said is not None:
            found[role] = _named(role, said, available, width, file)
    lowered = {name.lower(): name for name in reversed(available)}
    taken = set(found.values())
    for role, known in NAMES.items():
        match = next((lowered[name] for name in known.split() if name in lowered), None)
        if role not in found and match is not None and match not in taken:
            found[role] = match
            taken.add(match)
    missing = [role for role in ("source", "target", "time") if role not in found]
    if missing and len(missing) == 3 and not names and width in (3, 4):
        # Without names: u v t, or u v w t; a third column of epoch times makes it u v t w.
        found |= {"source": 0, "target": 1, "time": width - 1}
        if width == 4:
            third = [row[2] for row in rows or [] if len(row) > 2]
            epoch = bool(third) and all(_is_integer(v) and abs(int(v)) >= 10**8 for v in third)
            found |= {"time": 2, "weight": 3} if epoch else {"weight": 2}
    elif missing:
        raise InputError(
            f"cannot tell which column of {file.path} is the {' and the '.join(missing)}",
            got=", ".join(available) or f"{width} columns without names",
            allowed="names such as source, target, time, or three or four columns: u v t, u v w t",
            remedy="Say --source, --target and --time, by name or by position from 1.",
        )
    weight = found.get("weight") if settings.entry == "sum" else None
    return Layout(found["source"], found["target"], found["time"], weight)


def _named(role: str, said: str, available: list[str], width: int, file: SourceFile) -> Column:
    if said in available:
        return said
    if said.isdecimal() and 1 <= int(said) <= width:
        return int(said) - 1
    raise ConfigError(
        f"--{role}",
        got=said,
        allowed=", ".join(available) if available else f"positions 1 to {width}",
        remedy=f"These are the columns of {file.path}.",
    )


def _say(layout: Layout, names: list[str]) -> str:
    def show(column: Column) -> str:
        if isinstance(column, str):
            return column
        return names[column] if names else f"column {column + 1}"

    return ", ".join(f"{role} = {show(column)}" for role, column in layout.columns().items())
