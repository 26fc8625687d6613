"""The model's own score of pairs, from what a run publishes.

With M_0 = U S Vᵀ and the published E = U·S^{2/3}·Q, F = V·S^{2/3}·Q (Q: the rotation of a refresh, else I):

    summed over time    M_0(i,j)   = E_i Qᵀ diag(S^{−1/3}) Q F_jᵀ
    at one step         Z_i(t)·V_j = Z_i(t) Qᵀ diag(S^{−2/3}) Q F_jᵀ     Z(t) = irfft(M_k V) Q, the trajectory

S^{2/3} are the lengths of the columns of E·Qᵀ. Of an undirected graph V is U with the signs of the
eigenvalues, which fold.npy holds. At a step this is the fit seen through the common basis, M_k V Vᵀ. A run
with the output factors has the whole fit: x̂_ij(t) = irfft over k of A_k(i) R_k A_k(j)ᴴ.

A filtered trajectory has its basis at hand: Z_i(t)·V_j, on undirected graphs the mean of both orders. To
that the pair's own entries are added, filtered in time: both estimate the same entry, one from the company
that both nodes keep, one from what this pair did.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from toffee_dist.errors import InputError
from toffee_dist.kernels.spectrum import count_freqs, inverse_transform
from toffee_dist.results.nodes import find_nodes, find_step
from toffee_dist.results.outside import read_outside, refuse_moment
from toffee_dist.results.published import PublishedRun
from toffee_dist.storage.compact import CompactTrajectory
from toffee_dist.storage.vectors import (
    CompactTable,
    VectorBlock,
    Vectors,
    map_blocks,
    read_node_rows,
    read_nodes,
)
from toffee_dist.tensor import Floats, Ints

# Pairs whose vectors are in memory at once, and bytes of factors.
BATCH = 1 << 16
FACTOR_BYTES = 128 * 2**20


def score_pairs(
    run: PublishedRun,
    sources: Sequence[object],
    targets: Sequence[object],
    at: int | str | None = None,
    *,
    memory: bool = True,
    where: str | None = None,
) -> Floats:
    """Return the model's own score of pairs, entries of the fit: summed over time, or at one step.

    Parameters
    ----------
    run
        A run of the model toffee in the canonical gauge; with ``at``, one with factors or a trajectory.
    sources, targets
        Ids, of equal lengths.
    at
        A step or a moment; None sums over time as the run's ``reduce`` says.
    memory
        At a step of a filtered trajectory: whether what a pair itself did counts beside the low rank.
    where
        Where the vectors of the sources are, if not in the run; as in `neighbors`.
    """
    if len(sources) != len(targets):
        raise InputError(
            "sources and targets",
            got=f"{len(sources)} and {len(targets)}",
            allowed="equal lengths",
            remedy="Give one target for each source.",
        )
    step = None if at is None else find_step(run.grid, at)
    spaces = ("source", "target") if run.manifest.config.bipartite else (None, None)
    if where is not None:
        refuse_moment(at)
        known = [node.row for node in find_nodes(run, targets, spaces[1])]
        return _score_by_vectors(run, read_outside(run, where, sources, "embedding", spaces[0]), known, None)
    i, j = (
        [node.row for node in find_nodes(run, names, space)]
        for names, space in zip((sources, targets), spaces, strict=True)
    )
    if step is not None and "factors/A_freq" in run.manifest.outputs:
        return _score_by_factors(run, i, j, step)
    if step is not None:
        table = run.vectors("trajectory")
        if isinstance(table, CompactTable):
            return _score_by_compact(table.compact, np.array(i), np.array(j), step, memory)
    return _score_by_vectors(run, i, j, step)


def _score_by_factors(run: PublishedRun, i: list[int], j: list[int], step: int) -> Floats:
    """Return x̂_ij(t) of the frequencies that the trajectory has, or of all of them."""
    freqs = list(range(count_freqs(run.n_steps)))
    if "trajectory" in run.manifest.outputs:
        table = run.frequencies
        freqs = table.collect(table.polars().filter("chosen"))["k"].to_list()
    A = run.vectors("factors/A_freq")
    R = run.factors("R_freq").numpy().reshape(-1, run.rank, run.rank)[freqs]

    out = np.empty(len(i))
    size = max(1, FACTOR_BYTES // (64 * count_freqs(run.n_steps) * run.rank))
    for start in range(0, len(i), size):
        part = slice(start, start + size)
        left = np.einsum("pkr,krs->pks", read_node_rows(A, i[part])[:, freqs], R)
        hat = np.einsum("pks,pks->kp", left, read_node_rows(A, j[part])[:, freqs].conj())
        out[part] = inverse_transform(hat, freqs, run.n_steps, [step])[0]
    return out


def _score_by_compact(compact: CompactTrajectory, i: Ints, j: Ints, step: int, memory: bool) -> Floats:
    """Return Z_i(t)·V_j, and what the pair's own entries add; a rotation changes no product."""
    plain = CompactTrajectory(compact.folder)
    out = np.empty(len(i))
    for start in range(0, len(i), BATCH):
        part = slice(start, start + BATCH)
        a, b = i[part], j[part]
        out[part] = _products(plain, a, b, step)
        if not plain.directed:
            out[part] = (out[part] + _products(plain, b, a, step)) / 2
        if memory:
            out[part] += plain.pair_rates(a, b, step)
    return out


