"""The summary of an ingest: what was read, what became of it, and what was wrong with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from toffee_dist.errors import InputError
from toffee_dist.ingest.files import SourceFile
from toffee_dist.ingest.scan import ScanRecord, ScanTask
from toffee_dist.ingest.validate import MAX_EXAMPLES, BadRows
from toffee_dist.settings import EdgeSettings
from toffee_dist.storage.manifest import IngestRecord, Summary, write_record
from toffee_dist.storage.runs import StagedEdges
from toffee_dist.storage.tensors import open_tensor
from toffee_dist.tensor import TemporalTensor
from toffee_dist.timegrid import TimeGrid
from toffee_dist.words import hide_in, hide_secrets, show_line


@dataclass(frozen=True)
class Ingested:
    """The result: where it is, and what is in it."""

    folder: Path
    summary: Summary
    grid: TimeGrid

    def tensor(self) -> TemporalTensor:
        """Open the staged tensor."""
        return open_tensor(StagedEdges(self.folder).tensor)


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
    return "\n".join([*shown, *(f"  skipped: {show_line(example)}" for example in summary.examples)])


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
    """Raise where rows are invalid: how many of which kind, and the first ones."""
    if not bad.total:
        return
    kinds = ", ".join(f"{count:,} × {kind}" for kind, count in bad.counts.most_common())
    examples = "".join(f"\n  {show_line(str(example))}" for example in bad.examples)
    raise InputError(
        f"{bad.total:,} of {rows:,} rows are invalid",
        got=kinds,
        allowed="rows with two ids, a time and, where read, a finite weight",
        remedy=f"Repair them, or leave them out with --on-bad-rows skip. The first ones:{examples}",
    )


def write_manifest(
    staged: StagedEdges,
    settings: EdgeSettings,
    summary: Summary,
    grid: TimeGrid,
    files: Sequence[SourceFile],
) -> None:
    """Write what was asked for, what was read and what came out; last, so that it marks a whole result."""
    config = hide_in(settings.model_dump(mode="json", include=set(EdgeSettings.model_fields)))
    shown = [(hide_secrets(file.path), file.size, file.stamp) for file in files[:1000]]
    record = IngestRecord(config=config, summary=summary, grid=grid, files=shown)
    write_record(staged.record, record)
