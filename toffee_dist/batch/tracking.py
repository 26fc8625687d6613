"""Runs in MLflow: settings as parameters, figures as metrics, one MLflow run per attempt.

Where the tracking server is, and how to get in, MLflow's own environment says (MLFLOW_TRACKING_URI).
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from typing import Any

from toffee_dist.batch.listeners import Listener, error_words
from toffee_dist.errors import ConfigError
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.runs import RunFolder

# What MLflow's client would take minutes for, and what it would send to its makers, unless the user says so.
ENVIRONMENT = {
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "5",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
# The longest value of a parameter that every version of the server takes.
LONGEST_VALUE = 500
# The most of one request.
PARAMETERS_AT_ONCE = 100


def open_tracking(experiment: str, run: RunFolder) -> Listener:
    """Return what logs a run to an experiment.

    Raises
    ------
    ConfigError
        Where the package is not installed, or nobody says where to.
    """
    if not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "mlflow",
            got="no MLFLOW_TRACKING_URI",
            allowed="the address of a tracking server in the environment",
            remedy="Set it, such as MLFLOW_TRACKING_URI=https://mlflow.example; or leave --mlflow out.",
        )
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        # Saves start-up time.
        from mlflow import MlflowClient
    except ImportError as error:
        raise ConfigError(
            "mlflow",
            got=str(error),
            allowed="MLflow, installed here",
            remedy="Install it: pip install 'toffee_dist[mlflow]'; or leave --mlflow out.",
        ) from None
    return Tracking(experiment, run, MlflowClient)


class Tracking:
    """Logs one attempt of a run."""

    name = "MLflow"

    def __init__(self, experiment: str, run: RunFolder, make_client: Any) -> None:
        self.experiment, self.run, self.make_client = experiment, run, make_client
        self.client: Any = None
        self.id = ""

    def begin(self) -> None:
        """Begin a run of the experiment, with the settings."""
        # Saves start-up time.
        from mlflow.entities import Param

        self.client = self.make_client()
        found = self.client.get_experiment_by_name(self.experiment)
        place = self.client.create_experiment(self.experiment) if found is None else found.experiment_id
        job = self.run.read_job()
        tags = {
            "toffee.run": self.run.run_id,
            "toffee.job": "embed" if job.following is None else "refresh",
            "toffee.identity": job.identity,
        }
        self.id = self.client.create_run(place, run_name=self.run.run_id, tags=tags).info.run_id
        # As the folder of the run has them: secrets are masked, and where it runs is not among them.
        shown = {name: _text(value) for name, value in job.config.items() if value not in (None, "", [])}
        settings = [Param(name, value[:LONGEST_VALUE]) for name, value in shown.items()]
        for at in range(0, len(settings), PARAMETERS_AT_ONCE):
            self.client.log_batch(self.id, params=settings[at : at + PARAMETERS_AT_ONCE])

    def end(self, manifest: Manifest | None, error: BaseException | None) -> None:
        """Log the figures and how it ended."""
        # Saves start-up time.
        from mlflow.entities import Metric, RunTag

        tags, figures = [], {}
        if manifest is not None:
            tags.append(RunTag("toffee.state", manifest.state))
            tags.append(RunTag("toffee.space", manifest.space_id))
            figures = dict(_figures("", _told(manifest)))
        if error is not None:
            tags.append(RunTag("toffee.error", error_words(error)))
        metrics = [Metric(name, value, 0, 0) for name, value in figures.items()]
        self.client.log_batch(self.id, metrics=metrics, tags=tags)
        ended = (
            "FINISHED" if error is None else "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        )
        self.client.set_terminated(self.id, ended)


def _told(manifest: Manifest) -> dict[str, Any]:
    """Return the figures of a run: of its input, of itself, and against the previous run."""
    told: dict[str, Any] = {"input": manifest.summary.to_json(), **manifest.metrics.to_json()}
    refresh = manifest.refresh
    if refresh is not None:
        told["refresh"] = refresh.to_json()
        if refresh.drift:
            told["drift"] = refresh.drift[0].to_json()
    return told


def _figures(prefix: str, values: dict[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield the numbers of nested dicts by their paths; lists, which may name nodes, are left out."""
    for name, value in values.items():
        path = f"{prefix}{name}".replace(" ", "_")
        if isinstance(value, dict):
            yield from _figures(f"{path}.", value)
        elif isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            yield path, float(value)


def _text(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
