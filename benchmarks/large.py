"""Large graphs in blocks of nodes: beside pycleora, with one worker and two, how exact, and how it grows.

    python benchmarks/large.py                       # a million nodes; ends with one line of JSON
    python benchmarks/large.py --only sizes          # 0.3 to 10 million nodes, two workers of 3 GiB

Everything is wall seconds of commands as a user would run them, from Parquet files to published vectors with
their report. pycleora is installed in an environment of its own, and reads the same files; both run in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import scipy.sparse as sp
import scipy.sparse.linalg as sla
from report import THREAD_LIMITS, one_thread, print_json, print_table
from stream import write_stream

from toffee_dist.kernels.solvers.base import Operator
from toffee_dist.kernels.solvers.krylov import EigenSpace

PARTS = ("ratio", "speedup", "gap", "bandwidth")
PYCLEORA = "pycleora==3.2.1"
# Reads the files with pyarrow, makes pycleora's lines of them, embeds with its defaults (or without whitening
# after every step, its fastest way), writes the vectors.
RIVAL = """
import sys
import time
import numpy as np
import pyarrow.parquet as pq
import pycleora
from pycleora import SparseMatrix

def lines(folder):
    table = pq.read_table(folder, columns=["source", "target"])
    for batch in table.to_batches(max_chunksize=1 << 20):
        for a, b in zip(batch.column(0).to_pylist(), batch.column(1).to_pylist()):
            yield f"{a} {b}"

began = time.perf_counter()
graph = SparseMatrix.from_iterator(lines(sys.argv[1]), "complex::reflexive::node")
print(f"{time.perf_counter() - began:.1f} seconds of import", file=sys.stderr)
np.save(sys.argv[2], pycleora.embed(graph, feature_dim=int(sys.argv[3]), whiten=sys.argv[4] == "whitened"))
print(f"{time.perf_counter() - began:.1f} seconds in all", file=sys.stderr)
"""


def watch(command: list[str], free: bool = False) -> tuple[str, float, int]:
    """Run a command; return what it printed, its seconds, and the peak over all its processes.

    What is free has as many BLAS threads as it likes.
    """
    environment = {name: value for name, value in os.environ.items() if not (free and name in THREAD_LIMITS)}
    began, peak, done = time.perf_counter(), 0, threading.Event()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)

    def look() -> None:
        nonlocal peak
        while not done.wait(0.2):
            try:
                family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
                peak = max(peak, sum(member.memory_info().rss for member in family))
            except psutil.NoSuchProcess:
                continue

    watcher = threading.Thread(target=look)
    watcher.start()
    out, _ = process.communicate()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{' '.join(command[:4])} … ended with {process.returncode}")
    return out, time.perf_counter() - began, peak


def cpu_seconds() -> float:
    """Return what all processes that ended have used: the wall clock of a shared machine says little."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def embed(edges: Path, out: Path, rank: int, *options: str) -> tuple[dict[str, Any], float, int]:
    """Embed as a user would; return what it says, its seconds and its peak."""
    command = [sys.executable, "-m", "toffee_dist.cli", "embed", str(edges), "--out", str(out)]
    text, seconds, peak = watch([*command, "--rank", str(rank), "--json", *options])
    return json.loads(text), seconds, peak


def compare(work: Path, edges: Path, rank: int, repeats: int) -> dict[str, float]:
    """Return our seconds over pycleora's, each the best of its runs."""
    rival = work / "pycleora"
    subprocess.run([sys.executable, "-m", "venv", str(rival)], check=True)
    packages = [PYCLEORA, "numpy", "scipy", "pyarrow"]
    subprocess.run([str(rival / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages], check=True)
    script = work / "rival.py"
    script.write_text(RIVAL)
    command = [str(rival / "bin" / "python"), str(script), str(edges), str(work / "rival.npy"), str(rank)]
    names = ("directed", "undirected", "pycleora", "pycleora_not_whitened")
    seconds: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, int] = {}
    for repeat in range(repeats):
        for name, options in (("directed", ()), ("undirected", ("--undirected",))):
            _, taken, peaks[name] = embed(edges, work / f"{name}-{repeat}", rank, *options)
            seconds[name].append(taken)
        for name, way in zip(names[2:], ("whitened", "raw"), strict=True):
            _, taken, peaks[name] = watch([*command, way], free=True)
            seconds[name].append(taken)
    best = {name: min(values) for name, values in seconds.items()}
    print_table(
        f"from Parquet to vectors, rank {rank}",
        ["system", "seconds", "peak MiB"],
        [[name, f"{best[name]:.1f}", f"{peaks[name] / 2**20:,.0f}"] for name in best],
    )
    return {
        "ratio_directed": best["directed"] / best["pycleora"],
        "ratio_undirected": best["undirected"] / best["pycleora"],
        **{f"seconds_{name}": value for name, value in best.items()},
    }


