"""The engine: one process, two processes and two threads on the same full-spectrum job, in turns.

Wall seconds of the whole `start_run`, cluster start and publishing included, but for the page for people
(`report.html`). Overhead is everything that is not a solver at work, as a share of the one-process run.

    python benchmarks/scaling.py            # prints a table and, last, one line of JSON
    python benchmarks/scaling.py --ways     # the trajectory by the filter and by ALS
    python benchmarks/scaling.py --large    # a million nodes, ten million events, rank 64
    python benchmarks/scaling.py --large --trajectory --nodes 100000 --events 2000000 --days 365
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil
from report import one_thread, print_json, print_table
from stream import write_stream

from toffee_dist.batch.pipeline import start_run
from toffee_dist.settings import JobConfig

MODES = {"1 process": ("processes", 1), "2 processes": ("processes", 2), "2 threads": ("threads", 2)}


def time_modes(work: Path, nodes: int, events: int, days: int, rank: int, repeats: int) -> dict[str, float]:
    edges = write_stream(work / "edges", nodes=nodes, events=events, days=days)
    seconds: dict[str, list[float]] = {name: [] for name in MODES}
    overheads = []
    for repeat in range(repeats):
        for name, (mode, workers) in MODES.items():
            config = JobConfig(
                inputs=(str(edges),),
                out=str(work / f"{mode}-{workers}-{repeat}"),
                rank=rank,
                outputs=("embedding", "trajectory"),
                trajectory_by="als",
                freqs="all",
                mode=mode,
                workers=workers,
                report=False,
            )
            began = time.perf_counter()
            outcome = start_run(config)
            seconds[name].append(time.perf_counter() - began)
            if name == "1 process":
                overheads.append(1 - outcome.figures["solve_seconds"] / seconds[name][-1])
    best = {name: min(values) for name, values in seconds.items()}
    print_table(
        f"{nodes:,} nodes, {days} days, rank {rank}, all frequencies",
        ["mode", "seconds", "speedup"],
        [[name, f"{value:.1f}", f"{best['1 process'] / value:.2f}"] for name, value in best.items()],
    )
    return {
        "two_process_speedup": best["1 process"] / best["2 processes"],
        "threads_speedup": best["1 process"] / best["2 threads"],
        "overhead": min(overheads),
    }


def time_ways(work: Path, nodes: int, events: int, days: int, rank: int) -> dict[str, float]:
    """Time the trajectory by the filter and by ALS of all slices: their own stages, one process, same run."""
    edges = write_stream(work / "edges", nodes=nodes, events=events, days=days)
    own = ("choose", "cut", "patterns", "filter", "kernel", "solve", "trajectory")
    ways = {
        "filter": {"trajectory_by": "filter", "dense": "none"},
        "filter_dense": {"trajectory_by": "filter", "dense": "all"},
        "als": {"trajectory_by": "als", "freqs": "all"},
    }
    found = {}
    for name, options in ways.items():
        config = JobConfig(
            inputs=(str(edges),),
            out=str(work / name),
            rank=rank,
            outputs=("embedding", "trajectory"),
            mode="processes",
            workers=1,
            report=False,
            **options,
        )
        stages = start_run(config).seconds
        found[name] = sum(stages.get(stage, 0.0) for stage in own)
    title = f"{nodes:,} nodes, {days} days, rank {rank}: the trajectory, seconds of its stages"
    print_table(title, list(found), [[f"{seconds:.1f}" for seconds in found.values()]])
    return {f"{name}_seconds": round(seconds, 2) for name, seconds in found.items()} | {
        "ratio": round(found["als"] / found["filter"], 1),
        "ratio_dense": round(found["als"] / found["filter_dense"], 1),
    }


def time_large(work: Path, nodes: int, events: int, days: int, rank: int, extra: list[str]) -> dict[str, Any]:
    """Run the command as a user would, and watch the memory of all its processes."""
    edges = write_stream(work / "edges", nodes=nodes, events=events, days=days)
    command = [sys.executable, "-m", "toffee_dist.cli", "embed", str(edges), "--out", str(work / "out")]
    began = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--rank", str(rank), "--json", *extra], stdout=subprocess.PIPE, text=True
    )
    peak = 0
    while process.poll() is None:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            peak = max(peak, sum(member.memory_info().rss for member in family))
        except psutil.NoSuchProcess:
            break
        time.sleep(0.2)
    out, _ = process.communicate()
    if process.returncode:
        raise SystemExit(process.returncode)
    done = json.loads(out)
    return {
        "nodes": done["nodes"],
        "seconds": time.perf_counter() - began,
        "solve_seconds": done["solve_seconds"],
        "peak_mib": peak / 2**20,
        "stages": done["seconds"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--large", action="store_true", help="the job of a million nodes instead")
    parser.add_argument("--undirected", action="store_true", help="of the large job")
    parser.add_argument("--ways", action="store_true", help="the trajectory by the filter and by ALS instead")
    parser.add_argument(
        "--trajectory", action="store_true", help="of the large job: a trajectory over a year"
    )
    parser.add_argument("--nodes", type=int)
    parser.add_argument("--events", type=int)
    parser.add_argument("--days", type=int, default=240)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()
    one_thread()
    with tempfile.TemporaryDirectory() as folder:
        if options.large:
            extra = ["--undirected"] if options.undirected else []
            if options.trajectory:
                extra += ["--outputs", "embedding,trajectory", "--memory", "2GiB", "--mode", "processes"]
            nodes, events = options.nodes or 1_000_000, options.events or 10_000_000
            days = options.days if options.trajectory else 90
            print_json(time_large(Path(folder), nodes, events, days, options.rank or 64, extra))
        else:
            sizes = (options.nodes or 5000, options.events or 400_000, options.days, options.rank or 64)
            if options.ways:
                print_json(time_ways(Path(folder), *sizes))
            else:
                print_json(time_modes(Path(folder), *sizes, options.repeats))


if __name__ == "__main__":
    main()
