"""A PostgreSQL server on a socket in a folder that only it has; nothing listens on the network."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness import clusters

SECONDS = 60


@dataclass(frozen=True)
class Programs:
    """Where the programs of an installation are, and whether it has pgvector."""

    folder: Path
    vector: bool


def find_programs() -> Programs | None:
    """Return those of the package `pgserver`, which has pgvector, or the system's; None: neither is here."""
    spec = importlib.util.find_spec("pgserver")
    if spec is not None and spec.origin is not None:
        return Programs(Path(spec.origin).parent / "pginstall" / "bin", vector=True)
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))
    if not found:
        return None
    version = found[-1].parent.parent.name
    control = Path(f"/usr/share/postgresql/{version}/extension/vector.control")
    return Programs(found[-1].parent, vector=control.exists())


@dataclass(frozen=True)
class Postgres:
    """A running server, and who starts its programs."""

    programs: Programs
    socket: Path
    user: dict[str, Any]

    def psql(
        self, *options: str, role: str = "owner", stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run psql with its own defaults, as somebody who has no ~/.psqlrc."""
        command: list[str | Path] = [
            self.programs.folder / "psql",
            "-X",
            "-h",
            self.socket,
            "-U",
            role,
            "-d",
            "postgres",
            *options,
        ]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
            cwd=self.socket,
            input=stdin,
            **self.user,
        )

    def ask(self, sql: str) -> list[str]:
        """Return the lines that a query gives."""
        done = self.psql("-Atc", sql)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()


@contextmanager
def server(programs: Programs) -> Iterator[Postgres]:
    """Start a server with the superuser `owner`; it goes with everything that it has written."""
    # The server refuses to run as root.
    user: dict[str, Any] = (
        {"user": "nobody", "group": "nogroup", "extra_groups": []} if os.getuid() == 0 else {}
    )
    # The name of a socket is at most 107 letters long.
    folder = Path(tempfile.mkdtemp(prefix="toffee-pg-", dir="/tmp"))
    if user:
        shutil.chown(folder, user["user"], user["group"])
    data = folder / "data"
    try:
        make: list[str | Path] = [
            programs.folder / "initdb",
            "-D",
            data,
            "-U",
            "owner",
            "-A",
            "trust",
            "-E",
            "UTF8",
            "--locale=C",
            "-N",
        ]
        subprocess.run(make, check=True, capture_output=True, timeout=SECONDS, cwd=folder, **user)
        start: list[str | Path] = [
            programs.folder / "postgres",
            "-D",
            data,
            "-k",
            folder,
            "-c",
            "listen_addresses=",
            "-F",
        ]
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(
                start, stdout=log, stderr=log, start_new_session=True, cwd=folder, **user
            )
        try:
            running = Postgres(programs, folder, user)
            until = time.monotonic() + SECONDS
            while running.psql("-c", "SELECT 1").returncode:
                assert process.poll() is None, (folder / "log").read_text()
                assert time.monotonic() < until, (folder / "log").read_text()
                time.sleep(0.1)
            yield running
        finally:
            clusters.stop(process)
    finally:
        shutil.rmtree(folder)
