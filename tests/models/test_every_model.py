"""One set of checks over every model that gives vectors, whatever it does inside.

Elsewhere, over every model too: shapes and types of any graph, resumption, what goes through the scheduler,
memory below its projection (test_models.py), published bytes (test_bytes.py), no leak of the test part
(evaluation/test_evaluation.py), a row of the table (evaluation/test_kept.py).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.harness.events import make_events
from tests.harness.strategies import random_tensor
from toffee_dist import TemporalTensor
from toffee_dist.models import MODELS, fit
from toffee_dist.settings import FitSettings

VECTORS = [name for name, model in MODELS.items() if model.fit]
IN_TIME = [name for name, model in MODELS.items() if model.fit_in_time]
# Their axes and their vectors depend on no draw.
WITHOUT_DRAWS = ("toffee", "toffee-", "tsvd", "rescal")
OPTIONS = FitSettings(rank=6, max_iter=20, walks=10, walk_length=10, epochs=10, snapshots=3, window=3)


def planted(seed: int = 0, n: int = 24, order: Any = None) -> TemporalTensor:
    """Two groups of nodes, which link inside."""
    rng = np.random.default_rng(seed)
    i = rng.integers(0, n, 1500)
    j = (i // (n // 2)) * (n // 2) + rng.integers(0, n // 2, 1500)
    keep = (i != j) & (rng.random(1500) < 0.9)
    i, j, t = i[keep], j[keep], rng.integers(0, 12, 1500)[keep]
    if order is not None:
        i, j = order[i], order[j]
    # Counts: no two eigenvalues are then the same, and the leading ones are unique.
    weights: Any = {"entry": "count", "pair_weight": "raw"}
    return TemporalTensor.from_events(i, j, t, n_nodes=n, n_steps=12, directed=False, **weights)


def separation(vectors: Any, groups: Any) -> float:
    """Mean cosine inside the groups, less that between them."""
    V = vectors.astype(np.float64)
    V = V / np.maximum(np.linalg.norm(V, axis=1, keepdims=True), 1e-12)
    cosines, same = V @ V.T, np.equal.outer(groups, groups)
    off = ~np.eye(len(V), dtype=bool)
    return float(cosines[same & off].mean() - cosines[~same].mean())


@pytest.mark.parametrize("model", VECTORS)
def test_groups_are_found_in_any_order_of_the_nodes(model: str) -> None:
    order = np.random.default_rng(5).permutation(24)
    groups = np.arange(24) // 12
    plain = fit(model, planted(), OPTIONS)
    moved = fit(model, planted(order=order), OPTIONS)
    assert separation(plain.source, groups) > 0.1
    assert separation(moved.source[order], groups) > 0.1
    if model in WITHOUT_DRAWS:
        i, j = np.divmod(np.arange(24 * 24), 24)
        np.testing.assert_allclose(moved.score(order[i], order[j]), plain.score(i, j), atol=2e-2)


@pytest.mark.parametrize("model", VECTORS)
def test_the_seed_decides(model: str) -> None:
    tensor = random_tensor(1, 20, 8, 150)
    first = fit(model, tensor, OPTIONS.changed(seed=3))
    assert fit(model, tensor, OPTIONS.changed(seed=3)).source.tobytes() == first.source.tobytes()
    if model in ("ctdne", "htne", "hnip"):
        assert fit(model, tensor, OPTIONS.changed(seed=4)).source.tobytes() != first.source.tobytes()


@pytest.mark.parametrize("model", VECTORS)
def test_nodes_without_links_have_zeros(model: str) -> None:
    rng = np.random.default_rng(0)
    i, j = rng.integers(0, 10, (2, 80))
    tensor = TemporalTensor.from_events(
        i + 3, j + 3, rng.integers(0, 6, 80), n_nodes=16, n_steps=6, directed=False
    )
    found = fit(model, tensor, OPTIONS).source
    assert not found[:3].any()
    assert not found[13:].any()
    assert found[3:13].any()


@pytest.mark.parametrize("model", VECTORS)
def test_empty_steps_at_both_ends_change_nothing(model: str) -> None:
    rng = np.random.default_rng(2)
    i, j = rng.integers(0, 12, (2, 120))
    t = rng.integers(0, 6, 120)
    t[:2] = 0, 5
    plain = TemporalTensor.from_events(i, j, t, n_nodes=12, n_steps=6)
    later = TemporalTensor.from_events(i, j, t + 4, n_nodes=12, n_steps=13)
    # More steps are other frequencies: what sums them rounds otherwise.
    a, b = fit(model, plain, OPTIONS), fit(model, later, OPTIONS)
    np.testing.assert_allclose(a.source, b.source, atol=1e-4)


@pytest.mark.parametrize("model", VECTORS)
def test_the_order_of_the_rows_is_no_news(model: str) -> None:
    rng = np.random.default_rng(2)
    i, j = rng.integers(0, 12, (2, 120))
    t, order = rng.integers(0, 6, 120), rng.permutation(120)
    moved = (i[order], j[order], t[order])
    tensors = [TemporalTensor.from_events(*rows, n_nodes=12) for rows in ((i, j, t), moved)]
    one, two = (fit(model, tensor, OPTIONS) for tensor in tensors)
    assert one.source.tobytes() == two.source.tobytes()


@pytest.mark.parametrize("model", VECTORS)
def test_two_sets_of_nodes(model: str) -> None:
    """Every link goes from the first ten nodes to the others."""
    rng = np.random.default_rng(3)
    i, j = rng.integers(0, 10, 150), 10 + rng.integers(0, 8, 150)
    tensor = TemporalTensor.from_events(i, j, rng.integers(0, 6, 150), n_nodes=18, n_steps=6)
    found = fit(model, tensor, OPTIONS)
    targets = found.source if found.target is None else found.target
    assert found.source[:10].any(axis=1).all()
    if model != "toffee-paper":
        # The paper's raw A·R has one role: what only receives has rows of A, and none of A·R.
        assert targets[10:].any(axis=1).all()
    assert np.isfinite(found.source).all()
    assert np.isfinite(targets).all()


@pytest.mark.parametrize("model", VECTORS)
@pytest.mark.parametrize("directed", [True, False])
def test_one_link_and_none(model: str, directed: bool) -> None:
    for rows in (([], [], []), ([0], [1], [2]), ([1], [1], [0])):
        tensor = TemporalTensor.from_events(*rows, n_nodes=3, n_steps=4, directed=directed)
        found = fit(model, tensor, OPTIONS)
        assert found.source.shape == (3, 6)
        assert np.isfinite(found.source).all()
        assert not found.source[2].any()


@pytest.mark.parametrize("model", VECTORS)
def test_other_ids_and_a_later_start_change_no_byte(model: str) -> None:
    """Names in the same order, and times that are whole steps later."""
    events = make_events(4)
    later = replace(events, ids="node-" + events.ids, time=events.time + 1000 * 86_400)
    found = [fit(model, graph.past().tensor, OPTIONS) for graph in (events, later)]
    assert found[0].source.any()
    assert found[0].source.tobytes() == found[1].source.tobytes()


@pytest.mark.parametrize("model", IN_TIME)
def test_in_time_any_order_of_the_nodes(model: str) -> None:
    """The score of a pair at a step stays with the pair; TNE draws its start by the rows of nodes."""
    order = np.random.default_rng(5).permutation(24)
    fit_in_time = MODELS[model].fit_in_time
    assert fit_in_time is not None
    plain, moved = (fit_in_time(planted(order=given), OPTIONS, None) for given in (None, order))
    i, j = np.divmod(np.arange(24 * 24), 24)
    inside = i // 12 == j // 12
    for step in (0, 5, 11):
        one, two = plain.score(step, i, j), moved.score(step, order[i], order[j])
        if model == "tne":
            assert one[inside].mean() > one[~inside].mean()
            assert two[inside].mean() > two[~inside].mean()
        else:
            np.testing.assert_allclose(one, two, atol=2e-3 * np.abs(one).max())
        assert not np.allclose(one, moved.score(step, i, j), atol=2e-3 * np.abs(one).max())
