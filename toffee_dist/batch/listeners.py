"""Who is told of a run, by option: a catalogue of lineage (OpenLineage), a tracker of experiments (MLflow).

They are told that a run began and how it ended: settings, counts and figures, and no id or vector. A listener
that is away, slow or broken costs at most `PATIENCE` seconds at either end, is named once, and fails nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Protocol

from toffee_dist.errors import InputError
from toffee_dist.progress import Progress
from toffee_dist.settings import JobConfig
from toffee_dist.storage.manifest import Manifest
from toffee_dist.storage.runs import RunFolder
from toffee_dist.words import hide_secrets

# Seconds that a listener may take when a run begins, and again when it ends.
PATIENCE = 10.0


class Listener(Protocol):
    """What is told of a run."""

    name: str

    def begin(self) -> None:
        """Hear that a run begins, or goes on."""

    def end(self, manifest: Manifest | None, error: BaseException | None) -> None:
        """Hear how it ended: what a whole run says about itself, and the error where there was one."""


@contextmanager
def telling(config: JobConfig, run: RunFolder, progress: Progress) -> Iterator[None]:
    """Tell whoever the settings name of the run that is done within.

    Raises
    ------
    ConfigError
        Where a package that is needed for it is not installed: before anything is computed.
    """
    listeners = _open(config, run)
    listeners = [listener for listener in listeners if _within(listener.name, listener.begin, progress)]

    def end(error: BaseException | None) -> None:
        for listener in listeners:
            _within(listener.name, partial(_end, listener, run, error), progress)

    try:
        yield
    except BaseException as error:
        end(error)
        raise
    end(None)


def _open(config: JobConfig, run: RunFolder) -> list[Listener]:
    listeners: list[Listener] = []
    if config.openlineage:
        # Saves start-up time.
        from toffee_dist.batch.lineage import open_lineage

        listeners.append(open_lineage(config.openlineage, config, run))
    if config.mlflow:
        # Saves start-up time.
        from toffee_dist.batch.tracking import open_tracking

        listeners.append(open_tracking(config.mlflow, run))
    return listeners


def _end(listener: Listener, run: RunFolder, error: BaseException | None) -> None:
    listener.end(run.read_manifest() if run.complete else None, error)


def _within(name: str, tell: Callable[[], None], progress: Progress) -> bool:
    """Tell a listener, for as long as our patience lasts; return whether it was told."""
    problems: list[str] = []

    def attempt() -> None:
        try:
            tell()
        except BaseException as error:
            words = (str(error).strip() or type(error).__name__).splitlines()[0]
            problems.append(words[:300])

    # A client of others may wait for longer than it was asked to: it is left behind, and ends with us.
    thread = threading.Thread(target=attempt, name=f"tell {name}", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    if thread.is_alive():
        problems.append(f"no answer within {PATIENCE:g} seconds")
    for words in problems:
        progress.say(f"{name} was not told: {words}")
    return not problems


def error_words(error: BaseException) -> str:
    """Return what may be said elsewhere about how a run ended: an error of the input may quote its rows."""
    if isinstance(error, InputError):
        return "The input cannot be used (exit code 3); the output of the job says why."
    if isinstance(error, KeyboardInterrupt):
        return "Interrupted."
    return hide_secrets(str(error).strip() or type(error).__name__)[:2000]
