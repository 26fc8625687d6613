"""Solved slices on storage: A, R and, last, the report that says they are whole.

    A-<name>.npy (n×r)   R-<name>.npy (r×r)   <name>.json
    C-<name>.npy (r×r, R Aᴴ V)   and of a zero slice its singular vectors U, S, V

    source-<name>.npy, target-<name>.npy (n×r)   vectors that a model gives as they are, instead of all that;
                                                 with the weights (r) of its own score, and a report

A name is the frequency, ``reduced`` for the zero slice of the tensor weighted in time, ``held`` for that of
the tensor without its last steps, or ``model`` for the vectors of another model. Readers take ranges of rows
with one seek.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter, ValidationError

from toffee_dist.errors import InputError, UnfinishedError
from toffee_dist.kernels.gauge import canonical_vectors
from toffee_dist.kernels.solvers.base import SliceFactors, SliceReport, Tall, times
from toffee_dist.storage.blocks import BOUNDS, block_of, read_bounds
from toffee_dist.storage.files import (
    FileSeal,
    count_rows,
    is_whole,
    map_array,
    read_array,
    read_text,
    replacing,
    save_array,
)
from toffee_dist.storage.paths import to_path

REDUCED = "reduced"
MODEL = "model"
HELD = "held"

Role = Literal["source", "target"]

_REPORT = TypeAdapter(SliceReport)


def slice_name(k: int) -> str:
    """Return the name of a frequency's slice; names sort by frequency."""
    return f"{k:07d}"


def array_path(folder: Path, array: str, name: str) -> Path:
    """Return where an array of a slice is; A.00003 is block 3 of A."""
    array, _, block = array.partition(".")
    path = folder / f"{array}-{name}.npy"
    return block_of(path, int(block)) if block else path


def array_files(folder: Path, array: str, name: str) -> list[Path]:
    """Return the files that an array of a slice is in: one, or its blocks with where they are cut."""
    keys = [key for key in read_seals(folder, name) if key.partition(".")[0] == array]
    files = [array_path(folder, key, name) for key in keys]
    return [*files, folder / BOUNDS] if "." in keys[0] else files


