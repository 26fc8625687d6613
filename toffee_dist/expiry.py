"""Expiry: which rows of an earlier run a later one still has, when nodes unseen for long are forgotten.

Rows are never reordered, so what a run keeps of an earlier one is a mask over that one's rows, and the rows
that stay come first and in their order: ``kept-<run>.npy``, beside the manifest. Without one all rows stayed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow.compute as pc
from numpy.typing import NDArray

from toffee_dist.registry import registry_files
from toffee_dist.slices import read_rows
from toffee_dist.store import RunFolder, fetched, place, read_json, replacing, save_array, write_json
from toffee_dist.timegrid import TimeGrid
from toffee_dist.writer import open_dataset

Mask = NDArray[np.bool_]


def kept_path(run: Path, earlier: str) -> Path:
    """Return where a run says which rows of an earlier one it has."""
    return run / f"kept-{earlier}.npy"


def read_kept(run: Path, earlier: str) -> Mask | None:
    """Return the rows of an earlier run that a run has; None: all."""
    path = kept_path(run, earlier)
    return read_rows(path) if path.exists() else None


@dataclass(frozen=True)
class ExpireTask:
    """The forgetting of nodes, before a night reads its edges.

    Parameters
    ----------
    run, previous, reference
        Tonight's run, the one it follows, and that of chain drift.
    before
        Ticks: nodes last seen before this are forgotten; None: nobody is.
    """

    run: str
    previous: str
    reference: str
    before: int | None


def expire_nodes(task: ExpireTask) -> str:
    """Leave masks and a registry without the forgotten nodes; return its folder, as --known takes it."""
    run, previous, reference = RunFolder(place(task.run)), place(task.previous), place(task.reference)
    known = run.work / "known"
    if (known / "manifest.json").exists():
        return str(known)
    manifest = read_json(previous / "manifest.json")
    kept = find_kept(previous, TimeGrid.from_json(manifest["grid"]), task.before)
    if not kept.all():
        save_array(kept_path(run.path, previous.name), kept)
    if reference != previous:
        earlier = read_kept(previous, reference.name)
        if earlier is None:
            # Its rows are the first of the chain.
            earlier = np.ones(int(read_json(reference / "manifest.json")["summary"]["nodes"]), dtype=bool)
        earlier[earlier] = kept[: earlier.sum()]
        if not earlier.all():
            save_array(kept_path(run.path, reference.name), earlier)
    folder = known / "registry"
    folder.mkdir(parents=True, exist_ok=True)
    rows = np.cumsum(kept) - 1
    for name in registry_files(previous / "registry"):
        with fetched(place(name)) as local:
            table = pl.read_parquet(local)
        at = table["row"].to_numpy()
        table = table.with_columns(pl.Series("row", rows[at])).filter(pl.Series(kept[at]))
        with replacing(folder / place(name).name) as temporary:
            table.write_parquet(temporary)
    write_json(known / "manifest.json", manifest)
    return str(known)


def find_kept(run: Path, grid: TimeGrid, before: int | None) -> Mask:
    """Return which nodes of a run were last seen at this tick or later."""
    seen = open_dataset([run / "nodes.parquet"]).to_table(columns=["last_seen"])["last_seen"]
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
