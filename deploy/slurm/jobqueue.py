"""A cluster of Slurm jobs that grows and shrinks with the work (dask-jobqueue), and one toffee job on it.

    python deploy/slurm/jobqueue.py --cores 8 --memory 32GB --walltime 04:00:00 --most 10 -- \
        embed --config jobs/embed.toml --out /shared/vectors

Workers leave before their time limit (--lifetime) and give their tasks back. TLS, with certificates for this
run alone. Needs dask-jobqueue. Run by `make slurm-test` (tests/deploy/test_slurm.py): Slurm 22.05, two nodes
on one machine, a worker's job cancelled while it works. Not tested: several machines.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import dask.config
import yaml
from dask_jobqueue import SLURMCluster
from distributed.security import Security

from toffee_dist.cluster.certs import ROLES, write_certificates

DEPLOY = Path(__file__).parents[1]
# Seconds before the time limit at which a worker leaves: more than a task takes to be given back.
LEAVE = 300


def seconds(walltime: str) -> int:
    """Read ``04:00:00``.

    Examples
    --------
    >>> seconds("04:00:30")
    14430
    """
    hours, minutes, rest = (int(part) for part in walltime.split(":"))
    return 3600 * hours + 60 * minutes + rest


def make_security(folder: Path) -> Security:
    """Make certificates for this run, and return them as Dask takes them."""
    write_certificates(folder, days=30)
    files = {
        f"tls_{role}_{kind}": str(folder / f"{role}{end}.pem")
        for role in ROLES
        for kind, end in (("cert", ""), ("key", "-key"))
    }
    return Security(require_encryption=True, tls_ca_file=str(folder / "ca.pem"), **files)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one toffee job; return its exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--cores", type=int, default=8, help="of a Slurm job")
    parser.add_argument("--memory", default="32GB", help="of a Slurm job")
    parser.add_argument("--walltime", default="04:00:00", help="of a Slurm job, HH:MM:SS")
    parser.add_argument("--queue", help="partition")
    parser.add_argument("--account")
    parser.add_argument("--most", type=int, default=10, help="Slurm jobs at once")
    parser.add_argument("--interface", help="network interface of scheduler and workers, such as ib0")
    parser.add_argument("--shared", default=".", help="folder that every node sees, for certificates")
    parser.add_argument("command", nargs="+", help="what follows `toffee`")
    given = parser.parse_args(arguments)
    environment = [
        line for line in (DEPLOY / "worker.env").read_text().splitlines() if not line.startswith("#")
    ]
    lifetime = max(60, seconds(given.walltime) - LEAVE)
    dask.config.update(dask.config.config, yaml.safe_load((DEPLOY / "dask.yaml").read_text()))
    with tempfile.TemporaryDirectory(prefix=".toffee-", dir=given.shared) as folder:
        certificates = Path(folder) / "certs"
        with SLURMCluster(
            cores=given.cores,
            processes=given.cores,
            memory=given.memory,
            walltime=given.walltime,
            queue=given.queue,
            account=given.account,
            interface=given.interface,
            security=make_security(certificates),
            protocol="tls://",
            local_directory=tempfile.gettempdir(),
            log_directory=folder,
            job_script_prologue=[
                f"export {line}" for line in (*environment, f"DASK_CONFIG={DEPLOY / 'dask.yaml'}")
            ],
            worker_extra_args=[
                *("--lifetime", f"{lifetime}s", "--lifetime-stagger", "60s"),
                *("--preload-nanny", "toffee_dist.cluster.retire", "--no-dashboard"),
            ],
            scheduler_options={"dashboard": False, "dashboard_address": "127.0.0.1:0"},
        ) as cluster:
            cluster.adapt(minimum_jobs=1, maximum_jobs=given.most)
            where = [
                f"--mode={cluster.scheduler_address}",
                f"--tls-ca={certificates / 'ca.pem'}",
                f"--tls-cert={certificates / 'client.pem'}",
                f"--tls-key={certificates / 'client-key.pem'}",
            ]
            job = subprocess.Popen(
                [sys.executable, "-m", "toffee_dist.cli", *given.command, *where],
                env=os.environ | dict(line.split("=", 1) for line in environment),
            )
            # A scheduler's "stop" is for the job, which ends resumable; then everything is closed.
            signal.signal(signal.SIGTERM, lambda *_: job.terminate())
            return job.wait()


if __name__ == "__main__":
    sys.exit(main())
