"""Questions to a run: `toffee neighbors`, `trajectory`, `similar-periods`, `changes`, `score` and others."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import click

from toffee_dist.cli.options import json_option
from toffee_dist.cli.output import echo
from toffee_dist.errors import ConfigError
from toffee_dist.storage.files import check_parent
from toffee_dist.words import show_line

_run = click.argument("path", metavar="RUN")
_node = click.argument("node")
_at = click.option("--at", metavar="STEP", help="A step from 0, or a moment: 2024-03-01, 2024-03-01T12:00.")
_count = click.option("-k", "count", type=int, default=10, show_default=True, help="How many.")
_space = click.option(
    "--space",
    type=click.Choice(["source", "target"]),
    help="Where the id is, if both sides of a bipartite graph have it.",
)
_role = click.option(
    "--role",
    type=click.Choice(["source", "target"]),
    help="Of directed graphs: nodes as sources or as targets.  [default: source]",
)
_expected = click.option(
    "--space-id",
    metavar="ID",
    help="Refuse a run of another space: the id that came with vectors which are stored already.",
)
_where = click.option(
    "--from",
    "where",
    metavar="PATH",
    help="Where the vector of the first node is, if not in RUN: another run of the same space, or a file of "
    "toffee fold-in.",
)


def _table(frame: Any) -> str:
    """Return rows as aligned text: ids first, numbers with four significant digits."""
    rows = [
        [f"{v:.4g}" if isinstance(v, float) else show_line(str(v)) for v in row] for row in frame.iter_rows()
    ]
    rows = [list(frame.columns), *rows]
    widths = [max(len(row[c]) for row in rows) for c in range(len(frame.columns))]
    return "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
    )


@click.command("neighbors", short_help="The nodes nearest to a node")
@_run
@_node
@_at
@_count
@click.option(
    "--metric",
    type=click.Choice(["cosine", "dot"]),
    default="cosine",
    show_default=True,
    help="dot favours active nodes.",
)
@_role
@_space
@_where
@_expected
@json_option
def neighbors_command(
    path: str,
    node: str,
    at: str | None,
    count: int,
    metric: Any,
    role: Any,
    space: str | None,
    where: str | None,
    space_id: str | None,
    as_json: bool,
) -> None:
    """Find the nodes nearest to NODE, over all time or at a step.

    RUN is the folder of the runs, or of one run. Exact: every vector is compared, in blocks. toffee index
    makes it several times faster.

    \b
    Example:
      toffee neighbors vectors alice -k 5
      toffee neighbors vectors alice --at 2024-03-01
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    run = load_run(path, space_id)
    found = run.neighbors(node, count, at=at, metric=metric, role=role, space=space, where=where)
    echo(json.dumps({"node": node, "neighbors": found.to_dicts()}) if as_json else _table(found))


