"""Patterns in time that many nodes share: two kinds of days, a change half-way.

The filter in time treats all moments alike: a gain per frequency. What many nodes do together need not be a
wave, and all they do together says more of it than one frequency does. With y_i(t) the rows of a node on the
basis, less their part along the node's own mean (being busy is no pattern),

    G(s, t) = Σ_i y⊥_i(s)·y⊥_i(t) − [s = t]·Σ_entries w²·‖V⊥_j‖²

is zero on average if events are unrelated: the diagonal that is taken away is exactly what they leave.
Chance then moves its eigenvalues to both sides alike, and only what is shared has large positive ones: the
most negative one tells how far chance reaches. The patterns are the eigenvectors of those well above that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.entries import ActiveRows, NodeEntries
from toffee_dist.kernels.filter import TimeKernel, learn_kernel
from toffee_dist.kernels.gains import no_patterns
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# An eigenvalue counts from this many times the size of the most negative one. The largest of 48 planted
# graphs without a pattern (mean degree .33 to 2.6 per day) was 1.4 times that, of 48 with a weekly one at
# least 3.3; of 480 graphs of 60 nodes, half of them with heavy tails, one was above (2.6). On hidden entries
# of validation parts, patterns of school (3.8) add .003 to "when", one of email (2.0) takes .0005 from both
# marks, and hypertext, workplace and fb-forum have none (.4 to .5).
STANDS_OUT = 2.5
MOST_PATTERNS = 8
# Of few rows chance reaches further up than down: (2 + √γ) / (2 − √γ) times as far, γ steps per row. With
# 16 rows per step that is 1.3; with fewer, no patterns are looked for.
ROWS_PER_STEP = 16
# Windows with more steps are filtered by frequencies alone: a matrix of steps × steps is too large.
MOST_STEPS = 2048
# Products of two numbers that the sums may take, over all blocks: about a second.
PRODUCTS = 1e11
# Numbers of steps × nodes × directions that are multiplied at once, and entries whose noise is added up.
NUMBERS, ENTRIES = 1 << 22, 1 << 14


def looks_for_patterns(n_steps: int, causal: bool) -> bool:
    """Whether patterns are looked for: a causal filter would see the future in them."""
    return not causal and 3 <= n_steps <= MOST_STEPS


@dataclass(frozen=True, eq=False)
class PatternSums:
    """What patterns come from; those of blocks add up.

    Attributes
    ----------
    matrix : (T, T), G
    rows
        Of how many numbers per step: nodes times directions.
    """

    matrix: Floats
    rows: int

    def __add__(self, other: PatternSums) -> PatternSums:
        return PatternSums(self.matrix + other.matrix, self.rows + other.rows)


def pattern_sums(entries: NodeEntries, take: Callable[[Ints], Tall], blocks: int = 1) -> PatternSums:
    """Return the sums of the busiest nodes of a block.

    Parameters
    ----------
    entries
        Of the nodes of the block.
    take
        Gives the rows of the basis of some targets.
    blocks
        How many blocks there are: each has its part of `PRODUCTS`.
    """
    T = entries.n_steps
    own = _busiest(entries, blocks, np.shape(take(entries.target[:1]))[1])
    targets, column = np.unique(entries.target[own], return_inverse=True)
    # Nodes count from 0.
    nodes, node = np.unique(entries.node[own], return_inverse=True)
    V, step, value = np.asarray(take(targets)), entries.step[own], entries.value[own].astype(np.float64)
    G = np.zeros((T, T))
    active, row = np.unique(node.astype(np.int64) * T + step, return_inverse=True)
    shape = (len(active), len(V))
    Y = np.asarray(sp.csr_matrix((value.astype(V.dtype), (row, column)), shape=shape) @ V)
    at, when = np.divmod(active, T)
    # The direction of a node's mean.
    starts = np.searchsorted(at, np.arange(len(nodes)))
    unit = np.add.reduceat(Y, starts, axis=0) if len(nodes) else Y
    size = np.linalg.norm(unit, axis=1, keepdims=True)
    np.divide(unit, size, out=unit, where=size > 0)
    squares, noise = np.square(V).sum(axis=1), np.zeros(T)
    for part in _slices(len(value), ENTRIES):
        along = np.einsum("er,er->e", V[column[part]], unit[node[part]])
        left = np.square(value[part]) * (squares[column[part]] - np.square(along))
        noise += np.bincount(step[part], left, minlength=T)
    scale = float(np.abs(Y).max(initial=0.0)) or 1.0
    at_once = max(1, NUMBERS // (T * max(V.shape[1], 1)))
    for part in _slices(len(nodes), at_once):
        rows = slice(*np.searchsorted(at, [part.start, part.stop]))
        y, mine = Y[rows], unit[at[rows]]
        y = y - np.einsum("ar,ar->a", y, mine)[:, None] * mine
        F = np.zeros((T, part.stop - part.start, V.shape[1]), dtype=np.float32)
        F[when[rows], at[rows] - part.start] = y / scale
        flat = F.reshape(T, -1)
        G += flat @ flat.T
    G *= scale**2
    G[np.diag_indices(T)] -= noise
    return PatternSums(G, len(nodes) * V.shape[1])


def _busiest(entries: NodeEntries, blocks: int, rank: int) -> NDArray[np.bool_]:
    """Return which entries are of the nodes with most of them, as many as the products allow."""
    most = max(1, int(PRODUCTS / blocks / (entries.n_steps**2 * max(rank, 1))))
    counts = np.bincount(entries.node, minlength=entries.n_nodes)
    chosen = np.zeros(entries.n_nodes, dtype=bool)
    chosen[np.argsort(-counts, kind="stable")[:most]] = True
    return np.asarray(chosen[entries.node])


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def find_patterns(sums: PatternSums) -> Floats:
    """Return the patterns, (T, q): orthonormal, without their mean, those of most energy first; q may be 0.

    Parameters
    ----------
    sums
        Of all blocks.
    """
    T = len(sums.matrix)
    size = float(np.abs(sums.matrix).max(initial=0.0))
    if not size or sums.rows < ROWS_PER_STEP * T:
        return no_patterns(T)
    G = sums.matrix / size
    G -= G.mean(axis=0)
    G -= G.mean(axis=1, keepdims=True)
    values, vectors = np.linalg.eigh(G)
    count = min(int((values > STANDS_OUT * max(-values[0], 0.0)).sum()), MOST_PATTERNS)
    found = vectors[:, ::-1][:, :count]
    return np.asarray(found * np.where(found[np.abs(found).argmax(axis=0), np.arange(count)] < 0, -1.0, 1.0))


def learn_filter(
    tensor: TemporalTensor, V: Tall, *, causal: bool = False, strength: float = 1.0
) -> tuple[ActiveRows, TimeKernel]:
    """Return the rows of a graph in memory on a basis, and its kernel in time, with its patterns."""
    T, entries = tensor.n_steps, NodeEntries.of(tensor)
    rows = entries.project(lambda targets: V[targets])
    patterns = no_patterns(T)
    if looks_for_patterns(T, causal):
        patterns = find_patterns(pattern_sums(entries, lambda targets: V[targets]))
    return rows, learn_kernel([rows], T, causal=causal, strength=strength, patterns=patterns)
