"""TNE (Zhu et al., TKDE '16): non-negative vectors of length 1, smooth from snapshot to snapshot.

Time is cut into equal parts from the first link to the last (``snapshots``). A snapshot is 0/1 and
symmetric: a pair is in it if it has linked up to then (``snapshot_links`` cumulative), or within the part
(own). A node stays from its first snapshot on. The vectors are those of the last snapshot.

Every snapshot is a task that starts from the one before. Then rounds over all of them, with the snapshots on
both sides, until the joint objective falls by less than ``tol``:

    z-<round>-<snapshot>.npy, then <round>-<snapshot>.json
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.kernels.tne import fit_snapshot, join_rows, roughness, snapshot_misfit, start_rows
from toffee_dist.models.base import Cost, FitContext, FitReport, ReductionTask, one_role
from toffee_dist.models.htne import COMPILE_SECONDS, COMPILER_BYTES
from toffee_dist.settings import FitSettings
from toffee_dist.storage.files import read_json, remove_tree, save_array, write_json
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import load_rows
from toffee_dist.storage.tensors import Sizes, open_tensor
from toffee_dist.tensor import Floats, TemporalTensor

# The public code's passes over the rows of a snapshot, at the most.
PASSES = 300
# Rounds over all snapshots after the first, at the most.
MAX_ROUNDS = 5
COUNT = "snapshots.json"


@dataclass(frozen=True)
class SnapshotTask:
    """One snapshot in one round.

    Parameters
    ----------
    tensor, work
        Folders of the staged tensor and of the work.
    round, number, count
        Which round, which snapshot, and how many there are.
    options
        How to fit.
    """

    tensor: str
    work: str
    round: int
    number: int
    count: int
    options: FitSettings

    @property
    def done(self) -> Path:
        """The file that says that the snapshot is fitted."""
        return to_path(self.work) / f"{self.round:03d}-{self.number:05d}.json"

    def record(self) -> SnapshotRecord:
        """Return what that file says."""
        return SnapshotRecord(**read_json(self.done))


@dataclass(frozen=True)
class SnapshotRecord:
    """‖G − ZZᵀ‖² and Σ_u 1 − z(u)·z'(u) to the snapshot before, and how many passes were made."""

    misfit: float
    roughness: float
    passes: int
    converged: bool


@dataclass(frozen=True)
class LastTask:
    """The vectors from the last snapshot's file."""

    reduction: ReductionTask
    Z: str
    report: FitReport


@dataclass(frozen=True)
class SolvedRounds:
    """Where the work is, the file of every snapshot's Z, and how the fit went."""

    work: Path
    paths: list[Path]
    report: FitReport


def fit_tne(context: FitContext) -> FitReport:
    """Fit TNE: snapshot after snapshot, then rounds over all of them."""
    [wanted] = context.reduction_tasks()
    if wanted.finished():
        return wanted.read_report()
    found = solve_rounds(context)
    last = LastTask(wanted, str(found.paths[-1]), found.report)
    for _ in context.run(write_last, [last]):
        pass
    remove_tree(found.work)
    return found.report


def read_snapshots(context: FitContext) -> list[Floats]:
    """Fit TNE, and return the vectors of every snapshot."""
    found = solve_rounds(context)
    return [load_rows(path) for path in found.paths]


def solve_rounds(context: FitContext) -> SolvedRounds:
    """Fit all snapshots, round after round; what the folder of the context has is not done again."""
    began = time.perf_counter()
    work = to_path(context.folder) / f"{context.name}-work"
    work.mkdir(parents=True, exist_ok=True)
    first = SnapshotTask(context.tensor, str(work), 0, 0, 0, context.options)
    if not (work / COUNT).exists():
        for _ in context.run(count_snapshots, [first]):
            pass
    count = int(read_json(work / COUNT))
    values: list[float] = []
    passes, settled = 0, count <= 1
    for number in range(MAX_ROUNDS + 1):
        records: list[SnapshotRecord] = []
        for at in range(count):
            task = replace(first, round=number, number=at, count=count)
            records += [task.record()] if task.done.exists() else context.run(fit_one, [task])
        values.append(sum(r.misfit + context.options.smoothness * r.roughness for r in records))
        passes += sum(record.passes for record in records)
        settled = settled or (
            number > 0 and values[-2] - values[-1] <= context.options.tol * max(abs(values[-1]), 1.0)
        )
        if settled:
            break
    report = FitReport(
        values[-1], passes, time.perf_counter() - began, settled and all(r.converged for r in records)
    )
    return SolvedRounds(work, [_path(work, len(values) - 1, at) for at in range(count)], report)


