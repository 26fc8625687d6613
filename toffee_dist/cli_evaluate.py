"""`toffee evaluate`: options in, one call, tables or JSON out."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import click
import polars as pl

from toffee_dist.cli_edges import edge_options
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.classify import Classifier
from toffee_dist.evaluation.compare import GRID, EvaluateConfig
from toffee_dist.evaluation.job import make_job, run_job
from toffee_dist.evaluation.protocols import PROTOCOLS
from toffee_dist.evaluation.report import describe_cells, describe_steps, summarise
from toffee_dist.models import MODELS

_DEFAULT = EvaluateConfig()


@click.command("evaluate")
@edge_options
@click.option("--out", required=True, metavar="DIR", help="Where the result goes; must not exist yet.")
@click.option(
    "--protocol",
    "protocols",
    type=click.Choice([*PROTOCOLS, "none"]),
    multiple=True,
    default=_DEFAULT.protocols,
    show_default=True,
    help="Which pairs are asked about; several times for several. none: only --future or --labels.",
)
@click.option(
    "--model",
    "models",
    type=click.Choice(list(MODELS)),
    multiple=True,
    default=_DEFAULT.models,
    show_default=True,
)
@click.option(
    "--features",
    multiple=True,
    default=_DEFAULT.features,
    show_default=True,
    help="average, hadamard, weighted-l1, weighted-l2, combined (all four), scores; or joined by +.",
)
@click.option(
    "--classifier", type=click.Choice(get_args(Classifier)), default=_DEFAULT.classifier, show_default=True
)
@click.option("--seeds", type=click.IntRange(min=1), default=_DEFAULT.seeds, show_default=True)
@click.option(
    "--first-seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the draws of examples."
)
@click.option("--rank", type=click.IntRange(min=1), default=_DEFAULT.options.rank, show_default=True)
@click.option("--reg", type=float, default=_DEFAULT.options.reg_a, show_default=True, help="λ of A and R.")
@click.option(
    "--reduce",
    default="sum",
    show_default=True,
    help="What is summed over time: sum, last:N, decay:H (steps, or a share such as decay:5%); joined by + "
    "for several blocks of vectors side by side.",
)
@click.option("--gauge", type=click.Choice(["canonical", "none"]), default="canonical", show_default=True)
@click.option(
    "--oversample",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Directed graphs: solve this many times the rank, keep the leading columns of each role.",
)
@click.option(
    "--grid",
    multiple=True,
    metavar="NAME=V,V",
    help=f"Choose among values of {', '.join(GRID)}, on a validation part cut from the learning time.",
)
@click.option("--splits", metavar="DIR", help="Keep the examples here, or use those that are here.")
@click.option(
    "--future", type=click.IntRange(min=1), metavar="STEPS", help="Predict the links of the last steps."
)
@click.option(
    "--period", type=click.IntRange(min=2), default=7, show_default=True, help="Steps of --future's rhythm."
)
@click.option("--labels", type=click.Path(), help="Parquet or CSV with node, label and perhaps step.")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True, help="Of the models.")
@click.option("--workers", type=click.IntRange(min=1), help="Processes for rescal; default: this one.")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON line.")
def evaluate_command(inputs: tuple[str, ...], out: str, as_json: bool, **options: Any) -> None:
    """Compare embeddings with simple things, on your graph.

    The first 75 % of the links are learnt from, the rest is predicted. INPUT as for `toffee ingest`.

    \b
    Example:
      toffee evaluate edges/*.parquet --out quality --protocol link-paper --protocol link-new --rank 64
      toffee evaluate mail.csv --out future --protocol none --future 14 --period 7
    """  # noqa: D301
    if "none" in options["protocols"]:
        options["protocols"] = ()
    job = make_job(inputs, out, options)
    if not job.config.protocols and job.future is None and job.labels is None:
        raise click.UsageError("--protocol none needs --future or --labels.")

    def say(line: str) -> None:
        click.echo(line, err=True)

    found = run_job(job, say)
    if as_json:
        rows = summarise(found.cells).to_dicts()
        marks = found.steps.group_by("question", "method", maintain_order=True).agg(pl.col("mark").mean())
        click.echo(
            json.dumps({"out": str(job.out), **found.about, "summary": rows, "steps": marks.to_dicts()})
        )
        return
    tables = [describe_cells(found.cells), describe_steps(found.steps)]
    click.echo("\n\n".join(table for table in tables if table))
    click.echo(
        f"\nEvery cell: {job.out}/cells.parquet, steps.parquet, result.json; plots: {job.out}/report.html"
    )


def toml_arguments(path: Path, given: Sequence[str] = ()) -> list[str]:
    """Return the arguments of the command that a TOML file stands for.

    Its keys are the names of the options, and ``input``; an option that is also `given` on the command line
    is left to it.

    Raises
    ------
    ConfigError
        For a key that is no option; it names the nearest that is.
    """
    try:
        table = tomllib.loads(path.read_text())
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("config file", got=f"{path}: {error}", allowed="a TOML file") from None
    options = {
        name.removeprefix("--"): option
        for option in evaluate_command.params
        if isinstance(option, click.Option)
        for name in option.opts
    }
    arguments: list[str] = []
    inputs: list[str] = []
    for key, value in table.items():
        values = value if isinstance(value, list) else [value]
        if key == "input":
            inputs = [str(item) for item in values]
        elif key not in options:
            near = difflib.get_close_matches(key, [*options, "input"], n=1, cutoff=0.0)
            raise ConfigError(
                f"unknown key in {path}",
                got=key,
                allowed="input, " + ", ".join(options),
                remedy=f"Did you mean {near[0]}?",
            )
        elif f"--{key}" not in given:
            for item in values:
                if options[key].is_flag:
                    arguments += [f"--{key}"] * bool(item)
                else:
                    arguments += [f"--{key}", str(item)]
    return [*inputs, *arguments, *given]
