"""The filter in time: equal to its slow twin, and what it promises."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests import naive_filter as naive
from tests.harness.strategies import EXTREME, Events, events, random_tensor
from toffee_dist import TemporalTensor
from toffee_dist.kernels import gains as energies
from toffee_dist.kernels.entries import NodeEntries, project_rows
from toffee_dist.kernels.filter import (
    PairFilter,
    TimeKernel,
    filter_rows,
    learn_kernel,
    noise_levels,
    steadiness,
)
from toffee_dist.kernels.gains import Span, block_energies, epoch_energies, gains, no_patterns, padded_length

Array = NDArray[Any]


def dense(tensor: TemporalTensor) -> Array:
    return np.asarray(tensor.to_coo().todense())


def basis(n_nodes: int, rank: int, seed: int = 0) -> Array:
    return np.linalg.qr(np.random.default_rng(seed).standard_normal((max(n_nodes, rank), rank)))[0][:n_nodes]


def trajectory(tensor: TemporalTensor, V: Array, **options: Any) -> Array:
    rows = project_rows(tensor, V)
    return filter_rows(rows, learn_kernel([rows], tensor.n_steps, **options), np.arange(tensor.n_steps))


@given(events(), st.sampled_from([0.0, 0.5, 1.0, 3.0]))
def test_two_sided_filter_is_its_slow_twin(rows: Events, strength: float) -> None:
    tensor, V, T = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 3), rows.n_steps
    X = dense(tensor)
    y, length = naive.rows_in_time(X, V), padded_length(T)
    kappa = naive.kernel(naive.energies(y, length), naive.noise(X, V), length, T, strength)
    expected = np.stack([y[:, :, c] @ naive.two_sided(kappa[:, c]).T for c in range(3)], axis=2)
    found = trajectory(tensor, V, strength=strength)
    np.testing.assert_allclose(found, expected, atol=1e-8 * (1 + np.abs(y).max()))
    # The trajectory sums to X_0 V, whatever the gains.
    np.testing.assert_allclose(found.sum(axis=1), y.sum(axis=1), atol=1e-9 * (1 + np.abs(y).sum()))


def orthonormal(n_steps: int, count: int, seed: int = 0) -> Array:
    """Return patterns without a mean, as many as there can be."""
    random = np.random.default_rng(seed).standard_normal((n_steps, min(count, n_steps - 1)))
    return np.linalg.qr(random - random.mean(axis=0))[0]


@given(events(), st.sampled_from([0.5, 1.0, 3.0]))
def test_filter_with_patterns_is_its_slow_twin(rows: Events, strength: float) -> None:
    tensor, V, T = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 3), rows.n_steps
    X, patterns = dense(tensor), orthonormal(T, 2)
    y, length = naive.rows_in_time(X, V), padded_length(T)
    E, left = naive.energies(y, length, patterns), naive.noise_left(patterns, length)
    kappa = naive.kernel(E, naive.noise(X, V), length, T, strength, left)
    own = naive.pattern_gains(X, V, patterns, strength)
    H = [naive.two_sided(kappa[:, c], patterns, own[:, c]) for c in range(3)]
    expected = np.stack([y[:, :, c] @ H[c].T for c in range(3)], axis=2)
    found = trajectory(tensor, V, strength=strength, patterns=patterns)
    # A gain may be the difference of two numbers that are nearly equal.
    np.testing.assert_allclose(found, expected, atol=1e-6 * (1 + np.abs(y).max()))
    np.testing.assert_allclose(found.sum(axis=1), y.sum(axis=1), atol=1e-9 * (1 + np.abs(y).sum()))


@given(events())
def test_causal_filter_is_its_slow_twin(rows: Events) -> None:
    tensor, V, T = rows.tensor(entry="count", pair_weight="raw"), basis(rows.n_nodes, 2), rows.n_steps
    X = dense(tensor)
    y, moments = naive.rows_in_time(X, V), Span(T).epochs(causal=True)
    expected = np.zeros_like(y)
    for t in range(T):
        moment = max(at for at in moments if at <= t + 1)
        past, length = X[:, :, :moment], padded_length(moment)
        E = naive.energies(naive.rows_in_time(past, V), length)
        kappa = np.zeros((T, 2))
        kappa[:moment] = naive.kernel(E, naive.noise(past, V), length, moment, 1.0)
        for c in range(2):
            expected[:, t, c] = y[:, :, c] @ naive.causal_row(kappa[:, c], t, T)
    np.testing.assert_allclose(
        trajectory(tensor, V, causal=True), expected, atol=1e-8 * (1 + np.abs(y).max())
    )


@given(st.integers(1, 9), st.lists(st.integers(0, 9), max_size=6), st.integers(0, 999), st.booleans())
def test_a_chain_of_appends_is_the_slow_twin_of_all_steps(
    window: int, news: list[int], seed: int, single: bool
) -> None:
    """Whatever the windows: each run has what the twin makes of the whole history, and what was published."""
    news = [min(new, window) for new in news]
    n, total, rng = 6, window + sum(news), np.random.default_rng(seed)
    X = np.where(rng.random((n, n, total)) < rng.choice([0.05, 0.3]), rng.integers(1, 4, (n, n, total)), 0.0)
    V = basis(n, 2).astype(np.float32 if single else np.float64)
    expected = naive.chain_trajectory(X, V.astype(np.float64), window, padded_length)
    published: dict[int, bytes] = {}
    span, kernel = Span(window, age=window), None
    for new in (0, *news):
        if kernel is not None:
            span = kernel.span.append(new, kernel.epochs[-1])
        i, j, s = np.nonzero(X[:, :, span.first : span.age])
        entries = NodeEntries(n, span.n_steps, i, j, s, X[:, :, span.first : span.age][i, j, s])
        rows = entries.project(lambda targets: V[targets])
        kernel = TimeKernel.learn(epoch_energies(rows, span, True), span, True, 1.0, kernel)
        Z = filter_rows(rows, kernel, span.before + np.arange(window))
        noise = noise_levels(rows, kernel, span.before + np.arange(window))
        wanted = expected[:, span.age - window : span.age]
        np.testing.assert_allclose(Z, wanted, atol=(1e-4 if single else 1e-8) * (1 + np.abs(wanted).max()))
        for t in range(window):
            one = filter_rows(rows, kernel, np.array([span.before + t]))[:, 0]
            now = Z[:, t].tobytes() + noise[:, t].tobytes()
            assert one.tobytes() == Z[:, t].tobytes()
            assert published.setdefault(span.age - window + t, now) == now
        # No more than the window needs.
        assert span.before <= window - 1
        assert len(kernel.epochs) <= len(Span(window).epochs(causal=True)) + 1


@pytest.mark.parametrize("t", [0, 1, 7, 18])
def test_nothing_after_a_step_reaches_it(t: int) -> None:
    """Not a byte: neither through the kernel nor through its gains."""
    tensor, V = random_tensor(0, 12, 20, 400, directed=False), basis(12, 4).astype(np.float32)
    X = dense(tensor)
    rng = np.random.default_rng(t)
    X[:, :, t + 1 :] = rng.random(X[:, :, t + 1 :].shape) * 5
    i, j, s = np.nonzero(X)
    other = TemporalTensor.from_events(
        i, j, s, X[i, j, s], n_nodes=12, n_steps=20, entry="sum", pair_weight="raw"
    )
    raw = TemporalTensor.from_coo(tensor.to_coo(), directed=True)
    before, after = (trajectory(data, V, causal=True)[:, : t + 1] for data in (raw, other))
    assert before.tobytes() == after.tobytes()
    # And the future does reach the two-sided one: the test can fail.
    assert trajectory(raw, V)[:, : t + 1].tobytes() != trajectory(other, V)[:, : t + 1].tobytes()


def test_the_last_step_does_not_speak_of_the_first() -> None:
    """Activity that lasts for some steps: neighbours in time speak of each other, the two ends do not."""
    rng = np.random.default_rng(0)
    starts = rng.integers(0, 36, 60)
    i, j = np.repeat(rng.integers(0, 9, (2, 60)), 5, axis=1)
    t = (starts[:, None] + np.arange(5)).ravel()
    tensor = TemporalTensor.from_events(i, j, t, n_nodes=9, n_steps=40, entry="count", pair_weight="raw")
    rows = project_rows(tensor, basis(9, 1))
    H = learn_kernel([rows], 40).matrix(0, np.array([0]))[0]
    assert H[1] - H[20] > 0.1
    # Circular, the last step would count as much as step 1.
    assert abs(H[39] - H[20]) < 0.2 * (H[1] - H[20])


@given(events())
def test_energies_by_lags_and_by_transforms_agree(rows: Events) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    active, length = project_rows(tensor, basis(rows.n_nodes, 3)), padded_length(rows.n_steps)
    aside = energies.with_mean(orthonormal(rows.n_steps, 2))
    by_lags, by_fft = (way(active, aside, length) for way in (energies._lag_energies, energies._fft_energies))
    for one, two in zip(by_lags, by_fft, strict=True):
        np.testing.assert_allclose(one, two, atol=1e-9 * (1 + by_fft[0].max(initial=0.0)))


@given(events(), st.integers(1, 3))
def test_blocks_of_nodes_add_up(rows: Events, size: int) -> None:
    tensor, V = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 2)
    n, T = rows.n_nodes, rows.n_steps
    cuts = [(start, min(start + size, n)) for start in range(0, n, size)]
    parts = [project_rows(tensor.take_rows(*cut), V) for cut in cuts]
    kernel = learn_kernel(parts, T)
    whole = trajectory(tensor, V)
    np.testing.assert_allclose(
        np.concatenate([filter_rows(part, kernel, np.arange(T)) for part in parts]), whole, atol=1e-8
    )
    # Any steps alone are the same steps.
    some = np.array([T - 1, 0])
    np.testing.assert_allclose(filter_rows(project_rows(tensor, V), kernel, some), whole[:, some], atol=1e-8)


@given(events(EXTREME))
def test_extreme_weights_stay_finite(rows: Events) -> None:
    tensor, V = rows.tensor(entry="sum", pair_weight="raw"), basis(rows.n_nodes, 2).astype(np.float32)
    for causal in (False, True):
        assert np.isfinite(trajectory(tensor, V, causal=causal)).all()


@pytest.mark.parametrize(("causal", "count"), [(True, 0), (False, 0), (False, 2)])
def test_every_way_to_filter_gives_the_same(
    causal: bool, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tensor, V, steps = random_tensor(5, 30, 17, 300), basis(30, 3), np.arange(17)
    rows = project_rows(tensor, V)
    kernel = learn_kernel([rows], 17, causal=causal, patterns=orthonormal(17, count))
    expected = np.stack([rows.direction(c) @ kernel.matrix(c, steps).T for c in range(3)], axis=2)
    costs = {"SPARSE_COST": 1e9, "DENSE_COST": 1e9, "FFT_COST": 1e9}
    for cheap in ("SPARSE_COST", "DENSE_COST", *([] if causal else ["FFT_COST"])):
        for name, cost in (costs | {cheap: 0.0}).items():
            monkeypatch.setattr("toffee_dist.kernels.filter." + name, cost)
        np.testing.assert_allclose(filter_rows(rows, kernel, steps), expected, atol=1e-10)
        np.testing.assert_allclose(filter_rows(rows, kernel, steps[::2]), expected[:, ::2], atol=1e-10)
    squares = [[np.square(kernel.matrix(c, np.array([t]))).sum() for c in range(3)] for t in steps]
    np.testing.assert_allclose(kernel.spread, squares, atol=1e-12)
    for step in steps:
        one = filter_rows(rows, kernel, np.array([step]))[:, 0]
        np.testing.assert_allclose(one, expected[:, step], atol=1e-10)


def test_gains_fall_with_strength_and_end_at_the_mean() -> None:
    tensor, V = random_tensor(1, 30, 25, 2000), basis(30, 3)
    found = block_energies(project_rows(tensor, V), no_patterns(25))
    weak, strong = (gains(found.signal, found.noise, strength) for strength in (1.0, 2.0))
    assert (strong <= weak).all()
    assert ((weak >= 0) & (weak <= 1)).all()
    Z = trajectory(tensor, V, strength=1e9)
    np.testing.assert_allclose(Z, np.broadcast_to(Z.mean(axis=1, keepdims=True), Z.shape), atol=1e-12)


def test_noise_level_is_what_shuffled_events_leave() -> None:
    """Events at random steps: the spread of a vector about its mean is its noise level."""
    rng = np.random.default_rng(0)
    n, T, V = 40, 30, basis(40, 4)
    # Few enough that hardly any two fall on one entry, whose square would be 4, not 2.
    i, j, t = rng.integers(0, n, 1200), rng.integers(0, n, 1200), rng.integers(0, T, 1200)
    tensor = TemporalTensor.from_events(i, j, t, n_nodes=n, n_steps=T, entry="count", pair_weight="raw")
    rows = project_rows(tensor, V)
    kernel = learn_kernel([rows], T, strength=0.0)
    Z, steps = filter_rows(rows, kernel, np.arange(T)), np.arange(T)
    spread = np.square(Z - Z.mean(axis=1, keepdims=True)).sum(axis=(1, 2))
    level = np.square(noise_levels(rows, kernel, steps)).sum(axis=1)
    assert spread.sum() / level.sum() == pytest.approx(1.0, abs=0.08)


@given(events())
def test_pair_filter_is_the_filter_of_its_tube(rows: Events) -> None:
    tensor, T = rows.tensor(entry="sum", pair_weight="raw"), rows.n_steps
    X, length = dense(tensor), padded_length(rows.n_steps)
    tubes = X.reshape(-1, T, 1)
    kappa = naive.kernel(naive.energies(tubes, length), np.array([(X**2).sum()]), length, T, 1.0)
    expected = X @ naive.two_sided(kappa[:, 0]).T
    i, j = (grid.ravel() for grid in np.indices(X.shape[:2]))
    pairs = PairFilter.learn(tensor)
    for t in range(T):
        found = pairs.at(t, i, j).reshape(X.shape[:2])
        known = np.abs(X).sum(axis=2) > 0
        np.testing.assert_allclose(found, expected[:, :, t] * known, atol=1e-8 * (1 + np.abs(X).max()))


def test_same_behaviour_same_vector() -> None:
    """UASE's stabilities: nodes with the same rates at a step, a node with the same rates at two steps."""
    rng = np.random.default_rng(3)
    T, n, size = 40, 200, 50
    group = np.arange(n) // size
    rate = np.array([[0.5, 0.1, 0.1, 0.1], [0.1, 0.5, 0.1, 0.1], [0.1, 0.1, 0.4, 0.2], [0.1, 0.1, 0.2, 0.4]])
    i, j, t = [], [], []
    for step in range(T):
        # In odd tens of steps, groups 0 and 1 behave alike.
        now = rate.copy()
        if step // 10 % 2:
            now[0] = now[:, 0] = now[1] = now[:, 1] = 0.3
        a, b = np.triu_indices(n, 1)
        linked = rng.random(len(a)) < now[group[a], group[b]]
        i.append(a[linked])
        j.append(b[linked])
        t.append(np.full(linked.sum(), step))
    tensor = TemporalTensor.from_events(
        np.concatenate(i), np.concatenate(j), np.concatenate(t), n_nodes=n, directed=False, pair_weight="raw"
    )
    values, vectors = np.linalg.eigh(dense(tensor).sum(axis=2))
    V = vectors[:, np.argsort(-np.abs(values))[:6]]
    Z = trajectory(tensor, V)
    means = np.stack([Z[group == g].mean(axis=0) for g in range(4)])
    scale = np.linalg.norm(means[0, 5] - means[2, 5])
    # Cross-sectional: alike at step 15, apart at step 5.
    assert np.linalg.norm(means[0, 15] - means[1, 15]) < 0.1 * scale
    assert np.linalg.norm(means[0, 5] - means[1, 5]) > 0.5 * scale
    # Longitudinal: group 0 behaves alike at steps 5 and 25, not at 5 and 15.
    assert np.linalg.norm(means[0, 5] - means[0, 25]) < 0.1 * scale
    assert np.linalg.norm(means[0, 5] - means[0, 15]) > 0.3 * scale