def snapshot_bounds(tensor: TemporalTensor, count: int) -> list[int]:
    """Return where the snapshots begin and end, in steps: equal parts from the first entry to the last.

    There are no more of them than steps, and at least one.
    """
    if not tensor.n_entries:
        return [0, tensor.n_steps]
    first, last = int(np.min(tensor.steps)), int(np.max(tensor.steps)) + 1
    count = min(count, last - first)
    return [first + (last - first) * part // count for part in range(count + 1)]


def count_snapshots(task: SnapshotTask) -> None:
    """Leave how many snapshots there are."""
    bounds = snapshot_bounds(open_tensor(task.tensor), task.options.snapshots)
    write_json(to_path(task.work) / COUNT, len(bounds) - 1)


def build_snapshot(tensor: TemporalTensor, bounds: list[int], number: int, own: bool) -> sp.csr_matrix[Any]:
    """Return one snapshot: 0/1, symmetric."""
    steps, tube_ptr = np.asarray(tensor.steps), np.asarray(tensor.tube_ptr)
    inside = steps < bounds[number + 1]
    if own:
        inside &= steps >= bounds[number]
    # How many entries of every pair are inside.
    total = np.concatenate([[0], np.cumsum(inside)])
    pairs = np.flatnonzero(total[tube_ptr[1:]] > total[tube_ptr[:-1]])
    rows, columns = np.asarray(tensor.sources)[pairs], np.asarray(tensor.indices)[pairs]
    shape = (tensor.n_nodes, tensor.n_nodes)
    G = sp.csr_matrix((np.ones(len(pairs)), (rows, columns)), shape=shape)
    G = sp.csr_matrix(G.maximum(G.T))
    G.sort_indices()
    return G


def fit_one(task: SnapshotTask) -> SnapshotRecord:
    """Fit one snapshot, unless that was done, and leave its Z."""
    work, options = to_path(task.work), task.options
    if task.done.exists():
        return task.record()
    tensor = open_tensor(task.tensor)
    bounds = snapshot_bounds(tensor, options.snapshots)
    G = build_snapshot(tensor, bounds, task.number, options.snapshot_links == "own")
    before = load_rows(_path(work, task.round, task.number - 1)) if task.number else None
    after = None
    # Nodes of earlier snapshots stay, also where the snapshot has none of their links.
    live = np.diff(G.indptr) > 0
    if before is not None:
        live |= before.any(axis=1)
    if task.round:
        start = load_rows(_path(work, task.round - 1, task.number))
        if task.number + 1 < task.count:
            after = load_rows(_path(work, task.round - 1, task.number + 1))
    elif before is not None:
        start = join_rows(G, before, live, options.seed, task.number)
    else:
        start = start_rows(G, live, options.rank, options.seed)
    pull: Floats = np.zeros_like(start)
    for other in (before, after):
        if other is not None:
            pull += options.smoothness * other
    Z, history = fit_snapshot(
        G,
        start,
        pull,
        passes=options.epochs or PASSES,
        tol=options.tol,
        published=options.tne_step == "published",
    )
    record = SnapshotRecord(
        snapshot_misfit(G, Z),
        0.0 if before is None else roughness(Z, before),
        len(history) - 1,
        len(history) - 1 < (options.epochs or PASSES),
    )
    save_array(_path(work, task.round, task.number), Z)
    write_json(task.done, asdict(record))
    return record


def write_last(task: LastTask) -> None:
    """Leave the vectors."""
    task.reduction.write(one_role(load_rows(to_path(task.Z))), task.report)


def _path(work: Path, number: int, snapshot: int) -> Path:
    return work / f"z-{number:03d}-{snapshot:05d}.npy"


# Rough, on the safe side: on the six graphs of the paper the estimate is 4.5 to 7 times what was measured
# (benchmarks/paper.py).
# Seconds of a pass over the rows, per n·r² and per link·r.
ROW_SECONDS, LINK_SECONDS = 1.5e-9, 1e-9
# Passes that a snapshot takes until it settles, all rounds together.
USUAL_PASSES = 60


def tne_costs(sizes: Sizes, directed: bool, options: FitSettings) -> Sequence[Cost]:
    """Return what a fit takes."""
    n, rank = sizes.n_nodes, options.rank
    links = sizes.n_pairs * (2 if directed else 1)
    count = min(options.snapshots, sizes.n_steps)
    tall = 8 * n * rank
    seconds = min(options.epochs or PASSES, USUAL_PASSES) * (
        ROW_SECONDS * n * rank**2 + LINK_SECONDS * links * rank
    )
    return [
        Cost(
            "tne",
            f"{count} snapshots, one after the other",
            tasks=1,
            # Z, the snapshots on both sides, the pull and copies; the snapshot and its transpose.
            task_bytes=COMPILER_BYTES + 7 * tall + 48 * links + 24 * sizes.n_pairs + 24 * sizes.n_entries,
            seconds=count * seconds + COMPILE_SECONDS,
            disk=2 * count * tall + tall // 2,
        )
    ]
