"""`toffee ingest`, `plan`, `embed`, `resume` and `inspect`: the batch job and its parts.

A command imports what it runs when it runs, so that no other command waits for it.
"""

from __future__ import annotations

import json
from typing import Any

import click

from toffee_dist.cli.options import GroupedCommand, config_options, inputs_argument, json_option
from toffee_dist.cli.output import echo
from toffee_dist.progress import choose_progress
from toffee_dist.settings import (
    EdgeSettings,
    IngestSettings,
    JobConfig,
    JobRuntimeSettings,
    ModelSettings,
    RefreshConfig,
    RuntimeSettings,
)


@click.command("ingest", short_help="Only read edges, into a staged tensor", cls=GroupedCommand)
@inputs_argument
@config_options(IngestSettings, without=("memory",))
@json_option
def ingest_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Read edges into a staged tensor, a node registry and a time grid.

    INPUT is a file, a folder, a glob or an fsspec URL, several at once: Parquet, Arrow IPC, or text
    (comma, tab or space separated, with or without header, also .gz and .zst).

    \b
    Example:
      toffee ingest edges/*.parquet --out staged --step 1w --zone Europe/Athens
    """
    # Saves start-up time.
    from toffee_dist.cluster.client import open_cluster
    from toffee_dist.cluster.mapping import runner
    from toffee_dist.ingest.job import ingest
    from toffee_dist.ingest.summary import describe

    settings = IngestSettings.read({"inputs": inputs or None, **options}, config)
    if not settings.out:
        raise click.UsageError("Missing option '--out'.")
    progress = choose_progress()
    with open_cluster(settings) as client, progress.stage("ingest") as done:
        result = ingest(
            settings,
            settings.out,
            runner(client, wait=settings.wait, stall=settings.stall, done=done),
            progress.say,
        )
    echo(json.dumps({"out": str(result.folder), **result.summary.to_json()}) if as_json else describe(result))


@click.command("plan", short_help="Say what embed would take; solves nothing", cls=GroupedCommand)
@inputs_argument
@config_options(EdgeSettings, ModelSettings, RuntimeSettings)
@click.option("--nodes", type=float, help="Plan for a graph of so many nodes, without any input.")
@click.option("--events", type=float, help="With --nodes: how many events it has.")
@click.option("--n-steps", type=float, default=365.0, show_default=True, help="With --nodes: how many steps.")
@click.option(
    "--bandwidth",
    default="1GB",
    show_default=True,
    help="Bytes per second that one worker reads from and writes to storage.",
)
@json_option
def plan_command(
    inputs: tuple[str, ...],
    config: str | None,
    as_json: bool,
    nodes: float | None,
    events: float | None,
    n_steps: float,
    bandwidth: str,
    **options: Any,
) -> None:
    """Say what embed would do: frequencies, tasks, memory, disk, time. Solves nothing.

    Reads the input once. Nodes and pairs are estimates, to within 3 %; the time is of one core of a machine
    like ours, and of --workers of them. With --memory, what would not fit into such a worker is refused as
    embed would refuse it. With --nodes and --events no input is read: to size a cluster.

    \b
    Example:
      toffee plan edges/*.parquet --rank 64 --outputs embedding,trajectory --freqs all
      toffee plan --nodes 1e9 --events 1e10 --workers 64 --rank 64
    """
    # Saves start-up time.
    from toffee_dist.batch.plan import Shape
    from toffee_dist.batch.show_plan import describe_plan, plan_json
    from toffee_dist.batch.stages import make_plan
    from toffee_dist.cluster.client import count_cores, open_cluster
    from toffee_dist.cluster.mapping import runner
    from toffee_dist.ingest.prepare import estimate
    from toffee_dist.units import parse_bytes

    settings = JobConfig.read({"inputs": inputs or None, **options}, config)
    memory = None if settings.memory is None else parse_bytes(settings.memory)
    speed = parse_bytes(bandwidth, "bandwidth")
    if speed <= 0:
        raise click.UsageError("--bandwidth must be more than nothing.")
    directed = not settings.undirected
    if nodes is not None:
        sizes = [_whole("--nodes", nodes), _whole("--events", events), _whole("--n-steps", n_steps)]
        # Of an undirected graph both directions of a pair are stored.
        pairs = sizes[1] * (1 if directed else 2)
        shape = Shape(sizes[0], sizes[2], pairs, pairs, directed, sizes[1], exact=False)
    else:
        progress = choose_progress(quiet=as_json)
        with open_cluster(settings) as client, progress.stage("scan") as done:
            found = estimate(
                settings,
                runner(client, wait=settings.wait, stall=settings.stall, done=done),
                progress.say,
            )
        shape = Shape(found.nodes, found.steps, found.pairs, found.entries, directed, found.rows, exact=False)
    plan = make_plan(shape, settings)
    workers = settings.workers or count_cores()
    shown = plan_json(plan, workers, speed) if as_json else describe_plan(plan, workers, speed)
    echo(json.dumps(shown) if as_json else str(shown))
    if memory is not None:
        # As many threads as embed would start; of a running cluster nothing is known here.
        threads = (settings.workers or count_cores()) if settings.mode == "threads" else 1
        plan.check_memory(memory, threads, "a worker")


def _whole(option: str, value: float | None) -> int:
    """Return a number of things, which may be written as 1e9."""
    if value is None or not 1 <= value <= 1e15 or value != int(value):
        raise click.UsageError(f"{option} must be a whole number from 1 to 1e15.")
    return int(value)


@click.command("embed", short_help="Read edges and publish vectors: the whole job", cls=GroupedCommand)
@inputs_argument
@config_options(JobConfig)
@json_option
def embed_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Read edges and publish vectors: the whole batch job.

    Results are in OUT/runs/<run>; OUT/latest.json points to the newest complete run, and changes last.

    \b
    Example:
      toffee embed edges/*.parquet --out vectors --rank 64 --outputs embedding,trajectory
    """
    # Saves start-up time.
    from toffee_dist.batch.pipeline import start_run

    settings = JobConfig.read({"inputs": inputs or None, **options}, config)
    _show(start_run(settings, choose_progress(quiet=as_json)), as_json)


@click.command("resume", short_help="Go on with an unfinished run", cls=GroupedCommand)
@click.argument("path", metavar="OUT")
@click.argument("inputs", nargs=-1, metavar="[INPUT]...")
@config_options(JobRuntimeSettings)
@json_option
def resume_command(
    path: str, inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any
) -> None:
    """Go on with the newest unfinished run of OUT, or with the run whose folder OUT is.

    Finished slices and parts are used as they are. Where it runs is said again, here or in --config (which
    may be the file of the start): it is never taken from OUT. INPUT is needed only where it was a signed URL,
    which is not written down, and its edges were not read yet.

    \b
    Example:
      toffee resume vectors --mode processes
    """
    # Saves start-up time.
    from toffee_dist.batch.pipeline import resume_run
    from toffee_dist.cli.refresh import show_refresh
    from toffee_dist.refresh.job import resume_refresh
    from toffee_dist.storage.paths import to_path
    from toffee_dist.storage.runs import find_unfinished

    run, progress = find_unfinished(to_path(path)), choose_progress(quiet=as_json)
    is_refresh = run.read_job().following is not None
    kind = RefreshConfig if is_refresh else JobConfig
    where = kind.read(options, config).only(JobRuntimeSettings).model_dump()
    where |= {"inputs": inputs} if inputs else {}
    if is_refresh:
        show_refresh(resume_refresh(run, where, progress), as_json)
    else:
        _show(resume_run(run, where, progress), as_json)


def _show(outcome: Any, as_json: bool) -> None:
    data = outcome.to_json()
    if as_json:
        echo(json.dumps(data))
        return
    spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in data["seconds"].items())
    echo(f"published   {data['run']}")
    echo(f"nodes       {data['nodes']:,} over {data['steps']:,} steps")
    echo(f"slices      {data['solved']:,} solved, {data['reused']:,} reused")
    echo(f"seconds     {spent}")
    if "report" in data:
        echo(f"report      {data['run']}/{data['report']}")


@click.command("inspect", short_help="Say what a run holds, or how far it is")
@click.argument("path", metavar="OUT")
@click.option("--verify", is_flag=True, help="Read every published file and compare its checksum.")
@json_option
def inspect_command(path: str, verify: bool, as_json: bool) -> None:
    """Say what a run holds, or how far it is.

    With --verify every file of the run is read from the disk and compared with the checksum in its manifest;
    a file that is missing or changed is named (exit code 3).

    \b
    Example:
      toffee inspect vectors --verify
    """
    # Saves start-up time.
    from toffee_dist.batch.inspect_run import describe_run, inspect_run
    from toffee_dist.batch.seal import check_run
    from toffee_dist.storage.paths import to_path
    from toffee_dist.storage.runs import find_run

    found = inspect_run(to_path(path))
    if verify:
        found["verified"] = f"{check_run(find_run(to_path(path))):,} files, all as they were published"
    echo(json.dumps(found) if as_json else describe_run(found))


BATCH_COMMANDS = (ingest_command, plan_command, embed_command, resume_command, inspect_command)
