"""What is known of every node beside its vector: a map over blocks of nodes.

How connected a node is, when it was seen, and what the fit leaves of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.batch.blocks import MatrixTask, read_block, turn_rows
from toffee_dist.errors import InputError
from toffee_dist.kernels.fold import FoldSums
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.kernels.spmm import multiply_tiles
from toffee_dist.storage.blocks import (
    Rows,
    block_of,
    pack_array,
    read_sealed_record,
    unpack_array,
    write_bounds,
    write_sealed_record,
)
from toffee_dist.storage.files import FileSeal, read_json, save_array, write_json
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import Role, ZeroSlice, array_path, load_rows, map_block
from toffee_dist.tensor import Floats

ROLES: tuple[Role, Role] = ("source", "target")


@dataclass(frozen=True)
class NodeStatsTask:
    """One block of nodes.

    Parameters
    ----------
    run
        Folder of the run.
    zero
        Where one vector per node comes from; None where nothing is.
    block
        The rows of the zero slice; on storage where there is more than one block.
    directed
        Whether the graph is.
    """

    run: str
    zero: ZeroSlice | None
    block: MatrixTask
    directed: bool


@dataclass(frozen=True)
class NodeSums:
    """What the nodes of a block add up to, and of each role what is not fitted, the energy, and fold sums."""

    active: int
    missed: tuple[float, float]
    energy: tuple[float, float]
    folds: tuple[Floats, Floats]


def write_node_stats(task: NodeStatsTask) -> NodeSums:
    """Leave degree, first and last step of every node; for each role whether it is cold, and its residual.

    A node is cold in a role where it has no edge in it. The residual is the share of its row x_i of the zero
    slice that the fit m_i leaves: ‖x_i − m_i‖² / ‖x_i‖², 1 where there is nothing to fit. With M = U S Vᵀ,
    ‖m_i‖² = ‖(US)_i‖² and ⟨x_i, m_i⟩ = (US)_i·(XV)_i; for targets the same of Mᵀ.
    """
    run, zero, block = RunFolder.at(task.run), task.zero, task.block
    record = run.node_stat(f"block.{block.index:05d}").parent / f"block.{block.index:05d}.json"
    if (found := read_sealed_record(record)) is not None:
        return _unpack(found)
    sides = _read_sides(task)
    degree = np.diff(sides[0].indptr)
    first, last = _first_last(sides[0])
    if task.directed:
        degree = degree + np.diff(sides[1].indptr)
        first_in, last_in = _first_last(sides[1])
        first, last = np.minimum(first, first_in), np.maximum(last, last_in)
    first[last < 0] = -1
    arrays: dict[str, NDArray[Any]] = {"degree": degree.astype(np.int64), "first": first, "last": last}
    missed, energies, folds = [0.0, 0.0], [0.0, 0.0], [np.zeros((2, 0)), np.zeros((2, 0))]
    for at, (role, rows) in enumerate(zip(ROLES, sides, strict=True)) if zero is not None else ():
        energy = _row_sums(rows, np.square(np.abs(rows.values), dtype=np.float64))
        arrays[f"{role}_cold"] = energy == 0
        if zero is not None and zero.fitted:
            residual, missed[at], folds[at] = _role(task, zero, rows, role, energy)
            arrays[f"{role}_residual"] = residual
            energies[at] = float(energy.sum())
    seals: dict[str, FileSeal] = {}
    for name, array in arrays.items():
        path = place_of(run, name, block.bounds, block.index)
        seals[path.name] = save_array(path, array)
    sums = NodeSums(int((degree > 0).sum()), _pair(missed), _pair(energies), _pair(folds))
    write_sealed_record(record, _pack(sums), seals)
    return sums


def _read_sides(task: NodeStatsTask) -> tuple[Rows, Rows]:
    """Return the rows of X and of its adjoint."""
    block = task.block
    if not block.alone:
        matrix = block.matrix
        own = matrix.load("X", block.index)
        return own, matrix.load("Xh", block.index) if block.directed else own
    rows = read_block(block)
    return rows, turn_rows(rows, block.bounds[-1]) if task.directed else rows


def _role(
    task: NodeStatsTask, zero: ZeroSlice, rows: Rows, role: Role, energy: Floats
) -> tuple[NDArray[np.float32], float, Floats]:
    """Return the residual of every node in a role, the energy that is not fitted, and fold sums."""
    run, (start, stop) = RunFolder.at(task.run), task.block.rows
    ours, theirs = ("U", "V") if role == "source" else ("V", "U")
    S = load_rows(array_path(run.slices, "S", zero.name)) / (task.block.size or 1.0)
    left = load_rows(array_path(run.slices, ours, zero.name), start, stop)
    left *= S.astype(left.dtype)
    product = _multiply(task, rows, array_path(run.slices, theirs, zero.name), len(S))
    # Of an undirected graph both roles have the published vectors of the source.
    others = product
    if not task.directed:
        others = _multiply(task, rows, array_path(run.slices, ours, zero.name), len(S))
    inner = np.einsum("ir,ir->i", left, product, dtype=np.float64)
    missed = energy - 2 * inner + np.einsum("ir,ir->i", left, left, dtype=np.float64)
    share = np.divide(missed, energy, out=np.ones_like(energy), where=energy > 0)
    sums = FoldSums.of(left, others)
    return np.maximum(share, 0).astype(np.float32), float(missed[energy > 0].sum()), sums


def _multiply(task: NodeStatsTask, rows: Rows, path: Path, columns: int) -> Tall:
    bounds = task.block.bounds
    if task.block.alone:
        shape = (len(rows.indptr) - 1, bounds[-1])
        matrix = sp.csr_matrix((rows.values, rows.indices, rows.indptr), shape=shape)
        return np.asarray(matrix @ load_rows(path))
    tiles = ((bounds[at], bounds[at + 1], map_block(path, at)) for at in range(len(bounds) - 1))
    return multiply_tiles(rows.indptr, rows.indices, rows.values, tiles, columns)


def _row_sums(rows: Rows, values: Floats) -> Floats:
    """Add up the values of every row; reduceat takes the next one's first value for an empty row."""
    out = np.zeros(len(rows.indptr) - 1)
    filled = np.flatnonzero(np.diff(rows.indptr))
    if len(filled):
        out[filled] = np.add.reduceat(values, rows.indptr[filled])
    return out


