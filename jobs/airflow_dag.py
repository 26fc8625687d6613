"""The nightly refresh as an Airflow DAG; copy it to the folder of DAGs.

Airflow pins versions of its own, so the job runs in its own environment, as a command:

    TOFFEE_PYTHON   the Python of that environment (default: /opt/toffee/bin/python)
    TOFFEE_CONFIG   the configuration (default: /etc/toffee/nightly.toml)

Exit code 5 is tried again, and goes on where it was; any other fails at once. The figures of the run are the
task's XCom. Run by `make ecosystem-test` (tests/deploy/test_orchestrators.py):
Airflow 3.3, `airflow dags test`.
"""

from __future__ import annotations

import json
import os
import subprocess
from datetime import datetime, timedelta
from typing import Any

from airflow.sdk import dag, task
from airflow.sdk.exceptions import AirflowFailException

PAUSE = timedelta(seconds=float(os.environ.get("TOFFEE_PAUSE", "600")))


@dag(
    schedule="30 2 * * *", start_date=datetime(2026, 1, 1), catchup=False, max_active_runs=1, tags=["toffee"]
)
def toffee_nightly() -> None:
    """One vector per node, brought up to date every night."""

    @task(retries=3, retry_delay=PAUSE)
    def refresh() -> dict[str, Any]:
        """Run `toffee refresh`, and return its figures."""
        python = os.environ.get("TOFFEE_PYTHON", "/opt/toffee/bin/python")
        config = os.environ.get("TOFFEE_CONFIG", "/etc/toffee/nightly.toml")
        command = [python, "-m", "toffee_dist.cli", "refresh", "--json", "--config", config]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode == 5:
            raise RuntimeError("exit code 5: not finished; the next try goes on where this one was")
        if done.returncode:
            raise AirflowFailException(
                f"exit code {done.returncode}: a person must look (docs/operations.md)"
            )
        figures: dict[str, Any] = json.loads(done.stdout)
        return figures

    refresh()


toffee_nightly()
