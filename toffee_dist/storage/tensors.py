"""The staged tensor: five .npy files and a small header, written in blocks and opened as memory maps.

In a local folder the blocks are joined in place. On an object store they stay as they are: the header lists
them, and every machine that opens the tensor joins them once, in a local copy (local_cache.py).
"""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from toffee_dist.errors import InputError
from toffee_dist.storage.disk import disk
from toffee_dist.storage.files import (
    create_array,
    map_array,
    map_to_fill,
    read_array,
    read_text,
    save_array,
    write_json,
)
from toffee_dist.storage.local_cache import cached_copy
from toffee_dist.storage.manifest import LaterFormatError, refuse_later_format
from toffee_dist.storage.paths import as_remote, to_path
from toffee_dist.tensor import TemporalTensor, index_dtype

ARRAYS = ("indptr", "indices", "tube_ptr", "steps", "values")
HEADER = "header.json"
FORMAT = 1
# Blocks that are fetched at once: a request waits more than it works.
FETCHES = 4
# Numbers that are digested at once.
DIGEST_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class Sizes:
    """How large a tensor is."""

    n_nodes: int
    n_steps: int
    n_pairs: int
    n_entries: int


@dataclass(frozen=True)
class TensorBlock:
    """One block of rows, and what comes before it."""

    name: str
    first_row: int
    pairs_before: int
    entries_before: int


def block_path(folder: Path, name: str, array: str) -> Path:
    """Return where one array of a block is."""
    return folder / f"{name}.{array}.npy"


@dataclass(frozen=True)
class JoinTask:
    """The copying of one block from a folder to its place in another."""

    block: TensorBlock
    source: str
    target: str


def make_arrays(folder: Path, sizes: Sizes) -> None:
    """Make the files of a local tensor at their full size."""
    n_nodes, n_steps, n_pairs, n_entries = astuple(sizes)
    pattern, tube = index_dtype(n_nodes, n_pairs), index_dtype(n_steps, n_entries)
    shapes: dict[str, tuple[type[Any], int]] = {
        "indptr": (pattern, n_nodes + 1),
        "indices": (pattern, n_pairs),
        "tube_ptr": (tube, n_pairs + 1),
        "steps": (tube, n_entries),
        "values": (np.float64, n_entries),
    }
    for name, (dtype, length) in shapes.items():
        # A new file is all zeros, and so is the first entry of both pointers.
        create_array(folder / f"{name}.npy", dtype, (length,))


def join_block(task: JoinTask) -> int:
    """Copy one block to its place; blocks touch different bytes. Return the number of bytes."""
    block = task.block
    starts = {
        "indptr": (block.first_row + 1, block.pairs_before),
        "indices": (block.pairs_before, 0),
        "tube_ptr": (block.pairs_before + 1, block.entries_before),
        "steps": (block.entries_before, 0),
        "values": (block.entries_before, 0),
    }
    written = 0
    for name, (start, shift) in starts.items():
        array = read_array(block_path(to_path(task.source), block.name, name))
        if not len(array):
            continue
        place_of = map_to_fill(Path(task.target) / f"{name}.npy")
        piece = place_of[start : start + len(array)]
        # Blocks may be narrower or wider than the whole; the counts of the whole decide. One pass: a task
        # that runs twice at once, on a worker given up too early, writes the same bytes twice.
        np.add(array, piece.dtype.type(shift), out=piece, casting="same_kind")
        place_of.flush()
        written += piece.nbytes
    return written


def write_header(
    folder: Path, sizes: Sizes, *, directed: bool, blocks: Sequence[TensorBlock], joined: bool
) -> None:
    """Write the header last: a folder with one is complete. It tells how the pairs lie over the rows."""
    header: dict[str, Any] = {
        "format": FORMAT,
        "n_nodes": sizes.n_nodes,
        "n_steps": sizes.n_steps,
        "directed": directed,
        "cuts": [[block.first_row, block.pairs_before] for block in blocks]
        + [[sizes.n_nodes, sizes.n_pairs]],
    }
    if joined:
        # The header says that the arrays are whole: they must survive what it survives.
        for name in ARRAYS:
            disk().sync(folder / f"{name}.npy")
        disk().sync_folder(folder)
    else:
        # The stamp names this content and no other, for those who keep a copy.
        header |= {"n_pairs": sizes.n_pairs, "n_events": sizes.n_entries, "stamp": uuid.uuid4().hex}
        header["blocks"] = [astuple(block) for block in blocks]
    write_json(folder / HEADER, header)


