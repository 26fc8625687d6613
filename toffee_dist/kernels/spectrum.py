"""The Fourier transform along time: X_k = Σ_t X(:,:,t)·exp(−2πi·k·t/T), and back.

NumPy's convention (forward unnormalised, inverse 1/T). X is real, so X_{T−k} = conj(X_k) and only
k = 0 … T//2 exist here. The P×F spectrum is dense in time and is never formed: a caller asks for a
batch of frequencies and gets P×batch values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import scipy.fft
import scipy.sparse as sp
from numpy.typing import ArrayLike, NDArray

from toffee_dist.errors import ConfigError
from toffee_dist.tensor import Floats, Ints, TemporalTensor

# Nanoseconds, measured (one thread, mathoverflow by weeks, email by days, workplace by hours): a
# direct transform takes 2 to 4 an event and frequency, an FFT 0.9 to 1.8 a pair, step and log2(step).
DIRECT_COST, FFT_COST = 3.0, 1.2
# Nanoseconds of two events of one tube in the autocorrelation: 10 to 27 measured on the same graphs and more.
LAG_COST = 15.0
# Bytes of dense tubes, or of slice values, that are held at once.
BLOCK_BYTES = 64 * 2**20

Inexacts = NDArray[np.inexact[Any]]


def count_freqs(n_steps: int) -> int:
    """Return F = T//2 + 1, the frequencies that need solving."""
    return n_steps // 2 + 1


def is_real(k: int, n_steps: int) -> bool:
    """Whether slice k of a real tensor is real: k = 0, and k = T/2 (Nyquist) for even T."""
    return k == 0 or 2 * k == n_steps


def multiplicities(freqs: ArrayLike, n_steps: int) -> Ints:
    """Return m_k: 1 for the real slices, 2 for the others (they stand for k and T−k)."""
    k = np.asarray(freqs, dtype=np.int64)
    return np.where((k == 0) | (2 * k == n_steps), 1, 2)


def _angles(freqs: ArrayLike, steps: ArrayLike, n_steps: int) -> Floats:
    # k·t mod T in integers first: the angle is then exact to one rounding for any k·t.
    cycles = np.multiply.outer(np.asarray(steps, np.int64), np.asarray(freqs, np.int64)) % n_steps
    return np.asarray(2.0 * np.pi / n_steps * cycles)


def transform(tensor: TemporalTensor, freqs: Sequence[int]) -> NDArray[np.complex128]:
    """Return the values of the slices `freqs` on the union pattern, shape (len(freqs), n_pairs)."""
    out = np.empty((len(freqs), tensor.n_pairs), dtype=np.complex128)
    for pairs, part, values in _iter_pairs(tensor, freqs):
        out[part, pairs] = values
    return out


