"""`toffee refresh`, `runs`, `rollback`, `fold-in` and `forget`: a folder of runs, night after night."""

from __future__ import annotations

import json
from typing import Any

import click

from toffee_dist.cli.options import GroupedCommand, config_options, inputs_argument, json_option
from toffee_dist.cli.output import echo
from toffee_dist.progress import choose_progress
from toffee_dist.settings import RefreshConfig, RuntimeSettings
from toffee_dist.storage.files import check_parent
from toffee_dist.storage.paths import to_path
from toffee_dist.words import show_line


@click.command("refresh", short_help="New vectors, in the axes of the previous run", cls=GroupedCommand)
@inputs_argument
@config_options(RefreshConfig, without=("since", "until", "known"))
@json_option
def refresh_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Bring the published run up to date: a rolling window, the rows and axes of the previous run.

    For a scheduler, every night. A night that is done does no work; one that was cut short goes on. A run
    that breaks a limit is kept but not published (exit code 6): the previous run stays.

    \b
    Example:
      toffee refresh edges/ --out vectors --last 90d --rank 64
    """
    # Saves start-up time.
    from toffee_dist.refresh.job import refresh

    settings = RefreshConfig.read({"inputs": inputs or None, **options}, config)
    show_refresh(refresh(settings, choose_progress(quiet=as_json)), as_json)


def show_refresh(done: Any, as_json: bool) -> None:
    """Print what a refresh did."""
    data = done.to_json()
    if as_json:
        echo(json.dumps(data))
        return
    for name, value in data.items():
        if value not in (None, ""):
            shown = f"{value:.4g}" if isinstance(value, float) else value
            words = " to ".join(shown) if isinstance(shown, list | tuple) else str(shown)
            echo(f"{name:<18}{show_line(words)}")


@click.command("runs", short_help="List the runs of a folder")
@click.argument("path", metavar="OUT")
@json_option
def runs_command(path: str, as_json: bool) -> None:
    """List the runs of OUT, oldest first; the published one has a star.

    \b
    Example:
      toffee runs vectors
    """
    # Saves start-up time.
    from toffee_dist.refresh.history import describe_runs

    lines = describe_runs(to_path(path))
    if as_json:
        echo(json.dumps([line.to_json() for line in lines]))
        return
    for line in lines:
        words = [f"{'*' if line.latest else ' '} {line.run}  {line.state:<10}"]
        if line.nodes is not None:
            words.append(f"{line.nodes:>10,} nodes  {line.first} to {line.last}")
        if line.space_id:
            words.append(f"space {line.space_id[:8]}")
        if line.cosine is not None:
            words.append(f"cosine {line.cosine:.3f}")
        echo(show_line("  ".join([*words, *line.reasons])))


@click.command("rollback", short_help="Publish an earlier run again")
@click.argument("path", metavar="OUT")
@click.option("--to", metavar="RUN", help="Name of a complete run; default: the one published before.")
@json_option
def rollback_command(path: str, to: str | None, as_json: bool) -> None:
    """Publish an earlier run again. Nothing is computed, and nothing is removed.

    \b
    Example:
      toffee rollback vectors
    """
    # Saves start-up time.
    from toffee_dist.refresh.history import roll_back

    run = roll_back(to_path(path), to)
    echo(json.dumps({"run": str(run.path)}) if as_json else f"published   {run.path}")


@click.command("fold-in", short_help="Vectors for nodes that came after the run", cls=GroupedCommand)
@click.argument("path", metavar="OUT")
@inputs_argument
@click.option("--to", required=True, metavar="FILE", help="Parquet file for the vectors of the new nodes.")
@click.option(
    "--space-id",
    metavar="ID",
    help="Refuse a run of another space: the id that came with vectors which are stored already.",
)
@config_options(RuntimeSettings, without=("memory",))
@json_option
def fold_in_command(
    path: str,
    inputs: tuple[str, ...],
    to: str,
    space_id: str | None,
    config: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Give vectors to nodes that appeared after the run, from their edges, without a refresh.

    INPUT holds edges between new nodes and known ones, in the form of the run's own input. Vectors are in the
    axes of the published run. A node without an edge to a known one is cold, and gets zeros.

    \b
    Example:
      toffee fold-in vectors today.parquet --to new-nodes.parquet
    """
    # Saves start-up time.
    from toffee_dist.refresh.fold_in import FoldConfig, fold_in

    settings = FoldConfig.read({"inputs": inputs or None, **options}, config)
    check_parent(to_path(to), "--to")
    found = fold_in(to_path(path), settings, to_path(to), choose_progress(quiet=as_json), space_id)
    echo(
        json.dumps(found)
        if as_json
        else f"{found['new']:,} new nodes, {found['cold']:,} cold, in {found['out']}"
    )


@click.command("forget", short_help="Erase nodes from every run of a folder")
@click.argument("path", metavar="OUT")
@click.argument("ids", nargs=-1, metavar="[ID]...")
@click.option("--file", "file", metavar="FILE", help="Text file with one id per line.")
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
@json_option
def forget_command(path: str, ids: tuple[str, ...], file: str | None, dry_run: bool, as_json: bool) -> None:
    """Erase nodes: their ids, vectors and links, from every run of OUT, and from all later ones.

    Each run gets a new version under a new name; readers see whole runs all the time. If it is cut short, the
    same command goes on. A receipt says what was where, without the ids, and which exports are out of reach.

    \b
    Example:
      toffee forget vectors mallory
    """
    # Saves start-up time.
    from toffee_dist.forget.job import forget, read_id_file

    more = read_id_file(to_path(file)) if file is not None else []
    done = forget(to_path(path), [*ids, *more], dry_run=dry_run, progress=choose_progress(quiet=as_json))
    if as_json:
        echo(json.dumps(done.to_json()))
        return
    receipt = done.receipt
    for run in receipt.runs:
        changed = "" if dry_run else f", {len(run.files):,} files changed, now {run.new}"
        echo(show_line(f"{run.old}  {run.nodes:,} nodes{changed}"))
    for name in receipt.removed:
        echo(show_line(f"{'to remove' if dry_run else 'removed'}     {name}"))
    for note in receipt.exports:
        echo(show_line(f"out of reach  {note.get('format')} of {note.get('run')}: {note.get('to')}"))
    if not any(run.nodes for run in receipt.runs):
        echo("no run had such a node" + ("" if dry_run else "; later ones will not have it"))
    if done.path:
        echo(f"receipt     {done.path}")


REFRESH_COMMANDS = (refresh_command, runs_command, rollback_command, fold_in_command, forget_command)
