"""`toffee report`: the page about a run, again."""

from __future__ import annotations

import click


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
    from toffee_dist.report import REPORT, write_report
    from toffee_dist.report.page import open_page
    from toffee_dist.run import load_run
    from toffee_dist.store import place

    run = load_run(path)
    file = run.path / REPORT if to is None else place(to)
    write_report(run.path, run.manifest, file, "umap" if method == "umap" else "pca")
    click.echo(str(file))
    if show and not open_page(file):
        click.echo("No browser or no display here: open the file where there is one.", err=True)
