"""A season of nights: how still vectors lie, whether night 1's model serves on night 30, what a start saves.

    python benchmarks/refresh.py             # sx-mathoverflow, a week a night, a window of a year
    python benchmarks/refresh.py --stream    # a generated stream, a day a night, a window of four weeks
    python benchmarks/refresh.py --quick     # a small stream, for a test

Every night refreshes a rolling window in a chain (aligned, warm). Some nights, two in a row at the start, in
the middle and at the end, are also embedded on their own (a fresh run, not aligned, cold). A classifier of
coming links is trained on the vectors of night 1 and used, unchanged, on those of the last night. Seconds are
those of the whole refresh but for its page for people, over the nights that were run both ways. Cosines of
the trajectory are of the same step in two runs, the last one of the night before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from graphs import DAY, load_graph
from report import one_thread, print_json, print_table
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import f1_score

from toffee_dist import Run, load_run
from toffee_dist.kernels.align import row_cosines
from toffee_dist.refresh.job import refresh
from toffee_dist.settings import RefreshConfig

FIRST = 1_767_571_200  # Monday 2026-01-05 00:00 UTC
WEEK = 7 * DAY
COMMUNITY = 50
# Steps after a night whose links are foretold.
AHEAD = 8


@dataclass(frozen=True)
class Stream:
    """Edges that arrive step by step.

    Parameters
    ----------
    name, step, first
        What it is, how long a step is, and the moment at which step 0 begins.
    window
        Steps of a night's window; the first night ends with step `window` − 1.
    edges
        Gives the edges of a step: source, target, time.
    settings
        Of the refresh.
    """

    name: str
    step: str
    first: int
    window: int
    edges: Callable[[int], pl.DataFrame]
    settings: dict[str, Any]

    def moment(self, step: int) -> int:
        """Return when a step begins."""
        return self.first + step * (WEEK if self.step == "1w" else DAY)


def generated(nodes: int, events: int, rank: int) -> Stream:
    """Return a stream of communities, some of whose members move house as days pass."""

    def day(step: int) -> pl.DataFrame:
        rng = np.random.default_rng(step)
        source = (nodes * rng.random(events) ** 1.5).astype(np.int64)
        # 85 % of the links are inside communities. Node v has moved to the next one from day 6·(37·v mod 50)
        # on: a fifth of them within two months.
        moved = (37 * source % 50) < step / 6
        home = (source // COMMUNITY + moved) * COMMUNITY
        near = (home + rng.integers(COMMUNITY, size=events)) % nodes
        target = np.where(rng.random(events) < 0.85, near, rng.integers(nodes, size=events))
        time = FIRST + step * DAY + rng.integers(DAY, size=events)
        return pl.DataFrame({"source": source, "target": target, "time": time})

    name = f"a generated stream of {nodes:,} nodes, days"
    return Stream(name, "1d", FIRST, 28, day, {"rank": rank, "last": "28d", "freqs": "lowest:6"})


def mathoverflow(nights: int) -> Stream:
    """Return the last weeks of a real graph: nodes come and go all the time."""
    graph = load_graph("mathoverflow")
    monday = 4 * DAY  # The epoch began on a Thursday.
    last = int(graph.time.max() - monday) // WEEK * WEEK + monday  # The last week is not whole.
    first = last - (52 + nights + AHEAD) * WEEK
    table = pl.DataFrame({"source": graph.source, "target": graph.target, "time": graph.time})

    def week(step: int) -> pl.DataFrame:
        since = first + step * WEEK
        return table.filter(pl.col("time").is_between(since, since + WEEK, closed="left"))

    settings = {"rank": 128, "step": "1w", "last": "52w", "freqs": "all"}
    return Stream("sx-mathoverflow, weeks", "1w", first, 52, week, settings)


def examples(run: Run, coming: pl.DataFrame, seed: int) -> tuple[Any, Any]:
    """Return features and labels: coming links, and as many pairs with other targets."""
    frame = coming.unique(["source", "target"], maintain_order=True)
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
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--stream", action="store_true", help="a generated stream instead")
    parser.add_argument("--quick", action="store_true", help="a small one, for a test")
    parser.add_argument("--nights", type=int, default=30, help="length of the season, at least 2")
    parser.add_argument("--by", default="als", choices=["als", "filter"], help="how the trajectory is made")
    options = parser.parse_args()
    one_thread()
    if options.quick:
        stream = generated(400, 3000, 16)
    else:
        stream = generated(8000, 20_000, 64) if options.stream else mathoverflow(options.nights)
    with tempfile.TemporaryDirectory() as name:
        result = season(Path(name), stream, options.nights, options.by)
    rows = [
        ("median cosine to the night before", "cosine_aligned", "cosine_unaligned"),
        ("the same of the trajectory", "trajectory_aligned", "trajectory_unaligned"),
        ("F1 of night 1's classifier, last night", "f1_aligned", "f1_unaligned"),
        ("seconds of a refresh", "warm_seconds", "cold_seconds"),
        ("of which solving", "warm_solving", "cold_solving"),
    ]
    print_table(
        f"{options.nights} nights: {stream.name}, rank {stream.settings['rank']}",
        ("", "chain", "fresh runs"),
        [(label, *(f"{result[key]:.4f}" for key in keys)) for label, *keys in rows],
    )
    print_json(result)


def season(base: Path, stream: Stream, nights: int, by: str) -> dict[str, Any]:
    folder = base / "edges"
    folder.mkdir()
    settings = {
        "inputs": (str(folder),),
        "outputs": ("embedding", "trajectory"),
        # By ALS: slices of many frequencies, which a warm start serves.
        "trajectory_by": by,
        "mode": "threads",
        "workers": 1,
        "keep": 1,
        "report": False,
        **stream.settings,
    }
    middle = nights // 2
    both = sorted({0, 1, middle, middle + 1, nights - 2, nights - 1} & set(range(nights)))
    cosines: dict[str, list[float]] = {"chain": [], "fresh": []}
    in_time: dict[str, list[float]] = {"chain": [], "fresh": []}
    last_step: dict[str, tuple[int, dict[Any, Any]]] = {}
    seconds: dict[str, list[float]] = {"chain": [], "fresh": []}
    solving: dict[str, list[float]] = {"chain": [], "fresh": []}
    iterations = {"chain": 0, "fresh": 0}
    vectors: dict[tuple[str, int], dict[Any, Any]] = {}
    models: dict[str, Any] = {}
    f1: dict[str, float] = {}
    excess = []
    lines: list[dict[str, Any]] = []
    for step in range(stream.window):
        stream.edges(step).write_parquet(folder / f"{step:04d}.parquet")
    for night in range(nights):
        step = stream.window + night
        # The coming steps test the vectors; the first of them is there, and must not be read.
        coming = pl.concat([stream.edges(step + ahead) for ahead in range(AHEAD)])
        stream.edges(step).write_parquet(folder / f"{step:04d}.parquet")
        objectives = {}
        for way in ("chain", "fresh") if night in both else ("chain",):
            given = {"out": str(base / way), "as_of": str(stream.moment(step)), "fresh": way == "fresh"}
            config = RefreshConfig.read({**settings, **given})
            began = time.perf_counter()
            done = refresh(config)
            spent = time.perf_counter() - began
            if way == "chain":
                lines.append(done.to_json())
            run = load_run(base / way)
            ids = run.nodes.polars().collect()["node_id"]
            vectors[way, night] = dict(zip(ids, run.embedding.numpy(), strict=True))
            vectors.pop((way, night - 2), None)
            objectives[way] = float(run.fit.polars().collect()["objective"].sum())
            if night and night in both:
                seconds[way].append(spent)
                solving[way].append(done.manifest.metrics.solve_seconds)
                iterations[way] += done.manifest.metrics.iterations
            if (way, night - 1) in vectors:
                cosines[way].append(median_cosine(vectors[way, night], vectors[way, night - 1]))
            if night in both:
                Z = run.trajectory.dask()
                if last_step.get(way, (-2,))[0] == night - 1:
                    now = dict(zip(ids, Z[-2].compute(), strict=True))
                    in_time[way].append(median_cosine(now, last_step[way][1]))
                last_step[way] = night, dict(zip(ids, Z[-1].compute(), strict=True))
            if night == 0:
                models[way] = train(*examples(run, coming, seed=0))
            if night == nights - 1:
                X, y = examples(run, coming, seed=1)
                f1[way] = float(f1_score(y, models[way].predict(X), average="micro"))
                f1["retrained"] = retrained(X, y)
        if night and night in both:
            excess.append(objectives["chain"] / objectives["fresh"] - 1)
    return {
        "cosine_aligned": float(np.median(cosines["chain"])),
        "cosine_aligned_worst": min(cosines["chain"]),
        "cosine_unaligned": float(np.median(cosines["fresh"])),
        "trajectory_aligned": float(np.median(in_time["chain"])),
        "trajectory_unaligned": float(np.median(in_time["fresh"])),
        "f1_aligned": f1["chain"],
        "f1_unaligned": f1["fresh"],
        "f1_retrained": f1["retrained"],
        # Medians: a neighbour on the machine must not decide.
        "warm_ratio": float(np.median(seconds["chain"]) / np.median(seconds["fresh"])),
        "warm_seconds": float(np.median(seconds["chain"])),
        "cold_seconds": float(np.median(seconds["fresh"])),
        "warm_solving": float(np.median(solving["chain"])),
        "cold_solving": float(np.median(solving["fresh"])),
        "warm_iterations": iterations["chain"],
        "cold_iterations": iterations["fresh"],
        "objective_excess": max(excess),
        **worst_nights(lines),
        "nights": nights,
    }


def worst_nights(lines: list[dict[str, Any]]) -> dict[str, float]:
    """Return how near good nights come to the limits of the gate, whose defaults stand well apart."""
    later = lines[1:]
    pairs = list(zip(lines, later, strict=False))
    return {
        "auc_median": float(np.median([line["auc"] for line in later])),
        "auc_drop_worst": max(line["auc_before"] - line["auc"] for line in later),
        "coverage_worst": min(line["active"] / before["active"] for before, line in pairs),
        "energy_drop_worst": max(before["energy_share"] - line["energy_share"] for before, line in pairs),
        "cosine_reference_last": later[-1]["cosine_reference"],
        "overlap10_median": float(np.median([line["overlap10"] for line in later])),
    }


def median_cosine(now: dict[Any, Any], before: dict[Any, Any]) -> float:
    """Return the median cosine of the nodes that have a vector in both."""
    shared = [node for node in now if node in before]
    moves = row_cosines(np.stack([now[node] for node in shared]), np.stack([before[node] for node in shared]))
    return float(np.nanmedian(moves))


def train(X: Any, y: Any) -> Any:
    """Return a classifier of links, of vectors as they are: scaling would magnify columns of noise."""
    return LogisticRegression(max_iter=3000).fit(X, y)


def retrained(X: Any, y: Any) -> float:
    """Return the F1 of a classifier trained on half of the last night's own examples, on the other half."""
    half = np.random.default_rng(0).permutation(len(y)) < len(y) // 2
    return float(f1_score(y[~half], train(X[half], y[half]).predict(X[~half]), average="micro"))


if __name__ == "__main__":
    main()
