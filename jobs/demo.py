"""The main job on a small planted graph: communities that are different on weekends.

Embeds 400 nodes over 70 days with their trajectory, and says what was found. Takes seconds, needs no input.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from planted import planted_graph
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from toffee_dist import Toffee


def main() -> None:
    """Fit, find the rhythm, and compare with what was planted."""
    graph = planted_graph("weekly", degree=1.3, seed=0)
    print(f"A planted graph: {graph.tensor}")
    model = Toffee(rank=16).fit(graph.tensor)
    print(f"One vector a node, from one frequency: {model.embedding_.shape}")
    Z = model.trajectory()
    kept = model.freqs_
    share = f"{len(kept.freqs)} of {len(kept.energies)} frequencies"
    print(f"One vector a node and day: {Z.shape}, from {share}; the others are noise")
    for k, period, _, score in kept.rhythms().iter_rows():
        print(f"  rhythm found: every {period:.1f} days (k = {k}, {score:.0f} deviations above the noise)")
    for day, name in ((0, "a weekday"), (5, "a weekend")):
        scores = [
            adjusted_rand_score(graph.labels[day], KMeans(4, n_init=10, random_state=0).fit_predict(vectors))
            for vectors in (model.embedding_, Z[day])
        ]
        print(f"Communities of {name}: {scores[0]:.2f} from the sum, {scores[1]:.2f} from its own vectors")
    print("(adjusted Rand index: 1 is exact, 0 is chance)")
    norms = np.linalg.norm(Z, axis=2).mean(axis=1)
    print(f"Mean length of a vector: {norms[:5].mean():.2f} on weekdays, {norms[5:7].mean():.2f} on weekends")


if __name__ == "__main__":
    main()
