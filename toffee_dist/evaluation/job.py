"""One evaluation as a job: options or a TOML file in, a folder of results out."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import polars as pl
from pydantic import Field
from threadpoolctl import threadpool_limits

from toffee_dist.cluster.client import check_mode
from toffee_dist.errors import ConfigError
from toffee_dist.evaluation.classify import Classifier
from toffee_dist.evaluation.compare import GRID, Cell, EvaluateConfig, evaluate
from toffee_dist.evaluation.events import Events, read_events
from toffee_dist.evaluation.in_time import (
    MODELS_IN_TIME,
    Entries,
    InTimeCell,
    ask_in_time,
    check_models,
    choose,
)
from toffee_dist.evaluation.labels import label_steps, read_labels
from toffee_dist.evaluation.report import to_frame, write_results
from toffee_dist.evaluation.steps import FutureConfig, StepCell, future_links
from toffee_dist.models import MODELS
from toffee_dist.settings import (
    EdgeSettings,
    FitSettings,
    OutSettings,
    RuntimeSettings,
    Several,
    Split,
    shown,
)
from toffee_dist.storage.files import check_parent, check_writable, move_tree, scratch
from toffee_dist.storage.paths import as_remote, to_path
from toffee_dist.tasks import RunTasks, Say, run_here
from toffee_dist.words import hide_in, hide_secrets


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
    in_time
        Models that are asked about hidden entries of single steps; none: nothing is asked.
    where
        Where the tasks of the fits run; by default all in this process.
    cache
        Where fits and cells are kept, so that an evaluation that was interrupted goes on; None keeps nothing.
    """

    edges: EdgeSettings
    out: Path
    config: EvaluateConfig = field(default_factory=EvaluateConfig)
    splits: Path | None = None
    future: FutureConfig | None = None
    labels: Path | None = None
    in_time: tuple[str, ...] = ()
    where: RuntimeSettings = field(default_factory=RuntimeSettings)
    cache: Path | None = None


@dataclass(frozen=True, eq=False)
class Evaluated:
    """What was evaluated, and every cell."""

    about: dict[str, Any]
    cells: pl.DataFrame
    steps: pl.DataFrame
    in_time: pl.DataFrame


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
    if job.splits is not None:
        check_parent(job.splits, "--splits")
    if job.cache is not None:
        check_parent(job.cache, "--cache")
    events = read_events(job.edges, say=say)
    labels = None if job.labels is None else read_labels(job.labels, events)
    check_writable(out.parent if as_remote(out) is None else out)
    # Written beside its place and moved there; what goes to a store is written here, and copied.
    beside = out.parent if as_remote(out) is None else Path(tempfile.gettempdir())
    # One thread of BLAS, as in the workers: the bytes of a fit must not depend on where it ran.
    with scratch(beside, f".{out.name}.") as stage, threadpool_limits(1, user_api="blas"):
        folder = job.splits or stage / "splits"
        with _workers(job) as (run, work):
            found = (
                evaluate(events, job.config, splits=folder, run=run, work=work, cache=job.cache, say=say)
                if job.config.protocols
                else []
            )
        marks = []
        if job.future is not None:
            marks += future_links(events, job.future, job.config.options, say)
        seeds = range(job.config.first_seed, job.config.first_seed + job.config.seeds)
        weighted = replace(events, pair_weight="log") if job.edges.pair_weight == "auto" else events
        if labels is not None:
            past, options = weighted.past(), job.config.options
            methods = _label_methods(weighted, job.in_time, options)
            marks += label_steps(past.tensor, labels, options, past.grid.show, say, methods)
        hidden = []
        if job.in_time:
            hidden = ask_in_time(weighted, job.in_time, job.config.options, seeds, say, job.cache)
        cells, steps = to_frame(found, Cell), to_frame(marks, StepCell)
        in_time = to_frame(hidden, InTimeCell)
        about = {
            "inputs": hide_in(list(job.edges.inputs)),
            "links": len(events),
            "nodes": events.n_nodes,
            "directed": events.directed,
            "fingerprint": events.fingerprint(),
            "config": {
                name: getattr(job.config, name) for name in ("protocols", "models", "features", "seeds")
            },
        }
        write_results(stage, about, cells, steps, in_time, Path(hide_secrets(job.edges.inputs[0])).name)
        move_tree(stage, out)
    return Evaluated(about, cells, steps, in_time)


def _label_methods(
    events: Events, models: Sequence[str], options: FitSettings
) -> dict[str, tuple[str, float | None]] | None:
    """Return the models whose vectors are compared with labels; a bandwidth is chosen on hidden entries."""
    named = [name for name in models if MODELS[name].fit_in_time and name not in SAME_VECTORS]
    if not models:
        return None
    if not named:
        raise ConfigError(
            "model with --labels", got=", ".join(models), allowed="at least one with vectors, such as toffee"
        )
    entries = Entries.of(replace(events, pair_weight="raw").past().tensor)
    return {
        name: (
            name,
            choose(MODELS[name], entries, events.pair_weight, options, options.seed)[0]
            if MODELS[name].smoothing
            else None,
        )
        for name in named
    }


@contextmanager
def _workers(job: EvaluateJob) -> Iterator[tuple[RunTasks, Path | None]]:
    """Give where tasks run, and the folder through which large arrays travel."""
    where = job.where
    if where.mode == "auto" and where.workers is None:
        yield run_here, None
        return
    # Saves start-up time.
    from toffee_dist.cluster.client import open_cluster
    from toffee_dist.cluster.mapping import runner

    mode = "processes" if where.mode == "auto" else where.mode
    with ExitStack() as stack:
        if job.cache is not None:
            # Seen by the workers of a running cluster too, if the user has chosen well.
            job.cache.mkdir(parents=True, exist_ok=True)
            work = stack.enter_context(scratch(job.cache.absolute(), "work-", mode=0o700))
        else:
            work = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="toffee-")))
        client = stack.enter_context(open_cluster(where.changed(mode=mode)))
        yield runner(client, wait=where.wait, stall=where.stall), work


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


