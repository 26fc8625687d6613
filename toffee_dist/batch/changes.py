"""The tasks that look for changes: a small one, a map over blocks of nodes, and one that judges.

    watch     when events come, and the community of every node
    blocks    entries of a block → a test of every node, and what its events add to communities and the graph
    judge     the sums of all blocks, in their order → changes.parquet and changes.json

They need the staged tensor and the singular vectors of the sum over time, by rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.errors import InputError
from toffee_dist.kernels.align import unit_rows
from toffee_dist.kernels.changes import (
    GRAPH_DIRECTIONS,
    NODE_DIRECTIONS,
    Clock,
    Events,
    Sums,
    compare_rhythms,
    find_moments,
    find_shift,
    node_changes,
    pair_variances,
)
from toffee_dist.kernels.communities import centres_of, find_communities, nearest_centres
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.gauge import canonical_vectors
from toffee_dist.limits import LIMITS
from toffee_dist.models import find_model
from toffee_dist.settings import ModelSettings
from toffee_dist.storage import parquet
from toffee_dist.storage.changes import (
    ALERT_RATE,
    MOST_NODES,
    ChangesRecord,
    CommunityChange,
    Moment,
    NodeChange,
    RhythmChange,
    Tests,
    shared_rates,
)
from toffee_dist.storage.manifest import read_record, write_record
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import (
    array_path,
    is_finished,
    load_rows,
    open_array,
    slice_name,
    write_arrays,
)
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.tensor import Floats, Ints, TemporalTensor
from toffee_dist.timegrid import TimeGrid, name_period

# Nodes that communities are found of; the others join the nearest.
SAMPLE = 4000
# Members of a community that are named: the best connected.
MEMBERS = 3
# Entries that are read at once where nothing else is held.
READ_AT_ONCE = 1 << 22

# Bytes per entry of a block's task, in units of `trajectory.ENTRY_BYTES`: its products, their running sums.
ENTRY_NUMBERS = 48

WATCH = "watch"


def is_watched(settings: ModelSettings, refreshed: bool) -> bool:
    """Whether changes are looked for: in runs with a trajectory and in refreshes, of the sum over time."""
    sums = settings.reduce == "sum" or "trajectory" in settings.outputs
    own = find_model(settings.model).from_zero_slice and settings.outputs != ("spectrum",)
    return own and sums and (refreshed or "trajectory" in settings.outputs)


@dataclass(frozen=True)
class WatchTask:
    """When events come, and which nodes belong together."""

    run: str
    seed: int


def write_watch(task: WatchTask) -> None:
    """Leave events per step, their variance, and the community of every node; −1: it has no links."""
    run = RunFolder.at(task.run)
    arrays = ("activity", "variance", "labels")
    if is_finished(run.slices, WATCH, arrays):
        return
    tensor = open_tensor(run.staged.tensor)
    clock = read_clock(tensor)
    found = {
        "activity": clock.activity,
        "variance": np.array([clock.variance]),
        "labels": _label(run, tensor.n_nodes, task.seed),
    }
    write_arrays(run.slices, WATCH, found)


def read_clock(tensor: TemporalTensor) -> Clock:
    """Count the events of every step and, for their variance, those of every pair; each pair once."""
    activity = np.zeros(tensor.n_steps)
    repeats = np.zeros(tensor.n_steps + 1)
    before = np.asarray(tensor.tube_ptr)[np.asarray(tensor.indptr)]
    cuts = np.unique(np.searchsorted(before, np.arange(0, before[-1] + READ_AT_ONCE, READ_AT_ONCE)))
    cuts = np.unique(np.append(np.minimum(cuts, tensor.n_nodes), [0, tensor.n_nodes]))
    for start, stop in pairwise(cuts.tolist()):
        block = tensor.take_rows(start, stop)
        once = _once(tensor, block.sources + start, np.asarray(block.indices))
        counts = np.diff(np.asarray(block.tube_ptr))
        repeats += np.bincount(counts[once], minlength=len(repeats))[: len(repeats)]
        activity += np.bincount(np.asarray(block.steps)[once[block.entry_pairs]], minlength=len(activity))
    spread = Clock(activity, 0.0).spread
    m = np.arange(len(repeats))
    room = np.maximum(1 - (m - 1) / max(spread - 1.0, 1.0), 0.0)
    return Clock(activity, float((repeats * m * room).sum()))


def _once(tensor: TemporalTensor, source: Ints, target: Ints) -> NDArray[np.bool_]:
    """Whether a pair counts here; of an undirected graph its mirror does not."""
    return np.asarray(np.ones(len(source), dtype=bool) if tensor.directed else source <= target)


def _label(run: RunFolder, n_nodes: int, seed: int) -> NDArray[np.int8]:
    """Find communities among a sample by k-means on their directions; the others join the nearest."""
    U, V = (open_array(array_path(run.slices, name, slice_name(0))) for name in "UV")
    S = load_rows(array_path(run.slices, "S", slice_name(0)))

    def directions(rows: Any) -> Floats:
        # A node that is only a target has its place among targets.
        source, target = (unit_rows(canonical_vectors(np.asarray(E[rows]), S)) for E in (U, V))
        return np.asarray(np.where(np.any(source, axis=1)[:, None], source, target))

    degree = load_rows(run.node_stat("degree"))
    linked = np.flatnonzero(degree > 0)
    labels = np.full(n_nodes, -1, dtype=np.int8)
    if not len(linked):
        return labels
    sample = np.sort(np.random.default_rng(seed).permutation(linked)[:SAMPLE])
    chosen = directions(sample)
    own, _ = find_communities(chosen, seed)
    centres = centres_of(chosen, own, int(own.max()) + 1)
    for start in range(0, len(linked), parquet.GROUP_ROWS):
        rows = linked[start : start + parquet.GROUP_ROWS]
        labels[rows] = nearest_centres(directions(rows), centres)
    labels[sample] = own
    return labels


@dataclass(frozen=True)
class WatchBlockTask:
    """A block of nodes: a test of each, and what its events add to communities and the graph."""

    run: str
    index: int
    start: int
    stop: int

    @property
    def name(self) -> str:
        """Of what it leaves beside the slices."""
        return f"watch-{self.index:05d}"


def watch_block(task: WatchBlockTask) -> None:
    """Leave p, step and size of every node of a block, and its sums, unless they are there."""
    run = RunFolder.at(task.run)
    arrays = ("p", "when", "size", "tested", "sums")
    if is_finished(run.slices, task.name, arrays):
        return
    tensor, clock = open_tensor(run.staged.tensor), _load_clock(run)
    U, V = (open_array(array_path(run.slices, name, slice_name(0))) for name in "UV")
    block = tensor.take_rows(task.start, task.stop)
    entries = NodeEntries.of(block)
    found = node_changes(entries, lambda rows: np.asarray(V[rows])[:, :NODE_DIRECTIONS], clock)
    source, target, v, c, _ = pair_variances(entries, clock.spread)
    value = np.asarray(entries.value, dtype=np.float64)
    events = Events(block.n_steps, np.asarray(block.entry_pairs), entries.step, value, v, c)
    source = source + task.start
    once = _once(tensor, source, target)
    labels = load_rows(array_path(run.slices, "labels", WATCH))
    sums = watched_sums(events.of(once), source[once], target[once], U, V, labels, tensor.directed)
    packed = np.concatenate([_pack(part) for part in sums])
    results: dict[str, NDArray[Any]] = {
        "p": found.p,
        "when": found.step,
        "size": found.size,
        "tested": found.tested,
        "sums": packed,
    }
    write_arrays(run.slices, task.name, results)


def watched_sums(
    events: Events, source: Ints, target: Ints, U: Any, V: Any, labels: Ints, directed: bool
) -> list[Sums]:
    """Return the sums of the graph, then of every community, of some pairs.

    An event (i, j) adds to the graph the products of the leading directions of both ends, to the community
    of i the row V_j, and, of an undirected graph, V_i to that of j: both where they are one.

    Parameters
    ----------
    events
        Each pair once.
    source, target
        The ends of the pairs.
    U, V
        Singular vectors of the sum over time, which give rows by their numbers.
    labels
        The community of every node.
    directed
        Whether (i, j) differs from (j, i).
    """
    rows, at = np.unique(np.concatenate([source, target]), return_inverse=True)
    left, right = (np.asarray(E[rows], dtype=np.float64) for E in (U, V))
    i, j = at[: len(source)], at[len(source) :]
    q = min(GRAPH_DIRECTIONS, left.shape[1])
    if directed:
        x = (left[i, :q, None] * right[j, None, :q]).reshape(len(i), q * q)
    else:
        a, b = np.triu_indices(q)
        x = right[i][:, a] * right[j][:, b] + right[i][:, b] * right[j][:, a]
    found = [Sums.of(events, x)]
    d = min(NODE_DIRECTIONS, right.shape[1])
    ends = labels[source], labels[target]
    for label in range(int(labels.max(initial=-1)) + 1):
        x = (ends[0] == label)[:, None] * right[j, :d]
        if not directed:
            x = x + ((ends[1] == label) & (source != target))[:, None] * right[i, :d]
        chosen = (ends[0] == label) if directed else (ends[0] == label) | (ends[1] == label)
        found.append(Sums.of(events.of(chosen), x[chosen]))
    return found


def _pack(sums: Sums) -> Floats:
    return np.concatenate([sums.rows.ravel(), sums.G.ravel(), sums.g, [sums.fourth]])


def _unpack(packed: Floats, n_steps: int, sizes: Sequence[int]) -> list[Sums]:
    found, at = [], 0
    for d in sizes:
        rows, G, g = packed[at : at + n_steps * d], at + n_steps * d, at + n_steps * d + d * d
        found.append(
            Sums(rows.reshape(n_steps, d), packed[G:g].reshape(d, d), packed[g : g + d], packed[g + d])
        )
        at = g + d + 1
    return found


def _load_clock(run: RunFolder) -> Clock:
    activity, variance = (load_rows(array_path(run.slices, name, WATCH)) for name in ("activity", "variance"))
    return Clock(activity, float(variance[0]))


@dataclass(frozen=True)
class JudgeTask:
    """The judgement of all tests.

    Parameters
    ----------
    run
        Folder of the run.
    cuts
        The first node of every block, and the number of nodes.
    grid
        The steps as times.
    previous
        Folder of the previous run, whose alert file says what is not new; empty: none.
    rows_at_once
        Rows of the table that are held at once.
    """

    run: str
    cuts: tuple[int, ...]
    grid: TimeGrid
    previous: str = ""
    rows_at_once: int = LIMITS.table_rows


def judge_changes(task: JudgeTask) -> dict[str, int]:
    """Write changes.parquet and changes.json; return how many of each kind are significant."""
    run = RunFolder.at(task.run)
    tensor, clock = open_tensor(run.staged.tensor), _load_clock(run)
    labels = load_rows(array_path(run.slices, "labels", WATCH))
    graph, communities = _add_blocks(run, task, tensor, int(labels.max(initial=-1)) + 1)
    moments = find_moments(graph, clock)
    sizes = np.bincount(labels[labels >= 0], minlength=len(communities))
    shifts = [find_shift(sums, clock) for sums in communities]
    significant = [shift.step for shift in moments if 0 < shift.step and shift.p <= ALERT_RATE]
    rhythms = compare_rhythms(graph.rows, graph.G, np.array(significant, dtype=np.int64))
    names = ("p", "when", "size", "tested")
    blocks = range(len(task.cuts) - 1)
    p, when, size, tested = (
        np.concatenate([load_rows(array_path(run.slices, name, f"watch-{at:05d}")) for at in blocks])
        for name in names
    )
    q = np.ones(len(p))
    q[tested] = shared_rates(p[tested])
    chosen = np.flatnonzero(q <= ALERT_RATE)
    chosen = chosen[np.argsort(p[chosen], kind="stable")]
    named = chosen[:MOST_NODES]
    members = _best_connected(run, labels, len(communities))
    wanted = {*named.tolist(), *(row for rows in members for row in rows)}
    ids = _write_table(run, task, {"p": p, "when": when, "size": size}, labels, tested, wanted)
    known = _known(task.previous)
    show = task.grid.show

    def start(step: int) -> str:
        return show(step) if step >= 0 else ""

    tests = Tests(
        communities=[
            CommunityChange(
                community=at,
                nodes=int(sizes[at]),
                members=[ids[row][0] for row in members[at]],
                step=shift.step,
                start=start(shift.step),
                size=shift.size,
                p_value=shift.p,
                q_value=rate,
            )
            for at, (shift, rate) in enumerate(zip(shifts, _rates([s.p for s in shifts]), strict=True))
        ],
        rhythms=[
            RhythmChange(
                k=int(rhythms.k[at]),
                period_steps=float(rhythms.period[at]),
                period=name_period(float(rhythms.period[at]), task.grid),
                before=float(rhythms.before[at]),
                after=float(rhythms.after[at]),
                new=("rhythm", name_period(float(rhythms.period[at]), task.grid)) not in known,
                p_value=float(rhythms.p[at]),
                q_value=rate,
            )
            for at, rate in enumerate(_rates(rhythms.p))
        ],
        moments=[
            Moment(
                step=shift.step,
                start=start(shift.step),
                size=shift.size,
                new=("moment", start(shift.step)) not in known,
                p_value=shift.p,
                # Their chances are of any moment at all: one kind, one test.
                q_value=_rates([shift.p])[0],
            )
            for shift in moments
        ],
    )
    record = ChangesRecord(
        rate=ALERT_RATE,
        tested={
            "nodes": int(tested.sum()),
            "communities": len(tests.communities),
            "rhythms": len(tests.rhythms),
            "moments": 1,
        },
        found=len(chosen),
        nodes=[
            NodeChange(
                node_id=ids[row][0],
                space=ids[row][1],
                row=row,
                step=max(int(when[row]), 0),
                start=start(int(when[row])),
                size=float(size[row]),
                new=("node", str(ids[row][0]), ids[row][1]) not in known,
                p_value=float(p[row]),
                q_value=float(q[row]),
            )
            for row in named.tolist()
        ],
        communities=_significant(tests.communities),
        rhythms=_significant(tests.rhythms),
        moments=_significant(tests.moments),
        tests=tests,
    )
    write_record(run.changes, record)
    kinds = ("communities", "rhythms", "moments")
    return {"nodes": len(chosen), **{kind: len(getattr(record, kind)) for kind in kinds}}


def _significant(tests: list[Any]) -> list[Any]:
    return sorted((test for test in tests if test.q_value <= ALERT_RATE), key=lambda test: test.p_value)


def _rates(p: Any) -> list[float]:
    return [float(q) for q in shared_rates(np.asarray(p, dtype=np.float64))]


def _add_blocks(
    run: RunFolder, task: JudgeTask, tensor: TemporalTensor, count: int
) -> tuple[Sums, list[Sums]]:
    """Return the sums of the graph and of every community, over the blocks in their order."""
    rank = open_array(array_path(run.slices, "V", slice_name(0))).shape[1]
    q, d = min(GRAPH_DIRECTIONS, rank), min(NODE_DIRECTIONS, rank)
    sizes = [q * q if tensor.directed else q * (q + 1) // 2, *[d] * count]
    total = [Sums.zero(tensor.n_steps, size) for size in sizes]
    for at in range(len(task.cuts) - 1):
        packed = load_rows(array_path(run.slices, "sums", f"watch-{at:05d}"))
        total = [a + b for a, b in zip(total, _unpack(packed, tensor.n_steps, sizes), strict=True)]
    return total[0], total[1:]


def _best_connected(run: RunFolder, labels: Ints, count: int) -> list[list[int]]:
    degree = load_rows(run.node_stat("degree"))
    found = []
    for label in range(count):
        rows = np.flatnonzero(labels == label)
        found.append(rows[np.argsort(-degree[rows], kind="stable")[:MEMBERS]].tolist())
    return found


def _write_table(
    run: RunFolder,
    task: JudgeTask,
    columns: dict[str, NDArray[Any]],
    labels: Ints,
    tested: NDArray[np.bool_],
    wanted: set[int],
) -> dict[int, tuple[Any, str | None]]:
    """Write a row per node, and return the ids of some."""
    ids: dict[int, tuple[Any, str | None]] = {}
    asked = np.array(sorted(wanted), dtype=np.int64)

    def tables() -> Iterator[pa.Table]:
        for start in range(0, len(labels), task.rows_at_once):
            rows = slice(start, min(start + task.rows_at_once, len(labels)))
            named = read_ids(run.staged.nodes, rows.start, rows.stop)
            for row in asked[(asked >= rows.start) & (asked < rows.stop)].tolist():
                space = named["space"][row - start].as_py() if "space" in named else None
                ids[row] = (_plain(named["node_id"][row - start].as_py()), space)
            yield pa.table(
                named
                | {
                    "row": pa.array(np.arange(rows.start, rows.stop)),
                    "community": pa.array(labels[rows], mask=labels[rows] < 0),
                    "p_value": pa.array(columns["p"][rows], mask=~tested[rows]),
                    "step": pa.array(columns["when"][rows], mask=columns["when"][rows] < 0),
                    "size": pa.array(columns["size"][rows], mask=columns["when"][rows] < 0),
                }
            )

    parquet.write_stream(run.change_table, tables())
    return ids


def _plain(node_id: Any) -> Any:
    """Return an id as JSON can hold it."""
    return node_id if isinstance(node_id, int | str) else str(node_id)


def _known(previous: str) -> set[tuple[Any, ...]]:
    """Return what the previous run's alert file has; nothing where it has none, or none that can be read."""
    if not previous:
        return set()
    path = RunFolder.at(previous).changes
    if not path.exists():
        return set()
    with suppress(InputError):
        before = read_record(path, ChangesRecord)
        return {
            *(("node", str(node.node_id), node.space) for node in before.nodes),
            *(("rhythm", rhythm.period) for rhythm in before.rhythms),
            *(("moment", moment.start) for moment in before.moments),
        }
    return set()
