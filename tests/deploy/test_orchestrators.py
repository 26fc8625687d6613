"""The refresh under Dagster, Prefect and Airflow: it goes on after exit code 5, and stops after 6."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from tests.harness import ROOT
from tests.harness.examples import write_edges
from toffee_dist import load_run
from toffee_dist.errors import UnfinishedError

pytestmark = [pytest.mark.ecosystem, pytest.mark.job]

NOT_HERE = "make ecosystem-test installs it"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A configuration of a refresh of thirty days; nobody waits between two tries."""
    (tmp_path / "edges").mkdir()
    write_edges(tmp_path / "edges" / "0.parquet", range(40))
    monkeypatch.setenv("TOFFEE_PAUSE", "0")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    path = tmp_path / "nightly.toml"
    write_config(path)
    monkeypatch.setenv("TOFFEE_CONFIG", str(path))
    return path


def write_config(path: Path, **more: float | str) -> None:
    values: dict[str, Any] = {
        "inputs": [str(path.parent / "edges")],
        "out": str(path.parent / "out"),
        "step": "1d",
        "last": "30d",
        "rank": 4,
        "undirected": True,
        "mode": "threads",
        "report": False,
        **more,
    }
    path.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in values.items()))


def break_a_limit(path: Path, **more: str) -> None:
    """Let the next night come, and ask of it what no night can be: the same as the previous one."""
    write_edges(path.parent / "edges" / "1.parquet", range(40, 50))
    write_config(path, min_cosine=1.0, **more)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (path.parent / "out" / "refresh.jsonl").read_text().splitlines()]


def load_job(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "jobs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def interrupted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the cluster once, after everything was solved."""
    from toffee_dist.batch import pipeline

    check, calls = pipeline.check_parts, []

    def lose(*arguments: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise UnfinishedError("the cluster is lost", got="no worker")
        check(*arguments)

    monkeypatch.setattr(pipeline, "check_parts", lose)


@pytest.mark.filterwarnings("ignore")
def test_dagster(
    config: Path, tmp_path: Path, interrupted_once: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    dg = pytest.importorskip("dagster", reason=NOT_HERE)
    home = tmp_path / "dagster"
    home.mkdir()
    (home / "dagster.yaml").write_text("telemetry:\n  enabled: false\n")
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    events = tmp_path / "events.jsonl"
    write_config(config, openlineage=str(events))
    job = load_job("dagster_asset")
    assets = [job.node_vectors]
    key = dg.AssetKey("node_vectors")
    with dg.DagsterInstance.get() as instance:
        result = dg.materialize(assets, instance=instance)
        assert result.success
        # The first try was cut short, the second went on with the same run.
        failed, done = lines(config)
        assert (failed["state"], done["state"]) == ("failed", "published")
        assert len(list((tmp_path / "out" / "runs").iterdir())) == 1
        [made] = result.asset_materializations_for_node("node_vectors")
        run = load_run(tmp_path / "out")
        metadata = {name: value.value for name, value in made.metadata.items()}
        assert metadata["run"] == run.manifest.run_id == made.tags["dagster/data_version"]
        assert metadata["nodes"] == metadata["dagster/row_count"] == run.n_nodes
        assert metadata["state"] == "published"
        assert Path(metadata["folder"]) == run.path
        # The same night again is no new version.
        again = dg.materialize(assets, instance=instance)
        [same] = again.asset_materializations_for_node("node_vectors")
        assert same.tags["dagster/data_version"] == made.tags["dagster/data_version"]
        assert same.metadata["state"].value == "unchanged"
        event = instance.get_latest_materialization_event(key)
        assert event is not None
        break_a_limit(config, openlineage=str(events))
        stopped = dg.materialize(assets, instance=instance, raise_on_error=False)
        assert not stopped.success
        [failure] = [event for event in stopped.all_events if event.event_type_value == "STEP_FAILURE"]
        assert failure.step_failure_data.user_failure_data.metadata["exit_code"].value == 6
    assert [line["state"] for line in lines(config)] == ["failed", "published", "unchanged", "rejected"]
    assert load_run(tmp_path / "out").path == run.path
    # Beside it, the lineage: a night of which nothing is new is no run.
    told = [json.loads(line) for line in events.read_text().splitlines()]
    assert [event["eventType"] for event in told] == ["START", "FAIL", "START", "COMPLETE", "START", "FAIL"]
    assert {event["job"]["name"] for event in told} == {f"toffee.refresh.{str(tmp_path / 'out').strip('/')}"}
    assert "is not published" in told[-1]["run"]["facets"]["errorMessage"]["message"]
    # What Dagster's daemon goes by when it says whether vectors are stale, and when it starts the asset.
    spec = job.node_vectors.get_asset_spec(key)
    assert spec.freshness_policy.fail_window.to_timedelta() == timedelta(hours=36)
    assert job.defs.resolve_schedule_def("nightly").cron_schedule == "30 2 * * *"


@pytest.fixture
def prefect_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.setenv("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
    pytest.importorskip("prefect", reason=NOT_HERE)
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=120):
        yield


@pytest.mark.cluster
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_prefect(config: Path, tmp_path: Path, prefect_server: None, interrupted_once: None) -> None:
    from prefect.artifacts import Artifact

    job = load_job("prefect_flow")
    figures = job.nightly(str(config))
    run = load_run(tmp_path / "out")
    assert (figures["state"], figures["run"]) == ("published", run.manifest.run_id)
    assert [line["state"] for line in lines(config)] == ["failed", "published"]
    artifact = Artifact.get("toffee-refresh")
    assert artifact is not None
    shown = {row["figure"]: row["value"] for row in json.loads(artifact.data)}
    assert shown["nodes"] == str(run.n_nodes)
    break_a_limit(config)
    state = job.nightly(str(config), return_state=True)
    assert state.is_failed()
    assert "is not published" in state.message
    # It was not tried again.
    assert [line["state"] for line in lines(config)] == ["failed", "published", "rejected"]


@pytest.mark.cluster
@pytest.mark.slow
def test_airflow(config: Path, tmp_path: Path) -> None:
    folder = os.environ.get("TOFFEE_AIRFLOW")
    if not folder:
        pytest.skip(NOT_HERE)
    (tmp_path / "dags").mkdir()
    (tmp_path / "dags" / "toffee.py").write_text((ROOT / "jobs" / "airflow_dag.py").read_text())
    # A job that is cut short once.
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\n[ -e "{tmp_path}/tried" ] || {{ touch "{tmp_path}/tried"; exit 5; }}\n'
        f'exec {sys.executable} "$@"\n'
    )
    python.chmod(0o755)
    home = tmp_path / "airflow"
    environment = os.environ | {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(tmp_path / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db",
        "TOFFEE_PYTHON": str(python),
        "TOFFEE_CONFIG": str(config),
    }

    def airflow(*arguments: str) -> str:
        done = subprocess.run(
            [f"{folder}/airflow", *arguments],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        return done.stdout + done.stderr

    airflow("db", "migrate")
    said = airflow("dags", "test", "toffee_nightly", "2026-01-01")
    assert "exit code 5" in said
    assert [line["state"] for line in lines(config)] == ["published"], said[-3000:]
    run = load_run(tmp_path / "out")
    # The figures are what the task returned.
    assert run.manifest.run_id in said
    break_a_limit(config)
    said = airflow("dags", "test", "toffee_nightly", "2026-01-02")
    assert "exit code 6" in said
    assert [line["state"] for line in lines(config)] == ["published", "rejected"]
    assert load_run(tmp_path / "out").path == run.path
