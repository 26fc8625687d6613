"""The nightly refresh as a Dagster asset: materialised every night, with figures, a version and freshness.

    TOFFEE_CONFIG=/etc/toffee/nightly.toml dagster dev -f jobs/dagster_asset.py

Only what may go on is tried again (exit code 5). A run that broke a limit fails the asset, and the previous
run stays published. Run by `make ecosystem-test` (tests/deploy/test_orchestrators.py), by Dagster's executor.
"""

# No `from __future__ import annotations`: Dagster reads the annotations of an asset.
import os
from datetime import timedelta

import dagster as dg

from toffee_dist.errors import ToffeeError, UnfinishedError
from toffee_dist.progress import LogProgress
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RefreshConfig


@dg.asset(
    kinds={"python", "parquet"},
    retry_policy=dg.RetryPolicy(max_retries=3, delay=float(os.environ.get("TOFFEE_PAUSE", "600"))),
    freshness_policy=dg.FreshnessPolicy.time_window(fail_window=timedelta(hours=36)),
)
def node_vectors(context: dg.AssetExecutionContext) -> dg.MaterializeResult:
    """One vector per node of the graph, comparable from night to night."""
    config = RefreshConfig.read({}, os.environ.get("TOFFEE_CONFIG", "jobs/nightly.toml"))
    try:
        done = refresh(config, LogProgress(context.log.info))
    except UnfinishedError:
        raise  # The next try goes on where this one was.
    except ToffeeError as error:
        found = {"exit_code": error.exit_code}
        raise dg.Failure(str(error), metadata=found, allow_retries=False) from None
    # The line of OUT/refresh.jsonl: rows, nodes, drift, AUC of held-out links, seconds.
    figures = {name: value for name, value in done.to_json().items() if value not in (None, "")}
    manifest = done.manifest
    columns = [dg.TableColumn("node_id"), dg.TableColumn("embedding", f"float[{manifest.config.rank}]")]
    return dg.MaterializeResult(
        metadata={
            **figures,
            "space_id": manifest.space_id,
            "dagster/row_count": manifest.metrics.nodes,
            "dagster/column_schema": dg.TableSchema(columns),
            "folder": dg.MetadataValue.path(f"{config.out}/runs/{done.run}"),
        },
        # The same night gives the same run: what follows it need not run again.
        data_version=dg.DataVersion(done.run),
    )


nightly = dg.ScheduleDefinition(
    name="nightly", target=dg.AssetSelection.assets(node_vectors), cron_schedule="30 2 * * *"
)
defs = dg.Definitions(assets=[node_vectors], schedules=[nightly])
