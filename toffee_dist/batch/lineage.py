"""Events of OpenLineage: which inputs a run read and which tables it wrote, with columns and counts.

START when a run begins or goes on, then COMPLETE, FAIL, or ABORT where it was interrupted. A dataset is
``OUT/embedding``, not the folder of one run: the run is its version.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any
from urllib.parse import urlsplit

from toffee_dist.batch.listeners import Listener, error_words
from toffee_dist.errors import ConfigError
from toffee_dist.settings import JobConfig
from toffee_dist.storage.files import append_line
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.parquet import open_parquet
from toffee_dist.storage.paths import as_remote, to_path
from toffee_dist.storage.runs import RunFolder
from toffee_dist.words import hide_secrets

PRODUCER = "https://pypi.org/project/toffee-dist"
# Seconds that a server may take for one event; it is not asked twice.
TIMEOUT = 5.0
# Files of an output whose rows are counted, one footer each; of more, only bytes are told.
MOST_FOOTERS = 100


def open_lineage(target: str, config: JobConfig, run: RunFolder) -> Listener:
    """Return what sends events to a server, or adds them to a file.

    Raises
    ------
    ConfigError
        Where the package is not installed, or a key would be sent in the clear.
    """
    try:
        # Saves start-up time.
        import openlineage.client.event_v2
        import openlineage.client.facet_v2  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "openlineage",
            got=str(error),
            allowed="OpenLineage's client, installed here",
            remedy="Install it: pip install 'toffee_dist[openlineage]'; or leave --openlineage out.",
        ) from None
    return Lineage(config, run, _open_transport(target))


def _open_transport(target: str) -> Callable[[Any], None]:
    # Saves start-up time.
    from openlineage.client.serde import Serde

    if not target.startswith(("http://", "https://")):
        path = to_path(target)
        return lambda event: append_line(path, Serde.to_json(event))
    # Saves start-up time.
    from openlineage.client.transport.http import ApiKeyTokenProvider, HttpConfig, HttpTransport

    more: dict[str, Any] = {}
    if key := os.environ.get("OPENLINEAGE_API_KEY"):
        if target.startswith("http://") and not _on_this_machine(target):
            raise ConfigError(
                "openlineage",
                got=f"{target} and a key (OPENLINEAGE_API_KEY)",
                allowed="https://, where there is a key",
                remedy="A key is not sent in the clear.",
            )
        more["auth"] = ApiKeyTokenProvider({"apiKey": key})
    server = target if target.endswith("/") else f"{target}/"
    transport = HttpTransport(HttpConfig(url=server, timeout=TIMEOUT, retry={"total": 0}, **more))

    def send(event: Any) -> None:
        transport.emit(event)

    return send


def _on_this_machine(address: str) -> bool:
    host = urlsplit(address).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Lineage:
    """Sends the events of one run; every attempt to finish a run is one of OpenLineage's runs."""

    name = "OpenLineage"

    def __init__(self, config: JobConfig, run: RunFolder, send: Callable[[Any], None]) -> None:
        # Saves start-up time.
        from openlineage.client import event_v2, facet_v2
        from openlineage.client.uuid import generate_new_uuid

        self.events, self.facets = event_v2, facet_v2
        self.config, self.run, self.send = config, run, send
        self.kind = "embed" if run.read_job().following is None else "refresh"
        self.id = str(generate_new_uuid())
        facet_v2.set_producer(PRODUCER)

    def begin(self) -> None:
        """Send START, with what will be read."""
        self._send("START", inputs=self._inputs(None), outputs=[])

    def end(self, manifest: Manifest | None, error: BaseException | None) -> None:
        """Send how it ended, with what was read and, where it is published, what was written."""
        more = {}
        if error is not None:
            facet = self.facets.error_message_run.ErrorMessageRunFacet
            more["errorMessage"] = facet(message=error_words(error), programmingLanguage="Python")
        kind = "COMPLETE" if error is None else "ABORT" if isinstance(error, KeyboardInterrupt) else "FAIL"
        outputs = [] if manifest is None or error is not None else self._outputs(manifest)
        self._send(kind, inputs=self._inputs(manifest), outputs=outputs, **more)

    def _send(self, kind: str, inputs: list[Any], outputs: list[Any], **run_facets: Any) -> None:
        # Saves start-up time.
        from toffee_dist import __version__

        events, facets = self.events, self.facets
        engine = facets.processing_engine_run.ProcessingEngineRunFacet(__version__, name="toffee_dist")
        run_facets["processing_engine"] = engine
        if parent := self._parent():
            run_facets["parent"] = parent
        about = facets.job_type_job.JobTypeJobFacet("BATCH", "TOFFEE", jobType=self.kind.upper())
        # The folder of the runs is what stays the same from night to night.
        space, folder = _dataset(str(self.run.out))
        name = f"toffee.{self.kind}.{folder.strip('/') or space}"
        event = events.RunEvent(
            eventType=events.RunState[kind],
            eventTime=datetime.now(UTC).isoformat(),
            run=events.Run(self.id, facets=run_facets),
            job=events.Job(os.environ.get("OPENLINEAGE_NAMESPACE", "default"), name, {"jobType": about}),
            inputs=inputs,
            outputs=outputs,
            producer=PRODUCER,
        )
        self.send(event)

    def _parent(self) -> Any:
        """Return the run that this is part of, by OPENLINEAGE_PARENT_ID: namespace/job/run."""
        text = os.environ.get("OPENLINEAGE_PARENT_ID", "")
        namespace, _, rest = text.partition("/")
        job, _, run = rest.rpartition("/")
        if not (namespace and job and run):
            return None
        parent = self.facets.parent_run
        return parent.ParentRunFacet(parent.Run(run), parent.Job(namespace, job))

    def _inputs(self, manifest: Manifest | None) -> list[Any]:
        found = [self.events.InputDataset(*_dataset(name)) for name in self.config.inputs]
        if manifest is not None and len(found) == 1:
            summary = manifest.summary
            facet = self.facets.input_statistics_input_dataset.InputStatisticsInputDatasetFacet
            found[0].inputFacets = {"inputStatistics": facet(rowCount=summary.rows, fileCount=summary.files)}
        return found

    def _outputs(self, manifest: Manifest) -> list[Any]:
        return [self._output(manifest, output) for output in manifest.outputs]

    def _output(self, manifest: Manifest, output: str) -> Any:
        facets = self.facets
        version = facets.dataset_version_dataset.DatasetVersionDatasetFacet(manifest.run_id)
        about: dict[str, Any] = {"version": version}
        if space := manifest.spaces.get(output):
            tag = facets.tags_dataset.TagsDatasetFacetFields("toffee.space", space, source="toffee_dist")
            about["tags"] = facets.tags_dataset.TagsDatasetFacet([tag])
        told: dict[str, Any] = {}
        sizes = [record.bytes for name, record in manifest.files.items() if name.startswith(f"{output}/")]
        parts = self.run.parts(output)
        if parts:
            with open_parquet(parts[0]) as file:
                schema, rows = file.schema_arrow, file.metadata.num_rows
            field = facets.schema_dataset.SchemaDatasetFacetFields
            fields = [field(column.name, str(column.type)) for column in schema]
            about["schema"] = facets.schema_dataset.SchemaDatasetFacet(fields)
            if len(parts) <= MOST_FOOTERS:
                for part in parts[1:]:
                    with open_parquet(part) as file:
                        rows += file.metadata.num_rows
                told["rowCount"] = rows
        statistics = facets.output_statistics_output_dataset.OutputStatisticsOutputDatasetFacet
        counts = statistics(size=sum(sizes), fileCount=len(sizes), **told)
        place, name = _dataset(str(self.run.out / output))
        return self.events.OutputDataset(place, name, facets=about, outputFacets={"outputStatistics": counts})


def _dataset(text: str) -> tuple[str, str]:
    """Return namespace and name of a file, folder or URL, as OpenLineage names them.

    Examples
    --------
    >>> _dataset("s3://bucket/edges/2026"), _dataset("/data/edges")
    (('s3://bucket', 'edges/2026'), ('file', '/data/edges'))
    >>> _dataset("https://me:secret@host/edges.csv?sig=abc")
    ('https://…@host', 'edges.csv?…')
    """
    text = hide_secrets(text)
    if "://" not in text:
        return "file", str(to_path(text).absolute()) if as_remote(to_path(text)) is None else text
    scheme, _, rest = text.partition("://")
    place, _, name = rest.partition("/")
    return f"{scheme}://{place}", name or "/"
