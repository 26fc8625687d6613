"""Edges that are in memory, as frames, or named by paths: what the estimator reads."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.errors import InputError
from toffee_dist.ingest.job import ingest
from toffee_dist.settings import EdgeSettings
from toffee_dist.storage.files import replacing, scratch
from toffee_dist.storage.registry import read_node_rows, registry_files
from toffee_dist.storage.runs import StagedEdges
from toffee_dist.storage.tensors import ARRAYS
from toffee_dist.tasks import RunTasks, run_here
from toffee_dist.tensor import TemporalTensor


def is_edges(data: Any) -> bool:
    """Whether this names files of edges, or is a frame of them."""
    if isinstance(data, str | Path):
        return True
    if isinstance(data, list | tuple) and data:
        return all(isinstance(item, str | Path) for item in data)
    # pandas, polars and Arrow alike; a sparse tensor has none of these.
    return (
        isinstance(data, pl.DataFrame | pl.LazyFrame)
        or hasattr(data, "__arrow_c_stream__")
        or hasattr(data, "iloc")
    )


def read_edges(
    data: Any, options: Mapping[str, Any], folder: Path, run: RunTasks = run_here
) -> tuple[TemporalTensor, list[Any]]:
    """Return the tensor in memory, and the node id of every row.

    Parameters
    ----------
    data
        As `is_edges` knows it.
    options
        Of edges, by name.
    folder
        Where the tasks of the ingest hand over; what they leave there is removed.
    run
        Where they run.
    """
    with scratch(folder, "toffee-", mode=0o700) as stage:
        inputs = _as_files(data, stage / "edges.parquet")
        settings = EdgeSettings.read({"inputs": inputs, **options})
        result = ingest(settings, stage / "ingest", run)
        tensor = result.tensor()
        # The maps would outlive their files.
        arrays: dict[str, Any] = {name: np.array(getattr(tensor, name)) for name in ARRAYS}
        tensor = replace(tensor, **arrays)
        files = registry_files(StagedEdges(result.folder).nodes)
        return tensor, read_node_rows(files, 0, tensor.n_nodes)["id"].to_list()


def _as_files(data: Any, path: Path) -> tuple[str, ...]:
    if isinstance(data, str | Path):
        return (str(data),)
    if isinstance(data, list | tuple):
        return tuple(str(item) for item in data)
    try:
        frame = data.collect() if isinstance(data, pl.LazyFrame) else pl.DataFrame(data)
    except (TypeError, ValueError, pl.exceptions.PolarsError) as error:
        raise InputError(
            "cannot read this frame",
            got=str(error),
            allowed="a pandas, polars or Arrow frame",
            remedy="Pass a frame with columns source, target and time, or write it to a file.",
        ) from None
    with replacing(path) as temporary:
        frame.write_parquet(temporary)
    return (str(path),)
