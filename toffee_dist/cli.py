"""The command line: `toffee`. Thin: options in, one call, text or JSON out."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from toffee_dist.cli_ask import ASK_COMMANDS
from toffee_dist.cli_evaluate import evaluate_command
from toffee_dist.cli_help import Sections, completion_command, narrow_terminal
from toffee_dist.cli_refresh import REFRESH_COMMANDS
from toffee_dist.cli_report import report_command
from toffee_dist.config import EdgeSettings, JobConfig, ModelSettings, RuntimeSettings
from toffee_dist.errors import ToffeeError
from toffee_dist.options import config_options
from toffee_dist.progress import choose_progress


@click.group(cls=Sections, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="toffee_dist", prog_name="toffee")
def cli() -> None:
    """Vectors for the nodes of a graph that changes in time, as batch jobs on Dask."""


_json = click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON line.")
_inputs = click.argument("inputs", nargs=-1, metavar="INPUT...")


class IngestSettings(EdgeSettings, RuntimeSettings):
    """Options of `toffee ingest`."""

    out: str = ""


@cli.command("ingest", short_help="Only read edges, into a staged tensor")
@_inputs
@click.option("--out", metavar="DIR", help="Where the result goes; must not exist yet.")
@config_options(EdgeSettings, RuntimeSettings, without=("memory",))
@_json
def ingest_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Read edges into a staged tensor, a node registry and a time grid.

    INPUT is a file, a folder, a glob or an fsspec URL, several at once: Parquet, Arrow IPC, or text
    (comma, tab or space separated, with or without header, also .gz and .zst).

    \b
    Example:
      toffee ingest edges/*.parquet --out staged --step 1w --zone Europe/Athens
    """
    from toffee_dist.edges import ingest
    from toffee_dist.runtime import open_cluster, runner
    from toffee_dist.summary import describe

    settings = IngestSettings.read({"inputs": inputs or None, **options}, config)
    edges = settings.ingest_config()
    if not settings.out:
        raise click.UsageError("Missing option '--out'.")
    progress = choose_progress()
    with open_cluster(settings) as client, progress.stage("ingest") as done:
        result = ingest(
            edges,
            settings.out,
            runner(client, wait=settings.wait, stall=settings.stall, done=done),
            progress.say,
        )
    click.echo(
        json.dumps({"out": str(result.folder), **asdict(result.summary)}) if as_json else describe(result)
    )


