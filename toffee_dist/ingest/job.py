"""The ingest: edges of any source into a staged tensor, a node registry and a time grid.

Five maps of independent tasks over a work folder; a task takes paths and returns a small record:

    scan      fragments → valid rows, sorted distinct ids         (scan.py)
    merge_bucket, write_bucket   a range of ids → rows            (registry.py)
    map_part  rows → sorted (source, target, step) words          (aggregate.py)
    merge_block   a block of rows → aggregated, weighted tubes    (aggregate.py)
    join_block    blocks → the arrays of one tensor               (storage/tensors.py)

What is decided before the first of them is in prepare.py.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest.aggregate import (
    BlockTask,
    MapTask,
    Packing,
    choose_blocks,
    count_bins,
    list_blocks,
    map_part,
    merge_block,
)
from toffee_dist.ingest.files import SourceFile, fingerprint
from toffee_dist.ingest.prepare import prepare, time_range
from toffee_dist.ingest.registry import BucketRecord, BucketTask, choose_buckets, merge_bucket, write_bucket
from toffee_dist.ingest.scan import ScanPart, scan
from toffee_dist.ingest.summary import Ingested, gather_bad, refuse_bad, write_manifest
from toffee_dist.limits import LIMITS, Limits
from toffee_dist.settings import MAX_STEPS, EdgeSettings
from toffee_dist.storage.files import check_writable, move_tree, read_array, remove_tree
from toffee_dist.storage.forgotten import Forgotten
from toffee_dist.storage.manifest import Summary
from toffee_dist.storage.paths import as_remote, to_path
from toffee_dist.storage.registry import count_known, registry_files
from toffee_dist.storage.runs import RunFolder, StagedEdges
from toffee_dist.storage.tensors import JoinTask, Sizes, join_block, make_arrays, write_header
from toffee_dist.tasks import RunTasks, Say, run_here
from toffee_dist.timegrid import TimeGrid, build_grid
from toffee_dist.words import hide_secrets


def ingest(
    settings: EdgeSettings,
    out: Path | str,
    run: RunTasks = run_here,
    say: Say = lambda line: None,
    check: Callable[[int, int], None] = lambda n_nodes, n_steps: None,
    limits: Limits = LIMITS,
    forgotten: Forgotten | None = None,
) -> Ingested:
    """Read the edges and stage the tensor.

    Everything is written beside `out` and moved there at the end; on failure nothing stays.

    Parameters
    ----------
    settings
        What to read and how.
    out
        A folder that does not exist yet, or is empty. It gets ``tensor/``, ``nodes/`` and ``ingest.json``.
    run
        Where the tasks run; see `cluster.mapping.runner`.
    say
        Is told every guess, one line each.
    check
        Is told the numbers of nodes and steps as soon as they are known, and may raise.
    limits
        How much one task does.
    forgotten
        Ids whose rows are left out.

    Raises
    ------
    ConfigError, InputError
        With nothing left behind.
    """
    out = to_path(out).absolute()
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(
            "output folder",
            got=f"{out}, which is not empty",
            allowed="a folder that does not exist yet",
            remedy="Choose another or remove it.",
        )
    check_writable(out.parent if as_remote(out) is None else out)
    # A store has no rename: there it is the manifest, written last, that makes the result.
    stage = out.parent / f".{out.name}.{uuid.uuid4().hex[:12]}" if as_remote(out) is None else out
    (stage / "work").mkdir(parents=True)
    try:
        result = _ingest(settings, stage, run, say, check, limits, forgotten)
        remove_tree(stage / "work")
        write_manifest(StagedEdges(stage), settings, *result)
        if stage != out:
            if out.exists():
                out.rmdir()
            move_tree(stage, out)
    except BaseException:
        _remove(stage)
        raise
    return Ingested(out, *result[:2])


def _ingest(
    settings: EdgeSettings,
    stage: Path,
    run: RunTasks,
    say: Say,
    check: Callable[[int, int], None],
    limits: Limits,
    forgotten: Forgotten | None,
) -> tuple[Summary, TimeGrid, list[SourceFile]]:
    known = _known_files(settings)
    work, tensor = str(stage / "work"), stage / "tensor"
    # Blocks on a store stay as they are; in a folder they are joined.
    joined = as_remote(stage) is None
    reading = prepare(settings, work, run, say, limits)
    files, tasks = reading.files, [replace(task, forgotten=forgotten) for task in reading.tasks]
    found = list(run(scan, tasks))
    bad = gather_bad(found, tasks)
    if settings.on_bad_rows == "error":
        refuse_bad(bad, sum(record.rows for record in found))
    lo, hi = time_range(found)
    scale = reading.find_scale(settings, lo, hi, say)
    parts = [part for record in found for part in record.parts]
    times = _distinct_times(parts, work) if settings.step == "distinct" else None
    grid = build_grid(settings.step, lo, hi, scale, since=reading.since, until=reading.until, distinct=times)

    lookups, n_known, n_nodes = _build_registry(parts, settings.bipartite, known, stage, run, limits)
    check(n_nodes, grid.n_steps)
    used = sum(part.rows for part in parts)
    n_words = used if settings.directed else 2 * used
    packing = Packing.choose(n_nodes, grid.n_steps, n_words, limits)
    maps = [
        MapTask(part, lookup, work, packing, grid, settings.directed, settings.entry)
        for part, lookup in zip(parts, lookups, strict=True)
    ]
    self_loops = sum(run(map_part, maps))
    names = tuple(part.name for part in parts)
    blocks = [
        BlockTask(
            index,
            bins,
            names,
            work,
            work if joined else str(tensor),
            packing,
            settings.directed,
            settings.entry,
            settings.weight_of_pairs,
        )
        for index, bins in enumerate(choose_blocks(count_bins(maps, packing.n_bins), limits))
    ]
    merged = list(run(merge_block, blocks))
    n_pairs, n_entries = sum(record.n_pairs for record in merged), sum(record.n_entries for record in merged)
    sizes = Sizes(n_nodes, grid.n_steps, n_pairs, n_entries)
    placed = list_blocks(blocks, merged)
    if joined:
        tensor.mkdir()
        make_arrays(tensor, sizes)
        for _ in run(join_block, [JoinTask(block, work, str(tensor)) for block in placed]):
            pass
    write_header(tensor, sizes, directed=settings.directed, blocks=placed, joined=joined)

    bits = np.bitwise_or.reduce([np.frombuffer(record.steps, dtype=np.uint8) for record in merged])
    steps_used = int(np.bitwise_count(bits).sum())
    summary = Summary(
        files=len(files),
        rows=sum(record.rows for record in found),
        skipped=dict(sorted(bad.counts.items())),
        comments=sum(record.comments for record in found),
        outside=sum(record.outside for record in found),
        forgotten=sum(record.forgotten for record in found),
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
        examples=[hide_secrets(str(example)) for example in bad.examples],
    )
    return summary, grid, files


def _remove(folder: Path) -> None:
    """Remove a folder into which a task that was given up may still be writing."""
    for _ in range(100):
        remove_tree(folder)
        # A store that does not even answer: what it says is in the error that brought us here.
        with suppress(OSError):
            if not folder.exists():
                return
        time.sleep(0.1)


def _known_files(settings: EdgeSettings) -> tuple[str, ...]:
    if settings.known is None:
        return ()
    run, staged = RunFolder.at(settings.known), StagedEdges(to_path(settings.known))
    is_run = run.registry.is_dir()
    try:
        if is_run:
            bipartite = run.read_manifest().config.bipartite
        else:
            known = staged.read().config
            # An ingest of an earlier version had the columns in a table of their own.
            bipartite = bool(known.get("columns", known)["bipartite"])
    except (InputError, KeyError) as error:
        raise ConfigError(
            "earlier ingest",
            got=f"{settings.known} ({type(error).__name__})",
            allowed="a folder with ingest.json and nodes/, or a run with manifest.json and registry/",
        ) from None
    if bipartite != settings.bipartite:
        raise ConfigError(
            "earlier ingest",
            got="two spaces of nodes" if bipartite else "one space of nodes",
            allowed="the same choice of --bipartite",
        )
    return registry_files(run.registry if is_run else staged.nodes)


def _distinct_times(parts: Sequence[ScanPart], work: str) -> np.ndarray[Any, Any]:
    times = np.empty(0, dtype=np.int64)
    for part in parts:
        times = np.union1d(times, read_array(part.times_path(work)))
        if len(times) > MAX_STEPS:
            break
    return times


def _build_registry(
    parts: Sequence[ScanPart],
    bipartite: bool,
    known: tuple[str, ...],
    stage: Path,
    run: RunTasks,
    limits: Limits,
) -> tuple[list[tuple[tuple[tuple[str, int, int, int], ...], ...]], int, int]:
    """Give every id a row. Return each part's way from its ids to rows, the known nodes, and all nodes."""
    work = str(stage / "work")
    tasks: list[BucketTask] = []
    for space in range(1 + bipartite):
        samples = [(part.counts[space], part.samples[space]) for part in parts]
        paths = tuple(str(part.ids_path(work, space)) for part in parts)
        for lo, hi in choose_buckets(samples, limits):
            tasks.append(BucketTask(len(tasks), space, lo, hi, paths, known, work))
    records: list[BucketRecord] = list(run(merge_bucket, tasks))
    n_known = count_known(known)
    bases = list(accumulate((record.n_new for record in records), initial=n_known))
    nodes = stage / "nodes"
    nodes.mkdir()
    items = [(task, base, str(nodes)) for task, base in zip(tasks, bases[:-1], strict=True)]
    for _ in run(write_bucket, items):
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