def _first_last(rows: Rows) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Return the first and the last step of every row; the largest number and -1 where it has none."""
    count = len(rows.indptr) - 1
    first = np.full(count, np.iinfo(np.int32).max, dtype=np.int32)
    last = np.full(count, -1, dtype=np.int32)
    filled = np.flatnonzero(np.diff(rows.indptr))
    if len(filled):
        first[filled] = np.minimum.reduceat(rows.begins, rows.indptr[filled])
        last[filled] = np.maximum.reduceat(rows.ends, rows.indptr[filled])
    return first, last


def place_of(run: RunFolder, name: str, bounds: Sequence[int], index: int) -> Path:
    """Return where the numbers of a block of nodes are; a graph that is one block has one file."""
    path = run.node_stat(name)
    return path if len(bounds) == 2 else block_of(path, index)


def _pair(values: Sequence[Any]) -> tuple[Any, Any]:
    return values[0], values[1]


def _pack(sums: NodeSums) -> dict[str, Any]:
    folds = [pack_array(fold) for fold in sums.folds]
    return {"active": sums.active, "missed": sums.missed, "energy": sums.energy, "folds": folds}


def _unpack(found: dict[str, Any]) -> NodeSums:
    folds = [unpack_array(packed) for packed in found["folds"]]
    return NodeSums(found["active"], _pair(found["missed"]), _pair(found["energy"]), _pair(folds))


def read_record(run: RunFolder) -> dict[str, Any] | None:
    """Return the figures of all nodes, where they are there; a damaged record is made again."""
    with suppress(InputError):
        return dict(read_json(run.node_record))
    return None


def prepare(run: RunFolder, bounds: tuple[int, ...]) -> None:
    """Make the folder of the numbers per node."""
    run.node_record.parent.mkdir(exist_ok=True)
    if len(bounds) > 2:
        write_bounds(run.node_record.parent, bounds)


def finish(run: RunFolder, zero: ZeroSlice | None, sums: Sequence[NodeSums]) -> dict[str, Any]:
    """Add up the blocks, in their order; leave the weights for new nodes and, last, the figures of all."""
    found: dict[str, Any] = {"active": sum(part.active for part in sums)}
    if zero is not None and zero.fitted:
        missed, energy = (sum(getattr(part, name)[1] for part in sums) for name in ("missed", "energy"))
        found["energy_share"] = 1 - missed / max(energy, 1e-300)
        if zero.form == "canonical":
            S = load_rows(array_path(run.slices, "S", zero.name))
            weights = [
                FoldSums.weights(np.add.reduce([part.folds[at] for part in sums]), S) for at in range(2)
            ]
            save_array(run.fold_weights, np.stack(weights))
    write_json(run.node_record, found)
    return found
