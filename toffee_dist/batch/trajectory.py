"""The tasks of a filtered trajectory: two maps over blocks of nodes, and one small task between them.

    blocks   entries of a block → its compact form, and its energies (F×r numbers)
    kernel   the sum of all energies, in the order of blocks → gains → one kernel per direction
    parts    compact form and kernel → vectors of the steps that are asked for, as Parquet

They need the staged tensor and the basis V, by rows. Block boundaries depend on the tensor and the limits
only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from toffee_dist.batch.energy import ENERGY
from toffee_dist.errors import QualityError
from toffee_dist.kernels.filter import (
    ActiveRows,
    Energies,
    TimeKernel,
    add_energies,
    epoch_energies,
    epochs,
    filter_rows,
    gains,
    noise_levels,
    padded_length,
    project_rows,
)
from toffee_dist.settings import Basis, DenseNodes, DensePrecision, ModelSettings, parse_dense
from toffee_dist.storage import parquet
from toffee_dist.storage.compact import (
    HEADER,
    CompactTrajectory,
    has_entries,
    write_entries,
    write_kernel,
)
from toffee_dist.storage.files import save_array
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import (
    array_path,
    is_finished,
    load_rows,
    open_array,
    slice_name,
    write_sealed,
)
from toffee_dist.storage.tensors import open_tensor

# Without an answer to --dense: Parquet of all steps up to this size.
DENSE_BYTES = 256 * 2**20
# Bytes of a row of that Parquet beside its vector: step, noise, its share of pages; more of the id where a
# node has few rows.
ROW_BYTES = {"all": 12, "active": 20}
# Bytes of one entry, per direction, in the task of a block: its row of V, its y, squares in double.
ENTRY_BYTES = 4 + 4 + 3 * 8


def basis_path(run: RunFolder, basis: Basis) -> Path:
    """Return where the basis of the trajectory is."""
    return array_path(run.slices, "V", slice_name(0) if basis == "sum" else ENERGY)


@dataclass(frozen=True)
class CutTask:
    """Where the blocks begin, so that each has about as many entries as its task may hold."""

    tensor: str
    rank: int
    block_bytes: int


def cut_blocks(task: CutTask) -> tuple[int, ...]:
    """Return the first node of every block, and the number of nodes."""
    tensor = open_tensor(task.tensor)
    most = max(1, task.block_bytes // (ENTRY_BYTES * task.rank))
    before = np.asarray(tensor.tube_ptr)[np.asarray(tensor.indptr)]
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
    """

    run: str
    index: int
    start: int
    stop: int
    basis: Basis
    causal: bool

    @property
    def name(self) -> str:
        """Of what it leaves beside the slices."""
        return f"block-{self.index:05d}"


def write_block(task: BlockTask) -> None:
    """Leave the entries, the basis and the energies of a block, unless they are there."""
    run = RunFolder.at(task.run)
    if is_finished(run.slices, task.name, ("signal", "noise", "activity")) and has_entries(
        run.compact, task.index
    ):
        return
    V = open_array(basis_path(run, task.basis))
    block = open_tensor(run.staged.tensor).take_rows(task.start, task.stop)
    write_entries(run.compact, task.index, block, np.asarray(V[task.start : task.stop], dtype=np.float32))
    found = epoch_energies(project_rows(block, V), task.causal)
    values = np.asarray(block.values, dtype=np.float64)[:, None]
    tubes = ActiveRows(
        block.n_pairs, block.n_steps, block.entry_pairs, np.asarray(block.steps), values, np.square(values)
    )
    pairs = epoch_energies(tubes, task.causal)
    signal = np.concatenate([np.hstack([a.signal, b.signal]) for a, b in zip(found, pairs, strict=True)])
    noise = np.stack([np.append(a.noise, b.noise) for a, b in zip(found, pairs, strict=True)])
    activity = np.bincount(np.asarray(block.steps), minlength=block.n_steps)
    seals = {
        name: save_array(array_path(run.slices, name, task.name), array, durable=False)
        for name, array in (("signal", signal), ("noise", noise), ("activity", activity))
    }
    write_sealed(run.slices, task.name, {"report": {}}, seals)


@dataclass(frozen=True)
class KernelTask:
    """The kernel in time of every direction, from the energies of all blocks."""

    run: str
    cuts: tuple[int, ...]
    causal: bool
    strength: float
    space_id: str


@dataclass(frozen=True)
class KernelRecord:
    """How much of the movement is kept: the share of energy above the mean that the gains let through."""

    kept: float


def learn_kernels(task: KernelTask) -> KernelRecord:
    """Add the energies of all blocks in their order, and leave the kernels."""
    run = RunFolder.at(task.run)
    tensor = open_tensor(run.staged.tensor)
    total: list[Energies] = []
    lengths = [padded_length(at) // 2 + 1 for at in epochs(tensor.n_steps, task.causal)]
    edges = np.concatenate([[0], np.cumsum(lengths)])
    activity = np.zeros(tensor.n_steps, dtype=np.int64)
    for index in range(len(task.cuts) - 1):
        signal, noise, own = (
            load_rows(array_path(run.slices, name, f"block-{index:05d}"))
            for name in ("signal", "noise", "activity")
        )
        activity += own
        parts = [Energies(signal[a:b], row) for a, b, row in zip(edges[:-1], edges[1:], noise, strict=True)]
        total = add_energies(total, parts)
    last = total[-1]
    passed = np.square(gains(last, task.strength)[:, :-1]) * last.signal[:, :-1]
    everything = float(last.signal[:, :-1].sum())
    if not (run.compact / HEADER).exists():
        both = TimeKernel.learn(total, tensor.n_steps, task.causal, task.strength)
        kernel, pairs = (
            TimeKernel(both.lags[:, :, part], both.epochs, both.causal)
            for part in (slice(-1), slice(-1, None))
        )
        write_kernel(
            run.compact,
            kernel,
            pairs,
            activity,
            task.cuts,
            directed=tensor.directed,
            space_id=task.space_id,
        )
    return KernelRecord(float(passed.sum()) / everything if everything > 0 else 0.0)


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

    tensor: str
    start: int
    stop: int
    steps: tuple[int, ...]


def count_active(task: ActiveTask) -> int:
    """Return how many rows the active nodes of a block have at the steps."""
    block = open_tensor(task.tensor).take_rows(task.start, task.stop)
    source = np.asarray(block.sources)[block.entry_pairs].astype(np.int64)
    active = np.unique(source * block.n_steps + np.asarray(block.steps))
    return int(np.isin(active % block.n_steps, task.steps).sum())


def write_vectors(run: RunFolder, start: int, stop: int, dense: Dense, rotated: bool) -> dict[str, Any]:
    """Return the columns of a part: a row per node and step, with the noise of the vector."""
    compact = CompactTrajectory(run.compact, load_rows(run.rotation) if rotated else None)
    wanted = np.array(dense.steps, dtype=np.int64)
    rows = compact.entries(start, stop).project(compact.basis)
    Z = compact.turned(filter_rows(rows, compact.kernel, wanted)).reshape(-1, compact.rank)
    noise = noise_levels(rows, compact.kernel, wanted).ravel()
    node, at = np.divmod(np.arange(len(Z)), len(wanted))
    if dense.nodes == "active":
        kept = np.isin(rows.step, wanted)
        node, at = rows.node[kept], np.searchsorted(wanted, rows.step[kept])
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
