"""One query of a large run from disk: seconds and memory, without and with the index.

python benchmarks/neighbors.py [--nodes 1000000] [--rank 128] [--folder DIR]
python benchmarks/neighbors.py --in-time    # sx-mathoverflow by weeks: `trajectory` and `neighbors --at`

Every query is a process of its own, as `toffee neighbors` is: its seconds include the start of Python. The
last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
from graphs import DATA

from toffee_dist import Run, load_run
from toffee_dist.limits import LIMITS
from toffee_dist.storage import parquet
from toffee_dist.storage.manifest import Manifest, Metrics, RunConfig, Summary
from toffee_dist.storage.runs import RunFolder
from toffee_dist.timegrid import TimeScale, build_grid

QUERY = """
import json, sys, time
from pathlib import Path
import toffee_dist.results.run
from toffee_dist import load_run
def peak():  # not getrusage, which begins with the parent's peak
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
run, node, question = load_run(sys.argv[1]), sys.argv[2], sys.argv[3]
before = peak()
began = time.perf_counter()
if question == "suggest":
    from toffee_dist.results.nodes import suggest
    suggest(run, node + "x")
else:
    run.neighbors(node, metric=question)
seconds = time.perf_counter() - began
print(json.dumps({"seconds": seconds, "mib": peak() / 1024, "added_mib": (peak() - before) / 1024}))
"""


def write_run(folder: Path, n_nodes: int, rank: int) -> Run:
    """Write a published run of random vectors, in parts as a run has them."""
    rng = np.random.default_rng(0)
    ids = pa.array([f"person-{i:08d}" for i in range(n_nodes)])
    columns = {"node_id": ids, "row": np.arange(n_nodes), "degree": np.ones(n_nodes, np.int64)}
    parquet.write_parquet(folder / "nodes.parquet", columns)
    size = LIMITS.part_bytes // (4 * rank)
    for part, start in enumerate(range(0, n_nodes, size)):
        stop = min(start + size, n_nodes)
        vectors = parquet.vectors(rng.standard_normal((stop - start, rank), dtype=np.float32))
        path = folder / "embedding" / f"part-{part:05d}.parquet"
        parquet.write_parquet(path, {"node_id": ids[start:stop], "embedding": vectors})
    RunFolder(folder).write_manifest(
        Manifest(
            run_id="random",
            state="published",
            begun="",
            finished="",
            config=RunConfig(
                inputs=(),
                outputs=("embedding",),
                rank=rank,
                model="toffee",
                gauge="canonical",
                reduce="sum",
                seed=0,
                bipartite=False,
            ),
            identity="",
            fingerprint="",
            versions={},
            directed=False,
            summary=Summary(
                files=1,
                rows=0,
                skipped={},
                comments=0,
                outside=0,
                used=0,
                self_loops=0,
                duplicates=0,
                cancelled=0,
                nodes=n_nodes,
                new_nodes=n_nodes,
                pairs=0,
                entries=0,
                steps=2,
                empty_steps=0,
                density=0.0,
                first="",
                last="",
                fingerprint="",
                examples=[],
            ),
            grid=build_grid("1d", 0, 86400, TimeScale(1, True)),
            outputs=("embedding",),
            metrics=Metrics(nodes=n_nodes, steps=2, solved=0, reused=0, seconds={}),
        )
    )
    return load_run(folder)


def ask(folder: Path, node: str, question: str) -> dict[str, float]:
    began = time.perf_counter()
    command = [sys.executable, "-c", QUERY, str(folder), node, question]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return {**found, "process_seconds": time.perf_counter() - began}


def time_commands(repeats: int, folder: str | None) -> None:
    """Time the questions in time of a run of sx-mathoverflow, as a user types them."""
    path = DATA / "sx-mathoverflow.txt.gz"
    if not path.exists():
        sys.exit(f"{path} is not there: this benchmark needs the real graphs of ../shared/data")
    toffee = [sys.executable, "-m", "toffee_dist.cli"]
    with tempfile.TemporaryDirectory(dir=folder) as out:
        asked = ["--step", "1w", "--rank", "64", "--outputs", "embedding,trajectory", "--no-report"]
        subprocess.run([*toffee, "embed", str(path), "--out", out, *asked, "--json"], check=True)
        # The busiest node has the most to add up.
        node = str(load_run(out).nodes.polars().sort("degree").collect()["node_id"][-1])
        print(f"load of the machine: {os.getloadavg()[0]:.2f}")
        found = {}
        for words in (["trajectory", out, node], ["neighbors", out, node, "--at", "2013-06-01"]):
            each = [time_process([*toffee, *words]) for _ in range(repeats)]
            wall, cpu = (sorted(seconds)[repeats // 2] for seconds in zip(*each, strict=True))
            found[words[0]] = {"seconds": round(wall, 3), "cpu_seconds": round(cpu, 3)}
            print(f"toffee {words[0]:<12}{wall:.2f} s, {cpu:.2f} s of CPU (median of {repeats})")
        print(json.dumps(found))


def time_process(command: list[str]) -> tuple[float, float]:
    """Return the seconds of a command, and those of CPU that it took."""
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - began, os.times()
    user, system = (after[at] - before[at] for at in (2, 3))
    return wall, user + system


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the run is made; default: a temporary folder")
    parser.add_argument("--in-time", action="store_true", help="questions in time of sx-mathoverflow")
    options = parser.parse_args()
    if options.in_time:
        time_commands(options.repeats, options.folder)
        return
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        run = write_run(folder, options.nodes, options.rank)
        node = f"person-{options.nodes // 2:08d}"
        size = options.nodes * options.rank * 4 / 2**20
        print(f"{options.nodes:,} × {options.rank}: {size:,.0f} MiB of vectors")
        found: dict[str, dict[str, float]] = {}

        def measure(label: str, question: str) -> None:
            each = [ask(folder, node, question) for _ in range(options.repeats)]
            best = min(each, key=lambda one: one["seconds"])
            found[label] = {key: round(value, 3) for key, value in best.items()}
            print(
                f"{label:<16}{best['seconds']:.2f} s, {best['process_seconds']:.2f} s with the start of "
                f"Python; peak {best['mib']:.0f} MiB, of which {best['added_mib']:.0f} by the query"
            )

        measure("parquet", "cosine")
        began = time.perf_counter()
        run.build_index()
        print(f"{'toffee index':<16}{time.perf_counter() - began:.2f} s")
        measure("index", "cosine")
        measure("index, dot", "dot")
        measure("unknown node", "suggest")
        print(json.dumps(found))


if __name__ == "__main__":
    main()
