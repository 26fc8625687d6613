"""Walks, skip-gram, Hawkes process, TNE and the auto-encoder against their slow twins."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.sparse as sp
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import naive_models as naive
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import TemporalTensor
from toffee_dist.kernels.autoencoder import Guide, loss_and_gradients, start_weights, train_autoencoder
from toffee_dist.kernels.hawkes import train_hawkes
from toffee_dist.kernels.loops.draws import below, draw, seed_state, uniform
from toffee_dist.kernels.loops.hawkes import train_epoch as hawkes_epoch
from toffee_dist.kernels.loops.skipgram import train_epoch as skipgram_epoch
from toffee_dist.kernels.loops.tne import move_rows, move_rows_as_published
from toffee_dist.kernels.skipgram import negative_table, train_skipgram
from toffee_dist.kernels.tne import fit_snapshot, roughness, snapshot_misfit, start_rows
from toffee_dist.kernels.walks import ATTEMPTS, TimedLinks, draw_walks, shortest_walk, sum_later


def dense(tensor: TemporalTensor) -> Any:
    return np.asarray(tensor.to_coo().todense())


def chi_square(observed: Any, expected: Any) -> float:
    """How surprising the counts are, in deviations of a chi-square with as many degrees of freedom."""
    freedom = len(expected) - 1
    value = float(((observed - expected) ** 2 / expected).sum())
    return float((value - freedom) / np.sqrt(2 * max(freedom, 1)))


@pytest.mark.parametrize(("seed", "number"), [(0, 0), (7, 3), (2**62, 2**40)])
def test_draws_are_those_of_their_twin(seed: int, number: int) -> None:
    state, twin = np.empty(1, np.uint64), naive.Draws(seed, number)
    seed_state(state, seed, number)
    for count in (1, 2, 3, 1000, 2**31):
        assert uniform(state) == twin.uniform()
        assert below(state, count) == twin.below(count)


def test_negatives_follow_their_weights() -> None:
    counts = np.array([0, 1, 5, 40, 2, 0, 300])
    chance, other = negative_table(counts)
    state = np.empty(1, np.uint64)
    seed_state(state, 5, 0)
    observed = np.bincount([draw(state, chance, other) for _ in range(100_000)], minlength=7)
    expected = counts**0.75 / (counts**0.75).sum() * 100_000
    assert not observed[expected == 0].any()
    assert abs(chi_square(observed[expected > 0], expected[expected > 0])) < 4


@given(events(), st.booleans())
def test_links_are_by_node_and_time(graph: Events, both_ways: bool) -> None:
    tensor = graph.tensor()
    links = TimedLinks.of(tensor, both_ways=both_ways)
    expected = naive.timed_links(dense(tensor), both_ways and tensor.directed)
    assert list(zip(links.sources, links.steps, links.targets, strict=True)) == expected
    for node in range(tensor.n_nodes):
        assert (links.sources[links.ends[node] : links.ends[node + 1]] == node).all()
    if len(links.steps):
        assert links.times.min() == 0
        assert links.times.max() <= 1


@given(events(), st.integers(0, 2**40), st.sampled_from([0.0, 1.0, 30.0]), st.integers(2, 4))
def test_walks_are_those_of_their_twin(graph: Events, seed: int, decay: float, shortest: int) -> None:
    tensor = graph.tensor()
    links = TimedLinks.of(tensor)
    walks, times = draw_walks(links, 3, 6, length=5, shortest=shortest, decay=decay, seed=seed)
    if not tensor.n_entries:
        assert (walks == -1).all()
        return
    expected = naive.timed_links(dense(tensor))
    for row in range(6):
        found = [int(node) for node in walks[row] if node >= 0]
        assert found == naive.walk(expected, seed, 3 + row, 5, shortest, ATTEMPTS, decay)
        if found:
            taken = times[row, : len(found) - 1]
            assert (np.diff(taken) > 0).all()
            present = {(i, t, j) for i, t, j in expected}
            assert {(found[k], int(taken[k]), found[k + 1]) for k in range(len(taken))} <= present
    # The blocks may be cut anywhere.
    half, _ = draw_walks(links, 6, 3, length=5, shortest=shortest, decay=decay, seed=seed)
    assert np.array_equal(half, walks[3:])


@pytest.mark.parametrize("decay", [0.0, 3.0])
def test_walks_follow_the_exact_probabilities(decay: float) -> None:
    tensor = random_tensor(4, 6, 9, 60)
    links, exact = TimedLinks.of(tensor), naive.timed_links(dense(tensor))
    count = 40_000
    walks, times = draw_walks(links, 0, count, length=3, shortest=2, decay=decay, seed=1)
    firsts = {key: 0 for key in exact}
    seconds: dict[tuple[int, int, int], int] = {}
    chances: dict[tuple[int, int, int], float] = dict.fromkeys(exact, 0.0)
    for nodes, when in zip(walks.tolist(), times.tolist(), strict=True):
        firsts[nodes[0], when[0], nodes[1]] += 1
        if nodes[2] >= 0:
            key = (nodes[1], when[1], nodes[2])
            seconds[key] = seconds.get(key, 0) + 1
    for _, t, j in exact:
        for (step, node), chance in naive.next_chances(exact, j, t, decay).items():
            chances[j, step, node] += chance * count / len(exact)
    assert abs(chi_square(np.array([*firsts.values()]), np.full(len(exact), count / len(exact)))) < 4
    asked = [key for key in exact if chances[key] > 5]
    assert set(seconds) <= {key for key in exact if chances[key] > 0}
    observed, expected = (np.array([d.get(key, 0) for key in asked]) for d in (seconds, chances))
    assert abs(chi_square(observed, expected)) < 4
    # The check has teeth: walks of another decay fail it.
    wrong, when = draw_walks(links, 0, count, length=3, shortest=2, decay=decay + 2, seed=1)
    other: dict[tuple[int, int, int], int] = {}
    for nodes, taken in zip(wrong.tolist(), when.tolist(), strict=True):
        other[nodes[1], taken[1], nodes[2]] = other.get((nodes[1], taken[1], nodes[2]), 0) + 1
    assert chi_square(np.array([other.get(key, 0) for key in asked]), expected) > 10


def test_small_weights_keep_their_digits() -> None:
    tensor = TemporalTensor.from_events([0] * 3, [1, 2, 1], [0, 50, 100])
    later = sum_later(TimedLinks.of(tensor), 500.0)
    assert later[2] == pytest.approx(np.exp(-500.0))
    assert later[1] == pytest.approx(np.exp(-250.0))


def test_short_time_asks_for_shorter_walks() -> None:
    short = TimedLinks.of(TemporalTensor.from_events([0, 1, 2], [1, 2, 0], [0, 1, 2]))
    assert shortest_walk(short, 10) == 2
    long = TimedLinks.of(random_tensor(0, 5, 200, 900))
    assert shortest_walk(long, 10) == 10


def test_skipgram_makes_the_steps_of_its_twin() -> None:
    rng = np.random.default_rng(0)
    walks = [rng.integers(0, 6, size).tolist() for size in (2, 7, 1, 4, 5)]
    tokens = np.concatenate(walks).astype(np.int32)
    ends = np.concatenate([[0], np.cumsum([len(walk) for walk in walks])]).astype(np.int64)
    inner, outer = rng.normal(0, 0.5, (2, 6, 3))
    chance, other = negative_table(np.bincount(tokens, minlength=6))
    ours = inner.astype(np.float32), outer.astype(np.float32)
    order = np.array([3, 0, 1, 4, 2])
    loss = skipgram_epoch(tokens, ends, order, 3, 2, 0.2, 0.05, 9, 1, chance, other, *ours)
    arranged = [walks[k] for k in order]
    expected = naive.skipgram_epoch(arranged, 3, 2, 0.2, 0.05, 9, 1, chance, other, inner, outer)
    assert loss == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(ours[0], inner, atol=2e-5)
    np.testing.assert_allclose(ours[1], outer, atol=2e-5)


def test_skipgram_goes_down_its_gradient() -> None:
    rng = np.random.default_rng(1)
    u, v, w = rng.normal(size=(3, 4))
    g = naive.numerical_gradient(lambda x: naive.skipgram_loss(x, v, [w]), u)
    # One pair and one sure negative: the step is −rate times the gradient at the start.
    inner = np.stack([np.zeros(4), u, np.zeros(4)]).astype(np.float32)
    outer = np.stack([v, np.zeros(4), w]).astype(np.float32)
    chance, other = np.zeros(3), np.full(3, 2, np.int64)
    tokens, ends = np.array([0, 1], np.int32), np.array([0, 2])
    before = inner[1].copy()
    skipgram_epoch(tokens, ends, np.array([0]), 1, 1, 1e-3, 1e-3, 0, 1, chance, other, inner, outer)
    np.testing.assert_allclose((inner[1] - before) / 1e-3, -g, rtol=1e-2, atol=1e-3)


def test_skipgram_finds_two_groups() -> None:
    rng = np.random.default_rng(0)
    walks = [rng.integers(0, 8, 12) + 8 * (k % 2) for k in range(400)]
    ends = np.arange(0, 12 * 400 + 1, 12)
    tokens = np.concatenate(walks).astype(np.int32)
    V, losses = train_skipgram(tokens, ends, 17, 8, window=4, negatives=5, epochs=10, rate=0.05, seed=0)
    assert losses[-1] < losses[0]
    assert not V[16].any()
    V = V[:16] / np.linalg.norm(V[:16], axis=1)[:, None]
    inside = (V[:8] @ V[:8].T).mean() + (V[8:] @ V[8:].T).mean()
    assert inside / 2 > 0.3 + (V[:8] @ V[8:].T).mean()


@pytest.mark.parametrize("decaying", [True, False])
@pytest.mark.parametrize("directed", [True, False])
def test_hawkes_makes_the_steps_of_its_twin(decaying: bool, directed: bool) -> None:
    tensor = random_tensor(3, 6, 5, 14, directed=directed)
    links = TimedLinks.of(tensor, both_ways=True)
    every = list(zip(links.sources.tolist(), links.steps.tolist(), links.targets.tolist(), strict=True))
    rng = np.random.default_rng(0)
    V, delta = rng.normal(0, 0.7, (6, 3)), rng.uniform(0.5, 2, 6)
    table = negative_table(np.bincount(links.targets, minlength=6))
    order = rng.permutation(len(every))
    ours = V.astype(np.float32), delta.copy()
    arrays = (links.ends, links.sources, links.targets, links.times, order)
    loss = hawkes_epoch(*arrays, 2, 3, 0.05, decaying, 4, 1, *table, *ours)
    expected = naive.hawkes_epoch(every, order, 2, 3, 0.05, decaying, 4, 1, *table, V, delta)
    assert loss == pytest.approx(expected, rel=1e-4)
    np.testing.assert_allclose(ours[0], V, atol=1e-4)
    np.testing.assert_allclose(ours[1], delta, atol=1e-4)


def test_hawkes_learns() -> None:
    tensor = random_tensor(3, 30, 10, 200, directed=False)
    links = TimedLinks.of(tensor)
    V, losses = train_hawkes(links, 8, history=3, negatives=5, epochs=30, rate=0.05, decaying=True, seed=0)
    assert losses[-1] < 0.9 * losses[0]
    assert np.isfinite(V).all()


def snapshots_of(seed: int, n: int = 9) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    G = rng.random((n, n)) < 0.4
    G = (G | G.T).astype(float)
    return sp.csr_matrix(G), G


@given(st.integers(0, 50), st.integers(1, 5), st.booleans())
def test_tne_makes_the_passes_of_its_twin(seed: int, rank: int, published: bool) -> None:
    sparse, G = snapshots_of(seed)
    rng = np.random.default_rng(seed)
    Z = start_rows(sparse, np.ones(9, bool), rank, seed)
    pull = 0.3 * rng.random((9, rank))
    off = sparse - sp.diags_array(sparse.diagonal())
    off = sp.csr_matrix(off)
    off.eliminate_zeros()
    graph = off.indptr.astype(np.int64), off.indices.astype(np.int32), pull, np.ones(9, bool)
    ours, theirs = Z.copy(), Z.copy()
    steps, same = np.full(9, 0.05), np.full(9, 0.05)
    old, older = rng.random(Z.shape), None
    older = old.copy()
    for _ in range(3):
        if published:
            move_rows_as_published(*graph, ours, ours.T @ ours, old, 0.3, 0.02)
            naive.tne_published_pass(G, theirs, pull, older, 0.3, 0.02)
        else:
            move_rows(*graph, ours, ours.T @ ours, steps)
            naive.tne_pass(G, theirs, pull, same)
        np.testing.assert_allclose(ours, theirs, atol=1e-7)
    assert snapshot_misfit(sparse, ours) == pytest.approx(naive.tne_objective([G], [ours], 0.0))


def test_the_slope_of_tne_is_that_of_its_objective() -> None:
    _, G = snapshots_of(1)
    np.fill_diagonal(G, 0)
    Z = np.random.default_rng(0).random((9, 3))

    # The diagonal is constant for rows of length 1, so it is left out of both.
    def value(W: Any) -> float:
        total = 0.0
        for u in range(9):
            for v in range(9):
                if u != v:
                    total += (G[u, v] - W[u] @ W[v]) ** 2
        return total

    off = Z @ Z.T
    np.fill_diagonal(off, 0)
    np.testing.assert_allclose(naive.numerical_gradient(value, Z), -4 * (G - off) @ Z, atol=1e-5)


@given(st.integers(0, 100), st.integers(1, 6))
def test_tne_falls(seed: int, rank: int) -> None:
    sparse, _ = snapshots_of(seed)
    start = start_rows(sparse, np.ones(9, bool), rank, seed)
    pull = 0.01 * start
    Z, history = fit_snapshot(sparse, start, pull, passes=30, tol=1e-9, published=False)
    assert all(b <= a + 1e-9 for a, b in pairwise(history))
    assert (Z >= 0).all()
    np.testing.assert_allclose(np.linalg.norm(Z, axis=1), 1)


def test_tne_finds_cliques() -> None:
    blocks = np.kron(np.eye(3), np.ones((4, 4)))
    G = sp.csr_matrix(blocks)
    start = start_rows(G, np.ones(12, bool), 3, 0)
    Z, history = fit_snapshot(G, start, np.zeros_like(start), passes=200, tol=1e-12, published=False)
    assert history[-1] < 0.3 * history[0]
    assert np.isfinite(Z).all()


def test_the_start_of_tne_is_the_best_of_its_draws() -> None:
    sparse, G = snapshots_of(2)
    live = np.ones(9, bool)
    live[4] = False
    G[4] = G[:, 4] = 0
    sparse = sp.csr_matrix(G)
    Z = start_rows(sparse, live, 3, 5)
    best = naive.tne_objective([G], [Z], 0.0)
    rng = np.random.default_rng(0)
    for _ in range(20):
        other = np.eye(3)[rng.integers(0, 3, 9)] * live[:, None]
        assert best <= naive.tne_objective([G], [other], 0.0) + 12
    assert not Z[4].any()
    assert roughness(Z, Z) == 0


def test_the_gradient_of_the_autoencoder() -> None:
    rng = np.random.default_rng(0)
    X = rng.random((4, 5)) * (rng.random((4, 5)) < 0.6)
    near = rng.random((4, 4))
    near = near + near.T
    weights = [w.astype(np.float64) + 0.1 for w in start_weights(5, 2, 0)]
    guide = Guide(0.3, 3.0, 0.01)
    loss, gradients = loss_and_gradients(sp.csr_matrix(X), sp.csr_matrix(near), weights, guide)  # type: ignore[arg-type]
    assert loss == pytest.approx(naive.autoencoder_loss(X, near, weights, guide))
    for at, found in enumerate(gradients):

        def value(w: Any, at: int = at) -> float:
            return naive.autoencoder_loss(X, near, [*weights[:at], w, *weights[at + 1 :]], guide)

        np.testing.assert_allclose(found, naive.numerical_gradient(value, weights[at]), atol=1e-5)


@settings(max_examples=5)
@given(st.integers(0, 9))
def test_the_autoencoder_learns(seed: int) -> None:
    blocks = np.zeros((21, 21), np.float32)
    blocks[:20, :20] = np.kron(np.eye(4), np.ones((5, 5)))
    X = sp.csr_matrix(blocks)
    Y, losses = train_autoencoder(X, 3, epochs=60, rate=0.01, batch=7, seed=seed)
    assert losses[-1] < 0.5 * losses[0]
    assert not Y[-1].any()
    again, _ = train_autoencoder(X, 3, epochs=60, rate=0.01, batch=7, seed=seed)
    assert Y.tobytes() == again.tobytes()
