"""Pairs of ids as a user gives them: words with a comma, or a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import polars as pl
import pyarrow as pa

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.storage.parquet import scan_parquet


def read_pairs(words: Sequence[str]) -> tuple[list[object], list[object]]:
    """Return sources and targets of ``a,b`` words, or of one file.

    A file is Parquet, or text with a comma, a tab or spaces between two ids; the columns source and target,
    or else the first two. A first line ``source,target`` is a header.
    """
    if len(words) == 1 and Path(words[0]).is_file():
        return _read_file(Path(words[0]))
    pairs = [word.split(",") for word in words]
    wrong = next((word for word, parts in zip(words, pairs, strict=True) if len(parts) != 2), None)
    if wrong is not None:
        raise ConfigError(
            "pairs",
            got=repr(wrong),
            allowed="words such as alice,bob, or one file that exists",
            remedy="Ids with a comma in them go into a Parquet file with columns source and target.",
        )
    return [a for a, _ in pairs], [b for _, b in pairs]


def _read_file(path: Path) -> tuple[list[object], list[object]]:
    try:
        if path.suffix == ".parquet":
            frame = scan_parquet([path]).collect()
        else:
            text = path.read_text()
            first = text.split("\n", 1)[0]
            separator = next((s for s in ("\t", ",", ";") if s in first), " ")
            frame = pl.read_csv(text.encode(), separator=separator, has_header=False, infer_schema=False)
            if frame.height and frame.row(0)[:2] == ("source", "target"):
                frame = frame.slice(1)
    except (OSError, UnicodeDecodeError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        raise _unreadable(path, str(error).splitlines()[0]) from None
    names = ["source", "target"] if {"source", "target"} <= set(frame.columns) else frame.columns[:2]
    if len(names) < 2:
        raise _unreadable(path, f"{frame.width} column")
    frame = frame.select(names).drop_nulls()
    return frame.to_series(0).to_list(), frame.to_series(1).to_list()


def _unreadable(path: Path, got: str) -> InputError:
    return InputError(
        f"cannot read pairs from {path}",
        got=got,
        allowed="Parquet or text with two columns of ids",
        remedy="Write one line per pair: alice,bob",
    )
