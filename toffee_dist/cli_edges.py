"""The options that say what the edges are, the same as those of `toffee ingest`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS: list[Callable[[Any], Any]] = [
    click.option("--source", metavar="COLUMN", help="Source column, by name or by position from 1."),
    click.option("--target", metavar="COLUMN", help="Target column."),
    click.option("--time", metavar="COLUMN", help="Time column."),
    click.option("--weight", metavar="COLUMN", help="Weight column; read with --entry sum only."),
    click.option("--header", type=click.Choice(["auto", "yes", "no"]), default="auto", show_default=True),
    click.option("--separator", default="auto", show_default=True, help="Of text: one character."),
    click.option(
        "--ids", type=click.Choice(["auto", "integer", "string"]), default="auto", show_default=True
    ),
    click.option("--bipartite", is_flag=True, help="Sources and targets are two spaces of nodes."),
    click.option("--undirected", is_flag=True, help="(i, j) and (j, i) are the same edge."),
    click.option(
        "--entry",
        type=click.Choice(["binary", "count", "sum"]),
        default="binary",
        show_default=True,
        help="What repeated rows become: 1, their number, or the sum of their weights (negative ones too).",
    ),
    click.option(
        "--pair-weight",
        type=click.Choice(["raw", "log", "unit"]),
        default="unit",
        show_default=True,
        help="What the total of a pair over time is scaled to.",
    ),
    click.option(
        "--step",
        default="1d",
        show_default=True,
        help="Length of a step: 6h, 1d, 1w (weeks start on Monday); a whole number for plain-number times; "
        "distinct: a step for every distinct time; bins:64: that many equal steps.",
    ),
    click.option("--since", metavar="TIME", help="First moment to read: a date, timestamp or number."),
    click.option("--until", metavar="TIME", help="First moment not to read any more."),
    click.option("--last", metavar="DURATION", help="The last 90d, 4w, 12h, … up to the newest edge."),
    click.option(
        "--time-unit",
        type=click.Choice(["auto", "s", "ms", "us", "ns", "number"]),
        default="auto",
        show_default=True,
        help="What a number in the time column is; number has no calendar.",
    ),
    click.option(
        "--zone", default="UTC", show_default=True, help="Whose days and wall clock: Europe/Athens."
    ),
    click.option("--on-bad-rows", type=click.Choice(["error", "skip"]), default="error", show_default=True),
]


def edge_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add the inputs and these options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")(command)
