"""Blocks of nodes on storage: where rows are cut, and matrices and tall arrays in blocks of rows.

A tall array in blocks is NAME.00000.npy, NAME.00001.npy, … beside a `blocks.json` with the rows at which it
is cut; `slices.load_rows` reads any range of it as it would of one file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toffee_dist.storage.files import FileSeal, read_array, read_json, save_array, write_json
from toffee_dist.storage.paths import as_remote
from toffee_dist.tensor import Ints

BOUNDS = "blocks.json"


def write_bounds(folder: Path, bounds: Sequence[int]) -> None:
    """Say where the arrays of a folder are cut, unless it is said."""
    if not (folder / BOUNDS).exists():
        write_json(folder / BOUNDS, {"bounds": list(bounds)})


def read_bounds(folder: Path) -> tuple[int, ...]:
    """Return the rows at which the arrays of a folder are cut, the first 0 and the last n.

    Raises
    ------
    InputError
        Where that cannot be read.
    ValueError
        Where it makes no sense.
    """
    bounds = read_json(folder / BOUNDS)["bounds"]
    if not (isinstance(bounds, list) and all(isinstance(row, int) for row in bounds)):
        raise ValueError("bounds that are no rows")
    if len(bounds) < 2 or bounds[0] != 0 or sorted(bounds) != bounds:
        raise ValueError("bounds that are not in order")
    return tuple(bounds)


def block_of(path: Path, index: int) -> Path:
    """Return where one block of the array `path` is."""
    return path.with_name(f"{path.name.removesuffix('.npy')}.{index:05d}.npy")


def map_array(path: Path) -> NDArray[Any]:
    """Return an array on storage: a memory map where storage is local, else what was read."""
    if as_remote(path) is not None:
        return read_array(path)
    return np.asarray(np.load(path, mmap_mode="r", allow_pickle=False))


class Rows(NamedTuple):
    """Rows of a sparse matrix in CSR form, with all its columns; first and last step of every pair."""

    indptr: Ints
    indices: Ints
    values: NDArray[Any]
    begins: Ints
    ends: Ints


@dataclass(frozen=True)
class MatrixFolder:
    """A slice in blocks of rows: X, and its adjoint Xh where it is not X itself.

    Parameters
    ----------
    path
        The folder.
    """

    path: Path

    def array(self, side: str, index: int, name: str) -> Path:
        """Return where an array of a block is."""
        return self.path / f"{side}.{name}.{index:05d}.npy"

    def save(self, side: str, index: int, rows: Rows) -> dict[str, FileSeal]:
        """Write a block; return the seals of its files, by name."""
        seals = {}
        for name, array in rows._asdict().items():
            path = self.array(side, index, name)
            seals[path.name] = save_array(path, array, durable=False)
        return seals

    def load(self, side: str, index: int) -> Rows:
        """Open a block."""
        return Rows(*(map_array(self.array(side, index, name)) for name in Rows._fields))

    def load_matrix(self, side: str, index: int) -> tuple[Ints, Ints, NDArray[Any]]:
        """Open the numbers of a block, without its steps."""
        names = ("indptr", "indices", "values")
        indptr, indices, values = (map_array(self.array(side, index, name)) for name in names)
        return indptr, indices, values
