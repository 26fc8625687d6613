"""The task that looks at every node: how connected it is, when it was seen, and what the fit leaves of it."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from toffee_dist.errors import InputError
from toffee_dist.kernels.embedding import SUM, TimeWeights
from toffee_dist.kernels.fold import fold_weights
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.limits import LIMITS
from toffee_dist.storage.files import read_json, save_array, write_json
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import ZeroSlice, array_path, load_rows
from toffee_dist.storage.tensors import open_tensor


@dataclass(frozen=True)
class NodeStatsTask:
    """What is known of every node beside its vector.

    Parameters
    ----------
    run
        Folder of the run.
    zero
        Where one vector per node comes from; None where nothing is.
    weights
        Weights in time of that slice.
    pairs_at_once
        Pairs that are held at once.
    """

    run: str
    zero: ZeroSlice | None
    weights: TimeWeights = SUM
    pairs_at_once: int = LIMITS.table_pairs


def write_node_stats(task: NodeStatsTask) -> dict[str, Any]:
    """Leave degree, first and last step of every node; for each role whether it is cold, and its residual.

    A node is cold in a role where it has no edge in it. The residual is the share of its row x_i of the zero
    slice that the fit m_i leaves: ‖x_i − m_i‖² / ‖x_i‖², 1 where there is nothing to fit. With M = U S Vᵀ,
    ‖m_i‖² = ‖(US)_i‖² and ⟨x_i, m_i⟩ = (US)_i·(XV)_i; for targets the same of Mᵀ.
    """
    run, zero = RunFolder.at(task.run), task.zero
    # One that is damaged is made again.
    with suppress(InputError):
        return dict(read_json(run.node_record))
    run.node_record.parent.mkdir(exist_ok=True)
    tensor = open_tensor(run.staged.tensor)
    degree, first, last = tensor.node_activity(task.pairs_at_once)
    arrays: dict[str, Any] = {"degree": degree, "first": first, "last": last}
    folds: list[Any] = []
    found: dict[str, Any] = {"active": int((degree > 0).sum())}
    if zero is not None:
        [(_, values)] = iter_values(task.weights.apply(tensor), [0])
        matrix = slice_matrix(tensor, values)
        for role, X in (("source", matrix), ("target", matrix.T)):
            energy = np.asarray(X.multiply(X).sum(axis=1)).ravel()
            arrays[f"{role}_cold"] = energy == 0
            if zero.fitted:
                keys = ("U", "V") if role == "source" else ("V", "U")
                left, right = (load_rows(array_path(run.slices, key, zero.name)) for key in keys)
                # Of an undirected graph both roles have the published vectors of the source.
                others = right if tensor.directed else left.copy()
                S = load_rows(array_path(run.slices, "S", zero.name))
                left *= S.astype(left.dtype)
                product = np.einsum("ir,ir->i", left, X @ right, dtype=np.float64)
                folds.append(fold_weights(left, S, X @ others))
                missed = energy - 2 * product + np.square(left, dtype=np.float64).sum(axis=1)
                share = np.divide(missed, energy, out=np.ones_like(energy), where=energy > 0)
                arrays[f"{role}_residual"] = np.maximum(share, 0).astype(np.float32)
                found["energy_share"] = 1 - float(missed[energy > 0].sum() / max(energy.sum(), 1e-300))
    if folds and zero is not None and zero.form == "canonical":
        save_array(run.fold_weights, np.stack(folds))
    for name, array in arrays.items():
        save_array(run.node_stat(name), array)
    write_json(run.node_record, found)
    return found
