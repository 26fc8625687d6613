"""A trajectory on storage as what it is: entries by node, the basis, and one kernel in time per direction.

    Z_i(t)_l = Σ over the entries (i, j, s) of node i of  w·V_jl·H_l(t, s)

    compact/<block>-starts.npy                       entries before each node of a block, (nodes + 1)
    compact/<block>-target.npy, -step.npy, -value.npy   its entries, sorted by node, target, step
    compact/<block>-basis.npy                        its rows of V
    compact/kernel.npy, pairs.npy                    κ of every epoch, lag and direction; that of pairs
    compact/patterns.npy, gains.npy                  patterns that many nodes share, and their gains
    compact/activity.npy                             entries of all nodes at every step
    compact/header.json                              sizes, blocks, whether causal; written last

A causal chain also keeps entries of steps before its window, as far as the kernel of its first step reaches:
steps on storage count from the first of these, and so do those of `entries`. Whoever asks for vectors counts
from the first step of the window, as everywhere.

One node needs its entries and the basis of their targets; one step a pass over the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from toffee_dist.errors import InputError
from toffee_dist.kernels.entries import ActiveRows, NodeEntries
from toffee_dist.kernels.filter import TimeKernel, filter_rows, noise_levels
from toffee_dist.kernels.gains import Span
from toffee_dist.storage.files import map_array, read_array, save_array
from toffee_dist.storage.manifest import Count, Record, SpaceId, read_record, write_record
from toffee_dist.storage.paths import as_remote
from toffee_dist.tensor import Floats, Ints, index_dtype

FORMAT: Final = 1
HEADER = "header.json"
ARRAYS = ("starts", "target", "step", "value", "basis")
PATTERNS = ("patterns.npy", "gains.npy")
# Bytes of vectors of all steps that are made at once.
BLOCK_BYTES = 64 * 2**20


class CompactHeader(Record):
    """header.json: the first node of every block and the number of nodes, and what the kernels are.

    `before` and `age` are those of a causal chain, see `kernels.gains.Span`.
    """

    format: Literal[1] = FORMAT
    cuts: tuple[Count, ...] = Field(min_length=2)
    epochs: tuple[Count, ...] = Field(min_length=1)
    causal: bool
    directed: bool
    space_id: SpaceId | None = None
    before: Count = 0
    age: Count = 0
    patterns: Count = 0

    @model_validator(mode="after")
    def _check_order(self) -> Self:
        """Refuse blocks and epochs that are not in order, and a chain that is no causal one."""
        if self.cuts[0] != 0 or any(a >= b for a, b in pairwise(self.cuts)):
            raise ValueError("blocks that are not in order")
        if any(a >= b for a, b in pairwise(self.epochs)):
            raise ValueError("epochs that are not in order")
        if self.before >= max(self.age, 1) or (self.age and not self.causal):
            raise ValueError(f"{self.before} steps before the window of a chain of {self.age}")
        return self


def array_of(folder: Path, block: int, name: str) -> Path:
    """Return where an array of a block is."""
    return folder / f"{block:05d}-{name}.npy"


def write_entries(folder: Path, block: int, entries: NodeEntries, basis: NDArray[Any]) -> None:
    """Write the entries of a block of nodes, and its rows of the basis.

    Parameters
    ----------
    folder, block
        Where, and its number.
    entries
        Of the nodes of the block.
    basis
        The rows of V of these nodes.
    """
    arrays = {
        "starts": np.searchsorted(entries.node, np.arange(entries.n_nodes + 1)).astype(np.int64),
        "target": entries.target,
        "step": np.asarray(entries.step, dtype=np.uint16 if entries.n_steps <= 2**16 else np.int32),
        "value": np.asarray(entries.value, dtype=np.float32),
        "basis": basis,
    }
    for name, array in arrays.items():
        save_array(array_of(folder, block, name), array)


def has_entries(folder: Path, block: int) -> bool:
    """Whether the files of a block are there."""
    return all(array_of(folder, block, name).exists() for name in ARRAYS)


def write_kernel(
    folder: Path,
    kernel: TimeKernel,
    pairs: TimeKernel,
    activity: NDArray[np.int64],
    cuts: tuple[int, ...],
    *,
    directed: bool,
    space_id: str,
) -> None:
    """Write the kernels of directions and of pairs, the entries of every step, and the header."""
    save_array(folder / "activity.npy", activity)
    save_array(folder / "kernel.npy", kernel.lags)
    save_array(folder / "pairs.npy", pairs.lags)
    for name, array in zip(PATTERNS, kernel.aside, strict=True):
        save_array(folder / name, array)
    header = CompactHeader(
        cuts=cuts,
        epochs=kernel.epochs,
        causal=kernel.causal,
        directed=directed,
        space_id=space_id,
        before=kernel.before,
        age=kernel.age,
        patterns=kernel.aside[0].shape[1],
    )
    write_record(folder / HEADER, header)


def find_chain(folder: Path) -> CompactHeader | None:
    """Return the header of a trajectory that steps can be appended to; None where there is none."""
    header = read_record(folder / HEADER, CompactHeader) if (folder / HEADER).exists() else None
    return header if header is not None and header.age else None


@dataclass(eq=False)
class CompactTrajectory:
    """The compact form of a published run, opened.

    Parameters
    ----------
    folder
        Where it is.
    turn
        The r×r rotation of the run's vectors, where there is one.
    """

    folder: Path
    turn: NDArray[Any] | None = None

    @property
    def rotation(self) -> NDArray[Any] | None:
        """The rotation of the trajectory: that of the run, but a causal chain keeps the axes it began in."""
        return None if self._header.age else self.turn

    @cached_property
    def _header(self) -> CompactHeader:
        return read_record(self.folder / HEADER, CompactHeader)

    @property
    def cuts(self) -> tuple[int, ...]:
        """The first node of every block, and the number of nodes."""
        return self._header.cuts

    @property
    def n_nodes(self) -> int:
        """Number of nodes."""
        return self.cuts[-1]

    @property
    def directed(self) -> bool:
        """Whether (i, j) differs from (j, i)."""
        return self._header.directed

    @property
    def space_id(self) -> str | None:
        """The space that the vectors are in; None of runs that were made before spaces had ids."""
        return self._header.space_id

    @cached_property
    def kernel(self) -> TimeKernel:
        """The kernel of every direction."""
        plain, count = self._kernel("kernel.npy"), self._header.patterns
        if not count:
            return plain
        patterns, own = (np.asarray(self._read(self.folder / name)) for name in PATTERNS)
        if (patterns.shape, own.shape) != ((plain.n_steps, count), (count, plain.rank)):
            raise self._damaged(PATTERNS[0], ValueError(f"shapes {patterns.shape} and {own.shape}"))
        return replace(plain, patterns=patterns, pattern_gains=own)

    @cached_property
    def pair_kernel(self) -> TimeKernel:
        """The kernel of a known pair's own entries."""
        return self._kernel("pairs.npy")

    def _kernel(self, name: str) -> TimeKernel:
        lags = self._read(self.folder / name)
        epochs = self._header.epochs
        if lags.ndim != 3 or len(lags) != len(epochs):
            raise self._damaged(name, ValueError(f"shape {lags.shape} of {len(epochs)} epochs"))
        before, age, T = self._header.before, self._header.age, lags.shape[1]
        # So that every step of the window has an epoch, and an appended one is not long in coming.
        chain = Span(T, before, age)
        known = epochs[0] <= age - T + 1 and epochs[-1] <= age < chain.next_epoch(epochs[-1])
        if age and not (before < T <= age - before and known):
            raise self._damaged(HEADER, ValueError(f"a chain of {age} steps with windows of {T}"))
        return TimeKernel(np.asarray(lags, dtype=np.float64), epochs, self._header.causal, before, age)

    @property
    def before(self) -> int:
        """Steps before the window of which entries are kept."""
        return self._header.before

    @property
    def n_steps(self) -> int:
        """T."""
        return self.kernel.span.window

    @cached_property
    def activity(self) -> NDArray[np.int64]:
        """Entries of all nodes at every step of the window, counted."""
        total = np.zeros(self.kernel.n_steps, dtype=np.int64)
        for block in range(self._blocks):
            step = self._read(array_of(self.folder, block, "step"))
            self._check(step, len(total), "step")
            total += np.bincount(step, minlength=len(total))
        return total[self.before :]

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """How many entries every node has."""
        found = [np.diff(self._read(array_of(self.folder, block, "starts"))) for block in range(self._blocks)]
        counts = np.concatenate(found)
        if len(counts) != self.n_nodes or (counts < 0).any():
            raise self._damaged("starts", ValueError("entries that are not in order"))
        return counts

    def targets(self) -> NDArray[np.bool_]:
        """Return which nodes are the target of an entry."""
        found = np.zeros(self.n_nodes, dtype=bool)
        for block in range(self._blocks):
            target = self._read(array_of(self.folder, block, "target"))
            self._check(target, self.n_nodes, "target")
            found[target] = True
        return found

    @property
    def _blocks(self) -> int:
        return len(self.cuts) - 1

    def weights(self, step: int) -> Floats:
        """Return H of all directions at one step of the window, (steps of entries, r)."""
        return self.kernel.weights(self.before + step)

    @cached_property
    def mean_weights(self) -> Floats:
        """The mean of H over the window, (steps of entries, r or 1)."""
        if not self._header.age:
            return np.full((self.n_steps, 1), 1 / self.n_steps)
        total = np.zeros((self.kernel.n_steps, self.rank))
        for step in range(self.n_steps):
            total += self.weights(step)
        return total / self.n_steps

    @property
    def rank(self) -> int:
        """Length of a vector."""
        return self.kernel.rank

    def entries(self, start: int, stop: int) -> NodeEntries:
        """Return the entries of the nodes [start, stop), which count from 0."""
        found: list[tuple[Ints, ...]] = []
        for block, (first, last) in enumerate(pairwise(self.cuts)):
            low, high = max(start, first), min(stop, last)
            if low >= high:
                continue
            starts = self._read(array_of(self.folder, block, "starts"), low - first, high - first + 1)
            if (np.diff(starts) < 0).any():
                raise self._damaged("starts", ValueError("entries that are not in order"))
            rows = (int(starts[0]), int(starts[-1]))
            arrays = [self._read(array_of(self.folder, block, name), *rows) for name in ARRAYS[1:4]]
            # Before anything as long as the starts claim is made.
            if any(len(array) != rows[1] - rows[0] for array in arrays):
                raise self._damaged("starts", ValueError("more entries than there are"))
            node = np.repeat(np.arange(low - start, high - start), np.diff(starts))
            found.append((node, *arrays))
        node, target, step, value = (np.concatenate(column) for column in zip(*found, strict=True))
        self._check(target, self.n_nodes, "target")
        self._check(step, self.kernel.n_steps, "step")
        return NodeEntries(stop - start, self.kernel.n_steps, node, target, step.astype(np.int64), value)

    def basis(self, nodes: Ints) -> NDArray[Any]:
        """Return the rows of V of some nodes, in ascending order."""
        nodes = np.asarray(nodes)
        out = np.empty((len(nodes), self.rank), dtype=np.float32)
        edges = np.searchsorted(nodes, self.cuts)
        for block, (low, high) in enumerate(pairwise(edges)):
            if low == high:
                continue
            wanted, path = nodes[low:high] - self.cuts[block], array_of(self.folder, block, "basis")
            if as_remote(path) is None:
                try:
                    rows = map_array(path)[wanted]
                except (OSError, ValueError, IndexError) as error:
                    raise self._damaged(path.name, error) from None
            else:
                rows = self._read(path, int(wanted[0]), int(wanted[-1]) + 1)[wanted - wanted[0]]
            if rows.shape != (len(wanted), self.rank):
                raise self._damaged(path.name, ValueError(f"rows of shape {rows.shape[1:]}"))
            out[low:high] = rows
        return out

    def rows(self, start: int, stop: int, *, noise: bool = True) -> ActiveRows:
        """Return y of the nodes [start, stop) where they are active, in double.

        One node, one step and all of them are summed in different orders: rounded to single precision at the
        end, they agree.
        """
        entries = self.entries(start, stop)
        return entries.project(lambda targets: self.basis(targets).astype(np.float64), noise=noise)

    def read(self, start: int, stop: int, steps: Ints) -> NDArray[np.float32]:
        """Return the vectors of the nodes [start, stop) at some steps, (nodes, steps, r)."""
        return self.filtered(self.rows(start, stop, noise=False), steps)

    def filtered(self, rows: ActiveRows, steps: Ints) -> NDArray[np.float32]:
        """Return the vectors of some rows at some steps, (nodes, steps, r)."""
        return self.turned(filter_rows(rows, self.kernel, self.before + np.asarray(steps)))

    def turned(self, Z: NDArray[Any]) -> NDArray[np.float32]:
        """Return vectors in the axes of the run."""
        return np.asarray(Z if self.rotation is None else Z @ self.rotation.astype(Z.dtype), dtype=np.float32)

    def read_nodes(self, nodes: Ints, steps: Ints) -> NDArray[np.float32]:
        """Return the vectors of some nodes at some steps; many nodes are filtered at once."""
        wanted, where = np.unique(np.asarray(nodes, dtype=np.int64), return_inverse=True)
        out = np.empty((len(wanted), len(steps), self.rank), dtype=np.float32)
        size = self.nodes_at_once(len(steps))
        for start in range(0, len(wanted), size):
            part = wanted[start : start + size]
            entries = self.entries_of(part)
            rows = entries.project(lambda targets: self.basis(targets).astype(np.float64), noise=False)
            out[start : start + size] = self.filtered(rows, steps)
        return out[where]

    def entries_of(self, nodes: Ints) -> NodeEntries:
        """Return the entries of some nodes, ascending, which count from 0; neighbours are read at once."""
        breaks = np.flatnonzero(np.diff(nodes) > 1) + 1
        parts, before = [], 0
        for run in np.split(nodes, breaks):
            found = self.entries(int(run[0]), int(run[-1]) + 1)
            parts.append((found.node + before, found.target, found.step, found.value))
            before += len(run)
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        return NodeEntries(len(nodes), self.kernel.n_steps, *columns)

    def noise(self, start: int, stop: int, steps: Ints) -> NDArray[np.float32]:
        """Return the noise of the vectors of [start, stop) at some steps, (nodes, steps)."""
        return self.noise_of(self.rows(start, stop), steps)

    def noise_of(self, rows: ActiveRows, steps: Ints) -> NDArray[np.float32]:
        """Return the noise of the vectors of some rows at some steps, (nodes, steps)."""
        return noise_levels(rows, self.kernel, self.before + np.asarray(steps))

    def pair_rates(self, i: Ints, j: Ints, step: int) -> Floats:
        """Return what the own entries of pairs tell of their rates at a step; 0 of pairs never seen."""
        weights = self.pair_kernel.weights(self.before + step)[:, 0]
        found = np.zeros(len(i))
        order = np.argsort(i, kind="stable")
        for pairs in np.split(order, np.flatnonzero(np.diff(np.asarray(i)[order])) + 1):
            if not len(pairs):
                continue
            node = int(np.asarray(i)[pairs[0]])
            own = self.entries(node, node + 1)
            targets, at = np.unique(own.target, return_inverse=True)
            rates = np.bincount(at, own.value * weights[own.step], minlength=len(targets))
            place = np.minimum(np.searchsorted(targets, np.asarray(j)[pairs]), max(len(targets) - 1, 0))
            if len(targets):
                known = targets[place] == np.asarray(j)[pairs]
                found[pairs] = np.where(known, rates[place], 0.0)
        return found

    def nodes_at_once(self, n_steps: int) -> int:
        """Return how many nodes' vectors at so many steps are made at once."""
        return max(1, BLOCK_BYTES // (8 * max(n_steps, 1) * self.rank))

    def ranges(self, n_steps: int) -> Iterator[tuple[int, int]]:
        """Yield ranges of nodes whose vectors at so many steps are made at once; blocks are not crossed."""
        size = self.nodes_at_once(n_steps)
        for first, last in pairwise(self.cuts):
            for start in range(first, last, size):
                yield start, min(start + size, last)

    def _read(self, path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
        try:
            return read_array(path, start, stop)
        except (FileNotFoundError, ValueError) as error:
            raise self._damaged(path.name, error) from None

    def _check(self, index: Ints, size: int, name: str) -> None:
        if len(index) and (int(index.min()) < 0 or int(index.max()) >= size):
            raise self._damaged(name, ValueError(f"a {name} of {int(index.max())}, of {size:,}"))

    def _damaged(self, name: str, error: Exception) -> InputError:
        return InputError(
            f"run {self.folder.parent.name} is damaged",
            got=f"compact/{name}: {str(error).partition(chr(10))[0] or type(error).__name__}",
            remedy="Go back to a whole one with toffee rollback, or start a new chain with --fresh.",
        )


def compact_bytes(n_nodes: int, n_entries: int, n_steps: int, rank: int) -> int:
    """Return how much storage the compact form takes."""
    entry = 4 + (2 if n_steps <= 2**16 else 4) + np.dtype(index_dtype(n_nodes)).itemsize
    return n_entries * entry + n_nodes * (8 + 4 * rank) + 8 * n_steps * (rank + 1)
