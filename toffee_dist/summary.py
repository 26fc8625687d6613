"""The summary of an ingest: what was read, what became of it, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from toffee_dist import staging
from toffee_dist.errors import InputError
from toffee_dist.rows import MAX_EXAMPLES, BadRows
from toffee_dist.scan import ScanRecord, ScanTask
from toffee_dist.sources import SourceFile
from toffee_dist.store import INGESTED, write_json
from toffee_dist.tensor import TemporalTensor
from toffee_dist.timegrid import TimeGrid

MANIFEST = INGESTED


@dataclass(frozen=True)
class Summary:
    """What was read, and what became of it."""

    files: int
    rows: int
    skipped: dict[str, int]
    comments: int
    outside: int
    used: int
    self_loops: int
    duplicates: int
    cancelled: int
    nodes: int
    new_nodes: int
    pairs: int
    entries: int
    steps: int
    empty_steps: int
    density: float
    first: str
    last: str
    fingerprint: str
    examples: list[str]


@dataclass(frozen=True)
class Ingested:
    """The result: where it is, and what is in it."""

    folder: Path
    summary: Summary
    grid: TimeGrid

    def tensor(self) -> TemporalTensor:
        """Open the staged tensor."""
        return staging.open_tensor(self.folder / "tensor")


def describe(result: Ingested) -> str:
    """Return the summary as lines for a person."""
    summary = result.summary
    lines = [
        ("rows", f"{summary.rows:,} in {summary.files:,} files"),
        ("  skipped", f"{sum(summary.skipped.values()):,}" + _kinds(summary.skipped)),
        ("  outside window", f"{summary.outside:,}"),
        ("  comment lines", f"{summary.comments:,}"),
        ("edges used", f"{summary.used:,}"),
        ("  self-loops", f"{summary.self_loops:,} (kept)"),
        ("  duplicates", f"{summary.duplicates:,} (same source, target and step)"),
        ("  cancelled", f"{summary.cancelled:,} (weights that sum to zero)"),
        ("nodes", f"{summary.nodes:,} ({summary.new_nodes:,} new)"),
        ("pairs", f"{summary.pairs:,}"),
        ("steps", f"{summary.steps:,} of {result.grid.step} ({summary.empty_steps:,} empty)"),
        ("entries", f"{summary.entries:,} (density {summary.density:.3g})"),
        ("time", f"{summary.first} to {summary.last}"),
        ("fingerprint", summary.fingerprint[:16]),
        ("written to", str(result.folder)),
    ]
    shown = [f"{name:<18}{value}" for name, value in lines]
    return "\n".join([*shown, *(f"  skipped: {example}" for example in summary.examples)])


def _kinds(skipped: dict[str, int]) -> str:
    return " (" + ", ".join(f"{kind}: {count:,}" for kind, count in skipped.items()) + ")" if skipped else ""


def gather_bad(found: Sequence[ScanRecord], tasks: Sequence[ScanTask]) -> BadRows:
    """Sum what the tasks counted; rows of examples are counted from the start of their file."""
    counts = dict(pair for record in found for pair in record.fragment_rows)
    before: dict[int, int] = {}
    path, rows = "", 0
    for fragment in (fragment for task in tasks for fragment in task.fragments):
        rows = rows if fragment.file.path == path else 0
        path, before[fragment.index] = fragment.file.path, rows
        rows += counts.get(fragment.index, 0)
    bad = BadRows()
    for record in found:
        bad.counts.update(record.bad.counts)
        for one in record.bad.examples[: MAX_EXAMPLES - len(bad.examples)]:
            bad.examples.append(replace(one, row=one.row + before[one.fragment]))
    return bad


def refuse_bad(bad: BadRows, rows: int) -> None:
    """Raise where there are rows that are no edges: how many of which kind, and the first ones."""
    if not bad.total:
        return
    kinds = ", ".join(f"{count:,} × {kind}" for kind, count in bad.counts.most_common())
    examples = "".join(f"\n  {example}" for example in bad.examples)
    raise InputError(
        f"{bad.total:,} of {rows:,} rows are no edges",
        got=kinds,
        allowed="rows with two ids, a time and, where read, a finite weight",
        remedy=f"Repair them, or leave them out with --on-bad-rows skip. The first ones:{examples}",
    )


def write_manifest(
    stage: Path, config: dict[str, Any], summary: Summary, grid: TimeGrid, files: Sequence[SourceFile]
) -> None:
    """Write what was asked for, what was read and what came out; last, so that it marks a whole result."""
    manifest = {
        "format": 1,
        "config": config,
        "summary": asdict(summary),
        "grid": grid.to_json(),
        "files": [[file.path, file.size, file.stamp] for file in files[:1000]],
    }
    write_json(stage / MANIFEST, manifest)
