"""Tests of change: their tails, their twins by drawing, and that they find what was planted."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import naive_changes as naive
from toffee_dist.kernels.chance import discovery_rates, quadratic_tail
from toffee_dist.kernels.changes import (
    Clock,
    Events,
    Sums,
    compare_rhythms,
    find_moments,
    find_rhythms,
    find_shift,
    node_changes,
    pair_variances,
)
from toffee_dist.kernels.entries import NodeEntries

Array = NDArray[Any]


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 0.5, 0.2, 0.1], [1.0] * 10, (1 / np.arange(1, 30) ** 2).tolist()]
)
def test_tail_of_a_sum_of_squares(weights: list[float]) -> None:
    """Against draws, from the middle to one in ten thousand."""
    w = np.array(weights)
    drawn = np.square(np.random.default_rng(0).standard_normal((200_000, len(w)))) @ w
    chances = np.array([0.9, 0.5, 0.1, 0.05, 0.01, 1e-3])
    found = quadratic_tail(np.quantile(drawn, 1 - chances), np.tile(w, (len(chances), 1)))
    np.testing.assert_allclose(found, chances, rtol=0.12)
    # At its mean, where the formula is 0/0, it is continuous.
    near = quadratic_tail(w.sum() * (1 + np.array([-1e-6, 0.0, 1e-6])), np.tile(w, (3, 1)))
    assert np.ptp(near) < 1e-3


def test_tail_of_one_and_two_squares_far_out() -> None:
    """χ²_2 is exponential: relative errors stay small however small p is."""
    x = np.array([10.0, 50.0, 200.0])
    np.testing.assert_allclose(quadratic_tail(x, np.ones((3, 2))), np.exp(-x / 2), rtol=0.1)
    # Factors multiply weights; a row of nothing has chance 1 of nothing.
    np.testing.assert_allclose(quadratic_tail(x, np.ones((3, 1)), [1.0, 1.0]), np.exp(-x / 2), rtol=0.1)
    assert quadratic_tail([0.0, 1.0], np.zeros((2, 3))).tolist() == [1.0, 0.0]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sampled_from([0.01, 0.05, 0.2]))
def test_rates_are_those_of_the_textbook(p: list[float], rate: float) -> None:
    values = np.array(p)
    found = set(np.flatnonzero(discovery_rates(values) <= rate).tolist())
    textbook = naive.benjamini_hochberg(values, rate)
    # Ties and rounding at the very border aside.
    border = {at for at in found ^ textbook if abs(discovery_rates(values)[at] - rate) < 1e-9}
    assert found ^ textbook == border


def entries_of(rows: list[tuple[int, int, int, float]], n_nodes: int, n_steps: int) -> NodeEntries:
    node, target, step, value = (np.array(column) for column in zip(*sorted(rows), strict=True))
    return NodeEntries(n_nodes, n_steps, node, target, step, value.astype(float))


def still_node(rng: np.random.Generator, count: int, n_steps: int, others: int = 3000) -> tuple[Any, ...]:
    """One node with links at any time, the basis of its targets, and the events of all."""
    steps = rng.integers(0, n_steps, count)
    target = np.arange(count)  # Every link another: nothing keeps pairs apart.
    value = rng.uniform(0.5, 2, count)
    V = np.zeros((count, 3))
    V[np.arange(count), rng.integers(0, 3, count)] = rng.uniform(0.5, 1, count)
    activity = rng.multinomial(others, np.ones(n_steps) / n_steps)
    entries = entries_of(
        [(0, int(j), int(t), v) for j, t, v in zip(target, steps, value, strict=True)], 1, n_steps
    )
    total = activity + np.bincount(steps, minlength=n_steps)
    return entries, V, activity, Clock(total.astype(float), float(total.sum()))


@pytest.mark.parametrize("count", [8, 30])
def test_chance_of_a_node_is_that_of_draws(count: int) -> None:
    rng = np.random.default_rng(count)
    ours, drawn = [], []
    for seed in range(12):
        entries, V, activity, clock = still_node(rng, count, 20)
        found = node_changes(entries, V.__getitem__, clock)
        x = V[entries.target] * entries.value[:, None]
        assert found.step[0] in (naive.first_new_step(x, entries.step, clock.share), -1)
        ours.append(found.p[0])
        drawn.append(naive.drawn_chance(x, entries.step, activity, 199, seed))
    # Two hundred draws know p to ±.035.
    assert np.abs(np.array(ours) - drawn).mean() < 0.05
    assert np.abs(np.array(ours) - drawn).max() < 0.15


def test_nodes_that_keep_still_and_one_that_moves() -> None:
    rng = np.random.default_rng(1)
    T, n = 40, 400
    V = np.linalg.qr(rng.standard_normal((50, 4)))[0]
    rows = [(i, int(rng.integers(50)), int(rng.integers(T)), 1.0) for i in range(n) for _ in range(20)]
    rows += [(n, 3 if t < 25 else 9, t, 1.0) for t in range(T)]
    rows += [(n + 1, 5, 0, 1.0)]
    rows = list(dict.fromkeys(rows))
    entries = entries_of(rows, n + 2, T)
    activity = np.bincount(entries.step, minlength=T).astype(float)
    clock = Clock(activity, activity.sum())
    found = node_changes(entries, lambda asked: V[asked], clock)
    assert 0.02 < (found.p[:n] < 0.05).mean() < 0.09
    assert found.p[n] < 1e-6
    assert found.step[n] == 25
    assert found.size[n] > 0.5
    # One link tells nothing.
    assert (found.p[n + 1], found.tested[n + 1], found.step[n + 1]) == (1.0, False, -1)
    assert discovery_rates(found.p)[n] < 0.05
    # Where nothing happens, nothing is tested.
    none = np.empty(0, np.int64)
    empty = NodeEntries(2, T, none, none, none, np.empty(0))
    assert node_changes(empty, lambda asked: V[asked], clock).p.tolist() == [1.0, 1.0]


def graph(rng: np.random.Generator, rate: Array, profile: Array) -> tuple[Sums, Clock]:
    """Many pairs with one event each; rate (T,) of events, profile (T, d) of what they add."""
    steps = np.repeat(np.arange(len(rate)), rng.poisson(rate))
    x = profile[steps] + 0.5 * rng.standard_normal((len(steps), profile.shape[1]))
    ones = np.ones(len(steps))
    activity = np.bincount(steps, minlength=len(rate)).astype(float)
    return Sums.of(Events(len(rate), np.arange(len(steps)), steps, ones, ones, ones), x), Clock(
        activity, activity.sum()
    )


def test_moments_are_where_they_were_planted() -> None:
    rng = np.random.default_rng(2)
    profile = np.zeros((60, 3))
    profile[:20, 0], profile[20:45, 1], profile[45:, 2] = 1, 1, 1
    sums, clock = graph(rng, np.full(60, 30.0), profile)
    moments = find_moments(sums, clock)
    assert [shift.step for shift in moments if shift.p < 0.01] == [20, 45]
    # Twice as many events of the same kind are no change of what the graph is.
    rate = np.where(np.arange(60) < 30, 20.0, 40.0)
    sums, clock = graph(rng, rate, np.tile([1.0, 0, 0], (60, 1)))
    assert all(shift.p > 0.01 for shift in find_moments(sums, clock))
    assert find_shift(*graph(rng, np.full(1, 5.0), np.ones((1, 2)))).p == 1.0


def test_rhythms_and_their_changes() -> None:
    rng = np.random.default_rng(3)
    week = np.where(np.arange(84) % 7 < 5, 30.0, 10.0)
    steady, _ = graph(rng, week, np.ones((84, 2)))
    found = find_rhythms(steady.rows, steady.G)
    assert found.period[found.p.argmin()] == 7
    assert found.p.min() < 1e-6
    # The same rhythm in both halves is no change; one that ends is.
    assert compare_rhythms(steady.rows, steady.G, np.empty(0, np.int64)).p.min() * 21 > 0.05
    ends, _ = graph(rng, np.where(np.arange(84) < 42, week, 24.0), np.ones((84, 2)))
    changed = compare_rhythms(ends.rows, ends.G, np.empty(0, np.int64))
    at = int(changed.p.argmin())
    assert (changed.period[at], changed.before[at] > 2 * changed.after[at]) == (7, True)
    # A jump of the level that is known as a moment is no change of rhythm.
    jump, _ = graph(rng, np.where(np.arange(84) < 30, 10.0, 30.0), np.ones((84, 2)))
    assert compare_rhythms(jump.rows, jump.G, np.empty(0, np.int64)).p.min() < 1e-6
    assert compare_rhythms(jump.rows, jump.G, np.array([30])).p.min() * 21 > 0.01


def test_pairs_at_different_steps_vary_less() -> None:
    """The variance of a running sum over m distinct steps of T, against drawing them."""
    rng, T, m = np.random.default_rng(4), 12, 8
    entries = entries_of([(0, 1, t, 1.0) for t in range(m)], 1, T)
    _, _, v, c, count = pair_variances(entries, float(T))
    up_to = np.array([(rng.permutation(T)[:m] < T // 2).sum() for _ in range(20_000)])
    assert v[0] * 0.25 == pytest.approx(up_to.var(), rel=0.05)
    assert (v[0], c[0]) == (pytest.approx(count[0]), pytest.approx(count[0]))
