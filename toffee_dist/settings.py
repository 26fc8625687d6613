"""Configuration: every option once, for the command line, the TOML file, Python and a run's manifest.

Every field here is a command-line option (``pair_weight`` is ``--pair-weight``) and a TOML key of the same
name; its description is the option's help. Flags override the file, the file overrides the defaults. Nothing
of the package but its errors is imported here, so that everything else may import this.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import math
import re
import stat
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, Self, TypeVar
from zoneinfo import ZoneInfo

import numpy as np
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from toffee_dist.errors import ConfigError, ToffeeError

Entry = Literal["binary", "count", "sum"]
PairWeight = Literal["raw", "log", "unit"]
# `auto` is one of the others, by what is asked for.
PairWeightOption = Literal["auto", "raw", "log", "unit"]
TimeUnit = Literal["auto", "s", "ms", "us", "ns", "number"]
SolverName = Literal["auto", "als", "closed_form", "compressed"]
Precision = Literal["single", "double"]
Gauge = Literal["canonical", "none"]
ModelName = Literal["toffee", "toffee-", "toffee-paper", "tsvd", "rescal", "tne", "ctdne", "htne", "hnip"]
HistoryKernel = Literal["decaying", "growing"]
SnapshotLinks = Literal["cumulative", "own"]
TneStep = Literal["search", "published"]
TrajectoryBy = Literal["filter", "als"]
Basis = Literal["sum", "energy"]
Output = Literal["embedding", "trajectory", "factors", "spectrum"]
DenseNodes = Literal["all", "active"]
DensePrecision = Literal["single", "half"]
VectorLists = Literal["fixed", "list"]
OnBadRows = Literal["error", "skip"]
Header = Literal["auto", "yes", "no"]
IdType = Literal["auto", "integer", "string"]

# The outputs that each model can give. The spectrum is that of the graph, whatever the model.
MODEL_OUTPUTS: dict[str, tuple[Output, ...]] = {
    "toffee": ("embedding", "trajectory", "factors", "spectrum"),
    "toffee-": ("embedding", "trajectory", "factors", "spectrum"),
    "toffee-paper": ("embedding", "spectrum"),
    "tsvd": ("embedding", "spectrum"),
    "rescal": ("embedding", "spectrum"),
    "tne": ("embedding", "spectrum"),
    "ctdne": ("embedding", "spectrum"),
    "htne": ("embedding", "spectrum"),
    "hnip": ("embedding", "spectrum"),
}

Preset = Literal["paper"]
# What a preset stands for; what is given beside it counts more.
PRESETS: dict[str, dict[str, Any]] = {
    "paper": {
        "model": "toffee-paper",
        "entry": "count",
        "pair_weight": "raw",
        "gauge": "none",
        "solver": "als",
    }
}

# More steps than this is a mistake in the unit or the step, not a time axis.
MAX_STEPS = 1_000_000
# Walks per node, nodes of a walk and the like: more is a mistake. exp(-500) is still a number.
MAX_RIVAL, MAX_DECAY = 10_000, 500
# R is rank × rank: 8 GB at this one.
MAX_RANK = 32_768
# Seconds that anybody waits for: a year.
LONGEST_WAIT = 31_536_000
# Seconds without progress that are too many, where nobody says otherwise: more than any task should take.
STALL = 14_400.0
DURATIONS = "a whole number and s, m, h, d or w, such as 6h, 1d, 1w, up to 10,000 years"
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
# A longer time than the calendar has is a mistake.
LONGEST_SECONDS = 10_000 * 366 * 86400
# Numbers of a time column are 64-bit; a longer word is none of them.
LONGEST_NUMBER = 18
# A configuration is some lines of text. What is larger, endless or not a file is refused before it is read.
MAX_CONFIG_BYTES = 1 << 20

# The name of a run: words joined by . or -, so that it is one part of a path and never leads out of a folder.
RUN_NAME = r"[0-9A-Za-z]+([.-][0-9A-Za-z]+)*"

_DURATION = re.compile(rf"(\d{{1,{LONGEST_NUMBER}}})\s*([smhdw])")
S = TypeVar("S", bound="Settings")


def parse_duration(text: str) -> tuple[int, str] | None:
    """Return the count and the unit of ``6h``, ``1d``, ``1w``; else None; too long is None too.

    Examples
    --------
    >>> parse_duration("6h"), parse_duration("soon")
    ((6, 'h'), None)
    """
    match = _DURATION.fullmatch(text)
    if match is None or int(match[1]) * SECONDS[match[2]] > LONGEST_SECONDS:
        return None
    return int(match[1]), match[2]


def is_count(text: str, largest: int = 10**LONGEST_NUMBER - 1) -> bool:
    """Tell whether a text is a whole number from 1 to `largest`."""
    return text.isdecimal() and len(text) <= LONGEST_NUMBER and 1 <= int(text) <= largest


def check_step(step: str) -> None:
    """Refuse a step that no data could make sense of, before anything is read."""
    if step == "distinct" or step.isdecimal():
        good = step == "distinct" or is_count(step)
    elif step.startswith("bins:"):
        good = is_count(step[5:], MAX_STEPS)
    else:
        duration = parse_duration(step)
        good = duration is not None and duration[0] > 0
    if not good:
        raise ConfigError(
            "step",
            got=repr(step),
            allowed=f"{DURATIONS}; a whole number for plain-number times; bins:N; distinct",
        )


def check_last(last: str) -> None:
    """Refuse a rolling window that no data could make sense of, before anything is read."""
    duration = parse_duration(last)
    if not is_count(last) and (duration is None or duration[0] == 0):
        raise ConfigError(
            "last", got=repr(last), allowed=f"{DURATIONS}; a whole number for plain-number times"
        )


def check_zone(zone: str) -> str:
    """Return the zone, or say that no such zone exists."""
    try:
        ZoneInfo(zone)
    except (KeyError, ValueError, OSError):
        raise ConfigError(
            "zone", got=repr(zone), allowed="an IANA zone such as UTC or Europe/Athens"
        ) from None
    return zone


def parse_freqs(spec: str) -> tuple[str, int]:
    """Return (kind, K) of ``auto``, ``all``, ``lowest:K`` or ``strongest:K``."""
    kind, _, text = spec.partition(":")
    if spec in ("auto", "all"):
        return spec, 0
    if kind in ("lowest", "strongest") and is_count(text):
        return kind, int(text)
    raise ConfigError("freqs", got=repr(spec), allowed="auto, all, lowest:K or strongest:K")


def parse_dense(spec: str) -> tuple[str, tuple[int, ...]]:
    """Return the kind and the numbers of ``auto``, ``all``, ``none``, ``last:N``, ``every:K`` or ``0,7,14``.

    Examples
    --------
    >>> parse_dense("every:7"), parse_dense("0,7")
    (('every', (7,)), ('steps', (0, 7)))
    """
    kind, _, text = spec.partition(":")
    if spec in ("auto", "all", "none"):
        return spec, ()
    if kind in ("last", "every") and is_count(text, MAX_STEPS):
        return kind, (int(text),)
    words = [word.strip() for word in spec.split(",")]
    if all(word.isdecimal() and len(word) <= LONGEST_NUMBER for word in words):
        return "steps", tuple(sorted({int(word) for word in words}))
    raise ConfigError("dense", got=repr(spec), allowed="auto, all, none, last:N, every:K, or steps: 0,7,14")


class Reduction(NamedTuple):
    """What is summed over time: ``sum``, ``last`` or ``decay``, of how many steps or which share of them."""

    kind: Literal["sum", "last", "decay"]
    amount: float = 0.0
    share: bool = False


def parse_reduce(spec: str, *, shares: bool = False) -> Reduction:
    """Read ``sum``, ``last:N`` or ``decay:HALF_LIFE``, in steps; with `shares`, also ``decay:5%``.

    Examples
    --------
    >>> parse_reduce("last:7")
    Reduction(kind='last', amount=7.0, share=False)
    """
    kind, _, text = spec.partition(":")
    share = shares and text.endswith("%")
    if spec == "sum":
        return Reduction("sum")
    if share or kind == "decay":
        try:
            amount = float(text.removesuffix("%")) if share else float(text)
        except ValueError:
            amount = 0.0
    else:
        amount = float(text) if is_count(text) else 0.0
    if kind in ("last", "decay") and 0 < amount < math.inf:
        return Reduction("last" if kind == "last" else "decay", amount, share)
    allowed = "sum, last:N or decay:HALF_LIFE, counted in steps"
    if shares:
        allowed += " or as a share of the time (decay:5%); several joined by +"
    raise ConfigError("reduce", got=repr(spec), allowed=allowed)


def _several(value: object) -> object:
    return (value,) if isinstance(value, str) else value


def _split(value: object) -> object:
    """Read ``a,b`` and ``["a,b", "c"]`` as three words."""
    words = _several(value)
    if not isinstance(words, list | tuple) or not all(isinstance(word, str) for word in words):
        return value
    return tuple(part.strip() for word in words for part in word.split(","))


def _separator(value: object) -> object:
    """Take a backslash and a t for a tab: shells hand them on as they are."""
    value = "\t" if value == "\\t" else value
    if isinstance(value, str) and value != "auto":
        if len(value) != 1 or not value.isascii() or value in '"\r\n\0':
            raise ConfigError(
                "separator", got=repr(value), allowed="auto, one ASCII character, or \\t for a tab"
            )
    return value


def _whole(value: object) -> object:
    """Take NumPy's integers for integers, and neither True nor 2.0."""
    if isinstance(value, bool | float):
        raise ValueError("a whole number")
    return int(value) if isinstance(value, np.integer) else value


