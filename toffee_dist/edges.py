"""The ingest: edges of any source into a staged tensor, a node registry and a time grid.

Five maps of independent tasks over a work folder; a task takes paths and returns a small record:

    scan      fragments → valid rows, sorted distinct ids         (scan.py)
    merge_bucket, write_bucket   a range of ids → rows            (registry.py)
    map_part  rows → sorted (source, target, step) words          (entries.py)
    merge_block   a block of rows → aggregated, weighted tubes    (entries.py)
    join_block    blocks → the arrays of one tensor               (staging.py)
"""

from __future__ import annotations

import json
import os
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from toffee_dist import entries, registry, sketch, staging
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.registry import BucketRecord, BucketTask
from toffee_dist.scan import Part, ScanRecord, ScanTask, scan
from toffee_dist.schema import ColumnOptions, Schema, guess_schema
from toffee_dist.sources import (
    SourceFile,
    find_files,
    fingerprint,
    group_fragments,
    list_fragments,
)
from toffee_dist.store import check_writable, place, read_array, remote, remove_tree
from toffee_dist.summary import MANIFEST, Ingested, Summary, gather_bad, refuse_bad, write_manifest
from toffee_dist.tensor import Entry, PairWeight
from toffee_dist.timegrid import (
    MAX_STEPS,
    TimeGrid,
    TimeScale,
    TimeUnit,
    build_grid,
    check_step,
    check_zone,
    choose_scale,
    last_window,
    parse_moment,
)