@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize("at_once", [1, 1 << 24])
def test_steadiness_is_its_slow_twin(count: int, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toffee_dist.kernels.filter.STEADY_NUMBERS", at_once)
    rng = np.random.default_rng(7)
    i, j, t = rng.integers(0, 11, 150), rng.integers(0, 11, 150), rng.integers(0, 9, 150)
    # The last node has no entries.
    tensor, V = TemporalTensor.from_events(i, j, t, n_nodes=12, n_steps=9), basis(12, 3)
    rows = project_rows(tensor, V)
    kernel = learn_kernel([rows], 9, patterns=orthonormal(9, count))
    H = np.stack([kernel.matrix(c, np.arange(9)) for c in range(3)])
    mean, share = steadiness(rows, kernel)
    expected = naive.steadiness(dense(tensor), V, H)
    np.testing.assert_allclose(mean, expected[0], atol=1e-12)
    np.testing.assert_allclose(share, expected[1], atol=1e-9)
    assert share[11] == 0
    assert 0 < share.max() < 1


def test_movement_by_chance_is_nobodys_own() -> None:
    """A node that changes its company half-way keeps its movement; one whose links do not does not."""
    rng, n, T = np.random.default_rng(0), 60, 40
    group = np.arange(n) % 2
    i, j, t = rng.integers(0, n, 12000), rng.integers(0, n, 12000), rng.integers(0, T, 12000)
    side = np.where((i % 4 < 2) & (t >= T // 2), 1 - group[i], group[i])
    kept = side == group[j]
    tensor = TemporalTensor.from_events(i[kept], j[kept], t[kept], n_nodes=n, n_steps=T)
    V = np.linalg.svd(dense(tensor).sum(axis=2))[2][:4].T
    rows = project_rows(tensor, V)
    _, share = steadiness(rows, learn_kernel([rows], T))
    movers = np.arange(n) % 4 < 2
    assert share[movers].min() > 0.7
    assert share[~movers].mean() < 0.3
