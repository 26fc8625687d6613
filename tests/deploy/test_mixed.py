"""Hosts that differ: another Python or another Dask in a cluster is refused with words, by processes of both.

`make mixed-test` makes the two other environments and names their Python in MIXED_PYTHON and MIXED_DASK.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness import clusters
from tests.harness.clusters import free_port, security_options, wait_for_port, write_edges
from toffee_dist.cluster.certs import write_certificates

pytestmark = [pytest.mark.daemons, pytest.mark.timeout(200)]


def other(kind: str) -> str:
    """Return the interpreter of another environment, or skip."""
    found = os.environ.get(f"MIXED_{kind.upper()}", "")
    if not Path(found).is_file():
        pytest.skip(f"no environment with another {kind}: make mixed-test makes it")
    return found


def version_of(interpreter: str, kind: str) -> str:
    code = {
        "python": "import sys; print('%d.%d' % sys.version_info[:2])",
        "dask": "import dask; print(dask.__version__)",
    }
    return subprocess.run(
        [interpreter, "-c", code[kind]], capture_output=True, text=True, check=True
    ).stdout.strip()


@pytest.mark.parametrize(
    ("kind", "place"),
    [("python", "worker"), ("dask", "worker"), ("dask", "scheduler"), ("python", "scheduler")],
)
def test_another_version_is_refused(kind: str, place: str, tmp_path: Path) -> None:
    foreign = other(kind)
    theirs, ours = version_of(foreign, kind), version_of(sys.executable, kind)
    assert theirs != ours
    certificates = tmp_path / "certs"
    write_certificates(certificates)
    edges, port = write_edges(tmp_path / "edges.parquet", nodes=80, events=1500), free_port()
    address = f"tls://127.0.0.1:{port}"
    programs = {
        "scheduler": ["scheduler", f"--host={address}", "--no-dashboard", "--dashboard-address=127.0.0.1:0"],
        "worker": [
            "worker",
            address,
            "--nthreads=1",
            "--host=127.0.0.1",
            "--no-dashboard",
            "--memory-limit=0",
            "--no-nanny",
        ],
    }
    started = []
    try:
        for role, words in programs.items():
            python = foreign if role == place else sys.executable
            process = subprocess.Popen(
                [python, "-m", "dask", *words, *security_options(certificates, role)],
                env=os.environ | clusters.ENVIRONMENT,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
            started.append(process)
            wait_for_port(port, 60)
        files = {"ca": "ca.pem", "cert": "client.pem", "key": "client-key.pem"}
        tls = [f"--tls-{name}={certificates / file}" for name, file in files.items()]
        done = subprocess.run(
            [
                *(sys.executable, "-m", "toffee_dist.cli", "embed", str(edges), f"--out={tmp_path / 'out'}"),
                *(*tls, "--rank=8", f"--mode={address}", "--workers=1", "--wait=30"),
            ],
            env=os.environ | clusters.ENVIRONMENT,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
    finally:
        for process in reversed(started):
            clusters.stop(process)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    where = "the scheduler" if place == "scheduler" else "worker tls://"
    assert last.startswith(f"Error: {kind} of {where}")
    assert f"got {theirs}; allowed: {ours}, as here" in last
    assert "from one environment or image" in last