T = TypeVar("T")
R = TypeVar("R")
Run = Callable[[Callable[[Any], Any], Iterable[Any]], Iterator[Any]]
"""Applies a function to items, in parallel or not, and yields the results in the order of the items."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class IngestConfig:
    """Everything that decides what the tensor is.

    Self-loops are kept and counted. Rows that repeat (source, target, step) become one entry and are counted.
    Rows need no order in time. Weights are read for ``entry="sum"`` only, where they may be negative; a sum
    of exactly zero is no entry, and is counted.

    Parameters
    ----------
    inputs
        Paths, folders, globs, fsspec URLs.
    columns
        Where the columns are.
    directed, entry, pair_weight
        As in `TemporalTensor.from_events`.
    step, since, until, last
        The grid and its window [since, until); see `timegrid`.
    time_unit
        What a number in the time column is.
    on_bad_rows
        ``error`` refuses input that holds rows that are no edges, ``skip`` counts them.
    known
        A folder of an earlier ingest, or of an earlier run; its nodes keep their rows.
    """

    inputs: tuple[str, ...]
    columns: ColumnOptions = field(default_factory=ColumnOptions)
    directed: bool = True
    entry: Entry = "binary"
    pair_weight: PairWeight = "unit"
    step: str = "1d"
    since: str | None = None
    until: str | None = None
    last: str | None = None
    time_unit: TimeUnit = "auto"
    on_bad_rows: Literal["error", "skip"] = "error"
    known: str | None = None

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("entry", self.entry, get_args(Entry)),
            ("pair_weight", self.pair_weight, get_args(PairWeight)),
            ("on_bad_rows", self.on_bad_rows, ("error", "skip")),
            ("time_unit", self.time_unit, get_args(TimeUnit)),
        ):
            if value not in allowed:
                raise ConfigError(name, got=repr(value), allowed=", ".join(allowed))
        if not self.inputs:
            raise ConfigError("inputs", got="none", allowed="at least one file, folder, glob or URL")
        if self.last is not None and self.since is not None:
            raise ConfigError("--last and --since", got="both", allowed="one of them")
        if self.columns.weight is not None and self.entry != "sum":
            raise ConfigError(
                "--weight", got=f"entry {self.entry}", allowed="entry sum", remedy="Add --entry sum."
            )
        check_step(self.step)
        check_zone(self.columns.zone)


def run_here(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """Run one item after the other, in this process: for tests and small work."""
    return map(function, items)


def ingest(
    config: IngestConfig,
    out: Path | str,
    run: Run = run_here,
    say: Say = lambda line: None,
    check: Callable[[int, int], None] = lambda n_nodes, n_steps: None,
) -> Ingested:
    """Read the edges and stage the tensor.

    Everything is written beside `out` and moved there at the end; on failure nothing stays.

    Parameters
    ----------
    config
        What to read and how.
    out
        A folder that does not exist yet, or is empty. It gets ``tensor/``, ``nodes/`` and ``ingest.json``.
    run
        Where the tasks run; see `runtime.cluster`.
    say
        Is told every guess, one line each.
    check
        Is told the numbers of nodes and steps as soon as they are known, and may raise.

    Raises
    ------
    ConfigError, InputError
        With nothing left behind.
    """
    out = place(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "output folder",
            got=f"{out}, which is not empty",
            allowed="a folder that does not exist yet",
            remedy="Choose another or remove it.",
        )
    check_writable(out.parent if remote(out) is None else out)
    # A store has no rename: there it is the manifest, written last, that makes the result.
    stage = out.parent / f".{out.name}.{uuid.uuid4().hex[:12]}" if remote(out) is None else out
    (stage / "work").mkdir(parents=True)
    try:
        result = _ingest(config, stage, run, say, check)
        remove_tree(stage / "work")
        write_manifest(stage, asdict(config), *result)
        if stage != out:
            if out.exists():
                out.rmdir()
            os.rename(stage, out)
    except BaseException:
        _remove(stage)
        raise
    return Ingested(out, *result[:2])


def _ingest(
    config: IngestConfig, stage: Path, run: Run, say: Say, check: Callable[[int, int], None]
) -> tuple[Summary, TimeGrid, list[SourceFile]]:
    known = _known_files(config)
    work, tensor = str(stage / "work"), stage / "tensor"
    # Blocks on a store stay as they are; in a folder they are joined.
    joined = remote(stage) is None
    reading = _prepare(config, work, run, say)
    files, columns, schema = reading.files, config.columns, reading.schema
    tasks, scale, since, until = reading.tasks, reading.scale, reading.since, reading.until
    found = list(run(scan, tasks))
    bad = gather_bad(found, tasks)
    if config.on_bad_rows == "error":
        refuse_bad(bad, sum(record.rows for record in found))
    lo, hi = _time_range(found)
    if scale is None:
        scale, note = choose_scale(lo, hi, schema.per_unit, schema.per_second, config.time_unit, columns.zone)
        if note:
            say(note)
    parts = [part for record in found for part in record.parts]
    times = _distinct_times(parts, work) if config.step == "distinct" else None
    grid = build_grid(config.step, lo, hi, scale, since=since, until=until, distinct=times)

    lookups, n_known, n_nodes = _build_registry(parts, columns.bipartite, known, stage, run)
    check(n_nodes, grid.n_steps)
    used = sum(part.rows for part in parts)
    n_words = used if config.directed else 2 * used
    packing = entries.Packing.choose(n_nodes, grid.n_steps, n_words)
    maps = [
        entries.MapTask(part, lookup, work, packing, grid, config.directed, config.entry)
        for part, lookup in zip(parts, lookups, strict=True)
    ]
    self_loops = sum(run(entries.map_part, maps))
    names = tuple(part.name for part in parts)
    blocks = [
        entries.BlockTask(
            index,
            bins,
            names,
            work,
            work if joined else str(tensor),
            packing,
            config.directed,
            config.entry,
            config.pair_weight,
        )
        for index, bins in enumerate(entries.choose_blocks(entries.count_bins(maps, packing.n_bins)))
    ]
    merged = list(run(entries.merge_block, blocks))
    n_pairs, n_entries = sum(record.n_pairs for record in merged), sum(record.n_events for record in merged)
    sizes = staging.Sizes(n_nodes, grid.n_steps, n_pairs, n_entries)
    placed = staging.list_blocks(blocks, merged)
    if joined:
        tensor.mkdir()
        staging.make_arrays(tensor, sizes)
        for _ in run(staging.join_block, [staging.JoinTask(block, work, str(tensor)) for block in placed]):
            pass
    staging.write_header(tensor, sizes, directed=config.directed, blocks=() if joined else placed)

    bits = np.bitwise_or.reduce([np.frombuffer(record.steps, dtype=np.uint8) for record in merged])
    steps_used = int(np.bitwise_count(bits).sum())
    summary = Summary(
        files=len(files),
        rows=sum(record.rows for record in found),
        skipped=dict(sorted(bad.counts.items())),
        comments=sum(record.comments for record in found),
        outside=sum(record.outside for record in found),
        used=used,
        self_loops=self_loops,
        duplicates=used - sum(record.n_distinct for record in merged),
        cancelled=sum(record.n_cancelled for record in merged),
        nodes=n_nodes,
        new_nodes=n_nodes - n_known,
        pairs=n_pairs,
        entries=n_entries,
        steps=grid.n_steps,
        empty_steps=grid.n_steps - steps_used,
        density=n_entries / (n_nodes * n_nodes * grid.n_steps),
        first=scale.show(lo),
        last=scale.show(hi),
        fingerprint=fingerprint(files),
        examples=[str(example) for example in bad.examples],
    )
    return summary, grid, files


@dataclass(frozen=True)
class _Reading:
    """What is decided before the rows are read."""

    files: list[SourceFile]
    schema: Schema
    tasks: list[ScanTask]
    scale: TimeScale | None
    since: int | None
    until: int | None


def _prepare(config: IngestConfig, work: str, run: Run, say: Say) -> _Reading:
    files, notes = find_files(config.inputs)
    columns = replace(config.columns, need_weight=config.entry == "sum")
    schema, guesses = guess_schema(files, columns)
    for note in [*notes, *guesses]:
        say(note)
    groups = list(group_fragments(list_fragments(files)))
    tasks = [
        ScanTask(index, tuple(group), schema, work, columns.bipartite, distinct=config.step == "distinct")
        for index, group in enumerate(groups)
    ]
    scale, since, until = _window(config, tasks, run)
    tasks = [replace(task, since=since, until=until) for task in tasks]
    return _Reading(files, schema, tasks, scale, since, until)


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


def estimate(config: IngestConfig, run: Run = run_here, say: Say = lambda line: None) -> Estimate:
    """Read the edges once, keep nothing, and say how large the tensor will be.

    Stored pairs and entries of an undirected graph count both directions; entries are at most this many.
    """
    reading = _prepare(config, "", run, say)
    looks = [
        replace(task, keep=False, distinct=False, sketch=True, directed=config.directed)
        for task in reading.tasks
    ]
    found = list(run(scan, looks))
    bad = gather_bad(found, looks)
    rows = sum(record.rows for record in found)
    if config.on_bad_rows == "error":
        refuse_bad(bad, rows)
    lo, hi = _time_range(found)
    schema, scale = reading.schema, reading.scale
    if scale is None:
        scale, note = choose_scale(
            lo, hi, schema.per_unit, schema.per_second, config.time_unit, config.columns.zone
        )
        if note:
            say(note)
    counts = dict.fromkeys(("nodes", "pairs", "times"), sketch.empty())
    for record in found:
        for name, hashes in record.sketches.items():
            counts[name] = sketch.add(counts[name], hashes)
    if config.step == "distinct":
        steps = sketch.count(counts["times"])
    else:
        steps = build_grid(config.step, lo, hi, scale, since=reading.since, until=reading.until).n_steps
    sides = 1 if config.directed else 2
    used = rows - bad.total - sum(record.outside for record in found)
    return Estimate(
        rows=rows,
        nodes=sketch.count(counts["nodes"]),
        pairs=sides * sketch.count(counts["pairs"]),
        entries=sides * used,
        steps=steps,
        first=scale.show(lo),
        last=scale.show(hi),
    )


def find_newest(config: IngestConfig, run: Run = run_here) -> tuple[TimeScale, int]:
    """Return what a time is, and the newest one of all edges; reads the times once."""
    reading = _prepare(replace(config, since=None, until=None, last=None), "", run, lambda line: None)
    lo, hi = _time_range(list(run(scan, [replace(task, keep=False) for task in reading.tasks])))
    per_unit, per_second = reading.schema.per_unit, reading.schema.per_second
    scale, _ = choose_scale(lo, hi, per_unit, per_second, config.time_unit, config.columns.zone)
    return scale, hi


def _remove(folder: Path) -> None:
    """Remove a folder into which a task that was given up may still be writing."""
    for _ in range(100):
        remove_tree(folder)
        # A store that does not even answer: what it says is in the error that brought us here.
        with suppress(OSError):
            if not folder.exists():
                return
        time.sleep(0.1)


def _known_files(config: IngestConfig) -> tuple[str, ...]:
    if config.known is None:
        return ()
    folder = place(config.known)
    run = (folder / "registry").is_dir()
    try:
        known = json.loads((folder / ("manifest.json" if run else MANIFEST)).read_text())["config"]
        bipartite = known["bipartite"] if run else known["columns"]["bipartite"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(
            "earlier ingest",
            got=f"{config.known} ({type(error).__name__})",
            allowed=f"a folder with {MANIFEST} and nodes/, or a run with manifest.json and registry/",
        ) from None
    if bipartite != config.columns.bipartite:
        raise ConfigError(
            "earlier ingest",
            got="two spaces of nodes" if bipartite else "one space of nodes",
            allowed="the same choice of --bipartite",
        )
    return registry.registry_files(folder / ("registry" if run else "nodes"))


def _window(
    config: IngestConfig, tasks: Sequence[ScanTask], run: Run
) -> tuple[TimeScale | None, int | None, int | None]:
    """Return the window in ticks, and the scale where it is needed to read the window."""
    if config.since is None and config.until is None and config.last is None:
        return None, None, None
    schema: Schema = tasks[0].schema
    zone = config.columns.zone
    lo, hi = 0, 0
    if config.last is not None or (config.time_unit == "auto" and not schema.per_second):
        # Only a look at all times tells which unit they are in, and which is the newest.
        lo, hi = _time_range(list(run(scan, [replace(task, keep=False) for task in tasks])))
    scale, _ = choose_scale(lo, hi, schema.per_unit, schema.per_second, config.time_unit, zone)
    until = None if config.until is None else parse_moment(config.until, scale, "--until")
    since = None if config.since is None else parse_moment(config.since, scale, "--since")
    if config.last is not None:
        since = last_window(config.last, hi if until is None else until - 1, scale)
    if since is not None and until is not None and since >= until:
        raise ConfigError(
            "--since and --until",
            got=f"{scale.show(since)} and {scale.show(until)}",
            allowed="since before until",
        )
    return scale, since, until


def _time_range(found: Sequence[ScanRecord]) -> tuple[int, int]:
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


def _distinct_times(parts: Sequence[Part], work: str) -> np.ndarray[Any, Any]:
    times = np.empty(0, dtype=np.int64)
    for part in parts:
        times = np.union1d(times, read_array(part.times_path(work)))
        if len(times) > MAX_STEPS:
            break
    return times


def _build_registry(
    parts: Sequence[Part], bipartite: bool, known: tuple[str, ...], stage: Path, run: Run
) -> tuple[list[tuple[tuple[tuple[str, int, int, int], ...], ...]], int, int]:
    """Give every id a row. Return each part's way from its ids to rows, the known nodes, and all nodes."""
    work = str(stage / "work")
    tasks: list[BucketTask] = []
    for space in range(1 + bipartite):
        samples = [(part.counts[space], part.samples[space]) for part in parts]
        paths = tuple(str(part.ids_path(work, space)) for part in parts)
        for lo, hi in registry.choose_buckets(samples):
            tasks.append(BucketTask(len(tasks), space, lo, hi, paths, known, work))
    records: list[BucketRecord] = list(run(registry.merge_bucket, tasks))
    n_known = registry.count_known(known)
    bases = list(accumulate((record.n_new for record in records), initial=n_known))
    nodes = stage / "nodes"
    nodes.mkdir()
    items = [(task, base, str(nodes)) for task, base in zip(tasks, bases[:-1], strict=True)]
    for _ in run(registry.write_bucket, items):
        pass
    lookups = []
    for at in range(len(parts)):
        spaces = []
        for space in range(1 + bipartite):
            spaces.append(
                tuple(
                    (str(task.rows_path), record.offsets[at], record.offsets[at + 1], base)
                    for task, record, base in zip(tasks, records, bases[:-1], strict=True)
                    if task.space == space
                )
            )
        lookups.append(tuple(spaces))
    return lookups, n_known, bases[-1]
