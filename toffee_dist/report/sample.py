"""Which nodes a report shows: of a bounded number of row groups, so that no table is read whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from toffee_dist.storage.parquet import GROUP_ROWS, open_parquet, reading

# Nodes of the map: a page of them is quick to load and to hover over.
NODES = 4000
# Row groups that they come from at the most. A million nodes have 62: all are looked at.
GROUPS = 64
# Of nodes whose trajectory is on the page: at the most so many, so many pairs of a node and a step, and so
# many numbers that are read for them.
PATHS, PATH_POINTS, PATH_NUMBERS = 1500, 240_000, 16_000_000
# At least so many nodes have a path, however many steps there are: paths are of the last steps then.
FEWEST_PATHS = 20
# The best connected nodes always have theirs.
BEST_PATHS = 50

NodeRows = NDArray[np.int64]


def choose_nodes(nodes: Path, seed: int, count: int = NODES, groups: int = GROUPS) -> NodeRows:
    """Return rows of nodes with edges: half of them the best connected, then as many at random.

    Of a graph with more than `groups` row groups, these are the groups with the best connected nodes, and as
    many at random; only nodes in them are chosen.

    Parameters
    ----------
    nodes
        The table of nodes of a run.
    seed
        Of the random half.
    """
    with reading(nodes), open_parquet(nodes) as file:

        def degrees(group: int) -> NDArray[np.int64]:
            return np.asarray(file.read_row_group(group, columns=["degree"])["degree"].to_numpy())

        chosen = list(range(file.num_row_groups))
        if len(chosen) > groups:
            rng = np.random.default_rng([seed, 0])
            largest = np.array([degrees(group).max() for group in chosen])
            best = np.argsort(-largest, kind="stable")
            others = rng.permutation(best[groups // 2 :])[: groups - groups // 2]
            chosen = sorted([*best[: groups // 2].tolist(), *others.tolist()])
        starts = np.cumsum([0, *(file.metadata.row_group(g).num_rows for g in range(file.num_row_groups))])
        found = [degrees(group) for group in chosen]
        rows = np.concatenate(
            [starts[group] + np.arange(len(own)) for group, own in zip(chosen, found, strict=True)]
        )
    degree = np.concatenate(found)
    rows, degree = rows[degree > 0], degree[degree > 0]
    order = rows[np.argsort(-degree, kind="stable")]
    best, rest = order[: count // 2], order[count // 2 :]
    rest = np.random.default_rng([seed, 1]).permutation(rest)[: count - len(best)]
    return np.concatenate([best, rest]).astype(np.int64)


def choose_paths(
    rows: NodeRows, n_steps: int, rank: int, seed: int, groups: int = GROUPS
) -> tuple[NodeRows, int]:
    """Return which of these nodes have their trajectory on the page, and how many of the last steps of it.

    A node's steps are neighbours in the table: nodes of few row groups are chosen, so that little is read.
    """
    points = min(PATH_POINTS, PATH_NUMBERS // rank)
    count = min(max(points // n_steps, FEWEST_PATHS), PATHS)
    steps = min(n_steps, max(1, points // count))
    others = np.random.default_rng([seed, 2]).permutation(rows[BEST_PATHS:])
    order = np.concatenate([rows[:BEST_PATHS], others])
    group = order * n_steps // GROUP_ROWS
    # In the order of first appearance.
    _, first = np.unique(group, return_index=True)
    near = np.isin(group, group[np.sort(first)[:groups]])
    return order[near][:count], steps
