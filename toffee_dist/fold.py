"""Vectors for nodes that came after the run: from their edges, against the factors as they are.

The zero slice is X ≈ M = U S Vᵀ: a new row x of it belongs to x V = (U S)_new, and to the embedding U·S^{2/3}

    e = x V S^{−1/3} = x F S^{−1},   F = V·S^{2/3} the published vectors of the targets.

Published vectors are turned by Q: e = x F (Qᵀ diag(w) Q), with w = 1/S where the fit is exact. Elsewhere 1/S
blows up the columns that are noise, so w is found from the nodes of the run (`activity.fold_weights`); of an
undirected graph it carries the signs of the eigenvalues. Targets are the same with the roles exchanged.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import scipy.sparse as sp

from toffee_dist import runtime, writer
from toffee_dist.activity import FOLD, node_activity
from toffee_dist.config import EdgeSettings, RuntimeSettings
from toffee_dist.drift import iter_vectors
from toffee_dist.edges import ingest
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.parts import ROTATION, Part, read_ids
from toffee_dist.progress import Progress
from toffee_dist.slices import read_rows
from toffee_dist.solvers.base import Small, Tall
from toffee_dist.spectrum import iter_values, slice_matrix
from toffee_dist.staging import open_tensor
from toffee_dist.store import RunFolder, find_run, place, read_json, scratch
from toffee_dist.tasks import weigh_steps
from toffee_dist.tensor import Floats


class FoldConfig(RuntimeSettings):
    """Options of `toffee fold-in`; how edges are read is what the run says."""

    inputs: tuple[str, ...] = ()


def fold_rows(x: Any, blocks: Any, weights: Floats, rotation: Small | None) -> Tall:
    """Return the vectors of new rows.

    Parameters
    ----------
    x : (m, n) sparse matrix
        The new nodes' rows of the zero slice, towards the nodes of the run.
    blocks
        (first row, vectors) of the other role, in the order of rows.
    weights
        w, a number a column.
    rotation
        Q, or None.
    """
    x = sp.csc_matrix(x)
    total = np.zeros((x.shape[0], len(weights)))
    for start, F in blocks:
        total += x[:, start : start + len(F)] @ F.astype(np.float64)
    Q = np.eye(len(weights)) if rotation is None else rotation
    return np.asarray(total @ (Q.T @ (weights[:, None] * Q)))


@dataclass(frozen=True)
class FoldTask:
    """The folding of one ingest into one run."""

    run: str
    ingested: str
    out: str
    reduce: str
    outputs: tuple[Part, ...]


def fold(task: FoldTask) -> dict[str, Any]:
    """Write a row a new node: its vectors, how many pairs they come from, and whether there were none."""
    run, ingested = RunFolder(place(task.run)), place(task.ingested)
    known = int(read_json(run.manifest)["summary"]["nodes"])
    tensor = open_tensor(ingested / "tensor")
    new = tensor.n_nodes - known
    if not new:
        return {"new": 0, "cold": 0}
    [(_, values)] = iter_values(weigh_steps(tensor, task.reduce), [0])
    X = slice_matrix(tensor, values)
    weights = read_rows(run.path / FOLD)
    Q = read_rows(run.path / ROTATION) if (run.path / ROTATION).exists() else None
    columns: dict[str, Any] = dict(read_ids(ingested / "nodes", known, tensor.n_nodes))
    cold = np.ones(new, dtype=bool)
    for output in task.outputs:
        x = X[known:, :known] if output == "embedding" else X.T.tocsr()[known:, :known]
        other = task.outputs[-1] if output == "embedding" else task.outputs[0]
        role = 0 if output == "embedding" else 1
        vectors = fold_rows(x, iter_vectors(run.path, other), weights[role], Q)
        columns[output] = writer.vectors(vectors.astype(np.float32))
        cold &= ~np.any(vectors, axis=1)
    columns["degree"] = pa.array(node_activity(tensor)[0][known:])
    # Edges among new nodes alone say nothing about where they belong.
    columns["is_cold"] = pa.array(cold)
    writer.write_parquet(place(task.out), columns)
    return {"new": new, "cold": int(cold.sum())}


def fold_in(path: Path, config: FoldConfig, out: Path, progress: Progress | None = None) -> dict[str, Any]:
    """Give vectors to the nodes of some edges that the published run does not know.

    Parameters
    ----------
    path
        Folder of the runs, or of one run.
    config
        The edges of the new nodes, and where to work.
    out
        Parquet file of the results.
    """
    progress = progress or Progress()
    run = find_run(path)
    manifest = read_json(run.manifest)
    if not (run.path / FOLD).exists() or not run.registry.is_dir():
        raise InputError(
            "this run cannot take in new nodes",
            got=run.run_id,
            allowed="an embedding of model toffee or toffee-, gauge canonical",
            remedy="Run toffee embed or toffee refresh again.",
        )
    if not config.inputs:
        raise ConfigError("inputs", got="none", allowed="files with the edges of new nodes")
    asked = {name: manifest["config"][name] for name in EdgeSettings.model_fields}
    asked |= {"inputs": config.inputs, "known": str(run.path), "since": None, "until": None, "last": None}
    edges = EdgeSettings.read(asked).ingest_config()
    roles: tuple[Part, ...] = ("embedding", "embedding_target")
    outputs = tuple(role for role in roles if role in manifest["outputs"])
    with (
        # Beside the runs: where all workers can read and write.
        scratch(run.out, ".fold-") as folder,
        runtime.open_cluster(config) as client,
        progress.stage("fold in") as done,
    ):
        on = runtime.runner(client, wait=config.wait, stall=config.stall, done=done)
        result = ingest(edges, folder / "ingest", on, progress.say)
        item = FoldTask(
            str(run.path), str(result.folder), str(out.absolute()), manifest["config"]["reduce"], outputs
        )
        [found] = on(fold, [item])
    return {"run": run.run_id, "out": str(out), **found}
