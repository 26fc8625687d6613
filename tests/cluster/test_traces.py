"""Traces by OpenTelemetry: what a collector gets, and that a collector which is away does no harm."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.harness.clusters import digests, free_port, job, write_edges
from toffee_dist.batch.pipeline import start_run
from toffee_dist.errors import ConfigError

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Give the address of a collector, and the spans that it gets."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    spans: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            if self.headers.get("Content-Encoding") == "gzip":
                body = gzip.decompress(body)
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                spans.extend(span for scope in resource.scope_spans for span in scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", spans
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


@pytest.mark.job
@pytest.mark.cluster
def test_spans_of_run_stages_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=800)
    with collector() as (address, spans):
        monkeypatch.setenv(ENDPOINT, address)
        outcome = start_run(job(edges, tmp_path / "out", rank=4, traces=True))
    names = {span.span_id: span.name for span in spans}
    assert len(names) == len(spans)
    [run] = [span for span in spans if span.name == "run"]
    assert [value.value.string_value for value in run.attributes if value.key == "toffee.run"] == [
        outcome.run.run_id
    ]
    stages = [span for span in spans if span.parent_span_id == run.span_id]
    assert {span.name for span in stages} >= {"ingest", "solve zero", "solve", "embedding", "trajectory"}
    assert {span.name for span in stages} >= set(outcome.seconds)
    tasks = [span for span in spans if span.name == "task"]
    assert {span.name for span in stages if any(t.parent_span_id == span.span_id for t in tasks)} >= {
        "ingest",
        "solve zero",
        "embedding",
    }
    by_id = {span.span_id: span for span in spans}
    for task in tasks:
        stage = by_id[task.parent_span_id]
        assert stage.start_time_unix_nano <= task.start_time_unix_nano <= task.end_time_unix_nano
        assert task.end_time_unix_nano <= stage.end_time_unix_nano + 10**8
        assert {attribute.key for attribute in task.attributes} == {"toffee.task", "toffee.worker"}
    # Nothing of what is traced changes a byte.
    plain = start_run(job(edges, tmp_path / "plain", rank=4))
    assert digests(plain.run.path) == digests(outcome.run.path)


@pytest.mark.job
def test_a_collector_that_is_away_does_no_harm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setattr("toffee_dist.cluster.traces.PATIENCE", 0.5)
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=800)
    assert start_run(job(edges, tmp_path / "out", rank=4, traces=True)).run.complete


def test_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    edges = write_edges(tmp_path / "edges.parquet", nodes=60, events=800)
    with pytest.raises(ConfigError, match=r"traces.*pip install 'toffee_dist\[otel\]'"):
        start_run(job(edges, tmp_path / "out", rank=4, traces=True))
