"""The sha256 of every Parquet file of fixed jobs: a change that must change no result changes none of these.

    python benchmarks/fixed_jobs.py > before.txt     (on the code before)
    python benchmarks/fixed_jobs.py --compare before.txt

Digests of two machines may differ (BLAS, versions of NumPy and Arrow): compare on one.
"""

from __future__ import annotations

import argparse
import hashlib
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import polars as pl

COMMAND = [sys.executable, "-c", "from toffee_dist.cli import main; main()"]


def write_edges(path: Path) -> None:
    """Draw a graph of 300 nodes over 60 days with weekly communities, times unsorted, some rows repeated."""
    rng = np.random.default_rng(5)
    frames = []
    groups = rng.integers(4, size=(2, 300))
    for day in range(60):
        group = groups[int(day % 7 >= 5)]
        i, j = rng.integers(300, size=(2, 900))
        keep = (group[i] == group[j]) | (rng.random(900) < 0.1)
        seconds = 1_767_571_200 + day * 86_400 + rng.integers(86_400, size=900)
        frames.append(pl.DataFrame({"source": i, "target": j, "time": seconds}).filter(keep))
    frame = pl.concat(frames).sample(fraction=1.0, shuffle=True, seed=1)
    frame.with_columns(pl.format("node {}", "source").alias("source")).with_columns(
        pl.format("node {}", "target").alias("target"), pl.from_epoch("time", time_unit="s")
    ).write_parquet(path)


def list_jobs(edges: str) -> dict[str, list[list[str]]]:
    """Return the commands of every job, in order; the word OUT stands for its folder."""
    model = ["--rank", "12", "--mode", "threads", "--workers", "2"]
    out = ["--out", "OUT"]
    window = ["--last", "28d", "--holdout", "1", "--min-cosine=-1", "--max-auc-drop", "1"]
    return {
        "sum": [["embed", edges, *out, *model]],
        "sum, undirected": [["embed", edges, *out, *model, "--undirected", "--reduce", "decay:7"]],
        "trajectory": [["embed", edges, *out, *model, "--outputs", "embedding,trajectory"]],
        "factors and spectrum": [["embed", edges, *out, *model, "--outputs", "factors,spectrum", "--bound"]],
        "two refreshes": [
            ["refresh", edges, *out, *model, *window, "--outputs", "embedding,trajectory", "--as-of", day]
            for day in ("2026-02-20", "2026-02-23")
        ],
        "evaluation": [
            ["evaluate", edges, *out, "--rank", "12", "--undirected", "--seeds", "2", "--future", "3"],
        ],
        "model tsvd": [["embed", edges, *out, *model, "--model", "tsvd"]],
        "model rescal": [["embed", edges, *out, *model, "--model", "rescal"]],
    }


def digests(folder: Path) -> list[str]:
    """Return a line per Parquet file: its digest and its place, with runs by their number."""
    runs = {run.name: str(number) for number, run in enumerate(sorted((folder / "runs").glob("*")))}
    lines = []
    for path in sorted(folder.rglob("*.parquet")):
        parts = [runs.get(part, part) for part in path.relative_to(folder).parts]
        lines.append(f"{digest(path)}  {'/'.join(parts)}")
    return lines


def digest(path: Path) -> str:
    """Return the sha256 of a file; where it has a column of seconds, that of all its other columns."""
    frame = pl.read_parquet(path)
    timed = [name for name in frame.columns if name.endswith("seconds")]
    content = frame.drop(timed).write_ipc(None).getvalue() if timed else path.read_bytes()
    return hashlib.sha256(content).hexdigest()


def run_jobs() -> list[str]:
    """Run every job and return its lines."""
    lines = []
    with tempfile.TemporaryDirectory(prefix="toffee-") as name:
        edges = Path(name) / "edges.parquet"
        write_edges(edges)
        for number, (job, commands) in enumerate(list_jobs(str(edges)).items()):
            out = Path(name) / str(number)
            for command in commands:
                words = [str(out) if word == "OUT" else word for word in command]
                done = subprocess.run([*COMMAND, *words], capture_output=True, text=True, timeout=600)
                if done.returncode:
                    raise SystemExit(f"{job}: exit {done.returncode}\n{done.stderr}")
            lines += [f"{line}  ({job})" for line in digests(out)]
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compare", type=Path, help="Output of an earlier run of this command.")
    arguments = parser.parse_args()
    lines = run_jobs()
    print("\n".join(lines))
    if arguments.compare is not None:
        before = arguments.compare.read_text().splitlines()
        changed = sorted(set(before) ^ set(lines))
        print("\n".join(["", "different:", *changed]) if changed else f"\nall {len(lines)} are the same")
        raise SystemExit(bool(changed))


if __name__ == "__main__":
    main()
