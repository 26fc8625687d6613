"""The transform along time against loops, both ways and on both paths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import naive
from tests.harness.strategies import Events, events, random_tensor
from toffee_dist import ConfigError, InputError, tproduct, ttranspose
from toffee_dist.kernels import spectrum


@pytest.mark.parametrize("direct", [True, False])
@given(rows=events())
def test_slices_match_the_definition(direct: bool, rows: Events) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    expected = naive.slices(np.asarray(tensor.to_coo().todense()))
    freqs = range(spectrum.count_freqs(rows.n_steps))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectrum, "DIRECT_COST", 0.0 if direct else np.inf)
        got = list(spectrum.iter_values(tensor, freqs))
    for k, values in got:
        dense = spectrum.slice_matrix(tensor, values).toarray()
        np.testing.assert_allclose(dense, expected[k], atol=1e-10)
        assert (values.dtype.kind == "f") == spectrum.is_real(k, rows.n_steps)


@pytest.mark.parametrize("n_steps", [1, 2, 7, 12])
def test_paths_and_blocks_agree(n_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = random_tensor(1, 30, n_steps, 400)
    freqs = list(range(spectrum.count_freqs(n_steps)))
    monkeypatch.setattr(spectrum, "DIRECT_COST", 0.0)
    direct = spectrum.transform(tensor, freqs)
    monkeypatch.setattr(spectrum, "DIRECT_COST", np.inf)
    monkeypatch.setattr(spectrum, "BLOCK_BYTES", 16 * n_steps * 7)
    np.testing.assert_allclose(spectrum.transform(tensor, freqs), direct, atol=1e-12)
    # Batches of one frequency give what one batch of all gives.
    for k, values in spectrum.iter_values(tensor, freqs):
        np.testing.assert_allclose(values, direct[k], atol=1e-12)


@pytest.mark.parametrize("block_bytes", [spectrum.BLOCK_BYTES, 16 * 400 * 20, 16 * 400 * 3])
@given(wanted=st.sets(st.integers(1, 30)))
def test_values_do_not_depend_on_how_many_are_wanted(block_bytes: int, wanted: set[int]) -> None:
    """Some of a batch are, to the bit, what the whole batch has: by FFT, by direct sums, in blocks."""
    freqs = list(range(1, 31))
    for tensor in (random_tensor(3, 20, 60, 9000), random_tensor(3, 20, 60, 420)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(spectrum, "BLOCK_BYTES", block_bytes)
            whole = dict(spectrum.iter_values(tensor, freqs))
            some = dict(spectrum.iter_values(tensor, freqs, wanted))
        assert list(some) == sorted(wanted)
        for k, values in some.items():
            assert values.tobytes() == whole[k].tobytes()


@given(events())
def test_parseval(rows: Events) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    energies = spectrum.slice_energies(tensor)
    m = spectrum.multiplicities(np.arange(len(energies)), rows.n_steps)
    np.testing.assert_allclose((m * energies).sum() / rows.n_steps, np.square(tensor.values).sum())


@pytest.mark.parametrize("lag_cost", [0.0, np.inf])
@given(rows=events())
def test_energies_by_autocorrelation_and_by_transform(lag_cost: float, rows: Events) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    X_hat = naive.slices(np.asarray(tensor.to_coo().todense()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spectrum, "LAG_COST", lag_cost)
        patch.setattr(spectrum, "BLOCK_BYTES", 64 * 5)
        got = spectrum.slice_energies(tensor)
    expected = (np.abs(X_hat) ** 2).sum(axis=(1, 2))
    np.testing.assert_allclose(got, expected, atol=1e-12 * max(expected.max(), 1.0), rtol=1e-9)


@given(events())
def test_node_energies_sum_to_slice_energies(rows: Events) -> None:
    tensor = rows.tensor(entry="count")
    X_hat = naive.slices(np.asarray(tensor.to_coo().todense()))
    got = spectrum.node_energies(tensor)
    np.testing.assert_allclose(got, (np.abs(X_hat) ** 2).sum(axis=2).T, atol=1e-9)
    np.testing.assert_allclose(got.sum(axis=0), spectrum.slice_energies(tensor), atol=1e-9)


@pytest.mark.parametrize("n_steps", [1, 2, 5, 8, 61, 64])
@given(data=st.data())
def test_inverse_matches_the_definition(n_steps: int, data: st.DataObject) -> None:
    n_freqs = spectrum.count_freqs(n_steps)
    freqs = data.draw(st.lists(st.integers(0, n_freqs - 1), min_size=1, unique=True))
    rng = np.random.default_rng(0)
    hat = rng.standard_normal((len(freqs), 3, 2)) + 1j * rng.standard_normal((len(freqs), 3, 2))
    for position, k in enumerate(freqs):
        if spectrum.is_real(k, n_steps):
            hat[position] = hat[position].real
    expected = naive.signal(dict(zip(freqs, hat, strict=True)), n_steps)
    np.testing.assert_allclose(spectrum.inverse_transform(hat, freqs, n_steps), expected, atol=1e-12)
    some = [n_steps - 1, 0]
    picked = spectrum.inverse_transform(hat, freqs, n_steps, some)
    np.testing.assert_allclose(picked, expected[some], atol=1e-12)


@given(events())
def test_there_and_back(rows: Events) -> None:
    tensor = rows.tensor(entry="sum", pair_weight="raw")
    freqs = list(range(spectrum.count_freqs(rows.n_steps)))
    back = spectrum.inverse_transform(spectrum.transform(tensor, freqs), freqs, rows.n_steps)
    np.testing.assert_allclose(back.T, tensor.tubes.toarray(), atol=1e-10)


def test_a_frequency_that_does_not_exist() -> None:
    with pytest.raises(ConfigError, match="frequency: got 4; allowed: 0 to 3"):
        spectrum.transform(random_tensor(0, 3, 6, 10), [0, 4])


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4), st.integers(1, 6))
def test_tproduct(n: int, m: int, p: int, n_steps: int) -> None:
    rng = np.random.default_rng(n + 10 * m + 100 * p)
    A, B = rng.standard_normal((n, m, n_steps)), rng.standard_normal((m, p, n_steps))
    np.testing.assert_allclose(tproduct(A, B), naive.tproduct(A, B), atol=1e-12)
    np.testing.assert_array_equal(ttranspose(A), naive.ttranspose(A))
    reverse = tproduct(ttranspose(B), ttranspose(A))
    np.testing.assert_allclose(ttranspose(tproduct(A, B)), reverse, atol=1e-12)


def test_tproduct_of_wrong_shapes() -> None:
    with pytest.raises(InputError, match=r"\(n,m,T\) and \(m,p,T\)"):
        tproduct(np.zeros((2, 3, 4)), np.zeros((2, 3, 4)))
    with pytest.raises(InputError, match="t-transpose"):
        ttranspose(np.zeros((2, 3)))
