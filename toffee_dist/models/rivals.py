"""More rivals in time: regularised Laplacians (URLSE), the omnibus matrix (OMNI), aligned snapshots, TNE."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import scipy.sparse as sp

from toffee_dist.errors import TooLargeError
from toffee_dist.models.base import FitContext, Float32s, RoleVectors, StepVectors, VectorsInTime
from toffee_dist.models.in_time import fit_snapshot, fit_uase
from toffee_dist.models.tne import read_snapshots, snapshot_bounds
from toffee_dist.settings import FitSettings
from toffee_dist.storage.files import scratch
from toffee_dist.storage.tensors import stage_tensor
from toffee_dist.tensor import TemporalTensor
from toffee_dist.units import show_bytes

# Dense algebra of 2n×2n: what OMNI takes, in arrays of that size, and how much it may.
OMNI_ARRAYS, OMNI_BYTES = 6, 4 * 2**30


def fit_urlse(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit the unfolded regularised Laplacian: UASE of X(i,j,t) / √((d_it + γ)(d_j + γ')).

    d_it is the total of node i at step t, d_j that of node j as a target over all time; γ and γ' are their
    means over active rows and columns (Chaudhuri, Chung, Tsiatas 2012).
    """
    pair = tensor.entry_pairs
    values = np.asarray(tensor.values)
    key = tensor.sources[pair].astype(np.int64) * tensor.n_steps + tensor.steps
    _, row = np.unique(key, return_inverse=True)
    rows = np.bincount(row, np.abs(values))
    columns = np.bincount(tensor.indices[pair], np.abs(values), minlength=tensor.n_nodes)
    active = columns[columns > 0]
    if not len(rows):
        return fit_uase(tensor, options, None)
    scale = np.sqrt((rows + rows.mean())[row] * (columns + active.mean())[tensor.indices[pair]])
    return fit_uase(replace(tensor, values=values / scale), options, None)


def fit_omni(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit the omnibus embedding (Levin, Athreya, Tang, Lyzinski, Priebe 2017) of symmetric snapshots.

    M has the blocks (X(s) + X(t))/2; a node's vector at t is its row of U|Λ|^{½}. With B the steps on top of
    each other and E as many identities, M = ½(BEᵀ + EBᵀ): its eigenvectors lie in [B E], so a problem of
    2n×2n gives them, however many steps there are, and Z(t) = X(t)·W₁ + W₂. Of a directed graph, X + Xᵀ.
    """
    n, T = tensor.n_nodes, tensor.n_steps
    needed = OMNI_ARRAYS * 8 * (2 * n) ** 2
    if needed > OMNI_BYTES:
        raise TooLargeError(
            "model omni",
            got=f"{n:,} nodes, which take {show_bytes(needed)}",
            allowed=show_bytes(OMNI_BYTES),
            remedy="Use uase, urlse or ipp, which need no dense array of nodes by nodes.",
        )
    pair = tensor.entry_pairs
    i, j = tensor.sources[pair].astype(np.int64), tensor.indices[pair].astype(np.int64)
    step, values = np.asarray(tensor.steps, dtype=np.int64), np.asarray(tensor.values)
    if tensor.directed:
        i, j = np.concatenate([i, j]), np.concatenate([j, i])
        step, values = np.tile(step, 2), np.tile(values / 2, 2)
    B = sp.csr_matrix((values, (step * n + i, j)), shape=(T * n, n))
    total = np.asarray(sp.csr_matrix((values, (i, j)), shape=(n, n)).toarray())
    G = np.block([[np.asarray((B.T @ B).toarray()), total.T], [total, T * np.eye(n)]])
    # G = F Fᵀ on its range; M on an orthonormal basis of [B E] is then Fᵀ C F, C the swap of halves, halved.
    w, Q = np.linalg.eigh(G)
    kept = w > 1e-10 * max(w[-1], 1e-300)
    F = Q[:, kept] * np.sqrt(w[kept])
    small = F.T @ np.concatenate([F[n:], F[:n]]) / 2
    eigenvalues, Y = np.linalg.eigh(small)
    order = np.argsort(-np.abs(eigenvalues))[: options.rank]
    chosen = eigenvalues[order]
    # U = [B E] W with W = (Fᵀ)⁺ Y: columns of length 1.
    W = (Q[:, kept] / np.sqrt(w[kept])) @ Y[:, order] * np.sqrt(np.abs(chosen))
    signs = np.sign(chosen)
    missing = options.rank - len(order)
    W, signs = np.pad(W, ((0, 0), (0, missing))), np.pad(signs, (0, missing))

    def at(t: int) -> RoleVectors:
        Z = np.asarray(B[t * n : (t + 1) * n] @ W[:n]) + W[n:]
        return RoleVectors(Z.astype(np.float32), None, signs)

    return StepVectors(at)


def fit_aligned(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit every step alone, and turn it onto the step before by the best rotation (Procrustes).

    The rotation is found on nodes that both steps have. Scores of a step are those of `snapshot`: turning
    both roles alike changes no product.
    """
    alone = fit_snapshot(tensor, options, None)
    assert isinstance(alone, StepVectors)
    rotations: list[Any] = []
    before: Float32s | None = None
    for t in range(tensor.n_steps):
        Z = alone.at(t).source
        Q = np.eye(Z.shape[1])
        if before is not None and Z.any():
            U, _s, Vt = np.linalg.svd(Z.astype(np.float64).T @ before)
            Q = U @ Vt
        rotations.append(Q)
        # An empty step turns nothing: the next one is set against the last that was not.
        if Z.any():
            before = (Z @ Q).astype(np.float32)

    def at(t: int) -> RoleVectors:
        found, Q = alone.at(t), rotations[t]
        return RoleVectors(
            (found.source @ Q).astype(np.float32), (found.targets @ Q).astype(np.float32), found.weights
        )

    return StepVectors(at)


def fit_tne_in_time(tensor: TemporalTensor, options: FitSettings, _: float | None) -> VectorsInTime:
    """Fit TNE; the vectors of a step are those of the snapshot that it lies in."""
    with scratch(Path(tempfile.gettempdir()), "toffee-", mode=0o700) as folder:
        stage_tensor(tensor, folder / "tensor")
        context = FitContext(str(folder / "tensor"), str(folder / "fit"), options)
        found = read_snapshots(context)
    bounds = snapshot_bounds(tensor, options.snapshots)
    vectors = [RoleVectors(Z.astype(np.float32), None, np.ones(Z.shape[1])) for Z in found]

    def at(t: int) -> RoleVectors:
        return vectors[int(np.clip(np.searchsorted(bounds, t, side="right") - 1, 0, len(vectors) - 1))]

    return StepVectors(at)
