"""What changed in the window of a run, and how likely it is that chance did it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from toffee_dist.errors import ConfigError, InputError
from toffee_dist.kernels.changes import LARGEST_RATE
from toffee_dist.results.tables import Table
from toffee_dist.storage.changes import ALERT_RATE, ChangesRecord, shared_rates
from toffee_dist.storage.manifest import read_record
from toffee_dist.storage.runs import RunFolder
from toffee_dist.timegrid import TimeGrid

_TESTED = {"p_value": pl.Float64, "q_value": pl.Float64}
_COMMUNITY = {"community": pl.Int64, "nodes": pl.Int64, "members": pl.String}
_WHEN = {"step": pl.Int64, "start": pl.String, "size": pl.Float64}
_RHYTHM = {"k": pl.Int64, "period_steps": pl.Float64, "period": pl.String}


@dataclass(frozen=True, eq=False)
class Changes:
    """What is significant, a frame per kind, most significant first.

    Attributes
    ----------
    rate : the false discovery rate
    nodes : node_id, (space,) row, p_value, q_value, step, start, size
    communities : community, nodes, members, p_value, q_value, step, start, size
    rhythms : k, period_steps, period, before, after, p_value, q_value
    moments : step, start, p_value, q_value, size
    tested : how many of each kind were tested
    """

    rate: float
    nodes: pl.DataFrame
    communities: pl.DataFrame
    rhythms: pl.DataFrame
    moments: pl.DataFrame
    tested: dict[str, int]

    @property
    def kinds(self) -> dict[str, pl.DataFrame]:
        """The frames by their names."""
        kinds = ("moments", "communities", "rhythms", "nodes")
        return {kind: getattr(self, kind) for kind in kinds}

    def to_json(self) -> dict[str, Any]:
        """Return plain types."""
        tables = {kind: frame.to_dicts() for kind, frame in self.kinds.items()}
        return {"rate": self.rate, "tested": self.tested, **tables}


def has_changes(folder: RunFolder) -> bool:
    """Whether changes were looked for in a run."""
    return folder.changes.exists() and folder.change_table.exists()


def read_changes(folder: RunFolder, grid: TimeGrid, rate: float = ALERT_RATE) -> Changes:
    """Return what is significant at a false discovery rate.

    Parameters
    ----------
    folder
        The run, which need not be published yet.
    grid
        Its steps as times.
    rate
        Above 0, at most .2: the share of the list that may be chance; also the chance that a graph without
        any change has a list at all.

    Raises
    ------
    InputError
        Where changes were not looked for, or the files are damaged.
    """
    if not 0 < rate <= LARGEST_RATE:
        raise ConfigError(
            "rate", got=str(rate), allowed=f"above 0, at most {LARGEST_RATE:g}", remedy="0.05 is usual."
        )
    if not has_changes(folder):
        raise InputError(
            "changes were not looked for in this run",
            got=folder.run_id,
            remedy="Runs with --outputs trajectory have them, and every refresh with --reduce sum.",
        )
    record = read_record(folder.changes, ChangesRecord)
    tests = record.tests
    moments = [test.model_dump() for test in tests.moments]
    communities = [
        {**test.model_dump(), "members": ", ".join(map(str, test.members))} for test in tests.communities
    ]
    rhythms = [test.model_dump() for test in tests.rhythms]
    return Changes(
        rate,
        _significant_nodes(folder, grid, rate),
        _frame(communities, {**_COMMUNITY, **_TESTED, **_WHEN}, rate),
        _frame(rhythms, {**_RHYTHM, "before": pl.Float64, "after": pl.Float64, **_TESTED}, rate),
        _frame(moments, {"step": pl.Int64, "start": pl.String, **_TESTED, "size": pl.Float64}, rate),
        dict(record.tested),
    )


def _frame(rows: list[dict[str, Any]], schema: dict[str, Any], rate: float) -> pl.DataFrame:
    chosen = sorted((row for row in rows if row["q_value"] <= rate), key=lambda row: row["p_value"])
    return pl.DataFrame([{name: row[name] for name in schema} for row in chosen], schema=schema)


def _significant_nodes(folder: RunFolder, grid: TimeGrid, rate: float) -> pl.DataFrame:
    table = Table(folder.change_table)
    found = table.collect(table.polars().filter(pl.col("p_value").is_not_null()))
    q = shared_rates(found["p_value"].to_numpy())
    found = found.with_columns(q_value=pl.Series(q, dtype=pl.Float64)).filter(pl.col("q_value") <= rate)
    steps = found["step"].to_list()
    if any(step is not None and not 0 <= step < grid.n_steps for step in steps):
        raise InputError(
            "changes.parquet is damaged", got=f"a step beyond {grid.n_steps:,}", remedy="Embed again."
        )
    starts = ["" if step is None else grid.show(step) for step in steps]
    columns = ["node_id", *(["space"] if "space" in found.columns else []), "row", *_TESTED, *_WHEN]
    order = np.argsort(found["p_value"].to_numpy(), kind="stable")
    return found.with_columns(start=pl.Series(starts, dtype=pl.String)).select(columns)[order]
