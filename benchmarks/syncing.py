"""What it costs to be on the disk: a whole job with every sync, against the same job without one.

    python benchmarks/syncing.py [--repeats 3] [--folder A-FOLDER-ON-A-DISK]

The job is that of `scaling.py --large`: a million nodes, ten million events, rank 64, the sum over time. Both
run in turns, each in a process of its own, on a file system that is synced before each. Without syncs the
read-back before publishing comes from the system's cache: its cost is part of the difference. The last line
is JSON: `cost` is how much longer a job takes than the one before it (the median of such pairs). On a machine
with other work that is noisy still, so `share` says what can be told apart: the time in which tasks wait for
syncs, and what the read-back takes longer, as a part of the job.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from report import one_thread, print_json, print_table
from stream import write_stream

from toffee_dist.cli import main as toffee


def run_here(edges: Path, out: Path, rank: int, synced: bool) -> None:
    """Run the job in this process; print its seconds, and those in which it waited for a sync."""
    real, spent, calls, lock = os.fsync, 0.0, 0, threading.Lock()

    def fsync(handle: int) -> None:
        nonlocal spent, calls
        began = time.perf_counter()
        if synced:
            real(handle)
        with lock:
            spent += time.perf_counter() - began
            calls += 1

    os.fsync = fsync  # type: ignore[assignment]
    began = time.perf_counter()
    words = [f"--rank={rank}", "--mode=threads", "--workers=2", "--no-report", "--json"]
    toffee(["embed", str(edges), f"--out={out}", *words])
    seconds = time.perf_counter() - began
    print(json.dumps({"seconds": seconds, "waited": spent, "syncs": calls}))


def run_apart(edges: Path, out: Path, rank: int, synced: bool) -> dict[str, float]:
    """Run the job in a process of its own."""
    os.sync()
    words = [sys.executable, __file__, f"--rank={rank}", f"--folder={out}", f"--edges={edges}"]
    command = [*words, "--here=" + ("synced" if synced else "plain")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    shutil.rmtree(out)
    job, found = (json.loads(line) for line in done.stdout.splitlines()[-2:])
    return {**found, "check": job["seconds"]["check"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--folder", type=Path, help="on the disk that is meant; default: that of temporary files"
    )
    parser.add_argument("--edges", type=Path, help="used by the command itself")
    parser.add_argument("--here", choices=("synced", "plain"), help="used by the command itself")
    given = parser.parse_args()
    one_thread()
    if given.here:
        run_here(given.edges, given.folder, given.rank, given.here == "synced")
        return
    found: dict[str, list[dict[str, float]]] = {"plain": [], "synced": []}
    with tempfile.TemporaryDirectory(prefix="toffee-", dir=given.folder) as folder:
        edges = write_stream(Path(folder) / "edges", nodes=given.nodes, events=given.events, days=90)
        for _ in range(given.repeats):
            for name, runs in found.items():
                runs.append(run_apart(edges, Path(folder) / "out", given.rank, name == "synced"))
    rows = [
        (
            name,
            *(f"{run['seconds']:.1f}" for run in runs),
            f"{max(run['waited'] for run in runs):.2f}",
            f"{statistics.median(run['check'] for run in runs):.2f}",
        )
        for name, runs in found.items()
    ]
    columns = ("", *(f"run {number + 1}" for number in range(given.repeats)), "waited at most", "read back")
    print_table(f"{given.nodes:,} nodes, {given.events:,} events, rank {given.rank}, seconds", columns, rows)
    plain, synced = (statistics.median(run["seconds"] for run in runs) for runs in found.values())
    check = [statistics.median(run["check"] for run in runs) for runs in found.values()]
    pairs = [a["seconds"] / b["seconds"] for b, a in zip(*found.values(), strict=True)]
    waited = statistics.median(run["waited"] for run in found["synced"])
    print_json(
        {
            "repeats": given.repeats,
            "plain_seconds": round(plain, 2),
            "synced_seconds": round(synced, 2),
            "syncs": int(found["synced"][0]["syncs"]),
            "cost": round(statistics.median(pairs) - 1, 4),
            "share": round((waited + max(0, check[1] - check[0])) / synced, 4),
        }
    )


if __name__ == "__main__":
    main()
