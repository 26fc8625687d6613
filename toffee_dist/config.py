"""Configuration: one set of names for the command line, the TOML file and a run's manifest.

Every field here is a command-line option (``pair_weight`` is ``--pair-weight``) and a TOML key of the same
name; its description is the option's help. Flags override the file, the file overrides the defaults.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from toffee_dist.edges import IngestConfig
from toffee_dist.embedding import step_weights
from toffee_dist.errors import ConfigError, ToffeeError
from toffee_dist.frequencies import parse_freqs
from toffee_dist.schema import ColumnOptions
from toffee_dist.solvers.base import Precision, SolveOptions, SolverName
from toffee_dist.tensor import Entry, PairWeight
from toffee_dist.timegrid import TimeUnit
from toffee_dist.watchdog import STALL

Output = Literal["embedding", "trajectory", "factors", "spectrum"]


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _split(value: object) -> object:
    """Read ``a,b`` and ``["a,b", "c"]`` as three words."""
    words = _several(value)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    return tuple(part.strip() for word in words for part in word.split(","))


Several = BeforeValidator(_several)
Split = BeforeValidator(_split)


class Settings(BaseModel):
    """What every part of the configuration is: checked, closed and frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)

    @classmethod
    def read(cls, given: Mapping[str, Any], file: str | None = None) -> Self:
        """Merge a TOML file with what was given (which wins), and check all of it.

        Parameters
        ----------
        given
            By field name; None means not given.
        file
            Path of a TOML file, or None.

        Raises
        ------
        ConfigError
            Which names the wrong value, or for an unknown name the nearest known one.
        """
        values = _read_toml(file) if file is not None else {}
        values |= {name: value for name, value in given.items() if value is not None}
        try:
            return cls(**values)
        except ValidationError as error:
            raise _explain(error.errors()[0], list(cls.model_fields), file) from None


class EdgeSettings(Settings):
    """What is read, and what it means."""

    inputs: Annotated[tuple[str, ...], Several] = Field(
        (), description="Files, folders, globs or fsspec URLs."
    )
    source: str | None = Field(None, description="Source column, by name or by position from 1.")
    target: str | None = Field(None, description="Target column.")
    time: str | None = Field(None, description="Time column.")
    weight: str | None = Field(None, description="Weight column; read with --entry sum only.")
    header: Literal["auto", "yes", "no"] = Field("auto", description="Whether text files have a header.")
    separator: str = Field("auto", description="Of text: one character.")
    ids: Literal["auto", "integer", "string"] = Field("auto", description="What node ids are.")
    bipartite: bool = Field(False, description="Sources and targets are two spaces of nodes.")
    undirected: bool = Field(False, description="(i, j) and (j, i) are the same edge.")
    entry: Entry = Field(
        "binary",
        description="What repeated rows become: 1, their number, or the sum of their weights (negative "
        "ones too).",
    )
    pair_weight: PairWeight = Field("unit", description="What the total of a pair over time is scaled to.")
    step: str = Field(
        "1d",
        description="Length of a step: 6h, 1d, 1w (weeks start on Monday); a whole number for plain-number "
        "times; distinct: a step for every distinct time; bins:64: that many equal steps.",
    )
    since: str | None = Field(None, description="First moment to read: a date, timestamp or number.")
    until: str | None = Field(None, description="First moment not to read any more.")
    last: str | None = Field(None, description="The last 90d, 4w, 12h, … up to the newest edge.")
    time_unit: TimeUnit = Field(
        "auto", description="What a number in the time column is; number has no calendar."
    )
    zone: str = Field("UTC", description="Whose days and wall clock: Europe/Athens.")
    on_bad_rows: Literal["error", "skip"] = Field("error", description="What rows that are no edges cause.")
    known: str | None = Field(None, description="An earlier ingest or run: its nodes keep their rows.")

    def ingest_config(self) -> IngestConfig:
        """Return what the ingest takes."""
        names = ("source", "target", "time", "weight", "header", "separator", "ids", "bipartite", "zone")
        rest = ("entry", "pair_weight", "step", "since", "until", "last", "time_unit", "on_bad_rows", "known")
        return IngestConfig(
            inputs=self.inputs,
            columns=ColumnOptions(**{name: getattr(self, name) for name in names}),
            directed=not self.undirected,
            **{name: getattr(self, name) for name in rest},
        )


