"""Solved slices on storage: A, R and, last, the report that says they are whole.

    A-<name>.npy (n×r)   R-<name>.npy (r×r)   <name>.json
    C-<name>.npy (r×r, R Aᴴ V)   and of a zero slice its singular vectors U, S, V

A name is the frequency, ``reduced`` for the zero slice of the tensor weighted in time, ``held`` for that of
the tensor without its last steps, or ``model`` for the vectors of another model. Readers take ranges of rows
with one seek.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from toffee_dist.errors import UnfinishedError
from toffee_dist.solvers.base import SliceFactors, SliceReport
from toffee_dist.store import read_array, replacing, save_array

REDUCED = "reduced"
MODEL = "model"
HELD = "held"


def slice_name(k: int) -> str:
    """Return the name of a frequency's slice; names sort by frequency."""
    return f"{k:07d}"


def array_path(folder: Path, array: str, name: str) -> Path:
    """Return where an array of a slice is."""
    return folder / f"{array}-{name}.npy"


def write_slice(
    folder: Path, name: str, factors: SliceFactors, more: Mapping[str, NDArray[Any]] | None = None
) -> None:
    """Write A, R and what else belongs to a slice; the report comes last, with the sizes of all files."""
    arrays = {"A": factors.A, "R": factors.R, **(more or {})}
    _write_report(folder, name, asdict(factors.report), _write_arrays(folder, name, arrays))


def extend_slice(folder: Path, name: str, more: Mapping[str, NDArray[Any]]) -> None:
    """Add arrays to a slice that is there."""
    known = json.loads((folder / f"{name}.json").read_text())
    _write_report(folder, name, known["report"], known["sizes"] | _write_arrays(folder, name, more))


def _write_arrays(folder: Path, name: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, int]:
    return {key: save_array(array_path(folder, key, name), array) for key, array in arrays.items()}


def _write_report(folder: Path, name: str, report: dict[str, Any], sizes: dict[str, int]) -> None:
    with replacing(folder / f"{name}.json") as temporary:
        temporary.write_text(json.dumps({"report": report, "sizes": sizes}))


def is_finished(folder: Path, name: str, arrays: str = "AR") -> bool:
    """Whether a slice is there with these arrays, and every file of it is whole."""
    try:
        sizes = json.loads((folder / f"{name}.json").read_text())["sizes"]
        return set(arrays) <= set(sizes) and all(
            array_path(folder, key, name).stat().st_size == size for key, size in sizes.items()
        )
    except (OSError, ValueError, KeyError):
        return False


def read_report(folder: Path, name: str) -> SliceReport:
    """Return how the slice was solved."""
    return SliceReport(**json.loads((folder / f"{name}.json").read_text())["report"])


def read_reports(folder: Path, names: Iterable[str]) -> list[SliceReport]:
    """Return the reports of some slices."""
    return [read_report(folder, name) for name in names]


def read_slice(folder: Path, name: str) -> SliceFactors:
    """Return a whole slice."""
    A = read_rows(array_path(folder, "A", name))
    R = read_rows(array_path(folder, "R", name))
    return SliceFactors(A, R, read_report(folder, name))


def read_rows(path: Path, start: int = 0, stop: int | None = None) -> NDArray[Any]:
    """Return rows [start, stop) of an array on storage, reading nothing else.

    Raises
    ------
    UnfinishedError
        Where the file is missing or shorter than its header says; `toffee resume` makes it again.
    """
    try:
        return read_array(path, start, stop)
    except (OSError, ValueError) as error:
        raise UnfinishedError(
            f"cannot read {path.name}",
            got=f"{type(error).__name__}: {error}",
            allowed="the file as it was written",
            remedy="toffee resume makes it again.",
        ) from None
