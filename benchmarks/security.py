"""What it costs to lock the door: the start of local processes under TLS, against without.

The last line is JSON: `tls_start_seconds` is the difference of the medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any
from unittest import mock

import distributed
from distributed.security import Security
from report import print_json, print_table

from toffee_dist.cluster.client import cluster

LocalCluster = distributed.LocalCluster


class PlainCluster(distributed.LocalCluster):  # type: ignore[misc]
    """The same cluster for everybody who can reach its ports."""


def plain_cluster(**options: Any) -> Any:
    """Return the same cluster, for everybody who can reach its ports."""
    return LocalCluster(**{**options, "protocol": "tcp://", "security": None})


def start(workers: int) -> float:
    """Return the seconds until a cluster of processes is ready."""
    began = time.perf_counter()
    with cluster("processes", workers) as client:
        spent = time.perf_counter() - began
        assert client.scheduler.address.startswith(("tls://", "tcp://"))
        return spent


def start_plain(workers: int) -> float:
    with (
        mock.patch.object(distributed, "LocalCluster", plain_cluster),
        mock.patch.object(Security, "temporary", return_value=None),
    ):
        return start(workers)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    given = parser.parse_args()
    start_plain(given.workers)  # Loads what both need.
    plain, tls = [], []
    for _ in range(given.repeats):
        plain.append(start_plain(given.workers))
        tls.append(start(given.workers))
    rows = [
        (name, *(f"{value:.2f}" for value in (min(found), statistics.median(found), max(found))))
        for name, found in (("plain", plain), ("tls", tls))
    ]
    print_table(f"Start of {given.workers} processes, seconds", ("", "least", "median", "most"), rows)
    more = statistics.median(tls) - statistics.median(plain)
    print_json(
        {
            "repeats": given.repeats,
            "plain_start_seconds": round(statistics.median(plain), 3),
            "processes_start_seconds": round(statistics.median(tls), 3),
            "tls_start_seconds": round(more, 3),
        }
    )


if __name__ == "__main__":
    main()
