"""Traces of a run by OpenTelemetry: a span per run, stage and task, sent where the environment says (OTLP).

Stages are timed here. Of tasks the scheduler knows when each ran and on which worker, so nothing is added to
them: it is asked at the end of every stage. Whatever fails here fails nothing else.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from toffee_dist.errors import ConfigError

# Seconds that the end of a run may wait for a collector that does not answer.
PATIENCE = 5.0
NANO = 10**9


class Traces:
    """Sends nothing."""

    @contextmanager
    def stage(self, name: str, client: Any) -> Iterator[None]:
        """Trace a stage, whose tasks run on this client."""
        yield


class SentTraces(Traces):
    """Sends a span per stage and task, below that of the run."""

    def __init__(self, tracer: Any) -> None:
        self.tracer = tracer

    @contextmanager
    def stage(self, name: str, client: Any) -> Iterator[None]:
        """Trace a stage, whose tasks run on this client."""
        ahead = 0.0
        with suppress(Exception):
            # From now on the scheduler remembers; and its clock may be another.
            client.get_task_stream(start=0, stop=0)
            asked = time.time()
            ahead = client.run_on_scheduler(time.time) - (asked + time.time()) / 2
        began = time.time()
        with self.tracer.start_as_current_span(name, start_time=int(began * NANO)):
            try:
                yield
            finally:
                with suppress(Exception):
                    for task in client.get_task_stream(start=began + ahead):
                        self._send_task(task, began, ahead)

    def _send_task(self, task: dict[str, Any], began: float, ahead: float) -> None:
        times = [part for part in task["startstops"] if part["action"] == "compute"]
        if not times:
            return
        # No task began before its stage; what is left of the difference of clocks is milliseconds.
        start = max(min(part["start"] for part in times) - ahead, began)
        stop = max(max(part["stop"] for part in times) - ahead, start)
        attributes = {"toffee.task": str(task["key"]), "toffee.worker": str(task["worker"])}
        span = self.tracer.start_span("task", start_time=int(start * NANO), attributes=attributes)
        if task.get("status") != "OK":
            span.set_attribute("toffee.status", str(task.get("status")))
        span.end(end_time=int(stop * NANO))


@contextmanager
def open_traces(wanted: bool, run: str) -> Iterator[Traces]:
    """Give what traces the stages of a run; where it is not wanted, nothing is loaded.

    Raises
    ------
    ConfigError
        Where OpenTelemetry is not installed.
    """
    if not wanted:
        yield Traces()
        return
    try:
        # Saves start-up time.
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise ConfigError(
            "traces",
            got=str(error),
            allowed="OpenTelemetry, installed here",
            remedy="Install it: pip install 'toffee_dist[otel]'; or leave --traces out.",
        ) from None
    # Saves start-up time.
    from toffee_dist import __version__

    # A collector that is away is no news of every second.
    logging.getLogger("opentelemetry").setLevel(logging.CRITICAL)
    about = {"service.name": "toffee", "service.version": __version__}
    provider = TracerProvider(resource=Resource.create(about), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(timeout=PATIENCE)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    tracer = provider.get_tracer("toffee_dist")
    try:
        with tracer.start_as_current_span("run", attributes={"toffee.run": run}):
            yield SentTraces(tracer)
    finally:
        with suppress(Exception):
            provider.force_flush(int(1000 * PATIENCE))
            provider.shutdown()
