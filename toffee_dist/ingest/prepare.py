"""Before the rows are read: which files, which columns, which window of time; and looks that keep nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest import distinct_count
from toffee_dist.ingest.columns import Schema, guess_schema
from toffee_dist.ingest.files import SourceFile, find_files, group_fragments, list_fragments
from toffee_dist.ingest.scan import ScanRecord, ScanTask, scan
from toffee_dist.ingest.summary import gather_bad, refuse_bad
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import EdgeSettings
from toffee_dist.tasks import RunTasks, Say, run_here
from toffee_dist.timegrid import TimeScale, build_grid, choose_scale, last_window, parse_moment


@dataclass(frozen=True)
class Reading:
    """What is decided before the rows are read; times outside [since, until) are left out."""

    files: list[SourceFile]
    schema: Schema
    tasks: list[ScanTask]
    scale: TimeScale | None = None
    since: int | None = None
    until: int | None = None

    def find_scale(self, settings: EdgeSettings, lo: int, hi: int, say: Say) -> TimeScale:
        """Return what a time is, given the first and the last one; a guess is said."""
        if self.scale is not None:
            return self.scale
        scale, note = _scale(settings, self.schema, lo, hi)
        if note:
            say(note)
        return scale


def prepare(settings: EdgeSettings, work: str, run: RunTasks, say: Say, limits: Limits) -> Reading:
    """Decide what the tasks of a scan read, window included."""
    reading = list_tasks(settings, work, say, limits)
    scale, since, until = _window(settings, reading, run)
    tasks = [replace(task, since=since, until=until) for task in reading.tasks]
    return replace(reading, tasks=tasks, scale=scale, since=since, until=until)


def list_tasks(settings: EdgeSettings, work: str, say: Say, limits: Limits) -> Reading:
    """Find files and columns, and cut the files into tasks that read all of their rows."""
    files, notes = find_files(settings.inputs)
    schema, guesses = guess_schema(files, settings, limits)
    for note in [*notes, *guesses]:
        say(note)
    groups = group_fragments(list_fragments(files, limits), limits)
    tasks = [
        ScanTask(
            index,
            tuple(group),
            schema,
            work,
            settings.bipartite,
            distinct=settings.step == "distinct",
            limits=limits,
        )
        for index, group in enumerate(groups)
    ]
    return Reading(files, schema, tasks)


def read_window(settings: EdgeSettings, scale: TimeScale, newest: int) -> tuple[int | None, int | None]:
    """Return the window [since, until) in ticks; None is open.

    Parameters
    ----------
    settings
        Its ``since``, ``until`` and ``last``.
    scale
        What a tick is.
    newest
        The newest tick of all edges, where ``last`` counts back from.
    """
    until = None if settings.until is None else parse_moment(settings.until, scale, "--until")
    since = None if settings.since is None else parse_moment(settings.since, scale, "--since")
    if settings.last is not None:
        since = last_window(settings.last, newest if until is None else until - 1, scale)
    if since is not None and until is not None and since >= until:
        raise ConfigError(
            "--since and --until",
            got=f"{scale.show(since)} and {scale.show(until)}",
            allowed="since before until",
        )
    return since, until


@dataclass(frozen=True)
class Estimate:
    """What a look at the input tells: rows and steps exactly, nodes and pairs to within 3 %."""

    rows: int
    nodes: int
    pairs: int
    entries: int
    steps: int
    first: str
    last: str


def estimate(
    settings: EdgeSettings,
    run: RunTasks = run_here,
    say: Say = lambda line: None,
    limits: Limits = LIMITS,
) -> Estimate:
    """Read the edges once, keep nothing, and say how large the tensor will be.

    Stored pairs and entries of an undirected graph count both directions; entries are at most this many.
    """
    reading = prepare(settings, "", run, say, limits)
    looks = [
        replace(task, keep=False, distinct=False, estimate=True, directed=settings.directed)
        for task in reading.tasks
    ]
    found = list(run(scan, looks))
    bad = gather_bad(found, looks)
    rows = sum(record.rows for record in found)
    if settings.on_bad_rows == "error":
        refuse_bad(bad, rows)
    lo, hi = time_range(found)
    scale = reading.find_scale(settings, lo, hi, say)
    counts = dict.fromkeys(("nodes", "pairs", "times"), distinct_count.empty())
    for record in found:
        for name, hashes in record.sketches.items():
            counts[name] = distinct_count.add(counts[name], hashes)
    if settings.step == "distinct":
        steps = distinct_count.count(counts["times"])
    else:
        steps = build_grid(settings.step, lo, hi, scale, since=reading.since, until=reading.until).n_steps
    sides = 1 if settings.directed else 2
    used = rows - bad.total - sum(record.outside for record in found)
    return Estimate(
        rows=rows,
        nodes=distinct_count.count(counts["nodes"]),
        pairs=sides * distinct_count.count(counts["pairs"]),
        entries=sides * used,
        steps=steps,
        first=scale.show(lo),
        last=scale.show(hi),
    )


def find_newest(
    settings: EdgeSettings, run: RunTasks = run_here, limits: Limits = LIMITS
) -> tuple[TimeScale, int]:
    """Return what a time is, and the newest one of all edges; reads the times once."""
    reading = list_tasks(settings, "", lambda line: None, limits)
    lo, hi = _look(reading, run)
    return _scale(settings, reading.schema, lo, hi)[0], hi


def time_range(found: Sequence[ScanRecord]) -> tuple[int, int]:
    """Return the first and the last time inside the window."""
    lows = [record.lo for record in found if record.lo is not None]
    highs = [record.hi for record in found if record.hi is not None]
    if not lows:
        rows = sum(record.rows for record in found)
        outside = sum(record.outside for record in found)
        raise InputError(
            "no edges to work with",
            got=f"{rows:,} rows, {outside:,} of them outside the window",
            allowed="at least one valid row inside the window",
            remedy="Check --since, --until and --time-unit." if outside else "",
        )
    return min(lows), max(highs)


def _window(
    settings: EdgeSettings, reading: Reading, run: RunTasks
) -> tuple[TimeScale | None, int | None, int | None]:
    """Return the window, and the scale where it is needed to read the window."""
    if settings.since is None and settings.until is None and settings.last is None:
        return None, None, None
    lo, hi = 0, 0
    if settings.last is not None or (settings.time_unit == "auto" and not reading.schema.per_second):
        # Only a look at all times tells which unit they are in, and which is the newest.
        lo, hi = _look(reading, run)
    scale, _ = _scale(settings, reading.schema, lo, hi)
    return scale, *read_window(settings, scale, hi)


def _look(reading: Reading, run: RunTasks) -> tuple[int, int]:
    return time_range(list(run(scan, [replace(task, keep=False) for task in reading.tasks])))


def _scale(settings: EdgeSettings, schema: Schema, lo: int, hi: int) -> tuple[TimeScale, str]:
    return choose_scale(lo, hi, schema.per_unit, schema.per_second, settings.time_unit, settings.zone)
