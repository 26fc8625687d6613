"""What an evaluation keeps, so that one that was interrupted goes on: fits, and cells.

    cells/<digest>.json          one cell: all that decides it is in the digest
    fits/<digest>/…, .json       vectors as `models` leaves them, and what the fit took

A cell that is there is not marked again, and a fit is needed only where one of its cells is missing.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from toffee_dist.errors import InputError
from toffee_dist.evaluation.events import Events
from toffee_dist.storage.files import read_json, write_json
from toffee_dist.tasks import give_back

# Of what is kept: other files are not read.
FORMAT = 1
# Seconds between two lines that say how far it is.
SAY_EVERY = 10.0


@dataclass
class Usage:
    """What a fit took in this process: CPU seconds, and MiB above what the process had before.

    Not a number where that is not known: of a fit that an earlier process began, nobody has both parts.
    """

    seconds: float = 0.0
    mib: float = float("nan")


@contextmanager
def measured() -> Iterator[Usage]:
    """Measure what a block takes; memory where the system tells a peak that can be set back (Linux)."""
    usage = Usage()
    # What was freed before would be taken again without being seen.
    give_back()
    before = _reset_peak()
    began = time.process_time()
    try:
        yield usage
    finally:
        usage.seconds = time.process_time() - began
        peak = _memory("VmHWM")
        if before is not None and peak is not None:
            usage.mib = max(0.0, peak - before)


def _reset_peak() -> float | None:
    """Set the peak of this process back to what it holds; return that, or None where it cannot be told."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return None
    return _memory("VmRSS")


def _memory(name: str) -> float | None:
    """Return a figure of this process in MiB."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(name)), None)


def digest(*parts: object) -> str:
    """Return a short name for what decides a result."""
    return hashlib.sha256(json.dumps([FORMAT, *map(str, parts)]).encode()).hexdigest()[:32]


def identify(events: Events) -> str:
    """Return a name for a graph as it is read: its rows, their weights, and the steps."""
    weight = b"" if events.weight is None else np.ascontiguousarray(events.weight).tobytes()
    return digest(events.fingerprint(), weight, events.step, events.since, events.scale)


class Kept:
    """A folder of fits and cells.

    Parameters
    ----------
    folder
        Where; None keeps nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        if folder is not None:
            for name in ("cells", "fits"):
                (folder / name).mkdir(parents=True, exist_ok=True)

    def cell(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Return the cell of a digest, made now where it is not there."""
        if self.folder is None:
            return make()
        path = self.folder / "cells" / f"{name}.json"
        found = _read(path)
        if found is None:
            found = make()
            write_json(path, found)
        return found

    def has_cell(self, name: str) -> bool:
        """Whether a cell is there."""
        return self.folder is not None and (self.folder / "cells" / f"{name}.json").exists()

    def fit_folder(self, name: str) -> Path | None:
        """Return where a fit is kept; None where nothing is."""
        return None if self.folder is None else self.folder / "fits" / name

    def usage(self, name: str) -> Usage | None:
        """Return what a finished fit took."""
        path = self.fit_folder(name)
        found = None if path is None else _read(path.with_suffix(".json"))
        return None if found is None else Usage(**found)

    def write_usage(self, name: str, usage: Usage) -> None:
        """Keep what a finished fit took."""
        path = self.fit_folder(name)
        if path is not None:
            write_json(path.with_suffix(".json"), {"seconds": usage.seconds, "mib": usage.mib})


def _read(path: Path) -> dict[str, Any] | None:
    """Return what a file says; None where it is not there, or not what it should be."""
    try:
        found = read_json(path)
    except (OSError, InputError):
        return None
    return found if isinstance(found, dict) else None


class Progress:
    """Says how far an evaluation is, and how long it will take.

    A fit serves many cells, and is met with the first of them: its seconds are counted apart, so that one fit
    is not taken for the cost of every cell.

    Parameters
    ----------
    total, fits
        Cells and fits to come.
    say
        Is told.
    """

    def __init__(self, total: int, say: Callable[[str], None], fits: int = 0) -> None:
        self.total, self.fits, self.say = total, fits, say
        self.done = self.there = self.fitted = 0
        self._fitting = 0.0
        self._began = self._said = time.monotonic()

    def step(self, *, was_there: bool, what: str, fitting: float | None = None) -> None:
        """Count a cell; `fitting` are the seconds of the fit that it needed, None where there was none."""
        self.done += 1
        self.there += was_there
        if fitting is not None:
            self.fitted += 1
            self._fitting += fitting
        now = time.monotonic()
        made = self.done - self.there
        if now - self._said >= SAY_EVERY and made and self.done < self.total:
            self._said = now
            left = (now - self._began - self._fitting) / made * (self.total - self.done)
            if self.fitted:
                left += self._fitting / self.fitted * max(0, self.fits - self.fitted)
            self.say(f"{self.done:,} of {self.total:,} cells, about {show_seconds(left)} left ({what})")


def show_seconds(seconds: float) -> str:
    """Return a time as a person says it.

    Examples
    --------
    >>> show_seconds(42), show_seconds(600), show_seconds(9000)
    ('42 s', '10 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