Several = BeforeValidator(_several)
Split = BeforeValidator(_split)
Whole = Annotated[int, BeforeValidator(_whole)]


def shown(group: str, metavar: str = "") -> dict[str, Any]:
    """Return what the command line shows an option with: its group in the help, and what its value is."""
    return {"group": group, "metavar": metavar}


INPUT, TIME, MODEL, OUTPUT = shown("Input"), shown("Time"), shown("Model"), shown("Output")
CLUSTER, REFRESH, RIVALS = shown("Cluster"), shown("Refresh"), shown("Other models")
TOLD = shown("Who is told")


class Settings(BaseModel):
    """What every part of the configuration is: checked, closed, frozen and hashable."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False, allow_inf_nan=False)

    # Type checkers see the keywords that pydantic makes of the fields.
    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            self._fill(values)

    def _fill(self, values: Mapping[str, Any], file: str | None = None) -> None:
        preset = PRESETS.get(str(values.get("preset")), {}) if "preset" in type(self).model_fields else {}
        try:
            super().__init__(**{**preset, **values})
        except ValidationError as error:
            raise _explain(error.errors()[0], list(type(self).model_fields), file) from None

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
        settings = cls.__new__(cls)
        settings._fill(values, file)
        return settings

    def only(self, kind: type[S]) -> S:
        """Return the part of it that `kind` has."""
        names = type(self).model_fields.keys() & kind.model_fields.keys()
        return kind(**{name: getattr(self, name) for name in names})

    def changed(self, **values: Any) -> Self:
        """Return it with other values, checked."""
        return type(self)(**{name: getattr(self, name) for name in type(self).model_fields} | values)


class InputSettings(Settings):
    """What is read."""

    inputs: Annotated[tuple[str, ...], Several] = Field(
        (), description="Files, folders, globs or fsspec URLs.", json_schema_extra=INPUT
    )


class EdgeSettings(InputSettings):
    """What is read, and what it means.

    Self-loops are kept and counted. Rows that repeat (source, target, step) become one entry and are counted.
    Rows need no order in time. Weights are read for ``entry="sum"`` only, where they may be negative; a sum
    of exactly zero is no entry, and is counted. The window is [since, until).
    """

    source: str | None = Field(
        None, description="Source column, by name or by position from 1.", json_schema_extra=INPUT
    )
    target: str | None = Field(
        None, description="Target column, by name or by position from 1.", json_schema_extra=INPUT
    )
    time: str | None = Field(
        None, description="Time column, by name or by position from 1.", json_schema_extra=INPUT
    )
    weight: str | None = Field(
        None, description="Weight column; read with --entry sum only.", json_schema_extra=INPUT
    )
    header: Header = Field("auto", description="Whether text files have a header.", json_schema_extra=INPUT)
    separator: Annotated[str, BeforeValidator(_separator)] = Field(
        "auto",
        description="Separator of text files: one character, or \\t for a tab.",
        json_schema_extra=INPUT,
    )
    ids: IdType = Field("auto", description="Type of the node ids.", json_schema_extra=INPUT)
    bipartite: bool = Field(
        False, description="Treat sources and targets as two separate sets of nodes.", json_schema_extra=INPUT
    )
    undirected: bool = Field(
        False, description="Treat (i, j) and (j, i) as the same edge.", json_schema_extra=INPUT
    )
    entry: Entry = Field(
        "binary",
        description="What repeated rows become: 1, their number, or the sum of their weights (negative "
        "ones too).",
        json_schema_extra=INPUT,
    )
    # Link prediction from the sum is best with unit (benchmarks/defaults.py), in time unit is the worst
    # (benchmarks/intime.py --weight): a pair seen once becomes a spike as tall as a friendship of a year.
    pair_weight: PairWeightOption = Field(
        "auto",
        description="What the total s of a pair over time is scaled to: raw (s), log (log(1+s)) or unit (1); "
        "auto: log where a filtered trajectory is asked for, raw where it is causal, else unit.",
        json_schema_extra=INPUT,
    )
    step: str = Field(
        "1d",
        description="Length of a step: 6h, 1d, 1w (weeks start on Monday); a whole number for plain-number "
        "times; distinct: one step per distinct time; bins:64: that many equal steps.",
        json_schema_extra=TIME,
    )
    since: str | None = Field(
        None, description="First moment to read: a date, timestamp or number.", json_schema_extra=TIME
    )
    until: str | None = Field(
        None,
        description="First moment that is not read: a date, timestamp or number.",
        json_schema_extra=TIME,
    )
    last: str | None = Field(
        None, description="Read the last 90d, 4w, 12h, … up to the newest edge.", json_schema_extra=TIME
    )
    time_unit: TimeUnit = Field(
        "auto",
        description="What a number in the time column counts; number: no calendar.",
        json_schema_extra=TIME,
    )
    zone: str = Field(
        "UTC",
        description="Time zone of days, weeks and timestamps without a zone, such as Europe/Athens.",
        json_schema_extra=TIME,
    )
    on_bad_rows: OnBadRows = Field(
        "error",
        description="What to do about invalid rows: refuse the input, or leave them out and count them.",
        json_schema_extra=INPUT,
    )
    known: str | None = Field(
        None,
        description="Folder of an earlier ingest or run, whose nodes keep their rows.",
        json_schema_extra=shown("Input", "DIR"),
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what no input could make sense of, before anything is read."""
        super().model_post_init(context)
        if self.last is not None and self.since is not None:
            raise ConfigError("--last and --since", got="both", allowed="one of them")
        if self.weight is not None and self.entry != "sum":
            raise ConfigError(
                "--weight", got=f"entry {self.entry}", allowed="entry sum", remedy="Add --entry sum."
            )
        check_step(self.step)
        check_zone(self.zone)
        if self.last is not None:
            check_last(self.last)

    @property
    def weight_of_pairs(self) -> PairWeight:
        """The weight of pairs; that of a sum where nothing else is asked for."""
        return "unit" if self.pair_weight == "auto" else self.pair_weight

    @property
    def directed(self) -> bool:
        """Whether (i, j) differs from (j, i)."""
        return not self.undirected


