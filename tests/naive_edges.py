"""The ingest, slow and obvious: pandas, one row at a time, whole-number arithmetic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from toffee_dist import TemporalTensor

UNIT_NS = {"s": 10**9, "ms": 10**6, "us": 10**3, "ns": 1}
LENGTH_S = {"h": 3600, "m": 60, "s": 1}


@dataclass
class Expected:
    """Rows by id, a step for every row, and the tensor that from_events makes of them."""

    rows: dict[Any, int]
    steps: list[int]
    tensor: TemporalTensor
    self_loops: int
    duplicates: int


def rows_of_ids(source: list[Any], target: list[Any], bipartite: bool) -> tuple[dict[Any, int], ...]:
    if not bipartite:
        ids = sorted({*source, *target})
        rows = {node: row for row, node in enumerate(ids)}
        return rows, rows
    first = {node: row for row, node in enumerate(sorted(set(source)))}
    second = {node: len(first) + row for row, node in enumerate(sorted(set(target)))}
    return first, second


def steps_of(times: list[int], step: str, zone: str | None) -> tuple[list[int], int]:
    """Steps of whole numbers: ns since 1970 where a zone is given, plain numbers otherwise."""
    lo, hi = min(times), max(times)
    if step == "distinct":
        ordered = sorted(set(times))
        return [ordered.index(time) for time in times], len(ordered)
    if step.startswith("bins:"):
        n_bins = int(step[5:])
        return [(time - lo) * n_bins // (hi + 1 - lo) for time in times], n_bins
    if zone is None:
        steps = [(time - lo) // int(step) for time in times]
        return steps, max(steps) + 1
    count, unit = int(step[:-1]), step[-1]
    local = [pd.Timestamp(time, unit="ns", tz="UTC").tz_convert(zone) for time in times]
    if unit in "dw":
        days = [stamp.date() for stamp in local]
        first = min(days)
        if unit == "w":
            first -= pd.Timedelta(days=first.weekday())
        length = count * (7 if unit == "w" else 1)
        steps = [(day - first).days // length for day in days]
        return steps, max(steps) + 1
    midnight = min(local).normalize().value
    width = count * LENGTH_S[unit] * 10**9
    start = midnight + (lo - midnight) // width * width
    steps = [(time - start) // width for time in times]
    return steps, max(steps) + 1


def expect(
    table: pd.DataFrame,
    *,
    step: str,
    zone: str | None,
    directed: bool,
    bipartite: bool,
    entry: Any,
    pair_weight: Any,
) -> Expected:
    """table: source, target, time (whole numbers as `steps_of` takes them), weight."""
    source, target = table["source"].tolist(), table["target"].tolist()
    first, second = rows_of_ids(source, target, bipartite)
    steps, n_steps = steps_of(table["time"].tolist(), step, zone)
    i, j = [first[node] for node in source], [second[node] for node in target]
    tensor = TemporalTensor.from_events(
        np.array(i),
        np.array(j),
        np.array(steps),
        table["weight"].to_numpy(dtype=float) if entry == "sum" else None,
        n_nodes=len({**first}) if not bipartite else len(first) + len(second),
        n_steps=n_steps,
        directed=directed,
        entry=entry,
        pair_weight=pair_weight,
    )
    events = zip(i, j, steps, strict=True)
    distinct = {(a, b, t) if directed else (min(a, b), max(a, b), t) for a, b, t in events}
    loops = sum(a == b for a, b in zip(i, j, strict=True))
    rows = {(0, node): row for node, row in first.items()}
    rows |= {(1, node): row for node, row in second.items()} if bipartite else {}
    return Expected(rows, steps, tensor, loops, len(i) - len(distinct))


def assert_same(tensor: TemporalTensor, other: TemporalTensor) -> None:
    """Equal to the last bit, types included."""
    assert (tensor.n_nodes, tensor.n_steps, tensor.directed) == (other.n_nodes, other.n_steps, other.directed)
    for name in ("indptr", "indices", "tube_ptr", "steps", "values"):
        a, b = getattr(tensor, name), getattr(other, name)
        assert a.dtype == b.dtype, name
        assert a.tobytes() == b.tobytes(), name
