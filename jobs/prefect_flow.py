"""The nightly refresh as a Prefect flow: tried again where it may go on, its figures as an artifact.

    python -c 'import prefect_flow; prefect_flow.nightly.serve(cron="30 2 * * *")'      # in jobs/
    python jobs/prefect_flow.py /etc/toffee/nightly.toml                                # once

Run by `make ecosystem-test` (tests/deploy/test_orchestrators.py), against Prefect's own server.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.artifacts import create_table_artifact

from toffee_dist.errors import UnfinishedError
from toffee_dist.progress import LogProgress
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RefreshConfig


def may_go_on(task: Any, run: Any, state: Any) -> bool:
    """Whether the next try would go on where this one was: exit code 5, and no other."""
    return isinstance(state.result(raise_on_failure=False), UnfinishedError)


@task(
    retries=3,
    retry_delay_seconds=float(os.environ.get("TOFFEE_PAUSE", "600")),
    retry_condition_fn=may_go_on,
    persist_result=False,
)
def refresh_vectors(config: str) -> dict[str, Any]:
    """Bring the published vectors up to date; return the line of OUT/refresh.jsonl."""
    settings = RefreshConfig.read({}, config)
    return refresh(settings, LogProgress(get_run_logger().info)).to_json()


@flow(name="toffee-nightly")
def nightly(config: str = "jobs/nightly.toml") -> dict[str, Any]:
    """Refresh, and show the figures."""
    figures: dict[str, Any] = refresh_vectors(config)
    rows = [{"figure": name, "value": str(value)} for name, value in figures.items() if value is not None]
    create_table_artifact(rows, key="toffee-refresh", description=f"Run {figures['run']}")
    return figures


if __name__ == "__main__":
    nightly(*sys.argv[1:2])
