"""Blocks of nodes on storage: where rows are cut, and matrices and tall arrays in blocks of rows.

A tall array in blocks is NAME.00000.npy, NAME.00001.npy, … beside a `blocks.json` with the rows at which it
is cut; `slices.load_rows` reads any range of it as it would of one file.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from toffee_dist.storage.files import (
    FileSeal,
    is_whole,
    map_array,
    read_json,
    read_text,
    replacing,
    save_array,
    write_json,
)
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
    return path.parent / f"{path.name.removesuffix('.npy')}.{index:05d}.npy"


def write_sealed_record(path: Path, data: Mapping[str, Any], seals: Mapping[str, FileSeal]) -> None:
    """Write what is known of some files beside them, with their seals: it holds while they are whole."""
    record = {"data": data, "seals": {name: list(seal) for name, seal in seals.items()}}
    with replacing(path, durable=False) as temporary:
        temporary.write_text(json.dumps(record))


def read_sealed_record(path: Path) -> dict[str, Any] | None:
    """Return what is known of some files; None where there is no such record, or a file is not whole."""
    try:
        record = json.loads(read_text(path))
        seals = {name: FileSeal(*seal) for name, seal in record["seals"].items()}
        whole = all(is_whole(path.parent / name, seal) for name, seal in seals.items())
        return dict(record["data"]) if whole else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def pack_array(array: NDArray[Any]) -> dict[str, Any]:
    """Return a small array as JSON can hold it, to the bit."""
    data = base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()
    return {"type": array.dtype.str, "shape": list(array.shape), "data": data}


def unpack_array(packed: Mapping[str, Any]) -> NDArray[Any]:
    """Return the array that was packed."""
    dtype = np.dtype(packed["type"])
    if dtype.kind not in "fc":
        raise ValueError(f"numbers of type {dtype}")
    return np.frombuffer(base64.b64decode(packed["data"]), dtype).reshape(packed["shape"]).copy()


class Rows(NamedTuple):
    """Rows of a sparse matrix in CSR form, with all its columns; first and last step of every pair."""

    indptr: Ints
    indices: Ints
    values: NDArray[Any]
    begins: Ints
    ends: Ints


class MatrixRows(NamedTuple):
    """Rows of a sparse matrix in CSR form, with all its columns."""

    indptr: Ints
    indices: Ints
    values: NDArray[Any]


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

    def save(self, side: str, index: int, rows: Rows | MatrixRows) -> dict[str, FileSeal]:
        """Write a block; return the seals of its files, by name."""
        seals = {}
        for name, array in rows._asdict().items():
            path = self.array(side, index, name)
            seals[path.name] = save_array(path, array, durable=False)
        return seals

    def load(self, side: str, index: int) -> Rows:
        """Open a block."""
        return Rows(*(map_array(self.array(side, index, name)) for name in Rows._fields))

    def load_matrix(self, side: str, index: int) -> MatrixRows:
        """Open the numbers of a block, without its steps."""
        return MatrixRows(*(map_array(self.array(side, index, name)) for name in MatrixRows._fields))