class SolverSettings(Settings):
    """How slices are solved.

    λ_A and λ_R are both positive or both zero: with one of them zero, scaling A up and R down, or the
    reverse, takes the other's penalty to zero, and the minimum is not attained. Slice k draws from the stream
    of (seed, k).
    """

    rank: Whole = Field(
        128,
        description="Length of a vector; above the number of nodes, spare columns are zero.",
        json_schema_extra=MODEL,
    )
    reg_a: float = Field(
        0.01,
        description="Regularisation λ_A; with --reg-r, both positive or both zero.",
        json_schema_extra=MODEL,
    )
    reg_r: float = Field(
        0.01,
        description="Regularisation λ_R; with --reg-a, both positive or both zero.",
        json_schema_extra=MODEL,
    )
    solver: SolverName = Field(
        "auto",
        description="How a slice is solved: als is the paper's; closed_form is exact, for symmetric slices; "
        "compressed solves a small core first; auto: closed_form where it exists, else compressed.",
        json_schema_extra=MODEL,
    )
    tol: float = Field(
        1e-4,
        description="A slice has converged when an iteration lowers its objective by less than this share.",
        json_schema_extra=MODEL,
    )
    max_iter: Whole = Field(100, description="Most iterations per slice.", json_schema_extra=MODEL)
    precision: Precision = Field(
        "single",
        description="Precision of the n×r arrays; r×r algebra is always double.",
        json_schema_extra=MODEL,
    )
    bound: bool = Field(
        False,
        description="Also compute the lower bound of each slice's objective, and the gap to it.",
        json_schema_extra=MODEL,
    )
    seed: Whole = Field(0, description="Random seed.", json_schema_extra=MODEL)

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what no solver can work with."""
        super().model_post_init(context)
        _check("rank", self.rank, 1 <= self.rank <= MAX_RANK, f"an integer from 1 to {MAX_RANK:,}")
        _check("max_iter", self.max_iter, self.max_iter >= 1, "an integer from 1")
        _check("seed", self.seed, 0 <= self.seed < 2**63, "an integer from 0, of 64 bits")
        _check("tol", self.tol, 0 < self.tol < 1, "a number between 0 and 1")
        for name in ("reg_a", "reg_r"):
            value = getattr(self, name)
            _check(name, value, 0 <= value < np.inf, "a finite number from 0")
        regs = (self.reg_a, self.reg_r)
        _check("reg_a and reg_r", regs, (regs[0] > 0) == (regs[1] > 0), "both positive or both zero")

    @property
    def dtype(self) -> np.dtype[Any]:
        """The real dtype of n-sized arrays."""
        return np.dtype(np.float32 if self.precision == "single" else np.float64)


class RivalSettings(Settings):
    """What the models that learn from neighbourhoods take: tne, ctdne, htne and hnip.

    Where nothing is given for ``negatives``, ``epochs``, ``learning_rate`` or ``walk_decay``, each model has
    its own default, which its module tells.
    """

    walks: Whole = Field(10, description="Number of walks per node (ctdne, hnip).", json_schema_extra=RIVALS)
    walk_length: Whole = Field(
        80, description="Most nodes of a walk (ctdne, hnip).", json_schema_extra=RIVALS
    )
    window: Whole = Field(
        10, description="How far apart on a walk two nodes may be (ctdne, hnip).", json_schema_extra=RIVALS
    )
    # The published ctdne drops walks shorter than the window. On validation parts (ranks of the paper,
    # Micro-F1, at least 2 or 10 nodes): email .928 or .920, fb-forum .799 or .754, wildbird .880 or .873,
    # school .914 or .921, hypertext .765 or .776, workplace .899 or .901.
    shortest_walk: Whole = Field(
        2,
        description="Fewest nodes of a walk, where time is long enough for it (ctdne, hnip); the published "
        "ctdne asks for the window.",
        json_schema_extra=RIVALS,
    )
    walk_decay: float | None = Field(
        None,
        description="How fast the chance of a later link of a walk falls: exp(-d·t), time from 0 to 1; 0: "
        "all later links alike (default: ctdne 0, hnip 1).",
        json_schema_extra=RIVALS,
    )
    negatives: int | None = Field(
        None,
        ge=1,
        le=1000,
        description="Number of negative samples per link (default: ctdne 5, htne 10).",
        json_schema_extra=RIVALS,
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes over the data, at the most (default: tne 300, ctdne 5, htne 20, hnip 50).",
        json_schema_extra=RIVALS,
    )
    learning_rate: float | None = Field(
        None,
        gt=0,
        description="Size of a gradient step (default: ctdne 0.025, htne 0.01, hnip 0.001).",
        json_schema_extra=RIVALS,
    )
    history: Whole = Field(
        5, description="Number of earlier neighbours that count (htne).", json_schema_extra=RIVALS
    )
    kernel: HistoryKernel = Field(
        "decaying",
        description="Whether older neighbours count less, or more as in the public code (htne).",
        json_schema_extra=RIVALS,
    )
    snapshots: Whole = Field(
        10, description="Number of equal parts that time is cut into (tne).", json_schema_extra=RIVALS
    )
    snapshot_links: SnapshotLinks = Field(
        "cumulative",
        description="Whether a snapshot has all links up to its end, or its own only (tne).",
        json_schema_extra=RIVALS,
    )
    smoothness: float = Field(
        0.01,
        ge=0,
        description="Weight of the change of a vector from snapshot to snapshot (tne).",
        json_schema_extra=RIVALS,
    )
    tne_step: TneStep = Field(
        "search",
        description="Search a step that lowers the objective, or take the public code's (tne).",
        json_schema_extra=RIVALS,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what no walk or history can be made of."""
        super().model_post_init(context)
        for name in ("walks", "window", "history", "snapshots"):
            value = getattr(self, name)
            _check(name, value, 1 <= value <= MAX_RIVAL, f"an integer from 1 to {MAX_RIVAL:,}")
        for name in ("walk_length", "shortest_walk"):
            value = getattr(self, name)
            _check(name, value, 2 <= value <= MAX_RIVAL, f"an integer from 2 to {MAX_RIVAL:,}")
        decay = self.walk_decay
        _check(
            "walk_decay", decay, decay is None or 0 <= decay <= MAX_DECAY, f"a number from 0 to {MAX_DECAY}"
        )