def _products(compact: CompactTrajectory, i: Ints, j: Ints, step: int) -> Floats:
    Z = compact.read_nodes(i, np.array([step]))[:, 0].astype(np.float64)
    targets, at = np.unique(j, return_inverse=True)
    return np.asarray(np.einsum("pr,pr->p", Z, compact.basis(targets)[at].astype(np.float64)))


def _score_by_vectors(run: PublishedRun, i: list[int] | Vectors, j: list[int], step: int | None) -> Floats:
    """Return scores of sources, by their rows or their vectors, with targets."""
    _check_run(run, step)
    core = _core(run, power=1 / 3 if step is None else 2 / 3)
    left = run.vectors("embedding" if step is None else "trajectory")
    right = run.vectors("embedding_target" if run.manifest.directed else "embedding")
    out = np.empty(len(i))
    for start in range(0, len(i), BATCH):
        part = slice(start, start + BATCH)
        E = i[part] if isinstance(i, np.ndarray) else read_nodes(left, i[part], step)
        F = read_nodes(right, j[part]).astype(np.float64)
        out[part] = np.einsum("pr,pr->p", E.astype(np.float64) @ core, F)
    return out


def _check_run(run: PublishedRun, step: int | None) -> None:
    config = run.manifest.config
    for output in ("embedding", *(["trajectory"] if step is not None else [])):
        run.vectors(output)  # Refused where the run has none.
    # Only runs whose vectors are those of a solved zero slice have the file.
    if not run.folder.fold_weights.exists():
        raise InputError(
            "this run has no score of its own",
            got=f"model {config.model}, gauge {config.gauge}",
            allowed="model toffee or toffee-, gauge canonical",
            remedy="Compare vectors with toffee neighbors, or embed again with the defaults.",
        )
    if step is not None and config.reduce != "sum":
        raise InputError(
            "score at a step",
            got=f"a run with reduce {config.reduce}",
            allowed="reduce sum, whose embedding is in the basis of the trajectory",
            remedy="Leave --at out, or embed again with --reduce sum or --outputs factors.",
        )


def _core(run: PublishedRun, power: float) -> Floats:
    """Return Qᵀ diag(±S^{−power}) Q, r×r."""
    rotation = run.folder.read_rotation(run.rank)
    Q = np.eye(run.rank) if rotation is None else rotation

    def squares(block: VectorBlock) -> Floats:
        return np.asarray(np.square(block.read() @ Q.T.astype(np.float32)).sum(axis=0, dtype=np.float64))

    scaled = np.sqrt(sum(map_blocks(squares, run.vectors("embedding").blocks()), np.zeros(run.rank)))
    # S^{2/3}; a column of nothing but rounding error is none.
    present = scaled > np.finfo(np.float32).eps * scaled.max(initial=0)
    weights = np.zeros(run.rank)
    weights[present] = scaled[present] ** (-1.5 * power)
    if not run.manifest.directed:
        weights *= np.sign(run.folder.read_fold_weights(run.rank)[0])
    return np.asarray(Q.T @ (weights[:, None] * Q))
