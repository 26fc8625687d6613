"""`toffee refresh`, `runs`, `rollback` and `fold-in`: a folder of runs, night after night."""

from __future__ import annotations

import json
from typing import Any

import click

from toffee_dist.config import RefreshConfig, RuntimeSettings
from toffee_dist.options import config_options
from toffee_dist.progress import choose_progress
from toffee_dist.store import place

_json = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON line.")


@click.command("refresh", short_help="Tonight's vectors, in the axes of the run before")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@config_options(RefreshConfig, without=("since", "until", "known"))
@_json
def refresh_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Bring the published run up to date: a rolling window, the rows and axes of the run before.

    For a scheduler, every night. A night that is done does no work; one that was cut short goes on. A run
    that breaks a limit is kept but not published (exit code 6): the run before stays.

    \b
    Example:
      toffee refresh edges/ --out vectors --last 90d --rank 64
    """
    from toffee_dist.refresh import refresh

    settings = RefreshConfig.read({"inputs": inputs or None, **options}, config)
    show_night(refresh(settings, choose_progress(quiet=as_json)), as_json)


def show_night(done: Any, as_json: bool) -> None:
    """Print what a refresh did."""
    data = done.to_json()
    if as_json:
        click.echo(json.dumps(data))
        return
    for name, value in data.items():
        if value not in (None, ""):
            shown = f"{value:.4g}" if isinstance(value, float) else value
            click.echo(f"{name:<18}{' to '.join(shown) if isinstance(shown, list | tuple) else shown}")


@click.command("runs", short_help="List the runs of a folder")
@click.argument("path", metavar="OUT")
@_json
def runs_command(path: str, as_json: bool) -> None:
    """List the runs of OUT, oldest first; the published one has a star.

    \b
    Example:
      toffee runs vectors
    """
    from toffee_dist.operations import describe_runs

    rows = describe_runs(place(path))
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows:
        star = "*" if row["latest"] else " "
        words = [f"{star} {row['run']}  {row['state']:<10}"]
        if "nodes" in row:
            words.append(f"{row['nodes']:>10,} nodes  {row['first']} to {row['last']}")
        if row.get("cosine") is not None:
            words.append(f"cosine {row['cosine']:.3f}")
        click.echo("  ".join([*words, *row.get("reasons", [])]))


@click.command("rollback", short_help="Publish an earlier run again")
@click.argument("path", metavar="OUT")
@click.option("--to", metavar="RUN", help="Name of a complete run; default: the published one before this.")
@_json
def rollback_command(path: str, to: str | None, as_json: bool) -> None:
    """Publish an earlier run again. Nothing is computed, and nothing is removed.

    \b
    Example:
      toffee rollback vectors
    """
    from toffee_dist.operations import roll_back

    run = roll_back(place(path), to)
    click.echo(json.dumps({"run": str(run.path)}) if as_json else f"published   {run.path}")


@click.command("fold-in", short_help="Vectors for nodes that came after the run")
@click.argument("path", metavar="OUT")
@click.argument("inputs", nargs=-1, metavar="INPUT...")
@click.option("--to", required=True, metavar="FILE", help="Parquet file for the vectors of the new nodes.")
@config_options(RuntimeSettings, without=("memory",))
@_json
def fold_in_command(
    path: str, inputs: tuple[str, ...], to: str, config: str | None, as_json: bool, **options: Any
) -> None:
    """Give vectors to nodes that appeared after the run, from their edges, without a refresh.

    INPUT holds edges between new nodes and known ones, in the form of the run's own input. Vectors are in the
    axes of the published run. A node without an edge to a known one is cold, and gets zeros.

    \b
    Example:
      toffee fold-in vectors today.parquet --to new-nodes.parquet
    """
    from toffee_dist.fold import FoldConfig, fold_in

    settings = FoldConfig.read({"inputs": inputs or None, **options}, config)
    found = fold_in(place(path), settings, place(to), choose_progress(quiet=as_json))
    click.echo(
        json.dumps(found)
        if as_json
        else f"{found['new']:,} new nodes, {found['cold']:,} cold, in {found['out']}"
    )


REFRESH_COMMANDS = (refresh_command, runs_command, rollback_command, fold_in_command)
