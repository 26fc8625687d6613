"""What a refresh did, for those who watch it: a result, a line of a log, and Prometheus figures."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toffee_dist.storage.files import append_line, replacing
from toffee_dist.storage.manifest import Manifest, RefreshRecord
from toffee_dist.storage.runs import published_at
from toffee_dist.words import hide_secrets

LOG, METRICS = "refresh.jsonl", "refresh.prom"


@dataclass
class Refreshed:
    """What a refresh did that has a run to show.

    The state is ``published``, ``unchanged`` (this refresh was done before) or ``rejected``.
    """

    run: str
    state: str
    manifest: Manifest
    seconds: float = 0.0
    reason: str = ""
    removed: list[str] = field(default_factory=list)

    @property
    def record(self) -> RefreshRecord:
        """What was found about the refresh."""
        assert self.manifest.refresh is not None
        return self.manifest.refresh

    def to_json(self) -> dict[str, Any]:
        """Return the figures that an operator alarms on, as one flat line."""
        line = _line(self.run, self.state, self.reason, self.seconds, len(self.removed))
        summary, metrics, refresh = self.manifest.summary, self.manifest.metrics, self.manifest.refresh
        line |= {
            "rows": summary.used,
            "nodes": summary.nodes,
            "active": metrics.active,
            "new": summary.new_nodes,
            "energy_share": metrics.energy_share,
            "iterations": metrics.iterations,
            "solve_seconds": metrics.solve_seconds,
        }
        if refresh is None:
            return line
        line["window"] = list(refresh.window)
        if refresh.drift:
            last, reference = refresh.drift[0], refresh.drift[-1]
            line |= {"new": last.new, "left": last.left, "expired": last.expired, "overlap10": last.overlap10}
            line |= {"cosine": last.cosine.get("p50"), "cosine_reference": reference.cosine.get("p50")}
        if refresh.links is not None:
            line |= {"auc": refresh.links.now, "auc_before": refresh.links.before}
        if refresh.saved is not None:
            saved = refresh.saved
            line |= {"warm_slices": saved.slices, "iterations_saved": saved.iterations}
            line["seconds_saved"] = saved.seconds
        return line


@dataclass(frozen=True)
class FailedRefresh:
    """A refresh that ended without a complete run."""

    reason: str
    seconds: float
    state: str = "failed"

    def to_json(self) -> dict[str, Any]:
        """Return the line of a refresh, with figures for what is known."""
        return _line("", self.state, self.reason, self.seconds, 0)


# In the order in which a line has them.
_FIGURES = (
    "window",
    "rows",
    "nodes",
    "active",
    "new",
    "left",
    "expired",
    "cosine",
    "cosine_reference",
    "overlap10",
    "auc",
    "auc_before",
    "energy_share",
    "iterations",
    "solve_seconds",
    "warm_slices",
    "iterations_saved",
    "seconds_saved",
)


def _line(run: str, state: str, reason: str, seconds: float, removed: int) -> dict[str, Any]:
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "run": run,
        "state": state,
        "reason": hide_secrets(reason),
        "seconds": round(seconds, 3),
        **dict.fromkeys(_FIGURES),
        "removed": removed,
    }


def record_refresh(out: Path, done: Refreshed | FailedRefresh) -> None:
    """Add a line to the log of refreshes, and replace the Prometheus text file."""
    line = done.to_json()
    append_line(out / LOG, json.dumps(line))
    good = done.state in ("published", "unchanged")
    figures = {
        "success": float(good),
        "rejected": float(done.state == "rejected"),
        "finished_timestamp_seconds": time.time(),
    }
    published = published_at(out)
    if published is not None:
        figures["published_timestamp_seconds"] = published
    figures |= {
        name: float(value)
        for name, value in line.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    text = "".join(
        f"# TYPE toffee_refresh_{name} gauge\ntoffee_refresh_{name} {value!r}\n"
        for name, value in figures.items()
    )
    with replacing(out / METRICS) as temporary:
        temporary.write_text(text)