def speed_up(work: Path, edges: Path, rank: int, repeats: int) -> dict[str, float]:
    """Return the seconds of the solve with one process of one thread over those with two."""
    seconds: dict[int, list[float]] = {1: [], 2: []}
    for repeat in range(repeats):
        for workers in seconds:
            options = ("--undirected", "--mode", "processes", "--workers", str(workers), "--no-report")
            done, _, _ = embed(edges, work / f"workers-{workers}-{repeat}", rank, *options)
            seconds[workers].append(done["seconds"]["solve zero"])
    best = {workers: min(values) for workers, values in seconds.items()}
    rows = [[str(workers), f"{value:.1f}"] for workers, value in best.items()]
    print_table("solve, undirected", ["processes", "seconds"], rows)
    return {"two_worker_speedup": best[1] / best[2]}


def measure_gap(nodes: int, events: int, rank: int, folder: Path) -> dict[str, float]:
    """Return the share of the energy of the leading eigenvalues that a Krylov space of ours leaves."""
    import polars as pl

    write_stream(folder, nodes=nodes, events=events, days=90)
    frame = pl.concat([pl.read_parquet(path) for path in sorted(folder.glob("*.parquet"))])
    i, j = frame["source"].to_numpy(), frame["target"].to_numpy()
    X = sp.csr_matrix((np.ones(2 * len(i)), (np.append(i, j), np.append(j, i))), shape=(nodes, nodes))
    X.data[:] = 1.0
    X = X / np.linalg.norm(X.data)
    began = time.perf_counter()
    space = EigenSpace(Operator(X.astype(np.float32)), rank)
    ours = time.perf_counter() - began
    began = time.perf_counter()
    exact = sla.eigsh(X, k=rank, which="LM", tol=1e-8, v0=np.ones(nodes), return_eigenvectors=False)
    theirs = time.perf_counter() - began
    best = float(np.square(exact).sum())
    found = {
        "energy_gap": 1 - float(np.square(space.values).sum()) / best,
        "energy_gap_said": space.left / best,
    }
    print_table(
        f"leading {rank} eigenvalues, {nodes:,} nodes",
        ["", "seconds", "energy left"],
        [
            ["ours, single precision", f"{ours:.1f}", f"{found['energy_gap']:.1e}"],
            ["ARPACK, double, tol 1e-8", f"{theirs:.1f}", "0"],
        ],
    )
    return found


def measure_bandwidth() -> dict[str, float]:
    """Return what one core and what two cores copy at once, in bytes per second: the limit of every pass."""
    data = [np.ones(1 << 26, np.float32) for _ in range(2)]

    def copies(threads: int) -> float:
        def copy(array: np.ndarray[Any, Any]) -> None:
            other = np.empty_like(array)
            for _ in range(4):
                np.copyto(other, array)

        workers = [threading.Thread(target=copy, args=(array,)) for array in data[:threads]]
        began = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        return threads * 8 * data[0].nbytes / (time.perf_counter() - began)

    one, two = (max(copies(threads) for _ in range(3)) for threads in (1, 2))
    return {"copy_one_core_gb_s": one / 1e9, "copy_two_cores_gb_s": two / 1e9}


