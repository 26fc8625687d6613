"""What a run says about itself: the JSON files of a folder of runs as types, checked where they are read.

Names of fields are names in the files. Unknown fields are kept: a later version of the same format may add
some.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from toffee_dist.errors import InputError
from toffee_dist.settings import MAX_RANK, MAX_STEPS, RUN_NAME
from toffee_dist.storage.files import read_json, write_json
from toffee_dist.storage.spaces import old_space
from toffee_dist.timegrid import TimeGrid

# The version of everything in a folder of runs; raised when an older program could misread it.
FORMAT = 1

T = TypeVar("T", bound="Record")
# What readers allocate by: a damaged file must not ask for more than any run could have.
Count = Annotated[int, Field(ge=0, lt=2**48)]
SpaceId = Annotated[str, Field(pattern=r"\A[0-9a-f]{32}\z")]


class Record(BaseModel):
    """A part of such a file."""

    model_config = ConfigDict(extra="allow", frozen=True)

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        return self.model_dump(mode="json")

    def replaced(self, **changes: Any) -> Self:
        """Return it with other values."""
        return self.model_copy(update=changes)


class Summary(Record):
    """What an ingest read, and what became of it."""

    files: Count
    rows: Count
    skipped: dict[str, Count]
    comments: Count
    outside: Count
    forgotten: Count = 0
    used: Count
    self_loops: Count
    duplicates: Count
    cancelled: Count
    nodes: Count
    new_nodes: Count
    pairs: Count
    entries: Count
    steps: Count
    empty_steps: Count
    density: float
    first: str
    last: str
    fingerprint: str
    examples: list[str]


class IngestRecord(Record):
    """ingest.json: what was asked for, what was read and what came out."""

    format: int = FORMAT
    config: dict[str, Any]
    summary: Summary
    grid: TimeGrid
    files: list[tuple[str, int, str]]


class RunConfig(Record):
    """What was asked for: every option by its name, of which these are read by others."""

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    rank: int = Field(ge=1, le=MAX_RANK)
    model: str
    gauge: str
    reduce: str
    seed: int = Field(ge=0, lt=2**63)
    bipartite: bool
    vectors: str = "fixed"
    keep: int = 1


class Following(Record):
    """What a refresh is of, and what it follows.

    Attributes
    ----------
    night
        A digest of what was asked for, the window and the input: an equal one gives an equal run.
    window
        First moment in, and first moment out, as the configuration writes them.
    newest
        Tick of the newest edge of the whole input.
    previous, reference
        Folders of the previous run and of the one that chain drift is measured against; empty at the start
        of a chain. (In a manifest their names, which stay when a folder is moved.)
    holdout
        Steps at the end that the previous run has not seen, as many as are to be tested.
    warm
        Folder of the slices that solves start from; empty: they start from scratch. (In a manifest whether
        there was one.)
    cold
        Why they start from scratch.
    expire
        Tick: nodes last seen before it are forgotten; None: nobody is.
    append
        Steps that are appended to the causal trajectory of the previous run; None: to none.
    """

    night: str
    window: tuple[str, str]
    newest: int
    previous: str = ""
    reference: str = ""
    holdout: int = 0
    warm: str | bool = ""
    cold: str = ""
    expire: int | None = None
    append: Annotated[int, Field(ge=0, le=MAX_STEPS)] | None = None


class JobRecord(Record):
    """job.json: what was asked for, so that a run can be resumed; nothing of where it ran.

    Attributes
    ----------
    config
        Every option by its name, with signatures and other secrets masked.
    hidden
        Names of the options that were, which until the edges are staged must be given again.
    """

    format: int = FORMAT
    config: dict[str, Any]
    hidden: tuple[str, ...] = ()
    identity: str
    fingerprint: str
    begun: str
    following: Following | None = None


class AlignmentRecord(Record):
    """Over how many nodes a rotation was found, and how well they agree with and without it."""

    nodes: int
    mean_cosine: float
    unaligned: float


class LinksRecord(Record):
    """The AUC of held-out links by the vectors of both runs; None where none was asked for."""

    links: int
    steps: int
    before: float | None
    now: float | None


class SavedRecord(Record):
    """Slices that had a start, and what that saved against solving them from scratch."""

    slices: int = 0
    iterations: int = 0
    seconds: float = 0.0


class Mover(Record):
    """A node whose direction changed a lot."""

    node_id: Any
    row: int
    cosine: float
    degree: int
    p_value: float | None = None


class Drift(Record):
    """How far a run's vectors are from an earlier one's.

    Nodes are ``new`` (no row before), ``left`` (had edges, have none), ``returned`` (the reverse),
    ``expired`` (had a row, are forgotten) or stayed.
    """

    earlier: str
    nodes: int
    new: int
    left: int
    returned: int
    expired: int
    cosine: dict[str, float]
    norm_ratio: dict[str, float]
    overlap10: float | None
    angle_mean: float
    angle_max: float
    movers: list[Mover] = Field(default_factory=list)


class RefreshRecord(Following):
    """What was found about a refresh."""

    alignment: AlignmentRecord | None = None
    links: LinksRecord | None = None
    saved: SavedRecord | None = None
    expired: int = 0
    drift: list[Drift] = Field(default_factory=list)
    reasons: list[str] = Field(default_factory=list)


class FileRecord(Record):
    """What a published file must be: its bytes, and their CRC-32."""

    bytes: int
    crc32: int


class Metrics(Record):
    """The figures of a run; None where a run of its kind has none."""

    nodes: int
    steps: int
    solved: int
    reused: int
    seconds: dict[str, float]
    passes: dict[str, int] | None = None
    peaks: dict[str, int] | None = None
    active: int | None = None
    energy_share: float | None = None
    freqs: int | None = None
    energy_kept: float | None = None
    slices: int = 0
    converged: int = 0
    iterations: int = 0
    solve_seconds: float = 0.0
    mean_gap: float | None = None
    output_bytes: int = 0
    peak_bytes: int | None = None
    report: str | None = None


class Manifest(Record):
    """manifest.json: what makes a run visible, and all that is known about it.

    `space_id` names the space of the embedding, `spaces` those of all outputs: only vectors of one space may
    be compared (see `storage.spaces`). A run of a version without them has ids by the first of its chain.
    """

    format: int = FORMAT
    run_id: str
    state: Literal["published", "rejected"]
    forced: bool = False
    begun: str
    finished: str
    config: RunConfig
    identity: str
    fingerprint: str
    versions: dict[str, str]
    directed: bool
    summary: Summary
    grid: TimeGrid
    outputs: tuple[str, ...]
    space_id: SpaceId | Literal[""] = ""
    spaces: dict[str, SpaceId] = Field(default_factory=dict)
    refresh: RefreshRecord | None = None
    files: dict[str, FileRecord] = Field(default_factory=dict)
    metrics: Metrics

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        """Refuse a file whose parts contradict each other."""
        if self.grid.n_steps != self.summary.steps:
            raise ValueError(f"{self.grid.n_steps} steps in the grid, {self.summary.steps} in the summary")
        return self

    @model_validator(mode="after")
    def _name_spaces(self) -> Self:
        """Name the spaces of a run that was made before they had ids, by the first of its chain."""
        if not self.space_id:
            first = (self.refresh and self.refresh.reference) or self.run_id
            self.__dict__["space_id"] = old_space(first, "embedding")
            self.__dict__["spaces"] = {output: old_space(first, output) for output in self.outputs}
        if any(not output.startswith("embedding") and output not in self.spaces for output in self.outputs):
            raise ValueError("an output without the id of its space")
        return self

    def space_of(self, output: str) -> str:
        """Return the id of the space that the vectors of an output are in."""
        return self.space_id if output.startswith("embedding") else self.spaces[output]


class IndexRecord(Record):
    """index/<output>.json: which vectors the matrix beside it has; written after it."""

    format: int = FORMAT
    run_id: str
    space_id: str


class Pointer(Record):
    """latest.json: the published run, and newer ones that must not be published again.

    We find the run by its name; `path` is for other programs.
    """

    format: int = FORMAT
    run_id: str = Field(pattern=rf"\A{RUN_NAME}\z")
    path: str
    withdrawn: tuple[str, ...] = ()


def read_record(path: Path, kind: type[T]) -> T:
    """Read a file of this kind, or say what is wrong with it.

    Raises
    ------
    InputError
        Where it cannot be read, is of a later format, or is not what it should be.
    """
    data = read_json(path)
    refuse_later_format(path, data)
    try:
        return kind.model_validate(data)
    except (ValidationError, RecursionError) as error:
        if isinstance(error, RecursionError):
            raise _damaged_record(path, "nested too deeply") from None
        first = error.errors()[0]
        where = ".".join(str(part)[:40] for part in first["loc"]) or "the whole"
        raise _damaged_record(path, f"{where}: {first['msg']}") from None


class LaterFormatError(InputError):
    """A file that was written by a program that knows more than we do."""


def refuse_later_format(path: Path, data: Any) -> None:
    """Raise LaterFormatError where a file says that it was written by a later program than this."""
    found = data.get("format", FORMAT) if isinstance(data, dict) else FORMAT
    if isinstance(found, int) and found > FORMAT:
        raise LaterFormatError(
            f"{path} has a later format",
            got=found,
            allowed=f"up to {FORMAT}",
            remedy="Read it with the version of toffee_dist that wrote it, or a later one.",
        )


def _damaged_record(path: Path, found: str) -> InputError:
    return InputError(
        f"{path} is damaged",
        got=found,
        remedy="Use another run: toffee runs lists them.",
    )


def write_record(path: Path, record: Record) -> None:
    """Write a file of this kind, whole and on storage before this returns."""
    write_json(path, record.to_json())
