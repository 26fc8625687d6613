"""Who is told of a run: OpenLineage and MLflow, by their own packages; none of them can harm a run."""

from __future__ import annotations

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tests.harness.clusters import digests, free_port, job, write_edges
from toffee_dist.batch import listeners
from toffee_dist.batch.pipeline import resume_run, start_run
from toffee_dist.errors import ConfigError, InputError
from toffee_dist.progress import Progress
from toffee_dist.settings import JobConfig
from toffee_dist.storage.runs import find_unfinished

NOT_HERE = "make ecosystem-test installs it"


class Heard(Progress):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


@pytest.fixture
def edges(tmp_path: Path) -> Path:
    return write_edges(tmp_path / "edges.parquet", nodes=60, events=800)


def read_events(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@contextmanager
def server(
    status: int = 201, pause: float = 0.0
) -> Iterator[tuple[str, list[tuple[str, str, dict[str, Any]]]]]:
    """Give the address of a server, and what it gets: path, authorisation, event."""
    got: list[tuple[str, str, dict[str, Any]]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            got.append((self.path, self.headers.get("Authorization", ""), body))
            time.sleep(pause)
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=listening.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.server_port}", got
    finally:
        listening.shutdown()
        listening.server_close()
        thread.join(10)


@pytest.mark.ecosystem
@pytest.mark.job
def test_lineage_of_a_run(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    from openlineage.client.event_v2 import RunEvent

    parent = "0190f1e6-0000-7000-8000-000000000000"
    monkeypatch.setenv("OPENLINEAGE_NAMESPACE", "nights")
    monkeypatch.setenv("OPENLINEAGE_PARENT_ID", f"airflow/dag.task/{parent}")
    log = tmp_path / "events.jsonl"
    outcome = start_run(job(edges, tmp_path / "out", rank=4, openlineage=str(log)))
    start, complete = read_events(log)
    assert (start["eventType"], complete["eventType"]) == ("START", "COMPLETE")
    assert start["run"]["runId"] == complete["run"]["runId"]
    assert start["job"] == complete["job"]
    assert start["job"]["namespace"] == "nights"
    assert start["job"]["name"] == f"toffee.embed.{str(tmp_path / 'out').strip('/')}"
    assert complete["run"]["facets"]["parent"]["run"]["runId"] == parent
    [given] = complete["inputs"]
    assert (given["namespace"], given["name"]) == ("file", str(edges))
    assert given["inputFacets"]["inputStatistics"]["rowCount"] == 800
    outputs = {Path(output["name"]).name: output for output in complete["outputs"]}
    assert set(outputs) == set(outcome.run.read_manifest().outputs)
    embedding = outputs["embedding"]
    assert embedding["name"] == str(tmp_path / "out" / "embedding")
    assert embedding["facets"]["version"]["datasetVersion"] == outcome.run.run_id
    [tag] = embedding["facets"]["tags"]["tags"]
    assert tag["value"] == outcome.run.read_manifest().space_id
    counts = embedding["outputFacets"]["outputStatistics"]
    parts = outcome.run.parts("embedding")
    table = pl.read_parquet(parts)
    assert counts["rowCount"] == table.height
    assert counts["size"] == sum(part.stat().st_size for part in parts)
    assert counts["fileCount"] == len(parts)
    assert [field["name"] for field in embedding["facets"]["schema"]["fields"]] == table.columns
    assert outputs["trajectory"]["outputFacets"]["outputStatistics"]["rowCount"] == (
        pl.read_parquet(outcome.run.parts("trajectory")).height
    )
    # Its own classes take what is in the file, and nothing of the run is another for it.
    assert RunEvent(eventTime=complete["eventTime"], run=complete["run"], job=complete["job"])
    plain = start_run(job(edges, tmp_path / "plain", rank=4))
    assert digests(plain.run.path) == digests(outcome.run.path)
    assert "openlineage" not in outcome.run.manifest.read_text()
    # No id of a node leaves.
    ids = pl.read_parquet(edges)["source"].cast(pl.String).unique().to_list()
    assert not [name for name in ids if f'"{name}"' in log.read_text()]


@pytest.mark.ecosystem
@pytest.mark.job
def test_lineage_of_runs_that_fail(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    log = tmp_path / "events.jsonl"
    bad = tmp_path / "bad.csv"
    bad.write_text("source,target,time\nalice,bob,never-ever\ncarol,dave,2026-01-01\n")
    with pytest.raises(InputError, match="never-ever"):
        start_run(job(bad, tmp_path / "bad", rank=4, openlineage=str(log)))
    start, failed = read_events(log)
    assert (start["eventType"], failed["eventType"], failed["outputs"]) == ("START", "FAIL", [])
    message = failed["run"]["facets"]["errorMessage"]["message"]
    assert "exit code 3" in message
    assert "never-ever" not in log.read_text()

    log.unlink()
    config = job(edges, tmp_path / "out", rank=4, openlineage=str(log))
    with monkeypatch.context() as patch:
        patch.setattr("toffee_dist.batch.pipeline.check_parts", interrupt)
        with pytest.raises(KeyboardInterrupt):
            start_run(config)
    where = {"mode": "threads", "openlineage": str(log)}
    resume_run(find_unfinished(tmp_path / "out"), where)
    events = read_events(log)
    assert [event["eventType"] for event in events] == ["START", "ABORT", "START", "COMPLETE"]
    # After its end a run of OpenLineage is over: what goes on is another one of the same job.
    assert len({event["run"]["runId"] for event in events}) == 2
    assert len({event["job"]["name"] for event in events}) == 1


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.ecosystem
@pytest.mark.job
def test_lineage_by_http(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "the-key")
    heard = Heard()
    with server() as (address, got):
        start_run(job(edges, tmp_path / "out", rank=4, openlineage=f"{address}/lineage"), heard)
    assert [event["eventType"] for _, _, event in got] == ["START", "COMPLETE"]
    assert {(path, key) for path, key, _ in got} == {("/lineage/api/v1/lineage", "Bearer the-key")}
    assert "the-key" not in "".join(path.read_text("latin-1") for path in files(tmp_path / "out"))
    assert not [line for line in heard.lines if "OpenLineage" in line]


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.ecosystem
@pytest.mark.job
@pytest.mark.parametrize("trouble", ["away", "refuses", "slow"])
def test_a_server_in_trouble_does_no_harm(
    tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    monkeypatch.setattr(listeners, "PATIENCE", 0.5)
    heard = Heard()
    with server(status=500, pause=3.0 if trouble == "slow" else 0.0) as (address, got):
        if trouble == "away":
            address = f"http://127.0.0.1:{free_port()}"
        outcome = start_run(job(edges, tmp_path / "out", rank=4, openlineage=address), heard)
    assert outcome.run.complete
    # It is named once, and not asked again at the end.
    [line] = [line for line in heard.lines if "OpenLineage was not told" in line]
    assert trouble != "slow" or "no answer within 0.5 seconds" in line
    assert len(got) == (trouble != "away")


@pytest.mark.ecosystem
@pytest.mark.job
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")
def test_a_run_in_mlflow(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason=NOT_HERE)
    from mlflow import MlflowClient

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    # Its tables are made first, which on a busy machine takes longer than a job may wait.
    client = MlflowClient()
    client.create_experiment("graphs")
    heard = Heard()
    outcome = start_run(job(edges, tmp_path / "out", rank=4, mlflow="graphs"), heard)
    assert not [line for line in heard.lines if "MLflow" in line]
    bad = tmp_path / "bad.csv"
    bad.write_text("source,target,time\nalice,bob,never-ever\n")
    with pytest.raises(InputError):
        start_run(job(bad, tmp_path / "bad", rank=4, mlflow="graphs"))
    experiment = client.get_experiment_by_name("graphs")
    failed, done = client.search_runs([experiment.experiment_id])
    assert (done.info.status, failed.info.status) == ("FINISHED", "FAILED")
    assert done.info.run_name == outcome.run.run_id
    assert done.data.params["rank"] == "4"
    assert done.data.params["outputs"] == "embedding, trajectory"
    assert "mode" not in done.data.params
    manifest = outcome.run.read_manifest()
    assert done.data.metrics["nodes"] == manifest.metrics.nodes
    assert done.data.metrics["input.rows"] == 800
    assert done.data.metrics["seconds.solve_zero"] >= 0
    assert done.data.tags["toffee.state"] == "published"
    assert done.data.tags["toffee.space"] == manifest.space_id
    assert "exit code 3" in failed.data.tags["toffee.error"]
    assert "never-ever" not in str(failed.data.tags) + str(failed.data.params)


@pytest.mark.ecosystem
@pytest.mark.job
def test_an_mlflow_that_is_away_does_no_harm(
    tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlflow", reason=NOT_HERE)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr(listeners, "PATIENCE", 2.0)
    heard = Heard()
    assert start_run(job(edges, tmp_path / "out", rank=4, mlflow="graphs"), heard).run.complete
    assert len([line for line in heard.lines if "MLflow was not told" in line]) == 1


@pytest.mark.parametrize(
    ("option", "module", "value"),
    [("openlineage", "openlineage.client.event_v2", "events.jsonl"), ("mlflow", "mlflow", "graphs")],
)
def test_without_the_package(
    tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch, option: str, module: str, value: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError, match=rf"{option}.*pip install 'toffee_dist\[{option}\]'"):
        start_run(job(edges, tmp_path / "out", rank=4, **{option: value}))


def test_nobody_says_where_mlflow_is(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        start_run(job(edges, tmp_path / "out", rank=4, mlflow="graphs"))


@pytest.mark.ecosystem
def test_a_key_is_not_sent_in_the_clear(tmp_path: Path, edges: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("openlineage.client", reason=NOT_HERE)
    monkeypatch.setenv("OPENLINEAGE_API_KEY", "the-key")
    with pytest.raises(ConfigError, match="in the clear"):
        start_run(job(edges, tmp_path / "out", rank=4, openlineage="http://lineage.example"))


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"openlineage": "https://me:secret@host/"}, "https://…@host/"),
        ({"openlineage": "ftp://host/"}, "ftp://host/"),
        ({"openlineage": ""}, "path of a file"),
        ({"openlineage": "https://host/?key=abc"}, "OPENLINEAGE_API_KEY"),
        ({"mlflow": " "}, "name of an experiment"),
    ],
)
def test_wrong_values(values: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        JobConfig(inputs=("a",), out="b", **values)
    assert "secret" not in str(caught.value)


def test_a_listener_that_breaks_is_told_once() -> None:
    heard = Heard()

    def fail() -> None:
        raise RuntimeError("first line\nsecond line")

    assert not listeners._within("X", fail, heard)
    assert heard.lines == ["X was not told: first line"]