def grow(work: Path, sizes: list[float], rank: int, memory: str, undirected: bool) -> dict[str, Any]:
    """Run the same job on larger and larger graphs, on two workers; compare with the plan."""
    found: dict[str, Any] = {}
    rows = []
    # Storage is a local folder whose files stay in memory as far as they fit: it is as fast as a copy.
    speed = f"{measure_bandwidth()['copy_two_cores_gb_s'] / 2:.2f}GB"
    print(f"bandwidth for the plan: {speed}/s and worker")
    for millions in sizes:
        nodes, events = int(millions * 1e6), int(millions * 1e7)
        edges = write_stream(work / f"edges-{millions:g}", nodes=nodes, events=events, days=90)
        options = ["--mode", "processes", "--workers", "2", "--memory", memory]
        options += ["--undirected"] * undirected
        command = [sys.executable, "-m", "toffee_dist.cli", "plan", str(edges), "--rank", str(rank)]
        plan = json.loads(watch([*command, "--json", "--bandwidth", speed, *options])[0])
        before = cpu_seconds()
        done, seconds, _ = embed(edges, work / f"out-{millions:g}", rank, *options)
        cpu = cpu_seconds() - before
        subprocess.run(["rm", "-rf", str(work / f"out-{millions:g}"), str(edges)], check=True)
        planned, allowed = plan["seconds_with_workers"], plan["worker_bytes"]["1"]
        moved = sum(stage["moved"] for stage in plan["stages"])
        # A graph of one block has no passes.
        passes = done["passes"] or {"moved": 0}
        found[f"{millions:g}"] = {
            "seconds": round(seconds, 1),
            "planned_seconds": round(planned, 1),
            "peak_mib": round(done["peak_bytes"] / 2**20),
            "planned_mib": round(allowed / 2**20),
            "cpu_seconds": round(cpu, 1),
            "cpu_microseconds_per_event": round(cpu / events * 1e6, 2),
            "moved_gib": round(passes["moved"] / 2**30, 1),
            "planned_gib": round(moved / 2**30, 1),
        }
        figures = dict(found[f"{millions:g}"])
        found[f"{millions:g}"]["stages"] = done["seconds"]
        found[f"{millions:g}"]["peaks_mib"] = {name: peak >> 20 for name, peak in done["peaks"].items()}
        found[f"{millions:g}"]["planned_stages"] = {
            stage["name"]: round(stage["seconds_with_workers"], 1) for stage in plan["stages"]
        }
        rows.append([f"{nodes:,}", *(f"{value:,}" for value in figures.values())])
        names = ["nodes", "seconds", "plan", "peak MiB", "plan", "CPU s", "CPU µs/event", "GiB moved", "plan"]
        kind = "undirected" if undirected else "directed"
        print_table(f"two workers of {memory}, rank {rank}, {kind}", names, rows)
    return {"sizes": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", choices=(*PARTS, "sizes"), help="one part; without it all but the sizes")
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--gap-nodes", type=int, default=300_000)
    parser.add_argument("--sizes", default="0.3,1,3,10", help="millions of nodes, with ten events each")
    parser.add_argument("--memory", default="3GiB", help="of each worker, for the sizes")
    parser.add_argument("--undirected", action="store_true", help="graphs of the sizes")
    parser.add_argument("--rank", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    one_thread()
    parts = (options.only,) if options.only else PARTS
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        if {"ratio", "speedup"} & set(parts):
            edges = write_stream(work / "edges", nodes=options.nodes, events=options.events, days=90)
        if "ratio" in parts:
            found |= compare(work, edges, options.rank, options.repeats)
        if "speedup" in parts:
            found |= speed_up(work, edges, options.rank, options.repeats)
        if "gap" in parts:
            gap = work / "gap"
            found |= measure_gap(options.gap_nodes, 10 * options.gap_nodes, options.rank, gap)
        if "bandwidth" in parts:
            found |= measure_bandwidth()
        if "sizes" in parts:
            sizes = [float(size) for size in options.sizes.split(",")]
            found |= grow(work, sizes, options.rank, options.memory, options.undirected)
    print_json(found)


if __name__ == "__main__":
    main()
