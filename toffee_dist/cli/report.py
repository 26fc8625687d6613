"""`toffee report` and `serve`: the page about a run, again or live."""

from __future__ import annotations

import click

from toffee_dist.cli.output import echo


@click.command("report", short_help="Draw the page of a run again")
@click.argument("path", metavar="RUN")
@click.option("--to", metavar="FILE", help="Where it goes; default: report.html beside the run's vectors.")
@click.option(
    "--map",
    "method",
    type=click.Choice(["pca", "umap"]),
    default="pca",
    show_default=True,
    help="How the map of nodes is laid out; umap needs umap-learn.",
)
@click.option("--open", "show", is_flag=True, help="Show it in the browser.")
def report_command(path: str, to: str | None, method: str, show: bool) -> None:
    """Draw the report of a run again: what was read and done, a map of nodes, rhythms, fit and drift.

    RUN is a folder of runs, of which the published one is drawn, or a run's own folder.

    \b
    Example:
      toffee report vectors --open
    """
    # Saves start-up time.
    from toffee_dist.report.page import open_page
    from toffee_dist.report.write import write_report
    from toffee_dist.results.run import load_run
    from toffee_dist.storage.files import check_parent
    from toffee_dist.storage.paths import to_path

    if to is not None:
        check_parent(to_path(to), "--to")
    run = load_run(path)
    file = run.folder.report if to is None else to_path(to)
    write_report(run.folder, run.manifest, file, "umap" if method == "umap" else "pca")
    echo(str(file))
    if show and not open_page(file):
        echo("No browser or no display here: open the file where there is one.", err=True)


@click.command("serve", short_help="The page of a run, live: search, explain, compare")
@click.argument("path", metavar="RUN")
@click.option(
    "--host",
    default="127.0.0.1",
    show_default=True,
    help="Where to listen; others than this machine: with TLS.",
)
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Port; 0: any free one."
)
@click.option("--tls-cert", metavar="FILE", help="Certificate, for hosts beyond this machine.")
@click.option("--tls-key", metavar="FILE", help="Its key.")
@click.option("--open", "show", is_flag=True, help="Show it in the browser.")
def serve_command(
    path: str, host: str, port: int, tls_cert: str | None, tls_key: str | None, show: bool
) -> None:
    """Serve the page of RUN: every node can be searched, explained and compared, at every step.

    The address that is printed has a token: who has it may read the run, nobody else. Ctrl-C ends it.

    \b
    Example:
      toffee serve vectors --port 8765
    """
    # Saves start-up time.
    from pathlib import Path

    from toffee_dist.report.page import open_address
    from toffee_dist.report.serve import Door, PageServer, serve_run
    from toffee_dist.results.run import load_run

    def say(server: PageServer) -> None:
        echo(f"{server.url}\nCtrl-C ends it.")
        if show and not open_address(server.url):
            echo("No browser or no display here: open the address where there is one.", err=True)

    cert, key = (None if file is None else Path(file) for file in (tls_cert, tls_key))
    try:
        serve_run(load_run(path), Door(host, port, cert, key), say)
    except KeyboardInterrupt:
        echo("Ended.")


REPORT_COMMANDS = (report_command, serve_command)
