"""The demonstration: a graph whose communities follow the clock and the week, and what a run finds in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from toffee_dist.batch.pipeline import start_run
from toffee_dist.errors import ConfigError
from toffee_dist.progress import Progress
from toffee_dist.report.page import open_page
from toffee_dist.results.run import load_run
from toffee_dist.settings import JobConfig
from toffee_dist.timegrid import name_period

N_NODES, N_COMMUNITIES, N_WEEKS, STEPS_A_DAY = 240, 4, 8, 4
# Links a node and step, and how much likelier they are inside a community.
DEGREE, CONTRAST = 1.5, 20.0
MONDAY = 1_767_571_200  # 2026-01-05 00:00 UTC
EDGES = "edges.parquet"


def make_graph(seed: int = 0) -> tuple[pl.DataFrame, NDArray[np.int64]]:
    """Draw the edges, and the community of every node at every step of six hours (steps, nodes).

    By day everybody is with their team, by night with their family, at weekends with their club.
    """
    rng = np.random.default_rng(seed)
    team, family, club = rng.integers(N_COMMUNITIES, size=(3, N_NODES))
    i, j = np.triu_indices(N_NODES, 1)
    size = N_NODES / N_COMMUNITIES
    between = DEGREE / (CONTRAST * (size - 1) + N_NODES - size)
    n_steps = N_WEEKS * 7 * STEPS_A_DAY
    labels = np.empty((n_steps, N_NODES), dtype=np.int64)
    frames = []
    for step in range(n_steps):
        day, quarter = divmod(step, STEPS_A_DAY)
        labels[step] = club if day % 7 >= 5 else team if quarter in (1, 2) else family
        chance = np.where(labels[step][i] == labels[step][j], CONTRAST * between, between)
        pairs = np.flatnonzero(rng.random(len(chance)) < chance)
        moments = MONDAY + step * 21_600 + rng.integers(21_600, size=len(pairs))
        frames.append(pl.DataFrame({"source": i[pairs], "target": j[pairs], "time": moments}))
    names = pl.concat(frames).with_columns(
        pl.format("person-{}", pl.col("source").cast(pl.String).str.zfill(3)).alias("source"),
        pl.format("person-{}", pl.col("target").cast(pl.String).str.zfill(3)).alias("target"),
        pl.from_epoch("time", time_unit="s"),
    )
    return names, labels


def run_demo(out: Path, say: Callable[[str], None], progress: Progress) -> None:
    """Make the edges, run the batch job on them, and compare what it found with what was planted."""
    # Saves start-up time.
    from sklearn.cluster import KMeans
    from sklearn.metrics import adjusted_rand_score

    edges = out / EDGES
    if out.exists() and any(out.iterdir()) and not edges.exists():
        raise ConfigError(
            "folder of the demonstration",
            got=f"{out}, which holds other things",
            allowed="a new folder, or one of an earlier demonstration",
            remedy="Choose another with --out.",
        )
    shutil.rmtree(out / "vectors", ignore_errors=True)
    out.mkdir(parents=True, exist_ok=True)
    frame, labels = make_graph()
    frame.write_parquet(edges)
    say(f"A made-up graph: {frame.height:,} meetings of {N_NODES} people over {N_WEEKS} weeks, in {edges}")
    say("  (by day everybody meets their team, by night their family, at weekends their club)")
    options = "--step 6h --undirected --rank 16 --outputs embedding,trajectory"
    say(f"$ toffee embed {edges} --out {out / 'vectors'} {options}")
    config = JobConfig(
        inputs=(str(edges),),
        out=str(out / "vectors"),
        step="6h",
        undirected=True,
        rank=16,
        outputs=("embedding", "trajectory"),
    )
    start_run(config, progress)
    run = load_run(out / "vectors")
    say(f"Results: {run.path}")
    for name, table in (("embedding", run.embedding), ("trajectory", run.trajectory)):
        say(f"  {name:<12}{table.shape}  {len(table.files)} Parquet part(s)")
    rhythms = run.frequencies.polars().filter(pl.col("chosen") & (pl.col("k") > 0))
    strongest = rhythms.sort("significance", descending=True).head(4).collect()
    say("Rhythms that stand out of the noise:")
    for row in strongest.iter_rows(named=True):
        say(f"  {name_period(row['period_steps'], run.grid)} (k = {row['k']})")
    one, over_time = run.embedding.numpy(), run.trajectory.numpy()
    say("Communities found by k-means (adjusted Rand index: 1 is exact, 0 is chance):")
    for name, step in (("Monday noon", 2), ("Monday night", 3), ("Saturday noon", 5 * STEPS_A_DAY + 2)):
        scores = [
            adjusted_rand_score(
                labels[step], KMeans(N_COMMUNITIES, n_init=10, random_state=0).fit_predict(vectors)
            )
            for vectors in (one, over_time[step])
        ]
        say(f"  {name:<14} {scores[0]:.2f} from its one vector, {scores[1]:.2f} from its vector then")
    report = run.folder.report
    if report.exists():
        shown = "it is in your browser" if open_page(report) else "open it in a browser"
        say(f"Watch it move: {report.absolute().as_uri()} ({shown})")
        say(f"Ask about any node: toffee serve {out / 'vectors'}")
