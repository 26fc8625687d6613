"""Is p what it says: graphs without change, and graphs in which somebody moves.

60 nodes in 3 communities over 40 days, rank 8. Without change, every test should say p < .05 in a twentieth
of the graphs: one node (`mover`), one node's rhythm (`node_rhythm`), the graph's rhythm (`rhythm`), a change
of it (`rhythm_change`), the first community and the graph as a whole (`moment`); and the list of `toffee
changes` at a rate of .05 should have anything at all in a twentieth (`any`). Several densities, and
`heavy`: activities of nodes with a power-law tail. Power: the share of graphs with p < .05 for a node that
moves to another community half-way, alone, with a third of its community, or with all nodes.

UASE and IPP have no p-value. Beside ours stands the share of graphs in which the same distance (Cramér–von
Mises), taken of their vectors, is above its 95 % quantile over graphs without change of the same degree: a
threshold that a user with one graph does not have.
"""

from __future__ import annotations

import argparse
from functools import cache
from typing import Any, Literal

import numpy as np
from report import one_thread, print_json, print_table

from toffee_dist import TemporalTensor
from toffee_dist.batch.changes import read_clock, watched_sums
from toffee_dist.kernels.align import unit_rows
from toffee_dist.kernels.changes import (
    Clock,
    Events,
    compare_rhythms,
    find_moments,
    find_rhythms,
    find_shift,
    node_changes,
    pair_variances,
)
from toffee_dist.kernels.communities import find_communities
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.gauge import common_basis
from toffee_dist.kernels.solvers import solve_slices
from toffee_dist.kernels.spectrum import node_energies
from toffee_dist.models import find_model
from toffee_dist.results.rhythm import rhythm_chances
from toffee_dist.settings import FitSettings, SolverSettings
from toffee_dist.storage.changes import shared_rates

RIVALS: dict[str, float | None] = {"uase": None, "ipp": 4.0}
NODES, STEPS, RANK = 60, 40, 8
Change = Literal["none", "one", "community", "all"]


def planted(change: Change, degree: float, seed: int, heavy: bool = False) -> TemporalTensor:
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
    busy = np.sqrt(rng.pareto(1.5, NODES) + 0.3) if heavy else np.ones(NODES)
    factor = scale * busy[a] * busy[b] / np.mean(busy) ** 2
    rows = []
    for t in range(STEPS):
        now = group if t < STEPS // 2 else later
        linked = rng.random(len(a)) < factor * np.where(now[a] == now[b], 1.0, 0.1)
        rows.append(np.stack([a[linked], b[linked], np.full(int(linked.sum()), t)]))
    i, j, t = np.concatenate(rows, axis=1)
    return TemporalTensor.from_events(
        i, j, t, n_nodes=NODES, n_steps=STEPS, directed=False, pair_weight="raw"
    )


def try_graph(tensor: TemporalTensor, seed: int, *, everything: bool = True) -> dict[str, float]:
    """Return p of every test of a graph; `any` is the smallest q of the list."""
    (zero,) = solve_slices(tensor, [0], SolverSettings(rank=RANK))
    basis = common_basis(zero)
    V = np.asarray(basis.V, dtype=np.float64)
    pair = tensor.entry_pairs
    entries = NodeEntries(
        NODES,
        STEPS,
        tensor.sources[pair].astype(np.int64),
        np.asarray(tensor.indices)[pair],
        np.asarray(tensor.steps, dtype=np.int64),
        np.asarray(tensor.values, dtype=np.float64),
    )
    clock: Clock = read_clock(tensor)
    nodes = node_changes(entries, lambda rows: V[rows], clock)
    found: dict[str, Any] = {"mover": nodes.p[0]}
    if not everything:
        return found
    source, target, v, c, _ = pair_variances(entries, clock.spread)
    events = Events(STEPS, np.asarray(pair), entries.step, np.asarray(entries.value), v, c)
    once = source <= target
    labels, _ = find_communities(unit_rows(basis.embedding()), seed)
    graph, *groups = watched_sums(events.of(once), source[once], target[once], basis.U, V, labels, False)
    moments = find_moments(graph, clock)
    communities = np.array([find_shift(sums, clock).p for sums in groups])
    steps = np.array([shift.step for shift in moments if shift.p <= 0.05 and shift.step > 0], dtype=np.int64)
    changed, rhythms = compare_rhythms(graph.rows, graph.G, steps), find_rhythms(graph.rows, graph.G)
    own, _ = rhythm_chances(node_energies(tensor.take_rows(0, 1))[0].astype(np.float64), STEPS)
    moment = min(shift.p for shift in moments)
    q = [shared_rates(p).min() for p in (nodes.p[nodes.tested], communities, changed.p, np.array([moment]))]
    return found | {
        "node_rhythm": float(own.min()),
        "rhythm": _any(rhythms.p),
        "rhythm_change": _any(changed.p),
        "community": communities[0],
        "moment": moment,
        "any": min(q),
    }


def _any(p: Any) -> float:
    """Return the chance of the smallest of independent ones."""
    return float(1 - (1 - p.min()) ** len(p))


def rival_distance(tensor: TemporalTensor, node: int, model: str) -> float:
    """Return Σ_t ‖Σ_{s ≤ t} (Z(s) − mean)‖² of one node's vectors: what our test takes of entries."""
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
    alarms: dict[str, dict[str, float]] = {}
    kinds = [*((f"degree {degree:g}", degree, False) for degree in arguments.degrees), ("heavy", 1.0, True)]
    for name, degree, heavy in kinds:
        ps = [try_graph(planted("none", degree, seed, heavy), seed) for seed in range(arguments.graphs)]
        alarms[name] = {key: round(float(np.mean([p[key] < 0.05 for p in ps])), 4) for key in ps[0]}
        print(name, alarms[name], flush=True)
    header = ["without change", *next(iter(alarms.values()))]
    print_table(
        f"Share of {arguments.graphs} graphs without change with p < .05 (any: a list at a rate of .05)",
        header,
        [[name, *found.values()] for name, found in alarms.items()],
    )
    power: dict[str, dict[str, dict[float, float]]] = {}
    changes: tuple[Change, ...] = ("one", "community", "all")
    for change in changes:
        power[change] = {model: {} for model in ("ours", *RIVALS)}
        for degree in arguments.degrees:
            seeds = range(10_000, 10_000 + arguments.power_graphs)
            graphs = [planted(change, degree, seed) for seed in seeds]
            found = [try_graph(g, s, everything=False)["mover"] for g, s in zip(graphs, seeds, strict=True)]
            power[change]["ours"][degree] = round(float(np.mean(np.array(found) < 0.05)), 3)
            for model in RIVALS:
                apart = np.array([rival_distance(graph, 0, model) for graph in graphs])
                above = apart > rival_threshold(model, degree, arguments.still_graphs)
                power[change][model][degree] = round(float(np.mean(above)), 3)
    header = ["who moves", "by", *(f"degree {degree:g}" for degree in arguments.degrees)]
    rows = [[change, model, *p.values()] for change, own in power.items() for model, p in own.items()]
    print_table("Power: share of graphs in which the node is found to move", header, rows)
    print_json({"false_alarms": alarms, "graphs": arguments.graphs, "power": power})


if __name__ == "__main__":
    main()
