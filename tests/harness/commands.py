"""The command in a process of its own, and what it has left so far."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness import clusters
from toffee_dist.storage.runs import RunFolder, list_runs
from toffee_dist.storage.slices import is_finished

OPTIONS = [
    "--rank=24",
    "--outputs=embedding,trajectory",
    "--freqs=all",
    "--trajectory-by=als",
    "--keep-work",
    "--wait=15",
]
SECONDS = 180


@contextmanager
def toffee(*arguments: str, environment: dict[str, str] | None = None, **options: Any) -> Iterator[Any]:
    """Run the command in a process of its own, which does not outlive the test."""
    process = subprocess.Popen(
        [sys.executable, "-m", "toffee_dist.cli", *arguments],
        env=os.environ | clusters.ENVIRONMENT | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )
    try:
        yield process
    finally:
        clusters.stop(process)
        process.communicate()


def embed(edges: Path, out: Path, mode: str, workers: int) -> list[str]:
    return ["embed", str(edges), f"--out={out}", f"--mode={mode}", f"--workers={workers}", *OPTIONS]


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=SECONDS)
    assert "Traceback" not in err
    return process.returncode, out, err


def wait_until(condition: Callable[[], Any], seconds: float = 30) -> Any:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("waited in vain")


def finished_slices(out: Path) -> dict[str, int]:
    """Return the finished slices of the only run, by name, with the inode of their factors."""
    runs = list_runs(out)
    if not runs:
        return {}
    folder = runs[-1].slices
    names = [path.stem for path in folder.glob("[0-9]*.json")]
    return {
        name: (folder / f"A-{name}.npy").stat().st_ino for name in names if is_finished(folder, name, "ARC")
    }


def only_run(out: Path) -> RunFolder:
    [run] = list_runs(out)
    return run
