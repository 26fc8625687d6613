"""The task that looks at every node: how connected it is, when it was seen, and what the fit leaves of it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np

from toffee_dist.slices import (
    MODEL,
    array_path,
    read_rows,
)
from toffee_dist.spectrum import iter_values, slice_matrix
from toffee_dist.staging import open_tensor
from toffee_dist.store import place, save_array, write_json
from toffee_dist.tasks import weigh_steps
from toffee_dist.tensor import TemporalTensor

# The weights with which vectors of new nodes are made, a row a role; see `fold`.
FOLD = "fold.npy"
# Pairs that are held at once.
TABLE_PAIRS = 1 << 22


@dataclass(frozen=True)
class ActivityTask:
    """What is known of every node beside its vector.

    Parameters
    ----------
    run
        Folder of the run.
    zero
        Slice that one vector a node comes from; empty where there is none.
    reduce
        Weights in time of that slice.
    gauge
        What the vectors are; new nodes can be given canonical ones.
    """

    run: str
    zero: str
    reduce: str
    gauge: str


def write_activity(task: ActivityTask) -> dict[str, Any]:
    """Leave degree, first and last step of every node; for each role whether it is cold, and its residual.

    A node is cold in a role where it has no edge in it. The residual is the share of its row x_i of the zero
    slice that the fit m_i leaves: ‖x_i − m_i‖² / ‖x_i‖², 1 where there is nothing to fit. With M = U S Vᵀ,
    ‖m_i‖² = ‖(US)_i‖² and ⟨x_i, m_i⟩ = (US)_i·(XV)_i; for targets the same of Mᵀ.
    """
    run = place(task.run)
    folder, slices = run / "work" / "activity", run / "work" / "slices"
    record = folder / "record.json"
    if record.exists():
        known: dict[str, Any] = json.loads(record.read_text())
        return known
    folder.mkdir(exist_ok=True)
    tensor = open_tensor(run / "work" / "ingest" / "tensor")
    degree, first, last = node_activity(tensor)
    arrays = {"degree": degree, "first": first, "last": last}
    folds: list[Any] = []
    found: dict[str, Any] = {"active": int((degree > 0).sum())}
    if task.zero:
        [(_, values)] = iter_values(weigh_steps(tensor, task.reduce), [0])
        matrix = slice_matrix(tensor, values)
        for role, X in (("source", matrix), ("target", matrix.T)):
            energy = np.asarray(X.multiply(X).sum(axis=1)).ravel()
            arrays[f"{role}_cold"] = energy == 0
            if task.zero != MODEL:
                keys = ("U", "V") if role == "source" else ("V", "U")
                left, right = (read_rows(array_path(slices, key, task.zero)) for key in keys)
                # Of an undirected graph both roles have the published vectors of the source.
                others = right if tensor.directed else left.copy()
                S = read_rows(array_path(slices, "S", task.zero))
                left *= S.astype(left.dtype)
                product = np.einsum("ir,ir->i", left, X @ right, dtype=np.float64)
                folds.append(fold_weights(left, S, X @ others))
                missed = energy - 2 * product + np.square(left, dtype=np.float64).sum(axis=1)
                share = np.divide(missed, energy, out=np.ones_like(energy), where=energy > 0)
                arrays[f"{role}_residual"] = np.maximum(share, 0).astype(np.float32)
                found["energy_share"] = 1 - float(missed[energy > 0].sum() / max(energy.sum(), 1e-300))
    if folds and task.gauge == "canonical":
        save_array(run / FOLD, np.stack(folds))
    for name, array in arrays.items():
        save_array(folder / f"{name}.npy", array)
    write_json(record, found)
    return found


def fold_weights(US: Any, S: Any, P: Any) -> np.ndarray[Any, Any]:
    """Return w of `fold`: for each column the factor with which P = X F·S^{−2/3} comes nearest to U·S^{2/3}.

    Least squares over the nodes of the run, then S^{−2/3}: w = ⟨US, P⟩ / (‖P‖² S). Where the slice is fitted
    exactly, P = ±US and w = ±1/S; columns that are noise for a new node are damped.
    """
    scale = np.square(P, dtype=np.float64).sum(axis=0) * S
    num = np.einsum("ir,ir->r", US, P, dtype=np.float64)
    return np.asarray(np.divide(num, scale, out=np.zeros(len(S)), where=scale > 0))


def node_activity(
    tensor: TemporalTensor,
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Return each node's degree, first and last step (-1 where it has none), as source or as target.

    The degree counts pairs: of an undirected graph its neighbours, of a directed one both directions.
    """
    n = tensor.n_nodes
    degree = np.zeros(n, dtype=np.int64)
    first = np.full(n, tensor.n_steps, dtype=np.int32)
    last = np.full(n, -1, dtype=np.int32)
    for start in range(0, tensor.n_pairs, TABLE_PAIRS):
        pairs = slice(start, min(start + TABLE_PAIRS, tensor.n_pairs))
        i = np.searchsorted(tensor.indptr, np.arange(pairs.start, pairs.stop), side="right") - 1
        j = np.asarray(tensor.indices[pairs])
        begins = tensor.steps[tensor.tube_ptr[pairs]].astype(np.int32)
        ends = tensor.steps[tensor.tube_ptr[pairs.start + 1 : pairs.stop + 1] - 1].astype(np.int32)
        degree += np.bincount(i, minlength=n)
        sides = (i, j) if tensor.directed else (i,)
        if tensor.directed:
            degree += np.bincount(j, minlength=n)
        for side in sides:
            np.minimum.at(first, side, begins)
            np.maximum.at(last, side, ends)
    first[last < 0] = -1
    return degree, first, last
