"""Copies of runs that were handed on: a note per export, so that it is known where vectors went.

OUT/exports/<moment>-<word>.json    when, which run, which format, where to
"""

from __future__ import annotations

import os
import uuid
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from toffee_dist.errors import InputError
from toffee_dist.storage.files import read_json, write_json
from toffee_dist.storage.paths import as_remote
from toffee_dist.storage.runs import RunFolder, read_pointer
from toffee_dist.words import hide_secrets

FOLDER = "exports"


def note_export(run: RunFolder, form: str, to: Path) -> None:
    """Note where vectors of a run go, where it lies in a folder of runs that may be written to."""
    with suppress(OSError, InputError):
        if read_pointer(run.out) is None:
            return
        moment = datetime.now(UTC)
        place = str(to) if as_remote(to) is not None else os.path.abspath(to)
        note = {
            "time": moment.isoformat(timespec="seconds"),
            "run": run.run_id,
            "format": form,
            "to": hide_secrets(place),
        }
        folder = run.out / FOLDER
        folder.mkdir(exist_ok=True)
        write_json(folder / f"{moment:%Y%m%dT%H%M%S.%f}-{uuid.uuid4().hex[:4]}.json", note)


def list_exports(out: Path) -> list[dict[str, Any]]:
    """Return the notes of a folder, oldest first."""
    found = [read_json(path) for path in sorted((out / FOLDER).glob("*.json"))]
    return [note for note in found if isinstance(note, dict)]
