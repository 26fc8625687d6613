"""`toffee report`: the page about a run, again."""

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