def stage_tensor(tensor: TemporalTensor, folder: Path) -> None:
    """Write a tensor that is in memory."""
    sizes = Sizes(tensor.n_nodes, tensor.n_steps, tensor.n_pairs, tensor.n_entries)
    block = TensorBlock("block-000000", 0, 0, 0)
    if as_remote(folder) is not None:
        for name in ARRAYS:
            array = getattr(tensor, name)[1 if name in ("indptr", "tube_ptr") else 0 :]
            save_array(block_path(folder, block.name, name), array)
        write_header(folder, sizes, directed=tensor.directed, blocks=[block], joined=False)
        return
    folder.mkdir(parents=True, exist_ok=True)
    for name in ARRAYS:
        save_array(folder / f"{name}.npy", getattr(tensor, name), durable=False)
    write_header(folder, sizes, directed=tensor.directed, blocks=[block], joined=True)


def open_tensor(folder: Path | str) -> TemporalTensor:
    """Open a staged tensor; its arrays are memory maps and take no private memory.

    Raises
    ------
    InputError
        Where the folder holds no complete tensor.
    """
    folder = to_path(folder)
    with _reading(folder):
        text, header = _read_header(folder)
        if "blocks" not in header:
            return _open(folder, header)
        with cached_copy(f"{folder}\n{text}", lambda target: _join_all(folder, header, target)) as copy:
            return _open(copy, header)


def open_rows(folder: Path | str, start: int, stop: int) -> TemporalTensor:
    """Open the rows [start, stop) of a staged tensor alone; of a store only their bytes are read.

    Raises
    ------
    InputError
        Where the folder holds no complete tensor.
    """
    folder = to_path(folder)
    with _reading(folder):
        _, header = _read_header(folder)
        if "blocks" not in header:
            return _open(folder, header).take_rows(start, stop)
        blocks = [TensorBlock(*block) for block in header["blocks"]]
        ends = [*(block.first_row for block in blocks[1:]), header["n_nodes"]]
        parts = [
            _fetch_rows(folder, block, max(start, block.first_row), min(stop, end), header)
            for block, end in zip(blocks, ends, strict=True)
            if block.first_row < stop and end > start
        ]
        return _stack(parts, stop - start, header["n_steps"])


def _fetch_rows(
    folder: Path, block: TensorBlock, start: int, stop: int, header: dict[str, Any]
) -> TemporalTensor:
    """Read some rows of one block; its pointers are without their first zero."""

    def pointers(array: str, first: int, last: int) -> Any:
        path = block_path(folder, block.name, array)
        found = read_array(path, max(first - 1, 0), last).astype(np.int64)
        return found if first else np.append(0, found)

    indptr = pointers("indptr", start - block.first_row, stop - block.first_row)
    pairs = int(indptr[0]), int(indptr[-1])
    tube_ptr = pointers("tube_ptr", *pairs)
    entries = int(tube_ptr[0]), int(tube_ptr[-1])
    return TemporalTensor(
        n_nodes=stop - start,
        n_steps=header["n_steps"],
        directed=True,
        indptr=indptr - indptr[0],
        indices=read_array(block_path(folder, block.name, "indices"), *pairs),
        tube_ptr=tube_ptr - tube_ptr[0],
        steps=read_array(block_path(folder, block.name, "steps"), *entries),
        values=read_array(block_path(folder, block.name, "values"), *entries),
    )


def _stack(parts: Sequence[TemporalTensor], n_rows: int, n_steps: int) -> TemporalTensor:
    """Put rows below each other."""

    def pointers(name: str) -> Any:
        arrays = [getattr(part, name) for part in parts]
        shifts = np.cumsum([0] + [int(array[-1]) for array in arrays[:-1]])
        rest = [array[1:] + shift for array, shift in zip(arrays, shifts, strict=True)]
        return np.concatenate([np.zeros(1, np.int64), *rest])

    def joined(name: str) -> Any:
        return np.concatenate([getattr(part, name) for part in parts])

    return TemporalTensor(
        n_nodes=n_rows,
        n_steps=n_steps,
        directed=True,
        indptr=pointers("indptr"),
        indices=joined("indices"),
        tube_ptr=pointers("tube_ptr"),
        steps=joined("steps"),
        values=joined("values"),
    )


def read_cuts(folder: Path | str) -> list[tuple[int, int]]:
    """Return how pairs lie over the rows: (row, pairs before it), from (0, 0) to all rows and pairs."""
    folder = to_path(folder)
    with _reading(folder):
        _, header = _read_header(folder)
        # A tensor of an earlier version does not tell; it counts as one piece.
        if "cuts" not in header:
            whole = _open(folder, header) if "blocks" not in header else None
            return [(0, 0), (header["n_nodes"], whole.n_pairs if whole else header["n_pairs"])]
        return [(int(row), int(pairs)) for row, pairs in header["cuts"]]


