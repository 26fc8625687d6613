"""The tasks of a filtered trajectory: two maps over blocks of nodes, and one small task between them.

    blocks   entries of a block → its compact form, and its energies (F×r numbers)
    kernel   the sum of all energies, in the order of blocks → gains → one kernel per direction
    parts    compact form and kernel → vectors of the steps that are asked for, as Parquet

They need the staged tensor and the basis V, by rows. Block boundaries depend on the tensor and the limits
only.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from toffee_dist.batch.energy import ENERGY
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
from toffee_dist.settings import Basis, parse_dense
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


def dense_steps(spec: str, n_nodes: int, n_steps: int, rank: int) -> tuple[int, ...]:
    """Return the steps that are written as Parquet.

    Examples
    --------
    >>> dense_steps("last:2", 10, 5, 4), dense_steps("every:2", 10, 5, 4), dense_steps("1,9", 10, 5, 4)
    ((3, 4), (0, 2, 4), (1,))
    """
    kind, numbers = parse_dense(spec)
    if kind == "auto":
        kind = "all" if dense_bytes(n_nodes, n_steps, rank) <= DENSE_BYTES else "none"
    if kind == "last":
        return tuple(range(max(0, n_steps - numbers[0]), n_steps))
    if kind == "every":
        return tuple(range(0, n_steps, numbers[0]))
    if kind == "steps":
        return tuple(step for step in numbers if step < n_steps)
    return tuple(range(n_steps)) if kind == "all" else ()


def dense_bytes(n_nodes: int, n_steps: int, rank: int) -> int:
    """Return the size of Parquet with so many steps."""
    return n_nodes * n_steps * (4 * rank + 12)


def write_vectors(
    run: RunFolder, start: int, stop: int, steps: tuple[int, ...], rotated: bool
) -> dict[str, Any]:
    """Return the columns of a part: a row per node and step, with the noise of the vector."""
    compact = CompactTrajectory(run.compact, load_rows(run.rotation) if rotated else None)
    wanted = np.array(steps, dtype=np.int64)
    rows = compact.entries(start, stop).project(compact.basis)
    Z = compact.turned(filter_rows(rows, compact.kernel, wanted)).reshape(-1, compact.rank)
    noise = noise_levels(rows, compact.kernel, wanted)
    at = pa.array(np.repeat(np.arange(stop - start), len(steps)))
    ids = {name: column.take(at) for name, column in read_ids(run.staged.nodes, start, stop).items()}
    return ids | {
        "step": np.tile(wanted.astype(np.int32), stop - start),
        "embedding": parquet.vectors(np.ascontiguousarray(Z)),
        "noise": noise.ravel(),
    }
