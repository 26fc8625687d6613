"""The task that writes the small tables of a run: nodes, steps, how each slice was fitted, the cores R."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from toffee_dist.kernels.spectrum import inverse_transform
from toffee_dist.limits import LIMITS
from toffee_dist.storage import parquet
from toffee_dist.storage.earlier import EarlierRows
from toffee_dist.storage.files import replacing
from toffee_dist.storage.registry import read_ids
from toffee_dist.storage.runs import RunFolder
from toffee_dist.storage.slices import REDUCED, array_path, load_rows, read_reports, slice_name
from toffee_dist.timegrid import TimeGrid


@dataclass(frozen=True)
class TablesTask:
    """The small tables of a run.

    Parameters
    ----------
    run
        Folder of the run.
    grid
        Its steps as times.
    names
        Its slices.
    factors
        Frequencies whose cores R are written; none where they were not asked for.
    previous
        Folder of the previous run, which knows when its nodes were first and last seen; empty: none.
    rows_at_once
        Rows of the node table that are held at once.
    """

    run: str
    grid: TimeGrid
    names: tuple[str, ...]
    factors: tuple[int, ...]
    previous: str = ""
    rows_at_once: int = LIMITS.table_rows


def write_tables(task: TablesTask) -> dict[str, Any]:
    """Write nodes, steps, fit and, where asked for, the cores R; return figures of the fit."""
    run = RunFolder.at(task.run)
    reports = read_reports(run.slices, task.names)
    fit = [asdict(report) for report in reports]
    # Seconds differ from run to run, and the Parquet files of equal runs are equal: they have their own file.
    seconds = {name: row.pop("seconds") for name, row in zip(task.names, fit, strict=True)}
    frame = pl.DataFrame(fit, schema=FIT_SCHEMA).with_columns(
        reduced=pl.Series([name == REDUCED for name in task.names], dtype=pl.Boolean)
    )
    parquet.write_parquet(run.fit, {name: frame[name].to_arrow() for name in frame.columns})
    with replacing(run.timings) as temporary:
        temporary.write_text(json.dumps(seconds, indent=1) + "\n")
    n_steps = task.grid.n_steps
    parquet.write_parquet(
        run.steps,
        {"step": np.arange(n_steps, dtype=np.int32), "start": step_starts(task.grid)},
    )
    if task.factors:
        _write_cores(run, task.factors, n_steps)
    write_nodes(run, task)
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


def _write_cores(run: RunFolder, freqs: tuple[int, ...], n_steps: int) -> None:
    """Write R in frequency and in time; T·r² numbers."""
    cores = (load_rows(array_path(run.slices, "R", slice_name(k))).ravel() for k in freqs)
    flat = np.stack(list(cores), dtype=np.complex128)
    parquet.write_parquet(
        run.core("R_freq"),
        {
            "k": np.array(freqs, dtype=np.int32),
            "real": parquet.vectors(np.ascontiguousarray(flat.real)),
            "imag": parquet.vectors(np.ascontiguousarray(flat.imag)),
        },
    )
    in_time = np.asarray(inverse_transform(flat, freqs, n_steps))
    parquet.write_parquet(
        run.core("R_time"),
        {"step": np.arange(n_steps, dtype=np.int32), "embedding": parquet.vectors(in_time)},
    )


def write_nodes(run: RunFolder, task: TablesTask) -> None:
    """Write nodes.parquet: node_id, row, degree, first and last step, and the moments they begin at.

    Steps are those of the window. Moments reach back to earlier runs: a node that has left keeps them.
    """
    n_nodes = run.staged.read().summary.nodes
    starts = step_starts(task.grid)
    earlier = EarlierRows(run, RunFolder.at(task.previous)) if task.previous else None

    def tables() -> Iterator[pa.Table]:
        for start in range(0, n_nodes, task.rows_at_once):
            stop = min(start + task.rows_at_once, n_nodes)
            degree, first, last = (
                load_rows(run.node_stat(name), start, stop) for name in ("degree", "first", "last")
            )
            seen = {"first": first, "last": last}
            known = None if earlier is None else earlier.columns(["first_seen", "last_seen"], start, stop)
            columns = read_ids(run.staged.nodes, start, stop)
            columns |= {
                "row": pa.array(np.arange(start, stop, dtype=np.int64)),
                "degree": pa.array(degree),
            }
            for name, steps in seen.items():
                # A node that is known but has no edge in the window was never seen.
                mask = steps < 0
                columns[f"{name}_step"] = pa.array(steps, mask=mask)
                moments = starts.take(pa.array(np.maximum(steps, 0), mask=mask))
                if known is not None:
                    before = known[f"{name}_seen"].combine_chunks()
                    before = pa.concat_arrays([before, pa.nulls(stop - start - len(before), before.type)])
                    first_known = (moments, before) if name == "last" else (before, moments)
                    moments = pc.coalesce(*first_known)
                columns[f"{name}_seen"] = moments
            yield pa.table(columns)

    parquet.write_stream(run.nodes, tables())


def step_starts(grid: TimeGrid) -> pa.Array:
    """Return the first moment of every step: timestamps in UTC, or plain numbers."""
    starts = np.array([grid.start(step) for step in range(grid.n_steps)], dtype=np.int64)
    ticks = grid.scale.ticks
    if not grid.scale.instant:
        return pa.array(starts if ticks == 1 else starts / ticks)
    micros = starts * (10**6 // ticks) if ticks <= 10**6 else starts // (ticks // 10**6)
    return pa.array(micros, type=pa.timestamp("us", tz="UTC"))
