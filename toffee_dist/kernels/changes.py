"""What has changed, and whether that may be chance: nodes, communities, the whole graph, rhythms.

One idea serves all of them. An event (i, j, t) adds a vector x to whatever is watched: V_j to node i, V_i and
V_j to their communities, the products of both ends' rows to the graph. If nothing changes, the events of a
pair come at any time, as all events do (P(t): the share of them up to t). Then

    B(t) = Σ_{events up to t} x − P(t)·Σ_events x,        D = Σ_t p(t)·‖B(t)‖²      (Cramér and von Mises)

is a Brownian bridge per direction. Its covariance over the directions is known from the events alone,

    Γ = G − (g Sᵀ + S gᵀ)/n + S Sᵀ·v/n²,     G = Σ_pairs v_p x xᵀ,  g = Σ_pairs c_p x,  S = Σ_events x

with v_p = Σw² − ((Σw)² − Σw²)/(T'−1) the variance of a pair whose m events come at m different steps,
c_p its covariance with its own number of events, n events in all with variance v, and T' = 1/Σp². So D is
distributed like Σ γ_l·λ_m·χ²_1, γ the eigenvalues of Γ, λ those of the bridge at the steps:
`kernels.chance` has its tail.

Rhythms: the transform of unrelated events has covariance G at every frequency, so the energy at a frequency
is Σ γ_l·χ²_2/2, and so is that of the difference between two halves of the window, whatever rhythm both have.
Real events come in bursts, which raises all frequencies: the floor is raised to the median, never lowered.

Neither V (of the sum over time) nor the weights of pairs depend on when events came; a kernel learnt from the
same events would (measured: p < .05 in .20 of graphs without change).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import scipy.sparse as sp
from numpy.typing import NDArray

from toffee_dist.kernels.chance import quadratic_tail
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.solvers.base import Tall
from toffee_dist.tensor import Floats, Ints

# Leading directions of the basis in which nodes and communities are watched: a test loses power with more.
NODE_DIRECTIONS = 16
# Of the graph as a whole, on each side: pairs of them are 36 (undirected) or 64 numbers per step.
GRAPH_DIRECTIONS = 8
# Nodes with fewer entries are not tested: the tail is that of a sum of many.
FEWEST_ENTRIES = 5
# Eigenvalues of the bridge that are taken one by one; they fall like 1/m², the rest adds only to the mean.
BRIDGE_TERMS = 16
# Of few events the variance of D is below its limit, and is taken to be at least this share of it.
LEAST_VARIANCE = 0.25
# Steps that the bridge is computed of at the most; more are joined.
BRIDGE_STEPS = 512
# The graph is cut again at moments up to this chance; also the largest rate that may be asked for.
LARGEST_RATE = 0.2
# Segments between moments have at least so many steps, and at least this share of all.
FEWEST_STEPS, SHORTEST = 4, 1 / 16
# With fewer frequencies the median is no floor.
FREQS_FOR_FLOOR = 8
# Nodes whose d×d matrices are in memory at once.
NODES_AT_ONCE = 4096
# Numbers of pairs times directions² that are made at once.
AT_ONCE = 1 << 22


@dataclass(frozen=True, eq=False)
class Clock:
    """When events come: those of all nodes, each pair counted once.

    Parameters
    ----------
    activity : (T,)
        Events per step.
    variance
        Of their number, v: Σ_pairs m·(1 − (m−1)/(T'−1)); the number itself where pairs are rare.
    """

    activity: Floats
    variance: float

    @cached_property
    def events(self) -> float:
        """n: how many there are."""
        return float(self.activity.sum())

    @cached_property
    def share(self) -> Floats:
        """p(t)."""
        return np.asarray(self.activity / max(self.events, 1.0), dtype=np.float64)

    @cached_property
    def upto(self) -> Floats:
        """P(t), with P before the first step in front: (T+1)."""
        return np.concatenate([[0.0], np.cumsum(self.share)])

    @cached_property
    def spread(self) -> float:
        """T' = 1/Σp²: over how many steps events are spread."""
        return float(1.0 / np.square(self.share).sum()) if self.events else 1.0

    @cached_property
    def bridge(self) -> tuple[Floats, float]:
        """All λ_m, largest first, and the variance of k(s, s), the square of one event's own bridge."""
        p = self.share
        if len(p) > BRIDGE_STEPS:
            p = np.add.reduceat(p, np.linspace(0, len(p), BRIDGE_STEPS, endpoint=False).astype(int))
        P, root = np.cumsum(p), np.sqrt(p)
        covariance = np.minimum(P[:, None], P) - P[:, None] * P
        found = np.maximum(np.linalg.eigvalsh(root[:, None] * covariance * root)[::-1], 0.0)
        # k(s, s) = Σ_t p(t)·(1[s ≤ t] − P(t))²
        after = np.cumsum((p * (1 - 2 * P))[::-1])[::-1]
        own = after + float((p * P**2).sum())
        return found, float(p @ np.square(own) - (p @ own) ** 2)

    def chance(self, distance: Floats, gammas: Floats, fourth: Floats) -> Floats:
        """Return P(Σ γ_l·λ_m·χ²_1 ≥ D), row by row of the γ; 1 where all γ are zero.

        Of few events D varies less: the term of an event with itself hardly does. Its exact variance is
        2·Σγ²·Σλ² − Σ_events ‖x‖⁴·(2·Σλ² − Var k(s,s)); D is stretched about its mean to that of the limit.

        Parameters
        ----------
        distance : (rows,)
            D.
        gammas : (rows, d)
            Eigenvalues of Γ.
        fourth : (rows,)
            Σ_events ‖x‖⁴.
        """
        lambdas, own = self.bridge
        gammas = np.maximum(gammas, 0.0)
        total, squares = gammas.sum(axis=-1), np.square(gammas).sum(axis=-1)
        limit = 2 * squares * float(np.square(lambdas).sum())
        missing = fourth * max(2 * float(np.square(lambdas).sum()) - own, 0.0)
        ratio = 1 - np.divide(missing, limit, out=np.zeros_like(limit), where=limit > 0)
        mean = total * float(lambdas.sum())
        stretched = mean + (distance - mean) / np.sqrt(np.clip(ratio, LEAST_VARIANCE, 1.0))
        rest = total * float(lambdas[BRIDGE_TERMS:].sum())
        # A grain of rounding is no movement.
        still = distance <= 1e-9 * total
        return np.where(still, 1.0, quadratic_tail(stretched - rest, gammas, lambdas[:BRIDGE_TERMS]))


def pair_variances(entries: NodeEntries, spread: float) -> tuple[Ints, Ints, Floats, Floats, Floats]:
    """Return node and target of every pair, v_p, c_p, and the variance of its number of events.

    Parameters
    ----------
    entries
        Sorted by node, then target.
    spread
        T': over how many steps events are spread.
    """
    key = np.flatnonzero((np.diff(entries.node) != 0) | (np.diff(entries.target.astype(np.int64)) != 0)) + 1
    first = np.concatenate([[0], key]).astype(np.int64) if len(entries.node) else np.empty(0, np.int64)
    value = entries.value.astype(np.float64)
    total, squares = (np.add.reduceat(part, first) if len(first) else part for part in (value, value**2))
    count = np.diff(np.append(first, len(entries.node))).astype(np.float64)
    others = max(spread - 1.0, 1.0)
    v = np.maximum(squares - (np.square(total) - squares) / others, 0.0)
    room = np.maximum(1 - (count - 1) / others, 0.0)
    return entries.node[first], entries.target[first], v, total * room, count * room


@dataclass(frozen=True, eq=False)
class NodeChanges:
    """Of every node of a block: how likely chance is, the first step of what is new, and how different it is.

    Attributes
    ----------
    p : 1 of nodes that were not tested
    step : −1 of nodes that were not tested
    size : ‖after − before‖ / (‖after‖ + ‖before‖), of mean vectors per step; 1: nothing in common
    tested : whether it has enough entries
    """

    p: Floats
    step: NDArray[np.int32]
    size: NDArray[np.float32]
    tested: NDArray[np.bool_]


def node_changes(entries: NodeEntries, take: Callable[[Ints], Tall], clock: Clock) -> NodeChanges:
    """Test every node of a block.

    Parameters
    ----------
    entries
        Sorted by node, target, step.
    take
        Gives the rows of the basis of some targets, `NODE_DIRECTIONS` of them.
    clock
        Of all nodes.
    """
    n = entries.n_nodes
    found = NodeChanges(np.ones(n), np.full(n, -1, np.int32), np.zeros(n, np.float32), np.zeros(n, bool))
    if clock.events <= 0:
        return found
    counts = np.bincount(entries.node, minlength=n)
    found.tested[:] = counts >= FEWEST_ENTRIES
    nodes = np.flatnonzero(found.tested)
    ends = np.concatenate([[0], np.cumsum(counts)])
    for start in range(0, len(nodes), NODES_AT_ONCE):
        some = nodes[start : start + NODES_AT_ONCE]
        kept = np.concatenate([np.arange(ends[node], ends[node + 1]) for node in some])
        number = np.repeat(np.arange(len(some)), counts[some])
        part = NodeEntries(
            len(some), entries.n_steps, number, entries.target[kept], entries.step[kept], entries.value[kept]
        )
        found.p[some], found.step[some], found.size[some] = _test_nodes(part, take, clock)
    return found


def _test_nodes(
    entries: NodeEntries, take: Callable[[Ints], Tall], clock: Clock
) -> tuple[Floats, NDArray[np.int32], Floats]:
    """Return p, the first step of what is new (−1: none) and how different it is, of nodes with entries."""
    n, T = entries.n_nodes, entries.n_steps
    rows = entries.project(lambda targets: np.asarray(take(targets), dtype=np.float64))
    covariances, fourth = _node_covariances(entries, take, clock)
    gammas = _eigenvalues(covariances)
    ends = np.searchsorted(rows.node, np.arange(n + 1))
    first, last = ends[:-1], ends[1:]
    running = np.concatenate([np.zeros((1, rows.rank)), np.cumsum(rows.values, axis=0)])
    total = running[last] - running[first]
    S = running[1:] - running[first][rows.node]
    following = np.append(rows.step[1:], T)
    following[last - 1] = T
    # Σ_t p‖S(t)‖² − 2 Σ_t pP⟨S(t), S⟩ + ‖S‖² Σ_t pP², S(t) being constant from one active step to the next.
    P, share = clock.upto, clock.share
    weighted = np.concatenate([[0.0], np.cumsum(share * P[1:])])
    inner = np.einsum("ir,ir->i", S, total[rows.node])
    squares = np.square(S).sum(axis=1)
    own = squares * (P[following] - P[rows.step])
    own -= 2 * inner * (weighted[following] - weighted[rows.step])
    length = np.square(total).sum(axis=1)
    distance = np.bincount(rows.node, own, minlength=n) + length * float((share * P[1:] ** 2).sum())
    p = clock.chance(np.maximum(distance, 0.0), gammas, fourth)
    # ‖B(t)‖² is convex in P between two active steps: largest at an end, of which the first begins at step 0.
    begin = rows.step[first]
    node = np.concatenate([rows.node, rows.node, np.arange(n)])
    at = np.concatenate([rows.step + 1, following, begin])
    before = np.concatenate([S, S, np.zeros((n, rows.rank))])
    bridge = np.square(before - P[at][:, None] * total[node]).sum(axis=1)
    order = np.lexsort((-at, bridge, node))
    best = order[np.searchsorted(node[order], np.arange(n), side="right") - 1]
    step = at[best].astype(np.int32)
    known = (step > 0) & (step < T)
    size = difference(before[best], total - before[best], step, T)
    return p, np.where(known, step, -1).astype(np.int32), np.where(known, size, 0.0)


def _eigenvalues(G: Floats) -> Floats:
    return np.asarray(np.linalg.eigvalsh(G), dtype=np.float64)


def difference(before: Floats, after: Floats, step: Ints, n_steps: int) -> Floats:
    """Return ‖a − b‖ / (‖a‖ + ‖b‖) of mean vectors per step before and after, row by row; from 0 to 1."""
    b, a = before / np.maximum(step, 1)[:, None], after / np.maximum(n_steps - step, 1)[:, None]
    scale = np.linalg.norm(a, axis=1) + np.linalg.norm(b, axis=1)
    return np.asarray(np.divide(np.linalg.norm(a - b, axis=1), scale, out=np.zeros(len(a)), where=scale > 0))


def _node_covariances(
    entries: NodeEntries, take: Callable[[Ints], Tall], clock: Clock
) -> tuple[Floats, Floats]:
    """Return Γ of every node, (nodes, d, d), and Σ ‖x‖⁴ of its entries."""
    node, target, v, c, _ = pair_variances(entries, clock.spread)
    wanted, column = np.unique(target, return_inverse=True)
    V = np.asarray(take(wanted), dtype=np.float64)
    d = V.shape[1]
    n, starts = entries.n_nodes, np.searchsorted(node, np.arange(entries.n_nodes + 1))
    G = np.zeros((n, d * d))
    size = max(1, AT_ONCE // (d * d))
    for begin in range(0, len(node), size):
        part = slice(begin, begin + size)
        x = V[column[part]]
        outer = (x[:, :, None] * x[:, None, :]).reshape(len(x), d * d)
        low, high = int(node[part][0]), int(node[part][-1]) + 1
        edges = np.clip(starts[low : high + 1] - begin, 0, len(x))
        G[low:high] += sp.csr_matrix((v[part], np.arange(len(x)), edges), shape=(high - low, len(x))) @ outer
    by_node = sp.csr_matrix((c, column, starts), shape=(n, len(V)))
    g = np.asarray(by_node @ V)
    value = entries.value.astype(np.float64)
    ends = np.searchsorted(entries.node, np.arange(n + 1))
    at = np.searchsorted(wanted, entries.target)
    S = np.asarray(sp.csr_matrix((value, at, ends), shape=(n, len(V))) @ V)
    lengths = np.square(V).sum(axis=1)
    fourth = np.asarray(
        np.bincount(entries.node, np.square(np.square(value) * lengths[at]), minlength=n), dtype=np.float64
    )
    return _centred(G.reshape(n, d, d), g, S, clock.events, clock.variance), fourth


def _centred(G: Floats, g: Floats, S: Floats, n: float, v: float) -> Floats:
    """Γ = G − (g Sᵀ + S gᵀ)/n + S Sᵀ·v/n²."""
    cross = g[..., :, None] * S[..., None, :]
    cross = cross + np.swapaxes(cross, -1, -2)
    return np.asarray(G - cross / n + S[..., :, None] * S[..., None, :] * (v / n**2))


@dataclass(frozen=True, eq=False)
class Sums:
    """What the events of a group add up to; those of blocks add up.

    Attributes
    ----------
    rows : (T, d), Σ of x at every step
    G : (d, d), Σ_pairs v_p x xᵀ
    g : (d,), Σ_pairs c_p x
    fourth : Σ_events ‖x‖⁴
    """

    rows: Floats
    G: Floats
    g: Floats
    fourth: float

    def __add__(self, other: Sums) -> Sums:
        fourth = self.fourth + other.fourth
        return Sums(self.rows + other.rows, self.G + other.G, self.g + other.g, fourth)

    def part(self, start: int, stop: int, share: float) -> Sums:
        """Return those of some steps, with their share of the variances."""
        return Sums(self.rows[start:stop], self.G * share, self.g * share, self.fourth * share)

    @classmethod
    def zero(cls, n_steps: int, d: int) -> Sums:
        """Return the sums of no events."""
        return cls(np.zeros((n_steps, d)), np.zeros((d, d)), np.zeros(d), 0.0)

    @classmethod
    def of(cls, entries: Events, x: Floats) -> Sums:
        """Return the sums of some pairs, each of which adds its row of x."""
        steps = sp.csr_matrix((entries.value, (entries.step, entries.pair)), shape=(entries.n_steps, len(x)))
        lengths = np.square(x).sum(axis=1)[entries.pair]
        fourth = float(np.square(np.square(entries.value) * lengths).sum())
        return cls(np.asarray(steps @ x), np.asarray(x.T @ (x * entries.v[:, None])), entries.c @ x, fourth)


@dataclass(frozen=True, eq=False)
class Events:
    """Some pairs and their events: pair, step and value of each, variances of pairs (`pair_variances`)."""

    n_steps: int
    pair: Ints
    step: Ints
    value: Floats
    v: Floats
    c: Floats

    def of(self, chosen: NDArray[np.bool_]) -> Events:
        """Return those of some pairs, which are then counted from 0."""
        number = np.cumsum(chosen) - 1
        kept = chosen[self.pair]
        return Events(
            self.n_steps,
            number[self.pair[kept]],
            self.step[kept],
            self.value[kept],
            self.v[chosen],
            self.c[chosen],
        )


@dataclass(frozen=True)
class Shift:
    """A test of one group: how likely chance is, from which step on it is another, how different."""

    p: float
    step: int
    size: float


def find_shift(sums: Sums, clock: Clock) -> Shift:
    """Test whether a group changes between its first step and its last."""
    T, P = len(sums.rows), clock.upto[1:]
    running = np.cumsum(sums.rows, axis=0)
    total = running[-1] if T else np.zeros(len(sums.g))
    apart = np.square(running - P[:, None] * total).sum(axis=1)
    if clock.events <= 0 or T < 2:
        return Shift(1.0, -1, 0.0)
    gammas = _eigenvalues(_centred(sums.G, sums.g, total, clock.events, clock.variance))
    distance = np.array([float((clock.share * apart).sum())])
    [p] = clock.chance(distance, gammas[None], np.array([sums.fourth]))
    at = int(apart.argmax()) + 1
    if not 0 < at < T:
        return Shift(float(p), -1, 0.0)
    [size] = difference(running[at - 1][None], (total - running[at - 1])[None], np.array([at]), T)
    return Shift(float(p), at, float(size))


def find_moments(sums: Sums, clock: Clock) -> list[Shift]:
    """Return the moments from which the graph is another, in time, with their chances.

    The whole window is tested; where it changes, both sides of the moment are, and so on. A side of s of T
    steps counts its chance T/s times, and at least as much as that of the window it is a part of (Meinshausen
    2008): the chance of any false moment is below the rate.
    """
    T = len(sums.rows)
    found: list[Shift] = []
    waiting = [(0, T, 0.0)]
    least = max(FEWEST_STEPS, int(np.ceil(SHORTEST * T)))
    while waiting:
        start, stop, above = waiting.pop()
        activity = clock.activity[start:stop]
        share = float(activity.sum()) / max(clock.events, 1.0)
        shift = find_shift(sums.part(start, stop, share), Clock(activity, clock.variance * share))
        p = min(1.0, max(above, shift.p * T / max(stop - start, 1)))
        if start == 0 and stop == T:
            p = shift.p
        if shift.step < 0 or p > LARGEST_RATE:
            if start == 0 and stop == T:
                found.append(Shift(p, shift.step, shift.size))
            continue
        found.append(Shift(p, start + shift.step, shift.size))
        for low, high in ((start, start + shift.step), (start + shift.step, stop)):
            if high - low >= 2 * least:
                waiting.append((low, high, p))
    return sorted(found, key=lambda shift: shift.step)


@dataclass(frozen=True, eq=False)
class RhythmTests:
    """A test per frequency: its steps per period, its energies in units of the floor, and chances.

    Of `find_rhythms`, `energy` is that of the window and `p` the chance that noise reaches it. Of
    `compare_rhythms`, `before` and `after` are those of the two halves, and `p` the chance that two halves of
    the same rhythm differ as much.
    """

    k: Ints
    period: Floats
    before: Floats
    after: Floats
    p: Floats


def _raised_floor(energy: Floats, gammas: Floats) -> float:
    """Return by how much bursts raise the floor, at least 1: the median energy over that of unrelated events.

    Only where more energies than chance explains (two deviations of a coin) are above the median.
    """
    twice = np.repeat(gammas / 2, 2)[None]
    if len(energy) < FREQS_FOR_FLOOR or not twice.any():
        return 1.0
    above = quadratic_tail(energy, np.repeat(twice, len(energy), axis=0)) < 0.5
    if 2 * int(above.sum()) - len(energy) <= 2 * np.sqrt(len(energy)):
        return 1.0
    median = float(np.median(energy))
    low, high = 1.0, 1.0 + 8 * median / float(gammas.sum())
    for _ in range(40):
        middle = (low + high) / 2
        too_low = quadratic_tail([median], middle * twice)[0] < 0.5
        low, high = (middle, high) if too_low else (low, middle)
    return (low + high) / 2


def spectrum_chances(energy: Floats, gammas: Floats, real: NDArray[np.bool_]) -> tuple[Floats, float]:
    """Return the chance that noise reaches each energy, and by how much its floor is raised.

    Parameters
    ----------
    energy : (F,)
        ‖ŷ(k)‖² of some frequencies above 0.
    gammas : (d,)
        Eigenvalues of G: Σ γ_l is what unrelated events leave.
    real : (F,)
        Which frequencies are real (k = T/2): half the degrees of freedom.
    """
    gammas = np.maximum(gammas, 0.0)
    raised = _raised_floor(energy[~real], gammas)
    twice = np.repeat(gammas / 2, 2)
    p = quadratic_tail(energy, np.tile(raised * twice, (len(energy), 1)))
    if real.any():
        p[real] = quadratic_tail(energy[real], np.tile(raised * gammas, (int(real.sum()), 1)))
    return p, raised


def find_rhythms(rows: Floats, G: Floats) -> RhythmTests:
    """Test every frequency above 0 of rows (T, d) whose unrelated events have covariance G."""
    T = len(rows)
    energy = np.square(np.abs(np.fft.rfft(rows, axis=0)[1:])).sum(axis=1)
    k = np.arange(1, len(energy) + 1)
    gammas = _eigenvalues(G)
    p, raised = spectrum_chances(energy, gammas, 2 * k == T)
    floor = raised * float(np.maximum(gammas, 0.0).sum())
    shown = energy / floor if floor > 0 else np.zeros(len(energy))
    return RhythmTests(k, T / k, shown, shown, p)


def compare_rhythms(rows: Floats, G: Floats, moments: Ints) -> RhythmTests:
    """Compare the two halves of a window, frequency by frequency.

    A half of h steps holds whole periods h/k, so both halves have the same phase, and what is constant in a
    half leaves nothing there. The level between two moments is taken away first: a sudden change is none of
    rhythm. Halves of one step have none.
    """
    if len(rows) < 4:
        none = np.empty(0)
        return RhythmTests(none.astype(np.int64), none, none, none, none)
    level = np.zeros_like(rows)
    for low, high in zip([0, *moments], [*moments, len(rows)], strict=True):
        level[low:high] = rows[low:high].mean(axis=0) if high > low else 0
    h = len(rows) // 2
    first, second = (
        np.fft.rfft(part, axis=0)[1:] for part in ((rows - level)[:h], (rows - level)[h : 2 * h])
    )
    k = np.arange(1, len(first) + 1)
    apart = np.square(np.abs(first - second)).sum(axis=1)
    gammas = _eigenvalues(G * (2 * h / max(len(rows), 1)))
    p, raised = spectrum_chances(apart, gammas, 2 * k == h)
    floor = raised * float(np.maximum(gammas, 0.0).sum()) / 2
    before, after = (
        np.square(np.abs(part)).sum(axis=1) / floor if floor > 0 else np.zeros(len(k))
        for part in (first, second)
    )
    return RhythmTests(k, h / k, before, after, p)