class VectorSettings(SolverSettings, RivalSettings):
    """How one vector per node is made of slices."""

    reduce: str = Field(
        "sum",
        description="What one vector per node sums over: sum, last:N or decay:HALF_LIFE, in steps.",
        json_schema_extra=MODEL,
    )
    gauge: Gauge = Field(
        "canonical",
        description="Axes of the vectors. canonical: comparable over time and seeds; none: the paper's raw "
        "A·R.",
        json_schema_extra=MODEL,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse a reduction that is none."""
        super().model_post_init(context)
        self._check_reduce()

    def _check_reduce(self) -> None:
        """Refuse a reduction that is none."""
        parse_reduce(self.reduce)


class FitSettings(VectorSettings):
    """What `models.fit` takes.

    Its ``reduce`` may count in shares of the learning time (``decay:5%``), and several joined by + give
    several blocks of vectors side by side. On directed graphs one basis of rank r serves two roles, and holds
    about r/2 directions of each; ``oversample`` makes up for that.
    """

    reduce: str = Field(
        "sum",
        description="What one vector per node sums over: sum, last:N, decay:HALF_LIFE (in steps, or as a "
        "share such as decay:5%); several joined by + give blocks of vectors side by side.",
        json_schema_extra=MODEL,
    )
    oversample: Whole = Field(
        1,
        description="On directed graphs, solve this many times the rank and keep the leading columns of each "
        "role.",
        json_schema_extra=MODEL,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse less than the rank itself."""
        super().model_post_init(context)
        _check("oversample", self.oversample, self.oversample >= 1, "an integer from 1")

    def _check_reduce(self) -> None:
        """Refuse a reduction that is none, of several."""
        for part in self.reduce.split("+"):
            parse_reduce(part, shares=True)


class TrajectorySettings(VectorSettings):
    """How a vector per node and step is made."""

    trajectory_by: TrajectoryBy = Field(
        "filter",
        description="How a trajectory is made. filter: each node's links, smoothed in time as far as they "
        "stand out of noise; als: a low-rank fit per frequency (--freqs), as in the paper, slower. With "
        "--gauge none always als.",
        json_schema_extra=MODEL,
    )
    denoise: float = Field(
        1.0,
        description="How strongly the filter removes noise. 1: best reconstruction; 2 and more: steadier "
        "vectors, up to one that does not move; 0: nothing is removed.",
        json_schema_extra=MODEL,
    )
    causal: bool = Field(
        False,
        description="The vector of a step uses nothing after it, given the basis; needs --pair-weight raw.",
        json_schema_extra=MODEL,
    )
    basis: Basis = Field(
        "sum",
        description="Axes of the filtered trajectory: those of the sum over time, or of all energy, which "
        "also see what cancels in the sum.",
        json_schema_extra=MODEL,
    )
    freqs: str = Field(
        "auto",
        description="Frequencies of a trajectory by als: auto, all, lowest:K or strongest:K.",
        json_schema_extra=MODEL,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what makes no filter."""
        super().model_post_init(context)
        parse_freqs(self.freqs)
        _check("denoise", self.denoise, 0 <= self.denoise < np.inf, "a finite number from 0")
        self._check_filtered("causal", "basis")

    def _check_filtered(self, *names: str) -> None:
        """Refuse options that only a filtered trajectory has."""
        for name in names:
            plain = type(self).model_fields[name].default
            if getattr(self, name) != plain and not self.filtered:
                got = f"{getattr(self, name)} with trajectory_by {self.trajectory_by}, gauge {self.gauge}"
                raise ConfigError(name, got=got, allowed="trajectory_by filter, gauge canonical")

    @property
    def filtered(self) -> bool:
        """Whether a trajectory comes from the filter: raw axes differ from slice to slice."""
        return self.trajectory_by == "filter" and self.gauge == "canonical"


class ModelSettings(TrajectorySettings):
    """What is computed."""

    outputs: Annotated[tuple[Output, ...], Split] = Field(
        ("embedding",),
        description="What to write: any of embedding,trajectory,factors,spectrum.",
        json_schema_extra=OUTPUT,
    )
    model: ModelName = Field(
        "toffee",
        description="Which model: toffee; toffee- (the same with λ = 0); toffee-paper (the paper to the "
        "letter), tsvd, rescal, tne, ctdne, htne and hnip, which give an embedding only.",
        json_schema_extra=MODEL,
    )
    dense: str = Field(
        "auto",
        description="Steps whose vectors are also written as Parquet: all, none, last:N, every:K, or steps "
        "such as 0,7,14; auto: all where that takes up to 256 MiB. Of a filtered trajectory; readers do "
        "without it.",
        json_schema_extra=OUTPUT,
    )
    dense_nodes: DenseNodes = Field(
        "all",
        description="Rows of that Parquet: all nodes at every such step, or active, those with an edge at "
        "the step (of a directed graph, as its source).",
        json_schema_extra=OUTPUT,
    )
    dense_precision: DensePrecision = Field(
        "single",
        description="Numbers of that Parquet: single (float32), or half (float16: three digits, up to "
        "65,504), which takes half the space.",
        json_schema_extra=OUTPUT,
    )
    vectors: VectorLists = Field(
        "fixed",
        description="How Parquet says what a vector is: fixed, a list of fixed size; list, a plain list, for "
        "readers of Arrow schemas that know no other (Delta, ClickHouse). The numbers are the same.",
        json_schema_extra=OUTPUT,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse what the parts of the engine would refuse, before anything is read."""
        super().model_post_init(context)
        parse_dense(self.dense)
        self._check_filtered("dense_nodes", "dense_precision")
        if not self.outputs:
            raise ConfigError("outputs", got="none", allowed="embedding, trajectory, factors, spectrum")
        possible = MODEL_OUTPUTS[self.model]
        if not set(self.outputs) <= set(possible):
            raise ConfigError(
                f"outputs of model {self.model}",
                got=", ".join(self.outputs),
                allowed=", ".join(possible),
                remedy="Over time, use --model toffee.",
            )

    @property
    def appends(self) -> bool:
        """Whether a refresh appends steps to the trajectory instead of making it anew."""
        return self.causal and "trajectory" in self.outputs

    def solver_settings(self) -> SolverSettings:
        """Return what the solvers take."""
        settings = self.only(SolverSettings)
        return settings.changed(reg_a=0.0, reg_r=0.0) if self.model == "toffee-" else settings


class RuntimeSettings(Settings):
    """Where it runs. Nothing here changes a byte of the results."""

    mode: str = Field(
        "auto",
        description="Where it runs: auto, threads, processes, or a running cluster: tcp://host:port, "
        "tls://host:port.",
        json_schema_extra=CLUSTER,
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="Number of threads or processes (default: one per core); of a cluster, how many workers "
        "to wait for.",
        json_schema_extra=CLUSTER,
    )
    wait: float = Field(
        60.0,
        gt=0,
        le=LONGEST_WAIT,
        description="Seconds to wait for workers, at the start and when all are lost.",
        json_schema_extra=CLUSTER,
    )
    stall: float = Field(
        STALL,
        ge=0,
        le=LONGEST_WAIT,
        description="Give up (exit 5) after this many seconds without a task starting or finishing; 0: "
        "never.",
        json_schema_extra=CLUSTER,
    )
    memory: str | None = Field(
        None,
        description="Memory that one worker may use, such as 8GiB (default: what it has).",
        json_schema_extra=CLUSTER,
    )
    tls_ca: str | None = Field(
        None,
        description="Certificate of the authority, for tls:// clusters.",
        json_schema_extra=shown("Cluster", "FILE"),
    )
    tls_cert: str | None = Field(
        None,
        description="Certificate of this client, for tls:// clusters.",
        json_schema_extra=shown("Cluster", "FILE"),
    )
    tls_key: str | None = Field(
        None,
        description="Key of this client, for tls:// clusters.",
        json_schema_extra=shown("Cluster", "FILE"),
    )


class JobRuntimeSettings(RuntimeSettings):
    """Where a batch job runs, and who is told of it."""

    traces: bool = Field(
        False,
        description="Send OpenTelemetry traces of stages and tasks to the collector that "
        "OTEL_EXPORTER_OTLP_ENDPOINT names.",
        json_schema_extra=TOLD,
    )
    openlineage: str | None = Field(
        None,
        description="Send OpenLineage events of the run (START, COMPLETE, FAIL) to this server, or add them "
        "to this file.",
        json_schema_extra=shown("Who is told", "URL|FILE"),
    )
    mlflow: str | None = Field(
        None,
        description="Log settings and figures of the run to this experiment of the MLflow server that "
        "MLFLOW_TRACKING_URI names.",
        json_schema_extra=shown("Who is told", "NAME"),
    )

    def model_post_init(self, context: Any, /) -> None:
        """Refuse addresses that cannot be, or that hold a password."""
        super().model_post_init(context)
        target = self.openlineage
        if target is not None:
            web = re.match(r"https?://[^/@\s?#]+(/[^@\s?#]*)?\Z", target) is not None
            _check(
                "openlineage",
                target,
                bool(target) and (web or "://" not in target),
                "http://host or https://host (a key by OPENLINEAGE_API_KEY), or the path of a file",
            )
        if self.mlflow is not None:
            _check("mlflow", repr(self.mlflow), bool(self.mlflow.strip()), "the name of an experiment")


class OutSettings(Settings):
    """Where the result goes."""

    out: str = Field(
        "",
        description="Folder for the result; must not exist yet.",
        json_schema_extra=shown("Output", "DIR"),
    )


class JobConfig(EdgeSettings, ModelSettings, JobRuntimeSettings, OutSettings):
    """The whole batch job."""

    out: str = Field(
        "",
        description="Folder of the runs; its latest.json points to the published one.",
        json_schema_extra=shown("Output", "DIR"),
    )
    preset: Preset | None = Field(
        None,
        description="Start from other defaults; paper: toffee-paper on counts, raw pair totals and axes.",
        json_schema_extra=MODEL,
    )
    keep_work: bool = Field(
        False,
        description="Keep the staged tensor and the slices after publishing.",
        json_schema_extra=OUTPUT,
    )
    report: bool = Field(
        True,
        description="Write report.html, a page of plots, beside the vectors.",
        json_schema_extra=OUTPUT,
    )

    def model_post_init(self, context: Any, /) -> None:
        """Settle the weight of pairs by what is asked for: whatever reads it later sees one answer."""
        super().model_post_init(context)
        moves = "trajectory" in self.outputs and self.filtered
        causal = moves and self.causal
        if self.pair_weight == "auto":
            self.__dict__["pair_weight"] = "raw" if causal else "log" if moves else "unit"
        elif causal and self.pair_weight != "raw":
            raise ConfigError(
                "pair_weight of a causal trajectory",
                got=self.pair_weight,
                allowed="raw, or auto",
                remedy="A weight by the total of a pair knows what comes after a step.",
            )

    def identity(self) -> str:
        """Return a digest of all that decides the bytes of the results: not where it runs or goes."""
        names = {*EdgeSettings.model_fields, *ModelSettings.model_fields}
        text = json.dumps(self.model_dump(mode="json", include=names), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


class IngestSettings(EdgeSettings, RuntimeSettings, OutSettings):
    """Options of `toffee ingest`."""


class RefreshSettings(Settings):
    """What a refresh does beyond the batch job: its night, its limits, what it keeps."""

    as_of: str | None = Field(
        None,
        description="Use the steps that are over by this moment: a date, timestamp or number (default: now).",
        json_schema_extra=REFRESH,
    )
    fresh: bool = Field(
        False,
        description="Start from scratch: new rows, new axes, a new reference.",
        json_schema_extra=REFRESH,
    )
    reference: str | None = Field(
        None,
        description="Run that drift is measured against (default: the first of the chain).",
        json_schema_extra=shown("Refresh", "RUN"),
    )
    warm: bool = Field(
        True, description="Start the solvers from the slices of the previous run.", json_schema_extra=REFRESH
    )
    holdout: int = Field(
        1,
        ge=0,
        description="Number of new steps at the end whose links test the vectors; 0: no test.",
        json_schema_extra=REFRESH,
    )
    # The limits stand well apart from good nights. Over 30 of them (benchmarks/refresh.py, mathoverflow by
    # weeks) the AUC was at most 0.014 below the last run's, coverage at least 0.997, the median cosine 0.970,
    # and the share of energy fell by at most 0.0012.
    min_links: int = Field(
        50,
        ge=1,
        description="Fewest held-out links from which the AUC is judged.",
        json_schema_extra=REFRESH,
    )
    max_auc_drop: float = Field(
        0.05,
        ge=0,
        le=1,
        description="How far the AUC of held-out links may be below the previous run's.",
        json_schema_extra=REFRESH,
    )
    min_coverage: float = Field(
        0.5,
        ge=0,
        description="Fewest active nodes, as a share of the previous run's.",
        json_schema_extra=REFRESH,
    )
    min_cosine: float = Field(
        0.7,
        ge=-1,
        le=1,
        description="Lowest median cosine between a node's vectors in both runs.",
        json_schema_extra=REFRESH,
    )
    max_energy_drop: float = Field(
        0.1,
        ge=0,
        le=1,
        description="How far the share of energy explained may be below the previous run's.",
        json_schema_extra=REFRESH,
    )
    keep: int = Field(
        14,
        ge=1,
        description="Number of published runs to keep, beside the reference.",
        json_schema_extra=REFRESH,
    )
    expire: str | None = Field(
        None,
        description="Forget nodes, and their rows, without an edge for this long: 365d (default: never).",
        json_schema_extra=REFRESH,
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
        if self.reference is not None:
            _check(
                "reference",
                repr(self.reference),
                re.fullmatch(RUN_NAME, self.reference) is not None,
                "the name of a run, as toffee runs lists them",
            )


def _check(name: str, value: object, holds: bool, allowed: str) -> None:
    if not holds:
        raise ConfigError(name, got=value, allowed=allowed)


def _read_toml(file: str) -> dict[str, Any]:
    try:
        status = Path(file).stat()
        if not stat.S_ISREG(status.st_mode) or status.st_size > MAX_CONFIG_BYTES:
            found = f"{status.st_size:,} bytes" if stat.S_ISREG(status.st_mode) else "not a regular file"
            raise ConfigError(
                "config file", got=f"{file}: {found}", allowed=f"a file of up to {MAX_CONFIG_BYTES:,} bytes"
            )
        values = tomllib.loads(Path(file).read_text())
    except OSError as error:
        raise ConfigError("config file", got=f"{file}: {error.strerror}", allowed="a TOML file") from None
    except RecursionError:
        raise ConfigError("config file", got=f"{file}: nested too deeply", allowed="name = value") from None
    except ConfigError:
        raise
    except ValueError as error:
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
        allowed = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return ConfigError(f"{name}{where}", got=repr(error["input"]), allowed=allowed)
