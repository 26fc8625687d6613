"""Expiry: which rows of the previous run a new one keeps, when nodes unseen for long are forgotten.

Rows are never reordered, so what a run keeps of an earlier one is a mask over that one's rows, and the rows
that stay come first and in their order (`RunFolder.kept`). Without a mask all rows stayed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow.compute as pc

from toffee_dist.storage.files import replacing, save_array
from toffee_dist.storage.parquet import read_columns, read_frame
from toffee_dist.storage.paths import to_path
from toffee_dist.storage.registry import registry_files
from toffee_dist.storage.runs import Mask, RunFolder
from toffee_dist.timegrid import TimeGrid


@dataclass(frozen=True)
class ExpireTask:
    """The forgetting of nodes, before a refresh reads its edges.

    Parameters
    ----------
    run, previous, reference
        The new run, the one it follows, and that of chain drift.
    before
        Ticks: nodes last seen before this are forgotten; None: nobody is.
    """

    run: str
    previous: str
    reference: str
    before: int | None


def expire_nodes(task: ExpireTask) -> str:
    """Leave masks and a registry without the forgotten nodes; return its folder, as --known takes it."""
    run, previous, reference = (RunFolder.at(path) for path in (task.run, task.previous, task.reference))
    known = run.known
    if known.complete:
        return str(known.path)
    manifest = previous.read_manifest()
    kept = find_kept(previous, manifest.grid, task.before)
    if not kept.all():
        save_array(run.kept(previous.run_id), kept)
    if reference != previous:
        earlier = previous.read_kept(reference.run_id)
        if earlier is None:
            # Its rows are the first of the chain.
            earlier = np.ones(reference.read_manifest().summary.nodes, dtype=bool)
        earlier[earlier] = kept[: earlier.sum()]
        if not earlier.all():
            save_array(run.kept(reference.run_id), earlier)
    known.registry.mkdir(parents=True, exist_ok=True)
    rows = np.cumsum(kept) - 1
    for name in registry_files(previous.registry):
        table = read_frame(to_path(name))
        at = table["row"].to_numpy()
        table = table.with_columns(pl.Series("row", rows[at])).filter(pl.Series(kept[at]))
        with replacing(known.registry / to_path(name).name) as temporary:
            table.write_parquet(temporary)
    known.write_manifest(manifest)
    return str(known.path)


def find_kept(run: RunFolder, grid: TimeGrid, before: int | None) -> Mask:
    """Return which nodes of a run were last seen at this tick or later."""
    seen = read_columns(run.nodes, ["last_seen"])["last_seen"]
    if before is None:
        return np.ones(len(seen), dtype=bool)
    if grid.scale.instant:
        seen, unit = seen.cast("int64"), 10**6
    else:
        unit = 1
    # A node of which nothing is known is older than all that is.
    return np.asarray(
        pc.fill_null(seen.cast("float64"), -np.inf).to_numpy() >= before * unit / grid.scale.ticks
    )