@click.command("trajectory", short_help="A node over time: a plot, CSV, PNG")
@_run
@_node
@click.option("--csv", "csv_file", metavar="FILE", help="Also write a row per step: start, length, vector.")
@click.option("--png", "png_file", metavar="FILE", help="Also draw it into a PNG file.")
@_space
@json_option
def trajectory_command(
    path: str, node: str, csv_file: str | None, png_file: str | None, space: str | None, as_json: bool
) -> None:
    """Show NODE over time: how active it was, and how far from its usual place.

    The first curve is the length of its vector at each step, the second the cosine of that vector with the
    node's sum over time. RUN needs the output trajectory; p is the chance that a node
    which keeps still moves as far.

    \b
    Example:
      toffee trajectory vectors alice --csv alice.csv --png alice.png
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    for option, file in (("--csv", csv_file), ("--png", png_file)):
        if file:
            check_parent(Path(file), option)
    found = load_run(path).trajectory_of(node, space)
    if csv_file:
        found.write_csv(Path(csv_file))
    if png_file:
        found.write_png(Path(png_file))
    if as_json:
        figures: dict[str, Any] = {"length": found.lengths.tolist(), "cosine": found.cosines.tolist()}
        if found.noise is not None:
            figures |= {"noise": found.noise.tolist(), "p_value": found.p_value}
        starts = [found.grid.show(step) for step in range(found.grid.n_steps)]
        echo(json.dumps({"node": node, "start": starts, **figures}))
        return
    echo(found.text(min(shutil.get_terminal_size().columns, 110)))


@click.command("similar-periods", short_help="Which rhythm a node lives by, and who shares it")
@_run
@_node
@_count
@_space
@json_option
def similar_periods_command(path: str, node: str, count: int, space: str | None, as_json: bool) -> None:
    """Say by which rhythm NODE lives, and which nodes share it.

    RUN needs the output spectrum. Periods are those whose energy noise of the node's own strength would
    hardly reach.

    \b
    Example:
      toffee embed edges/*.parquet --out rhythms --outputs spectrum
      toffee similar-periods rhythms alice
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    found = load_run(path).rhythm_of(node, count, space)
    if as_json:
        rhythm = {"periods": found.periods.to_dicts(), "similar": found.similar.to_dicts()}
        echo(json.dumps({"node": node, **rhythm}))
        return
    if not found.periods.height:
        echo(f"No rhythm of {show_line(node)} stands out of its noise.")
    for row in found.periods.head(10).iter_rows(named=True):
        echo(f"{row['period']:<20} {row['times_floor']:.1f} times its noise, p = {row['p_value']:.2g}")
    if found.similar.height:
        echo("\nMost similar:\n" + _table(found.similar))


@click.command("changes", short_help="What changed, and whether chance did it")
@_run
@click.option(
    "--rate",
    type=float,
    default=0.05,
    show_default=True,
    help="False discovery rate: the share of the list that may be chance.",
)
@click.option("-k", "count", type=int, default=20, show_default=True, help="Rows to show of each kind.")
@json_option
def changes_command(path: str, rate: float, count: int, as_json: bool) -> None:
    """List nodes, communities, rhythms and moments that changed within the window of RUN.

    Only what is significant: p is the chance that something which does not change seems to change as much, q
    the false discovery rate at which it is on the list. RUN needs the output trajectory, or is a refresh;
    its file changes.json has the same at a rate of 0.05, for alerts.

    \b
    Example:
      toffee changes vectors
      toffee changes vectors --rate 0.01 --json
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    found = load_run(path).changes(rate)
    if as_json:
        echo(json.dumps(found.to_json(), default=str))
        return
    for kind, frame in found.kinds.items():
        # One test of the whole graph, and of both sides of every moment found, gives any number of moments.
        of = "" if kind == "moments" else f" of {found.tested.get(kind, 0):,} tested"
        echo(f"{kind}: {frame.height:,}{of}")
        if frame.height:
            hidden = [name for name in ("row", "k", "period_steps") if name in frame.columns]
            echo(_table(frame.head(count).drop(hidden)) + "\n")


@click.command("explain", short_help="Which links and rhythms made a vector or a move")
@_run
@_node
@_at
@click.option(
    "--between", nargs=2, metavar="STEP STEP", help="Explain the move of the vector from one step to another."
)
@_count
@_space
@_expected
@json_option
def explain_command(
    path: str,
    node: str,
    at: str | None,
    between: tuple[str, str] | None,
    count: int,
    space: str | None,
    space_id: str | None,
    as_json: bool,
) -> None:
    """Say which links, steps and rhythms made the vector of NODE.

    Without --at or --between it is the one vector over all time. A share is how far a part goes in the
    direction of the vector; all shares add up to 100 %, and what pulls the other way is negative. RUN needs
    a trajectory made by the filter, which has the links of every node.

    \b
    Example:
      toffee explain vectors alice
      toffee explain vectors alice --at 2024-03-01
      toffee explain vectors alice --between 2024-03-01 2024-03-08
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    found = load_run(path, space_id).explain(node, at=at, between=between, k=count, space=space)
    if as_json:
        echo(json.dumps(found.to_json()))
        return
    what = "the vector" if between is None else "the move"
    echo(f"{show_line(node)}: {what} {found.about}, of length {found.length:.4g}")
    for title, parts in (("links", found.links), ("steps", found.steps), ("rhythms", found.rhythms)):
        if parts is None:
            continue
        shown = parts.table.drop("k", strict=False)
        echo(f"\nBy {title}:\n" + _table(_percent(shown)))
        if parts.n_others:
            echo(f"{parts.n_others:,} others: {parts.others_share:.1%}")
    if found.rhythms is None:
        echo(f"\nNot from its links (what the solver left over): {found.rest_share:.1%}")


def _percent(frame: Any) -> Any:
    """Return a table whose column share is in percent."""
    return frame.with_columns(share=[f"{share:.1%}" for share in frame["share"]])


@click.command("score", short_help="The model's own score of pairs of nodes")
@_run
@click.argument("pairs", nargs=-1, required=True, metavar="PAIRS...")
@_at
@click.option(
    "--memory/--no-memory",
    default=True,
    help="At a step: whether what a pair itself did counts, beside the company that both nodes keep.",
)
@click.option("--explain", "why", is_flag=True, help="Say which common directions make each score.")
@_where
@_expected
@json_option
def score_command(
    path: str,
    pairs: tuple[str, ...],
    at: str | None,
    memory: bool,
    why: bool,
    where: str | None,
    space_id: str | None,
    as_json: bool,
) -> None:
    """Give the model's own score of PAIRS: how likely a link is, over all time or at a step.

    PAIRS are source,target words, or a Parquet or text file with two columns of ids. Scores are entries of
    the fit: about 0 for strangers, larger for those who link.

    \b
    Example:
      toffee score vectors alice,bob alice,carol
      toffee score vectors pairs.csv --at 2024-03-01
      toffee score vectors alice,bob --explain
    """
    # Saves start-up time.
    import polars as pl

    from toffee_dist.results.pairs import read_pairs
    from toffee_dist.results.run import load_run

    run = load_run(path, space_id)
    sources, targets = read_pairs(pairs)
    if why:
        if where is not None:
            raise ConfigError(
                "--explain",
                got="sources whose vectors are not in the run",
                allowed="nodes of the run",
                remedy="Leave --explain or the place of the vectors out.",
            )
        _explain_scores(run, sources, targets, at, memory, as_json)
        return
    scores = run.score(sources, targets, at, memory=memory, where=where)
    frame = pl.DataFrame({"source": sources, "target": targets, "score": scores})
    echo(json.dumps({"scores": frame.to_dicts()}) if as_json else _table(frame))


def _explain_scores(
    run: Any, sources: list[object], targets: list[object], at: str | None, memory: bool, as_json: bool
) -> None:
    pairs = list(zip(sources, targets, strict=True))
    found = [run.explain_score(source, target, at, memory=memory) for source, target in pairs]
    if as_json:
        rows = [
            {"source": source, "target": target, **one.to_json()}
            for (source, target), one in zip(pairs, found, strict=True)
        ]
        echo(json.dumps({"scores": rows}))
        return
    for (source, target), one in zip(pairs, found, strict=True):
        echo(f"{show_line(str(source))}, {show_line(str(target))}: {one.score:.4g}")
        for row in one.directions.iter_rows(named=True):
            about = ", ".join(show_line(name) for name in row["about"])
            echo(f"  {row['part']:+.4g}  direction {row['direction']} (most about {about})")
        echo(f"  {one.others:+.4g}  all other directions")
        if one.own:
            echo(f"  {one.own:+.4g}  this pair's own links")


@click.command("index", short_help="Make queries of a large run quick")
@_run
@_expected
@json_option
def index_command(path: str, space_id: str | None, as_json: bool) -> None:
    """Write the vectors of RUN once more, for quick queries.

    As float32 matrices in the run's folder index/; neighbors, similar-periods and score then read these.

    \b
    Example:
      toffee index vectors
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    files = [str(file) for file in load_run(path, space_id).build_index()]
    echo(json.dumps({"files": files}) if as_json else "\n".join(map(show_line, files)))


@click.command("export", short_help="word2vec, NumPy, FAISS, SQL, Delta, Lance, Feast")
@_run
@click.option(
    "--format",
    "form",
    required=True,
    type=click.Choice(
        ["word2vec", "numpy", "faiss", "duckdb", "pgvector", "parquet", "delta", "lance", "feast"]
    ),
    help="Of which program.",
)
@click.option(
    "--to",
    required=True,
    metavar="PATH",
    help="A new file; for numpy and faiss a new folder; for delta, lance and feast a folder that grows by a "
    "snapshot per run.",
)
@_at
@_role
@click.option("--steps", is_flag=True, help="Of parquet, delta, lance, feast: a row per node and step.")
@click.option(
    "--vectors",
    type=click.Choice(["fixed", "list"]),
    help="Of parquet, delta, lance, feast: lists of fixed size, or plain ones.  [default: as the format has "
    "it]",
)
@_expected
@json_option
def export_command(
    path: str,
    form: str,
    to: str,
    at: str | None,
    role: str | None,
    steps: bool,
    vectors: Any,
    space_id: str | None,
    as_json: bool,
) -> None:
    """Hand the vectors on: text, NumPy, FAISS, DuckDB, pgvector, Parquet, Delta, Lance, Feast.

    \b
    Example:
      toffee export vectors --format numpy --to matrix
      toffee export vectors --format pgvector --to vectors.sql
      toffee export vectors --format parquet --to snapshot.parquet
    """
    # Saves start-up time.
    from toffee_dist.results.run import load_run

    check_parent(Path(to), "--to")
    run = load_run(path, space_id)
    written = run.export(form, to, at=at, role=role or "source", steps=steps, vectors=vectors)
    files = [str(file) for file in written]
    if as_json:
        echo(json.dumps({"files": files, "run_id": run.manifest.run_id, "space_id": run.space_id}))
        return
    echo("\n".join(map(show_line, files)))


ASK_COMMANDS = (
    neighbors_command,
    trajectory_command,
    similar_periods_command,
    changes_command,
    explain_command,
    score_command,
    index_command,
    export_command,
)
