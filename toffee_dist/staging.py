"""The staged tensor: five .npy files and a small header, written in blocks and opened as memory maps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from toffee_dist.entries import BlockRecord, BlockTask
from toffee_dist.errors import InputError
from toffee_dist.store import save_array, write_json
from toffee_dist.tensor import TemporalTensor, index_dtype

ARRAYS = ("indptr", "indices", "tube_ptr", "steps", "values")
HEADER = "header.json"
FORMAT = 1


@dataclass(frozen=True)
class JoinTask:
    """The copying of one block to its place."""

    block: BlockTask
    pairs_before: int
    events_before: int
    folder: str


def plan_join(
    folder: Path,
    blocks: Sequence[BlockTask],
    records: Sequence[BlockRecord],
    *,
    n_nodes: int,
    n_steps: int,
) -> list[JoinTask]:
    """Make the files at their full size, and say where each block goes."""
    n_pairs = sum(record.n_pairs for record in records)
    n_events = sum(record.n_events for record in records)
    pattern, tube = index_dtype(n_nodes, n_pairs), index_dtype(n_steps, n_events)
    shapes: dict[str, tuple[type[Any], int]] = {
        "indptr": (pattern, n_nodes + 1),
        "indices": (pattern, n_pairs),
        "tube_ptr": (tube, n_pairs + 1),
        "steps": (tube, n_events),
        "values": (np.float64, n_events),
    }
    folder.mkdir(parents=True)
    for name, (dtype, length) in shapes.items():
        if length == 0:
            np.save(folder / f"{name}.npy", np.empty(0, dtype=dtype))
        else:
            # A new file is all zeros, and so is the first entry of both pointers.
            np.lib.format.open_memmap(folder / f"{name}.npy", "w+", dtype, (length,))
    pairs = [0, *accumulate(record.n_pairs for record in records)]
    events = [0, *accumulate(record.n_events for record in records)]
    return [JoinTask(block, pairs[k], events[k], str(folder)) for k, block in enumerate(blocks)]


def join_block(task: JoinTask) -> int:
    """Copy one block to its place; blocks touch different bytes. Return the number of bytes."""
    first_row, _ = task.block.rows
    starts = {
        "indptr": (first_row + 1, task.pairs_before),
        "indices": (task.pairs_before, 0),
        "tube_ptr": (task.pairs_before + 1, task.events_before),
        "steps": (task.events_before, 0),
        "values": (task.events_before, 0),
    }
    written = 0
    for name, (start, shift) in starts.items():
        array = np.load(task.block.path(name), mmap_mode="r", allow_pickle=False)
        if not len(array):
            continue
        place = np.load(Path(task.folder) / f"{name}.npy", mmap_mode="r+", allow_pickle=False)
        piece = place[start : start + len(array)]
        # Blocks may be narrower or wider than the whole; the counts of the whole decide. One pass: a task
        # that runs twice at once, on a worker given up too early, writes the same bytes twice.
        np.add(array, piece.dtype.type(shift), out=piece, casting="same_kind")
        place.flush()
        written += piece.nbytes
    return written


def write_header(folder: Path, *, n_nodes: int, n_steps: int, directed: bool) -> None:
    """Write the header last: a folder with one is complete."""
    header = {"format": FORMAT, "n_nodes": n_nodes, "n_steps": n_steps, "directed": directed}
    write_json(folder / HEADER, header)


def stage_tensor(tensor: TemporalTensor, folder: Path) -> None:
    """Write a tensor that is in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        save_array(folder / f"{name}.npy", getattr(tensor, name))
    write_header(folder, n_nodes=tensor.n_nodes, n_steps=tensor.n_steps, directed=tensor.directed)


def open_tensor(folder: Path | str) -> TemporalTensor:
    """Open a staged tensor; its arrays are memory maps and take no private memory.

    Raises
    ------
    InputError
        Where the folder holds no complete tensor.
    """
    folder = Path(folder)
    try:
        header = json.loads((folder / HEADER).read_text())
        if header["format"] != FORMAT:
            raise ValueError(f"format {header['format']}")
        arrays = {name: _open(folder / f"{name}.npy") for name in ARRAYS}
        return TemporalTensor(header["n_nodes"], header["n_steps"], header["directed"], **arrays)
    except (OSError, ValueError, KeyError) as error:
        raise InputError(
            f"no staged tensor in {folder}",
            got=f"{type(error).__name__}: {error}",
            allowed=f"a folder with {HEADER} and {', '.join(ARRAYS)} as .npy",
            remedy="Ingest the edges again.",
        ) from None


def _open(path: Path) -> Any:
    return np.load(path, mmap_mode="r", allow_pickle=False)
