"""A slice over many workers: its tall arrays in blocks of rows, every operation a map over the blocks.

The solver runs on the client and sees small matrices only (`kernels.solvers.base.Slice`). One operation is
one pass, a task per block (`batch.passes`); sums over blocks are taken in the order of blocks.

Passes are numbered, and what each has left is written down: a run that is resumed takes the passes that are
there as they are, and goes on in the middle of the first that is not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
from threadpoolctl import threadpool_limits

from toffee_dist.batch.blocks import BlockMatrix
from toffee_dist.batch.passes import CheckTask, PassRecord, PassTask, TermSpec, check_block, run_pass
from toffee_dist.batch.solve import SolveTask
from toffee_dist.kernels.gauge import find_basis
from toffee_dist.kernels.solvers import Fit, fit_slice, zero_report
from toffee_dist.kernels.solvers.base import Built, Small, Term
from toffee_dist.storage.blocks import (
    block_of,
    pack_array,
    read_sealed_record,
    unpack_array,
    write_bounds,
    write_sealed_record,
)
from toffee_dist.storage.files import FileSeal, is_whole, remove_file, remove_tree, save_array
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import (
    NO_STARTS,
    Starts,
    array_path,
    read_seals,
    slice_name,
    write_sealed,
)
from toffee_dist.tasks import RunTasks
from toffee_dist.tensor import Floats


class ShardedArrays:
    """Tall arrays in blocks on storage, and the matrix that they are multiplied by.

    Parameters
    ----------
    matrix
        The matrix.
    folder
        Where tall arrays go until they are not needed any more.
    run
        Runs the tasks of a pass.
    seed
        Names its random numbers.

    Attributes
    ----------
    passes, reused, blocks_reused : how many passes there were, how many of them were there already, and of
        the passes that were begun, how many blocks
    moved : bytes that tasks have opened and written
    """

    present: tuple[str, ...] = ("X", "Xh")

    def __init__(self, matrix: BlockMatrix, folder: Path, run: RunTasks, seed: Sequence[int]) -> None:
        first = matrix.first
        self.n, self.dtype = first.bounds[-1], np.dtype(first.dtype)
        self._matrix, self._folder, self._run, self._seed = matrix, folder, run, tuple(seed)
        self._live: list[str] = []
        self._dropped: list[str] = []
        self._draws = 0
        self.passes = self.reused = self.blocks_reused = self.moved = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._known = self._find_known()

    # What solvers ask for.

    def random(self, columns: int) -> Built:
        """Return a new random tall array, with its own Gram matrix."""
        self._draws += 1
        found = self._pass(random=((*self._seed, self._draws), columns, self.dtype.str), own=True)
        assert found is not None
        return found

    def build(self, *terms: Term, against: Sequence[str] = (), own: bool = False, keep: bool = True) -> Built:
        """Return the sum of terms; where it is not kept, only what it leaves."""
        found = self._pass(terms, against=against, own=own, keep=keep)
        assert found is not None
        return found

    def gram(self, left: str, right: str) -> Small:
        """Return leftᴴ·right."""
        return self.build(Term(right), against=[left], keep=False).grams[0]

    def largest(self, tall: str, small: Small) -> Floats:
        """Return the entry of largest magnitude of every column of tall·small."""
        found = self._pass([Term(tall, small)], keep=False, largest=True)
        assert found is not None
        each = np.stack(found.grams)
        return np.asarray(each[np.abs(each).argmax(axis=0), np.arange(each.shape[1])])

    def keep_only(self, talls: Sequence[str]) -> None:
        """Forget all other tall arrays, once the next pass is written down."""
        self._dropped += [name for name in self._live if name not in talls]
        self._live = [name for name in self._live if name in talls]

    def start(self, starts: Starts, name: str, rank: int) -> str | None:
        """Return the tall array that an earlier run has left; None where there is none that fits."""
        if starts == NO_STARTS:
            return None
        found = self._pass(starts=(starts, name, rank, self.dtype.str))
        return None if found is None else str(found.tall)

    def store(self, tall: str, small: Small, path: Path) -> dict[str, FileSeal]:
        """Write tall·small to its place, in blocks; return the seal of every block, by its number."""
        task = self._task(f"store-{path.name}", [Term(tall, small)], out=str(path))
        # Without a record of its own: what is stored is sealed with the slice.
        records: list[PassRecord] = list(self._run(run_pass, self._each(replace(task, record=""))))
        self.moved += sum(record.moved for record in records)
        return {f"{at:05d}": record.seal for at, record in enumerate(records) if record.seal is not None}

    def counts(self) -> dict[str, int]:
        """Return what was done so far, by name."""
        return {name: getattr(self, name) for name in ("passes", "reused", "blocks_reused", "moved")}

    # How a pass is done.

    def _pass(
        self,
        terms: Sequence[Term] = (),
        *,
        against: Sequence[str] = (),
        own: bool = False,
        keep: bool = True,
        largest: bool = False,
        random: tuple[tuple[int, ...], int, str] | None = None,
        starts: tuple[Starts, str, int, str] | None = None,
    ) -> Built | None:
        number = self.passes
        self.passes += 1
        name = f"pass-{number:05d}"
        path = str(self._folder / f"t{number:05d}.npy") if keep else ""
        done = self._known.get(number)
        if done is None:
            task = self._task(name, terms, path)
            task = replace(
                task, against=tuple(against), own=own, largest=largest, random=random, starts=starts
            )
            records: list[PassRecord] = list(self._run(run_pass, self._each(task)))
            self.blocks_reused += sum(not record.made for record in records)
            self.moved += sum(record.moved for record in records)
            arrays = _add_up(records, stacked=largest)
        else:
            self.reused += 1
            arrays = done
        if path and arrays is not None:
            self._live.append(path)
        if done is None:
            self._write_down(number, arrays)
        if arrays is None:
            return None
        first = arrays.pop(0) if own else np.empty(0)
        return Built(path, first, arrays)

    def _task(self, name: str, terms: Sequence[Term], out: str) -> PassTask:
        smalls = [np.atleast_2d(term.small) for term in terms if term.small is not None]
        specs = tuple(
            TermSpec(term.tall, None if term.small is None else np.atleast_2d(term.small).shape, term.by)
            for term in terms
        )
        path = self._folder / f"{name}.smalls.npy"
        if terms:
            double = np.result_type(np.float64, *smalls) if smalls else np.dtype(np.float64)
            flat = np.concatenate([small.astype(double).ravel() for small in smalls] or [np.zeros(0)])
            save_array(path, flat, durable=False)
        sides = tuple((by, self._matrix.side(by)) for by in ("X", "Xh"))
        return PassTask(
            self._matrix.first.folder,
            self._matrix.first.bounds,
            0,
            out,
            str(self._folder / name),
            specs,
            str(path),
            sides,
            self.present,
        )

    def _each(self, task: PassTask) -> list[PassTask]:
        return [replace(task, index=index) for index in range(self._matrix.count)]

    def _write_down(self, number: int, arrays: list[Small] | None) -> None:
        """Write down a pass that is done, then remove what is not needed after it."""
        packed = None if arrays is None else [pack_array(array) for array in arrays]
        data = {"arrays": packed, "live": [to_path(path).name for path in self._live]}
        write_sealed_record(self._folder / f"done-{number:05d}.json", data, {})
        # A record of a block says that its rows are there: it goes with them.
        for path in self._dropped:
            stem = to_path(path).name.removesuffix(".npy").replace("t", "pass-")
            for index in range(self._matrix.count):
                remove_file(self._folder / f"{stem}.{index:05d}.json")
                remove_file(block_of(to_path(path), index))
        self._dropped = []

    def _find_known(self) -> dict[int, list[Small] | None]:
        """Return what passes have left that are there, if all that the next one may need is there too."""
        known: dict[int, list[Small] | None] = {}
        live: list[str] = []
        while (found := read_sealed_record(self._folder / f"done-{len(known):05d}.json")) is not None:
            try:
                packed = found["arrays"]
                known[len(known)] = None if packed is None else [unpack_array(array) for array in packed]
                live = [str(name) for name in found["live"]]
            except (KeyError, ValueError, TypeError):
                break
        names = [name.removesuffix(".npy").replace("t", "pass-") for name in live]
        checks = [
            CheckTask(str(self._folder / f"{name}.{index:05d}.json"))
            for name in names
            for index in range(self._matrix.count)
        ]
        if known and not all(self._run(check_block, checks)):
            # Something was lost, as by a power cut: from scratch.
            remove_tree(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
            return {}
        return known


class ShardedSlice(ShardedArrays):
    """A slice in blocks on storage, divided by its norm, as solvers see it."""

    norm2 = 1.0

    @property
    def hermitian(self) -> bool:
        """Whether X = Xᴴ exactly."""
        return not self._matrix.first.directed


def _add_up(records: Sequence[PassRecord], *, stacked: bool) -> list[Small] | None:
    """Add up what the blocks have left, in their order; of largest entries, all are kept.

    None where there was nothing to start from.
    """
    if not all(record.fits for record in records):
        return None
    if stacked:
        return [record.arrays[0] for record in records]
    total = [np.array(array) for array in records[0].arrays]
    for record in records[1:]:
        for sum_, array in zip(total, record.arrays, strict=True):
            sum_ += array
    return total


@dataclass(frozen=True)
class SealTask:
    """The comparing of one file with its seal."""

    path: str
    seal: FileSeal


def check_seal(task: SealTask) -> bool:
    """Whether a file is whole."""
    return is_whole(to_path(task.path), task.seal)


def solve_sharded(
    run: RunTasks, task: SolveTask, bounds: tuple[int, ...], cut: Callable[[], BlockMatrix]
) -> dict[str, int]:
    """Solve one slice in blocks of nodes, and leave what `solve_batch` and `write_basis` would.

    `cut` gives its matrix, once it is known to be needed.

    Returns how many slices were solved, and the passes that took, with those that were there already.
    """
    [k], folder = task.freqs, to_path(task.slices)
    name, basis = task.name(k), k == 0
    if is_there(run, folder, name, "ARUSVC" if basis else task.arrays):
        return {"solved": 0}
    write_bounds(folder, bounds)
    began = time.perf_counter()
    matrix = cut()
    passes = folder / f"passes-{name}"
    X = ShardedSlice(matrix, passes, run, (task.options.seed, k))
    # The small matrices decide the bytes of the large ones: one thread, as in the workers.
    with threadpool_limits(1, user_api="blas"):
        if matrix.first.size > 0:
            start = X.start(task.starts, name, task.options.rank)
            fit = fit_slice(X, matrix.first.size, k, task.options, start)
        else:
            fit = _nothing(X, task, k)
        smalls: dict[str, Small] = {"R": fit.R}
        talls = {"A": (fit.A, fit.small)}
        if basis:
            found = find_basis(X, fit.A, fit.G, fit.R, fit.small)
            talls |= {"U": (found.Q, found.P), "V": (found.Q, found.W)}
            smalls |= {"S": found.S, "C": found.C}
        elif task.projected:
            V = str(array_path(folder, "V", slice_name(0)))
            smalls["C"] = fit.R @ fit.small.T @ X.gram(fit.A, V)
        seals = {
            f"{key}.{index}": seal
            for key, (tall, small) in talls.items()
            for index, seal in X.store(tall, small, array_path(folder, key, name)).items()
        }
        for key, small in smalls.items():
            seals[key] = save_array(array_path(folder, key, name), small, durable=False)
    report = replace(fit.report, seconds=time.perf_counter() - began)
    write_sealed(folder, name, {"report": asdict(report)}, seals)
    remove_tree(passes)
    if not basis:
        remove_tree(to_path(matrix.first.folder))
    return {"solved": 1, **X.counts()}


def is_there(run: RunTasks, folder: Path, name: str, arrays: str) -> bool:
    """Whether a slice is whole; its blocks are read where there is most to read with: in tasks."""
    seals = read_seals(folder, name)
    if not set(arrays) <= {key.partition(".")[0] for key in seals}:
        return False
    checks = [SealTask(str(array_path(folder, key, name)), seal) for key, seal in seals.items()]
    return all(list(run(check_seal, checks)))


def _nothing(X: ShardedSlice, task: SolveTask, k: int) -> Fit:
    """Return the factors of a slice without entries: zeros."""
    rank = min(task.options.rank, X.n)
    zeros = np.zeros((rank, task.options.rank))
    A = X.random(rank)
    R = np.zeros((task.options.rank, task.options.rank))
    return Fit(A.tall, zeros, A.own, R, zero_report(k, task.options, 0.0))
