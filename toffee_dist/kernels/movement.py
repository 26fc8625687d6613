"""Does a node move, or is it noise: a test of one node's links in time, with a p-value that holds.

If a node's links came at any time, as those of the others do (P(t): the share of their entries up to t), what
it has done up to t would be P(t) of all that it does. The statistic is how far it is from that, in the basis,

    D = Σ_l Σ_t ( Σ_{entries up to t} w·V_jl − P(t)·Σ_entries w·V_jl )²

(a Cramér–von Mises distance), and its null distribution comes from drawing the steps of the node's own
entries anew, those of a pair at different steps. Neither the basis of the sum nor the weights of pairs depend
on when entries came, so p is exact. A kernel learnt from the same entries would let chance through (measured:
p < .05 in .20 of graphs without change). It sees changes and drifts; a rhythm returns too quickly to be one.
"""

from __future__ import annotations

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.filter import NodeEntries
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Floats, Ints

# Draws of the null: p is known to about ±.007 at .05.
DRAWS = 999
# A pair that links at nearly every step cannot be drawn apart for long.
REDRAWS = 8


def movement_p(entries: NodeEntries, V: Tall, others: Floats, seed: int = 0, draws: int = DRAWS) -> float:
    """Return how often a node whose links come at any time moves as far as this one.

    Parameters
    ----------
    entries
        Of one node.
    V : (entries, r)
        The rows of the basis of their targets.
    others : (T,)
        Entries of the other nodes at every step; with its own, a node would be nearer to them than a draw is.
    seed
        Of the draws.
    """
    total = float(others.sum())
    if not len(entries.step) or total <= 0:
        return 1.0
    p = others / total
    rng = np.random.default_rng(seed)
    # The first row is what happened.
    steps = np.vstack([entries.step, _draw(rng, p, entries.target, draws)])
    starts = np.arange(0, steps.size + 1, steps.shape[1])
    found = np.zeros(len(steps))
    for c in range(V.shape[1]):
        weights = entries.value.astype(np.float64) * V[:, c]
        data = np.tile(weights, len(steps))
        placed = sp.csr_matrix((data, steps.ravel(), starts), shape=(len(steps), len(p))).toarray()
        apart = np.cumsum(placed, axis=1) - np.cumsum(p) * weights.sum()
        found += np.square(apart).sum(axis=1)
    # Equal ones count as further: rounding must not make a node move.
    return float((1 + (found[1:] >= found[0] * (1 - 1e-9)).sum()) / (draws + 1))


def _draw(rng: np.random.Generator, p: Floats, target: Ints, draws: int) -> NDArray[np.int64]:
    """Draw a step for every entry; an entry that meets another of its pair is drawn again, a few times."""
    steps = rng.choice(len(p), (draws, len(target)), p=p)
    for _ in range(REDRAWS):
        keys = np.asarray(target, dtype=np.int64) * len(p) + steps
        order = np.argsort(keys, axis=1, kind="stable")
        ordered = np.take_along_axis(keys, order, axis=1)
        again = np.zeros(keys.shape, dtype=bool)
        np.put_along_axis(again[:, :], order[:, 1:], ordered[:, 1:] == ordered[:, :-1], axis=1)
        if not again.any():
            break
        steps[again] = rng.choice(len(p), int(again.sum()), p=p)
    return steps
