"""A season of nights: how still vectors lie, whether night 1's model serves on night 30, what a start saves.

Run:  python benchmarks/refresh.py [--quick] [--nights 30]

A generated stream of communities, some of whose members move house as days pass. Every night refreshes a
rolling window twice: in a chain (aligned, warm) and on its own (a fresh run, not aligned, cold). A classifier
of links is trained on the vectors of night 1 and used, unchanged, on those of the last night.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from report import one_thread, print_json, print_table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from toffee_dist import Run, load_run
from toffee_dist.align import row_cosines
from toffee_dist.config import RefreshConfig
from toffee_dist.refresh import refresh

FIRST, DAY = 1_767_571_200, 86_400  # Monday 2026-01-05 00:00 UTC
WINDOW = 28
COMMUNITY = 50


def write_day(folder: Path, day: int, *, nodes: int, events: int) -> None:
    """Write one day: 85 % of the links inside communities; every day a few nodes move to the next one."""
    rng = np.random.default_rng(day)
    source = (nodes * rng.random(events) ** 1.5).astype(np.int64)
    # Node v has moved once from day 37·(v mod 50) / 10 on: a fifth of them within a month.
    moved = (37 * source % 50) < day / 6
    home = (source // COMMUNITY + moved) * COMMUNITY
    near = (home + rng.integers(COMMUNITY, size=events)) % nodes
    target = np.where(rng.random(events) < 0.85, near, rng.integers(nodes, size=events))
    time = FIRST + day * DAY + rng.integers(DAY, size=events)
    frame = pl.DataFrame({"source": source, "target": target, "time": time})
    frame.write_parquet(folder / f"day-{day:03d}.parquet")


def examples(run: Run, folder: Path, day: int, seed: int) -> tuple[Any, Any]:
    """Return features and labels: links of the coming day, and as many pairs with other targets."""
    frame = pl.read_parquet(folder / f"day-{day:03d}.parquet").unique(
        ["source", "target"], maintain_order=True
    )
    nodes = run.nodes.polars().collect()
    row = np.full(int(nodes["node_id"].max()) + 1, -1)  # type: ignore[arg-type]
    row[nodes["node_id"].to_numpy()] = nodes["row"].to_numpy()
    i, j = (frame[name].to_numpy() for name in ("source", "target"))
    known = (i < len(row)) & (j < len(row))
    i, j = row[i[known]], row[j[known]]
    i, j = i[(i >= 0) & (j >= 0)], j[(i >= 0) & (j >= 0)]
    other = np.random.default_rng(seed).permutation(j)
    E, F = run.embedding.numpy(), run.embedding_target.numpy()
    # The vectors themselves beside their product: a model in whose weights the axes matter.
    pairs = [np.hstack([E[i], F[t], E[i] * F[t]]) for t in (j, other)]
    return np.vstack(pairs), np.repeat([1, 0], len(i))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a small graph, for a test")
    parser.add_argument("--nights", type=int, default=30, help="length of the season")
    arguments = parser.parse_args()
    nodes, events, rank = (400, 3000, 16) if arguments.quick else (8000, 20_000, 64)
    nights = arguments.nights
    one_thread()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "edges"
        folder.mkdir()
        for day in range(WINDOW):
            write_day(folder, day, nodes=nodes, events=events)
        result = season(Path(name), folder, nodes, events, rank, nights)
    print_table(
        f"{nights} nights of {nodes:,} nodes, rank {rank}, a window of {WINDOW} days",
        ("", "chain", "fresh runs"),
        [
            (
                "median cosine to the night before",
                f"{result['cosine_aligned']:.4f}",
                f"{result['cosine_unaligned']:.4f}",
            ),
            (
                "F1 of night 1's classifier, last night",
                f"{result['f1_aligned']:.4f}",
                f"{result['f1_unaligned']:.4f}",
            ),
            ("seconds of solving", f"{result['warm_seconds']:.2f}", f"{result['cold_seconds']:.2f}"),
            ("iterations", result["warm_iterations"], result["cold_iterations"]),
        ],
    )
    print_json(result)


def season(base: Path, folder: Path, nodes: int, events: int, rank: int, nights: int) -> dict[str, Any]:
    settings = {
        "inputs": (str(folder),),
        "rank": rank,
        "last": f"{WINDOW}d",
        "outputs": ("embedding", "trajectory"),
        "freqs": "lowest:6",
        "mode": "threads",
        "workers": 1,
    }
    cosines: dict[str, list[float]] = {"chain": [], "fresh": []}
    seconds, iterations = {"chain": 0.0, "fresh": 0.0}, {"chain": 0, "fresh": 0}
    before: dict[str, Any] = {}
    models: dict[str, Any] = {}
    f1: dict[str, float] = {}
    worst = -np.inf
    for at in range(nights):
        # The coming day is written, and not read: it tests the vectors.
        write_day(folder, WINDOW + at, nodes=nodes, events=events)
        as_of = str(FIRST + (WINDOW + at) * DAY)
        fits = {}
        for way in ("chain", "fresh"):
            # Fresh runs have no rows and axes but their own, and start their solves from nothing.
            done = refresh(
                RefreshConfig.read(
                    {**settings, "out": str(base / way), "as_of": as_of, "fresh": way == "fresh", "keep": 1}
                )
            )
            run = load_run(base / way)
            E = {
                i: e
                for i, e in zip(run.nodes.polars().collect()["node_id"], run.embedding.numpy(), strict=True)
            }
            if before.get(way):
                shared = [i for i in E if i in before[way]]
                moves = row_cosines(
                    np.stack([E[i] for i in shared]), np.stack([before[way][i] for i in shared])
                )
                cosines[way].append(float(np.nanmedian(moves)))
                seconds[way] += done.manifest["metrics"]["solve_seconds"]
                iterations[way] += done.manifest["metrics"]["iterations"]
            before[way] = E
            fits[way] = float(run.fit.polars().collect()["objective"].to_numpy().sum())
            if at == 0:
                models[way] = LogisticRegression(max_iter=2000).fit(*examples(run, folder, WINDOW, seed=0))
            if at == nights - 1:
                X, y = examples(run, folder, WINDOW + at, seed=1)
                f1[way] = float(f1_score(y, models[way].predict(X), average="micro"))
                f1[f"{way} retrained"] = retrained(X, y)
        if at:
            worst = max(worst, fits["chain"] / fits["fresh"] - 1)
    return {
        "cosine_aligned": float(np.median(cosines["chain"])),
        "cosine_aligned_worst": min(cosines["chain"]),
        "cosine_unaligned": float(np.median(cosines["fresh"])),
        "f1_aligned": f1["chain"],
        "f1_unaligned": f1["fresh"],
        "f1_retrained": f1["chain retrained"],
        "warm_ratio": seconds["chain"] / seconds["fresh"],
        "warm_seconds": seconds["chain"],
        "cold_seconds": seconds["fresh"],
        "warm_iterations": iterations["chain"],
        "cold_iterations": iterations["fresh"],
        "objective_excess": worst,
        "nights": nights,
    }


def retrained(X: Any, y: Any) -> float:
    """Return the F1 of a classifier trained on half of the last night's own examples, on the other half."""
    half = np.random.default_rng(0).permutation(len(y)) < len(y) // 2
    model = LogisticRegression(max_iter=2000).fit(X[half], y[half])
    return float(f1_score(y[~half], model.predict(X[~half]), average="micro"))


if __name__ == "__main__":
    main()
