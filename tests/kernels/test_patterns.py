"""Patterns in time that many nodes share: found where they are, none where there are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import naive_filter as naive
from tests.harness.strategies import EXTREME, Events, events
from toffee_dist import TemporalTensor
from toffee_dist.kernels.entries import NodeEntries
from toffee_dist.kernels.filter import filter_rows, learn_kernel
from toffee_dist.kernels.patterns import MOST_PATTERNS, PatternSums, find_patterns, learn_filter, pattern_sums

Array = NDArray[Any]
N, T = 120, 42


def basis(n_nodes: int, rank: int) -> Array:
    return np.linalg.qr(np.random.default_rng(0).standard_normal((max(n_nodes, rank), rank)))[0][:n_nodes]


def sums_of(tensor: TemporalTensor, V: Array) -> PatternSums:
    return pattern_sums(NodeEntries.of(tensor), lambda targets: V[targets])


@given(events())
def test_sums_are_their_slow_twin(rows: Events) -> None:
    tensor, V = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 3)
    expected = naive.pattern_sums(np.asarray(tensor.to_coo().todense()), V)
    found = sums_of(tensor, V).matrix
    # Products are taken in single precision.
    np.testing.assert_allclose(found, expected, atol=1e-5 * (1 + np.abs(expected).max()))


@given(events(), st.integers(1, 3))
def test_sums_of_blocks_add_up(rows: Events, size: int) -> None:
    tensor, V, n = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 2), rows.n_nodes
    whole = sums_of(tensor, V)
    total = PatternSums(np.zeros_like(whole.matrix), 0)
    for start in range(0, n, size):
        total += sums_of(tensor.take_rows(start, min(start + size, n)), V)
    np.testing.assert_allclose(total.matrix, whole.matrix, atol=1e-5 * (1 + np.abs(whole.matrix).max()))
    assert total.rows == whole.rows


@given(events(EXTREME))
def test_patterns_are_finite_orthonormal_and_few(rows: Events) -> None:
    tensor, V = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 2)
    found = find_patterns(sums_of(tensor, V))
    assert found.shape[1] <= MOST_PATTERNS
    np.testing.assert_allclose(found.T @ found, np.eye(found.shape[1]), atol=1e-9)
    np.testing.assert_allclose(found.sum(axis=0), 0, atol=1e-6)


def graph(other: Array, busy: Array, seed: int = 0) -> TemporalTensor:
    """Two communities, whose members are others on some steps; steps are as busy as is said."""
    rng = np.random.default_rng(seed)
    first, second = rng.integers(2, size=(2, N))
    i, j = np.triu_indices(N, 1)
    source, target, step = [], [], []
    for t in range(T):
        group = second if other[t] else first
        linked = rng.random(len(i)) < busy[t] * np.where(group[i] == group[j], 0.03, 0.002)
        source.append(i[linked])
        target.append(j[linked])
        step.append(np.full(int(linked.sum()), t))
    return TemporalTensor.from_events(
        *(np.concatenate(part) for part in (source, target, step)),
        n_nodes=N,
        n_steps=T,
        directed=False,
        pair_weight="raw",
    )


def axes(tensor: TemporalTensor, rank: int = 6) -> Array:
    values, vectors = np.linalg.eigh(np.asarray(tensor.to_coo().todense()).sum(axis=2))
    return vectors[:, np.argsort(-np.abs(values))[:rank]]


WEEKENDS = np.arange(T) % 7 >= 5
HALVES = np.arange(T) >= T // 2
NEVER, EVEN = np.zeros(T, dtype=bool), np.ones(T)


@pytest.mark.parametrize("other", [WEEKENDS, HALVES], ids=["weekends", "halves"])
def test_what_all_do_together_is_found(other: Array) -> None:
    tensor = graph(other, EVEN)
    patterns = find_patterns(sums_of(tensor, axes(tensor)))
    assert patterns.shape[1] == 1
    contrast = other - other.mean()
    assert abs(patterns[:, 0] @ contrast) > 0.9 * np.linalg.norm(contrast)


@pytest.mark.parametrize("seed", range(5))
def test_nothing_is_found_where_nothing_changes(seed: int) -> None:
    # Busy weekdays are no pattern: the same nodes meet, only more often.
    for busy in (EVEN, np.where(WEEKENDS, 0.2, 1.5)):
        tensor = graph(NEVER, busy, seed)
        assert find_patterns(sums_of(tensor, axes(tensor))).shape[1] == 0


def test_a_pattern_is_kept_where_its_waves_would_be_shrunk() -> None:
    tensor = graph(WEEKENDS, 0.6 * EVEN)
    V = axes(tensor)
    rows, kernel = learn_filter(tensor, V)
    assert kernel.aside[0].shape[1] == 1
    Z = filter_rows(rows, kernel, np.arange(T))
    plain = filter_rows(rows, learn_kernel([rows], T), np.arange(T))
    rates = [expected_rows(V, day) for day in (False, True)]
    truth = np.stack([rates[int(day)] for day in WEEKENDS], axis=1)

    def error(found: Array) -> float:
        wrong = found - 0.6 * truth
        return float(np.square(wrong - wrong.mean(axis=1, keepdims=True)).sum())

    assert error(Z) < 0.8 * error(plain)


def expected_rows(V: Array, other: bool) -> Array:
    """Return E y_i of a step of the graph above."""
    first, second = np.random.default_rng(0).integers(2, size=(2, N))
    group = second if other else first
    rate = np.where(group[:, None] == group, 0.03, 0.002)
    np.fill_diagonal(rate, 0.0)
    return np.asarray(rate @ V)


def test_a_causal_filter_has_no_patterns() -> None:
    tensor = graph(HALVES, EVEN)
    _, kernel = learn_filter(tensor, axes(tensor), causal=True)
    assert kernel.aside[0].shape == (T, 0)


def test_few_rows_tell_no_patterns() -> None:
    """Of noise alone, in more steps than rows: chance reaches far up, and not down."""
    F = np.random.default_rng(0).standard_normal((T, 20))
    G = F @ F.T - 20 * np.eye(T)
    assert find_patterns(PatternSums(G, 20)).shape[1] == 0
    assert find_patterns(PatternSums(G, 20 * T)).shape[1] > 0
