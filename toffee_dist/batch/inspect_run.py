"""What a run holds, or how far an unfinished one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toffee_dist.storage.manifest import LaterFormatError
from toffee_dist.storage.runs import RunFolder, find_run, find_unfinished
from toffee_dist.units import show_bytes
from toffee_dist.words import show_line


def inspect_run(path: Path) -> dict[str, Any]:
    """Return a run's state, sizes, outputs and figures as plain types."""
    try:
        run = find_run(path)
    except LaterFormatError:
        raise
    except ValueError:
        run = find_unfinished(path)
    if not run.complete:
        return _unfinished(run)
    manifest = run.read_manifest()
    files = run.result_files("*.parquet")
    return {
        "run": str(run.path),
        "state": manifest.state,
        "begun": manifest.begun,
        "finished": manifest.finished,
        "nodes": manifest.summary.nodes,
        "steps": manifest.summary.steps,
        "first": manifest.summary.first,
        "last": manifest.summary.last,
        "rank": manifest.config.rank,
        "outputs": list(manifest.outputs),
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "versions": manifest.versions,
        "metrics": manifest.metrics.to_json(),
    }


def _unfinished(run: RunFolder) -> dict[str, Any]:
    return {
        "run": str(run.path),
        "state": "unfinished",
        "begun": run.read_job().begun,
        "staged": run.staged.complete,
        "slices": len(list(run.slices.glob("[0-9r]*.json"))),
        "parts": len(run.result_files("part-*.parquet")),
        "next": f"toffee resume {run.out}",
    }


def describe_run(found: dict[str, Any]) -> str:
    """Return it as lines for a person."""
    lines = []
    for name, value in found.items():
        if isinstance(value, dict):
            value = ", ".join(f"{key} {_short(one)}" for key, one in value.items() if one is not None)
        elif isinstance(value, list):
            value = ", ".join(value)
        elif name == "bytes":
            value = show_bytes(value)
        lines.append(f"{name:<10} {show_line(str(value))}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_short(one)}' for key, one in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
