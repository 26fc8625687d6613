"""The command line: `toffee`. Thin: options in, one call, text or JSON out."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from typing import Any

import click

from toffee_dist.cli_evaluate import evaluate_command
from toffee_dist.edges import IngestConfig, ingest, run_here
from toffee_dist.errors import ToffeeError
from toffee_dist.schema import ColumnOptions
from toffee_dist.summary import Ingested, describe


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="toffee_dist", prog_name="toffee")
def cli() -> None:
    """Embeddings of temporal graphs, as batch jobs on Dask."""


@cli.command("ingest")
@click.argument("inputs", nargs=-1, required=True, metavar="INPUT...")
@click.option("--out", required=True, metavar="DIR", help="Where the result goes; must not exist yet.")
@click.option("--source", metavar="COLUMN", help="Source column, by name or by position from 1.")
@click.option("--target", metavar="COLUMN", help="Target column.")
@click.option("--time", metavar="COLUMN", help="Time column.")
@click.option("--weight", metavar="COLUMN", help="Weight column; read with --entry sum only.")
@click.option("--header", type=click.Choice(["auto", "yes", "no"]), default="auto", show_default=True)
@click.option("--separator", default="auto", show_default=True, help="Of text: one character.")
@click.option("--ids", type=click.Choice(["auto", "integer", "string"]), default="auto", show_default=True)
@click.option("--bipartite", is_flag=True, help="Sources and targets are two spaces of nodes.")
@click.option("--undirected", is_flag=True, help="(i, j) and (j, i) are the same edge.")
@click.option(
    "--entry",
    type=click.Choice(["binary", "count", "sum"]),
    default="binary",
    show_default=True,
    help="What repeated rows become: 1, their number, or the sum of their weights (negative ones too).",
)
@click.option(
    "--pair-weight",
    type=click.Choice(["raw", "log", "unit"]),
    default="unit",
    show_default=True,
    help="What the total of a pair over time is scaled to.",
)
@click.option(
    "--step",
    default="1d",
    show_default=True,
    help="Length of a step: 6h, 1d, 1w (weeks start on Monday); a whole number for plain-number times; "
    "distinct: a step for every distinct time; bins:64: that many equal steps.",
)
@click.option("--since", metavar="TIME", help="First moment to read: a date, timestamp or number.")
@click.option("--until", metavar="TIME", help="First moment not to read any more.")
@click.option("--last", metavar="DURATION", help="The last 90d, 4w, 12h, … up to the newest edge.")
@click.option(
    "--time-unit",
    type=click.Choice(["auto", "s", "ms", "us", "ns", "number"]),
    default="auto",
    show_default=True,
    help="What a number in the time column is; number has no calendar.",
)
@click.option("--zone", default="UTC", show_default=True, help="Whose days and wall clock: Europe/Athens.")
@click.option("--on-bad-rows", type=click.Choice(["error", "skip"]), default="error", show_default=True)
@click.option("--known", metavar="DIR", help="An earlier result: its nodes keep their rows.")
@click.option("--mode", type=click.Choice(["threads", "processes"]), default="threads", show_default=True)
@click.option("--workers", type=click.IntRange(min=1), help="Threads or processes; default: one a core.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON line.")
def ingest_command(
    inputs: tuple[str, ...], out: str, mode: Any, workers: int | None, as_json: bool, **options: Any
) -> None:
    r"""Read edges into a staged tensor, a node registry and a time grid.

    INPUT is a file, a folder, a glob or an fsspec URL, several at once: Parquet, Arrow IPC, or text
    (comma, tab or space separated, with or without header, also .gz and .zst).

    \b
    Example:
      toffee ingest edges/*.parquet --out staged --step 1w --zone Europe/Athens
    """
    names = ("source", "target", "time", "weight", "header", "separator", "ids", "bipartite", "zone")
    columns = ColumnOptions(**{name: options.pop(name) for name in names})
    directed = not options.pop("undirected")
    config = IngestConfig(inputs=inputs, columns=columns, directed=directed, **options)
    result = _run(config, out, mode, workers)
    if as_json:
        click.echo(json.dumps({"out": str(result.folder), **asdict(result.summary)}))
    else:
        click.echo(describe(result))


cli.add_command(evaluate_command)


def _run(config: IngestConfig, out: str, mode: Any, workers: int | None) -> Ingested:
    def say(line: str) -> None:
        click.echo(line, err=True)

    if mode == "threads" and workers == 1:
        return ingest(config, out, run_here, say)
    from toffee_dist.runtime import cluster, runner

    with cluster(mode, workers) as client:
        return ingest(config, out, runner(client), say)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors a user can meet become one message and an exit code."""
    try:
        cli.main(args=arguments, standalone_mode=False)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ToffeeError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted; nothing was left behind.", err=True)
        sys.exit(5)
    except OSError as error:
        click.echo(f"Error: {error}. Is the disk full or not writable?", err=True)
        sys.exit(3)
    except Exception as error:
        if os.environ.get("TOFFEE_DEBUG"):
            raise
        click.echo(
            f"Internal error: {type(error).__name__}: {error}. This is a bug in toffee, not in your data; "
            "set TOFFEE_DEBUG=1 for the details that a report needs.",
            err=True,
        )
        sys.exit(1)


if __name__ == "__main__":
    main()
