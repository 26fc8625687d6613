"""The tasks of a filtered trajectory: two maps over blocks of nodes, and one small task between them.

    blocks   entries of a block → its compact form, and its energies (F×r numbers)
    kernel   the sum of all energies, in the order of blocks → gains → one kernel per direction
    parts    compact form and kernel → vectors of the steps that are asked for, as Parquet

They need the staged tensor and the basis V, by rows, and what a causal chain goes on from (`batch.past`).
Block boundaries depend on entries and limits only.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from toffee_dist.batch.energy import ENERGY
from toffee_dist.batch.past import NO_PAST, Past
from toffee_dist.kernels.filter import (
    Energies,
    NodeEntries,
    TimeKernel,
    add_energies,
    epoch_energies,
    gains,
    padded_length,
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
from toffee_dist.storage.paths import to_path
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
from toffee_dist.storage.tensors import open_tensor, read_kind

# Without an answer to --dense: Parquet of all steps up to this size.
DENSE_BYTES = 256 * 2**20
# Bytes of one entry, per direction, in the task of a block: its row of V, its y, squares in double.
ENTRY_BYTES = 4 + 4 + 3 * 8


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
    if is_finished(run.slices, task.name, ("signal", "noise", "activity")) and has_entries(
        run.compact, task.index
    ):
        return
    V = open_array(basis_path(run, task.basis, task.past))
    block = open_tensor(run.staged.tensor).take_rows(task.start, task.stop)
    entries = task.past.join(NodeEntries.of(block), task.start, task.stop, run)
    write_entries(run.compact, task.index, entries, np.asarray(V[task.start : task.stop], dtype=np.float32))
    span = task.past.span(block.n_steps)
    rows = entries.project(lambda targets: V[targets])
    found, pairs = (epoch_energies(each, span, task.causal) for each in (rows, entries.pairs()))
    # Without an epoch among the new steps of a chain, nothing is learnt.
    signal, noise = [np.empty((0, rows.rank + 1))], [np.empty((0, rows.rank + 1))]
    for a, b in zip(found, pairs, strict=True):
        signal.append(np.hstack([a.signal, b.signal]))
        noise.append(np.append(a.noise, b.noise)[None])
    activity = np.bincount(entries.step, minlength=entries.n_steps)
    seals = {
        name: save_array(array_path(run.slices, name, task.name), array, durable=False)
        for name, array in (
            ("signal", np.concatenate(signal)),
            ("noise", np.concatenate(noise)),
            ("activity", activity),
        )
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
    span, total = task.past.span(n_steps), list[Energies]()
    pasts = [span.past(moment) for moment in span.epochs(task.causal)]
    edges = np.cumsum([0, *(padded_length(stop - start) // 2 + 1 for start, stop in pasts)])
    activity = np.zeros(span.n_steps, dtype=np.int64)
    for index in range(len(task.cuts) - 1):
        signal, noise, own = (
            load_rows(array_path(run.slices, name, f"block-{index:05d}"))
            for name in ("signal", "noise", "activity")
        )
        activity += own
        parts = [Energies(signal[a:b], row) for a, b, row in zip(edges[:-1], edges[1:], noise, strict=True)]
        total = add_energies(total, parts)
    if not (run.compact / HEADER).exists():
        both = TimeKernel.learn(total, span, task.causal, task.strength, task.past.kernel())
        kernel, pairs = (replace(both, lags=both.lags[:, :, part]) for part in (slice(-1), slice(-1, None)))
        write_kernel(
            run.compact, kernel, pairs, activity, task.cuts, directed=directed, space_id=task.space_id
        )
    if not total:
        return KernelRecord(None)
    last = total[-1]
    passed = np.square(gains(last, task.strength)[:, :-1]) * last.signal[:, :-1]
    everything = float(last.signal[:, :-1].sum())
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
    Z = compact.filtered(rows, wanted).reshape(-1, compact.rank)
    noise = compact.noise_of(rows, wanted)
    at = pa.array(np.repeat(np.arange(stop - start), len(steps)))
    ids = {name: column.take(at) for name, column in read_ids(run.staged.nodes, start, stop).items()}
    return ids | {
        "step": np.tile(wanted.astype(np.int32), stop - start),
        "embedding": parquet.vectors(np.ascontiguousarray(Z)),
        "noise": noise.ravel(),
    }