def _iter_pairs(
    tensor: TemporalTensor, freqs: Sequence[int]
) -> Iterator[tuple[slice, slice, NDArray[np.complex128]]]:
    """Yield blocks of pairs, of positions in `freqs`, and their values, (positions, pairs).

    By a direct sparse-dense product or by an FFT of dense tubes, whichever is cheaper for this many
    frequencies (fact 6). Neither holds more than a few `BLOCK_BYTES`, however many steps there are.
    """
    check_freqs(freqs, tensor.n_steps)
    n_steps, tubes = tensor.n_steps, tensor.tubes
    direct_cost, fft_cost = _transform_costs(tensor, len(freqs))
    direct = direct_cost <= fft_cost
    # A direct transform needs cos and sin of every step at its frequencies.
    width = max(1, min(len(freqs), BLOCK_BYTES // (16 * n_steps))) if direct else len(freqs)
    rows = max(1, BLOCK_BYTES // (16 * (width if direct else max(n_steps, 1))))
    for first in range(0, len(freqs), max(width, 1)):
        part = slice(first, min(first + width, len(freqs)))
        angles = _angles(freqs[part], np.arange(n_steps), n_steps) if direct else np.empty(0)
        cosines, sines = np.cos(angles), np.sin(angles)
        for start in range(0, tensor.n_pairs, rows):
            pairs = slice(start, min(start + rows, tensor.n_pairs))
            block = tubes[pairs]
            if direct:
                values = np.empty((part.stop - part.start, block.shape[0]), dtype=np.complex128)
                values.real = (block @ cosines).T
                values.imag = -(block @ sines).T
            else:
                values = scipy.fft.rfft(block.toarray(), axis=1)[:, list(freqs)].T
            yield pairs, part, values


def _transform_costs(tensor: TemporalTensor, n_freqs: int) -> tuple[float, float]:
    """Return the nanoseconds of a direct transform and of an FFT."""
    fft = FFT_COST * tensor.n_pairs * tensor.n_steps * np.log2(max(tensor.n_steps, 2))
    return DIRECT_COST * tensor.n_entries * n_freqs, fft


def iter_values(
    tensor: TemporalTensor, freqs: Sequence[int], wanted: Collection[int] | None = None
) -> Iterator[tuple[int, NDArray[Any]]]:
    """Yield (k, values of slice k on the union pattern); real slices have real values.

    Frequencies are transformed in batches of at most `BLOCK_BYTES`: memory is O(events + pairs·batch). Where
    some are `wanted`, only those come, with the bits that they have among all of `freqs`: a batch is
    transformed as a whole, since an FFT and direct sums differ in the last digits and which is cheaper
    depends on how many there are.
    """
    batch = max(1, BLOCK_BYTES // (16 * max(tensor.n_pairs, 1)))
    for start in range(0, len(freqs), batch):
        part = freqs[start : start + batch]
        if wanted is not None and not any(k in wanted for k in part):
            continue
        for k, values in zip(part, transform(tensor, part), strict=True):
            if wanted is None or k in wanted:
                yield k, values.real.copy() if is_real(k, tensor.n_steps) else values


def slice_matrix(tensor: TemporalTensor, values: Inexacts) -> sp.csr_matrix[Any]:
    """Return slice values on the union pattern as a CSR matrix that shares the pattern's memory."""
    shape = (tensor.n_nodes, tensor.n_nodes)
    return sp.csr_matrix((values, tensor.indices, tensor.indptr), shape=shape, copy=False)


def slice_energies(tensor: TemporalTensor) -> Floats:
    """Return ‖X_k‖² for k = 0 … T//2. Parseval: ‖X‖² = (1/T) Σ_k m_k ‖X_k‖².

    Energies are the transform of the autocorrelation, which needs the pairs of events in one tube only:
    with few events a tube that is far less than transforming every tube.
    """
    counts = np.diff(tensor.tube_ptr).astype(np.float64)
    direct, dense = _transform_costs(tensor, count_freqs(tensor.n_steps))
    if LAG_COST * float((counts * (counts - 1)).sum()) / 2 <= min(direct, dense):
        correlation = _autocorrelation(tensor)
        return np.maximum(scipy.fft.rfft(correlation).real, 0.0)
    energies = np.zeros(count_freqs(tensor.n_steps))
    for _, part, values in _iter_pairs(tensor, range(len(energies))):
        energies[part] += np.square(np.abs(values)).sum(axis=1)
    return energies


def _autocorrelation(tensor: TemporalTensor) -> Floats:
    """Return c(l) = Σ_pairs Σ_t x(t)·x(t + l mod T), l = 0 … T−1."""
    lags = np.zeros(tensor.n_steps)
    at = 0
    while at < tensor.n_pairs:
        # Whole tubes, about as many events as a block holds; a single tube has at most T.
        limit = tensor.tube_ptr[at] + BLOCK_BYTES // 64
        stop = max(at + 1, int(np.searchsorted(tensor.tube_ptr, limit, side="right")) - 1)
        ends = np.asarray(tensor.tube_ptr[at : stop + 1], dtype=np.int64)
        steps, values = tensor.steps[ends[0] : ends[-1]], tensor.values[ends[0] : ends[-1]]
        lags[0] += float(np.square(values).sum())
        left = np.repeat(ends[1:], np.diff(ends)) - np.arange(ends[0], ends[-1])  # events to the tube's end
        first = np.flatnonzero(left > 1)
        apart = 1
        while len(first):
            lag = steps[first + apart] - steps[first]
            lags += np.bincount(lag, values[first] * values[first + apart], minlength=tensor.n_steps)
            apart += 1
            first = first[left[first] > apart]
        at = stop
    lags[1:] += lags[:0:-1].copy()
    return lags


def node_energies(tensor: TemporalTensor, freqs: Sequence[int] | None = None) -> Floats:
    """Return Σ_j |X_k(i,j)|² for every node i and frequency k, shape (n_nodes, len(freqs)).

    Which nodes live by the day, which by the week: the row sums of the energies of the slices.
    """
    freqs = range(count_freqs(tensor.n_steps)) if freqs is None else freqs
    energies = np.zeros((tensor.n_nodes, len(freqs)))
    sources = tensor.sources
    for pairs, part, values in _iter_pairs(tensor, freqs):
        # Pairs are sorted by source: a block touches a run of nodes.
        nodes, starts = np.unique(sources[pairs], return_index=True)
        energies[nodes, part] += np.add.reduceat(np.square(np.abs(values)), starts, axis=1).T
    return energies


def inverse_transform(
    hat: Inexacts, freqs: Sequence[int], n_steps: int, steps: ArrayLike | None = None
) -> Inexacts:
    """Return the real signal whose frequencies `freqs` are `hat` and whose others are zero.

        z(t) = (1/T) Σ_k m_k Re(ẑ_k·exp(2πi·k·t/T))

    Parameters
    ----------
    hat : (len(freqs), …)
        The imaginary part at k = 0 and Nyquist does not reach a real signal, as in `irfft`.
    freqs, n_steps
        The frequencies, each in 0 … T//2, and T.
    steps
        The steps wanted, default all.

    Returns
    -------
    (len(steps), …), real, in the precision of `hat`.
    """
    check_freqs(freqs, n_steps)
    real = hat.real.dtype
    if steps is None and len(freqs) > 4 * np.log2(max(n_steps, 2)):
        full = np.zeros((count_freqs(n_steps), *hat.shape[1:]), dtype=np.result_type(hat, np.complex64))
        full[list(freqs)] = hat
        return np.asarray(scipy.fft.irfft(full, n=n_steps, axis=0), dtype=real)
    wanted = np.arange(n_steps) if steps is None else np.asarray(steps, dtype=np.int64)
    angles = _angles(freqs, wanted, n_steps)
    weights = multiplicities(freqs, n_steps) / n_steps
    cosines, sines = (
        (np.cos(angles) * weights).astype(real),
        (np.sin(angles) * weights).astype(real),
    )
    signal = np.tensordot(cosines, hat.real, axes=1)
    if np.iscomplexobj(hat):
        signal -= np.tensordot(sines, hat.imag, axes=1)
    return np.asarray(signal)


def check_freqs(freqs: Sequence[int], n_steps: int) -> None:
    """Raise `ConfigError` unless every frequency lies in 0 … T//2."""
    wrong = [k for k in freqs if not 0 <= k <= n_steps // 2]
    if wrong:
        raise ConfigError("frequency", got=wrong[0], allowed=f"0 to {n_steps // 2} for {n_steps} steps")