def write_slice(
    folder: Path, name: str, factors: SliceFactors, more: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """Write A, R and what else belongs to a slice; the report comes last, with the seals of all files."""
    arrays = {"A": factors.A, "R": factors.R, **(more or {})}
    write_sealed(folder, name, {"report": asdict(factors.report)}, _write_arrays(folder, name, arrays))


def extend_slice(folder: Path, name: str, more: Mapping[str, NDArray[Any]]) -> None:
    """Add arrays to a slice that is there."""
    report, seals = _read_record(folder, name)
    write_sealed(folder, name, {"report": report}, seals | _write_arrays(folder, name, more))


def write_arrays(folder: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Leave the arrays of a result that has no report, with their seals."""
    write_sealed(folder, name, {"report": {}}, _write_arrays(folder, name, arrays))


def _write_arrays(folder: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, FileSeal]:
    # The seal tells whether a file is whole, so it need not be on the disk before the run goes on.
    return {
        key: save_array(array_path(folder, key, name), array, durable=False) for key, array in arrays.items()
    }


def write_sealed(folder: Path, name: str, record: Mapping[str, Any], seals: Mapping[str, FileSeal]) -> None:
    """Write what is known of a result, with the seals of its arrays: it is finished when they are whole."""
    sizes = {key: seal.bytes for key, seal in seals.items()}
    checksums = {key: seal.crc32 for key, seal in seals.items()}
    with replacing(folder / f"{name}.json", durable=False) as temporary:
        temporary.write_text(json.dumps({**record, "sizes": sizes, "crc32": checksums}))


def is_finished(folder: Path, name: str, arrays: Iterable[str] = "AR") -> bool:
    """Whether a slice is there with these arrays, and every file of it is whole: its checksum says so."""
    try:
        _, seals = _read_record(folder, name)
    except UnfinishedError:
        return False
    return set(arrays) <= {key.partition(".")[0] for key in seals} and all(
        is_whole(array_path(folder, key, name), seal) for key, seal in seals.items()
    )


def read_seals(folder: Path, name: str) -> dict[str, FileSeal]:
    """Return the seals of a slice's files by array; none where there is no such slice."""
    try:
        return _read_record(folder, name)[1]
    except UnfinishedError:
        return {}


def read_report(folder: Path, name: str) -> SliceReport:
    """Return how the slice was solved."""
    report, _ = _read_record(folder, name)
    try:
        return _REPORT.validate_python(report)
    except ValidationError as error:
        raise _unreadable(folder / f"{name}.json", error) from None


def _read_record(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, FileSeal]]:
    """Return the report of a slice and the seals of its files."""
    path = folder / f"{name}.json"
    try:
        found = json.loads(read_text(path))
        report, sizes, checksums = found["report"], found["sizes"], found["crc32"]
        if not isinstance(report, dict):
            raise ValueError("not a record of a slice")
        seals = {key: FileSeal(int(sizes[key]), int(checksums[key])) for key in sizes}
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise _unreadable(path, error) from None
    return report, seals


def read_reports(folder: Path, names: Iterable[str]) -> list[SliceReport]:
    """Return the reports of some slices."""
    return [read_report(folder, name) for name in names]


def read_slice(folder: Path, name: str) -> SliceFactors:
    """Return a whole slice."""
    A = load_rows(array_path(folder, "A", name))
    R = load_rows(array_path(folder, "R", name))
    return SliceFactors(A, R, read_report(folder, name))


def load_rows(path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return rows [start, stop) of an array on storage, in one file or in blocks, reading nothing else.

    Raises
    ------
    UnfinishedError
        Where a file is missing or shorter than its header says; `toffee resume` makes it again.
    """
    try:
        return read_rows(path, start, stop)
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from None


def map_block(path: Path, index: int) -> NDArray[Any]:
    """Return one block of an array on storage: a memory map where storage is local."""
    try:
        return map_array(block_of(path, index))
    except (OSError, ValueError) as error:
        raise _unreadable(block_of(path, index), error) from None


class RowsInBlocks:
    """An array in blocks, of which ranges of rows, and rows by their sorted numbers, are taken.

    Parameters
    ----------
    path
        The array.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._bounds = path, read_bounds(path.parent)
        first = map_block(path, 0)
        self.shape, self.dtype = (self._bounds[-1], *first.shape[1:]), first.dtype

    def __getitem__(self, rows: slice | NDArray[Any]) -> NDArray[Any]:
        """Return some rows, reading only the blocks that they are in."""
        if isinstance(rows, slice):
            start, stop, _ = rows.indices(self.shape[0])
            return load_rows(self._path, start, stop)
        out = np.empty((len(rows), *self.shape[1:]), self.dtype)
        cuts = np.searchsorted(rows, self._bounds)
        for index, (first, last) in enumerate(pairwise(cuts)):
            if first < last:
                own = rows[first:last] - self._bounds[index]
                out[first:last] = map_block(self._path, index)[own]
        return out


def open_array(path: Path) -> NDArray[Any] | RowsInBlocks:
    """Open an array in one file or in blocks, to take rows of it; memory maps where storage is local."""
    try:
        return map_array(path)
    except FileNotFoundError:
        return RowsInBlocks(path)


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return rows [start, stop) of an array on storage, in one file or in blocks.

    Raises
    ------
    OSError, ValueError
        Where there is no such array, or it is not whole.
    """
    try:
        return read_array(path, start, stop)
    except FileNotFoundError:
        if not block_of(path, 0).exists():
            raise
    try:
        bounds = read_bounds(path.parent)
    except (InputError, KeyError, TypeError) as error:
        raise ValueError(f"blocks whose bounds cannot be read: {error}") from None
    stop = bounds[-1] if stop is None else stop
    if not 0 <= start <= stop <= bounds[-1]:
        raise ValueError(f"rows {start} to {stop} of {bounds[-1]}")
    parts = [
        read_array(block_of(path, index), max(start - first, 0), min(stop, last) - first)
        for index, (first, last) in enumerate(pairwise(bounds))
        if (first < stop and last > start) or (start == stop and first <= start <= last)
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _unreadable(path: Path, error: Exception) -> UnfinishedError:
    return UnfinishedError(
        f"cannot read {path.name}",
        got=f"{type(error).__name__}: {str(error)[:300]}",
        remedy="toffee resume makes it again.",
    )


@dataclass(frozen=True)
class ZeroSlice:
    """Where one vector per node comes from.

    Parameters
    ----------
    name
        Of a slice on storage.
    form
        ``canonical``: U·S^{2/3} (sources) and V·S^{2/3} (targets); ``none``: the paper's A_0·R_0;
        ``given``: vectors as a model gave them, without a slice that was fitted.
    """

    name: str
    form: Literal["canonical", "none", "given"]

    @property
    def fitted(self) -> bool:
        """Whether there is a fit M = A R Aᵀ of the slice, of which residuals are known."""
        return self.form != "given"

    def read_vectors(self, folder: Path, role: Role, start: int = 0, stop: int | None = None) -> Tall:
        """Return the vectors of the nodes [start, stop) in a role."""
        return self._finish(folder, load_rows(self._path(folder, role), start, stop))

    def take_vectors(self, folder: Path, role: Role, rows: NDArray[np.int64]) -> Tall:
        """Return the vectors of some nodes, whose numbers ascend, in a role."""
        return self._finish(folder, np.array(open_array(self._path(folder, role))[rows]))

    def _path(self, folder: Path, role: Role) -> Path:
        array = {"given": role, "none": "A", "canonical": "U" if role == "source" else "V"}[self.form]
        return array_path(folder, array, self.name)

    def _finish(self, folder: Path, vectors: Tall) -> Tall:
        if self.form == "none":
            return times(vectors, load_rows(array_path(folder, "R", self.name)))
        if self.form == "canonical":
            return canonical_vectors(vectors, load_rows(array_path(folder, "S", self.name)))
        return vectors


@dataclass(frozen=True)
class Starts:
    """The A that slices start from: those of an earlier run.

    Parameters
    ----------
    folder
        Where they are; empty: there are none.
    kept
        File that tells which rows of them are still there; empty: all.
    name
        Slice to start from; empty: the one of the same name.
    """

    folder: str = ""
    kept: str = ""
    name: str = ""

    def read(self, name: str, n_nodes: int, rank: int) -> Tall | None:
        """Return the A of a slice, new nodes as zeros; None where there is none that fits."""
        return self.read_block(name, 0, n_nodes, n_nodes, rank)

    def read_block(self, name: str, start: int, stop: int, n_nodes: int, rank: int) -> Tall | None:
        """Return the rows [start, stop) of the A of a slice; None where there is none that fits.

        Storage that fails raises: a start from scratch would give other bytes than the next attempt.
        """
        if not self.folder:
            return None
        path = array_path(to_path(self.folder), "A", self.name or name)
        try:
            # Which rows of the earlier run the nodes have: those that are still there come first.
            rows = np.flatnonzero(read_array(to_path(self.kept))) if self.kept else None
            known = len(rows) if rows is not None else self._count(path)
            last = min(stop, known)
            if rows is None:
                A = read_rows(path, min(start, last), last)
            elif start < last:
                own = rows[start:last]
                A = read_rows(path, int(own[0]), int(own[-1]) + 1)[own - own[0]]
            else:
                A = read_rows(path, 0, 0)
        except (FileNotFoundError, ValueError):
            return None
        if A.ndim != 2 or A.shape[1] != rank or known > n_nodes or not np.isfinite(A).all():
            return None
        return np.pad(A, [(0, stop - start - len(A)), (0, 0)])

    @staticmethod
    def _count(path: Path) -> int:
        """Return how many rows the array has."""
        if block_of(path, 0).exists():
            return read_bounds(path.parent)[-1]
        return count_rows(path)


NO_STARTS = Starts()
