"""The page of a large run: its bytes, and what it takes to draw it and to answer from it.

    python benchmarks/page.py                        # a million nodes; ends with one line of JSON
    python benchmarks/page.py --nodes 20000 --events 200000

The page is drawn in a process of its own, whose memory above its start is its peak.
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

from large import embed
from report import print_json, print_table
from stream import write_stream

from toffee_dist.report.answers import Answers
from toffee_dist.results.run import load_run

DRAW = """
import json, sys, time
import toffee_dist.batch.pipeline
from toffee_dist.cluster.workers import high_water
from toffee_dist.report.write import write_report
from toffee_dist.storage.runs import find_run
from toffee_dist.storage.paths import to_path
run = find_run(to_path(sys.argv[1]))
before, began = high_water(), time.perf_counter()
write_report(run, run.read_manifest(), run.report)
seconds, peak = time.perf_counter() - began, (high_water() - before) / 2**20
print(json.dumps({"seconds": seconds, "peak_mib": peak, "bytes": run.report.stat().st_size}))
"""


def ask(out: Path) -> dict[str, float]:
    """Return the seconds of each question of a live page."""
    run = load_run(out)
    answers = Answers(run)
    last = str(run.n_steps - 1)
    questions: dict[str, dict[str, str]] = {
        "find": {"text": "99999"},
        "node": {"node": "1234"},
        "neighbors": {"node": "1234"},
        "neighbors_at": {"node": "1234", "at": last},
        "explain": {"node": "1234", "at": last},
        "compare": {"one": "1234", "two": "1240", "at": last},
    }
    answers.page()
    seconds = {}
    for name, words in questions.items():
        began = time.perf_counter()
        status, found = answers.answer(name.removesuffix("_at"), words)
        seconds[name] = time.perf_counter() - began
        if status != 200:
            raise SystemExit(f"{name}: {found}")
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, default=1_000_000)
    parser.add_argument("--events", type=int, default=10_000_000)
    parser.add_argument("--days", type=int, default=60)
    parser.add_argument("--rank", type=int, default=64)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        edges = write_stream(
            Path(folder) / "edges", nodes=options.nodes, events=options.events, days=options.days
        )
        out = Path(folder) / "out"
        wanted = ("--undirected", "--step", "1d", "--outputs", "embedding,trajectory", "--dense", "none")
        embed(edges, out, options.rank, *wanted, "--no-report")
        done = subprocess.run(
            [sys.executable, "-c", DRAW, str(out)], capture_output=True, text=True, check=True
        )
        drawn: dict[str, Any] = json.loads(done.stdout)
        asked = ask(out)
    rows = [["bytes of the page", f"{drawn['bytes']:,}"], ["seconds to draw", f"{drawn['seconds']:.1f}"]]
    rows += [["MiB above the process", f"{drawn['peak_mib']:.0f}"]]
    rows += [[f"seconds of {name}", f"{value:.2f}"] for name, value in asked.items()]
    print_table(f"the page of {options.nodes:,} nodes and {options.days} steps", ["what", "figure"], rows)
    print_json({"page": drawn, "answers": asked, "nodes": options.nodes})


if __name__ == "__main__":
    main()
