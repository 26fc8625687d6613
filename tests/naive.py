"""Slow and obvious twins of the fast code: loops and dense algebra, formula by formula."""

from __future__ import annotations

import hashlib
import json
import struct
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def tproduct(A: Array, B: Array) -> Array:
    """C(:,:,t) = Σ_s A(:,:,s) B(:,:,t−s mod T), by loops."""
    T = A.shape[2]
    C = np.zeros((A.shape[0], B.shape[1], T))
    for t, s in product(range(T), range(T)):
        C[:, :, t] += A[:, :, s] @ B[:, :, (t - s) % T]
    return C


def ttranspose(A: Array) -> Array:
    """Transpose every snapshot and reverse snapshots 1 … T−1."""
    T = A.shape[2]
    return np.stack([A[:, :, -t % T].T for t in range(T)], axis=2)


def tensor(
    source: Any,
    target: Any,
    step: Any,
    weight: Any,
    n: int,
    T: int,
    directed: bool,
    entry: str,
    pair_weight: str,
) -> Array:
    """Build the dense n×n×T tensor, one event at a time."""
    total, count = np.zeros((n, n, T)), np.zeros((n, n, T))
    for i, j, t, w in zip(source, target, step, weight, strict=True):
        cells = {(i, j), (j, i)} if not directed else {(i, j)}
        for a, b in cells:
            total[a, b, t] += w
            count[a, b, t] += 1
    X = {"binary": (count > 0).astype(float), "count": count, "sum": total}[entry]
    for i, j in product(range(n), range(n)):
        s = np.abs(X[i, j]).sum()
        if s > 0:
            X[i, j] *= {"raw": s, "log": np.log1p(s), "unit": 1.0}[pair_weight] / s
    return X


