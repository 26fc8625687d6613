"""Communities by k-means: the slow twins of its steps, planted groups, and nodes that have none."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from toffee_dist.kernels.align import unit_rows
from toffee_dist.kernels.communities import (
    MOST_COMMUNITIES,
    centres_of,
    find_communities,
    k_means,
    nearest_centres,
    silhouette,
)


@given(
    seed=st.integers(0, 1000),
    rows=st.integers(1, 30),
    columns=st.integers(1, 5),
    count=st.integers(1, MOST_COMMUNITIES),
)
def test_centres_and_who_is_nearest(seed: int, rows: int, columns: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((rows, columns))
    labels = rng.integers(count, size=rows)
    centres = centres_of(vectors, labels, count)
    np.testing.assert_allclose(centres, naive.centres(vectors, labels, count), atol=1e-12)
    nearest = nearest_centres(vectors, centres)
    distances = np.array([[np.linalg.norm(row - centre) for centre in centres] for row in vectors])
    np.testing.assert_allclose(distances[np.arange(rows), nearest], distances.min(axis=1), atol=1e-7)


@given(seed=st.integers(0, 1000), rows=st.integers(2, 20), count=st.integers(2, 4))
def test_silhouette(seed: int, rows: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = rng.standard_normal((rows, 3))
    labels = np.append([0, 1], rng.integers(count, size=rows - 2))
    distances = np.array([[np.linalg.norm(a - b) for b in vectors] for a in vectors])
    assert silhouette(distances, labels) == pytest.approx(naive.silhouette(distances, labels), abs=1e-12)


@pytest.mark.parametrize("groups", [2, 4, MOST_COMMUNITIES])
def test_planted_groups_are_found_largest_first(groups: int) -> None:
    rng = np.random.default_rng(groups)
    sizes = np.arange(groups, 0, -1) * 20
    planted = np.repeat(np.arange(groups), sizes)
    order = rng.permutation(len(planted))
    vectors = np.eye(groups + 1)[planted] + 0.1 * rng.standard_normal((len(planted), groups + 1))
    labels, apart = find_communities(unit_rows(vectors)[order], seed=0)
    np.testing.assert_array_equal(labels, planted[order])
    assert apart > 0.5


def test_k_means_ends_where_every_row_is_with_its_nearest_centre() -> None:
    rows = np.random.default_rng(3).standard_normal((200, 4))
    labels = k_means(rows, 5, seed=0)
    np.testing.assert_array_equal(nearest_centres(rows, centres_of(rows, labels, 5)), labels)


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_nodes_that_are_all_alike_are_one_community(rows: int) -> None:
    labels, apart = find_communities(np.tile([0.6, 0.8], (rows, 1)), seed=0)
    assert (labels == 0).all()
    assert apart == 0
