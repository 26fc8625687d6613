"""One evaluation as a job: options or a TOML file in, a folder of results out."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import polars as pl

from toffee_dist.edges import IngestConfig, Run, Say, run_here
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.compare import GRID, Cell, EvaluateConfig, evaluate
from toffee_dist.evaluation.events import read_events
from toffee_dist.evaluation.report import to_frame, write_report
from toffee_dist.evaluation.steps import FutureConfig, StepCell, future_links, label_steps, read_labels
from toffee_dist.models import ModelOptions
from toffee_dist.schema import ColumnOptions


@dataclass(frozen=True)
class EvaluateJob:
    """One evaluation: what to read, what to compare, where the result goes.

    Parameters
    ----------
    edges
        As for `ingest`.
    config
        Protocols, models, features, seeds, settings, grid.
    out
        A folder that does not exist yet.
    splits
        Where examples are kept for another evaluation; by default inside `out`.
    future
        Which coming steps are asked about; None asks none.
    labels
        A file of labels; None compares none.
    workers
        Processes for models with many tasks; None runs all in this process.
    """

    edges: IngestConfig
    out: Path
    config: EvaluateConfig = field(default_factory=EvaluateConfig)
    splits: Path | None = None
    future: FutureConfig | None = None
    labels: Path | None = None
    workers: int | None = None


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What was evaluated, and every cell."""

    about: dict[str, Any]
    cells: pl.DataFrame
    steps: pl.DataFrame


def run_job(job: EvaluateJob, say: Say = lambda line: None) -> Evaluated:
    """Evaluate, write everything, and return the tables.

    On failure nothing is left but splits that are complete.
    """
    out = job.out.absolute()
    if out.exists():
        raise ConfigError(
            "output folder",
            got=f"{out}, which exists",
            allowed="a folder that does not exist yet",
            remedy="Choose another or remove it.",
        )
    events = read_events(job.edges, say=say)
    labels = None if job.labels is None else read_labels(job.labels, events)
    stage = out.parent / f".{out.name}.{uuid.uuid4().hex[:12]}"
    try:
        stage.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(
            "output folder", got=f"{out}: {error.strerror}", allowed="a place to write"
        ) from None
    try:
        folder = job.splits or stage / "splits"
        with _workers(job.workers) as (run, work):
            found = (
                evaluate(events, job.config, splits=folder, run=run, work=work, say=say)
                if job.config.protocols
                else []
            )
        marks = []
        if job.future is not None:
            marks += future_links(events, job.future, job.config.options, say)
        if labels is not None:
            past = events.past()
            marks += label_steps(past.tensor, labels, job.config.options, past.grid.show, say)
        cells, steps = to_frame(found, Cell), to_frame(marks, StepCell)
        about = {
            "inputs": list(job.edges.inputs),
            "links": len(events),
            "nodes": events.n_nodes,
            "directed": events.directed,
            "fingerprint": events.fingerprint(),
            "config": {
                name: getattr(job.config, name) for name in ("protocols", "models", "features", "seeds")
            },
        }
        write_report(stage, about, cells, steps, Path(job.edges.inputs[0]).name)
        os.rename(stage, out)
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    return Evaluated(about, cells, steps)


@contextmanager
def _workers(count: int | None) -> Iterator[tuple[Run, Path | None]]:
    """Give where tasks run, and the folder through which large arrays travel."""
    if count is None:
        yield run_here, None
        return
    from toffee_dist.runtime import cluster, runner

    with tempfile.TemporaryDirectory(prefix="toffee-") as work, cluster("processes", count) as client:
        yield runner(client), Path(work)


def edges_config(inputs: Sequence[str], options: Mapping[str, Any]) -> IngestConfig:
    """Turn the options of `edge_options` into a config."""
    values = dict(options)
    names = ("source", "target", "time", "weight", "header", "separator", "ids", "bipartite", "zone")
    columns = ColumnOptions(**{name: values.pop(name) for name in names if name in values})
    directed = not values.pop("undirected", False)
    return IngestConfig(inputs=tuple(inputs), columns=columns, directed=directed, **values)


def parse_grid(words: Sequence[str]) -> dict[str, list[Any]]:
    """Read ``rank=64,128`` and the like.

    Examples
    --------
    >>> parse_grid(["rank=64,128", "reg=1e-4,1e-2"])
    {'rank': [64, 128], 'reg': [0.0001, 0.01]}
    """
    grid: dict[str, list[Any]] = {}
    for word in words:
        name, _, values = word.partition("=")
        if name not in GRID or not values:
            raise ConfigError(
                "grid", got=repr(word), allowed=f"NAME=VALUE,VALUE with NAME of {', '.join(GRID)}"
            )
        try:
            grid[name] = [GRID[name](value) for value in values.split(",")]
        except ValueError:
            raise ConfigError(
                f"grid of {name}", got=repr(values), allowed=f"{GRID[name].__name__}s"
            ) from None
    return grid


def make_job(inputs: Sequence[str], out: str, options: Mapping[str, Any]) -> EvaluateJob:
    """Turn the options of the command, or the keys of a TOML file, into a job; what is absent is default."""
    values = dict(options)
    take = values.pop
    model_names = ("rank", "reduce", "gauge", "oversample", "seed")
    chosen = {name: take(name) for name in model_names if name in values}
    if "reg" in values:
        chosen["reg_a"] = chosen["reg_r"] = take("reg")
    names = ("protocols", "models", "features")
    lists: dict[str, Any] = {name: tuple(found) for name in names if (found := take(name, None)) is not None}
    rest = {name: take(name) for name in ("seeds", "first_seed", "classifier") if name in values}
    config = EvaluateConfig(
        **lists, **rest, options=ModelOptions(**chosen), grid=parse_grid(take("grid", ()) or ())
    )
    horizon, period = take("future", None), take("period", 7)
    future = None if horizon is None else FutureConfig(horizon, period)
    splits, labels, workers = take("splits", None), take("labels", None), take("workers", None)
    return EvaluateJob(
        edges=edges_config(inputs, values),
        out=Path(out),
        config=config,
        splits=None if splits is None else Path(splits),
        future=future,
        labels=None if labels is None else Path(labels),
        workers=workers,
    )
