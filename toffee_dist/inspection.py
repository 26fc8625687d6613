"""What a run holds, or how far an unfinished one is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from toffee_dist.plan import show_bytes
from toffee_dist.store import RunFolder, find_run, find_unfinished, read_json


def inspect_run(path: Path) -> dict[str, Any]:
    """Return a run's state, sizes, outputs and figures as plain types."""
    try:
        run = find_run(path)
    except ValueError:
        run = find_unfinished(path)
    if not run.published:
        return _unfinished(run)
    manifest = read_json(run.manifest)
    files = _outputs(run, "*.parquet")
    return {
        "run": str(run.path),
        "state": manifest["state"],
        "begun": manifest["begun"],
        "finished": manifest["finished"],
        "nodes": manifest["summary"]["nodes"],
        "steps": manifest["summary"]["steps"],
        "first": manifest["summary"]["first"],
        "last": manifest["summary"]["last"],
        "rank": manifest["config"]["rank"],
        "outputs": manifest["outputs"],
        "files": len(files),
        "bytes": sum(file.stat().st_size for file in files),
        "versions": manifest["versions"],
        "metrics": manifest["metrics"],
    }


def _outputs(run: RunFolder, pattern: str) -> list[Path]:
    return [file for file in run.path.rglob(pattern) if "work" not in file.relative_to(run.path).parts]


def _unfinished(run: RunFolder) -> dict[str, Any]:
    job = run.read_job()
    return {
        "run": str(run.path),
        "state": "unfinished",
        "begun": job["begun"],
        "staged": run.staged,
        "slices": len(list(run.slices.glob("[0-9r]*.json"))),
        "parts": len(_outputs(run, "part-*.parquet")),
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
        lines.append(f"{name:<10} {value}")
    return "\n".join(lines)


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"({', '.join(f'{key} {_short(one)}' for key, one in value.items())})"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
