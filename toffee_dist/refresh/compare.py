"""The tasks that set a run beside an earlier one: its rotation, how far nodes moved, links it predicted.

Rows never change between two runs of a chain, so row i is the same node in both. Like all tasks these take
paths, leave files and return small records; vectors pass through in blocks of nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.batch.write_outputs import OutputFolder, published_vectors, role_of
from toffee_dist.kernels.align import (
    Alignment,
    SubspaceAngles,
    degree_weights,
    neighbour_overlap,
    quantiles,
    rank_auc,
    row_cosines,
)
from toffee_dist.limits import LIMITS
from toffee_dist.storage import parquet
from toffee_dist.storage.changes import read_p_values
from toffee_dist.storage.files import save_array
from toffee_dist.storage.manifest import AlignmentRecord, Drift, LinksRecord, Mover
from toffee_dist.storage.parquet import GROUP_ROWS, open_dataset
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import Mask, RunFolder
from toffee_dist.storage.slices import HELD, ZeroSlice, load_rows
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.storage.vectors import damaged, first_line, iter_vectors, open_vectors

# Nodes among which neighbours are looked for, how many of them are asked, and movers that are named.
CANDIDATES, QUERIES, MOVERS = 5000, 300, 20
# Held-out links that are scored at the most.
LINKS = 20_000


def read_degrees(run: RunFolder, kept: Mask | None = None) -> NDArray[Any]:
    """Return the degree of a published run's nodes, or of those that are kept; -1 where it is null."""
    try:
        table = open_dataset([run.nodes]).to_table(columns=["degree"])
        column = table["degree"].fill_null(-1).to_numpy()
        return np.asarray(column if kept is None else column[kept])
    except (OSError, ValueError, pa.ArrowException) as error:
        raise damaged(run, f"{run.nodes.name}: {first_line(error)}") from None


@dataclass(frozen=True)
class AlignTask:
    """The rotation of a run onto the previous one."""

    run: str
    previous: str
    outputs: tuple[OutputFolder, ...]
    zero: ZeroSlice


def align_run(task: AlignTask) -> AlignmentRecord:
    """Leave the rotation, r×r; return over how many nodes it was found, and how well they then agree."""
    run, previous = RunFolder.at(task.run), RunFolder.at(task.previous)
    degree = load_rows(run.node_stat("degree"))
    kept = run.read_kept(previous.run_id)
    before = read_degrees(previous, kept)
    weights = np.asarray(np.minimum(before, degree[: len(before)]) > 0, dtype=np.float64)
    sums: Alignment | None = None
    # Both roles of a directed graph are in one basis: they turn together.
    for output in task.outputs:
        for start, vectors in iter_vectors(open_vectors(previous, output), kept):
            stop = start + len(vectors)
            now = task.zero.read_vectors(run.slices, role_of(output), start, stop)
            sums = sums or Alignment(now.shape[1])
            sums.add(now, vectors, weights[start:stop])
    assert sums is not None
    Q = sums.rotation()
    save_array(run.rotation, Q)
    return AlignmentRecord(nodes=sums.nodes, mean_cosine=sums.fit(Q), unaligned=sums.fit(np.eye(sums.rank)))


@dataclass(frozen=True)
class DriftTask:
    """What moved between an earlier run and this one, as published.

    Parameters
    ----------
    run, earlier
        The two.
    zero
        Where this run's vectors come from.
    table
        Whether to leave drift.parquet.
    seed
        Of the sample of nodes whose neighbours are compared.
    rows_at_once
        Rows of that table that are held at once.
    """

    run: str
    earlier: str
    zero: ZeroSlice
    table: bool
    seed: int
    rows_at_once: int = LIMITS.table_rows


def measure_drift(task: DriftTask) -> Drift:
    """Compare two runs node by node, and leave a table of it."""
    run, earlier = RunFolder.at(task.run), RunFolder.at(task.earlier)
    degree = load_rows(run.node_stat("degree"))
    still = run.read_kept(earlier.run_id)
    before = read_degrees(earlier, still)
    n, shared = len(degree), len(before)
    cosine, norm, norm_before = np.full(n, np.nan), np.zeros(n), np.zeros(n)
    weights = degree_weights(before, degree[:shared])
    sample = _sample(weights, task.seed)
    kept: list[list[NDArray[Any]]] = [[], []]
    angles: SubspaceAngles | None = None

    def now(start: int, stop: int) -> NDArray[Any]:
        E, _ = published_vectors(run, task.zero, "source", True, start, stop)
        norm[start:stop] = np.linalg.norm(E, axis=1)
        return E

    for start, F in iter_vectors(open_vectors(earlier, "embedding"), still):
        stop = start + len(F)
        E = now(start, stop)
        angles = angles or SubspaceAngles(F.shape[1])
        angles.add(E, F)
        cosine[start:stop] = row_cosines(E, F)
        norm_before[start:stop] = np.linalg.norm(F, axis=1)
        own = sample[(sample >= start) & (sample < stop)] - start
        kept[0].append(E[own])
        kept[1].append(F[own])
    for start in range(shared, n, GROUP_ROWS):
        now(start, min(start + GROUP_ROWS, n))
    assert angles is not None
    had, has = before > 0, degree[:shared] > 0
    state = np.full(n, "new", dtype=object)
    state[:shared] = np.select(
        [had & ~has, has & ~had, ~has & ~had], ["left", "returned", "absent"], default="stayed"
    )
    overlap = None
    if len(sample) > 1:
        queries = np.linspace(0, len(sample) - 1, min(QUERIES, len(sample))).astype(np.int64)
        E, F = (np.concatenate(part) for part in kept)
        overlap = float(neighbour_overlap(E, F, queries).mean())
    # Of nodes with one or two edges a large move is no news.
    known = np.flatnonzero(np.isfinite(cosine[:shared]))
    busy = known[weights[known] >= (np.median(weights[known]) if len(known) else 0)]
    movers = busy[np.argsort(cosine[busy], kind="stable")][:MOVERS]
    ids = dict.fromkeys(movers.tolist())
    p_value = read_p_values(run, n)

    def tables() -> Iterator[pa.Table]:
        for start in range(0, n, task.rows_at_once):
            stop = min(start + task.rows_at_once, n)
            rows = slice(start, stop)
            columns = read_ids(run.staged.nodes, start, stop)
            ids.update({r: columns["node_id"][r - start].as_py() for r in ids if start <= r < stop})
            columns |= {
                "row": pa.array(np.arange(start, stop)),
                "state": pa.array(state[rows], type=pa.string()),
                "cosine": pa.array(cosine[rows], mask=~np.isfinite(cosine[rows])),
                "norm_before": pa.array(norm_before[rows]),
                "norm": pa.array(norm[rows]),
                "p_value": pa.array(p_value[rows], mask=np.isnan(p_value[rows])),
            }
            yield pa.table(columns)

    if task.table:
        parquet.write_stream(run.drift, tables())
    else:
        for _ in tables():
            pass
    both = (norm > 0) & (norm_before > 0)
    return Drift(
        earlier=earlier.run_id,
        nodes=int(both.sum()),
        new=n - shared,
        left=int((state == "left").sum()),
        returned=int((state == "returned").sum()),
        expired=0 if still is None else int((~still).sum()),
        cosine=quantiles(cosine),
        norm_ratio=quantiles(norm[both] / norm_before[both]),
        overlap10=overlap,
        angle_mean=float(angles.degrees().mean()) if len(angles.degrees()) else 0.0,
        angle_max=float(angles.degrees().max(initial=0.0)),
        movers=[
            Mover(
                node_id=ids[r],
                row=r,
                cosine=float(cosine[r]),
                degree=int(degree[r]),
                p_value=_known(p_value[r]),
            )
            for r in movers.tolist()
        ],
    )