def read_kind(folder: Path | str) -> tuple[bool, int]:
    """Return whether a staged tensor is of a directed graph, and how many steps it has."""
    folder = to_path(folder)
    with _reading(folder):
        _, header = _read_header(folder)
        return bool(header["directed"]), int(header["n_steps"])


def digest_tensor(folder: str) -> str:
    """Return a digest of the entries of a staged tensor: the same wherever it is, and wherever it was cut."""
    cuts = read_cuts(folder)
    directed, n_steps = read_kind(folder)
    lengths, indices, tubes, steps, values = digests = tuple(hashlib.sha256() for _ in range(5))
    for (start, _), (stop, _) in pairwise(cuts):
        rows = open_rows(folder, start, stop)
        for digest, array, dtype in (
            (lengths, np.diff(rows.indptr), "<i8"),
            (indices, rows.indices, "<i8"),
            (tubes, np.diff(rows.tube_ptr), "<i4"),
            (steps, rows.steps, "<i4"),
            (values, rows.values, "<f8"),
        ):
            for first in range(0, len(array), DIGEST_AT_ONCE):
                piece = np.asarray(array[first : first + DIGEST_AT_ONCE], dtype=dtype)
                digest.update(piece.tobytes())
    parts = [cuts[-1][0], n_steps, directed, *(digest.hexdigest() for digest in digests)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _read_header(folder: Path) -> tuple[str, dict[str, Any]]:
    text = read_text(folder / HEADER)
    header = json.loads(text)
    refuse_later_format(folder / HEADER, header)
    if header["format"] != FORMAT:
        raise ValueError(f"format {header['format']}")
    return text, header


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turn whatever a damaged folder raises into words."""
    try:
        yield
    except LaterFormatError:
        raise
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"no staged tensor in {folder}",
            got=f"{type(error).__name__}: {error}",
            allowed=f"a folder with {HEADER} and {', '.join(ARRAYS)} as .npy",
            remedy="Ingest the edges again.",
        ) from None


def _join_all(folder: Path, header: dict[str, Any], target: Path) -> None:
    """Join the blocks of a tensor on a store in a local folder."""
    make_arrays(target, Sizes(*(header[name] for name in ("n_nodes", "n_steps", "n_pairs", "n_events"))))
    joins = [JoinTask(TensorBlock(*block), str(folder), str(target)) for block in header["blocks"]]
    with ThreadPoolExecutor(FETCHES) as pool:
        for _ in pool.map(join_block, joins):
            pass


def _open(folder: Path, header: dict[str, Any]) -> TemporalTensor:
    arrays = {name: map_array(folder / f"{name}.npy") for name in ARRAYS}
    tensor = TemporalTensor(
        int(header["n_nodes"]), int(header["n_steps"]), bool(header["directed"]), **arrays
    )
    kinds = "".join(array.dtype.kind for array in arrays.values())
    if kinds != "iiiif" or any(array.ndim != 1 for array in arrays.values()):
        raise ValueError(f"arrays of the types {kinds}")
    lengths = [len(array) for array in arrays.values()]
    if lengths != [tensor.n_nodes + 1, tensor.n_pairs, tensor.n_pairs + 1, *[tensor.n_entries] * 2]:
        raise ValueError(f"{lengths} numbers in {', '.join(ARRAYS)}")
    return tensor


def check_tensor(folder: Path) -> None:
    """Raise where a staged tensor of a local folder leads anywhere but to its own rows, pairs and steps.

    Compiled loops follow these numbers without a look. One pass, for a tensor that an earlier process left.

    Raises
    ------
    InputError
        Where the folder holds no complete tensor.
    """
    if as_remote(folder) is not None:
        return
    tensor = open_tensor(folder)
    with _reading(folder):
        for pointers, size, name in (
            (tensor.indptr, tensor.n_pairs, "indptr"),
            (tensor.tube_ptr, tensor.n_entries, "tube_ptr"),
        ):
            if pointers[0] != 0 or pointers[-1] != size or (pointers[1:] < pointers[:-1]).any():
                raise ValueError(f"{name} is not in order")
        for index, size, name in (
            (tensor.indices, tensor.n_nodes, "indices"),
            (tensor.steps, tensor.n_steps, "steps"),
        ):
            if len(index) and (index.min() < 0 or index.max() >= size):
                raise ValueError(f"{name} has numbers outside of 0 to {size - 1}")
        if not np.isfinite(tensor.values).all():
            raise ValueError("values has numbers that are not finite")
