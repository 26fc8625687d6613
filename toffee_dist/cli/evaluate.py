"""`toffee evaluate`: options in, one call, tables or JSON out."""

from __future__ import annotations

import json
from typing import Any

import click
import polars as pl

from toffee_dist.cli.options import GroupedCommand, config_options, inputs_argument, json_option
from toffee_dist.cli.output import complain, echo
from toffee_dist.evaluation.job import EvaluateSettings, run_job
from toffee_dist.evaluation.report import describe_cells, describe_in_time, describe_steps, summarise


@click.command("evaluate", short_help="Are the vectors any good on this graph?", cls=GroupedCommand)
@inputs_argument
@config_options(EvaluateSettings, without=("known", "bound", "memory"))
@json_option
def evaluate_command(inputs: tuple[str, ...], config: str | None, as_json: bool, **options: Any) -> None:
    """Compare embeddings with simple things, on your graph.

    The first 75 % of the links are learnt from, the rest is predicted. INPUT as for `toffee ingest`.

    \b
    Example:
      toffee evaluate edges/*.parquet --out quality --protocol link-paper,link-new --rank 64
      toffee evaluate mail.csv --out steps --protocol in-time --pair-weight log --rank 64 --seeds 1
      toffee evaluate mail.csv --out future --protocol none --future 14 --period 7
    """
    job = EvaluateSettings.read({"inputs": inputs or None, **options}, config).job()

    found = run_job(job, complain)
    if as_json:
        rows = summarise(found.cells).to_dicts()
        marks = found.steps.group_by("question", "method", maintain_order=True).agg(pl.col("mark").mean())
        result = {"summary": rows, "steps": marks.to_dicts(), "in_time": found.in_time.to_dicts()}
        echo(json.dumps({"out": str(job.out), **found.about, **result}))
        return
    tables = [describe_cells(found.cells), describe_steps(found.steps), describe_in_time(found.in_time)]
    echo("\n\n".join(table for table in tables if table))
    echo(f"\nEvery cell: {job.out}/cells.parquet, steps.parquet, result.json; plots: {job.out}/report.html")
