"""Is p what it says: nodes that keep still, and nodes that move, in generated graphs.

60 nodes in 3 communities over 40 days, rank 8. Without change, the test of one node (`kernels.movement`)
should say p < .05 in a twentieth of the graphs. Power: the share of graphs with p < .05 for a node that moves
to another community half-way, alone, with a third of its community, or with all nodes.

UASE and IPP have no p-value. Beside ours stands the share of graphs in which the same distance (Cramér–von
Mises), taken of their vectors, is above its 95 % quantile over graphs without change of the same degree: a
threshold that a user with one graph does not have.
"""

from __future__ import annotations

import argparse
from functools import cache
from typing import Literal

import numpy as np
from report import one_thread, print_json, print_table

from toffee_dist import TemporalTensor
from toffee_dist.kernels.filter import NodeEntries
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.movement import movement_p
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.models import find_model
from toffee_dist.settings import FitSettings, SolverSettings

RIVALS: dict[str, float | None] = {"uase": None, "ipp": 4.0}
NODES, STEPS, RANK = 60, 40, 8
Change = Literal["none", "one", "community", "all"]


def planted(change: Change, degree: float, seed: int) -> TemporalTensor:
    """Links within communities ten times as often as across; some nodes change theirs half-way."""
    rng = np.random.default_rng(seed)
    group = rng.permutation(np.arange(NODES) % 3)
    moved = np.zeros(NODES, dtype=bool)
    moved[0] = change != "none"
    if change == "community":
        moved |= (group == group[0]) & (rng.random(NODES) < 1 / 3)
    elif change == "all":
        moved[:] = True
    later = np.where(moved, (group + 1 + rng.integers(0, 2, NODES)) % 3, group)
    a, b = np.triu_indices(NODES, 1)
    scale = degree / (NODES / 3 + 0.1 * NODES * 2 / 3)
    rows = []
    for t in range(STEPS):
        now = group if t < STEPS // 2 else later
        linked = rng.random(len(a)) < scale * np.where(now[a] == now[b], 1.0, 0.1)
        rows.append(np.stack([a[linked], b[linked], np.full(int(linked.sum()), t)]))
    i, j, t = np.concatenate(rows, axis=1)
    return TemporalTensor.from_events(
        i, j, t, n_nodes=NODES, n_steps=STEPS, directed=False, pair_weight="raw"
    )


def test_node(tensor: TemporalTensor, node: int, seed: int) -> float:
    (zero,) = solve_slices(tensor, [0], SolverSettings(rank=RANK))
    V = np.asarray(common_basis(zero).V)
    own = tensor.take_rows(node, node + 1)
    target, step = np.asarray(own.indices)[own.entry_pairs], np.asarray(own.steps, dtype=np.int64)
    entries = NodeEntries(1, STEPS, np.zeros(len(step), dtype=np.int64), target, step, np.asarray(own.values))
    others = np.bincount(tensor.steps, minlength=STEPS) - 2.0 * np.bincount(step, minlength=STEPS)
    return movement_p(entries, V[target], others, seed)


def rival_distance(tensor: TemporalTensor, node: int, model: str) -> float:
    """Return Σ_t ‖Σ_{s ≤ t} (Z(s) − mean)‖² of one node's vectors: what `movement_p` takes of entries."""
    fit = find_model(model).fit_in_time
    assert fit is not None
    found = fit(tensor, FitSettings(rank=RANK), RIVALS[model])
    Z = np.stack([found.vectors(t)[node] for t in range(STEPS)]).astype(np.float64)
    return float(np.square(np.cumsum(Z - Z.mean(axis=0), axis=0)).sum())


@cache
def rival_threshold(model: str, degree: float, n_graphs: int) -> float:
    """Return what 95 % of still graphs stay below."""
    seeds = range(20_000, 20_000 + n_graphs)
    return float(np.quantile([rival_distance(planted("none", degree, s), 0, model) for s in seeds], 0.95))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--graphs", type=int, default=1000)
    parser.add_argument("--power-graphs", type=int, default=100)
    parser.add_argument("--still-graphs", type=int, default=200, help="for the thresholds of rivals")
    parser.add_argument("--degrees", type=float, nargs="+", default=[0.25, 0.5, 1.0, 2.0])
    arguments = parser.parse_args()
    one_thread()
    still = [test_node(planted("none", 1.0, seed), 0, seed) for seed in range(arguments.graphs)]
    alarms = float(np.mean(np.array(still) < 0.05))
    print(f"without change: p < .05 in {alarms:.4f} of {arguments.graphs} graphs")
    power: dict[str, dict[str, dict[float, float]]] = {}
    changes: tuple[Change, ...] = ("one", "community", "all")
    for change in changes:
        power[change] = {model: {} for model in ("ours", *RIVALS)}
        for degree in arguments.degrees:
            seeds = range(10_000, 10_000 + arguments.power_graphs)
            found = [test_node(planted(change, degree, seed), 0, seed) for seed in seeds]
            power[change]["ours"][degree] = round(float(np.mean(np.array(found) < 0.05)), 3)
            for model in RIVALS:
                apart = [rival_distance(planted(change, degree, seed), 0, model) for seed in seeds]
                above = np.array(apart) > rival_threshold(model, degree, arguments.still_graphs)
                power[change][model][degree] = round(float(np.mean(above)), 3)
    header = ["who moves", "by", *(f"degree {degree:g}" for degree in arguments.degrees)]
    rows = [[change, model, *p.values()] for change, own in power.items() for model, p in own.items()]
    print_table("Power: share of graphs in which the node is found to move", header, rows)
    print_json({"false_alarms": alarms, "graphs": arguments.graphs, "power": power})


if __name__ == "__main__":
    main()