_DEFAULT = EvaluateConfig()
_GROUP = shown("Evaluation")
Protocol = Literal["link-paper", "link-new", "link-hard", "in-time", "none"]
IN_TIME = "in-time"
# Their vectors are those of another model: only scores of pairs differ.
SAME_VECTORS = ("toffee-pairs",)
# What `--model all` stands for.
ALL = "all"
ALL_MODELS = tuple(name for name, model in MODELS.items() if model.fit or model.score)
ALL_IN_TIME = tuple(name for name, model in MODELS.items() if model.fit_in_time or name == "pair-count")


class EvaluateSettings(EdgeSettings, FitSettings, RuntimeSettings, OutSettings):
    """Options of `toffee evaluate`, and keys of its TOML file."""

    protocol: Annotated[tuple[Protocol, ...], Split] = Field(
        ("link-paper",),
        description="What is asked: link-paper, link-new, link-hard (pairs of the future); in-time (who is "
        "linked at a step, and when a pair is); none: only --future or --labels.",
        json_schema_extra=_GROUP,
    )
    model: Annotated[tuple[str, ...], Split] = Field(
        (),
        description=f"Which models to compare: {', '.join(MODELS)}; all: every one that suits the protocol "
        "(default: the quick ones).",
        json_schema_extra=_GROUP,
    )
    features: Annotated[tuple[str, ...], Split] = Field(
        _DEFAULT.features,
        description="How the vectors of a pair become features: average, hadamard, weighted-l1, weighted-l2, "
        "combined (all four), scores; joined by +.",
        json_schema_extra=_GROUP,
    )
    classifier: Classifier = Field(
        "logistic", description="Classifier of the features.", json_schema_extra=_GROUP
    )
    seeds: int = Field(
        _DEFAULT.seeds, ge=1, description="Number of draws of examples.", json_schema_extra=_GROUP
    )
    first_seed: int = Field(
        _DEFAULT.first_seed,
        ge=0,
        description="Random seed of the first draw of examples.",
        json_schema_extra=_GROUP,
    )
    reg: float | None = Field(
        None,
        description="Regularisation λ_A and λ_R at once, instead of --reg-a and --reg-r.",
        json_schema_extra=shown("Model"),
    )
    grid: Annotated[tuple[str, ...], Several] = Field(
        (),
        description=f"NAME=V,V: choose among values of {', '.join(GRID)}, on a validation part cut from the "
        "learning time.",
        json_schema_extra=_GROUP,
    )
    splits: str | None = Field(
        None,
        description="Folder of examples: read where they are there, else written.",
        json_schema_extra=shown("Evaluation", "DIR"),
    )
    future: int | None = Field(
        None, ge=1, description="Predict the links of this many last steps.", json_schema_extra=_GROUP
    )
    period: int = Field(
        7, ge=2, description="Length of the rhythm of --future, in steps.", json_schema_extra=_GROUP
    )
    cache: str | None = Field(
        None,
        description="Folder that keeps fits and scores: what is there is not computed again, so that an "
        "evaluation that was interrupted goes on.",
        json_schema_extra=shown("Evaluation", "DIR"),
    )
    labels: str | None = Field(
        None,
        description="Parquet, CSV or TSV file with node, label and perhaps step: how well vectors of each "
        "step know them; with in-time, those of its models.",
        json_schema_extra=shown("Evaluation", "FILE"),
    )
    mode: str = Field(
        "auto",
        description="Where the fits run: auto (this process, or --workers of them), threads, processes, or a "
        "running cluster that sees --cache: tcp://host:port, tls://host:port.",
        json_schema_extra=shown("Cluster"),
    )

    def job(self) -> EvaluateJob:
        """Return what `run_job` takes, all of it checked."""
        protocols = tuple(name for name in self.protocol if name not in ("none", IN_TIME))
        wanted = ALL_MODELS if ALL in self.model else self.model
        in_time: tuple[str, ...] = ()
        if IN_TIME in self.protocol:
            in_time = ALL_IN_TIME if ALL in self.model else self.model or MODELS_IN_TIME
        check_models(in_time)
        if not protocols and not in_time and self.future is None and self.labels is None:
            raise ConfigError("protocol none", got="nothing else", allowed="it needs --future or --labels")
        if not self.out:
            raise ConfigError(
                "out", got="nothing", allowed="a folder for the result", remedy="Add --out DIR."
            )
        check_mode(self.mode)
        if "://" in self.mode and self.cache is None:
            raise ConfigError(
                "mode",
                got=f"{self.mode} without --cache",
                allowed="a folder through which large arrays travel",
                remedy="Add --cache DIR, on storage that every worker sees.",
            )
        options = self.only(FitSettings)
        if self.reg is not None:
            options = options.changed(reg_a=self.reg, reg_r=self.reg)
        config = EvaluateConfig(
            protocols,
            models=wanted or _DEFAULT.models,
            features=self.features,
            classifier=self.classifier,
            seeds=self.seeds,
            first_seed=self.first_seed,
            options=options,
            grid=parse_grid(self.grid),
        )
        return EvaluateJob(
            edges=self.only(EdgeSettings),
            out=to_path(self.out),
            config=config,
            splits=None if self.splits is None else Path(self.splits),
            future=None if self.future is None else FutureConfig(self.future, self.period),
            labels=None if self.labels is None else Path(self.labels),
            in_time=in_time,
            where=self.only(RuntimeSettings),
            cache=None if self.cache is None else Path(self.cache),
        )
