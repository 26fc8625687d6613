"""From solved slices to what a user asks for: reductions over time, trajectories, factors, scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from toffee_dist.kernels.gauge import project
from toffee_dist.kernels.solvers.base import SliceFactors, Tall, times
from toffee_dist.kernels.spectrum import inverse_transform
from toffee_dist.settings import parse_reduce
from toffee_dist.tensor import Floats, TemporalTensor

# Bytes of slice rows that a block of nodes may take in an inverse transform.
BLOCK_BYTES = 128 * 2**20


def step_weights(reduce: str, n_steps: int) -> Floats | None:
    """Return the weights w_t of a reduction over time, or None for the plain sum.

    Parameters
    ----------
    reduce
        ``sum`` (the paper's), ``last:N`` (the last N steps alike, the others not at all) or
        ``decay:H`` (w_t = 2^{−(T−1−t)/H}: a step counts half as much as one H steps later).
    n_steps
        T.

    Examples
    --------
    >>> step_weights("decay:1", 3)
    array([0.25, 0.5 , 1.  ])
    >>> step_weights("last:1", 3)
    array([0., 0., 1.])
    """
    found = parse_reduce(reduce)
    return None if found.kind == "sum" else weigh(found.kind, found.amount, n_steps)


def weigh(kind: str, amount: float, n_steps: int) -> Floats:
    """Return the weights of ``last`` or ``decay`` of so many steps."""
    if kind == "last":
        return (np.arange(n_steps) >= n_steps - amount).astype(np.float64)
    return np.asarray(0.5 ** (np.arange(n_steps)[::-1] / amount))


@dataclass(frozen=True)
class TimeWeights:
    """Weights in time that go in before the transform (fact 7), so that their sum is one zero slice.

    Parameters
    ----------
    reduce
        As in `step_weights`.
    leave_out
        Steps at the end that count nothing; the others are weighted as if these were not there.
    """

    reduce: str = "sum"
    leave_out: int = 0

    def apply(self, tensor: TemporalTensor) -> TemporalTensor:
        """Return the tensor with its snapshots multiplied by the weights."""
        seen = tensor.n_steps - self.leave_out
        weights = step_weights(self.reduce, seen)
        if self.leave_out:
            weights = np.append(np.ones(seen) if weights is None else weights, [0.0] * self.leave_out)
        return tensor if weights is None else tensor.with_step_weights(weights)


SUM = TimeWeights()


def raw_embedding(zero: SliceFactors) -> NDArray[np.float32]:
    """Return A_0·R_0, the paper's embedding: the sum over time is the zero frequency (fact 1)."""
    return times(zero.A, zero.R).astype(np.float32)


def trajectory(
    slices: Mapping[int, SliceFactors],
    V: Tall | None,
    n_steps: int,
    nodes: ArrayLike | None = None,
    steps: ArrayLike | None = None,
) -> NDArray[Any]:
    """Return a vector per step and node, shape (len(steps), len(nodes), rank).

    Z(t) = irfft over k of M_k V = A_k R_k (A_kᴴ V): independent of every slice's gauge, in one basis for
    all t, and Σ_t Z(t) = U·S. Frequencies that are not in `slices` count as zero.

    Parameters
    ----------
    slices
        Solved slices by frequency.
    V
        Right singular vectors of M_0; None gives the paper's raw irfft(A_k R_k), whose axes mix.
    n_steps
        T.
    nodes, steps
        Rows and steps wanted, default all.
    """
    smalls = {k: f.R if V is None else project(f, V) for k, f in slices.items()}
    first = next(iter(slices.values()))
    rows = np.arange(len(first.A)) if nodes is None else np.asarray(nodes)
    rank = first.A.shape[1]
    wanted = n_steps if steps is None else np.size(steps)
    out = np.empty((wanted, len(rows), rank), dtype=first.A.real.dtype)
    size = max(1, BLOCK_BYTES // (16 * rank * (len(slices) + n_steps)))
    for start in range(0, len(rows), size):
        block = rows[start : start + size]
        hat = np.stack([times(f.A[block], smalls[k]) for k, f in slices.items()])
        out[:, start : start + size] = inverse_transform(hat, list(slices), n_steps, steps)
    return out


def factors_in_time(slices: Mapping[int, SliceFactors], n_steps: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return A (T, n, r) and R (T, r, r) in time, the paper's inverse transform of all slices."""
    freqs = list(slices)
    A = inverse_transform(np.stack([f.A for f in slices.values()]), freqs, n_steps)
    R = inverse_transform(np.stack([f.R for f in slices.values()]), freqs, n_steps)
    return A, R


def pair_scores(
    slices: Mapping[int, SliceFactors],
    source: NDArray[np.integer[Any]],
    target: NDArray[np.integer[Any]],
    n_steps: int,
    step: int | None,
) -> Floats:
    """Return the model's own link score, an entry of A R Aᴴ: summed over time, or at one step.

    Summed: M_0(i,j). At step t: (1/T) Σ_k m_k Re(M_k(i,j)·exp(2πi·k·t/T)).
    """
    freqs: Sequence[int] = [0] if step is None else list(slices)
    hat = np.stack([entries(slices[k], source, target) for k in freqs])
    if step is None:
        return np.asarray(hat[0].real, dtype=np.float64)
    return np.asarray(inverse_transform(hat, freqs, n_steps, [step])[0], dtype=np.float64)


def entries(
    factors: SliceFactors, source: NDArray[np.integer[Any]], target: NDArray[np.integer[Any]]
) -> NDArray[Any]:
    """Return the entries of the fit M = A R Aᴴ at pairs, in blocks of pairs."""
    # M(i,j) = A(i,:) R A(j,:)ᴴ
    out = np.empty(len(source), dtype=np.result_type(factors.R.dtype, factors.A.dtype))
    size = max(1, BLOCK_BYTES // (32 * factors.A.shape[1]))
    for start in range(0, len(source), size):
        block = slice(start, start + size)
        left = factors.A[source[block]] @ factors.R
        out[block] = np.einsum("pr,pr->p", left, factors.A[target[block]].conj())
    return out