class ModelSettings(Settings):
    """What is computed."""

    outputs: Annotated[tuple[Output, ...], Split] = Field(
        ("embedding",), description="Any of embedding,trajectory,factors,spectrum."
    )
    model: Literal["toffee", "toffee-", "tsvd", "rescal"] = Field(
        "toffee",
        description="toffee; toffee- (the same with λ = 0); tsvd and rescal, which give an embedding only.",
    )
    rank: int = Field(128, description="Length of a vector.")
    reduce: str = Field(
        "sum", description="What one vector a node sums over: sum, last:N or decay:HALF_LIFE, in steps."
    )
    freqs: str = Field(
        "auto", description="Frequencies of the trajectory: auto, all, lowest:K or strongest:K."
    )
    gauge: Literal["canonical", "none"] = Field(
        "canonical", description="canonical: comparable axes; none: the paper's raw A·R."
    )
    reg_a: float = Field(0.01, description="λ_A; with reg_r, both positive or both zero.")
    reg_r: float = Field(0.01, description="λ_R.")
    solver: SolverName = Field("auto", description="How a slice is solved.")
    tol: float = Field(1e-4, description="Converged when an iteration lowers the objective by less.")
    max_iter: int = Field(100, description="Iterations a slice at the most.")
    precision: Precision = Field("single", description="Of n-sized arrays.")
    bound: bool = Field(False, description="Also compute each slice's lower bound, and its gap.")
    seed: int = Field(0, description="Of all random numbers.")

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what the parts of the engine would refuse, before anything is read."""
        self.solve_options()
        parse_freqs(self.freqs)
        step_weights(self.reduce, 1)
        if not self.outputs:
            raise ConfigError("outputs", got="none", allowed="embedding, trajectory, factors, spectrum")
        if self.model in ("tsvd", "rescal") and set(self.outputs) - {"embedding", "spectrum"}:
            raise ConfigError(
                f"outputs of model {self.model}",
                got=", ".join(self.outputs),
                allowed="embedding, spectrum",
                remedy="Over time, use --model toffee.",
            )

    def solve_options(self) -> SolveOptions:
        """Return what the solvers take."""
        names = ("rank", "reg_a", "reg_r", "solver", "tol", "max_iter", "precision", "bound", "seed")
        options = SolveOptions(**{name: getattr(self, name) for name in names})
        return replace(options, reg_a=0.0, reg_r=0.0) if self.model == "toffee-" else options


class RuntimeSettings(Settings):
    """Where it runs. Nothing here changes a byte of the results."""

    mode: str = Field(
        "auto",
        description="auto, threads, processes, or a running cluster: tcp://host:port, tls://host:port.",
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="Threads or processes (default: one a core); of a cluster, how many to wait for.",
    )
    wait: float = Field(
        60.0, gt=0, description="Seconds to wait for workers, at the start and when all are lost."
    )
    stall: float = Field(
        STALL,
        ge=0,
        description="Seconds in which no task ends and none begins before the job gives up; 0: never.",
    )
    memory: str | None = Field(
        None, description="What one worker may use, such as 8GiB; default: what it has."
    )
    tls_ca: str | None = Field(None, description="Certificate of the authority, for tls://.")
    tls_cert: str | None = Field(None, description="Certificate of this client.")
    tls_key: str | None = Field(None, description="Key of this client.")


class JobConfig(EdgeSettings, ModelSettings, RuntimeSettings):
    """The whole batch job."""

    out: str = Field("", description="Folder of the runs; results are found through its latest.json.")
    keep_work: bool = Field(False, description="Keep the staged tensor and the slices after publishing.")
    report: bool = Field(True, description="Leave report.html, a page of plots, beside the vectors.")

    def identity(self) -> str:
        """Return a digest of all that decides the bytes of the results: not where it runs or goes."""
        names = {*EdgeSettings.model_fields, *ModelSettings.model_fields}
        text = json.dumps(self.model_dump(mode="json", include=names), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class RefreshSettings(Settings):
    """What a refresh does beyond the batch job: its night, its limits, what it keeps."""

    as_of: str | None = Field(
        None,
        description="Steps that are over by this moment count (default: now): a date, timestamp or number.",
    )
    fresh: bool = Field(False, description="Follow no earlier run: new rows, new axes, a new reference.")
    reference: str | None = Field(
        None, description="Run that chain drift is measured against; default: the first of the chain."
    )
    warm: bool = Field(True, description="Start from the slices of the run before.")
    holdout: int = Field(
        1, ge=0, description="New steps at the end whose links test the vectors; 0 tests none."
    )
    # The limits stand well apart from good nights. Over 30 of them (benchmarks/refresh.py, mathoverflow by
    # weeks) the AUC was at most 0.014 below the last run's, coverage at least 0.997, the median cosine 0.970,
    # and the share of energy fell by at most 0.0012.
    min_links: int = Field(50, ge=1, description="Held-out links below which they are not judged.")
    max_auc_drop: float = Field(
        0.05, ge=0, le=1, description="How far the AUC of held-out links may be below the last run's."
    )
    min_coverage: float = Field(
        0.5, ge=0, description="Active nodes at the least, as a share of the last run's."
    )
    min_cosine: float = Field(
        0.7, ge=-1, le=1, description="Median cosine at the least between a node's vectors in both runs."
    )
    max_energy_drop: float = Field(
        0.1, ge=0, le=1, description="How far the share of energy explained may be below the last run's."
    )
    keep: int = Field(14, ge=1, description="Published runs to keep, beside the reference.")
    expire: str | None = Field(
        None,
        description="Forget nodes, and their rows, without an edge for this long: 365d; default: never.",
    )


class RefreshConfig(JobConfig, RefreshSettings):
    """The nightly job. Window and known nodes are found by the refresh itself."""

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what would make two nights incomparable."""
        super().model_post_init(context)
        if "embedding" not in self.outputs:
            raise ConfigError(
                "outputs of a refresh",
                got=", ".join(self.outputs),
                allowed="embedding, and others beside it",
                remedy="Nights are compared by their embedding.",
            )


def _read_toml(file: str) -> dict[str, Any]:
    try:
        values = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError("config file", got=f"{file}: {error.strerror}", allowed="a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError("config file", got=f"{file}: {error}", allowed="TOML: name = value") from None
    return {name.replace("-", "_"): value for name, value in values.items()}


def _explain(error: Any, known: list[str], file: str | None) -> ToffeeError:
    """Turn pydantic's words into ours: what, which value, what is allowed, what to do."""
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ToffeeError):
        return cause
    name = ".".join(str(part) for part in error["loc"][:1]) or "configuration"
    where = f" in {file}" if file is not None else ""
    if error["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
        return ConfigError(
            f"unknown name{where}",
            got=name,
            allowed="the names of the options",
            remedy=f"Did you mean {near[0]}?",
        )
    if error["type"] == "literal_error":
        allowed = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
    else:
        allowed = error["msg"].removeprefix("Input should be ")
    return ConfigError(f"{name}{where}", got=repr(error["input"]), allowed=allowed)
