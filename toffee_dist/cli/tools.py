"""`toffee demo` and `certs`."""

from __future__ import annotations

from pathlib import Path

import click

from toffee_dist.cli.output import echo
from toffee_dist.progress import choose_progress


@click.command("demo", short_help="A made-up graph, from edges to vectors, in seconds")
@click.option("--out", default="toffee-demo", show_default=True, metavar="DIR", help="Where everything goes.")
def demo_command(out: str) -> None:
    """Make a small graph with daily and weekly communities, embed it, and show what was found.

    \b
    Example:
      toffee demo --out toffee-demo
    """
    # Saves start-up time.
    from toffee_dist.demo import run_demo

    run_demo(Path(out), echo, choose_progress())


@click.command("certs", short_help="Make the certificates of a TLS cluster")
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
    "--days", type=click.IntRange(1, 36_500), default=365, show_default=True, help="How long they are valid."
)
def certs_command(out: str, hosts: tuple[str, ...], days: int) -> None:
    """Make an authority, and certificates for scheduler, workers and client of a TLS cluster.

    \b
    Example:
      toffee certs certs --host 10.0.0.5 --host scheduler.example
    """
    # Saves start-up time.
    from toffee_dist.cluster.certs import write_certificates

    for path in write_certificates(Path(out), hosts, days):
        echo(str(path))


TOOL_COMMANDS = (demo_command, certs_command)
