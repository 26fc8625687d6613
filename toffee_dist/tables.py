"""The task that writes the small tables of a run: nodes, steps, how each slice was fitted, the cores R."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from toffee_dist import writer
from toffee_dist.expiry import read_kept
from toffee_dist.parts import read_ids
from toffee_dist.slices import (
    REDUCED,
    array_path,
    read_reports,
    read_rows,
    slice_name,
)
from toffee_dist.spectrum import inverse_transform
from toffee_dist.staging import open_tensor
from toffee_dist.store import place, replacing
from toffee_dist.timegrid import TimeGrid


@dataclass(frozen=True)
class TablesTask:
    """The small tables of a run."""

    run: str
    grid: TimeGrid
    names: tuple[str, ...]
    factors: tuple[int, ...]
    previous: str = ""


# Rows of the node table that are held at once.
TABLE_ROWS = 1 << 20


def write_tables(task: TablesTask) -> dict[str, Any]:
    """Write nodes, steps, fit and, where asked for, the cores R; return figures of the fit."""
    run = place(task.run)
    slices = run / "work" / "slices"
    reports = read_reports(slices, task.names)
    fit = [asdict(report) for report in reports]
    # Seconds differ from run to run, and the Parquet files of equal runs are equal: they have their own file.
    seconds = {name: row.pop("seconds") for name, row in zip(task.names, fit, strict=True)}
    frame = pl.DataFrame(fit, schema=FIT_SCHEMA).with_columns(
        reduced=pl.Series([name == REDUCED for name in task.names], dtype=pl.Boolean)
    )
    writer.write_parquet(run / "fit.parquet", {name: frame[name].to_arrow() for name in frame.columns})
    with replacing(run / "timings.json") as temporary:
        temporary.write_text(json.dumps(seconds, indent=1) + "\n")
    n_steps = task.grid.n_steps
    writer.write_parquet(
        run / "steps.parquet",
        {"step": np.arange(n_steps, dtype=np.int32), "start": step_starts(task.grid)},
    )
    if task.factors:
        _write_cores(run, task.factors, n_steps)
    write_nodes(run, task.grid, task.previous)
    gaps = [report.gap for report in reports if report.gap is not None]
    return {
        "slices": len(reports),
        "converged": sum(report.converged for report in reports),
        "iterations": sum(report.iterations for report in reports),
        "solve_seconds": round(sum(seconds.values()), 3),
        "mean_gap": float(np.mean(gaps)) if gaps else None,
    }


FIT_SCHEMA = {
    "k": pl.Int32,
    "energy": pl.Float64,
    "objective": pl.Float64,
    "bound": pl.Float64,
    "gap": pl.Float64,
    "iterations": pl.Int32,
    "solver": pl.String,
    "converged": pl.Boolean,
}


def _write_cores(run: Path, freqs: tuple[int, ...], n_steps: int) -> None:
    """Write R in frequency and in time; T·r² numbers."""
    R = np.stack([read_rows(array_path(run / "work" / "slices", "R", slice_name(k))) for k in freqs])
    flat = R.reshape(len(freqs), -1).astype(np.complex128)
    writer.write_parquet(
        run / "factors" / "R_freq.parquet",
        {
            "k": np.array(freqs, dtype=np.int32),
            "real": writer.vectors(np.ascontiguousarray(flat.real)),
            "imag": writer.vectors(np.ascontiguousarray(flat.imag)),
        },
    )
    in_time = np.asarray(inverse_transform(flat, freqs, n_steps))
    writer.write_parquet(
        run / "factors" / "R_time.parquet",
        {"step": np.arange(n_steps, dtype=np.int32), "embedding": writer.vectors(in_time)},
    )


def write_nodes(run: Path, grid: TimeGrid, previous: str = "") -> None:
    """Write nodes.parquet: node_id, row, degree, first and last step, and the moments they begin at.

    Steps are those of the window. Moments reach back to the runs before: a node that has left keeps them.
    """
    tensor = open_tensor(run / "work" / "ingest" / "tensor")
    activity = run / "work" / "activity"
    degree, first, last = (read_rows(activity / f"{name}.npy") for name in ("degree", "first", "last"))
    starts = step_starts(grid)
    earlier = _earlier_moments(run, place(previous)) if previous else None

    def tables() -> Iterator[pa.Table]:
        for start in range(0, tensor.n_nodes, TABLE_ROWS):
            stop = min(start + TABLE_ROWS, tensor.n_nodes)
            rows = slice(start, stop)
            seen = {"first": first[rows], "last": last[rows]}
            columns = read_ids(run / "work" / "ingest" / "nodes", start, stop)
            columns |= {
                "row": pa.array(np.arange(start, stop, dtype=np.int64)),
                "degree": pa.array(degree[rows]),
            }
            for name, steps in seen.items():
                # A node that is known but has no edge in the window was never seen.
                mask = steps < 0
                columns[f"{name}_step"] = pa.array(steps, mask=mask)
                moments = starts.take(pa.array(np.maximum(steps, 0), mask=mask))
                if earlier is not None:
                    before = earlier[f"{name}_seen"].slice(start, stop - start).combine_chunks()
                    before = pa.concat_arrays([before, pa.nulls(stop - start - len(before), before.type)])
                    first_known = (moments, before) if name == "last" else (before, moments)
                    moments = pc.coalesce(*first_known)
                columns[f"{name}_seen"] = moments
            yield pa.table(columns)

    stream = tables()
    head = next(stream)

    def whole() -> Iterator[pa.Table]:
        yield head
        yield from stream

    writer.write_stream(run / "nodes.parquet", head.schema, whole())


def _earlier_moments(run: Path, previous: Path) -> pa.Table:
    """Return when the nodes of the run before were first and last seen, in tonight's rows."""
    table = writer.open_dataset([previous / "nodes.parquet"]).to_table(columns=["first_seen", "last_seen"])
    kept = read_kept(run, previous.name)
    return table if kept is None else table.filter(pa.array(kept))


def step_starts(grid: TimeGrid) -> pa.Array:
    """Return the first moment of every step: timestamps in UTC, or plain numbers."""
    starts = np.array([grid.start(step) for step in range(grid.n_steps)], dtype=np.int64)
    ticks = grid.scale.ticks
    if not grid.scale.instant:
        return pa.array(starts if ticks == 1 else starts / ticks)
    micros = starts * (10**6 // ticks) if ticks <= 10**6 else starts // (ticks // 10**6)
    return pa.array(micros, type=pa.timestamp("us", tz="UTC"))