@cli.command("plan", short_help="Say what embed would take; solves nothing")
@_inputs
@config_options(EdgeSettings, ModelSettings, RuntimeSettings)
@_json
def plan_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Say what embed would do: frequencies, tasks, memory, disk, time. Solves nothing.

    Reads the input once. Nodes and pairs are estimates, to within 3 %; the time is of one core of a machine
    like ours. With --memory, what would not fit into such a worker is refused as embed would refuse it.

    \b
    Example:
      toffee plan edges/*.parquet --rank 64 --outputs embedding,trajectory --freqs all
    """
    from toffee_dist.edges import estimate
    from toffee_dist.plan import Shape, describe_plan, make_plan, parse_bytes, plan_json
    from toffee_dist.runtime import count_cores, open_cluster, runner

    settings = JobConfig.read({"inputs": inputs or None, **options}, config)
    memory = None if settings.memory is None else parse_bytes(settings.memory)
    progress = choose_progress(quiet=as_json)
    with open_cluster(settings) as client, progress.stage("scan") as done:
        found = estimate(
            settings.ingest_config(),
            runner(client, wait=settings.wait, stall=settings.stall, done=done),
            progress.say,
        )
    shape = Shape(
        found.nodes,
        found.steps,
        found.pairs,
        found.entries,
        not settings.undirected,
        found.rows,
        exact=False,
    )
    plan = make_plan(shape, settings)
    click.echo(json.dumps(plan_json(plan)) if as_json else describe_plan(plan))
    if memory is not None:
        # As many threads as embed would start; of a running cluster nothing is known here.
        threads = (settings.workers or count_cores()) if settings.mode == "threads" else 1
        plan.check_memory(memory, threads, "a worker")


@cli.command("embed", short_help="Read edges and publish vectors: the whole job")
@_inputs
@config_options(JobConfig)
@_json
def embed_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Read edges and publish vectors: the whole batch job.

    Results are in OUT/runs/<run>; OUT/latest.json points to the newest complete run, and changes last.

    \b
    Example:
      toffee embed edges/*.parquet --out vectors --rank 64 --outputs embedding,trajectory
    """
    from toffee_dist.pipeline import start_run

    settings = JobConfig.read({"inputs": inputs or None, **options}, config)
    _show(start_run(settings, choose_progress(quiet=as_json)), as_json)


@cli.command("resume", short_help="Go on with an unfinished run")
@click.argument("path", metavar="OUT")
@config_options(RuntimeSettings)
@_json
def resume_command(path: str, config: str | None, as_json: bool, **options: Any) -> None:
    """Go on with the newest unfinished run of OUT, or with the run whose folder OUT is.

    Finished slices and parts are used as they are. Where it runs may differ from the start.

    \b
    Example:
      toffee resume vectors --mode processes
    """
    from toffee_dist.cli_refresh import show_night
    from toffee_dist.pipeline import resume_run
    from toffee_dist.refresh import resume_night
    from toffee_dist.store import find_unfinished, place

    where = RuntimeSettings.read(options, config).model_dump(exclude_unset=True)
    run, progress = find_unfinished(place(path)), choose_progress(quiet=as_json)
    if "following" in run.read_job():
        show_night(resume_night(run, where, progress), as_json)
    else:
        _show(resume_run(run, where, progress), as_json)


def _show(outcome: Any, as_json: bool) -> None:
    data = outcome.to_json()
    if as_json:
        click.echo(json.dumps(data))
        return
    spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in data["seconds"].items())
    click.echo(f"published   {data['run']}")
    click.echo(f"nodes       {data['nodes']:,} over {data['steps']:,} steps")
    click.echo(f"slices      {data['solved']:,} solved, {data['reused']:,} reused")
    click.echo(f"seconds     {spent}")
    if "report" in data:
        click.echo(f"report      {data['run']}/{data['report']}")


@cli.command("inspect", short_help="Say what a run holds, or how far it is")
@click.argument("path", metavar="OUT")
@_json
def inspect_command(path: str, as_json: bool) -> None:
    """Say what a run holds, or how far it is.

    \b
    Example:
      toffee inspect vectors
    """
    from toffee_dist.inspection import describe_run, inspect_run
    from toffee_dist.store import place

    found = inspect_run(place(path))
    click.echo(json.dumps(found) if as_json else describe_run(found))


@cli.command("demo", short_help="A made-up graph, from edges to vectors, in seconds")
@click.option("--out", default="toffee-demo", show_default=True, metavar="DIR", help="Where everything goes.")
def demo_command(out: str) -> None:
    """Make a small graph with daily and weekly communities, embed it, and show what was found.

    \b
    Example:
      toffee demo --out toffee-demo
    """
    from toffee_dist.demo import run_demo

    run_demo(Path(out), click.echo, choose_progress())


@cli.command("certs", short_help="Make the certificates of a TLS cluster")
@click.argument("out", metavar="DIR")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    default=("127.0.0.1", "localhost"),
    show_default=True,
    help="Name or address of a machine of the cluster; several times for several.",
)
@click.option(
    "--days", type=click.IntRange(min=1), default=365, show_default=True, help="How long they are valid."
)
def certs_command(out: str, hosts: tuple[str, ...], days: int) -> None:
    """Make an authority, and certificates for scheduler, workers and client of a TLS cluster.

    \b
    Example:
      toffee certs certs --host 10.0.0.5 --host scheduler.example
    """
    from toffee_dist.certs import write_certificates

    for path in write_certificates(Path(out), hosts, days):
        click.echo(str(path))


for _command in (evaluate_command, report_command, completion_command, *REFRESH_COMMANDS, *ASK_COMMANDS):
    cli.add_command(_command)


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors a user can meet become one message and an exit code."""
    # A scheduler's or an operator's "stop" is an interruption like Ctrl-C: close everything, stay resumable.
    signal.signal(signal.SIGTERM, _interrupt)
    if not os.environ.get("TOFFEE_DEBUG"):
        # Of timers that a closed cluster leaves behind it writes tracebacks, which no user can act upon.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    try:
        cli.main(args=arguments, standalone_mode=False, **narrow_terminal())
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except ToffeeError as error:
        click.echo(f"Error: {error}", err=True)
        if not error.remedy:
            click.echo(
                f"Next: toffee {_command_name(arguments)}--help says what each option takes.", err=True
            )
        sys.exit(error.exit_code)
    except (KeyboardInterrupt, click.Abort):
        click.echo("Interrupted. A run that had begun is finished by: toffee resume OUT", err=True)
        sys.exit(5)
    except OSError as error:
        click.echo(
            f"Error: {error}. Is the disk full or not writable? A run that had begun: toffee resume OUT",
            err=True,
        )
        sys.exit(5)
    except Exception as error:
        if os.environ.get("TOFFEE_DEBUG"):
            raise
        click.echo(
            f"Internal error: {type(error).__name__}: {error}. This is a bug in toffee, not in your data; "
            "set TOFFEE_DEBUG=1 for the details that a report needs.",
            err=True,
        )
        sys.exit(1)


def _command_name(arguments: list[str] | None) -> str:
    """Return the command that was called, and a space; nothing where there was none."""
    words = sys.argv[1:] if arguments is None else arguments
    return f"{words[0]} " if words and words[0] in cli.commands else ""


def _interrupt(signum: int, frame: Any) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main()
