"""Vectors for nodes that came after the run, from their edges, without a refresh; see `kernels.fold`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from toffee_dist.batch.write_outputs import OutputFolder
from toffee_dist.cluster.client import open_cluster
from toffee_dist.cluster.mapping import runner
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.ingest.job import ingest
from toffee_dist.kernels.embedding import TimeWeights
from toffee_dist.kernels.fold import fold_rows
from toffee_dist.kernels.spectrum import iter_values, slice_matrix
from toffee_dist.progress import Progress
from toffee_dist.results.published import PublishedRun
from toffee_dist.settings import EdgeSettings, InputSettings, RuntimeSettings
from toffee_dist.storage import parquet
from toffee_dist.storage.exports import note_export
from toffee_dist.storage.files import scratch
from toffee_dist.storage.forgotten import read_forgotten
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder, StagedEdges, find_run
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.storage.vectors import iter_vectors, open_vectors


class FoldConfig(InputSettings, RuntimeSettings):
    """Options of `toffee fold-in`; how edges are read is what the run says."""


@dataclass(frozen=True)
class FoldTask:
    """The folding of one ingest into one run."""

    run: str
    ingested: str
    out: str
    reduce: str
    outputs: tuple[OutputFolder, ...]


def fold(task: FoldTask) -> dict[str, Any]:
    """Write a row per new node: its vectors, how many pairs they come from, and whether there were none."""
    run, ingested = RunFolder.at(task.run), StagedEdges(to_path(task.ingested))
    manifest = run.read_manifest()
    known, rank = manifest.summary.nodes, manifest.config.rank
    tensor = open_tensor(ingested.tensor)
    new = tensor.n_nodes - known
    if not new:
        return {"new": 0, "cold": 0}
    [(_, values)] = iter_values(TimeWeights(task.reduce).apply(tensor), [0])
    X = slice_matrix(tensor, values)
    weights, Q = run.read_fold_weights(rank), run.read_rotation(rank)
    columns: dict[str, Any] = dict(read_ids(ingested.nodes, known, tensor.n_nodes))
    cold = np.ones(new, dtype=bool)
    for output in task.outputs:
        x = X[known:, :known] if output == "embedding" else X.T.tocsr()[known:, :known]
        other = task.outputs[-1] if output == "embedding" else task.outputs[0]
        role = 0 if output == "embedding" else 1
        vectors = fold_rows(x, iter_vectors(open_vectors(run, other)), weights[role], Q)
        columns[output] = parquet.vectors(vectors.astype(np.float32))
        cold &= ~np.any(vectors, axis=1)
    columns["degree"] = pa.array(tensor.node_activity()[0][known:])
    # Edges among new nodes alone say nothing about where they belong.
    columns["is_cold"] = pa.array(cold)
    table = parquet.with_space(columns, manifest.space_id)
    lists = manifest.config.vectors == "list"
    parquet.write_parquet(to_path(task.out), parquet.as_lists(table) if lists else table)
    return {"new": new, "cold": int(cold.sum())}


def fold_in(
    path: Path,
    config: FoldConfig,
    out: Path,
    progress: Progress | None = None,
    space_id: str | None = None,
) -> dict[str, Any]:
    """Give vectors to the nodes of some edges that the published run does not know.

    Parameters
    ----------
    path
        Folder of the runs, or of one run.
    config
        The edges of the new nodes, and where to work.
    out
        Parquet file of the results.
    progress
        Is shown how far it is.
    space_id
        Id of the space that the vectors of new nodes must be in; None: that of the run, whichever it is.
    """
    progress = progress or Progress()
    run = find_run(path)
    manifest = run.read_manifest()
    if space_id is not None:
        PublishedRun(run).expect_space(space_id)
    if not run.fold_weights.exists() or not run.registry.is_dir():
        raise InputError(
            "this run cannot take in new nodes",
            got=run.run_id,
            allowed="an embedding of model toffee or toffee-, gauge canonical",
            remedy="Run toffee embed or toffee refresh again.",
        )
    if not config.inputs:
        raise ConfigError("inputs", got="none", allowed="files with the edges of new nodes")
    asked = {
        name: value for name, value in manifest.config.to_json().items() if name in EdgeSettings.model_fields
    }
    asked |= {"inputs": config.inputs, "known": str(run.path), "since": None, "until": None, "last": None}
    edges = EdgeSettings.read(asked)
    roles: tuple[OutputFolder, ...] = ("embedding", "embedding_target")
    outputs = tuple(role for role in roles if role in manifest.outputs)
    with (
        # Beside the runs: where all workers can read and write.
        scratch(run.out, ".fold-") as folder,
        open_cluster(config) as client,
        progress.stage("fold in") as done,
    ):
        on = runner(client, wait=config.wait, stall=config.stall, done=done)
        forgotten = read_forgotten(run.out)
        result = ingest(edges, folder / "ingest", on, progress.say, forgotten=forgotten)
        item = FoldTask(
            str(run.path), str(result.folder), str(out.absolute()), manifest.config.reduce, outputs
        )
        [found] = on(fold, [item])
    note_export(run, "fold-in", out)
    return {"run": run.run_id, "space_id": manifest.space_id, "out": str(out), **found}
