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

from collections.abc import Callable, Sequence

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
    if where is not None:
        refuse_moment(at)
        spaces = _spaces(run)
        known = np.array([node.row for node in find_nodes(run, targets, spaces[1])], dtype=np.int64)
        E = read_outside(run, where, sources, "embedding", spaces[0])
        outside = vector_parts(run, None)
        return _in_batches(len(known), lambda part: outside(E[part], known[part]).sum(axis=1))
    i, j = find_pair_rows(run, sources, targets)
    if step is not None and "factors/A_freq" in run.manifest.outputs:
        return _score_by_factors(run, i, j, step)
    parts_of = score_parts(run, step)

    def score(part: slice) -> Floats:
        directions, own = parts_of(i[part], j[part])
        return np.asarray(directions.sum(axis=1) + (own if memory else 0.0))

    return _in_batches(len(i), score)


def _in_batches(count: int, score: Callable[[slice], Floats]) -> Floats:
    out = np.empty(count)
    for start in range(0, count, BATCH):
        part = slice(start, start + BATCH)
        out[part] = score(part)
    return out


def _spaces(run: PublishedRun) -> tuple[str | None, str | None]:
    return ("source", "target") if run.manifest.config.bipartite else (None, None)


def find_pair_rows(
    run: PublishedRun, sources: Sequence[object], targets: Sequence[object]
) -> tuple[Ints, Ints]:
    """Return the rows of sources and targets."""
    i, j = (
        np.array([node.row for node in find_nodes(run, names, space)], dtype=np.int64)
        for names, space in zip((sources, targets), _spaces(run), strict=True)
    )
    return i, j


def score_parts(run: PublishedRun, step: int | None) -> Callable[[Ints, Ints], tuple[Floats, Floats]]:
    """Return what gives, for rows i and j of pairs, the parts that a score without factors is the sum of.

    These are (pairs, r), what both nodes have in common along each direction of the common basis, and
    (pairs,), what the pair's own entries add at a step of a filtered trajectory, else 0.
    """
    table = None if step is None else run.vectors("trajectory")
    if step is not None and isinstance(table, CompactTable):
        # Before the rotation, which changes no product: the directions are those of the basis.
        plain = CompactTrajectory(table.compact.folder)
        return lambda i, j: (_company(plain, i, j, step), plain.pair_rates(i, j, step))
    left, parts_of = run.vectors("embedding" if step is None else "trajectory"), vector_parts(run, step)
    return lambda i, j: (parts_of(read_nodes(left, i, step), j), np.zeros(len(i)))


def vector_parts(run: PublishedRun, step: int | None) -> Callable[[Vectors, Ints], Floats]:
    """Return what gives, for vectors of sources and rows of targets, their products along each direction."""
    _check_run(run, step)
    Q, weights = _core(run, power=1 / 3 if step is None else 2 / 3)
    right = run.vectors("embedding_target" if run.manifest.directed else "embedding")

    def products(E: Vectors, j: Ints) -> Floats:
        F = read_nodes(right, j).astype(np.float64) @ Q.T
        return np.asarray(E.astype(np.float64) @ Q.T * weights * F)

    return products


def _score_by_factors(run: PublishedRun, i: Ints, j: Ints, step: int) -> Floats:
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


def _company(compact: CompactTrajectory, i: Ints, j: Ints, step: int) -> Floats:
    """Return Z_i(t)_l·V_jl, (pairs, r); of an undirected graph the mean of both orders."""
    found = _products(compact, i, j, step)
    return found if compact.directed else (found + _products(compact, j, i, step)) / 2


def _products(compact: CompactTrajectory, i: Ints, j: Ints, step: int) -> Floats:
    Z = compact.read_nodes(i, np.array([step]))[:, 0].astype(np.float64)
    targets, at = np.unique(j, return_inverse=True)
    return np.asarray(Z * compact.basis(targets)[at].astype(np.float64))


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


def _core(run: PublishedRun, power: float) -> tuple[Floats, Floats]:
    """Return Q and ±S^{−power}."""
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
    return np.asarray(Q, dtype=np.float64), weights
