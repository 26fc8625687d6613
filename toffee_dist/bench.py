"""What the estimator needs for more than arrays in memory: reading edges, and solving on a client."""

from __future__ import annotations

import tempfile
import uuid
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from toffee_dist import registry
from toffee_dist.config import EdgeSettings
from toffee_dist.edges import Run, ingest, run_here
from toffee_dist.errors import InputError
from toffee_dist.plan import Shape, batch_freqs
from toffee_dist.slices import read_slice
from toffee_dist.solvers import SliceFactors, SolveOptions
from toffee_dist.staging import ARRAYS, stage_tensor
from toffee_dist.store import check_writable, place, remove_tree, replacing, scratch
from toffee_dist.tasks import SolveTask, solve_batch
from toffee_dist.tensor import TemporalTensor


class Bench:
    """A client and a folder that its workers share: where an estimator has its slices solved."""

    def __init__(self, client: Any, storage: str | None) -> None:
        from toffee_dist.runtime import runner
        from toffee_dist.survey import ask_workers

        self.path = place(storage or tempfile.gettempdir()) / f"toffee-{uuid.uuid4().hex[:12]}"
        self.path.mkdir(mode=0o700)
        check_writable(self.path)
        # Gone with the estimator.
        weakref.finalize(self, remove_tree, self.path)
        self.run: Run = runner(client)
        self._staged: TemporalTensor | None = None
        ask_workers(client, self.path)

    def solve(
        self, tensor: TemporalTensor, freqs: Sequence[int], options: SolveOptions, reduce: str = "sum"
    ) -> Iterator[SliceFactors]:
        """Yield solved slices in the order of `freqs`; the factors come through storage."""
        if self._staged is not tensor:
            stage_tensor(tensor, self.path / "tensor")
            self._staged = tensor
        slices = self.path / "slices"
        slices.mkdir(exist_ok=True)
        shape = Shape(
            tensor.n_nodes, tensor.n_steps, tensor.n_pairs, tensor.n_events, tensor.directed, 0, exact=True
        )
        tasks = [
            SolveTask(str(self.path / "tensor"), str(slices), batch, options, reduce)
            for batch in batch_freqs(list(freqs), shape, options.rank)
        ]
        for task, _ in zip(tasks, self.run(solve_batch, tasks), strict=True):
            for k in task.freqs:
                yield read_slice(slices, task.name(k))


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
    data: Any, options: Mapping[str, Any], bench: Bench | None
) -> tuple[TemporalTensor, list[Any]]:
    """Return the tensor in memory, and the node id of every row."""
    parent = Path(tempfile.gettempdir()) if bench is None else bench.path
    with scratch(parent, "toffee-", mode=0o700) as folder:
        inputs = _as_files(data, folder / "edges.parquet")
        settings = EdgeSettings.read({"inputs": inputs, **options})
        result = ingest(settings.ingest_config(), folder / "ingest", run_here if bench is None else bench.run)
        tensor = result.tensor()
        # The maps would outlive their files.
        arrays: dict[str, Any] = {name: np.array(getattr(tensor, name)) for name in ARRAYS}
        tensor = replace(tensor, **arrays)
        ids = registry.read_rows(registry.registry_files(result.folder / "nodes"), 0, tensor.n_nodes)["id"]
        return tensor, ids.to_list()


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