def _known(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _sample(weights: NDArray[np.float64], seed: int) -> NDArray[np.int64]:
    """Return rows of well-connected nodes, in order: those at or above the median weight, at random."""
    alive = np.flatnonzero(weights > 0)
    if not len(alive):
        return alive
    alive = alive[weights[alive] >= np.median(weights[alive])]
    rng = np.random.default_rng(seed)
    return np.sort(rng.choice(alive, min(CANDIDATES, len(alive)), replace=False))


@dataclass(frozen=True)
class LinksTask:
    """The links of the last steps, predicted by the previous run and by new vectors without those steps.

    Parameters
    ----------
    run, previous
        The new run, with the slice that has not seen the held-out steps, and the previous one.
    holdout
        How many steps at the end.
    outputs, zero
        Which roles have vectors, and where those of the new run are.
    seed
        Of the sample and of the pairs without a link.
    """

    run: str
    previous: str
    holdout: int
    outputs: tuple[OutputFolder, ...]
    zero: ZeroSlice
    seed: int


def score_links(task: LinksTask) -> LinksRecord:
    """Return the AUC of both, and how many links they were asked for.

    Scores are products of vectors. The pairs without a link have the same sources and the same targets in
    another order: knowing who is busy does not help.
    """
    run, previous = RunFolder.at(task.run), RunFolder.at(task.previous)
    tensor = open_tensor(run.staged.tensor)
    rng = np.random.default_rng([task.seed, tensor.n_steps])
    source, target = tensor.pairs_since(tensor.n_steps - task.holdout)
    # Nodes that both could know: an unknown node is no fault of either.
    kept = run.read_kept(previous.run_id)
    known = read_degrees(previous, kept) > 0
    seen = np.zeros(tensor.n_nodes, dtype=bool)
    seen[: len(known)] = known
    both = seen[source] & seen[target] & (source != target)
    linked = source * tensor.n_nodes + target
    source, target = source[both], target[both]
    if len(source) > LINKS:
        chosen = np.sort(rng.choice(len(source), LINKS, replace=False))
        source, target = source[chosen], target[chosen]
    other = rng.permutation(target)
    apart = (source != other) & ~np.isin(source * tensor.n_nodes + other, linked)
    found: dict[str, float | None] = {"before": None, "now": None}
    if apart.any():
        # One role or two: the last one is the targets'.
        outputs = (task.outputs[0], task.outputs[-1])
        nodes = np.unique(np.concatenate([source, target]))
        i, j, o = (np.searchsorted(nodes, rows) for rows in (source, target, other))
        for name in found:
            if name == "before":
                tables = (open_vectors(previous, output) for output in outputs)
                E, F = (_gather(iter_vectors(table, kept), nodes) for table in tables)
            else:
                E, F = (task.zero.read_vectors(run.slices, role_of(output))[nodes] for output in outputs)
            yes = np.einsum("ir,ir->i", E[i], F[j], dtype=np.float64)
            no = np.einsum("ir,ir->i", E[i[apart]], F[o[apart]], dtype=np.float64)
            found[name] = rank_auc(yes, no)
    return LinksRecord(links=len(source), steps=task.holdout, **found)


def held_out(zero: ZeroSlice) -> ZeroSlice:
    """Return where the vectors are that have not seen the held-out steps, in the form of those that have."""
    return ZeroSlice(HELD, zero.form)


def _gather(blocks: Iterator[tuple[int, NDArray[Any]]], rows: NDArray[np.int64]) -> NDArray[Any]:
    """Return some rows, in order, of vectors that come in blocks."""
    parts = []
    for start, vectors in blocks:
        parts.append(vectors[rows[(rows >= start) & (rows < start + len(vectors))] - start])
    return np.concatenate(parts)
