"""Rivals in time against their definitions, dense and step by step."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import scipy.linalg

from tests.harness.strategies import random_tensor
from toffee_dist import TemporalTensor
from toffee_dist.errors import TooLargeError
from toffee_dist.models import find_model, fit, rivals
from toffee_dist.models.tne import snapshot_bounds
from toffee_dist.settings import FitSettings

OPTIONS = FitSettings(rank=3, snapshots=3, epochs=20)


def dense(tensor: TemporalTensor) -> Any:
    return np.asarray(tensor.to_coo().todense())


def found_by(name: str, tensor: TemporalTensor, options: FitSettings = OPTIONS) -> Any:
    model = find_model(name).fit_in_time
    assert model is not None
    return model(tensor, options, None)


@pytest.mark.parametrize("directed", [True, False])
@pytest.mark.parametrize("rank", [3, 30])
def test_omni_is_the_omnibus_matrix(directed: bool, rank: int) -> None:
    tensor = random_tensor(1, 7, 4, 40, directed=directed, entry="count", pair_weight="raw")
    X = dense(tensor)
    X = (X + X.transpose(1, 0, 2)) / 2
    n, _, T = X.shape
    M = np.block([[(X[:, :, s] + X[:, :, t]) / 2 for t in range(T)] for s in range(T)])
    values, U = np.linalg.eigh(M)
    order = np.argsort(-np.abs(values))[:rank]
    found = found_by("omni", tensor, FitSettings(rank=rank))
    i, j = np.divmod(np.arange(n * n), n)
    for t in range(T):
        rows = U[t * n : (t + 1) * n, order]
        expected = (rows * values[order]) @ rows.T
        np.testing.assert_allclose(found.score(t, i, j).reshape(n, n), expected, atol=1e-4)
        lengths = (np.square(rows) * np.abs(values[order])).sum(axis=1)
        np.testing.assert_allclose(np.square(found.vectors(t)).sum(axis=1), lengths, atol=1e-4)


def test_omni_says_what_it_would_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rivals, "OMNI_BYTES", 1000)
    with pytest.raises(TooLargeError, match="7 nodes, which take"):
        found_by("omni", random_tensor(1, 7, 4, 40))


@pytest.mark.parametrize("directed", [True, False])
def test_urlse_is_the_svd_of_scaled_steps(directed: bool) -> None:
    tensor = random_tensor(2, 8, 5, 60, directed=directed, entry="count", pair_weight="raw")
    X = dense(tensor)
    rows, columns = X.sum(axis=1), X.sum(axis=(0, 2))
    gamma, delta = rows[rows > 0].mean(), columns[columns > 0].mean()
    L = X / np.sqrt((rows + gamma)[:, None, :] * (columns + delta)[None, :, None])
    stacked = np.concatenate([L[:, :, t] for t in range(5)])
    _, _, Vt = np.linalg.svd(stacked)
    V = Vt[:3].T
    found = found_by("urlse", tensor)
    i, j = np.divmod(np.arange(64), 8)
    for t in range(5):
        expected = L[:, :, t] @ V @ V.T
        if not directed:
            expected = (expected + expected.T) / 2
        np.testing.assert_allclose(found.score(t, i, j).reshape(8, 8), expected, atol=1e-4)


def test_aligned_snapshots_are_turned_by_procrustes() -> None:
    tensor = random_tensor(3, 12, 5, 200, directed=False, entry="count", pair_weight="raw")
    alone, aligned = found_by("snapshot", tensor), found_by("aligned", tensor)
    i, j = np.divmod(np.arange(144), 12)
    before = alone.vectors(0)
    np.testing.assert_allclose(aligned.vectors(0), before)
    for t in range(1, 5):
        Q, _ = scipy.linalg.orthogonal_procrustes(alone.vectors(t), before)
        before = alone.vectors(t) @ Q
        np.testing.assert_allclose(aligned.vectors(t), before, atol=1e-3)
        np.testing.assert_allclose(aligned.score(t, i, j), alone.score(t, i, j), atol=1e-4)


def test_tne_in_time_ends_with_its_embedding() -> None:
    tensor = random_tensor(4, 12, 9, 80, directed=False)
    found = found_by("tne", tensor)
    last = fit("tne", tensor, OPTIONS).source
    assert np.array_equal(found.vectors(8), last)
    bounds = snapshot_bounds(tensor, 3)
    for t in range(9):
        assert np.array_equal(found.vectors(t), found.vectors(max(b for b in bounds[:-1] if b <= t)))
    assert not np.array_equal(found.vectors(0), last)


@pytest.mark.parametrize("name", ["urlse", "omni", "aligned", "tne"])
def test_empty_graphs_and_steps(name: str) -> None:
    empty = TemporalTensor.from_events([], [], [], n_nodes=4, n_steps=3)
    sparse = TemporalTensor.from_events([0, 1], [1, 2], [0, 4], n_nodes=4, n_steps=6, directed=False)
    for tensor in (empty, sparse):
        found = found_by(name, tensor)
        for t in range(tensor.n_steps):
            assert np.isfinite(found.vectors(t)).all()
