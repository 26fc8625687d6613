"""Alignment of two embeddings, against slow twins and known rotations."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.linalg
from numpy.typing import NDArray

from tests import naive
from toffee_dist.kernels.align import (
    Alignment,
    SubspaceAngles,
    cosine_quantiles,
    neighbour_overlap,
    rank_auc,
    row_cosines,
)
from toffee_dist.kernels.sample import tally_cosines


def make(n: int = 200, rank: int = 6, seed: int = 0) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    E = (rng.standard_normal((n, rank)) * np.arange(rank, 0, -1)).astype(np.float32)
    Q, _ = np.linalg.qr(rng.standard_normal((rank, rank)))
    return E, Q


def aligned(
    now: NDArray[np.floating], before: NDArray[np.floating], weights: NDArray[np.float64]
) -> Alignment:
    """Take the nodes in as uneven blocks, as a run does."""
    found = Alignment(now.shape[1])
    for start in range(0, len(now), 37):
        block = slice(start, start + 37)
        found.add(now[block], before[block], weights[block])
    return found


def test_a_known_rotation_is_undone() -> None:
    E, Q = make()
    found = aligned(E @ Q, E, np.ones(len(E)))
    np.testing.assert_allclose(found.rotation(), Q.T, atol=1e-6)
    assert found.fit(found.rotation()) == pytest.approx(1.0, abs=1e-6)
    np.testing.assert_allclose(row_cosines(E @ Q @ found.rotation(), E), 1.0, atol=1e-6)


def test_flipped_signs_are_undone() -> None:
    E, _ = make()
    signs = np.array([1, -1, -1, 1, -1, 1])
    np.testing.assert_allclose(
        aligned(E * signs, E, np.ones(len(E))).rotation(), np.diag(signs.astype(float)), atol=1e-6
    )


def test_the_same_input_stays() -> None:
    E, _ = make()
    np.testing.assert_allclose(aligned(E, E, np.ones(len(E))).rotation(), np.eye(6), atol=1e-7)


def test_no_shared_node_and_empty_columns_stay() -> None:
    np.testing.assert_allclose(Alignment(4).rotation(), np.eye(4))
    assert np.isnan(Alignment(4).fit(np.eye(4)))
    E, Q = make(rank=3)
    padded = np.pad(E, [(0, 0), (0, 2)])
    found = aligned(np.pad(E @ Q, [(0, 0), (0, 2)]), padded, np.ones(len(E))).rotation()
    np.testing.assert_allclose(found[:3, :3], Q.T, atol=1e-5)
    np.testing.assert_allclose(found[3:, 3:], np.eye(2), atol=1e-5)
    np.testing.assert_allclose(found @ found.T, np.eye(5), atol=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_no_other_rotation_is_better(seed: int) -> None:
    E, Q = make(seed=seed)
    rng = np.random.default_rng(seed)
    before = E + rng.standard_normal(E.shape)
    degrees = rng.integers(0, 9, size=(2, len(E)))
    weights = np.log1p(degrees.min(axis=0))
    found = aligned(E @ Q, before, weights)
    best = naive.misfit(E @ Q, before, weights, found.rotation())
    for _ in range(50):
        skew = rng.standard_normal((6, 6)) * 10.0 ** rng.uniform(-3, 0)
        other = found.rotation() @ scipy.linalg.expm(skew - skew.T)
        assert naive.misfit(E @ Q, before, weights, other) >= best - 1e-9


def test_a_node_without_edges_has_no_say() -> None:
    E, Q = make()
    before = E.copy()
    before[:100] = -E[:100]
    weights = np.repeat([0.0, 1.0], 100)
    np.testing.assert_allclose(aligned(E @ Q, before, weights).rotation(), Q.T, atol=1e-6)
    E[:100] = 0
    found = aligned(E @ Q, before, np.ones(200))
    assert found.nodes == 100
    np.testing.assert_allclose(found.rotation(), Q.T, atol=1e-6)


def test_cosines_of_absent_vectors_are_not_numbers() -> None:
    cosines = row_cosines(np.array([[1.0, 0], [0, 0], [1, 1]]), np.array([[0, 2.0], [1, 1], [2, 2]]))
    np.testing.assert_allclose(cosines, [0.0, np.nan, 1.0], atol=1e-12)
    assert cosine_quantiles(tally_cosines(np.full(3, np.nan))) == {}
    assert cosine_quantiles(tally_cosines(cosines))["p50"] == 0.5


@pytest.mark.parametrize("noise", [0.0, 0.1, 3.0])
def test_subspace_angles(noise: float) -> None:
    E, Q = make()
    F = E @ Q + noise * np.random.default_rng(1).standard_normal(E.shape)
    angles = SubspaceAngles(6)
    for start in range(0, len(E), 64):
        angles.add(E[start : start + 64], F[start : start + 64])
    expected = np.degrees(scipy.linalg.subspace_angles(E.astype(np.float64), F))[::-1]
    np.testing.assert_allclose(angles.degrees(), expected, atol=1e-3)


def test_neighbour_overlap() -> None:
    E, Q = make()
    rng = np.random.default_rng(0)
    queries = rng.choice(len(E), 20, replace=False)
    assert (neighbour_overlap(E @ Q, E, queries) == 1).all()
    F = E + rng.standard_normal(E.shape)
    found = neighbour_overlap(F, E, queries)
    expected = [
        len(naive.neighbours(F, query, 10) & naive.neighbours(E, query, 10)) / 10 for query in queries
    ]
    np.testing.assert_allclose(found, expected)
    assert 0.1 < found.mean() < 0.9
    E[queries[0]] = 0
    assert neighbour_overlap(F, E, queries)[0] == 0
    assert neighbour_overlap(E[:1], E[:1], np.array([0])).tolist() == [1.0]


def test_auc() -> None:
    rng = np.random.default_rng(0)
    positive = rng.integers(2, 11, 40).astype(np.float64)
    negative = rng.integers(0, 9, 30).astype(np.float64)
    expected = np.mean([(p > n) + 0.5 * (p == n) for p in positive for n in negative])
    assert rank_auc(positive, negative) == pytest.approx(expected)
