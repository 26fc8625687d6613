"""The choice of frequencies: a map over blocks of nodes leaves sums, and the choice is made from those."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise

import numpy as np

from toffee_dist.errors import InputError
from toffee_dist.kernels.frequencies import TEST_DIRECTIONS, BasisRows, ChoiceSums, choose
from toffee_dist.storage import parquet
from toffee_dist.storage.files import read_json, replacing
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.slices import (
    array_path,
    is_finished,
    load_rows,
    slice_name,
    write_arrays,
)
from toffee_dist.storage.tensors import open_rows

# What a block leaves, under these names.
SUMS = ("energies", "core", "shuffled", "spreads")


@dataclass(frozen=True)
class ChoiceTask:
    """One block of nodes, or the choice from all of them.

    Parameters
    ----------
    tensor, slices
        Folders of the staged tensor and of the slices, with the basis of the zero slice.
    bounds, index
        Where rows are cut, and which block.
    directed, n_steps
        Of the tensor.
    freqs
        Which to choose: ``auto``, ``all``, ``lowest:K`` or ``strongest:K``.
    table
        File that gets a row per frequency.
    """

    tensor: str
    slices: str
    bounds: tuple[int, ...]
    index: int
    directed: bool
    n_steps: int
    freqs: str
    table: str


@dataclass(frozen=True)
class ChoiceRecord:
    """The frequencies chosen, and their exact share of the energy."""

    freqs: tuple[int, ...]
    energy_kept: float


def _name(index: int) -> str:
    return f"choice-{index:05d}"


def read_choice(task: ChoiceTask) -> ChoiceRecord | None:
    """Return the choice that was made; None where there is none, or it is damaged: it is made again."""
    if to_path(task.table).exists():
        with suppress(InputError, KeyError, TypeError):
            data = read_json(to_path(task.slices) / "choice.json")
            return ChoiceRecord(tuple(data["freqs"]), data["energy_kept"])
    return None


def add_up_block(task: ChoiceTask) -> None:
    """Leave the sums of a block, unless they are there."""
    folder, name = to_path(task.slices), _name(task.index)
    if is_finished(folder, name, SUMS):
        return
    start, stop = task.bounds[task.index], task.bounds[task.index + 1]

    def basis(first: int, last: int) -> BasisRows:
        # One after the other: of all columns, a copy of the leading ones stays.
        paths = (array_path(folder, key, slice_name(0)) for key in "UV")
        U, V = (load_rows(path, first, last)[:, :TEST_DIRECTIONS].copy() for path in paths)
        return first, U, V

    tiles = (basis(first, last) for first, last in pairwise(task.bounds))
    sums = ChoiceSums.of_block(open_rows(task.tensor, start, stop), basis(start, stop), tiles, task.directed)
    write_arrays(folder, name, {key: getattr(sums, key) for key in SUMS})


def make_choice(task: ChoiceTask) -> ChoiceRecord:
    """Choose from the sums of all blocks, added up in their order; leave a table with what each is worth."""
    folder, total = to_path(task.slices), None
    for index in range(len(task.bounds) - 1):
        energies, core, shuffled, spreads = (load_rows(array_path(folder, key, _name(index))) for key in SUMS)
        own = ChoiceSums(energies, core, shuffled, spreads, task.directed)
        total = own if total is None else total + own
    assert total is not None
    choice = choose(total, task.freqs, task.n_steps)
    n_freqs = len(choice.energies)
    k = np.arange(n_freqs)
    parquet.write_parquet(
        to_path(task.table),
        {
            "k": k.astype(np.int32),
            "period_steps": np.divide(task.n_steps, k, out=np.full(n_freqs, np.inf), where=k > 0),
            "energy": choice.energies,
            "significance": choice.significances,
            "chosen": np.isin(k, choice.freqs),
        },
    )
    found = ChoiceRecord(tuple(choice.freqs), choice.energy_kept)
    with replacing(folder / "choice.json") as temporary:
        temporary.write_text(json.dumps(asdict(found)))
    return found