def slices(X: Array) -> Array:
    """X_k = Σ_t X(:,:,t) exp(−2πi·k·t/T) for k = 0 … T//2, shape (F, n, n)."""
    T = X.shape[2]
    return np.stack(
        [sum(X[:, :, t] * np.exp(-2j * np.pi * k * t / T) for t in range(T)) for k in range(T // 2 + 1)]
    )


def signal(hat: dict[int, Array], T: int) -> Array:
    """z(t) = (1/T) Σ over all T frequencies, the missing ones zero, the upper half conjugate."""
    out = []
    for t in range(T):
        total: Any = 0.0
        for k, value in hat.items():
            total = total + value * np.exp(2j * np.pi * k * t / T)
            if k not in (0, T - k):
                total = total + np.conj(value) * np.exp(2j * np.pi * (T - k) * t / T)
        out.append(np.real(total) / T)
    return np.stack(out)


def objective(X: Array, A: Array, R: Array, reg_a: float, reg_r: float) -> float:
    """½‖X − A R Aᴴ‖² + λ_A/2 ‖A‖² + λ_R/2 ‖R‖², dense."""
    misfit = np.linalg.norm(X - A @ R @ A.conj().T) ** 2
    return float(misfit + reg_a * np.linalg.norm(A) ** 2 + reg_r * np.linalg.norm(R) ** 2) / 2


def best_core(X: Array, A: Array, reg_r: float) -> Array:
    """Least squares for R with the Kronecker product: vec(A R Aᴴ) = (conj(A) ⊗ A) vec(R)."""
    r = A.shape[1]
    K = np.kron(A.conj(), A)
    rows = np.vstack([K, np.sqrt(reg_r) * np.eye(r * r)])
    right = np.concatenate([X.ravel(order="F"), np.zeros(r * r)])
    return np.asarray(np.linalg.lstsq(rows, right)[0]).reshape((r, r), order="F")


def best_update(X: Array, A: Array, R: Array, reg_a: float) -> Array:
    """Least squares for B in X ≈ B R Aᴴ and Xᴴ ≈ B Rᴴ Aᴴ together, with λ_A/2 ‖B‖²."""
    right = np.hstack([R @ A.conj().T, R.conj().T @ A.conj().T, np.sqrt(reg_a) * np.eye(len(R))])
    left = np.hstack([X, X.conj().T, np.zeros((len(X), len(R)))])
    return np.asarray(np.linalg.lstsq(right.T, left.T)[0]).T


def als(X: Array, A: Array, reg_a: float, reg_r: float, iterations: int) -> list[float]:
    """Return the objective after the first R and after every iteration."""
    R = best_core(X, A, reg_r)
    history = [objective(X, A, R, reg_a, reg_r)]
    for _ in range(iterations):
        A = best_update(X, A, R, reg_a)
        R = best_core(X, A, reg_r)
        history.append(objective(X, A, R, reg_a, reg_r))
    return history


def shrink(sigma: float, c: float) -> float:
    """argmin_x ½(σ − x)² + c·x^{2/3} on a fine grid."""
    x = np.linspace(0, sigma, 200_001)
    return float(x[np.argmin((sigma - x) ** 2 / 2 + c * np.cbrt(x) ** 2)])


def bound(X: Array, rank: int, reg_a: float, reg_r: float) -> float:
    """The lower bound of the objective, from all singular values and the grid."""
    sigma = np.linalg.svd(X, compute_uv=False)
    c = 1.5 * 2 ** (-2 / 3) * reg_a ** (2 / 3) * reg_r ** (1 / 3)
    total = 0.0
    for s in sigma[:rank]:
        x = shrink(float(s), c)
        total += (s - x) ** 2 / 2 + c * np.cbrt(x) ** 2
    return float(total + (sigma[rank:] ** 2).sum() / 2)


def rescal_objective(X: Array, A: Array, R: Array, reg_a: float, reg_r: float) -> float:
    """½ Σ_t ‖X_t − A R_t Aᵀ‖² + λ_A/2 ‖A‖² + λ_R/2 Σ_t ‖R_t‖², X of shape (n, n, T)."""
    misfit = sum(np.linalg.norm(X[:, :, t] - A @ R[t] @ A.T) ** 2 for t in range(X.shape[2]))
    return float(misfit + reg_a * np.linalg.norm(A) ** 2 + reg_r * np.linalg.norm(R) ** 2) / 2


def rescal(
    X: Array, A: Array, reg_a: float, reg_r: float, iterations: int
) -> tuple[Array, Array, list[float]]:
    """Return A, the R_t and the objective of every iteration; steps that rise are halved."""
    T = X.shape[2]
    R = np.stack([best_core(X[:, :, t], A, reg_r) for t in range(T)])
    history = [rescal_objective(X, A, R, reg_a, reg_r)]
    for _ in range(iterations):
        # Least squares for B in X_t ≈ B R_t Aᵀ and X_tᵀ ≈ B R_tᵀ Aᵀ, all t together.
        right = np.hstack([Q @ A.T for t in range(T) for Q in (R[t], R[t].T)])
        left = np.hstack([Q for t in range(T) for Q in (X[:, :, t], X[:, :, t].T)])
        rank = A.shape[1]
        right = np.hstack([right, np.sqrt(reg_a) * np.eye(rank)])
        left = np.hstack([left, np.zeros((len(A), rank))])
        plain = np.linalg.lstsq(right.T, left.T)[0].T
        for share in (0.0, 0.5, 0.75, 0.875, 0.9375):
            B = (1 - share) * plain + share * A
            S = np.stack([best_core(X[:, :, t], B, reg_r) for t in range(T)])
            value = rescal_objective(X, B, S, reg_a, reg_r)
            if value < history[-1]:
                A, R = B, S
                history.append(value)
                break
        else:
            break
    return A, R, history


def zero_slice_svd(X: Array, rank: int) -> tuple[Array, Array, Array]:
    """Truncated SVD of Σ_t X(:,:,t), by numpy."""
    U, S, Vt = np.linalg.svd(X.sum(axis=2))
    return U[:, :rank], S[:rank], Vt[:rank].T


def misfit(now: Array, before: Array, weights: Array, Q: Array) -> float:
    """Σ_i w_i ‖x_i Q − y_i‖²."""
    return sum(
        float(w * np.linalg.norm(x @ Q - y) ** 2) for x, y, w in zip(now, before, weights, strict=True)
    )


def neighbours(E: Array, row: int, k: int) -> set[int]:
    """The k other rows with the largest cosine."""
    cosines = [float(E[row] @ e / np.linalg.norm(E[row]) / np.linalg.norm(e)) for e in E]
    cosines[row] = -np.inf
    return set(np.argsort(cosines)[::-1][:k].tolist())


def principal_plane(vectors: Any) -> tuple[Any, Any]:
    """Coordinates on the two leading principal axes, and their shares of the variance: by SVD."""
    centred = vectors - vectors.mean(axis=0)
    U, S, _ = np.linalg.svd(np.pad(centred, [(0, 2), (0, 2)]), full_matrices=False)
    total = np.square(S).sum()
    return (U * S)[: len(vectors), :2], np.square(S[:2]) / total if total > 0 else np.zeros(2)


def soft_paths(Z: Array) -> tuple[Array, Array]:
    """p = z / √(‖z‖² + (m/2)²), m the root mean square length of a node, and ‖z‖/m; Z (T, n, r)."""
    T, n, r = Z.shape
    found, size = np.zeros((n, T, r)), np.zeros((n, T))
    for i in range(n):
        usual = np.sqrt(np.mean([np.sum(Z[t, i] ** 2) for t in range(T)]))
        for t in range(T):
            found[i, t] = Z[t, i] / np.sqrt(np.sum(Z[t, i] ** 2) + (usual / 2) ** 2)
            size[i, t] = np.linalg.norm(Z[t, i]) / usual
    return found, size


def peaks(heights: list[float]) -> list[int]:
    """Frequencies 1 … whose height is at least six and above both neighbours', highest first, six at most."""
    found = []
    for at, height in enumerate(heights):
        beside = heights[max(at - 1, 0) : at] + heights[at + 1 : at + 2]
        if height >= 6 and all(height > other for other in beside):
            found.append((-height, at + 1))
    return [k for _, k in sorted(found)[:6]]


def histogram(values: list[float], bins: int, low: float, high: float) -> list[int]:
    """How many values are in each of some equal bins; the last one holds its upper end."""
    counts = [0] * bins
    for value in values:
        counts[min(int((value - low) / (high - low) * bins), bins - 1)] += 1
    return counts


def neighbors(vectors: Array, row: int, k: int, metric: str) -> list[tuple[int, float]]:
    """Rows and similarities of the k vectors nearest to one of them, by a loop; equal ones by row."""
    query = vectors[row].astype(np.float64)
    found = []
    for i, vector in enumerate(vectors.astype(np.float64)):
        if i == row or not vector.any():
            continue
        product = float((vector * query).sum())
        if metric == "cosine":
            product /= float(np.linalg.norm(vector) * np.linalg.norm(query))
        found.append((i, product))
    return sorted(found, key=lambda pair: (-round(pair[1], 12), pair[0]))[:k]


def digest_tensor(tensor: Any) -> str:
    """Return the digest of a tensor's entries, number after number."""
    digests = [hashlib.sha256() for _ in range(5)]
    for row in range(tensor.n_nodes):
        pairs = range(int(tensor.indptr[row]), int(tensor.indptr[row + 1]))
        digests[0].update(struct.pack("<q", len(pairs)))
        for pair in pairs:
            digests[1].update(struct.pack("<q", int(tensor.indices[pair])))
            entries = range(int(tensor.tube_ptr[pair]), int(tensor.tube_ptr[pair + 1]))
            digests[2].update(struct.pack("<i", len(entries)))
            for entry in entries:
                digests[3].update(struct.pack("<i", int(tensor.steps[entry])))
                digests[4].update(struct.pack("<d", float(tensor.values[entry])))
    parts = [tensor.n_nodes, tensor.n_steps, tensor.directed, *(digest.hexdigest() for digest in digests)]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def choice_sums(X: Array, U: Array, V: Array, directed: bool) -> dict[str, Array]:
    """What a choice of frequencies is made from, pair by pair, of a dense (n, n, T) tensor."""
    n, _, T = X.shape
    depth = U.shape[1]
    shuffled, spreads = np.zeros(2), np.zeros((2, depth, depth))
    for i in range(n):
        for j in range(n):
            tube = X[i, j]
            v = ((tube**2).sum() - tube.sum() ** 2 / T) * T / (T - 1)
            own, other = U[i] @ U[i], V[j] @ V[j]
            shuffled[0] += v * own * other
            spreads += v * np.array([other * np.outer(U[i], U[i]), own * np.outer(V[j], V[j])])
            if not directed and i != j:
                shuffled[1] += v * (U[i] @ U[j]) * (V[i] @ V[j])
    return {
        "energies": (np.abs(np.fft.rfft(X, axis=2)) ** 2).sum(axis=(0, 1)),
        "core": np.einsum("ia,ijt,jb->tab", U, X, V),
        "shuffled": shuffled,
        "spreads": spreads,
    }


def drift(before: dict[Any, Any], now: dict[Any, Any]) -> dict[str, Any]:
    """How far nodes moved between two tables of vectors, node by node."""
    states, cosines, ratios, trusted = [], {}, [], []
    for name, row in now.items():
        old = before.get(name)
        if old is None:
            states.append("new")
            continue
        had, has = old["degree"] > 0, row["degree"] > 0
        states.append({(True, False): "left", (False, True): "returned"}.get((had, has), "other"))
        if had and has:
            trusted.append(min(old["degree"], row["degree"]))
        x, y = (np.array(each["embedding"], dtype=np.float64) for each in (row, old))
        if x.any() and y.any():
            cosines[name] = float(x @ y / np.linalg.norm(x) / np.linalg.norm(y))
            ratios.append(float(np.linalg.norm(x) / np.linalg.norm(y)))
    busy = float(np.median(trusted))
    known = [name for name in cosines if min(before[name]["degree"], now[name]["degree"]) >= busy]
    movers = sorted(known, key=lambda name: cosines[name])
    return {"states": states, "cosines": cosines, "ratios": ratios, "movers": movers}


def centres(rows: Array, labels: Array, count: int) -> Array:
    """Return the mean of the rows of each label; zeros of a label without rows."""
    found = np.zeros((count, rows.shape[1]))
    for label in range(count):
        members = [row for row, own in zip(rows, labels, strict=True) if own == label]
        if members:
            found[label] = sum(members) / len(members)
    return found


def silhouette(distances: Array, labels: Array) -> float:
    """Return the mean of (b − a) / max(a, b); 0 of a row that is alone in its label."""
    scores = []
    for i, own in enumerate(labels):
        inside = [distances[i, j] for j, label in enumerate(labels) if label == own and j != i]
        outside = [
            np.mean([distances[i, j] for j, label in enumerate(labels) if label == other])
            for other in set(labels.tolist()) - {own}
        ]
        a, b = np.mean(inside) if inside else 0.0, min(outside)
        scores.append((b - a) / max(a, b) if inside and max(a, b) > 0 else 0.0)
    return float(np.mean(scores))
