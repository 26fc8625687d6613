"""The tasks of a filtered trajectory: maps over blocks of nodes, and small tasks between them.

    patterns some blocks: how alike steps are (T×T numbers) → patterns in time that many nodes share
    blocks   entries of a block → its compact form, and its energies (F×r numbers)
    kernel   the sum of all energies, in the order of blocks → gains → one kernel per direction
    parts    compact form and kernel → vectors of the steps that are asked for, as Parquet

They need the staged tensor and the basis V, by rows, and what a causal chain goes on from (`batch.past`).
Block boundaries depend on entries and limits only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.batch.energy import ENERGY
from toffee_dist.batch.past import NO_PAST, Past
from toffee_dist.errors import QualityError
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.filter import TimeKernel
from toffee_dist.kernels.gains import (
    Energies,
    add_energies,
    epoch_energies,
    gains,
    no_patterns,
    padded_length,
)
from toffee_dist.kernels.patterns import PatternSums, find_patterns, pattern_sums
from toffee_dist.settings import Basis, DenseNodes, DensePrecision, ModelSettings, parse_dense
from toffee_dist.storage import parquet
from toffee_dist.storage.compact import (
    HEADER,
    CompactTrajectory,
    has_entries,
    write_entries,
    write_kernel,
)
from toffee_dist.storage.paths import to_path
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
from toffee_dist.storage.tensors import open_tensor, read_kind
from toffee_dist.tensor import Floats

# Without an answer to --dense: Parquet of all steps up to this size.
DENSE_BYTES = 256 * 2**20
# Bytes of a row of that Parquet beside its vector: step, noise, its share of pages; more of the id where a
# node has few rows.
ROW_BYTES = {"all": 12, "active": 20}
# Bytes of one entry, per direction, in the task of a block: its row of V, its y, squares in double.
ENTRY_BYTES = 4 + 4 + 3 * 8
# Blocks that patterns are looked for in: they are of all nodes, and some blocks of a large graph tell them.
# Between these numbers, as many as their T×T sums take up to so many bytes.
PATTERN_BLOCKS, SUMS_BYTES = (16, 128), 1 << 29
# Name of the patterns beside the slices, and what a block leaves there.
PATTERNS = "patterns"
LEFT = ("signal", "noise", "own", "activity")
SUMS = ("sums", "rows")


def basis_path(run: RunFolder, basis: Basis, past: Past = NO_PAST) -> Path:
    """Return where the basis of the trajectory is."""
    if past.basis:
        return to_path(past.basis)
    return array_path(run.slices, "V", slice_name(0) if basis == "sum" else ENERGY)


@dataclass(frozen=True)
class CutTask:
    """Where the blocks begin, so that each has about as many entries as its task may hold."""

    run: str
    rank: int
    block_bytes: int
    past: Past = NO_PAST


def cut_blocks(task: CutTask) -> tuple[int, ...]:
    """Return the first node of every block, and the number of nodes."""
    run = RunFolder.at(task.run)
    tensor = open_tensor(run.staged.tensor)
    most = max(1, task.block_bytes // (ENTRY_BYTES * task.rank))
    before = np.asarray(tensor.tube_ptr)[np.asarray(tensor.indptr)].astype(np.int64)
    before[1:] += np.cumsum(task.past.count(tensor.n_nodes, run))
    cuts = np.searchsorted(before, np.arange(0, int(before[-1]) + most, most))
    return tuple(
        int(cut) for cut in np.unique(np.append(np.minimum(cuts, tensor.n_nodes), [0, tensor.n_nodes]))
    )


@dataclass(frozen=True)
class BlockTask:
    """A block of nodes: its compact form and its energies.

    Parameters
    ----------
    run
        Folder of the run.
    index, start, stop
        Number and nodes of the block.
    basis
        Which basis, which must be there.
    causal
        Whether energies are also taken of every past.
    past
        What the trajectory goes on from.
    """

    run: str
    index: int
    start: int
    stop: int
    basis: Basis
    causal: bool
    past: Past = NO_PAST

    @property
    def name(self) -> str:
        """Of what it leaves beside the slices."""
        return f"block-{self.index:05d}"


def write_block(task: BlockTask) -> None:
    """Leave the entries, the basis and the energies of a block, unless they are there."""
    run = RunFolder.at(task.run)
    if is_finished(run.slices, task.name, LEFT) and has_entries(run.compact, task.index):
        return
    V = open_array(basis_path(run, task.basis, task.past))
    block = open_tensor(run.staged.tensor).take_rows(task.start, task.stop)
    entries = task.past.join(NodeEntries.of(block), task.start, task.stop, run)
    write_entries(run.compact, task.index, entries, np.asarray(V[task.start : task.stop], dtype=np.float32))
    span, patterns = task.past.span(block.n_steps), read_patterns(run)
    rows = entries.project(lambda targets: V[targets])
    found = epoch_energies(rows, span, task.causal, patterns)
    pairs = epoch_energies(entries.pairs(), span, task.causal)
    # Without an epoch among the new steps of a chain, nothing is learnt.
    signal, noise = [np.empty((0, rows.rank + 1))], [np.empty((0, rows.rank + 1))]
    own = np.zeros((2, patterns.shape[1], rows.rank))
    for a, b in zip(found, pairs, strict=True):
        signal.append(np.hstack([a.signal, b.signal]))
        noise.append(np.append(a.noise, b.noise)[None])
        own = np.stack([a.pattern_signal, a.pattern_noise])
    activity = np.bincount(entries.step, minlength=entries.n_steps)
    arrays = (np.concatenate(signal), np.concatenate(noise), own, activity)
    write_arrays(run.slices, task.name, dict(zip(LEFT, arrays, strict=True)))


@dataclass(frozen=True)
class LookTask:
    """A block that patterns are looked for in, one of so many."""

    block: BlockTask
    blocks: int

    @property
    def name(self) -> str:
        """Of what it leaves beside the slices."""
        return f"{PATTERNS}-{self.block.index:05d}"


def most_looks(n_steps: int) -> int:
    """Return how many blocks patterns are looked for in, at the most.

    Examples
    --------
    >>> most_looks(90), most_looks(2048)
    (128, 16)
    """
    fewest, most = PATTERN_BLOCKS
    return max(fewest, min(most, SUMS_BYTES // (8 * n_steps**2)))


def look_tasks(blocks: Sequence[BlockTask], n_steps: int) -> list[LookTask]:
    """Return the blocks that patterns are looked for in, from all over."""
    some = blocks[:: -(-len(blocks) // most_looks(n_steps))]
    return [LookTask(block, len(some)) for block in some]


def look_for_patterns(task: LookTask) -> None:
    """Leave how alike steps are to the busiest nodes of a block, unless it is there."""
    run, block = RunFolder.at(task.block.run), task.block
    if is_finished(run.slices, task.name, SUMS):
        return
    V = open_array(basis_path(run, block.basis))
    entries = NodeEntries.of(open_tensor(run.staged.tensor).take_rows(block.start, block.stop))
    found = pattern_sums(entries, lambda targets: V[targets], task.blocks)
    arrays = (found.matrix, np.array([found.rows]))
    write_arrays(run.slices, task.name, dict(zip(SUMS, arrays, strict=True)))


@dataclass(frozen=True)
class PatternsTask:
    """The patterns in time that many nodes share, from what some blocks have left."""

    run: str
    names: tuple[str, ...]


def choose_patterns(task: PatternsTask) -> int:
    """Leave the patterns, unless they are there; return how many they are."""
    run = RunFolder.at(task.run)
    if not is_finished(run.slices, PATTERNS, ("patterns",)):
        T = open_tensor(run.staged.tensor).n_steps
        found = no_patterns(T)
        if task.names:
            total = PatternSums(np.zeros((T, T)), 0)
            for name in task.names:
                matrix, rows = (load_rows(array_path(run.slices, part, name)) for part in SUMS)
                total += PatternSums(matrix, int(rows[0]))
            found = find_patterns(total)
        write_arrays(run.slices, PATTERNS, {"patterns": found})
    return int(read_patterns(run).shape[1])


def read_patterns(run: RunFolder) -> Floats:
    """Return the patterns of a run, (T, q)."""
    return np.asarray(load_rows(array_path(run.slices, "patterns", PATTERNS)))


@dataclass(frozen=True)
class KernelTask:
    """The kernel in time of every direction, from the energies of all blocks."""

    run: str
    cuts: tuple[int, ...]
    causal: bool
    strength: float
    space_id: str
    past: Past = NO_PAST


@dataclass(frozen=True)
class KernelRecord:
    """How much of the movement is kept: the share of energy above the mean that the gains let through.

    None where no gains were learnt: those of the chain serve on.
    """

    kept: float | None


def learn_kernels(task: KernelTask) -> KernelRecord:
    """Add the energies of all blocks in their order, and leave the kernels."""
    run = RunFolder.at(task.run)
    directed, n_steps = read_kind(run.staged.tensor)
    span, patterns = task.past.span(n_steps), read_patterns(run)
    total, alone = list[Energies](), list[Energies]()
    pasts = [span.past(moment) for moment in span.epochs(task.causal)]
    edges = np.cumsum([0, *(padded_length(stop - start) // 2 + 1 for start, stop in pasts)])
    activity = np.zeros(span.n_steps, dtype=np.int64)
    for index in range(len(task.cuts) - 1):
        signal, noise, own, steps = (
            load_rows(array_path(run.slices, name, f"block-{index:05d}")) for name in LEFT
        )
        activity += steps
        epoch = list(zip(pairwise(edges), noise, strict=True))
        total = add_energies(total, [Energies(signal[a:b, :-1], row[:-1], *own) for (a, b), row in epoch])
        none = np.zeros((2, 0, 1))
        alone = add_energies(alone, [Energies(signal[a:b, -1:], row[-1:], *none) for (a, b), row in epoch])
    if not (run.compact / HEADER).exists():
        earlier = task.past.kernels()
        kernel = TimeKernel.learn(total, span, task.causal, task.strength, earlier[0], patterns)
        pairs = TimeKernel.learn(alone, span, task.causal, task.strength, earlier[1])
        write_kernel(
            run.compact, kernel, pairs, activity, task.cuts, directed=directed, space_id=task.space_id
        )
    if not total:
        return KernelRecord(None)
    last = total[-1]
    passed = sum(
        float((np.square(gains(signal, noise, task.strength)) * signal).sum())
        for signal, noise in ((last.signal, last.noise), (last.pattern_signal, last.pattern_noise))
    )
    everything = float(last.signal.sum() + last.pattern_signal.sum())
    return KernelRecord(passed / everything if everything > 0 else 0.0)


@dataclass(frozen=True)
class Dense:
    """What of a filtered trajectory is also written as Parquet.

    Parameters
    ----------
    steps
        Which steps; none: no Parquet.
    nodes
        Whether a step has a row of all nodes, or of those that are active: with an entry at the step. The
        tensor of an undirected graph has every entry in both orders; of a directed one, it is the source that
        moves.
    precision
        Of the numbers.
    """

    steps: tuple[int, ...] = ()
    nodes: DenseNodes = "all"
    precision: DensePrecision = "single"

    @classmethod
    def asked(cls, settings: ModelSettings, n_nodes: int, n_steps: int, n_entries: int) -> Dense:
        """Return what is asked for, of a tensor of these sizes; ``auto`` is all steps or none."""
        kind, numbers = parse_dense(settings.dense)
        every = cls(tuple(range(n_steps)), settings.dense_nodes, settings.dense_precision)
        if kind == "auto":
            small = every.bytes(every.most_rows(n_nodes, n_entries), settings.rank) <= DENSE_BYTES
            kind = "all" if small else "none"
        if kind == "last":
            return replace(every, steps=every.steps[-numbers[0] :])
        if kind == "every":
            return replace(every, steps=every.steps[:: numbers[0]])
        if kind == "steps":
            return replace(every, steps=tuple(step for step in numbers if step < n_steps))
        return every if kind == "all" else replace(every, steps=())

    def most_rows(self, n_nodes: int, n_entries: int) -> int:
        """Return how many rows there are: exactly of all nodes, at the most of active ones."""
        rows = n_nodes * len(self.steps)
        return rows if self.nodes == "all" else min(rows, n_entries)

    def bytes(self, rows: int, rank: int) -> int:
        """Return the size of Parquet with so many rows."""
        return rows * ((4 if self.precision == "single" else 2) * rank + ROW_BYTES[self.nodes])


@dataclass(frozen=True)
class ActiveTask:
    """The counting of active nodes at some steps, in a block of nodes."""

    run: str
    start: int
    stop: int
    steps: tuple[int, ...]


def count_active(task: ActiveTask) -> int:
    """Return how many rows the active nodes of a block have at the steps.

    As the trajectory has it, where it is there: a causal chain leaves out what comes late.
    """
    run, before = RunFolder.at(task.run), 0
    if (run.compact / HEADER).exists():
        compact = CompactTrajectory(run.compact)
        entries, before = compact.entries(task.start, task.stop), compact.before
    else:
        entries = NodeEntries.of(open_tensor(run.staged.tensor).take_rows(task.start, task.stop))
    active = np.unique(entries.node.astype(np.int64) * entries.n_steps + entries.step)
    return int(np.isin(active % entries.n_steps - before, task.steps).sum())


def write_vectors(run: RunFolder, start: int, stop: int, dense: Dense, rotated: bool) -> dict[str, Any]:
    """Return the columns of a part: a row per node and step, with the noise of the vector."""
    compact = CompactTrajectory(run.compact, load_rows(run.rotation) if rotated else None)
    wanted = np.array(dense.steps, dtype=np.int64)
    rows = compact.entries(start, stop).project(compact.basis)
    Z = compact.filtered(rows, wanted).reshape(-1, compact.rank)
    noise = compact.noise_of(rows, wanted).ravel()
    node, at = np.divmod(np.arange(len(Z)), len(wanted))
    if dense.nodes == "active":
        step = rows.step - compact.before
        kept = np.isin(step, wanted)
        node, at = rows.node[kept], np.searchsorted(wanted, step[kept])
        Z, noise = Z[node * len(wanted) + at], noise[node * len(wanted) + at]
    ids = read_ids(run.staged.nodes, start, stop)
    return {name: column.take(pa.array(node)) for name, column in ids.items()} | {
        "step": wanted[at].astype(np.int32),
        "embedding": parquet.vectors(_rounded(Z) if dense.precision == "half" else np.ascontiguousarray(Z)),
        "noise": noise,
    }


def _rounded(Z: NDArray[np.float32]) -> NDArray[np.float16]:
    """Return vectors in half precision."""
    largest, most = float(np.abs(Z).max(initial=0.0)), float(np.finfo(np.float16).max)
    if largest > most:
        raise QualityError(
            "a vector does not fit into half precision",
            got=f"a number of {largest:.6g}",
            allowed=f"numbers up to {most:,.0f}",
            remedy="Nothing was published. Embed again with --dense-precision single, or --pair-weight log.",
        )
    return Z.astype(np.float16)
